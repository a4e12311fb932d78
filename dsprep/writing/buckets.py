"""Samples dealt into buckets on disk, so that each bucket can be read at once.

The samples come in source order, as pieces, and every sample belongs to one bucket. A piece is
sorted by bucket and written behind the one before as one *run*, so that writing is sequential; a
bucket is then one segment of every run.

``runs``
    The runs, back to back; a run has a segment per bucket, and a segment of n samples: the
    position of each in its bucket (uint32), of every ragged field n numbers of rows (int64); then
    of every fixed field n values, of every ragged field all its rows. Numbers are in the machine's
    own byte order: the files are of use only to a rerun on such a machine.
``index``
    int64, two rows per run: how many of its samples are in the buckets before each, then where
    each segment begins in ``runs``; both with the end of the last one.
``sizes``
    Where fields are ragged: int64, the payload bytes of every sample in source order.

Long samples are copied by the kernel alone: one call writes them from where they were read to, and
one reads them to where they come in the bucket. Short ones are sorted in memory.
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
from dsprep.core.schema import Arena, Array, Batch, Bytes, DType, Field, Ints, Ragged, Schema
from dsprep.core.spans import offsets_of
from dsprep.errors import FormatError
from dsprep.formats.base import Writer
from dsprep.storage.durable import close, punch, start_sync, sync, write_error
from dsprep.storage.ranges import fstat, pread_into, pwrite_all
from dsprep.storage.scatter import drain, scatter

_FEW = 1 << 20  # bytes up to which memory is not kept

WINDOW_NBYTES = 4 << 20
"""Bytes of the columns of indexes that are in memory at a time, at least two of them."""

STRIP_NBYTES = 1 << 20
"""Bytes of an index that are read at a time, at least the rows of a run."""

MOST = 1 << 31
"""Samples of a bucket at most."""

_POSITION = np.dtype(np.uint32)


@dataclass
class Run:
    """A piece sorted by bucket.

    Attributes
    ----------
    start
        Its first sample.
    edges
        int64, shape ``(buckets + 1,)``: how many of its samples are in the buckets before each.
    segments
        int64, shape ``(buckets + 1,)``: where its segments begin, counted from its own beginning.
    places
        int64, shape ``(n, 2)``: the addresses of its bytes, each with a number of bytes.
    held
        What has the memory at these addresses.
    sizes
        int64: the payload bytes of its samples in source order; empty if no field is ragged.
    index, offset
        Its number, and where it is in the file; set by `RunWriter.reserve`.
    """

    start: int
    edges: Ints
    segments: Ints
    places: Ints
    held: list[Array]
    sizes: Ints
    index: int = -1
    offset: int = -1


class RunWriter(Writer):
    """Writes the samples of a source into runs; see `Writer` for how it is driven.

    Parameters
    ----------
    directory
        Where the files are.
    schema
        The samples' fields.
    order
        Where each sample will come.
    bucket_samples
        Bucket b has the samples at the positions ``b * bucket_samples ..`` of the new order.
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
        self._path = directory / names[0]
        self._files = [os.open(directory / name, flags, 0o666) for name in names]

    def encode(self, batch: Batch, start: int, arena: Arena) -> Run:
        """Sort samples ``start ..`` by bucket."""
        count = len(next(iter(batch.values()))) if batch else 0
        numbers = np.arange(start, start + count, dtype=np.int64)
        bucket, position = np.divmod(self._order.inverse(numbers), self._per_bucket)
        small = bucket.astype(np.uint16) if self._buckets <= 1 << 16 else bucket  # sorted faster
        sequence = np.argsort(small, kind="stable")
        edges = offsets_of(np.bincount(bucket, minlength=self._buckets))
        heads = [_Sorted.plain(position[sequence].astype(_POSITION))]
        fixed, ragged = [], []
        for f in self._schema:
            column = batch[f.name]
            if isinstance(column, Ragged):
                heads.append(_Sorted.plain(column.lengths[sequence]))
                ragged.append(_Sorted.of(column, f, sequence, arena))
            else:
                fixed.append(_Sorted.of(column, f, sequence, arena))
        columns = [*heads, *fixed, *ragged]
        columns_of_positions = [c.places(edges) for c in columns]
        every, each = np.arange(self._buckets, dtype=small.dtype), small[sequence]
        keys = [every if c.apart is None else each for c in columns]
        together = np.argsort(np.concatenate(keys), kind="stable")
        positions = np.concatenate(columns_of_positions)[together]
        return Run(
            start,
            edges,
            np.sum([c.offsets[edges] for c in columns], axis=0, dtype=np.int64),
            np.ascontiguousarray(positions[positions[:, 1] > 0]),
            [c.memory for c in columns],
            payload_sizes(self._schema, batch) if self._schema.ragged else bucket[:0],
        )

    def reserve(self, piece: Run) -> None:
        """Reserve the next place for the run."""
        piece.index, piece.offset = self._runs, self._end
        self._runs += 1
        self._end += int(piece.segments[-1])

    def write(self, piece: Run) -> None:
        """Write the run and its rows of the index."""
        data, index, sizes = self._files
        drain(data, piece.offset, piece.places, self._path)
        rows = np.stack([piece.edges, piece.segments + piece.offset])
        pwrite_all(index, [rows], piece.index * rows.nbytes)
        pwrite_all(sizes, [piece.sizes], piece.start * 8)
        if self.durable:
            start_sync(data)

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


