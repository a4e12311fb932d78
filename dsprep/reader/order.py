"""The samples that a rank delivers, and their order: a pure function, equal on every machine.

The **sequence** of an epoch is every sample once: the groups in an order drawn from seed and
epoch (`Sequence`). It is divided among ranks, one range each: of n samples, rank r of P owns the
positions ``r * n // P .. (r + 1) * n // P``, so that nearly all groups belong to one rank, and a
group that two of them share is read in two parts, each once. What a rank reads at a time is a
*unit*: a group or several, or the part of one that it owns; its samples are shuffled together.

Numbers of samples differ by one between ranks, numbers of steps never do:

``drop``
    Every rank delivers ``n // P // M`` full batches of M; what is left of each share is left out
    of this epoch.
``pad``
    Every rank delivers ``ceil(ceil(n / P) / M)`` full batches; it continues with the samples after
    its own, around the end of the sequence (which makes it a ring), or of its pool if there are
    several.
``ragged``
    As many steps, each sample exactly once: the last batches of a rank are shorter, and the last
    one is empty where a rank has fewer samples than there are steps.

An epoch that was interrupted continues with another number of ranks or another batch size: each
`ResumePoint` gives with how many ranks how many steps were done, and what these left is assigned
as if it were a sequence of its own. Sources: Lee et al., "Asynchronous I/O Strategy for Large-Scale
Deep Learning Applications", section III (groups, their assignment, shuffling in the buffer).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, TypeAlias

import numpy as np

from dsprep.core.packing import digest
from dsprep.core.permutation import Permutation, mix
from dsprep.core.schema import Array, Ints
from dsprep.core.spans import offsets_of, ranges
from dsprep.reader.mini_epochs import MiniEpochs, Pass, borders_of, derive

Shuffle: TypeAlias = Literal["group", "global", "none"]
Remainder: TypeAlias = Literal["drop", "pad", "ragged"]

SHUFFLES = ("group", "global", "none")
REMAINDERS = ("drop", "pad", "ragged")


@dataclass(frozen=True)
class Span:
    """A part of a sequence, in the order in which it is delivered."""

    start: int  # positions in the sequence
    stop: int
    low: int  # which of them, in shuffled order: low <= i < high <= stop - start
    high: int
    fixed: bool = False
    """True if the order is decided: the samples of ``start .. stop`` are shuffled together. If not,
    the span is cut into units first; then it is whole."""

    @classmethod
    def uncut(cls, start: int, stop: int) -> Span:
        """Return all of ``start .. stop``, not yet cut into units."""
        return cls(start, stop, 0, stop - start)

    def __len__(self) -> int:
        return self.high - self.low

    def part(self, begin: int, end: int) -> Span:
        """Return the part ``begin .. end`` of this span."""
        if self.fixed:
            return replace(self, low=self.low + begin, high=self.low + end)
        return Span.uncut(self.start + begin, self.start + end)


class Sequence:
    """The samples of one epoch in their order, before they are shuffled within units.

    Parameters
    ----------
    edges
        int64, shape ``(groups + 1,)``: where groups begin, and the number of samples.
    shuffle
        ``"group"``: the groups in random order; ``"global"``: the samples; ``"none"``: as stored.
    seed, epoch
        Seed and epoch from which the order is drawn.
    mixed
        Groups that a unit holds, and whose samples are shuffled together.
    groups
        int64, shape ``(n,)``: the groups of a pass through a part of the epoch, in their order;
        `epoch` is then the number of the pass. None: all, in an order that is drawn.
    pools
        Caches among which they are divided, see `MiniEpochs`.
    kept
        The samples at the positions that `edges` divide, as of a subset: int64, rising, what
        weights drew more often several times; and how many of a group come at a time at most, those
        beyond in further runs. None: all. Groups without one have equal edges, and do not come.

    Attributes
    ----------
    groups
        int64, shape ``(n,)``: the groups in their order; None: all, as stored.
    ends
        int64, shape ``(n + 1,)``: the positions at which groups begin and end.
    """

    def __init__(
        self,
        edges: Ints,
        shuffle: Shuffle,
        seed: int,
        epoch: int,
        mixed: int = 1,
        groups: Ints | None = None,
        pools: int = 1,
        kept: tuple[Ints, int] | None = None,
    ) -> None:
        self.edges, self.shuffle, self.mixed, self.pools = edges, shuffle, mixed, pools
        self.seed, self.epoch = seed, epoch
        self._kept = None if kept is None else kept[0]
        if kept is not None and groups is None:
            self._take_runs(kept[1])
            return
        if groups is None and shuffle == "group" and len(edges) > 2:
            groups = Permutation(derive(seed, epoch, "groups"), len(edges) - 1).all()
        self.groups, self._begins = groups, edges[:-1] if groups is None else edges[groups]
        self.ends = edges if groups is None else offsets_of(np.diff(edges)[groups])

    def _take_runs(self, longest: int) -> None:
        """Take what is kept of each group, in one run or several of at most so many samples."""
        if self.shuffle == "global":  # units are cut anywhere
            n = int(self.edges[-1])
            self.groups, self.ends = None, np.append(np.arange(0, n, longest, dtype=np.int64), n)
            return
        runs = -(-np.diff(self.edges) // longest)
        groups = np.repeat(np.arange(len(runs), dtype=np.int64), runs)
        begins = self.edges[groups] + (np.arange(len(groups)) - offsets_of(runs)[groups]) * longest
        lengths = np.minimum(longest, self.edges[groups + 1] - begins)
        if self.shuffle == "group" and len(groups) > 1:
            order = Permutation(derive(self.seed, self.epoch, "groups"), len(groups)).all()
            groups, begins, lengths = groups[order], begins[order], lengths[order]
        self.groups, self._begins, self.ends = groups, begins, offsets_of(lengths)

    def __len__(self) -> int:
        return int(self.ends[-1])

    @property
    def drawn(self) -> tuple[int, int] | None:
        """Distinct samples that weights drew, and the most draws of one; None: each comes once."""
        if self._kept is None or not len(self._kept):
            return None
        first = np.flatnonzero(np.diff(self._kept, prepend=-1))
        times = np.diff(first, append=len(self._kept))
        return (len(first), int(times.max())) if len(first) < len(self) else None

    @cached_property
    def _samples(self) -> Permutation:
        return Permutation(derive(self.seed, self.epoch, "samples"), len(self))

    def samples(self, start: int, stop: int) -> Ints:
        """Return the samples at the positions ``start <= i < stop``: int64, ``(n,)``.

        Of a subset, or drawn by weights: their positions among those that are kept.
        """
        if self.shuffle == "global":
            return self._numbers(self._samples.forward(np.arange(start, stop, dtype=np.int64)))
        if self.groups is None:
            return np.arange(start, stop, dtype=np.int64)
        first, last = np.searchsorted(self.ends, (start, stop - 1), "right").tolist()
        if first == last:
            count = stop - start
            start += int(self._begins[first - 1] - self.ends[first - 1])
            return np.arange(start, start + count, dtype=np.int64)
        ends = self.ends[first - 1 : last + 1]
        low = np.maximum(ends[:-1], start)
        inside = low - ends[:-1] + self._begins[first - 1 : last]
        return ranges(inside, np.minimum(ends[1:], stop) - low)

    def groups_at(self, start: int, stop: int) -> Ints:
        """Return the groups with samples at the positions ``start <= i < stop``, in their order.

        None in a global shuffle, where all groups have samples everywhere.
        """
        if start >= stop or self.shuffle == "global":
            return np.zeros(0, np.int64)
        low, high = np.searchsorted(self.ends, (start, stop - 1), "right").tolist()
        groups = np.arange(low - 1, high, dtype=np.int64)
        if self.groups is None:
            return groups
        groups = self.groups[groups]
        return (
            groups
            if self._kept is None
            else groups[np.sort(np.unique(groups, return_index=True)[1])]
        )

    def _numbers(self, positions: Ints) -> Ints:
        """Return the samples at any positions, before they are shuffled."""
        if self.groups is None:
            return positions
        numbers = np.searchsorted(self.ends, positions, "right") - 1
        return self._begins[numbers] + positions - self.ends[numbers]

    def units(self, span: Span) -> Iterator[Span]:
        """Cut a span where units end: yield fixed spans that hold its samples."""
        if span.fixed:
            yield span
            return
        at = span.start
        group = int(np.searchsorted(self.ends, at, "right")) - 1
        while at < span.stop:
            group += self.mixed
            end = min(span.stop, int(self.ends[min(group, len(self.ends) - 1)]))
            if end > at:
                yield Span(at, end, 0, end - at, True)
            at = end

    def unit_at(self, span: Span, done: int) -> Span:
        """Return the unit that holds sample number `done` of a span."""
        if span.fixed:
            return span
        first = int(np.searchsorted(self.ends, span.start, "right")) - 1
        group = int(np.searchsorted(self.ends, span.start + done, "right")) - 1
        low = first + (group - first) // self.mixed * self.mixed
        high = min(low + self.mixed, len(self.ends) - 1)
        start = max(span.start, int(self.ends[low]))
        stop = min(span.stop, int(self.ends[high]))
        return Span(start, stop, 0, stop - start, True)

    def slots(self, unit: Span) -> tuple[Ints, Ints]:
        """Return the samples of a unit in the order of the files, and where each is delivered.

        Both are int64 of shape ``(n,)``: samples rise within a group, slots are a permutation of
        ``0 .. n``.
        """
        positions, slots = self.positions(unit)
        return positions if self._kept is None else self._kept[positions], slots

    def positions(self, unit: Span) -> tuple[Ints, Ints]:
        """Return `slots` with positions among the samples that are kept in place of samples."""
        samples = self.samples(unit.start, unit.stop)
        if self.shuffle == "global":
            chosen = samples[unit.low : unit.high]
            order = np.argsort(chosen, kind="stable")
            return chosen[order], order
        if self.shuffle == "none":
            return samples[unit.low : unit.high], np.arange(len(unit), dtype=np.int64)
        mix = Permutation(derive(self.seed, self.epoch, unit.start, unit.stop), len(samples))
        delivered = mix.all(inverse=True)
        if len(unit) == len(samples):
            return samples, delivered
        kept = np.flatnonzero((delivered >= unit.low) & (delivered < unit.high))
        return samples[kept], delivered[kept] - unit.low


class Weights:
    """Draws samples with replacement, each as often as its weight is of all.

    Parameters
    ----------
    weights
        float64, shape ``(n,)``: not below 0, with a sum above 0.

    Attributes
    ----------
    ends
        float64, shape ``(n,)``: the sums of the weights up to each sample.
    """

    def __init__(self, weights: Array) -> None:
        self.ends: Array = np.cumsum(weights, dtype=np.float64)
        self.draw = lru_cache(maxsize=2)(self._draw)

    def _draw(self, seed: int, epoch: int) -> Ints:
        """Return the samples of an epoch, rising, some of them several times: int64, ``(n,)``."""
        key, count = np.uint64(derive(seed, epoch, "weights")), len(self.ends)
        drawn = np.empty(count, np.int64)
        for start in range(0, count, 1 << 18):
            numbers = np.arange(start, min(count, start + (1 << 18)), dtype=np.uint64)
            shares = (mix(numbers, key) >> np.uint64(11)) * 2.0**-53  # in [0, 1)
            at = np.searchsorted(self.ends, shares * self.ends[-1], "right")
            drawn[start : start + len(at)] = at
        last = int(np.searchsorted(self.ends, self.ends[-1], "left"))  # that can be drawn
        return np.sort(np.minimum(drawn, last))


@dataclass(frozen=True)
class ResumePoint:
    """Steps that all ranks did of an epoch, of `batch_size` samples each."""

    world_size: int
    batch_size: int
    steps: int


@dataclass(frozen=True)
class Share:
    """The share of one rank of n samples that are assigned."""

    start: int  # the first position that it owns; each position has one owner
    own: int  # how many it owns
    count: int  # samples that it delivers; beyond `own` they are repeats
    batch_size: int  # samples per step; fewer in the last steps of a ``ragged`` share
    steps: int  # the same on every rank
    ring: tuple[int, int]  # the positions among which repeats are

    def stretches(self) -> Iterator[tuple[int, int]]:
        """Yield the positions that it delivers, as ranges: its own, and repeats around the ring."""
        at, rest, (low, high) = self.start, self.count, self.ring
        end = at + min(self.own, rest)
        while rest > 0:
            if end > at:
                yield at, end
            rest -= end - at
            at = end if low <= end < high else low
            end = min(high, at + rest)

    def delivered(self, steps: int) -> int:
        """Return the number of samples that the first `steps` steps deliver."""
        full = steps * self.batch_size
        if 0 <= self.steps - steps <= self.count - full:  # nearly always
            return full
        fewest = max(self.count - (self.steps - steps), min(steps, self.count))
        return min(full, fewest, self.count)

    def sizes(self, start: int, stop: int) -> Ints:
        """Return the samples of each of the steps ``start <= i < stop``: int64."""
        steps = np.arange(start, stop + 1, dtype=np.int64)
        fewest = np.maximum(self.count - (self.steps - steps), np.minimum(steps, self.count))
        return np.diff(np.minimum(np.minimum(steps * self.batch_size, fewest), self.count))


def pool_of(rank: int, world_size: int, pools: int) -> int:
    """Return the pool in which most of a rank's share lies: all, with as many ranks in each."""
    return (2 * rank + 1) * pools // (2 * world_size)


