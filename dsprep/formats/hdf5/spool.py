"""An HDF5 file whose sizes are known only at the end: ragged fields, or compressed chunks.

Until then the pieces are appended to two files in the folder ``PATH.spool``:

``data``
    Piece after piece; within a piece stream after stream. A fixed field is one stream, its rows
    or, if it is compressed, its encoded chunks; a second stream has the chunks' sizes. A ragged
    field is two: its rows, and their numbers per sample. Numbers are little-endian int64.
``pieces``
    For each piece the bytes of each of its streams, as int64.

`SpoolWriter.finish` makes the HDF5 file and moves the bytes to their places, within the kernel
where they need no change. It reads the folder only, so it can be killed and repeated.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import Arena, Array, Batch, Ragged, Schema
from dsprep.core.storage import (
    Buffer,
    close,
    copy_range,
    pread_into,
    pwrite_all,
    remove,
    sync,
)
from dsprep.errors import FormatError, TargetError
from dsprep.formats.base import State, Writer
from dsprep.formats.hdf5.chunks import encode_chunk
from dsprep.formats.hdf5.create import build
from dsprep.formats.hdf5.guard import library
from dsprep.formats.hdf5.plan import FieldPlan
from dsprep.formats.hdf5.writer import contiguous

_INT = np.dtype("<i8")
_COUNTS_AT_ONCE = 1 << 20


@dataclass(eq=False)
class _Piece:
    """Samples ready to be appended.

    Attributes
    ----------
    buffers
        The bytes, stream after stream.
    sizes
        int64, shape ``(streams,)``: the bytes of each stream.
    number, offset
        Which piece it is, and its place in ``data``; given by `SpoolWriter.reserve`.
    """

    buffers: list[Buffer] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    number: int = -1
    offset: int = -1

    def add(self, *buffers: Buffer) -> None:
        """Append a stream."""
        self.buffers += buffers
        self.sizes.append(sum(b.nbytes if isinstance(b, np.ndarray) else len(b) for b in buffers))


class SpoolWriter(Writer):
    """Writes any schema, compressed or not."""

    def __init__(
        self,
        path: Path,
        schema: Schema,
        plans: Sequence[FieldPlan],
        count: int,
        unit: int,
        state: State | None,
    ) -> None:
        self._path, self._schema, self._plans, self._count = path, schema, plans, count
        self.unit = unit
        self._streams = [2 if p.field.ragged or p.eager else 1 for p in plans]
        self._folder = Path(f"{path}.spool")
        self._pieces, self._nbytes = 0, 0
        self._data, self._index = -1, -1
        if state is None:
            remove(self._folder)
            self._folder.mkdir(parents=True)
        else:
            self._pieces, self._nbytes = int(state["pieces"]), int(state["bytes"])
        self._open()

    def _open(self) -> None:
        """Open the spool, and cut off what an interrupted run wrote after its checkpoint."""
        flags = os.O_RDWR | os.O_CREAT
        rows = self._pieces * sum(self._streams) * _INT.itemsize
        try:
            self._data = os.open(self._folder / "data", flags, 0o666)
            self._index = os.open(self._folder / "pieces", flags, 0o666)
            sizes = os.fstat(self._data).st_size, os.fstat(self._index).st_size
        except FileNotFoundError:
            sizes = (-1, -1)
        if sizes[0] < self._nbytes or sizes[1] < rows:
            self.close()
            raise TargetError(
                "the samples written so far are gone",
                where=self._folder,
                fix="start again with --restart",
            )
        # Not when nothing is to be cut: ext4 writes a file that was cut to 0 out when it is closed.
        if sizes[0] > self._nbytes:
            os.ftruncate(self._data, self._nbytes)
        if sizes[1] > rows:
            os.ftruncate(self._index, rows)

    # --- while the samples come ---

    def encode(self, batch: Batch, start: int, arena: Arena) -> _Piece:
        """Return the samples as streams of bytes; compress the chunks of fixed fields."""
        piece = _Piece()
        for p in self._plans:
            column = batch[p.field.name]
            key = f"write.{p.field.name}"
            if isinstance(column, Ragged):
                piece.add(contiguous(column.values, p.field.dtype, arena, key))
                piece.add(column.lengths.astype(_INT))
                continue
            rows = contiguous(column, p.field.dtype, arena, key)
            if p.eager:
                chunks = list(_encode_chunks(rows, p, p.chunk_rows(self._count)))
                piece.add(*chunks)
                piece.add(np.array([len(c) for c in chunks], _INT))
            else:
                piece.add(rows)
        return piece

    def reserve(self, piece: _Piece) -> None:
        """Append the piece to the spool."""
        piece.number, piece.offset = self._pieces, self._nbytes
        self._pieces += 1
        self._nbytes += sum(piece.sizes)

    def write(self, piece: _Piece) -> None:
        """Write the piece at its place in the spool."""
        pwrite_all(self._data, piece.buffers, piece.offset)
        sizes = np.array(piece.sizes, _INT)
        pwrite_all(self._index, [sizes], piece.number * sizes.nbytes)

    def checkpoint(self) -> State:
        """Return the length of the spool."""
        return {"pieces": self._pieces, "bytes": self._nbytes}

    def sync(self) -> None:
        """Make the spool durable."""
        sync(self._data, data=True)
        sync(self._index, data=True)

    def close(self) -> None:
        """Close the spool."""
        both, self._data, self._index = (self._data, self._index), -1, -1
        close(*(fd for fd in both if fd >= 0))

    # --- when all are there ---

    def finish(self) -> None:
        """Make the HDF5 file from the spool."""
        streams = self._read_streams()
        totals = {
            p.field.name: streams[i][0].nbytes // max(1, p.field.row_nbytes)
            for i, p in enumerate(self._plans)
            if p.field.ragged
        }
        for i, p in enumerate(self._plans):
            if p.field.ragged and not p.field.row_nbytes:  # rows without bytes: their number
                totals[p.field.name] = sum(int(c.sum()) for c in _counts(streams[i][1]))
        with (
            library(self._path, "the file cannot be made"),
            build(self._path, self._schema, self._plans, self._count, totals) as file,
        ):
            offsets = self._place(file, streams, totals)
        fd = os.open(self._path, os.O_RDWR)
        try:
            self._fill(fd, offsets, streams)
            if self.durable:
                sync(fd)
        finally:
            close(fd)
        self.close()

    def clean(self) -> None:
        """Remove the spool."""
        remove(self._folder)

    def _read_streams(self) -> list[list[_Stream]]:
        """Return, for each field, its one or two streams."""
        width = sum(self._streams)
        table = np.empty((self._pieces, width), _INT)
        pread_into(self._index, table, 0, self._folder / "pieces")
        ends = np.cumsum(table.reshape(-1)).reshape(table.shape)
        if table.size and int(ends[-1, -1]) != self._nbytes:
            raise FormatError("the list of pieces is damaged", where=self._folder)
        starts = ends - table
        found, k = [], 0
        for n in self._streams:
            found.append([_Stream(self._data, starts[:, j], table[:, j]) for j in range(k, k + n)])
            k += n
        return found

    def _place(
        self, file: Any, streams: list[list[_Stream]], totals: dict[str, int]
    ) -> list[dict[str, int]]:
        """Write all chunks; return the offsets of each field's contiguous datasets, by part."""
        offsets: list[dict[str, int]] = []
        for p, (values, *_), stream in zip(self._plans, streams, streams, strict=True):
            item = file[p.field.name]
            parts = {"values": item["values"] if p.field.ragged else item}
            if p.field.ragged:
                parts |= {"first": item["first"], "count": item["count"]}
            rows = totals[p.field.name] if p.field.ragged else self._count
            if p.chunk_rows(rows):
                dataset = parts.pop("values")
                chunks = _eager_chunks(*stream) if p.eager else _late_chunks(values, p, rows)
                with library(self._path, f"field {p.field.name} cannot be written"):
                    at = [0] * dataset.ndim
                    for data in chunks:
                        dataset.id.write_direct_chunk(tuple(at), data)
                        at[0] += dataset.chunks[0]
            offsets.append({k: d.id.get_offset() for k, d in parts.items() if d.nbytes})
        return offsets

    def _fill(self, fd: int, offsets: list[dict[str, int]], streams: list[list[_Stream]]) -> None:
        """Move the bytes of the contiguous datasets to their places."""
        for places, stream in zip(offsets, streams, strict=True):
            if "values" in places:
                stream[0].copy(fd, places["values"])
            if "count" in places:
                stream[1].copy(fd, places["count"])
                rows, at = 0, places["first"]
                for counts in _counts(stream[1]):
                    first = np.cumsum(counts) - counts + rows
                    at += pwrite_all(fd, [first.astype(_INT)], at)
                    rows += int(counts.sum())


