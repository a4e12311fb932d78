"""py-lmdb: ``txn.get(key)`` in shuffled order, and cursors strided by rank as Caffe has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.bench.delays import delay_of
from dsprep.bench.strategies.base import Way
from dsprep.bench.task import Task
from dsprep.core.schema import Batch, Ints
from dsprep.core.spans import offsets_of
from dsprep.errors import FormatError
from dsprep.formats.lmdb.keys import Keys
from dsprep.formats.lmdb.values import Values


def opened(path: Path) -> Any:
    """Return an environment of py-lmdb, which only reads."""
    import lmdb

    return lmdb.open(str(path), subdir=path.is_dir(), readonly=True, lock=False, meminit=False)


def _transaction(task: Task, resources: ExitStack) -> Any:
    """Return one read transaction, for as long as the environment is open.

    Raises
    ------
    FormatError
        If it does not hold one record per sample.
    """
    env = resources.enter_context(opened(task.path))
    entries = int(env.stat()["entries"])
    if entries != task.samples:
        raise FormatError(
            "the environment does not hold a record per sample",
            where=task.path,
            expected=task.samples,
            found=entries,
        )
    return resources.enter_context(env.begin(buffers=True))


def _decoder(task: Task) -> Callable[[Sequence[Any]], Batch]:
    """Return what copies the samples of some records out of the mapping."""
    values, delay = Values(task.schema), delay_of(task)

    def label(i: int) -> str:
        return f"{task.path}, record {i} of a batch"

    def decoded(records: Sequence[Any]) -> Batch:
        lengths = np.fromiter(map(len, records), np.int64, len(records))
        delay(int(lengths.sum()), len(records))
        if values.ragged:
            data = np.frombuffer(b"".join(records), np.uint8)
            return values.decode(data, offsets_of(lengths)[:-1], lengths, label)
        values.check_lengths(lengths, label)
        batch: Batch = {}
        parts, at = [], 0
        for f in values.fixed:
            batch[f.name] = column = np.empty((len(records), *f.inner), f.dtype)
            if f.row_nbytes:
                rows = column.reshape(-1).view(np.uint8).reshape(-1, f.row_nbytes)
                parts.append((rows, at, f.row_nbytes))
                at += f.row_nbytes
        for i, record in enumerate(records):
            for rows, at, nbytes in parts:
                rows[i] = np.frombuffer(record, np.uint8, nbytes, at)
        return batch

    return decoded


def open_get(task: Task, resources: ExitStack) -> Way:
    """Open records by their keys, as a map-style dataset over LMDB reads them, shuffled.

    If the first and the last key are decimal numbers of one width, as dsprep writes them, all
    others are computed. Otherwise a cursor walks over all of them, which reads every leaf of the
    tree.
    """
    txn, decoded = _transaction(task, resources), _decoder(task)
    with txn.cursor() as cursor:
        first = bytes(cursor.key()) if cursor.first() else b""
        last = bytes(cursor.key()) if cursor.last() else b""
        numbers = Keys(b"", b"", len(first), b"0123456789")
        ends = (numbers.one(0), numbers.one(max(0, task.samples - 1)))
        known: list[bytes] | None = None
        if ends != (first, last):
            cursor.first()
            known = [bytes(key) for key in cursor.iternext(keys=True, values=False)]

    def keys_of(indices: Ints) -> list[bytes]:
        if known is not None:
            return [known[i] for i in indices.tolist()]
        width, made = numbers.nbytes, numbers.make(indices).tobytes()
        return [made[at : at + width] for at in range(0, len(made), width)]

    def epoch(number: int) -> Iterator[Any]:
        for indices in task.batches(number):
            records = [txn.get(key) for key in keys_of(indices)]
            if None in records:
                missing = int(indices[records.index(None)])
                raise FormatError("a key is missing", where=f"{task.path}, sample {missing}")
            yield decoded(records)

    return Way(epoch)


def open_cursor(task: Task, resources: ExitStack) -> Way:
    """Open py-lmdb cursors, strided by rank, as Caffe reads LMDB (Pumma et al., Section 2).

    Each rank walks ``rank * batch_size`` records from the first one on. Then, in every step, it
    reads ``batch_size`` records and steps over the ``(ranks - 1) * batch_size`` of the others, one
    by one: a cursor cannot jump to a number. So all ranks together read the records in their order,
    a block of ``ranks * batch_size`` a step. Nothing is shuffled. Caffe goes round in a ring; a new
    epoch that walks to its first record again costs as many steps of the cursor.
    """
    txn, decoded = _transaction(task, resources), _decoder(task)

    def walk(cursor: Any, count: int) -> bool:
        """Step over `count` records; return whether there is one left."""
        return all(cursor.next() for _ in range(count))

    def epoch(number: int) -> Iterator[Any]:
        each, others = task.batch_size, task.world_size - 1
        with txn.cursor() as cursor:
            there = cursor.first() and walk(cursor, task.rank * each)
            while there:
                records = [cursor.value()]
                while (there := cursor.next()) and len(records) < each:
                    records.append(cursor.value())
                yield decoded(records)
                there = there and walk(cursor, others * each)

    return Way(epoch)
