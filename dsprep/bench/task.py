"""What one process of a benchmark is to run, and what it measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dsprep.bench.counters import Counters
from dsprep.bench.evidence import Seen
from dsprep.core.schema import Ints, Schema


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What all runs of a benchmark have in common.

    Attributes
    ----------
    batch_size
        Samples per step and rank.
    seed
        Of the order.
    epochs
        Epochs of a run that are measured.
    buffers
        Groups in memory at a time, where the strategy double-buffers.
    stagger
        Readers that read at a time, where the strategy staggers.
    readers_per_node
        Processes that read for all, where the strategy has such.
    engine
        Of the `Reader` and of the limit: ``"buffered"``, ``"direct"``, ``"mapped"``.
    compute
        What a step does with its batch; see `dsprep.bench.computing`.
    cold
        Whether the data are dropped from the page cache before each epoch.
    warm_server
        Whether all is read once before the first cold epoch, for the server to have it in memory.
    evict_server
        The command that drops the cache of the server before each cold epoch.
    check
        Whether all that is delivered is summed up, in one more epoch that is not measured.
    """

    batch_size: int = 32
    seed: int = 0
    epochs: int = 1
    buffers: int = 2
    stagger: int = 1
    readers_per_node: int = 1
    engine: str = "buffered"
    compute: str = "none"
    cold: bool = False
    warm_server: bool = False
    evict_server: str | None = None
    check: bool = True


@dataclass(frozen=True, kw_only=True)
class Task(Conditions):
    """One rank of one run of one strategy.

    Attributes
    ----------
    strategy
        Its name.
    path
        The dataset in the form that the strategy needs, or its sidecar.
    data
        The dataset, where `path` is a sidecar that is not beside it.
    schema
        Its fields, as every strategy has to deliver them.
    samples
        Of the dataset.
    rank, world_size
        Which process this is, of how many.
    warmup
        Epochs before those that are measured.
    threads
        Threads or worker processes that read, where the strategy has some.
    buffer_nbytes
        Bytes that a group-wise strategy reads at a time; None: one group as stored.
    transfer_size
        Bytes of one read call at most; None: all at once.
    everywhere
        Whether every rank drops the files: where ranks are on several nodes; else the first does.
    key
        What the processes of this run have in common, and no others.
    drop
        The files that a cold run drops from the page cache.
    """

    strategy: str
    path: Path
    schema: Schema
    samples: int
    data: Path | None = None
    rank: int = 0
    world_size: int = 1
    warmup: int = 0
    threads: int = 1
    buffer_nbytes: int | None = None
    transfer_size: int | None = None
    everywhere: bool = False
    key: str = ""
    drop: tuple[Path, ...] = ()

    @property
    def steps(self) -> int:
        """Steps of an epoch, the same on every rank."""
        each = -(-self.samples // self.world_size)
        return -(-each // self.batch_size)

    def share(self, epoch: int) -> Ints:
        """Return the samples of this rank in an epoch, in shuffled order."""
        order = np.random.default_rng([self.seed, epoch]).permutation(self.samples)
        return order[self.rank :: self.world_size].astype(np.int64)

    def batches(self, epoch: int) -> Iterator[Ints]:
        """Yield the samples of each step of this rank, shuffled; the last ones may be fewer."""
        share = self.share(epoch)
        for at in range(0, len(share), self.batch_size):
            yield share[at : at + self.batch_size]


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One measured epoch of one rank.

    Attributes
    ----------
    samples
        Delivered.
    seconds
        From the first step until after the last one, without the time that checking took.
    waits
        Seconds that the consumer waited for the batch of each step, and for the end.
    computing
        Seconds of the steps' own work.
    skew
        Seconds that this rank waited for others at the end of steps.
    counters
        What the kernel counted.
    light
        The light sum of what was delivered; None where nothing is.
    excess
        Whether there were more batches than steps.
    seen
        What shows whether the epoch was cold, or could be warm; None if nobody looked.
    """

    samples: int
    seconds: float
    waits: tuple[float, ...]
    computing: float
    skew: float
    counters: Counters
    light: int | None
    excess: bool = False
    seen: Seen | None = None

    @property
    def exposed(self) -> float:
        """Seconds that the consumer waited for data."""
        return sum(self.waits)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one rank did in one run of a strategy.

    Attributes
    ----------
    epochs
        Those that were measured.
    peak_rss
        Bytes of memory of its processes at their peaks.
    full
        The full sum over one more epoch; None if there was none.
    checked
        Samples of that epoch.
    """

    epochs: tuple[Epoch, ...]
    peak_rss: int
    full: int | None = None
    checked: int = 0


@dataclass(frozen=True)
class Failure:
    """Why a run gave no result."""

    reason: str
