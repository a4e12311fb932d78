"""Attributes as Zarr keeps them: JSON.

Text, booleans, finite numbers and lists of them are kept. Arrays become lists, bytes that are
UTF-8 become text; everything else is left out, and `to_json` says so. Names that begin with
`OWN` are dsprep's and never show as attributes of the data.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from dsprep.core.schema import Attrs

OWN = "dsprep_"
KIND = "dsprep_kind"
"""The attribute of the group of a ragged field that says its `schema.Field.kind`."""
FIELDS = "dsprep_fields"
"""The attribute of the root group that lists the field names in order."""

CAPACITY = "dsprep_capacity"
"""The attribute of the group of a ragged field written in groups: rows of values kept for each
group of samples, which begin at its multiples; the rows that a group does not need are zeros."""
ROWS = "dsprep_rows"
"""With `CAPACITY`: how many rows of values all samples have together."""
COPY = "dsprep_copy"
"""The attribute of an array whose rows also lie in the files of another array, behind its chunks:
``{"array": its path, "at": bytes from the end of a chunk to the rows of the same samples}``."""


def to_json(attrs: Attrs, owner: str) -> tuple[dict[str, Any], list[str]]:
    """Return the attributes as JSON, and what is lost, one clause each.

    Parameters
    ----------
    attrs
        As in `schema.Field`.
    owner
        Whose attributes they are, for the clauses: ``field x``.
    """
    kept: dict[str, Any] = {}
    lost = []
    for name, value in attrs.items():
        if name.startswith(OWN):
            continue
        try:
            kept[name] = _plain(value)
        except ValueError:
            lost.append(f"attribute {name} of {owner}: JSON has no {type(value).__name__} of it")
            continue
        if isinstance(value, np.ndarray):
            lost.append(f"attribute {name} of {owner} becomes a list, without its dtype")
        elif isinstance(value, bytes):
            lost.append(f"attribute {name} of {owner} becomes text")
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
    if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise ValueError(value)


def from_json(attrs: Attrs) -> dict[str, Any]:
    """Return JSON attributes as `schema.Field` has them: lists as arrays, objects as JSON text."""
    return {str(k): _typed(v) for k, v in attrs.items() if not str(k).startswith(OWN)}


def _typed(value: Any) -> Any:
    if isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list) and value:
        numbers = all(isinstance(v, int | float) for v in value)
        if numbers or all(isinstance(v, str) for v in value):
            array = np.asarray(value)
            if array.dtype.kind != "O":  # integers beyond 64 bits
                return array
    return json.dumps(value)
