"""From samples to byte ranges, without I/O: vectorised over the requested samples."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dsprep.core.schema import Field, Ints
from dsprep.core.spans import ranges
from dsprep.errors import UsageError, layout_mismatch
from dsprep.layout.as_json import file_path
from dsprep.layout.laws import Affine, Law
from dsprep.layout.model import Column, FileLayout, Given, Grid, OwnFiles, Records
from dsprep.layout.words import Words


@dataclass(frozen=True)
class Extents:
    """Byte ranges of one field of some samples of one file, in arrays of shape ``(m,)``.

    Attributes
    ----------
    request
        int64, rising: which of the requested indices the range belongs to. A sample has one
        range, or several if it spreads over chunks, or none if it has no bytes.
    template
        The file, as in `Blocks.path`.
    file_index
        The file's position in the grid of files: int64, shape ``(axes, m)``; None: one file.
    offset, length
        int64: the stored bytes; an offset of -1 means fill values.
    inside, inside_nbytes
        int64: the sample's bytes within those that the stored ones decode to, where chunks are
        encoded or cut along inner axes; None: the stored bytes are the sample's.
    names
        Where each sample has a file: their names, by their number in `file_index`, of one axis.
    """

    request: Ints
    template: str
    file_index: Ints | None
    offset: Ints
    length: Ints
    inside: Ints | None = None
    inside_nbytes: Ints | None = None
    names: Words | None = None

    def path(self, file_index: Sequence[int]) -> str:
        """Return the file at a position in the grid of files."""
        if self.names is not None:
            return os.fsdecode(self.names[file_index[0]])
        return file_path(self.template, file_index)

    def by_path(self) -> list[tuple[str, Ints | slice]]:
        """Return the files that the ranges are in, and which ranges are in each."""
        if self.file_index is None:
            return [(self.template, slice(None))]
        file_indices, inverse, counts = np.unique(
            self.file_index, axis=1, return_inverse=True, return_counts=True
        )
        order = np.argsort(inverse.reshape(-1), kind="stable")
        files, ends = file_indices.T.tolist(), np.cumsum(counts).tolist()
        return [
            (self.path(file_index), order[end - count : end])
            for file_index, end, count in zip(files, ends, counts.tolist(), strict=True)
        ]

    def addresses(self, to: Ints) -> Ints:
        """Return the target of each range: those of request i, back to back, from ``to[i]`` on."""
        request = self.request
        if len(request) == len(to) and not (request[1:] == request[:-1]).any():
            return to
        before = np.cumsum(self.length) - self.length
        first = np.searchsorted(request, np.arange(len(to)))
        addresses: Ints = to[request] + before - np.append(before, 0)[first][request]
        return addresses

    def stored(self) -> Extents:
        """Return those ranges that are stored and not empty."""
        kept = (self.offset >= 0) & (self.length > 0)
        if kept.all():
            return self
        inside = None if self.inside is None else self.inside[kept]
        nbytes = None if self.inside_nbytes is None else self.inside_nbytes[kept]
        file_index = None if self.file_index is None else self.file_index[:, kept]
        offset, length = self.offset[kept], self.length[kept]
        request, template, names = self.request[kept], self.template, self.names
        return Extents(request, template, file_index, offset, length, inside, nbytes, names)


def locate(layout: FileLayout, name: str, indices: Ints) -> Extents:
    """Return the extents of field `name` of the samples `indices` of a file.

    Parameters
    ----------
    indices
        int64, shape ``(n,)``, each ``0 <= i < layout.count``.

    Raises
    ------
    UsageError
        If only the format's library finds that field.
    FormatError
        If laws give rows that are not there.
    """
    match layout.find_field(name):
        case Records() as records:
            return _in_records(records, name, indices)
        case Column() as column:
            return _in_column(column, name, indices)
        case OwnFiles() as own:
            at, nbytes = np.zeros(len(indices), np.int64), own.lengths.at(indices)
            request = np.arange(len(indices), dtype=np.int64)
            return Extents(request, "", indices[None], at, nbytes, names=own.names)
        case Given():
            none = np.zeros(0, np.int64)
            return Extents(none, "", None, none, none)
        case reason:
            raise UsageError(f"field {name} has no extents", found=reason)


def _in_records(records: Records, name: str, indices: Ints) -> Extents:
    part, blocks = records.parts[name], records.blocks
    offset, length = records.extents(indices, f"field {name}")
    request = np.arange(len(indices), dtype=np.int64)
    if part.at is not None:
        offset += part.at
        rest = length - part.at
        length = rest if part.nbytes is None else np.full(len(indices), part.nbytes, np.int64)
    return Extents(request, blocks.path, None, offset, length)


def _in_column(column: Column, name: str, indices: Ints) -> Extents:
    none = np.zeros(0, np.int64)
    grid = column.grid
    if grid is None:
        return Extents(none, "", None, none, none)
    first, count = rows_of(column, indices)
    if column.first is not None:
        check_rows(grid, first, count, name)
    return locate_rows(grid, first, count)


_path = lru_cache(1 << 12)(file_path)


def rows_at(grid: Grid, first: int, count: int) -> tuple[str, int] | None:
    """Return file and offset of rows of a plain grid; None unless they are in one chunk."""
    chunk, inside = divmod(first, grid.chunk[0])
    exist = 0 <= first < first + count <= grid.shape[0]
    if not exist or inside + count > grid.chunk[0]:
        return None
    path, block = grid.blocks.path, chunk
    if grid.files is not None:
        along, *across = grid.files
        path = _path(path, (chunk // along, *(0 for _ in across)))
        block = chunk * math.prod(across)
    elif grid.file_numbers is not None:
        path = _path(path, (grid.file_numbers.one(block),))
    offset, length = grid.blocks.offsets.one(block), grid.blocks.lengths.one(block)
    return (path, offset + inside * grid.row_nbytes) if offset >= 0 and length > 0 else None


def locate_rows(grid: Grid, first: Ints, count: Ints) -> Extents:
    """Return the ranges of rows of a grid; request i has ``count[i]`` rows."""
    row, path = grid.row_nbytes, grid.blocks.path
    base = adjoining(grid) if grid.plain else None
    if base is not None:
        offset = first * row
        offset += base
        kept = count > 0
        request = np.arange(len(first), dtype=np.int64)
        if not kept.all():
            request, offset, count = request[kept], offset[kept], count[kept]
        return Extents(request, path, None, offset, count * row)
    request, inside, rows, block, file_index = _cut(grid, first, count)
    offset, length = grid.blocks.offsets.at(block), grid.blocks.lengths.at(block)
    if grid.plain:
        offset = np.where((offset >= 0) & (length > 0), offset + inside * row, -1)
        return Extents(request, path, file_index, offset, rows * row)
    line = math.prod(grid.chunk[1:]) * grid.itemsize
    return Extents(request, path, file_index, offset, length, inside * line, rows * line)


def adjoining(grid: Grid) -> int | None:
    """Return the offset of row 0 if all rows are contiguous in one file, else None."""
    law = grid.blocks.offsets
    if grid.several or not isinstance(law, Affine) or law.base < 0:
        return None
    return law.base if law.count == 1 or law.stride == grid.chunk_nbytes else None


def rows_of(column: Column, indices: Ints) -> tuple[Ints, Ints]:
    """Return the first row of each sample in the array, and how many rows it has."""
    if column.first is None or column.count is None:
        return indices * column.lines, np.full(len(indices), column.lines, np.int64)
    return column.first.at(indices), column.count.at(indices)


def check_rows(grid: Grid, first: Ints, count: Ints, name: str) -> None:
    """Raise `FormatError` unless all samples have rows that exist, and none of another sample."""
    rows = grid.shape[0]
    bad = (first < 0) | (count < 0) | (count > rows) | (first > rows - count)
    if bad.any():
        i = int(bad.argmax())
        raise layout_mismatch(
            "gives a sample rows that do not exist",
            f"field {name}",
            f"within {rows} rows",
            f"{count[i]} rows from {first[i]} on",
        )
    if len(count) > 1 and int(count.sum()) > rows:
        _, chosen = np.unique(first, return_index=True)
        if int(count[chosen].sum()) > rows:
            raise layout_mismatch("gives samples rows that overlap", f"field {name}")


def cut_lines(per: int, first: Ints, count: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Cut ranges of rows at every multiple of `per`.

    Returns
    -------
    ``(request, done, inside, rows, line)``, int64 of shape ``(m,)``: which of the ranges each piece
    is of; rows of that in the pieces before; its first row, behind the multiple number ``line``;
    and how many rows it has.
    """
    low = first // per
    lines = np.where(count > 0, (first + count - 1) // per - low + 1, 0)
    request = np.repeat(np.arange(len(first), dtype=np.int64), lines)
    at = ranges(low, lines)
    begin = np.maximum(first[request], at * per)
    end = np.minimum((first + count)[request], (at + 1) * per)
    return request, begin - first[request], begin - at * per, end - begin, at


def _cut(grid: Grid, first: Ints, count: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints | None]:
    """Cut ranges of rows where chunks end, and repeat each piece for all chunks side by side."""
    request, _, inside, rows, at = cut_lines(grid.chunk[0], first, count)
    tiles = grid.chunks[1:]
    side, n = math.prod(tiles), len(at)
    if side > 1:
        request, inside, rows, at = (np.repeat(a, side) for a in (request, inside, rows, at))
        tile = np.tile(np.array(np.unravel_index(np.arange(side), tiles), np.int64), (1, n))
    else:
        tile = np.zeros((len(tiles), n), np.int64)
    return request, inside, rows, *grid.numbers(np.concatenate([at[None], tile]))


def sizes(layout: FileLayout, field: Field, indices: Ints) -> Ints | None:
    """Return the bytes of a ragged field in samples; None where only the records say."""
    match layout.find_field(field.name):
        case Given(values=values) as given:
            assert isinstance(values, Words)  # of all that is ragged
            return values.lengths(given.numbers(indices, field.name))
        case OwnFiles() as own:
            return own.lengths.at(indices)
        case Column(grid=None):
            return np.zeros(len(indices), np.int64)
        case Column(grid=Grid() as grid, count=None) as column:
            return np.full(len(indices), grid.row_nbytes * column.lines, np.int64)
        case Column(grid=Grid() as grid, count=Law() as count):
            return count.at(indices) * grid.row_nbytes
        case Records() as records if (at := records.parts[field.name].at) is not None:
            nbytes = records.parts[field.name].nbytes
            if nbytes is not None:
                return np.full(len(indices), nbytes, np.int64)
            return records.blocks.lengths.at(records.numbers(indices, field.name)) - at
    return None
