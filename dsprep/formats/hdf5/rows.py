"""A dataset as rows along its first axis, and index tables that say whose rows they are.

Rows are read at their offsets in the file, or by the library where only it finds or decodes them.

A table has, for each of its rows, the first row and the number of rows of something else: another
table, or the values. Only partitions are taken: each row begins where the one before it ends. So
a range of samples is one range of rows however many tables are between, and the lengths of the
samples follow from the last table's numbers.

The one exception is what dsprep writes in groups: a group's rows follow each other, and each group
begins at a multiple of the capacity that all have.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsprep.core.schema import Arena, Array, Field, Ints, Kind, has_padding, new_array
from dsprep.errors import FormatError
from dsprep.formats.hdf5 import grids
from dsprep.formats.hdf5.datasets import Held
from dsprep.formats.hdf5.dtypes import check_text
from dsprep.formats.hdf5.guard import library, need_filters
from dsprep.layout.model import Column, Grid
from dsprep.reading.columns import ColumnReader, Wanted, fetch
from dsprep.reading.files import File

_LARGE = 256 << 20
_BEST_RATIO = 1100
"""More than deflate can shrink anything: a larger claim is a lie or a fill value."""

_SCAN = 1 << 20


class Rows:
    """The rows of one dataset of fixed-width elements; safe to read from several threads.

    With `whole`, all of it is one row. `where` is the file and the field, for messages.

    Attributes
    ----------
    count, inner, row_nbytes
        The number of rows; the shape and the bytes of one.
    lines
        Rows of the dataset in one row: more than 1 only when `whole`.
    """

    def __init__(
        self, dataset: Any, held: Held, file: File, where: str, *, whole: bool = False
    ) -> None:
        self.dataset, self.held, self.where = dataset, held, where
        self.whole = whole or not held.shape
        self.dtype = held.carrier.dtype
        self.count = 1 if self.whole else held.shape[0]
        self.inner = held.shape if self.whole else held.shape[1:]
        self.row_nbytes = math.prod(self.inner) * self.dtype.itemsize
        # A whole dataset is one row for the caller, but on disk as many as its first axis.
        self.lines = held.shape[0] if whole and held.shape else 1
        self._file = file
        self._grid: Grid | str | None = None
        self._reader: ColumnReader | None = None
        self._located = self._opened = False
        self._lock = threading.RLock()
        with library(where, "the dataset cannot be read"):
            need_filters(dataset, where)
            stored = dataset.id.get_storage_size()
        if self.row_nbytes > max(_LARGE, _BEST_RATIO * stored):
            raise FormatError(
                "the sizes of the dataset cannot be right",
                where=where,
                expected=f"about {stored} bytes, as stored",
                found=f"{self.row_nbytes} bytes per sample",
            )

    def grid(self, progress: Callable[[int], None] | None = None) -> Grid | None:
        """Return where the dataset is, found when first asked for; see `grids.locate`."""
        with self._lock:
            if not self._located:
                try:
                    with library(self.where, "the dataset cannot be located"):
                        self._grid = grids.locate(self.dataset, self._file, self.where, progress)
                except grids.Unlocated as reason:
                    self._grid = str(reason)
                self._located = True
            if isinstance(self._grid, str):
                raise grids.Unlocated(self._grid)
            return self._grid

    def stored(self) -> Grid | None:
        """Return where the rows are, of whatever type, as `grids.locate` with ``raw``."""
        nbytes = int(self.dataset.id.get_type().get_size())
        return grids.locate(self.dataset, self._file, self.where, raw=nbytes)

    @property
    def reader(self) -> ColumnReader | None:
        """Reads the rows at their offsets; None if the library has to read them."""
        with self._lock:
            if not self._opened:
                try:
                    grid = self.grid()
                except (grids.Unlocated, grids.Outside):
                    grid = None
                if grid is not None and grid.row_nbytes * self.lines == self.row_nbytes:
                    field = Field(self.dataset.name.strip("/"), self.dtype, self.inner)
                    self._reader = ColumnReader(Column(grid), field, self._file.itself)
                self._opened = True
            return self._reader

    @property
    def resident(self) -> int:
        """Bytes that reading holds besides the rows asked for, such as decoded chunks."""
        if self.reader is not None:
            return self.reader.resident_nbytes()
        chunks = self.dataset.chunks
        return 2 * math.prod(map(int, chunks)) * int(self.dataset.dtype.itemsize) if chunks else 0

    def read(self, start: int, stop: int) -> Array:
        """Return rows ``start <= i < stop``, shape ``(n, *inner)``."""
        first, count = np.array([start], np.int64), np.array([stop - start], np.int64)
        rows: Array = fetch({"": self.begin(first, count, None, "")}, None)[""]  # type: ignore[assignment]
        return rows

    def begin(self, first: Ints, count: Ints, arena: Arena | None, key: str) -> Wanted:
        """Return what reading ranges of rows needs from the file.

        `first` and `count` have the first row of each range, and how many rows it has; what is read
        is turned into an array of shape ``(sum(count), *inner)``.
        """
        shape = (int(count.sum()), *self.inner)
        if not shape[0] or not self.row_nbytes:
            empty = np.empty(shape, self.dtype)
            return Wanted(0, [], lambda _: empty)
        reader = self.reader
        if reader is None:
            out = new_array(arena, key, shape, self.dtype)
            at = 0
            for low, rows in zip(first.tolist(), count.tolist(), strict=True):
                if rows:
                    self._by_library(out[at : at + rows], low, low + rows)
                at += rows
            check_text(out, self.where)
            return Wanted(0, [], lambda _: out)
        wanted = reader.begin_rows(first * self.lines, count * self.lines, arena, key)

        def done(buffer: Array) -> Array:
            values: Array = wanted.done(buffer).view(self.dtype).reshape(shape)
            check_text(values, self.where)
            return values

        return Wanted(wanted.nbytes, wanted.spans, done)

    def _by_library(self, out: Array, start: int, stop: int) -> None:
        from h5py import h5d, h5s, h5t

        with library(f"{self.where}, samples {start} to {stop - 1}", "the data cannot be read"):
            plist = self.dataset.id.get_create_plist()
            unfilled = (
                plist.get_fill_time() == h5d.FILL_TIME_NEVER
                or plist.fill_value_defined() == h5d.FILL_VALUE_UNDEFINED
            )
            if unfilled or has_padding(self.dtype):
                # The memory may hold anything, and the library writes neither padding nor chunks
                # that are not there and have no fill value.
                out.reshape(-1).view("u1")[...] = 0
            shape = self.dataset.shape
            if shape:
                rows = (0, shape[0]) if self.whole else (start, stop)
                grids.check_chunks(self.dataset, rows[0], rows[1], self.where)
            file_space = self.dataset.id.get_space()
            if shape and not self.whole:
                shape = (stop - start, *shape[1:])
                file_space.select_hyperslab((start, *(0 for _ in shape[1:])), shape)
            memory = h5s.create_simple(shape) if shape else h5s.create(h5s.SCALAR)
            element = h5t.py_create(self.dataset.dtype, logical=True)
            self.dataset.id.read(memory, file_space, out, element)


@dataclass(frozen=True, eq=False)
class IndexTable:
    """Where the first rows and the numbers of rows are.

    Attributes
    ----------
    first, count
        The datasets; the same one when the table is compound or has two columns.
    first_member, count_member
        The member of the compound type, the number of the column, or None for a plain dataset.
    capacity
        Rows from the beginning of one group to that of the next; 0: there are no groups.
    edges
        Whether `first` has one number more than the table has rows: where each begins, and where
        the last one ends; `count` is not used then.
    """

    first: Rows
    count: Rows
    first_member: str | int | None = None
    count_member: str | int | None = None
    capacity: int = 0
    edges: bool = False

    @property
    def rows(self) -> int:
        """The number of rows of the table."""
        return self.first.count - self.edges

    def read(self, start: int, stop: int, target: int, *, gaps: bool = False) -> tuple[Ints, Ints]:
        """Return the first rows and the ends (exclusive) of table rows ``start <= i < stop``.

        Raises `FormatError` if they leave ``0 .. target``, the rows that they point to, or do not
        follow each other without gap; with `gaps`, but between groups.
        """
        whole = self.first.read(start, stop + self.edges)
        low = _integers(whole, self.first_member)
        if self.edges:
            low, size = low[:-1], np.diff(low)
        else:
            if self.count is not self.first:
                whole = self.count.read(start, stop)
            size = _integers(whole, self.count_member)
        if low.size and (min(low.min(), size.min()) < 0 or max(low.max(), size.max()) > target):
            raise self._wrong(start, stop, f"rows 0 to {target}", "rows outside")
        end = low + size
        if end.size and (int(end.max()) > target or not self._follow(low, end, gaps)):
            raise self._wrong(
                start, stop, f"each of {target} rows once, in order", "gaps or overlaps"
            )
        return low, end

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
        cuts = np.flatnonzero(first[1:] != end[:-1])
        lows, highs = first[np.append(0, cuts + 1)], end[np.append(cuts, -1)]
        offsets = np.append(0, np.cumsum(end - first))[offsets]
    return Located(lows, highs, offsets)
