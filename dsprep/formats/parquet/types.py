"""Arrow's types as fields, and its arrays as columns, without a change of any bit.

=============================  ================================================================
Arrow                          field
=============================  ================================================================
integers, floats, bool         the same; float16 too
timestamp, date                datetime64 of the same unit (days, for date32)
time, duration                 timedelta64 of the same unit
fixed_size_binary(n)           void of n bytes
binary, string                 `bytes`, `str`; also large ones and views
fixed_size_list                a fixed axis
list, large_list               the axis that varies, of any of those with a width
dictionary                     as its values
struct                         a field for each member
list of structs, map           a field for each member (``key``, ``value``), as of lists
list of strings, or of lists   two fields: the strings back to back (as `bytes`), or the items;
                               and the length of each, called as it is with ``.lengths`` behind
fixed_shape_tensor             its shape
other extension types          as what they are stored in
=============================  ================================================================

Decimals, intervals, unions and what is nested more deeply have no field. Null is not a value of any
field.

Source: https://arrow.apache.org/docs/format/Columnar.html
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import Array, Column, DType, Field, Ints, Kind, Ragged
from dsprep.errors import FormatError, UnsupportedError
from dsprep.formats.fields import LENGTHS, lengths_field
from dsprep.formats.parquet.guard import arrow

_SIMPLE = {
    "bool": "bool",
    **{f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "halffloat": "float16",
    "float": "float32",
    "double": "float64",
}
_TENSOR = "arrow.fixed_shape_tensor"


@dataclass(frozen=True)
class Leaf:
    """A column without members, or a part of one whose items have parts.

    Attributes
    ----------
    path
        Its name, after those of the structs around it.
    field
        What its samples are; None: none of dsprep's kinds, and `reason` says so.
    flat
        Whether it has one value a row: of these the footer counts the nulls.
    inner
        The names of the structs' members that lead from the items of its lists to it.
    form
        What it is of the column: its values; or the strings or lists in its lists, back to back, or
        their lengths. ``"null"``: it has no type, and no values.
    """

    path: tuple[str, ...]
    field: Field | None
    reason: str = ""
    flat: bool = True
    inner: tuple[str, ...] = ()
    form: Literal["values", "joined", "lengths", "null"] = "values"

    @property
    def name(self) -> str:
        """The names that lead to it, joined by dots."""
        name = ".".join((*self.path, *self.inner))
        return name + LENGTHS if self.form == "lengths" else name

    @property
    def column(self) -> str:
        """The name of the column in the file, or what those of its parts begin with."""
        return ".".join(self.path)


def leaves(schema: Any) -> Iterator[Leaf]:
    """Yield the columns of a schema of Arrow's, in order."""
    for f in schema:
        yield from _leaves(f, ())


def _leaves(f: Any, above: tuple[str, ...]) -> Iterator[Leaf]:
    path, of = (*above, f.name), stored(f.type)
    if arrow().types.is_struct(of):
        for i in range(of.num_fields):
            yield from _leaves(of.field(i), path)
        return
    name = ".".join(path)
    if arrow().types.is_null(of):
        yield Leaf(path, Field.opaque(name), form="null")
        return
    try:
        field, reason = _field(name, f), ""
    except UnsupportedError as error:
        field, reason = None, error.what
    if field is not None:
        yield Leaf(path, field, flat=not _is_list(of))
    elif _is_list(of) and _extension(f) != _TENSOR:
        yield from _items(path, (), of.value_type)
    elif arrow().types.is_map(of):
        for key, inside in (("key", of.key_type), ("value", of.item_type)):
            yield from _items(path, (key,), inside)
    else:
        yield Leaf(path, None, reason)


def _items(path: tuple[str, ...], inner: tuple[str, ...], of: Any) -> Iterator[Leaf]:
    """Yield the parts of items of lists."""
    of, name = stored(of), ".".join((*path, *inner))
    if arrow().types.is_struct(of):
        for i in range(of.num_fields):
            yield from _items(path, (*inner, of.field(i).name), of.field(i).type)
        return
    joined = None
    try:
        field = _field(name, arrow().field("x", of))
        if field.kind == "array" and not field.ragged:
            values = Field(name, field.dtype, (None, *field.inner), attrs=field.attrs)
            yield Leaf(path, values, flat=False, inner=inner)
            return
        joined = Field.opaque(name) if field.kind != "array" else field
    except UnsupportedError as error:
        yield Leaf(path, None, f"in its lists, {error.what}", flat=False, inner=inner)
        return
    yield Leaf(path, joined, flat=False, inner=inner, form="joined")
    yield Leaf(path, lengths_field(name), flat=False, inner=inner, form="lengths")


