"""``dsprep bench read``: every way of reading a dataset, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from dsprep.bench import caches, scratch, sums
from dsprep.bench.machine import describe
from dsprep.bench.report import sweeping
from dsprep.bench.report.answer import answer
from dsprep.bench.report.model import BenchReport, Row
from dsprep.bench.report.tables import tables
from dsprep.bench.running import run
from dsprep.bench.strategies import DUMMY, IN_PLACE, LIMIT, MET, SETS, TIERED, TODAY, find, peers
from dsprep.bench.summary import against_limit, row
from dsprep.bench.task import Failure, Result, Settings, Task
from dsprep.core.units import parse_nbytes
from dsprep.errors import UsageError, require
from dsprep.executors.mpi import launched
from dsprep.formats.options import OpenOptions
from dsprep.planning.published import parse_storage
from dsprep.reader.defaults import cores_of, threads_by_rule, units_ahead
from dsprep.reader.ledger import KEPT
from dsprep.reader.ranks import RankInfo, detect
from dsprep.source.dataset import open_dataset
from dsprep.source.files import find_files
from dsprep.storage.paths import StorePath
from dsprep.storage.trees import remove

Progress: TypeAlias = Callable[[int, int, str], None]
"""Called with runs done, of how many, and the words for what is being done."""

Runner: TypeAlias = Callable[[Task], list[Result] | Failure]
"""Runs a task on as many ranks as it has."""

LIMIT_NBYTES = 512 << 20
"""Bytes of values that are read of a larger dataset, unless more are asked for."""

PATIENCE = 10.0
"""Seconds that a pass over the dataset takes sample by sample where a storage is imitated."""

LARGEST = {"ranks": 1024, "threads": 1024, "batch_size": 2**31 - 1}
"""Limits beyond which a setting would only bring the machine down."""

PASSES = ("repeats", "mini-epochs")
"""Settings of passes that a sweep varies: only `MET` has them."""

LEFT_OUT = (
    "ways that ask an object store for one sample at a time are left out: "
    f"--strategy {IN_PLACE},provenance measures them"
)
"""The note on datasets in a store, where each sample would take the time of a request."""

ALONE = "pread-limit without steps"
"""The raw limit of the storage, run where steps work; reported in the settings."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The runs to make, decided before anything is written."""

    names: tuple[str, ...]  # the strategies, the limit first
    swept: str  # the detail that is swept; empty: none
    points: tuple[tuple[str, Settings], ...]  # its values, and settings; one without a sweep
    plans: tuple[scratch.Preparation, ...]  # what has to be prepared of the dataset for each
    notes: tuple[str, ...]  # remarks
    named: tuple[str, ...] = ()  # the strategies that were asked for one by one, not as a set

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
    sweeps: Sequence[str] = (),
    limit: str | None = None,
    folder: Path | None = None,
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
    sweeps
        Details: ``"threads=2"`` sets one, ``"buffer-size=1MiB,4MiB"`` has all run for each value.
    limit
        Bytes of values to read at most, as text: the first samples; ``"all"``. None: 512 MiB, of an
        imitated storage as many samples as are read one by one in `PATIENCE`.
    folder
        Where converted forms are written for the time of the run; None: beside the dataset.

    Raises
    ------
    DsprepError, OSError
        If the dataset cannot be read, or arguments contradict.
    """
    settings, reading = settings or Settings(), reading or OpenOptions()
    if settings.storage is not None:  # the data come from memory, and wait for nothing else
        settings = replace(settings, cold=False)
    swept, points = sweeping.points(settings, sweeps)
    first, format = find_files(list(data))[0][0]
    suitable, requested = usual(format.name, isinstance(first, StorePath)), tuple(strategies)
    if (baseline := settings.baseline) is not None:
        strategies = (*(strategies or suitable), baseline)
    names = chosen(strategies or suitable, settings, swept)
    notes = [LEFT_OUT] if isinstance(first, StorePath) and not requested else []
    for _, one in points:
        _check(one, names, swept)
    nbytes, max_samples = _limits(settings, limit)
    if max_samples is not None:
        notes.append(f"the first {max_samples:,} samples are read at most; --limit all reads them")
    needed = dict.fromkeys(find(name).container for name in names if not find(name).missing)
    plans = list[scratch.Preparation]()
    for _, one in points:
        plan = scratch.plan(
            data,
            reading,
            tuple(needed),
            folder=folder,
            into=plans[0].folder if plans else None,
            limit=nbytes,
            max_samples=max_samples,
            buffer_size=one.buffer_size,
        )
        plans.append(plan)
    if not requested:
        impossible = plans[0].impossible
        notes += [f"not read as {form}: {reason}" for form, reason in impossible.items()]
        names = _suited(names, plans[0], baseline)
        used = {find(name).container for name in names}
        plans = [
            replace(plan, forms={n: form for n, form in plan.forms.items() if n in used})
            for plan in plans
        ]
    notes += [n for plan in plans for n in plan.notes]
    return Work(
        names=names,
        swept=swept,
        points=tuple(points),
        plans=tuple(plans),
        notes=tuple(dict.fromkeys(notes)),
        named=tuple(n for n in dict.fromkeys(strategies) if n in names) if requested else (),
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
    first = work.plans[0]
    try:
        progress(0, work.runs, "preparing")
        for plan in work.plans:
            scratch.prepare(plan)
        progress(0, work.runs, "checksum of the dataset")
        with open_dataset(list(first.data), first.reading) as source:
            expected = sums.of_source(first.chosen(source), first.samples)
        rows, alone = _measured(work, expected, progress, runner)
        machine = describe(first.folder if first.folder.exists() else Path(first.data[0]))
    finally:
        for plan in work.plans:
            remove(plan.folder)
    dataset = {
        "name": Path(first.data[0]).name,
        "format": first.source,
        "samples": first.samples,
        "of": first.of,
        "sample_nbytes": round(expected.nbytes / first.samples),
        "payload_nbytes": expected.nbytes,
        "fields": [str(f) for f in first.schema],
        "grouped": first.grouped is not None,
        "stored": first.is_stored,
        "in_place": list(first.not_copied),
    }
    report = BenchReport(
        command=command,
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine,
        dataset=dataset,
        settings=_settings(work, alone),
        rows=tuple(rows),
        swept=work.swept,
    )
    if report.swept:
        knees = {n: sweeping.knee(rows) for n, rows in tables(report).items() if n != DUMMY}
        report = replace(report, knees={n: k for n, k in knees.items() if k is not None})
    return replace(report, answer=answer(report))


def _settings(work: Work, alone: float | None) -> dict[str, Any]:
    """Return the settings for the report."""
    settings = work.points[0][1]
    return {
        **vars(settings),
        "tier": None if settings.tier is None else str(settings.tier),
        "buffer_size": work.plans[0].buffer_nbytes,
        "threads": _threads(settings, work.plans[0]),
        **({} if alone is None else {"storage_gb_per_second": alone}),
        "named": list(work.named),
    }


def chosen(strategies: Sequence[str], settings: Settings, swept: str = "") -> tuple[str, ...]:
    """Return the strategies to run, the limit first, but where what is swept is nothing to it."""
    names = [LIMIT, *([DUMMY] if settings.step_seconds else [])]
    if swept in PASSES:
        names = []
    for word in strategies:
        names += peers() if word == "peers" else SETS.get(word, (word,))
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


def _limits(settings: Settings, limit: str | None) -> tuple[int | None, int | None]:
    """Return the bytes of values, and the samples, that are read at most; None: all."""
    if limit is not None:
        return (None if limit == "all" else parse_nbytes(limit)), None
    seconds = 0.0 if settings.storage is None else parse_storage(settings.storage).alone(0)
    return LIMIT_NBYTES, int(PATIENCE / seconds) if seconds else None


def _suited(
    names: Sequence[str], plan: scratch.Preparation, baseline: str | None
) -> tuple[str, ...]:
    """Return the ways of a form that the dataset can have, of those of today one that it has."""
    # Where it has the form that its format's own ways read, reading it in place is one of them.
    ways = {n for n in names if n in TODAY.get(plan.source, ())}
    is_plain = any(find(n).container in plan.in_place for n in ways)
    excess = ({IN_PLACE} if is_plain else ways) - {baseline}
    return tuple(n for n in names if n not in excess and find(n).container not in plan.impossible)


def _check(settings: Settings, names: Sequence[str], swept: str) -> None:
    """Raise `UsageError` if a setting is beyond all sense, or strategies need others."""
    for name, largest in LARGEST.items():
        number, expected = getattr(settings, name), f"{largest:,} at most"
        words = f"{name.replace('_', '-')} {number} makes no sense"
        require(number is None or number <= largest, UsageError, words, expected=expected)
    tier, passes = settings.tier, settings.mini_epochs * settings.repeats
    for name in names:
        fix = "give --tier a directory on it"
        is_served = tier is not None or name not in TIERED
        require(is_served, UsageError, f"{name} needs a fast tier", fix=fix)
        words = f"--storage cannot delay {name}, which reads by itself"
        is_known = settings.storage is None or ":" not in name
        require(is_known, UsageError, words, fix="leave one of them out")
    is_folder = tier is None or tier.is_dir()
    require(is_folder, UsageError, "--tier is not a directory", where=tier)
    words = f"nothing but {MET} has {swept}"
    is_passed = swept not in PASSES or MET in names
    require(is_passed, UsageError, words, fix=f"add --strategy {MET}")
    if MET in names:
        words = f"{MET} needs a step that takes time: how fast data are consumed decides on stalls"
        require(settings.step_seconds, UsageError, words, fix="give --compute, such as 12ms")
        words = f"{settings.mini_epochs} mini-epochs, {settings.repeats} times: {passes:,} passes"
        require(passes <= KEPT, UsageError, words, expected=f"{KEPT} at most")


def _threads(settings: Settings, plan: scratch.Preparation) -> int:
    """Return the threads that read for each rank: as asked, or by the Reader's rule."""
    if settings.threads is None and plan.is_stored:
        return units_ahead(plan.buffer_nbytes)
    rank_info = (
        detect() if launched() else RankInfo(0, settings.ranks, 0, settings.ranks, "--ranks")
    )
    return settings.threads or threads_by_rule(cores_of(rank_info))


