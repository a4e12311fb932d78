"""The two writers of HDF5 files; the bytes of both depend only on the samples.

`PlacedWriter`: every byte has its offset before the first sample comes. The library makes the file
with all metadata and allocates the data; then it is closed, and the samples are written with
``pwrite`` at the addresses that it chose, rows of ragged fields behind those of earlier samples.
So pieces may be written in any order and from any thread, an interrupted file continues where it
was, and a killed run never leaves the library's metadata half-written.

`SpoolWriter`: sizes are known only at the end: those of compressed chunks, and of ragged fields of
which the source does not give the rows beforehand. Until then the pieces are appended to streams,
each a file in the folder ``PATH.spool``. A fixed field is one stream, its rows; if its chunks are
encoded as they come, these, and a second stream has their sizes. A ragged field is two: its rows,
and their numbers per sample. In groups there are two in all: the chunks, group after group, and for
each group their sizes and the CRC-32C of them all. Numbers are little-endian int64.

`SpoolWriter.finish` makes the HDF5 file and moves the bytes to their offsets, within the kernel
where they need no change. It reads the folder only, so it can be killed and repeated.
"""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from typing_extensions import override

from dsprep.core.schema import (
    Arena,
    Array,
    Batch,
    Ints,
    Ragged,
)
from dsprep.errors import FormatError, TargetError
from dsprep.formats.base import State, Writer
from dsprep.formats.hdf5.create import allocate, build, by_group, find, regular, write_groups
from dsprep.formats.hdf5.guard import hdf5_errors
from dsprep.formats.hdf5.plan import AllocatedDataset, FieldPlan, Hdf5Plan
from dsprep.formats.index_tables import laws_of, runs_of
from dsprep.formats.record_writer import RecordWriter, stored_groups
from dsprep.formats.stored_rows import contiguous, spans
from dsprep.layout.laws import Explicit, Law
from dsprep.layout.model import Blocks, Column, FileLayout, Grid, Groups
from dsprep.storage.checksums import combine, crc32c, pwrite_crc32c
from dsprep.storage.durable import close, preallocate, start_sync, sync
from dsprep.storage.paths import open_file
from dsprep.storage.ranges import (
    Buffer,
    as_bytes,
    copy_range,
    fstat,
    pread_into,
    pwrite_all,
    truncate,
)
from dsprep.storage.trees import remove

_INT = np.dtype("<i8")
_BLOCK = 8 << 20


def open_writer(file: Hdf5Plan, path: Path, state: State | None) -> Writer:
    """Start or continue a file: in place, or by way of ``PATH.spool`` if sizes are unknown."""
    return (SpoolWriter if file.spooled else PlacedWriter)(path, file, state)


@dataclass(eq=False)
class _Placed:
    """Samples from `start` on: one C-contiguous array per part.

    Without groups, `first` has the row of each ragged field with which they begin, once reserved.
    """

    start: int
    rows: list[Array]
    first: dict[str, int] = field(default_factory=dict)


