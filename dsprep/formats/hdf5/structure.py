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
from dsprep.formats.ragged import RaggedRows, find_tables, table_of

_MOST_DIGITS = 18


Open = Callable[[str], DatasetField]


def discover(contents: Contents, open_rows: Open, where: object, *, own: bool) -> RaggedRows:
    """Return the ragged fields of a file; where dsprep wrote it (`own`), nothing is guessed.

    Raises
    ------
    FormatError
        If a group states that it is in dsprep's encoding but is not.
    """
    groups = contents.groups
    stated = [name for name, attributes in groups.items() if KIND_ATTRIBUTE in attributes]
    others = [] if own else [name for name in groups if KIND_ATTRIBUTE not in groups[name]]
    tables = find_tables(contents, others, open_rows)
    for name in stated:
        kind = marked(contents.open(name), KIND_ATTRIBUTE)
        _own_group(name, kind, contents, open_rows, tables, f"{where}, field {name}")
    return tables


def _own_group(
    name: str, kind: Any, contents: Contents, open_rows: Open, rows: RaggedRows, here: str
) -> None:
    paths = [f"{name}/{part}".lstrip("/") for part in ("values", "first", "count")]
    lost, table = [path for path in paths if path not in contents.datasets], None
    if not lost:
        table = table_of(paths[1:], contents, open_rows, _capacity(name, contents))
    stored = contents.datasets.get(paths[0])
    bytes_in_row = stored and stored.carrier.dtype.str == "|u1" and len(stored.shape) == 1
    if not (table and stored and stored.shape and not stored.vlen) or not (
        kind == "array" or (kind in ("bytes", "str") and bytes_in_row)
    ):
        raise FormatError(
            "the group is not a ragged field as dsprep writes it",
            where=here,
            expected="values, first and count; of bytes or str, values of uint8",
            found=f"{kind}, without {', '.join(lost)}" if lost else kind,
        )
    rows.routes[name] = (paths[0], Route((table,), (",".join(paths[1:]),), kind))
    rows.used.update(paths)


def _capacity(name: str, contents: Contents) -> int:
    """Return the rows that dsprep gave each group of samples, or 0 if it wrote no groups."""
    if CAPACITY_ATTRIBUTE not in contents.groups[name]:
        return 0
    text = marked(contents.open(name), CAPACITY_ATTRIBUTE) or ""
    if not text.isdecimal() or len(text) > _MOST_DIGITS:
        problem = f"attribute {CAPACITY_ATTRIBUTE} is not a number of rows"
        raise FormatError(problem, where=name, found=text[:40])
    return int(text)
