"""HDF5's global heap, read here, and never by the library before it was checked.

The values of variable-length types lie in collections of objects. The library walks a collection
without looking whether it advances, so that one wrong byte can keep it busy for ever while it
holds Python's lock, and it copies an object before it compares its size with what was asked for.
So the values of datasets are fetched by plain reads, and those of attributes, which the library
reads, are looked at first. The layout is that of "Global Heap" in the HDF5 File Format
Specification, section III.E.
"""

from __future__ import annotations

import struct
import threading
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import Array
from dsprep.core.storage import pread_exact, pread_into
from dsprep.errors import FormatError

_SIGNATURE = b"GCOL"
_START = _SIGNATURE + b"\1\0\0\0"
"""Version 1 and three reserved bytes; anything else the library refuses by itself."""

_OBJECT = {2: struct.Struct("<H6xH"), 4: struct.Struct("<H6xI"), 8: struct.Struct("<H6xQ")}
"""Number and size of an object, by the bytes of a size in the file."""

_SMALLEST = 4096
_WINDOW = 64 << 10
_REMEMBERED = 32
_OVERLAP = 4
"""How often a byte may belong to a collection: files lie within files, but not without end."""


class Heaps:
    """The heap collections of one file. Threads may check at the same time.

    Parameters
    ----------
    fd, file_nbytes
        The file, opened for plain reads, and its size.
    base
        Bytes of the user block, from the end of which addresses count.
    widths
        Bytes of an address and of a size.
    path
        The file, for messages.
    """

    def __init__(
        self, fd: int, file_nbytes: int, base: int, widths: tuple[int, int], path: object
    ) -> None:
        self._fd, self._file_nbytes, self._base, self._path = fd, file_nbytes, base, path
        self._address_nbytes, self._size_nbytes = widths
        self._recent: dict[int, NDArray[np.int64]] = {}
        self._seen: set[int] = set()
        self._seen_nbytes = 0
        self._lock = threading.Lock()

    def read(self, rows: Array, itemsize: int, where: object) -> tuple[Array, NDArray[np.int64]]:
        """Return the items that descriptors refer to, and how many bytes each one has.

        Parameters
        ----------
        rows
            uint8, shape ``(n, 4 + address + 4)``: number of items, address of the collection,
            number of the object in it. Address 0 stands for no items.
        itemsize
            Bytes of an item on disk.
        where
            File and field.

        Returns
        -------
        The bytes of all rows, one after another, and those of each row.

        Raises
        ------
        FormatError
            If a row does not refer to an object of the right size.
        """
        order, edges, begins, asked = self._follow(rows, itemsize, where)
        lengths = np.zeros(len(rows), np.int64)
        lengths[order] = asked
        out = np.empty(int(lengths.sum()), np.uint8)
        to = (np.cumsum(lengths) - lengths)[order]
        for low, high in pairwise(edges):
            self._fetch(begins[low:high], asked[low:high], to[low:high], out, where)
        return out, lengths

    def check(self, rows: Array, itemsize: int, where: object) -> None:
        """Raise `FormatError` where `read` would."""
        self._follow(rows, itemsize, where)

    def _follow(
        self, rows: Array, itemsize: int, where: object
    ) -> tuple[NDArray[np.int64], tuple[int, ...], NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows that have items, in the order of the heap, and where these lie.

        Returns
        -------
        The numbers of these rows; the edges between those of one collection and the next; where
        the items of each row begin, and their bytes.
        """
        part = min(self._address_nbytes, 8)
        wide = np.zeros((len(rows), 8), np.uint8)
        wide[:, :part] = rows[:, 4 : 4 + part]
        addresses = wide.view("<u8")[:, 0]
        order = np.argsort(addresses, kind="stable")
        order = order[np.searchsorted(addresses[order], 1) :]
        addresses = addresses[order]
        asked = np.ascontiguousarray(rows[order, :4]).view("<u4")[:, 0].astype(np.int64) * itemsize
        numbers = np.ascontiguousarray(rows[order, -4:]).view("<u4")[:, 0].astype(np.int64)
        cuts = np.flatnonzero(np.diff(addresses)) + 1
        edges = (0, *cuts.tolist(), len(order)) if len(order) else (0,)
        begins = np.zeros(len(order), np.int64)
        for low, high in pairwise(edges):
            begins[low:high] = self._objects(
                int(addresses[low]), numbers[low:high], asked[low:high], where
            )
        return order, edges, begins, asked

    def _objects(
        self, address: int, numbers: NDArray[np.int64], asked: NDArray[np.int64], where: object
    ) -> NDArray[np.int64]:
        """Return where objects of one collection begin, after comparing their sizes."""
        objects = self._collection(address, where)
        inside = np.minimum(numbers, len(objects) - 1)
        held = np.where(numbers < len(objects), objects[inside, 1], -1)
        wrong = np.flatnonzero(held != asked)
        if len(wrong):
            at = int(wrong[0])
            raise self._error(
                where,
                self._base + address,
                f"object {numbers[at]} of {asked[at]} bytes",
                "none" if held[at] < 0 else f"{held[at]} bytes",
            )
        begins: NDArray[np.int64] = objects[inside, 0]
        return begins

    def _fetch(
        self,
        begins: NDArray[np.int64],
        sizes: NDArray[np.int64],
        to: NDArray[np.int64],
        out: Array,
        where: object,
    ) -> None:
        """Copy objects of one collection: by one read where they are most of what it fetches."""
        low, high = int(begins.min()), int((begins + sizes).max())
        if high - low > _WINDOW + 2 * int(sizes.sum()):
            for begin, size, at in zip(begins.tolist(), sizes.tolist(), to.tolist(), strict=True):
                pread_into(self._fd, out[at : at + size], begin, where)
            return
        data = np.empty(high - low, np.uint8)
        pread_into(self._fd, data, low, where)
        for begin, size, at in zip(
            (begins - low).tolist(), sizes.tolist(), to.tolist(), strict=True
        ):
            out[at : at + size] = data[begin : begin + size]

    def _claims(self, offset: int) -> int:
        """Return the size of the collection at `offset`, more than the file's if it has none."""
        head = pread_exact(
            self._fd, min(8 + self._size_nbytes, self._file_nbytes - offset), offset, self._path
        )
        size = int.from_bytes(head[8:], "little")
        whole = len(head) == 8 + self._size_nbytes and size >= _SMALLEST
        return size if whole else self._file_nbytes + 1

    def _collection(self, address: int, where: object) -> NDArray[np.int64]:
        """Return begin and bytes of each object of a collection by its number; -1: there is none.

        The collection is walked once, unless many others come between.
        """
        with self._lock:
            objects = self._recent.get(address)
        if objects is not None:
            return objects
        offset = self._base + address
        if offset > self._file_nbytes - 8 - self._size_nbytes:
            raise self._error(where, offset, f"within {self._file_nbytes} bytes", "beyond the file")
        head = pread_exact(self._fd, 8, offset, where)
        if head != _START:
            raise self._error(where, offset, f"a collection, {_START!r}", repr(head))
        size = self._claims(offset)
        if size > self._file_nbytes - offset:
            raise self._error(
                where, offset, f"at most {self._file_nbytes - offset} bytes", "another size"
            )
        self._count(address, size, where)
        found = self._walk(offset, size, where)
        objects = np.full((max(found, default=0) + 1, 2), -1, np.int64)
        objects[list(found.keys())] = list(found.values()) or np.empty((0, 2), np.int64)
        with self._lock:
            self._recent[address] = objects
            while len(self._recent) > _REMEMBERED:
                del self._recent[next(iter(self._recent))]
        return objects

    def _count(self, address: int, size: int, where: object) -> None:
        """Remember a collection, and refuse a file whose collections overlap without end."""
        with self._lock:
            if address in self._seen:
                return
            self._seen.add(address)
            self._seen_nbytes += size
            total = self._seen_nbytes
        if total > _OVERLAP * self._file_nbytes:
            offset = self._base + address
            raise self._error(where, offset, "collections side by side", "overlapping ones")

    def _walk(self, offset: int, size: int, where: object) -> dict[int, tuple[int, int]]:
        """Return begin and bytes of each object of the collection at `offset` by its number."""
        if self._size_nbytes not in _OBJECT:
            raise self._error(where, offset, "sizes of 2, 4, or 8 bytes", self._size_nbytes)
        unpack = _OBJECT[self._size_nbytes].unpack_from
        head = (8 + self._size_nbytes + 7) & ~7  # of the collection, and of each object
        at, end = offset + head, offset + size
        objects: dict[int, tuple[int, int]] = {}
        while end - at >= head:
            low, window = at, pread_exact(self._fd, min(_WINDOW, end - at), at, where)
            last = low + len(window) - head
            while at <= last:
                number, nbytes = unpack(window, at - low)
                if number == 0:  # the free space at the end, whose size has its header in it
                    if nbytes != end - at:
                        raise self._error(where, at, f"free space of {end - at} bytes", nbytes)
                    return objects
                step = head + ((nbytes + 7) & ~7)
                if step > end - at:
                    raise self._error(where, at, f"an object of at most {end - at - head}", nbytes)
                if number in objects:
                    raise self._error(where, at, "a number that is free", f"{number} again")
                objects[number] = (at + head, nbytes)
                at += step
        return objects

    def _error(self, where: object, offset: int, expected: object, found: object) -> FormatError:
        return FormatError(
            "the heap of variable-length values is damaged",
            where=f"{where}, offset {offset}",
            expected=expected,
            found=found,
        )
