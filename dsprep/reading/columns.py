"""Samples from arrays in chunks: plain rows are read into place, encoded chunks decoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dsprep.core import filters
from dsprep.core.schema import Arena, Bytes, Field, Ints, Ragged, new_array
from dsprep.core.schema import Column as Values
from dsprep.core.spans import offsets_of
from dsprep.errors import layout_mismatch
from dsprep.layout.locate import check_rows, cut_lines, plain_rows, rows_at, rows_of
from dsprep.layout.model import Column, Grid
from dsprep.reading.chunks import Chunks, fill_value
from dsprep.reading.files import most_open
from dsprep.reading.read_plan import ReadPlan
from dsprep.storage.base import Handle
from dsprep.storage.scatter import GROUP_NEAR, NEAR

_U8 = np.dtype(np.uint8)
_ALIGN = 64


Spans = tuple[Callable[[str], Handle], str, Ints, Ints, Ints]
"""Byte ranges of one file: what opens it, its path, offsets, lengths, offsets in the buffer."""


@dataclass(frozen=True)
class PendingRead:
    """What a read of one field needs from the files.

    `nbytes` is the size of the buffer that it takes, `spans` are the byte ranges, file by file;
    `done` turns the buffer, once it is filled, into the field's values, or the rows' bytes.
    """

    nbytes: int
    spans: list[Spans]
    done: Callable[[Bytes], Any]


def read_columns(
    readers: Mapping[str, ColumnReader], indices: Ints, arena: Arena | None
) -> dict[str, Values]:
    """Return several fields of the same samples of a file; raises as `ColumnReader.begin` does."""
    consecutive = bool((indices[1:] - indices[:-1] == 1).all())
    pending = {name: reader.begin(indices, arena) for name, reader in readers.items()}
    return fetch(pending, arena, GROUP_NEAR if consecutive else NEAR)


def fetch(
    pending: Mapping[str, PendingRead], arena: Arena | None, near: int = GROUP_NEAR
) -> dict[str, Values]:
    """Return fields by what each of them needs from the files.

    All their bytes are fetched together, so fields that lie side by side, as in a group, take one
    ``preadv``. The values of fields that need nothing more from the files may be there already.
    As many files are open together as may be. `near` is as in `dsprep.storage.scatter.runs`.
    """
    bases = [0]
    for want in pending.values():
        bases.append(bases[-1] + -(-want.nbytes // _ALIGN) * _ALIGN)
    buffer = new_array(arena, "sidecar.columns", (bases[-1],), _U8)
    spans: dict[tuple[Callable[[str], Handle], str], list[tuple[str, Ints, Ints, Ints]]] = {}
    for base, (name, want) in zip(bases, pending.items(), strict=False):
        for open_file, path, offsets, lengths, positions in want.spans:
            part = name, offsets, lengths, positions + base if base else positions
            spans.setdefault((open_file, path), []).append(part)
    files, most = [*spans.items()], most_open()
    for low in range(0, len(files), most):
        plan = ReadPlan()
        for (open_file, path), parts in files[low : low + most]:
            file = open_file(path)
            if len(files) == len(parts) == len(parts[0][1]) == 1:
                offset, nbytes, at = (int(p[0]) for p in parts[0][1:])
                file.read_checked(buffer[at : at + nbytes], offset, f"field {parts[0][0]}")
                continue
            for name, offsets, lengths, positions in parts:
                plan.put(file, offsets, lengths, positions + buffer.ctypes.data, f"field {name}")
        plan.read(near)
    return {
        name: want.done(buffer[base : base + want.nbytes])
        for base, (name, want) in zip(bases, pending.items(), strict=False)
    }


class ColumnReader:
    """Reads a field of one file that is an array of its own.

    `open_file` opens a file by its path relative to the dataset's file entry.
    """

    def __init__(self, column: Column, field: Field, open_file: Callable[[str], Handle]) -> None:
        self.column, self.field, self._open = column, field, open_file
        self._chunks: Chunks | None = None
        grid = column.grid
        if grid is not None and not grid.plain:
            if grid.filters:
                filters.check(grid.filters, field.name)
            self._chunks = Chunks(grid, field.name, open_file)

    def resident_nbytes(self) -> int:
        """Return what reading holds besides the samples: decoded chunks."""
        return 0 if self._chunks is None else self._chunks.nbytes

    def begin(self, indices: Ints, arena: Arena | None) -> PendingRead:
        """Return what reading the field of the samples `indices` needs from the files.

        Raises `FormatError` if the layout gives offsets that are not in the files.
        """
        first, count = rows_of(self.column, indices)
        rows = self.begin_rows(first, count, arena, f"sidecar.field.{self.field.name}")
        return replace(rows, done=lambda buffer: self._values(rows.done(buffer), count))

    def begin_rows(self, first: Ints, count: Ints, arena: Arena | None, key: str) -> PendingRead:
        """Return what reading rows of the array needs from the files.

        What it is turned into are the bytes of these rows, decoded and back to back. `first` and
        `count` are int64, shape ``(n,)``: the first row of each range, and how many rows it has;
        `key` names the memory in `arena` that decoded rows take.
        """
        grid = self.column.grid
        if grid is None or not len(first):
            return PendingRead(0, [], lambda _: np.empty(0, np.uint8))
        if len(first) == 1 and self._chunks is None:
            extents, rows = rows_at(grid, int(first[0]), int(count[0])), int(count[0])
            if extents is not None:
                extent = np.array([[extents[1]], [rows * grid.row_nbytes], [0]], np.int64)
                spans: list[Spans] = [(self._open, extents[0], *extent)]
                return PendingRead(rows * grid.row_nbytes, spans, lambda buffer: buffer)
        check_rows(grid, first, count, self.field.name)
        first, count = _joined(first, count)
        if self._chunks is not None:
            return self._begin_encoded(self._chunks, first, count, arena, key)
        return self._begin_plain(grid, first, count)

    def _values(self, out: Bytes, count: Ints) -> Values:
        """Return decoded rows as the field of samples that have `count` rows each."""
        field, grid = self.field, self.column.grid
        if not field.ragged:
            return out.view(field.dtype).reshape(len(count), *field.inner)
        if grid is None and count.any():
            raise layout_mismatch(
                "gives samples rows of an array that has none", f"field {field.name}"
            )
        nbytes, row = count * (0 if grid is None else grid.row_nbytes), max(1, field.row_nbytes)
        excess = field.excess(nbytes)
        if excess.any():
            raise layout_mismatch(
                f"does not give whole values of {field}",
                self.field.name,
                f"a multiple of {field.row_nbytes}",
                f"{int(nbytes[excess != 0][0])} bytes",
            )
        values = out.view(field.dtype).reshape(-1, *field.inner)
        return Ragged.from_lengths(values, nbytes // row, field.kind)

    def _begin_plain(self, grid: Grid, first: Ints, count: Ints) -> PendingRead:
        extents, positions = plain_rows(grid, first, count), offsets_of(count * grid.row_nbytes)
        to, stored = extents.addresses(positions[:-1]), extents.stored()
        there = to[(extents.offset >= 0) & (extents.length > 0)] if stored is not extents else to
        spans = [
            (self._open, path, stored.offset[chosen], stored.length[chosen], there[chosen])
            for path, chosen in (stored.by_path() if len(there) else ())
        ]
        lacking = np.flatnonzero(extents.offset < 0).tolist()
        fill = fill_value(grid, self.field.name) if lacking else np.zeros(0, np.uint8)

        def done(out: Bytes) -> Bytes:
            for i in lacking:
                out[to[i] : to[i] + extents.length[i]].reshape(-1, grid.itemsize)[:] = fill
            return out

        return PendingRead(int(positions[-1]), spans, done)

    def _begin_encoded(
        self, chunks: Chunks, first: Ints, count: Ints, arena: Arena | None, key: str
    ) -> PendingRead:
        grid = chunks.grid
        nbytes = int(count.sum()) * grid.row_nbytes
        lines = _lines(grid.chunk[0], first, count)

        def decode(stored: Bytes | None) -> Bytes:
            out = new_array(arena, key, (nbytes,), _U8)
            result = out.reshape(-1, *grid.shape[1:], grid.itemsize)
            for line, rows in lines.items():
                chunks.copy(line, rows, result, stored)
            return out

        # A single chunk is fetched with what other fields need.
        line = next(iter(lines), -1)
        if chunks.side == len(lines) == 1 and not chunks.has(line):
            path, offset, length, _ = chunks.where(line)
            if length:
                self._open(path).check_extents(np.array([offset]), np.array([length]), "a chunk")
                extent = np.array([[offset], [length], [0]], np.int64)
                return PendingRead(length, [(self._open, path, *extent)], decode)
        return PendingRead(0, [], lambda _: decode(None))


def _lines(per: int, first: Ints, count: Ints) -> dict[int, list[tuple[int, int, int]]]:
    """Return ranges of rows by the line of chunks that they are in, as `Chunks.copy` wants them."""
    if len(first) == 1 and 0 < int(count[0]) <= per - int(first[0]) % per:
        return {int(first[0]) // per: [(0, int(first[0]) % per, int(count[0]))]}
    request, done, inside, rows, lines = cut_lines(per, first, count)
    by_line: dict[int, list[tuple[int, int, int]]] = {}
    to = offsets_of(count)[request] + done
    every = zip(lines.tolist(), to.tolist(), inside.tolist(), rows.tolist(), strict=True)
    for line, *where in every:
        by_line.setdefault(line, []).append((where[0], where[1], where[2]))
    return by_line


def _joined(first: Ints, count: Ints) -> tuple[Ints, Ints]:
    """Return ranges of rows as fewer ones, where one begins as the one before ends."""
    new = np.ones(len(first), bool)
    new[1:] = first[1:] != first[:-1] + count[:-1]
    starts = np.flatnonzero(new)
    return first[starts], np.add.reduceat(count, starts)
