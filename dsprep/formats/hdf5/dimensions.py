"""Dimensions: which of them each axis is along, and how long the unlimited ones of netCDF-4 are.

A dataset that is a dimension scale stands for a dimension, and others refer to it. Along an
unlimited dimension a variable is stored as far as it was written; netCDF takes it to be as long as
the longest one, and reads the rest as its fill value.

Sources: HDF5 Dimension Scale Specification; NetCDF-4 File Format; NUG, appendix "Fill Values".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from dsprep.core.schema import Array, Attrs, DType
from dsprep.formats.conventions import Attributes, text_of
from dsprep.formats.hdf5.datasets import Contents
from dsprep.formats.hdf5.heaps import Descriptors

NO_VARIABLE = "This is a netCDF dimension but not a netCDF variable"
_LIST = "DIMENSION_LIST"

_OWN = frozenset(
    {_LIST, "REFERENCE_LIST", "_Netcdf4Dimid", "_Netcdf4Coordinates", "_nc3_strict", "_NCCOMPRESS"}
)
"""Attributes by which datasets and dimensions refer to each other."""

_CLASSES: Mapping[str, tuple[str, ...]] = {
    "DIMENSION_SCALE": ("CLASS", "NAME"),
    **dict.fromkeys(
        ("ARRAY", "CARRAY", "EARRAY", "VLARRAY", "TABLE", "GROUP"),
        ("CLASS", "VERSION", "FLAVOR", "EXTDIM", "PSEUDOATOM"),
    ),
}
"""Attributes that an object's class makes a library's own, not the user's."""


def bookkeeping(attrs: Attrs) -> frozenset[str]:
    """Return the names of attributes that libraries keep for themselves."""
    own = _CLASSES.get(text_of(attrs.get("CLASS", "")), ())
    return _OWN.union(own, ("TITLE",) if own and not attrs.get("TITLE") else ())


def read_dimensions(
    contents: Contents, attributes: Attributes, descriptors: Descriptors
) -> dict[str, list[str]]:
    """Return the dimensions of the axes of datasets, by path; ``""`` is one that is not known.

    Datasets get the lengths that netCDF gives them, and dimensions that are no variables are left
    out: they hold no values.
    """
    scales = {address: path for path, address in contents.scales.items()}
    axes: dict[str, list[str]] = {path: [path] for path in contents.scales}
    for path in contents.attributed if scales else ():
        if path not in contents.scales:
            references = descriptors.references(contents.open(path), _LIST)
            axes[path] = [scales.get(address, "") for address in references]
    _lengthen(contents, axes)
    for path in sorted(contents.scales):
        if text_of(attributes(path).get("NAME")).startswith(NO_VARIABLE):
            contents.leave_out(path, "it is a netCDF dimension, not a variable", noted=False)
    return {path: names for path, names in axes.items() if any(names)}


def _lengthen(contents: Contents, axes: Mapping[str, list[str]]) -> None:
    lengths: dict[str, int] = {}
    for path in contents.scales:
        if contents.open(path).maxshape[:1] == (None,):
            lengths[path] = 0
    for path, names in axes.items():
        for name, length in zip(names, contents.datasets[path].shape, strict=False):
            if name in lengths:
                lengths[name] = max(lengths[name], length)
    for path, names in axes.items() if lengths else ():
        stored_type = contents.datasets[path]
        rest = [""] * (len(stored_type.shape) - len(names))
        shape = tuple(
            max(n, lengths.get(name, 0))
            for n, name in zip(stored_type.shape, [*names, *rest], strict=False)
        )
        dataset = contents.open(path)
        if shape != stored_type.shape and dataset.chunks and len(shape) == len(dataset.shape):
            contents.datasets[path] = replace(stored_type, shape=shape)


_DEFAULTS = {
    "i1": -127,
    "i2": -32767,
    "i4": -2147483647,
    "i8": -9223372036854775806,
    "u1": 255,
    "u2": 65535,
    "u4": 4294967295,
    "u8": 18446744073709551614,
    "f4": 9.969209968386869e36,
    "f8": 9.969209968386869e36,
}


def fill_value(dataset: Any, dtype: DType) -> Array:
    """Return what netCDF gives for elements that are not stored, of shape ``()``."""
    from h5py import h5d

    value = np.zeros((), dtype)
    plist = dataset.id.get_create_plist()
    if plist.fill_value_defined() == h5d.FILL_VALUE_USER_DEFINED:
        plist.get_fill_value(value)
    elif dtype.str[1:] in _DEFAULTS:
        value[...] = _DEFAULTS[dtype.str[1:]]
    return value
