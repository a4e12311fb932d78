"""How long training waits for data, in closed form: predicted, nothing is read.

A rank reads in **events**: a step's samples, or a unit (a group, or several) as a whole. An event
of some calls and bytes takes ``calls * overhead + bytes / w`` with ``1/w = 1/W + P/A``
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

ERROR = "within 25 % on storage that bench storage measured at two scales, else a factor of 2"
"""How far predictions were from the tables of Lee et al.: 20 of 24 cells; see `plan papers`."""

BUSY = 0.95
"""Utilisation from which on training is limited by its own compute."""

COALESCED = 2_500_000_000
"""Bytes that LMDBIO's COAL reads at a time. Pumma et al., section 6."""

MAPPED, SEEKING = 2.5, 0.8
"""What DM takes of PROV's time, and which share of DIO's time reads. Pumma et al., Figs. 4, 16."""

POINTS = 2001
"""At which the distribution of the slowest read is evaluated."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What trains: `compute` is the seconds of a step without I/O, `batch_size` that of a rank."""

    nodes: int
    ranks_per_node: int
    batch_size: int
    compute: float
    threads: int = 1  # that read for a rank, where a way has several

    @property
    def ranks(self) -> int:
        """Processes that train."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True, kw_only=True)
class Load:
    """What an epoch reads, of the busiest rank and in all."""

    samples: int  # of the busiest rank
    units: int  # that it reads, each as a whole
    steps: int  # of every rank
    sample_nbytes: float
    nbytes: float  # of the dataset
    files: int


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way of reading, and what an epoch of it is predicted to cost.

    Attributes
    ----------
    name, words
        As `bench read` names it; what it does.
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
        What limits it: latency, stream, aggregate, spread, metadata, fast tier or compute.
    """

    name: str
    words: str
    io_seconds: float
    exposed_seconds: float
    later_seconds: float
    skew_seconds: float = 0.0
    slowest_seconds: float = 0.0
    utilisation: float
    limit: str


