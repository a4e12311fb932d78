"""Whether every sample comes as often as promised, by computing what every rank delivers.

Nothing is read but the sidecar. What is counted comes from the functions from which `Reader`
takes its order, unit by unit: which samples a unit delivers, and that each of its slots in the
order is taken once. Memory is a byte per sample and a few per group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.core.schema import Array, Ints, Schema
from dsprep.errors import UsageError
from dsprep.reader.order import (
    REMAINDERS,
    SHUFFLES,
    Epoch,
    Remainder,
    Sequence,
    Share,
    Shuffle,
    Span,
    Stage,
)
from dsprep.reader.units import cut_units, group_edges, sample_nbytes
from dsprep.sidecar.sidecar import Sidecar

_STEPS = 1 << 20  # of which the sizes of batches are counted at a time
_REPORTED = 1 << 19  # samples after which progress is reported


@dataclass(frozen=True)
class RunAudit:
    """Steps that were done in a row by as many ranks.

    Attributes
    ----------
    ranks
        How many.
    steps
        That each of them did; the most if they differ.
    least, most
        Samples that a rank delivered: of the ranks with the fewest and with the most.
    full, short, empty
        Batches of all ranks together: of batch_size samples, of fewer, of none.
    """

    ranks: int
    steps: int
    least: int
    most: int
    full: int
    short: int
    empty: int


@dataclass(frozen=True)
class EpochAudit:
    """What came in an epoch.

    Attributes
    ----------
    epoch
        Its number.
    never, once, more
        Samples that were delivered so often.
    repeats
        Deliveries that fill up the last batches, with ``pad``.
    units
        Ranges that were read.
    largest_unit
        Samples of the largest.
    shared_groups
        Groups, or ranges where there are none, of which more than one rank read a part; None
        where samples are read one by one, in a global shuffle.
    runs
        One; before and after the resumption, where there was one.
    problems
        How the promise was broken, one sentence each.
    """

    epoch: int
    never: int
    once: int
    more: int
    repeats: int
    units: int
    largest_unit: int
    shared_groups: int | None
    runs: tuple[RunAudit, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class AuditReport:
    """What every rank delivers.

    Attributes
    ----------
    path
        The dataset.
    samples, groups
        That it has; of a dataset without groups the ranges that are read at a time.
    grouped
        Whether it has groups.
    mixed
        Groups that are read and shuffled together.
    sample_nbytes
        Bytes of a sample; of ragged samples about how many.
    shuffle, remainder, seed, batch_size
        As asked.
    resume
        ``(step, ranks)``: after how many steps the epoch continues on how many ranks; or None.
    epochs
        One after another.
    """

    path: Path
    samples: int
    groups: int
    grouped: bool
    mixed: int
    sample_nbytes: float
    shuffle: Shuffle
    remainder: Remainder
    seed: int
    batch_size: int
    resume: tuple[int, int] | None
    epochs: tuple[EpochAudit, ...]

    @property
    def kept(self) -> bool:
        """Whether the promise of the remainder policy was kept in every epoch."""
        return not any(e.problems for e in self.epochs)

    @property
    def largest_unit_nbytes(self) -> int:
        """Bytes of the largest unit; of ragged samples about how many."""
        return round(max((e.largest_unit for e in self.epochs), default=0) * self.sample_nbytes)


def audit(
    path: str | Path,
    ranks: int,
    batch_size: int,
    *,
    epochs: int = 1,
    buffer_size: int | str | None = None,
    shuffle: Shuffle = "group",
    remainder: Remainder = "ragged",
    seed: int = 0,
    buffers_mixed: int | None = None,
    fields: tuple[str, ...] = (),
    resume_at: int | None = None,
    resume_ranks: int | None = None,
    sidecar: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> AuditReport:
    """Compute what every rank delivers in each epoch, and compare it with the promise.

    Parameters
    ----------
    path
        A dataset with a sidecar, or the sidecar.
    ranks
        Processes that read.
    batch_size, epochs, buffer_size, shuffle, seed, buffers_mixed, fields
        As for `Reader`.
    remainder
        ``"drop"``, ``"pad"`` or ``"ragged"``: ``drop_last=True``, ``pad=True`` and neither.
    resume_at, resume_ranks
        Each epoch is interrupted after so many steps, and continues on so many ranks.
    sidecar
        Its sidecar, if that is not beside the dataset.
    progress
        Called with samples counted so far, and in all.

    Returns
    -------
    AuditReport
        ``report.kept`` is True if the promise of `remainder` was kept in every epoch.

    Raises
    ------
    UsageError
        If arguments are not possible.
    MissingError, StaleError, FormatError
        If the dataset has no sidecar, or not its own, or a damaged one.
    """
    _check(ranks, batch_size, epochs, shuffle, remainder, buffers_mixed, resume_at, resume_ranks)
    with Sidecar.open(path) if sidecar is None else Sidecar.open(sidecar, path) as opened:
        schema = Schema(tuple(opened.schema[n] for n in fields or opened.schema.names))
        edges, mixed = cut_units(opened, schema, shuffle, buffer_size, buffers_mixed)
        grouped = shuffle != "global" and group_edges(opened) is not None
        nbytes, dataset = sample_nbytes(opened, schema), opened.dataset
    n = int(edges[-1])
    if remainder == "drop" and n and n // (ranks * batch_size) == 0:
        raise UsageError(
            f"drop leaves nothing: {n} samples are fewer than a batch of {batch_size} for each of "
            f"{ranks} ranks",
            fix="take smaller batches or fewer ranks, or pad",
        )
    done = 0
    reports = []
    for number in range(epochs):
        counter = _Counter(Sequence(edges, shuffle, seed, number, mixed), remainder, batch_size)
        if progress is not None:
            counter.report = partial(_report, progress, done, n * epochs)
        reports.append(counter.run(ranks, resume_at, resume_ranks))
        done += n
    resume = None if resume_at is None or resume_ranks is None else (resume_at, resume_ranks)
    return AuditReport(
        dataset,
        n,
        len(edges) - 1,
        grouped,
        mixed,
        nbytes,
        shuffle,
        remainder,
        seed,
        batch_size,
        resume,
        tuple(reports),
    )


def _check(
    ranks: int,
    batch_size: int,
    epochs: int,
    shuffle: str,
    remainder: str,
    mixed: int | None,
    resume_at: int | None,
    resume_ranks: int | None,
) -> None:
    least: dict[str, tuple[Any, int]] = {
        "ranks": (ranks, 1),
        "batch_size": (batch_size, 1),
        "epochs": (epochs, 1),
    }
    if mixed is not None:
        least["buffers_mixed"] = mixed, 1
    if resume_at is not None:
        least["resume_at"] = resume_at, 0
    if resume_ranks is not None:
        least["resume_ranks"] = resume_ranks, 1
    for name, (value, low) in least.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < low:
            raise UsageError(f"{name} is {value!r}", expected=f"a whole number, at least {low}")
    for name, word, known in (("shuffle", shuffle, SHUFFLES), ("remainder", remainder, REMAINDERS)):
        if word not in known:
            raise UsageError(f"{name} is {word!r}", expected="one of " + ", ".join(known))
    if (resume_at is None) != (resume_ranks is None):
        raise UsageError(
            "resuming takes both the step and the number of ranks",
            fix="give resume_at and resume_ranks, or neither",
        )


def _report(progress: Callable[[int, int], None], before: int, total: int, done: int) -> None:
    progress(min(total, before + done), total)


@dataclass(frozen=True)
class _Run:
    """Steps ``first .. last`` of what is left after some stages, on so many ranks."""

    epoch: Epoch
    ranks: int
    first: int
    last: int | None

    def steps(self, share: Share) -> tuple[int, int]:
        """Return which of the steps of a share are done: ``first, last``."""
        last = share.steps if self.last is None else min(self.last, share.steps)
        return min(self.first, last), last

    def part(self, share: Share) -> tuple[int, int]:
        """Return which of the samples of a share are delivered: ``begin, end``."""
        first, last = self.steps(share)
        return share.delivered(first), share.delivered(last)


@dataclass
class _Counter:
    """Counts what an epoch delivers.

    Attributes
    ----------
    seen
        uint8, shape ``(n,)``: how often each sample came as one of its rank's own; 2: or more.
    reader
        int64, shape ``(groups,)``: the last rank that read of each group; -1: none.
    shared
        bool, shape ``(groups,)``: whether there was another one.
    """

    sequence: Sequence
    remainder: Remainder
    batch_size: int
    report: Callable[[int], None] = field(default=lambda done: None)

    def __post_init__(self) -> None:
        groups = len(self.sequence.edges) - 1
        self.seen = np.zeros(len(self.sequence), np.uint8)
        self.reader = np.full(groups, -1, np.int64)
        self.shared = np.zeros(groups, bool)
        self.units = self.largest = self.counted = self.reported = self.misplaced = 0
        self.problems: list[str] = []

    def run(self, ranks: int, resume_at: int | None, resume_ranks: int | None) -> EpochAudit:
        """Return what comes: all of an epoch, in one run or two."""
        runs = self._runs(ranks, resume_at, resume_ranks)
        counted = tuple(self._count(run, i) for i, run in enumerate(runs))
        self._check_own(self._times(), runs[-1])
        repeats = sum(self._repeat(run, i) for i, run in enumerate(runs))
        if self.misplaced:
            self.problems.append(f"in {self.misplaced:,} units two samples have one slot")
        never, once, more = self._times()
        found = None if self.sequence.shuffle == "global" else int(self.shared.sum())
        return EpochAudit(
            self.sequence.epoch,
            never,
            once,
            more,
            repeats,
            self.units,
            self.largest,
            found,
            counted,
            tuple(self.problems),
        )

    def _times(self) -> tuple[int, int, int]:
        """Return how many samples came never, once, and more often."""
        never = int(np.count_nonzero(self.seen == 0))
        once = int(np.count_nonzero(self.seen == 1))
        return never, once, len(self.seen) - never - once

    def _runs(self, ranks: int, resume_at: int | None, resume_ranks: int | None) -> list[_Run]:
        whole = Epoch(self.sequence, (), self.remainder)
        if resume_at is None or resume_ranks is None:
            return [_Run(whole, ranks, 0, None)]
        first = _Run(whole, ranks, 0, resume_at)
        if resume_ranks == ranks:  # as `Reader` does: the same deal, from that step on
            return [first, _Run(whole, ranks, resume_at, None)]
        rest = Epoch(self.sequence, (Stage(ranks, self.batch_size, resume_at),), self.remainder)
        return [first, _Run(rest, resume_ranks, 0, None)]

    def _count(self, run: _Run, number: int) -> RunAudit:
        """Count the own samples of all ranks, and the batches of a run."""
        batches: dict[Share, tuple[int, int, int]] = {}
        sizes, steps, done, sums = [], set(), 0, np.zeros(3, np.int64)
        for rank in range(run.ranks):
            share = run.epoch.share(run.ranks, rank, self.batch_size)
            begin, end = run.part(share)
            steps.add(share.steps)
            done = max(done, run.steps(share)[1] - run.steps(share)[0])
            sizes.append(end - begin)
            key = Share(0, share.own, share.count, share.batch_size, share.steps)
            if key not in batches:
                batches[key] = _batches(key, run)
            sums += batches[key]
            self._deliver(run, share, begin, min(end, share.own), (number, rank))
        if len(steps) > 1:
            self.problems.append(f"ranks do different numbers of steps: {sorted(steps)}")
        full, short, empty = sums.tolist()
        if self.remainder != "ragged" and short + empty:
            self.problems.append(f"{short + empty:,} batches are not full")
        return RunAudit(run.ranks, done, min(sizes), max(sizes), full, short, empty)

    def _repeat(self, run: _Run, number: int) -> int:
        """Count the samples with which all ranks fill up batches; return how many there are."""
        if self.remainder != "pad":
            return 0
        total = 0
        for rank in range(run.ranks):
            share = run.epoch.share(run.ranks, rank, self.batch_size)
            begin, end = run.part(share)
            total += self._deliver(run, share, max(begin, share.own), end, (number, rank))
        return total

    def _deliver(self, run: _Run, share: Share, begin: int, end: int, who: tuple[int, int]) -> int:
        """Count samples ``begin .. end`` of a rank; return how many there were."""
        if begin >= end:
            return 0
        rest = end - begin
        for unit in run.epoch.units(share, begin):
            part = unit.part(0, min(len(unit), rest))
            self._take(part, who)
            rest -= len(part)
            if not rest:
                break
        if rest:
            self.problems.append(f"rank {who[1]} of {run.ranks} lacks {rest:,} samples")
        return end - begin - rest

    def _take(self, unit: Span, who: tuple[int, int]) -> None:
        """Count the samples of a unit."""
        samples, slots = self.sequence.slots(unit)
        filled = np.zeros(len(unit), bool)
        filled[slots] = True
        if len(samples) != len(unit) or not filled.all():
            self.misplaced += 1
        order = samples if (np.diff(samples) > 0).all() else np.sort(samples, kind="stable")
        before: Array = self.seen[order]
        self.seen[order] = np.minimum(before, 1) + np.uint8(1)
        self.seen[order[1:][order[1:] == order[:-1]]] = 2
        self.units += 1
        self.largest = max(self.largest, len(unit))
        self.counted += len(unit)
        if self.counted - self.reported >= _REPORTED:
            self.reported = self.counted
            self.report(self.counted)
        if self.sequence.shuffle != "global":
            self._groups(unit, who)

    def _groups(self, unit: Span, who: tuple[int, int]) -> None:
        """Note who read of the groups of a unit."""
        ends: Ints = self.sequence.ends
        low, high = np.searchsorted(ends, (unit.start, unit.stop - 1), "right").tolist()
        groups = slice(low - 1, high)
        number = who[0] << 40 | who[1]
        others = (self.reader[groups] >= 0) & (self.reader[groups] != number)
        self.shared[groups] |= others
        self.reader[groups] = number

    def _check_own(self, own: tuple[int, int, int], last: _Run) -> None:
        """Compare how often samples came as their rank's own with the promise."""
        never, _, more = own
        if more:
            self.problems.append(f"samples that come more than once: {more:,}")
        expected = 0
        if self.remainder == "drop":
            expected = len(last.epoch) % (last.ranks * self.batch_size)
        if never != expected:
            self.problems.append(f"samples that never come: {never:,}, not {expected:,}")


def _batches(share: Share, run: _Run) -> tuple[int, int, int]:
    """Return how many batches of a share are full, short and empty."""
    full = short = empty = 0
    first, last = run.steps(share)
    for start in range(first, last, _STEPS):
        sizes = share.sizes(start, min(start + _STEPS, last))
        full += int((sizes == share.batch_size).sum())
        empty += int((sizes == 0).sum())
        short += int(((sizes > 0) & (sizes < share.batch_size)).sum())
    return full, short, empty
