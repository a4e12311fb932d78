"""Parsing a Zarr store: which of its arrays are fields, and how their samples are counted.

The walk through the groups, the choice of fields, and the source that reads them.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from dsprep.core.schema import Arena, Attrs, Batch, Field, Schema
from dsprep.errors import DsprepError, FormatError, SchemaError
from dsprep.formats import samples
from dsprep.formats.base import Source
from dsprep.formats.conventions import Stated, state_common
from dsprep.formats.fields import missing_field, retype, wanted
from dsprep.formats.index_tables import IndexTable, Route
from dsprep.formats.options import OpenOptions
from dsprep.formats.ragged import (
    ArrayTree,
    RaggedRows,
    find_tables,
    route_of,
    table_paths,
)
from dsprep.formats.splits import check_arrays
from dsprep.formats.zarr.array import StoredArray
from dsprep.formats.zarr.attributes import CAPACITY, FIELDS, STATIC, from_json
from dsprep.formats.zarr.conventions import state_images
from dsprep.formats.zarr.fields import Elements, Parts, Reading
from dsprep.formats.zarr.locate import Unlocated
from dsprep.formats.zarr.metadata import ArrayMeta, NoField, read_array, read_document
from dsprep.formats.zarr.store import DOCUMENTS, Directory, Store, Zip, join
from dsprep.layout.describe import FieldStorage
from dsprep.layout.model import Column, FileLayout
from dsprep.reading.columns import fetch

ROOT_NAME = "data"
"""The field name of an array that is the whole store."""

MAX_DEPTH = 32  # Linux follows 40 symbolic links on one path
MAX_NODES = 100_000
MAX_FILES = 100_000
"""Files of a store that are looked for when it is opened."""

FEW_FILES = 64
"""Those of an array of more files."""

CHUNK_NAME = re.compile(r"c|(c\.)?\d+(\.\d+)*")
"""The names of chunks, or of the folders that hold them, in all spellings."""

PARTS = {"count", "first", "values"}


class ZarrSource(Source):
    """A Zarr store opened for reading; see `base.Source`."""

    random_access = True

    def __init__(self, path: Path, options: OpenOptions) -> None:
        self.path = path
        directory = path.is_dir()
        self._store: Store = Directory(path, options.follow_external) if directory else Zip(path)
        try:
            self._open(options)
        except BaseException:
            self._store.close()
            raise

    def _open(self, options: OpenOptions) -> None:
        nodes = walk(self._store)
        root: Attrs = {} if "" in nodes.arrays else nodes.groups.get("", {})
        self.version = f"Zarr v{nodes.version}, {'ZIP' if self.path.is_file() else 'directory'}"
        own = root.get(FIELDS)
        listed = [n for n in own if isinstance(n, str)] if isinstance(own, list) else []
        fields = StoreFields(self._store, nodes, listed, options)
        requested = fields.requested
        mode = options.sample_axis
        if mode == "auto" and listed:
            mode = "first"
        if fields.stated.refused and options.sample_axis == "auto" and not requested and not listed:
            reason, fix = fields.stated.refused
            raise SchemaError(reason, where=self.path, fix=f"{fix}, or name fields: --field NAME")
        readings = fields.select(self.path)
        shapes = {n: fields.sized(n) for n in readings}
        if not requested and not listed and mode != "none":
            check_arrays(readings, self.path)
        axis = samples.choose(
            shapes, mode, self.path, named=bool(requested), grouped=fields.stated.grouped
        )
        notes = [] if requested else fields.notes
        self._count, notes = axis.count, [*axis.notes, *notes]
        self.others = axis.others or tuple(fields.stated.aside if listed else ())
        if axis.whole_file:
            readings = as_single_sample(readings, notes)
            if not readings:
                raise FormatError(
                    "no array can be a field", where=self.path, found="; ".join(notes)
                )
        elif requested and set(axis.names) != requested:
            name = min(requested - {*axis.names})
            raise samples.not_of_samples(name, (*shapes[name].shape, "no axis")[0], axis, self.path)
        else:
            readings = {n: r for n, r in readings.items() if n in axis.names}
        fields.add_attributes(readings)
        self._choose(options, readings, from_json(root))
        chosen = [r for _, r in self._columns]
        notes += unkept(nodes.groups, chosen)
        if not requested:
            notes += samples.unapplied({f.name: f.attrs for f in self.schema})
        self.notes = (*notes, *missing(self._store, chosen))

    def _choose(self, options: OpenOptions, readings: dict[str, Reading], attrs: Attrs) -> None:
        available = {n: r.field for n, r in readings.items()}
        specs = (replace(s, path=s.spelled, index=()) if s.index else s for s in options.fields)
        chosen = wanted(tuple(specs), available)
        self._columns: list[tuple[Field, Reading]] = [(f, readings[p]) for p, f in chosen]
        self.schema = Schema(tuple(f for f, _ in self._columns), attrs)

    def __len__(self) -> int:
        return self._count

    @override
    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        try:
            pending = {f.name: r.begin(start, stop, arena) for f, r in self._columns}
            columns = fetch(pending, arena)
        except MemoryError as error:
            where = f"{self.path}, samples {start} to {stop}"
            raise FormatError("the samples do not fit into memory", where=where) from error
        except FormatError:
            for array in (a for _, r in self._columns for a in r.arrays):
                array.invalidate()
            raise
        if len(self) <= 1:  # it was read whole
            for array in (a for _, r in self._columns for a in r.arrays):
                array.release()
        return {f.name: retype(columns[f.name], f, self.path, start) for f, _ in self._columns}

    @override
    def extents(self, progress: Callable[[int, int], None] | None = None) -> FileLayout:
        total = sum(r.arrays[0].meta.files() for _, r in self._columns)
        done = 0

        def step(files: int) -> None:
            nonlocal done
            done += files
            if progress is not None:
                progress(done, total)

        columns: dict[str, Column] = {}
        unlocated: dict[str, str] = {}
        for field, reading in self._columns:
            upto = done + reading.arrays[0].meta.files()
            try:
                columns[field.name] = reading.located(field, len(self), step)
            except Unlocated as reason:
                unlocated[field.name] = str(reason)
            step(upto - done)
        return FileLayout(len(self), columns=columns, unlocated=unlocated)

    @override
    def sizes(self, start: int, stop: int) -> NDArray[np.int64] | None:
        total = np.zeros(stop - start, np.int64)
        for _, reading in self._columns:
            part = reading.sizes(start, stop)
            if part is None:
                return None
            total += part
        return total

    def resident_nbytes(self) -> int:
        """See `Source.resident_nbytes`: each array keeps the chunk that it decoded last.

        A single sample is read whole, and nothing is kept of it.
        """
        if len(self) <= 1:
            return 0
        return sum(a.resident_nbytes() for _, reading in self._columns for a in reading.arrays)

    @override
    def storage(self) -> dict[str, FieldStorage]:
        return {field.name: reading.storage() for field, reading in self._columns}

    @override
    def close(self) -> None:
        self._store.close()


# --- finding the fields ----------------------------------------------------------------------


class Nodes:
    """What a walk through a store found, by path.

    An array that gave an error is that error; of a group the attributes are kept; `version` is the
    root's.
    """

    def __init__(self) -> None:
        self.arrays: dict[str, ArrayMeta | DsprepError] = {}
        self.groups: dict[str, Attrs] = {}
        self.version = 3


def walk(store: Store) -> Nodes:
    """Return all arrays and groups.

    Raise `FormatError` if the root is neither, a group's metadata is damaged, or there is no end.
    """
    nodes, todo = Nodes(), [""]
    while todo:
        path = todo.pop()
        is_group = visit(store, path, nodes)
        if is_group:
            todo += [join(path, name) for name in reversed(store.children(path))]
        elif path == "" and not nodes.arrays:
            raise FormatError("there is no zarr.json, .zgroup or .zarray", where=store.path)
        if path.count("/") >= MAX_DEPTH or len(nodes.arrays) + len(nodes.groups) > MAX_NODES:
            raise FormatError(
                "groups are nested without end",
                where=f"{store.path}, {path}",
                expected=f"at most {MAX_DEPTH} levels and {MAX_NODES} arrays",
                fix="look for symbolic links that lead back",
            )
    return nodes


def visit(store: Store, path: str, nodes: Nodes) -> bool:
    """Add the node at `path`, if there is one; return whether it is a group."""
    try:
        key = join(path, "zarr.json")
        document = read_document(store, key)
        if document is not None:
            attrs = document.get("attributes")
            kind = document.get("node_type")
        else:
            key = join(path, ".zarray")
            document = read_document(store, key)
            kind = "array" if document is not None else "group"
            if document is None:
                key = join(path, ".zgroup")
                document = read_document(store, key)
            if document is None:
                return False
            attrs = read_document(store, join(path, ".zattrs"))
        where = f"{store.path}, {key}"
        version = document.get("zarr_format")
        if version != (3 if key.endswith("zarr.json") else 2) or kind not in ("array", "group"):
            raise FormatError("this describes no Zarr v2 or v3 node", where=where)
        attrs = attrs if isinstance(attrs, dict) else {}
        if kind == "array":
            nodes.arrays[path] = read_array(document, attrs, path, where)
    except DsprepError as error:
        if path == "":
            raise
        nodes.arrays[path] = error
        return False
    if path == "":
        nodes.version = version
    if kind == "group":
        nodes.groups[path] = attrs
    return bool(kind == "group")


class StoreFields:
    """The fields that a store may have, as the user asked for them.

    Those in `order` come first: dsprep wrote them.

    Attributes
    ----------
    readings
        How to read them, by name.
    problems
        Why other arrays cannot be read.
    stated
        What programs state about the arrays.
    requested
        The names of those that the user named.
    notes
        What was left out, one clause each.
    """

    def __init__(self, store: Store, nodes: Nodes, order: list[str], options: OpenOptions) -> None:
        self.requested = {spec.spelled for spec in options.fields}
        self.readings: dict[str, Reading] = {}
        self.problems: dict[str, DsprepError] = {}
        self.stated, self.notes = Stated(), list[str]()
        self._where, self._own = store.path, bool(order)
        opened: dict[str, StoredArray] = {}
        for path, meta in nodes.arrays.items():
            if isinstance(meta, ArrayMeta):
                opened[path] = StoredArray(meta, store)
            else:
                self.problems[path] = meta
        self._opened = dict(opened)
        self._take_own(nodes, opened)
        tree = ArrayTree(
            {path: array.meta for path, array in opened.items()},
            {path: tuple(attrs) for path, attrs in nodes.groups.items()},
        )
        rows = RaggedRows()
        if not order:
            state_common(tree, partial(_attributes, nodes), self.stated)
            state_images(tree, nodes.groups, self.stated)
            if options.sample_axis != "none":
                rows = find_tables(tree, tree.groups, self._array)
        own = nodes.groups.get("", {}).get(STATIC)
        for name in own if order and isinstance(own, list) else ():
            self.stated.aside[str(name)] = samples.STATIC
        for spec in options.fields:
            if spec.index:
                for path in (spec.path, *(p for e in spec.index for p in table_paths(e))):
                    if path not in opened:
                        raise missing_field(path, opened, store.path)
                route = route_of(spec, tree, self._array, store.path)
                self.readings[spec.spelled] = Parts(spec.path, opened[spec.path], route, {})
        for name, (path, route) in rows.routes.items():
            self._add(name, partial(Parts, name, opened[path], route, opened[path].meta.attrs))
        for path, array in opened.items():
            name = path or ROOT_NAME
            used = path in rows.used | rows.left_out and name not in self.requested
            if name not in self.readings and not used:
                self._add(name, partial(reading, name, array))
        first = [n for n in order if n in self.readings]
        for name in first:
            for array in self.readings[name].arrays:
                array.complete = not array.meta.vlen
        rest = sorted(self.readings.keys() - set(first))
        self.readings = {n: self.readings[n] for n in [*first, *rest]}
        self._set_aside(rows)

    def _array(self, path: str) -> StoredArray:
        return self._opened[path]

    def _add(self, name: str, make: Callable[[], Reading]) -> None:
        try:
            self.readings[name] = make()
        except (FormatError, SchemaError) as error:
            self.problems[name] = error

    def _take_own(self, nodes: Nodes, opened: dict[str, StoredArray]) -> None:
        """Take the groups that are one ragged field in dsprep's own encoding."""
        below: dict[str, set[str]] = defaultdict(set)
        for path in (*nodes.arrays, *nodes.groups):
            parent, _, child = path.rpartition("/")
            below[parent].add(child)
        for group, attrs in nodes.groups.items():
            parts = ragged_parts(group, opened, below[group])
            if parts is None:
                continue
            for part in parts.values():
                del opened[part.meta.path]
            first, count, capacity = parts["first"], parts["count"], attrs.get(CAPACITY, 0)
            grouped = isinstance(capacity, int) and capacity > 0
            paths = first.meta.path, count.meta.path
            table = IndexTable(paths, first, count, capacity=capacity if grouped else 0)
            route = Route((table,), (",".join(paths),))
            self._add(group, partial(Parts, group, parts["values"], route, attrs))

    def _set_aside(self, rows: RaggedRows) -> None:
        """Leave out what is not samples, unless the user names it; and note it."""
        stated = self.stated
        for path, reason in stated.left_out.items():
            if self.readings.pop(path, None) is not None:
                self.problems[path] = NoField(reason, where=f"{self._where}, array {path}")
        self.notes += rows.notes
        for reason in dict.fromkeys(stated.aside.values()):
            paths = [p for p, text in stated.aside.items() if text == reason]
            self.notes.append(f"left out {samples.listed(paths)}: {reason}")
            for path in paths:
                if path not in self.requested:
                    self.readings.pop(path, None)
                    self.problems.pop(path, None)

    def select(self, where: Path) -> dict[str, Reading]:
        """Return the readings of the fields that the user requested, or of all that can be read."""
        left_out = {
            n: e
            for n, e in self.problems.items()
            if isinstance(e, NoField) and n not in self.requested
        }
        damaged = [e for n, e in self.problems.items() if n not in left_out]
        if damaged and not self.requested:
            raise damaged[0]
        for name in self.requested & self.problems.keys():
            raise self.problems[name]
        for name in sorted(self.requested - self.readings.keys()):
            raise missing_field(name, self.readings, where)
        readings = {
            n: r for n, r in self.readings.items() if n in self.requested or not self.requested
        }
        if not readings:
            reasons = samples.listed([f"{n or ROOT_NAME}: {e.what}" for n, e in left_out.items()])
            reasons = "; ".join([reasons, *self.notes] if reasons else self.notes)
            message = "the store holds no arrays"
            message += " that can be fields" if reasons else ""
            raise FormatError(message, where=where, found=reasons or None)
        self.notes += [f"left out {n}: {e.what}" for n, e in left_out.items()]
        return readings

    def sized(self, name: str) -> samples.Sized:
        """Return the shape of a field with its samples, its bytes, and what counts them."""
        reading = self.readings[name]
        if reading.single:
            return samples.Sized((), reading.nbytes)
        axis = self.stated.axes.get(name, "")
        if not (isinstance(reading, Parts) or self._own):
            axis = axis or (*reading.arrays[0].meta.axes, "")[0]
        return samples.Sized((reading.count, *reading.field.inner), reading.nbytes, axis)

    def add_attributes(self, readings: Mapping[str, Reading]) -> None:
        """Add to the attributes of fields what is stated elsewhere."""
        for name, reading in readings.items():
            more = self.stated.attrs.get(name, {})
            reading.field = replace(reading.field, attrs={**reading.field.attrs, **more})


