"""What the structure of a file means: ragged fields by index tables, and groups that are samples.

Three things name the values of ragged fields and their index tables (`discover`):

- dsprep's own encoding: a group with the attribute ``dsprep_kind`` and the datasets ``values``,
  ``first`` and ``count``;
- two datasets of integers in a group that are called ``first`` and ``count`` (``start`` and
  ``length``, ``x_start`` and ``x_len``, ...);
- a dataset of a compound type with such members, as in larcv3: ``extents(first, N)`` gives each
  event its rows in ``voxel_extents(first, N, ID)``, which gives each of those its ``voxels``.

A name is a hint only: a table counts if it partitions a dataset of its group, row by row.

Groups side by side are taken for samples (`sample_groups`) where all have the same datasets, and
their names differ in a number alone or they are many; the fields are the datasets in a group, by
their paths in it. Where the same structure may as well mean something else, the user is asked
(`Judged`). That follows from names, shapes and types; no values are read.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import DType, FieldSpec
from dsprep.errors import FormatError
from dsprep.formats.hdf5.attributes import CAPACITY_ATTRIBUTE, KIND_ATTRIBUTE, marked
from dsprep.formats.hdf5.datasets import Contents, Held
from dsprep.formats.hdf5.rows import IndexTable, Route, Rows
from dsprep.formats.samples import listed, natural_key

_FIRST = re.compile(r"(?i)(.*?)_?(?:first|start|begin|offset)s?")
_COUNT = re.compile(r"(?i)(.*?)_?(?:n|count|length|len|size|num)s?")
_MOST_DIGITS = 18
_STEP = 1 << 20
_MOST_TABLES = 6
"""In one group: the ways from table to table grow with the factorial of their number."""


@dataclass
class RaggedRows:
    """What `discover` found.

    Attributes
    ----------
    routes
        Field name to the path of its dataset and its route.
    used
        The datasets that are part of an index and are not fields.
    left_out
        Datasets that only an invalid index would reach.
    notes
        What was left out or is doubtful, one clause each.
    """

    routes: dict[str, tuple[str, Route]] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    left_out: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


Open = Callable[[str], Rows]


def discover(contents: Contents, open_rows: Open, where: object, *, own: bool) -> RaggedRows:
    """Return the ragged fields of a file; where dsprep wrote it (`own`), nothing is guessed.

    Raises
    ------
    FormatError
        If a group states that it is in dsprep's encoding but is not.
    """
    found = RaggedRows()
    for name, group in contents.groups.items():
        kind = marked(group, KIND_ATTRIBUTE)
        if kind is not None:
            _own_group(name, kind, contents, open_rows, found, f"{where}, field {name}")
        elif not own:
            _group(name, contents, open_rows, found)
    return found


def _own_group(
    name: str, kind: object, contents: Contents, open_rows: Open, found: RaggedRows, here: str
) -> None:
    if kind not in ("array", "bytes", "str"):
        raise FormatError(f"attribute {KIND_ATTRIBUTE} is {kind!r}", where=here)
    parts = {part: f"{name}/{part}".lstrip("/") for part in ("values", "first", "count")}
    for part, path in parts.items():
        if path not in contents.datasets:
            raise FormatError(f"the ragged field lacks its dataset {part}", where=here)
    table = table_of([parts["first"], parts["count"]], contents, open_rows)
    what = contents.datasets[parts["values"]][1]
    if table is None or what.vlen or not what.shape:
        raise FormatError("the ragged field has datasets of wrong types", where=here)
    if kind != "array" and (what.carrier.dtype.str != "|u1" or len(what.shape) != 1):
        raise FormatError("the text or bytes are not uint8", where=here)
    route = Route((table,), (f"{parts['first']},{parts['count']}",), kind)
    found.routes[name] = (parts["values"], route)
    found.used.update(parts.values())


def table_of(paths: list[str], contents: Contents, open_rows: Open) -> IndexTable | None:
    """Return the index table in one or two datasets, or None if they are not a table.

    One dataset has members or two columns, the first rows and the numbers of rows; two have one
    each.
    """
    every = [contents.datasets[p][1] for p in paths]
    if any(what.vlen for what in every):
        return None
    shapes, dtypes = [what.shape for what in every], [what.carrier.dtype for what in every]
    whole = all(d.kind in "iu" for d in dtypes)
    if len(paths) == 2:
        if not whole or len(shapes[0]) != 1 or shapes[0] != shapes[1]:
            return None
        capacity = _capacity(paths, contents)
        return IndexTable(open_rows(paths[0]), open_rows(paths[1]), capacity=capacity)
    members: tuple[str | int, str | int] | None = index_members(dtypes[0])
    if whole and shapes[0][1:] == (2,):
        members = (0, 1)
    elif members is None or len(shapes[0]) != 1:
        return None
    rows = open_rows(paths[0])
    return IndexTable(rows, rows, *members)


def _capacity(paths: list[str], contents: Contents) -> int:
    """Return the rows that dsprep gave each group, or 0 if it wrote no groups."""
    folders = {path.rpartition("/")[0] for path in paths}
    group = contents.groups.get(folders.pop()) if len(folders) == 1 else None
    text = None if group is None else marked(group, CAPACITY_ATTRIBUTE)
    if text is None:
        return 0
    if not text.isdecimal() or len(text) > _MOST_DIGITS:
        raise FormatError(
            f"attribute {CAPACITY_ATTRIBUTE} is not a number of rows",
            where=paths[0],
            found=text[:40],
        )
    return int(text)


def index_members(dtype: DType) -> tuple[str, str] | None:
    """Return the names of the first and the count member of a compound dtype, if it has both."""
    if dtype.names is None or dtype.fields is None:
        return None
    whole = [n for n in dtype.names if dtype.fields[n][0].kind in "iu"]
    first = [n for n in whole if (m := _FIRST.fullmatch(n)) and not m[1]]
    count = [n for n in whole if (m := _COUNT.fullmatch(n)) and not m[1]]
    return (first[0], count[0]) if len(first) == 1 and len(count) == 1 else None


def _candidates(paths: list[str], contents: Contents) -> Iterator[list[str]]:
    """Yield the datasets that look like index tables by their names and types."""
    starts: dict[str, str] = {}
    counts: dict[str, str] = {}
    for path in paths:
        what = contents.datasets[path][1]
        if what.vlen or len(what.shape) != 1:
            continue
        if index_members(what.carrier.dtype) is not None:
            yield [path]
        elif what.carrier.dtype.kind in "iu":
            name = path.rpartition("/")[2]
            if match := _FIRST.fullmatch(name):
                starts.setdefault(match[1], path)
            elif match := _COUNT.fullmatch(name):
                counts.setdefault(match[1], path)
    for prefix in starts.keys() & counts.keys():
        yield [starts[prefix], counts[prefix]]


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A table of one group, and the datasets of that group that it partitions."""

    name: str
    parts: tuple[str, ...]
    table: IndexTable
    targets: tuple[str, ...]


