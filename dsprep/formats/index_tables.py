"""Index tables: whose rows are whose, in whatever format the arrays are.

A table has, for each of its rows, the first row and the number of rows of something else: another
table, or the values. It is stored as these two, as N + 1 bounds (the ``indptr`` of sparse matrices
in CSR, the offsets of Arrow and Awkward Array), or as N ends (the ``VectorIndex`` of NWB). Only
partitions are taken: each row begins where the one before it ends. So a range of samples is one
range of rows however many tables are between, and the lengths of the samples follow from the last
table's numbers.

The one exception is what dsprep writes in groups: a group's rows follow each other, and each group
begins at a multiple of the capacity that all have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np

from dsprep.core.schema import Array, DType, Ints, Kind
from dsprep.errors import FormatError
from dsprep.layout.laws import Affine, Explicit, Law

_SCAN = 1 << 20

Form: TypeAlias = Literal["counts", "bounds", "ends", "pairs"]


class Numbers(Protocol):
    """An array of integers, or of rows with some, as a table holds them.

    Attributes
    ----------
    where
        The file and the array, for messages.
    """

    where: str

    @property
    def dtype(self) -> DType:
        """Its dtype."""

    @property
    def count(self) -> int:
        """How many rows it has."""

    def read(self, start: int, stop: int) -> Array:
        """Return rows ``start <= i < stop``."""


@dataclass(frozen=True, eq=False)
class IndexTable:
    """Where the first rows and the numbers of rows are.

    Attributes
    ----------
    paths
        Of the arrays that hold it, one or two.
    first, count
        These; the same one when the table is compound or has two columns.
    form
        ``"counts"``: the first row of each, and how many it has. ``"bounds"``: `first` has one
        number more than the table has rows, where each begins, and where the last one ends.
        ``"pairs"``: as counts, but where each ends instead of how many it has.
        ``"ends"``: `first` has where each ends, and the first one begins at 0.
    first_member, count_member
        The member of the compound type, the number of the column, or None for plain arrays.
    capacity
        Rows from the beginning of one group to that of the next; 0: there are no groups.
    """

    paths: tuple[str, ...]
    first: Numbers
    count: Numbers
    form: Form = "counts"
    first_member: str | int | None = None
    count_member: str | int | None = None
    capacity: int = 0

    @property
    def rows(self) -> int:
        """The number of rows of the table."""
        return self.first.count - (self.form == "bounds")

    def read(self, start: int, stop: int, target: int, *, gaps: bool = False) -> tuple[Ints, Ints]:
        """Return the first rows and the ends (exclusive) of table rows ``start <= i < stop``.

        Raises `FormatError` if they leave ``0 .. target``, the rows that they point to, or do not
        follow each other without gap; with `gaps`, but between groups.
        """
        if self.form in ("counts", "pairs"):
            values = self.first.read(start, stop)
            low = _integers(values, self.first_member)
            if self.count is not self.first:
                values = self.count.read(start, stop)
            size = _integers(values, self.count_member)
            size = size - low if self.form == "pairs" else size
        else:
            bounds = self._bounds(start, stop)
            low, size = bounds[:-1], np.diff(bounds)
        if low.size and (min(low.min(), size.min()) < 0 or max(low.max(), size.max()) > target):
            raise self._wrong(start, stop, f"rows 0 to {target}", "rows outside")
        end = low + size
        if end.size and (int(end.max()) > target or not self._follow(low, end, gaps)):
            raise self._wrong(
                start, stop, f"each of {target} rows once, in order", "gaps or overlaps"
            )
        return low, end

    def _bounds(self, start: int, stop: int) -> Ints:
        """Return where rows ``start <= i < stop`` begin, and where the last of them ends."""
        if self.form == "bounds":
            return _integers(self.first.read(start, stop + 1), None)
        ends = _integers(self.first.read(max(0, start - 1), stop), None)
        return ends if start else np.append(np.zeros(1, np.int64), ends)

    def _follow(self, low: Ints, end: Ints, gaps: bool) -> bool:
        """Whether each row begins where the one before it ends, or a group does."""
        if not gaps or not self.capacity:
            return np.array_equal(low[1:], end[:-1])
        apart = low[1:] != end[:-1]
        begins = low[1:][apart]
        ordered = bool((begins >= end[:-1][apart]).all())
        rows = end > low
        inside = low[rows] // self.capacity == (end[rows] - 1) // self.capacity
        return ordered and not bool((begins % self.capacity).any()) and bool(inside.all())

    def _wrong(self, start: int, stop: int, expected: str, stated: str) -> FormatError:
        return FormatError(
            "the index does not fit its values",
            where=f"{self.first.where}, rows {start} to {stop - 1}",
            expected=expected,
            found=stated,
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
        """Whether the whole table divides `target` rows, read block by block."""
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


def _integers(rows: Array, member: str | int | None) -> Ints:
    """Return a column of integers as int64.

    Numbers beyond int64 come out negative, which no caller takes for a row.
    """
    if member is not None:
        rows = rows[:, member] if isinstance(member, int) else rows[member]
    return rows.astype(np.int64)


@dataclass(frozen=True, eq=False)
class Route:
    """How to reach a dataset from the samples.

    Attributes
    ----------
    tables, names
        From the samples to the values, at least one; as in ``--field x=PATH@NAME@NAME``.
    rebase
        The member of the values (``""``: the values themselves) that counts rows of the next
        table and is made to start at 0 in each sample; None if there is none.
    """

    tables: tuple[IndexTable, ...]
    names: tuple[str, ...]
    kind: Kind = "array"
    rebase: str | None = None


@dataclass(frozen=True, eq=False)
class Located:
    """Where consecutive samples are in the values.

    Attributes
    ----------
    lows, highs
        int64, shape ``(runs,)``: they have the rows ``lows[k] <= r < highs[k]`` of all runs, in
        this order. There is one run unless they are in several groups.
    offsets
        int64, shape ``(n + 1,)``: sample i has the rows ``offsets[i]`` to ``offsets[i + 1]``,
        counted in the runs joined together.
    """

    lows: Ints
    highs: Ints
    offsets: Ints

    @property
    def first(self) -> Ints:
        """The first row of each sample, int64 of shape ``(n,)``."""
        ends = np.cumsum(self.highs - self.lows)
        starts = np.append(0, ends[:-1])
        run = np.searchsorted(starts, self.offsets[:-1], "right") - 1
        rows: Ints = self.offsets[:-1] + (self.lows - starts)[run]
        return rows


def locate(tables: Sequence[IndexTable], target: int, start: int, stop: int) -> Located:
    """Return where samples ``start <= i < stop`` are in the values, which have `target` rows."""
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
        located = runs_of(first, end)
        lows, highs, offsets = located.lows, located.highs, located.offsets[offsets]
    return Located(lows, highs, offsets)


def runs_of(first: Ints, end: Ints) -> Located:
    """Return where samples are that have these rows: at least one sample."""
    cuts = np.flatnonzero(first[1:] != end[:-1])
    lows, highs = first[np.append(0, cuts + 1)], end[np.append(cuts, -1)]
    return Located(lows, highs, np.append(0, np.cumsum(end - first)))


def laws_of(located: Callable[[int, int], Located], count: int) -> tuple[Law, Law]:
    """Return the first row of each of `count` samples, and how many rows it has.

    `located` returns where samples ``start <= i < stop`` are.
    """
    first, number, end = np.empty(count, np.int64), np.empty(count, np.int64), 0
    for start in range(0, count, _SCAN):
        stop = min(start + _SCAN, count)
        some = located(start, stop)
        number[start:stop] = np.diff(some.offsets)
        first[start:stop] = end  # of samples without rows: where those before them end
        if some.offsets[-1]:
            first[start:stop], end = some.first, int(some.highs[-1])
    even = count and bool((number == number[0]).all())
    return Explicit(first), Affine(count, int(number[0])) if even else Explicit(number)
