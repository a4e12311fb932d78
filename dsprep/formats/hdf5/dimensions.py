"""Dimensions: which of them each axis is along.

A dataset that is a dimension scale stands for a dimension, and has a list of those that refer to
it.

Sources: HDF5 Dimension Scale Specification; NetCDF-4 File Format.
"""

from __future__ import annotations

from collections.abc import Mapping

from dsprep.core.schema import Attrs
from dsprep.formats.conventions import Attributes, text_of
from dsprep.formats.hdf5.datasets import Contents

NOTHING = "it is a netCDF dimension, not a variable"
"""Why a dataset is left out that holds no values."""

NO_VARIABLE = "This is a netCDF dimension but not a netCDF variable"
_LIST = "REFERENCE_LIST"

_OWN = frozenset(
    {_LIST, "DIMENSION_LIST", "_Netcdf4Dimid", "_Netcdf4Coordinates", "_nc3_strict", "_NCCOMPRESS"}
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


def read_dimensions(contents: Contents, attributes: Attributes) -> dict[str, list[str]]:
    """Return the dimensions of the axes of datasets, by path; ``""`` is one that is not known.

    Dimensions that are not variables are left out: they hold no values.
    """
    import h5py
    from h5py import h5r

    axes: dict[str, list[str]] = {path: [path] for path in contents.scales}
    for scale in sorted(contents.scales):
        item = contents.open(scale)
        kind = item.attrs.get_id(_LIST).dtype if _LIST in item.attrs else None
        # References to regions are in heaps, where damage can hang the library.
        if kind is None or not kind.names or h5py.check_ref_dtype(kind[0]) is not h5py.Reference:
            continue
        for reference, axis, *_ in item.attrs[_LIST]:
            name = h5r.get_name(reference, contents.file.id) or b""
            path = name.decode("utf-8", "replace").strip("/")
            rank = len(contents.datasets[path].shape) if path in contents.datasets else 0
            names = axes.setdefault(path, [""] * rank) if rank else []
            if axis < len(names) and not names[axis]:
                names[axis] = scale
    for path in sorted(contents.scales):
        if text_of(attributes(path).get("NAME")).startswith(NO_VARIABLE):
            contents.leave_out(path, NOTHING)
    return axes
