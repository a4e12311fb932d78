"""What programs state about datasets in HDF5 alone: PyTables, pandas, images.

What other formats have too is stated in `dsprep.formats.conventions`.

Sources: PyTables, "PyTables File Format"; the HDF5 files of pandas' `HDFStore`; HDF5 Image and
Palette Specification.
"""

from __future__ import annotations

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


def _pytables(contents: Contents, attributes: Attributes, facts: Stated) -> None:
    """State the tables and pickled objects of PyTables."""
    root = contents.groups.get("", ())
    if not any(name.startswith("PYTABLES_") for name in root):
        return
    for path in sorted(contents.attributed):
        stored_type = contents.datasets.get(path)
        attrs = attributes(path) if stored_type is not None and stored_type.vlen else {}
        if text_of(attrs.get("PSEUDOATOM")) == "object":
            facts.aside[path] = "pickled Python objects, which dsprep never unpickles"


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
