"""What programs state about datasets in HDF5 alone: PyTables, pandas, images.

What other formats have too is stated in `dsprep.formats.conventions`.

Sources: PyTables, "PyTables File Format"; the HDF5 files of pandas' `HDFStore`; HDF5 Image and
Palette Specification.
"""

from __future__ import annotations

import re

from dsprep.formats.conventions import Attributes, Stated, state_common, text_of
from dsprep.formats.hdf5.datasets import Contents


def stated(contents: Contents, attributes: Attributes) -> Stated:
    """Return what is stated about the datasets of a file; some of them are left out of it."""
    facts = Stated()
    state_common(contents, attributes, facts)
    for path, reason in facts.left_out.items():
        contents.leave_out(path, reason)
    _pytables(contents, attributes, facts)
    _images(contents, attributes, facts)
    return facts


_ITEMS = re.compile(
    r"(axis0|block\d+_items|axis1_(?=level))(_(level|label|code|name)\d+)?|axis1_level\d+"
)
_BLOCK = re.compile(r"(block\d+)_values")


def _pytables(contents: Contents, attributes: Attributes, facts: Stated) -> None:
    """State the tables and pickled objects of PyTables, and what pandas keeps beside values."""
    root = contents.groups.get("", ())
    if not any(name.startswith("PYTABLES_") for name in root):
        return
    for path in sorted(contents.attributed):
        stored_type = contents.datasets.get(path)
        if stored_type is None or not (stored_type.vlen or stored_type.carrier.dtype.names):
            continue
        attrs = attributes(path)
        kind = text_of(attrs.get("CLASS"))
        if kind == "TABLE" and stored_type.carrier.dtype.names and len(stored_type.shape) == 1:
            facts.tables.add(path)
        elif kind == "VLARRAY" and text_of(attrs.get("PSEUDOATOM")) == "object":
            facts.aside[path] = "pickled Python objects, which dsprep never unpickles"
    for group, names in contents.groups.items():
        if "pandas_type" not in names or text_of(attributes(group).get("pandas_type")) != "frame":
            continue
        for path in contents.inside(group):
            name = path.rpartition("/")[2]
            block = _BLOCK.fullmatch(name)
            items = f"{group}/{block[1]}_items" if block else ""
            if items in contents.datasets:
                facts.names[path] = "columns", items
            elif _ITEMS.fullmatch(name):
                facts.aside[path] = "names of pandas' columns"


_FEW = 64


def _images(contents: Contents, attributes: Attributes, facts: Stated) -> None:
    """Do not take rows of one image for samples."""
    if len(contents.attributed) > _FEW or facts.refused:
        return
    for path in contents.attributed:
        there = path in contents.datasets and 2 <= len(contents.datasets[path].shape) <= 3
        if there and text_of(attributes(path).get("CLASS")) == "IMAGE":
            facts.refused = (
                f"{path} is one image, as its attribute CLASS states",
                "--sample-axis none takes the file as one sample",
            )
