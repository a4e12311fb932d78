"""Options that several commands share, and adding a command with those that it takes.

A command is a function with typer's annotations. A parameter called as one of `SHARED` stands for
the options of that class, of which the command gets the library's value.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import wraps
from importlib import import_module
from inspect import Parameter, signature
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_type_hints

import typer

from dsprep.cli.ending import reporting_errors
from dsprep.cli.report import Verbosity, count_bar, fail, note, say_asked, verbosity
from dsprep.cli.usage import HDF5_ZARR, IMAGES, LMDB, PARQUET, TFRECORD, Command

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from dsprep.formats.base import Source
    from dsprep.formats.options import OpenOptions
    from dsprep.writing.job import RunOptions

READING = "Options"
WRITING = "How the target is written"
MANY = "Many processes"


def completing(*names: str) -> Callable[[str], list[str]]:
    """Return what completes a word: lists of names, each by the ``module:attribute`` that has it.

    Nothing is imported before a word is to be completed.
    """

    def complete(incomplete: str) -> list[str]:
        lists = [getattr(import_module(m), a) for m, _, a in (n.partition(":") for n in names)]
        known = chain.from_iterable(f() if callable(f) else f for f in lists)
        return [name for name in known if name.startswith(incomplete)]

    return complete


def value(
    metavar: str,
    help: str,
    *names: str,
    default: Any = None,
    panel: str | None = None,
    **more: Any,
) -> Any:
    """Return an option that takes a value; its name is that of the parameter if none is given."""
    return typer.Option(default, *names, metavar=metavar, help=help, rich_help_panel=panel, **more)


def switch(help: str, *names: str, default: bool = False, panel: str | None = None) -> Any:
    """Return an option that takes no value."""
    return typer.Option(default, *names, help=help, rich_help_panel=panel)


def argument(metavar: str, help: str, **more: Any) -> Any:
    """Return an argument."""
    return typer.Argument(metavar=metavar, help=help, show_default=False, **more)


MANY_FILES = "Files, directories, quoted globs or @list.txt, read as one dataset"
Dataset: TypeAlias = Annotated[list[str], argument("DATA...", f"{MANY_FILES}.")]
SourcesAndTarget: TypeAlias = Annotated[
    list[str], argument("SRC... DST", f"{MANY_FILES}; then the output.")
]
DryRun: TypeAlias = Annotated[
    bool, typer.Option("--dry-run", "-n", help="Show what would be done, and stop.")
]
At: TypeAlias = Annotated[
    Path | None, typer.Option("--sidecar", metavar="F", help="The sidecar, if not beside the data.")
]
Subset: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--subset",
        metavar="WHICH",
        help="Only 'y > 0', FILE.npy, or 'val of train=.9,val=.1'.",
    ),
]
Weights: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="FIELD|FILE.npy",
        help="Draw samples with replacement, each as often as its weight says.",
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


@dataclass
class Reading:
    """How a dataset is read."""

    fields: list[str] = value(
        "SPEC",
        "A field to take: NAME[=PATH][@INDEX][:DTYPE[SHAPE]], x=climate/data, y:int16[9,4]; "
        "*: others. Repeatable.",
        "--field",
        "-f",
        default=[],
        panel=READING,
    )
    sample_axis: str = value(
        "first|last|none|groups|AXIS",
        "Source, also netCDF and NumPy: this axis counts samples (first, last, a number), a file "
        "is one sample (none), or each of the groups or arrays side by side is one (groups).",
        default="auto",
        panel=HDF5_ZARR,
    )
    order: Literal["key", "file", "numeric"] = value(
        "key|file|numeric",
        "Source: number samples by key, by offset, or by the number in a key.",
        default="key",
        panel=LMDB,
    )
    values: Literal["opaque", "datum"] = value(
        "opaque|datum",
        "Source: values are opaque byte strings, or Caffe Datum messages.",
        default="opaque",
        panel=LMDB,
    )
    database: str | None = value("NAME", "Source: a named database.", "--db", panel=LMDB)
    skip_keys: list[str] = value(
        "KEY",
        "Source: a key that is not a sample, such as length.",
        "--skip-key",
        default=[],
        panel=LMDB,
    )
    keys_as: str | None = value(
        "NAME", "Source: keep each sample's key in a field (also of WebDataset).", panel=LMDB
    )
    raw_records: bool = switch(
        "Source: take records whole, as opaque bytes.", "--raw-records", panel=TFRECORD
    )
    check_crc: bool = switch(
        "Source: check the CRCs of what is read.", "--crc/--no-crc", default=True, panel=TFRECORD
    )
    labels: str = value(
        "folders|none|TABLE[:COLUMN]",
        "Source: what labels the images: their folders, or a table and its column that names them.",
        default="auto",
        panel=IMAGES,
    )
    nulls: Literal["refuse", "drop-rows"] = value(
        "refuse|drop-rows",
        "Source: refuse columns with nulls, or leave out the rows that have a null (of image "
        "folders: samples that lack a file).",
        default="refuse",
        panel=PARQUET,
    )
    file_field: str | None = value(
        "NAME",
        "Also the number of each sample's file, as a field.",
        panel=READING,
    )
    join: bool = switch(
        "Take the fields of all sources, or files, together.",
        "--join",
        panel=READING,
    )
    follow_external: bool = switch(
        "Also read what the source refers to outside of it.",
        "--follow-external",
        panel=READING,
    )

    def made(self, given: dict[str, Any], stack: ExitStack) -> OpenOptions:
        """Return how to read."""
        from dsprep.core.schema import FieldSpec
        from dsprep.formats.options import OpenOptions

        taken: dict[str, Any] = dict(vars(self))
        taken["fields"] = tuple(map(FieldSpec.parse, self.fields))
        taken["skip_keys"] = tuple(k.encode("utf-8", "surrogateescape") for k in self.skip_keys)
        taken["records"] = "opaque" if taken.pop("raw_records") else "auto"
        taken["memory"] = nbytes_of(given.get("memory"))
        return OpenOptions(**taken)


READER = "As the Reader's"
PARTS = "Mini-epochs"


@dataclass
class Ordering:
    """Which samples come, and in which order: as the Reader's."""

    seed: int = value("N", "What the order is drawn from.", default=0, panel=READER)
    shuffle: Literal["group", "global", "none"] = value(
        "group|global|none", "What is shuffled.", default="group", panel=READER
    )
    remainder: Literal["drop", "pad", "ragged"] = value(
        "drop|pad|ragged",
        "What happens to samples that do not fill a batch on every rank: left out (drop), filled "
        "up by repeats (pad), or delivered in shorter batches (ragged).",
        default="ragged",
        panel=READER,
    )
    buffer_size: str | None = value(
        "SIZE",
        "What is read at a time: samples (4096) or bytes (64MiB); by default one group, or 64MiB "
        "where there are none.",
        "--buffer-size",
        "-b",
        panel=READER,
    )
    buffers_mixed: int | None = value(
        "K",
        "Groups that are shuffled together; by default those of --buffer-size.",
        min=1,
        panel=READER,
    )
    fields: list[str] = value(
        "NAME",
        "A field that is read; all if none is named.",
        "--field",
        "-f",
        default=[],
        panel=READER,
    )
    mini_epochs: int | None = value("NM", "Parts of each epoch.", min=1, panel=PARTS)
    fixed_parts: bool = switch(
        "The same parts in every epoch: recompose=False.", "--fixed-parts", panel=PARTS
    )
    pools: int = value("N", "Caches among which a part is divided.", default=1, min=1, panel=PARTS)
    subset: Subset = None
    weights: Weights = None
    sidecar: At = None

    def made(self, given: dict[str, Any], stack: ExitStack) -> dict[str, Any]:
        """Return the arguments of `audit` and `stage`."""
        if self.mini_epochs is None and (self.fixed_parts or self.pools > 1):
            fail("--fixed-parts and --pools are those of --mini-epochs", 2)
        arguments = {**vars(self), "recompose": not self.fixed_parts}
        del arguments["fixed_parts"]
        return arguments