def _attributes(nodes: Nodes, path: str) -> Attrs:
    meta = nodes.arrays.get(path)
    return from_json(meta.attrs if isinstance(meta, ArrayMeta) else nodes.groups.get(path, {}))


def reading(name: str, array: StoredArray) -> Reading:
    """Return the field that one array is."""
    if array.meta.vlen:
        return Elements(name, array)
    return Reading(name, array)


def ragged_parts(
    group: str, opened: Mapping[str, StoredArray], members: set[str]
) -> dict[str, StoredArray] | None:
    """Return the arrays of a group that is one ragged field, or None if it is none."""
    if not group or members != PARTS or not all(f"{group}/{name}" in opened for name in PARTS):
        return None
    parts = {name: opened[f"{group}/{name}"] for name in PARTS}
    values, first, count = (parts[k].meta for k in ("values", "first", "count"))
    index = all(len(m.shape) == 1 and m.dtype.kind in "iu" and not m.vlen for m in (first, count))
    if index and first.shape == count.shape and values.shape and not values.vlen:
        return parts
    return None


def as_single_sample(readings: Mapping[str, Reading], notes: list[str]) -> dict[str, Reading]:
    """Return the fields of a store that is one sample: every array as it is."""
    fields: dict[str, Reading] = {}
    for reading in readings.values():
        for array in reading.arrays:
            name = array.meta.path or ROOT_NAME
            if array.meta.vlen:
                notes.append(f"left out {name}: a single sample cannot hold strings")
            else:
                fields[name] = Reading(name, array, single=True)
    return fields


