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
    name: str, kind: object, contents: Contents, open_rows: Open, rows: RaggedRows, here: str
) -> None:
    if kind not in ("array", "bytes", "str"):
        raise FormatError(f"attribute {KIND_ATTRIBUTE} is {kind!r}", where=here)
    parts = {part: f"{name}/{part}".lstrip("/") for part in ("values", "first", "count")}
    for part, path in parts.items():
        if path not in contents.datasets:
            raise FormatError(f"the ragged field lacks its dataset {part}", where=here)
    index = [parts["first"], parts["count"]]
    table = table_of(index, contents, open_rows, _capacity(name, contents))
    stored_type = contents.datasets[parts["values"]]
    if table is None or stored_type.vlen or not stored_type.shape:
        raise FormatError("the ragged field has datasets of wrong types", where=here)
    if kind != "array" and (stored_type.carrier.dtype.str != "|u1" or len(stored_type.shape) != 1):
        raise FormatError("the text or bytes are not uint8", where=here)
    route = Route((table,), (f"{parts['first']},{parts['count']}",), kind)
    rows.routes[name] = (parts["values"], route)
    rows.used.update(parts.values())


def _capacity(name: str, contents: Contents) -> int:
    """Return the rows that dsprep gave each group of samples, or 0 if it wrote no groups."""
    if CAPACITY_ATTRIBUTE not in contents.groups[name]:
        return 0
    text = marked(contents.open(name), CAPACITY_ATTRIBUTE) or ""
    if not text.isdecimal() or len(text) > _MOST_DIGITS:
        problem = f"attribute {CAPACITY_ATTRIBUTE} is not a number of rows"
        raise FormatError(problem, where=name, found=text[:40])
    return int(text)
