"""Values of HDF5's variable-length types, found without the library.

A dataset of such a type holds one descriptor per element: the number of items as a little-endian
32-bit integer, the address of a heap, and the number of an object in it (the global heap ID of
the HDF5 File Format Specification, after the length). The descriptors are read like the rows of
any dataset (`Lengths`).

The values are in collections of objects (`Heaps`; "Global Heap", section III.E). The library walks
a collection without looking whether it advances, so that one wrong byte can keep it busy for ever
while it holds Python's lock, and it copies an object before it compares its size with what was
asked for. So the values of datasets are fetched by plain reads, and those of attributes, which the
library reads, are looked at first.
"""

from __future__ import annotations

import struct
import threading
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import Array, Field, Ints
from dsprep.core.storage import pread_exact, pread_into
from dsprep.errors import FormatError
from dsprep.formats.hdf5 import grids
from dsprep.formats.hdf5.guard import library
from dsprep.layout.model import Column
from dsprep.reading.columns import ColumnReader, fetch
from dsprep.reading.files import File


class Lengths:
    """The elements of one dataset and their lengths.

    Parameters
    ----------
    dataset
        An `h5py.Dataset` of a variable-length type and at most one axis.
    file
        The file, opened a second time for plain reads.
    where
        File and field, for messages.
    heaps
        The heaps of the file.
    """

    def __init__(self, dataset: Any, file: File, where: str, heaps: Heaps) -> None:
        self.dataset, self.where, self._file, self._heaps = dataset, where, file, heaps
        self._reader: ColumnReader | _Foreign | None = None
        self._width = 0
        self._lock = threading.Lock()

    def read(self, start: int, stop: int) -> Ints | None:
        """Return the items of elements ``start <= i < stop``, or None if only the library can."""
        rows = self._descriptors(start, stop)
        if rows is None:
            return None
        items = np.ascontiguousarray(rows[:, :4]).view("<u4")[:, 0].astype(np.int64)
        # Where nothing was written, the address of the heap is 0, whatever the length says.
        items[~rows[:, 4:-4].any(axis=1)] = 0
        return items

    def values(self, start: int, stop: int) -> tuple[Array, Ints]:
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
                where=self.where,
                expected="plain or chunked storage without a fill value of its own",
                fix="write the dataset again, with h5repack or h5py",
            )
        element = self.dataset.id.get_type()
        if not isinstance(element, h5t.TypeVlenID):
            return self._heaps.read(rows, 1, self.where)
        items = element.get_super()
        values, nbytes = self._heaps.read(rows, items.get_size(), self.where)
        return _as_numpy(values, nbytes, items)

    def _descriptors(self, start: int, stop: int) -> Array | None:
        """Return descriptors as stored: uint8, shape ``(stop - start, width)``."""
        reader = self._opened()
        if reader is None:
            return None
        if isinstance(reader, _Foreign):
            return reader.read(start, stop, self.where)
        first, count = np.array([start], np.int64), np.array([stop - start], np.int64)
        found: Any = fetch({"": reader.begin_rows(first, count, None, "")}, None)[""]
        rows: Array = found.reshape(-1, self._width)
        return rows

    @property
    def resident(self) -> int:
        """Bytes that `read` holds besides its result."""
        reader = self._opened()
        return 0 if reader is None else reader.resident_nbytes()

    def _opened(self) -> ColumnReader | _Foreign | None:
        """Return what reads the descriptors; None if only the library finds them."""
        with self._lock:
            if not self._width:
                with library(self.where, "the dataset cannot be located"):
                    address_nbytes = self.dataset.file.id.get_create_plist().get_sizes()[0]
                    width = 4 + int(address_nbytes) + 4
                    self._reader = self._open(width)
                    self._width = width
        return self._reader

    def _open(self, width: int) -> ColumnReader | _Foreign | None:
        field = Field(self.dataset.name.strip("/"), np.dtype(np.uint8), (width,))
        if self.dataset.chunks and isinstance(
            grids.filters_of(self.dataset.id.get_create_plist()), str
        ):
            return _Foreign.of(self.dataset, self._file, width)
        try:
            grid = grids.locate(self.dataset, self._file, self.where, raw=width)
        except (grids.Unlocated, grids.Outside):
            return None
        return ColumnReader(Column(grid), field, self._file.itself)


class _Foreign:
    """Chunks of descriptors with filters that only the library knows.

    Parameters
    ----------
    table
        The chunks, as from `dsprep.formats.hdf5.grids.chunk_table`. Missing ones have no items.
    file
        The file, opened for plain reads.
    block, width
        Descriptors per chunk, and bytes of each.
    plist
        The dataset's ``h5py.h5p.PropDCID``.
    """

    def __init__(self, table: Array, file: File, block: int, width: int, plist: Any) -> None:
        self._table, self._file, self._plist = table, file, plist
        self._block, self._width = block, width
        self._last: tuple[int, Array | None] = (-1, None)

    @classmethod
    def of(cls, dataset: Any, file: File, width: int) -> _Foreign | None:
        """Return the chunks of an `h5py.Dataset`, or None if the library cannot list them."""
        from h5py import h5d

        plist = dataset.id.get_create_plist()
        table = grids.chunk_table(dataset, file.nbytes)
        if table is None or (table["address"] > file.nbytes - table["nbytes"].astype("i8")).any():
            return None
        own_fill = plist.fill_value_defined() == h5d.FILL_VALUE_USER_DEFINED
        if own_fill and (table["address"] < 0).any():
            return None
        return cls(table, file, int(dataset.chunks[0]), width, plist)

    def resident_nbytes(self) -> int:
        """Return what reading holds beside its result: a chunk, and what it is made from."""
        return 2 * self._block * self._width

    def read(self, start: int, stop: int, where: object) -> Array:
        """Return descriptors ``start <= i < stop``, uint8 of shape ``(n, width)``."""
        out = np.zeros((stop - start, self._width), np.uint8)
        at = start
        while at < stop:
            b = at // self._block
            first = b * self._block
            end = min(first + self._block, stop)
            if self._table["address"][b] >= 0:
                number, rows = self._last
                if number != b or rows is None:
                    rows = self._decode(self._table[b], where)
                    self._last = (b, rows)
                out[at - start : end - start] = rows[at - first : end - first]
            at = end
        return out

    def _decode(self, entry: Any, where: object) -> Array:
        """Return a chunk's descriptors, which the library decodes as bytes without a meaning."""
        import h5py
        from h5py import h5d, h5p, h5s, h5t

        address = int(entry["address"])
        here = f"{where}, offset {address}"
        data = pread_exact(self._file.fd, int(entry["nbytes"]), address, here)
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


def _as_numpy(values: Array, nbytes: Ints, items: Any) -> tuple[Array, Ints]:
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


_SIGNATURE = b"GCOL"
_START = _SIGNATURE + b"\1\0\0\0"
"""Version 1 and three reserved bytes; anything else the library refuses by itself."""

_OBJECT = {2: struct.Struct("<H6xH"), 4: struct.Struct("<H6xI"), 8: struct.Struct("<H6xQ")}
"""Number and size of an object, by the bytes of a size in the file."""

_SMALLEST = 4096
_WINDOW = 64 << 10
_REMEMBERED = 32
_OVERLAP = 4
"""How often a byte may belong to a collection: files may be within files, but not without end."""


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
        The bytes of all rows, back to back, and those of each row.

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
        """Return the rows that have items, in the order of the heap, and where these are.

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
