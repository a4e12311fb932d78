"""The contract of a way of reading: `Strategy`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, ClassVar

from dsprep.bench.task import Drawn, Task
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

    # Whether there are samples in the items at all; the limit and the run without any reading have
    # none, and are not checked.
    delivers: ClassVar[bool] = True

    # Whether all samples have to come; a loader of the user's own may leave some out.
    counted: ClassVar[bool] = True

    # Whether it is opened anew before each epoch, also where the page cache is left as it is.
    anew: ClassVar[bool] = False

    def __init__(self, task: Task) -> None:
        self.task, self.opened = task, 0  # how often it was opened
        self._resources = ExitStack()

    def open(self) -> None:
        """Open files; what was open is closed first."""
        self.close()
        self.opened += 1
        with ExitStack() as resources:
            self.prepare(resources)
            self._resources = resources.pop_all()

    @abstractmethod
    def prepare(self, resources: ExitStack) -> None:
        """Open files, which `resources` will close; do not read samples yet, nor start to."""

    @abstractmethod
    def epoch(self, number: int) -> Iterator[Any]:
        """Yield one item per step: at most ``task.batch_size`` samples in memory, with all fields.

        Over all ranks every sample comes exactly once, or ``task.repeats`` times where parts are
        passed so often; there are at most `steps` items.
        What is yielded is what a training step would take, in the form that is natural for the
        way of reading: copied out of files, decoded and stacked, but not converted any further.
        Epochs of other numbers have another order, if the strategy shuffles.
        """

    def steps(self, number: int) -> int:
        """Return the steps of an epoch, the same on every rank."""
        return self.task.steps

    def drawn(self, number: int) -> Drawn | None:
        """Return from which tiers an epoch came that has just ended; None: that is not counted."""
        return None

    def size(self, item: Any) -> int:
        """Return the number of samples in an item, at once."""
        return len(next(iter(item.values())))

    def batch(self, item: Any) -> Batch:
        """Return an item as dsprep's batches are: field name to array or `Ragged`; not timed."""
        return item  # type: ignore[no-any-return]

    def clear(self) -> None:
        """Remove what is no longer needed, once all ranks have closed it."""
        return

    def close(self) -> None:
        """Forget all that `prepare` made, and close it; may be called twice."""
        resources, kept = self._resources, {"task": self.task, "opened": self.opened}
        vars(self).clear()
        vars(self).update(kept, _resources=ExitStack())
        resources.close()


class Loader(Strategy):
    """A strategy whose items are those of another project's loader; it ends with its references."""

    loader: Any = None  # made by `prepare`, iterated once per epoch
    batches: Any = None  # the iterator of this epoch, here for `close` to end even a running one

    def epoch(self, number: int) -> Iterator[Any]:
        """Yield the loader's own batches."""
        self.batches = iter(self.loader)
        while (item := next(self.batches, None)) is not None:
            yield item