def nbytes_of(size: str | None) -> int | None:
    """Return the bytes that a size means, None if none was given."""
    from dsprep.core.units import as_nbytes

    return None if size is None else as_nbytes(size)


@dataclass
class Memory:
    """The memory that is taken."""

    memory: str | None = value(
        "SIZE", "Memory for what is read and decoded; by default a quarter of what is free."
    )

    def made(self, given: dict[str, Any], stack: ExitStack) -> int | None:
        """Return the bytes."""
        return nbytes_of(self.memory)


@dataclass
class Writing:
    """What is written, and into which files."""

    to: str | None = value(
        "FORMAT",
        "hdf5, lmdb, tfrecord or zarr; by default as the suffix of DST says (repack: else hdf5).",
        autocompletion=completing("dsprep.formats:WRITTEN"),
    )
    compress: str = value(
        "CODEC[:LEVEL]",
        "none, gzip, zstd or blosc, as the target allows; repack compresses each group alone.",
        default="none",
        panel=WRITING,
    )
    samples_per_file: int | None = value(
        "N", "Write a directory of files of so many samples.", panel=WRITING, min=1
    )
    shard_size: str | None = value(
        "SIZE",
        "Write a directory of files of at most so many bytes of values: 4GiB.",
        panel=WRITING,
    )

    def made(self, given: dict[str, Any], stack: ExitStack) -> Writing:
        """Return the options themselves: see `options`."""
        return self

    def options(self, **write: Any) -> dict[str, Any]:
        """Return what `ConvertOptions` and `RepackOptions` share; `write`: how to write."""
        from dsprep.core.units import as_nbytes
        from dsprep.formats.options import Compression, WriteOptions
        from dsprep.writing.plan import is_cut

        nbytes = None if self.shard_size is None else as_nbytes(self.shard_size)
        is_cut(self.samples_per_file, nbytes)
        return {
            "to": self.to,
            "write": WriteOptions(compress=Compression.parse(self.compress), **write),
            "samples_per_file": self.samples_per_file,
            "shard_nbytes": nbytes,
        }


