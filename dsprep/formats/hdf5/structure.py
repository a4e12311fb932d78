"""What the structure of a file means: ragged fields by index tables, and groups as samples.

Ragged fields are those of dsprep's own encoding, a group with the attribute ``dsprep_kind`` and the
datasets ``values``, ``first`` and ``count``, and what `dsprep.formats.ragged` finds.

Groups side by side are taken for samples (`sample_groups`) where all have the same datasets, and
their names differ in a number alone or they are many; the fields are the datasets in a group, by
their paths in it. So are datasets side by side that differ in their first axes. Where the same
structure may as well mean something else, the user is asked (`Judged`). That follows from names,
shapes and types; no values are read.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import FieldSpec
from dsprep.errors import FormatError, SchemaError
from dsprep.formats.hdf5.attributes import CAPACITY_ATTRIBUTE, KIND_ATTRIBUTE, marked
from dsprep.formats.hdf5.datasets import Contents, StoredType
from dsprep.formats.hdf5.rows import Rows
from dsprep.formats.index_tables import Route
from dsprep.formats.ragged import RaggedRows, find_tables, table_of
from dsprep.formats.samples import listed, natural_key
from dsprep.formats.splits import by_part

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
_PARTS = re.compile(r"(?i)(.*[^a-z])?(batch|part|chunk|shard|fold|split|block)([^a-z].*)?")
_MANY = 10
"""From this many on, groups that are alike are samples, whatever their names and shapes."""

_ROWS = 100
"""Rows for each array from which on arrays side by side are columns of a table."""

_SHORT = 64
"""Numbers below which an array of one axis is no sample, unless there are many more of them."""

_ODD = 0.1
"""Groups that differ from the others, as a share; where there are more, they are not samples."""

VALUES = "values"
"""The field of samples that are datasets, not groups."""


@dataclass(frozen=True)
class Samples:
    """Groups that are samples: their paths, in natural order, in the group `parent`.

    Or datasets that are samples, of one field whose path in them is ``""``. Where several groups
    hold them, `parent` is a pattern such as ``*``.

    `members` has the shapes of each dataset in all groups by its path there, int64 of
    ``(samples, axes)``.
    """

    parent: str
    groups: tuple[str, ...]
    members: dict[str, NDArray[np.int64]]

    def field(self, member: str) -> str:
        """Return how ``--field`` spells a field of these groups, and of no others."""
        return f"{self.parent}/*/{member}".strip("/")

    def has(self, specs: Iterable[FieldSpec], others: Iterable[str]) -> bool:
        """Whether all fields that the user named are of these groups, or among `others`."""
        names = {m or VALUES for m in self.members} | set(others)
        known = names | {self.field(n) for n in (*self.members, *others)}
        return all(spec.path in known for spec in specs)

    @property
    def names(self) -> list[str]:
        """The names of the groups, behind what all of them have in common."""
        begin = len(self.parent.partition("*")[0].rstrip("/")) if self.parent else 0
        return [g[begin:].strip("/") for g in self.groups]

    @property
    def counting(self) -> bool:
        """Whether the names of the groups do no more than count them."""
        return len({_NUMBER.sub("#", n) for n in self.names}) == 1

    @property
    def numbered(self) -> bool:
        """Whether their names count the groups one by one, from 0 or 1 on."""
        numbers = [_NUMBER.findall(name) for name in self.names]
        if not self.counting or len(numbers[0]) != 1:
            return False
        first = int(numbers[0][0])
        return first < 2 and [int(n[0]) for n in numbers] == [*range(first, first + len(numbers))]

    def __str__(self) -> str:
        first, last = self.groups[0], self.groups[-1]
        fields = listed([m or VALUES for m in self.members])
        return f"{len(self.groups)} samples, {first} to {last}, with the fields {fields}"


class Judged(NamedTuple):
    """Groups that are samples; with a `reason` to doubt it, only if the user says so.

    `differing` has the fields, as ``--field`` spells them, that cannot be read as samples, and why.
    """

    samples: Samples | None
    reason: str | None
    differing: Mapping[str, str] = {}


def beside(samples: Samples, contents: Contents) -> list[str]:
    """Return the datasets beside numbered groups that have as many rows, one for each of them."""
    if not samples.numbered:
        return []
    near, groups = {samples.parent, samples.parent.rpartition("/")[0]}, set(samples.groups)
    return [
        path
        for group in sorted(near)
        for path in contents.inside(group)
        if path not in groups
        and contents.datasets[path].shape[:1] == (len(samples.groups),)
        and (len(contents.datasets[path].shape) == 1 or not contents.datasets[path].vlen)
    ]


def sample_groups(contents: Contents) -> list[Judged]:
    """Return the groups of a file that are or may be samples, only those next to the root."""
    inside: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in contents.datasets:
        parts = path.split("/")
        for k in range(len(parts) - 1):
            inside["/".join(parts[:k])]["/".join(parts[: k + 1])].add("/".join(parts[k + 1 :]))
    parents = {*inside, *(path.rpartition("/")[0] for path in contents.datasets)}
    empty: dict[str, list[str]] = defaultdict(list)
    for path in contents.groups:
        above = path.rpartition("/")[0]
        if path and path not in parents:
            empty[above].append(path)
    by_depth: dict[int, list[str]] = defaultdict(list)
    for parent in parents:
        by_depth[len(parent.split("/")) if parent else 0].append(parent)
    groups: list[Judged] = []
    for depth in sorted(by_depth):
        for parent in sorted(by_depth[depth], key=natural_key):
            judged = _judge(parent, inside.get(parent, {}), empty[parent], contents)
            judged = judged or _judge_datasets(parent, contents)
            groups += [] if judged is None else [judged]
        # As many groups in each of them may be the samples too.
        first = [j.samples.groups[0] for j in groups if j.samples is not None]
        if groups and not any(len(_family(inside.get(g, {}))[0]) >= _MANY for g in first):
            break
    return groups


def joined(judged: Sequence[Judged]) -> Samples | None:
    """Return the samples that several groups side by side hold, if they are all alike."""
    every = [j.samples for j in judged if j.samples is not None]
    deepest = max((s.parent.count("/") for s in every), default=0)
    every = [s for s in every if s.parent.count("/") == deepest and s.parent]
    parents = {s.parent.rpartition("/")[0] for s in every}
    first = every[0] if every else None
    if first is None or len(every) < 2 or len(parents) > 1:
        return None
    axes = {m: shapes.shape[1] for m, shapes in first.members.items()}
    if any({m: shapes.shape[1] for m, shapes in s.members.items()} != axes for s in every):
        return None
    members = {m: np.concatenate([s.members[m] for s in every]) for m in first.members}
    groups = tuple(g for s in every for g in s.groups)
    return Samples(f"{parents.pop()}/*".lstrip("/"), groups, members)


def check_alike(samples: Samples, contents: Contents) -> None:
    """Raise `SchemaError` unless the samples of each field differ in their first axis only."""
    for member in samples.members:
        types = [contents.datasets[f"{g}/{member}".rstrip("/")] for g in samples.groups]
        reason = _differing(member, samples.groups, types)
        if reason is not None:
            raise SchemaError(reason, where=contents.where)


def _judge(
    parent: str, children: dict[str, set[str]], empty: Sequence[str], contents: Contents
) -> Judged | None:
    """Do what `sample_groups` does for the groups directly in one group.

    `children` are those with datasets, and what these are; `empty` are those without.
    """
    family, members, odd = _family(children)
    groups = [g for g in family if children[g] == members]
    if len(groups) < 2 or len(odd) > max(1, _ODD * (len(groups) + len(odd))):
        return None
    order = {path: i for i, path in enumerate(contents.datasets)}
    shapes: dict[str, NDArray[np.int64]] = {}
    reason = None
    unlike: dict[str, str] = {}
    for member in sorted(members, key=lambda m: order[f"{groups[0]}/{m}"]):
        types = [contents.datasets[f"{g}/{member}"] for g in groups]
        differing = _differing(member, groups, types)
        if differing is None:
            shapes[member] = np.array([h.shape for h in types], np.int64).reshape(len(types), -1)
        else:
            unlike[f"{parent}/*/{member}".strip("/")] = differing
        reason = reason or differing
    if reason is None and odd:
        reason = f"{odd[0]} differs from the others in {listed(sorted(members ^ children[odd[0]]))}"
    if reason is None:
        patterns = {_pattern(g) for g in groups} - {""}
        lacking = next((g for g in empty if _pattern(g) in patterns), None)
        reason = lacking and f"{lacking} is empty, or nothing in it can be a field"
    rows = _one_axis(contents, (f"{g}/{m}" for g in groups for m in members))
    columns = rows is not None and (len(groups) < _MANY or rows >= _ROWS * len(groups))
    if reason is not None and columns:
        return None  # fields of their own, with as many samples
    samples = Samples(parent, tuple(groups), shapes) if shapes else None
    each = all(_one_axis(contents, (f"{g}/{m}" for m in members)) is not None for g in groups)
    if reason is None:
        names = [g.rpartition("/")[2] for g in groups]
        if each and (len(groups) < _MANY or columns or all(map(_PARTS.fullmatch, names))):
            reason = "in each of them, the first axis may count samples as well"
        elif len(by_part(names).keys() - {""}) > 1:
            reason = "their names are those of splits"
    return Judged(samples, reason, unlike)


def _pattern(path: str) -> str:
    """Return the last name in a path with its numbers left out; "" if it has none."""
    name = path.rpartition("/")[2]
    pattern = _NUMBER.sub("#", name)
    return "" if pattern == name else pattern


def _family(children: dict[str, set[str]]) -> tuple[list[str], set[str], list[str]]:
    """Return the groups that may be samples, in natural order, what they hold, and the odd ones.

    Odd ones have names like theirs, or some of the same datasets, but not all.
    """
    if len(children) < 2:
        return [], set(), []
    patterns = {path: _NUMBER.sub("#", path.rpartition("/")[2]) for path in children}
    numbered = Counter(p for p in patterns.values() if "#" in p)
    pattern, count = numbered.most_common(1)[0] if numbered else ("", 0)
    kinds = Counter(frozenset(members) for members in children.values())
    members, alike = kinds.most_common(1)[0]
    family = [path for path in children if children[path] == members]
    if alike < _MANY:
        if count < 2:
            return [], set(), []
        kinds = Counter(frozenset(children[path]) for path in children if patterns[path] == pattern)
        members = kinds.most_common(1)[0][0]
        family = [p for p in children if patterns[p] == pattern and children[p] == members]
        odd = [p for p in children if patterns[p] == pattern and children[p] != members]
    else:
        shared = {patterns[path] for path in family}
        odd = [
            path
            for path, stored_type in children.items()
            if stored_type != members
            and (stored_type & members or ("#" in patterns[path] and patterns[path] in shared))
        ]
    return sorted(family, key=natural_key), set(members), odd


def _judge_datasets(parent: str, contents: Contents) -> Judged | None:
    """Do what `sample_groups` does for the datasets directly in one group."""
    kinds: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for path in contents.inside(parent):
        stored_type = contents.datasets[path]
        if stored_type.shape and not stored_type.vlen:
            kinds[_same_field(stored_type)].append(path)
    largest: list[str] = max(kinds.values(), key=len, default=[])
    paths = sorted(largest, key=natural_key)
    if len(paths) < _MANY:
        return None
    patterns = Counter(_NUMBER.sub("#", p.rpartition("/")[2]) for p in paths)
    pattern, count = patterns.most_common(1)[0]
    numbered = "#" in pattern and count >= (1 - _ODD) * len(paths)
    if not numbered and len(paths) < _MANY**2:
        return None
    shapes = np.array([contents.datasets[p].shape for p in paths], np.int64).reshape(len(paths), -1)
    lengths = np.unique(shapes[:, 0])
    if len(lengths) == 1:
        rows, many = int(lengths[0]), len(paths)
        few = shapes.shape[1] == 1 and rows < _SHORT and many < _MANY * rows
        if few or rows >= _ROWS * many:
            return None  # columns of a table
    samples = Samples(parent, tuple(paths), {"": shapes})
    reason = None
    if len(lengths) < 3 and not beside(samples, contents):
        reason = "each of these datasets may be a sample, or a field"
    return Judged(samples, reason)


def _one_axis(contents: Contents, paths: Iterable[str]) -> int | None:
    """Return the length of the first axis of all datasets, if all have one and of one length."""
    lengths = {contents.datasets[path].shape[:1] for path in paths}
    return lengths.pop()[0] if len(lengths) == 1 and () not in lengths else None


def _differing(member: str, groups: Sequence[str], types: Sequence[StoredType]) -> str | None:
    """Return how the datasets of a member differ, if not in their first axis alone."""
    first = _same_field(types[0])
    k = next(
        (k for k, h in enumerate(types) if h is not types[0] and _same_field(h) != first), None
    )
    if k is None:
        return None
    return (
        f"{member} is {_show(types[0])} in {groups[0]} and {_show(types[k])} in {groups[k]}: "
        f"{_difference(types[0], types[k])}, and samples of a field may differ in their first axis "
        "only"
    )


def _difference(one: StoredType, other: StoredType) -> str:
    if len(one.shape) != len(other.shape):
        return "they differ in their number of axes"
    axes = [i for i, (a, b) in enumerate(zip(one.shape, other.shape, strict=True)) if a != b and i]
    if not axes:
        return "they differ in their types"
    sizes = f"{one.shape[axes[0]]} and {other.shape[axes[0]]}"
    return f"they differ in axis {axes[0]} ({sizes})"


def _same_field(stored_type: StoredType) -> tuple[object, ...]:
    """Return what two datasets have in common that are samples of one field."""
    return (
        stored_type.carrier,
        stored_type.kind,
        stored_type.vlen,
        len(stored_type.shape),
        stored_type.shape[1:],
    )


def _show(stored_type: StoredType) -> str:
    text = "sequences of " if stored_type.vlen else ""
    return f"{text}{stored_type.carrier}[{','.join(map(str, stored_type.shape))}]"
