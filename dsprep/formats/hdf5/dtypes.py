"""HDF5 types and numpy dtypes: what HDF5 holds as it is, and what travels in a stand-in.

HDF5 has no bfloat16, float8, UCS-4 strings or dates that h5py would give back. Such a dtype is
stored bit by bit in a *carrier*, and the attribute ``dsprep_dtype`` of the dataset names it in
the notation of `dsprep.core.schema.encode_dtype`:

======================================  ==========================================
dtype                                   carrier
======================================  ==========================================
bfloat16, float8 and the like           unsigned integer of the same size
``U`` strings of n characters           uint32, with a last axis of n
datetime64, timedelta64                 int64
structs that contain one of these       uint8, with a last axis of the item size
======================================  ==========================================
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from dsprep.core.schema import (
    DType,
    decode_dtype,
    encode_dtype,
    is_extension,
    show_dtype,
)
from dsprep.errors import FormatError, SchemaError

DTYPE_ATTRIBUTE = "dsprep_dtype"


@dataclass(frozen=True)
class Carrier:
    """The form in which elements of `dtype` are stored in a dataset.

    Attributes
    ----------
    stored
        The dtype of the dataset; `dtype` itself where HDF5 holds it.
    axis
        Axes that the dataset has in addition, behind the others: ``()`` or ``(n,)``.
    """

    dtype: DType
    stored: DType
    axis: tuple[int, ...] = ()

    @property
    def foreign(self) -> bool:
        """True if `stored` is a stand-in."""
        return self.stored != self.dtype

    def attribute(self) -> str:
        """Return the value of the attribute that `read_carrier` understands."""
        return json.dumps(encode_dtype(self.dtype), sort_keys=True)

    def __str__(self) -> str:
        if not self.foreign:
            return show_dtype(self.stored)
        return f"{show_dtype(self.stored)} ({show_dtype(self.dtype)} bits)"


def carrier_of(dtype: DType) -> Carrier:
    """Return the carrier that stores elements of `dtype`."""
    if is_extension(dtype):
        return Carrier(dtype, np.dtype(f"u{dtype.itemsize}"))
    if dtype.kind == "U":
        return Carrier(dtype, np.dtype(f"{dtype.str[0]}u4"), (dtype.itemsize // 4,))
    if dtype.kind in "mM":
        return Carrier(dtype, np.dtype(f"{dtype.str[0]}i8"))
    if _holds(dtype):
        return Carrier(dtype, dtype)
    return Carrier(dtype, np.dtype("u1"), (dtype.itemsize,))


def _holds(dtype: DType) -> bool:
    """Return whether h5py gives `dtype` back as it was."""
    from h5py import h5t

    if dtype.names is not None and dtype.fields is not None:
        members = [dtype.fields[n][0] for n in dtype.names]
        bases = [m.subdtype[0] if m.subdtype else m for m in members]
        if any(is_extension(b) or b.kind in "UmM" for b in bases):
            return False
    try:
        native = h5t.py_create(dtype, logical=True).dtype
    except (TypeError, ValueError, RuntimeError):
        return False
    return bool(plain(native) == dtype)


def read_carrier(text: str, stored: DType, shape: tuple[int, ...], where: object) -> Carrier:
    """Return the carrier that a ``dsprep_dtype`` attribute describes, if it fits the dataset."""
    try:
        dtype = decode_dtype(json.loads(text))
    except (SchemaError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise FormatError(f"attribute {DTYPE_ATTRIBUTE} is not a dtype", where=where) from error
    axis = () if stored.itemsize == dtype.itemsize else shape[-1:]
    if stored.itemsize * (axis[0] if axis else 1) != dtype.itemsize or stored.kind not in "ui":
        raise FormatError(
            f"attribute {DTYPE_ATTRIBUTE} does not fit the dataset",
            where=where,
            expected=f"elements of {dtype.itemsize} bytes",
            found=f"{show_dtype(stored)} of shape {shape}",
        )
    return Carrier(dtype, stored, axis)


def plain(dtype: DType) -> DType:
    """Return `dtype` without h5py's metadata; enumerations become integers."""
    if dtype.names is not None and dtype.fields is not None:
        return np.dtype(
            {
                "names": list(dtype.names),
                "formats": [plain(dtype.fields[n][0]) for n in dtype.names],
                "offsets": [dtype.fields[n][1] for n in dtype.names],
                "itemsize": dtype.itemsize,
            }
        )
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return np.dtype((plain(base), shape))
    return np.dtype(dtype.str)


def overlaps(dtype: DType) -> bool:
    """Return whether members of a compound dtype share bytes, or leave it.

    That is what h5py makes of members that numpy has only in a larger type, such as floats of an
    unusual exponent; the library then writes beyond what it is given.
    """
    if dtype.subdtype is not None:
        return overlaps(dtype.subdtype[0])
    if dtype.fields is None:
        return False
    end = 0
    for member, at in sorted((f[:2] for f in dtype.fields.values()), key=lambda f: f[1]):
        if at < end or overlaps(member):
            return True
        end = at + member.itemsize
    return end > dtype.itemsize
