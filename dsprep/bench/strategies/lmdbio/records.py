"""Records of an LMDB in the order of their keys, by cursor or by ``pread``, into given memory.

The memory begins with two rows of int64, one number for each record: where its value begins,
counted from the beginning of the memory, and its bytes; see `table`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

import numpy as np

from dsprep.bench.delays import delay_of
from dsprep.bench.strategies.lmdb_samples import opened
from dsprep.bench.task import Task
from dsprep.core.schema import Bytes, Ints
from dsprep.errors import FormatError, UsageError
from dsprep.formats.lmdb import data_file
from dsprep.formats.lmdb.keys import plan_keys
from dsprep.formats.options import WriteOptions
from dsprep.sidecar.sidecar import Sidecar
from dsprep.storage.ranges import as_bytes, pread_into

NEAR = 256 << 10
"""Bytes between two records that are read along, such as pages of the tree."""

Records: TypeAlias = Callable[[int, int, Bytes], None]
"""Reads the values of records ``first <= i < stop`` into memory."""

Offsets: TypeAlias = Callable[[int, int], tuple[Ints, Ints]]
"""Gives offsets and lengths of the values of records ``first <= i < stop``."""


def table(memory: Bytes, count: int) -> tuple[Ints, Ints]:
    """Return where the values of `count` records begin in memory, and their bytes."""
    rows = memory[: 16 * count].view(np.int64).reshape(2, count)
    return rows[0], rows[1]


class Cursor:
    """A cursor of py-lmdb over the mapped file: page faults bring the values in.

    Parameters
    ----------
    task
        Whose environment it is.
    jumps
        Whether it goes to a record by its key, not record by record.
    """

    def __init__(self, task: Task, jumps: bool) -> None:
        self._path, self._jumps, self._delay = task.path, jumps, delay_of(task)
        self._keys = plan_keys(WriteOptions().key_format, task.samples)
        self._env = opened(task.path)
        self._transaction = self._env.begin(buffers=True)
        self._cursor = self._transaction.cursor()
        self._at: int | None = None  # the record that the cursor is at
        self._base: int | None = None  # address of byte 0 of the file

    def values(self, first: int, stop: int) -> list[memoryview]:
        """Return the values of some records in the mapping; nothing is copied."""
        cursor = self._cursor
        if self._jumps or self._at is None or self._at > first:
            there = cursor.set_key(self._keys.one(first)) if self._jumps else cursor.first()
            self._check(there, first)
            self._at = first if self._jumps else 0
        for _ in range(self._at, first):
            self._check(cursor.next(), first)
        out = []
        for i in range(first, stop):
            if i > first:
                self._check(cursor.next(), i)
            out.append(cursor.value())
        self._at = stop - 1
        return out

    def _check(self, there: bool, record: int) -> None:
        if not there:
            raise FormatError(f"there is no record {record}", where=self._path)

    def read(self, first: int, stop: int, memory: Bytes) -> None:
        """Copy the values of records ``first <= i < stop`` out of the mapping."""
        values = self.values(first, stop)
        at, view = 16 * len(values), as_bytes(memory)
        starts, lengths = table(memory, len(values))
        lengths[:] = [len(v) for v in values]
        starts[:] = at + np.cumsum(lengths) - lengths
        self._delay(int(lengths.sum()), len(values))
        for value in values:
            view[at : at + len(value)] = value
            at += len(value)

    def offsets(self, first: int, stop: int) -> tuple[Ints, Ints]:
        """Return offsets and lengths of values: their addresses, less that of the mapping."""
        values = self.values(first, stop)
        lengths = np.array([len(v) for v in values], np.int64)
        addresses = [np.frombuffer(v, np.uint8).ctypes.data if len(v) else 0 for v in values]
        if self._base is None and any(addresses):
            self._base = _mapped_at(next(filter(None, addresses)))
        return np.where(lengths > 0, np.array(addresses, np.int64) - (self._base or 0), 0), lengths

    def close(self) -> None:
        """Unmap the file."""
        if self._env is not None:
            self._cursor.close()
            self._transaction.abort()
            self._env.close()
        self._env = None


def _mapped_at(address: int) -> int:
    """Return the address of byte 0 of the file whose mapping holds an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, *_ = line.split()
        low, high = (int(word, 16) for word in span.split("-"))
        if low <= address < high:
            return low - int(offset, 16)
    raise UsageError("the system does not show where the file is mapped")


def computed(path: Path, resources: ExitStack) -> Offsets:
    """Return the offsets that the sidecar's law gives; the file is not touched."""
    sidecar = resources.enter_context(Sidecar.open(path))
    records = sidecar.layout(0).records if len(sidecar.content.files) == 1 else None
    if records is None:
        raise UsageError("this is not one LMDB with a sample per record", where=path)
    blocks, order = records.blocks, records.order

    def offsets(first: int, stop: int) -> tuple[Ints, Ints]:
        if order is None:
            return blocks.offsets.span(first, stop), blocks.lengths.span(first, stop)
        chosen = order.span(first, stop)
        return blocks.offsets.at(chosen), blocks.lengths.at(chosen)

    return offsets


def explicit(task: Task, source: Offsets, resources: ExitStack) -> Records:
    """Return what reads values by ``pread``: records near each other by one call."""
    file, delay = data_file(task.path), delay_of(task)
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    resources.callback(os.close, fd)

    def read(first: int, stop: int, memory: Bytes) -> None:
        offsets, lengths = source(first, stop)
        starts, ranges = _joined(offsets, lengths)
        done = 16 * (stop - first)
        at, sizes = table(memory, stop - first)
        at[:], sizes[:] = starts + done, lengths
        for low, high in ranges:
            step = task.transfer_size or max(1, high - low)
            for a in range(low, high, step):
                size = min(step, high - a)
                pread_into(fd, memory[done : done + size], a, file)
                delay(size, 1)
                done += size

    return read


def _joined(offsets: Ints, lengths: Ints) -> tuple[Ints, list[tuple[int, int]]]:
    """Return ranges of a file that hold some records, and where each begins among their bytes."""
    if not len(offsets):
        return offsets, []
    order = np.argsort(offsets, kind="stable")
    low, size = offsets[order], lengths[order]
    reach = np.maximum.accumulate(low + size)
    new = np.flatnonzero(low[1:] - reach[:-1] > NEAR) + 1
    edges = np.concatenate([[0], new, [len(low)]])
    begins, ends = low[edges[:-1]], reach[edges[1:] - 1]
    before = np.cumsum(ends - begins) - (ends - begins)
    numbers = np.repeat(np.arange(len(begins)), np.diff(edges))
    starts = np.empty_like(offsets)
    starts[order] = before[numbers] + low - begins[numbers]
    return starts, list(zip(begins.tolist(), ends.tolist(), strict=True))