def share(
    n: int, world_size: int, rank: int, batch_size: int, remainder: Remainder, pools: int = 1
) -> Share:
    """Return the share of a rank of n samples."""
    start = rank * n // world_size
    own = (rank + 1) * n // world_size - start
    pool = pool_of(rank, world_size, pools)
    low, high = borders_of(n, pools)[pool : pool + 2].tolist()
    ring = (low, high) if low < high else (0, n)
    if remainder == "drop":
        steps = n // world_size // batch_size
        return Share(start, own, steps * batch_size, batch_size, steps, ring)
    steps = -(-n // (world_size * batch_size))
    count = steps * batch_size if remainder == "pad" else own
    return Share(start, own, count, batch_size, steps, ring)


class Epoch:
    """The rest of an epoch after some stages, and its assignment to ranks."""

    def __init__(self, sequence: Sequence, stages: tuple[ResumePoint, ...], remainder: Remainder):
        self.sequence, self.remainder = sequence, remainder
        self._pools = 1 if stages else sequence.pools  # what is left is assigned anew
        self._take([Span.uncut(0, len(sequence))])
        for stage in stages:
            self._take(self._left(stage))

    def _take(self, spans: list[Span]) -> None:
        self.spans = spans
        self._starts = offsets_of(np.array([len(s) for s in spans], np.int64))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def share(self, world_size: int, rank: int, batch_size: int) -> Share:
        """Return the share of a rank of the rest of the epoch."""
        return share(len(self), world_size, rank, batch_size, self.remainder, self._pools)

    def units(self, share: Share, skip: int = 0) -> Iterator[Span]:
        """Yield the units that a rank reads, from its sample number `skip` on."""
        for start, stop in share.stretches():
            for span in self._clipped(start, stop):
                for unit in self.sequence.units(span):
                    if skip < len(unit):
                        yield unit.part(skip, len(unit)) if skip else unit
                    skip = max(0, skip - len(unit))

    def _clipped(self, start: int, stop: int) -> Iterator[Span]:
        """Yield the spans at the positions ``start .. stop`` of what is left."""
        starts = self._starts
        i = int(np.searchsorted(starts, start, "right")) - 1
        while start < stop:
            end = min(stop, int(starts[i + 1]))
            if end > start:
                yield self.spans[i].part(start - int(starts[i]), end - int(starts[i]))
            start = max(start, end)
            i += 1

    def _left(self, stage: ResumePoint) -> list[Span]:
        """Return the spans of samples that a stage did not deliver."""
        left = []
        for rank in range(stage.world_size):
            share = self.share(stage.world_size, rank, stage.batch_size)
            done = min(share.own, share.delivered(min(stage.steps, share.steps)))
            used = min(share.own, share.count)  # units end where the rank stops
            for span in self._clipped(share.start, share.start + used):
                if done >= len(span):
                    done -= len(span)
                    continue
                if done:
                    unit = self.sequence.unit_at(span, done)
                    if unit is span:
                        span = span.part(done, len(span))
                    else:
                        inside = done - (unit.start - span.start)
                        if inside:
                            left.append(unit.part(inside, len(unit)))
                            span = Span.uncut(unit.stop, span.stop)
                        else:
                            span = Span.uncut(unit.start, span.stop)
                    done = 0
                if len(span):
                    left.append(span)
            left += self._clipped(share.start + used, share.start + share.own)
        return left


@dataclass(frozen=True)
class EpochSegment:
    """The steps of one epoch that a rank delivers."""

    number: int  # of the epoch
    epoch: Epoch
    share: Share
    first: int  # the step that it begins with
    stop: int  # the step before which it ends
    mini_pass: Pass | None = None
    rank: int = 0

    def numbers(self) -> Iterator[Ints]:
        """Yield the numbers of the samples of each step, as they are delivered: int64, ``(n,)``."""
        share, sequence = self.share, self.epoch.sequence
        at, ahead = share.delivered(self.first), np.zeros(0, np.int64)
        units = self.epoch.units(share, at)
        for count in share.sizes(self.first, self.stop).tolist():
            while len(ahead) < count:
                samples, slots = sequence.slots(next(units))
                ahead = np.append(ahead, samples[np.argsort(slots)])
            yield ahead[:count]
            ahead = ahead[count:]


Segments: TypeAlias = Callable[[], Iterator[EpochSegment]]
"""Begins the segments of a loop, one for each epoch."""


@dataclass(frozen=True)
class Start:
    """The first step of a loop, and its epochs."""

    epoch: int
    stages: tuple[ResumePoint, ...]  # what was done of it with other ranks or batches
    steps: int  # that were done since
    epochs: int | None  # how many; None: without end
    mini_pass: Pass | None = None  # of a mini-epoch whose repeats adapt


@dataclass(frozen=True)
class Assignment:
    """The order of samples and their assignment: the same on all ranks of a job."""

    edges: Ints
    shuffle: Shuffle
    seed: int
    mixed: int
    remainder: Remainder
    world_size: int
    batch_size: int
    mini: MiniEpochs | None = None
    dataset_edges: Ints | None = None
    """First samples of the groups of the dataset, if `edges` are those of a subset."""
    kept: Ints | None = None
    """The samples of the subset, rising: int64; None: all."""
    weights: Weights | None = None

    @property
    def stored_edges(self) -> Ints:
        """First samples of the groups of the dataset, and its number of samples: as `edges`."""
        return self.edges if self.dataset_edges is None else self.dataset_edges

    @property
    def largest_group(self) -> int:
        """The most samples of a group that are read at a time."""
        edges = self.edges if self.weights is None else self.stored_edges
        return int(np.diff(edges).max(initial=1))

    @property
    def groups(self) -> int:
        """The number of groups with samples that are used."""
        return int(np.count_nonzero(np.diff(self.edges)))

    def sequence(self, number: int) -> Sequence:
        """Return the order of an epoch; with mini-epochs, of a pass, see `MiniEpochs.at`."""
        mini_pass = None if self.mini is None else self.mini.at(number)
        return self._sequence(number, mini_pass)

    def _sequence(self, number: int, mini_pass: Pass | None) -> Sequence:
        groups, pools = None, 1
        if self.mini is not None and mini_pass is not None:
            shuffled, pools = self.shuffle != "none", self.mini.pools
            groups = self.mini.groups(self.edges, self.seed, mini_pass, shuffled=shuffled)
        edges, kept = self.edges, self.kept
        if self.weights is not None:
            drawn = self.weights.draw(self.seed, number)
            edges = np.searchsorted(drawn, edges)
            kept = drawn if kept is None else kept[drawn]
        how = self.shuffle, self.seed, number, self.mixed, groups, pools
        return Sequence(edges, *how, None if kept is None else (kept, self.largest_group))

    def after(self, mini_pass: Pass) -> tuple[Pass, Sequence]:
        """Return the first pass of the mini-epoch after that of a pass, and its order.

        Its number depends on repeats to come, and is 0 here.
        """
        assert self.mini is not None, "there are mini-epochs"
        part = mini_pass.epoch * self.mini.parts + mini_pass.part + 1
        first = Pass(0, *divmod(part, self.mini.parts), 0)
        return first, self._sequence(0, first)

    def pool(self, mini_pass: Pass, rank: int) -> Ints:
        """Return the groups of the pool in which a rank's share of a pass lies, rising."""
        assert self.mini is not None, "there are mini-epochs"
        number = pool_of(rank, self.world_size, self.mini.pools)
        shuffled = self.shuffle != "none"
        return self.mini.pool(self.edges, self.seed, mini_pass, number, shuffled=shuffled)

    def segment(self, rank: int, start: Start) -> EpochSegment:
        """Return the steps that a rank delivers of the epoch in which a loop begins."""
        mini_pass = start.mini_pass
        if mini_pass is None and self.mini is not None:
            mini_pass = self.mini.at(start.epoch)
        epoch = Epoch(self._sequence(start.epoch, mini_pass), start.stages, self.remainder)
        share = epoch.share(self.world_size, rank, self.batch_size)
        return EpochSegment(start.epoch, epoch, share, start.steps, share.steps, mini_pass, rank)

    def segments(self, rank: int, start: Start) -> Segments:
        """Return the segments of a loop of a rank, one for each epoch."""
        first = self.segment(rank, start)

        def segments() -> Iterator[EpochSegment]:
            yield first
            number = 1
            while self.edges[-1] and (start.epochs is None or number < start.epochs):
                yield self.segment(rank, Start(start.epoch + number, (), 0, 1))
                number += 1

        return segments

    def facts(self) -> dict[str, object]:
        """Return the inputs of the order, besides ranks and batches, as JSON."""
        mini = {} if self.mini is None else {"mini_epochs": self.mini.facts}
        chosen = {}
        if self.kept is not None:
            chosen["subset"] = digest(self.kept.tobytes())
        if self.weights is not None:
            chosen["weights"] = digest(self.weights.ends.tobytes())
        return {
            **mini,
            **chosen,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "remainder": self.remainder,
            "mixed": self.mixed,
            "samples": int(self.edges[-1]),
            "units": digest(self.stored_edges.tobytes())[:16],
        }
