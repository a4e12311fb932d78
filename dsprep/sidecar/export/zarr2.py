"""Types, filters, fill values and attributes in the words of Zarr version 2.

Source: the specification of Zarr storage, version 2 (zarr-specs.readthedocs.io), and the codec
configurations of numcodecs. What these cannot tell exactly is `Inexpressible`.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dsprep.core.schema import DType, is_extension, show_dtype

COMPRESSORS = frozenset({"zlib", "gzip", "zstd", "blosc", "lz4", "bz2"})
_DROPPED = {"blosc": {"typesize"}}  # older releases of numcodecs do not know it


class Inexpressible(Exception):
    """Zarr has no word for it; the argument is the reason, a clause."""


def dtype(of: DType) -> Any:
    """Return a dtype as in ``.zarray``, byte order included."""
    if of.names is not None and of.fields is not None:
        members = [(n, of.fields[n][0]) for n in of.names]
        if any(d.names or d.subdtype or is_extension(d) for _, d in members):
            raise Inexpressible(f"Zarr version 2 has no dtype {show_dtype(of)}")
        if np.dtype(members) != of:
            raise Inexpressible("Zarr version 2 has no dtype with gaps between its members")
        return [[n, dtype(d)] for n, d in members]
    exact = of.kind in "biuSUV" or (of.kind in "fc" and of.itemsize in _SIZES[of.kind])
    exact = exact or (of.kind in "Mm" and "[" in of.str)  # with a unit
    if not exact or is_extension(of) or of.subdtype is not None:
        raise Inexpressible(f"Zarr version 2 has no dtype {show_dtype(of)}")
    return of.str


_SIZES = {"f": (2, 4, 8), "c": (8, 16)}


def codecs(filters: Sequence[Mapping[str, Any]]) -> tuple[Any, Any]:
    """Return ``filters`` and ``compressor`` as in ``.zarray``, for filters as in `Grid`."""
    found: list[dict[str, Any]] = []
    for f in filters:
        name = f["id"]
        dropped = _DROPPED.get(name, set())
        kept = {k: v for k, v in f.items() if v is not None and k not in dropped}
        if name == "crc32c":
            kept["location"] = "end"  # numcodecs puts it in front if nothing is said
        found.append(kept)
    last = found.pop() if found and found[-1]["id"] in COMPRESSORS else None
    return found or None, last


def fill_value(fill: bytes, of: DType) -> Any:
    """Return an element as the ``fill_value`` in ``.zarray``."""
    element = np.frombuffer(fill, of)[0]
    if of.names is not None or of.kind in "SV":
        return base64.b64encode(fill).decode()
    if of.kind == "U":
        return str(element)
    if of.kind in "Mm":
        return int(element.astype(np.int64))
    if of.kind in "fc":
        parts = [element.real, element.imag] if of.kind == "c" else [element]
        words = [_real(float(p)) for p in parts]
        back = [float(w) for w in words]
        same = np.array([complex(*back) if of.kind == "c" else back[0]], of).tobytes() == fill
        if not same:
            raise Inexpressible("its fill value has bits that JSON does not keep")
        return words if of.kind == "c" else words[0]
    return element.item()


def _real(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def attribute(value: Any) -> Any:
    """Return an attribute as JSON: numpy values and arrays become numbers and lists."""
    if isinstance(value, np.generic | np.ndarray):
        kind = value.dtype.kind
        words = kind == "O" and all(isinstance(v, str) for v in np.asarray(value).reshape(-1))
        if not (words or kind in "biuU" or (kind == "f" and value.dtype.itemsize in _SIZES["f"])):
            raise Inexpressible(f"JSON has no {show_dtype(value.dtype)}")
        return value.tolist()
    if isinstance(value, str | bool | int | float):
        return value
    raise Inexpressible(f"JSON has no {type(value).__name__}")
