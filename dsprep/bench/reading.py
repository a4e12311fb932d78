"""``dsprep bench read``: every way of reading a dataset, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from dsprep.bench import caches, scratch, sums, tiering
from dsprep.bench.machine import describe
from dsprep.bench.report import sweeping
from dsprep.bench.report.answer import answer
from dsprep.bench.report.model import BenchReport, Row
from dsprep.bench.report.tables import tables
from dsprep.bench.running import TIMEOUT, run
from dsprep.bench.strategies import DUMMY, IN_PLACE, LIMIT, MET, SETS, TODAY, find
from dsprep.bench.summary import StrategyFacts, against_limit, row
from dsprep.bench.task import Conditions, Failure, Result, Task, parse_compute
from dsprep.core.units import parse_nbytes, parse_rate
from dsprep.errors import UsageError
from dsprep.executors.mpi import launched
from dsprep.formats.options import OpenOptions
from dsprep.reader.defaults import cores_of, threads_by_rule, units_ahead
from dsprep.reader.ranks import RankInfo, detect
from dsprep.source.dataset import open_dataset
from dsprep.source.files import find_files
from dsprep.storage.paths import StorePath
from dsprep.storage.trees import remove

Progress: TypeAlias = Callable[[int, int, str], None]
"""Called with runs done, of how many, and the words for what is being done."""

Runner: TypeAlias = Callable[[Task, int, float], list[Result] | Failure]
"""Runs a task on so many ranks, within so many seconds."""

LIMIT_NBYTES = 512 << 20
"""Bytes of values that are read of a larger dataset, unless more are asked for."""


@dataclass(frozen=True, kw_only=True)
class Settings(Conditions):
    """How `bench_read` measures."""

    buffer_size: str | None = None  # of groups: samples, bytes ("64MiB"), None: as the data are
    transfer_size: str | None = None  # bytes of one read call at most, as text
    threads: int | None = None  # None: as many as the Reader takes with as many ranks
    ranks: int = 1  # processes that read together, meeting after every step
    warmup: int | None = None  # epochs that do not count; None: 0 if `cold`, else 1
    repeat: int = 3  # how often each strategy runs, in new processes
    cold: bool = True
    timeout: float = TIMEOUT  # seconds that a run may take
    # "train.py:make_loader", a loader of the user's own, which is the baseline unless another one
    # is given; see `dsprep.bench.strategies.own_loader`.
    loader: str | None = None


LARGEST = {"ranks": 1024, "threads": 1024, "batch_size": 2**31 - 1, "timeout": 7 * 86400}
"""Limits beyond which a setting would only bring the machine down, or time out at once."""

LEFT_OUT = (
    "ways that ask an object store for one sample at a time are left out: "
    f"--strategy {IN_PLACE},provenance measures them"
)
"""The note on datasets in a store, where each sample would take the time of a request."""

ALONE = "pread-limit without steps"
"""What the storage gives by itself, run where steps work; reported in the settings."""

_SWEPT = {"buffer-size": str, "transfer-size": str, "engine": str}
"""Parameters of a sweep that stay text; all others are whole numbers."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What will be run, decided before anything is written."""

    names: tuple[str, ...]  # the strategies, the limit first
    points: tuple[tuple[str, Settings], ...]  # what is swept, and settings; one without sweep
    plans: tuple[
        scratch.Preparation, ...
    ]  # the dataset, and what has to be prepared of it for each point
    sweep: str | None  # what is swept, as it was written; None if nothing is
    notes: tuple[str, ...]  # remarks
    named: tuple[str, ...] = ()  # the strategies that were asked for one by one, not as a set
    baseline: str | None = None  # how the user reads the dataset today; None: not said

    @property
    def runs(self) -> int:
        """Runs that will be made."""
        return len(self.names) * sum(s.repeat for _, s in self.points)


