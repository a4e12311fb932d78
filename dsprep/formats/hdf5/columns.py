"""The four ways in which an HDF5 file holds a field, each giving columns of samples.

`Fixed`: one row of a dataset per sample. `Indexed`: the rows that index tables give. `Sequences`:
HDF5's own variable-length types, whose values are in a heap. `PerGroup`: a dataset per sample.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

import numpy as np

from dsprep.core.schema import Arena, Array, Attrs, Field, Ints, Ragged, new_array
from dsprep.core.schema import Column as Values
from dsprep.errors import FormatError
from dsprep.formats.hdf5.datasets import Held
from dsprep.formats.hdf5.grids import Unlocated, grid_of
from dsprep.formats.hdf5.rows import Route, Rows, locate
from dsprep.layout.laws import Affine, Explicit
from dsprep.layout.model import Blocks, Column, Grid
from dsprep.reading.columns import Wanted, fetch

_STEP = 1 << 20

Progress: TypeAlias = Callable[[int], None]


class Resident(Protocol):
    """A dataset of which reading keeps parts in memory, such as decoded chunks."""

    @property
    def resident(self) -> int:
        """Their bytes."""


class FieldColumn(ABC):
    """A field as the file holds it.

    Attributes
    ----------
    dataset
        The `h5py.Dataset` with the values; that of the first sample where each has its own.
    field
        What the samples are, by the name that they have in the file.
    count
        The number of samples.
    """

    dataset: Any
    field: Field
    count: int

    @property
    def steps(self) -> int:
        """The steps of `locate`."""
        return 0

    @abstractmethod
    def begin(self, start: int, stop: int, arena: Arena | None, key: str) -> Wanted:
        """Return what samples ``start <= i < stop`` need from the file.

        Where only reading gives their sizes, or only the library reads them, they are read now.
        """

    @abstractmethod
    def sizes(self, start: int, stop: int) -> Ints | None:
        """Return the bytes of each sample, or None where only reading them gives that."""

    @abstractmethod
    def locate(self, field: Field, where: str, progress: Progress) -> Column:
        """Return where all samples are, as the user asked for them: `field`.

        Parameters
        ----------
        where
            File and field, for messages.
        progress
            Called now and then with the number of steps taken since the last time.

        Raises
        ------
        Unlocated
            If only the library finds them.
        FormatError
            If the file is damaged.
        """

    @abstractmethod
    def datasets(self) -> Sequence[Resident]:
        """Return the datasets that reading keeps parts of in memory; fields may share them."""


class Fixed(FieldColumn):
    """A field whose samples are the rows of a dataset."""

    def __init__(self, rows: Rows, name: str, attrs: Attrs) -> None:
        self.rows, self.dataset, self.count = rows, rows.dataset, rows.count
        self.field = Field(name, rows.dtype, rows.inner, attrs=attrs)

    @property
    def steps(self) -> int:
        """See `FieldColumn`."""
        return _chunks(self.dataset)

    def begin(self, start: int, stop: int, arena: Arena | None, key: str) -> Wanted:
        """See `FieldColumn.begin`."""
        first, count = np.array([start], np.int64), np.array([stop - start], np.int64)
        return self.rows.begin(first, count, arena, key)

    def sizes(self, start: int, stop: int) -> Ints | None:
        """See `FieldColumn.sizes`."""
        return np.full(stop - start, self.rows.row_nbytes, np.int64)

    def locate(self, field: Field, where: str, progress: Progress) -> Column:
        """See `FieldColumn.locate`."""
        grid = self.rows.grid(progress)
        if grid is None or not field.row_nbytes:
            return Column(None)
        return _fitting(Column(grid, grid.shape[0] if self.rows.whole else 1), self.count, field)

    def datasets(self) -> list[Rows]:
        """Return the dataset."""
        return [self.rows]


class Indexed(FieldColumn):
    """A ragged field whose rows are found through index tables."""

    def __init__(self, rows: Rows, route: Route, name: str, attrs: Attrs) -> None:
        self.rows, self.route = rows, route
        self.dataset, self.count = rows.dataset, route.tables[0].rows
        self.field = Field(name, rows.dtype, (None, *rows.inner), attrs=attrs)
        if route.kind != "array":
            self.field = Field.opaque(name, route.kind, attrs)

    @property
    def steps(self) -> int:
        """See `FieldColumn`."""
        return _chunks(self.dataset) + self.count

    def begin(self, start: int, stop: int, arena: Arena | None, key: str) -> Wanted:
        """See `FieldColumn.begin`."""
        found = locate(self.route.tables, self.rows.count, start, stop)
        wanted = self.rows.begin(found.lows, found.highs - found.lows, arena, key)

        def done(buffer: Array) -> Ragged:
            values = wanted.done(buffer)
            if self.route.rebase is not None:
                first = values[self.route.rebase] if self.route.rebase else values
                _rebase(first, found.offsets)
            return Ragged(values, found.offsets, self.route.kind)

        return replace(wanted, done=done)

    def sizes(self, start: int, stop: int) -> Ints | None:
        """Return the bytes of each sample, from the tables alone."""
        offsets = locate(self.route.tables, self.rows.count, start, stop).offsets
        sizes: Ints = np.diff(offsets) * self.rows.row_nbytes
        return sizes

    def locate(self, field: Field, where: str, progress: Progress) -> Column:
        """See `FieldColumn.locate`."""
        if self.route.rebase is not None:
            raise Unlocated(
                "it counts rows of another dataset, and is made to begin at 0 in each sample"
            )
        grid, unit = self.rows.grid(progress), field.row_nbytes
        first, number = self._rows_of_samples(progress)
        if self.route.kind == "bytes" and field.kind == "array" and unit:
            return self._retyped(field, grid, first, number, where)
        if not field.ragged and not unit:
            return Column(None)
        column = Column(grid if unit else None, 1, Explicit(first), _law(number))
        return _fitting(column, self.count, field)

    def datasets(self) -> list[Rows]:
        """Return the values and the tables."""
        return [self.rows, *(rows for t in self.route.tables for rows in (t.first, t.count))]

    def _rows_of_samples(self, progress: Progress) -> tuple[Ints, Ints]:
        """Return the first row of every sample, and how many it has."""
        end = 0
        first, number = np.empty(self.count, np.int64), np.empty(self.count, np.int64)
        for start in range(0, self.count, _STEP):
            stop = min(start + _STEP, self.count)
            found = locate(self.route.tables, self.rows.count, start, stop)
            number[start:stop] = np.diff(found.offsets)
            if found.offsets[-1]:
                first[start:stop] = found.first
                end = int(found.highs[-1])
            else:
                first[start:stop] = end  # samples without rows: where those before them end
            progress(stop - start)
        return first, number

    def _retyped(
        self, field: Field, grid: Grid | None, first: Ints, number: Ints, where: str
    ) -> Column:
        """Return where the samples are of a field of bytes that the user gave another type."""
        unit = field.row_nbytes
        bad = number % unit != 0 if field.ragged else number != unit
        if bool(bad.any()):
            i = int(bad.argmax())
            raise FormatError(
                f"the bytes do not fit {field}",
                where=f"{where}, sample {i}",
                expected=f"a multiple of {unit} bytes" if field.ragged else f"{unit} bytes",
                found=f"{int(number[i])} bytes",
            )
        if not field.ragged:
            if grid is None:
                return Column(None)
            if not np.array_equal(first, np.arange(len(first), dtype=np.int64) * unit):
                raise Unlocated("its bytes are not an array of the type that it was given")
            return _fitting(Column(grid, unit), self.count, field)
        if grid is not None:
            cut = grid.chunk[0] % unit and grid.chunk != grid.shape
            if cut or grid.shape[0] % unit or bool((first % unit).any()):
                raise Unlocated("its bytes are cut inside elements of the type that it was given")
            shape, chunk = (grid.shape[0] // unit,), (grid.chunk[0] // unit,)
            fill = None if grid.fill is None else grid.fill * unit
            grid = replace(grid, shape=shape, chunk=chunk, itemsize=unit, fill=fill)
        return Column(grid, 1, Explicit(first // unit), _law(number // unit))


def _chunks(dataset: Any) -> int:
    return math.prod(grid_of(dataset)) if dataset.chunks and dataset.size else 0


def _rebase(first: Array, offsets: Ints) -> None:
    """Make first rows count from the sample's own first row, in place."""
    lengths = np.diff(offsets)
    starts = first[offsets[:-1][lengths > 0]]
    first -= np.repeat(starts, lengths[lengths > 0])


