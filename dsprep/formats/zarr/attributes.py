"""Attributes and dtypes as Zarr keeps them: JSON, and stand-ins for dtypes that it lacks.

Of attributes text, booleans, numbers and lists of them are kept; what is not finite as zarr-python
writes it, which JSON lacks. Arrays become lists, bytes that are UTF-8 become text; everything else
is left out, and `to_json` says so. Names that begin with `OWN` are dsprep's and never show as
attributes of the data. Names of axes and fill values are kept where xarray looks for them:

===============  ============================================  ====================================
attribute        v2                                            v3
===============  ============================================  ====================================
`DIMENSIONS`     itself                                        ``dimension_names``
``_FillValue``   ``fill_value`` beside `DIMENSIONS`            itself; of floats base64 of a float64
===============  ============================================  ====================================

Every dtype has a stand-in that Zarr specifies, holding the same bits.

Zarr v3 specifies booleans, integers, floats and complex numbers; v2 also fixed-length strings and
times. Anything else is stored as unsigned integers, with a trailing axis where one element takes
several, and the array's attribute `DTYPE` says what it stands for (`schema.encode_dtype`):

=====================  ============================  ==========
dtype                  stored as                     trailing axis
=====================  ============================  ==========
bfloat16, float8       uint16, uint8                 none
datetime64, timedelta  int64                         none
``S7``                 uint8                         7
``U3``                 uint32 (code points)          3
structured, the rest   uint8                         itemsize
=====================  ============================  ==========

Big-endian numbers are stored as they are: v2 names the order in the dtype, v3 in the codec.
"""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import numpy as np

from dsprep.core.schema import (
    DIMENSIONS,
    Array,
    Attrs,
    DType,
    decode_dtype,
    encode_dtype,
    is_extension,
)
from dsprep.errors import DsprepError, FormatError, SchemaError, UnsupportedError

OWN = "dsprep_"
KIND = "dsprep_kind"
"""The attribute of the group of a ragged field that says its `schema.Field.kind`."""
FIELDS = "dsprep_fields"
"""The attribute of the root group that lists the field names in order."""
STATIC = "dsprep_static"
"""The attribute of the root group that lists the arrays of all samples, which are not fields."""

FILL = "_FillValue"
"""The attribute that is the missing value, by the CF conventions."""

CAPACITY = "dsprep_capacity"
"""The attribute of the group of a ragged field written in groups: rows of values kept for each
group of samples, which begin at its multiples; the rows that a group does not need are zeros."""
ROWS = "dsprep_rows"
"""With `CAPACITY`: how many rows of values all samples have together."""
DTYPE = "dsprep_dtype"
"""The array attribute that names the dtype for which the stored one stands in."""

V3_SPECIFIED = frozenset("?bBhHiIlLqQefdFD")
"""Type characters (`numpy.dtype.char`) of the core data types of v3."""


def to_json(attrs: Attrs, owner: str) -> tuple[dict[str, Any], list[str]]:
    """Return the attributes of `owner` (``field x``) as JSON, and what is lost, one clause each."""
    kept: dict[str, Any] = {}
    lost = []
    for name, value in attrs.items():
        if name.startswith(OWN) or name == DIMENSIONS:
            continue
        try:
            kept[name] = _plain(value)
        except ValueError:
            lost.append(f"attribute {name} of {owner}: JSON has no {type(value).__name__} of it")
    return kept, lost


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind not in "biufSU":
            raise ValueError(value)
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, bytes):
        value = value.decode("utf-8")  # UnicodeDecodeError is a ValueError
    if isinstance(value, str):
        value.encode("utf-8")  # lone surrogates have no JSON file
        return value
    if isinstance(value, bool | int | float):
        return value
    raise ValueError(value)


def from_json(attrs: Attrs) -> dict[str, Any]:
    """Return JSON attributes as `schema.Field` has them: lists as arrays, objects as JSON text."""
    return {str(k): _typed(v) for k, v in attrs.items() if not str(k).startswith(OWN)}