@dataclass
class Executing:
    """Who does the work."""

    executor: Literal["threads", "processes", "mpi", "dask"] | None = value(
        "KIND",
        "threads of this process, processes of this machine, ranks of an MPI job (mpi), or "
        "dask workers; by default mpi where mpiexec or srun started several processes, else "
        "threads. A task is a file, or 64 MiB or more of one.",
        panel=MANY,
    )
    scheduler: str | None = value(
        "ADDRESS",
        "dask: tcp://host:8786 or its file; else workers here.",
        panel=MANY,
    )

    def made(self, given: dict[str, Any], stack: ExitStack) -> Executor | None:
        """Return the executor; in MPI ranks other than the first, do its tasks and leave."""
        from dsprep.executors import opened
        from dsprep.executors.mpi import launched

        name = self.executor
        if given.get("dry_run") and not launched():  # no workers are needed
            if name not in (None, "threads"):
                note(f"planned only: whether --executor {name} works here was not checked")
            return None
        made = opened(name, workers=given.get("workers"), scheduler=self.scheduler)
        executor = stack.enter_context(made)
        if (advice := getattr(executor, "advice", None)) is not None:
            note(advice)
        return executor


@dataclass
class Running(Executing):
    """How an output is made."""

    overwrite: bool = switch("Replace DST once the new one is complete.", "--overwrite")
    restart: bool = switch("Discard what an interrupted run left; start over.", "--restart")
    workers: Workers = None
    memory: str | None = value("SIZE", "Memory for buffers (a quarter of what is free).")
    sync: bool = switch(
        "Wait for the disk: no loss if the machine crashes.",
        "--sync/--no-sync",
        default=True,
    )

    def made(self, given: dict[str, Any], stack: ExitStack) -> RunOptions:  # type: ignore[override]
        """Return how the output is made."""
        from dsprep.writing.job import RunOptions

        return RunOptions.of(
            workers=self.workers,
            memory=self.memory,
            overwrite=self.overwrite,
            restart=self.restart,
            durable=self.sync,
            executor=super().made(given, stack),
        )


@dataclass
class Talking:
    """How much a command says."""

    quiet: bool = switch("No progress, and no report of what was done.", "--quiet", "-q")
    verbose: bool = switch(
        "Also the time of each step and the causes of errors.", "--verbose", "-v"
    )


@dataclass
class Asking:
    """Which object store is asked for URLs."""

    endpoint: str | None = value("URL", "The server that s3://, gs:// or az:// means.")

    def apply(self, given: object) -> None:
        """Have this process, and those that it starts, ask that server for what is `given`."""
        from dsprep.storage.paths import ENDPOINTS

        named = [scheme for scheme in ENDPOINTS if f"{scheme}://" in str(given)]
        if self.endpoint is not None and len(named) > 1:
            names = " and ".join(ENDPOINTS[scheme][0] for scheme in named)
            fail(f"--endpoint is of one kind of store, and here are several: set {names}", 2)
        if self.endpoint is not None:
            for scheme in named or ENDPOINTS:
                os.environ.update(dict.fromkeys(ENDPOINTS[scheme], self.endpoint))