def _field(name: str, f: Any) -> Field:
    pa, of = arrow(), stored(f.type)
    attrs = {}
    shape: list[int | None] = []
    known = _shape(f)
    if known is not None:
        shape = list(known)
        while _is_list(of):
            of = stored(of.value_type)
    while _is_list(of):
        if not pa.types.is_fixed_size_list(of) and shape:
            raise UnsupportedError("lists in lists have no fixed shape")
        shape.append(of.list_size if pa.types.is_fixed_size_list(of) else None)
        of = stored(of.value_type)
    if _is_text(of):
        if shape:
            raise UnsupportedError(f"lists of {of} are not a field")
        text = pa.types.is_string(of) or pa.types.is_large_string(of) or str(of) == "string_view"
        return Field.opaque(name, "str" if text else "bytes")
    if pa.types.is_timestamp(of) and of.tz is not None:
        attrs = {"timezone": of.tz}
    return Field(name, dtype_of(of), tuple(shape), attrs=attrs)


def stored(of: Any) -> Any:
    """Return the type in which values of an extension type, or a dictionary, are stored."""
    while True:
        if isinstance(of, arrow().BaseExtensionType):
            of = of.storage_type
        elif arrow().types.is_dictionary(of):
            of = of.value_type
        else:
            return of


def _shape(f: Any) -> tuple[int, ...] | None:
    """Return the shape of tensors."""
    if _extension(f) != _TENSOR or not isinstance(f.type, arrow().BaseExtensionType):
        return None
    order = f.type.permutation
    if order is not None and list(order) != sorted(order):
        raise UnsupportedError("the axes of its tensors are permuted")
    return tuple(f.type.shape)


def _extension(f: Any) -> str:
    """Return the name of the extension type of a field of Arrow's, known to it or not."""
    if isinstance(f.type, arrow().BaseExtensionType):
        return str(f.type.extension_name)
    return str((f.metadata or {}).get(b"ARROW:extension:name", b"").decode("utf-8", "replace"))


def _is_list(of: Any) -> bool:
    types = arrow().types
    return bool(types.is_list(of) or types.is_large_list(of) or types.is_fixed_size_list(of))


def _is_text(of: Any) -> bool:
    types = arrow().types
    plain = types.is_binary(of) or types.is_string(of)
    large = types.is_large_binary(of) or types.is_large_string(of)
    return bool(plain or large) or str(of) in ("binary_view", "string_view")


def dtype_of(of: Any) -> DType:
    """Return the dtype of a type of fixed width.

    Raises
    ------
    UnsupportedError
        If numpy has none with the same values.
    """
    types, name = arrow().types, str(of)
    if name in _SIMPLE:
        return np.dtype(_SIMPLE[name])
    if types.is_timestamp(of):
        return np.dtype(f"<M8[{of.unit}]")
    if types.is_date(of):
        return np.dtype("<M8[D]" if types.is_date32(of) else "<M8[ms]")
    if types.is_time(of) or types.is_duration(of):
        return np.dtype(f"<m8[{of.unit}]")
    if types.is_fixed_size_binary(of) and of.byte_width:
        return np.dtype(f"V{of.byte_width}")
    raise UnsupportedError(f"values of type {name[:80]} are not a field")


# --- arrays ----------------------------------------------------------------------------------


def member(array: Any, path: tuple[str, ...], where: object) -> Any:
    """Return a column of a struct in a struct."""
    for name in path:
        _need_values(array, where)
        array = _plain(array).field(name)
    return array


def column(array: Any, leaf: Leaf, where: object) -> Column:
    """Return the values of consecutive samples, perhaps a view of Arrow's memory.

    Parameters
    ----------
    array
        An array of Arrow's: of the column that the first name of the leaf's path leads to.
    leaf
        What of it, a field.
    where
        The file, row group and column, for messages.

    Raises
    ------
    FormatError
        If there are nulls, or lists do not have the shape of the field.
    """
    field = leaf.field
    assert field is not None  # see the parameter
    array = _plain(member(array, leaf.path[1:], where))
    _need_values(array, where)
    if field.kind != "array" and leaf.form == "values":
        return _text(array, field.kind)
    if not field.ragged:
        return _fixed(array, field.inner, field.dtype, where)
    offsets, items = _lists(array)
    items = _plain(member(items, leaf.inner, where))
    _need_values(items, where)
    if leaf.form == "values":
        return Ragged(_fixed(items, field.inner, field.dtype, where), offsets)
    if _is_text(items.type):
        text = _text(items, "bytes")
        values, ends = text.values, text.offsets
    else:
        ends, inside = _lists(items)
        of = field if leaf.form == "joined" else None
        values = np.empty(0) if of is None else _fixed(inside, of.inner, of.dtype, where)
    if leaf.form == "lengths":
        return Ragged(np.diff(ends), offsets)
    return Ragged(values, ends[offsets], field.kind)