def _group(name: str, contents: Contents, open_rows: Open, found: RaggedRows) -> None:
    """Find the ragged fields among the datasets directly in one group."""
    paths = contents.inside(name)
    tables: dict[str, _Candidate] = {}
    refused: dict[str, set[str]] = {}
    for parts in sorted(_candidates(paths, contents), key=lambda p: paths.index(p[0])):
        label = ",".join(parts)
        table = table_of(parts, contents, open_rows)
        total = None if table is None else table.total()
        targets = tuple(
            p
            for p in paths
            if p not in parts
            and (shape := contents.datasets[p][1].shape)
            and shape[0] == total
            and not contents.datasets[p][1].vlen
        )
        if table is None or not targets or total is None:
            continue
        if table.partitions(total):
            tables[label] = _Candidate(label, tuple(parts), table, targets)
        else:
            refused[label] = set(targets)
    _reach(tables, found)
    for label, targets_ in refused.items():
        lost = [p for p in sorted(targets_) if p not in found.used and p not in found.routes]
        rows = contents.datasets[label.partition(",")[0]][1].shape[0]
        lost = [p for p in lost if contents.datasets[p][1].shape[0] != rows]
        if lost:
            found.left_out.update(lost)
            found.notes.append(f"left out {listed(lost)}: {label} has gaps or overlaps")


