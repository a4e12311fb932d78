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
fixed_shape_tensor             its shape
ArrayXD (Hugging Face)         its shape
other extension types          as what they are stored in
=============================  ================================================================

Decimals, intervals, maps, unions, lists of lists and lists of strings have no field. Null is no
value of any field.

Source: https://arrow.apache.org/docs/format/Columnar.html
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsprep.core.schema import Array, Column, DType, Field, Ints, Ragged
from dsprep.errors import FormatError, UnsupportedError
from dsprep.formats.parquet.guard import arrow

_SIMPLE = {
    "bool": "bool",
    **{f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "halffloat": "float16",
    "float": "float32",
    "double": "float64",
}
_TENSOR = "arrow.fixed_shape_tensor"
_ARRAY_XD = "datasets.features.features.Array"


@dataclass(frozen=True)
class Leaf:
    """A column without members.

    Attributes
    ----------
    path
        Its name, after those of the structs around it.
    field
        What its samples are; None: none of dsprep's kinds, and `why` says so.
    flat
        Whether it has one value a row: of these the footer counts the nulls.
    """

    path: tuple[str, ...]
    field: Field | None
    why: str = ""
    flat: bool = True

    @property
    def name(self) -> str:
        """The names in its path, joined by dots."""
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
    try:
        yield Leaf(path, _field(".".join(path), f), flat=not _is_list(of))
    except UnsupportedError as error:
        yield Leaf(path, None, error.what)


def _field(name: str, f: Any) -> Field:
    pa, of = arrow(), stored(f.type)
    attrs = {}
    shape: list[int | None] = []
    known = _shape(f)
    if known is not None:
        shape = list(known)
        of = _innermost(of)
    while _is_list(of):
        if not pa.types.is_fixed_size_list(of) and shape:
            raise UnsupportedError("lists in lists have no fixed shape")
        shape.append(of.list_size if pa.types.is_fixed_size_list(of) else None)
        of = stored(of.value_type)
    if _is_text(of):
        if shape:
            raise UnsupportedError(f"lists of {of} are not a field")
        text = pa.types.is_string(of) or pa.types.is_large_string(of) or _is(of, "string_view")
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


def _shape(f: Any) -> tuple[int | None, ...] | None:
    """Return the shape that an extension type gives, of which the first axis may vary."""
    metadata = f.metadata or {}
    own = isinstance(f.type, arrow().BaseExtensionType)
    name = f.type.extension_name if own else metadata.get(b"ARROW:extension:name", b"").decode()
    if name == _TENSOR and own:
        order = f.type.permutation
        if order is not None and list(order) != sorted(order):
            raise UnsupportedError("the axes of its tensors are permuted")
        return tuple(f.type.shape)
    if not name.startswith(_ARRAY_XD):
        return None
    try:
        found = f.type.shape if own else json.loads(metadata[b"ARROW:extension:metadata"])[0]
        shape = tuple(found)
    except (KeyError, ValueError, TypeError, IndexError, RecursionError) as error:
        raise UnsupportedError("its extension type gives no shape") from error
    depth = 0
    of = stored(f.type)
    while _is_list(of):
        depth, of = depth + 1, stored(of.value_type)
    good = all(type(n) is int and n >= 0 for n in shape[1:]) and depth == len(shape)
    if not good or not (shape[0] is None or (type(shape[0]) is int and shape[0] >= 0)):
        raise UnsupportedError("its extension type gives a shape that its lists do not have")
    return shape


def _innermost(of: Any) -> Any:
    while _is_list(of):
        of = stored(of.value_type)
    return of


def _is(of: Any, name: str) -> bool:
    return str(of) == name


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


def column(array: Any, field: Field, where: object) -> Column:
    """Return the values of consecutive samples, perhaps a view of Arrow's memory.

    Parameters
    ----------
    array
        An array of Arrow's, with a value for each sample.
    where
        The file, row group and column, for messages.

    Raises
    ------
    FormatError
        If there are nulls, or lists do not have the shape of the field.
    """
    array = _plain(array)
    _need_values(array, where)
    if field.kind != "array":
        return _text(array, field)
    if not field.ragged:
        return _fixed(array, field.inner, field.dtype, where)
    offsets, child = _lists(array)
    return Ragged(_fixed(child, field.inner, field.dtype, where), offsets)


def _need_values(array: Any, where: object) -> None:
    if array.null_count:
        raise nulls(array.null_count, where)


def nulls(count: int, where: object) -> FormatError:
    """Return the error for nulls."""
    return FormatError(
        "there are nulls, which are no values",
        where=where,
        expected="a value in each row",
        found=f"{count:,} nulls",
        fix="name the fields without nulls by --field, or fill them where the file is written",
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
        return np.zeros(1, np.int64)
    every = np.frombuffer(buffer, np.int64 if large else np.int32)
    return every[array.offset : array.offset + len(array) + 1].astype(np.int64)


def _lists(array: Any) -> tuple[Ints, Any]:
    """Return the offsets of lists, from 0 on, and their items."""
    if arrow().types.is_fixed_size_list(array.type):
        return np.arange(len(array) + 1, dtype=np.int64) * array.type.list_size, array.flatten()
    offsets = _offsets(array)
    return offsets - offsets[0], array.values.slice(offsets[0], offsets[-1] - offsets[0])


def _text(array: Any, field: Field) -> Ragged:
    offsets, data = _offsets(array), array.buffers()[2]
    values = np.frombuffer(b"" if data is None else data, np.uint8)
    return Ragged(values[offsets[0] : offsets[-1]], offsets - offsets[0], field.kind)


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
    found = np.frombuffer(buffer, raw, len(array), array.offset * width)
    if dtype.kind in "mM" and width < dtype.itemsize:
        found = found.astype("<i8")
    return found.view(dtype)
