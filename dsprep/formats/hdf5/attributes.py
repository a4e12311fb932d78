"""Attributes of HDF5 objects as plain Python and numpy values, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from dsprep.core.schema import DIMENSIONS, Attrs
from dsprep.errors import FormatError
from dsprep.formats.hdf5.dtypes import DTYPE_ATTRIBUTE, plain

KIND_ATTRIBUTE = "dsprep_kind"
LAYOUT_ATTRIBUTE = "dsprep_layout"
STATIC_ATTRIBUTE = "dsprep_static"
"""Of the file: which datasets are not fields but belong to all samples, with zeros between."""
CAPACITY_ATTRIBUTE = "dsprep_capacity"
"""Of a ragged field in groups: group g has its rows from ``g * capacity`` on, and up to that many;
what it does not need is a gap that belongs to no sample."""

_OWN = frozenset({DTYPE_ATTRIBUTE, KIND_ATTRIBUTE, LAYOUT_ATTRIBUTE, CAPACITY_ATTRIBUTE})
_OWN |= {STATIC_ATTRIBUTE}


def read_attributes(
    item: Any, sound: Callable[[Any, str], bool]
) -> tuple[dict[str, Any], list[str]]:
    """Return the attributes of an h5py object, and the names of those left out.

    These are references, empty attributes, what h5py cannot read, and what is in a heap and is not
    `sound`.
    """
    values: dict[str, Any] = {}
    lost: list[str] = []
    try:
        names = _names(item)
    except Exception:  # h5py raises many kinds for a damaged header
        return {}, ["all"]
    for raw in names:
        name = raw.decode("utf-8", "backslashreplace")
        if name in _OWN:
            continue
        try:
            raw.decode("utf-8")
            dtype = item.attrs.get_id(name).dtype
            value = None
            if not dtype.hasobject or (_flat(dtype) and sound(item, name)):
                value = _plain_value(item.attrs[name])
        except Exception:  # as above; an attribute is never worth losing the data
            value = None
        if value is None:
            lost.append(name)
        else:
            values[name] = value
    return values, lost


def has_attributes(names: Iterable[str]) -> bool:
    """Return whether one of these attributes is not dsprep's own."""
    return not _OWN.issuperset(names)


def attribute_names(item: Any) -> tuple[str, ...]:
    """Return the names of the attributes of an h5py object; of a damaged header, ``("?",)``."""
    try:
        return tuple(raw.decode("utf-8", "backslashreplace") for raw in _names(item))
    except Exception:  # as in `read_attributes`
        return ("?",)


def _names(item: Any) -> list[bytes]:
    """Return the names of the attributes of an h5py object, sorted as h5py lists them."""
    # They are walked as stored: to sort them the library makes a table, and it crashes where damage
    # stops it on the way.
    from h5py import h5, h5a

    names: list[bytes] = []
    h5a.iterate(item.id, names.append, index_type=h5.INDEX_NAME, order=h5.ITER_NATIVE)
    return sorted(names)


def _flat(dtype: Any) -> bool:
    """Return whether values of an attribute are texts or sequences of plain numbers."""
    import h5py

    base = h5py.check_vlen_dtype(dtype)
    # Releases of h5py call the bytes of sequences native in any case.
    return h5py.check_string_dtype(dtype) is not None or (
        base is not None and np.dtype(base).isnative and not np.dtype(base).hasobject
    )


def _plain_value(value: Any) -> Any:
    """Return an attribute without h5py's own types, or None if it has no plain form."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes) or (isinstance(value, np.void) and value.dtype.names is None):
        return value.tobytes() if isinstance(value, np.void) else bytes(value)
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject:
            items = np.asarray(value).reshape(-1).tolist()
            if not items or not all(isinstance(i, str) for i in items):
                return None
            return np.array(items).reshape(value.shape)
        return np.asarray(value, plain(value.dtype))[()]
    return None


def mark(item: Any, name: str, text: str) -> None:
    """Give an h5py object one of dsprep's own attributes, as a string of fixed length.

    One of variable length is in a heap, where damage can hang the library.
    """
    item.attrs.create(name, np.bytes_(text.encode()))


def marked(item: Any, name: str, where: object = None) -> str | None:
    """Return what `mark` wrote, or None if there is no such attribute."""
    if name not in item.attrs:
        return None
    attribute = item.attrs.get_id(name)
    if attribute.dtype.kind != "S" or attribute.shape != ():
        raise FormatError(
            f"attribute {name} is not as dsprep writes it",
            where=where or str(item.name),
            expected="one string of fixed length, as numpy.bytes_ makes it",
        )
    value: bytes = item.attrs[name]
    return value.decode("utf-8", "replace")


def write_attributes(item: Any, attrs: Attrs) -> list[str]:
    """Give an h5py object the attributes `attrs`; return the names of those it cannot hold."""
    import h5py

    lost = []
    for name, value in attrs.items():
        if name in _OWN or name == DIMENSIONS:
            continue
        array = np.asarray(value)
        try:
            if array.dtype.kind == "U" and array.ndim:
                item.attrs.create(name, array.astype(object), dtype=h5py.string_dtype())
            elif array.dtype.hasobject:
                lost.append(name)
            elif isinstance(value, bytes):
                # A fixed string loses zeros at its end, and h5py would make plain bytes a str.
                item.attrs.create(name, (np.void if value.endswith(b"\0") else np.bytes_)(value))
            else:
                item.attrs.create(name, value)
        except (TypeError, ValueError, RuntimeError, OSError, KeyError):
            lost.append(name)
    return lost
