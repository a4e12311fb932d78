"""HDF5's global heap, checked before the library walks it.

The values of variable-length types lie in collections of objects. The library walks a collection
without looking whether it advances, so that one wrong byte can keep it busy for ever while it
holds Python's lock, and it copies an object before it compares its size with what was asked for.
So what the rows refer to is checked here first: by their own descriptors where these can be read,
else every collection that the file has. The layout is that of "Global Heap" in the HDF5 File
Format Specification, section III.E.
"""

from __future__ import annotations

import struct
import threading

import numpy as np
from numpy.typing import NDArray

from dsprep.errors import FormatError
from dsprep.schema import Array
from dsprep.storage import pread_exact

_SIGNATURE = b"GCOL"
_START = _SIGNATURE + b"\1\0\0\0"
"""Version 1 and three reserved bytes; anything else the library refuses by itself."""

_OBJECT = {2: struct.Struct("<H6xH"), 4: struct.Struct("<H6xI"), 8: struct.Struct("<H6xQ")}
"""Number and size of an object, by the bytes of a size in the file."""

_SMALLEST = 4096
_WINDOW = 64 << 10
_STEP = 8 << 20
_REMEMBERED = 32
_OVERLAP = 4
"""How often a byte may belong to a collection: files lie within files, but not without end."""

_ATTRIBUTES = 16 << 20
"""The size of a file up to which it is searched for the sake of its attributes."""


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
        self._searching = threading.Lock()
        self._searched = False
        self._damage: FormatError | None = None

    def check(self, rows: Array, itemsize: int, where: object) -> None:
        """Raise `FormatError` unless each descriptor refers to an object of the right size.

        Parameters
        ----------
        rows
            uint8, shape ``(n, 4 + address + 4)``: number of items, address of the collection,
            number of the object in it. Address 0 stands for no items.
        itemsize
            Bytes of an item on disk.
        where
            File and field.
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
        for low, high in zip((0, *cuts.tolist()), (*cuts.tolist(), len(order)), strict=True):
            if low == high:
                continue
            address = int(addresses[low])
            sizes = self._sizes(address, where)
            inside = np.minimum(numbers[low:high], len(sizes) - 1)
            held = np.where(numbers[low:high] < len(sizes), sizes[inside], -1)
            wrong = np.flatnonzero(held != asked[low:high])
            if len(wrong):
                at = low + int(wrong[0])
                found = int(held[wrong[0]])
                raise self._error(
                    where,
                    self._base + address,
                    f"object {numbers[at]} of {asked[at]} bytes",
                    "none" if found < 0 else f"{found} bytes",
                )

    def check_all(self, where: object) -> None:
        """Raise `FormatError` if any collection is damaged, looking for them through the file."""
        with self._searching:
            if not self._searched:
                try:
                    self._search(where)
                except FormatError as error:
                    self._damage = error
                self._searched = True
            if self._damage is not None:
                raise self._damage

    def sound(self) -> bool:
        """Whether attributes of variable length can be read, as far as a quick look tells.

        A large file is not searched for them, and counts as sound.
        """
        if self._file_nbytes > _ATTRIBUTES:
            return True
        try:
            self.check_all(self._path)
        except FormatError:
            return False
        return True

    def _search(self, where: object) -> None:
        for low in range(0, self._file_nbytes, _STEP):
            here = f"{where}, offset {low}"
            data = pread_exact(self._fd, min(_STEP, self._file_nbytes - low), low, here)
            at = data.find(_START)
            while at >= 0:
                # What claims to end behind the file is no collection, or one that is refused.
                if at % 8 == 0 and self._claims(low + at) <= self._file_nbytes - low - at:
                    self._sizes(low + at - self._base, where)
                at = data.find(_START, at + 1)

    def _claims(self, offset: int) -> int:
        """Return the size of the collection at `offset`, more than the file's if it has none."""
        head = pread_exact(
            self._fd, min(8 + self._size_nbytes, self._file_nbytes - offset), offset, self._path
        )
        size = int.from_bytes(head[8:], "little")
        whole = len(head) == 8 + self._size_nbytes and size >= _SMALLEST
        return size if whole else self._file_nbytes + 1

    def _sizes(self, address: int, where: object) -> NDArray[np.int64]:
        """Return the bytes of each object of a collection by its number; -1 where there is none."""
        with self._lock:
            sizes = self._recent.get(address)
        if sizes is not None:
            return sizes
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
        objects = self._walk(offset, size, where)
        sizes = np.full(max(objects, default=0) + 1, -1, np.int64)
        sizes[list(objects.keys())] = list(objects.values())
        with self._lock:
            self._recent[address] = sizes
            while len(self._recent) > _REMEMBERED:
                del self._recent[next(iter(self._recent))]
        return sizes

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

    def _walk(self, offset: int, size: int, where: object) -> dict[int, int]:
        """Return the bytes of each object of the collection at `offset` by its number."""
        if self._size_nbytes not in _OBJECT:
            raise self._error(where, offset, "sizes of 2, 4, or 8 bytes", self._size_nbytes)
        unpack = _OBJECT[self._size_nbytes].unpack_from
        head = (8 + self._size_nbytes + 7) & ~7  # of the collection, and of each object
        at, end = offset + head, offset + size
        objects: dict[int, int] = {}
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
                objects[number] = nbytes
                at += step
        return objects

    def _error(self, where: object, offset: int, expected: object, found: object) -> FormatError:
        return FormatError(
            "the heap of variable-length values is damaged",
            where=f"{where}, offset {offset}",
            expected=expected,
            found=found,
        )
