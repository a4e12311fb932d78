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
from dsprep.core.schema import Batch
from dsprep.core.spans import offsets_of
from dsprep.errors import FormatError, require
from dsprep.formats.lmdb.keys import plan_keys
from dsprep.formats.lmdb.values import Values
from dsprep.formats.options import WriteOptions


def opened(path: Path) -> Any:
    """Return an environment of py-lmdb, which only reads."""
    import lmdb

    return lmdb.open(str(path), subdir=path.is_dir(), readonly=True, lock=False, meminit=False)


def _transaction(task: Task, resources: ExitStack) -> Any:
    """Return one read transaction, for as long as the environment is open."""
    env = resources.enter_context(opened(task.path))
    entries, words = int(env.stat()["entries"]), "the environment does not hold a record per sample"
    facts = {"where": task.path, "expected": task.samples, "found": entries}
    require(entries == task.samples, FormatError, words, **facts)
    return resources.enter_context(env.begin(buffers=True))


def _decoder(task: Task) -> Callable[[Sequence[Any]], Batch]:
    """Return what copies the samples of some records out of the mapping."""
    values, delay = Values(task.schema), delay_of(task)

    def label(i: int) -> str:
        return f"{task.path}, record {i} of a batch"

    def decoded(records: Sequence[Any]) -> Batch:
        lengths = np.fromiter(map(len, records), np.int64, len(records))
        delay(int(lengths.sum()), len(records))
        data = np.frombuffer(b"".join(records), np.uint8)
        return values.decode(data, offsets_of(lengths)[:-1], lengths, label)

    return decoded


def open_get(task: Task, resources: ExitStack) -> Way:
    """Open records by their keys, as a map-style dataset over LMDB reads them, shuffled."""
    txn, decoded = _transaction(task, resources), _decoder(task)
    keys = plan_keys(WriteOptions().key_format, task.samples)

    def epoch(number: int) -> Iterator[Any]:
        for indices in task.batches(number):
            records = [txn.get(keys.one(i)) for i in indices.tolist()]
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