def plan_read(
    data: Sequence[str | Path],
    strategies: Sequence[str] = (),
    settings: Settings | None = None,
    *,
    reading: OpenOptions | None = None,
    sweep: str | None = None,
    limit: int | None = LIMIT_NBYTES,
    folder: Path | None = None,
    baseline: str | None = None,
) -> Work:
    """Decide what to measure; nothing is written.

    Parameters
    ----------
    data, reading
        The dataset, as `dsprep.open` takes it, and how to read it.
    strategies
        Names, or names of sets; those that suit the dataset if empty. The limit always runs.
    settings
        How to measure.
    sweep
        ``"buffer-size=1MiB,4MiB"``: run all for each value.
    limit
        Bytes of values to read at most: the first samples; None: all.
    folder
        Where converted forms are written for the time of the run; None: beside the dataset.
    baseline
        The strategy by which the dataset is read today, with which the others are compared.

    Raises
    ------
    DsprepError, OSError
        If the dataset cannot be read, or arguments contradict.
    """
    settings, reading = settings or Settings(), reading or OpenOptions()
    parse_compute(settings.compute)
    points = _points(settings, sweep)
    first, found = find_files(list(data))[0][0]
    format, stored = found.name, isinstance(first, StorePath)
    requested = tuple(strategies)
    baseline = baseline or settings.loader
    for name in filter(None, (settings.loader, baseline)):
        find(name).check(name)
        strategies = (*(strategies or usual(format, stored)), name)
    swept = "" if sweep is None else sweeping.parse(sweep)[0]
    names = chosen(strategies or usual(format, stored), settings, swept)
    notes = [LEFT_OUT] if stored and not requested else []
    for _, one in points:
        tiering.check(names, one, one.ranks, swept)
    forms = dict.fromkeys(find(name).container for name in names if not find(name).missing)
    plans = list[scratch.Preparation]()
    for _, one in points:
        plan = scratch.plan(
            data,
            reading,
            tuple(forms),
            folder=folder,
            into=plans[0].folder if plans else None,
            limit=limit,
            buffer_size=one.buffer_size,
        )
        plans.append(plan)
    if not requested:
        impossible = plans[0].impossible
        notes += [f"not read as {form}: {reason}" for form, reason in impossible.items()]
        excess = _not_today(names, plans[0], baseline)
        excess |= {name for name in names if find(name).container in impossible}
        names = tuple(name for name in names if name not in excess)
        unused = set(forms) - {find(name).container for name in names}
        plans = [plan.without(unused) for plan in plans]
    notes += [n for plan in plans for n in plan.notes]
    return Work(
        names=names,
        points=tuple(points),
        plans=tuple(plans),
        sweep=sweep,
        notes=tuple(dict.fromkeys(notes)),
        named=tuple(n for n in dict.fromkeys(strategies) if n in names) if requested else (),
        baseline=baseline,
    )


def bench_read(
    work: Work,
    command: str = "",
    progress: Progress = lambda done, total, words: None,
    runner: Runner = run,
) -> BenchReport:
    """Prepare the data, run everything in turn, and report what was found.

    Parameters
    ----------
    work
        What to do.
    command
        The command line, for the report.
    progress
        Called before each run.
    runner
        Who starts the ranks of a run; by default this process.

    Raises
    ------
    DsprepError, OSError
        If the dataset cannot be read or converted. What goes wrong with one strategy is reported
        in its row.
    """
    first, settings = work.plans[0], work.points[0][1]
    try:
        progress(0, work.runs, "preparing")
        made = [scratch.prepare(plan) for plan in work.plans]
        progress(0, work.runs, "checksum of the dataset")
        with open_dataset(list(first.data), first.reading) as source:
            expected = sums.of_source(first.chosen(source), first.samples)
        jobs = [
            (value, one, _tasks(work.names, one, plan, forms))
            for (value, one), plan, forms in zip(work.points, work.plans, made, strict=True)
        ]
        rows, alone = _measured(jobs, _facts(expected, settings), progress, runner)
        machine = describe(first.folder if first.folder.exists() else Path(first.data[0]))
    finally:
        for plan in work.plans:
            remove(plan.folder)
    report = BenchReport(
        command=command,
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine,
        dataset=_dataset(work, expected),
        settings=_settings(work, alone),
        rows=tuple(rows),
        swept="" if work.sweep is None else sweeping.parse(work.sweep)[0],
    )
    if report.swept:
        knees = {n: sweeping.knee(rows) for n, rows in tables(report).items() if n != DUMMY}
        report = replace(report, knees={n: k for n, k in knees.items() if k is not None})
    return replace(report, answer=answer(report))