def _task(name: str, settings: Settings, plan: scratch.Preparation) -> Task | str:
    """Return what to run for a strategy, or why that cannot be."""
    entry = find(name)
    if entry.missing:
        return entry.missing
    if reason := plan.impossible.get(entry.container):
        return f"failed: the dataset cannot be read as {entry.container}: {reason}"
    form = plan.forms[entry.container]
    known: dict[str, Any] = {
        **vars(settings),
        "threads": _threads(settings, plan),
        "warmup": int(entry.settles or not (settings.cold or settings.storage)),
    }
    return Task(
        **known,
        strategy=name,
        path=form.path,
        data=form.data,
        files=plan.data,
        reading=plan.reading,
        numbers=form.numbers,
        of=plan.of,
        schema=plan.schema,
        samples=plan.samples,
        buffer_nbytes=plan.buffer_nbytes,
        drop=tuple(caches.files_of(form.data or form.path)),
    )


def _measured(
    work: Work, expected: sums.Sums, progress: Progress, runner: Runner
) -> tuple[list[Row], float | None]:
    """Run all, in turn: a repeat begins with the strategy that was second in the one before."""
    # Returns the rows, and the GB/s that the storage gave by itself, if that was measured.
    tasks: dict[tuple[int, str], Task | str] = {}
    for i, ((_, settings), plan) in enumerate(zip(work.points, work.plans, strict=True)):
        tasks |= {(i, name): _task(name, settings, plan) for name in work.names}
        limit = tasks.get((i, LIMIT))
        if settings.step_seconds and isinstance(limit, Task):
            tasks[i, ALONE] = replace(limit, compute="none")
    queue = [(key, task) for key, task in tasks.items() if isinstance(task, Task)]
    runs: dict[tuple[int, str], list[list[Result] | Failure]] = {key: [] for key, _ in queue}
    repeats = work.points[0][1].repeat
    for number in range(repeats * len(queue)):
        turn, number_in_turn = divmod(number, len(queue))
        key, task = queue[(turn + number_in_turn) % len(queue)]
        progress(number, repeats * len(queue), f"{key[1]} {work.points[key[0]][0]}".strip())
        if not any(isinstance(r, Failure) for r in runs[key]):  # it would fail again
            runs[key].append(runner(task))
    progress(repeats * len(queue), repeats * len(queue), "done")
    rows = {
        key: Row(key[1], find(key[1]).words, problems=(task,))
        if isinstance(task, str)
        else row(task, runs[key], expected)
        for key, task in tasks.items()
    }
    measured = list[Row]()
    for i, (value, _) in enumerate(work.points):
        own = [one for (at, name), one in rows.items() if at == i and name != ALONE]
        measured += [replace(one, value=value) for one in against_limit(own)]
    alone = rows.get((0, ALONE))
    return measured, None if alone is None else alone.median("gb_per_second")
