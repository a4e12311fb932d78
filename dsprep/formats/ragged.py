"""Ragged fields by index tables: the one rule for all formats that hold named arrays.

Names and shapes say what may be a table (`find_tables`):

- two arrays of integers in a group that are called ``first`` and ``count`` (``start`` and
  ``length``, ``x_start`` and ``x_len``, ...);
- an array of a compound type with such members, as in larcv3: ``extents(first, N)`` gives each
  event its rows in ``voxel_extents(first, N, ID)``, which gives each of those its ``voxels``;
- an array of N + 1 integers called ``indptr``, ``offsets`` or alike, as of sparse matrices in CSR
  and of lists in Arrow: sample i has the rows ``offsets[i] <= r < offsets[i + 1]``;
- N integers called ``x_index`` beside ``x``, as NWB has them: where the rows of each sample end.

A name is a hint only: a table counts if it partitions an array of its group, row by row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from dsprep.core.schema import DType, FieldSpec
from dsprep.errors import UsageError
from dsprep.formats.index_tables import IndexTable, Numbers, Route
from dsprep.formats.samples import listed

_FIRST = re.compile(r"(?i)(.*?)_?(?:first|start|begin|offset)s?")
_COUNT = re.compile(r"(?i)(.*?)_?(?:n|count|length|len|size|num)s?")
_BOUNDS = re.compile(
    r"(?i)(?:.*[_.-])?(?:ind_?ptr|offsets?|row_?splits|(?:row_?)?ptr|crow_indices|cu_seqlens|slices"
    r"|jc)"
)
_ENDS = re.compile(r"(?i)(.+)_(?:index|ends?)")
_VALUES = re.compile(r"(?i)(?:.*[_.-])?(?:data|content|values?|indices|col_indices|cols?|flat|ir)")
_STEP = 1 << 20
_MOST_TABLES = 6
"""In one group that lead to each other: the ways grow with the factorial of their number."""


class ArrayForm(Protocol):
    """What is known of an array without reading it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def dtype(self) -> DType:
        """Of an element."""

    @property
    def vlen(self) -> bool:
        """Whether each element is a sequence of its own length."""


class Tree(Protocol):
    """The arrays of a file by path, in its order, and its groups: ``""`` is the root."""

    @property
    def datasets(self) -> Mapping[str, ArrayForm]:
        """What is known of the arrays."""

    @property
    def groups(self) -> Mapping[str, Collection[str]]:
        """The names of the attributes of each group."""

    def inside(self, group: str) -> Sequence[str]:
        """Return the paths of the arrays directly in a group."""


