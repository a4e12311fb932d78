"""Samples dealt into buckets on disk, so that each bucket can be read at once.

The samples come in source order, as pieces, and every sample belongs to one bucket. A piece is
sorted by bucket and written behind the one before as one *run*, so that writing is sequential; a
bucket is then one segment of every run. Of each bucket the samples stay in source order: which
they are follows from the permutation and is stored nowhere.

``runs``
    The runs, one behind another; a run has a segment per bucket, and a segment of n samples:
    of every fixed field n values; of every ragged field n numbers of rows (int64); of every
    ragged field all its rows. Numbers are in the machine's own byte order: the files are of use
    only to a rerun on the same machine.
``index``
    int64, one row per run: the first sample of the run, then where each segment begins in
    ``runs``, and where the last one ends.
``sizes``
    Where fields are ragged: int64, the payload bytes of every sample in source order.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dsprep.core.gather import LONG, take
from dsprep.core.permutation import Permutation
from dsprep.core.pread import scatter
from dsprep.core.schema import Arena, Array, Batch, Bytes, DType, Field, Ints, Ragged, Schema
from dsprep.core.storage import Buffer, as_bytes, close, pread_into, pwrite_all, sync
from dsprep.errors import FormatError
from dsprep.formats.base import Writer

_FEW = 1 << 20  # bytes up to which memory is not kept

WINDOW_NBYTES = 4 << 20
"""Bytes of the columns of indexes that are in memory at a time, at least two of them."""

STRIP_NBYTES = 1 << 20
"""Bytes of an index that are read at a time, at least a row."""


@dataclass
class Run:
    """A piece sorted by bucket.

    Attributes
    ----------
    start
        Its first sample.
    segments
        int64, shape ``(buckets + 1,)``: where its segments begin, counted from its own beginning.
    buffers
        Its bytes.
    sizes
        int64: the payload bytes of its samples in source order; empty if no field is ragged.
    index, offset
        Its number, and where it lies in the file; set by `RunWriter.reserve`.
    """

    start: int
    segments: Ints
    buffers: list[Buffer]
    sizes: Ints
    index: int = -1
    offset: int = -1


class RunWriter(Writer):
    """Writes the samples of a source into runs; see `Writer` for how it is driven.

    Parameters
    ----------
    directory
        Where the files lie.
    schema
        The samples' fields.
    order
        Where each sample will come.
    bucket_samples
        Bucket b has the samples at the places ``b * bucket_samples ..``.
    """

    def __init__(
        self, directory: Path, schema: Schema, order: Permutation, bucket_samples: int
    ) -> None:
        self._schema, self._order = schema, order
        self._per_bucket = bucket_samples
        self._buckets = -(-len(order) // bucket_samples)
        self._runs = self._end = 0
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        names = ("runs", "index", "sizes")
        self._files = [os.open(directory / name, flags, 0o666) for name in names]

    def encode(self, batch: Batch, start: int, arena: Arena) -> Run:
        """Sort samples ``start ..`` by bucket."""
        count = len(next(iter(batch.values()))) if batch else 0
        numbers = np.arange(start, start + count, dtype=np.int64)
        bucket = self._order.inverse(numbers) // self._per_bucket
        sizes = payload_sizes(self._schema, batch) if self._schema.ragged else bucket[:0]
        sequence = np.argsort(bucket, kind="stable")
        edges = np.zeros(self._buckets + 1, np.int64)
        np.cumsum(np.bincount(bucket, minlength=self._buckets), out=edges[1:])
        segments = edges * self._schema.fixed_nbytes
        fixed, ragged, lengths = [], [], []
        for f in self._schema:
            column = batch[f.name]
            if isinstance(column, Ragged):
                sorted_lengths = column.lengths[sequence]
                offsets = np.zeros(count + 1, np.int64)
                np.cumsum(sorted_lengths, out=offsets[1:])
                segments += 8 * edges + offsets[edges] * f.row_nbytes
                lengths.append(_Sorted(sorted_lengths, None))
                ragged.append(_sorted(column, f, sequence, arena))
            else:
                fixed.append(_sorted(column, f, sequence, arena))
        columns = [*fixed, *lengths, *ragged]
        bounds = edges.tolist()
        buffers: list[Buffer] = []
        for i, j in itertools.pairwise(bounds):
            if i < j:
                for c in columns:
                    buffers += c.buffers(i, j)
        return Run(start, segments, buffers, sizes)

    def reserve(self, piece: Run) -> None:
        """Give the run the next place."""
        piece.index, piece.offset = self._runs, self._end
        self._runs += 1
        self._end += int(piece.segments[-1])

    def write(self, piece: Run) -> None:
        """Write the run and its row of the index."""
        data, index, sizes = self._files
        pwrite_all(data, piece.buffers, piece.offset)
        row = np.append(np.int64(piece.start), piece.segments + piece.offset)
        pwrite_all(index, [row], piece.index * row.nbytes)
        pwrite_all(sizes, [piece.sizes], piece.start * 8)

    def sync(self) -> None:
        """Make all that has been written durable."""
        for fd in self._files:
            sync(fd, data=True)

    def finish(self) -> None:
        """Wait for the disk if `durable`, and close the files."""
        if self.durable:
            self.sync()
        self.close()

    def close(self) -> None:
        """Close the files."""
        files, self._files = self._files, []
        close(*files)


def intact(directory: Path, buckets: int) -> bool:
    """Whether the files of a writer that has finished have the bytes that it wrote."""
    try:
        runs, rows = ((directory / n).stat().st_size for n in ("runs", "index"))
        if rows % index_row_nbytes(buckets):
            return False
        return runs == (int(read_ints(directory / "index", rows // 8 - 1, 1)[0]) if rows else 0)
    except (OSError, FormatError):
        return False


def read_ints(path: Path, start: int, count: int) -> Ints:
    """Return some of the numbers of a file of int64."""
    out = np.empty(count, np.int64)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pread_into(fd, out, 8 * start, path)
    finally:
        os.close(fd)
    return out


def payload_sizes(schema: Schema, batch: Batch) -> Ints:
    """Return the payload bytes of each sample."""
    count = len(next(iter(batch.values()))) if batch else 0
    sizes = np.full(count, schema.fixed_nbytes, np.int64)
    for f in schema:
        column = batch[f.name]
        if isinstance(column, Ragged):
            sizes += column.lengths * f.row_nbytes
    return sizes


def index_row_nbytes(buckets: int) -> int:
    """Return the bytes of one row of the index."""
    return 8 * (buckets + 2)


@dataclass
class _Sorted:
    """A column sorted by bucket: copied together, or only the places of its samples.

    Attributes
    ----------
    column
        The samples in the new sequence; unused if there are `views`.
    views
        The bytes of each sample, in the new sequence.
    """

    column: Array | Ragged
    views: list[memoryview] | None

    def buffers(self, i: int, j: int) -> list[Buffer]:
        """Return the bytes of samples ``i .. j`` of the sequence."""
        if self.views is not None:
            return [*self.views[i:j]]
        if isinstance(self.column, Ragged):
            return [self.column.values[self.column.offsets[i] : self.column.offsets[j]]]
        return [self.column[i:j]]


def _sorted(column: Array | Ragged, field: Field, sequence: Ints, arena: Arena) -> _Sorted:
    if isinstance(column, Ragged):
        values, edges = np.ascontiguousarray(column.values), column.offsets * field.row_nbytes
    else:
        values = np.ascontiguousarray(column)
        edges = np.arange(len(column) + 1, dtype=np.int64) * field.row_nbytes
    if values.nbytes < LONG * len(sequence) or not len(sequence):
        alone = Schema((field,))
        taken = take(alone, {field.name: column}, sequence, arena, "write.runs")
        return _Sorted(taken[field.name], None)
    return _Sorted(column, _views(values, edges[sequence], edges[sequence + 1]))


def _views(values: Array, starts: Ints, ends: Ints) -> list[memoryview]:
    """Return the bytes ``starts[i] .. ends[i]`` of a C-contiguous array, for each i."""
    data = as_bytes(values)
    return [data[i:j] for i, j in zip(starts.tolist(), ends.tolist(), strict=True)]


class BucketReader:
    """Reads buckets that `RunWriter`s completed.

    Parameters
    ----------
    directories
        Where the files of each writer lie. Together they have every sample of the source once,
        each of them a range, in order.
    schema, order, bucket_samples
        As the writers had them.
    """

    def __init__(
        self, directories: Sequence[Path], schema: Schema, order: Permutation, bucket_samples: int
    ) -> None:
        self._schema, self._order, self._per_bucket = schema, order, bucket_samples
        self._buckets = -(-len(order) // bucket_samples)
        self._memory = _Memory()
        self._paths = [d / "runs" for d in directories]
        self._data: list[int] = []
        self._tables: list[_Table] = []
        row = index_row_nbytes(self._buckets)
        try:
            for path in self._paths:
                self._data.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                self._tables.append(_Table(path.with_name("index"), row))
            sizes = [os.fstat(fd).st_size for fd in self._data]
            self._begins = np.append(np.int64(0), np.cumsum(sizes))
            self._firsts = self._columns(0, 1)[:, 0]
        except BaseException:
            self.close()
            raise
        self._window = 0, np.zeros((len(self._firsts), 0), np.int64)

    def _columns(self, first: int, count: int) -> Ints:
        """Return columns of all indexes."""
        return np.concatenate([table.columns(first, count) for table in self._tables])

    def _edges(self, bucket: int) -> Ints:
        """Return where the segments of a bucket begin and end, counted from the first file on.

        Buckets are read in order: some columns are read at a time, as memory allows.
        """
        first, window = self._window
        at = 1 + bucket - first
        if at < 0 or at + 2 > window.shape[1]:
            count = max(2, WINDOW_NBYTES // (8 * max(1, len(self._firsts))))
            first, at = 1 + bucket, 0
            window = self._columns(first, min(count, self._buckets + 2 - first))
            rows = [len(table) for table in self._tables]
            window += np.repeat(self._begins[:-1], rows)[:, None]
            self._window = first, window
        return window[:, at : at + 2]

    def load(self, bucket: int) -> Batch:
        """Return the samples of a bucket in their new order, in memory of their own."""
        first = bucket * self._per_bucket
        places = np.arange(first, min(first + self._per_bucket, len(self._order)), dtype=np.int64)
        samples = self._order.forward(places)
        target = np.argsort(samples)  # where each sample comes, in source order
        edges = np.append(np.searchsorted(samples[target], self._firsts), len(samples))
        counts = np.diff(edges)
        if edges[0] or (counts < 0).any():
            raise FormatError("a temporary file is damaged", where=self._paths[0])
        runs = np.flatnonzero(counts)
        at, ends = np.ascontiguousarray(self._edges(bucket)[runs].T)
        parts = _Runs(at, edges[runs], counts[runs])
        targets = {f.name: _Target(f, target, self._memory) for f in self._schema if not f.ragged}
        lengths = {f.name: np.empty(len(samples), np.int64) for f in self._schema if f.ragged}
        self._read(
            [t.places(parts) for t in targets.values()]
            + [parts.places(8 * np.arange(len(t) + 1), _address(t)) for t in lengths.values()]
        )
        for name, rows in lengths.items():
            total = float(rows.sum(dtype=np.float64)) * self._schema[name].row_nbytes
            if rows.min(initial=0) < 0 or not total <= self._nbytes():
                raise FormatError("a temporary file is damaged", where=self._paths[0])
            targets[name] = _Target(self._schema[name], target, self._memory, rows)
        self._read([targets[name].places(parts) for name in lengths])
        if (parts.at != ends).any():
            raise FormatError("a temporary file is damaged", where=self._paths[0])
        return {name: targets[name].column() for name in self._schema.names}

    def _read(self, places: list[tuple[Ints, Ints, Ints]]) -> None:
        """Read ranges of the files, given as offsets, lengths and addresses."""
        if not places:
            return
        offsets, lengths, addresses = (np.concatenate(p) for p in zip(*places, strict=True))
        order = np.argsort(offsets, kind="stable")
        order = order[lengths[order] > 0]
        offsets, lengths, addresses = offsets[order], lengths[order], addresses[order]
        cuts = np.searchsorted(offsets, self._begins)
        for i, (a, b) in enumerate(itertools.pairwise(cuts.tolist())):
            if a < b:
                at = offsets[a:b] - self._begins[i]
                scatter(self._data[i], at, lengths[a:b], addresses[a:b], self._paths[i])

    def _nbytes(self) -> int:
        return int(self._begins[-1])

    def close(self) -> None:
        """Close the files."""
        while self._data:
            os.close(self._data.pop())
        while self._tables:
            self._tables.pop().close()


class _Table:
    """The index of a `RunWriter`, of which columns are read.

    By ``pread`` and not from a mapping: some file systems map no files, and a page that a server
    does not deliver would kill the process.
    """

    def __init__(self, path: Path, row_nbytes: int) -> None:
        self._path, self._width = path, row_nbytes // 8
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._rows, rest = divmod(os.fstat(self._fd).st_size, row_nbytes)
        if rest:
            self.close()
            raise FormatError("a temporary file is damaged", where=path)

    def __len__(self) -> int:
        return self._rows

    def columns(self, first: int, count: int) -> Ints:
        """Return so many columns of all rows."""
        out = np.empty((self._rows, count), np.int64)
        step = max(1, STRIP_NBYTES // (8 * self._width))
        strip = np.empty((min(step, self._rows), self._width), np.int64)
        for row in range(0, self._rows, step):
            rows = strip[: self._rows - row]
            pread_into(self._fd, rows, row * 8 * self._width, self._path)
            out[row : row + step] = rows[:, first : first + count]
        return out

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


@dataclass
class _Runs:
    """The segments of one bucket, column by column.

    Attributes
    ----------
    at
        int64, shape ``(runs,)``: where the next column of each segment begins in the file.
    firsts, counts
        int64, shape ``(runs,)``: the first sample of each, of those of the bucket in source order,
        and how many.
    """

    at: Ints
    firsts: Ints
    counts: Ints

    def places(
        self, edges: Ints, address: int, apart: Ints | None = None
    ) -> tuple[Ints, Ints, Ints]:
        """Return offset, length and address of what is read of the next column.

        Parameters
        ----------
        edges
            int64, shape ``(n + 1,)``: where samples begin, in bytes, in source order.
        address
            Where the column lies.
        apart
            int64, shape ``(n,)``: where each sample is read to; None: as they follow each other.
        """
        begins, lengths = edges[self.firsts], edges[self.firsts + self.counts] - edges[self.firsts]
        offsets = self.at
        self.at = self.at + lengths
        if apart is None:
            return offsets, lengths, address + begins
        return (
            np.repeat(offsets - begins, self.counts) + edges[:-1],
            np.diff(edges),
            address + apart,
        )


def _address(array: Array) -> int:
    return int(array.ctypes.data)


class _Memory:
    """Blocks of memory that are used again when no array refers to them any more.

    Fresh memory costs a page fault every 4 KiB, as much as reading into it. Buckets are handed
    out as views, whose life only their users know; every view keeps a reference to its block.
    """

    def __init__(self) -> None:
        self._blocks: list[Bytes] = []
        self._lock = threading.Lock()
        probe = [np.empty(1, np.uint8)]
        self._unused = sys.getrefcount(probe[0])  # the list, and whatever the call itself adds

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """Return an uninitialised C-contiguous array."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _FEW:
            return np.empty(shape, dtype)
        with self._lock:
            free = [
                k
                for k in range(len(self._blocks))
                if sys.getrefcount(self._blocks[k]) <= self._unused
            ]
            fits = [k for k in free if nbytes <= self._blocks[k].nbytes]
            if fits:
                best = min(fits, key=lambda k: self._blocks[k].nbytes)
            else:
                for k in reversed(free):
                    del self._blocks[k]
                self._blocks.append(np.empty(nbytes + nbytes // 64, np.uint8))
                best = len(self._blocks) - 1
            return self._blocks[best][:nbytes].view(dtype).reshape(shape)


class _Target:
    """A column being read in source order that ends up in the new order.

    Long samples are read to where they belong, short ones are moved there afterwards.

    Parameters
    ----------
    field
        What it is.
    target
        int64, shape ``(n,)``: where each sample comes, in source order.
    memory
        Where the column lies.
    rows
        int64, shape ``(n,)``: rows of each sample in source order, if ragged.
    """

    def __init__(
        self, field: Field, target: Ints, memory: _Memory, rows: Ints | None = None
    ) -> None:
        self._field, self._target = field, target
        n = len(target)
        self._rows = np.ones(n, np.int64) if rows is None else rows
        total = int(self._rows.sum())
        self._values = memory.empty((total, *field.inner), field.dtype)
        self._long = self._values.nbytes >= LONG * max(1, n)
        lengths = self._rows
        if self._long:
            lengths = np.empty(n, np.int64)
            lengths[target] = self._rows
        self._offsets = np.zeros(n + 1, np.int64)
        np.cumsum(lengths, out=self._offsets[1:])

    def places(self, runs: _Runs) -> tuple[Ints, Ints, Ints]:
        """Return what is read of the file, and to where; see `_Runs.places`."""
        nbytes = self._field.row_nbytes
        edges = np.zeros(len(self._rows) + 1, np.int64)
        np.cumsum(self._rows * nbytes, out=edges[1:])
        apart = self._offsets[self._target] * nbytes if self._long else None
        return runs.places(edges, _address(self._values), apart)

    def column(self) -> Array | Ragged:
        """Return the column in the new order, when all has been read."""
        f = self._field
        if self._long:
            return Ragged(self._values, self._offsets, f.kind) if f.ragged else self._values
        back = np.empty(len(self._target), np.int64)
        back[self._target] = np.arange(len(back))
        read = Ragged(self._values, self._offsets, f.kind) if f.ragged else self._values
        return take(Schema((f,)), {f.name: read}, back)[f.name]
