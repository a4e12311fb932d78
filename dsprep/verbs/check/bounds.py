"""Whether the extents that laws give are in their files; memory does not grow with the samples."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.core.schema import Ints, Schema
from dsprep.layout.as_json import file_path
from dsprep.layout.laws import Affine
from dsprep.layout.locate import locate, rows_of
from dsprep.layout.model import Column, FileLayout, Grid, OwnFiles, Records
from dsprep.verbs.check.problems import Problem

SLICE = 1 << 18
"""Samples whose extents are computed at once."""
MOST_BLOCKS = 1 << 24
"""Blocks of one sample, beyond which it is not checked."""
OFTEN = 1000
"""Samples that may share a row."""


def file_nbytes(path: Path) -> int | None:
    """Return the size of a file; None if it cannot be examined."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def outside(layout: FileLayout, schema: Schema, root: Path) -> Iterator[Problem]:
    """Yield the problems of extents that the laws give: per field the first, and how many.

    Parameters
    ----------
    root
        The file or store.
    """
    known: dict[str, int | None] = {}

    def size(path: str) -> int | None:
        if path not in known:
            if len(known) > 1 << 16:
                known.clear()
            known[path] = file_nbytes(root / path if path else root)
        return known[path]

    records_checked = False
    for name in schema.names:
        match layout.find_field(name):
            case Records() as records if not records_checked:
                yield from _records_outside(records, layout.count, size)
                records_checked = True
            case OwnFiles() as own:
                yield from _files_outside(own, name, root)
            case Column(grid=Grid()) as column:
                yield from _column_outside(layout, name, column, size)


def _slices(count: int, linear: bool) -> Iterator[Ints]:
    """Yield all indices in slices; where laws are linear, their ends suffice."""
    if linear and count > 2:
        yield np.array([0, count - 1], np.int64)
        return
    for start in range(0, count, SLICE):
        yield np.arange(start, min(start + SLICE, count), dtype=np.int64)


