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

Fields: TypeAlias = Annotated[
    list[str],
    typer.Option(
        "--field",
        "-f",
        metavar="SPEC",
        help="A field to take: NAME[=PATH][@INDEX][:DTYPE[SHAPE]], as in x=climate/data or "
        "x:int16[128,128,4]; * takes all that are not named. Repeat for more.",
        rich_help_panel=READING,
    ),
]
SampleAxisOption: TypeAlias = Annotated[
    SampleAxis,
    typer.Option(
        "--sample-axis",
        metavar="auto|first|none",
        help="Source: whether first axes count samples, or a file is one sample (none).",
        rich_help_panel=HDF5_ZARR,
    ),
]
OrderOption: TypeAlias = Annotated[
    Order,
    typer.Option(
        "--order",
        metavar="key|file|numeric",
        help="Source: number samples by key, by offset, or by the number in a key.",
        rich_help_panel=LMDB,
    ),
]
ValuesOption: TypeAlias = Annotated[
    Values,
    typer.Option(
        "--values",
        metavar="opaque|datum",
        help="Source: values are opaque byte strings, or Caffe Datum messages.",
        rich_help_panel=LMDB,
    ),
]
Database: TypeAlias = Annotated[
    str | None,
    typer.Option("--db", metavar="NAME", help="Source: a named database.", rich_help_panel=LMDB),
]
SkipKeys: TypeAlias = Annotated[
    list[str],
    typer.Option(
        "--skip-key",
        metavar="KEY",
        help="Source: a key that is not a sample, such as length.",
        rich_help_panel=LMDB,
    ),
]
KeysAs: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--keys-as",
        metavar="NAME",
        help="Source: keep each sample's key in a field of this name.",
        rich_help_panel=LMDB,
    ),
]
RawRecords: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--raw-records",
        help="Source: take records whole, as opaque bytes.",
        rich_help_panel=TFRECORD,
    ),
]
CheckCrc: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--crc/--no-crc",
        help="Source: check the CRCs of what is read.",
        rich_help_panel=TFRECORD,
    ),
]
FollowExternal: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--follow-external",
        help="hdf5, zarr: also read files outside of the dataset's directory that it refers to.",
        rich_help_panel=READING,
    ),
]
At: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--sidecar", metavar="F", help="Its sidecar, if that is not beside it.", show_default=False
    ),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Workers: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--workers",
        "-j",
        metavar="N",
        min=1,
        help="Threads (one per core, at most 8), or processes of --executor.",
    ),
]


Quiet: TypeAlias = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="No progress, and no report of what was done."),
]
Verbose: TypeAlias = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Also each step's time and the causes of errors."),
]
TALKING: dict[str, tuple[Any, Any]] = {"quiet": (Quiet, False), "verbose": (Verbose, False)}


Executor: TypeAlias = Annotated[
    Executors | None,
    typer.Option(
        "--executor",
        metavar="KIND",
        help="threads of this process, processes of this machine, ranks of an MPI job (mpi), or "
        "dask workers; mpi where mpiexec or srun started several processes, else threads.",
        show_default=False,
        rich_help_panel=MANY,
    ),
]
Scheduler: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--scheduler",
        metavar="ADDRESS",
        help="dask: tcp://host:8786, or the scheduler's file; else workers on this machine.",
        show_default=False,
        rich_help_panel=MANY,
    ),
]


def reads_datasets(command: Callable[..., R]) -> Callable[..., R]:
    """Give a command the options on how to read, which it gets as one value, ``reading``.

    Every command that opens datasets has these options, so they are written once.
    """

    def run(chosen: dict[str, Any], args: Any, kwargs: Any) -> R:
        return command(*args, reading=open_options(**chosen), **kwargs)

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
        localns={"OpenOptions": object, "PoolExecutor": object},
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


def open_options(
    fields: list[str],
    sample_axis: SampleAxis,
    order: Order,
    values: Values,
    database: str | None,
    skip_keys: list[str],
    keys_as: str | None,
    raw_records: bool,
    check_crc: bool,
    follow_external: bool,
) -> OpenOptions:
    """Return the library's value for the options above."""
    from dsprep.core.schema import FieldSpec
    from dsprep.formats.base import OpenOptions

    return OpenOptions(
        fields=tuple(map(FieldSpec.parse, fields)),
        sample_axis=sample_axis.value,
        order=order.value,
        values=values.value,
        database=database,
        skip_keys=tuple(k.encode("utf-8", "surrogateescape") for k in skip_keys),
        keys_as=keys_as,
        records="opaque" if raw_records else "auto",
        check_crc=check_crc,
        follow_external=follow_external,
    )


def check_last(paths: list[str], allowed: bool) -> None:
    """Leave the command if the last path, the output, exists beside sources of its kind.

    It is one of them where a pattern was not quoted and no output was named.
    """
    from dsprep.cli.report import fail
    from dsprep.core.atomic import partial_path

    *_, source, last = map(Path, paths)
    alike = source.suffix == last.suffix and source.parent.resolve() == last.parent.resolve()
    alike &= source.name != last.name  # which is told to be wrong by itself
    if allowed or not alike or not last.exists() or partial_path(last).exists():
        return
    fail(
        f"{last}: the last path is the output, and it exists already: add --overwrite to replace "
        "it, or name another output behind the sources",
        1,
    )


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
    from dsprep.source.dataset import find_files

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
