"""An HDF5 file whose sizes are known only at the end: ragged fields, or compressed chunks.

Until then the pieces are appended to two files in the folder ``PATH.spool``:

``data``
    Piece after piece; within a piece stream after stream. A fixed field is one stream, its rows
    or, if it is compressed, its encoded chunks; a second stream has the chunks' sizes. A ragged
    field is two: its rows, and their numbers per sample. Numbers are little-endian int64. In groups
    a piece is a group, and each dataset is one stream: its chunk.
``pieces``
    For each piece the bytes of each of its streams, as int64, and the CRC-32C of them all in
    groups (otherwise 0).

`SpoolWriter.finish` makes the HDF5 file and moves the bytes to their places, within the kernel
where they need no change. It reads the folder only, so it can be killed and repeated.
"""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.core.checksums import combine, crc32c
from dsprep.core.schema import Arena, Array, Batch, Ints, Ragged
from dsprep.core.storage import (
    Buffer,
    as_bytes,
    close,
    copy_range,
    pread_into,
    pwrite_all,
    remove,
    sync,
)
from dsprep.errors import FormatError, TargetError
from dsprep.formats.base import State, Writer
from dsprep.formats.hdf5.create import addresses, build, place, together
from dsprep.formats.hdf5.guard import library
from dsprep.formats.hdf5.plan import FieldPlan, FilePlan, Part
from dsprep.formats.hdf5.writer import Sums, contiguous, groups_of, rows_of
from dsprep.layout.model import Groups

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
    crc
        CRC-32C of all of them, in groups.
    number, offset
        Which piece it is, and its place in ``data``; given by `SpoolWriter.reserve`.
    """

    buffers: list[Buffer] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    crc: int = 0
    number: int = -1
    offset: int = -1

    def add(self, *buffers: Buffer) -> None:
        """Append a stream."""
        self.buffers += buffers
        self.sizes.append(sum(b.nbytes if isinstance(b, np.ndarray) else len(b) for b in buffers))


class SpoolWriter(Writer):
    """Writes any schema, compressed or not."""

    def __init__(self, path: Path, file: FilePlan, state: State | None) -> None:
        self._path, self._file = path, file
        self.unit, self.whole = file.unit, file.grouped
        self._streams = [2 if p.field.ragged or p.eager else 1 for p in file.plans]
        # Of a row of the index: a number for each stream, and the CRC.
        self._width = (len(file.parts) if file.grouped else sum(self._streams)) + 1
        self._folder = Path(f"{path}.spool")
        self._pieces, self._nbytes = 0, 0
        self._data, self._index = -1, -1
        self._found: Groups | None = None
        if state is None:
            remove(self._folder)
            self._folder.mkdir(parents=True)
        else:
            self._pieces, self._nbytes = int(state["pieces"]), int(state["bytes"])
        self._open()

    def _open(self) -> None:
        """Open the spool, and cut off what an interrupted run wrote after its checkpoint."""
        flags = os.O_RDWR | os.O_CREAT
        rows = self._pieces * self._width * _INT.itemsize
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
        if self._file.grouped:
            rows = rows_of(self._file, batch, start, arena)
            for part, values in zip(self._file.parts, rows, strict=True):
                data = _encoded(part, values)
                piece.add(data)
                piece.crc = combine(piece.crc, crc32c(data), len(data))
            return piece
        for p in self._file.plans:
            column = batch[p.field.name]
            key = f"write.{p.field.name}"
            if isinstance(column, Ragged):
                piece.add(contiguous(column.values, p.field.dtype, arena, key))
                piece.add(column.lengths.astype(_INT))
                continue
            values = contiguous(column, p.field.dtype, arena, key)
            if p.eager:
                chunk = p.chunk_rows(self._file.count)
                cuts = (values[i : i + chunk] for i in range(0, len(values), chunk))
                chunks = [encode_chunk(c.reshape(-1).view(np.uint8), p, chunk) for c in cuts]
                piece.add(*chunks)
                piece.add(np.array([len(c) for c in chunks], _INT))
            else:
                piece.add(values)
        return piece

    def reserve(self, piece: _Piece) -> None:
        """Append the piece to the spool."""
        piece.number, piece.offset = self._pieces, self._nbytes
        self._pieces += 1
        self._nbytes += sum(piece.sizes)

    def write(self, piece: _Piece) -> None:
        """Write the piece at its place in the spool."""
        pwrite_all(self._data, piece.buffers, piece.offset)
        sizes = np.array([*piece.sizes, piece.crc], _INT)
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
        table = np.empty((self._pieces, self._width), _INT)
        pread_into(self._index, table, 0, self._folder / "pieces")
        sizes = table[:, :-1]
        if int(sizes.sum()) != self._nbytes:
            raise FormatError("the list of pieces is damaged", where=self._folder)
        offsets: list[dict[str, int]] = []
        streams: list[list[_Stream]] = []
        if self._file.grouped:
            place(self._path, self._file, lambda: self._groups(sizes))
        else:
            streams = self._read_streams(sizes)
            totals = self._totals(streams)
            with build(self._path, self._file, totals) as made:
                offsets = self._place(made, streams, totals)
        fd = os.open(self._path, os.O_RDWR)
        try:
            self._fill(fd, offsets, streams)
            if self.durable:
                sync(fd)
        finally:
            close(fd)
        if self._file.grouped:
            self._found = self._located(table[:, -1])
        self.close()

    def groups(self) -> Groups | None:
        """Return where the groups are."""
        return self._found

    def clean(self) -> None:
        """Remove the spool."""
        remove(self._folder)

    # --- in groups ---

    def _groups(self, sizes: Ints) -> Iterator[list[memoryview]]:
        """Yield the groups in order, in memory that the next one uses again."""
        block = np.empty(int(sizes.sum(axis=1).max(initial=0)), np.uint8)
        at = 0
        for row in sizes:
            ends = np.cumsum(row)
            nbytes = int(ends[-1]) if len(ends) else 0
            pread_into(self._data, block[:nbytes], at, self._folder / "data")
            cuts = [0, *ends.tolist()]
            view = block.data
            yield [view[a:b] for a, b in itertools.pairwise(cuts)]
            at += nbytes

    def _located(self, crcs: Ints) -> Groups:
        """Return the groups, from where their chunks are in the file."""
        found, sizes = addresses(self._path, self._file)
        offsets = found.min(axis=0, initial=1 << 62)
        lengths = (found + sizes).max(axis=0, initial=0) - offsets
        if not len(found):
            offsets, lengths = np.zeros_like(crcs), np.zeros_like(crcs)
        if not together(found, sizes):  # what is between the chunks is not in the sums
            sums = Sums(offsets, lengths, np.diff(self._file.grouping.edges))
            sums.complete(self._path)
            crcs = sums.crcs
        return groups_of(self._file, offsets, lengths, np.ascontiguousarray(crcs))

    # --- otherwise ---

    def _read_streams(self, sizes: Ints) -> list[list[_Stream]]:
        """Return, for each field, its one or two streams."""
        starts = np.cumsum(sizes.reshape(-1)).reshape(sizes.shape) - sizes
        found, k = [], 0
        for n in self._streams:
            found.append([_Stream(self._data, starts[:, j], sizes[:, j]) for j in range(k, k + n)])
            k += n
        return found

    def _totals(self, streams: list[list[_Stream]]) -> dict[str, int]:
        """Return the rows of each ragged field."""
        totals = {}
        for p, (values, *rest) in zip(self._file.plans, streams, strict=True):
            if p.field.ragged and p.field.row_nbytes:
                totals[p.field.name] = values.nbytes // p.field.row_nbytes
            elif p.field.ragged:  # rows without bytes: their number
                totals[p.field.name] = sum(int(c.sum()) for c in _counts(rest[0]))
        return totals

    def _place(
        self, file: Any, streams: list[list[_Stream]], totals: dict[str, int]
    ) -> list[dict[str, int]]:
        """Write all chunks; return the offsets of each field's contiguous datasets, by part."""
        offsets: list[dict[str, int]] = []
        for p, (values, *_), stream in zip(self._file.plans, streams, streams, strict=True):
            item = file[p.field.name]
            parts = {"values": item["values"] if p.field.ragged else item}
            if p.field.ragged:
                parts |= {"first": item["first"], "count": item["count"]}
            rows = totals[p.field.name] if p.field.ragged else self._file.count
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