class PlacedWriter(RecordWriter):
    """Writes fields without filters: fixed ones, and ragged ones whose rows are known."""

    def __init__(self, path: Path, file: Hdf5Plan, state: State | None) -> None:
        self._file, self.fd = file, -1
        self.whole = file.grouped and file.schema.ragged
        totals = {} if file.grouped else file.totals
        self._done = {**dict.fromkeys(totals, 0), **(state or {}).get("rows", {})}
        if state is None:
            allocate(path, file)
        self._places = find(path, file)
        super().__init__(path, "", file.grouping, self.checkpoint())
        if state is None:
            preallocate(self.fd, 0, fstat(self.fd).st_size)

    def encode(self, batch: Batch, start: int, arena: Arena) -> _Placed:
        """Return the samples as contiguous arrays: mostly the columns themselves."""
        return _Placed(start, _rows_of(self._file, batch, start, arena))

    @override
    def reserve(self, piece: _Placed) -> None:
        # In groups all rows have their offsets.
        piece.first = dict(self._done)
        for part, rows in zip(self._file.parts, piece.rows, strict=True):
            name = part.plan.field.name
            if name in self._done and part.role == "values":
                self._done[name] += len(rows)
                if self._done[name] > part.used[0]:
                    raise self._changed(name)
            elif name in self._done and part.role == "first":
                rows += piece.first[name]

    def _changed(self, name: str) -> FormatError:
        return FormatError(
            f"field {name} has changed since its rows were counted",
            where=self.path,
            expected=f"{self._file.totals[name]} rows",
            found=self._done[name],
            fix="start again with --restart",
        )

    def write(self, piece: _Placed) -> None:
        """Write the piece at its offsets."""
        group = self._file.grouping.of(piece.start)
        for part, (places, _), rows in zip(self._file.parts, self._places, piece.rows, strict=True):
            first = piece.start
            if part.role == "values":
                first = piece.first.get(part.plan.field.name, group * part.chunk)
            last = first + len(rows)
            for offset, low, high in spans(
                places, part.chunk or last, part.row_nbytes, first, last
            ):
                data = rows[low - first : high - first]
                if self.grouping is None:
                    pwrite_all(self.fd, [data], offset)
                elif data.nbytes:
                    crc = pwrite_crc32c(self.fd, [data], offset)
                    self.sums.add(group, offset, data.nbytes, crc)

    def checkpoint(self) -> State:
        """Return the rows of ragged fields that have been reserved."""
        return {"rows": dict(self._done)}

    @override
    def finish(self) -> None:
        # The file has been complete since the last piece.
        for name in self._done:
            if self._done[name] != self._file.totals[name]:
                raise self._changed(name)
        if self.durable:
            sync(self.fd)
        self.close()

    @override
    def layout(self) -> FileLayout:
        return layout_of(self.path, self._file, self._places)

    @override
    def sum_of(self, group: int, begin: int, end: int) -> int | None:
        used = sum(int(p.used[group]) * p.row_nbytes for p in self._file.parts)
        return self.sums.of(group, begin, end, used) if self._regular else None

    @override
    def group_ranges(self, edges: Ints) -> tuple[Ints, Ints]:
        begins, _ = by_group(self._places, self._file)
        # In a file whose groups are not as planned, other things may be between the chunks.
        self._regular = regular(begins, self._file)
        used = np.array([p.used * p.row_nbytes for p in self._file.parts], np.int64)
        return _ranges(self._file, begins, np.where(used > 0, begins + used, 0))