def name_axes_in(version: int, names: list[str], dtype: DType, attrs: dict[str, Any]) -> Any:
    """Return where names of axes and the fill value of an array stand, besides in its `attrs`."""
    fill = decode_fill(attrs.get(FILL), dtype)
    if version == 3:
        if isinstance(fill, np.floating):
            attrs[FILL] = base64.b64encode(struct.pack("<d", fill)).decode()
        return {"dimension_names": names}
    attrs[DIMENSIONS] = names
    if not isinstance(fill, np.generic):
        return {"fill_value": None}  # 0 would be a missing value
    del attrs[FILL]
    return {"fill_value": fill}


def decode_fill(value: Any, dtype: DType) -> Any:
    """Return a ``_FillValue`` as metadata spell it, of `dtype` where that fits."""
    try:
        if isinstance(value, str) and dtype.kind == "f" and value.endswith("="):
            data = base64.b64decode(value, validate=True)
            value = np.frombuffer(data, f"<f{len(data)}")[0].item()
        fits = dtype.kind in "iuf" and isinstance(value, str | int | float)
        return dtype.newbyteorder("=").type(value) if fits else value
    except (ValueError, TypeError, OverflowError):
        return value


def _typed(value: Any) -> Any:
    if isinstance(value, str | bool | int | float | np.generic | np.ndarray):
        return value
    if isinstance(value, list) and value:
        numbers = all(isinstance(v, int | float) for v in value)
        if numbers or all(isinstance(v, str) for v in value):
            array = np.asarray(value)
            if array.dtype.kind != "O":  # integers beyond 64 bits
                return array
    return json.dumps(value)


# --- dtypes ----------------------------------------------------------------------------------


def carrier(dtype: DType, zarr_format: int) -> tuple[DType, tuple[int, ...]]:
    """Return the dtype by which `dtype` is stored, and the sizes of axes added behind the field's.

    Where it is another one, `DTYPE` has to say what it means. Raise `UnsupportedError` if nothing
    could say so.
    """
    if dtype.subdtype is not None:
        raise UnsupportedError(
            f"zarr holds no sub-array dtype {dtype}", fix="give the sub-array's axes to the shape"
        )
    if not is_extension(dtype) and dtype.names is None:
        if dtype.char in V3_SPECIFIED or (zarr_format == 2 and dtype.kind in "SUMm"):
            # `numpy.longlong` is int64 under another name, which zarr-python does not know.
            return np.dtype(dtype.str), ()
        if dtype.kind in "Mm":
            return np.dtype(np.int64).newbyteorder(dtype.byteorder), ()
        if dtype.kind == "U":
            return np.dtype("u4").newbyteorder(dtype.byteorder), (dtype.itemsize // 4,)
    try:
        known = decode_dtype(encode_dtype(dtype)) == dtype
    except DsprepError:
        known = False
    if not known:
        raise UnsupportedError(
            f"zarr has no stand-in for dtype {dtype}", fix="convert it, for example to float32"
        )
    if is_extension(dtype) and dtype.itemsize <= 2:
        return np.dtype(f"<u{dtype.itemsize}"), ()
    return np.dtype(np.uint8), (dtype.itemsize,)


def restore(
    stored: DType, shape: tuple[int, ...], declared: object, where: object
) -> tuple[DType, tuple[int, ...]]:
    """Return the dtype and shape that an array has once it is viewed as `declared`.

    Raise `FormatError` if that is not a dtype, or elements of that size do not come out even.
    """
    try:
        dtype = decode_dtype(declared)
    except (SchemaError, SyntaxError, RecursionError) as error:
        raise FormatError(f"attribute {DTYPE} is not a dtype", where=where) from error
    if dtype.subdtype is None and stored.names is None:
        if dtype.itemsize == stored.itemsize:
            return dtype, shape
        if len(shape) > 1 and shape[-1] * stored.itemsize == dtype.itemsize:
            return dtype, shape[:-1]
    raise FormatError(
        f"attribute {DTYPE} does not fit the array",
        where=where,
        expected=f"elements of {stored.itemsize} bytes, or rows of them",
        found=f"{dtype} of {dtype.itemsize} bytes for {stored}{list(shape)}",
    )


def view(array: Array, dtype: DType, shape: tuple[int, ...]) -> Array:
    """Return the bytes of a C-contiguous `array` as `dtype` and `shape`."""
    if array.size == 0:
        return np.empty(shape, dtype)
    return array.reshape(-1).view(np.uint8).view(dtype).reshape(shape)
