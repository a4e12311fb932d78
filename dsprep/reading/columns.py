"""Samples from arrays in chunks: plain rows read into place, encoded chunks decoded once.

The chunks of the rows that were decoded last are kept, since the next read often begins inside
them; threads that want a chunk while another one decodes it wait for it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

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

KEPT = 256 << 20
"""Decoded bytes of chunks side by side up to which all of them are kept, not the last one alone."""

_U8 = np.dtype(np.uint8)
_ALIGN = 64


Spans = tuple[Callable[[str], File], str, Ints, Ints, Ints]
"""Byte ranges of one file: what opens it, its path, offsets, lengths, offsets in the buffer."""


@dataclass(frozen=True)
class Wanted:
    """What a read of one field needs from the files.

    Attributes
    ----------
    nbytes
        Bytes of the buffer that it needs.
    spans
        The byte ranges, file by file.
    done
        Turns the buffer, once it is filled, into the field's values, or the rows' bytes.
    """

    nbytes: int
    spans: list[Spans]
    done: Callable[[Bytes], Any]


def read_columns(
    readers: Mapping[str, ColumnReader], indices: Ints, arena: Arena | None
) -> dict[str, Values]:
    """Return several fields of the same samples of a file.

    Raises
    ------
    FormatError
        If the layout gives offsets that are not in the files, or a chunk is damaged.
    """
    consecutive = bool((indices[1:] - indices[:-1] == 1).all())
    wanted = {name: reader.begin(indices, arena) for name, reader in readers.items()}
    return fetch(wanted, arena, GROUP_NEAR if consecutive else NEAR)


def fetch(
    wanted: Mapping[str, Wanted], arena: Arena | None, near: int = GROUP_NEAR
) -> dict[str, Values]:
    """Return fields by what each of them needs from the files.

    All their bytes are fetched together, so fields that lie side by side, as in a group, take one
    ``preadv``. The values of fields that need nothing more from the files may be there already.
    One file is open at a time, however many there are.

    Parameters
    ----------
    wanted
        By field.
    arena
        Memory to use; see `Source.read`.
    near
        Bytes between two ranges that are read along, as in `dsprep.core.pread.runs`.
    """
    bases = packed(np.array([-(-w.nbytes // _ALIGN) * _ALIGN for w in wanted.values()], np.int64))
    buffer = new_array(arena, "sidecar.columns", (int(bases[-1]),), _U8)
    spans: dict[tuple[Callable[[str], File], str], list[tuple[str, Ints, Ints, Ints]]] = {}
    for base, (name, want) in zip(bases[:-1].tolist(), wanted.items(), strict=True):
        for open_file, path, offsets, lengths, places in want.spans:
            part = name, offsets, lengths, places + base
            spans.setdefault((open_file, path), []).append(part)
    for (open_file, path), parts in spans.items():
        file = open_file(path)
        for name, offsets, lengths, _ in parts:
            file.check(offsets, lengths, f"field {name}")
        offsets, lengths, places = (np.concatenate([p[k] for p in parts]) for k in (1, 2, 3))
        read_spans(file.fd, offsets, lengths, buffer, places, file.path, near)
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
        return 0 if self._chunks is None else self._chunks.nbytes

    def begin(self, indices: Ints, arena: Arena | None) -> Wanted:
        """Return what reading the field of the samples `indices` needs from the files.

        Raises
        ------
        FormatError
            If the layout gives offsets that are not in the files.
        """
        first, count = rows_of(self.column, indices)
        rows = self.begin_rows(first, count, arena, f"sidecar.field.{self.field.name}")
        return replace(rows, done=lambda buffer: self._values(rows.done(buffer), count))

    def begin_rows(self, first: Ints, count: Ints, arena: Arena | None, key: str) -> Wanted:
        """Return what reading rows of the array needs from the files.

        What it is turned into are the bytes of these rows, decoded and one after another.

        Parameters
        ----------
        first, count
            int64, shape ``(n,)``: the first row of each range, and how many rows it has.
        key
            Of the memory in `arena` that decoded rows take.
        """
        grid = self.column.grid
        if grid is None or not len(first):
            return Wanted(0, [], lambda _: np.empty(0, np.uint8))
        check_rows(grid, first, count, self.field.name)
        joined, rows = _joined(first, count)
        pieces, places = cut(grid, joined, rows), packed(rows)
        nbytes = int(places[-1]) * grid.row_nbytes
        if grid.plain:
            return self._begin_plain(grid, pieces, places, nbytes)

        def decode(stored: Bytes | None) -> Bytes:
            out = new_array(arena, key, (nbytes,), _U8)
            if nbytes:
                lines = (joined[pieces.request] + pieces.done) // grid.chunk[0]
                self._read_encoded(grid, pieces, lines, out, places, stored)
            return out

        only = self._only_chunk(grid, pieces)
        if only is None:
            return Wanted(0, [], lambda _: decode(None))
        return Wanted(int(only[3][0]), [only], decode)

    def _values(self, out: Bytes, count: Ints) -> Values:
        """Return decoded rows as the field of samples that have `count` rows each."""
        field, grid = self.field, self.column.grid
        values = out.view(field.dtype)
        if not field.ragged:
            return values.reshape(len(count), *field.inner)
        whole = self.column.first is None and grid is not None  # the only sample of its file
        per = grid.row_nbytes // max(1, field.row_nbytes) if whole and grid is not None else 1
        return Ragged.from_lengths(values.reshape(-1, *field.inner), count * per, field.kind)

    def _begin_plain(self, grid: Grid, pieces: Pieces, places: Ints, nbytes: int) -> Wanted:
        row = grid.row_nbytes
        offset = grid.blocks.offsets.at(pieces.block)
        stored = (offset >= 0) & (grid.blocks.lengths.at(pieces.block) > 0)
        to = (places[pieces.request] + pieces.done) * row
        offset += pieces.inside * row
        sizes = pieces.rows * row
        spans = [
            (self._open, path, offset[chosen], sizes[chosen], to[chosen])
            for path, chosen in self._by_file(grid, pieces, stored)
        ]
        if not stored.all():
            self._fill_value(grid)

        def done(out: Bytes) -> Bytes:
            if not stored.all():
                self._fill(grid, out, to[~stored], sizes[~stored])
            return out

        return Wanted(nbytes, spans, done)

    def _only_chunk(self, grid: Grid, pieces: Pieces) -> Spans | None:
        """Return the extent of the only chunk that is needed, if it is one and not at hand."""
        blocks = grid.blocks
        if not len(pieces.block) or bool((pieces.block != pieces.block[0]).any()):
            return None
        number = int(pieces.block[0])
        offset, length = blocks.offsets.one(number), blocks.lengths.one(number)
        if offset < 0 or length <= 0 or self._chunks is None or self._chunks.has(number):
            return None
        ((path, _),) = self._by_file(grid, pieces, np.ones(len(pieces.block), bool))
        return self._open, path, np.array([offset]), np.array([length]), np.zeros(1, np.int64)

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

    def _by_file(self, grid: Grid, pieces: Pieces, chosen: Array) -> list[tuple[str, Ints]]:
        """Return the paths of the files, each with which of the chosen pieces it holds."""
        which = np.flatnonzero(chosen)
        if pieces.place is None or not len(which):
            return [(grid.blocks.path, which)] if len(which) else []
        places = pieces.place[:, which]
        new = np.flatnonzero((np.diff(places, axis=1) != 0).any(axis=0)) + 1
        edges = [0, *new.tolist(), len(which)]
        return [
            (file_path(grid.blocks.path, places[:, a].tolist()), which[a:b])
            for a, b in pairwise(edges)
        ]

    def _read_encoded(
        self,
        grid: Grid,
        pieces: Pieces,
        lines: Ints,
        out: Bytes,
        places: Ints,
        data: Bytes | None,
    ) -> None:
        """Decode the chunks that pieces are of.

        Parameters
        ----------
        lines
            The place of each piece's chunk along the first axis.
        data
            The stored bytes, if it is only one chunk.
        """
        assert self._chunks is not None  # made for every grid that is not plain
        blocks = grid.blocks
        offset, length = blocks.offsets.at(pieces.block), blocks.lengths.at(pieces.block)
        masks = None if grid.masks is None else grid.masks.at(pieces.block)
        stored = (offset >= 0) & (length > 0)
        to = places[pieces.request] + pieces.done
        result = out.reshape(-1, *grid.shape[1:], grid.itemsize)
        paths: list[str | None] = [None] * len(stored)
        for path, chosen in self._by_file(grid, pieces, stored):
            for k in chosen.tolist():
                paths[k] = path
        opened: tuple[str | None, File | None] = (None, None)
        # By chunk, so that each is decoded once.
        last = len(stored) - 1
        order = np.argsort(pieces.block, kind="stable").tolist()
        chunk: Array | None = None
        before = -1
        for n, k in enumerate(order):
            number, path = int(pieces.block[k]), paths[k]
            begin, rows = int(pieces.inside[k]), int(pieces.rows[k])
            low = (pieces.tile[:, k] * np.array(grid.chunk[1:], np.int64)).tolist()
            ends = zip(low, grid.chunk[1:], grid.shape[1:], strict=True)
            high = [min(a + c, size) for a, c, size in ends]
            box = (
                slice(int(to[k]), int(to[k]) + rows),
                *(slice(a, b) for a, b in zip(low, high, strict=True)),
            )
            if path is None:
                result[box] = self._fill_value(grid)
                continue
            if number != before or chunk is None:
                if path != opened[0]:
                    opened = path, self._open(path)
                file = opened[1]
                assert file is not None  # opened with its path
                file.check(offset[k : k + 1], length[k : k + 1], f"field {self.field.name}")
                mask = 0 if masks is None else int(masks[k])
                place = int(offset[k]), int(length[k])
                edge = n == last or begin + rows < grid.chunk[0]
                line = int(lines[k]) if edge else None
                chunk = self._chunks.get(number, file, place, mask, self.field.name, data, line)
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
    """The decoded chunks of a grid: those of the last rows are kept."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        side = math.prod(grid.chunks[1:])
        self._whole = side * grid.chunk_nbytes <= KEPT
        self.nbytes = ((side if self._whole else 1) + 1) * grid.chunk_nbytes
        self._line = -1
        self._kept: dict[int, Array] = {}
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
        line: int | None,
    ) -> Array:
        """Return a chunk as uint8 of shape ``(*chunk, itemsize)``.

        It is kept with others of the same `line`, its place along the first axis, if that is given.
        """

        def decode() -> Array:
            with self._decoders:
                return self._decode(file, place, mask, f"{file.path}, field {name}", data)

        with self._lock:
            if number in self._kept:
                return self._kept[number]
            if line is None:
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
                    if line != self._line or not self._whole:
                        self._kept.clear()
                    self._line = -1 if line is None else line
                    self._kept[number] = chunk
                    del self._underway[number]
                future.set_result(chunk)
        return future.result()

    def has(self, number: int) -> bool:
        """Whether a chunk is at hand, or being decoded by somebody."""
        with self._lock:
            return number in self._kept or number in self._underway

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
