"""A Zarr store as samples: which of its arrays are fields, and reading them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import Arena, Attrs, Batch, Field, Schema
from dsprep.errors import DsprepError, FormatError, SchemaError, UsageError
from dsprep.formats import samples
from dsprep.formats.base import Source
from dsprep.formats.fields import missing_field, retype, wanted
from dsprep.formats.options import OpenOptions
from dsprep.formats.splits import check_arrays
from dsprep.formats.zarr.array import StoredArray
from dsprep.formats.zarr.attributes import FIELDS, from_json
from dsprep.formats.zarr.fields import Elements, Fixed, Parts, Reading, program
from dsprep.formats.zarr.locations import Unlocated
from dsprep.formats.zarr.metadata import ArrayMeta, NoField, read_array, read_document
from dsprep.formats.zarr.store import Directory, Store, Zip, join
from dsprep.layout.describe import FieldStorage
from dsprep.layout.model import Column, FileLayout
from dsprep.reading.columns import fetch

ROOT_NAME = "data"
"""The field name of an array that is the whole store."""

MAX_DEPTH = 32  # Linux follows 40 symbolic links on one path
MAX_NODES = 100_000
MAX_FILES = 100_000
"""Files of a store that are looked for when it is opened."""

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
        if any(spec.index for spec in options.fields):
            raise UsageError("zarr fields have no @INDEX: a ragged group names its own")
        nodes = walk(self._store)
        root: Attrs = {} if "" in nodes.arrays else nodes.groups.get("", {})
        self.version = f"Zarr v{nodes.version}, {'ZIP' if self.path.is_file() else 'directory'}"
        own = root.get(FIELDS)
        listed = [n for n in own if isinstance(n, str)] if isinstance(own, list) else []
        readings, problems = find_readings(self._store, nodes, listed)
        if options.sample_axis == "groups":
            raise UsageError("--sample-axis groups applies to hdf5", where=self.path)
        mode = "first" if listed and options.sample_axis == "auto" else options.sample_axis
        asked = {spec.path for spec in options.fields}
        left_out = {n: e for n, e in problems.items() if isinstance(e, NoField) and n not in asked}
        damaged = [e for n, e in problems.items() if n not in left_out]
        if damaged and not asked:
            raise damaged[0]
        for name in asked & problems.keys():
            raise problems[name]
        if asked:
            for name in sorted(asked - readings.keys()):
                raise missing_field(name, readings, self.path)
            readings = {n: r for n, r in readings.items() if n in asked}
        if not readings:
            why = samples.listed([f"{n or ROOT_NAME}: {e.what}" for n, e in left_out.items()])
            what = "the store holds no arrays"
            what += " that can be fields" if left_out else ""
            raise FormatError(what, where=self.path, found=why or None)
        shapes = {n: ((r.count, *r.field.inner), r.nbytes) for n, r in readings.items()}
        for name, reading in readings.items():
            if isinstance(reading, Fixed) and reading.whole:
                shapes[name] = ((), reading.nbytes)
        if not asked and not listed and mode != "none":
            check_arrays(readings, self.path)
        axis = samples.choose(shapes, mode, self.path)
        notes = [] if asked else [f"left out {n}: {e.what}" for n, e in left_out.items()]
        self._count, notes = axis.count, [*axis.notes, *notes]
        if axis.whole_file:
            readings = whole(readings, notes)
            if not readings:
                raise FormatError(
                    "no array can be a field", where=self.path, found="; ".join(notes)
                )
        elif asked and set(axis.names) != asked:
            lengths = sorted(f"{n}: {r.count}" for n, r in readings.items())
            raise SchemaError(
                "the fields differ in their number of samples",
                where=self.path,
                found=", ".join(lengths),
            )
        else:
            readings = {n: r for n, r in readings.items() if n in axis.names}
        self._choose(options, readings, from_json(root))
        chosen = [r for _, r in self._columns]
        self.notes = (*notes, *unkept(nodes.groups, chosen), *missing(self._store, chosen))

    def _choose(self, options: OpenOptions, readings: dict[str, Reading], attrs: Attrs) -> None:
        available = {n: r.field for n, r in readings.items()}
        chosen = wanted(options.fields, available)
        self._columns: list[tuple[Field, Reading]] = [(f, readings[p]) for p, f in chosen]
        self.schema = Schema(tuple(f for f, _ in self._columns), attrs)

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        """See `Source.read`."""
        try:
            wanted = {f.name: r.begin(start, stop, arena) for f, r in self._columns}
            found = fetch(wanted, arena)
        except MemoryError as error:
            where = f"{self.path}, samples {start} to {stop}"
            raise FormatError("the samples do not fit into memory", where=where) from error
        except FormatError:
            for array in (a for _, r in self._columns for a in r.arrays):
                array.forget()
            raise
        if len(self) <= 1:  # it was read whole
            for array in (a for _, r in self._columns for a in r.arrays):
                array.release()
        return {f.name: retype(found[f.name], f, self.path, start) for f, _ in self._columns}

    def extents(self, progress: Callable[[int, int], None] | None = None) -> FileLayout:
        """See `Source.extents`."""
        total = sum(r.arrays[0].meta.files() for _, r in self._columns)
        done = 0

        def step(files: int) -> None:
            nonlocal done
            done += files
            if progress is not None:
                progress(done, total)

        found: dict[str, Column] = {}
        unlocated: dict[str, str] = {}
        for field, reading in self._columns:
            upto = done + reading.arrays[0].meta.files()
            try:
                found[field.name] = reading.located(field, len(self), step)
            except Unlocated as reason:
                unlocated[field.name] = str(reason)
            step(upto - done)
        return FileLayout(len(self), columns=found, unlocated=unlocated)

    def sizes(self, start: int, stop: int) -> NDArray[np.int64] | None:
        """See `Source.sizes`."""
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

    def storage(self) -> dict[str, FieldStorage]:
        """See `Source.storage`."""
        return {field.name: reading.storage() for field, reading in self._columns}

    def loading_code(self) -> str:
        """See `Source.loading_code`."""
        return program(self.path, [(f, r) for f, r in self._columns])

    def close(self) -> None:
        """See `Source.close`."""
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
        found = visit(store, path, nodes)
        if found:
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


def find_readings(
    store: Store, nodes: Nodes, order: list[str]
) -> tuple[dict[str, Reading], dict[str, DsprepError]]:
    """Return the readable fields by name, and why others are not.

    Those in `order` come first: dsprep wrote them.
    """
    readings: dict[str, Reading] = {}
    problems: dict[str, DsprepError] = {}
    opened: dict[str, StoredArray] = {}
    for path, meta in nodes.arrays.items():
        if isinstance(meta, ArrayMeta):
            opened[path] = StoredArray(meta, store)
        else:
            problems[path] = meta
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
        try:
            readings[group] = Parts(group, parts, attrs)
        except (FormatError, SchemaError) as error:
            problems[group] = error
    for path, array in opened.items():
        name = path or ROOT_NAME
        try:
            readings[name] = reading(name, array)
        except (FormatError, SchemaError) as error:
            problems[name] = error
    first = [n for n in order if n in readings]
    for name in first:
        for array in readings[name].arrays:
            array.complete = not array.meta.vlen
    return {n: readings[n] for n in [*first, *sorted(readings.keys() - set(first))]}, problems


def reading(name: str, array: StoredArray) -> Reading:
    """Return the field that one array is."""
    if array.meta.vlen:
        return Elements(name, array)
    return Fixed(name, array)


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


def whole(readings: Mapping[str, Reading], notes: list[str]) -> dict[str, Reading]:
    """Return the fields of a store that is one sample: every array as it is."""
    found: dict[str, Reading] = {}
    for reading in readings.values():
        for array in reading.arrays:
            name = array.meta.path or ROOT_NAME
            if array.meta.vlen:
                notes.append(f"left out {name}: a single sample cannot hold strings")
            else:
                found[name] = Fixed(name, array, whole=True)
    return found


# --- notes -----------------------------------------------------------------------------------


def unkept(groups: Mapping[str, Attrs], readings: Sequence[Reading]) -> list[str]:
    """Return which names of axes and attributes do not become part of the samples.

    `groups` are the attributes of each group of the store, `readings` the fields that are read.
    """
    arrays = [a for r in readings for a in r.arrays]
    named = [a.meta.path or "the array" for a in arrays if a.meta.named_axes]
    parts = [r for r in readings if isinstance(r, Parts)]
    fields = {r.field.name for r in parts}
    owners = [a.meta.path for r in parts for a in r.arrays if from_json(a.meta.attrs)]
    for path, attrs in groups.items():
        above = any(a.meta.path.startswith(f"{path}/") for a in arrays)
        if path and path not in fields and above and from_json(attrs):
            owners.append(path)
    notes = [f"dimension names of {samples.listed(named, 8)} are not kept"] if named else []
    return notes + ([f"attributes of {samples.listed(owners, 8)} are not kept"] if owners else [])


def missing(store: Store, readings: Sequence[Reading]) -> list[str]:
    """Return how many files of each array are missing, for as many files as are soon counted."""
    notes, left = [], MAX_FILES
    for array in (a for r in readings for a in r.arrays if a.meta.shape):
        files = array.meta.files()
        if files > left:
            continue
        left -= files
        gone = store.count_missing(array.meta.file_keys(0, len(array)))
        if gone:
            name = array.meta.path or "the array"
            what = "" if array.complete else " and read as the fill value"
            notes.append(f"{gone} of {files} chunk files of {name} are missing{what}")
    return notes
