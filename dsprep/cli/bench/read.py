"""``dsprep bench read``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dsprep.cli import options as opt
from dsprep.cli.report import note, run_bar

if TYPE_CHECKING:
    from dsprep.bench.reading import Runner, Settings, Work
    from dsprep.formats.options import OpenOptions

HOW = "How to measure"
READERS = "How to read"
OUTPUT = "What to write"

EPILOG = """
dsprep bench read train.h5

dsprep bench read train.h5 --compute 12ms --loader train.py:make --html r.html

dsprep bench read train.h5 -s async-io -s lmdbio --ranks 2 --json report.json

dsprep bench read train.h5 -s dsprep --sweep buffer-size=1MiB,4MiB,16MiB

dsprep bench read train.h5 -s all --limit 4GiB --scratch /fast/scratch --warm

dsprep bench read a.h5 -s met --sweep repeats=1,4,16 --tier /ssd --compute 9ms

Exit status: 0 all was measured, 1 not all was, or bad data, 2 wrong usage.
"""


@dataclass
class Chosen:
    """The command's own options."""

    strategies: list[str] = opt.value(
        "NAME",
        "Ways or sets (async-io, lmdbio, samples, cache, all), as A,B or repeated; "
        "default: what suits.",
        "--strategy",
        "--set",
        "-s",
        default=[],
        autocompletion=opt.completing(
            "dsprep.bench.strategies:STRATEGIES", "dsprep.bench.strategies:SETS"
        ),
    )
    baseline: str | None = opt.value("NAME", "How it is read today; by default the slowest -s.")
    loader: str | None = opt.value("FILE.py:F", "Your own loader, which F returns: the baseline.")
    listed: bool = opt.switch("List the strategies, and stop.", "--list")
    batch_size: int = opt.value(
        "N", "Samples per step and rank.", "--batch-size", "-M", default=32, min=1
    )
    compute: str = opt.value(
        "TIME", "What a step takes on an accelerator, such as 12ms; none.", default="none"
    )
    ranks: int = opt.value(
        "N", "Processes, in step with each other.", "--ranks", "-P", default=1, min=1
    )
    cold: bool = opt.switch(
        "Drop the files from the page cache before each epoch.",
        "--cold/--warm",
        default=True,
        panel=HOW,
    )
    epochs: int = opt.value("N", "Epochs per run.", "--epochs", "-E", default=1, min=1, panel=HOW)
    warmup: int | None = opt.value(
        "N", "First epochs, not counted; by default 0, warm 1.", min=0, panel=HOW
    )
    repeat: int = opt.value(
        "N", "Runs of each strategy, in turn.", "--repeat", "-r", default=3, min=1, panel=HOW
    )
    sweeps: list[str] = opt.value(
        "NAME=VALUES",
        "Vary one option: threads=1,2,4, buffer-size=1MiB,16MiB, ...",
        "--sweep",
        default=[],
        panel=HOW,
    )
    limit: str = opt.value(
        "SIZE",
        "Of a larger dataset, read the first; or all.",
        default="512MiB",
        panel=HOW,
    )
    scratch: Path | None = opt.value(
        "DIR",
        "Write converted forms here, not beside the data.",
        panel=HOW,
    )
    check: bool = opt.switch(
        "Compare all that is delivered, in one more epoch.",
        "--check/--no-check",
        default=True,
        panel=HOW,
    )
    timeout: float = opt.value("SECONDS", "Limit of one run.", default=900, min=1, panel=HOW)
    buffer_size: str | None = opt.value(
        "SIZE",
        "What one read fetches: 128 (samples) or 64MiB.",
        "--buffer-size",
        "-b",
        panel=READERS,
    )
    transfer_size: str | None = opt.value(
        "SIZE", "Bytes of one read call at most; by default a group's.", panel=READERS
    )
    threads: int | None = opt.value(
        "N",
        "That read; by default cores / ranks, at most 4.",
        min=1,
        panel=READERS,
    )
    buffers: int = opt.value("N", "Groups in memory at a time.", default=2, min=1, panel=READERS)
    engine: Literal["buffered", "direct"] = opt.value(
        "KIND", "buffered or direct reads.", default="buffered", panel=READERS
    )
    stagger: int = opt.value(
        "N", "lmdbio-stag: readers at a time.", default=1, min=1, panel=READERS
    )
    readers_per_node: int = opt.value(
        "N", "lmdbio: processes that read.", default=1, min=1, panel=READERS
    )
    seed: int = opt.value("N", "Seed of the order.", default=0, min=0, panel=READERS)
    tier: Path | None = opt.value("DIR", "met, cache: a directory on the fast tier.", panel=READERS)
    tier_size: str | None = opt.value(
        "SIZE", "What may be kept there: 20GB, or 75% of what is free.", panel=READERS
    )
    tier_bandwidth: str | None = opt.value(
        "RATE", "Throttle the dataset to 200MB/s, to try out tiers.", panel=READERS
    )
    mini_epochs: int = opt.value("N", "met: parts of an epoch.", default=8, min=1, panel=READERS)
    repeats: int = opt.value("N", "met: passes of each part.", default=1, min=1, panel=READERS)
    dry_run: bool = opt.switch("Show what would be run, and stop.", "--dry-run", "-n")
    json: Path | None = opt.value(
        "FILE", "Write all figures as JSON; - for stdout.", panel=OUTPUT, allow_dash=True
    )
    html: Path | None = opt.value("FILE", "Write a page for a browser.", panel=OUTPUT)

    def made(self, given: dict[str, Any], stack: ExitStack) -> Chosen:
        """Return the options themselves."""
        return self


