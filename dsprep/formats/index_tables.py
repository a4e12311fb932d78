"""Index tables: whose rows are whose, in whatever format the arrays are.

A table has, for each of its rows, the first row and the number of rows of something else: another
table, or the values. It is stored as these two, as the first row and that behind the last, as N + 1
bounds (the ``indptr`` of sparse matrices in CSR, the offsets of Arrow and Awkward Array), or as N
ends (the ``VectorIndex`` of NWB). Only partitions are taken: each row begins where the one before
it ends, from the first to the last.

The one exception is what dsprep writes in groups: a group's rows follow each other, and each group
begins at a multiple of the capacity that all have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from dsprep.core.memory import free_memory
from dsprep.core.schema import Array, Field, Ints, Kind, Schema
from dsprep.errors import FormatError
from dsprep.layout.laws import Affine, Explicit, Law
from dsprep.layout.model import Column, FileLayout
from dsprep.reading.layout_reader import LayoutReader
from dsprep.storage.base import Handle

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
    def count(self) -> int:
        """The number of rows."""

    def read(self, start: int, stop: int) -> Array:
        """Return rows ``start <= i < stop``."""


class LocatedRows:
    """Rows of an array that are read as a column says, such as those of a table."""

    def __init__(
        self,
        field: Field,
        count: int,
        column: Column,
        open_file: Callable[[str], Handle],
        where: str,
    ) -> None:
        self.where, self.count, self._name = where, count, field.name
        layout = FileLayout(count, columns={field.name: column})
        self._reader = LayoutReader(layout, Schema((field,)), open_file, where)

    def read(self, start: int, stop: int) -> Array:
        """Return rows ``start <= i < stop``."""
        batch: Any = self._reader.read(np.arange(start, stop, dtype=np.int64), (self._name,))
        rows: Array = batch[self._name]
        return rows

    def resident_nbytes(self) -> int:
        """Return the bytes that reading holds."""
        return self._reader.resident_nbytes()


@dataclass(frozen=True, eq=False)
class IndexTable:
    """A table of first rows and numbers of rows.

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
    members
        Of `first` and `count`: the members of the compound type, the numbers of the columns, or
        None for plain arrays.
    capacity
        Rows from the beginning of one group to that of the next; 0: there are no groups.
    """

    paths: tuple[str, ...]
    first: Numbers
    count: Numbers
    form: Form = "counts"
    members: tuple[str | int | None, str | int | None] = (None, None)
    capacity: int = 0

    @property
    def rows(self) -> int:
        """The number of rows of the table."""
        return self.first.count - (self.form == "bounds")

    def _read(self, start: int, stop: int) -> tuple[Ints, Ints]:
        """Return the first rows and the ends (exclusive) of table rows ``start <= i < stop``."""
        if self.form == "bounds":
            bounds = _integers(self.first.read(start, stop + 1), None)
            return bounds[:-1], bounds[1:]
        if self.form == "ends":
            ends = _integers(self.first.read(max(0, start - 1), stop), None)
            ends = ends if start else np.append(np.zeros(1, np.int64), ends)
            return ends[:-1], ends[1:]
        values = self.first.read(start, stop)
        low = _integers(values, self.members[0])
        if self.count is not self.first:
            values = self.count.read(start, stop)
        size = _integers(values, self.members[1])
        return low, size if self.form == "pairs" else low + size

    def total(self) -> int | None:
        """Return where the last row ends, if the first one begins at 0."""
        if not self.rows:
            return 0
        low, end = self._read(0, 1)[0][0], self._read(self.rows - 1, self.rows)[1][0]
        return int(end) if low == 0 <= end else None

    def spans(self, target: int) -> tuple[Ints, Ints]:
        """Return the first row of each, and the one behind its last.

        Raise `FormatError` unless they are all of `target` rows, one after another.
        """
        if 16 * self.rows > free_memory():
            problem = "the rows of an index table do not fit into memory"
            raise FormatError(problem, where=self.first.where, found=f"{self.rows} rows")
        first, end = np.empty((2, self.rows), np.int64)
        for start in range(0, self.rows, _SCAN):
            some = slice(start, min(start + _SCAN, self.rows))
            first[some], end[some] = self._read(some.start, some.stop)
        if not self._divides(first, end, target):
            raise FormatError(
                f"the index does not fit its values: {' and '.join(self.paths)} do not divide them",
                where=self.first.where,
                expected=f"each of {target} rows once, in order",
                found="rows outside, gaps or overlaps",
            )
        return first, end

    def _divides(self, first: Ints, end: Ints, target: int) -> bool:
        if not self.rows:
            return target == 0 or bool(self.capacity)
        inside = first.min() >= 0 and (end >= first).all() and end.max() <= target
        apart = first[1:] != end[:-1]
        if not self.capacity:
            return bool(inside and first[0] == 0 and end[-1] == target and not apart.any())
        begins, rows = first[1:][apart], end > first
        groups = first[rows] // self.capacity == (end[rows] - 1) // self.capacity
        even = first[0] % self.capacity == 0 and not (begins % self.capacity).any()
        return bool(inside and even and (begins >= end[:-1][apart]).all() and groups.all())

    def partitions(self, target: int) -> bool:
        """Return whether the whole table divides `target` rows."""
        try:
            self.spans(target)
        except FormatError:
            return False
        return True


def _integers(rows: Array, member: str | int | None) -> Ints:
    """Return a column of integers as int64."""
    # Numbers beyond int64 come out negative, which no caller takes for a row.
    if member is not None:
        rows = rows[:, member] if isinstance(member, int) else rows[member]
    return rows.astype(np.int64)


@dataclass(frozen=True, eq=False)
class Route:
    """The way from samples to their rows of an array.

    Attributes
    ----------
    tables
        From the samples to the values, at least one.
    kind
        What the values are.
    """

    tables: tuple[IndexTable, ...]
    kind: Kind = "array"

    def spans(self, target: int) -> tuple[Ints, Ints]:
        """Return the first of `target` rows that each sample has, and the one behind its last.

        Raise `FormatError` unless they are all rows, one after another.
        """
        first, end = np.arange(self.tables[0].rows), np.arange(1, self.tables[0].rows + 1)
        for table, rows in zip(
            self.tables, (*(t.rows for t in self.tables[1:]), target), strict=True
        ):
            low, high = table.spans(rows)
            if table is self.tables[0]:
                first, end = low, high
            else:
                bounds = np.append(low, high[-1:]) if len(low) else np.zeros(1, np.int64)
                first, end = bounds[first], bounds[end]
        return first, end


RowLaws: TypeAlias = Callable[[Ints, Ints], tuple[Law, Law]]
"""Returns the laws of first rows and numbers of rows, from the first and the end of each sample."""


def row_laws(first: Ints, end: Ints) -> tuple[Law, Law]:
    """Return the laws of the first row of each sample, and of how many rows it has.

    Those without rows begin where the next one does.
    """
    count, last = end - first, end.max(initial=0)
    begins = np.where(count > 0, first, last)
    first = np.minimum.accumulate(begins[::-1])[::-1]
    even = len(count) and bool((count == count[0]).all())
    return Explicit(first), Affine(len(count), int(count[0])) if even else Explicit(count)


def runs(first: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Return the ranges of rows that samples have together, joined where they adjoin."""
    first, end = first[end > first], end[end > first]
    if not len(first):
        return first, end
    cuts = np.flatnonzero(first[1:] != end[:-1])
    return first[np.append(0, cuts + 1)], end[np.append(cuts, -1)]