def _facts(expected: sums.Sums, settings: Settings) -> StrategyFacts:
    return StrategyFacts(
        expected=expected,
        payload=expected.nbytes,
        cold=settings.cold,
        computes=settings.compute != "none",
        checked=settings.check,
    )


def _dataset(work: Work, expected: sums.Sums) -> dict[str, Any]:
    """Return the facts about the dataset for the report."""
    first = work.plans[0]
    return {
        "name": Path(first.data[0]).name,
        "format": first.source,
        "samples": first.samples,
        "of": first.of,
        "sample_nbytes": round(expected.nbytes / first.samples),
        "payload_nbytes": expected.nbytes,
        "fields": [str(f) for f in first.schema],
        "grouped": first.grouped,
        "stored": first.is_stored,
        "in_place": list(first.not_copied),
    }


def chosen(strategies: Sequence[str], settings: Settings, swept: str = "") -> tuple[str, ...]:
    """Return the strategies to run, the limit first, but where what is swept is nothing to it."""
    names = [LIMIT, *([DUMMY] if settings.compute != "none" else [])]
    if swept in tiering.PASSES:
        names = []
    for word in strategies:
        names += SETS.get(word, (word,))
    for name in names:
        find(name)
    return tuple(dict.fromkeys(names))


def usual(format: str, stored: bool = False) -> tuple[str, ...]:
    """Return the strategies that a dataset of a format is read by, and what dsprep has for it.

    `stored`: it is in an object store, where a sample by itself takes the time of a request.
    """
    if stored:
        return ("group", "group-db", "dsprep")
    return (IN_PLACE, *TODAY.get(format, ())[:2], "provenance", "group", "group-db", "dsprep")


def _not_today(names: Sequence[str], plan: scratch.Preparation, baseline: str | None) -> set[str]:
    """Return which ways nobody reads the dataset by today: those of a form that it does not have.

    Where it has the form that its format's own ways read, reading it in place is one of them.
    """
    ways = [n for n in names if n in TODAY.get(plan.source, ())]
    here = any(find(n).container in plan.in_place for n in ways)
    return ({IN_PLACE} if here else set(ways)) - {baseline}


def _points(settings: Settings, sweep: str | None) -> list[tuple[str, Settings]]:
    """Return the settings to measure with, each with the value that is swept."""
    points = [("", settings)]
    if sweep is not None:
        parameter, values = sweeping.parse(sweep)
        name, kind = parameter.replace("-", "_"), _SWEPT.get(parameter, int)
        changed: list[dict[str, Any]] = [{name: kind(value)} for value in values]
        points = [(v, replace(settings, **c)) for v, c in zip(values, changed, strict=True)]
    for _, one in points:
        _check(one)
    return points


def _check(settings: Settings) -> None:
    """Raise `UsageError` if a setting is beyond all sense."""
    for name, largest in LARGEST.items():
        value = getattr(settings, name)
        if value is not None and not value <= largest:  # nor is it NaN
            raise UsageError(
                f"--{name.replace('_', '-')} {value} makes no sense",
                expected=f"{largest:,} at most",
            )


def _threads(settings: Settings, plan: scratch.Preparation) -> int:
    """Return the threads that read for each rank: as asked, or by the Reader's rule."""
    if settings.threads is None and plan.is_stored:
        return units_ahead(plan.buffer_nbytes)
    rank_info = (
        detect() if launched() else RankInfo(0, settings.ranks, 0, settings.ranks, "--ranks")
    )
    return settings.threads or threads_by_rule(cores_of(rank_info))


def _warmup(settings: Settings) -> int:
    return int(not settings.cold) if settings.warmup is None else settings.warmup


