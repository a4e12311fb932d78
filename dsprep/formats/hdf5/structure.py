"""What the structure of a file means: ragged fields by index tables, and groups as samples.

Ragged fields are those of dsprep's own encoding, a group with the attribute ``dsprep_kind`` and the
datasets ``values``, ``first`` and ``count``, and what `dsprep.formats.ragged` finds.

Groups side by side, or datasets, are samples if the user says so (`sample_groups`); the fields are
the datasets in a group, by their paths in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import FieldSpec
from dsprep.errors import FormatError, SchemaError
from dsprep.formats.fields import missing_field
from dsprep.formats.foreign import WAY_OUT
from dsprep.formats.hdf5.attributes import CAPACITY_ATTRIBUTE, KIND_ATTRIBUTE, marked
from dsprep.formats.hdf5.datasets import Contents, StoredType
from dsprep.formats.hdf5.rows import Rows
from dsprep.formats.index_tables import Route
from dsprep.formats.ragged import RaggedRows, find_tables, table_of
from dsprep.formats.samples import (
    Sized,
    ambiguous,
    groups_named,
    listed,
    natural_key,
)

_MOST_DIGITS = 18


Open = Callable[[str], Rows]


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
    table = table_of(index, contents, open_rows, capacity(index, contents))
    stored_type = contents.datasets[parts["values"]]
    if table is None or stored_type.vlen or not stored_type.shape:
        raise FormatError("the ragged field has datasets of wrong types", where=here)
    if kind != "array" and (stored_type.carrier.dtype.str != "|u1" or len(stored_type.shape) != 1):
        raise FormatError("the text or bytes are not uint8", where=here)
    route = Route((table,), (f"{parts['first']},{parts['count']}",), kind)
    rows.routes[name] = (parts["values"], route)
    rows.used.update(parts.values())


def capacity(paths: Sequence[str], contents: Contents) -> int:
    """Return the rows that dsprep gave each group, or 0 if it wrote no groups."""
    folders = {path.rpartition("/")[0] for path in paths}
    folder = folders.pop() if len(folders) == 1 else ""
    if CAPACITY_ATTRIBUTE not in contents.groups.get(folder, ()):
        return 0
    text = marked(contents.open(folder), CAPACITY_ATTRIBUTE)
    if text is None:
        return 0
    if not text.isdecimal() or len(text) > _MOST_DIGITS:
        raise FormatError(
            f"attribute {CAPACITY_ATTRIBUTE} is not a number of rows",
            where=paths[0],
            found=text[:40],
        )
    return int(text)


_NUMBER = re.compile(r"\d+")

VALUES = "values"
"""The field of samples that are datasets, not groups."""


@dataclass(frozen=True)
class Samples:
    """Groups that are samples, in natural order; or datasets, of one field whose path is ``""``.

    Attributes
    ----------
    pattern
        As ``--field`` spells the groups.
    groups
        Their paths.
    members
        The shapes of each dataset in all groups by its path there, int64 of ``(samples, axes)``.
    notes
        What cannot be a field, one clause each.
    """

    pattern: str
    groups: tuple[str, ...]
    members: dict[str, NDArray[np.int64]]
    notes: tuple[str, ...] = ()

    def field(self, member: str) -> str:
        """Return how ``--field`` spells a field of these groups, and of no others."""
        return f"{self.pattern}/{member}".strip("/")

    @property
    def names(self) -> list[str]:
        """The names of the groups, behind what all of them have in common."""
        begin = len(self.pattern.partition("*")[0].rpartition("/")[0])
        return [g[begin:].strip("/") for g in self.groups]

    @property
    def counting(self) -> bool:
        """Whether the names of the groups do no more than count them."""
        return len({_NUMBER.sub("#", n) for n in self.names}) == 1


def sample_groups(contents: Contents, specs: Sequence[FieldSpec], others: Iterable[str]) -> Samples:
    """Return the groups that are samples, as the user says.

    `others` are names that are no datasets of the groups, which the user may name too.

    Raises
    ------
    AmbiguousError
        If there are several such groups.
    SchemaError
        If there are none, or what was named differs in them in more than its first axis.
    """
    beside = groups_named(contents.datasets, specs)
    if not beside or not beside[0].members:
        raise SchemaError("no groups side by side hold the same datasets", where=contents.where)
    if len(beside) > 1:
        arrays = {p: Sized(d.shape, d.nbytes) for p, d in contents.datasets.items()}
        raise ambiguous("several groups hold others", arrays, contents.where, groups_only=True)
    chosen = beside[0]
    named = {s.path.removeprefix(f"{chosen.pattern}").lstrip("/") for s in specs} - {*others}
    if chosen.members == ("",):
        named = {"" if path == VALUES else path for path in named}
    for path in sorted(named - {*chosen.members}):
        raise missing_field(path, chosen.members, contents.where)
    shapes: dict[str, NDArray[np.int64]] = {}
    notes = [f"{chosen.odd} has other datasets, too"] if chosen.odd and not specs else []
    like = re.compile("[^/]*".join(map(re.escape, chosen.pattern.split("*"))))
    empty = [g for g in contents.groups if g and like.fullmatch(g)]
    empty = sorted({*empty} - {*chosen.groups}, key=natural_key) if "" not in chosen.members else []
    if empty:
        notes.append(f"left out {listed(empty)}: without {chosen.members[0]}, or empty")
    for member in (m for m in chosen.members if m in named or not specs):
        types = [contents.datasets[f"{g}/{member}".rstrip("/")] for g in chosen.groups]
        differing = _differing(member, chosen.groups, types)
        if differing is None:
            shapes[member] = np.array([h.shape for h in types], np.int64).reshape(len(types), -1)
        elif specs or len(chosen.members) == 1:
            raise SchemaError(differing, where=contents.where, fix=WAY_OUT)
        else:
            notes.append(f"left out {differing}")
    return Samples(chosen.pattern, chosen.groups, shapes, tuple(notes))


def _differing(member: str, groups: Sequence[str], types: Sequence[StoredType]) -> str | None:
    """Return how the datasets of a member differ, if not in their first axis alone."""
    first = _same_field(types[0])
    k = next(
        (k for k, h in enumerate(types) if h is not types[0] and _same_field(h) != first), None
    )
    if k is None:
        return None
    return (
        f"{member} is {_show(types[0])} in {groups[0]} and {_show(types[k])} in {groups[k]}, and "
        "samples of a field may differ in their first axis only"
    )


def _same_field(stored_type: StoredType) -> tuple[object, ...]:
    """Return what two datasets have in common that are samples of one field."""
    s = stored_type
    return s.carrier, s.kind, s.vlen, len(s.shape), s.shape[1:]


def _show(stored_type: StoredType) -> str:
    text = "sequences of " if stored_type.vlen else ""
    return f"{text}{stored_type.carrier}[{','.join(map(str, stored_type.shape))}]"
