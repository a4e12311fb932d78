"""py-lmdb: ``txn.get(key)`` in shuffled order, and cursors strided by rank as Caffe has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.bench.strategies.base import Strategy
from dsprep.core.schema import Batch, Ints
from dsprep.errors import FormatError
from dsprep.formats.lmdb.keys import Keys
from dsprep.formats.lmdb.values import Values


def opened(path: Path) -> Any:
    """Return an environment of py-lmdb, which only reads."""
    import lmdb

    return lmdb.open(str(path), subdir=path.is_dir(), readonly=True, lock=False, meminit=False)


class Records(Strategy):
    """An LMDB environment, with one read transaction for as long as it is open."""

    def prepare(self, resources: ExitStack) -> None:
        """Open the environment.

        Raises
        ------
        FormatError
            If it does not hold one record per sample.
        """
        self._values = Values(self.task.schema)
        env = resources.enter_context(opened(self.task.path))
        self.txn = resources.enter_context(env.begin(buffers=True))
        entries = int(env.stat()["entries"])
        if entries != self.task.samples:
            raise FormatError(
                "the environment does not hold a record per sample",
                where=self.task.path,
                expected=self.task.samples,
                found=entries,
            )

    def decoded(self, records: Sequence[Any]) -> Batch:
        """Return the samples of some records, copied out of the mapping."""
        lengths = np.fromiter(map(len, records), np.int64, len(records))
        if self._values.ragged:
            data = np.frombuffer(b"".join(records), np.uint8)
            return self._values.decode(data, lengths, self._label)
        self._values.check_lengths(lengths, self._label)
        batch: Batch = {}
        parts, at = [], 0
        for f in self._values.fixed:
            batch[f.name] = column = np.empty((len(records), *f.inner), f.dtype)
            if f.row_nbytes:
                rows = column.reshape(-1).view(np.uint8).reshape(-1, f.row_nbytes)
                parts.append((rows, at, f.row_nbytes))
                at += f.row_nbytes
        for i, record in enumerate(records):
            for rows, at, nbytes in parts:
                rows[i] = np.frombuffer(record, np.uint8, nbytes, at)
        return batch

    def _label(self, i: int) -> str:
        return f"{self.task.path}, record {i} of a batch"


class LmdbGet(Records):
    """Records by their keys, as a map-style dataset over LMDB does it."""

    _keys: Keys | list[bytes]

    def prepare(self, resources: ExitStack) -> None:
        """Open the environment and find its keys.

        If the first and the last one are decimal numbers of one width, as dsprep writes them,
        all others are computed. Otherwise a cursor walks over all of them, which reads every leaf
        of the tree.
        """
        super().prepare(resources)
        with self.txn.cursor() as cursor:
            first = bytes(cursor.key()) if cursor.first() else b""
            last = bytes(cursor.key()) if cursor.last() else b""
            numbers = Keys(b"", b"", len(first), b"0123456789")
            largest = self.task.samples - 1
            if (numbers.one(0), numbers.one(max(0, largest))) == (first, last):
                self._keys = numbers
            else:
                cursor.first()
                self._keys = [bytes(key) for key in cursor.iternext(keys=True, values=False)]

    def _keys_of(self, indices: Ints) -> list[bytes]:
        if isinstance(self._keys, list):
            return [self._keys[i] for i in indices.tolist()]
        width, made = self._keys.nbytes, self._keys.make(indices).tobytes()
        return [made[at : at + width] for at in range(0, len(made), width)]

    def epoch(self, number: int) -> Iterator[Any]:
        """Yield each step's samples, shuffled."""
        for indices in self.task.batches(number):
            get = self.txn.get
            records = [get(key) for key in self._keys_of(indices)]
            if None in records:
                missing = int(indices[records.index(None)])
                raise FormatError("a key is missing", where=f"{self.task.path}, sample {missing}")
            yield self.decoded(records)


class LmdbCursor(Records):
    """py-lmdb cursors, strided by rank, as Caffe reads LMDB (Pumma et al., Section 2).

    Each rank walks ``rank * batch_size`` records from the first one on. Then, in every step, it
    reads ``batch_size`` records and steps over the ``(ranks - 1) * batch_size`` of the others, one
    by one: a cursor cannot jump to a number. So all ranks together read the records in their order,
    a block of ``ranks * batch_size`` a step. Nothing is shuffled. Caffe goes round in a ring; a new
    epoch that walks to its first record again costs as many steps of the cursor.
    """

    def epoch(self, number: int) -> Iterator[Any]:
        """Yield each step's records, those of every epoch in the same order."""
        each, others = self.task.batch_size, self.task.world_size - 1
        with self.txn.cursor() as cursor:
            there = cursor.first() and _walk(cursor, self.task.rank * each)
            while there:
                records = [cursor.value()]
                while (there := cursor.next()) and len(records) < each:
                    records.append(cursor.value())
                yield self.decoded(records)
                there = there and _walk(cursor, others * each)


def _walk(cursor: Any, count: int) -> bool:
    """Step over `count` records; return whether there is one left."""
    return all(cursor.next() for _ in range(count))
