"""The contract of a way of reading: `Strategy`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from dsprep.bench.task import Task
from dsprep.core.schema import Batch


class Strategy(ABC):
    """One way of reading a dataset, in a process of its own.

    The process calls `open`, then `epoch` for every epoch, and `close` at the end; cold runs
    close and open again before each epoch, so that nothing of the dataset stays mapped.

    Parameters
    ----------
    task
        What to read, and how.
    """

    # whether there are samples in the items at all; the limit and the run without any reading
    # have none, and are not checked
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

    def size(self, item: Any) -> int:
        """Return the number of samples in an item, at once."""
        return len(next(iter(item.values())))

    def batch(self, item: Any) -> Batch:
        """Return an item as dsprep's batches are: field name to array or `Ragged`; not timed."""
        return item  # type: ignore[no-any-return]

    @abstractmethod
    def close(self) -> None:
        """Close all; end threads and processes. May be called twice."""


class Loader(Strategy):
    """A strategy whose items are those of another project's loader."""

    loader: Any = None  # made by `open`, iterated once per epoch
    # the iterator of this epoch. It is an attribute, so that `close` ends what works for it even
    # while an epoch is under way.
    batches: Any = None

    def epoch(self, number: int) -> Iterator[Any]:
        """Yield the loader's own batches."""
        self.batches = iter(self.loader)
        while (item := next(self.batches, None)) is not None:
            yield item

    def close(self) -> None:
        """End what reads: it goes with the last reference."""
        self.batches = self.loader = None
