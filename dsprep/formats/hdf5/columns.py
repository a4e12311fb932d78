"""The four ways in which an HDF5 file holds a field, each giving columns of samples.

`Fixed`: one row of a dataset per sample. `Indexed`: the rows that index tables tell. `Sequences`:
HDF5's own variable-length types, whose values lie in a heap. `PerGroup`: a dataset per sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import Arena, Array, Attrs, Column, Field, Ragged, new_array
from dsprep.formats.hdf5.element_types import Held
from dsprep.formats.hdf5.guard import library, need_filters
from dsprep.formats.hdf5.lengths import Lengths
from dsprep.formats.hdf5.ragged import Route
from dsprep.formats.hdf5.rows import Rows
from dsprep.formats.hdf5.tables import locate


@dataclass(frozen=True, eq=False)
class Fixed:
    """A field whose samples are the rows of a dataset."""

    rows: Rows
    attrs: Attrs

    @property
    def count(self) -> int:
        """The number of samples."""
        return self.rows.count

    def field(self, name: str) -> Field:
        """Return what the samples are."""
        return Field(name, self.rows.dtype, self.rows.inner, attrs=self.attrs)

    def read(self, start: int, stop: int, arena: Arena | None, key: str) -> Column:
        """Return samples ``start <= i < stop``."""
        return self.rows.read(start, stop, arena, key)

    def datasets(self) -> list[Rows]:
        """Return the datasets that are read as rows."""
        return [self.rows]

    def sizes(self, start: int, stop: int) -> NDArray[np.int64] | None:
        """Return the bytes of each sample."""
        return np.full(stop - start, self.rows.row_nbytes, np.int64)


@dataclass(frozen=True, eq=False)
class Indexed:
    """A ragged field whose rows are found through index tables."""

    rows: Rows
    route: Route
    attrs: Attrs

    @property
    def count(self) -> int:
        """The number of samples."""
        return self.route.tables[0].rows

    def field(self, name: str) -> Field:
        """Return what the samples are."""
        if self.route.kind != "array":
            return Field.opaque(name, self.route.kind, self.attrs)
        return Field(name, self.rows.dtype, (None, *self.rows.inner), attrs=self.attrs)

    def read(self, start: int, stop: int, arena: Arena | None, key: str) -> Column:
        """Return samples ``start <= i < stop``."""
        found = locate(self.route.tables, self.rows.count, start, stop)
        values, offsets = (
            self.rows.join(found.runs, int(found.offsets[-1]), arena, key),
            found.offsets,
        )
        if self.route.rebase is not None:
            _rebase(values[self.route.rebase] if self.route.rebase else values, offsets)
        return Ragged(values, offsets, self.route.kind)

    def datasets(self) -> list[Rows]:
        """Return the datasets that are read as rows: the values and the tables."""
        return [self.rows, *(rows for t in self.route.tables for rows in (t.first, t.count))]

    def sizes(self, start: int, stop: int) -> NDArray[np.int64] | None:
        """Return the bytes of each sample, from the tables alone."""
        offsets = locate(self.route.tables, self.rows.count, start, stop).offsets
        sizes: NDArray[np.int64] = np.diff(offsets) * self.rows.row_nbytes
        return sizes


def _rebase(first: Array, offsets: NDArray[np.int64]) -> None:
    """Make first rows count from the sample's own first row, in place."""
    lengths = np.diff(offsets)
    starts = first[offsets[:-1][lengths > 0]]
    first -= np.repeat(starts, lengths[lengths > 0])


@dataclass(frozen=True, eq=False)
class Sequences:
    """A ragged field of one of HDF5's variable-length types.

    With `whole` the dataset has no axis, and is the only sample.
    """

    dataset: Any
    held: Held
    lengths: Lengths
    where: str
    attrs: Attrs
    whole: bool = False

    @property
    def count(self) -> int:
        """The number of samples."""
        return 1 if self.whole else self.held.shape[0]

    def field(self, name: str) -> Field:
        """Return what the samples are."""
        if self.held.kind != "array":
            return Field.opaque(name, self.held.kind, self.attrs)
        return Field(name, self.held.carrier.dtype, (None,), attrs=self.attrs)

    def read(self, start: int, stop: int, arena: Arena | None, key: str) -> Column:
        """Return samples ``start <= i < stop``."""
        del arena, key  # nothing tells beforehand how large the samples are
        here = f"{self.where}, samples {start} to {stop - 1}"
        dtype = self.held.carrier.dtype
        with library(here, "the data cannot be read"):
            need_filters(self.dataset, self.where)
            values, nbytes = self.lengths.values(start, stop)
        if self.held.kind == "str":
            values, nbytes = _to_zeros(values, nbytes)
        return Ragged.from_lengths(values.view(dtype), nbytes // dtype.itemsize, self.held.kind)

    def datasets(self) -> list[Lengths]:
        """Return where the lengths are read: the values are left to the library."""
        return [] if self.whole else [self.lengths]

    def sizes(self, start: int, stop: int) -> NDArray[np.int64] | None:
        """Return the bytes of each sample, or None where the lengths cannot be read alone."""
        items = None if self.whole else self.lengths.read(start, stop)
        return None if items is None else items * self.held.carrier.dtype.itemsize


def _to_zeros(values: Array, nbytes: NDArray[np.int64]) -> tuple[Array, NDArray[np.int64]]:
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
    shapes: NDArray[np.int64]
    held: Held
    attrs: Attrs

    @property
    def count(self) -> int:
        """The number of samples."""
        return len(self.shapes)

    @property
    def dataset(self) -> Any:
        """The `h5py.Dataset` of the first sample."""
        return self.first.rows.dataset if isinstance(self.first, Fixed) else self.first.dataset

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

    def read(self, start: int, stop: int, arena: Arena | None, key: str) -> Column:
        """Return samples ``start <= i < stop``."""
        field = self.field("values")
        fixed = (
            None
            if field.ragged
            else new_array(arena, key, (stop - start, *field.inner), field.dtype)
        )
        parts: list[Array] = []
        lengths = np.zeros(stop - start, np.int64)
        for i in range(start, stop):
            column = self.open(i).read(0, 1, None, key)
            if isinstance(column, Ragged):
                parts.append(column.values)
                lengths[i - start] = column.lengths[0]
            elif fixed is not None:
                fixed[i - start] = column[0]
            else:
                parts.append(column[0])
                lengths[i - start] = len(column[0])
        if fixed is not None:
            return fixed
        empty = np.empty((0, *field.inner), field.dtype)
        values = np.concatenate([empty, *parts], dtype=field.dtype)
        return Ragged.from_lengths(values, lengths, field.kind)

    def datasets(self) -> list[Rows] | list[Lengths]:
        """Return the datasets that are read as rows, at a time."""
        return self.first.datasets()

    def sizes(self, start: int, stop: int) -> NDArray[np.int64] | None:
        """Return the bytes of each sample; None for sequences."""
        if self.held.vlen:
            return None
        rows = self.shapes[start:stop, 0] if self.ragged else np.ones(stop - start, np.int64)
        return rows * self.row_nbytes


ColumnReader: TypeAlias = Fixed | Indexed | Sequences | PerGroup
