"""A dataset as rows along its first axis, read by several threads into memory of the caller."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from typing import Any

from dsprep.core.schema import Arena, Array, has_padding, new_array
from dsprep.core.storage import pread_into
from dsprep.errors import FormatError
from dsprep.formats.hdf5.dtypes import check_text
from dsprep.formats.hdf5.element_types import Held
from dsprep.formats.hdf5.encoded import Encoded, check_chunks, encoded_of
from dsprep.formats.hdf5.guard import library, need_filters
from dsprep.formats.hdf5.placement import Placement, placement_of

_LARGE = 256 << 20
_BEST_RATIO = 1100
"""More than deflate can shrink anything: a larger claim is a lie or a fill value."""


class Rows:
    """The rows of one dataset.

    Parameters
    ----------
    dataset
        An `h5py.Dataset` of fixed-width elements.
    held
        What it holds.
    fd, file_nbytes
        The file, opened a second time for plain reads, and its size.
    where
        File and field, for messages.
    whole
        Take the whole dataset as one row.

    Attributes
    ----------
    count
        The number of rows.
    inner
        The shape of one row.
    row_nbytes
        Bytes of one row.
    lines
        Rows of the dataset in one row: more than 1 only when `whole`.
    """

    def __init__(
        self,
        dataset: Any,
        held: Held,
        fd: int,
        file_nbytes: int,
        where: str,
        *,
        whole: bool = False,
    ) -> None:
        self.dataset, self.held, self.where = dataset, held, where
        self.whole = whole or not held.shape
        self.dtype = held.carrier.dtype
        self.count = 1 if self.whole else held.shape[0]
        self.inner = held.shape if self.whole else held.shape[1:]
        self.row_nbytes = math.prod(self.inner) * self.dtype.itemsize
        # A whole dataset is one row for the caller, but on disk as many as its first axis.
        self.lines = held.shape[0] if whole and held.shape else 1
        self._fd, self._file_nbytes = fd, file_nbytes
        self._place: Placement | Encoded | None = None
        self._located = False
        self._lock = threading.Lock()
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

    @property
    def place(self) -> Placement | Encoded | None:
        """Where the rows lie, or None if the library has to read them. Found when first used."""
        with self._lock:
            if not self._located:
                with library(self.where, "the dataset cannot be located"):
                    self._place = self._locate()
                self._located = True
        return self._place

    @property
    def resident(self) -> int:
        """Bytes that reading holds besides the rows asked for, such as decoded chunks."""
        place = self.place
        if isinstance(place, Encoded):
            return place.resident
        chunks = self.dataset.chunks if place is None else None
        return 2 * math.prod(map(int, chunks)) * int(self.dataset.dtype.itemsize) if chunks else 0

    def _locate(self) -> Placement | Encoded | None:
        if not self.row_nbytes or not self.count or not self.dataset.shape:
            return None
        line_nbytes = self.row_nbytes // self.lines
        found = placement_of(self.dataset, line_nbytes, self._file_nbytes)
        return found or encoded_of(self.dataset, line_nbytes, self._file_nbytes)

    def read(self, start: int, stop: int, arena: Arena | None, key: str) -> Array:
        """Return rows ``start <= i < stop``, shape ``(n, *inner)``, in memory of `arena`."""
        return self.join([(start, stop)], stop - start, arena, key)

    def join(
        self, runs: Iterable[tuple[int, int]], count: int, arena: Arena | None, key: str
    ) -> Array:
        """Return the rows ``low <= i < high`` of all runs, `count` together, one after another."""
        out = new_array(arena, key, (count, *self.inner), self.dtype)
        if out.size:
            at = 0
            for low, high in runs:
                if low < high:
                    self._fill(out[at : at + high - low], low, high)
                at += high - low
            check_text(out, self.where)
        return out

    def _fill(self, out: Array, start: int, stop: int) -> None:
        place = self.place
        if place is not None:
            first = start * self.lines
            lines = out.reshape(len(out) * self.lines, -1)
            if isinstance(place, Encoded):
                place.read(self._fd, lines.view("u1"), first, self.where)
                return
            for offset, low, high in place.runs(first, first + len(lines)):
                pread_into(self._fd, lines[low - first : high - first], offset, self.where)
            return
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
            if self.dataset.shape:
                rows = (0, self.dataset.shape[0]) if self.whole else (start, stop)
                check_chunks(self.dataset, rows[0], rows[1], self.where)
            shape = self.dataset.shape
            file_space = self.dataset.id.get_space()
            if shape and not self.whole:
                shape = (stop - start, *shape[1:])
                file_space.select_hyperslab((start, *(0 for _ in shape[1:])), shape)
            memory = h5s.create_simple(shape) if shape else h5s.create(h5s.SCALAR)
            element = h5t.py_create(self.dataset.dtype, logical=True)
            self.dataset.id.read(memory, file_space, out, element)
