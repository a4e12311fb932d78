"""A dataset as rows along its first axis, read by several threads into memory of the caller."""

from __future__ import annotations

import math
import threading
from typing import Any

from dsprep.errors import FormatError
from dsprep.formats.hdf5.dtypes import check_text
from dsprep.formats.hdf5.guard import library, need_filters
from dsprep.formats.hdf5.held import Held
from dsprep.formats.hdf5.placement import Placement, placement_of
from dsprep.schema import Arena, Array, has_padding, new_array
from dsprep.storage import pread_into

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
        self._fd, self._file_nbytes = fd, file_nbytes
        self._placement: Placement | None = None
        self._placed = False
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
    def placement(self) -> Placement | None:
        """Where the rows lie, or None if the library has to read them. Found when first used."""
        with self._lock:
            if not self._placed:
                with library(self.where, "the dataset cannot be located"):
                    self._placement = self._locate()
                self._placed = True
        return self._placement

    def _locate(self) -> Placement | None:
        if not self.row_nbytes or not self.count or not self.dataset.shape:
            return None
        if not self.whole:
            return placement_of(self.dataset, self.row_nbytes, self._file_nbytes)
        lines = self.dataset.shape[0]
        found = placement_of(self.dataset, self.row_nbytes // lines, self._file_nbytes)
        if found is None or len(found.addresses) > 1:
            return None
        return Placement(found.addresses, 1, self.row_nbytes)

    def read(self, start: int, stop: int, arena: Arena | None, key: str) -> Array:
        """Return rows ``start <= i < stop``, shape ``(n, *inner)``, in memory of `arena`."""
        out = new_array(arena, key, (stop - start, *self.inner), self.dtype)
        if out.size:
            self._fill(out, start, stop)
            check_text(out, self.where)
        return out

    def _fill(self, out: Array, start: int, stop: int) -> None:
        placement = self.placement
        if placement is not None:
            for offset, first, last in placement.runs(start, stop):
                pread_into(self._fd, out[first - start : last - start], offset, self.where)
            return
        from h5py import h5s, h5t

        if has_padding(self.dtype):
            # The library writes the members only, and the memory may hold anything.
            out.reshape(-1).view("u1")[...] = 0
        with library(f"{self.where}, samples {start} to {stop - 1}", "the data cannot be read"):
            shape = self.dataset.shape
            file_space = self.dataset.id.get_space()
            if shape and not self.whole:
                shape = (stop - start, *shape[1:])
                file_space.select_hyperslab((start, *(0 for _ in shape[1:])), shape)
            memory = h5s.create_simple(shape) if shape else h5s.create(h5s.SCALAR)
            element = h5t.py_create(self.dataset.dtype, logical=True)
            self.dataset.id.read(memory, file_space, out, element)
