"""Ragged fields by index tables: the one rule for all formats that hold named arrays.

Names and shapes say what may be a table (`find_tables`):

- two arrays of integers in a group that are called ``first`` and ``count`` (``start`` and
  ``length``, ``x_start`` and ``x_len``, ...), or one of a compound type with such members;
- an array of N + 1 integers called ``indptr``, ``offsets`` or alike, as of sparse matrices in CSR
  and of lists in Arrow: sample i has the rows ``offsets[i] <= r < offsets[i + 1]``;
- N integers called ``x_index`` beside ``x``, as NWB has them: where the rows of each sample end.

A name is a hint only: a table counts if it partitions an array of its group, row by row. Where that
is a table again, as in larcv3, it leads on to what that one partitions. All other tables are named.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice, permutations
from typing import Any, TypeAlias

import numpy as np
from typing_extensions import override

from dsprep.core.schema import Column as Values
from dsprep.core.schema import DType, Field, FieldSpec, Ints, Ragged
from dsprep.errors import FormatError, UsageError
from dsprep.formats.fields import missing_field
from dsprep.formats.index_tables import Form, IndexTable, Numbers, Route, RowLaws, row_laws, runs
from dsprep.formats.located import LazyField, RowsField
from dsprep.formats.samples import MOST_READINGS, show_reading
from dsprep.layout.describe import FieldStorage
from dsprep.layout.model import Column

_FIRST = re.compile(r"(?i)(.*?)_?(?:first|start|begin|offset)s?")
_COUNT = re.compile(r"(?i)(.*?)_?(?:n|count|length|len|size|num)s?")
_BOUNDS = re.compile(
    r"(?i)(?:.*[_.-])?(?:ind_?ptr|offsets?|row_?splits|(?:row_?)?ptr|crow_indices|cu_seqlens|slices"
    r"|jc)"
)
_ENDS = re.compile(r"(?i)(.+)_(?:index|ends?)")
_VALUES = re.compile(r"(?i)(?:.*[_.-])?(?:data|content|values?|indices|col_indices|cols?|flat|ir)")
_SOME = 1024
"""Samples by which the rows of a typical one are judged."""
_MOST_TABLES = 256
"""Arrays that are looked at for `indexed`: each is opened, and there may be one for each sample."""


OWN = ("values", "first", "count")
"""The arrays of a group that is a ragged field in dsprep's own encoding."""


