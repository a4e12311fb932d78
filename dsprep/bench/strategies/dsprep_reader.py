"""`dsprep.Reader`, as a training script would use it, on repacked data or on the data as stored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from dsprep.bench.strategies.base import Strategy
from dsprep.bench.task import Drawn, Task
from dsprep.cache.copier import Throttle
from dsprep.core.units import parse_rate
from dsprep.errors import UsageError
from dsprep.reader.cached import CacheOptions
from dsprep.reader.loader import Reader
from dsprep.reader.pipeline import Settings


def buffer_size(task: Task) -> str | None:
    """Return what a Reader gets as the bytes to read at a time."""
    return None if task.buffer_nbytes is None else f"{task.buffer_nbytes}B"


class ThrottledReader(Reader):
    """A Reader of storage that gives so many bytes per second.

    What is copied to a cache, and what is read past it, share them.
    """

    def __init__(self, *arguments: Any, bandwidth: float, **more: Any) -> None:
        self._throttle = Throttle(bandwidth)
        super().__init__(*arguments, **more)

    def cache_options(self, threads: int) -> CacheOptions | None:
        """Return the options of the cache, with this throttle."""
        options = super().cache_options(threads)
        return None if options is None else replace(options, throttle=self._throttle)

    def _reading(self, comm: Any) -> Settings:
        return replace(super()._reading(comm), drawn=self._throttle.take)


class DsprepReader(Strategy):
    """`Reader` over a repacked dataset: groups and samples shuffled, read ahead by threads."""

    def arguments(self) -> dict[str, Any]:
        """Return how the Reader is made, but for dataset and batch size."""
        task = self.task
        return {
            "buffer_size": buffer_size(task),
            "seed": task.seed,
            "rank": task.rank,
            "world_size": task.world_size,
            "epochs": 1,
            "shuffle": "group",
            "buffers": None if task.buffers == Task.buffers else task.buffers,
            "io_threads": task.threads,
            "transfer_size": task.transfer_size,
            "engine": task.engine,
        }

    def prepare(self, resources: ExitStack) -> None:
        """Read the sidecar."""
        arguments, task = self.arguments(), self.task
        if task.tier_bandwidth is None:
            self._reader = Reader(task.path, task.batch_size, **arguments)
        else:
            rate = parse_rate(task.tier_bandwidth)
            self._reader = ThrottledReader(task.path, task.batch_size, bandwidth=rate, **arguments)
        resources.callback(self._reader.close)
        choice = self._reader.choice
        if choice.engine != arguments["engine"]:  # figures would be of another engine
            raise UsageError(f"the engine does not work here: {choice.why}")

    def epoch(self, number: int) -> Iterator[Any]:
        """Return the Reader's own iterator: nothing stands between it and the loop."""
        self._reader.set_epoch(number)
        return iter(self._reader)

    def passes(self, number: int) -> range:
        """Return the numbers that the Reader counts in an epoch."""
        return range(number, number + 1)

    def drawn(self, number: int) -> Drawn | None:
        """Return what the Reader counted, where there are tiers."""
        if self.task.tier is None and self.task.tier_bandwidth is None:
            return None
        passes = self.passes(number)
        stats = [s for s in self._reader.stats if s.epoch in passes]
        return Drawn(
            read=sum(s.nbytes for s in stats),
            cached=sum(s.cache_nbytes for s in stats),
            copied=sum(s.copied_nbytes for s in stats),
            stalled=sum(s.stall_seconds for s in stats),
        )


class Provenance(DsprepReader):
    """`Reader` over a dataset that was not repacked, at the extents that its sidecar gives.

    All samples are shuffled. What is read at a time, `Task.buffer_nbytes`, are samples from all
    over the dataset, in the order in which they are stored.
    """

    def arguments(self) -> dict[str, Any]:
        """Return how the Reader is made."""
        task = self.task
        in_place = {"data": task.data, "subset": task.numbers}
        return {**super().arguments(), "shuffle": "global", **in_place}
