"""`dsprep.Reader`, as a training script would use it, on repacked data or on the data as stored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from dsprep.bench.strategies.base import Strategy
from dsprep.bench.task import Task
from dsprep.errors import UsageError
from dsprep.reader.loader import Reader


def buffer_size(task: Task) -> str | None:
    """Return what a Reader gets as the bytes to read at a time."""
    return None if task.buffer_nbytes is None else f"{task.buffer_nbytes}B"


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

    def prepare(self, held: ExitStack) -> None:
        """Read the sidecar."""
        arguments = self.arguments()
        self._reader = Reader(self.task.path, self.task.batch_size, **arguments)
        held.callback(self._reader.close)
        choice = self._reader.choice
        if choice.engine != arguments["engine"]:  # figures would be of another engine
            raise UsageError(f"the engine does not work here: {choice.why}")

    def epoch(self, number: int) -> Iterator[Any]:
        """Return the Reader's own iterator: nothing stands between it and the loop."""
        self._reader.set_epoch(number)
        return iter(self._reader)


class Provenance(DsprepReader):
    """`Reader` over a dataset that was not repacked, at the extents that its sidecar gives.

    All samples are shuffled. What is read at a time, `Task.buffer_nbytes`, are samples from all
    over the dataset, in the order in which they are stored.
    """

    def arguments(self) -> dict[str, Any]:
        """Return how the Reader is made."""
        return {**super().arguments(), "shuffle": "global", "data": self.task.data}
