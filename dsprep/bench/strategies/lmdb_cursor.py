"""py-lmdb cursors, strided by rank, as Caffe reads LMDB (Pumma et al., Section 2).

Each rank walks ``rank * batch_size`` records from the first one on. Then, in every step, it reads
``batch_size`` records and steps over the ``(ranks - 1) * batch_size`` of the others, one by one: a
cursor cannot jump to a number. So all ranks together read the records in their order, a block of
``ranks * batch_size`` a step. Nothing is shuffled. Caffe goes round in a ring; a new epoch that
walks to its first record again costs as many steps of the cursor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dsprep.bench.strategies.base import Strategy
from dsprep.bench.strategies.lmdb_get import Environment


class LmdbCursor(Strategy):
    """What LMDBIO's authors measured first; the kernel reads ahead, as it does for Caffe."""

    _env: Environment | None = None

    def open(self) -> None:
        """Open the environment."""
        self._env = Environment(self.task, readahead=True)

    def epoch(self, number: int) -> Iterator[Any]:
        """Yield each step's records, those of every epoch in the same order."""
        env = self._env
        assert env is not None  # between open and close
        each, others = self.task.batch_size, self.task.world_size - 1
        with env.txn.cursor() as cursor:
            there = cursor.first() and _walk(cursor, self.task.rank * each)
            while there:
                records = [cursor.value()]
                while (there := cursor.next()) and len(records) < each:
                    records.append(cursor.value())
                yield env.decoded(records)
                there = there and _walk(cursor, others * each)

    def size(self, item: Any) -> int:
        """Return the samples of a step."""
        return len(next(iter(item.values())))

    def close(self) -> None:
        """Close the environment."""
        if self._env is not None:
            self._env.close()
        self._env = None


def _walk(cursor: Any, count: int) -> bool:
    """Step over `count` records; return whether there is one behind."""
    return all(cursor.next() for _ in range(count))
