"""``dsprep bench read``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dsprep.cli.bench.output import check_targets, emit
from dsprep.cli.command import command
from dsprep.cli.report import fail, note, print_rows, run_bar
from dsprep.formats.options import OpenOptions

if TYPE_CHECKING:
    from dsprep.bench.reading import Runner, Work
    from dsprep.bench.task import Settings


@command
def read(
    data: tuple[str, ...] = (),
    /,
    *,
    reading: OpenOptions,
    strategies: tuple[str, ...] = (),
    baseline: str | None = None,
    batch_size: int = 32,
    compute: str = "none",
    ranks: int = 1,
    storage: str | None = None,
    cold: bool = True,
    repeat: int = 3,
    sweep: tuple[str, ...] = (),
    limit: str | None = None,
    scratch: Path | None = None,
    tier: Path | None = None,
    dry_run: bool = False,
    json: Path | None = None,
    html: Path | None = None,
) -> None:
    """Measure ways of reading a dataset, and show whether reading is slow.

    Every way has processes of its own; all that it delivers is checked.

    Parameters
    ----------
    data : DATA...
        The dataset; without one, strategies are listed.
    strategies : NAME
        Ways or sets (async-io, lmdbio, samples, cache, peers, all), as A,B or repeated; FILE.py:F
        is your own loader, which F returns. By default those that suit.
    baseline : NAME
        The way by which it is read today, also FILE.py:F; by default the slowest -s.
    batch_size
        Samples per step and rank.
    compute : TIME
        The time of a step on an accelerator, such as 12ms.
    ranks
        Processes, in step with each other.
    storage : NAME|FIGURES
        Delay all reads as another storage would: cori, or latency=3ms,stream=1GB/s.
    cold
        Leave the files in the page cache, from which they are dropped else before each epoch.
    repeat
        Runs of each strategy, in turn.
    sweep : NAME=VALUES
        Set a detail, such as threads=2, or vary one: buffer-size=1MiB,16MiB.
    limit : SIZE
        Of a larger dataset, read the first 512MiB, or so many; or all.
    scratch : DIR
        Write converted forms here, not beside the data.
    tier : DIR
        met, cache: a directory on the fast tier.
    dry_run
        Show what would be done, and stop.
    json
        Write all figures as JSON; - for stdout.
    html
        Write a page for a browser.

    Examples
    --------
    dsprep bench read train.h5
    dsprep bench read train.h5 --compute 12ms --baseline job.py:make --html r.html
    dsprep bench read train.h5 -s async-io -s lmdbio --ranks 2 --json report.json
    dsprep bench read train.h5 -s dsprep --sweep buffer-size=1MiB,4MiB,16MiB
    dsprep bench read train.h5 -s all --limit 4GiB --scratch /fast/scratch --warm
    dsprep bench read a.h5 -s met --sweep repeats=1,4,16 --tier /ssd --compute 9ms
    dsprep bench read a.h5 --storage cori -r 1

    Notes
    -----
    Exit status: 0 all was measured, 1 not all was, or bad data, 2 wrong usage.
    """
    from dsprep.bench.reading import bench_read, plan_read
    from dsprep.bench.strategies import find
    from dsprep.bench.task import Settings
    from dsprep.reader.options import at_least

    if not data:
        _list()
        return
    settings = Settings(
        baseline=baseline,
        batch_size=at_least("batch_size", batch_size, 1),
        compute=compute,
        ranks=at_least("ranks", ranks, 1),
        storage=storage,
        cold=cold,
        repeat=at_least("repeat", repeat, 1),
        tier=tier,
    )
    chosen = chain.from_iterable([s] if ":" in s else s.split(",") for s in strategies)
    with _job(settings, sweep) as (settings, runner):
        check_targets(json=json, html=html)
        work = plan_read(
            data,
            list(chosen),
            settings,
            reading=reading,
            sweeps=sweep,
            limit=limit,
            folder=scratch,
        )
        for words in work.notes:
            note(words)
        if dry_run:
            _plan(work)
            return
        with run_bar() as update:
            report = bench_read(work, shlex.join(["dsprep", *sys.argv[1:]]), update, runner)
    emit(report, json=json, html=html)
    absent = {name for name in work.names if find(name).missing} - set(work.named)
    if any(r.problems for r in report.rows if r.name not in absent):
        raise typer.Exit(1)


@contextmanager
def _job(settings: Settings, sweeps: Sequence[str]) -> Iterator[tuple[Settings, Runner]]:
    """Return the runner of the ranks: this process, or an MPI job."""
    from dsprep.bench.running import joined, run
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

    rows = [
        (name, e.words + (f" ({e.missing})" if e.missing else "")) for name, e in STRATEGIES.items()
    ]
    print_rows([*rows, *((f"set {name}", ", ".join(names)) for name, names in SETS.items())])
