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
    """What all runs of a benchmark have in common."""

    batch_size: int = 32  # samples per step and rank
    seed: int = 0  # of the order
    epochs: int = 1  # epochs of a run that are measured
    buffers: int = 2  # groups in memory at a time, where the strategy double-buffers
    stagger: int = 1  # readers that read at a time, where the strategy staggers
    readers_per_node: int = 1  # processes that read for all, where the strategy has such
    # of the `Reader` and of the limit: `"buffered"`, `"direct"`, `"mapped"`
    engine: str = "buffered"
    compute: str = "none"  # what a step does with its batch; see `dsprep.bench.computing`
    cold: bool = False  # whether the data are dropped from the page cache before each epoch
    # whether all is read once before the first cold epoch, for the server to have it in memory
    warm_server: bool = False
    # the command that drops the cache of the server before each cold epoch
    evict_server: str | None = None
    # whether all that is delivered is summed up, in one more epoch that is not measured
    check: bool = True


@dataclass(frozen=True, kw_only=True)
class Task(Conditions):
    """One rank of one run of one strategy."""

    strategy: str  # its name
    path: Path  # the dataset in the form that the strategy needs, or its sidecar
    schema: Schema  # its fields, as every strategy has to deliver them
    samples: int  # of the dataset
    data: Path | None = None  # the dataset, where `path` is a sidecar that is not beside it
    # rank, world_size: which process this is, of how many
    rank: int = 0
    world_size: int = 1
    warmup: int = 0  # epochs before those that are measured
    threads: int = 1  # threads or worker processes that read, where the strategy has some
    # bytes that a group-wise strategy reads at a time; None: one group as stored
    buffer_nbytes: int | None = None
    transfer_size: int | None = None  # bytes of one read call at most; None: all at once
    # whether every rank drops the files: where ranks are on several nodes; else the first does
    everywhere: bool = False
    key: str = ""  # what the processes of this run have in common, and no others
    drop: tuple[Path, ...] = ()  # the files that a cold run drops from the page cache

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
    """One measured epoch of one rank."""

    samples: int  # delivered
    # from the first step until after the last one, without the time that checking took
    seconds: float
    # seconds that the consumer waited for the batch of each step, and for the end
    waits: tuple[float, ...]
    computing: float  # seconds of the steps' own work
    skew: float  # seconds that this rank waited for others at the end of steps
    counters: Counters  # what the kernel counted
    light: int | None  # the light sum of what was delivered; None where nothing is
    excess: bool = False  # whether there were more batches than steps
    # what shows whether the epoch was cold, or could be warm; None if nobody looked
    seen: Seen | None = None

    @property
    def exposed(self) -> float:
        """Seconds that the consumer waited for data."""
        return sum(self.waits)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one rank did in one run of a strategy."""

    epochs: tuple[Epoch, ...]  # those that were measured
    peak_rss: int  # bytes of memory of its processes at their peaks
    full: int | None = None  # the full sum over one more epoch; None if there was none
    checked: int = 0  # samples of that epoch


@dataclass(frozen=True)
class Failure:
    """Why a run gave no result."""

    reason: str
