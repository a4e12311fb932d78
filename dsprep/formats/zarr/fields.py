"""The fields of a store, each with the arrays that hold it.

`ArrayField`
    One array; its first axis counts samples, or it is the value of the only sample.
`RaggedField`
    An array of values and the index tables that say whose rows are whose: what dsprep writes as a
    group of ``values``, ``first`` and ``count``, or what `dsprep.formats.ragged` finds.
`ElementsField`
    One array whose elements vary in length: strings or byte strings.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

import numpy as np
from typing_extensions import override

from dsprep.core.filters import unpack
from dsprep.core.memory import free_memory
from dsprep.core.schema import DIMENSIONS, Field, Ints, Kind, Ragged
from dsprep.core.schema import Column as Values
from dsprep.errors import FormatError
from dsprep.formats.index_tables import Route
from dsprep.formats.located import LazyField
from dsprep.formats.zarr.array import StoredArray
from dsprep.formats.zarr.attributes import DTYPE, KIND, ROWS, from_json, restore, view
from dsprep.formats.zarr.chunks import MAX_CHUNK
from dsprep.formats.zarr.metadata import MAX_ROW, NoField
from dsprep.layout.describe import Chunking, FieldStorage, of_array
from dsprep.layout.laws import Explicit
from dsprep.layout.model import Column

VLEN = {"str": "vlen-utf8", "bytes": "vlen-bytes"}
"""The codecs of elements that vary in length, by kind of field."""

MIN_ELEMENTS_NBYTES = 64 << 20
"""Bytes that elements of varying length in one chunk may always take, else a quarter of what is
free."""


def declared(array: StoredArray) -> tuple[Any, tuple[int, ...]]:
    """Return dtype and shape of an array, as its attribute says where it is a stand-in."""
    meta = array.meta
    text = meta.attrs.get(DTYPE)
    if text is None:
        return meta.dtype, meta.shape
    return restore(meta.dtype, meta.shape, text, array.where)


class ArrayField(LazyField):
    """A field that is one array: its first axis counts samples, or it is a `single` sample.

    Attributes
    ----------
    field
        Its type; the name is its path in the store.
    count
        Samples.
    nbytes
        Payload bytes of all samples, as far as the metadata tell.
    arrays
        The arrays that hold it, that of the values first.
    """

    arrays: tuple[StoredArray, ...]
    single = False

    def __init__(self, name: str, array: StoredArray, single: bool = False) -> None:
        dtype, shape = declared(array)
        self.single = single or not shape
        inner = shape if self.single else shape[1:]
        attrs = from_json(array.meta.attrs)
        if DIMENSIONS in attrs:  # those of a stand-in are more
            attrs[DIMENSIONS] = attrs[DIMENSIONS][: len(shape)]
        self.field = Field(name, dtype, inner, "array", attrs)
        self.count = 1 if self.single else shape[0]
        self.nbytes = self.count * self.field.row_nbytes
        self.arrays = (array,)
        self._lines = (array.meta.shape or (1,))[0] if self.single else 1
        if self.single and self.nbytes > MAX_ROW:
            raise FormatError(
                "one sample is impossibly large",
                where=array.where,
                found=f"{self.nbytes} bytes",
                fix="--sample-axis first takes the first axis as samples",
            )

    def rows(self, start: int, stop: int) -> tuple[int, int]:
        """Return the range of rows of the first array that samples need."""
        return start * self._lines, stop * self._lines

    @override
    def locate(self) -> Column:
        return Column(self.arrays[0].grid, self._lines) if self.nbytes else Column(None)

    @override
    def read(self, start: int, stop: int) -> Values:
        field, ranges = self.field, [self.rows(start, stop)]
        stored = self.arrays[0].by_library(ranges)
        return view(stored, field.dtype, (stop - start, *field.inner))

    @override
    def sizes(self, start: int, stop: int) -> Ints | None:
        return np.full(stop - start, self.field.row_nbytes, np.int64)

    @override
    def resident_nbytes(self) -> int:
        return self.arrays[0].resident_nbytes()

    @override
    def storage(self) -> FieldStorage:
        meta, tables = self.arrays[0].meta, [a.meta.path for a in self.arrays[1:]]
        array = Chunking(
            shape=meta.shape,
            itemsize=meta.dtype.itemsize,
            chunk=meta.chunk,
            file=meta.grid,
            codecs=tuple(c for c in meta.codecs if c not in ("bytes", "sharding_indexed")),
            plain=meta.raw and bool(meta.shape),
        )
        stored = sum(a.store.nbytes(a.meta.path) for a in self.arrays)
        if meta.vlen:
            access = f"a chunk of {meta.chunk[0]:,} samples is read and decoded for one sample"
            words = array.words("samples")
            return FieldStorage(
                storage=words, codecs=array.codecs, stored_nbytes=stored, access=access, reads=1
            )
        rows = self.nbytes / max(1, self.count) / max(1, array.row_nbytes)
        ragged = bool(tables)
        return of_array(array, rows, self.count, ragged=ragged, stored_nbytes=stored, tables=tables)


class RaggedField(ArrayField):
    """A ragged field kept as values and index tables."""

    def __init__(
        self, name: str, values: StoredArray, route: Route, attrs: Mapping[str, Any]
    ) -> None:
        self.route = route
        numbers = (array for table in route.tables for array in (table.first, table.count))
        tables = dict.fromkeys(array for array in numbers if isinstance(array, StoredArray))
        self.arrays = (values, *tables)
        kind: Kind = attrs.get(KIND, "array")
        dtype, shape = declared(values)
        if kind != "array" and not (
            kind in ("bytes", "str") and (dtype, len(shape)) == (np.uint8, 1)
        ):
            raise FormatError(
                f"attribute {KIND} does not fit the values",
                where=values.where,
                expected="array, or bytes or str of uint8 values",
                found=f"{kind!r} of {dtype}{list(shape)}",
            )
        self.field = Field(name, dtype, (None, *shape[1:]), kind, from_json(attrs))
        self.count = route.tables[0].rows
        self._total = values.count
        rows = attrs.get(ROWS, self._total)
        known = isinstance(rows, int) and 0 <= rows <= self._total
        self.nbytes = (rows if known else self._total) * self.field.row_nbytes

    @cached_property
    def _table(self) -> tuple[Ints, Ints]:
        """The first row of each sample, and how many rows it has."""
        first, ends = self.route.spans(self._total)
        return first, ends - first

    @override
    def rows(self, start: int, stop: int) -> tuple[int, int]:
        if start == stop:
            return 0, 0
        first, count = (each[start:stop] for each in self._table)
        return int(first[0]), int((first + count).max())

    @override
    def locate(self) -> Column:
        first, count = self._table
        grid = self.arrays[0].grid if self.nbytes else None
        return Column(grid, 1, Explicit(first), Explicit(count))

    @override
    def read(self, start: int, stop: int) -> Values:
        first, count = (each[start:stop] for each in self._table)
        ranges = zip(first.tolist(), (first + count).tolist(), strict=True)
        stored = self.arrays[0].by_library([*ranges])
        shape = (int(count.sum()), *self.field.inner)
        return Ragged.from_lengths(view(stored, self.field.dtype, shape), count, self.field.kind)

    @override
    def sizes(self, start: int, stop: int) -> Ints | None:
        sizes: Ints = self._table[1][start:stop] * self.field.row_nbytes
        return sizes


class ElementsField(ArrayField):
    """A field of elements that vary in length."""

    def __init__(self, name: str, array: StoredArray) -> None:
        meta = array.meta
        codecs = meta.codecs
        if len(meta.shape) != 1 or codecs[0] != VLEN[meta.kind] or len(codecs) > 2:
            raise NoField(
                f"strings along {len(meta.shape)} axes, by {', '.join(codecs)}, are not read",
                where=array.where,
                expected=f"one axis, {VLEN[meta.kind]} and at most one compressor",
            )
        self.field = Field(name, meta.dtype, (None,), meta.kind, from_json(meta.attrs))
        self.count, self.nbytes, self.arrays = meta.shape[0], 0, (array,)
        self._lines = 1

    @override
    def locate(self) -> Column:
        return Column(self.arrays[0].grid)

    @override
    def read(self, start: int, stop: int) -> Values:
        rows = self.arrays[0].meta.grid[0]
        items: list[Any] = []
        for i in range(start // rows, -(-stop // rows) if stop > start else 0):
            chunk = self.arrays[0].kept(i, partial(self.chunk, i))
            items += chunk[max(0, start - i * rows) : stop - i * rows]
        return Ragged.pack(items, self.field)

    def chunk(self, i: int) -> list[Any]:
        """Return the elements in chunk `i`.

        The number of elements that it claims to hold is compared with the metadata first: the
        codec takes memory for as many.
        """
        array, meta, text = self.arrays[0], self.arrays[0].meta, self.field.kind == "str"
        empty: Any = "" if text else b""
        rows, where = meta.grid[0], f"{array.where}, chunk {i}"
        import numcodecs

        with array.reading(i * rows, min((i + 1) * rows, self.count)):
            data: Any = array.store.document(meta.key(i), MAX_CHUNK)
            if data is None:
                missing = array.element((i * rows,)).item()
                return [missing if isinstance(missing, type(empty)) else empty] * rows
            if len(meta.codecs) > 1:
                limit = max(MIN_ELEMENTS_NBYTES, free_memory() // 4)
                data = unpack(data, {"id": meta.codecs[1]}, limit, where)
            encoded = bytes(data)
            count = int.from_bytes(encoded[:4], "little")
            if count != rows:
                what = "the chunk holds another number of elements"
                raise FormatError(what, where=where, expected=rows, found=count)
            codec = numcodecs.VLenUTF8() if text else numcodecs.VLenBytes()
            return [empty if item is None else item for item in codec.decode(encoded)]

    @override
    def sizes(self, start: int, stop: int) -> Ints | None:
        return None
