"""Waiting times of training in closed form: predicted, nothing is read.

A rank reads in **events**: a step's samples, or a unit (a group, or several) as a whole. An event
of some calls and bytes takes ``calls * latency + bytes / w`` with ``1/w = 1/W + (P - 1)/A``
(`StorageFigures`). Without overlap all of it is waited for; with a second buffer only what is left
after the compute of the steps that the buffer before it lasts. Read times are lognormal, as wide
as their p50 and p99 say, and at a barrier all ranks wait for the slowest of P of them: the expected
largest of P draws, integrated numerically. Sources: Lee et al. (HiPC 2021), section III, for groups
and buffers; Pumma et al. (ACM TOPC 2019) for LMDB; Mathuriya et al. (SC18), section VI, for the
straggler.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dsprep.planning.storage_figures import StorageFigures
from dsprep.reader.defaults import buffers_by_rule

BUSY = 0.95
"""Utilisation from which on training is limited by its own compute."""

COALESCED = 2_500_000_000
"""Bytes that LMDBIO's COAL reads at a time. Pumma et al., section 6."""

MAPPED, SEEKING = 2.5, 0.8
"""DM's share of PROV's time, and the share of DIO's time that reads. Pumma et al., Figs. 4, 16."""

HAND_OVER = 60e-6
"""Seconds in which a loop takes a batch that is in memory: dsprep's median here, 36 to 89 us."""

POINTS = 2001
"""At which the distribution of the slowest read is evaluated."""


