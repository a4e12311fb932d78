"""The writer of HDF5 files; their bytes depend only on the samples.

Where all sizes are known, every byte has its offset before the first sample comes. The library
makes the file with all metadata and allocates the data; then it is closed, and the samples are
written with ``pwrite`` at the addresses that it chose, rows of ragged fields behind those of
earlier samples. So pieces may be written in any order and from any thread, an interrupted file
continues where it was, and a killed run never leaves the library's metadata half-written.

Sizes of compressed chunks, and of ragged fields of which the source does not give the rows, are
known only at the end. Until then each dataset has a file of its own in the folder ``PATH.spool``:
its rows back to back, or its chunks as they were encoded, each with its size as little-endian int64
before it. `Hdf5Writer.finish` makes the HDF5 file and moves the bytes to their offsets, within the
kernel where they need no change. It reads the folder only, so it can be killed and repeated.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from dsprep.core.schema import Arena, Array, Batch, Ints, Ragged
from dsprep.errors import FormatError, TargetError
from dsprep.formats.base import State
from dsprep.formats.hdf5.create import allocate, build, by_group, find, regular, write_groups
from dsprep.formats.hdf5.guard import hdf5_errors
from dsprep.formats.hdf5.plan import AllocatedDataset, Hdf5Plan
from dsprep.formats.index_tables import row_laws
from dsprep.formats.record_writer import RecordWriter
from dsprep.formats.stored_rows import contiguous, spans
from dsprep.layout.laws import Law
from dsprep.layout.model import Column, FileLayout, Grid
from dsprep.storage.checksums import combine, crc32c, pwrite_crc32c
from dsprep.storage.durable import close, preallocate, start_sync, sync
from dsprep.storage.paths import open_file
from dsprep.storage.ranges import Buffer, as_bytes, copy_range, fstat, pread_into, pwrite_all
from dsprep.storage.trees import remove

_INT = np.dtype("<i8")
_BLOCK = 8 << 20
_TABLES = ("first", "count")


@dataclass(eq=False)
class _Piece:
    """Samples from `start` on: rows of each dataset, C-contiguous, or its encoded chunks."""

    start: int
    parts: list[Any]
    done: dict[str, int] = field(default_factory=dict)


class Hdf5Writer(RecordWriter):
    """Writes any schema, compressed or not."""

    def __init__(self, file: Hdf5Plan, path: Path, state: State | None) -> None:
        self._file, self.path, self.fd = file, path, -1
        self.unit = file.unit
        self.whole_groups = file.grouped and (file.spooled or file.schema.ragged)
        self._folder = Path(f"{path}.spool")
        self._spool: dict[str, int] = {}  # descriptors, by the path of the dataset
        self._grids: list[Grid] = []
        # Rows of ragged fields, by field, and bytes of encoded chunks, by dataset.
        ragged = [f.name for f in file.schema if f.ragged and not file.grouped]
        encoded = [part.path for part in file.parts if file.encoded(part)]
        self._done = dict.fromkeys((*ragged, *encoded), 0) | (state or {}).get("rows", {})
        if file.spooled:
            self._open_spool(state)
        else:
            if state is None:
                allocate(path, file)
            self._grids = find(path, file)
        self._offsets = [*map(_offsets, self._grids)]
        super().__init__(path, "", file.grouping, state if file.spooled else self.checkpoint())
        if state is None and not file.spooled:
            preallocate(self.fd, 0, fstat(self.fd).st_size)

    def _open_spool(self, state: State | None) -> None:
        new = state is None
        if new:
            remove(self._folder)
            self._folder.mkdir(parents=True)
        try:
            for i, part in enumerate(self._file.parts):
                flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if new else 0)
                self._spool[part.path] = os.open(self._folder / str(i), flags, 0o666)
        except FileNotFoundError as error:
            self.close()
            raise TargetError(
                "the samples written so far are gone",
                where=self._folder,
                fix="start again with --restart",
            ) from error

    # --- while the samples come ---

    def encode(self, batch: Batch, start: int, arena: Arena) -> _Piece:
        """Return the samples as contiguous arrays, mostly the columns themselves, or chunks."""
        file, group, parts = self._file, self._file.grouping.of(start), list[Any]()
        for part in file.parts:
            rows = _rows(file, part, batch, group, arena)
            if file.encoded(part):  # each chunk with its size before
                cuts = range(0, max(1, len(rows)), part.chunk)
                chunks = [bytes(_encode_chunk(rows[at : at + part.chunk], part)) for at in cuts]
                sized = ((len(chunk).to_bytes(8, "little"), chunk) for chunk in chunks)
                parts.append([*chain.from_iterable(sized)])
            else:
                parts.append(rows)
        return _Piece(start, parts)

    @override
    def reserve(self, piece: _Piece) -> None:
        # In groups all rows have their offsets.
        piece.done = dict(self._done)
        for part, rows in zip(self._file.parts, piece.parts, strict=True):
            name = part.plan.field.name
            if self._file.encoded(part):
                self._done[part.path] += sum(map(len, rows))
            elif part.role == "first" and name in self._done:
                rows += piece.done[name]
            elif part.role == "count" and name in self._done:
                self._done[name] += int(rows.sum())
                if self._done[name] > self._file.totals.get(name, self._done[name]):
                    raise _changed(name, self._file.totals[name], self._done[name], self.path)

    def write(self, piece: _Piece) -> None:
        """Write the piece at its offsets."""
        file, group = self._file, self._file.grouping.of(piece.start)
        for i, (part, rows) in enumerate(zip(file.parts, piece.parts, strict=True)):
            if file.encoded(part):
                pwrite_all(self._spool[part.path], rows, piece.done[part.path])
                continue
            first = piece.start
            if part.role == "values":
                first = piece.done.get(part.plan.field.name, group * part.chunk)
            if file.spooled:
                pwrite_all(self._spool[part.path], [rows], first * part.row_nbytes)
                continue
            last = first + len(rows)
            for offset, low, high in spans(
                self._offsets[i], part.chunk or last, part.row_nbytes, first, last
            ):
                data = rows[low - first : high - first]
                if self.grouping is None:
                    pwrite_all(self.fd, [data], offset)
                elif data.nbytes:
                    crc = pwrite_crc32c(self.fd, [data], offset)
                    self.sums.add(group, offset, data.nbytes, crc)

    def checkpoint(self) -> State:
        """Return the rows of ragged fields, and the bytes of chunks, that have been reserved."""
        return {"rows": dict(self._done)}

    @override
    def sync(self) -> None:
        for fd in self._spool.values() if self._file.spooled else (self.fd,):
            sync(fd, data=True)

    @override
    def close(self) -> None:
        super().close()
        spool, self._spool = self._spool, {}
        close(*spool.values())

    # --- when all are there ---

    @override
    def finish(self) -> None:
        # Without a spool, the file has been complete since the last piece.
        for name, rows in self._file.totals.items():
            if self._done.get(name, rows) != rows:
                raise _changed(name, self._file.totals[name], self._done[name], self.path)
        if self._file.spooled:
            (self._finish_groups if self._file.grouped else self._finish_fields)()
        if self.durable:
            sync(self.fd)
        self.close()

    def _finish_groups(self) -> None:
        file = self._file
        self._crcs = np.zeros(file.grouping.count, np.int64)

        def groups() -> Iterator[Sequence[Buffer]]:
            for g, chunks in enumerate(zip(*map(self._chunks, file.parts), strict=True)):
                crc = 0
                for data in chunks:
                    crc = combine(crc, crc32c(data), len(data))
                self._crcs[g] = crc
                yield chunks

        self._grids = write_groups(self.path, file, groups())

    def _finish_fields(self) -> None:
        rows = {f.name: self._done[f.name] for f in self._file.schema if f.ragged}
        file = self._file.with_totals(rows)
        with build(self.path, file) as made:
            for part in (p for p in file.parts if p.chunk):
                with hdf5_errors(self.path, f"field {part.plan.field.name} cannot be written"):
                    dataset, corner = made[part.path], [0] * len(part.shape)
                    for data in self._chunks(part):
                        dataset.id.write_direct_chunk(tuple(corner), data)
                        corner[0] += part.chunk
        self._grids = find(self.path, file)
        preallocate(self.fd, 0, fstat(self.fd).st_size)
        for part, grid in zip(file.parts, self._grids, strict=True):
            nbytes = 0 if part.chunk else part.rows * part.row_nbytes
            for at in range(0, nbytes, _BLOCK):
                size = min(_BLOCK, nbytes - at)
                copy_range(
                    self._spool[part.path], self.fd, size, at, grid.blocks.offsets.one(0) + at
                )
                if self.durable:
                    start_sync(self.fd)
        self._file = file

    def _chunks(self, part: AllocatedDataset) -> Iterator[Buffer]:
        """Yield the chunks of a spooled dataset, encoded now on all processors if they are not."""
        fd = self._spool[part.path]
        if self._file.encoded(part):
            at = 0
            while at < self._done[part.path]:
                size = int(self._block(fd, at, _INT.itemsize).view(_INT)[0])
                yield self._block(fd, at + _INT.itemsize, size)
                at += _INT.itemsize + size
            return
        threads, nbytes = len(os.sched_getaffinity(0)), part.rows * part.row_nbytes
        with ThreadPoolExecutor(threads) as pool:
            for begin in range(0, nbytes, 2 * threads * part.nbytes):
                cuts = range(begin, min(begin + 2 * threads * part.nbytes, nbytes), part.nbytes)
                blocks = [self._block(fd, at, min(part.nbytes, nbytes - at)) for at in cuts]
                yield from pool.map(_encode_chunk, blocks, [part] * len(blocks))

    def _block(self, fd: int, at: int, nbytes: int) -> Array:
        block = np.empty(nbytes, np.uint8)
        pread_into(fd, block, at, self._folder)
        return block

    @override
    def layout(self) -> FileLayout:
        file = self._file
        grids = {part.path: grid for part, grid in zip(file.parts, self._grids, strict=True)}
        tables = {p.path: np.empty(p.rows, _INT) for p in file.parts if p.role in _TABLES}
        with closing(open_file(self.path)) as opened:
            for name, table in tables.items():
                chunk, offsets = grids[name].chunk[0], _offsets(grids[name])
                for offset, low, high in spans(offsets, chunk, _INT.itemsize, 0, len(table)):
                    opened.pread_into(table[low:high], offset)
        columns = {}
        for f in file.schema:
            rows: tuple[Law, ...] = ()
            if f.ragged:
                first = tables[f"{f.name}/first"]
                rows = row_laws(first, first + tables[f"{f.name}/count"])
            values = grids.get(f"{f.name}/values" if f.ragged else f.name)
            columns[f.name] = Column(values, 1, *rows)
        return FileLayout(file.count, columns=columns)

    @override
    def clean(self) -> None:
        remove(self._folder)

    @override
    def sum_of(self, group: int, begin: int, end: int) -> int | None:
        # In a file whose groups are not as planned, other things may be between the chunks.
        if not self._regular:
            return None
        if self._file.spooled:
            return int(self._crcs[group])
        used = sum(int(p.used[group]) * p.row_nbytes for p in self._file.parts)
        return self.sums.of(group, begin, end, used)

    @override
    def group_ranges(self, edges: Ints) -> tuple[Ints, Ints]:
        file = self._file
        begins, sizes = by_group(self._grids, file)
        self._regular = regular(begins, sizes, file)
        if not file.spooled:
            sizes = np.array([p.used * p.row_nbytes for p in file.parts], np.int64)
        if not len(begins):
            begins = sizes = np.zeros((1, file.grouping.count), np.int64)
        first = begins.min(axis=0)
        return first, np.maximum(np.where(sizes > 0, begins + sizes, 0).max(axis=0), first)


def _offsets(grid: Grid) -> Ints:
    return grid.blocks.offsets.span(0, grid.blocks.count)


# --- rows and chunks --------------------------------------------------------------------------


def _rows(file: Hdf5Plan, part: AllocatedDataset, batch: Batch, group: int, arena: Arena) -> Array:
    """Return the rows of a dataset for samples of one group: a C-contiguous array."""
    name = part.plan.field.name
    column = batch[name]
    if not isinstance(column, Ragged):
        return contiguous(column, arena, f"write.{name}")
    if part.role == "count":
        return column.lengths.astype(_INT)
    if part.role == "first":
        return (column.offsets[:-1] + group * part.plan.chunk * file.grouped).astype(_INT)
    if file.grouped and len(column.values) != part.used[group]:
        raise _changed(name, part.used[group], len(column.values), f"group {group}")
    return contiguous(column.values, arena, f"write.{name}")


def _changed(name: str, expected: int, found: int, where: object) -> FormatError:
    return FormatError(
        f"field {name} has changed since its rows were counted",
        where=where,
        expected=f"{expected} rows",
        found=found,
        fix="start again with --restart",
    )


def _encode_chunk(rows: Array, part: AllocatedDataset) -> Buffer:
    """Return rows, filled up with zeros, as one chunk; tables of rows are not compressed."""
    flat, p = rows.reshape(-1).view(np.uint8), part.plan
    if len(flat) < part.nbytes:
        flat = np.concatenate([flat, np.zeros(part.nbytes - len(flat), np.uint8)])
    if part.role in _TABLES or p.codec is None:
        return flat
    if p.shuffle:
        # First the first byte of all elements, then the second of all: filter 2 of HDF5.
        flat = np.ascontiguousarray(flat.reshape(-1, p.carrier.stored.itemsize).T).reshape(-1)
    if p.codec == "gzip":
        return zlib.compress(as_bytes(flat), p.level)
    from numcodecs.zstd import Zstd

    return bytes(Zstd(level=p.level).encode(flat))