# --- chunks -----------------------------------------------------------------------------------


def encode_chunk(rows: Array, p: FieldPlan, chunk_rows: int) -> Buffer:
    """Return `rows` as one chunk of the dataset that `p` describes.

    Parameters
    ----------
    rows
        uint8, shape ``(n * row_nbytes,)``, with ``n <= chunk_rows``; zeros fill what is missing.
    chunk_rows
        The rows of a whole chunk.
    """
    missing = chunk_rows * p.field.row_nbytes - len(rows)
    if missing:
        rows = np.concatenate([rows, np.zeros(missing, np.uint8)])
    if p.shuffle:
        # First the first byte of all elements, then the second of all: filter 2 of HDF5.
        rows = np.ascontiguousarray(rows.reshape(-1, p.carrier.stored.itemsize).T).reshape(-1)
    if p.codec == "gzip":
        return zlib.compress(as_bytes(rows), p.level)
    if p.codec == "zstd":
        from numcodecs.zstd import Zstd

        return bytes(Zstd(level=p.level).encode(rows))
    return rows


def _encoded(part: Part, rows: Array) -> bytes:
    """Return the chunk of a group; the tables of ragged fields are not compressed."""
    flat = rows.reshape(-1).view(np.uint8)
    if part.role in ("rows", "values"):
        return bytes(encode_chunk(flat, part.plan, part.chunk))
    return flat.tobytes() + bytes(part.nbytes - len(flat))


def _counts(stream: _Stream) -> Iterator[Ints]:
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


# --- streams ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Stream:
    """One stream of all pieces.

    Attributes
    ----------
    fd
        The file ``data``.
    starts, sizes
        int64, shape ``(pieces,)``: where its bytes are.
    """

    fd: int
    starts: Ints
    sizes: Ints

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