def _reach(tables: dict[str, _Candidate], found: RaggedRows) -> None:
    """Give each dataset that the tables partition its way from the samples.

    A table is reached by the longest way, since each is there to be used; values by the nearest.
    """
    candidates = list(tables.values())[:_MOST_TABLES]
    children = {
        a.name: [b for b in candidates if b is not a and set(b.parts) <= set(a.targets)]
        for a in candidates
    }
    reached = {b.name for a in candidates for b in children[a.name]}
    roots = [c for c in candidates if c.name not in reached] or candidates[:1]
    ways: dict[str, tuple[_Candidate, ...]] = {}
    stack: list[tuple[_Candidate, ...]] = [(root,) for root in reversed(roots)]
    while stack:
        way = stack.pop()
        last = way[-1]
        if len(way) > len(ways.get(last.name, ())):
            ways[last.name] = way
        stack.extend((*way, c) for c in reversed(children[last.name]) if c not in way)
    fits: dict[str, list[tuple[_Candidate, ...]]] = {}
    for way in ways.values():
        for path in way[-1].targets:
            fits.setdefault(path, []).append(way)
    members = {part: c for c in candidates for part in c.parts if c.name in ways}
    for root in roots:
        found.used.update(root.parts)
        used = {root.table.first_member, root.table.count_member}
        lost = [n for n in root.table.first.dtype.names or () if n not in used]
        if lost:
            found.notes.append(f"left out {listed(lost)} of the index {root.name}")
    for path, options in fits.items():
        owner = members.get(path)
        if owner in roots:
            continue
        chosen = min(options, key=len) if owner is None else ways[owner.name][:-1]
        found.routes[path] = (path, _route(chosen, owner, path))
        if any(not _same(chosen, other) for other in options) and owner is None:
            names = " and ".join(sorted({o[-1].name for o in options}))
            found.notes.append(
                f"{path} fits {names}: taken as rows of {chosen[-1].name}; "
                f"--field NAME={path}@{'@'.join(c.name for c in max(options, key=len))} otherwise"
            )


def _route(way: tuple[_Candidate, ...], owner: _Candidate | None, path: str) -> Route:
    rebase = None
    if owner is not None and owner.parts[0] == path:
        member = owner.table.first_member
        rebase = member if isinstance(member, str) else ""
    return Route(tuple(c.table for c in way), tuple(c.name for c in way), rebase=rebase)


def _same(short: tuple[_Candidate, ...], long: tuple[_Candidate, ...]) -> bool:
    """Whether two ways give every sample the same rows, judged by their tables alone.

    They do if one continues the other with tables that have one row for each row.
    """
    short, long = sorted((short, long), key=len)
    if long[: len(short)] != short:
        return False
    for table in (c.table for c in long[len(short) :]):
        if table.rows != table.total():
            return False
        for start in range(0, table.rows, _STEP):
            first, end = table.read(start, min(start + _STEP, table.rows), table.rows)
            if not bool((end - first == 1).all()):
                return False
    return True


_NUMBER = re.compile(r"\d+")
_MANY = 10
"""So many groups that are alike are samples, whatever their names and shapes."""

_ODD = 0.1
"""Groups that differ from the others, as a share; where there are more, they are not samples."""


@dataclass(frozen=True)
class Samples:
    """Groups that are samples: their paths, in natural order, in the group `parent`.

    `members` has the shapes of each dataset in all groups by its path there, int64 of
    ``(samples, axes)``.
    """

    parent: str
    groups: tuple[str, ...]
    members: dict[str, NDArray[np.int64]]

    def field(self, member: str) -> str:
        """Return how ``--field`` spells a field of these groups, and of no others."""
        return f"{self.parent}/*/{member}".lstrip("/")

    def has(self, specs: Iterable[FieldSpec]) -> bool:
        """Whether all fields that the user named are fields of these groups."""
        known = {*self.members, *map(self.field, self.members)}
        return all(spec.path in known for spec in specs)

    def __str__(self) -> str:
        first, last = self.groups[0], self.groups[-1]
        fields = listed(list(self.members))
        return f"{len(self.groups)} samples, {first} to {last}, with the fields {fields}"


