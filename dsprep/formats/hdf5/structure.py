"""Ragged fields by index tables.

Ragged fields are those of dsprep's own encoding, a group with the attribute ``dsprep_kind`` and the
datasets ``values``, ``first`` and ``count``, and what `dsprep.formats.ragged` finds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsprep.errors import FormatError
from dsprep.formats.hdf5.attributes import CAPACITY_ATTRIBUTE, KIND_ATTRIBUTE, marked
from dsprep.formats.hdf5.datasets import Contents
from dsprep.formats.hdf5.fields import DatasetField
from dsprep.formats.index_tables import Route
from dsprep.formats.ragged import RaggedRows, Tree, find_tables, table_of

_MOST_DIGITS = 18


Open = Callable[[str], DatasetField]


def discover(contents: Contents, tree: Tree, open_rows: Open, *, own: bool) -> RaggedRows:
    """Return the ragged fields of a file; where dsprep wrote it (`own`), nothing is guessed.

    Raises
    ------
    FormatError
        If a group states that it is in dsprep's encoding but is not.
    """
    stated = [name for name, names in contents.groups.items() if KIND_ATTRIBUTE in names]
    others = [] if own else [name for name in contents.groups if name not in stated]
    rows = find_tables(tree, others, open_rows)
    for name in stated:
        paths = [f"{name}/{part}".lstrip("/") for part in ("values", "first", "count")]
        lost = [path for path in paths if path not in contents.datasets]
        kind: Any = marked(contents.open(name), KIND_ATTRIBUTE)
        capacity = marked(contents.open(name), CAPACITY_ATTRIBUTE) or "0"
        table = None
        if not lost and capacity.isdecimal() and len(capacity) <= _MOST_DIGITS:
            values = contents.datasets[paths[0]]
            of_bytes = values.carrier.dtype.str == "|u1" and len(values.shape) == 1
            if (kind == "array" or (kind in ("bytes", "str") and of_bytes)) and (
                values.shape and not values.vlen
            ):
                table = table_of(paths[1:], tree, open_rows, int(capacity))
        if table is None:
            raise FormatError(
                "the group is not a ragged field as dsprep writes it",
                where=f"{contents.where}, field {name}",
                expected="values, first and count; of bytes or str, values of uint8",
                found=f"{kind}, without {', '.join(lost)}" if lost else kind,
            )
        rows.routes[name] = (paths[0], Route((table,), (",".join(paths[1:]),), kind))
        rows.used.update(paths)
    return rows
