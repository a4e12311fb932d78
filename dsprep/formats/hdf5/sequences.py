"""Fields of HDF5's variable-length types, found without the library.

A dataset of such a type holds one descriptor per element: the number of items as a little-endian
32-bit integer, the address of a heap, and the number of an object in it (the global heap ID of
the HDF5 File Format Specification, after the length). The descriptors are read like the rows of
any dataset, and the values from the heaps (`dsprep.formats.hdf5.heaps`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from dsprep.core.schema import Arena, Array, Attrs, Field, Ints, Ragged
from dsprep.core.storage import pread_exact
from dsprep.errors import FormatError
from dsprep.formats.hdf5 import grids
from dsprep.formats.hdf5.columns import FieldColumn, Progress, Resident
from dsprep.formats.hdf5.datasets import Held
from dsprep.formats.hdf5.guard import library, need_filters
from dsprep.formats.hdf5.heaps import Heaps
from dsprep.layout.model import Column
from dsprep.reading.columns import ColumnReader, Wanted, fetch
from dsprep.reading.files import File


class Sequences(FieldColumn):
    """A ragged field of one of HDF5's variable-length types.

    Parameters
    ----------
    dataset
        An `h5py.Dataset` with at most one axis.
    held
        What it holds.
    file, heaps
        The file, opened a second time for plain reads, and its heaps.
    where
        File and field, for messages.
    whole
        The dataset has no axis, and is the only sample.
    """

    def __init__(
        self,
        dataset: Any,
        held: Held,
        file: File,
        heaps: Heaps,
        where: str,
        attrs: Attrs,
        *,
        whole: bool = False,
    ) -> None:
        self.dataset, self.held, self.whole, self._where = dataset, held, whole, where
        self.count = 1 if whole else held.shape[0]
        name, self._dtype = str(dataset.name).strip("/"), held.carrier.dtype
        self.field = Field(name, self._dtype, (None,), held.kind, attrs)
        self._file, self._heaps = file, heaps
        self._reader: ColumnReader | _Foreign | None = None
        self._width = 0
        self._lock = threading.Lock()

    def begin(self, start: int, stop: int, arena: Arena | None, key: str) -> Wanted:
        """See `FieldColumn.begin`.

        Raises
        ------
        FormatError
            If an element refers to nothing, a heap is damaged, or only the library could find
            the values: it follows what it finds there unchecked.
        """
        from h5py import h5t

        where = f"{self._where}, samples {start} to {stop - 1}"
        with library(where, "the data cannot be read"):
            need_filters(self.dataset, self._where)
            rows = self._descriptors(start, stop)
            if rows is None:
                raise FormatError(
                    "only the HDF5 library could find these values of variable length, and it "
                    "follows damaged ones without end",
                    where=self._where,
                    expected="plain or chunked storage without a fill value of its own",
                    fix="write the dataset again, with h5repack or h5py",
                )
            element = self.dataset.id.get_type()
            if isinstance(element, h5t.TypeVlenID):
                items = element.get_super()
                values, nbytes = self._heaps.read(rows, items.get_size(), self._where)
                values, nbytes = _as_numpy(values, nbytes, items)
            else:
                values, nbytes = self._heaps.read(rows, 1, self._where)
        if self.held.kind == "str":
            values, nbytes = _to_zeros(values, nbytes)
        lengths = nbytes // self._dtype.itemsize
        column = Ragged.from_lengths(values.view(self._dtype), lengths, self.held.kind)
        return Wanted(0, [], lambda _: column)

    def sizes(self, start: int, stop: int) -> Ints | None:
        """See `FieldColumn.sizes`."""
        rows = None if self.whole else self._descriptors(start, stop)
        if rows is None:
            return None
        items = np.ascontiguousarray(rows[:, :4]).view("<u4")[:, 0].astype(np.int64)
        # Where nothing was written, the address of the heap is 0, whatever the length says.
        items[~rows[:, 4:-4].any(axis=1)] = 0
        return items * self._dtype.itemsize

    def locate(self, field: Field, where: str, progress: Progress) -> Column:
        """Raise `Unlocated`."""
        raise grids.Unlocated(
            "its values are in the global heap, each found through a descriptor; "
            "dsprep convert makes them addressable"
        )

    def datasets(self) -> Sequence[Resident]:
        """Return the dataset of the descriptors."""
        return [] if self.whole else [self]

    @property
    def resident(self) -> int:
        """Bytes that reading holds besides its result."""
        reader = self._opened()
        return 0 if reader is None else reader.resident_nbytes()

    def _descriptors(self, start: int, stop: int) -> Array | None:
        """Return descriptors as stored: uint8, shape ``(stop - start, width)``."""
        reader = self._opened()
        if reader is None or isinstance(reader, _Foreign):
            return None if reader is None else reader.read(start, stop, self._where)
        first, count = np.array([start], np.int64), np.array([stop - start], np.int64)
        found: Any = fetch({"": reader.begin_rows(first, count, None, "")}, None)[""]
        rows: Array = found.reshape(-1, self._width)
        return rows

    def _opened(self) -> ColumnReader | _Foreign | None:
        """Return what reads the descriptors; None if only the library finds them."""
        with self._lock:
            if not self._width:
                with library(self._where, "the dataset cannot be located"):
                    width = 4 + int(self.dataset.file.id.get_create_plist().get_sizes()[0]) + 4
                    self._reader = self._open(width)
                    self._width = width
        return self._reader

    def _open(self, width: int) -> ColumnReader | _Foreign | None:
        plist = self.dataset.id.get_create_plist()
        if self.dataset.chunks and isinstance(grids.filters_of(plist), str):
            return _Foreign.of(self.dataset, self._file, width)
        try:
            grid = grids.locate(self.dataset, self._file, self._where, raw=width)
        except (grids.Unlocated, grids.Outside):
            return None
        field = Field(self.field.name, np.dtype(np.uint8), (width,))
        return ColumnReader(Column(grid), field, self._file.itself)


def _to_zeros(values: Array, nbytes: Ints) -> tuple[Array, Ints]:
    """Return texts up to their first zero byte, as the library gives them, and their bytes."""
    zeros = np.flatnonzero(values == 0)
    if not len(zeros):
        return values, nbytes
    ends = np.cumsum(nbytes)
    begins = ends - nbytes
    first = np.append(zeros, len(values))[np.searchsorted(zeros, begins)]
    kept = np.minimum(first, ends) - begins
    inside = np.arange(len(values)) < np.repeat(begins + kept, nbytes)
    return values[inside], kept


class _Foreign:
    """Chunks of descriptors with filters that only the library knows.

    `table` is that of `grids.chunk_table`, `block` the descriptors per chunk, `width` the bytes of
    each, and `plist` the dataset's ``h5py.h5p.PropDCID``.
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
