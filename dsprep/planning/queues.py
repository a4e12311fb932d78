"""Reads as queues at storage targets: what a closed form cannot see. Simulated, nothing is read.

Each target serves its requests in the order of their arrival, one at a time, and seeks where a
request does not continue the one before it. All queues are computed at once in max-plus algebra:
``done[i] = max(arrival[i], done[i - 1]) + seconds[i]`` is a running maximum once the sums of the
seconds are taken off.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsprep.core.schema import Array, Ints
from dsprep.planning.storage_figures import StorageFigures
from dsprep.reader.order import Sequence

REQUESTS = 10_000_000
"""Requests that are simulated at most; what they take is scaled to the epoch."""


class Targets:
    """Storage targets, and what they did so far.

    Parameters
    ----------
    count
        How many there are.
    seek_seconds
        What a request takes in addition that does not begin where the one before it ended.
    """

    def __init__(self, count: int, seek_seconds: float) -> None:
        self.seek_seconds = seek_seconds
        self.free, self.busy = np.zeros(count), np.zeros(count)  # seconds
        self._ends = np.zeros(count)
        self.requests = self.seeks = 0

    def serve(
        self, arrivals: Array, targets: Ints, seconds: Array, offsets: Array, nbytes: Array
    ) -> Array:
        """Return when requests are done that arrive after all those before: float64, ``(n,)``.

        All arrays have that shape; offsets are those on the target.
        """
        order = np.lexsort((arrivals, targets))
        at, begin, end = targets[order], offsets[order], (offsets + nbytes)[order]
        first = np.flatnonzero(np.append(True, at[1:] != at[:-1]))
        last = np.append(first[1:], len(at)) - 1
        queue = np.repeat(np.arange(len(first)), last - first + 1)
        before = np.append(0.0, end[:-1])
        before[first] = self._ends[at[first]]
        seeks = begin != before
        service = seconds[order] + self.seek_seconds * seeks
        arrived = arrivals[order].astype(np.float64)
        arrived[first] = np.maximum(arrived[first], self.free[at[first]])
        served = np.cumsum(service)
        served -= (served - service)[first][queue]
        slack = arrived - (served - service)
        lift = queue * (np.ptp(slack) + 1.0)  # no queue waits for the one before it
        done = np.maximum.accumulate(slack + lift) - lift + served
        self.free[at[last]], self._ends[at[last]] = done[last], end[last]
        self.busy += np.bincount(at, service, len(self.busy))
        self.requests, self.seeks = self.requests + len(at), self.seeks + int(seeks.sum())
        result: Array = np.empty_like(done)
        result[order] = done
        return result


@dataclass(frozen=True)
class Shares:
    """Which groups of a sequence each of some ranks reads, as `Epoch.units` gives them one by one.

    Attributes
    ----------
    bounds
        int64, shape ``(ranks + 1,)``: rank r has the positions ``bounds[r] .. bounds[r + 1]``.
    first, stop
        int64, shape ``(ranks,)``: it reads the groups ``first .. stop`` of the sequence.
    """

    bounds: Ints
    first: Ints
    stop: Ints

    @classmethod
    def of(cls, sequence: Sequence, ranks: int) -> Shares:
        """Return the shares of an epoch that is assigned as a whole."""
        bounds = np.arange(ranks + 1, dtype=np.int64) * len(sequence) // ranks
        first = np.searchsorted(sequence.ends, bounds[:-1], "right") - 1
        stop = np.searchsorted(sequence.ends, bounds[1:] - 1, "right")
        return cls(bounds, first, np.where(bounds[1:] > bounds[:-1], stop, first))

    @property
    def samples(self) -> Ints:
        """Samples of each rank: int64, ``(ranks,)``."""
        return np.diff(self.bounds)


@dataclass(frozen=True)
class Simulated:
    """What a simulation gave.

    Attributes
    ----------
    waited_seconds
        For which all ranks waited in an epoch: for data, or for the slowest of them.
    rounds, simulated_rounds
        Groups of the busiest rank, and how many of them were simulated.
    requests, seeks
        How many there were, and how many of them did not continue the one before on their target.
    busiest
        What the busiest target worked, by what all did on average.
    """

    waited_seconds: float
    rounds: int
    simulated_rounds: int
    requests: int
    seeks: int
    busiest: float


class Simulation:
    """Ranks that read group after group from storage targets, with a barrier after each.

    Parameters
    ----------
    sequence, ranks
        The order of an epoch, and who reads it.
    sample_nbytes
        Bytes of a sample; the dataset counts as one file.
    figures
        Of the storage.
    stripe, count
        Bytes of a stripe, and the targets on which stripes lie in turn: they share A.
    stagger
        Ranks that read at a time; None: all.
    """

    def __init__(
        self,
        sequence: Sequence,
        ranks: int,
        sample_nbytes: float,
        figures: StorageFigures,
        stripe: int,
        count: int,
        stagger: int | None = None,
    ) -> None:
        self.sequence, self.figures, self.sample_nbytes = sequence, figures, sample_nbytes
        self.stripe, self.count, self.shares = stripe, count, Shares.of(sequence, ranks)
        largest = int(np.diff(sequence.ends).max() * sample_nbytes)
        self.pieces = np.arange(min(count, 2 + largest // stripe))
        self.rate = (figures.total_bytes_per_second or np.inf) / count
        self.sets = np.array_split(np.arange(ranks), -(-ranks // (stagger or ranks)))

    def run(self, compute: float, *, overlapped: bool) -> Simulated:
        """Return what ranks wait for if a group lasts `compute` seconds.

        `overlapped`: the next one is read meanwhile, into a second buffer.
        """
        targets = Targets(self.count, self.figures.seek_seconds or 0.0)
        ranks, rounds = len(self.shares.first), int((self.shares.stop - self.shares.first).max())
        limit = min(rounds, max(1, REQUESTS // (ranks * len(self.pieces))))
        now = waited = 0.0
        ready = self._read(targets, 0, np.zeros(ranks))
        for number in range(1, limit + 1):
            begin = max(now, float(ready.max()))
            waited, freed, now = waited + begin - now, now, begin + compute
            if number < limit:
                starts = np.maximum(ready, freed) if overlapped else np.full(ranks, now)
                ready = self._read(targets, number, starts)
        busiest, waited = float(targets.busy.max() / targets.busy.mean()), waited * rounds / limit
        return Simulated(waited, rounds, limit, targets.requests, targets.seeks, busiest)

    def _read(self, targets: Targets, number: int, starts: Array) -> Array:
        """Return when each rank has group `number` of its own, asked for at its start."""
        shares, ends, done, ready = self.shares, self.sequence.ends, starts.copy(), 0.0
        for ranks in self.sets:
            ranks = ranks[shares.first[ranks] + number < shares.stop[ranks]]
            if not len(ranks):
                continue
            index = shares.first[ranks] + number
            low = np.maximum(ends[index], shares.bounds[ranks])
            samples = np.minimum(ends[index + 1], shares.bounds[ranks + 1]) - low
            groups = index if self.sequence.groups is None else self.sequence.groups[index]
            offsets = (self.sequence.edges[groups] + low - ends[index]) * self.sample_nbytes
            arrivals = np.maximum(starts[ranks], ready) + self.figures.call_seconds
            done[ranks] = self._served(targets, arrivals, offsets, samples * self.sample_nbytes)
            ready = max(ready, float(done[ranks].max()))
        return done

    def _served(self, targets: Targets, arrivals: Array, offsets: Array, nbytes: Array) -> Array:
        """Return when reads are done, each of which asks all targets that it touches at once."""
        first = (offsets // self.stripe).astype(np.int64)
        stripes = ((offsets + nbytes - 1) // self.stripe).astype(np.int64) - first + 1
        read, piece = np.nonzero(self.pieces < stripes[:, None])
        size = nbytes[read] * (-((piece - stripes[read]) // self.count)) / stripes[read]
        on_target = ((first[read] + piece) // self.count).astype(np.float64) * self.stripe
        at = (first[read] + piece) % self.count
        done: Array = arrivals + nbytes / self.figures.stream_bytes_per_second
        ends = targets.serve(arrivals[read], at, size / self.rate, on_target, size)
        np.maximum.at(done, read, ends)
        return done
