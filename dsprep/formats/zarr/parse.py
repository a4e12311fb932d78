"""Parsing a Zarr store: which of its arrays are fields, and how their samples are counted.

The walk through the groups, the choice of fields, and the source that reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from dsprep.core.closing import failure_closes
from dsprep.core.schema import Attrs
from dsprep.errors import DsprepError, FormatError
from dsprep.formats import samples
from dsprep.formats.choice import choose_fields
from dsprep.formats.conventions import Stated, state_common
from dsprep.formats.located import LocatedSource, Parsed
from dsprep.formats.options import OpenOptions
from dsprep.formats.ragged import ArrayTree, RaggedField
from dsprep.formats.zarr.array import StoredArray
from dsprep.formats.zarr.attributes import CAPACITY, FIELDS, KIND, STATIC, from_json
from dsprep.formats.zarr.fields import AnyField, ArrayField, ElementsField, arrays_of, ragged_field
from dsprep.formats.zarr.metadata import ArrayMeta, NoField, read_node
from dsprep.formats.zarr.store import Directory, Store, Zip, join
from dsprep.layout.model import FileLayout

ROOT_NAME = "data"
"""The field name of an array that is the whole store."""

MAX_DEPTH = 32  # Linux follows 40 symbolic links on one path
MAX_NODES = 100_000

OME = {"multiscales", "plate", "well"}
OME_FIX = (
    "name a level, such as --field 0, with --sample-axis none or first; or the images of a plate, "
    "a sample each: 'PLATE/*/*/*/0' --sample-axis none"
)
"""Attributes of OME-NGFF 0.4 and 0.5, and the way to read such images."""


def open_zarr(path: Path, options: OpenOptions) -> LocatedSource:
    """Open a store for reading; see `base.Format.open`."""
    store: Store = Directory(path, options.follow_external) if path.is_dir() else Zip(path)
    with failure_closes(store.close):
        parsed = parse(store, options)
        return LocatedSource(path, parsed, options, store.open, store.close)


def parse(store: Store, options: OpenOptions) -> Parsed:
    """Return the parsed contents of a store."""
    nodes, groups = walk(store)
    path, root = store.path, groups.get("", {})
    own = root.get(FIELDS)
    order = [n for n in own if isinstance(n, str)] if isinstance(own, list) else []
    arrays = _opened(store, nodes, order)
    refused = {n or ROOT_NAME: e for n, e in nodes.items() if isinstance(e, DsprepError)}
    stated = _state(arrays, groups, bool(order))
    for name in stated.left_out.keys() & arrays.keys():
        del arrays[name]
        refused[name] = NoField(stated.left_out[name], where=f"{path}, array {name}")
    refused = {n: e for n, e in refused.items() if n not in stated.aside or options.fields}
    for error in refused.values():
        if not (options.fields or isinstance(error, NoField)):
            raise error
    axis, routes = choose_fields(
        ArrayTree(arrays, {name: tuple(from_json(attrs)) for name, attrs in groups.items()}),
        arrays.__getitem__,
        options,
        path,
        stated=stated,
        own=bool(order),
        marked={n: (a[KIND], a.get(CAPACITY, 0)) for n, a in groups.items() if KIND in a},
        refused=refused,
    )
    fields, notes, single = dict[str, AnyField](), [*axis.notes], axis.whole_file
    for name, (values, route) in routes.items():
        array = arrays[values]
        more = stated.attrs.get(values, {})
        if route is not None:
            attrs = {**from_json(groups.get(name, array.meta.attrs)), **more}
            fields[name] = ragged_field(name, array, route, attrs)
        elif single and array.meta.vlen:
            notes.append(f"left out {name}: a single sample cannot hold strings")
        else:
            kind = ElementsField if array.meta.vlen else ArrayField
            fields[name] = kind(name, array, single, {**from_json(array.meta.attrs), **more})
    if not fields:
        raise FormatError("no array can be a field", where=path, found="; ".join(notes))
    if not options.fields:
        notes += samples.unapplied({n: f.field.attrs for n, f in fields.items()})
    zipped = isinstance(store, Zip)
    return Parsed(
        version=f"Zarr v{3 if store.has('zarr.json') else 2}, {'ZIP' if zipped else 'directory'}",
        fields={n: f.field for n, f in fields.items()},
        layout=FileLayout(axis.count),
        lazy=fields,
        attrs=from_json(root),
        notes=tuple(notes),
        others=axis.others,
        prove=partial(prove, [*fields.values()]) if zipped else None,
    )


def _opened(store: Store, nodes: Arrays, order: list[str]) -> dict[str, StoredArray]:
    """Return the arrays, those of fields that dsprep wrote first, in their order."""
    numbers = {name: i for i, name in enumerate(order)}
    arrays = {
        n or ROOT_NAME: StoredArray(m, store) for n, m in nodes.items() if isinstance(m, ArrayMeta)
    }

    def place(name: str) -> tuple[int, str]:
        return numbers.get(name.rpartition("/")[0], numbers.get(name, len(order))), name

    for name, array in arrays.items():
        array.complete = place(name)[0] < len(order) and not array.meta.vlen
    return {name: arrays[name] for name in sorted(arrays, key=place)}


def _state(arrays: Mapping[str, StoredArray], groups: Groups, own: bool) -> Stated:
    """Return what the store states about its arrays; dsprep's own: only what is not a field."""
    stated = Stated()
    if own:
        static = groups[""].get(STATIC)
        names = static if isinstance(static, list) else ()
        stated.aside |= {str(name): samples.STATIC for name in names}
        return stated
    tree = ArrayTree(arrays, {name: tuple(attrs) for name, attrs in groups.items()})

    def attributes(path: str) -> Attrs:
        return from_json(arrays[path].meta.attrs if path in arrays else groups.get(path, {}))

    state_common(tree, attributes, stated)
    if any(OME & attrs.keys() or "ome" in attrs for attrs in groups.values()):
        stated.refused = "this is an OME-Zarr image or plate", OME_FIX
    named = {path: array.meta.axes[0] for path, array in arrays.items() if array.meta.axes}
    stated.axes = {**{path: axis for path, axis in named.items() if axis}, **stated.axes}
    return stated


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


# --- notes -----------------------------------------------------------------------------------
