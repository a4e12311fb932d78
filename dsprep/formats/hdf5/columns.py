"""How an HDF5 file can hold a field, besides one row of a dataset per sample (`Rows`).

`Indexed`: the rows that index tables give. `Sequences`: HDF5's own variable-length types.
`OnDemand`: a dataset as the only sample.

A dataset of sequences holds one descriptor per element: the number of items as a little-endian
32-bit integer, the address of a heap, and the number of an object in it (the global heap ID of
the HDF5 File Format Specification, after the length). The descriptors are read like the rows of
any dataset, and the values from the heaps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from typing_extensions import override

from dsprep.core.schema import Arena, Array, Attrs, Field, Ints, Ragged
from dsprep.errors import FormatError
from dsprep.formats.hdf5.datasets import StoredType
from dsprep.formats.hdf5.guard import hdf5_errors, need_filters
from dsprep.formats.hdf5.heaps import Heaps
from dsprep.formats.hdf5.locate import Outside, locate_grid
from dsprep.formats.hdf5.rows import FieldColumn, Rows, fitting
from dsprep.formats.index_tables import Route, row_laws, runs
from dsprep.formats.located import Unlocated
from dsprep.layout.model import Column
from dsprep.reading.columns import ColumnReader, PendingRead, fetch
from dsprep.storage.base import Handle


class Indexed(FieldColumn):
    """A ragged field whose rows are found through index tables."""

    def __init__(self, rows: Rows, route: Route, name: str, attrs: Attrs) -> None:
        self.rows, self.route = rows, route
        self.dataset, self.count = rows.dataset, route.tables[0].rows
        tables = (part for t in route.tables for part in (t.first, t.count))
        self.datasets = [rows, *(part for part in tables if isinstance(part, Rows))]
        self.field = Field(name, rows.dtype, (None, *rows.field.shape), attrs=attrs)
        if route.kind != "array":
            self.field = Field.opaque(name, route.kind, attrs)

    @cached_property
    def _spans(self) -> tuple[Ints, Ints]:
        """The first row of each sample, and the one behind its last."""
        return self.route.spans(self.rows.count)

    @override
    def begin(self, start: int, stop: int, arena: Arena | None, key: str) -> PendingRead:
        first, end = (each[start:stop] for each in self._spans)
        low, high = runs(first, end)
        pending = self.rows.begin_rows(low, high - low, arena, key)

        def done(buffer: Array) -> Ragged:
            return Ragged.from_lengths(pending.done(buffer), end - first, self.route.kind)

        return replace(pending, done=done)

    def sizes(self, start: int, stop: int) -> Ints | None:
        """Return the bytes of each sample, from the tables alone."""
        first, end = (each[start:stop] for each in self._spans)
        sizes: Ints = (end - first) * self.rows.row_nbytes
        return sizes

    @override
    def locate(self, field: Field) -> Column:
        if self.route.kind == "bytes" and field.kind == "array":
            raise Unlocated("it was given a type here; dsprep convert gives it one in the file")
        grid = self.rows.grid() if field.row_nbytes else None
        return fitting(Column(grid, 1, *row_laws(*self._spans)), self.count, field)


class Sequences(FieldColumn):
    """A ragged field of one of HDF5's variable-length types.

    The dataset has one axis or, with `whole`, none, and is the only sample. `where` is the file and
    the field, for messages.
    """

    unlocated = "its values are in the global heap, each found through a descriptor"

    def __init__(
        self,
        dataset: Any,
        stored_type: StoredType,
        file: Handle,
        heaps: Heaps,
        where: str,
        attrs: Attrs,
        whole: bool = False,
    ) -> None:
        from h5py import h5t

        self.dataset, self._where, self._heaps = dataset, where, heaps
        self.count = 1 if whole else stored_type.shape[0]
        name, dtype = str(dataset.name).strip("/"), stored_type.dtype
        self.field = Field(name, dtype, (None,), stored_type.kind, attrs)
        self._reader: ColumnReader | None = None
        with hdf5_errors(where, "the dataset cannot be located"):
            need_filters(dataset, where)
            element = dataset.id.get_type()
            self._items = element.get_super() if isinstance(element, h5t.TypeVlenID) else None
            try:
                grid = locate_grid(dataset, file, where, raw=heaps.width)
            except (Unlocated, Outside) as reason:
                raise FormatError(
                    f"values of variable length cannot be found without the HDF5 library, which "
                    f"follows damaged ones without end: {reason}",
                    where=where,
                    expected="plain or chunked storage without a fill value of its own",
                    fix="write the dataset again: h5repack -f GZIP=1 IN OUT",
                ) from reason
        if grid is not None:
            descriptor = Field(name, np.dtype(np.uint8), (heaps.width,))
            self._reader = ColumnReader(Column(grid), descriptor, file.opened)
            self.datasets = [] if whole else [self]

    @override
    def begin(self, start: int, stop: int, arena: Arena | None, key: str) -> PendingRead:
        dtype, kind = self.field.dtype, self.field.kind
        with hdf5_errors(f"{self._where}, samples {start} to {stop - 1}", "it cannot be read"):
            size = 1 if self._items is None else self._items.get_size()
            values, nbytes = self._heaps.read(self._descriptors(start, stop), size, self._where)
        if kind == "str":
            values, nbytes = _to_zeros(values, nbytes)
        column = Ragged.from_lengths(values.view(dtype), nbytes // dtype.itemsize, kind)
        return PendingRead(0, [], lambda _: column)

    @override
    def sizes(self, start: int, stop: int) -> Ints | None:
        if not self.dataset.shape:
            return None
        rows = self._descriptors(start, stop)
        items = np.ascontiguousarray(rows[:, :4]).view("<u4")[:, 0].astype(np.int64)
        # Where nothing was written, the address of the heap is 0, whatever the length says.
        items[~rows[:, 4:-4].any(axis=1)] = 0
        return items * self.field.row_nbytes

    @property
    def resident(self) -> int:
        """Bytes that reading holds besides its result."""
        return 0 if self._reader is None else self._reader.resident_nbytes()

    def _descriptors(self, start: int, stop: int) -> Array:
        """Return descriptors as stored: uint8, shape ``(stop - start, width)``."""
        if self._reader is None:
            return np.zeros((stop - start, self._heaps.width), np.uint8)
        first, count = np.array([start], np.int64), np.array([stop - start], np.int64)
        rows: Any = fetch({"": self._reader.begin_rows(first, count, None, "")}, None)[""]
        descriptors: Array = rows.reshape(-1, self._heaps.width)
        return descriptors


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


class OnDemand(FieldColumn):
    """A dataset that is the only sample, opened each time that it is read: there may be millions.

    `open_column` opens it.
    """

    count = 1

    def __init__(self, open_column: Callable[[], FieldColumn], field: Field) -> None:
        self._open, self.field = open_column, field

    @override
    def opened(self) -> FieldColumn:
        return self._open()

    @override
    def begin(self, start: int, stop: int, arena: Arena | None, key: str) -> PendingRead:
        return self._open().begin(start, stop, arena, key)

    @override
    def sizes(self, start: int, stop: int) -> Ints | None:
        return None if self.field.ragged else super().sizes(start, stop)

    @override
    def locate(self, field: Field) -> Column:
        return self._open().locate(field)
