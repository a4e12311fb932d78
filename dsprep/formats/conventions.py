"""Statements of programs about the arrays of a file, in whatever format: AnnData, NWB, SciPy ...

Names and attributes alone say it, so this reads no values. What is kept *aside* is never taken for
samples by itself, and is read where the user names it.

Sources: AnnData, "On-disk format"; NWB, "hdmf-common: DynamicTable"; MATLAB's files of version 7.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dsprep.core.schema import Attrs
from dsprep.formats.ragged import ArrayTree
from dsprep.formats.samples import listed

Attributes = Callable[[str], Attrs]
"""Returns the attributes of the group or array at a path."""


@dataclass
class Stated:
    """The statements about the arrays of a file, by their paths.

    Attributes
    ----------
    aside
        Those that are not samples, with the reason.
    left_out
        Those that cannot be fields, with the reason.
    attrs
        What is stated elsewhere and belongs to their attributes.
    axes
        What their first axis counts; arrays of two such things are never fields of one sample.
    grouped
        Whether groups that are alike may be samples.
    refused
        Why nothing is taken unless it is named, and what to do: two clauses.
    """

    aside: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    attrs: dict[str, Attrs] = field(default_factory=dict)
    axes: dict[str, str] = field(default_factory=dict)
    grouped: bool = True
    refused: tuple[str, str] | None = None

    def notes(self) -> list[str]:
        """Return what is kept aside, one clause for each reason."""
        reasons: dict[str, list[str]] = {}
        for path, reason in self.aside.items():
            reasons.setdefault(reason, []).append(path)
        return [f"left out {listed(paths)}: {reason}" for reason, paths in reasons.items()]


def state_common(tree: ArrayTree, attributes: Attributes, stated: Stated) -> None:
    """Add what is stated in the same way in every format that holds named arrays."""
    _sparse(tree, attributes, stated)
    _anndata(tree, stated)
    _categories(tree, stated)
    for group, names in tree.groups.items():
        if "colnames" in names:  # of NWB and hdmf: its rows are those of that table alone
            stated.axes.update(dict.fromkeys(tree.inside(group), group or "rows"))


def text_of(value: Any) -> str:
    """Return an attribute as text."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _within(group: str, name: str) -> str:
    return f"{group}/{name}".lstrip("/")


_SPARSE = {"csc": "by columns", "coo": "one by one", "bsr": "by blocks", "dia": "by diagonals"}
"""Sparse matrices of SciPy whose rows do not follow one another, and how they are stored."""


def _sparse(tree: ArrayTree, attributes: Attributes, stated: Stated) -> None:
    """State the columns of matrices in CSR, and leave out those that are not stored by rows."""
    for group, names in tree.groups.items():
        data = _within(group, "data")
        if "MATLAB_sparse" in names:
            stated.attrs[data] = {"columns": attributes(group)["MATLAB_sparse"]}
        key = next((k for k in ("encoding-type", "h5sparse_format") if k in names), None)
        if key is None or data not in tree.datasets:
            continue
        attrs = attributes(group)
        kind = text_of(attrs.get(key)).removesuffix("_matrix")
        shape = attrs.get("shape", attrs.get("h5sparse_shape", ()))
        columns = list(shape)[1:] if hasattr(shape, "__iter__") else []
        if kind == "csr" and columns:
            stated.attrs[data] = {"columns": columns[0]}
        elif kind in _SPARSE:
            note = f"{group or 'this'} is {kind}_matrix, stored {_SPARSE[kind]}"
            note += ", and columns are not samples" if kind == "csc" else ", not by rows"
            fix = "write it by rows, as its method tocsr() gives it"
            for path in tree.inside(group):
                stated.left_out[path] = f"{note} ({fix})"
            if group.rpartition("/")[2] in ("X", ""):
                stated.refused = note, fix


def _put_aside(tree: ArrayTree, parts: list[str], reason: str, stated: Stated) -> None:
    """Keep arrays aside: those at these paths, and all below them."""
    prefixes = tuple(f"{part}/" for part in parts)
    for path in tree.datasets:
        if path in parts or path.startswith(prefixes):
            stated.aside[path] = reason


def _anndata(tree: ArrayTree, stated: Stated) -> None:
    """Keep aside what belongs to the variables of AnnData, which are its columns."""
    there, others = {*tree.groups, *tree.datasets}, list[str]()
    for group in tree.groups:
        if {_within(group, "obs"), _within(group, "var")} <= there:
            parts = ("var", "varm", "varp", "uns", "raw/var", "raw/varm", "varmap")
            others += [_within(group, part) for part in parts]
    if others:
        stated.grouped = False
        _put_aside(tree, others, "AnnData's variables and annotations", stated)


def _categories(tree: ArrayTree, stated: Stated) -> None:
    """Keep aside what the codes of categorical columns stand for."""
    for path in tree.datasets:
        group, _, name = path.rpartition("/")
        codes = name == "categories" and f"{group}/codes" in tree.datasets
        if (codes and "encoding-type" in tree.groups[group]) or group.endswith("/__categories"):
            stated.aside.setdefault(path, "the categories of codes")
