"""Values that are stored packed, such as int16 with ``scale_factor``: `mask_and_scale`.

By the CF conventions, section 8.1 (packed data) and 2.5.1 (missing data).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.core.schema import Array, Attrs, Batch, DType, Field, Ragged, Schema
from dsprep.errors import UsageError
from dsprep.formats.base import Source
from dsprep.formats.samples import CONVENTIONS
from dsprep.source.dataset import open_dataset


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
    return on_values({name: _unpacking(schema[name], result) for name in names})


def on_values(functions: Mapping[str, Callable[[Array], Array]]) -> Callable[[Batch], Batch]:
    """Return a ``transform`` that applies functions to the numbers of fields, ragged or not."""

    def transform(batch: Batch) -> Batch:
        out = dict(batch)
        for name, function in functions.items():
            column = batch[name]
            if isinstance(column, Ragged):
                first = int(column.offsets[0])
                rows = column.values[first : int(column.offsets[-1])]
                out[name] = Ragged(function(rows), column.offsets - first)
            else:
                out[name] = function(np.asarray(column))
        return out

    return transform


def _unpacking(f: Field, dtype: DType | None) -> Callable[[Array], Array]:
    """Return the function that unpacks the values of a field."""
    if f.kind != "array" or f.dtype.kind not in "iuf":
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
    result = dtype or result

    def unpacked(values: Array) -> Array:
        packed = values.astype(stored, copy=False)
        invalid = np.zeros(packed.shape, bool)
        for value in missing:
            invalid |= packed == value
        for bound in low:
            invalid |= packed < bound
        for bound in high:
            invalid |= packed > bound
        out: Any = packed
        for factor in scale[:1]:
            out = out * factor
        for term in offset[:1]:
            out = out + term
        out = out.astype(result, copy=False)
        made: Array = np.where(invalid, result.type(np.nan), out) if invalid.any() else out
        return made

    return unpacked


def _numbers(f: Field, name: str, stored: DType | None = None) -> Array:
    """Return an attribute as an array of one axis; without elements if there is none.

    Where it is compared with values of dtype `stored`, it has their precision, or their sign.
    """
    attrs: Attrs = f.attrs
    values: Array = np.ravel(np.asarray(attrs.get(name, ())))
    if values.dtype.kind not in "iuf":
        raise UsageError(f"attribute {name} of {f.name} is not a number", found=attrs[name])
    wraps = stored is not None and stored.kind == "u" and values.dtype.kind == "i"
    rounds = stored is not None and stored.kind == "f"
    return values.astype(stored) if wraps or rounds else values