def _encode_chunks(rows: Array, p: FieldPlan, chunk: int) -> Iterator[Buffer]:
    for start in range(0, len(rows), chunk):
        part = rows[start : start + chunk].reshape(-1).view(np.uint8)
        yield encode_chunk(part, p, chunk)


def _counts(stream: _Stream) -> Iterator[NDArray[np.int64]]:
    for data in stream.blocks(_COUNTS_AT_ONCE * _INT.itemsize):
        yield data.view(_INT)


def _eager_chunks(values: _Stream, sizes: _Stream) -> Iterator[bytes]:
    """Yield the chunks that were encoded with the pieces."""
    reader = values.reader()
    for block in _counts(sizes):
        for nbytes in block.tolist():
            yield reader(nbytes).tobytes()


def _late_chunks(values: _Stream, p: FieldPlan, rows: int) -> Iterator[bytes]:
    """Yield the chunks of a field that is spooled raw, encoded on all processors."""
    chunk = p.chunk_rows(rows)
    threads = len(os.sched_getaffinity(0))
    waiting: list[Any] = []
    with ThreadPoolExecutor(threads) as pool:
        for block in values.blocks(chunk * p.field.row_nbytes):
            waiting.append(pool.submit(encode_chunk, block, p, chunk))
            if len(waiting) > 2 * threads:
                yield bytes(waiting.pop(0).result())
        for future in waiting:
            yield bytes(future.result())


