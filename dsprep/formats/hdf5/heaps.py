"""The heaps that hold values of variable length, followed and checked without the library.

The values are in collections of objects (`Heaps`; "Global Heap", section III.E of the HDF5 Handle
Format Specification). The library walks a collection without looking whether it advances, so that
one wrong byte can keep it busy for ever while it holds Python's lock, and it copies an object
before it compares its size with what was asked for. So the values of datasets are fetched by plain
reads, and those of attributes, which the library reads, are looked at first (`Descriptors`): their
descriptors are in the object's header, or, where it has many attributes, in the blocks of its
fractal heap (sections IV.A, "Object Headers", IV.A.2.m, "Attribute Message", and III.G, "Fractal
Heap").
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from dsprep.core.schema import Array, Ints
from dsprep.errors import FormatError
from dsprep.storage.base import Handle

_SIGNATURE = b"GCOL"
_START = _SIGNATURE + b"\1\0\0\0"
"""Version 1 and three reserved bytes; anything else the library refuses by itself."""

_OBJECT = {2: struct.Struct("<H6xH"), 4: struct.Struct("<H6xI"), 8: struct.Struct("<H6xQ")}
"""Number and size of an object, by the bytes of a size in the file."""

_SMALLEST = 4096
_WINDOW = 64 << 10
_REMEMBERED = 32
_OVERLAP = 4
"""How many collections a byte may belong to: files may contain files, but not without end."""


class Heaps:
    """The heap collections of one file. Threads may read at the same time.

    Attributes
    ----------
    file
        Opened for plain reads.
    base
        Bytes of the user block, from the end of which addresses count.
    address_nbytes, size_nbytes
        Bytes of an address and of a size.
    """

    def __init__(self, file: Handle, base: int, widths: tuple[int, int]) -> None:
        self.file, self.base = file, base
        self.address_nbytes, self.size_nbytes = widths
        self._recent: dict[int, Ints] = {}
        self._collections: set[int] = set()
        self._collections_nbytes = 0
        self._lock = threading.Lock()

    def read(self, rows: Array, itemsize: int, where: object) -> tuple[Array, Ints]:
        """Return the items that descriptors refer to, back to back, and the bytes of each row.

        Parameters
        ----------
        rows
            uint8, shape ``(n, 4 + address + 4)``: number of items, address of the collection,
            number of the object in it. Address 0 stands for no items.
        itemsize
            Bytes of an item on disk.

        Raises
        ------
        FormatError
            If a row does not refer to an object of the right size.
        """
        order, edges, begins, nbytes_of_rows = self._follow(rows, itemsize, where)
        lengths = np.zeros(len(rows), np.int64)
        lengths[order] = nbytes_of_rows
        out = np.empty(int(lengths.sum()), np.uint8)
        to = (np.cumsum(lengths) - lengths)[order]
        for low, high in pairwise(edges):
            self._fetch(begins[low:high], nbytes_of_rows[low:high], to[low:high], out, where)
        return out, lengths

    def check(self, rows: Array, itemsize: int, where: object) -> None:
        """Raise `FormatError` where `read` would."""
        self._follow(rows, itemsize, where)

    def _follow(
        self, rows: Array, itemsize: int, where: object
    ) -> tuple[Ints, tuple[int, ...], Ints, Ints]:
        """Return the numbers of the rows that have items, in the order of the heap, and more.

        That is the edges between those of one collection and the next, where the items of each row
        begin, and their bytes.
        """
        part = min(self.address_nbytes, 8)
        wide = np.zeros((len(rows), 8), np.uint8)
        wide[:, :part] = rows[:, 4 : 4 + part]
        addresses = wide.view("<u8")[:, 0]
        order = np.argsort(addresses, kind="stable")
        order = order[np.searchsorted(addresses[order], 1) :]
        addresses = addresses[order]
        stated_nbytes = (
            np.ascontiguousarray(rows[order, :4]).view("<u4")[:, 0].astype(np.int64) * itemsize
        )
        numbers = np.ascontiguousarray(rows[order, -4:]).view("<u4")[:, 0].astype(np.int64)
        cuts = np.flatnonzero(np.diff(addresses)) + 1
        edges = (0, *cuts.tolist(), len(order)) if len(order) else (0,)
        begins = np.zeros(len(order), np.int64)
        for low, high in pairwise(edges):
            begins[low:high] = self._objects(
                int(addresses[low]), numbers[low:high], stated_nbytes[low:high], where
            )
        return order, edges, begins, stated_nbytes

    def _objects(self, address: int, numbers: Ints, stated_nbytes: Ints, where: object) -> Ints:
        """Return where objects of one collection begin, after comparing their sizes."""
        objects = self._collection(address, where)
        inside = np.minimum(numbers, len(objects) - 1)
        stored_nbytes = np.where(numbers < len(objects), objects[inside, 1], -1)
        wrong = np.flatnonzero(stored_nbytes != stated_nbytes)
        if len(wrong):
            at = int(wrong[0])
            raise self._error(
                where,
                self.base + address,
                f"object {numbers[at]} of {stated_nbytes[at]} bytes",
                "none" if stored_nbytes[at] < 0 else f"{stored_nbytes[at]} bytes",
            )
        begins: Ints = objects[inside, 0]
        return begins

    def _fetch(self, begins: Ints, sizes: Ints, to: Ints, out: Array, where: object) -> None:
        """Copy objects of one collection: by one read where they are most of what it fetches."""
        low, high = int(begins.min()), int((begins + sizes).max())
        data = None
        if high - low <= _WINDOW + 2 * int(sizes.sum()):
            data = np.empty(high - low, np.uint8)
            self.file.pread_into(data, low)
        for begin, size, at in zip(begins.tolist(), sizes.tolist(), to.tolist(), strict=True):
            if data is None:
                self.file.pread_into(out[at : at + size], begin)
            else:
                out[at : at + size] = data[begin - low : begin - low + size]

    def _collection(self, address: int, where: object) -> Ints:
        """Return begin and bytes of each object of a collection by its number; -1: there is none.

        It is walked once, unless many others come between.
        """
        with self._lock:
            objects = self._recent.get(address)
        if objects is not None:
            return objects
        offset = self.base + address
        left = self.file.nbytes - offset
        if left < 8 + self.size_nbytes:
            raise self._error(where, offset, f"within {self.file.nbytes} bytes", "beyond the file")
        head = self.file.pread_exact(8 + self.size_nbytes, offset)
        if head[:8] != _START:
            raise self._error(where, offset, f"a collection, {_START!r}", repr(head[:8]))
        size = int.from_bytes(head[8:], "little")
        if not _SMALLEST <= size <= left:
            raise self._error(where, offset, f"{_SMALLEST} to {left} bytes", size)
        self._count(address, size, where)
        walked = self._walk(offset, size, where)
        objects = np.full((max(walked, default=0) + 1, 2), -1, np.int64)
        objects[list(walked.keys())] = list(walked.values()) or np.empty((0, 2), np.int64)
        with self._lock:
            self._recent[address] = objects
            while len(self._recent) > _REMEMBERED:
                del self._recent[next(iter(self._recent))]
        return objects

    def _count(self, address: int, size: int, where: object) -> None:
        """Remember a collection, and refuse a file whose collections overlap without end."""
        with self._lock:
            if address in self._collections:
                return
            self._collections.add(address)
            self._collections_nbytes += size
            total = self._collections_nbytes
        if total > _OVERLAP * self.file.nbytes:
            offset = self.base + address
            raise self._error(where, offset, "collections side by side", "overlapping ones")

    def _walk(self, offset: int, size: int, where: object) -> dict[int, tuple[int, int]]:
        """Return begin and bytes of each object of the collection at `offset` by its number."""
        if self.size_nbytes not in _OBJECT:
            raise self._error(where, offset, "sizes of 2, 4, or 8 bytes", self.size_nbytes)
        unpack = _OBJECT[self.size_nbytes].unpack_from
        head = (8 + self.size_nbytes + 7) & ~7  # of the collection, and of each object
        at, end = offset + head, offset + size
        objects: dict[int, tuple[int, int]] = {}
        while end - at >= head:
            low, window = at, self.file.pread_exact(min(_WINDOW, end - at), at)
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


_ATTRIBUTE, _CONTINUATION, _ATTRIBUTES = 0x0C, 0x10, 0x15
_SHARED = 2
_TIMES, _PHASES, _CREATION = 0x20, 0x10, 0x04
_MOST = 16 << 20
"""Bytes of an object's headers and heap blocks; where there are more, nothing is found."""


