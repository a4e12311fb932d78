"""Options that several commands share, and turning them into library values."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import wraps
from importlib import import_module
from inspect import Parameter, signature
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar, get_type_hints

import typer

from dsprep.cli.usage import HDF5_ZARR, LMDB, TFRECORD

if TYPE_CHECKING:
    from dsprep.formats.base import OpenOptions, Source

R = TypeVar("R")

READING = "Options"
MANY = "Many processes"


class SampleAxis(StrEnum):
    """Choices of ``--sample-axis``."""

    auto = "auto"
    first = "first"
    none = "none"
    groups = "groups"


class Order(StrEnum):
    """Choices of ``--order``."""

    key = "key"
    file = "file"
    numeric = "numeric"


class Values(StrEnum):
    """Choices of ``--values``."""

    opaque = "opaque"
    datum = "datum"


class Executors(StrEnum):
    """Choices of ``--executor``."""

    threads = "threads"
    processes = "processes"
    mpi = "mpi"
    dask = "dask"


def completing(*names: str) -> Callable[[str], list[str]]:
    """Return what completes a word: lists of names, each by the ``module:attribute`` that has it.

    Nothing is imported before a word is to be completed.
    """

    def complete(incomplete: str) -> list[str]:
        found = [getattr(import_module(m), a) for m, _, a in (n.partition(":") for n in names)]
        known = chain.from_iterable(f() if callable(f) else f for f in found)
        return [name for name in known if name.startswith(incomplete)]

    return complete


FORMATS = completing("dsprep.formats:FORMATS")


def value(metavar: str, help: str, *names: str, panel: str | None = None, **more: Any) -> Any:
    """Return an option that takes a value; its name is that of the parameter if none is given."""
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel, **more)


def switch(help: str, *names: str, panel: str | None = None) -> Any:
    """Return an option that takes no value."""
    return typer.Option(*names, help=help, rich_help_panel=panel)


Dataset: TypeAlias = Annotated[
    list[str],
    typer.Argument(
        metavar="DATA...",
        help="Files, directories, quoted globs or @list.txt, read as one dataset.",
        show_default=False,
    ),
]
SourcesAndTarget: TypeAlias = Annotated[
    list[str],
    typer.Argument(
        metavar="SRC... DST",
        help="Files, directories, quoted globs or @list.txt, read as one dataset; then the output.",
        show_default=False,
    ),
]
DryRun: TypeAlias = Annotated[bool, switch("Show what would be done, and stop.", "--dry-run", "-n")]
Overwrite: TypeAlias = Annotated[
    bool, switch("Replace DST once the new one is complete.", "--overwrite")
]
Restart: TypeAlias = Annotated[
    bool, switch("Discard what an interrupted run left; start over.", "--restart")
]
Memory: TypeAlias = Annotated[
    str | None, value("SIZE", "Memory for buffers; a quarter of what is free.", "--memory")
]
Sync: TypeAlias = Annotated[
    bool, switch("Wait for the disk: a crash of the machine loses nothing.", "--sync/--no-sync")
]

Fields: TypeAlias = Annotated[
    list[str],
    value(
        "SPEC",
        "A field to take: NAME[=PATH][@INDEX][:DTYPE[SHAPE]], as in x=climate/data or "
        "x:int16[128,128,4]; * takes all that are not named. Repeat for more.",
        "--field",
        "-f",
        panel=READING,
    ),
]
SampleAxisOption: TypeAlias = Annotated[
    SampleAxis,
    value(
        "auto|first|none",
        "Source: whether first axes count samples, or a file is one sample (none).",
        panel=HDF5_ZARR,
    ),
]
OrderOption: TypeAlias = Annotated[
    Order,
    value(
        "key|file|numeric",
        "Source: number samples by key, by offset, or by the number in a key.",
        panel=LMDB,
    ),
]
ValuesOption: TypeAlias = Annotated[
    Values,
    value(
        "opaque|datum",
        "Source: values are opaque byte strings, or Caffe Datum messages.",
        panel=LMDB,
    ),
]
Database: TypeAlias = Annotated[
    str | None, value("NAME", "Source: a named database.", "--db", panel=LMDB)
]
SkipKeys: TypeAlias = Annotated[
    list[str],
    value("KEY", "Source: a key that is not a sample, such as length.", "--skip-key", panel=LMDB),
]
KeysAs: TypeAlias = Annotated[
    str | None,
    value("NAME", "Source: keep each sample's key in a field of this name.", panel=LMDB),
]
RawRecords: TypeAlias = Annotated[
    bool, switch("Source: take records whole, as opaque bytes.", "--raw-records", panel=TFRECORD)
]
CheckCrc: TypeAlias = Annotated[
    bool, switch("Source: check the CRCs of what is read.", "--crc/--no-crc", panel=TFRECORD)
]
FollowExternal: TypeAlias = Annotated[
    bool,
    switch(
        "hdf5, zarr: also read files outside of the dataset's directory that it refers to.",
        "--follow-external",
        panel=READING,
    ),
]
At: TypeAlias = Annotated[
    Path | None,
    value("F", "Its sidecar, if that is not beside it.", "--sidecar", show_default=False),
]
Json: TypeAlias = Annotated[bool, switch("Print the result as JSON.", "--json")]
Workers: TypeAlias = Annotated[
    int | None,
    value(
        "N",
        "Threads (one per core, at most 8), or processes of --executor.",
        "--workers",
        "-j",
        min=1,
    ),
]


Quiet: TypeAlias = Annotated[
    bool,
    switch("No progress, and no report of what was done.", "--quiet", "-q"),
]
Verbose: TypeAlias = Annotated[
    bool,
    switch("Also each step's time and the causes of errors.", "--verbose", "-v"),
]
TALKING: dict[str, tuple[Any, Any]] = {"quiet": (Quiet, False), "verbose": (Verbose, False)}


Executor: TypeAlias = Annotated[
    Executors | None,
    value(
        "KIND",
        "threads of this process, processes of this machine, ranks of an MPI job (mpi), or "
        "dask workers; mpi where mpiexec or srun started several processes, else threads.",
        "--executor",
        panel=MANY,
        show_default=False,
    ),
]
Scheduler: TypeAlias = Annotated[
    str | None,
    value(
        "ADDRESS",
        "dask: tcp://host:8786, or the scheduler's file; else workers on this machine.",
        "--scheduler",
        panel=MANY,
        show_default=False,
    ),
]


def reads_datasets(command: Callable[..., R]) -> Callable[..., R]:
    """Give a command the options on how to read, which it gets as one value, ``reading``.

    Every command that opens datasets has these options, so they are written once.
    """

    def run(chosen: dict[str, Any], args: Any, kwargs: Any) -> R:
        return command(*args, reading=open_options(chosen), **kwargs)

    return with_options(command, "reading", _READING, run)


def distributes(command: Callable[..., R]) -> Callable[..., R]:
    """Give a command the options on who works, which it gets as one value, ``executor``.

    In MPI ranks other than the first the command never begins: they do its tasks, and leave.
    """

    def run(chosen: dict[str, Any], args: Any, kwargs: Any) -> R:
        from dsprep.cli.report import note
        from dsprep.executors import opened
        from dsprep.executors.launched import launched

        name = chosen["executor"]
        if kwargs.get("dry_run") and not launched():  # nobody works: none has to be there
            if name is not None and name.value != "threads":
                note(f"planned only: whether --executor {name.value} works here was not looked at")
            return command(*args, executor=None, **kwargs)
        with opened(
            None if name is None else name.value,
            workers=kwargs.get("workers"),
            scheduler=chosen["scheduler"],
        ) as executor:
            advice = getattr(executor, "advice", None)
            if advice is not None:
                note(advice)
            return command(*args, executor=executor, **kwargs)

    return with_options(command, "executor", _EXECUTING, run)


def writes_outputs(command: Callable[..., R]) -> Callable[..., R]:
    """Give a command the options on how an output is made, which it gets as one value, ``run``.

    The executor comes from `distributes`.
    """

    def run(chosen: dict[str, Any], args: Any, kwargs: Any) -> R:
        from dsprep.write.job import RunOptions
        from dsprep.write.plan import parse_nbytes

        made = RunOptions(
            workers=chosen["workers"],
            memory=parse_nbytes(chosen["memory"]) if chosen["memory"] else None,
            overwrite=chosen["overwrite"],
            restart=chosen["restart"],
            durable=chosen["sync"],
            executor=kwargs.pop("executor"),
        )
        return command(*args, run=made, **kwargs)

    return distributes(with_options(command, "run", _WRITING, run))


def with_options(
    command: Callable[..., R],
    taken: str,
    options: dict[str, tuple[Any, Any]],
    call: Callable[[dict[str, Any], Any, Any], R],
) -> Callable[..., R]:
    """Return a command with more options, in place of the argument `taken` that is made of them."""
    own = signature(command)
    hints = get_type_hints(
        command,
        localns={"OpenOptions": object, "PoolExecutor": object, "RunOptions": object},
        include_extras=True,
    )
    rest = [p.replace(annotation=hints[p.name]) for p in own.parameters.values() if p.name != taken]
    added = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in options.items()
    ]

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> R:
        chosen = {name: kwargs.pop(name) for name in options}
        return call(chosen, args, kwargs)

    run.__annotations__ = {p.name: p.annotation for p in (*rest, *added)}
    run.__signature__ = own.replace(parameters=[*rest, *added])  # type: ignore[attr-defined]
    return run


_WRITING: dict[str, tuple[Any, Any]] = {
    "overwrite": (Overwrite, False),
    "restart": (Restart, False),
    "workers": (Workers, None),
    "memory": (Memory, None),
    "sync": (Sync, True),
}
_EXECUTING: dict[str, tuple[Any, Any]] = {
    "executor": (Executor, None),
    "scheduler": (Scheduler, None),
}
_READING: dict[str, tuple[Any, Any]] = {
    "fields": (Fields, []),
    "sample_axis": (SampleAxisOption, SampleAxis.auto),
    "order": (OrderOption, Order.key),
    "values": (ValuesOption, Values.opaque),
    "database": (Database, None),
    "skip_keys": (SkipKeys, []),
    "keys_as": (KeysAs, None),
    "raw_records": (RawRecords, False),
    "check_crc": (CheckCrc, True),
    "follow_external": (FollowExternal, False),
}


def open_options(chosen: dict[str, Any]) -> OpenOptions:
    """Return the library's value for the options `_READING`."""
    from dsprep.core.schema import FieldSpec
    from dsprep.formats.base import OpenOptions

    taken: dict[str, Any] = {
        name: v.value if isinstance(v, StrEnum) else v for name, v in chosen.items()
    }
    taken["fields"] = tuple(map(FieldSpec.parse, taken["fields"]))
    taken["skip_keys"] = tuple(k.encode("utf-8", "surrogateescape") for k in taken["skip_keys"])
    taken["records"] = "opaque" if taken.pop("raw_records") else "auto"
    return OpenOptions(**taken)


