"""``dsprep bench read``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsprep.cli import options as opt
from dsprep.cli.bench.options import (
    HOW,
    Csv,
    EvictServer,
    Html,
    Json,
    Repeat,
    WarmServer,
    command_line,
)
from dsprep.cli.report import guarded, note, run_bar
from dsprep.cli.usage import Command

if TYPE_CHECKING:
    from dsprep.bench.reading import Runner, Settings, Work
    from dsprep.formats.base import OpenOptions

READERS = "How to read"

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


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("read", epilog=EPILOG, cls=Command)(guarded(opt.reads_datasets(read)))


def read(
    data: Annotated[
        list[str] | None,
        typer.Argument(metavar="DATA...", help="The dataset.", show_default=False),
    ] = None,
    strategies: Annotated[
        list[str],
        typer.Option(
            "--strategy",
            "-s",
            metavar="NAME",
            help="A way of reading, or a set: async-io, lmdbio, samples, peers, all. Repeat for "
            "more. Those that suit the dataset if not given.",
            autocompletion=opt.completing(
                "dsprep.bench.strategies:STRATEGIES", "dsprep.bench.strategies:SETS"
            ),
        ),
    ] = [],  # noqa: B006 (typer copies it)
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="How it is read today; else the slowest -s.",
            show_default=False,
        ),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="Show the strategies, and stop.")] = False,
    batch_size: Annotated[
        int,
        typer.Option("--batch-size", "-M", metavar="N", min=1, help="Samples per step and rank."),
    ] = 32,
    compute: Annotated[
        str,
        typer.Option(
            metavar="WORK",
            help="A step's work: none, a time (12ms: on an accelerator), gemm or gemm:512 "
            "(matrices multiplied here).",
        ),
    ] = "none",
    ranks: Annotated[
        int,
        typer.Option(
            "--ranks", "-P", metavar="N", min=1, help="Processes, in step with each other."
        ),
    ] = 1,
    cold: Annotated[
        bool,
        typer.Option(
            "--cold/--warm",
            help="Drop the files from the page cache before each epoch, or leave them in it.",
            rich_help_panel=HOW,
        ),
    ] = True,
    warm_server: WarmServer = False,
    evict_server: EvictServer = None,
    epochs: Annotated[
        int,
        typer.Option("--epochs", "-E", metavar="N", min=1, help="Per run.", rich_help_panel=HOW),
    ] = 1,
    warmup: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Epochs that do not count; 1 if --warm, else 0.",
            show_default=False,
            rich_help_panel=HOW,
        ),
    ] = None,
    repeat: Repeat = 3,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=VALUES",
            help="Vary one option of reading, --ranks or --batch-size: threads=1,2,4, "
            "engine=buffered,direct or buffer-size=1MiB..64MiB.",
            rich_help_panel=HOW,
        ),
    ] = None,
    limit: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Values to read of a larger dataset, its first ones; or all.",
            rich_help_panel=HOW,
        ),
    ] = "512MiB",
    scratch: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep converted forms of the dataset here; else they lie beside it while this "
            "runs.",
            show_default=False,
            rich_help_panel=HOW,
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check",
            help="Compare what is delivered with the dataset, in one more epoch.",
            rich_help_panel=HOW,
        ),
    ] = True,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="Of one run.", rich_help_panel=HOW)
    ] = 900,
    buffer_size: Annotated[
        str | None,
        typer.Option(
            "--buffer-size",
            "-b",
            metavar="SIZE",
            help="What one read of a group fetches: samples (128) or bytes (64MiB); else as the "
            "data are grouped.",
            show_default=False,
            rich_help_panel=READERS,
        ),
    ] = None,
    transfer_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Bytes of one read call at most; a group's if not given.",
            show_default=False,
            rich_help_panel=READERS,
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Threads or processes that read; else as the Reader does: cores / ranks, at most "
            "4.",
            show_default=False,
            rich_help_panel=READERS,
        ),
    ] = None,
    buffers: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Groups in memory at a time.", rich_help_panel=READERS
        ),
    ] = 2,
    engine: Annotated[
        Engines,
        typer.Option(
            metavar="KIND", help="buffered, direct or mapped reads.", rich_help_panel=READERS
        ),
    ] = Engines.buffered,
    stagger: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="lmdbio-stag: readers at a time.", rich_help_panel=READERS
        ),
    ] = 1,
    readers_per_node: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="lmdbio: processes that read.", rich_help_panel=READERS
        ),
    ] = 1,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, help="Of the order.", rich_help_panel=READERS)
    ] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Show what would be run, and stop.")
    ] = False,
    json: Json = None,
    html: Html = None,
    csv: Csv = None,
    *,
    reading: OpenOptions,
) -> None:
    """Measure ways of reading a dataset against plain preadv, and tell whether reading is slow.

    Every way has processes of its own and the same samples; what it delivers is checked.
    """
    from dsprep.bench.reading import Settings, bench_read, plan_read
    from dsprep.cli.bench.output import check_targets, emit
    from dsprep.cli.report import fail
    from dsprep.write.plan import parse_nbytes

    if listed:
        _list()
        return
    if not data:
        fail("missing DATA", 2)
    settings = Settings(
        batch_size=batch_size,
        buffer_size=buffer_size,
        transfer_size=transfer_size,
        threads=threads,
        ranks=ranks,
        epochs=epochs,
        warmup=warmup,
        repeat=repeat,
        compute=compute,
        cold=cold,
        stagger=stagger,
        readers_per_node=readers_per_node,
        buffers=buffers,
        engine=engine.value,
        seed=seed,
        check=check,
        timeout=timeout,
        warm_server=warm_server,
        evict_server=evict_server,
    )
    most = None if limit == "all" else parse_nbytes(limit)
    if transfer_size is not None:
        parse_nbytes(transfer_size)  # before anything is converted
    with _job(settings, sweep) as (settings, runner):
        check_targets(json=json, html=html, csv=csv)
        work = plan_read(
            data,
            strategies,
            settings,
            reading=reading,
            sweep=sweep,
            limit=most,
            folder=scratch,
            baseline=baseline,
        )
        for words in work.notes:
            note(words)
        if dry_run:
            _plan(work)
            return
        with run_bar() as update:
            report = bench_read(work, command_line(), update, runner)
    emit(report, json=json, html=html, csv=csv)
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
