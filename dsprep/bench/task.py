"""The settings of a benchmark, the task of one of its processes, and the measures of that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dsprep.bench.counters import Counters
from dsprep.core.schema import Ints, Schema
from dsprep.core.units import parse_seconds
from dsprep.errors import UsageError, require
from dsprep.formats.options import OpenOptions


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The conditions of all runs of a benchmark."""

    batch_size: int = 32  # samples per step and rank
    ranks: int = 1  # processes that read together, meeting after every step
    compute: str = "none"  # time of a step beside reading; see `step_seconds`
    cold: bool = True  # whether the data are dropped from the page cache before each epoch
    storage: str | None = None  # imitated by delays; as `parse_storage` takes it
    baseline: str | None = None  # the strategy by which the dataset is read today
    repeat: int = 3  # runs of each strategy, in new processes
    epochs: int = 1  # epochs of a run that are measured
    seed: int = 0  # of the order
    buffer_size: str | None = None  # of groups: samples, bytes ("64MiB"), None: as the data are
    transfer_size: int | None = None  # bytes of one read call at most; None: all at once
    threads: int | None = None  # None: as many as the Reader takes with as many ranks
    buffers: int = 2  # groups in memory at a time, where the strategy double-buffers
    engine: str = "buffered"  # of the `Reader` and of the limit; see `dsprep.reader.engines`
    stagger: int = 1  # readers that read at a time, where the strategy staggers
    readers_per_node: int = 1  # processes that read for all, where the strategy has such
    tier: Path | None = None  # a directory of the fast tier, where the strategy has a cache
    tier_size: str | None = None  # bytes of the cache there, as `dsprep.Reader` takes them
    mini_epochs: int = 8  # parts of an epoch, where the strategy passes parts
    repeats: int = 1  # passes of each

    @property
    def step_seconds(self) -> float:
        """Seconds of a step beside reading, without using the processor: of ``12ms``, ``none``."""
        seconds = 0.0 if self.compute == "none" else parse_seconds(self.compute)
        where, expected = f"--compute {self.compute}", "an hour at most"
        require(seconds <= 3600, UsageError, f"{where} makes no sense", expected=expected)
        return seconds


@dataclass(frozen=True, kw_only=True)
class Task(Settings):
    """One rank of one run of one strategy."""

    strategy: str  # its name
    path: Path  # the dataset in the form that the strategy needs, or its sidecar
    schema: Schema  # its fields, as every strategy has to deliver them
    samples: int  # of the dataset
    cold: bool = False
    warmup: int = 0  # epochs before those that are measured
    threads: int = 1  # threads or worker processes that read, where the strategy has some
    data: Path | None = None  # the dataset, where `path` is a sidecar that is not beside it
    files: tuple[str | Path, ...] = ()  # the dataset as the user names it
    reading: OpenOptions = field(default_factory=OpenOptions)  # and how it is read
    numbers: Ints | None = None  # the samples that are taken where `path` has more; None: all
    of: int = 0  # samples of the dataset
    rank: int = 0  # which process this is, of `world_size`
    world_size: int = 1
    buffer_nbytes: int | None = None  # bytes that are read at a time; None: one group as stored
    everywhere: bool = False  # whether ranks are on several nodes, and each drops the files
    opening: int = 0  # which time it is that this is opened, from 1 on
    key: str = ""  # what the processes of this run have in common, and no others
    drop: tuple[Path, ...] = ()  # the files that a cold run drops from the page cache

    @property
    def stored_nbytes(self) -> int:
        """Bytes of the files that the samples take, if all are of one size."""
        nbytes = sum(p.stat().st_size for p in self.drop)
        is_part = self.numbers is not None and len(self.numbers) > 0
        return nbytes * self.samples // max(self.of, 1) if is_part else nbytes

    @property
    def tier_folder(self) -> Path | None:
        """The directory for what this run keeps on the fast tier."""
        return None if self.tier is None else self.tier / f"dsprep-{self.key}"

    @property
    def own_folder(self) -> Path:
        """The part of it that is of one opening alone."""
        assert self.tier_folder is not None, "there is a fast tier"
        return self.tier_folder / str(self.opening)

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
class Drawn:
    """The tiers that the bytes of an epoch came from."""

    read: int  # bytes for batches
    cached: int  # the part of them that came from the fast tier; the rest from the capacity tier
    copied: int  # bytes copied from the capacity tier to the fast one
    stalled: float  # seconds that were waited for what is copied, hidden or not


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One measured epoch of one rank."""

    samples: int  # delivered
    seconds: float  # from the first step until after the last one
    waits: tuple[float, ...]  # seconds until each batch had come, and the end
    computing: float  # seconds of the steps' own work
    skew: float  # seconds that this rank waited for others at the end of steps
    counters: Counters  # what the kernel counted
    excess: bool = False  # whether there were more batches than steps
    resident: float | None = None  # share of the files in the page cache before; None: unknown
    drawn: Drawn | None = None  # where tiers of storage are measured

    @property
    def exposed(self) -> float:
        """Seconds that the consumer waited for data."""
        return sum(self.waits)


@dataclass(frozen=True, kw_only=True)
class Result:
    """The measures of one rank in one run of a strategy."""

    epochs: tuple[Epoch, ...]  # those that were measured
    peak_rss: int  # bytes of memory of its processes at their peaks
    full: int | None = None  # the sum over one more epoch; None if there was none
    checked: int = 0  # samples of that epoch


@dataclass(frozen=True)
class Failure:
    """The reason why a run gave no result."""

    reason: str
