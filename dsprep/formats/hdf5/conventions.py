"""What programs state about the datasets that they write: netCDF-4, AnnData, PyTables, pandas ...

Names and attributes alone say it, so this reads no values. What is kept *aside* is never taken for
samples by itself, and is read where the user names it.

Sources: NetCDF-4 File Format, "Dimensions and Coordinate Variables"; AnnData, "On-disk format";
PyTables, "PyTables File Format"; the HDF5 files of pandas' `HDFStore`; the HDF5 driver of Silo;
HDF5 Image and Palette Specification.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dsprep.core.schema import Attrs
from dsprep.formats.hdf5.datasets import Contents

Attributes = Callable[[str], Attrs]
"""Returns the attributes of the object at a path."""


@dataclass
class Stated:
    """What is stated about the datasets of a file, by their paths.

    Attributes
    ----------
    aside
        Those that are not samples, with the reason.
    tables
        Those whose members are fields.
    names
        Those that have names or categories in another dataset: the attribute that keeps these, and
        the path of the other one.
    attrs
        What is stated elsewhere and belongs to their attributes.
    grouped
        Whether groups that are alike may be samples.
    refused
        Why nothing is taken unless it is named, and what to do: two clauses.
    """

    aside: dict[str, str] = field(default_factory=dict)
    tables: set[str] = field(default_factory=set)
    names: dict[str, tuple[str, str]] = field(default_factory=dict)
    attrs: dict[str, Attrs] = field(default_factory=dict)
    grouped: bool = True
    refused: tuple[str, str] | None = None


def stated(contents: Contents, attributes: Attributes) -> Stated:
    """Return what is stated about the datasets of a file.

    Matrices in CSC, and dimensions of netCDF that are not variables, are left out of them.
    """
    found = Stated()
    _netcdf(contents, attributes)
    _silo(contents, found)
    _sparse(contents, attributes, found)
    _anndata(contents, found)
    _categories(contents, attributes, found)
    _pytables(contents, attributes, found)
    _keras(contents, found)
    _images(contents, attributes, found)
    return found


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


_DIMENSION = "This is a netCDF dimension but not a netCDF variable"


def _netcdf(contents: Contents, attributes: Attributes) -> None:
    """Leave out what netCDF-4 keeps of a dimension: a length, and no values."""
    for path in sorted(contents.scales):
        if _text(attributes(path).get("NAME")).startswith(_DIMENSION):
            contents.leave_out(path, "it is a netCDF dimension, not a variable")


_SILO = frozenset({"_fileinfo", "_hdf5libinfo", "_silolibinfo"})


def _silo(contents: Contents, found: Stated) -> None:
    for path in contents.datasets:
        if path in _SILO:
            found.aside[path] = "Silo's own"
        elif path.startswith(".silo/"):
            found.aside[path] = "an array of Silo's objects, to be named by --field"
    found.grouped = not found.aside


def _sparse(contents: Contents, attributes: Attributes, found: Stated) -> None:
    """State the columns of matrices in CSR, and leave out those in CSC."""
    for group, names in contents.groups.items():
        key = next((k for k in ("encoding-type", "h5sparse_format") if k in names), None)
        if key is None or f"{group}/indptr".lstrip("/") not in contents.datasets:
            continue
        attrs = attributes(group)
        kind = _text(attrs.get(key)).removesuffix("_matrix")
        shape = attrs.get("shape", attrs.get("h5sparse_shape", ()))
        columns = list(shape)[1:] if hasattr(shape, "__iter__") else []
        if kind == "csr" and columns:
            found.attrs[f"{group}/data"] = {"columns": columns[0]}
        elif kind == "csc":
            fix = "write it by rows, as its method tocsr() gives it"
            reason = f"{group} is csc_matrix, stored by columns, and columns are not samples"
            for path in contents.inside(group):
                contents.leave_out(path, f"{reason} ({fix})")
            if group.rpartition("/")[2] == "X":
                found.refused = reason, fix


def _anndata(contents: Contents, found: Stated) -> None:
    """Keep aside what belongs to the variables of AnnData, which are its columns."""

    def there(path: str) -> bool:
        return path in contents.groups or path in contents.datasets

    others: list[str] = []
    for group in contents.groups:
        prefix = f"{group}/" if group else ""
        if there(f"{prefix}obs") and there(f"{prefix}var"):
            parts = ("var", "varm", "varp", "uns", "raw/var", "raw/varm", "varmap")
            others += [f"{prefix}{part}" for part in parts]
    if others:
        found.grouped = False
        prefixes = tuple(f"{part}/" for part in others)
        for path in contents.datasets:
            if path in others or path.startswith(prefixes):
                found.aside[path] = "AnnData's variables and annotations"


def _categories(contents: Contents, attributes: Attributes, found: Stated) -> None:
    """State what the codes of categorical columns stand for."""
    for group, names in contents.groups.items():
        codes, categories = f"{group}/codes", f"{group}/categories"
        there = "encoding-type" in names and {codes, categories} <= contents.datasets.keys()
        if there and _text(attributes(group).get("encoding-type")) == "categorical":
            found.names[codes] = "categories", categories
            found.aside.setdefault(categories, "the categories of codes")
        if group.endswith("/__categories"):
            table = group.rpartition("/")[0]
            for path in contents.inside(group):
                column = f"{table}/{path.rpartition('/')[2]}"
                if column in contents.datasets:
                    found.names[column] = "categories", path
                found.aside.setdefault(path, "the categories of codes")


_ITEMS = re.compile(
    r"(axis0|block\d+_items|axis1_(?=level))(_(level|label|code|name)\d+)?|axis1_level\d+"
)
_BLOCK = re.compile(r"(block\d+)_values")


def _pytables(contents: Contents, attributes: Attributes, found: Stated) -> None:
    """State the tables and pickled objects of PyTables, and what pandas keeps beside values."""
    root = contents.groups.get("", ())
    if not any(name.startswith("PYTABLES_") for name in root):
        return
    for path in sorted(contents.attributed):
        what = contents.datasets.get(path)
        if what is None or not (what.vlen or what.carrier.dtype.names):
            continue
        attrs = attributes(path)
        kind = _text(attrs.get("CLASS"))
        if kind == "TABLE" and what.carrier.dtype.names and len(what.shape) == 1:
            found.tables.add(path)
        elif kind == "VLARRAY" and _text(attrs.get("PSEUDOATOM")) == "object":
            found.aside[path] = "pickled Python objects, which dsprep never unpickles"
    for group, names in contents.groups.items():
        if "pandas_type" not in names or _text(attributes(group).get("pandas_type")) != "frame":
            continue
        for path in contents.inside(group):
            name = path.rpartition("/")[2]
            block = _BLOCK.fullmatch(name)
            items = f"{group}/{block[1]}_items" if block else ""
            if items in contents.datasets:
                found.names[path] = "columns", items
            elif _ITEMS.fullmatch(name):
                found.aside[path] = "names of pandas' columns"


def _keras(contents: Contents, found: Stated) -> None:
    first = any("layer_names" in contents.groups.get(p, ()) for p in ("", "model_weights"))
    later = "layers" in contents.groups or "_layer_checkpoint_dependencies" in contents.groups
    if first or (later and any(p.endswith("/vars") for p in contents.groups)):
        found.refused = "these are the weights of a Keras model, not samples", "name the dataset"


_FEW = 64


def _images(contents: Contents, attributes: Attributes, found: Stated) -> None:
    """Do not take rows of one image for samples."""
    if len(contents.attributed) > _FEW or found.refused:
        return
    for path in contents.attributed:
        there = path in contents.datasets and 2 <= len(contents.datasets[path].shape) <= 3
        if there and _text(attributes(path).get("CLASS")) == "IMAGE":
            found.refused = (
                f"{path} is one image, as its attribute CLASS states",
                "--sample-axis none takes the file as one sample",
            )
