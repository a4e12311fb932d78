"""Consecutive samples that lie evenly: a few numbers instead of one place per sample.

Most units are such: the rows of a group's chunk, records of one size. Planning them takes a
tenth of the time that `dsprep.layout.locate.locate` and `dsprep.core.pread.runs` take, which give
the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsprep.core.pread import DROPPED, NEAR
from dsprep.core.schema import Field, Ints
from dsprep.layout.laws import Affine
from dsprep.layout.model import Column, FileLayout, Grid, Records


@dataclass(frozen=True)
class Line:
    """Where a field of consecutive samples lies: sample i at ``offset + i * stride``.

    Attributes
    ----------
    path
        The file, below the dataset's file entry.
    offset, stride
        Bytes.
    nbytes
        Bytes of a sample.
    """

    path: str
    offset: int
    stride: int
    nbytes: int


def line(layout: FileLayout, field: Field, first: int, count: int) -> Line | None:
    """Return where `count` samples from `first` on lie, or None if they do not lie evenly.

    Parameters
    ----------
    layout
        Of the file.
    field
        A field of fixed shape, of at least one byte.
    first, count
        Samples of the file; at least one.
    """
    column = layout.columns.get(field.name)
    if column is not None:
        return _of_column(column, field, first, count)
    records = layout.records
    return None if records is None else _of_records(records, field, first, count)


def _of_column(column: Column, field: Field, first: int, count: int) -> Line | None:
    grid: Grid | None = column.grid
    if grid is None or not grid.plain or grid.files is not None or column.first is not None:
        return None
    rows = grid.chunk[0]
    low, high = first * column.lines, (first + count) * column.lines
    chunk = low // rows
    if high > grid.shape[0] or (high - 1) // rows != chunk:
        return None
    offset = grid.blocks.offsets.one(chunk)
    nbytes = column.lines * grid.row_nbytes
    if offset < 0 or grid.blocks.lengths.one(chunk) <= 0 or nbytes != field.row_nbytes:
        return None
    return Line(grid.blocks.path, offset + (low - chunk * rows) * grid.row_nbytes, nbytes, nbytes)


def _of_records(records: Records, field: Field, first: int, count: int) -> Line | None:
    part, blocks = records.parts[field.name], records.blocks
    if part.at is None or records.order is not None:
        return None
    offsets, lengths = blocks.offsets, blocks.lengths
    stop = first + count
    if isinstance(offsets, Affine):
        base, stride = offsets.one(first), offsets.stride
    else:
        found = offsets.span(first, stop)
        steps = np.diff(found)
        base, stride = int(found[0]), int(steps[0]) if count > 1 else 0
        if (steps != stride).any():
            return None
    fixed = isinstance(lengths, Affine) and not lengths.stride
    least = lengths.one(first) if fixed else int(lengths.span(first, stop).min())
    nbytes = field.row_nbytes
    if part.nbytes is None:
        if not fixed or least - part.at != nbytes:
            return None
    elif part.nbytes != nbytes or part.at + nbytes > least:
        return None
    if count == 1:
        stride = nbytes
    return Line(blocks.path, base + part.at, stride, nbytes) if stride >= nbytes else None


def woven(lines: Sequence[Line], addresses: Sequence[Ints | int]) -> list[tuple[int, Ints]] | None:
    """Return what has to be read of one file, as `dsprep.core.pread.runs` does.

    Parameters
    ----------
    lines
        Of different fields of the same samples.
    addresses
        For each, where the values go: int64, shape ``(n,)``; or where all of them go together,
        as they lie.

    Returns
    -------
    None where the lines overlap or differ too much to be woven together.
    """
    order = sorted(range(len(lines)), key=lambda k: lines[k].offset)
    if all(lines[k].stride == lines[k].nbytes for k in order):
        return _stacked([(lines[k], addresses[k]) for k in order])
    return _interleaved([(lines[k], addresses[k]) for k in order])


def _stacked(parts: Sequence[tuple[Line, Ints | int]]) -> list[tuple[int, Ints]] | None:
    """Fields that lie one behind another, each without gaps."""
    out: list[tuple[int, list[Ints]]] = []
    n = next((len(a) for _, a in parts if not isinstance(a, int)), 0)
    end = -1
    for line, address in parts:
        if isinstance(address, int):
            if not n:
                return None  # how many samples there are is not told
            places = np.array([[address, n * line.nbytes]], np.int64)
        else:
            places = np.empty((n, 2), np.int64)
            places[:, 0], places[:, 1] = address, line.nbytes
        gap = line.offset - end
        if out and gap < 0:
            return None
        if out and gap <= NEAR:
            if gap:
                out[-1][1].append(np.array([[DROPPED, gap]], np.int64))
            out[-1][1].append(places)
        else:
            out.append((line.offset, [places]))
        end = line.offset + n * line.nbytes
    return [(start, each[0] if len(each) == 1 else np.concatenate(each)) for start, each in out]


def _interleaved(parts: Sequence[tuple[Line, Ints | int]]) -> list[tuple[int, Ints]] | None:
    """Fields of records of one size: the same fields and gaps again and again."""
    stride, start = parts[0][0].stride, parts[0][0].offset
    columns: list[tuple[Ints | int, int]] = []
    at, n = start, 0
    for line, address in parts:
        gap = line.offset - at
        if line.stride != stride or not 0 <= gap <= NEAR or isinstance(address, int):
            return None
        if gap:
            columns.append((DROPPED, gap))
        columns.append((address, line.nbytes))
        at, n = line.offset + line.nbytes, len(address)
    gap = start + stride - at
    if not 0 <= gap <= NEAR:
        return None
    if gap:
        columns.append((DROPPED, gap))
    places = np.empty((n, len(columns), 2), np.int64)
    for k, (address, nbytes) in enumerate(columns):
        places[:, k, 0], places[:, k, 1] = address, nbytes
    flat = places.reshape(-1, 2)
    return [(start, flat[:-1] if gap else flat)]