def _chunk_ends(count: int, samples_per_chunk: int) -> Iterator[Ints]:
    """Yield the first and the last sample of every chunk, in slices."""
    for indices in _slices(-(-count // samples_per_chunk), False):
        first = indices * samples_per_chunk
        last = np.minimum(first + samples_per_chunk, count) - 1
        yield np.stack((first, last), 1).reshape(-1)


class _Tally:
    """Counts what is wrong and keeps the first."""

    def __init__(self) -> None:
        self.count, self.first = 0, None
        self.number = -1

    first: tuple[int, int] | None

    def add(self, bad: Any, numbers: Ints, offset: Ints, length: Ints) -> None:
        k = int(bad.sum())
        if k and self.first is None:
            i = int(bad.argmax())
            self.number, self.first = int(numbers[i]), (int(offset[i]), int(length[i]))
        self.count += k

    def problem(self, text: str, nbytes: int | None, name: str | None) -> Iterator[Problem]:
        if self.first is None:
            return
        offset, length = self.first
        more = f", and {self.count - 1:,} more" if self.count > 1 else ""
        expected = "a file" if nbytes is None else f"within {nbytes:,} bytes"
        extent = f"{length:,} bytes at {offset:,}"
        yield Problem("", text + more, expected, extent, name, self.number)


def _beyond(offset: Ints, length: Ints, nbytes: int | None) -> Any:
    size = -1 if nbytes is None else nbytes
    return (offset < 0) | (length < 0) | (length > size) | (offset > size - length)


def _records_outside(
    records: Records, count: int, size: Callable[[str], int | None]
) -> Iterator[Problem]:
    blocks, order, nbytes = records.blocks, records.order, size(records.blocks.path)
    linear = all(
        law is None or isinstance(law, Affine) for law in (blocks.offsets, blocks.lengths, order)
    )
    far, short = _Tally(), _Tally()
    min_nbytes = max(
        (p.at + (p.nbytes or 0) for p in records.parts.values() if p.at is not None), default=0
    )
    for indices in _slices(count, linear):
        numbers = indices if order is None else order.at(indices)
        wrong = (numbers < 0) | (numbers >= blocks.count)
        if wrong.any():
            i = int(wrong.argmax())
            text = "the sidecar gives a sample a record that does not exist"
            record = int(numbers[i])
            yield Problem("", text, f"below {blocks.count:,}", record, None, int(indices[i]))
            return
        offset, length = blocks.offsets.at(numbers), blocks.lengths.at(numbers)
        far.add(_beyond(offset, length, nbytes), indices, offset, length)
        short.add(length < min_nbytes, indices, offset, length)
    yield from far.problem("the sidecar gives an extent that is not in the file", nbytes, None)
    yield from short.problem("a record is too short for its fields", min_nbytes, None)


def _files_outside(own: OwnFiles, name: str, root: Path) -> Iterator[Problem]:
    """Yield the problem of files that have another size than the sidecar gives."""
    tally, where, limit = _Tally(), "", None
    for indices in _slices(own.lengths.count, False):
        offset, length = np.zeros(len(indices), np.int64), own.lengths.at(indices)
        paths = [root / os.fsdecode(own.names[i]) for i in indices.tolist()]
        sizes = np.array([-1 if (n := file_nbytes(p)) is None else n for p in paths], np.int64)
        bad = length != sizes
        if tally.first is None and bad.any():
            i = int(bad.argmax())
            where, limit = str(paths[i]), int(sizes[i]) if sizes[i] >= 0 else None
        tally.add(bad, indices, offset, length)
    text = f"the sidecar gives another size than that of the file {where}"
    yield from tally.problem(text, limit, name)


def _column_outside(
    layout: FileLayout, name: str, column: Column, size: Callable[[str], int | None]
) -> Iterator[Problem]:
    grid = column.grid
    assert grid is not None
    samples_per_chunk, rest = divmod(grid.chunk[0], max(1, column.lines))
    if column.first is None and not rest and samples_per_chunk > 2:
        # The extents of one chunk's samples are between those of its first and last one.
        ends = _chunk_ends(layout.count, samples_per_chunk)
        if not any(_samples_outside(grid, layout, name, ends, size)):
            return
    yield from _samples_outside(grid, layout, name, _slices(layout.count, False), size)


def _samples_outside(
    grid: Grid,
    layout: FileLayout,
    name: str,
    slices: Iterator[Ints],
    size: Callable[[str], int | None],
) -> Iterator[Problem]:
    column = layout.columns[name]
    tally = _Tally()
    limit: int | None = None
    row_count = 0
    for indices in slices:
        first, count = rows_of(column, indices)
        rows = grid.shape[0]
        bad = (first < 0) | (count < 0) | (count > rows) | (first > rows - count)
        row_count += int(count.astype(float).sum()) if not bad.any() else 0
        if bad.any() or row_count > OFTEN * rows:
            i = int(bad.argmax())
            text = "the sidecar gives samples rows that do not exist, or overlap"
            row_text = f"{count[i]:,} rows from {first[i]:,} on"
            yield Problem("", text, f"within {rows:,} rows", row_text, name, int(indices[i]))
            return
        side = int(np.prod(np.array(grid.chunks[1:], float)))
        blocks = (count // grid.chunk[0] + 2).astype(float) * side
        if float(blocks.max(initial=0)) > MOST_BLOCKS:
            yield Problem("", "a sample has impossibly many chunks", field=name)
            return
        parts = max(1, int(blocks.sum() // (SLICE * 4)) + 1)
        for some in np.array_split(indices, min(parts, len(indices))):
            ranges = locate(layout, name, some)
            stored = (ranges.offset >= 0) & (ranges.length > 0)
            if grid.fill is None:
                stored[:] = True
            offset, length = ranges.offset[stored], ranges.length[stored]
            numbers = some[ranges.request[stored]]
            for path, members in _by_path(ranges.template, ranges.file_index, stored):
                nbytes = size(path)
                if tally.first is None:
                    limit = nbytes
                where = offset[members], length[members]
                tally.add(_beyond(*where, nbytes), numbers[members], *where)
    yield from tally.problem("the sidecar gives an extent that is not in the file", limit, name)


def _by_path(template: str, numbers: Ints | None, stored: Any) -> Iterator[tuple[str, Any]]:
    """Yield each file with which of the stored ranges it holds."""
    if numbers is None:
        yield template, slice(None)
        return
    kept = numbers[:, stored]
    if not kept.shape[1]:
        return
    distinct, inverse = np.unique(kept, axis=1, return_inverse=True)
    order = np.argsort(inverse.reshape(-1), kind="stable")
    edges = np.searchsorted(inverse.reshape(-1)[order], np.arange(distinct.shape[1] + 1))
    for k, spot in enumerate(distinct.T.tolist()):
        yield file_path(template, spot), order[edges[k] : edges[k + 1]]
