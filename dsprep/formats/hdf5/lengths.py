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

from dsprep.core.schema import Array
from dsprep.core.storage import pread_exact, pread_into
from dsprep.errors import FormatError
from dsprep.formats.hdf5.encoded import Encoded, chunks_of
from dsprep.formats.hdf5.guard import library
from dsprep.formats.hdf5.heap import Heaps
from dsprep.formats.hdf5.index import CHUNK, chunk_table, in_file
from dsprep.formats.hdf5.placement import Placement, blocks_of


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
        self._place: Placement | Encoded | _Chunks | None = None
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

    def values(self, start: int, stop: int) -> tuple[Array, NDArray[np.int64]]:
        """Return the items of elements ``start <= i < stop``, and how many each one has.

        Returns
        -------
        The items' bytes as numpy has them, and the bytes of each element.

        Raises
        ------
        FormatError
            If an element refers to nothing, a heap is damaged, or only the library could find
            the values: it follows what it finds there unchecked.
        """
        from h5py import h5t

        rows = self._descriptors(start, stop)
        if rows is None:
            raise FormatError(
                "only the HDF5 library could find these values of variable length, and it follows "
                "damaged ones without end",
                where=self._where,
                expected="plain or chunked storage without a fill value of its own",
                fix="write the dataset again, with h5repack or h5py",
            )
        element = self._dataset.id.get_type()
        if not isinstance(element, h5t.TypeVlenID):
            return self._heaps.read(rows, 1, self._where)
        items = element.get_super()
        values, nbytes = self._heaps.read(rows, items.get_size(), self._where)
        return _as_numpy(values, nbytes, items)

    def _descriptors(self, start: int, stop: int) -> Array | None:
        place = self._located()
        if place is None:
            return None
        rows = np.empty((stop - start, self._width), np.uint8)
        if isinstance(place, Placement):
            for offset, low, high in place.runs(start, stop):
                pread_into(self._fd, rows[low - start : high - start], offset, self._where)
        else:
            place.read(self._fd, rows, start, self._where)
        return rows

    @property
    def resident(self) -> int:
        """Bytes that `read` holds besides its result."""
        place = self._located()
        return 0 if place is None or isinstance(place, Placement) else place.resident

    def _located(self) -> Placement | Encoded | _Chunks | None:
        with self._lock:
            if not self._width:
                with library(self._where, "the dataset cannot be located"):
                    address_nbytes = self._dataset.file.id.get_create_plist().get_sizes()[0]
                    self._width = 4 + int(address_nbytes) + 4
                    self._place = self._locate()
        return self._place

    def _locate(self) -> Placement | Encoded | _Chunks | None:
        from h5py import h5d

        plist = self._dataset.id.get_create_plist()
        empty = plist.fill_value_defined() != h5d.FILL_VALUE_USER_DEFINED
        layout = plist.get_layout()
        if layout not in (h5d.CONTIGUOUS, h5d.CHUNKED) or plist.get_external_count():
            return None
        if not self._dataset.shape:
            # As for rows, only what was written has an address that can be believed.
            written = self._dataset.id.get_storage_size() == self._width
            offset = self._dataset.id.get_offset() if written else None
            if offset is not None and offset + self._width <= self._file_nbytes:
                return Placement(np.array([offset], np.int64), 1, self._width)
        else:
            args = (self._dataset, self._width, self._file_nbytes)
            found = blocks_of(*args) or chunks_of(*args)
            if found is not None:
                return found
        if layout == h5d.CHUNKED:
            table = chunk_table(self._dataset, self._file_nbytes)
            if table is None or not (empty or in_file(table, self._file_nbytes)):
                return None
            return _Chunks(table, int(self._dataset.chunks[0]), self._width, plist)
        if empty and not self._dataset.id.get_storage_size():
            return _Chunks(np.full(1, -1, CHUNK), max(1, self._dataset.size), self._width, plist)
        return None


class _Chunks:
    """Chunks of descriptors that may be missing, or have filters that only the library knows.

    Parameters
    ----------
    table
        The chunks, as from `dsprep.formats.hdf5.index.chunk_table`. Missing ones have no items.
    block, width
        Descriptors per chunk, and bytes of each.
    plist
        The dataset's ``h5py.h5p.PropDCID``.
    """

    def __init__(self, table: NDArray[Any], block: int, width: int, plist: Any) -> None:
        self._table, self._block, self._width, self._plist = table, block, width, plist
        self._last: tuple[int, Array | None] = (-1, None)

    @property
    def resident(self) -> int:
        """Bytes that reading holds beside its result: a chunk, and what it is made from."""
        return 2 * self._block * self._width

    def read(self, fd: int, out: Array, start: int, where: object) -> None:
        """Fill `out`, uint8 of shape ``(n, width)``, with the descriptors from `start` on."""
        at, stop = start, start + len(out)
        while at < stop:
            b = at // self._block
            first = b * self._block
            end = min(first + self._block, stop)
            entry = self._table[b]
            if entry["address"] < 0:
                out[at - start : end - start] = 0
            else:
                number, rows = self._last
                if number != b or rows is None:
                    rows = self._decode(fd, entry, where)
                    self._last = (b, rows)
                out[at - start : end - start] = rows[at - first : end - first]
            at = end

    def _decode(self, fd: int, entry: Any, where: object) -> Array:
        """Return a chunk's descriptors, which the library decodes as bytes without a meaning."""
        import h5py
        from h5py import h5d, h5p, h5s, h5t

        address = int(entry["address"])
        here = f"{where}, offset {address}"
        data = pread_exact(fd, int(entry["nbytes"]), address, here)
        rows = np.empty((self._block, self._width), np.uint8)
        with (
            library(here, "the chunk cannot be decoded"),
            h5py.File("chunk", "w", driver="core", backing_store=False) as file,
        ):
            plist = h5p.create(h5p.DATASET_CREATE)
            plist.set_chunk((self._block,))
            for i in range(self._plist.get_nfilters()):
                code, flags, values, _ = self._plist.get_filter(i)
                # Without a size, as on types of variable length, the library leaves it out.
                left_out = code == h5py.h5z.FILTER_SHUFFLE and not values
                if not (left_out or int(entry["mask"]) >> i & 1):
                    plist.set_filter(code, flags, values)
            kind = h5t.create(h5t.OPAQUE, self._width)
            space = h5s.create_simple((self._block,))
            dataset = h5d.create(file.id, b"x", kind, space, plist)
            dataset.write_direct_chunk((0,), data, 0)
            dataset.read(h5s.ALL, h5s.ALL, rows, kind)
        return rows


def _as_numpy(
    values: Array, nbytes: NDArray[np.int64], items: Any
) -> tuple[Array, NDArray[np.int64]]:
    """Return items of the HDF5 type `items` as numpy has them, and the bytes of each element."""
    from h5py import h5t

    wanted = h5t.py_create(items.dtype, logical=True)
    if items == wanted or items.get_class() == h5t.OPAQUE:
        return values, nbytes
    size, made = items.get_size(), wanted.get_size()
    count = len(values) // size
    buffer = np.zeros(count * max(size, made), np.uint8)
    buffer[: len(values)] = values
    h5t.convert(items, wanted, count, buffer)
    return buffer[: count * made], nbytes // size * made
