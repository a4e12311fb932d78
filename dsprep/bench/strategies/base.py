"""The contract of a way of reading: a function that opens it, given a task; see `Way`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from dsprep.bench.task import Drawn, Task
from dsprep.core.schema import Batch


@dataclass(frozen=True)
class Way:
    """A way of reading that is open, in a process of its own.

    `epoch` yields one item per step: at most ``task.batch_size`` samples in memory, with all
    fields. Over all ranks every sample comes exactly once, or ``task.repeats`` times where parts
    are passed so often. What is yielded is what a training step would take, in the form that is
    natural for the way of reading: copied out of files, decoded and stacked, but not converted any
    further. Epochs of other numbers have another order, if the way shuffles.
    """

    epoch: Callable[[int], Iterator[Any]]
    # the samples in an item, at once
    size: Callable[[Any], int] = lambda item: len(next(iter(item.values())))
    batch: Callable[[Any], Batch] = lambda item: item  # as dsprep's batches are; not timed
    steps: Callable[[int], int] | None = None  # of an epoch; None: the task's
    drawn: Callable[[int], Drawn | None] | None = None  # the tiers that an epoch came from


Opener: TypeAlias = Callable[[Task, ExitStack], Way]
"""Opens a way of reading, whose files the stack will close; no samples are read yet."""


class Strategy:
    """A way of reading that can be opened and closed again and again.

    Cold runs close and open it before each epoch, so that nothing of the dataset stays mapped.
    """

    def __init__(self, task: Task, opener: Opener) -> None:
        self.task, self._opener = task, opener
        self._way: Way | None = None
        self._running: Any = None
        self._resources = ExitStack()

    @property
    def way(self) -> Way:
        """The way of reading, which is open."""
        assert self._way is not None, "open comes first"
        return self._way

    def open(self) -> None:
        """Open files; what was open is closed first."""
        self.close()
        self.task = replace(self.task, opening=self.task.opening + 1)
        with ExitStack() as resources:
            self._way = self._opener(self.task, resources)
            self._resources = resources.pop_all()

    def epoch(self, number: int) -> Iterator[Any]:
        """Return the items of an epoch."""
        self._running = iter(self.way.epoch(number))
        return self._running  # type: ignore[no-any-return]

    def close(self) -> None:
        """Forget all that was opened, and close it; may be called twice."""
        if (end := getattr(self._running, "close", None)) is not None:
            end()
        self._running = self._way = None
        self._resources.close()


def iterated(loader: Any) -> Iterator[Any]:
    """Yield what another project's loader gives, whose iterator ends with this one."""
    batches = iter(loader)
    while (item := next(batches, None)) is not None:
        yield item