class ArrayTree:
    """A `Tree` of arrays whose groups follow from their paths, and may have attributes."""

    def __init__(
        self,
        datasets: Mapping[str, ArrayForm],
        groups: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        self.datasets: Mapping[str, ArrayForm] = datasets
        self._inside: dict[str, list[str]] = {"": []}
        for path in datasets:
            self._inside.setdefault(path.rpartition("/")[0], []).append(path)
        self.groups: Mapping[str, Collection[str]] = {
            **dict.fromkeys(self._inside, ()),
            **(groups or {}),
        }

    def inside(self, group: str) -> Sequence[str]:
        """Return the paths of the arrays directly in a group."""
        return self._inside.get(group, [])


Open = Callable[[str], Numbers]


@dataclass
class RaggedRows:
    """What `find_tables` found.

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


def find_tables(tree: Tree, groups: Iterable[str], open_rows: Open) -> RaggedRows:
    """Return the ragged fields in some groups, each with the tables that are beside it."""
    ragged_rows = RaggedRows()
    for group in groups:
        _find_in(group, tree, open_rows, ragged_rows)
    return ragged_rows


def table_of(
    paths: Sequence[str], tree: Tree, open_rows: Open, capacity: int = 0
) -> IndexTable | None:
    """Return the index table in one or two arrays, or None if they are not a table.

    One array has members or two columns, the first rows and the numbers of rows, or one column of
    N + 1 bounds or N ends; two have one each.
    """
    arrays = [tree.datasets[p] for p in paths]
    if any(array.vlen for array in arrays):
        return None
    shapes, dtypes = [array.shape for array in arrays], [array.dtype for array in arrays]
    integers = all(d.kind in "iu" for d in dtypes)
    first = paths[0]
    if len(paths) == 2:
        if not integers or len(shapes[0]) != 1 or shapes[0] != shapes[1]:
            return None
        return IndexTable(tuple(paths), open_rows(first), open_rows(paths[1]), capacity=capacity)
    if integers and len(shapes[0]) == 1 and shapes[0][0]:
        rows, ends = open_rows(first), _ENDS.fullmatch(first.rpartition("/")[2])
        return IndexTable((first,), rows, rows, "ends" if ends else "bounds")
    members: tuple[str | int, str | int] | None = index_members(dtypes[0])
    if integers and shapes[0][1:] == (2,):
        members = (0, 1)
    elif members is None or len(shapes[0]) != 1:
        return None
    rows = open_rows(first)
    return IndexTable((first,), rows, rows, "counts", *members)


def route_of(
    spec: FieldSpec,
    tree: Tree,
    open_rows: Open,
    where: object,
    capacity: Callable[[Sequence[str]], int] = lambda paths: 0,
) -> Route:
    """Return the route to an array through the tables that the user named.

    `capacity` returns the rows that dsprep gave each group of what two arrays count.

    Raises
    ------
    UsageError
        If one of them is no table, or does not divide what comes next.
    """
    if tree.datasets[spec.path].vlen:
        raise UsageError(
            f"{spec.path} holds sequences of variable length, not rows",
            where=where,
            fix="name it without an index table",
        )
    tables = []
    for entry in spec.index:
        parts = table_paths(entry)
        few = len(parts) <= 2
        table = table_of(parts, tree, open_rows, capacity(parts)) if few else None
        if table is None:
            raise UsageError(
                f"{entry} is not an index table",
                where=where,
                expected="a table with members such as first and count, one of (first, count) "
                "or (begin, end) rows, N + 1 bounds, N ends, FIRST,COUNT, or BEGIN,END",
            )
        tables.append(table)
    rows = (*(t.rows for t in tables[1:]), *tree.datasets[spec.path].shape[:1])
    for entry, table, count in zip(spec.index, tables, rows, strict=False):
        paired = replace(table, form="pairs")
        if table.form == "counts" and not table.partitions(count) and paired.partitions(count):
            tables[tables.index(table)] = table = paired
        if table.form != "counts" and not table.partitions(count):
            raise UsageError(
                f"{entry} is not an index table of {spec.path}",
                where=where,
                expected=f"numbers that rise from 0 to {count}, or FIRST,COUNT",
            )
    return Route(tuple(tables), spec.index)


def table_paths(entry: str) -> list[str]:
    """Return the paths in one part of ``--field NAME=PATH@PART``."""
    return [p.strip().strip("/") for p in entry.split(",")]


def may_be_table(path: str) -> bool:
    """Whether the name of an array is one that tables have."""
    name = path.rpartition("/")[2]
    return any(pattern.fullmatch(name) for pattern in (_FIRST, _COUNT, _BOUNDS, _ENDS))


def index_members(dtype: DType) -> tuple[str, str] | None:
    """Return the names of the first and the count member of a compound dtype, if it has both."""
    if dtype.names is None or dtype.fields is None:
        return None
    integers = [n for n in dtype.names if dtype.fields[n][0].kind in "iu"]
    first = [n for n in integers if (m := _FIRST.fullmatch(n)) and not m[1]]
    count = [n for n in integers if (m := _COUNT.fullmatch(n)) and not m[1]]
    return (first[0], count[0]) if len(first) == 1 and len(count) == 1 else None


def _candidates(paths: Sequence[str], tree: Tree) -> Iterator[list[str]]:
    """Yield the arrays that look like index tables by their names and types."""
    starts: dict[str, str] = {}
    counts: dict[str, str] = {}
    edges: list[str] = []
    for path in paths:
        array = tree.datasets[path]
        if array.vlen or len(array.shape) != 1:
            continue
        if index_members(array.dtype) is not None:
            yield [path]
        elif array.dtype.kind in "iu":
            name = path.rpartition("/")[2]
            if match := _FIRST.fullmatch(name):
                starts.setdefault(match[1], path)
            elif match := _COUNT.fullmatch(name):
                counts.setdefault(match[1], path)
            ends = _ENDS.fullmatch(path)
            if _BOUNDS.fullmatch(name) or (ends and ends[1] in tree.datasets):
                edges.append(path)
    for prefix in starts.keys() & counts.keys():
        yield [starts[prefix], counts[prefix]]
        edges = [path for path in edges if path != starts[prefix]]
    yield from ([path] for path in edges if tree.datasets[path].shape[0])


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A table of one group, and the datasets of that group that it partitions."""

    name: str
    parts: tuple[str, ...]
    table: IndexTable
    targets: tuple[str, ...]


def _find_in(name: str, tree: Tree, open_rows: Open, ragged_rows: RaggedRows) -> None:
    """Find the ragged fields among the arrays directly in one group."""
    paths = tree.inside(name)
    tables: dict[str, _Candidate] = {}
    refused: dict[str, tuple[set[str], str]] = {}
    for parts in sorted(_candidates(paths, tree), key=lambda p: paths.index(p[0])):
        label = ",".join(parts)
        table = table_of(parts, tree, open_rows)
        total = None if table is None else table.total()
        edges = table is not None and table.form != "counts"
        if edges and total is None:
            values = {p for p in paths if _VALUES.fullmatch(p.rpartition("/")[2])}
            refused[label] = ({label} | values, "does not begin at 0") if values else (set(), "")
        if table is None or total is None:
            continue
        targets = _targets(parts, paths, tree, total, table)
        if not targets and not edges:
            continue
        of_texts = [p for p in targets if tree.datasets[p].vlen]
        if of_texts:
            refused[label] = {label, *of_texts}, "counts values that vary in length themselves"
        elif table.partitions(total):
            tables[label] = _Candidate(label, tuple(parts), table, targets)
        elif targets:
            labels = {label} if edges else set()
            refused[label] = labels | set(targets), "has gaps or overlaps"
    for outer, inner in _nested([c for c in tables.values() if c.table.form != "counts"]):
        reason = (
            "counts lists in lists (--field NAME=VALUES@OUTER@INNER joins those of each sample)"
        )
        refused[inner] = set(tables.pop(inner).targets) | {inner}, reason
        kept = tuple(p for p in tables[outer].targets if p != inner)
        tables[outer] = replace(tables[outer], targets=kept)
        if not kept:
            refused[outer] = {outer}, f"counts rows of {inner}, which is left out too"
    _reach({label: c for label, c in tables.items() if c.targets}, ragged_rows)
    for label, (owned, reason) in refused.items():
        lost = [
            p for p in sorted(owned) if p not in ragged_rows.used and p not in ragged_rows.routes
        ]
        rows = tree.datasets[label.partition(",")[0]].shape[0]
        lost = [p for p in lost if label in owned or tree.datasets[p].shape[0] != rows]
        if lost:
            ragged_rows.left_out.update(lost)
            ragged_rows.notes.append(f"left out {listed(lost)}: {label} {reason}")


def _targets(
    parts: list[str], paths: Sequence[str], tree: Tree, total: int, table: IndexTable
) -> tuple[str, ...]:
    """Return the arrays among `paths` that have the rows which a table counts.

    Ends are those of one array. Where the rows of what bounds count are as many as the samples,
    only names can say which arrays have the ones and which the others.
    """
    ends = _ENDS.fullmatch(parts[0]) if table.form == "ends" else None
    if ends:
        shape = tree.datasets[ends[1]].shape
        return (ends[1],) if shape and shape[0] == total else ()
    unclear = table.form == "bounds" and total == table.rows
    return tuple(
        p
        for p in paths
        if p not in parts
        and (shape := tree.datasets[p].shape)
        and shape[0] == total
        and not tree.datasets[p].vlen
        and not (unclear and not _VALUES.fullmatch(p.rpartition("/")[2]))
    )


def _nested(edges: list[_Candidate]) -> list[tuple[str, str]]:
    """Return pairs of tables of which the second one counts lists in the lists of the first."""
    outer_of: dict[str, str] = {}
    for outer in edges:
        for inner in edges:
            if inner is outer or inner.table.rows != outer.table.total():
                continue
            if outer.table.form == "ends":
                counted = inner.name in outer.targets
            else:
                counted = inner.table.rows != outer.table.rows or not outer.targets
            if counted:
                outer_of.setdefault(inner.name, outer.name)
    return [(outer, inner) for inner, outer in outer_of.items()]


def _reach(tables: dict[str, _Candidate], ragged_rows: RaggedRows) -> None:
    """Give each dataset that the tables partition its way from the samples.

    A table is reached by the longest way, since each is there to be used; values by the nearest.
    """
    every = list(tables.values())
    children = {
        a.name: [b for b in every if b is not a and set(b.parts) <= set(a.targets)] for a in every
    }
    linked = [c for c in every if children[c.name] or any(c in b for b in children.values())]
    for table in linked[_MOST_TABLES:]:
        ragged_rows.left_out.update({*table.parts, *table.targets})
        reason = f"too many tables lead to each other beside {table.name}"
        ragged_rows.notes.append(f"left out {listed([*table.targets])}: {reason}")
    candidates = [c for c in every if c not in linked[_MOST_TABLES:]]
    children = {c.name: [b for b in children[c.name] if b in candidates] for c in candidates}
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
        ragged_rows.used.update(root.parts)
        used = {root.table.first_member, root.table.count_member}
        lost = [n for n in root.table.first.dtype.names or () if n not in used]
        if lost:
            ragged_rows.notes.append(f"left out {listed(lost)} of the index {root.name}")
    for path, options in fits.items():
        owner = members.get(path)
        if owner in roots:
            continue
        chosen = min(options, key=len) if owner is None else ways[owner.name][:-1]
        ragged_rows.routes[path] = (path, _route(chosen, owner, path))
        if any(not _same(chosen, other) for other in options) and owner is None:
            names = " and ".join(sorted({o[-1].name for o in options}))
            ragged_rows.notes.append(
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
