"""Counts what all ranks deliver in an epoch, or in one pass of a mini-epoch, and compares it.

Memory is a byte per sample, and some per group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from dsprep.core.schema import Array, Ints
from dsprep.reader.mini_epochs import MiniEpochs, Pass
from dsprep.reader.order import Assignment, Epoch, Remainder, ResumePoint, Sequence, Share, Span

_STEPS = 1 << 20  # of which the sizes of batches are counted at a time
_SEEN = 1 << 20  # samples that are counted at a time
_REPORTED = 1 << 19  # samples after which progress is reported


@dataclass(frozen=True)
class RunAudit:
    """Steps that were done in a row by as many ranks.

    Attributes
    ----------
    ranks
        Their number.
    steps
        Steps of each of them; the largest number if they differ.
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
    """The samples of an epoch, or of one pass of a mini-epoch.

    Attributes
    ----------
    epoch
        Its number, as the Reader counts: with mini-epochs that of the pass.
    mini_epoch
        Its pass, part and epoch; None without mini-epochs.
    never, once, more
        Samples, of those of the mini-epoch if it is one, that were delivered so often.
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
        Breaches of the promise, one sentence each.
    drawn
        With weights: how many samples of the dataset were drawn, and how often one at most.
    """

    epoch: int
    mini_epoch: Pass | None
    never: int
    once: int
    more: int
    repeats: int
    units: int
    largest_unit: int
    shared_groups: int | None
    runs: tuple[RunAudit, ...]
    problems: tuple[str, ...]
    drawn: tuple[int, int] | None = None


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
class Counter:
    """Counts what an epoch, or a pass of a mini-epoch, delivers.

    Attributes
    ----------
    problems
        What is wrong, beginning with the problems given.
    times_read
        uint8, shape ``(n,)``: how often each sample came as one of its rank's own; 2: or more.
    reader
        int64, shape ``(groups,)``: the last rank that read of each group; -1: none.
    shared
        bool, shape ``(groups,)``: whether there was another one.
    """

    sequence: Sequence
    remainder: Remainder
    batch_size: int
    mini_epoch: Pass | None = None
    problems: list[str] = field(default_factory=list)
    report: Callable[[int], None] = field(default=lambda done: None)

    def __post_init__(self) -> None:
        groups = len(self.sequence.edges) - 1
        self.times_read = np.zeros(int(self.sequence.edges[-1]), np.uint8)
        self.reader = np.full(groups, -1, np.int64)
        self.shared = np.zeros(groups, bool)
        self.units = self.largest = self.counted = self.reported = self.misplaced = 0

    def run(self, ranks: int, resume_at: int | None, resume_ranks: int | None) -> EpochAudit:
        """Return what comes: all of an epoch, in one run or two."""
        runs = self._runs(ranks, resume_at, resume_ranks)
        counted = tuple(self._count(run, i) for i, run in enumerate(runs))
        self._check_own(self._times(), runs[-1])
        repeats = sum(self._repeat(run, i) for i, run in enumerate(runs))
        if self.misplaced:
            self.problems.append(f"in {self.misplaced:,} units two samples have one slot")
        never, once, more = self._times()
        shared = None if self.sequence.shuffle == "global" else int(self.shared.sum())
        return EpochAudit(
            self.sequence.epoch,
            self.mini_epoch,
            never,
            once,
            more,
            repeats,
            self.units,
            self.largest,
            shared,
            counted,
            tuple(self.problems),
            self.sequence.drawn,
        )

    def _times(self) -> tuple[int, int, int]:
        """Return the numbers of samples delivered never, once, and more often."""
        never = once = more = 0
        edges, groups = self.sequence.edges, self.sequence.groups
        chosen = np.ones(len(edges) - 1, bool)
        if groups is not None:
            chosen = np.isin(np.arange(len(chosen)), groups)
        for at in range(0, len(self.times_read), _SEEN):
            times = self.times_read[at : at + _SEEN]
            low, high = np.searchsorted(edges, (at, at + len(times) - 1), "right").tolist()
            bounds: Ints = edges[low - 1 : high + 1].clip(at, at + len(times))
            counts = times[np.repeat(chosen[low - 1 : high], np.diff(bounds))]
            came, again = int(np.count_nonzero(counts)), int(np.count_nonzero(counts > 1))
            never, once, more = never + len(counts) - came, once + came - again, more + again
        return never, once, more

    def _runs(self, ranks: int, resume_at: int | None, resume_ranks: int | None) -> list[_Run]:
        undivided = Epoch(self.sequence, (), self.remainder)
        if resume_at is None or resume_ranks is None:
            return [_Run(undivided, ranks, 0, None)]
        first = _Run(undivided, ranks, 0, resume_at)
        if resume_ranks == ranks:  # as `Reader` does: the same deal, from that step on
            return [first, _Run(undivided, ranks, resume_at, None)]
        rest = Epoch(
            self.sequence, (ResumePoint(ranks, self.batch_size, resume_at),), self.remainder
        )
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
            key = replace(share, start=0, ring=(0, 0))
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
        samples, slots = self.sequence.positions(unit)
        filled = np.zeros(len(unit), bool)
        filled[slots] = True
        self.misplaced += len(samples) != len(unit) or not filled.all()
        rising = bool((samples[1:] > samples[:-1]).all())
        if rising and int(samples[-1]) - int(samples[0]) == len(samples) - 1:
            times = self.times_read[int(samples[0]) : int(samples[-1]) + 1]
            np.minimum(times, 1, out=times)
            times += np.uint8(1)
        else:
            order = samples if rising else np.sort(samples, kind="stable")
            before: Array = self.times_read[order]
            self.times_read[order] = np.minimum(before, 1) + np.uint8(1)
            self.times_read[order[1:][order[1:] == order[:-1]]] = 2
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
        never, once, more = own
        if more:
            self.problems.append(f"samples that come more than once: {more:,}")
        elif self.counted > once:
            self.problems.append(f"samples of other mini-epochs: {self.counted - once:,}")
        expected = 0
        if self.remainder == "drop":
            expected = len(last.epoch) % (last.ranks * self.batch_size)
        if never and not (once or more):
            self.problems.append("not one full batch for every rank: no sample comes")
        if never != expected:
            self.problems.append(f"samples that never come: {never:,}, not {expected:,}")