def complete(array: Any, leaf: Leaf) -> NDArray[np.bool_]:
    """Return which rows of the column of a leaf have a value, and no null in it."""
    return _complete(array, leaf.path[1:], leaf.inner)


def _complete(array: Any, path: tuple[str, ...], inner: tuple[str, ...] = ()) -> NDArray[np.bool_]:
    if not isinstance(array, arrow().DictionaryArray):  # of which the values may be large
        array = _plain(array)
    valid: NDArray[np.bool_] = np.asarray(array.is_valid().to_numpy(zero_copy_only=False), np.bool_)
    if path:
        return valid & _complete(array.field(path[0]), path[1:], inner)
    if not _is_list(array.type) and not arrow().types.is_map(array.type):
        return valid
    offsets, items = _lists(array)
    missing = np.concatenate([[0], np.cumsum(~_complete(items, inner))])
    valid &= missing[offsets[1:]] == missing[offsets[:-1]]
    return valid


def _need_values(array: Any, where: object) -> None:
    if array.null_count:
        raise FormatError(
            "there are nulls, which are not values",
            where=where,
            expected="a value in each row",
            found=f"{array.null_count:,} nulls",
            fix="--nulls drop-rows leaves such rows out; or name the other fields by --field",
        )


def _plain(array: Any) -> Any:
    """Return what extension arrays and dictionaries stand for."""
    pa = arrow()
    while True:
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        elif isinstance(array, pa.DictionaryArray):
            array = array.dictionary_decode()
        elif str(array.type) in ("binary_view", "string_view"):
            array = array.cast(f"large_{array.type}".removesuffix("_view"))
        else:
            return array


def _offsets(array: Any) -> Ints:
    """Return the offsets of lists or strings, int64 of shape ``(n + 1,)``."""
    types, of = arrow().types, array.type
    large = types.is_large_list(of) or types.is_large_binary(of) or types.is_large_string(of)
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.zeros(len(array) + 1, np.int64)
    every = np.frombuffer(buffer, np.int64 if large else np.int32)
    return every[array.offset : array.offset + len(array) + 1].astype(np.int64)


def _lists(array: Any) -> tuple[Ints, Any]:
    """Return the offsets of lists, from 0 on, and their items."""
    pa = arrow()
    if pa.types.is_fixed_size_list(array.type):
        each = array.type.list_size
        items = array.values.slice(array.offset * each, len(array) * each)
        return np.arange(len(array) + 1, dtype=np.int64) * each, items
    offsets = _offsets(array)
    if pa.types.is_map(array.type):  # structs of a key and a value
        items = pa.StructArray.from_arrays([array.keys, array.items], ["key", "value"])
    else:
        items = array.values
    return offsets - offsets[0], items.slice(offsets[0], offsets[-1] - offsets[0])


def _text(array: Any, kind: Kind) -> Ragged:
    offsets, data = _offsets(array), array.buffers()[2]
    values = np.frombuffer(b"" if data is None else data, np.uint8)
    return Ragged(values[offsets[0] : offsets[-1]], offsets - offsets[0], kind)


def _fixed(array: Any, inner: tuple[int, ...], dtype: DType, where: object) -> Array:
    """Return arrays of one shape."""
    count = len(array)
    for axis in range(len(inner)):
        array = _plain(array)
        if not _is_list(array.type):  # a tensor, of which the storage is one list
            break
        _need_values(array, where)
        offsets, array = _lists(array)
        per = math.prod(inner) if axis == 0 and not _is_list(_plain(array).type) else inner[axis]
        if bool((np.diff(offsets) != per).any()):
            raise FormatError(
                "the lists do not have the shape of the column",
                where=where,
                expected=f"{per} items in each list of axis {axis}",
                found=f"{int(np.diff(offsets).min())} to {int(np.diff(offsets).max())}",
            )
    array = _plain(array)
    _need_values(array, where)
    return _values(array, dtype).reshape(count, *inner)


def _values(array: Any, dtype: DType) -> Array:
    if dtype.kind == "b":
        return np.asarray(array.to_numpy(zero_copy_only=False), np.bool_)
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.empty(0, dtype)
    width = array.type.byte_width if dtype.kind == "V" else array.type.bit_width // 8
    raw = np.dtype(f"V{width}") if dtype.kind == "V" else np.dtype(f"<i{width}")
    values = np.frombuffer(buffer, raw, len(array), array.offset * width)
    if dtype.kind in "mM" and width < dtype.itemsize:
        values = values.astype("<i8")
    return values.view(dtype)