class Judged(NamedTuple):
    """Groups that are samples; with a `reason` to doubt it, only if the user says so."""

    samples: Samples | None
    reason: str | None


def sample_groups(contents: Contents) -> list[Judged]:
    """Return the groups of a file that are or may be samples, only those next to the root."""
    inside: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in contents.datasets:
        parts = path.split("/")
        for k in range(len(parts) - 1):
            inside["/".join(parts[:k])]["/".join(parts[: k + 1])].add("/".join(parts[k + 1 :]))
    by_depth: dict[int, list[str]] = defaultdict(list)
    for parent in inside:
        by_depth[len(parent.split("/")) if parent else 0].append(parent)
    for depth in sorted(by_depth):
        judged = (_judge(parent, inside[parent], contents) for parent in by_depth[depth])
        found = [j for j in judged if j is not None]
        if found:
            return found
    return []


def _judge(parent: str, children: dict[str, set[str]], contents: Contents) -> Judged | None:
    """Do what `sample_groups` does for the groups directly in one group."""
    family = _family(children)
    if len(family) < 2:
        return None
    kinds = Counter(frozenset(children[g]) for g in family)
    members = kinds.most_common(1)[0][0]
    groups = [g for g in family if children[g] == members]
    odd = [g for g in family if children[g] != members]
    if len(groups) < 2 or len(odd) > max(1, _ODD * len(family)):
        return None
    order = {path: i for i, path in enumerate(contents.datasets)}
    shapes: dict[str, NDArray[np.int64]] = {}
    reason = None
    for member in sorted(members, key=lambda m: order[f"{groups[0]}/{m}"]):
        held = [contents.datasets[f"{g}/{member}"][1] for g in groups]
        differing = next(
            (k for k, h in enumerate(held) if _same_field(h) != _same_field(held[0])), None
        )
        if differing is None:
            shapes[member] = np.array([h.shape for h in held], np.int64).reshape(len(held), -1)
        elif reason is None:
            reason = (
                f"{member} is {_show(held[0])} in {groups[0]} and {_show(held[differing])} in "
                f"{groups[differing]}, and samples of a field may differ in their first axis only"
            )
    if reason is None and odd:
        reason = f"{odd[0]} differs from the others in {listed(sorted(members ^ children[odd[0]]))}"
    if reason is not None and _one_axis(
        contents, (f"{g}/{m}" for g in family for m in children[g])
    ):
        return None  # fields of their own, with as many samples
    samples = Samples(parent, tuple(groups), shapes) if shapes else None
    if (
        reason is None
        and len(groups) < _MANY
        and all(_one_axis(contents, (f"{g}/{m}" for m in members)) for g in groups)
    ):
        reason = "in each of them, the first axis may count samples as well"
    return Judged(samples, reason)


def _family(children: Iterable[str]) -> list[str]:
    """Return the groups that may be samples by their names, in natural order."""
    names = {path: path.rpartition("/")[2] for path in children}
    patterns = Counter(_NUMBER.sub("#", n) for n in names.values() if _NUMBER.search(n))
    found = list(names)
    if patterns and patterns.most_common(1)[0][1] >= 2:
        pattern = patterns.most_common(1)[0][0]
        found = [p for p, n in names.items() if _NUMBER.sub("#", n) == pattern]
    elif len(found) < _MANY:
        return []
    return sorted(found, key=natural_key)


def _one_axis(contents: Contents, paths: Iterable[str]) -> bool:
    """Whether datasets all have a first axis, and of the same length."""
    lengths = {contents.datasets[path][1].shape[:1] for path in paths}
    return len(lengths) == 1 and () not in lengths


def _same_field(held: Held) -> tuple[object, ...]:
    """Return what two datasets have in common that are samples of one field."""
    return held.carrier, held.kind, held.vlen, len(held.shape), held.shape[1:]


def _show(held: Held) -> str:
    text = "sequences of " if held.vlen else ""
    return f"{text}{held.carrier}[{','.join(map(str, held.shape))}]"