@opt.command(EPILOG, chosen=Chosen)
def read(
    chosen: Chosen,
    reading: OpenOptions,
    data: Annotated[list[str] | None, opt.argument("DATA...", "The dataset.")] = None,
) -> None:
    """Measure ways of reading a dataset, and show whether reading is slow.

    Every way has processes of its own; all that it delivers is checked.
    """
    from dataclasses import fields

    from dsprep.bench.reading import Settings, bench_read, plan_read
    from dsprep.bench.strategies import find
    from dsprep.cli.bench.output import check_targets, emit
    from dsprep.cli.report import fail
    from dsprep.core.units import parse_nbytes

    if chosen.listed:
        _list()
        return
    if not data:
        fail("missing DATA", 2)
    settings = Settings(**{f.name: getattr(chosen, f.name) for f in fields(Settings)})
    files = {"json": chosen.json, "html": chosen.html}
    largest = None if chosen.limit == "all" else parse_nbytes(chosen.limit)
    if settings.transfer_size is not None:
        parse_nbytes(settings.transfer_size)  # before anything is converted
    if len(chosen.sweeps) > 1:
        count = len(chosen.sweeps)
        fail(f"--sweep varies one option, and is given {count} times: run the command for each", 2)
    sweep = next(iter(chosen.sweeps), None)
    strategies = [[given] if ":" in given else given.split(",") for given in chosen.strategies]
    with _job(settings, sweep) as (settings, runner):
        check_targets(**files)
        work = plan_read(
            data,
            list(chain.from_iterable(strategies)),
            settings,
            reading=reading,
            sweep=sweep,
            limit=largest,
            folder=chosen.scratch,
            baseline=chosen.baseline,
        )
        for words in work.notes:
            note(words)
        if chosen.dry_run:
            _plan(work)
            return
        with run_bar() as update:
            report = bench_read(work, shlex.join(["dsprep", *sys.argv[1:]]), update, runner)
    emit(report, **files)
    absent = {name for name in work.names if find(name).missing} - set(work.named)
    if any(r.problems for r in report.rows if r.name not in absent):
        raise typer.Exit(1)


@contextmanager
def _job(settings: Settings, sweep: str | None) -> Iterator[tuple[Settings, Runner]]:
    """Give what runs the ranks: this process, or an MPI job, whose processes are the ranks then."""
    from dataclasses import replace

    from dsprep.bench.running import joined, run
    from dsprep.cli.report import fail
    from dsprep.executors.mpi import launched

    if not launched():
        yield settings, run
        return
    with joined() as job:
        if settings.ranks not in (1, job.size) or (sweep or "").startswith("ranks"):
            fail(f"there are {job.size} MPI processes, and these are the ranks", 2)
        yield replace(settings, ranks=job.size), job.run


def _plan(work: Work) -> None:
    """Print what would be done."""
    from dsprep.cli.report import print_rows
    from dsprep.core.units import show_nbytes

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
        bound = "at most " if len(work.plans) > 1 else ""  # they share forms
        rows.append(("to write", f"{bound}{show_nbytes(needed)} in {first.folder}, for this run"))
    print_rows(rows)


def _list() -> None:
    from dsprep.bench.strategies import SETS, STRATEGIES
    from dsprep.cli.report import print_rows

    rows = [
        (name, e.words + (f" ({e.missing})" if e.missing else "")) for name, e in STRATEGIES.items()
    ]
    print_rows([*rows, *((f"set {name}", ", ".join(names)) for name, names in SETS.items())])
