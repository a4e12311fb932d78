"""Parsing a Zarr store: which of its arrays are fields, and how their samples are counted.

The walk through the groups, the choice of fields, and the source that reads them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from dsprep.core.schema import Attrs
from dsprep.errors import DsprepError, FormatError, SchemaError
from dsprep.formats import samples
from dsprep.formats.conventions import Stated, state_common
from dsprep.formats.index_tables import Route
from dsprep.formats.located import LocatedSource, Parsed
from dsprep.formats.options import OpenOptions
from dsprep.formats.ragged import (
    ArrayTree,
    RaggedField,
    RaggedRows,
    find_tables,
    indexed,
    routes_of,
    take_own,
)
from dsprep.formats.splits import check_arrays
from dsprep.formats.zarr.array import StoredArray
from dsprep.formats.zarr.attributes import CAPACITY, FIELDS, KIND, STATIC, from_json
from dsprep.formats.zarr.fields import AnyField, ArrayField, ElementsField, arrays_of, ragged_field
from dsprep.formats.zarr.locate import stored_files
from dsprep.formats.zarr.metadata import ArrayMeta, NoField, read_node
from dsprep.formats.zarr.store import DOCUMENTS, Directory, Store, Zip, join
from dsprep.layout.model import FileLayout

ROOT_NAME = "data"
"""The field name of an array that is the whole store."""

MAX_DEPTH = 32  # Linux follows 40 symbolic links on one path
MAX_NODES = 100_000
FEW_FILES = 64
"""Files of an array that are looked for by name before all are listed."""

OME = {"multiscales", "plate", "well"}
OME_FIX = (
    "name a level, such as --field 0, with --sample-axis none or first; or the images of a plate, "
    "a sample each: 'PLATE/*/*/*/0' --sample-axis none"
)
"""What OME-NGFF 0.4 and 0.5 state of images, and how they are read."""


def open_zarr(path: Path, options: OpenOptions) -> LocatedSource:
    """Open a store for reading; see `base.Format.open`."""
    store: Store = Directory(path, options.follow_external) if path.is_dir() else Zip(path)
    try:
        parsed = parse(store, options)
        return LocatedSource(path, parsed, options, store.open, store.close)
    except BaseException:
        store.close()
        raise


def parse(store: Store, options: OpenOptions) -> Parsed:
    """Return what a store holds."""
    arrays, groups = walk(store)
    path, root = store.path, groups.get("", {})
    own = root.get(FIELDS)
    listed = [n for n in own if isinstance(n, str)] if isinstance(own, list) else []
    fields = StoreFields(store, arrays, groups, listed, options)
    requested = fields.requested
    mode = options.sample_axis
    if mode == "auto" and listed:
        mode = "first"
    if fields.stated.refused and options.sample_axis == "auto" and not requested and not listed:
        reason, fix = fields.stated.refused
        raise SchemaError(reason, where=path, fix=f"{fix}, or name fields: --field NAME")
    readings = fields.select(path)
    shapes = {n: fields.sized(n) for n in readings}
    if not requested and mode == "auto":
        check_arrays(shapes, path)
    axis = samples.choose(
        shapes,
        mode,
        path,
        named=bool(requested),
        grouped=fields.stated.grouped,
        more=fields.indexed,
    )
    notes = [*axis.notes, *([] if requested else fields.notes)]
    if axis.whole_file:
        readings = as_single_sample(readings, notes)
        if not readings:
            raise FormatError("no array can be a field", where=path, found="; ".join(notes))
    else:
        readings = {n: r for n, r in readings.items() if n in axis.names}
    fields.add_attributes(readings)
    notes += unkept(groups, [*readings.values()])
    if not requested:
        notes += samples.unapplied({n: r.field.attrs for n, r in readings.items()})
    for array in (a for r in readings.values() for a in arrays_of(r) if a.meta.shape):
        check_names(store, array.meta)
    zipped = isinstance(store, Zip)
    return Parsed(
        version=f"Zarr v{3 if store.has('zarr.json') else 2}, {'ZIP' if zipped else 'directory'}",
        fields={n: r.field for n, r in readings.items()},
        layout=FileLayout(axis.count),
        lazy=readings,
        attrs=from_json(root),
        notes=tuple(notes),
        others=axis.others or tuple(fields.stated.aside if listed else ()),
        prove=partial(prove, [*readings.values()]) if zipped else None,
    )


def prove(fields: Sequence[AnyField], start: int, stop: int) -> None:
    """Compare the members of a ZIP file that some samples need with their checksums."""
    for field in fields:
        if isinstance(field, RaggedField):
            first, end = field.spans(start, stop)
            low, high = int(first.min(initial=field.values.count)), int(end.max(initial=0))
        else:
            low, high = (0, field.array.count) if field.single else (start, stop)
        array = arrays_of(field)[0]
        if array.meta.shape and low < high and not array.meta.unlocated:
            array.store.verify_crc(array.meta.file_keys(low, high))


# --- finding the fields ----------------------------------------------------------------------


Arrays = dict[str, ArrayMeta | DsprepError]
"""Arrays by path; one that gave an error is that error."""

Groups = dict[str, Attrs]
"""The attributes of groups by path."""


def walk(store: Store) -> tuple[Arrays, Groups]:
    """Return all arrays and groups.

    Raise `FormatError` if the root is neither or damaged, or there is no end.
    """
    arrays, groups, todo = Arrays(), Groups(), [""]
    while todo:
        path = todo.pop()
        try:
            node = read_node(store, path)
            if node is None and path == "":
                raise FormatError("there is no zarr.json, .zgroup or .zarray", where=store.path)
        except DsprepError as error:
            if path == "":
                raise
            arrays[path] = error
            continue
        if isinstance(node, ArrayMeta):
            arrays[path] = node
        elif node is not None:
            groups[path] = node
            todo += [join(path, name) for name in reversed(store.children(path))]
        if path.count("/") >= MAX_DEPTH or len(arrays) + len(groups) > MAX_NODES:
            raise FormatError(
                "groups are nested without end",
                where=f"{store.path}, {path}",
                expected=f"at most {MAX_DEPTH} levels and {MAX_NODES} arrays",
                fix="look for symbolic links that lead back",
            )
    return arrays, groups


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

    def __init__(
        self, store: Store, arrays: Arrays, groups: Groups, order: list[str], options: OpenOptions
    ) -> None:
        self.requested = {spec.spelled for spec in options.fields}
        self.readings: dict[str, AnyField] = {}
        self.stated, self.notes = Stated(), list[str]()
        self._where, self._own = store.path, bool(order)
        self.problems = {p: each for p, each in arrays.items() if isinstance(each, DsprepError)}
        opened = {p: StoredArray(m, store) for p, m in arrays.items() if isinstance(m, ArrayMeta)}
        self._opened = opened
        tree = ArrayTree(
            {path: array.meta for path, array in opened.items()},
            {path: tuple(attrs) for path, attrs in groups.items()},
        )
        rows = RaggedRows()
        others = [path for path in tree.groups if KIND not in tree.groups[path]]
        if not order:
            state_common(tree, partial(_attributes, arrays, groups), self.stated)
            if any(OME & attrs.keys() or "ome" in attrs for attrs in groups.values()):
                self.stated.refused = "this is an OME-Zarr image or plate", OME_FIX
            if options.sample_axis != "none":
                for path in others:
                    find_tables(tree, path, self._array, rows)
        for path in tree.groups.keys() - {*others}:
            kind, capacity = (groups[path].get(name, 0) for name in (KIND, CAPACITY))
            capacity = max(0, capacity) if isinstance(capacity, int) else 0
            where = f"{store.path}, group {path}"
            try:
                take_own(path, kind, capacity, tree, self._array, rows, where)
            except FormatError as error:
                self.problems[path] = error
        self.indexed = partial(indexed, tree, self._array)
        own = groups.get("", {}).get(STATIC)
        for name in own if order and isinstance(own, list) else ():
            self.stated.aside[str(name)] = samples.STATIC
        asked = [
            replace(s, path="") if s.path == ROOT_NAME and "" in opened else s
            for s in options.fields
        ]
        for spec in asked:
            if spec.path in self.problems:
                raise self.problems[spec.path]
        self._make(routes_of(asked, tree, rows, self._array, store.path), groups)
        first = [n for n in order if n in self.readings]
        for name in first:
            for array in arrays_of(self.readings[name]):
                array.complete = not array.meta.vlen
        rest = sorted(self.readings.keys() - set(first))
        self.readings = {n: self.readings[n] for n in [*first, *rest]}
        # What is not samples is left out, unless the user names it.
        for path, reason in self.stated.left_out.items():
            if self.readings.pop(path, None) is not None:
                self.problems[path] = NoField(reason, where=f"{self._where}, array {path}")
        self.notes += self.stated.notes()
        for path in self.stated.aside.keys() - self.requested:
            self.readings.pop(path, None)
            self.problems.pop(path, None)

    def _make(self, routes: Mapping[str, tuple[str, Route | None]], groups: Groups) -> None:
        for name, (path, route) in routes.items():
            array, name = self._opened[path], name or ROOT_NAME
            kind = ElementsField if array.meta.vlen else ArrayField
            attrs = groups.get(name, array.meta.attrs)
            try:
                self.readings[name] = (
                    kind(name, array) if route is None else ragged_field(name, array, route, attrs)
                )
            except (FormatError, SchemaError) as error:
                self.problems[name] = error

    def _array(self, path: str) -> StoredArray:
        return self._opened[path]

    def select(self, where: Path) -> dict[str, AnyField]:
        """Return the readings of the fields that the user requested, or of all that can be read."""
        asked = self.requested
        left_out = {n: e for n, e in self.problems.items() if isinstance(e, NoField) and not asked}
        for name, error in self.problems.items():
            if name in asked if asked else name not in left_out:
                raise error
        if not self.readings:
            reasons = samples.listed([f"{n or ROOT_NAME}: {e.what}" for n, e in left_out.items()])
            reasons = "; ".join([reasons, *self.notes] if reasons else self.notes)
            message = "the store holds no arrays"
            message += " that can be fields" if reasons else ""
            raise FormatError(message, where=where, found=reasons or None)
        self.notes += [f"left out {n}: {e.what}" for n, e in left_out.items()]
        return self.readings

    def sized(self, name: str) -> samples.Sized:
        """Return the shape of a field with its samples, its bytes, and what counts them."""
        reading, array = self.readings[name], arrays_of(self.readings[name])[0]
        nbytes = math.prod(array.meta.shape) * array.dtype.itemsize * (not array.meta.vlen)
        if isinstance(reading, ArrayField) and reading.single:
            return samples.Sized((), nbytes, dtype=reading.field.dtype)
        axis = self.stated.axes.get(name, "")
        if not (isinstance(reading, RaggedField) or self._own):
            axis = axis or (*array.meta.axes, "")[0]
        shape, dtype = (reading.count, *reading.field.inner), reading.field.dtype
        return samples.Sized(shape, nbytes, axis, dtype)

    def add_attributes(self, readings: Mapping[str, AnyField]) -> None:
        """Add to the attributes of fields what is stated elsewhere."""
        for name, reading in readings.items():
            more = self.stated.attrs.get(name, {})
            reading.field = replace(reading.field, attrs={**reading.field.attrs, **more})


def _attributes(arrays: Arrays, groups: Groups, path: str) -> Attrs:
    meta = arrays.get(path)
    return from_json(meta.attrs if isinstance(meta, ArrayMeta) else groups.get(path, {}))


def as_single_sample(readings: Mapping[str, AnyField], notes: list[str]) -> dict[str, AnyField]:
    """Return the fields of a store that is one sample: every array as it is."""
    fields: dict[str, AnyField] = {}
    for reading in readings.values():
        for array in arrays_of(reading):
            name = array.meta.path or ROOT_NAME
            if array.meta.vlen:
                notes.append(f"left out {name}: a single sample cannot hold strings")
            else:
                fields[name] = ArrayField(name, array, single=True)
    return fields


# --- notes -----------------------------------------------------------------------------------


def unkept(groups: Mapping[str, Attrs], readings: Sequence[AnyField]) -> list[str]:
    """Return which attributes do not become part of the samples.

    `groups` are the attributes of each group of the store, `readings` the fields that are read.
    """
    arrays = [a for r in readings for a in arrays_of(r)]
    parts = [r for r in readings if isinstance(r, RaggedField)]
    fields = {r.field.name for r in parts}
    owners = [a.meta.path for r in parts for a in arrays_of(r) if from_json(a.meta.attrs)]
    owners = [path for path in owners if path not in fields]
    for path, attrs in groups.items():
        above = any(a.meta.path.startswith(f"{path}/") for a in arrays)
        if path and path not in fields and above and from_json(attrs):
            owners.append(path)
    return [f"attributes of {samples.listed(owners, 8)} are not kept"] if owners else []


def check_names(store: Store, meta: ArrayMeta) -> None:
    """Raise `FormatError` if no chunk of an array is there, but other files are."""
    lines = range(min(FEW_FILES, -(-meta.shape[0] // meta.grid[0])))
    if any(store.has(meta.key(line)) for line in lines) or stored_files(store, meta).size:
        return
    folders = (
        (name, join(meta.path, name), depth)
        for name in store.children(meta.path)
        for depth in range(len(meta.shape))
    )
    names = {name for name, folder, depth in folders if next(store.listed(folder, depth), None)}
    names |= {name for name, *_ in store.listed(meta.path, 0)} - DOCUMENTS
    if names := {name for name in names if name[0] != "."}:
        stated = '"chunk_key_encoding" in zarr.json'
        if meta.version == 2:
            stated = '"dimension_separator": "." or "/" in .zarray'
        raise FormatError(
            "files of an array have other names than its metadata give to chunks",
            where=f"{store.path}, array {meta.path or ROOT_NAME}",
            expected=f"names such as {meta.key()}",
            found=samples.listed([join(meta.path, n) for n in sorted(names)]),
            fix=f"if they are its chunks, rename them or state {stated}",
        )
