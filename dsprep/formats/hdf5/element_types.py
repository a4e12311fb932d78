"""What a dataset holds: the elements, their shape, and whether they are sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dsprep.core.schema import Kind
from dsprep.formats.hdf5.attributes import marked
from dsprep.formats.hdf5.dtypes import DTYPE_ATTRIBUTE, Carrier, plain, read_carrier


@dataclass(frozen=True)
class Held:
    """What a dataset holds.

    Attributes
    ----------
    carrier
        The elements; those inside the sequences when `vlen`.
    shape
        The dataset's shape as the field's own, with the axes of array types and without those
        of carriers.
    kind
        ``"str"`` and ``"bytes"`` only with `vlen`.
    vlen
        Whether each element is a sequence of its own length.
    """

    carrier: Carrier
    shape: tuple[int, ...]
    kind: Kind = "array"
    vlen: bool = False

    @property
    def nbytes(self) -> int:
        """Logical bytes, as Python's unbounded integer; 16 for each sequence when `vlen`."""
        total = 16 if self.vlen else self.carrier.dtype.itemsize
        for n in self.shape:
            total *= n
        return total


def _unreadable(dataset: Any) -> str | None:
    """Return why values of variable length are not read, which only the library would find.

    It follows what it finds there unchecked.
    """
    from h5py import h5d

    kind = {h5d.COMPACT: "compact", h5d.VIRTUAL: "virtual"}.get(
        dataset.id.get_create_plist().get_layout()
    )
    if kind is None:
        return None
    return f"it is {kind}, and of variable length (h5repack -l CHUNK=64 changes that)"


def held(dataset: Any, where: object) -> Held | str:
    """Return what an `h5py.Dataset` holds, or why it cannot be a field."""
    import h5py

    if dataset.shape is None:
        return "it holds no data"
    try:
        dtype = dataset.dtype
    except (TypeError, ValueError, NotImplementedError) as error:
        return f"its type is unknown to numpy: {error}"
    shape = tuple(map(int, dataset.shape))
    string = h5py.check_string_dtype(dtype)
    if string is not None and string.length is None:
        byte = np.dtype(np.uint8)
        return _unreadable(dataset) or Held(Carrier(byte, byte), shape, "str", vlen=True)
    if h5py.check_ref_dtype(dtype) is not None:
        return "it holds references"
    base = h5py.check_vlen_dtype(dtype)
    element = dtype if base is None else np.dtype(base)
    if element.hasobject or element.itemsize == 0:
        return "its type has parts of variable length"
    element = plain(element)
    if element.subdtype is not None:
        if base is not None:
            return "its type is a sequence of arrays"
        element, extra = element.subdtype
        shape += extra
    if base is not None:
        kind: Kind = "bytes" if element.str == "|V1" else "array"
        element = np.dtype(np.uint8) if kind == "bytes" else element
        return _unreadable(dataset) or Held(Carrier(element, element), shape, kind, vlen=True)
    text = marked(dataset, DTYPE_ATTRIBUTE, where)
    if text is None:
        return Held(Carrier(element, element), shape)
    carrier = read_carrier(text, element, shape, where)
    return Held(carrier, shape[: len(shape) - len(carrier.axis)])
