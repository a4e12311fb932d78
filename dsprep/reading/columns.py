"""Samples from arrays in chunks: plain rows are read into place, encoded chunks decoded."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from dsprep.core import filters
from dsprep.core.schema import Arena, Bytes, Field, Ints, Ragged, new_array
from dsprep.core.schema import Column as Values
from dsprep.core.spans import offsets_of
from dsprep.errors import layout_mismatch
from dsprep.layout.locate import check_rows, cut_lines, locate_rows, rows_of
from dsprep.layout.model import Column, Grid
from dsprep.reading.chunks import Chunks, fill_value
from dsprep.reading.files import most_open
from dsprep.reading.read_plan import ReadPlan
from dsprep.storage.base import Handle
from dsprep.storage.scatter import GROUP_NEAR, NEAR

_U8 = np.dtype(np.uint8)

Ranges: TypeAlias = tuple[str, Ints, Ints, Ints]
"""Byte ranges of one file: its path, offsets, lengths, and the addresses that they are read to."""


def read_columns(
    readers: Mapping[str, ColumnReader], indices: Ints, arena: Arena | None
) -> dict[str, Values]:
    """Return several fields of the same samples of a file; raises as `ColumnReader.steps` does.

    All their bytes are fetched together, so fields that lie side by side, as in a group, take one
    ``preadv``. As many files are open together as may be.
    """
    steps = {name: reader.steps(indices, arena) for name, reader in readers.items()}
    files: dict[str, list[tuple[str, Ints, Ints, Ints]]] = {}
    for name, step in steps.items():
        for path, *ranges in next(step):
            files.setdefault(path, []).append((name, *ranges))
    consecutive = bool((indices[1:] - indices[:-1] == 1).all())
    open_file, paths, file_limit = next(iter(readers.values())).open_file, [*files], most_open()
    for low in range(0, len(paths), file_limit):
        plan = ReadPlan()
        for path in paths[low : low + file_limit]:
            file = open_file(path)
            for name, offsets, lengths, addresses in files[path]:
                plan.put(file, offsets, lengths, addresses, f"field {name}")
        plan.read(GROUP_NEAR if consecutive else NEAR)
    return {name: next(step) for name, step in steps.items()}


class ColumnReader:
    """Reads a field of one file that is an array of its own.

    `open_file` opens a file by its path relative to the dataset's file entry.
    """

    def __init__(self, column: Column, field: Field, open_file: Callable[[str], Handle]) -> None:
        self.column, self.field, self.open_file = column, field, open_file
        self._chunks: Chunks | None = None
        grid = column.grid
        if grid is not None and not grid.plain:
            if grid.filters:
                filters.check(grid.filters, field.name)
            self._chunks = Chunks(grid, field.name, open_file)

    def resident_nbytes(self) -> int:
        """Return the bytes that reading holds besides the samples: decoded chunks."""
        return 0 if self._chunks is None else self._chunks.nbytes

    def steps(self, indices: Ints, arena: Arena | None) -> Iterator[Any]:
        """Yield the ranges to read, a list of `Ranges`; after they are read, the values.

        Raises `FormatError` if the layout gives rows or offsets that are not there.
        """
        grid = self.column.grid
        first, count = rows_of(self.column, indices)
        if grid is None or not len(first):
            yield []
            yield self._values(np.empty(0, np.uint8), count)
            return
        check_rows(grid, first, count, self.field.name)
        key = f"sidecar.field.{self.field.name}"
        rows, nbytes = _joined(first, count), int(count.sum()) * grid.row_nbytes
        read = self._plain if self._chunks is None else self._encoded
        out = yield from read(grid, *rows, lambda: new_array(arena, key, (nbytes,), _U8))
        yield self._values(out, count)

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

    def _plain(
        self, grid: Grid, first: Ints, count: Ints, take: Callable[[], Bytes]
    ) -> Generator[list[Ranges], None, Bytes]:
        """Yield the ranges of rows that are stored as they are; return their bytes."""
        out, extents = take(), locate_rows(grid, first, count)
        base = int(out.ctypes.data)
        to = extents.addresses(offsets_of(count * grid.row_nbytes)[:-1] + base)
        there = (extents.offset >= 0) & (extents.length > 0)
        stored, addresses = extents.stored(), to[there]
        yield [
            (path, stored.offset[chosen], stored.length[chosen], addresses[chosen])
            for path, chosen in (stored.by_path() if len(addresses) else ())
        ]
        for i in np.flatnonzero(extents.offset < 0).tolist():
            at = int(to[i]) - base
            rows = out[at : at + int(extents.length[i])].reshape(-1, grid.itemsize)
            rows[:] = fill_value(grid, self.field.name)
        return out

    def _encoded(
        self, grid: Grid, first: Ints, count: Ints, take: Callable[[], Bytes]
    ) -> Generator[list[Ranges], None, Bytes]:
        """Yield the range of a single chunk; return rows, decoded."""
        chunks, lines = self._chunks, _lines(grid.chunk[0], first, count)
        assert chunks is not None  # of what is not plain
        line, stored, ranges = next(iter(lines), -1), None, list[Ranges]()
        if chunks.side == len(lines) == 1 and not chunks.has(line):
            path, offset, length, _ = chunks.where(line)
            if length:  # it is fetched with what other fields need
                offsets, lengths = np.array([offset]), np.array([length])
                self.open_file(path).check_extents(offsets, lengths, "a chunk")
                stored = np.empty(length, np.uint8)
                ranges = [(path, offsets, lengths, np.array([stored.ctypes.data]))]
        yield ranges
        out = take()
        result = out.reshape(-1, *grid.shape[1:], grid.itemsize)
        for line, rows in lines.items():
            chunks.copy(line, rows, result, stored)
        return out


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
