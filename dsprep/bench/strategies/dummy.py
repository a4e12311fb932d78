"""No reading: what a step costs by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from dsprep.bench.strategies.base import Strategy


class Dummy(Strategy):
    """Nothing is read, as with the dummy data of SC18's CosmoFlow: what is left is not I/O."""

    delivers: ClassVar[bool] = False

    def open(self) -> None:
        """Open nothing."""

    def epoch(self, number: int) -> Iterator[Any]:
        """Yield the number of samples of each step."""
        for indices in self.task.batches(number):
            yield len(indices)

    def size(self, item: Any) -> int:
        """Return the samples of a step."""
        return int(item)

    def close(self) -> None:
        """Close nothing."""