def _distrust(path: Path) -> None:
    """Make a rerun repeat the part that these runs belong to."""
    path.with_name("index").unlink(missing_ok=True)


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
    """Return the bytes of the rows of a run in the index."""
    return 16 * (buckets + 1)


@dataclass
class _Sorted:
    """A column of a piece, sorted by bucket: in memory, or only the addresses of its samples.

    Attributes
    ----------
    memory
        What holds the samples.
    offsets
        int64, shape ``(n + 1,)``: where each sample begins in the new sequence, in bytes.
    apart
        int64, shape ``(n,)``: the address of each sample in the new sequence; None: they are back
        to back in `memory`.
    """

    memory: Array
    offsets: Ints
    apart: Ints | None = None

    @classmethod
    def plain(cls, memory: Array) -> _Sorted:
        """Return a column that has been sorted."""
        return cls(memory, memory.itemsize * np.arange(len(memory) + 1))

    @classmethod
    def of(cls, column: Array | Ragged, field: Field, sequence: Ints, arena: Arena) -> _Sorted:
        """Return a column whose samples come in this sequence; short ones are copied."""
        n = len(sequence)
        if column.nbytes < LONG * n or not n:
            alone = Schema((field,))
            column = take(alone, {field.name: column}, sequence, arena, "write.runs")[field.name]
            if isinstance(column, Ragged):
                return cls(column.values, column.offsets * field.row_nbytes)
            return cls(column, field.row_nbytes * np.arange(n + 1))
        if isinstance(column, Ragged):
            values = np.ascontiguousarray(column.values)
            offsets = offsets_of(column.lengths[sequence] * field.row_nbytes)
            starts = column.offsets[sequence] * field.row_nbytes
        else:
            values = column if column[:1].flags.c_contiguous else np.ascontiguousarray(column)
            offsets = field.row_nbytes * np.arange(n + 1)
            starts = sequence * values.strides[0]
        return cls(values, offsets, starts + _address(values))

    def places(self, edges: Ints) -> Ints:
        """Return address and length of every sample if `apart`, else of those of each bucket."""
        offsets, addresses = self.offsets, self.apart
        if addresses is None:
            offsets = offsets[edges]
            addresses = offsets[:-1] + _address(self.memory)
        return np.stack([addresses, np.diff(offsets)], axis=1)


@dataclass(frozen=True)
class Bucket:
    """The samples of a bucket in memory.

    Attributes
    ----------
    columns
        The samples.
    rows
        int64, shape ``(n,)``: which of them comes at each position of the new order; None: they are
        in that order.
    """

    columns: Batch
    rows: Ints | None

    def part(self, start: int, stop: int) -> tuple[Batch, Ints | None]:
        """Return samples that hold those at ``start <= i < stop``, and which they are, if not all.

        What `dsprep.core.gather.Assembly.put` takes.
        """
        if self.rows is not None:
            return self.columns, self.rows[start:stop]
        return {name: column[start:stop] for name, column in self.columns.items()}, None


