"""HDF5's filters by number: their names, and what `dsprep.core.filters` has to undo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

Filters: TypeAlias = tuple[Mapping[str, Any], ...]

_NAMES = {
    1: "gzip",
    2: "shuffle",
    3: "fletcher32",
    4: "szip",
    5: "nbit",
    6: "scaleoffset",
    32000: "lzf",
    32001: "blosc",
    32004: "lz4",
    32008: "bitshuffle",
    32013: "zfp",
    32015: "zstd",
    32026: "blosc2",
}
_SHUFFLE = 2
_UNDONE = {1: "zlib", 3: "fletcher32", 32001: "blosc", 32015: "zstd"}
"""Filters whose output is exactly what `dsprep.core.filters` takes; lz4's framing differs."""


def name(code: int, label: bytes) -> str:
    """Return how a person calls a filter; `label` is what the file calls it."""
    return _NAMES.get(code) or label.decode("utf-8", "replace").strip("\0 ") or str(code)


def filters_of(plist: Any) -> Filters | str:
    """Return the filters of a dataset as `dsprep.core.filters` knows them, or the one it does not.

    Parameters
    ----------
    plist
        The dataset's ``h5py.h5p.PropDCID``.
    """
    found: list[Mapping[str, Any]] = []
    for i in range(plist.get_nfilters()):
        code, _, values, label = plist.get_filter(i)
        # Without a size, as on variable-length types, the library leaves the shuffle out.
        size = int(values[0]) if values else 1
        if code == _SHUFFLE and 0 < size < 1 << 31:
            found.append({"id": "shuffle", "elementsize": size})
        elif code in _UNDONE:
            found.append({"id": _UNDONE[code]})
        else:
            return name(code, label)
    return tuple(found)
