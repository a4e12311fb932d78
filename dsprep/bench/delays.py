"""An imitated storage: every read of a strategy ends as late as it would there.

A read takes the latency of a call and the time of its bytes in a stream; all reads of a rank share
its part of what all streams together get. What the storage here takes is a part of that time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from typing_extensions import override

from dsprep.bench.task import Task
from dsprep.planning.published import parse_storage
from dsprep.reader.engines import Engine
from dsprep.storage.base import Handle
from dsprep.storage.scatter import Runs

Delay: TypeAlias = Callable[[int, int], None]
"""Called after bytes were read, with their number and that of the calls."""


def delay_of(task: Task) -> Delay:
    """Return what delays the reads of a task; without an imitated storage it does nothing."""
    if task.storage is None:
        return lambda nbytes, calls: None
    figures, lock, free = parse_storage(task.storage), threading.Lock(), 0.0
    total = figures.total_bytes_per_second
    seconds = task.world_size / total if total else 0.0  # of a byte, where all streams are busy

    def delay(nbytes: int, calls: int) -> None:
        nonlocal free
        until = time.monotonic() + calls * figures.alone(nbytes / max(1, calls))
        with lock:
            free = max(free, time.monotonic()) + nbytes * seconds
            until = max(until, free)
        time.sleep(max(0.0, until - time.monotonic()))

    return delay


class DelayedEngine(Engine):
    """Reads by another engine, and late, but for copies on a fast tier."""

    def __init__(self, engine: Engine, task: Task) -> None:
        self._engine, self._delay, self.name = engine, delay_of(task), engine.name

    @override
    def prepare(self, file: Handle) -> None:
        self._engine.prepare(file)

    @override
    def read_runs(self, file: Handle, runs: Runs) -> tuple[int, int]:
        calls, nbytes = self._engine.read_runs(file, runs)
        if file.original is None:
            self._delay(nbytes, calls)
        return calls, nbytes
