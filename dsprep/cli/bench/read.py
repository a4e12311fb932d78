"""``dsprep bench read``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsprep.cli import options as opt
from dsprep.cli.report import guarded, note, run_bar
from dsprep.cli.usage import Command

if TYPE_CHECKING:
    from dsprep.bench.reading import Runner, Settings, Work
    from dsprep.formats.base import OpenOptions

HOW = "How to measure"
READERS = "How to read"
OUTPUT = "What to write"

EPILOG = """
dsprep bench read train.h5

dsprep bench read train.h5 --compute 12ms --html report.html

dsprep bench read train.h5 -s async-io -s lmdbio --ranks 2 --json report.json

dsprep bench read train.h5 -s dsprep --sweep buffer-size=1MiB..256MiB

dsprep bench read train.h5 -s all --limit 4GiB --scratch /fast/scratch --warm

Exit status: 0 all was measured, 1 not all was, or bad data, 2 wrong usage.
"""


class Engines(StrEnum):
    """Choices of ``--engine``."""

    buffered = "buffered"
    direct = "direct"
    mapped = "mapped"


def _option(
    kind: Any, default: Any, help: str, *flags: str, panel: str | None = None, **more: Any
) -> tuple[Any, Any]:
    """Return the type and the default of an option, as `options.with_options` takes them."""
    more.setdefault("show_default", default is not None and not isinstance(default, bool))
    given = typer.Option(*flags, help=help, rich_help_panel=panel, **more)
    return Annotated[kind, given], default


_N: dict[str, Any] = {"metavar": "N", "min": 1}
_FILE: dict[str, Any] = {"metavar": "FILE", "panel": OUTPUT}

OPTIONS: dict[str, tuple[Any, Any]] = {
    "strategies": _option(
        list[str],
        [],
        "A way of reading, or a set: async-io, lmdbio, samples, peers, all. Repeat for more. Those "
        "that suit the dataset if not given.",
        *("--strategy", "-s"),
        metavar="NAME",
        autocompletion=opt.completing(
            "dsprep.bench.strategies:STRATEGIES", "dsprep.bench.strategies:SETS"
        ),
    ),
    "baseline": _option(
        str | None, None, "How it is read today; else the slowest -s.", metavar="NAME"
    ),
    "listed": _option(bool, False, "Show the strategies, and stop.", "--list"),
    "batch_size": _option(int, 32, "Samples per step and rank.", "--batch-size", "-M", **_N),
    "compute": _option(
        str,
        "none",
        "A step's work: none, a time (12ms: on an accelerator), gemm or gemm:512 (matrices "
        "multiplied here).",
        metavar="WORK",
    ),
    "ranks": _option(int, 1, "Processes, in step with each other.", "--ranks", "-P", **_N),
    "cold": _option(
        bool,
        True,
        "Drop the files from the page cache before each epoch, or leave them in it.",
        "--cold/--warm",
        panel=HOW,
    ),
    "warm_server": _option(
        bool,
        False,
        "Read all once before; drop this node's pages only.",
        "--warm-server",
        panel=HOW,
    ),
    "evict_server": _option(
        str | None,
        None,
        "Run before each cold run, to drop the server's cache.",
        metavar="CMD",
        panel=HOW,
    ),
    "epochs": _option(int, 1, "Per run.", "--epochs", "-E", **_N, panel=HOW),
    "warmup": _option(
        int | None,
        None,
        "Epochs that do not count; 1 if --warm, else 0.",
        metavar="N",
        min=0,
        panel=HOW,
    ),
    "repeat": _option(int, 3, "Runs of each, in turn.", "--repeat", "-r", **_N, panel=HOW),
    "sweep": _option(
        str | None,
        None,
        "Vary one option of reading, --ranks or --batch-size: threads=1,2,4, "
        "engine=buffered,direct or buffer-size=1MiB..64MiB.",
        metavar="NAME=VALUES",
        panel=HOW,
    ),
    "limit": _option(
        str,
        "512MiB",
        "Values to read of a larger dataset, its first ones; or all.",
        metavar="SIZE",
        panel=HOW,
    ),
    "scratch": _option(
        Path | None,
        None,
        "Keep converted forms of the dataset here; else they are beside it while this runs.",
        metavar="DIR",
        panel=HOW,
    ),
    "check": _option(
        bool,
        True,
        "Compare what is delivered with the dataset, in one more epoch.",
        "--check/--no-check",
        panel=HOW,
    ),
    "timeout": _option(float, 900, "Of one run.", metavar="SECONDS", min=1, panel=HOW),
    "buffer_size": _option(
        str | None,
        None,
        "What one read of a group fetches: samples (128) or bytes (64MiB); else as the data are "
        "grouped.",
        *("--buffer-size", "-b"),
        metavar="SIZE",
        panel=READERS,
    ),
    "transfer_size": _option(
        str | None,
        None,
        "Bytes of one read call at most; a group's if not given.",
        metavar="SIZE",
        panel=READERS,
    ),
    "threads": _option(
        int | None,
        None,
        "Threads or processes that read; else as the Reader does: cores / ranks, at most 4.",
        **_N,
        panel=READERS,
    ),
    "buffers": _option(int, 2, "Groups in memory at a time.", **_N, panel=READERS),
    "engine": _option(
        Engines,
        Engines.buffered,
        "buffered, direct or mapped reads.",
        metavar="KIND",
        panel=READERS,
    ),
    "stagger": _option(int, 1, "lmdbio-stag: readers at a time.", **_N, panel=READERS),
    "readers_per_node": _option(int, 1, "lmdbio: processes that read.", **_N, panel=READERS),
    "seed": _option(int, 0, "Of the order.", metavar="N", min=0, panel=READERS),
    "dry_run": _option(bool, False, "Show what would be run, and stop.", "--dry-run", "-n"),
    "json": _option(
        Path | None, None, "Write all figures as JSON; - for stdout.", **_FILE, allow_dash=True
    ),
    "html": _option(Path | None, None, "Write a page for a browser.", **_FILE),
    "csv": _option(Path | None, None, "Write the table as CSV.", **_FILE),
}


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""

    def call(chosen: dict[str, Any], args: Any, kwargs: Any) -> None:
        read(*args, chosen=chosen, **kwargs)

    command = opt.with_options(read, "chosen", OPTIONS, call)
    app.command("read", epilog=EPILOG, cls=Command)(guarded(opt.reads_datasets(command)))


def read(
    data: Annotated[
        list[str] | None,
        typer.Argument(metavar="DATA...", help="The dataset.", show_default=False),
    ] = None,
    *,
    chosen: Any,
    reading: OpenOptions,
) -> None:
    """Measure ways of reading a dataset against plain preadv, and tell whether reading is slow.

    Every way has processes of its own and the same samples; what it delivers is checked.
    """
    from dataclasses import fields

    from dsprep.bench.reading import Settings, bench_read, plan_read
    from dsprep.cli.bench.output import check_targets, emit
    from dsprep.cli.report import fail
    from dsprep.write.plan import parse_nbytes

    if chosen["listed"]:
        _list()
        return
    if not data:
        fail("missing DATA", 2)
    taken = {f.name: chosen[f.name] for f in fields(Settings)}
    settings = Settings(**{**taken, "engine": chosen["engine"].value})
    files = {name: chosen[name] for name in ("json", "html", "csv")}
    most = None if chosen["limit"] == "all" else parse_nbytes(chosen["limit"])
    if settings.transfer_size is not None:
        parse_nbytes(settings.transfer_size)  # before anything is converted
    with _job(settings, chosen["sweep"]) as (settings, runner):
        check_targets(**files)
        work = plan_read(
            data,
            chosen["strategies"],
            settings,
            reading=reading,
            sweep=chosen["sweep"],
            limit=most,
            folder=chosen["scratch"],
            baseline=chosen["baseline"],
        )
        for words in work.notes:
            note(words)
        if chosen["dry_run"]:
            _plan(work)
            return
        with run_bar() as update:
            report = bench_read(work, shlex.join(["dsprep", *sys.argv[1:]]), update, runner)
    emit(report, **files)
    if any(r.problems for r in report.all_rows):
        raise typer.Exit(1)


@contextmanager
def _job(settings: Settings, sweep: str | None) -> Iterator[tuple[Settings, Runner]]:
    """Give who runs the ranks: this process, or all of an MPI job, which are the ranks then."""
    from dataclasses import replace

    from dsprep.bench.running import run
    from dsprep.cli.report import fail
    from dsprep.executors.launched import launched

    if not launched():
        yield settings, run
        return
    from dsprep.bench import mpi

    with mpi.opened() as ranks:
        if settings.ranks not in (1, ranks.size) or (sweep or "").startswith("ranks"):
            fail(f"there are {ranks.size} MPI processes, and these are the ranks", 2)
        yield replace(settings, ranks=ranks.size), ranks.run


def _plan(work: Work) -> None:
    """Print what would be done."""
    from dsprep.cli.report import print_rows
    from dsprep.write.plan import show_nbytes

    first = work.plans[0]
    of = f" of {first.of:,}, the first" if first.of > first.samples else ""
    rows = [
        ("samples", f"{first.samples:,}{of}; {show_nbytes(first.payload)} of values"),
        ("groups", f"of {show_nbytes(first.buffer_nbytes)}"),
        ("strategies", ", ".join(work.names)),
        ("runs", f"{work.runs}, each with its processes"),
        ("as it is", ", ".join(first.in_place) or "nothing"),
    ]
    needed = sum(p.needed for p in work.plans)
    if needed:
        kept = "for this run" if first.temporary else "kept"
        most = "at most " if len(work.plans) > 1 else ""  # they share forms
        rows.append(("to write", f"{most}{show_nbytes(needed)} in {first.folder}, {kept}"))
    print_rows(rows)


def _list() -> None:
    from dsprep.bench.strategies import SETS, STRATEGIES
    from dsprep.cli.report import print_rows

    rows = [
        (name, e.words + (f" (not installed: {', '.join(e.missing)})" if e.missing else ""))
        for name, e in STRATEGIES.items()
    ]
    print_rows([*rows, *((f"set {name}", ", ".join(names)) for name, names in SETS.items())])
