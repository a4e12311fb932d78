"""``dsprep bench read``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsprep.cli import options as opt
from dsprep.cli.report import note, run_bar

if TYPE_CHECKING:
    from dsprep.bench.reading import Runner, Work
    from dsprep.bench.task import Settings
    from dsprep.formats.options import OpenOptions

EPILOG = """
dsprep bench read train.h5

dsprep bench read train.h5 --compute 12ms --baseline job.py:make --html r.html

dsprep bench read train.h5 -s async-io -s lmdbio --ranks 2 --json report.json

dsprep bench read train.h5 -s dsprep --sweep buffer-size=1MiB,4MiB,16MiB

dsprep bench read train.h5 -s all --limit 4GiB --scratch /fast/scratch --warm

dsprep bench read a.h5 -s met --sweep repeats=1,4,16 --tier /ssd --compute 9ms

dsprep bench read a.h5 --storage cori -r 1

Exit status: 0 all was measured, 1 not all was, or bad data, 2 wrong usage.
"""


@dataclass
class Chosen:
    """The command's own options."""

    strategies: list[str] = opt.value(
        "NAME",
        "Ways or sets (async-io, lmdbio, samples, cache, peers, all), FILE.py:F your own loader.",
        "--strategy",
        "--set",
        "-s",
        default=[],
        autocompletion=opt.completing(
            "dsprep.bench.strategies:STRATEGIES", "dsprep.bench.strategies:SETS"
        ),
    )
    baseline: str | None = opt.value(
        "NAME", "How it is read today; FILE.py:F is your own loader, which F returns."
    )
    batch_size: int = opt.value(
        "N", "Samples per step and rank.", "--batch-size", "-M", default=32, min=1
    )
    compute: str = opt.value(
        "TIME", "What a step takes on an accelerator, such as 12ms; none.", default="none"
    )
    ranks: int = opt.value(
        "N", "Processes, in step with each other.", "--ranks", "-P", default=1, min=1
    )
    storage: str | None = opt.value(
        "NAME|FIGURES",
        "Delay all reads as another storage would: cori, or latency=3ms,stream=1GB/s.",
    )
    cold: bool = opt.switch(
        "Drop the files from the page cache before each epoch.", "--cold/--warm", default=True
    )
    repeat: int = opt.value(
        "N", "Runs of each strategy, in turn.", "--repeat", "-r", default=3, min=1
    )
    sweeps: list[str] = opt.value(
        "NAME=VALUES",
        "Set a detail, such as threads=2, or vary one: buffer-size=1MiB,16MiB.",
        "--sweep",
        default=[],
    )
    limit: str | None = opt.value(
        "SIZE", "Of a larger dataset, read the first 512MiB, or so many; or all."
    )
    scratch: Path | None = opt.value("DIR", "Write converted forms here, not beside the data.")
    tier: Path | None = opt.value("DIR", "met, cache: a directory on the fast tier.")
    dry_run: bool = opt.switch("Show what would be run, and stop.", "--dry-run", "-n")
    json: Path | None = opt.value(
        "FILE", "Write all figures as JSON; - for stdout.", allow_dash=True
    )
    html: Path | None = opt.value("FILE", "Write a page for a browser.")

    def made(self, given: dict[str, Any], stack: ExitStack) -> Chosen:
        """Return the options themselves."""
        return self


@opt.command(EPILOG, chosen=Chosen)
def read(
    chosen: Chosen,
    reading: OpenOptions,
    data: Annotated[
        list[str] | None, opt.argument("DATA...", "The dataset; without one, list strategies.")
    ] = None,
) -> None:
    """Measure ways of reading a dataset, and show whether reading is slow.

    Every way has processes of its own; all that it delivers is checked.
    """
    from dsprep.bench.reading import bench_read, plan_read
    from dsprep.bench.strategies import find
    from dsprep.bench.task import Settings
    from dsprep.cli.bench.output import check_targets, emit

    if not data:
        _list()
        return
    own = {name: value for name, value in vars(chosen).items() if hasattr(Settings, name)}
    strategies = [[given] if ":" in given else given.split(",") for given in chosen.strategies]
    files = {"json": chosen.json, "html": chosen.html}
    with _job(Settings(**own), chosen.sweeps) as (settings, runner):
        check_targets(**files)
        work = plan_read(
            data,
            list(chain.from_iterable(strategies)),
            settings,
            reading=reading,
            sweeps=chosen.sweeps,
            limit=chosen.limit,
            folder=chosen.scratch,
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
def _job(settings: Settings, sweeps: list[str]) -> Iterator[tuple[Settings, Runner]]:
    """Give what runs the ranks: this process, or an MPI job, whose processes are the ranks then."""
    from dataclasses import replace

    from dsprep.bench.running import joined, run
    from dsprep.cli.report import fail
    from dsprep.executors.mpi import launched

    if not launched():
        yield settings, run
        return
    with joined() as job:
        if settings.ranks not in (1, job.size) or any("ranks=" in text for text in sweeps):
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
