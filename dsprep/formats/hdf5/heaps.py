"""The heaps that hold values of variable length, followed and checked without the library.

The values are in collections of objects ("Global Heap", section III.E of the HDF5 File Format
Specification). The library walks a collection without looking whether it advances, so that one
wrong byte can keep it busy for ever while it holds Python's lock, and it copies an object before it
compares its size with what was asked for. So the values of datasets are fetched by plain reads, and
those of attributes, which the library reads, are looked at first: their descriptors are in the
object's header, or, where it has many attributes, in the blocks of its fractal heap (sections IV.A,
"Object Headers", IV.A.2.m, "Attribute Message", and III.G, "Fractal Heap").
"""

from __future__ import annotations

import math
import re
import struct
import threading
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from dsprep.core.schema import Array, Ints
from dsprep.errors import FormatError
from dsprep.storage.base import Handle
from dsprep.storage.ranges import as_bytes

_START = b"GCOL\1\0\0\0"
"""Signature, version 1 and three reserved bytes; anything else the library refuses by itself."""

_OBJECT = {2: struct.Struct("<H6xH"), 4: struct.Struct("<H6xI"), 8: struct.Struct("<H6xQ")}
"""Number and size of an object, by the bytes of a size in the file."""

_SMALLEST, _LARGE = 4096, 1 << 20
_REMEMBERED = 32
_OVERLAP = 4
"""Collections to which a byte may belong, at most: files may contain files, to a depth."""

_ATTRIBUTE, _CONTINUATION, _APART, _SHARED = 0x0C, 0x10, 0x15, 2
_MOST = 16 << 20
"""Bytes of an object's headers; where there are more, nothing is found."""


Collection: TypeAlias = tuple[Array, dict[int, tuple[int, int]]]
"""The bytes of a collection; by its number where in these each object begins, and its bytes."""


