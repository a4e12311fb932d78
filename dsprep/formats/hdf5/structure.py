"""Ragged fields by index tables.

Ragged fields are those of dsprep's own encoding, a group with the attribute ``dsprep_kind`` and the
datasets ``values``, ``first`` and ``count``, and what `dsprep.formats.ragged` finds.
"""

from __future__ import annotations

from collections.abc import Callable

from dsprep.errors import FormatError
from dsprep.formats.hdf5.attributes import CAPACITY_ATTRIBUTE, KIND_ATTRIBUTE, marked
from dsprep.formats.hdf5.datasets import Contents
from dsprep.formats.hdf5.fields import DatasetField
from dsprep.formats.ragged import ArrayTree, RaggedRows, find_tables, take_own

_MOST_DIGITS = 18


Open = Callable[[str], DatasetField]


def discover(contents: Contents, tree: ArrayTree, open_rows: Open, *, own: bool) -> RaggedRows:
    """Return the ragged fields of a file; where dsprep wrote it (`own`), nothing is guessed.

    Raises
    ------
    FormatError
        If a group states that it is in dsprep's encoding but is not.
    """
    stated = [name for name, names in contents.groups.items() if KIND_ATTRIBUTE in names]
    rows = RaggedRows()
    for name in () if own else contents.groups:
        if name not in stated:
            find_tables(tree, name, open_rows, rows)
    for name in stated:
        where, group = f"{contents.where}, field {name}", contents.open(name)
        capacity = marked(group, CAPACITY_ATTRIBUTE) or "0"
        if not capacity.isdecimal() or len(capacity) > _MOST_DIGITS:
            problem = f"attribute {CAPACITY_ATTRIBUTE} is not a number of rows"
            raise FormatError(problem, where=where, found=capacity[:40])
        kind = marked(group, KIND_ATTRIBUTE)
        take_own(name, kind, int(capacity), tree, open_rows, rows, where)
    return rows