def _tasks(
    names: Sequence[str],
    settings: Settings,
    plan: scratch.Preparation,
    made: Mapping[str, scratch.Prepared],
) -> dict[str, Task | Failure]:
    """Return what to run for each strategy, or why that cannot be."""
    tasks: dict[str, Task | Failure] = {}
    for name in names:
        container = find(name).container
        if missing := find(name).missing:
            tasks[name] = Failure(missing)
            continue
        if reason := plan.impossible.get(container):
            tasks[name] = Failure(f"the dataset cannot be read as {container}: {reason}")
            continue
        form = made[container]
        transfer = settings.transfer_size
        tasks[name] = Task(
            **{f.name: getattr(settings, f.name) for f in fields(Conditions)},
            strategy=name,
            path=form.path,
            data=form.data,
            files=plan.data,
            reading=plan.reading,
            numbers=form.numbers,
            of=plan.of,
            schema=plan.schema,
            samples=plan.samples,
            warmup=max(_warmup(settings), int(find(name).settles)),
            threads=_threads(settings, plan),
            buffer_nbytes=plan.buffer_nbytes,
            transfer_size=None if transfer is None else parse_nbytes(transfer),
            drop=tuple(caches.files_of(form.data or form.path)),
        )
    limit = tasks.get(LIMIT)
    if settings.compute != "none" and isinstance(limit, Task):
        tasks[ALONE] = replace(limit, compute="none")
    return tasks


def _measured(
    jobs: Sequence[tuple[str, Settings, dict[str, Task | Failure]]],
    facts: StrategyFacts,
    progress: Progress,
    runner: Runner,
) -> tuple[list[Row], float | None]:
    """Run all, in turn: a repeat begins with the strategy that was second in the one before.

    Returns the rows, and the GB/s that the storage gave by itself, if that was measured.
    """
    queue = [(i, name) for i, (_, _, tasks) in enumerate(jobs) for name in tasks]
    runs: dict[tuple[int, str], list[list[Result] | Failure]] = {key: [] for key in queue}
    repeats = jobs[0][1].repeat
    total, done = repeats * len(queue), 0
    for number in range(repeats):
        turn = number % len(queue)
        for i, name in queue[turn:] + queue[:turn]:
            value, settings, tasks = jobs[i]
            progress(done, total, f"{name} {value}".strip())
            task = tasks[name]
            if isinstance(task, Failure):
                runs[i, name] = [task]
            elif not any(isinstance(r, Failure) for r in runs[i, name]):  # it would fail again
                runs[i, name].append(runner(task, settings.ranks, settings.timeout))
            done += 1
    progress(total, total, "done")
    rows = list[Row]()
    for i, (value, _, tasks) in enumerate(jobs):
        made = [
            row(name, runs[i, name], _facts_of(task, facts))
            for name, task in tasks.items()
            if name != ALONE
        ]
        rows += [replace(one, value=value) for one in against_limit(made)]
    if (0, ALONE) not in runs:
        return rows, None
    idle = replace(facts, computes=False)
    return rows, row(LIMIT, runs[0, ALONE], idle).median("gb_per_second")


def _facts_of(task: Task | Failure, facts: StrategyFacts) -> StrategyFacts:
    """Return what is known of the runs of a task."""
    if isinstance(task, Failure):
        return facts
    met, rate = task.strategy == MET, task.tier_bandwidth
    return replace(
        facts,
        stored=_stored_nbytes(task),
        times=task.repeats if met else 1,
        capacity=parse_rate(rate) if met and rate is not None else None,
        remark=tiering.remark(task.strategy, task),
    )


def _stored_nbytes(task: Task) -> int:
    """Return the bytes of the files of a task that its samples take, if all are of one size."""
    nbytes = sum(p.stat().st_size for p in task.drop)
    if task.numbers is None or not len(task.numbers):
        return nbytes
    return nbytes * task.samples // max(task.of, 1)


def _settings(work: Work, alone: float | None) -> dict[str, Any]:
    """Return the settings for the report."""
    settings = work.points[0][1]
    return {
        **vars(settings),
        "tier": None if settings.tier is None else str(settings.tier),
        "buffer_size": work.plans[0].buffer_nbytes,
        "threads": _threads(settings, work.plans[0]),
        "warmup": _warmup(settings),
        **({} if alone is None else {"storage_gb_per_second": alone}),
        "named": list(work.named),
        "baseline": work.baseline,
    }
