"""What the structure of a file means: ragged fields by index tables, and groups that are samples.

Four things name the values of ragged fields and their index tables (`discover`):

- dsprep's own encoding: a group with the attribute ``dsprep_kind`` and the datasets ``values``,
  ``first`` and ``count``;
- two datasets of integers in a group that are called ``first`` and ``count`` (``start`` and
  ``length``, ``x_start`` and ``x_len``, ...);
- a dataset of a compound type with such members, as in larcv3: ``extents(first, N)`` gives each
  event its rows in ``voxel_extents(first, N, ID)``, which gives each of those its ``voxels``;
- a dataset of N + 1 integers called ``indptr``, ``offsets`` or alike, as of sparse matrices in CSR
  and of lists in Arrow: sample i has the rows ``offsets[i] <= r < offsets[i + 1]``.

A name is a hint only: a table counts if it partitions a dataset of its group, row by row.

Groups side by side are taken for samples (`sample_groups`) where all have the same datasets, and
their names differ in a number alone or they are many; the fields are the datasets in a group, by
their paths in it. So are datasets side by side that differ in their first axes. Where the same
structure may as well mean something else, the user is asked (`Judged`). That follows from names,
shapes and types; no values are read.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import DType, FieldSpec
from dsprep.errors import FormatError, SchemaError
from dsprep.formats.hdf5.attributes import CAPACITY_ATTRIBUTE, KIND_ATTRIBUTE, marked
from dsprep.formats.hdf5.datasets import Contents, Held
from dsprep.formats.hdf5.rows import IndexTable, Route, Rows
from dsprep.formats.samples import listed, natural_key
from dsprep.formats.splits import by_part

_FIRST = re.compile(r"(?i)(.*?)_?(?:first|start|begin|offset)s?")
_COUNT = re.compile(r"(?i)(.*?)_?(?:n|count|length|len|size|num)s?")
_EDGES = re.compile(
    r"(?i)(?:.*[_.-])?(?:ind_?ptr|offsets?|row_?splits|(?:row_?)?ptr|crow_indices|cu_seqlens|slices)"
)
_VALUES = re.compile(r"(?i)(?:.*[_.-])?(?:data|content|values?|indices|col_indices|cols?|flat)")
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
    for name, attributes in contents.groups.items():
        if KIND_ATTRIBUTE in attributes:
            kind = marked(contents.open(name), KIND_ATTRIBUTE)
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
    what = contents.datasets[parts["values"]]
    if table is None or what.vlen or not what.shape:
        raise FormatError("the ragged field has datasets of wrong types", where=here)
    if kind != "array" and (what.carrier.dtype.str != "|u1" or len(what.shape) != 1):
        raise FormatError("the text or bytes are not uint8", where=here)
    route = Route((table,), (f"{parts['first']},{parts['count']}",), kind)
    found.routes[name] = (parts["values"], route)
    found.used.update(parts.values())


def table_of(paths: list[str], contents: Contents, open_rows: Open) -> IndexTable | None:
    """Return the index table in one or two datasets, or None if they are not a table.

    One dataset has members or two columns, the first rows and the numbers of rows, or one column of
    where each row begins and the last one ends; two have one each.
    """
    every = [contents.datasets[p] for p in paths]
    if any(what.vlen for what in every):
        return None
    shapes, dtypes = [what.shape for what in every], [what.carrier.dtype for what in every]
    whole = all(d.kind in "iu" for d in dtypes)
    if len(paths) == 2:
        if not whole or len(shapes[0]) != 1 or shapes[0] != shapes[1]:
            return None
        capacity = _capacity(paths, contents)
        return IndexTable(open_rows(paths[0]), open_rows(paths[1]), capacity=capacity)
    if whole and len(shapes[0]) == 1 and shapes[0][0]:
        rows = open_rows(paths[0])
        return IndexTable(rows, rows, edges=True)
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
    edges: list[str] = []
    for path in paths:
        what = contents.datasets[path]
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
            if _EDGES.fullmatch(name):
                edges.append(path)
    for prefix in starts.keys() & counts.keys():
        yield [starts[prefix], counts[prefix]]
        edges = [path for path in edges if path != starts[prefix]]
    yield from ([path] for path in edges if contents.datasets[path].shape[0])


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
    refused: dict[str, tuple[set[str], str]] = {}
    for parts in sorted(_candidates(paths, contents), key=lambda p: paths.index(p[0])):
        label = ",".join(parts)
        table = table_of(parts, contents, open_rows)
        total = None if table is None else table.total()
        if table is not None and table.edges and total is None:
            values = {p for p in paths if _VALUES.fullmatch(p.rpartition("/")[2])}
            refused[label] = ({label} | values, "does not begin at 0") if values else (set(), "")
        if table is None or total is None:
            continue
        targets = _targets(parts, paths, contents, total, table)
        if not targets and not table.edges:
            continue
        if table.partitions(total):
            tables[label] = _Candidate(label, tuple(parts), table, targets)
        elif targets:
            whole = {label} if table.edges else set()
            refused[label] = whole | set(targets), "has gaps or overlaps"
    for label in _nested([c for c in tables.values() if c.table.edges]):
        why = "counts lists in lists (--field NAME=VALUES@OUTER@INNER joins those of each sample)"
        refused[label] = set(tables.pop(label).targets) | {label}, why
    _reach({label: c for label, c in tables.items() if c.targets}, found)
    found.used.update(p for c in tables.values() if not c.targets and refused for p in c.parts)
    for label, (targets_, why) in refused.items():
        lost = [p for p in sorted(targets_) if p not in found.used and p not in found.routes]
        rows = contents.datasets[label.partition(",")[0]].shape[0]
        lost = [p for p in lost if label in targets_ or contents.datasets[p].shape[0] != rows]
        if lost:
            found.left_out.update(lost)
            found.notes.append(f"left out {listed(lost)}: {label} {why}")


def _targets(
    parts: list[str], paths: list[str], contents: Contents, total: int, table: IndexTable
) -> tuple[str, ...]:
    """Return the datasets among `paths` that have the rows which a table counts.

    Where the rows of what N + 1 numbers count are as many as the samples, only names can say which
    datasets have the ones and which the others.
    """
    unclear = table.edges and total == table.rows
    return tuple(
        p
        for p in paths
        if p not in parts
        and (shape := contents.datasets[p].shape)
        and shape[0] == total
        and not contents.datasets[p].vlen
        and not (unclear and not _VALUES.fullmatch(p.rpartition("/")[2]))
    )


def _nested(edges: list[_Candidate]) -> list[str]:
    """Return those whose rows are what others count: lists in the lists of a sample."""
    return [
        inner.name
        for inner in edges
        if any(
            inner is not outer
            and inner.table.rows == outer.table.total()
            and (inner.table.rows != outer.table.rows or not outer.targets)
            for outer in edges
        )
    ]


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
_PARTS = re.compile(r"(?i)(.*[^a-z])?(batch|part|chunk|shard|fold|split|block)([^a-z].*)?")
_MANY = 10
"""So many groups that are alike are samples, whatever their names and shapes."""

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

    def __str__(self) -> str:
        first, last = self.groups[0], self.groups[-1]
        fields = listed([m or VALUES for m in self.members])
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
    parents = {*inside, *(path.rpartition("/")[0] for path in contents.datasets)}
    empty: dict[str, list[str]] = defaultdict(list)
    for path in contents.groups:
        above = path.rpartition("/")[0]
        if path and path not in parents:
            empty[above].append(path)
    by_depth: dict[int, list[str]] = defaultdict(list)
    for parent in parents:
        by_depth[len(parent.split("/")) if parent else 0].append(parent)
    found: list[Judged] = []
    for depth in sorted(by_depth):
        for parent in sorted(by_depth[depth], key=natural_key):
            judged = _judge(parent, inside.get(parent, {}), empty[parent], contents)
            judged = judged or _judge_datasets(parent, contents)
            found += [] if judged is None else [judged]
        # As many groups in each of them may be the samples too.
        first = [j.samples.groups[0] for j in found if j.samples is not None]
        if found and not any(len(_family(inside.get(g, {}))[0]) >= _MANY for g in first):
            break
    return found


def joined(found: Sequence[Judged]) -> Samples | None:
    """Return the samples that several groups side by side hold, if they are all alike."""
    every = [j.samples for j in found if j.samples is not None]
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


def check_alike(found: Samples, contents: Contents) -> None:
    """Raise `SchemaError` unless the samples of each field differ in their first axis only."""
    for member in found.members:
        held = [contents.datasets[f"{g}/{member}".rstrip("/")] for g in found.groups]
        reason = _differing(member, found.groups, held)
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
    for member in sorted(members, key=lambda m: order[f"{groups[0]}/{m}"]):
        held = [contents.datasets[f"{g}/{member}"] for g in groups]
        differing = _differing(member, groups, held)
        if differing is None:
            shapes[member] = np.array([h.shape for h in held], np.int64).reshape(len(held), -1)
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
    return Judged(samples, reason)


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
            for path, held in children.items()
            if held != members
            and (held & members or ("#" in patterns[path] and patterns[path] in shared))
        ]
    return sorted(family, key=natural_key), set(members), odd


def _judge_datasets(parent: str, contents: Contents) -> Judged | None:
    """Do what `sample_groups` does for the datasets directly in one group."""
    kinds: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for path in contents.inside(parent):
        held = contents.datasets[path]
        if held.shape and not held.vlen:
            kinds[_same_field(held)].append(path)
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
    if len(lengths) < 3:
        reason = "each of these datasets may be a sample, or a field"
    return Judged(samples, reason)


def _one_axis(contents: Contents, paths: Iterable[str]) -> int | None:
    """Return the length of the first axis of all datasets, if all have one and of one length."""
    lengths = {contents.datasets[path].shape[:1] for path in paths}
    return lengths.pop()[0] if len(lengths) == 1 and () not in lengths else None


def _differing(member: str, groups: Sequence[str], held: Sequence[Held]) -> str | None:
    """Return how the datasets of a member differ, if not in their first axis alone."""
    first = _same_field(held[0])
    k = next((k for k, h in enumerate(held) if h is not held[0] and _same_field(h) != first), None)
    if k is None:
        return None
    return (
        f"{member} is {_show(held[0])} in {groups[0]} and {_show(held[k])} in "
        f"{groups[k]}, and samples of a field may differ in their first axis only"
    )


def _same_field(held: Held) -> tuple[object, ...]:
    """Return what two datasets have in common that are samples of one field."""
    return held.carrier, held.kind, held.vlen, len(held.shape), held.shape[1:]


def _show(held: Held) -> str:
    text = "sequences of " if held.vlen else ""
    return f"{text}{held.carrier}[{','.join(map(str, held.shape))}]"