def sources_and_target(command: str, paths: list[str], replacing: bool) -> tuple[list[str], str]:
    """Return the sources, and the last path, which is the output.

    Leaves the command if there is no source, or the output exists beside sources of its kind and
    is not to be replaced: it is one of them where a pattern was not quoted and no output was named.
    """
    from dsprep.cli.report import fail
    from dsprep.core.atomic import partial_path

    if len(paths) < 2:
        fail(f"a source and a target are needed: dsprep {command} SRC... DST", 2)
    *_, source, last = map(Path, paths)
    alike = source.suffix == last.suffix and source.parent.resolve() == last.parent.resolve()
    alike &= source.name != last.name  # which is told to be wrong by itself
    if not replacing and alike and last.exists() and not partial_path(last).exists():
        fail(
            f"{last}: the last path is the output, and it exists already: add --overwrite to "
            "replace it, or name another output behind the sources",
            1,
        )
    return paths[:-1], paths[-1]


def for_format(path: str, options: OpenOptions, fields: list[str]) -> OpenOptions:
    """Return `options`, as far as they apply to the dataset `path`, with `fields` added.

    Left out are those that its format does not know, and all if dsprep wrote it.
    """
    from dataclasses import fields as attributes
    from dataclasses import replace

    from dsprep.core.schema import FieldSpec
    from dsprep.errors import FormatError
    from dsprep.formats.base import OpenOptions
    from dsprep.sidecar import spec
    from dsprep.source.files import find_files

    specs = (*options.fields, *map(FieldSpec.parse, fields))
    files = find_files([path])[0]
    try:
        ours = spec.find([f for f, _ in files]) is not None
    except FormatError:
        ours = False
    if ours:
        return OpenOptions(fields=specs)
    known = files[0][1].open_options
    default = OpenOptions()
    foreign = {f.name: getattr(default, f.name) for f in attributes(default) if f.name not in known}
    return replace(options, **foreign, fields=specs)


def opened(
    paths: list[str],
    options: OpenOptions,
    show: bool,
    at: Path | None = None,
    *,
    marked: bool = False,
) -> Source:
    """Open a dataset, with a bar where it has many files; `at`, `marked`: see `open_dataset`."""
    from dsprep.cli.report import count_bar
    from dsprep.source.dataset import open_dataset

    with count_bar("open", show) as update:
        return open_dataset(paths, options, update, at=at, marked=marked)
