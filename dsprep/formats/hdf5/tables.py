"""Index tables: from a range of samples to the range of rows that holds them.

A table has, for each of its rows, the first row and the number of rows of something else: another
table, or the values. Only partitions are taken: each row begins where the one before it ends. So
a range of samples is one range of rows however many tables lie between, and the lengths of the
samples follow from the last table's numbers.

The one exception is what dsprep writes in groups: a group's rows follow each other, and each group
begins at a multiple of the capacity that all have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import Array
from dsprep.errors import FormatError
from dsprep.formats.hdf5.rows import Rows

_SCAN = 1 << 20


@dataclass(frozen=True, eq=False)
class Table:
    """Where the first rows and the numbers of rows stand.

    Attributes
    ----------
    first, count
        The datasets; the same one when the table is compound or has two columns.
    first_member, count_member
        The member of the compound type, the number of the column, or None for a plain dataset.
    capacity
        Rows from the beginning of one group to that of the next; 0: there are no groups.
    """

    first: Rows
    count: Rows
    first_member: str | int | None = None
    count_member: str | int | None = None
    capacity: int = 0

    @property
    def rows(self) -> int:
        """The number of rows of the table."""
        return self.first.count

    def read(
        self, start: int, stop: int, target: int, *, gaps: bool = False
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first rows and the ends (exclusive) of table rows ``start <= i < stop``.

        Parameters
        ----------
        target
            The number of rows that they tell of.
        gaps
            Whether there may be gaps between groups.

        Raises
        ------
        FormatError
            If they leave ``0 .. target`` or do not follow each other without gap.
        """
        low, whole = _integers(self.first, self.first_member, start, stop)
        same = whole if self.count is self.first else None
        size, _ = _integers(self.count, self.count_member, start, stop, same)
        if low.size and (
            int(low.min()) < 0
            or int(size.min()) < 0
            or int(low.max()) > target
            or int(size.max()) > target
        ):
            raise self._wrong(start, stop, f"rows 0 to {target}", "rows outside")
        end = low + size
        if end.size and (int(end.max()) > target or not self._follow(low, end, gaps)):
            raise self._wrong(
                start, stop, f"each of {target} rows once, in order", "gaps or overlaps"
            )
        return low, end

    def _follow(self, low: NDArray[np.int64], end: NDArray[np.int64], gaps: bool) -> bool:
        """Whether each row begins where the one before it ends, or a group does."""
        if not gaps or not self.capacity:
            return np.array_equal(low[1:], end[:-1])
        apart = low[1:] != end[:-1]
        begins = low[1:][apart]
        ordered = bool((begins >= end[:-1][apart]).all())
        rows = end > low
        inside = low[rows] // self.capacity == (end[rows] - 1) // self.capacity
        return ordered and not bool((begins % self.capacity).any()) and bool(inside.all())

    def _wrong(self, start: int, stop: int, expected: str, found: str) -> FormatError:
        return FormatError(
            "the index does not fit its values",
            where=f"{self.first.where}, rows {start} to {stop - 1}",
            expected=expected,
            found=found,
        )

    def total(self) -> int | None:
        """Return where the last row ends, if the first one begins at 0."""
        if not self.rows:
            return 0
        largest = np.iinfo(np.int64).max // 4
        try:
            low = self.read(0, 1, largest)[0]
            end = self.read(self.rows - 1, self.rows, largest)[1]
        except FormatError:
            return None
        return int(end[0]) if low[0] == 0 else None

    def partitions(self, target: int) -> bool:
        """Whether the whole table divides `target` rows, read piece by piece."""
        expected = 0
        for start in range(0, self.rows, _SCAN):
            stop = min(start + _SCAN, self.rows)
            try:
                low, end = self.read(start, stop, target)
            except FormatError:
                return False
            if int(low[0]) != expected:
                return False
            expected = int(end[-1])
        return expected == target


def _integers(
    rows: Rows, member: str | int | None, start: int, stop: int, known: Array | None = None
) -> tuple[NDArray[np.int64], Array]:
    """Return a column of integers as int64, and the rows that it is a part of.

    Numbers beyond int64 come out negative, which no caller takes for a row.
    """
    whole = rows.read(start, stop, None, "") if known is None else known
    if isinstance(member, int):
        column = whole[:, member]
    else:
        column = whole if member is None else whole[member]
    return column.astype(np.int64), whole


@dataclass(frozen=True, eq=False)
class Located:
    """Where consecutive samples lie in the values.

    Attributes
    ----------
    lows, highs
        int64, shape ``(runs,)``: they have the rows ``lows[k] <= r < highs[k]`` of all runs, in
        this order. There is one run unless they are in several groups.
    offsets
        int64, shape ``(n + 1,)``: sample i has the rows ``offsets[i]`` to ``offsets[i + 1]``,
        counted in the runs joined together.
    """

    lows: NDArray[np.int64]
    highs: NDArray[np.int64]
    offsets: NDArray[np.int64]

    @property
    def runs(self) -> Iterator[tuple[int, int]]:
        """The runs, as ``(low, high)``."""
        return zip(self.lows.tolist(), self.highs.tolist(), strict=True)

    @property
    def first(self) -> NDArray[np.int64]:
        """The first row of each sample, int64 of shape ``(n,)``."""
        ends = np.cumsum(self.highs - self.lows)
        starts = np.append(0, ends[:-1])
        run = np.searchsorted(starts, self.offsets[:-1], "right") - 1
        rows: NDArray[np.int64] = self.offsets[:-1] + (self.lows - starts)[run]
        return rows


def locate(tables: Sequence[Table], target: int, start: int, stop: int) -> Located:
    """Return where samples ``start <= i < stop`` lie in the values.

    Parameters
    ----------
    tables
        From the samples to the values; at least one.
    target
        The number of rows of the values.
    """
    offsets = np.arange(stop - start + 1, dtype=np.int64)
    low, high = start, stop
    lows, highs = np.array([start], np.int64), np.array([stop], np.int64)
    for k, table in enumerate(tables):
        last = k + 1 == len(tables)
        rows = target if last else tables[k + 1].rows
        first, end = table.read(low, high, rows, gaps=last)
        if not len(first):
            zero = np.zeros(1, np.int64)
            return Located(zero, zero, np.zeros(len(offsets), np.int64))
        low, high = int(first[0]), int(end[-1])
        cuts = np.flatnonzero(first[1:] != end[:-1])
        lows, highs = first[np.append(0, cuts + 1)], end[np.append(cuts, -1)]
        offsets = np.append(0, np.cumsum(end - first))[offsets]
    return Located(lows, highs, offsets)
