"""Samples from arrays in chunks: plain rows read into place, encoded chunks decoded once.

The chunk that was decoded last is kept, since the next read often begins inside it; threads that
want a chunk while another one decodes it wait for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from itertools import pairwise

import numpy as np

from dsprep import filters
from dsprep.errors import FormatError
from dsprep.layout.codec import file_path
from dsprep.layout.extents import Pieces, cut, rows_of
from dsprep.layout.model import Column, Grid
from dsprep.reading.files import File
from dsprep.schema import Arena, Array, Bytes, Field, Ints, Ragged, new_array
from dsprep.schema import Column as Values
from dsprep.spans import packed, read_spans
from dsprep.storage import pread_exact

DECODED = 64 << 20
"""Decoded bytes in the making at once: threads beyond wait, unless none is at work."""

_U8 = np.dtype(np.uint8)


class ColumnReader:
    """Reads a field of one file that is an array of its own.

    Parameters
    ----------
    column
        Where it lies.
    field
        What it is.
    open_file
        Opens a file by its path relative to the dataset's file entry.
    """

    def __init__(self, column: Column, field: Field, open_file: Callable[[str], File]) -> None:
        self.column, self.field, self._open = column, field, open_file
        self._chunks: _Chunks | None = None
        grid = column.grid
        if grid is not None and not grid.plain:
            if grid.filters:
                filters.check(grid.filters, field.name)
            self._chunks = _Chunks(grid)

    def resident_nbytes(self) -> int:
        """Return what reading holds besides the samples: decoded chunks."""
        grid = self.column.grid
        return 0 if grid is None or grid.plain else 2 * grid.chunk_nbytes

    def read(self, indices: Ints, arena: Arena | None) -> Values:
        """Return the field of the samples `indices`.

        Raises
        ------
        FormatError
            If the sidecar gives places that are not in the file, or a chunk is damaged.
        """
        column, field, grid = self.column, self.field, self.column.grid
        first, count = rows_of(column, indices)
        whole = field.ragged and column.first is None  # the only sample of its file
        if grid is None:
            rows = np.empty((0, *field.inner), field.dtype)
            if field.ragged:
                return Ragged.from_lengths(rows, np.zeros(len(indices), np.int64), field.kind)
            return np.empty((len(indices), *field.inner), field.dtype)
        self._check_rows(grid, first, count)
        total = int(count.sum())
        out = new_array(arena, f"sidecar.{field.name}", (total * grid.row_nbytes,), _U8)
        if total:
            first_, count_ = _joined(first, count)
            pieces, places = cut(grid, first_, count_), packed(count_)
            if grid.plain:
                self._read_plain(grid, pieces, out, places)
            else:
                self._read_encoded(grid, pieces, out, places)
        if field.ragged:
            per = grid.row_nbytes // max(1, field.row_nbytes) if whole else 1
            values = out.view(field.dtype).reshape(-1, *field.inner)
            return Ragged.from_lengths(values, count * per, field.kind)
        return out.view(field.dtype).reshape(len(indices), *field.inner)

    def _check_rows(self, grid: Grid, first: Ints, count: Ints) -> None:
        rows = grid.shape[0]
        bad = (first < 0) | (count < 0) | (count > rows) | (first > rows - count)
        if bad.any():
            i = int(bad.argmax())
            raise FormatError(
                "the sidecar gives a sample rows that do not exist",
                where=f"field {self.field.name}",
                expected=f"within {rows} rows",
                found=f"{count[i]} rows from {first[i]} on",
                fix="write the sidecar again with dsprep provenance",
            )
        if len(count) > 1 and int(count.sum()) > rows:
            _, chosen = np.unique(first, return_index=True)
            if int(count[chosen].sum()) > rows:
                raise FormatError(
                    "the sidecar gives samples rows that overlap", where=f"field {self.field.name}"
                )

    def _read_plain(self, grid: Grid, pieces: Pieces, out: Bytes, places: Ints) -> None:
        row = grid.row_nbytes
        offset = grid.blocks.offsets.at(pieces.block)
        stored = (offset >= 0) & (grid.blocks.lengths.at(pieces.block) > 0)
        to = (places[pieces.request] + pieces.done) * row
        if not stored.all():
            self._fill(grid, out, to[~stored], pieces.rows[~stored] * row)
        offset += pieces.inside * row
        for file, chosen in self._by_file(grid, pieces, stored):
            at, nbytes = offset[chosen], pieces.rows[chosen] * row
            file.check(at, nbytes, f"field {self.field.name}")
            read_spans(file.fd, at, nbytes, out, to[chosen], file.path)

    def _fill(self, grid: Grid, out: Bytes, starts: Ints, lengths: Ints) -> None:
        """Fill ranges of the result with the fill value."""
        fill = self._fill_value(grid)
        for a, n in zip(starts.tolist(), lengths.tolist(), strict=True):
            out[a : a + n] = np.tile(fill, n // grid.itemsize)

    def _fill_value(self, grid: Grid) -> Bytes:
        if grid.fill is None:
            raise FormatError(
                "a chunk is missing",
                where=f"field {self.field.name}",
                fix="write the sidecar again with dsprep provenance",
            )
        return np.frombuffer(grid.fill, np.uint8)

    def _by_file(self, grid: Grid, pieces: Pieces, chosen: Array) -> list[tuple[File, Ints]]:
        """Return the open files, each with which of the chosen pieces it holds."""
        which = np.flatnonzero(chosen)
        if pieces.place is None or not len(which):
            return [(self._open(grid.blocks.path), which)] if len(which) else []
        places = pieces.place[:, which]
        new = np.flatnonzero((np.diff(places, axis=1) != 0).any(axis=0)) + 1
        edges = [0, *new.tolist(), len(which)]
        return [
            (self._open(file_path(grid.blocks.path, places[:, a].tolist())), which[a:b])
            for a, b in pairwise(edges)
        ]

    def _read_encoded(self, grid: Grid, pieces: Pieces, out: Bytes, places: Ints) -> None:
        assert self._chunks is not None  # made for every grid that is not plain
        blocks = grid.blocks
        offset, length = blocks.offsets.at(pieces.block), blocks.lengths.at(pieces.block)
        masks = None if grid.masks is None else grid.masks.at(pieces.block)
        stored = (offset >= 0) & (length > 0)
        to = places[pieces.request] + pieces.done
        result = out.reshape(-1, *grid.shape[1:], grid.itemsize)
        files: list[File | None] = [None] * len(stored)
        for file, chosen in self._by_file(grid, pieces, stored):
            file.check(offset[chosen], length[chosen], f"field {self.field.name}")
            for k in chosen.tolist():
                files[k] = file
        # By chunk, so that each is decoded once.
        last = len(stored) - 1
        order = np.argsort(pieces.block, kind="stable").tolist()
        chunk: Array | None = None
        before = -1
        for n, k in enumerate(order):
            number, file = int(pieces.block[k]), files[k]
            begin, rows = int(pieces.inside[k]), int(pieces.rows[k])
            low = (pieces.tile[:, k] * np.array(grid.chunk[1:], np.int64)).tolist()
            ends = zip(low, grid.chunk[1:], grid.shape[1:], strict=True)
            high = [min(a + c, size) for a, c, size in ends]
            box = (
                slice(int(to[k]), int(to[k]) + rows),
                *(slice(a, b) for a, b in zip(low, high, strict=True)),
            )
            if file is None:
                result[box] = self._fill_value(grid)
                continue
            if number != before or chunk is None:
                mask = 0 if masks is None else int(masks[k])
                place = int(offset[k]), int(length[k])
                edge = n == last or begin + rows < grid.chunk[0]
                chunk = self._chunks.get(number, file, place, mask, self.field.name, keep=edge)
                before = number
            inner = tuple(slice(0, b - a) for a, b in zip(low, high, strict=True))
            result[box] = chunk[(slice(begin, begin + rows), *inner)]


def _joined(first: Ints, count: Ints) -> tuple[Ints, Ints]:
    """Return ranges of rows as fewer ones, where one begins as the one before ends."""
    new = np.ones(len(first), bool)
    new[1:] = first[1:] != first[:-1] + count[:-1]
    starts = np.flatnonzero(new)
    return first[starts], np.add.reduceat(count, starts)


class _Chunks:
    """The decoded chunks of a grid: the last one is kept."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._last: tuple[int, Array | None] = (-1, None)
        self._underway: dict[int, Future[Array]] = {}
        self._lock = threading.Lock()
        self._decoders = threading.BoundedSemaphore(
            max(1, min(64, DECODED // max(1, grid.chunk_nbytes)))
        )

    def get(
        self,
        number: int,
        file: File,
        place: tuple[int, int],
        mask: int,
        name: str,
        *,
        keep: bool,
    ) -> Array:
        """Return a chunk as uint8 of shape ``(*chunk, itemsize)``; with `keep`, remember it."""

        def decode() -> Array:
            with self._decoders:
                return self._decode(file, place, mask, f"{file.path}, field {name}")

        with self._lock:
            if self._last[0] == number and self._last[1] is not None:
                return self._last[1]
            if not keep:
                future = None
            elif (future := self._underway.get(number)) is None:
                future = self._underway[number] = Future()
                future.set_running_or_notify_cancel()
                mine = True
            else:
                mine = False
        if future is None:
            return decode()
        if mine:
            try:
                chunk = decode()
            except BaseException as error:
                with self._lock:
                    del self._underway[number]
                future.set_exception(error)
            else:
                with self._lock:
                    self._last = (number, chunk)
                    del self._underway[number]
                future.set_result(chunk)
        return future.result()

    def _decode(self, file: File, place: tuple[int, int], mask: int, where: str) -> Array:
        grid = self._grid
        offset, nbytes = place
        here = f"{where}, offset {offset}"
        if not grid.filters and nbytes != grid.chunk_nbytes:
            raise FormatError(
                "a chunk has the wrong size", where=here, expected=grid.chunk_nbytes, found=nbytes
            )
        data = pread_exact(file.fd, nbytes, offset, here)
        flat = filters.decode(data, grid.filters, mask, grid.chunk_nbytes, here)
        return flat.reshape(*grid.chunk, grid.itemsize)