def excess(mean: float, sigma: float, ranks: int, hidden: float = 0.0) -> float:
    """Return by how much the slowest of `ranks` reads exceeds `hidden` seconds, on average.

    That is the integral of 1 - F(x)**ranks over x > hidden, of the lognormal F with this mean.

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
    taking_turns: bool = False  # as many at a time as the storage serves at full speed

    def latency(self, figures: StorageFigures) -> float:
        """Return the seconds of an event in which no byte comes."""
        at_once = min(self.threads, max(1.0, self.calls))
        return self.calls / at_once * figures.read_overhead

    def stream(self, figures: StorageFigures) -> float:
        """Return the seconds in which bytes come, if nobody else reads."""
        return self.nbytes / self.threads / figures.bytes_per_second(self.threads)

    def transfer(self, figures: StorageFigures) -> float:
        """Return the seconds in which bytes come while all read."""
        streams, total = self.streams * self.threads, figures.total_bytes_per_second
        if self.taking_turns:
            return max(self.stream(figures), self.nbytes * self.streams / (total or math.inf))
        return self.nbytes / self.threads / figures.bytes_per_second(streams)

    def seconds(self, figures: StorageFigures) -> float:
        """Return the seconds of an event, the mean."""
        return self.latency(figures) + self.transfer(figures)

    def sigma(self, figures: StorageFigures) -> float:
        """Return how wide the times of an event are: its reads, one after another, even out.

        A read larger than the one that was measured counts as several.
        """
        reads = max(1.0, self.calls, self.nbytes / (figures.spread_nbytes or math.inf))
        return math.sqrt(math.log1p(math.expm1(figures.sigma**2) / reads))


def way(name: str, events: Events, job: Job, load: Load, figures: StorageFigures) -> Way:
    """Return what a way of reading is predicted to cost; `events` are those of an epoch."""
    mean, sigma, count = events.seconds(figures), events.sigma(figures), events.count
    alone = excess(mean, sigma, 1, events.hidden)
    slowest = excess(mean, sigma, events.streams, events.hidden)
    opened = min(load.files, load.samples if name.startswith("sample") else load.units)
    opening = opened * events.streams / (figures.opens_per_second or math.inf)
    later, skew = count * alone, count * (slowest - alone)
    first = opening + (mean + (count - 1) * alone if events.hidden else count * mean)
    parts = {
        "latency": count * events.latency(figures),
        "stream": count * events.stream(figures),
        "aggregate": count * max(0.0, events.transfer(figures) - events.stream(figures)),
        "spread": skew,
        "metadata": opening,
    }
    compute = load.steps * job.compute
    utilisation = compute / (compute + later + skew)
    return Way(
        name=name,
        words=WORDS[name],
        io_seconds=count * mean,
        exposed_seconds=first,
        later_seconds=later,
        skew_seconds=skew,
        slowest_seconds=excess(mean, sigma, events.streams),
        utilisation=utilisation,
        limit="compute" if utilisation >= BUSY else max(parts, key=lambda part: parts[part]),
    )


WORDS = {
    "sample": "a sample per read, no overlap",
    "sample-prefetch": "the same, read ahead by threads",
    "group": "a group per read, no overlap",
    "group-db": "the same, double buffered",
    "dsprep": "dsprep.Reader with all threads",
    "lmdb-cursor": "LMDB by cursors: each node reads the whole file",
    "lmdbio-dm": "LMDBIO: jumps to its records, through mmap",
    "lmdbio-dio": "LMDBIO: and reads them by pread",
    "lmdbio-prov": "LMDBIO: offsets computed, a step of a node by one read",
    "lmdbio-coal": "LMDBIO: many steps by one read",
    "lmdbio-stag": "LMDBIO: readers take turns",
}
"""The ways of reading that have no fast tier, as `bench read` names them."""


def ways(job: Job, load: Load, figures: StorageFigures) -> list[Way]:
    """Return the ways of `WORDS`, each with its prediction."""
    ranks, nodes, steps, units = job.ranks, job.nodes, max(1, load.steps), max(1, load.units)
    step, share = load.samples / steps, load.nbytes / nodes
    in_step = step * load.sample_nbytes, ranks
    in_unit = load.samples / units * load.sample_nbytes, ranks
    each, blocks = share / steps, max(1, math.ceil(share / COALESCED))
    beside = steps * job.compute / units
    events = {
        "sample": Events(steps, step, *in_step),
        "sample-prefetch": Events(steps, step, *in_step, job.threads, job.compute),
        "group": Events(units, 1, *in_unit),
        "group-db": Events(units, 1, *in_unit, 1, beside),
        "dsprep": Events(units, 1, *in_unit, job.threads, beside),
        "lmdb-cursor": Events(steps, 0, load.nbytes / steps, nodes),
        "lmdbio-dm": Events(steps, MAPPED, MAPPED * each, nodes),
        "lmdbio-dio": Events(steps, 1 / SEEKING, each / SEEKING, nodes),
        "lmdbio-prov": Events(steps, 1, each, nodes),
        "lmdbio-coal": Events(blocks, 1, share / blocks, nodes),
        "lmdbio-stag": Events(blocks, 1, share / blocks, nodes, taking_turns=True),
    }
    return [way(name, each, job, load, figures) for name, each in events.items()]


def enough(job: Job, load: Load, figures: StorageFigures) -> float | None:
    """Return the samples of the smallest group whose read is hidden by its steps, or None.

    Of B samples: overhead + B s / w <= B / M * compute.
    """
    per_sample = load.sample_nbytes / figures.bytes_per_second(job.ranks)
    spare = job.compute / job.batch_size - per_sample
    return max(1.0, figures.read_overhead / spare) if spare > 0 else None


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


def copy_seconds(nbytes: float, streams: int, figures: StorageFigures) -> float:
    """Return how long so many streams take to read that many bytes, together."""
    return nbytes / streams / figures.bytes_per_second(streams)