class Descriptors:
    """Looks at the attributes of one file, whose heaps are `heaps`."""

    def __init__(self, heaps: Heaps) -> None:
        self._heaps, self._file, self._address_nbytes = heaps, heaps.file, heaps.address_nbytes
        self._recent: tuple[int, list[bytes], list[bytes]] = (-1, [], [])

    def sound(self, item: Any, name: str) -> bool:
        """Whether the library may be asked for an attribute of variable length."""
        from h5py import h5o, h5t

        attribute = item.attrs.get_id(name)
        kind = attribute.get_type()
        text = isinstance(kind, h5t.TypeStringID)
        # The library believes any number for what a type of variable length is, and crashes.
        if kind.get_class() not in (h5t.STRING, h5t.VLEN) or kind.encode()[3] & 15 != text:
            return False
        items = 1 if text else kind.get_super().get_size()
        width = 4 + self._address_nbytes + 4
        nbytes = math.prod(attribute.shape) * width
        is_found = False
        try:
            for data in self._data(h5o.get_info(item.id).addr, name.encode("utf-8")):
                if len(data) < nbytes:
                    return False
                rows = np.frombuffer(data[:nbytes], np.uint8).reshape(-1, width)
                self._heaps.check(rows, items, f"attribute {name}")
                is_found = True
        except (FormatError, EOFError, IndexError):
            return False
        return is_found

    def references(self, item: Any, name: str) -> list[int]:
        """Return the addresses that a list of lists of references holds, the first of each list.

        Those of lists without any are -1. Without such an attribute, or if it is damaged: nothing.
        """
        from h5py import h5o

        try:
            count = math.prod(item.attrs.get_id(name).shape)
            width = 4 + self._address_nbytes + 4
            for data in self._data(h5o.get_info(item.id).addr, name.encode("utf-8")):
                rows = np.frombuffer(data[: count * width], np.uint8).reshape(count, width)
                values, sizes = self._heaps.read(rows, self._address_nbytes, f"attribute {name}")
                begins = np.cumsum(sizes) - sizes
                content = values.tobytes()
                return [
                    int.from_bytes(content[a : a + self._address_nbytes], "little") if n else -1
                    for a, n in zip(begins.tolist(), sizes.tolist(), strict=True)
                ]
        except (FormatError, EOFError, LookupError, ValueError, TypeError, OSError, RuntimeError):
            pass
        return []

    def _data(self, address: int, name: bytes) -> Iterator[bytes]:
        """Yield the data of each attribute called `name` of the object at `address`."""
        if self._recent[0] != address:
            listed = list(self._messages(address))
            heaps = [m for kind, m in listed if kind == _ATTRIBUTES]
            blocks = [
                b for m in heaps for b in self._blocks(self._address(m, 4 if m[1] & 1 else 2))
            ]
            self._recent = (address, [m for kind, m in listed if kind == _ATTRIBUTE], blocks)
        _, messages, blocks = self._recent
        for message in messages:
            data = _attribute(message, 0, name)
            if data is not None:
                yield data
        for block in blocks:
            at = block.find(name + b"\0")
            while at >= 0:
                for begin in (at - 9, at - 8):  # of version 3, or of those before
                    data = _attribute(block, begin, name) if begin >= 0 else None
                    if data is not None and (block[begin] == 3) == (begin == at - 9):
                        yield data
                at = block.find(name + b"\0", at + 1)

    def _messages(self, address: int) -> Iterator[tuple[int, bytes]]:
        """Yield type and data of each message in the headers of the object at `address`."""
        head = self._read(address, 64)
        first, flags = 16, 0
        modern = head[:4] == b"OHDR"
        if modern:
            flags = head[5]
            at = 6 + (16 if flags & _TIMES else 0) + (4 if flags & _PHASES else 0)
            width = 1 << (flags & 3)
            nbytes = int.from_bytes(head[at : at + width], "little")
            first = at + width
        else:
            nbytes = int.from_bytes(head[8:12], "little")
        blocks, visited, total = [(address + first, nbytes)], set[int](), 0
        while blocks:
            address, nbytes = blocks.pop()
            total += nbytes
            if address in visited or total > _MOST:
                continue
            visited.add(address)
            data = self._read(address, nbytes)
            at, skip = 0, 8
            if modern:
                skip = 6 if flags & _CREATION else 4
                if data[:4] == b"OCHK":
                    at = 4
            while at + skip <= len(data):
                if modern:
                    kind, size = data[at], int.from_bytes(data[at + 1 : at + 3], "little")
                    marks = data[at + 3]
                else:
                    kind = int.from_bytes(data[at : at + 2], "little")
                    size = int.from_bytes(data[at + 2 : at + 4], "little")
                    marks = data[at + 4]
                message = data[at + skip : at + skip + size]
                at += skip + size
                if marks & _SHARED:
                    continue  # it is elsewhere
                if kind == _CONTINUATION and len(message) >= self._address_nbytes:
                    size = int.from_bytes(message[self._address_nbytes :], "little")
                    blocks.append((self._address(message, 0), size))
                yield kind, message

    def _blocks(self, address: int) -> Iterator[bytes]:
        """Yield the blocks of the fractal heap at `address` that hold its objects directly."""
        n, s = self._address_nbytes, self._heaps.size_nbytes
        head = self._read(address, 22 + 12 * s + 3 * n)
        if head[:4] != b"FRHP":
            return
        at = 14 + 10 * s + 2 * n
        width = int.from_bytes(head[at : at + 2], "little")
        start = int.from_bytes(head[at + 2 : at + 2 + s], "little")
        at += 2 + 2 * s + 4
        root, rows = self._address(head, at), int.from_bytes(head[at + n : at + n + 2], "little")
        if rows == 0:
            yield self._read(root, min(start, _MOST))
            return
        bits = int.from_bytes(head[at - 4 : at - 2], "little")
        first = 5 + n + (bits + 7) // 8
        index = self._read(root, first + min(rows * width, 1 << 12) * n)
        size, total = start, 0
        for row in range(rows):
            size = start if row < 2 else size * 2
            for column in range(width):
                at = first + (row * width + column) * n
                block = index[at : at + n]
                total += size
                if len(block) < n or block == b"\xff" * n or total > _MOST:
                    continue
                yield self._read(int.from_bytes(block, "little"), size)

    def _address(self, data: bytes, at: int) -> int:
        return int.from_bytes(data[at : at + self._address_nbytes], "little")

    def _read(self, address: int, nbytes: int) -> bytes:
        """Return up to `nbytes` bytes of the file, fewer at its end."""
        offset = self._heaps.base + address
        nbytes = min(nbytes, _MOST, self._file.nbytes - offset)
        if nbytes <= 0:
            return b""
        return self._file.pread_exact(nbytes, offset)


def _attribute(message: bytes, at: int, name: bytes) -> bytes | None:
    """Return the data of an attribute message from `at` on if it is called `name`."""
    head = message[at : at + 9]
    if len(head) < 8 or head[0] not in (1, 2, 3):
        return None
    sizes = [int.from_bytes(head[k : k + 2], "little") for k in (2, 4, 6)]
    at += 9 if head[0] == 3 else 8
    if message[at : at + sizes[0]].split(b"\0", 1)[0] != name:
        return None
    unit = 8 if head[0] == 1 else 1
    return message[at + sum(-(-size // unit) * unit for size in sizes) :]