@dataclass(frozen=True, eq=False)
class _Stream:
    """One stream of all pieces.

    Attributes
    ----------
    fd
        The file ``data``.
    starts, sizes
        int64, shape ``(pieces,)``: where its bytes lie.
    """

    fd: int
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        """All bytes of the stream."""
        return int(self.sizes.sum())

    def copy(self, fd: int, offset: int) -> None:
        """Copy the stream to one place in another file."""
        for start, size in zip(self.starts.tolist(), self.sizes.tolist(), strict=True):
            copy_range(self.fd, fd, size, start, offset)
            offset += size

    def blocks(self, nbytes: int) -> Iterator[Array]:
        """Yield the stream in blocks of `nbytes`; the last one may be shorter."""
        reader, left = self.reader(), self.nbytes
        while left:
            yield reader(min(nbytes, left))
            left -= min(nbytes, left)

    def reader(self) -> _Reader:
        """Return what reads the stream from its beginning."""
        return _Reader(self)


class _Reader:
    """Reads a stream bit by bit, across the ends of pieces."""

    def __init__(self, stream: _Stream) -> None:
        self._stream, self._piece, self._done = stream, 0, 0

    def __call__(self, nbytes: int) -> Array:
        """Return the next `nbytes` bytes, which must be there."""
        out = np.empty(nbytes, np.uint8)
        filled = 0
        while filled < nbytes:
            left = int(self._stream.sizes[self._piece]) - self._done
            take = min(left, nbytes - filled)
            at = int(self._stream.starts[self._piece]) + self._done
            pread_into(self._stream.fd, out[filled : filled + take], at, "the spool")
            filled += take
            self._done += take
            if take == left:
                self._piece, self._done = self._piece + 1, 0
        return out