class Parts:
    """Compares mini-epochs: every group is in one of each epoch, in all its passes.

    Parameters
    ----------
    order, mini
        How samples are ordered, and epochs cut.
    """

    def __init__(self, order: Assignment, mini: MiniEpochs) -> None:
        self._order, self._mini = order, mini
        self._home = np.full(len(order.edges) - 1, -1, np.int64)  # the part that has a group

    def problems(self, mini_pass: Pass, groups: Ints, last: bool) -> list[str]:
        """Return problems of the groups of a pass; `last`: it is the last one of its part."""
        lines = []
        if mini_pass.part == mini_pass.turn == 0:
            self._home[:] = -1
        if mini_pass.turn == 0:
            shared = int((self._home[groups] >= 0).sum())
            if shared or len(np.unique(groups)) < len(groups):
                lines.append("groups come twice, or are in an earlier mini-epoch as well")
            self._home[groups] = mini_pass.part
        own = np.flatnonzero(self._home == mini_pass.part)
        if not np.array_equal(own, np.sort(groups)):
            lines.append("the groups are not those of the first pass of the mini-epoch")
        if last and mini_pass.part == self._mini.parts - 1:
            lost = int(np.diff(self._order.edges)[self._home < 0].sum())
            if lost:
                lines.append(f"samples that are in no mini-epoch of this epoch: {lost:,}")
        return lines


def _batches(share: Share, run: _Run) -> tuple[int, int, int]:
    """Return the numbers of full, short and empty batches of a share."""
    full = short = empty = 0
    first, last = run.steps(share)
    for start in range(first, last, _STEPS):
        sizes = share.sizes(start, min(start + _STEPS, last))
        full += int((sizes == share.batch_size).sum())
        empty += int((sizes == 0).sum())
        short += int(((sizes > 0) & (sizes < share.batch_size)).sum())
    return full, short, empty
