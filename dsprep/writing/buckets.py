"""Samples dealt into buckets on disk, so that each bucket can be read at once.

The samples come in source order, as pieces, and every sample belongs to one bucket. A piece is
sorted by bucket and written behind the one before as one *run*, so that writing is sequential; a
bucket is then one segment of every run. A file has

- the runs, back to back; a run has a segment per bucket, and a segment of n samples: the position
  of each in its bucket (uint32), of every ragged field n numbers of rows (int64); then of every
  fixed field n values, of every ragged field all its rows;
- the index, int64: for each bucket, and the end of the last one, how many samples of each run are
  in those before, then where its segment begins;
- the number of runs: int64.

Numbers are in the machine's own byte order: the files are of use only on such a machine.

Long samples are copied by the kernel alone: one call writes them from where they were read to, and
one reads them to where they come in the bucket. Short ones are sorted in memory.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np

from dsprep.core.closing import failure_closes
from dsprep.core.gather import LONG, take_into, take_ragged
from dsprep.core.permutation import Permutation
from dsprep.core.schema import Arena, Array, Batch, Bytes, Ints, Ragged, Schema
from dsprep.core.spans import offsets_of
from dsprep.errors import FormatError
from dsprep.storage.durable import write_error
from dsprep.storage.ranges import fstat, pread_into, pwrite_all
from dsprep.storage.scatter import drain, read_files, runs

MOST = 1 << 31
"""Samples of a bucket at most."""

_POSITION = np.dtype(np.uint32)

_Column: TypeAlias = tuple[Ints, Array, Ints | None]
"""The beginnings of samples, in bytes, as they are stored; their memory; their destinations there,
None: in this order."""


def index_nbytes(buckets: int) -> int:
    """Return the bytes of a run in the index."""
    return 16 * (buckets + 1)


def write_runs(
    file: FileIO,
    schema: Schema,
    order: Permutation,
    bucket_samples: int,
    batches: Iterable[tuple[int, Batch]],
) -> None:
    """Write samples into an empty file, each batch as a run; see the module.

    Parameters
    ----------
    order
        Where each sample will come.
    bucket_samples
        Bucket b has the samples at the positions ``b * bucket_samples ..`` of the new order.
    batches
        Samples, each batch with the number of the first one.
    """
    buckets = -(-len(order) // bucket_samples)
    arena, index, end = Arena(), list[Ints](), 0
    for start, batch in batches:
        count = len(next(iter(batch.values())))
        bucket, position = np.divmod(order.inverse(np.arange(start, start + count)), bucket_samples)
        small = bucket.astype(np.uint16) if buckets <= 1 << 16 else bucket  # sorted faster
        sequence = np.argsort(small, kind="stable")
        edges = offsets_of(np.bincount(bucket, minlength=buckets))
        memories, numbers, iovecs, offsets = [], [], [], np.full(buckets + 1, end)
        for i, column in enumerate(_columns(schema, batch, position.astype(_POSITION))):
            memory, ends, addresses = _sorted(column, sequence, arena, f"run.{i}")
            offsets += ends[edges]
            if addresses is None:
                ends = ends[edges]
                addresses = _address(memory) + ends[:-1]
                numbers.append(np.arange(buckets, dtype=small.dtype))
            else:
                numbers.append(small[sequence])
            memories.append(memory)
            iovecs.append(np.stack([addresses, np.diff(ends)], axis=1))
        iovec = np.concatenate(iovecs)[np.argsort(np.concatenate(numbers), kind="stable")]
        drain(file.fileno(), end, np.ascontiguousarray(iovec[iovec[:, 1] > 0]), file.name)
        index += [edges, offsets]
        end = int(offsets[-1])
    table = np.array(index).reshape(-1, 2, buckets + 1).T  # by bucket, as they are read
    pwrite_all(file.fileno(), [np.ascontiguousarray(table), np.array([len(table.T)])], end)


def _columns(schema: Schema, batch: Batch, position: Array) -> list[Array | Ragged]:
    """Return what is stored of some samples, in its order."""
    columns = [batch[f.name] for f in sorted(schema, key=lambda f: f.ragged)]
    return [position, *(c.lengths for c in columns if isinstance(c, Ragged)), *columns]


def _sorted(
    column: Array | Ragged, sequence: Ints, arena: Arena, key: str
) -> tuple[Array, Ints, Ints | None]:
    """Return a column whose samples come in this sequence; short ones are copied."""
    rows = column.values if isinstance(column, Ragged) else column
    width = rows[:1].nbytes
    ends = width * np.arange(len(sequence) + 1)
    if isinstance(column, Ragged):
        ends = offsets_of(column.lengths[sequence] * width)
    if column.nbytes >= LONG * len(sequence):
        if not rows[:1].flags.c_contiguous:
            rows = np.ascontiguousarray(rows)
        firsts = column.offsets[sequence] if isinstance(column, Ragged) else sequence
        return rows, ends, _address(rows) + firsts * rows.strides[0]
    if isinstance(column, Ragged):
        return take_ragged(column, sequence, arena, key).values, ends, None
    out = arena.empty(key, column.shape, column.dtype)
    take_into(out, column, sequence)
    return out, ends, None


class BucketReader:
    """Reads buckets from files that `write_runs` completed.

    Parameters
    ----------
    paths
        The files. Together they have every sample of the source once.
    schema, bucket_samples
        As they were written.
    samples
        In all.
    """

    def __init__(
        self, paths: Sequence[Path], schema: Schema, samples: int, bucket_samples: int
    ) -> None:
        self._paths, self._schema = paths, schema
        self._samples, self._per_bucket = samples, bucket_samples
        self._files: list[int] = []
        self._free: list[Bytes] = []
        self._runs, begins = list[int](), [0]  # offsets are counted from the first file on
        with failure_closes(self.close):
            for path in paths:
                self._files.append(os.open(path, os.O_RDWR | os.O_CLOEXEC))
                size, count = fstat(self._files[-1]).st_size, np.zeros(1, np.int64)
                pread_into(self._files[-1], count, max(0, size - 8), path)
                end = size - 8 - int(count[0]) * index_nbytes(-(-samples // bucket_samples))
                if not 0 <= end <= size - 8:
                    raise _damaged(path)
                self._runs.append(int(count[0]))
                begins.append(begins[-1] + end)
        self._begins = np.array(begins)

    def _edges(self, bucket: int) -> Ints:
        """Return what all indexes have for a bucket: int64, shape ``(2, runs)``."""
        parts = []
        for i, (begin, stop) in enumerate(pairwise(self._begins.tolist())):
            part = np.empty((2, self._runs[i]), np.int64)
            pread_into(self._files[i], part, stop - begin + bucket * part.nbytes, self._paths[i])
            if part.min(initial=0) < 0 or part.max(initial=0) > stop - begin:
                raise _damaged(self._paths[i])
            part[1] += begin
            parts.append(part)
        return np.concatenate(parts, axis=1)

    def load(self, bucket: int) -> tuple[Batch, Ints | None]:
        """Return the samples of a bucket, in memory of their own.

        Returns
        -------
        The samples; and int64, shape ``(n,)``, which of them comes at each position of the new
        order, None if they are in that order.
        """
        n = min(self._per_bucket, self._samples - bucket * self._per_bucket)
        low, high = self._edges(bucket), self._edges(bucket + 1)
        there = np.flatnonzero(low[0] < high[0])
        firsts = offsets_of((high[0] - low[0])[there])
        at, ends = low[1, there], high[1, there]
        if int(firsts[-1]) != n or (ends < at).any():
            raise _damaged(self._paths[0])
        position = np.empty(n, _POSITION)
        lengths = {f.name: np.empty(n, np.int64) for f in self._schema if f.ragged}
        heads: list[Array] = [position, *lengths.values()]
        self._fill(at, firsts, [(h.itemsize * np.arange(n + 1), h, None) for h in heads])
        order = self._check(position, lengths, int((ends - at).sum()))
        # Long samples are read to where they belong; of short ones `order` tells it.
        is_long = int((ends - at).sum()) >= LONG * n * len(self._schema)
        block, taken = self._memory(int((ends - at).sum()) + 64 * len(self._schema)), 0
        batch: Batch = {}
        columns = list[_Column]()
        for f in sorted(self._schema, key=lambda f: f.ragged):
            rows = lengths.get(f.name, np.ones(n, np.int64))
            edges = offsets = offsets_of(rows)
            to = None
            if is_long:
                offsets = offsets_of(rows[order])
                to = offsets[position] * f.row_nbytes
            size = int(offsets[-1]) * f.row_nbytes
            values = block[taken : taken + size].view(f.dtype).reshape(offsets[-1], *f.inner)
            taken += -(-size // 64) * 64
            columns.append((edges * f.row_nbytes, values, to))
            batch[f.name] = Ragged(values, offsets, f.kind) if f.ragged else values
        self._fill(at, firsts, columns)
        if (at != ends).any():
            raise _damaged(self._paths[0])
        for fd in self._files:  # the system may drop what it failed to bring to the disk
            write_error(fd)
        return {name: batch[name] for name in self._schema.names}, None if is_long else order

    def _check(self, position: Array, lengths: Mapping[str, Ints], nbytes: int) -> Ints:
        """Return which sample, as they are stored, comes at each position."""
        # Raises `FormatError` unless that is each once, and their values have so many bytes.
        n = len(position)
        order = np.full(n, -1, np.int64)
        if int(position.max()) < n:
            order[position] = np.arange(n)
        sizes = [float(n * self._schema.fixed_nbytes)]
        for name, rows in lengths.items():
            sizes.append(float(rows.sum(dtype=np.float64)) * self._schema[name].row_nbytes)
        least = min(int(numbers.min()) for numbers in (order, *lengths.values()))
        if least < 0 or sum(sizes) != nbytes:
            raise _damaged(self._paths[0])
        return order

    def _fill(self, at: Ints, firsts: Ints, columns: Sequence[_Column]) -> None:
        """Read the next columns of segments."""
        ranges = []
        for edges, out, to in columns:
            begins, lengths = edges[firsts[:-1]], np.diff(edges[firsts])
            if to is None:
                ranges.append((at.copy(), lengths, _address(out) + begins))
            else:
                each = np.repeat(at - begins, np.diff(firsts)) + edges[:-1]
                ranges.append((each, np.diff(edges), _address(out) + to))
            at += lengths
        offsets, lengths, addresses = (np.concatenate(p) for p in zip(*ranges, strict=True))
        order = np.argsort(offsets, kind="stable")
        order = order[lengths[order] > 0]
        offsets, lengths, addresses = offsets[order], lengths[order], addresses[order]
        parts = []
        for i, (a, b) in enumerate(pairwise(np.searchsorted(offsets, self._begins).tolist())):
            own = runs(offsets[a:b] - self._begins[i], lengths[a:b], addresses[a:b])
            parts.append((self._files[i], own, self._paths[i]))
        read_files(parts)

    def _memory(self, nbytes: int) -> Bytes:
        """Return memory, that of a bucket which no array refers to any more if there is one."""
        # Fresh memory costs a page fault every 4 KiB, as much as reading into it.
        del self._free[2:]
        memory = self._free.pop() if self._free else np.empty(0, np.uint8)
        if len(memory) < nbytes:
            memory = np.empty(nbytes + nbytes // 64, np.uint8)
        block = np.frombuffer(memory.data, np.uint8)  # views of it keep it, not `memory`
        weakref.finalize(block, self._free.append, memory)
        return block

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.pop())


def _damaged(path: Path) -> FormatError:
    return FormatError("a temporary file is damaged", where=path, fix="add --restart to start over")


def _address(array: Array) -> int:
    return int(array.ctypes.data)
