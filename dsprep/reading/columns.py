"""Samples from arrays in chunks: plain rows read into place, encoded chunks decoded once.

The chunk that was decoded last is kept, since the next read often begins inside it; threads that
want a chunk while another one decodes it wait for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dsprep.core import filters
from dsprep.core.pread import GROUP_NEAR, NEAR, packed, read_spans
from dsprep.core.schema import Arena, Array, Bytes, Field, Ints, Ragged, new_array
from dsprep.core.schema import Column as Values
from dsprep.core.storage import pread_exact
from dsprep.errors import FormatError
from dsprep.layout.as_json import file_path
from dsprep.layout.locate import Pieces, check_rows, cut, rows_of
from dsprep.layout.model import Column, Grid
from dsprep.reading.files import File

DECODED = 64 << 20
"""Decoded bytes in the making at once: threads beyond wait, unless none is at work."""

_U8 = np.dtype(np.uint8)
_ALIGN = 64


@dataclass(frozen=True)
class Wanted:
    """What a read of one field needs from the files.

    Attributes
    ----------
    nbytes
        Bytes of the buffer that it needs.
    spans
        Each ``(file, offsets, lengths, places in the buffer)``.
    done
        Turns the buffer, once it is filled, into the field's values.
    """

    nbytes: int
    spans: list[tuple[File, Ints, Ints, Ints]]
    done: Callable[[Bytes], Values]


def read_columns(
    readers: Mapping[str, ColumnReader], indices: Ints, arena: Arena | None
) -> dict[str, Values]:
    """Return several fields of the same samples of a file.

    All their bytes are fetched together, so fields that lie side by side, as in a group, take one
    ``preadv``.

    Raises
    ------
    FormatError
        If the sidecar gives places that are not in the files, or a chunk is damaged.
    """
    wanted = {name: reader.begin(indices, arena) for name, reader in readers.items()}
    bases = packed(np.array([-(-w.nbytes // _ALIGN) * _ALIGN for w in wanted.values()], np.int64))
    buffer = new_array(arena, "sidecar.columns", (int(bases[-1]),), _U8)
    near = GROUP_NEAR if bool((indices[1:] - indices[:-1] == 1).all()) else NEAR
    spans: dict[int, list[tuple[File, Ints, Ints, Ints]]] = {}
    for base, want in zip(bases[:-1].tolist(), wanted.values(), strict=True):
        for file, offsets, lengths, places in want.spans:
            spans.setdefault(id(file), []).append((file, offsets, lengths, places + base))
    for parts in spans.values():
        offsets, lengths, places = (np.concatenate([p[k] for p in parts]) for k in (1, 2, 3))
        read_spans(parts[0][0].fd, offsets, lengths, buffer, places, parts[0][0].path, near)
    return {
        name: want.done(buffer[base : base + want.nbytes])
        for base, (name, want) in zip(bases[:-1].tolist(), wanted.items(), strict=True)
    }


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

    def begin(self, indices: Ints, arena: Arena | None) -> Wanted:
        """Return what reading the field of the samples `indices` needs from the files.

        Raises
        ------
        FormatError
            If the sidecar gives places that are not in the files.
        """
        grid = self.column.grid
        first, count = rows_of(self.column, indices)
        if grid is None:
            count = np.zeros(len(indices), np.int64)
            return Wanted(0, [], lambda _: self._values(np.empty(0, np.uint8), count))
        check_rows(grid, first, count, self.field.name)
        joined, rows = _joined(first, count)
        pieces, places = cut(grid, joined, rows), packed(rows)
        nbytes = int(places[-1]) * grid.row_nbytes
        if grid.plain:
            return self._begin_plain(grid, pieces, places, count, nbytes)

        def decode(stored: Bytes | None) -> Values:
            out = new_array(arena, f"sidecar.field.{self.field.name}", (nbytes,), _U8)
            if nbytes:
                self._read_encoded(grid, pieces, out, places, stored)
            return self._values(out, count)

        only = self._only_chunk(grid, pieces)
        if only is None:
            return Wanted(0, [], lambda _: decode(None))
        file, offset, length = only
        spans = (file, np.array([offset]), np.array([length]), np.zeros(1, np.int64))
        return Wanted(length, [spans], decode)

    def _values(self, out: Bytes, count: Ints) -> Values:
        """Return decoded rows as the field of samples that have `count` rows each."""
        field, grid = self.field, self.column.grid
        values = out.view(field.dtype)
        if not field.ragged:
            return values.reshape(len(count), *field.inner)
        whole = self.column.first is None and grid is not None  # the only sample of its file
        per = grid.row_nbytes // max(1, field.row_nbytes) if whole and grid is not None else 1
        return Ragged.from_lengths(values.reshape(-1, *field.inner), count * per, field.kind)

    def _begin_plain(
        self, grid: Grid, pieces: Pieces, places: Ints, count: Ints, nbytes: int
    ) -> Wanted:
        row = grid.row_nbytes
        offset = grid.blocks.offsets.at(pieces.block)
        stored = (offset >= 0) & (grid.blocks.lengths.at(pieces.block) > 0)
        to = (places[pieces.request] + pieces.done) * row
        offset += pieces.inside * row
        sizes = pieces.rows * row
        spans = []
        for file, chosen in self._by_file(grid, pieces, stored):
            file.check(offset[chosen], sizes[chosen], f"field {self.field.name}")
            spans.append((file, offset[chosen], sizes[chosen], to[chosen]))
        if not stored.all():
            self._fill_value(grid)

        def done(out: Bytes) -> Values:
            if not stored.all():
                self._fill(grid, out, to[~stored], sizes[~stored])
            return self._values(out, count)

        return Wanted(nbytes, spans, done)

    def _only_chunk(self, grid: Grid, pieces: Pieces) -> tuple[File, int, int] | None:
        """Return where the only chunk that is needed lies, if it is one and not at hand."""
        blocks = grid.blocks
        if not len(pieces.block) or bool((pieces.block != pieces.block[0]).any()):
            return None
        number = int(pieces.block[0])
        offset, length = blocks.offsets.one(number), blocks.lengths.one(number)
        if offset < 0 or length <= 0 or self._chunks is None or self._chunks.has(number):
            return None
        ((file, _),) = self._by_file(grid, pieces, np.ones(len(pieces.block), bool))
        file.check(np.array([offset]), np.array([length]), f"field {self.field.name}")
        return file, offset, length

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

    def _read_encoded(
        self, grid: Grid, pieces: Pieces, out: Bytes, places: Ints, data: Bytes | None
    ) -> None:
        """Decode the chunks that pieces are of; `data`: the stored bytes, if it is only one."""
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
                chunk = self._chunks.get(
                    number, file, place, mask, self.field.name, data, keep=edge
                )
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
        data: Bytes | None,
        *,
        keep: bool,
    ) -> Array:
        """Return a chunk as uint8 of shape ``(*chunk, itemsize)``; with `keep`, remember it."""

        def decode() -> Array:
            with self._decoders:
                return self._decode(file, place, mask, f"{file.path}, field {name}", data)

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

    def has(self, number: int) -> bool:
        """Whether a chunk is at hand, or being decoded by somebody."""
        with self._lock:
            return self._last[0] == number or number in self._underway

    def _decode(
        self, file: File, place: tuple[int, int], mask: int, where: str, data: Bytes | None
    ) -> Array:
        grid = self._grid
        offset, nbytes = place
        here = f"{where}, offset {offset}"
        if not grid.filters and nbytes != grid.chunk_nbytes:
            raise FormatError(
                "a chunk has the wrong size", where=here, expected=grid.chunk_nbytes, found=nbytes
            )
        stored = pread_exact(file.fd, nbytes, offset, here) if data is None else data
        flat = filters.decode(stored, grid.filters, mask, grid.chunk_nbytes, here)
        if data is not None and np.may_share_memory(flat, data):
            flat = flat.copy()  # it may be kept longer than the caller's memory
        return flat.reshape(*grid.chunk, grid.itemsize)
