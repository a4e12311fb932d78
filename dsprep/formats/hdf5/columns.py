"""The four ways in which an HDF5 file holds a field, each giving columns of samples.

`Fixed`: one row of a dataset per sample. `Indexed`: the rows that index tables give. `Sequences`:
HDF5's own variable-length types, whose values are in a heap. `PerGroup`: a dataset per sample.

Each is read (`begin`), and says where all its samples are (`locate`), for readers that do without
the library. Fields that only the library can find are `Unlocated`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from dsprep.core.schema import Arena, Array, Attrs, Field, Ints, Ragged, new_array
from dsprep.core.schema import Column as Values
from dsprep.errors import FormatError
from dsprep.formats.hdf5.datasets import Held
from dsprep.formats.hdf5.grids import Unlocated, grid_of
from dsprep.formats.hdf5.guard import library, need_filters
from dsprep.formats.hdf5.rows import Rows, locate
from dsprep.formats.hdf5.sequences import Lengths
from dsprep.formats.hdf5.structure import Route
from dsprep.layout.laws import Affine, Explicit
from dsprep.layout.model import Blocks, Column, Grid
from dsprep.reading.columns import Wanted, fetch

_STEP = 1 << 20

Progress: TypeAlias = Callable[[int], None]


@dataclass(frozen=True, eq=False)
class Fixed:
    """A field whose samples are the rows of a dataset."""

    rows: Rows
    attrs: Attrs

    @property
    def dataset(self) -> Any:
        """The `h5py.Dataset`."""
        return self.rows.dataset

    @property
    def count(self) -> int:
        """The number of samples."""
        return self.rows.count

    def field(self, name: str) -> Field:
        """Return what the samples are."""
        return Field(name, self.rows.dtype, self.rows.inner, attrs=self.attrs)

    def begin(self, start: int, stop: int, arena: Arena | None, key: str) -> Wanted:
        """Return what samples ``start <= i < stop`` need from the file."""
        first, count = np.array([start], np.int64), np.array([stop - start], np.int64)
        return self.rows.begin(first, count, arena, key)

    def datasets(self) -> list[Rows]:
        """Return the datasets that are read as rows."""
        return [self.rows]

    def sizes(self, start: int, stop: int) -> Ints | None:
        """Return the bytes of each sample."""
        return np.full(stop - start, self.rows.row_nbytes, np.int64)

    @property
    def steps(self) -> int:
        """The steps of `locate`."""
        return _chunks(self.rows)

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
        grid = self.rows.grid(progress)
        if grid is None or not field.row_nbytes:
            return Column(None)
        lines = grid.shape[0] if self.rows.whole else 1
        return _fitting(Column(grid, lines), self.count, field)


@dataclass(frozen=True, eq=False)
class Indexed:
    """A ragged field whose rows are found through index tables."""

    rows: Rows
    route: Route
    attrs: Attrs

    @property
    def dataset(self) -> Any:
        """The `h5py.Dataset` with the values."""
        return self.rows.dataset

    @property
    def count(self) -> int:
        """The number of samples."""
        return self.route.tables[0].rows

    def field(self, name: str) -> Field:
        """Return what the samples are."""
        if self.route.kind != "array":
            return Field.opaque(name, self.route.kind, self.attrs)
        return Field(name, self.rows.dtype, (None, *self.rows.inner), attrs=self.attrs)

    def begin(self, start: int, stop: int, arena: Arena | None, key: str) -> Wanted:
        """Return what samples ``start <= i < stop`` need from the file."""
        found = locate(self.route.tables, self.rows.count, start, stop)
        wanted = self.rows.begin(found.lows, found.highs - found.lows, arena, key)

        def done(buffer: Array) -> Ragged:
            values = wanted.done(buffer)
            if self.route.rebase is not None:
                first = values[self.route.rebase] if self.route.rebase else values
                _rebase(first, found.offsets)
            return Ragged(values, found.offsets, self.route.kind)

        return replace(wanted, done=done)

    def datasets(self) -> list[Rows]:
        """Return the datasets that are read as rows: the values and the tables."""
        return [self.rows, *(rows for t in self.route.tables for rows in (t.first, t.count))]

    def sizes(self, start: int, stop: int) -> Ints | None:
        """Return the bytes of each sample, from the tables alone."""
        offsets = locate(self.route.tables, self.rows.count, start, stop).offsets
        sizes: Ints = np.diff(offsets) * self.rows.row_nbytes
        return sizes

    @property
    def steps(self) -> int:
        """The steps of `locate`."""
        return _chunks(self.rows) + self.count

    def locate(self, field: Field, where: str, progress: Progress) -> Column:
        """Return where all samples are; see `Fixed.locate`."""
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


def _chunks(rows: Rows) -> int:
    dataset = rows.dataset
    return math.prod(grid_of(dataset)) if dataset.chunks and dataset.size else 0


@dataclass(frozen=True, eq=False)
class Sequences:
    """A ragged field of one of HDF5's variable-length types.

    With `whole` the dataset has no axis, and is the only sample.
    """

    lengths: Lengths
    held: Held
    attrs: Attrs
    whole: bool = False

    @property
    def dataset(self) -> Any:
        """The `h5py.Dataset`."""
        return self.lengths.dataset

    @property
    def count(self) -> int:
        """The number of samples."""
        return 1 if self.whole else self.held.shape[0]

    def field(self, name: str) -> Field:
        """Return what the samples are."""
        if self.held.kind != "array":
            return Field.opaque(name, self.held.kind, self.attrs)
        return Field(name, self.held.carrier.dtype, (None,), attrs=self.attrs)

    def begin(self, start: int, stop: int, arena: Arena | None, key: str) -> Wanted:
        """Return samples ``start <= i < stop``, read already: only reading gives their size."""
        del arena, key
        where, dtype = self.lengths.where, self.held.carrier.dtype
        with library(f"{where}, samples {start} to {stop - 1}", "the data cannot be read"):
            need_filters(self.dataset, where)
            values, nbytes = self.lengths.values(start, stop)
        if self.held.kind == "str":
            values, nbytes = _to_zeros(values, nbytes)
        column = Ragged.from_lengths(values.view(dtype), nbytes // dtype.itemsize, self.held.kind)
        return Wanted(0, [], lambda _: column)

    def datasets(self) -> list[Lengths]:
        """Return where the lengths are read."""
        return [] if self.whole else [self.lengths]

    def sizes(self, start: int, stop: int) -> Ints | None:
        """Return the bytes of each sample, or None where the lengths cannot be read alone."""
        items = None if self.whole else self.lengths.read(start, stop)
        return None if items is None else items * self.held.carrier.dtype.itemsize

    @property
    def steps(self) -> int:
        """The steps of `locate`."""
        return 0

    def locate(self, field: Field, where: str, progress: Progress) -> Column:
        """Raise `Unlocated`."""
        raise Unlocated(
            "its values are in the global heap, each found through a descriptor; "
            "dsprep convert makes them addressable"
        )


def _to_zeros(values: Array, nbytes: Ints) -> tuple[Array, Ints]:
    """Return texts up to their first zero byte, as the library gives them, and their bytes."""
    zeros = np.flatnonzero(values == 0)
    if not len(zeros):
        return values, nbytes
    ends = np.cumsum(nbytes)
    begins = ends - nbytes
    first = np.append(zeros, len(values))[np.searchsorted(zeros, begins)]
    kept = np.minimum(first, ends) - begins
    inside = np.arange(len(values)) < np.repeat(begins + kept, nbytes)
    return values[inside], kept


@dataclass(frozen=True, eq=False)
class PerGroup:
    """A field of which each sample is a dataset of its own, in a group of its own.

    Attributes
    ----------
    open
        Opens the dataset of a sample, as the only sample that it has.
    shapes
        Of all these datasets: int64 of shape ``(samples, axes)``.
    held
        What the first one holds; the others differ in their first axis at most.
    """

    open: Callable[[int], Fixed | Sequences]
    shapes: Ints
    held: Held
    attrs: Attrs

    @property
    def count(self) -> int:
        """The number of samples."""
        return len(self.shapes)

    @property
    def dataset(self) -> Any:
        """The `h5py.Dataset` of the first sample."""
        return self.first.dataset

    @cached_property
    def first(self) -> Fixed | Sequences:
        """The dataset of the first sample."""
        return self.open(0)

    @cached_property
    def ragged(self) -> bool:
        """Whether first axes differ."""
        return bool((self.shapes != self.shapes[0]).any())

    @property
    def row_nbytes(self) -> int:
        """Bytes of a sample, or of one row of it where first axes differ."""
        shape = self.held.shape[1:] if self.ragged else self.held.shape
        return math.prod(shape) * self.held.carrier.dtype.itemsize

    def field(self, name: str) -> Field:
        """Return what the samples are."""
        if self.held.vlen or not self.ragged:
            return replace(self.first.field(name), attrs=self.attrs)
        shape = (None, *self.held.shape[1:])
        return Field(name, self.held.carrier.dtype, shape, attrs=self.attrs)

    def begin(self, start: int, stop: int, arena: Arena | None, key: str) -> Wanted:
        """Return samples ``start <= i < stop``, read already, one dataset after another."""
        field = self.field("values")
        fixed = (
            None
            if field.ragged
            else new_array(arena, key, (stop - start, *field.inner), field.dtype)
        )
        parts: list[Array] = []
        lengths = np.zeros(stop - start, np.int64)
        for i in range(start, stop):
            column = fetch({key: self.open(i).begin(0, 1, None, key)}, None)[key]
            if isinstance(column, Ragged):
                parts.append(column.values)
                lengths[i - start] = column.lengths[0]
            elif fixed is not None:
                fixed[i - start] = column[0]
            else:
                parts.append(column[0])
                lengths[i - start] = len(column[0])
        values: Values
        if fixed is not None:
            values = fixed
        else:
            empty = np.empty((0, *field.inner), field.dtype)
            rows = np.concatenate([empty, *parts], dtype=field.dtype)
            values = Ragged.from_lengths(rows, lengths, field.kind)
        return Wanted(0, [], lambda _: values)

    def datasets(self) -> list[Rows] | list[Lengths]:
        """Return the datasets that are read as rows, at a time."""
        return self.first.datasets()

    def sizes(self, start: int, stop: int) -> Ints | None:
        """Return the bytes of each sample; None for sequences."""
        if self.held.vlen:
            return None
        rows = self.shapes[start:stop, 0] if self.ragged else np.ones(stop - start, np.int64)
        return rows * self.row_nbytes

    @property
    def steps(self) -> int:
        """The steps of `locate`."""
        return self.count

    def locate(self, field: Field, where: str, progress: Progress) -> Column:
        """Return where all samples are, if they are datasets of one chunk each, all alike."""
        if self.ragged or self.held.vlen:
            raise Unlocated(
                "its samples differ in length, and each is in a dataset of its own; dsprep "
                "convert makes them addressable"
            )
        if not field.row_nbytes:
            return Column(None)
        first: Grid | None = None
        zero = np.zeros(1, np.int64)
        begins, sizes = np.empty(self.count, np.int64), np.empty(self.count, np.int64)
        for i in range(self.count):
            part = self.open(i)
            grid = part.rows.grid() if isinstance(part, Fixed) else None
            several = grid is None or grid.blocks.count != 1
            if grid is None or several or grid.masks is not None or grid.fill is not None:
                raise Unlocated("each of its samples is in a dataset of several chunks")
            first = first or grid
            if (grid.filters, math.prod(grid.chunk)) != (first.filters, math.prod(first.chunk)):
                raise Unlocated("its samples are in datasets that are not stored alike")
            begins[i] = grid.blocks.offsets.at(zero)[0]
            sizes[i] = grid.blocks.lengths.at(zero)[0]
            progress(1)
        if first is None or math.prod(first.chunk) * first.itemsize != field.row_nbytes:
            raise Unlocated("its rows are stored with another size than its samples have")
        shape, chunk = (self.count, *self.held.shape), (1, *self.held.shape)
        blocks, itemsize = Blocks(Explicit(begins), _law(sizes)), field.dtype.itemsize
        return Column(replace(first, blocks=blocks, shape=shape, chunk=chunk, itemsize=itemsize))


FieldColumn: TypeAlias = Fixed | Indexed | Sequences | PerGroup
