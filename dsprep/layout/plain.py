"""Fields of which every sample is one range of bytes, at an offset that laws give: without I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsprep.core.schema import Field, Ints
from dsprep.layout.laws import Affine
from dsprep.layout.locate import adjoining, rows_at
from dsprep.layout.model import Column, FileLayout, Grid, Records


@dataclass(frozen=True)
class Plain:
    """Fields that lie in one range of every sample of a file, each at a place of its own.

    Attributes
    ----------
    fields
        Each field, and the bytes from the beginning of the range to its value, which has
        `Field.row_nbytes`; in the order of these places.
    holder
        What holds them: records, or the array of the only field, whose samples have `lines` rows.
    nbytes
        Bytes that the range has at least.
    exact
        Whether it has to have just as many.
    base
        The offset of sample 0, where all samples of an array are back to back in one file.
    """

    fields: list[tuple[Field, int]]
    holder: Records | Grid
    nbytes: int
    lines: int = 1
    exact: bool = False
    base: int | None = None

    @property
    def path(self) -> str:
        """The file, as in `Blocks.path`."""
        return self.holder.blocks.path

    def run(self, first: int, count: int) -> tuple[str, int, int] | None:
        """Return the file of consecutive samples, the offset of the first, and their distance.

        None where they have no constant distance, or are not as the layout says.
        """
        if isinstance(self.holder, Grid):
            at = rows_at(self.holder, first * self.lines, count * self.lines)
            return None if at is None else (*at, self.nbytes)
        blocks, order, stride = self.holder.blocks, self.holder.order, self.nbytes
        if order is not None:
            return None
        low = high = blocks.lengths.one(first)
        if count > 1:
            if not isinstance(blocks.lengths, Affine) or blocks.lengths.stride:
                lengths = blocks.lengths.span(first, first + count)
                low, high = int(lengths.min()), int(lengths.max())
            if isinstance(blocks.offsets, Affine):
                stride = blocks.offsets.stride
            else:
                steps = np.diff(blocks.offsets.span(first, first + count))
                stride = int(steps[0])
                if (steps != stride).any():
                    return None
        if stride < self.nbytes or not self._fits(low, high):
            return None
        return blocks.path, blocks.offsets.one(first), stride

    def starts(self, samples: Ints) -> Ints | None:
        """Return the offsets of samples, int64 of shape ``(n,)``; None as `run` does.

        There is at least one sample, and each ``0 <= i < layout.count``.
        """
        if isinstance(self.holder, Records):
            starts, lengths = self.holder.extents(samples, self.path)
            return starts if self._fits(int(lengths.min()), int(lengths.max())) else None
        grid = self.holder
        if self.base is not None:
            return samples * self.nbytes + self.base
        if grid.several or grid.chunk[0] % self.lines:
            return None
        block, inside = np.divmod(samples, grid.chunk[0] // self.lines)
        starts = grid.blocks.offsets.at(block)
        if int(starts.min()) < 0 or int(grid.blocks.lengths.at(block).min()) <= 0:
            return None
        inside *= self.nbytes
        inside += starts
        return inside

    def _fits(self, shortest: int, longest: int) -> bool:
        return shortest >= self.nbytes and (not self.exact or longest == self.nbytes)


def plain(layout: FileLayout, fields: Sequence[Field]) -> list[Plain] | None:
    """Return the ranges of fields of at least one byte; None unless each value is one range."""
    out = []
    inside = [f for f in fields if f.name not in layout.columns]
    if inside:
        if layout.records is None or (each := _in_records(layout.records, inside)) is None:
            return None
        out.append(each)
    for f in fields:
        if (column := layout.columns.get(f.name)) is not None:
            if (each := _in_column(column, f, layout.count)) is None:
                return None
            out.append(each)
    return out


def _in_records(records: Records, fields: Sequence[Field]) -> Plain | None:
    placed, ends = list[tuple[Field, int]](), set[int]()
    for f in fields:
        part = records.parts.get(f.name)
        if part is None or part.at is None or f.ragged or part.nbytes not in (None, f.row_nbytes):
            return None
        placed.append((f, part.at))
        if part.nbytes is None:
            ends.add(part.at + f.row_nbytes)
    nbytes = max(at + f.row_nbytes for f, at in placed)
    if ends and ends != {nbytes}:
        return None
    return Plain(sorted(placed, key=lambda p: p[1]), records, nbytes, exact=bool(ends))


def _in_column(column: Column, f: Field, count: int) -> Plain | None:
    grid, lines, nbytes = column.grid, column.lines, f.row_nbytes
    if grid is None or not grid.plain or column.first is not None or f.ragged:
        return None
    if not nbytes or lines * grid.row_nbytes != nbytes or count * lines > grid.shape[0]:
        return None
    return Plain([(f, 0)], grid, nbytes, lines, base=adjoining(grid))
