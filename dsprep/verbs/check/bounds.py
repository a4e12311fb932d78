"""Whether the extents that laws give are in their files; memory does not grow with the samples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dsprep.core.schema import Ints, Schema
from dsprep.errors import FormatError, layout_mismatch
from dsprep.layout.laws import Affine
from dsprep.layout.locate import adjoining, check_rows, locate, rows_of
from dsprep.layout.model import Column, FileLayout, Grid, OwnFiles, Records
from dsprep.verbs.check.problems import Problem, problem

SLICE = 1 << 18
"""Samples whose extents are computed at once."""
MOST_BLOCKS = 1 << 24
"""Blocks of one sample, beyond which it is not checked."""


def file_nbytes(path: Path) -> int | None:
    """Return the size of a file; None if it cannot be examined."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def outside(layout: FileLayout, schema: Schema, root: Path) -> Iterator[Problem]:
    """Yield for each field the first extent that is not in its file.

    Parameters
    ----------
    root
        The file or store.
    """
    records_checked = False
    for name in schema.names:
        stored: object = layout.find_field(name)
        if isinstance(stored, Records):
            stored, records_checked = (None if records_checked else stored), True
        try:
            for indices in _samples(stored, layout.count):
                mistake = _outside(layout, name, indices, root)
                if mistake is not None:
                    yield mistake
                    break
        except FormatError as error:
            yield problem(error, "", name)


def _samples(stored: object, count: int) -> Iterator[Ints]:
    """Yield the samples whose extents are looked at, in slices: the others are between these."""
    each, ends = 1, False
    match stored:
        case Records() as records:
            numbers = records.blocks.offsets, records.blocks.lengths, records.order
            ends = all(law is None or isinstance(law, Affine) for law in numbers)
        case Column(grid=Grid() as grid, first=None, lines=lines):
            ends = grid.plain and adjoining(grid) is not None
            each, rest = divmod(grid.chunk[0], max(1, lines))
            each = 1 if rest else max(1, each)
        case Column(grid=Grid()) | OwnFiles():
            pass
        case _:  # there is no such extent
            return
    if ends and count > 2:
        yield np.array([0, count - 1], np.int64)
        return
    units = -(-count // each)
    for start in range(0, units, SLICE):
        first = np.arange(start, min(start + SLICE, units), dtype=np.int64) * each
        last = np.minimum(first + each, count) - 1
        yield first if each == 1 else np.unique(np.concatenate([first, last]))


def _outside(layout: FileLayout, name: str, indices: Ints, root: Path) -> Problem | None:
    """Return the first of some samples that has an extent outside of its file."""
    needed, fill, parts, column = 0, False, 1, layout.columns.get(name)
    if column is not None and column.grid is not None:
        grid, (first, count) = column.grid, rows_of(column, indices)
        check_rows(grid, first, count, name)
        side = float(np.prod(np.array(grid.chunks[1:], float)))
        blocks = (count // grid.chunk[0] + 2) * side
        if float(blocks.max(initial=0)) > MOST_BLOCKS:
            raise layout_mismatch("gives a sample impossibly many chunks", f"field {name}")
        fill, parts = grid.fill is not None, int(blocks.sum() // (SLICE * 4)) + 1
    elif layout.records is not None and name in layout.records.parts:
        needed = _needed(layout.records)
    for some in np.array_split(indices, min(parts, max(1, len(indices)))):
        if layout.records is not None and name in layout.records.parts:
            offsets, lengths = layout.records.extents(some, f"field {name}")
            ranges = [(layout.records.blocks.path, some, offsets, lengths)]
        else:
            extents = locate(layout, name, some)
            numbers = some[extents.request]
            ranges = [
                (path, numbers[chosen], extents.offset[chosen], extents.length[chosen])
                for path, chosen in extents.by_path()
            ]
        for path, numbers, offset, length in ranges:
            size = file_nbytes(root / path if path else root)
            nbytes = -1 if size is None else size
            bad = (length < needed) | (length > nbytes) | (offset > nbytes - length)
            bad |= (offset < 0) & ~((offset == -1) & fill)
            if bad.any():
                i = int(bad.argmax())
                within = "a file" if size is None else f"within {size:,} bytes"
                expected = f"{within}, of at least {needed:,}" if needed else within
                found = f"{int(length[i]):,} bytes at {int(offset[i]):,}"
                text = "the sidecar gives an extent that is not in the file"
                return Problem("", text, expected, found, name, int(numbers[i]))
    return None


def _needed(records: Records) -> int:
    """Return the bytes that a record has at least."""
    return max(
        (p.at + (p.nbytes or 0) for p in records.parts.values() if p.at is not None), default=0
    )