@dataclass(frozen=True)
class Job:
    """A training: `compute` is the seconds of a step without I/O, `batch_size` that of a rank."""

    nodes: int
    ranks_per_node: int
    batch_size: int
    compute: float
    threads: int = 1  # that read for a rank, where a way has several

    @property
    def ranks(self) -> int:
        """Processes that train."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class Load:
    """The reads of an epoch: samples, units and steps are those of the busiest rank."""

    samples: int
    units: int  # that are read as a whole
    steps: int
    sample_nbytes: float
    nbytes: float  # of the dataset
    files: int


@dataclass(frozen=True)
class Way:
    """A way of reading, and what an epoch of it is predicted to cost.

    Attributes
    ----------
    name
        As `bench read` names it; ``sample`` and ``sample-prefetch`` stand for all libraries.
    io_seconds
        Of the reads of a rank, hidden or not.
    exposed_seconds
        For which a rank waits for its data in a first epoch.
    later_seconds
        The same in further epochs, whose first read the epoch before them hides.
    skew_seconds
        For which it then waits for the slowest rank, in any epoch.
    slowest_seconds
        Of the slowest of all ranks' reads in one event, on average.
    utilisation
        Share of a further epoch in which training computes: AU.
    limit
        What limits it: latency, stream, aggregate, spread, metadata or compute.
    """

    name: str
    io_seconds: float
    exposed_seconds: float
    later_seconds: float
    skew_seconds: float
    slowest_seconds: float
    utilisation: float
    limit: str


def excess(mean: float, sigma: float, ranks: int, hidden: float = 0.0) -> float:
    """Return by how much the slowest of `ranks` reads exceeds `hidden` seconds, on average.

    That is the integral of 1 - F(x)**ranks over x > hidden, of the lognormal F with this mean;
    `hidden` below 0 is what all of them take longer.

    >>> excess(2.0, 0.0, 1000), round(excess(2.0, 0.3, 1), 6), round(excess(2.0, 0.3, 1000), 2)
    (2.0, 2.0, 5.08)
    """
    if sigma <= 0 or mean <= 0:
        return max(0.0, mean - hidden)
    median = mean * math.exp(-(sigma**2) / 2)
    first = -8.0 if hidden <= 0 else max(-8.0, math.log(hidden / median) / sigma)
    z = np.linspace(first, max(first, 12 + 2 * sigma), POINTS)
    tails = np.array([math.erfc(v / math.sqrt(2)) / 2 for v in z.tolist()])
    density = -np.expm1(ranks * np.log1p(-tails)) * sigma * median * np.exp(sigma * z)
    below = median * math.exp(sigma * first) - hidden  # where all reads take longer
    return max(0.0, below) + float((density[1:] + density[:-1]).sum() * (z[1] - z[0]) / 2)


@dataclass(frozen=True)
class Events:
    """Reads that follow each other: `count` events of `calls` calls and `nbytes` bytes each."""

    count: float
    calls: float
    nbytes: float
    streams: int  # ranks, or the processes that read for them
    threads: int = 1  # of each of them
    hidden: float = 0.0  # seconds of compute beside each event
    units: float = 1  # that are read at a time, of which the first one is enough to begin
    taking_turns: bool = False  # as many at a time as the storage serves at full speed

    def parts(self, figures: StorageFigures) -> dict[str, float]:
        """Return the seconds of an event by what they are spent on, the mean.

        Bytes come in those of ``stream`` if nobody else reads; the others add ``aggregate``.
        """
        calls = max(self.calls / self.threads, min(1.0, self.calls))  # one after another
        each, rate = self.nbytes / self.threads, figures.bytes_per_second
        alone = calls * figures.alone(each / calls) if calls else each / rate(1)
        latency = calls * figures.call_seconds
        among = each / rate(self.streams * self.threads) - each / rate(1)
        if self.taking_turns:
            among = self.nbytes * self.streams / (figures.total_bytes_per_second or math.inf)
            among -= alone
        stream = max(0.0, alone - latency)
        return {"latency": latency, "stream": stream, "aggregate": max(0.0, among)}

    def seconds(self, figures: StorageFigures) -> float:
        """Return the seconds of an event, the mean."""
        return sum(self.parts(figures).values())

    def way(self, name: str, job: Job, load: Load, figures: StorageFigures) -> Way:
        """Return what an epoch of these events is predicted to cost.

        What a read takes by itself is spread, what all ranks together add to it is not.
        The times of reads one after another even out, and a read larger than the one whose spread
        was measured counts as several.
        """
        mean, count, compute = self.seconds(figures), self.count, load.steps * job.compute
        reads = max(1.0, self.calls, self.nbytes / (figures.spread_nbytes or math.inf))
        sigma = math.sqrt(math.log1p(math.expm1(figures.sigma**2) / reads))
        shared = self.parts(figures)["aggregate"]  # for which all ranks wait alike
        spread, beside = (mean - shared, sigma), self.hidden - shared
        alone = excess(*spread, 1, beside)
        slowest = shared + excess(*spread, self.streams)
        later, skew = count * alone, count * (excess(*spread, self.streams, beside) - alone)
        opens = min(load.files, load.samples if "sample" in name else load.units) * self.streams
        opening = opens / (figures.opens_per_second or math.inf)
        begin = mean - shared * (1 - 1 / self.units)  # the first of several comes first
        first = opening + (max(later, begin + (count - 1) * alone) if self.hidden else count * mean)
        parts = {part: count * seconds for part, seconds in self.parts(figures).items()}
        parts |= {"spread": skew, "metadata": opening}
        limit = max(parts, key=lambda part: parts[part])
        limit = "compute" if compute >= BUSY * (compute + later + skew) else limit
        taking = load.steps * HAND_OVER
        first, later = first + taking, later + taking
        busy = compute / (compute + later + skew)
        return Way(name, count * mean, first, later, skew, slowest, busy, limit)


def ways(job: Job, load: Load, figures: StorageFigures) -> dict[str, Way]:
    """Return the ways of reading that have no fast tier, each with its prediction."""
    ranks, nodes, steps, units = job.ranks, job.nodes, max(1, load.steps), max(1, load.units)
    step, share = load.samples / steps, load.nbytes / nodes
    in_step = step * load.sample_nbytes, ranks
    unit = load.samples / units * load.sample_nbytes
    ahead = min(job.threads, units, buffers_by_rule(unit, job.threads) - 1)  # read at a time
    each, blocks = share / steps, max(1, math.ceil(share / COALESCED))
    beside = steps * job.compute / units
    events = {
        "sample": Events(steps, step, *in_step),
        "sample-prefetch": Events(steps, step, *in_step, job.threads, job.compute),
        "group": Events(units, 1, unit, ranks),
        "group-db": Events(units, 1, unit, ranks, 1, beside),
        "dsprep": Events(
            units / ahead, job.threads, ahead * unit, ranks, job.threads, ahead * beside, ahead
        ),
        "lmdb-cursor": Events(steps, 0, load.nbytes / steps, nodes),
        "lmdbio-dm": Events(steps, MAPPED, MAPPED * each, nodes),
        "lmdbio-dio": Events(steps, 1 / SEEKING, each / SEEKING, nodes),
        "lmdbio-prov": Events(steps, 1, each, nodes),
        "lmdbio-coal": Events(blocks, 1, share / blocks, nodes),
        "lmdbio-stag": Events(blocks, 1, share / blocks, nodes, taking_turns=True),
    }
    return {name: each.way(name, job, load, figures) for name, each in events.items()}


def enough(job: Job, load: Load, figures: StorageFigures) -> float | None:
    """Return the samples of the smallest group whose read is hidden by its steps, or None.

    Of B samples: latency + B s / w <= B / M * compute.
    """
    per_sample = load.sample_nbytes / figures.bytes_per_second(job.ranks)
    spare = job.compute / job.batch_size - per_sample
    return max(1.0, figures.call_seconds / spare) if spare > 0 else None


def readers_per_node(job: Job, needed: float, figures: StorageFigures) -> int:
    """Return the fewest readers on each node that get `needed` bytes per second, or all ranks."""
    for readers in range(1, job.ranks_per_node):
        streams = readers * job.nodes
        if streams * figures.bytes_per_second(streams) >= needed:
            return readers
    return job.ranks_per_node


def turns(job: Job, figures: StorageFigures) -> int | None:
    """Return how many ranks should read at a time; None: all may, the storage serves them all."""
    total = figures.total_bytes_per_second
    at_once = None if total is None else math.ceil(total / figures.stream_bytes_per_second)
    return None if at_once is None or at_once >= job.ranks else at_once
