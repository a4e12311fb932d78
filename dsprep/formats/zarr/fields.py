"""The fields of a store, each with the arrays that hold it.

`Reading`
    One array; its first axis counts samples, or it is the value of the only sample.
`Parts`
    An array of values and the index tables that say whose rows are whose: what dsprep writes as a
    group of ``values``, ``first`` and ``count``, or what `dsprep.formats.ragged` finds.
`Elements`
    One array whose elements vary in length: strings or byte strings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from dsprep.core.filters import unpack
from dsprep.core.memory import free_memory
from dsprep.core.schema import DIMENSIONS, Arena, Array, Column, Field, Ints, Kind, Ragged
from dsprep.errors import FormatError
from dsprep.formats.index_tables import Route, locate
from dsprep.formats.located import Unlocated
from dsprep.formats.zarr.array import StoredArray
from dsprep.formats.zarr.attributes import DTYPE, KIND, ROWS, from_json, restore, view
from dsprep.formats.zarr.chunks import MAX_CHUNK
from dsprep.formats.zarr.metadata import MAX_ROW, NoField
from dsprep.layout.describe import Chunking, FieldStorage, of_array
from dsprep.layout.laws import Explicit
from dsprep.layout.model import Column as Located
from dsprep.reading.columns import PendingRead

VLEN = {"str": "vlen-utf8", "bytes": "vlen-bytes"}
"""The codecs of elements that vary in length, by kind of field."""

MIN_ELEMENTS_NBYTES = 64 << 20
"""Bytes that elements of varying length in one chunk may always take, else a quarter of what is
free."""

_STEP = 1 << 20  # samples whose rows are looked up at a time


def declared(array: StoredArray) -> tuple[Any, tuple[int, ...]]:
    """Return dtype and shape of an array, as its attribute says where it is a stand-in."""
    meta = array.meta
    text = meta.attrs.get(DTYPE)
    if text is None:
        return meta.dtype, meta.shape
    return restore(meta.dtype, meta.shape, text, array.where)


class Reading:
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

    def begin(self, start: int, stop: int, arena: Arena | None) -> PendingRead:
        """Return what reading samples ``start <= i < stop`` needs, and what makes their column."""
        field = self.field
        first, count = (self._lines * np.array([n]) for n in (start, stop - start))
        rows = self.arrays[0].begin(first, count, arena, f"read.{field.name}")
        shape = (stop - start, *field.inner)
        return replace(rows, done=lambda stored: view(rows.done(stored), field.dtype, shape))

    def located(self, field: Field, count: int) -> Located:
        """Return where all samples are stored; see `base.Source.extents` and `locate.locate`.

        `field` is as the user asked for it, perhaps with a type for what is kept as bytes.
        """
        if not count or not field.row_nbytes:
            return Located(None)
        return self.arrays[0].column(self._lines)

    def sizes(self, start: int, stop: int) -> NDArray[np.int64] | None:
        """Return the payload bytes of each sample, or None where that takes reading them."""
        return np.full(stop - start, self.field.row_nbytes, np.int64)

    def storage(self) -> FieldStorage:
        """Return how the field is stored."""
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


class Parts(Reading):
    """A ragged field kept as values and index tables.

    That the samples are a partition of the values is checked with each read, of the samples read
    and the one behind them, so that reading all samples checks all of it.
    """

    def __init__(
        self, name: str, values: StoredArray, route: Route, attrs: Mapping[str, Any]
    ) -> None:
        self._values, self.route = values, route
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

    def rows(self, start: int, stop: int) -> tuple[Ints, Ints]:
        """Return the first row of each sample, and how many rows it has.

        Raise `FormatError` if they do not follow one another, or leave the values.
        """
        if start == stop:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        behind = min(stop + 1, self.count)
        last = self.route.tables[-1]
        if last is self.route.tables[0]:
            first, ends = last.read(start, behind, self._total, gaps=True)
        else:
            spans = locate(self.route.tables, self._total, start, behind)
            first = spans.first
            ends = first + np.diff(spans.offsets)
        early = start == 0 and bool(first[0] % last.capacity if last.capacity else first[0])
        if early or (behind == self.count and not last.capacity and ends[-1] != self._total):
            raise FormatError(
                f"{' and '.join(last.paths)} do not divide the values among the samples",
                where=self._values.where,
                expected=f"consecutive rows from 0 to {self._total}",
                found=f"rows {first[0]} to {ends[-1]} for samples {start} to {behind - 1}",
            )
        return first[: stop - start], (ends - first)[: stop - start]

    @override
    def begin(self, start: int, stop: int, arena: Arena | None) -> PendingRead:
        field = self.field
        first, count = self.rows(start, stop)
        rows = self._values.begin(first, count, arena, f"read.{field.name}")
        offsets = np.concatenate([[0], np.cumsum(count)])

        def column(stored: Array) -> Ragged:
            shape = (int(offsets[-1]), *field.inner)
            return Ragged(view(rows.done(stored), field.dtype, shape), offsets, field.kind)

        return replace(rows, done=column)

    @override
    def located(self, field: Field, count: int) -> Located:
        firsts, counts = np.zeros((2, self.count), np.int64)
        for start in range(0, self.count, _STEP):
            some = slice(start, min(start + _STEP, self.count))
            firsts[some], counts[some] = self.rows(some.start, some.stop)
        grid = self._values.column().grid if self.nbytes else None
        if (field.dtype, field.shape) != (self.field.dtype, self.field.shape):
            raise Unlocated("only after a convert have bytes of a type that was asked for offsets")
        return Located(grid, 1, Explicit(firsts), Explicit(counts))

    @override
    def sizes(self, start: int, stop: int) -> NDArray[np.int64] | None:
        sizes: Ints = self.rows(start, stop)[1] * self.field.row_nbytes
        return sizes


class Elements(Reading):
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

    @override
    def begin(self, start: int, stop: int, arena: Arena | None) -> PendingRead:
        return PendingRead(0, [], lambda _: self._read(start, stop))

    @override
    def located(self, field: Field, count: int) -> Located:
        raise Unlocated("only zarr reads elements of varying length")

    def _read(self, start: int, stop: int) -> Column:
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

    def sizes(self, start: int, stop: int) -> NDArray[np.int64] | None:
        """Return None: reading the elements is the only way to tell."""
        return None