class Heaps:
    """The heap collections of an `h5py.File`, which is open for plain reads as `file` too.

    Threads may read at the same time.

    Attributes
    ----------
    width
        Bytes of a descriptor: the number of items, the address of the collection, which counts from
        the end of the user block, and the number of the object in it.
    """

    def __init__(self, file: Handle, opened: Any) -> None:
        plist = opened.id.get_create_plist()
        self._file, self._base = file, plist.get_userblock()
        self._address_nbytes, self._size_nbytes = plist.get_sizes()
        self.width = 4 + self._address_nbytes + 4
        self._recent: dict[int, Collection] = {}
        self._visited, self._nbytes = set[int](), 0
        self._lock = threading.Lock()

    def read(self, rows: Array, itemsize: int, where: object) -> tuple[Array, Ints]:
        """Return the items that descriptors refer to, back to back, and the bytes of each row.

        Parameters
        ----------
        rows
            uint8, shape ``(n, width)``. Address 0 stands for no items.
        itemsize
            Bytes of an item on disk.

        Raises
        ------
        FormatError
            If a row does not refer to an object of the right size.
        """
        part = min(self._address_nbytes, 8)
        wide = np.zeros((len(rows), 8), np.uint8)
        wide[:, :part] = rows[:, 4 : 4 + part]
        addresses = wide.view("<u8")[:, 0].tolist()
        items, numbers = (
            np.ascontiguousarray(r).view("<u4")[:, 0].tolist() for r in (rows[:, :4], rows[:, -4:])
        )
        values = [np.empty(0, np.uint8)] * (len(rows) + 1)
        for i in sorted(range(len(rows)), key=addresses.__getitem__):
            address, nbytes = addresses[i], items[i] * itemsize
            if not address:
                continue
            data, objects = self._recent.get(address) or self._collection(address, where)
            begin, stored = objects.get(numbers[i], (0, -1))
            if stored != nbytes:
                expected = f"object {numbers[i]} of {nbytes} bytes"
                actual = "none" if stored < 0 else f"{stored} bytes"
                raise _damage(where, self._base + address, expected, actual)
            values[i] = data[begin : begin + nbytes]
        return np.concatenate(values), np.fromiter(map(len, values), np.int64, len(rows))

    def _collection(self, address: int, where: object) -> Collection:
        """Return a collection; it is read and walked once, unless many others come between."""
        offset, head = self._base + address, 8 + self._size_nbytes
        left = self._file.nbytes - offset
        if left < head:
            raise _damage(where, offset, f"within {self._file.nbytes} bytes", "beyond the file")
        start = self._file.pread_exact(head, offset)
        if start[:8] != _START:
            raise _damage(where, offset, f"a collection, {_START!r}", repr(start[:8]))
        size = int.from_bytes(start[8:], "little")
        if not _SMALLEST <= size <= left:
            raise _damage(where, offset, f"{_SMALLEST} to {left} bytes", size)
        with self._lock:
            self._nbytes += size * (address not in self._visited)
            self._visited.add(address)
        if self._nbytes > _OVERLAP * self._file.nbytes:
            raise _damage(where, offset, "collections side by side", "overlapping ones")
        data = np.empty(size, np.uint8)
        self._file.pread_into(data, offset)
        collection = data, self._walk(data, offset, where)
        if size <= _LARGE:
            with self._lock:
                self._recent[address] = collection
                while len(self._recent) > _REMEMBERED:
                    del self._recent[next(iter(self._recent))]
        return collection

    def _walk(self, data: Array, offset: int, where: object) -> dict[int, tuple[int, int]]:
        """Return begin and bytes of each object of the collection at `offset` by its number."""
        unpack, view, end = _OBJECT[self._size_nbytes].unpack_from, as_bytes(data), len(data)
        at = head = (8 + self._size_nbytes + 7) & ~7  # of the collection, and of each object
        objects: dict[int, tuple[int, int]] = {}
        while end - at >= head:
            number, nbytes = unpack(view, at)
            if number == 0:  # the free space at the end, whose size has its header in it
                if nbytes != end - at:
                    raise _damage(where, offset + at, f"free space of {end - at} bytes", nbytes)
                break
            step = head + ((nbytes + 7) & ~7)
            if step > end - at:
                raise _damage(where, offset + at, f"an object of at most {end - at - head}", nbytes)
            if number in objects:
                raise _damage(where, offset + at, "a number that is free", f"{number} again")
            objects[number] = (at + head, nbytes)
            at += step
        return objects

    # --- attributes ---

    def sound(self, item: Any, name: str) -> bool:
        """Return whether the library may be asked for an attribute of variable length."""
        from h5py import h5o, h5t

        attribute = item.attrs.get_id(name)
        kind = attribute.get_type()
        text = isinstance(kind, h5t.TypeStringID)
        # The library believes any number for what a type of variable length is, and crashes.
        if kind.get_class() not in (h5t.STRING, h5t.VLEN) or kind.encode()[3] & 15 != text:
            return False
        nbytes, is_whole = math.prod(attribute.shape) * self.width, False
        try:
            for data in self._attributes(h5o.get_info(item.id).addr, name.encode("utf-8")):
                rows = np.frombuffer(data[:nbytes], np.uint8).reshape(-1, self.width)
                items = 1 if text else kind.get_super().get_size()
                self.read(rows, items, f"attribute {name}")
                is_whole = len(data) >= nbytes
        except (FormatError, EOFError, LookupError, ValueError, struct.error):
            return False
        return is_whole

    def _attributes(self, address: int, name: bytes) -> Iterator[bytes]:
        """Yield the data of each attribute called `name` of the object at `address`."""
        head, width = self._read(address, 64), self._address_nbytes
        modern = head[:4] == b"OHDR"
        if modern:
            at = 6 + (16 if head[5] & 0x20 else 0) + (4 if head[5] & 0x10 else 0)
            first = at + (1 << (head[5] & 3))
            nbytes, unpack = int.from_bytes(head[at:first], "little"), struct.Struct("<BHB")
            skip = 6 if head[5] & 4 else 4
        else:
            first, nbytes = 16, int.from_bytes(head[8:12], "little")
            unpack, skip = struct.Struct("<HHB"), 8
        blocks, visited, total = [(address + first, nbytes)], set[int](), 0
        while blocks:
            address, nbytes = blocks.pop()
            total += nbytes
            if address in visited or total > _MOST:
                continue
            visited.add(address)
            data = self._read(address, nbytes)
            at = 4 if data[:4] == b"OCHK" else 0
            while at + skip <= len(data):
                kind, size, flags = unpack.unpack_from(data, at)
                message = data[at + skip : at + skip + size]
                at += skip + size
                if kind == _CONTINUATION and len(message) >= width:
                    at_block = int.from_bytes(message[:width], "little")
                    blocks.append((at_block, int.from_bytes(message[width:], "little")))
                elif flags & _SHARED:
                    continue
                elif kind == _ATTRIBUTE:
                    yield from _content(message, name)
                elif kind == _APART and len(message) > 2:
                    begin = 4 if message[1] & 1 else 2
                    heap = int.from_bytes(message[begin : begin + width], "little")
                    for block in self._blocks(heap):
                        for match in re.finditer(re.escape(name + b"\0"), block):
                            for begin in (match.start() - 9, match.start() - 8):
                                yield from _content(block[max(0, begin) :], name)

    def _blocks(self, address: int) -> Iterator[bytes]:
        """Yield the blocks of the fractal heap at `address` that hold its objects directly."""
        n, s = self._address_nbytes, self._size_nbytes
        head = self._read(address, 22 + 12 * s + 3 * n)
        if head[:4] != b"FRHP":
            return
        at = 14 + 10 * s + 2 * n
        columns, size = (int.from_bytes(b, "little") for b in (head[at:][:2], head[at + 2 :][:s]))
        at += 6 + 2 * s
        bits, rows = (int.from_bytes(head[k : k + 2], "little") for k in (at - 4, at + n))
        root = int.from_bytes(head[at : at + n], "little")
        if rows == 0:
            yield self._read(root, size)
            return
        first = 5 + n + (bits + 7) // 8
        index, total = self._read(root, first + min(rows * columns, 1 << 12) * n), 0
        for i in range(rows * columns):
            if i >= 2 * columns and i % columns == 0:
                size *= 2
            block = index[first + i * n : first + (i + 1) * n]
            total += size
            if len(block) < n or total > _MOST:
                return
            if block != b"\xff" * n:
                yield self._read(int.from_bytes(block, "little"), size)

    def _read(self, address: int, nbytes: int) -> bytes:
        """Return up to `nbytes` bytes of the file, fewer at its end."""
        offset = self._base + address
        nbytes = min(nbytes, _MOST, self._file.nbytes - offset)
        return self._file.pread_exact(nbytes, offset) if nbytes > 0 else b""


def _damage(where: object, offset: int, expected: object, found: object) -> FormatError:
    return FormatError(
        "the heap of variable-length values is damaged",
        where=f"{where}, offset {offset}",
        expected=expected,
        found=found,
    )


def _content(message: bytes, name: bytes) -> Iterator[bytes]:
    """Yield the data of an attribute message if it is called `name`."""
    if len(message) < 8 or message[0] not in (1, 2, 3):
        return
    sizes = struct.unpack_from("<3H", message, 2)
    at, unit = (9 if message[0] == 3 else 8), (8 if message[0] == 1 else 1)
    if message[at : at + sizes[0]].split(b"\0", 1)[0] == name:
        yield message[at + sum(-(-size // unit) * unit for size in sizes) :]
