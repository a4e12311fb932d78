"""The contract of a way of reading: `Strategy`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from dsprep.bench.task import Task
from dsprep.core.schema import Batch


class Strategy(ABC):
    """One way of reading a dataset, in a process of its own.

    The process calls `open`, then for every epoch `epoch`, and at last `close`; in cold runs it
    closes and opens anew before each epoch, so that nothing of the dataset stays mapped.

    Parameters
    ----------
    task
        What to read, and how.

    Attributes
    ----------
    delivers
        Whether there are samples in the items at all; the limit and the run without any reading
        have none, and are not checked.
    """

    delivers: ClassVar[bool] = True

    def __init__(self, task: Task) -> None:
        self.task = task

    @abstractmethod
    def open(self) -> None:
        """Open files; do not read samples yet, nor start to."""

    @abstractmethod
    def epoch(self, number: int) -> Iterator[Any]:
        """Yield one item per step: at most ``task.batch_size`` samples in memory, with all fields.

        Over all ranks every sample comes exactly once; there are at most ``task.steps`` items.
        What is yielded is what a training step would take, in the form that is natural for the
        way of reading: copied out of files, decoded and stacked, but not converted any further.
        Epochs of other numbers have another order, if the strategy shuffles.
        """

    @abstractmethod
    def size(self, item: Any) -> int:
        """Return the samples in an item, at once."""

    def batch(self, item: Any) -> Batch:
        """Return an item as dsprep's batches are: field name to array or `Ragged`; not timed."""
        return item  # type: ignore[no-any-return]

    @abstractmethod
    def close(self) -> None:
        """Close all; end threads and processes. May be called twice."""
