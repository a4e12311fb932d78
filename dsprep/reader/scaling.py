"""Values that are stored packed, such as int16 with ``scale_factor``: `mask_and_scale`.

By the CF conventions, section 8.1 (packed data) and 2.5.1 (missing data).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.core.schema import Array, Attrs, Batch, DType, Field, Schema
from dsprep.errors import UsageError
from dsprep.formats.base import Source
from dsprep.formats.samples import CONVENTIONS, is_nan
from dsprep.reader.transforms import FieldTransform, Function
from dsprep.source.dataset import open_dataset

PACKING = (*CONVENTIONS, "valid_min", "valid_max", "valid_range")
"""Attributes by which values are packed, missing or invalid."""


def mask_and_scale(
    of: str | Path | Source | Schema, *fields: str, dtype: str | None = None
) -> Callable[[Batch], Batch]:
    """Return a ``transform`` that applies the attributes by which values are packed.

    Parameters
    ----------
    of
        The dataset, or its schema, which has the attributes: ``scale_factor``, ``add_offset``,
        ``_FillValue``, ``missing_value``, ``valid_min``, ``valid_max``, ``valid_range`` and
        ``_Unsigned``.
    fields
        Names; none: all that have ``scale_factor``, ``add_offset``, ``_FillValue`` or
        ``missing_value``.
    dtype
        Of the result; None: by the CF conventions that of ``scale_factor`` and ``add_offset``, or
        else that of the field. Integers without these that have missing values become float32, or
        float64 if they have more than two bytes.

    Returns
    -------
    function
        Of a batch. Fields become ``stored * scale_factor + add_offset``, missing and invalid values
        NaN; shapes stay.

    Raises
    ------
    UsageError
        If no field is packed, or a field or an attribute is not of numbers.
    """
    if isinstance(of, Schema):
        schema = of
    elif isinstance(of, Source):
        schema = of.schema
    else:
        with open_dataset(of) as source:
            schema = source.schema
    names = fields or [f.name for f in schema if any(c in f.attrs for c in CONVENTIONS[:4])]
    if not names:
        raise UsageError("no field is packed", expected=f"attributes: {', '.join(CONVENTIONS[:4])}")
    result = None if dtype is None else np.dtype(dtype)
    functions = {name: _unpacking(schema[name], result) for name in names}
    return FieldTransform("unpacked", functions)


def unpacking(f: Field) -> Function | None:
    """Return what unpacks the values of a field, missing ones as NaN; None if it changes none."""
    attrs = {name: value for name, value in f.attrs.items() if name in PACKING}
    if not is_packable(f) or all(is_nan(value) for value in attrs.values()):
        return None
    return _unpacking(f, None)


def _unpacking(f: Field, dtype: DType | None) -> Callable[[Array], Array]:
    """Return the function that unpacks the values of a field."""
    if not is_packable(f):
        raise UsageError(f"{f} is not a field of numbers that can be packed")
    stored = f.dtype.newbyteorder("=")
    if stored.kind == "i" and str(f.attrs.get("_Unsigned")).lower() == "true":
        stored = np.dtype(f"u{stored.itemsize}")
    scale, offset = (_numbers(f, name) for name in ("scale_factor", "add_offset"))
    missing = [v for name in ("_FillValue", "missing_value") for v in _numbers(f, name, stored)]
    bounds = _numbers(f, "valid_range", stored)
    low = bounds[:1] if len(bounds) else _numbers(f, "valid_min", stored)
    high = bounds[1:] if len(bounds) else _numbers(f, "valid_max", stored)
    factors = [a.dtype for a in (scale, offset) if len(a)]
    result = np.result_type(*factors) if factors else stored
    if (len(missing) or len(low) or len(high)) and result.kind != "f":
        result = np.dtype("f4" if stored.itemsize <= 2 else "f8")
    given = (scale[:1], offset[:1]), missing, (low, high)
    return partial(_unpacked, f, stored, *given, dtype or result)


def _unpacked(
    f: Field,
    stored: DType,
    linear: tuple[Array, Array],
    missing: Sequence[Any],
    bounds: tuple[Array, Array],
    result: DType,
    values: Array,
) -> Array:
    """Return values unpacked; what is missing or out of bounds is NaN."""
    if not is_stored(f, values):
        raise UsageError(
            f"field {f} is {values.dtype}, not as stored",
            fix="mask_and_scale comes before all that changes the field",
        )
    packed = values.astype(stored, copy=False)
    invalid = np.zeros(packed.shape, bool)
    for value in missing:
        invalid |= packed == value
    for bound in bounds[0]:
        invalid |= packed < bound
    for bound in bounds[1]:
        invalid |= packed > bound
    out: Any = packed
    for factor in linear[0]:
        out = out * factor
    for term in linear[1]:
        out = out + term
    out = out.astype(result, copy=False)
    made: Array = np.where(invalid, result.type(np.nan), out) if invalid.any() else out
    return made


def is_packable(f: Field) -> bool:
    """Return whether the values of a field are numbers that can be packed."""
    return f.kind == "array" and f.dtype.kind in "iuf"


def is_stored(f: Field, values: Array) -> bool:
    """Return whether values of a field have the dtype that is stored."""
    return values.dtype.newbyteorder("=") == f.dtype.newbyteorder("=")


def _numbers(f: Field, name: str, stored: DType | None = None) -> Array:
    """Return an attribute as an array of one axis in the precision of `stored`; empty if absent."""
    attrs: Attrs = f.attrs
    values: Array = np.ravel(np.asarray(attrs.get(name, ())))
    if values.dtype.kind not in "iuf":
        raise UsageError(f"attribute {name} of {f.name} is not a number", found=attrs[name])
    wraps = stored is not None and stored.kind == "u" and values.dtype.kind == "i"
    rounds = stored is not None and stored.kind == "f"
    return values.astype(stored) if wraps or rounds else values
