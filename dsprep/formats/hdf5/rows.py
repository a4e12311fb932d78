"""A dataset as rows along its first axis.

They are read at their offsets in the file, or by the library where only it finds or decodes them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from dsprep.core.schema import Arena, Array, Field, Ints, has_padding, new_array
from dsprep.errors import FormatError
from dsprep.formats.hdf5.datasets import StoredType, check_external, open_sources
from dsprep.formats.hdf5.dimensions import fill_value
from dsprep.formats.hdf5.dtypes import check_text
from dsprep.formats.hdf5.guard import hdf5_errors, need_filters
from dsprep.formats.hdf5.locate import Outside, Unlocated, check_chunks, extended, locate_grid
from dsprep.layout.model import Column, Grid
from dsprep.reading.columns import ColumnReader, PendingRead, fetch
from dsprep.storage.base import Handle

_LARGE = 256 << 20
_BEST_RATIO = 1100
"""More than deflate can shrink anything: a larger claim is damage or a fill value."""


class Rows:
    """The rows of one dataset of fixed-width elements; safe to read from several threads.

    With `whole`, all of it is one row. `where` is the file and the field, for messages.

    Attributes
    ----------
    count, inner, row_nbytes
        The number of rows; the shape and the bytes of one.
    short
        Whether it is stored in part, and the rest is its fill value.
    lines
        Rows of the dataset in one row: more than 1 only when `whole`.
    """

    def __init__(
        self,
        dataset: Any,
        stored_type: StoredType,
        file: Handle,
        where: str,
        *,
        whole: bool = False,
    ) -> None:
        self.dataset, self.stored_type, self.where = dataset, stored_type, where
        self.whole = whole or not stored_type.shape
        self.dtype = stored_type.carrier.dtype
        self.count = 1 if self.whole else stored_type.shape[0]
        self.inner = stored_type.shape if self.whole else stored_type.shape[1:]
        self.row_nbytes = math.prod(self.inner) * self.dtype.itemsize
        # A whole dataset is one row for the caller, but on disk as many as its first axis.
        self.lines = stored_type.shape[0] if whole and stored_type.shape else 1
        self._file = file
        self._grid: Grid | str | None = None
        self._reader: ColumnReader | None = None
        self._located = self._opened = False
        self._lock = threading.RLock()
        self.short = any(a != b for a, b in zip(stored_type.shape, dataset.shape, strict=False))
        with hdf5_errors(where, "the dataset cannot be read"):
            need_filters(dataset, where)
            open_sources(dataset, where)
            stored = dataset.id.get_storage_size()
        if self.row_nbytes > max(_LARGE, _BEST_RATIO * stored):
            raise FormatError(
                "the sizes of the dataset cannot be right",
                where=where,
                expected=f"about {stored} bytes, as stored",
                found=f"{self.row_nbytes} bytes per sample",
            )

    def grid(self, progress: Callable[[int], None] | None = None) -> Grid | None:
        """Return where the dataset is, found when first asked for; see `locate_grid`."""
        with self._lock:
            if not self._located:
                try:
                    with hdf5_errors(self.where, "the dataset cannot be located"):
                        self._grid = locate_grid(self.dataset, self._file, self.where, progress)
                        if self.short:
                            self._grid = extended(
                                self._grid,
                                self.dataset,
                                self.stored_type.shape,
                                self.fill().tobytes(),
                            )
                except Unlocated as reason:
                    self._grid = str(reason)
                self._located = True
            if isinstance(self._grid, str):
                raise Unlocated(self._grid)
            return self._grid

    def stored(self) -> Grid | None:
        """Return where the rows are, of whatever type, as `locate_grid` with ``raw``."""
        nbytes = int(self.dataset.id.get_type().get_size())
        return locate_grid(self.dataset, self._file, self.where, raw=nbytes)

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
                    field = Field(self.dataset.name.strip("/"), self.dtype, self.inner)
                    self._reader = ColumnReader(Column(grid), field, self._file.opened)
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

    def begin(self, first: Ints, count: Ints, arena: Arena | None, key: str) -> PendingRead:
        """Return what reading ranges of rows needs from the file.

        `first` and `count` have the first row of each range, and how many rows it has; what is read
        is turned into an array of shape ``(sum(count), *inner)``.
        """
        shape = (int(count.sum()), *self.inner)
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

        return PendingRead(pending.nbytes, pending.spans, done)

    def fill(self) -> Array:
        """Return what elements hold that are not stored, of shape ``()``."""
        return fill_value(self.dataset, self.dtype)

    def _by_library(self, out: Array, start: int, stop: int) -> None:
        if not self.short:
            self._read_stored(out, start, stop)
            return
        out[...] = self.fill()
        shape = tuple(map(int, self.dataset.shape))
        stored = (stop - start, *shape) if self.whole else (min(stop, shape[0]) - start, *shape[1:])
        if min(stored) > 0:
            part = np.empty(stored, self.dtype)
            self._read_stored(part, start, stop if self.whole else start + stored[0])
            out[tuple(map(slice, stored))] = part

    def _read_stored(self, out: Array, start: int, stop: int) -> None:
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
            check_external(self.dataset, self.where)
