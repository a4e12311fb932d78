"""The choice of fields among named arrays: one way for HDF5, NumPy and Zarr.

Index tables first, since the arrays that they divide are ragged; then what counts the samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from dsprep.errors import AmbiguousError, DsprepError, FormatError, SchemaError, require
from dsprep.formats.conventions import Stated
from dsprep.formats.foreign import WAY_OUT
from dsprep.formats.options import OpenOptions
from dsprep.formats.ragged import (
    ArrayTree,
    Open,
    Routes,
    find_tables,
    indexed,
    routes_of,
    table_paths,
    take_own,
)
from dsprep.formats.samples import SampleAxis, Sized, choose, listed
from dsprep.formats.splits import check_arrays


def choose_fields(
    tree: ArrayTree,
    open_rows: Open,
    options: OpenOptions,
    where: object,
    *,
    stated: Stated | None = None,
    own: bool = False,
    marked: Mapping[str, tuple[Any, int]] | None = None,
    refused: Mapping[str, str] | Mapping[str, DsprepError] | None = None,
) -> tuple[SampleAxis, Routes]:
    """Return what counts the samples, and the fields: as named, or all that have one for each.

    Parameters
    ----------
    tree
        The arrays that can be read, each with `nbytes`, too; and the groups, with the names of
        those attributes that are the user's.
    open_rows
        Opens an array as index tables have it, by its path.
    options
        As given by the user.
    where
        The file, for messages.
    stated
        What programs state about the arrays.
    own
        Whether dsprep wrote the file: nothing is guessed.
    marked
        Groups that are one ragged field each, in dsprep's own encoding: kind and capacity.
    refused
        Arrays that cannot be fields: the reason of each, or the error.

    Raises
    ------
    FormatError
        If nothing can be a field, or a table is damaged.
    SchemaError, UsageError, AmbiguousError
        If a field that the user named does not fit, or what counts the samples is doubtful.
    """
    stated, marked, refused = stated or Stated(), marked or {}, refused or {}
    specs, mode = options.fields, options.sample_axis
    mode = "first" if own and mode == "auto" else mode
    doubtful = mode == "auto" and not specs
    if stated.refused and doubtful:
        reason, fix = stated.refused
        raise SchemaError(reason, where=where, fix=f"{fix}, or name fields: --field NAME")
    ragged, nested = ({}, []) if mode == "none" else _ragged(tree, open_rows, marked, own, where)
    if nested and not specs:
        raise AmbiguousError("there are lists in lists", nested, where=where, fix=WAY_OUT)
    for path in (p for s in specs for p in (s.path, *(t for e in s.index for t in table_paths(e)))):
        problem = refused.get(path)
        if isinstance(problem, DsprepError):
            raise problem
        require(not problem, SchemaError, f"{path} cannot be a field: {problem}", where=where)
    routes = routes_of(specs, tree, ragged, open_rows, where)
    if not specs:
        routes = {n: r for n, r in routes.items() if r[0] not in stated.aside}
    arrays = _sized(routes, tree, stated)
    errors = {p: r.what if isinstance(r, DsprepError) else r for p, r in refused.items()}
    reasons = [f"{path}: {reason}" for path, reason in errors.items()]
    if not arrays:
        problem, notes = "it holds no arrays that can be fields", [*stated.notes(), *reasons]
        raise FormatError(problem, where=where, found=listed(notes) or None)
    if doubtful:
        check_arrays(arrays, where)
    axis = choose(
        arrays,
        mode,
        where,
        named=bool(specs),
        grouped=stated.grouped,
        more=partial(indexed, tree, open_rows),
    )
    notes = [*axis.notes]
    if not specs:
        notes = [*stated.notes(), *notes, *(f"left out {reason}" for reason in reasons)]
        owners = [g for g, names in tree.groups.items() if g and g not in marked and names]
        if owners:
            notes.append(f"attributes of {listed(owners)} are not kept")
    others = axis.others or tuple(stated.aside if own else ())
    axis = replace(axis, notes=tuple(notes), others=others)
    return axis, {n: routes[n] for n in axis.names}


def _ragged(
    tree: ArrayTree,
    open_rows: Open,
    marked: Mapping[str, tuple[Any, Any]],
    own: bool,
    where: object,
) -> tuple[Routes, list[tuple[str, str]]]:
    """Return the ragged fields by the tables beside them, and the readings of lists in lists."""
    ragged: Routes = {}
    nested = list[tuple[str, str]]()
    for group in tree.groups:
        if group in marked:
            at = f"{where}, field {group}"
            ragged[group] = take_own(group, *marked[group], tree, open_rows, at)
        elif not own:
            routes, readings = find_tables(tree, group, open_rows)
            ragged |= routes
            nested += readings
    return ragged, nested


def _sized(routes: Routes, tree: ArrayTree, stated: Stated) -> dict[str, Sized]:
    """Return the arrays of fields, in the order of the file, by what counts their samples."""
    numbers, arrays = {path: i for i, path in enumerate(tree.datasets)}, dict[str, Sized]()
    for name in sorted(routes, key=lambda n: numbers[routes[n][0]]):
        path, route = routes[name]
        array, table = tree.datasets[path], None if route is None else route.tables[0]
        shape = array.shape if table is None else (table.rows,)
        axis_name = stated.axes.get(path if table is None else table.paths[0], "")
        arrays[name] = Sized(shape, array.nbytes, axis_name, array.dtype)
    return arrays