class ArrayTree:
    """The arrays of a file by path, in its order, and its groups: ``""`` is the root.

    Of an array its `shape` and `dtype` are known, and whether elements are sequences: `vlen`. Of a
    group its path, and perhaps the names of its attributes.
    """

    def __init__(
        self,
        datasets: Mapping[str, Any],
        groups: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        self.datasets: Mapping[str, Any] = datasets
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


Routes: TypeAlias = dict[str, tuple[str, Route | None]]
"""By field: the path of its array, and how its rows are reached if it is ragged."""


def indexed(tree: ArrayTree, open_rows: Open) -> list[tuple[str, str]]:
    """Return the readings of rows by an array that divides them, whatever their names are."""
    readings, by_length = list[tuple[str, str]](), dict[tuple[int, ...], list[str]]()
    for name, array in tree.datasets.items():
        by_length.setdefault(array.shape[:1], []).append(name)
    tables = ((name, table_of([name], tree, open_rows)) for name in tree.datasets)
    candidates = ((name, table) for name, table in tables if table is not None)
    for name, counts in islice(candidates, _MOST_TABLES):
        forms = [counts, *([replace(counts, form="pairs")] if counts.form == "counts" else [])]
        for table in forms:
            total = table.total() or 0
            rows = [n for n in by_length.get((total,), ()) if n != name]
            if not total or total == table.rows or not rows or not table.partitions(total):
                continue
            beside = [n for n in by_length.get((table.rows,), ()) if n != name]
            fields = [*(f"{n}={n}@{name}" for n in rows), *beside]
            option = " ".join(f"--field {shlex.quote(spec)}" for spec in fields)
            readings.append((option, show_reading(table.rows, [*rows, *beside])))
        if len(readings) >= MOST_READINGS // 2:  # others are shown, too
            break
    return readings


def take_own(
    group: str, kind: Any, capacity: Any, tree: ArrayTree, open_rows: Open, where: object
) -> tuple[str, Route]:
    """Return the field that a group states to be, ragged and of a `kind`, as dsprep writes it.

    Raises
    ------
    FormatError
        If it is not.
    """
    values, *parts = (f"{group}/{part}".lstrip("/") for part in OWN)
    array: Any = tree.datasets.get(values)
    there = all(path in tree.datasets for path in (values, *parts))
    known = isinstance(capacity, int) and capacity >= 0
    table = table_of(parts, tree, open_rows, capacity) if there and known else None
    text = kind in ("bytes", "str") and there and (array.dtype, len(array.shape)) == (np.uint8, 1)
    if table is None or array.vlen or not array.shape or not (kind == "array" or text):
        raise FormatError(
            f"the group is not a ragged field of kind {kind!r}",
            where=where,
            expected=f"{', '.join(OWN)}, and array, or bytes or str of uint8 values",
        )
    return values, Route((table,), kind)


def table_of(
    paths: Sequence[str], tree: ArrayTree, open_rows: Open, capacity: int = 0
) -> IndexTable | None:
    """Return the index table in one or two arrays, or None if they are not a table.

    One array has members or two columns, the first rows and the numbers of rows, or one column of
    N + 1 bounds or N ends; two have one each.
    """
    arrays = [tree.datasets[p] for p in paths]
    shapes, kinds = {a.shape for a in arrays}, {a.dtype.kind for a in arrays}
    shape, members = arrays[0].shape, index_members(arrays[0].dtype)
    if any(a.vlen for a in arrays) or len(shapes) > 1 or len(paths) > 2:
        return None
    rows = open_rows(paths[0])
    count = rows if len(paths) == 1 else open_rows(paths[1])
    form: Form = "counts"
    if kinds <= {"i", "u"} and len(shape) == 1:
        if len(paths) == 1:
            form = "ends" if _ENDS.fullmatch(paths[0].rpartition("/")[2]) else "bounds"
        if form == "bounds" and not shape[0]:
            return None
        return IndexTable((*paths,), rows, count, form, capacity=capacity)
    if kinds <= {"i", "u"} and shape[1:] == (2,) and len(paths) == 1:
        return IndexTable((*paths,), rows, rows, members=(0, 1))
    if members is not None and len(shape) == len(paths) == 1:
        return IndexTable((*paths,), rows, rows, members=members)
    return None


def route_of(
    spec: FieldSpec,
    tree: ArrayTree,
    open_rows: Open,
    where: object,
) -> Route:
    """Return the route to an array through the tables that the user named.

    Raises
    ------
    UsageError
        If one of them is not a table, or does not divide what comes next.
    """
    values, tables = tree.datasets[spec.path], list[IndexTable]()
    for entry in spec.index:
        table = None if values.vlen else table_of(table_paths(entry), tree, open_rows)
        if table is None:
            raise UsageError(
                f"{entry} is not an index table of {spec.path}",
                where=where,
                expected="a table with members such as first and count, one of (first, count) "
                "or (begin, end) rows, N + 1 bounds, N ends, FIRST,COUNT, or BEGIN,END; and rows",
            )
        tables.append(table)
    for i, count in enumerate((*(t.rows for t in tables[1:]), *values.shape[:1])):
        paired, is_table = replace(tables[i], form="pairs"), tables[i].partitions(count)
        if tables[i].form == "counts" and not is_table and paired.partitions(count):
            tables[i] = paired
        elif not is_table and tables[i].form != "counts":  # of others reading them tells
            raise UsageError(
                f"{spec.index[i]} is not an index table of {spec.path}",
                where=where,
                expected=f"numbers that rise from 0 to {count}, or FIRST,COUNT",
            )
    return Route(tuple(tables))


def routes_of(
    specs: Sequence[FieldSpec], tree: ArrayTree, ragged: Routes, open_rows: Open, where: object
) -> Routes:
    """Return the array of each field, those of `specs` or all, and the route to what is ragged.

    Raise `SchemaError` or `UsageError` if there is no such array, or no such table.
    """
    tables = {p for _, route in ragged.values() if route for t in route.tables for p in t.paths}
    if not specs:
        skip = tables | {path for path, _ in ragged.values()}
        return {**ragged, **{p: (p, None) for p in tree.datasets if p not in skip}}
    routes: Routes = {}
    for spec in specs:
        if not spec.index and spec.path in ragged:
            routes[spec.path] = ragged[spec.path]
            continue
        for path in (spec.path, *(p for entry in spec.index for p in table_paths(entry))):
            if path not in tree.datasets:
                raise missing_field(path, {*tree.datasets, *ragged} - tables, where)
        route = route_of(spec, tree, open_rows, where) if spec.index else None
        routes[spec.spelled] = spec.path, route
    return routes


def table_paths(entry: str) -> list[str]:
    """Return the paths in one part of ``--field NAME=PATH@PART``."""
    return [p.strip().strip("/") for p in entry.split(",")]


def may_be_table(path: str) -> bool:
    """Return whether the name of an array is one that tables have."""
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


def _candidates(paths: Sequence[str], tree: ArrayTree) -> Iterator[list[str]]:
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


def find_tables(
    tree: ArrayTree, group: str, open_rows: Open
) -> tuple[Routes, list[tuple[str, str]]]:
    """Return the ragged fields among the arrays of one group, by the tables beside them.

    And the readings of lists in lists: options, and what each gives.
    """
    routes: Routes = {}
    nested = list[tuple[str, str]]()
    paths = tree.inside(group)
    tables: dict[tuple[str, ...], IndexTable] = {}
    targets: dict[tuple[str, ...], list[str]] = {}
    for parts in sorted(map(tuple, _candidates(paths, tree)), key=lambda p: paths.index(p[0])):
        table = table_of(parts, tree, open_rows)
        total = None if table is None else table.total()
        if table is None or total is None:
            continue
        divided = _targets(parts, paths, tree, total, table)
        if (divided or table.form != "counts") and table.partitions(total):
            tables[parts], targets[parts] = table, divided
    edged = [p for p in tables if tables[p].form != "counts"]
    for outer, inner in permutations(edged, 2):
        unequal = tables[inner].rows != tables[outer].rows or not targets[outer]
        within = inner[0] in targets[outer]
        if tables[inner].rows == tables[outer].total() and (unequal or within):
            for name in targets[inner]:
                for index, what in (((*outer, *inner), "its lists joined"), (inner, "a list each")):
                    option = f"--field {shlex.quote('@'.join((f'{name}={name}', *index)))}"
                    rows = tables[outer if len(index) > 1 else inner].rows
                    nested.append((option, f"{rows} samples, {what}"))
    for parts in (p for p in tables if targets[p]):
        way = [parts]
        while above := [p for p in tables if {*way[0]} <= {*targets[p]} and p not in way]:
            way.insert(0, above[0])
        route = Route(tuple(tables[p] for p in way))
        for path in targets[parts]:
            routes.setdefault(path, (path, route))
    return routes, nested


def _targets(
    parts: tuple[str, ...], paths: Sequence[str], tree: ArrayTree, total: int, table: IndexTable
) -> list[str]:
    """Return the arrays among `paths` that have the rows which a table counts."""
    # Ends are those of one array. Where the rows of what bounds count are as many as the samples,
    # only names can say which arrays have the ones and which the others.
    ends = _ENDS.fullmatch(parts[0]) if table.form == "ends" else None
    unclear = table.form == "bounds" and total == table.rows
    return [
        p
        for p in ([ends[1]] if ends else paths)
        if p not in parts
        and tree.datasets[p].shape[:1] == (total,)
        and not tree.datasets[p].vlen
        and not (unclear and not _VALUES.fullmatch(p.rpartition("/")[2]))
    ]


class RaggedField(LazyField):
    """A ragged field: the rows of `values` that index tables give; `laws` states them."""

    def __init__(
        self, values: RowsField, route: Route, field: Field, laws: RowLaws = row_laws
    ) -> None:
        self.values, self.field, self.route = values, field, route
        self.count, self._laws = route.tables[0].rows, laws

    @cached_property
    def _spans(self) -> tuple[Ints, Ints]:
        """The first row of each sample, and the one behind its last."""
        return self.route.spans(self.values.count)

    def spans(self, start: int, stop: int) -> tuple[Ints, Ints]:
        """Return the first row of each of some samples, and the one behind its last."""
        return self._spans[0][start:stop], self._spans[1][start:stop]

    @override
    def locate(self) -> Column:
        return Column(self.values.locate().grid, 1, *self._laws(*self._spans))

    @override
    def read(self, start: int, stop: int) -> Values:
        first, end = self.spans(start, stop)
        low, high = runs(first, end)
        values = self.values.rows(zip(low.tolist(), high.tolist(), strict=True))
        return Ragged.from_lengths(values, end - first, self.field.kind)

    @override
    def sizes(self, start: int, stop: int) -> Ints | None:
        first, end = self.spans(start, stop)
        sizes: Ints = (end - first) * self.field.row_nbytes
        return sizes

    @override
    def resident_nbytes(self) -> int:
        return self.values.resident_nbytes()

    @override
    def storage(self) -> FieldStorage:
        first, end = self.spans(0, _SOME)
        nbytes = float((end - first).mean()) * self.field.row_nbytes if len(first) else 0.0
        tables = [",".join(table.paths) for table in self.route.tables]
        return self.values.storage_of(self.count, nbytes, tables)
