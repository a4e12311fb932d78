"""A group per read without overlap: "Async I/O"; with it, it is a Reader of two buffers.

Source: Lee et al., "Asynchronous I/O Strategy for Large-Scale Deep Learning Applications".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np

from dsprep.bench.delays import DelayedEngine
from dsprep.bench.strategies.base import Way
from dsprep.bench.strategies.dsprep_reader import buffer_size
from dsprep.bench.task import Task
from dsprep.reader.engines import make
from dsprep.reader.ledger import Ledger
from dsprep.reader.order import Assignment, EpochSegment, Start
from dsprep.reader.pipeline import Pipeline, PipelineSettings, Pools, Steps
from dsprep.reader.unit_plan import UnitPlanner
from dsprep.reader.units import cut_units
from dsprep.sidecar.sidecar import Sidecar


def open_group(task: Task, resources: ExitStack) -> Way:
    """Open groups that are shuffled, each read as a whole once its first sample is needed.

    A `Reader` with one buffer is not that: it has room for two batches more than a unit, so that
    the next unit begins to be read while the last batches are used.
    """
    sidecar = resources.enter_context(Sidecar.open(task.path))
    edges, _, mixed = cut_units(sidecar, sidecar.schema, "group", buffer_size(task), None)
    assignment = Assignment(
        edges, "group", task.seed, mixed, "ragged", task.world_size, task.batch_size
    )
    planner = UnitPlanner(sidecar, sidecar.schema.names, min(task.batch_size, max(1, len(sidecar))))
    settings = PipelineSettings(
        engine=DelayedEngine(make("buffered"), task),
        threads=1,
        buffers=1,
        unit_samples=int(np.diff(edges).max(initial=1)) * mixed,
        transfer=task.transfer_size,
        ahead=False,
    )
    pools = Pools(planner, settings)

    def epoch(number: int) -> Iterator[Any]:
        segment = assignment.segment(task.rank, Start(number, (), 0, 1))
        ledger = Ledger()

        def segments() -> Iterator[EpochSegment]:
            return iter((segment,))

        running = Steps(Pipeline(planner, segments, settings, pools, ledger), segments, ledger)
        try:
            for _, _, batch in running.batches():
                yield batch
                del batch
        finally:
            running.close()

    return Way(epoch)