DATASETS = frozenset({"paths", "data", "a"})
"""Parameters that name datasets: their commands have the options `Asking`, too."""

SHARED: dict[str, Callable[..., Any]] = {
    "writing": Writing,
    "reading": Reading,
    "memory": Memory,
    "run": Running,
    "executor": Executing,
    "ordering": Ordering,
}
"""Options of several commands, by the parameter that stands for them.

`made` of each returns the library's value, which may be a context; it is given all options.
"""


@dataclass(frozen=True)
class CommandSpec:
    """A command before it is built."""

    function: Callable[..., None]
    epilog: str
    cls: type[Command]
    own: dict[str, Callable[..., Any]]

    def build(self) -> Any:
        """Return the command as the parser has it."""
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        name = self.function.__name__.rstrip("_")
        app.command(name, epilog=self.epilog, cls=self.cls)(_runner(self.function, self.own))
        return typer.main.get_command(app)


def command(
    epilog: str, cls: type[Command] = Command, **own: Callable[..., Any]
) -> Callable[[Callable[..., None]], CommandSpec]:
    """Make a function a command; `own` options are as `SHARED` ones."""
    return lambda function: CommandSpec(function, epilog, cls, own)


def _runner(
    command: Callable[..., None], own: dict[str, Callable[..., Any]]
) -> Callable[..., None]:
    """Return a function that has all options as parameters, and calls the command."""
    plain = signature(command).parameters
    groups = {n: c for n, c in {**own, **SHARED}.items() if n in plain}
    types = dict.fromkeys(("OpenOptions", "RunOptions", "Executor"), object)
    hints = get_type_hints(command, localns=types, include_extras=True)
    taken = [p.replace(annotation=hints[n]) for n, p in plain.items() if n not in groups]
    asks = not DATASETS.isdisjoint(plain)
    kinds: list[Callable[..., object]] = [*groups.values(), *[Asking] * asks, Talking]
    for kind in kinds:
        hints = get_type_hints(kind, include_extras=True)
        taken += [
            p.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[n])
            for n, p in signature(kind).parameters.items()
        ]

    @wraps(command)
    def run(**given: Any) -> None:
        def pick(kind: Any) -> Any:
            return kind(**{f.name: given[f.name] for f in fields(kind)})

        talk = pick(Talking)
        if talk.quiet and talk.verbose:
            fail("--quiet and --verbose contradict each other", 2)
        with (
            verbosity(Verbosity(talk.verbose - talk.quiet)),
            reporting_errors(),
            ExitStack() as stack,
        ):
            if asks:
                pick(Asking).apply(given)
            values = {n: pick(kind).made(given, stack) for n, kind in groups.items()}
            command(**{n: values[n] if n in values else given[n] for n in plain})
            say_asked()

    run.__annotations__ = {p.name: p.annotation for p in taken}
    run.__signature__ = signature(command).replace(parameters=taken)  # type: ignore[attr-defined]
    return run


def sources_and_target(command: str, paths: list[str], replacing: bool) -> tuple[list[str], str]:
    """Return the sources, and the last path, which is the output.

    Leaves the command if there is no source, or the output exists beside sources of its kind and
    is not to be replaced: it is one of them where a pattern was not quoted and no output was named.
    """
    from dsprep.storage.atomic import partial_path
    from dsprep.storage.paths import as_path

    if len(paths) < 2:
        fail(f"a source and a target are needed: dsprep {command} SRC... DST", 2)
    *_, source, last = map(as_path, paths)
    alike = source.suffix == last.suffix and source.parent.resolve() == last.parent.resolve()
    alike &= source.name != last.name  # which is refused for what it is
    if not replacing and alike and last.exists() and not partial_path(last).exists():
        fail(
            f"{last}: the last path is the output, and it exists already: add --overwrite to "
            "replace it, or name another output after the sources",
            1,
        )
    return paths[:-1], paths[-1]


def opened(
    paths: list[str],
    options: OpenOptions,
    show: bool,
    at: Path | None = None,
    *,
    marked: bool = False,
    inspected: int | None = None,
) -> Source:
    """Open a dataset, with a bar where it has many files; see `open_dataset`."""
    from dsprep.source.dataset import open_dataset

    with count_bar("open", show) as update:
        return open_dataset(paths, options, update, at=at, marked=marked, inspected=inspected)
