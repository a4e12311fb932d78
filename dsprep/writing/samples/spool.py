"""Samples between the program that makes them and the output: blocks of them, read as a source.

A block is what came at a time: the rows of each sample of each ragged field as int64, then all
values of the first field, of the second one and so on. Numbers are in the machine's own byte order.
Where groups begin depends on how many samples there are and, if they are ragged, on their sizes: so
all are kept until the last one has come, in memory and then in a file without a name (`Spool`).
"""

from __future__ import annotations

import tempfile
from abc import abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from dsprep.core.gather import Assembly
from dsprep.core.schema import (
    Arena,
    Array,
    Batch,
    Bytes,
    Column,
    Ints,
    Ragged,
    Schema,
    batch_nbytes,
    empty_batch,
    new_array,
)
from dsprep.formats.base import Source
from dsprep.layout.describe import FieldStorage
from dsprep.storage.atomic import make_scratch
from dsprep.storage.durable import write_error
from dsprep.storage.ranges import pread_into, pwrite_all

BLOCK_NBYTES = 1 << 20
"""Payload of a block, about: what is read of one to get a sample."""

WAITING = 2
"""Blocks that are in memory until they are written, at most."""


def pack(batch: Batch) -> list[Array]:
    """Return what a block has of samples, which have the fields of the schema in its order."""
    columns = batch.values()
    lengths = [np.asarray(c.lengths, np.int64) for c in columns if isinstance(c, Ragged)]
    values = [c.values if isinstance(c, Ragged) else c for c in columns]
    return [np.ascontiguousarray(part) for part in (*lengths, *values)]


def unpack(schema: Schema, data: Bytes, count: int) -> Batch:
    """Return the samples of a block, which refer to its bytes."""
    batch: Batch = {}
    ragged = sum(f.ragged for f in schema)
    at = 8 * count * ragged
    rows = iter(data[:at].view(np.int64).reshape(ragged, count))
    for f in schema:
        lengths = next(rows) if f.ragged else None
        total = count if lengths is None else int(lengths.sum())
        stop = at + total * f.row_nbytes
        values: Any = data[at:stop].view(f.dtype).reshape(total, *f.inner)
        made = values if lengths is None else Ragged.from_lengths(values, lengths, f.kind)
        batch[f.name], at = made, stop
    return batch


class GivenSource(Source):
    """Samples that a program gives: they are in no file that stays."""

    version = "samples that a program gave"
    repeatable = False

    def files(self) -> list[Path]:
        """Return nothing."""
        return []

    def storage(self) -> dict[str, FieldStorage]:
        """Return nothing, as `files` does."""
        return {}


class BlockSource(GivenSource):
    """Samples in blocks of temporary files.

    Attributes
    ----------
    firsts
        The first sample of each block, and the number of all.
    """

    firsts: Sequence[int]

    def __len__(self) -> int:
        return int(self.firsts[-1])

    @abstractmethod
    def block(self, number: int, some: slice, arena: Arena | None) -> tuple[Batch, slice]:
        """Return some samples of a block, perhaps among others: which of the batch they are."""

    def within(self, start: int, stop: int) -> Iterator[tuple[int, slice]]:
        """Yield the blocks that some samples are in, and which samples of each these are."""
        number = bisect_right(self.firsts, start) - 1
        while start < stop:
            first, end = int(self.firsts[number]), int(self.firsts[number + 1])
            yield number, slice(start - first, min(end, stop) - first)
            start, number = end, number + 1

    @override
    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        if start == stop:
            return empty_batch(self.schema)
        assembly, at = Assembly(self.schema, stop - start, arena, "blocks"), 0
        own = None if self.schema.ragged else arena  # ragged values are joined in the end
        for number, some in self.within(start, stop):
            batch, rows = self.block(number, some, own)
            assembly.put(at, {name: column[rows] for name, column in batch.items()})
            at += some.stop - some.start
        return assembly.batch()


class Spool(BlockSource):
    """Samples kept in memory and in a temporary file, and then read from there.

    Parameters
    ----------
    path
        What they are for: the file is in the same directory.
    schema
        The fields.
    memory
        Bytes from which on the samples that come go to the file.
    """

    def __init__(self, path: Path, schema: Schema, memory: int = 0) -> None:
        self.path, self.schema, self._memory = path, schema, memory
        self._file = tempfile.TemporaryFile(dir=make_scratch(path), buffering=0)  # noqa: SIM115 (`close`)
        self._kept: dict[int, Batch] = {}  # blocks in memory, by number
        self._pool = ThreadPoolExecutor(1, "dsprep-spool")
        self._writing: deque[Future[int]] = deque()
        self.firsts: list[int] = [0]
        self._offsets = [0]  # of each block, and the end of the last one
        self._rows: dict[str, Any] = {f.name: [np.zeros(0, np.int64)] for f in schema if f.ragged}

    def put(self, batch: Batch) -> None:
        """Add samples as a block; nobody changes the batch any more."""
        at, buffers = self._offsets[-1], pack(batch)
        if at < self._memory:
            self._kept[len(self.firsts) - 1] = batch
        else:
            while len(self._writing) >= WAITING:
                self._writing.popleft().result()
            self._writing.append(self._pool.submit(self._write, buffers, at))
        self._offsets.append(at + sum(int(buffer.nbytes) for buffer in buffers))
        self.firsts.append(self.firsts[-1] + len(next(iter(batch.values()))))
        for rows, lengths in zip(self._rows.values(), buffers, strict=False):
            rows.append(lengths)

    def _write(self, buffers: list[Array], at: int) -> int:
        return pwrite_all(self._file.fileno(), buffers, at)

    def spill(self) -> None:
        """Have all that is in memory in the file."""
        for number in list(self._kept):
            self._write(pack(self._kept.pop(number)), self._offsets[number])

    def finish(self) -> None:
        """Have all samples in memory or in the file; from then on they are read.

        Raises
        ------
        OSError
            If the file system has no space for them.
        """
        while self._writing:
            self._writing.popleft().result()
        self._pool.shutdown()
        self._rows = {name: np.concatenate(parts) for name, parts in self._rows.items()}

    @override
    def block(self, number: int, some: slice, arena: Arena | None) -> tuple[Batch, slice]:
        if number in self._kept:
            return self._kept[number], some
        count = self.firsts[number + 1] - self.firsts[number]
        fd, at, batch = self._file.fileno(), self._offsets[number], dict[str, Column]()
        where = f"{self.path}, temporary file"
        if self.schema.ragged:
            data = np.empty(self._offsets[number + 1] - at, np.uint8)
            pread_into(fd, data, at, where)
            write_error(fd)  # the system may drop what it failed to bring to the disk
            return unpack(self.schema, data, count), some
        for f in self.schema:
            shape = (some.stop - some.start, *f.inner)
            values = new_array(arena, f"spool.{f.name}", shape, f.dtype)
            pread_into(fd, values, at + some.start * f.row_nbytes, where)
            batch[f.name], at = values, at + count * f.row_nbytes
        write_error(fd)
        return batch, slice(0, some.stop - some.start)

    @override
    def rows(self, name: str, start: int, stop: int) -> Ints | None:
        rows: Ints = self._rows[name][start:stop]
        return rows

    @override
    def resident_nbytes(self) -> int:
        return sum(map(batch_nbytes, self._kept.values()))

    def close(self) -> None:
        """Close the file, with which it goes."""
        self._pool.shutdown(cancel_futures=True)
        self._file.close()