def _fitting(column: Column, count: int, field: Field) -> Column:
    """Return the column if its rows are samples of the field."""
    grid = column.grid
    if grid is not None:
        per = grid.row_nbytes * (1 if field.ragged else column.lines)
        fixed = column.first is None
        if per != field.row_nbytes or (fixed and grid.shape[0] != count * column.lines):
            raise Unlocated("its rows are stored with another size than its samples have")
    return column


def _law(values: Ints) -> Affine | Explicit:
    if len(values) and bool((values == values[0]).all()):
        return Affine(len(values), int(values[0]))
    return Explicit(values)


class PerGroup(FieldColumn):
    """A field of which each sample is a dataset of its own, in a group of its own.

    Parameters
    ----------
    part
        Opens the dataset of a sample, as the only sample that it has.
    shapes
        Of all these datasets: int64 of shape ``(samples, axes)``.
    held
        What the first one holds; the others differ in their first axis at most.
    """

    def __init__(
        self, part: Callable[[int], FieldColumn], shapes: Ints, held: Held, name: str, attrs: Attrs
    ) -> None:
        self._part, self._shapes, self.held = part, shapes, held
        self._first = part(0)
        self.dataset, self.count = self._first.dataset, len(shapes)
        self._differ = bool((shapes != shapes[0]).any())
        self.field = replace(self._first.field, name=name, attrs=attrs)
        if not held.vlen and self._differ:
            self.field = replace(self.field, shape=(None, *held.shape[1:]))

    @property
    def steps(self) -> int:
        """See `FieldColumn`."""
        return self.count

    def begin(self, start: int, stop: int, arena: Arena | None, key: str) -> Wanted:
        """See `FieldColumn.begin`; one dataset is read after another."""

        def rows(i: int) -> Array:
            column = fetch({key: self._part(i).begin(0, 1, None, key)}, None)[key]
            values: Array = column.values if isinstance(column, Ragged) else column[0]
            return values

        values: Values
        if not self.field.ragged:
            values = new_array(arena, key, (stop - start, *self.field.inner), self.field.dtype)
            for i in range(start, stop):
                values[i - start] = rows(i)
        else:
            parts = [*map(rows, range(start, stop))]
            empty = np.empty((0, *self.field.inner), self.field.dtype)
            joined = np.concatenate([empty, *parts], dtype=self.field.dtype)
            lengths = np.array([len(p) for p in parts], np.int64)
            values = Ragged.from_lengths(joined, lengths, self.field.kind)
        return Wanted(0, [], lambda _: values)

    def sizes(self, start: int, stop: int) -> Ints | None:
        """See `FieldColumn.sizes`."""
        if self.held.vlen:
            return None
        rows = self._shapes[start:stop, 0] if self._differ else np.ones(stop - start, np.int64)
        return rows * self.field.row_nbytes

    def locate(self, field: Field, where: str, progress: Progress) -> Column:
        """Return where all samples are, if they are datasets of one chunk each, all alike."""
        if self._differ or self.held.vlen:
            raise Unlocated(
                "its samples differ in length, and each is in a dataset of its own; dsprep "
                "convert makes them addressable"
            )
        if not field.row_nbytes:
            return Column(None)
        first: Grid | None = None
        begins, sizes = np.empty(self.count, np.int64), np.empty(self.count, np.int64)
        for i in range(self.count):
            part = self._part(i)
            grid = part.rows.grid() if isinstance(part, Fixed) else None
            several = grid is None or grid.blocks.count != 1
            if grid is None or several or grid.masks is not None or grid.fill is not None:
                raise Unlocated("each of its samples is in a dataset of several chunks")
            first = first or grid
            if (grid.filters, math.prod(grid.chunk)) != (first.filters, math.prod(first.chunk)):
                raise Unlocated("its samples are in datasets that are not stored alike")
            begins[i], sizes[i] = grid.blocks.offsets.one(0), grid.blocks.lengths.one(0)
            progress(1)
        if first is None or math.prod(first.chunk) * first.itemsize != field.row_nbytes:
            raise Unlocated("its rows are stored with another size than its samples have")
        shape, chunk = (self.count, *self.held.shape), (1, *self.held.shape)
        blocks, itemsize = Blocks(Explicit(begins), _law(sizes)), field.dtype.itemsize
        return Column(replace(first, blocks=blocks, shape=shape, chunk=chunk, itemsize=itemsize))

    def datasets(self) -> Sequence[Resident]:
        """Return those of the first sample."""
        return self._first.datasets()
