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
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.errors import FormatError
from dsprep.formats.base import State, Writer
from dsprep.gathering import take
from dsprep.permutation import Permutation
from dsprep.schema import Arena, Array, Batch, Ints, Ragged, Schema
from dsprep.storage import IOV_MAX, Buffer, as_bytes, pread_into, pwrite_all


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
    state
        What `checkpoint` returned in an earlier run that is to be continued.
    """

    def __init__(
        self,
        directory: Path,
        schema: Schema,
        order: Permutation,
        bucket_samples: int,
        state: State | None,
    ) -> None:
        self._schema, self._order = schema, order
        self._per_bucket = bucket_samples
        self._buckets = -(-len(order) // bucket_samples)
        self._runs = int(state["runs"]) if state else 0
        self._end = int(state["end"]) if state else 0
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._data = os.open(directory / "runs", flags, 0o666)
        self._index = os.open(directory / "index", flags, 0o666)
        self._sizes = os.open(directory / "sizes", flags, 0o666)
        self._open = True
        os.ftruncate(self._data, self._end)
        os.ftruncate(self._index, self._runs * index_row_nbytes(self._buckets))

    def encode(self, batch: Batch, start: int, arena: Arena) -> Run:
        """Sort samples ``start ..`` by bucket."""
        count = len(next(iter(batch.values()))) if batch else 0
        numbers = np.arange(start, start + count, dtype=np.int64)
        bucket = self._order.inverse(numbers) // self._per_bucket
        sizes = payload_sizes(self._schema, batch) if self._schema.ragged else bucket[:0]
        batch = take(self._schema, batch, np.argsort(bucket, kind="stable"), arena, "write.runs")
        edges = np.zeros(self._buckets + 1, np.int64)
        np.cumsum(np.bincount(bucket, minlength=self._buckets), out=edges[1:])
        segments = edges * self._schema.fixed_nbytes
        fixed: list[Array] = []
        ragged: list[Ragged] = []
        for column in batch.values():
            if isinstance(column, Ragged):
                ragged.append(column)
                row = column.values[:0].itemsize * int(np.prod(column.values.shape[1:]))
                segments += 8 * edges + column.offsets[edges] * row
            else:
                fixed.append(column)
        lengths = [c.lengths for c in ragged]
        bounds = edges.tolist()
        buffers: list[Buffer] = []
        for i, j in itertools.pairwise(bounds):
            if i < j:
                buffers += [c[i:j] for c in (*fixed, *lengths)]
                buffers += [c.values[c.offsets[i] : c.offsets[j]] for c in ragged]
        return Run(start, segments, buffers, sizes)

    def reserve(self, piece: Run) -> None:
        """Give the run the next place."""
        piece.index, piece.offset = self._runs, self._end
        self._runs += 1
        self._end += int(piece.segments[-1])

    def write(self, piece: Run) -> None:
        """Write the run and its row of the index."""
        pwrite_all(self._data, piece.buffers, piece.offset)
        row = np.append(np.int64(piece.start), piece.segments + piece.offset)
        pwrite_all(self._index, [row], piece.index * row.nbytes)
        pwrite_all(self._sizes, [piece.sizes], piece.start * 8)

    def checkpoint(self) -> State:
        """Return how far it has come."""
        return {"runs": self._runs, "end": self._end}

    def sync(self) -> None:
        """Make all that has been written durable."""
        for fd in (self._data, self._index, self._sizes):
            os.fdatasync(fd)

    def finish(self) -> None:
        """Wait for the disk if `durable`, and close the files."""
        if self.durable:
            self.sync()
        self.close()

    def close(self) -> None:
        """Close the files."""
        if self._open:
            for fd in (self._data, self._index, self._sizes):
                os.close(fd)
        self._open = False


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


class BucketReader:
    """Reads buckets that a `RunWriter` completed."""

    def __init__(
        self, directory: Path, schema: Schema, order: Permutation, bucket_samples: int
    ) -> None:
        self._schema, self._order, self._per_bucket = schema, order, bucket_samples
        self._buckets = -(-len(order) // bucket_samples)
        self._path = directory / "runs"
        self._data = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        self._open = True
        width = index_row_nbytes(self._buckets) // 8
        if len(order):
            self._index: Any = np.memmap(directory / "index", np.int64, "r").reshape(-1, width)
        else:
            self._index = np.zeros((0, width), np.int64)

    def load(self, bucket: int) -> Batch:
        """Return the samples of a bucket in source order, in memory of their own."""
        first = bucket * self._per_bucket
        places = np.arange(first, min(first + self._per_bucket, len(self._order)), dtype=np.int64)
        samples = np.sort(self._order.forward(places))
        starts = self._index[:, 0]
        edges = np.append(np.searchsorted(samples, starts), len(samples))
        offsets, ends = self._index[:, 1 + bucket], self._index[:, 2 + bucket]
        fixed = {
            f.name: np.empty((len(samples), *f.inner), f.dtype)
            for f in self._schema
            if not f.ragged
        }
        lengths = {f.name: np.empty(len(samples), np.int64) for f in self._schema if f.ragged}
        parts = [(int(o), int(e)) for o, e in zip(offsets, ends, strict=True)]
        tables = [*fixed.values(), *lengths.values()]
        bodies = []  # where the rows of the ragged fields begin
        for (i, j), (at, _) in zip(_pairs(edges), parts, strict=True):
            bodies.append(self._fill([t[i:j] for t in tables], at) if i < j else at)
        ragged = self._rows(lengths, edges, bodies, [e for _, e in parts])
        return {f.name: ragged.get(f.name, fixed.get(f.name)) for f in self._schema}  # type: ignore[misc]

    def _rows(
        self, lengths: dict[str, Ints], edges: Ints, bodies: list[int], ends: list[int]
    ) -> dict[str, Ragged]:
        """Return the ragged fields, whose numbers of rows are known."""
        columns = {}
        for name, rows in lengths.items():
            f = self._schema[name]
            total = int(rows.sum())
            if rows.min(initial=0) < 0 or total * f.row_nbytes > self._nbytes():
                raise FormatError("a temporary file is damaged", where=self._path)
            values = np.empty((total, *f.inner), f.dtype)
            columns[name] = Ragged.from_lengths(values, rows, f.kind)
        if not columns:
            return {}
        for (i, j), at, end in zip(_pairs(edges), bodies, ends, strict=True):
            parts = [c.values[c.offsets[i] : c.offsets[j]] for c in columns.values()]
            if self._fill(parts, at) != end:
                raise FormatError("a temporary file is damaged", where=self._path)
        return columns

    def _fill(self, arrays: list[Array], at: int) -> int:
        """Fill arrays with the bytes from `at` on; return where they end."""
        filled = [a for a in arrays if a.nbytes]
        if 1 < len(filled) <= IOV_MAX:  # one call for all, as a rule
            views = [as_bytes(a) for a in filled]
            if os.preadv(self._data, views, at) == sum(map(len, views)):
                return at + sum(map(len, views))
        for a in filled:
            pread_into(self._data, a, at, self._path)
            at += a.nbytes
        return at

    def _nbytes(self) -> int:
        return os.fstat(self._data).st_size

    def close(self) -> None:
        """Close the file."""
        if self._open:
            os.close(self._data)
        self._open = False


def _pairs(edges: Ints) -> list[tuple[int, int]]:
    bounds = edges.tolist()
    return list(itertools.pairwise(bounds))
