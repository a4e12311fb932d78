"""A group per read, with and without overlap: "Async I/O" and "Async I/O (DB)".

Source: Lee et al., "Asynchronous I/O Strategy for Large-Scale Deep Learning Applications".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np

from dsprep.bench.strategies.base import Strategy
from dsprep.bench.strategies.dsprep_reader import DsprepReader, buffer_size
from dsprep.reader.engines import make
from dsprep.reader.filling import Filler
from dsprep.reader.ledger import Ledger
from dsprep.reader.order import Assignment, EpochSegment, Start
from dsprep.reader.pipeline import Pipeline, Pools, Settings, Steps
from dsprep.reader.units import cut_units
from dsprep.sidecar.sidecar import Sidecar


class Group(Strategy):
    """Groups shuffled, each read as a whole once its first sample is needed; no overlap.

    A `Reader` with one buffer is not that: it has room for two batches more than a unit, so that
    the next unit begins to be read while the last batches are used.
    """

    def prepare(self, resources: ExitStack) -> None:
        """Read the sidecar, and find out how samples are assigned."""
        task = self.task
        sidecar = resources.enter_context(Sidecar.open(task.path))
        edges, _, mixed = cut_units(sidecar, sidecar.schema, "group", buffer_size(task), None)
        self._assignment = Assignment(
            edges, "group", task.seed, mixed, "ragged", task.world_size, task.batch_size
        )
        capacity = min(task.batch_size, max(1, len(sidecar)))
        self._filler = Filler(sidecar, sidecar.schema.names, capacity)
        self._settings = Settings(
            engine=make("buffered"),
            threads=1,
            buffers=1,
            unit_samples=int(np.diff(edges).max(initial=1)) * mixed,
            transfer=task.transfer_size,
            ahead=False,
        )
        self._pools = Pools(self._filler, self._settings)
        self._running = resources.enter_context(ExitStack())

    def epoch(self, number: int) -> Iterator[Any]:
        """Yield the batches, in the order of the Reader."""
        leg = self._assignment.leg(self.task.rank, Start(number, (), 0, 1))
        self._running.close()
        ledger = Ledger()

        def legs() -> Iterator[EpochSegment]:
            return iter((leg,))

        pipeline = Pipeline(self._filler, legs, self._settings, self._pools, ledger)
        running = Steps(pipeline, legs, ledger)
        self._running.callback(running.close)
        try:
            for _, _, batch in running.batches():
                yield batch
                del batch
        finally:
            running.close()


class GroupDb(DsprepReader):
    """`Reader` with two buffers and one thread: one is read into while the other one is used."""

    def arguments(self) -> dict[str, Any]:
        """Return how the Reader is made."""
        return {**super().arguments(), "buffers": 2, "io_threads": 1, "engine": "buffered"}