class BucketReader:
    """Reads buckets that `RunWriter`s completed.

    Parameters
    ----------
    directories
        Where the files of each writer are. Together they have every sample of the source once.
    schema, bucket_samples
        As the writers had them.
    samples
        In all.
    released
        Buckets before this one have been released.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        schema: Schema,
        samples: int,
        bucket_samples: int,
        released: int,
    ) -> None:
        self._schema, self._samples, self._per_bucket = schema, samples, bucket_samples
        self._buckets = -(-samples // bucket_samples)
        self._released = released
        self._memory = _Memory()
        self._paths = [d / "runs" for d in directories]
        self._data: list[int] = []
        self._tables: list[_Table] = []
        row = index_row_nbytes(self._buckets)
        try:
            for path in self._paths:
                self._data.append(os.open(path, os.O_RDWR | os.O_CLOEXEC))
                self._tables.append(_Table(path.with_name("index"), row))
            sizes = [fstat(fd).st_size for fd in self._data]
            self._begins = offsets_of(np.array(sizes, np.int64))
        except BaseException:
            self.close()
            raise
        self._window = 0, np.zeros((0, 2, 0), np.int64)

    def _columns(self, first: int, count: int) -> Ints:
        """Return columns of all indexes: int64, shape ``(runs, 2, count)``."""
        return np.concatenate([table.columns(first, count) for table in self._tables])

    def _edges(self, bucket: int) -> Ints:
        """Return the columns of the index that a bucket is between: shape ``(runs, 2, 2)``.

        Segments are counted from the first file on. Buckets are read in order: some columns are
        read at a time, as memory allows.
        """
        first, window = self._window
        at = bucket - first
        if at < 0 or at + 2 > window.shape[2]:
            rows = [len(table) for table in self._tables]
            count = max(2, WINDOW_NBYTES // (16 * max(1, sum(rows))))
            first, at = bucket, 0
            window = self._columns(first, min(count, self._buckets + 1 - first))
            window[:, 1] += np.repeat(self._begins[:-1], rows)[:, None]
            self._window = first, window
        return window[:, :, at : at + 2]

    def load(self, bucket: int) -> Bucket:
        """Return the samples of a bucket, in memory of their own."""
        n = min(self._per_bucket, self._samples - bucket * self._per_bucket)
        edges = self._edges(bucket)
        counts = np.diff(edges[:, 0])[:, 0]
        if bucket < self._released:
            raise FormatError("a temporary file has been released", where=self._paths[0])
        if counts.min(initial=0) < 0 or int(counts.sum()) != n:
            raise self._damaged()
        runs = np.flatnonzero(counts)
        ends = edges[runs, 1, 1]
        segments = _Segments(edges[runs, 1, 0], offsets_of(counts[runs])[:-1], counts[runs])
        position = np.empty(n, _POSITION)
        lengths = {f.name: np.empty(n, np.int64) for f in self._schema if f.ragged}
        heads: list[Array] = [position, *lengths.values()]
        self._read([segments.next(h.itemsize * np.arange(n + 1), _address(h)) for h in heads])
        rows = self._rows(position)
        total = float(n * self._schema.fixed_nbytes)
        for name, rows_of in lengths.items():
            total += float(rows_of.sum(dtype=np.float64)) * self._schema[name].row_nbytes
            if rows_of.min(initial=0) < 0 or not total <= float(self._begins[-1]):
                raise self._damaged()
        # Long samples are read to where they belong; of short ones, `rows` tells the order.
        target = position.astype(np.int64) if total >= LONG * n * len(self._schema) else None
        columns = {
            f.name: _Target(f, n, self._memory, target, lengths.get(f.name)) for f in self._schema
        }
        stored = sorted(self._schema, key=lambda f: f.ragged)
        self._read([columns[f.name].places(segments) for f in stored])
        if (segments.at != ends).any():
            raise self._damaged()
        self._check_written()
        batch = {name: column.column for name, column in columns.items()}
        return Bucket(batch, rows if target is None else None)

    def _rows(self, position: Array) -> Ints:
        """Return which sample, as they were read, comes at each position."""
        rows = np.full(len(position), -1, np.int64)
        if len(position) and int(position.max()) < len(rows):
            rows[position] = np.arange(len(rows))
        if (rows < 0).any():
            raise self._damaged()
        return rows

    def _damaged(self) -> FormatError:
        for path in self._paths:
            _distrust(path)
        return FormatError(
            "a temporary file is damaged",
            where=self._paths[0],
            fix="run the same command again: it is made again",
        )

    def _read(self, segments: list[tuple[Ints, Ints, Ints]]) -> None:
        """Read ranges of the files, given as offsets, lengths and addresses."""
        if not segments:
            return
        offsets, lengths, addresses = (np.concatenate(p) for p in zip(*segments, strict=True))
        order = np.argsort(offsets, kind="stable")
        order = order[lengths[order] > 0]
        offsets, lengths, addresses = offsets[order], lengths[order], addresses[order]
        cuts = np.searchsorted(offsets, self._begins)
        for i, (a, b) in enumerate(itertools.pairwise(cuts.tolist())):
            if a < b:
                at = offsets[a:b] - self._begins[i]
                scatter(self._data[i], at, lengths[a:b], addresses[a:b], self._paths[i])

    def _check_written(self) -> None:
        """Raise `OSError` if what has been read may not be what was written.

        The system writes to the disk when it likes, and may drop from memory what it failed to.
        """
        for fd, path in zip(self._data, self._paths, strict=True):
            try:
                write_error(fd)
            except OSError:
                _distrust(path)
                raise

    def release(self, bucket: int) -> None:
        """Free the space of the buckets before this one, which are not read again."""
        if bucket <= self._released:
            return
        first, self._released = self._released, bucket
        for fd, table in zip(self._data, self._tables, strict=True):
            begins, ends = (table.columns(b, 1)[:, 1, 0].tolist() for b in (first, bucket))
            for begin, end in zip(begins, ends, strict=True):
                punch(fd, begin, end - begin)

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
        self._path, self._width = path, row_nbytes // 16
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._rows, rest = divmod(fstat(self._fd).st_size, row_nbytes)
        if rest:
            self.close()
            raise FormatError("a temporary file is damaged", where=path)

    def __len__(self) -> int:
        return self._rows

    def columns(self, first: int, count: int) -> Ints:
        """Return so many columns of all runs: int64, shape ``(runs, 2, count)``."""
        out = np.empty((self._rows, 2, count), np.int64)
        step = max(1, STRIP_NBYTES // (16 * self._width))
        strip = np.empty((min(step, self._rows), 2, self._width), np.int64)
        for row in range(0, self._rows, step):
            rows = strip[: self._rows - row]
            pread_into(self._fd, rows, row * 16 * self._width, self._path)
            out[row : row + step] = rows[:, :, first : first + count]
        return out

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


@dataclass
class _Segments:
    """The segments of one bucket, column by column.

    Attributes
    ----------
    at
        int64, shape ``(runs,)``: where the next column of each segment begins in the file.
    firsts, counts
        int64, shape ``(runs,)``: the first sample of each, of those of the bucket as they are
        stored, and how many.
    """

    at: Ints
    firsts: Ints
    counts: Ints

    def next(self, edges: Ints, address: int, apart: Ints | None = None) -> tuple[Ints, Ints, Ints]:
        """Return offset, length and address of what is read of the next column.

        Parameters
        ----------
        edges
            int64, shape ``(n + 1,)``: where samples begin, in bytes, as they are stored.
        address
            Of the column.
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
    """Memory for a column of a bucket that is being read.

    Parameters
    ----------
    field, count
        What it is, and how many samples.
    memory
        Where its memory comes from.
    target
        int64, shape ``(n,)``: where each sample comes, as they are stored; None: they stay so.
    rows
        int64, shape ``(n,)``: the rows of each sample as they are stored, if ragged.

    Attributes
    ----------
    column
        The column; complete when what `places` returned has been read.
    """

    def __init__(
        self, field: Field, count: int, memory: _Memory, target: Ints | None, rows: Ints | None
    ) -> None:
        self._width, self._rows, self._target = field.row_nbytes, rows, target
        self._values = memory.empty(
            (count if rows is None else int(rows.sum()), *field.inner), field.dtype
        )
        self.column: Array | Ragged = self._values
        self._edges = np.arange(count + 1) if rows is None else offsets_of(rows)
        self._to = target
        if rows is not None:
            offsets = self._edges
            if target is not None:
                lengths = np.empty(count, np.int64)
                lengths[target] = rows
                offsets = offsets_of(lengths)
                self._to = offsets[target]
            self.column = Ragged(self._values, offsets, field.kind)

    def places(self, segments: _Segments) -> tuple[Ints, Ints, Ints]:
        """Return what is read of the files, and to where; see `_Segments.next`."""
        apart = None if self._to is None else self._to * self._width
        return segments.next(self._edges * self._width, _address(self._values), apart)