def _ranges(file: Hdf5Plan, begins: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Return where groups begin and end, of the bytes in use of each chunk; 0 is no end."""
    if not len(begins):
        begins = ends = np.zeros((1, file.grouping.count), np.int64)
    first = begins.min(axis=0)
    return first, np.maximum(ends.max(axis=0), first)


def layout_of(path: Path, file: Hdf5Plan, places: Sequence[tuple[Ints, Ints]]) -> FileLayout:
    """Return where the samples of a complete file are, whose datasets have these places."""
    grids, tables = dict[str, Grid](), dict[str, Ints]()
    with closing(open_file(path)) as opened:
        for part, (offsets, sizes) in zip(file.parts, places, strict=True):
            shape, plan = part.shape, part.plan
            if part.role in ("first", "count"):
                table = tables[part.path] = np.empty(shape, _INT)
                chunk = part.chunk or part.rows
                for offset, low, high in spans(offsets, chunk, _INT.itemsize, 0, part.rows):
                    opened.pread_into(table[low:high], offset)
                continue
            grids[plan.field.name] = Grid(
                Blocks(Explicit(offsets), Explicit(sizes)),
                shape,
                plan.carrier.stored.itemsize,
                (part.chunk or part.rows, *shape[1:]),
                filters=plan.filters,
            )
    columns = {}
    for f in file.schema:
        rows: tuple[Law, ...] = ()
        if f.ragged:
            first = tables[f"{f.name}/first"]
            end = first + tables[f"{f.name}/count"]
            rows = laws_of(lambda a, b: runs_of(first[a:b], end[a:b]), file.count)  # noqa: B023
        columns[f.name] = Column(grids.get(f.name), 1, *rows)
    return FileLayout(file.count, columns=columns)


# --- sizes unknown beforehand -----------------------------------------------------------------


_Appended: TypeAlias = list[tuple[list[Buffer], list[int]]]
"""Samples ready to be appended: the bytes for each stream, and from `reserve` on their offset."""


_Spooled: TypeAlias = "tuple[FieldPlan, _Stream, _Stream | None]"
"""The values of a field; and the rows of samples, or the sizes of chunks encoded as they came."""


class SpoolWriter(Writer):
    """Writes any schema, compressed or not."""

    def __init__(self, path: Path, file: Hdf5Plan, state: State | None) -> None:
        self._path, self._file = path, file
        self.unit, self.whole = file.unit, file.grouped
        self._folder = Path(f"{path}.spool")
        self._written_groups: Groups | None = None
        numbered = [False, True] if file.grouped else []
        for p in () if file.grouped else file.plans:
            numbered += [False, True] if p.field.ragged or p.eager else [False]
        if state is None:
            remove(self._folder)
            self._folder.mkdir(parents=True)
        self._streams: list[_Stream] = []
        try:
            # A run of a version that kept one file for all streams has none of these lengths.
            lengths = [0] * len(numbered) if state is None else [int(n) for n in state["streams"]]
            for i, length in enumerate(lengths):
                self._streams.append(_Stream(self._folder / str(i), length, new=state is None))
        except (FileNotFoundError, KeyError) as error:
            self.close()
            raise TargetError(
                "the samples written so far are gone",
                where=self._folder,
                fix="start again with --restart",
            ) from error

    # --- while the samples come ---

    def encode(self, batch: Batch, start: int, arena: Arena) -> _Appended:
        """Return the samples as streams of bytes; compress the chunks of fixed fields."""
        if self._file.grouped:
            rows, crc = _rows_of(self._file, batch, start, arena), 0
            chunks = [_encoded(p, values) for p, values in zip(self._file.parts, rows, strict=True)]
            for data in chunks:
                crc = combine(crc, crc32c(data), len(data))
            return [([*chunks], []), ([np.array([*map(len, chunks), crc], _INT)], [])]
        streams: list[list[Buffer]] = []
        for p in self._file.plans:
            column = batch[p.field.name]
            key = f"write.{p.field.name}"
            if isinstance(column, Ragged):
                values = contiguous(column.values, arena, key)
                streams += [[values], [column.lengths.astype(_INT)]]
                continue
            values = contiguous(column, arena, key)
            if not p.eager:
                streams.append([values])
                continue
            chunk = p.chunk_rows(self._file.count)
            cuts = (values[i : i + chunk] for i in range(0, len(values), chunk))
            encoded = [_encode_chunk(c.reshape(-1).view(np.uint8), p, chunk) for c in cuts]
            streams += [encoded, [np.array([len(c) for c in encoded], _INT)]]
        return [(buffers, []) for buffers in streams]

    def reserve(self, piece: _Appended) -> None:
        """Append the piece to the spool."""
        for stream, (buffers, at) in zip(self._streams, piece, strict=True):
            at.append(stream.nbytes)
            stream.nbytes += sum(
                len(as_bytes(b)) if isinstance(b, np.ndarray) else len(b) for b in buffers
            )

    def write(self, piece: _Appended) -> None:
        """Write the piece at its place in the spool."""
        for stream, (buffers, (at,)) in zip(self._streams, piece, strict=True):
            pwrite_all(stream.fd, buffers, at)

    def checkpoint(self) -> State:
        """Return the lengths of the streams."""
        return {"streams": [stream.nbytes for stream in self._streams]}

    def sync(self) -> None:
        """Make the spool durable."""
        for stream in self._streams:
            sync(stream.fd, data=True)

    def close(self) -> None:
        """Close the spool."""
        fds = [stream.fd for stream in self._streams if stream.fd >= 0]
        for stream in self._streams:
            stream.fd = -1
        close(*fds)

    # --- when all are there ---

    def finish(self) -> None:
        """Make the HDF5 file from the spool."""
        if self._file.grouped:
            self._finish_groups()
        else:
            self._finish_fields()
        with closing(open_file(self._path)) as file:
            if self.durable:
                sync(file.fd)
        self.close()

    def _finish_groups(self) -> None:
        table = np.concatenate([np.empty(0, _INT), *self._streams[1].numbers()])
        table = table.reshape(-1, len(self._file.parts) + 1)
        begins, stored, together = write_groups(
            self._path, self._file, lambda: self._groups(table[:, :-1])
        )

        def known(group: int, begin: int, end: int) -> int | None:
            # What is between the chunks is not in the sums of the pieces.
            return int(table[group, -1]) if together else None

        ranges = _ranges(self._file, begins, begins + stored)
        self._written_groups = stored_groups(
            lambda _: self._path, self._file.grouping, *ranges, known
        )

    def _finish_fields(self) -> None:
        left, fields = iter(self._streams), list[_Spooled]()
        for p in self._file.plans:
            numbers = p.field.ragged or p.eager
            fields.append((p, next(left), next(left) if numbers else None))
        totals = {p.field.name: _count_rows(p, v, n) for p, v, n in fields if p.field.ragged and n}
        self._file, places = self._file.with_totals(totals), []
        with build(self._path, self._file) as made:
            for p, values, lengths in fields:
                with hdf5_errors(self._path, f"field {p.field.name} cannot be written"):
                    rows = totals.get(p.field.name, self._file.count)
                    places.append(_place(made, p, rows, values, lengths))
        fd = os.open(self._path, os.O_RDWR)
        try:
            preallocate(fd, 0, fstat(fd).st_size)
            for (_, values, lengths), offsets in zip(fields, places, strict=True):
                _fill(fd, offsets, values, lengths, self.durable)
        finally:
            close(fd)

    def groups(self) -> Groups | None:
        """Return where the groups are."""
        return self._written_groups

    @override
    def layout(self) -> FileLayout:
        return layout_of(self._path, self._file, find(self._path, self._file))

    def clean(self) -> None:
        """Remove the spool."""
        remove(self._folder)

    def _groups(self, sizes: Ints) -> Iterator[list[memoryview]]:
        """Yield the groups in order, each as the bytes of its chunks."""
        blocks = self._streams[0].blocks(sizes.sum(axis=1).tolist())
        for row, block in zip(sizes, blocks, strict=True):
            cuts = [0, *np.cumsum(row).tolist()]
            yield [block.data[a:b] for a, b in itertools.pairwise(cuts)]


def _count_rows(p: FieldPlan, values: _Stream, numbers: _Stream) -> int:
    """Return the rows of a ragged field; of those without bytes the numbers alone are there."""
    nbytes = p.field.row_nbytes
    return values.nbytes // nbytes if nbytes else sum(int(n.sum()) for n in numbers.numbers())


def _place(
    file: Any, p: FieldPlan, rows: int, values: _Stream, numbers: _Stream | None
) -> dict[str, int]:
    """Write all chunks of a field; return the offsets of its contiguous datasets."""
    item = file[p.field.name]
    parts = {"values": item}
    if p.field.ragged:
        parts = {name: item[name] for name in ("values", "first", "count")}
    if p.chunk_rows(rows):
        dataset, chunks = parts.pop("values"), _late_chunks(values, p, rows)
        if p.eager and numbers is not None:
            sizes = itertools.chain.from_iterable(n.tolist() for n in numbers.numbers())
            chunks = (block.tobytes() for block in values.blocks(sizes))
        at = [0] * dataset.ndim
        for data in chunks:
            dataset.id.write_direct_chunk(tuple(at), data)
            at[0] += dataset.chunks[0]
    return {name: d.id.get_offset() for name, d in parts.items() if d.nbytes}


def _fill(
    fd: int, offsets: dict[str, int], values: _Stream, numbers: _Stream | None, durable: bool
) -> None:
    """Move the bytes of contiguous datasets to their offsets."""
    if "values" in offsets:
        values.copy(fd, offsets["values"], durable)
    if "count" in offsets and numbers is not None:
        numbers.copy(fd, offsets["count"], durable)
        rows, at = 0, offsets["first"]
        for counts in numbers.numbers():
            first = np.cumsum(counts) - counts + rows
            at += pwrite_all(fd, [first.astype(_INT)], at)
            rows += int(counts.sum())


# --- chunks -----------------------------------------------------------------------------------


def _encode_chunk(rows: Array, p: FieldPlan, chunk_rows: int) -> Buffer:
    """Return the bytes of `rows`, filled up with zeros, as one chunk of that many rows of `p`."""
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


def _encoded(part: AllocatedDataset, rows: Array) -> bytes:
    """Return the chunk of a group; the tables of ragged fields are not compressed."""
    flat = rows.reshape(-1).view(np.uint8)
    if part.role in ("rows", "values"):
        return bytes(_encode_chunk(flat, part.plan, part.chunk))
    return flat.tobytes() + bytes(part.nbytes - len(flat))


def _late_chunks(values: _Stream, p: FieldPlan, rows: int) -> Iterator[bytes]:
    """Yield the chunks of a field that is spooled raw, encoded on all processors."""
    chunk = p.chunk_rows(rows)
    threads = len(os.sched_getaffinity(0))
    waiting: list[Any] = []
    with ThreadPoolExecutor(threads) as pool:
        for block in values.even_blocks(chunk * p.field.row_nbytes):
            waiting.append(pool.submit(_encode_chunk, block, p, chunk))
            if len(waiting) > 2 * threads:
                yield bytes(waiting.pop(0).result())
        for future in waiting:
            yield bytes(future.result())


# --- streams ----------------------------------------------------------------------------------


class _Stream:
    """A file of the spool: `nbytes` of it count, what is behind them is cut off."""

    def __init__(self, path: Path, nbytes: int, *, new: bool) -> None:
        self.path, self.nbytes = path, nbytes
        self.fd = os.open(path, os.O_RDWR | (os.O_CREAT if new else 0), 0o666)
        size = fstat(self.fd).st_size
        if size < nbytes:
            os.close(self.fd)
            raise FileNotFoundError(path)
        # Only where something must be cut: ext4 flushes a file that was cut to 0 when it is closed.
        if size > nbytes:
            truncate(self.fd, nbytes)

    def copy(self, fd: int, offset: int, durable: bool) -> None:
        """Copy the stream to a place in another file; with `durable` the disk begins with it."""
        for at in range(0, self.nbytes, _BLOCK):
            copy_range(self.fd, fd, min(_BLOCK, self.nbytes - at), at, offset + at)
            if durable:
                start_sync(fd)

    def blocks(self, sizes: Iterable[int]) -> Iterator[Array]:
        """Yield the stream in blocks of these sizes."""
        at = 0
        for nbytes in sizes:
            block = np.empty(nbytes, np.uint8)
            pread_into(self.fd, block, at, self.path)
            at += nbytes
            yield block

    def even_blocks(self, nbytes: int) -> Iterator[Array]:
        """Yield the stream in blocks of one size; the last one may be shorter."""
        return self.blocks(min(nbytes, self.nbytes - at) for at in range(0, self.nbytes, nbytes))

    def numbers(self) -> Iterator[Ints]:
        """Yield the stream as numbers, some at a time."""
        return (block.view(_INT) for block in self.even_blocks(_BLOCK))


# --- rows -------------------------------------------------------------------------------------


def _rows_of(file: Hdf5Plan, batch: Batch, start: int, arena: Arena) -> list[Array]:
    """Return what samples from `start` on put into each part: C-contiguous arrays."""
    group = file.grouping.of(start)
    return [_rows(file, part, batch, group, arena) for part in file.parts]


def _rows(file: Hdf5Plan, part: AllocatedDataset, batch: Batch, group: int, arena: Arena) -> Array:
    field = part.plan.field
    column = batch[field.name]
    if not isinstance(column, Ragged):
        return contiguous(column, arena, f"write.{field.name}")
    if part.role == "count":
        return column.lengths.astype(_INT)
    if part.role == "first":
        return (column.offsets[:-1] + group * part.plan.chunk).astype(_INT)
    if file.grouped and len(column.values) != part.used[group]:
        raise FormatError(
            f"field {field.name} has changed since the groups were planned",
            where=f"group {group}",
            expected=f"{part.used[group]} rows",
            found=len(column.values),
            fix="start again with --restart",
        )
    return contiguous(column.values, arena, f"write.{field.name}")
