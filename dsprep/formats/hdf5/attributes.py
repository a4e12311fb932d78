"""Attributes of HDF5 objects as plain Python and numpy values, and back.

An attribute of a variable-length type holds descriptors of objects in the global heap. The library
follows them unchecked, so they are found and compared first (`Descriptors.sound`): in the object's
header, or, where it has many attributes, in the blocks of its fractal heap. The layout is that of
"Object Headers", "Attribute Message" and "Fractal Heap" in the HDF5 File Format Specification,
sections IV.A, IV.A.2.m and III.G.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dsprep.core.schema import Attrs
from dsprep.core.storage import pread_exact
from dsprep.errors import FormatError
from dsprep.formats.hdf5.dtypes import DTYPE_ATTRIBUTE, in_order, plain
from dsprep.formats.hdf5.sequences import Heaps

KIND_ATTRIBUTE = "dsprep_kind"
LAYOUT_ATTRIBUTE = "dsprep_layout"
CAPACITY_ATTRIBUTE = "dsprep_capacity"
"""Of a ragged field in groups: group g has its rows from ``g * capacity`` on, and up to that many;
what it does not need is a gap that belongs to no sample."""

_OWN = frozenset({DTYPE_ATTRIBUTE, KIND_ATTRIBUTE, LAYOUT_ATTRIBUTE, CAPACITY_ATTRIBUTE})


def read_attributes(
    item: Any, sound: Callable[[Any, str], bool]
) -> tuple[dict[str, Any], list[str]]:
    """Return the attributes of an h5py object, and the names of those left out.

    `sound` says whether one that is in a heap may be read.

    Left out are references, empty attributes, and what h5py cannot read.
    """
    values: dict[str, Any] = {}
    lost: list[str] = []
    try:
        names = _names(item)
    except Exception:  # h5py raises many kinds for a damaged header
        return {}, ["all"]
    for raw in names:
        name = raw.decode("utf-8", "backslashreplace")
        if name in _OWN:
            continue
        try:
            raw.decode("utf-8")
            dtype = item.attrs.get_id(name).dtype
            value = None
            if not dtype.hasobject or (_flat(dtype) and sound(item, name)):
                value = _plain_value(item.attrs[name], dtype)
        except Exception:  # as above; an attribute is never worth losing the data
            value = None
        if value is None:
            lost.append(name)
        else:
            values[name] = value
    return values, lost


def has_attributes(item: Any) -> bool:
    """Whether an h5py object has attributes other than dsprep's own, or a damaged header."""
    try:
        return not {name.encode() for name in _OWN}.issuperset(_names(item))
    except Exception:  # as in `read_attributes`
        return True


def _names(item: Any) -> list[bytes]:
    """Return the names of the attributes of an h5py object, sorted as h5py lists them.

    They are walked as stored: to sort them the library makes a table, and it crashes where damage
    stops it on the way.
    """
    from h5py import h5, h5a

    names: list[bytes] = []
    h5a.iterate(item.id, names.append, index_type=h5.INDEX_NAME, order=h5.ITER_NATIVE)
    return sorted(names)


def _flat(dtype: Any) -> bool:
    """Whether values of an attribute are texts or sequences of plain numbers."""
    import h5py

    base = h5py.check_vlen_dtype(dtype)
    return h5py.check_string_dtype(dtype) is not None or (
        base is not None and not np.dtype(base).hasobject
    )


def _plain_value(value: Any, dtype: Any) -> Any:
    """Return an attribute without h5py's own types, or None if it has no plain form."""
    import h5py

    base = h5py.check_vlen_dtype(dtype)
    if base is not None and isinstance(value, np.ndarray) and not value.dtype.hasobject:
        value = in_order(value, np.dtype(base))  # one sequence
    if isinstance(value, str):
        return value
    if isinstance(value, bytes) or (isinstance(value, np.void) and value.dtype.names is None):
        return value.tobytes() if isinstance(value, np.void) else bytes(value)
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject:
            items = np.asarray(value).reshape(-1).tolist()
            if not items or not all(isinstance(i, str) for i in items):
                return None
            return np.array(items).reshape(value.shape)
        return np.asarray(value, plain(value.dtype))[()]
    return None


