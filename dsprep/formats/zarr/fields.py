"""The fields of a store, each with the arrays that hold it.

`ArrayField`
    One array; its first axis counts samples, or it is the value of the only sample.
`ragged_field`
    An array of values and the index tables that say whose rows are whose: what dsprep writes as a
    group of ``values``, ``first`` and ``count``, or what `dsprep.formats.ragged` finds.
`ElementsField`
    One array whose elements vary in length, strings or byte strings, which only zarr reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from typing_extensions import override

from dsprep.core.schema import DIMENSIONS, Array, Attrs, Field, Ragged
from dsprep.core.schema import Column as Values
from dsprep.errors import FormatError
from dsprep.formats.index_tables import Route
from dsprep.formats.located import RowsField
from dsprep.formats.ragged import RaggedField
from dsprep.formats.zarr.array import StoredArray
from dsprep.formats.zarr.attributes import DTYPE, restore, view
from dsprep.formats.zarr.metadata import MAX_ROW
from dsprep.layout.describe import Chunking, FieldStorage, of_array
from dsprep.layout.laws import Explicit
from dsprep.layout.model import Column


def declared(array: StoredArray) -> tuple[Any, tuple[int, ...]]:
    """Return dtype and shape of an array, as its attribute says where it is a stand-in."""
    meta = array.meta
    text = meta.attrs.get(DTYPE)
    if text is None:
        return meta.dtype, meta.shape
    return restore(meta.dtype, meta.shape, text, array.where)


class ArrayField(RowsField):
    """A field that is one array: its first axis counts samples, or it is a `single` sample.

    Attributes
    ----------
    array
        The array.
    field
        Its type; the name is its path in the store.
    count
        Samples.
    """

    def __init__(
        self, name: str, array: StoredArray, single: bool = False, attrs: Attrs | None = None
    ) -> None:
        dtype, shape = declared(array)
        self.array, self.single, attrs = array, single or not shape, dict(attrs or {})
        if DIMENSIONS in attrs:  # those of a stand-in are more
            attrs[DIMENSIONS] = attrs[DIMENSIONS][: len(shape)]
        self.field = Field(name, dtype, shape if self.single else shape[1:], "array", attrs)
        self.count = 1 if self.single else shape[0]
        self._lines = (array.meta.shape or (1,))[0] if self.single else 1
        if self.single and self.field.row_nbytes > MAX_ROW:
            raise FormatError(
                "one sample is impossibly large",
                where=array.where,
                found=f"{self.field.row_nbytes} bytes",
                fix="--sample-axis first takes the first axis as samples",
            )

    @override
    def locate(self) -> Column:
        empty = not self.count * self.field.row_nbytes
        return Column(None) if empty else Column(self.array.grid, self._lines)

    @override
    def rows(self, ranges: Iterable[tuple[int, int]]) -> Array:
        lines = self._lines
        stored = self.array.by_library([(low * lines, high * lines) for low, high in ranges])
        return view(stored, self.field.dtype, (len(stored) // max(1, lines), *self.field.inner))

    @override
    def resident_nbytes(self) -> int:
        return self.array.resident_nbytes()

    @override
    def storage_of(self, count: int, nbytes: float, tables: Sequence[str] = ()) -> FieldStorage:
        meta = self.array.meta
        form = Chunking(
            shape=meta.shape,
            itemsize=meta.dtype.itemsize,
            chunk=meta.chunk,
            file=meta.grid,
            codecs=tuple(c for c in meta.codecs if c not in ("bytes", "sharding_indexed")),
            plain=meta.raw,
        )
        stored = int(self.array.files[2].clip(0).sum())
        if meta.vlen:
            access = f"a chunk of {meta.chunk[0]:,} samples is read and decoded for one sample"
            words = form.words("samples")
            return FieldStorage(
                storage=words, codecs=form.codecs, stored_nbytes=stored, access=access, reads=1
            )
        rows = nbytes / max(1, form.row_nbytes)
        return of_array(form, rows, count, ragged=bool(tables), stored_nbytes=stored, tables=tables)


def ragged_field(name: str, array: StoredArray, route: Route, attrs: Attrs) -> RaggedField:
    """Return the field of samples that have rows of an array."""
    values = ArrayField(name, array)
    f = values.field
    if values.single:
        raise FormatError("the values of a ragged field have no axis", where=array.where)
    field = replace(f, shape=(None, *f.shape), kind=route.kind, attrs=attrs)
    return RaggedField(values, route, field, lambda a, b: (Explicit(a), Explicit(b - a)))


class ElementsField(ArrayField):
    """A field of elements that vary in length."""

    def __init__(self, name: str, array: StoredArray, single: bool, attrs: Attrs) -> None:
        self.field = Field(name, array.meta.dtype, (None,), array.meta.kind, attrs)
        self.array, self.single, self.count, self._lines = array, single, array.count, 1

    @override
    def read(self, start: int, stop: int) -> Values:
        items = self.array.by_library([(start, stop)]).tolist()
        empty = "" if self.field.kind == "str" else b""
        return Ragged.pack([item or empty for item in items], self.field)


AnyField: TypeAlias = ArrayField | RaggedField


def arrays_of(field: AnyField) -> tuple[StoredArray, ...]:
    """Return the arrays that hold a field, that of the values first."""
    if isinstance(field, ArrayField):
        return (field.array,)
    values: Any = field.values
    numbers: list[Any] = [n for t in field.route.tables for n in (t.first, t.count)]
    return tuple(dict.fromkeys([values.array, *numbers]))
