"""A dataset as rows along its first axis.

They are read at their offsets in the file, or by the library where only it finds or decodes them.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from typing_extensions import override

from dsprep.core.schema import Arena, Array, Field, Ints, has_padding, new_array
from dsprep.errors import FormatError
from dsprep.formats.hdf5.datasets import StoredType, check_sources, sources
from dsprep.formats.hdf5.dtypes import check_text
from dsprep.formats.hdf5.guard import hdf5_errors, need_filters
from dsprep.formats.hdf5.locate import Outside, check_chunks, locate_grid
from dsprep.formats.located import Unlocated
from dsprep.layout.model import Column, Grid
from dsprep.reading.columns import ColumnReader, PendingRead, fetch
from dsprep.storage.base import Handle

_LARGE = 256 << 20
_BEST_RATIO = 1100
"""More than deflate can shrink anything: a larger claim is damage or a fill value."""


class FieldColumn(ABC):
    """A field as the file holds it.

    Attributes
    ----------
    dataset
        The `h5py.Dataset` with the values, if one has them; that of the first sample where each
        has its own.
    field
        What the samples are, by the name that they have in the file.
    count
        The number of samples.
    datasets
        What reading keeps parts of in memory; fields may share them.
    unlocated
        Why it has no offsets, if it never has.
    """

    dataset: Any = None
    field: Field
    count: int
    datasets: Sequence[Any] = ()
    unlocated: str = ""

    def opened(self) -> FieldColumn:
        """Return the column with its dataset open."""
        return self

    @abstractmethod
    def begin(self, start: int, stop: int, arena: Arena | None, key: str) -> PendingRead:
        """Return what samples ``start <= i < stop`` need from the file.

        Where only reading gives their sizes, or only the library reads them, they are read now.
        """

    def sizes(self, start: int, stop: int) -> Ints | None:
        """Return the bytes of each sample, or None where only reading them gives that."""
        return np.full(stop - start, self.field.row_nbytes, np.int64)

    def locate(self, field: Field) -> Column:
        """Return where all samples are, as the user asked for them: `field`.

        Raises
        ------
        Unlocated
            If only the library finds them.
        FormatError
            If the file is damaged.
        """
        raise Unlocated(f"{self.unlocated}; dsprep convert makes it addressable")


def fitting(column: Column, count: int, field: Field) -> Column:
    """Return the column if its rows are samples of the field."""
    grid = column.grid
    if grid is not None:
        per = grid.row_nbytes * (1 if field.ragged else column.lines)
        fixed = column.first is None
        if per != field.row_nbytes or (fixed and grid.shape[0] != count * column.lines):
            raise Unlocated("its rows are stored with another size than its samples have")
    return column


class Rows(FieldColumn):
    """The rows of one dataset of fixed-width elements, and a field of which each is a sample.

    With `whole`, all of it is one row. `where` is the file and the field, for messages. Safe to
    read from several threads.

    Attributes
    ----------
    row_nbytes
        The bytes of a row.
    lines
        Rows of the dataset in one row: more than 1 only when `whole`.
    """

    def __init__(
        self, dataset: Any, stored_type: StoredType, file: Handle, where: str, whole: bool = False
    ) -> None:
        self.dataset, self.stored_type, self.where = dataset, stored_type, where
        self.whole, shape = whole or not stored_type.shape, stored_type.shape
        self.count = 1 if self.whole else shape[0]
        inner = shape if self.whole else shape[1:]
        self.field = Field(str(dataset.name).strip("/"), stored_type.dtype, inner)
        self.row_nbytes, self.datasets = self.field.row_nbytes, [self]
        # A whole dataset is one row for the caller, but on disk as many as its first axis.
        self.lines = shape[0] if whole and shape else 1
        self._file, self._lock = file, threading.RLock()
        self._grid: Grid | str | None = None
        self._reader: ColumnReader | None = None
        self._located = self._opened = False
        with hdf5_errors(where, "the dataset cannot be read"):
            need_filters(dataset, where)
            self._sources = sources(dataset, where)
            stored = dataset.id.get_storage_size()
        check_sources(self._sources, where)
        if self.row_nbytes > max(_LARGE, _BEST_RATIO * stored):
            raise FormatError(
                "the sizes of the dataset cannot be right",
                where=where,
                expected=f"about {stored} bytes, as stored",
                found=f"{self.row_nbytes} bytes per sample",
            )

    @property
    def dtype(self) -> Any:
        """Of the elements."""
        return self.field.dtype

    def grid(self) -> Grid | None:
        """Return where the dataset is, found when first asked for; see `locate_grid`."""
        with self._lock:
            if not self._located:
                try:
                    with hdf5_errors(self.where, "the dataset cannot be located"):
                        self._grid = locate_grid(self.dataset, self._file, self.where)
                except Unlocated as reason:
                    self._grid = str(reason)
                self._located = True
            if isinstance(self._grid, str):
                raise Unlocated(self._grid)
            return self._grid

    @override
    def locate(self, field: Field) -> Column:
        grid = self.grid()
        if grid is None or not field.row_nbytes:
            return Column(None)
        return fitting(Column(grid, grid.shape[0] if self.whole else 1), self.count, field)

    @property
    def reader(self) -> ColumnReader | None:
        """Reads the rows at their offsets; None if the library has to read them."""
        with self._lock:
            if not self._opened:
                try:
                    grid = self.grid()
                except (Unlocated, Outside):
                    grid = None
                if grid is not None and grid.row_nbytes * self.lines == self.row_nbytes:
                    self._reader = ColumnReader(Column(grid), self.field, self._file.opened)
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
        rows: Array = fetch({"": self.begin(start, stop, None, "")}, None)[""]  # type: ignore[assignment]
        return rows

    @override
    def begin(self, start: int, stop: int, arena: Arena | None, key: str) -> PendingRead:
        first, count = np.array([start], np.int64), np.array([stop - start], np.int64)
        return self.begin_rows(first, count, arena, key)

    def begin_rows(self, first: Ints, count: Ints, arena: Arena | None, key: str) -> PendingRead:
        """Return what reading ranges of rows needs from the file.

        `first` and `count` have the first row of each range, and how many rows it has; what is read
        is turned into an array of shape ``(sum(count), *inner)``.
        """
        shape = (int(count.sum()), *self.field.inner)
        if not shape[0] or not self.row_nbytes:
            empty = np.empty(shape, self.dtype)
            return PendingRead(0, [], lambda _: empty)
        reader = self.reader
        if reader is None:
            out = new_array(arena, key, shape, self.dtype)
            at = 0
            for low, rows in zip(first.tolist(), count.tolist(), strict=True):
                if rows:
                    self._by_library(out[at : at + rows], low, low + rows)
                at += rows
            check_text(out, self.where)
            return PendingRead(0, [], lambda _: out)
        pending = reader.begin_rows(first * self.lines, count * self.lines, arena, key)

        def done(buffer: Array) -> Array:
            values: Array = pending.done(buffer).view(self.dtype).reshape(shape)
            check_text(values, self.where)
            return values

        return replace(pending, done=done)

    def _by_library(self, out: Array, start: int, stop: int) -> None:
        from h5py import h5d, h5s, h5t

        with hdf5_errors(f"{self.where}, samples {start} to {stop - 1}", "the data cannot be read"):
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
                check_chunks(self.dataset, rows[0], rows[1], self.where)
            file_space = self.dataset.id.get_space()
            if shape and not self.whole:
                shape = (stop - start, *shape[1:])
                file_space.select_hyperslab((start, *(0 for _ in shape[1:])), shape)
            memory = h5s.create_simple(shape) if shape else h5s.create(h5s.SCALAR)
            element = h5t.py_create(self.dataset.dtype, logical=True)
            self.dataset.id.read(memory, file_space, out, element)
        check_sources(self._sources, self.where)
