"""HDF5's variable-length values, and their lengths without the values.

A dataset of such a type holds one descriptor per element: the number of items as a little-endian
32-bit integer, the address of a heap, and the number of an object in it (the global heap ID of
the HDF5 File Format Specification, after the length). Where the descriptors are plain rows or
chunks of the common kind, the items are found through them without the library.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsprep.formats.hdf5.encoded import Encoded, chunks_of
from dsprep.formats.hdf5.guard import library
from dsprep.formats.hdf5.heap import Heaps
from dsprep.formats.hdf5.placement import Placement, blocks_of
from dsprep.schema import Array
from dsprep.storage import pread_into


class Lengths:
    """The elements of one dataset and their lengths.

    Parameters
    ----------
    dataset
        An `h5py.Dataset` of a variable-length type and one axis.
    fd, file_nbytes
        The file, opened a second time for plain reads, and its size.
    where
        File and field, for messages.
    heaps
        The heaps of the file.
    """

    def __init__(self, dataset: Any, fd: int, file_nbytes: int, where: str, heaps: Heaps) -> None:
        self._dataset, self._fd, self._file_nbytes = dataset, fd, file_nbytes
        self._where, self._heaps = where, heaps
        self._place: Placement | Encoded | None = None
        self._width = 0
        self._lock = threading.Lock()

    def read(self, start: int, stop: int) -> NDArray[np.int64] | None:
        """Return the items of elements ``start <= i < stop``, or None if only the library can."""
        rows = self._descriptors(start, stop)
        if rows is None:
            return None
        items = np.ascontiguousarray(rows[:, :4]).view("<u4")[:, 0].astype(np.int64)
        # Where nothing was written, the address of the heap is 0, whatever the length says.
        items[~rows[:, 4:-4].any(axis=1)] = 0
        return items

    def values(self, start: int, stop: int) -> tuple[Array, NDArray[np.int64]] | None:
        """Return the bytes of elements ``start <= i < stop`` as stored, and those of each.

        None if only the library can read them; then all heaps of the file have been checked, so
        that it may be asked. See `dsprep.formats.hdf5.heap`.

        Raises
        ------
        FormatError
            If an element refers to nothing, or a heap is damaged.
        """
        from h5py import h5d, h5t

        rows = self._descriptors(start, stop)
        if rows is not None:
            element = self._dataset.id.get_type()
            if not isinstance(element, h5t.TypeVlenID):
                return self._heaps.read(rows, 1, self._where)
            items = element.get_super()
            if items == h5t.py_create(items.dtype, logical=True):
                return self._heaps.read(rows, items.get_size(), self._where)
        fill = self._dataset.id.get_create_plist().fill_value_defined()
        if self._dataset.id.get_storage_size() or fill == h5d.FILL_VALUE_USER_DEFINED:
            self._heaps.check_all(self._where)
        return None

    def _descriptors(self, start: int, stop: int) -> Array | None:
        place = self._located()
        if place is None:
            return None
        rows = np.empty((stop - start, self._width), np.uint8)
        if isinstance(place, Encoded):
            place.read(self._fd, rows, start, self._where)
        else:
            for offset, low, high in place.runs(start, stop):
                pread_into(self._fd, rows[low - start : high - start], offset, self._where)
        return rows

    @property
    def resident(self) -> int:
        """Bytes that `read` holds besides its result."""
        place = self._located()
        return place.resident if isinstance(place, Encoded) else 0

    def _located(self) -> Placement | Encoded | None:
        with self._lock:
            if not self._width:
                with library(self._where, "the dataset cannot be located"):
                    address_nbytes = self._dataset.file.id.get_create_plist().get_sizes()[0]
                    self._width = 4 + int(address_nbytes) + 4
                    self._place = self._locate()
        return self._place

    def _locate(self) -> Placement | Encoded | None:
        if not self._dataset.shape:
            # As for rows, only what was written has an address that can be believed.
            written = self._dataset.id.get_storage_size() == self._width
            offset = self._dataset.id.get_offset() if written else None
            if offset is None or offset + self._width > self._file_nbytes:
                return None
            return Placement(np.array([offset], np.int64), 1, self._width)
        args = (self._dataset, self._width, self._file_nbytes)
        return blocks_of(*args) or chunks_of(*args)
