"""Statistics of a reader: samples, bytes, reads, and the time that the consumer waited."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class EpochStats:
    """Statistics of one rank in one epoch.

    Attributes
    ----------
    epoch
        Its number.
    samples, batches
        Delivered.
    units
        Groups, or ranges of samples, that were read.
    reads
        Read calls.
    nbytes
        Bytes that they asked for.
    io_seconds
        Time spent in reads and in what belongs to them, added up over the threads.
    exposed_seconds
        Time that the consumer waited for data.
    first_seconds
        The part of it before the first batch.
    cache_nbytes, cache_units
        The part of `nbytes`, and of `units`, that came from the cache; the rest came from the
        dataset itself.
    copied_nbytes
        Bytes of the dataset that this process copied to the cache meanwhile.
    stall_seconds
        Time that was waited for what is copied to the cache. The consumer waits for as much of it
        as is not hidden by what has been read ahead: `exposed_seconds`.
    """

    epoch: int
    samples: int = 0
    batches: int = 0
    units: int = 0
    reads: int = 0
    nbytes: int = 0
    io_seconds: float = 0.0
    exposed_seconds: float = 0.0
    first_seconds: float = 0.0
    cache_nbytes: int = 0
    cache_units: int = 0
    copied_nbytes: int = 0
    stall_seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)


KEPT = 1000
"""Epochs that are remembered one by one."""


class Ledger:
    """The statistics of a reader, epoch by epoch; threads add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epochs: dict[int, EpochStats] = {}

    def add(self, epoch: int, **more: float) -> None:
        """Add to some numbers of an epoch."""
        with self._lock:
            stats = self._of(epoch)
            for name, value in more.items():
                setattr(stats, name, getattr(stats, name) + value)

    def delivered(self, epoch: int, samples: int, waited: float, first: bool) -> None:
        """Add a batch, for which the consumer waited some seconds."""
        with self._lock:
            stats = self._of(epoch)
            stats.samples += samples
            stats.batches += 1
            stats.exposed_seconds += waited
            if first:
                stats.first_seconds += waited

    def _of(self, epoch: int) -> EpochStats:
        stats = self._epochs.get(epoch)
        if stats is None:
            stats = self._epochs[epoch] = EpochStats(epoch)
            if len(self._epochs) > KEPT:
                del self._epochs[next(iter(self._epochs))]
        return stats

    def take(self) -> list[EpochStats]:
        """Return the epochs so far, and forget them."""
        with self._lock:
            stats, self._epochs = list(self._epochs.values()), {}
        return stats

    def epochs(self) -> list[EpochStats]:
        """Return the epochs so far, the last ones if there were very many."""
        with self._lock:
            return [EpochStats(**asdict(s)) for s in self._epochs.values()]