def mark(item: Any, name: str, text: str) -> None:
    """Give an h5py object one of dsprep's own attributes.

    As a fixed string: one of variable length is in a heap, where damage can hang the library.
    """
    item.attrs.create(name, np.bytes_(text.encode()))


def marked(item: Any, name: str, where: object = None) -> str | None:
    """Return what `mark` wrote, or None if there is no such attribute.

    Raises
    ------
    FormatError
        If something else wrote it.
    """
    if name not in item.attrs:
        return None
    found = item.attrs.get_id(name)
    if found.dtype.kind != "S" or found.shape != ():
        raise FormatError(
            f"attribute {name} is not as dsprep writes it",
            where=where or str(item.name),
            expected="one string of fixed length, as numpy.bytes_ makes it",
        )
    value: bytes = item.attrs[name]
    return value.decode("utf-8", "replace")


def write_attributes(item: Any, attrs: Attrs) -> list[str]:
    """Give an h5py object the attributes `attrs`; return the names of those it cannot hold."""
    import h5py

    lost = []
    for name, value in attrs.items():
        if name in _OWN:
            continue
        array = np.asarray(value)
        try:
            if array.dtype.kind == "U" and array.ndim:
                item.attrs.create(name, array.astype(object), dtype=h5py.string_dtype())
            elif array.dtype.hasobject:
                lost.append(name)
            elif isinstance(value, bytes):
                # A fixed string loses zeros at its end, and h5py would make plain bytes a str.
                item.attrs.create(name, (np.void if value.endswith(b"\0") else np.bytes_)(value))
            else:
                item.attrs.create(name, value)
        except (TypeError, ValueError, RuntimeError, OSError, KeyError):
            lost.append(name)
    return lost


_ATTRIBUTE, _CONTINUATION, _ATTRIBUTES = 0x0C, 0x10, 0x15
_SHARED = 2
_TIMES, _PHASES, _CREATION = 0x20, 0x10, 0x04
_MOST = 16 << 20
"""Bytes of an object's headers and heap blocks; where there are more, nothing is found."""


class Descriptors:
    """Looks at the attributes of one file.

    The parameters are those of `dsprep.formats.hdf5.sequences.Heaps`, and the heaps themselves.
    """

    def __init__(
        self, fd: int, file_nbytes: int, base: int, widths: tuple[int, int], heaps: Heaps
    ) -> None:
        self._fd, self._file_nbytes, self._base, self._heaps = fd, file_nbytes, base, heaps
        self._address_nbytes, self._size_nbytes = widths
        self._recent: tuple[int, list[bytes], list[bytes]] = (-1, [], [])

    def sound(self, item: Any, name: str) -> bool:
        """Whether the library may be asked for an attribute that is in a heap.

        Parameters
        ----------
        item
            The `h5py.Group` or `h5py.Dataset`.
        name
            Of an attribute whose type is a string or a sequence of variable length.
        """
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
        found = False
        try:
            for data in self._data(h5o.get_info(item.id).addr, name.encode("utf-8")):
                if len(data) < nbytes:
                    return False
                rows = np.frombuffer(data[:nbytes], np.uint8).reshape(-1, width)
                self._heaps.check(rows, items, f"attribute {name}")
                found = True
        except (FormatError, EOFError, IndexError):
            return False
        return found

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
            found = _attribute(message, 0, name)
            if found is not None:
                yield found
        for block in blocks:
            at = block.find(name + b"\0")
            while at >= 0:
                for begin in (at - 9, at - 8):  # of version 3, or of those before
                    found = _attribute(block, begin, name) if begin >= 0 else None
                    if found is not None and (block[begin] == 3) == (begin == at - 9):
                        yield found
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
        blocks, seen, total = [(address + first, nbytes)], set[int](), 0
        while blocks:
            address, nbytes = blocks.pop()
            total += nbytes
            if address in seen or total > _MOST:
                continue
            seen.add(address)
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
        n, s = self._address_nbytes, self._size_nbytes
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
        offset = self._base + address
        nbytes = min(nbytes, _MOST, self._file_nbytes - offset)
        if nbytes <= 0:
            return b""
        return pread_exact(self._fd, nbytes, offset, f"offset {offset}")


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