# --- notes -----------------------------------------------------------------------------------


def unkept(groups: Mapping[str, Attrs], readings: Sequence[Reading]) -> list[str]:
    """Return which attributes do not become part of the samples.

    `groups` are the attributes of each group of the store, `readings` the fields that are read.
    """
    arrays = [a for r in readings for a in r.arrays]
    parts = [r for r in readings if isinstance(r, Parts)]
    fields = {r.field.name for r in parts}
    owners = [a.meta.path for r in parts for a in r.arrays if from_json(a.meta.attrs)]
    owners = [path for path in owners if path not in fields]
    for path, attrs in groups.items():
        above = any(a.meta.path.startswith(f"{path}/") for a in arrays)
        if path and path not in fields and above and from_json(attrs):
            owners.append(path)
    return [f"attributes of {samples.listed(owners, 8)} are not kept"] if owners else []


def missing(store: Store, readings: Sequence[Reading]) -> list[str]:
    """Return how many files of each array are missing, for as many files as are soon counted.

    Raise `FormatError` if they lie there under other names than the metadata give.
    """
    notes, left = [], MAX_FILES
    for array in (a for r in readings for a in r.arrays if a.meta.shape):
        meta, files = array.meta, array.meta.files()
        if files > left:
            lines = range(min(FEW_FILES, -(-meta.shape[0] // meta.grid[0])))
            if not any(store.has(meta.key(line)) for line in lines):
                check_names(store, meta, every=False)
            continue
        left -= files
        absent = store.count_missing(meta.file_keys(0, array.count))
        if absent:
            check_names(store, meta, every=absent == files)
            name = meta.path or "the array"
            consequence = "" if array.complete else " and read as the fill value"
            notes.append(f"{absent} of {files} chunk files of {name} are missing{consequence}")
    return notes


def check_names(store: Store, meta: ArrayMeta, *, every: bool) -> None:
    """Raise `FormatError` if files are where chunks of an array belong, but are called otherwise.

    Those are files with the names of chunks in another spelling; if `every` chunk is missing, any.
    """
    last = meta.key(*(-(-n // g) - 1 for n, g in zip(meta.shape, meta.grid, strict=True)))
    first = last.removeprefix(f"{meta.path}/").partition("/")[0]
    spelling = re.sub(r"\d+", r"\\d+", re.escape(first))
    inside = {*store.children(meta.path), *(name for name, *_ in store.listed(meta.path, 0))}
    names = sorted(n for n in inside if CHUNK_NAME.fullmatch(n) and not re.fullmatch(spelling, n))
    fix = "if they are its chunks, rename them"
    if names:
        separator, start = "." if "." in names[0] else "/", names[0][0]
        encoding = {"name": "default" if start == "c" else "v2"}
        stated = {**encoding, "configuration": {"separator": separator}}
        if meta.version == 3:
            fix += f' or state "chunk_key_encoding": {json.dumps(stated)} in zarr.json'
        elif start != "c":
            fix += f' or state "dimension_separator": "{separator}" in .zarray'
    elif every and store.nbytes(meta.path):
        names = sorted(n for n in inside if n[0] != "." and n not in DOCUMENTS)
    if names:
        raise FormatError(
            "files of an array have other names than its metadata give to chunks",
            where=f"{store.path}, array {meta.path or ROOT_NAME}",
            expected=f"names such as {last}",
            found=samples.listed([join(meta.path, n) for n in names]),
            fix=fix,
        )
