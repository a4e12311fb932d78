"""NumPy arrays as samples: which axis counts them, and what is compared before they are read."""

from __future__ import annotations

import glob
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from dsprep.core.schema import Field, FieldSpec, Schema, show_shape
from dsprep.errors import AmbiguousError, FormatError, SchemaError
from dsprep.formats.fields import missing_field
from dsprep.formats.index_tables import Route
from dsprep.formats.located import LocatedSource, Parsed
from dsprep.formats.npy.archive import Member
from dsprep.formats.npy.arrays import (
    SUFFIX,
    Arrays,
    StoredArray,
    name_of,
    of_archive,
    of_directory,
    of_file,
)
from dsprep.formats.npy.tables import StoredNumbers, check
from dsprep.formats.options import OpenOptions
from dsprep.formats.ragged import (
    ArrayTree,
    RaggedRows,
    find_tables,
    indexed,
    routes_of,
    table_paths,
)
from dsprep.formats.samples import SampleAxis, Sized, ambiguous, choose
from dsprep.formats.splits import check_arrays
from dsprep.layout.laws import Explicit
from dsprep.layout.model import FileLayout
from dsprep.reading.files import Files
from dsprep.storage.base import Handle
from dsprep.storage.local import DirectoryGuard
from dsprep.storage.paths import open_file

Routes: TypeAlias = Mapping[str, tuple[str, Route | None]]
"""By field: the array that has its values, and how its rows are found if it is ragged."""

PROVED = 64 << 20
"""Bytes of a stored ZIP member up to which its CRC-32 is compared when it is first read."""


def open_numpy(path: Path, options: OpenOptions, hint: Schema | None) -> LocatedSource:
    """Open a file, or a directory whose files are fields, for reading; see `base.Format.open`."""
    file = None if path.is_dir() else open_file(path)
    files = Files(DirectoryGuard(path, options.follow_external), lambda _: path)
    opened = partial(files.get, 0) if file is None else file.opened
    close = files.close if file is None else file.close
    try:
        inside = _arrays(path, file, opened, options, hint)
        specs = tuple(_known(s, inside) for s in options.fields)

        def open_rows(name: str) -> StoredNumbers:
            member = inside.members.get(name)
            if member is not None and file is not None:
                check(file, member)
            return StoredNumbers(name, inside.arrays[name], opened, f"{path}, array {name}")

        tree = ArrayTree(inside.arrays, {"": ()})
        ragged = RaggedRows()
        for group in tree.groups if options.sample_axis != "none" else ():
            find_tables(tree, group, open_rows, ragged)
        known = [s for s in specs if s.index or s.path in inside.arrays]  # the others: `_parsed`
        routes = routes_of(known, tree, ragged, open_rows, path) if known or not specs else {}
        axis = _axis(routes, inside, options, path, partial(indexed, tree, open_rows))
        parsed = _parsed(routes, inside, axis, specs, hint, path)
        if file is not None and inside.members:
            values = (inside.members.get(routes[name][0]) for name in parsed.fields)
            members = [m for m in values if m is not None and m.nbytes <= PROVED]
            parsed = replace(parsed, prove=partial(_prove, file, members, threading.Lock()))
        return LocatedSource(path, parsed, replace(options, fields=specs), opened, close)
    except BaseException:
        close()
        raise


def _arrays(
    path: Path,
    file: Handle | None,
    opened: Callable[[str], Handle],
    options: OpenOptions,
    hint: Schema | None,
) -> Arrays:
    tables = [p for s in options.fields for entry in s.index for p in table_paths(entry)]
    named = [*(p for s in options.fields for p in (s.path, s.spelled, str(s))), *tables]
    names = {n for p in named for n in (p, name_of(p))}
    if file is None:
        return of_directory(path, names, opened)
    if file.pread(2, 0) == b"PK":
        return of_archive(file, names)
    alone = None if hint is None or len(hint) != 1 else hint.names[0]
    return of_file(file, alone or name_of(path.name) or path.name)


def _prove(
    file: Handle, members: list[Member], lock: threading.Lock, start: int, stop: int
) -> None:
    """Compare stored members of a ZIP file with their CRC-32, once; see `PROVED`."""
    with lock:
        while members:
            file.check_same()
            check(file, members[-1])
            members.pop()


def _known(spec: FieldSpec, inside: Arrays) -> FieldSpec:
    """Return what is asked for by the name of an array where it is given as that of its file."""
    names = {*inside.arrays, *inside.refused}

    def known(path: str) -> str:
        return path if path in names else name_of(path)

    index = tuple(",".join(map(known, table_paths(entry))) for entry in spec.index)
    return replace(spec, path=known(spec.path), index=index)


def _parsed(
    routes: Routes,
    inside: Arrays,
    axis: SampleAxis,
    specs: tuple[FieldSpec, ...],
    hint: Schema | None,
    path: Path,
) -> Parsed:
    for name in (s.path for s in specs) if specs or inside.arrays else inside.refused:
        if name in inside.refused:
            raise inside.refused[name]
        if name not in inside.arrays:
            raise missing_field(name, inside.names, path)
    if not routes:
        problem = "no array can be a field" if inside.arrays else "it holds no arrays"
        raise FormatError(problem, where=path)
    others = [n for n in (s.spelled for s in specs) if n not in axis.names]
    if others:
        raise SchemaError(
            f"field {others[0]} has not the length of the others",
            where=path,
            expected=f"{axis.count} samples along its first axis",
            found=show_shape(_sized(*routes[others[0]], inside).shape) or "no axis",
        )
    known = {} if hint is None or not axis.whole_file else {f.name: f for f in hint}
    fields, columns = {}, {}
    for n in axis.names:
        values, route = routes[n]
        array = inside.arrays[values]
        if route is not None:
            fields[n] = Field(n, array.dtype, (None, *array.shape[1:]))
            first, end = route.spans(array.shape[0])
            rows = Explicit(first), Explicit(end - first)
            columns[n] = replace(array.column(whole_file=False), first=rows[0], count=rows[1])
            continue
        fields[n] = _field(n, array, known.get(n), axis.whole_file)
        columns[n] = array.column(whole_file=axis.whole_file, ragged=fields[n].ragged)
    refused = [f"left out {name}: {error.what}" for name, error in inside.refused.items()]
    return Parsed(
        version=inside.version,
        fields=fields,
        layout=FileLayout(axis.count, columns=columns),
        notes=(*inside.notes, *refused, *axis.notes),
        others=axis.others,
    )


def _field(name: str, array: StoredArray, hint: Field | None, whole_file: bool) -> Field:
    """Return the field of an array; of a whole one as in `hint`, where its first axis varies."""
    shape: tuple[int | None, ...] = array.shape if whole_file else array.shape[1:]
    if hint is not None and hint.ragged and array.shape and hint.inner == array.shape[1:]:
        shape = hint.shape
    return Field(name, array.dtype, shape)


def _sized(values: str, route: Route | None, inside: Arrays) -> Sized:
    array = inside.arrays[values]
    shape = array.shape if route is None else (route.tables[0].rows,)
    return Sized(shape, array.stored, dtype=array.dtype if route is None else None)


def _axis(
    routes: Routes,
    inside: Arrays,
    options: OpenOptions,
    path: Path,
    more: Callable[[], Sequence[tuple[str, str]]],
) -> SampleAxis:
    """Return which axis counts the samples.

    Raises
    ------
    AmbiguousError
        If it is doubtful, or all of the files of a directory are the same kind of array, so that
        each may be a sample.
    """
    arrays, mode = inside.arrays, options.sample_axis
    shapes = {name: _sized(*route, inside) for name, route in routes.items()}
    if not shapes:
        return SampleAxis(0, False, ())
    if not options.fields and mode == "auto":
        check_arrays(shapes, path)
    kinds = {(a.dtype.str, a.shape[1:], len(a.shape)) for a in arrays.values()}
    table = max(kinds)[2] < 2 and len({a.shape for a in arrays.values()}) == 1
    if mode == "auto" and path.is_dir() and len(arrays) > 1 and len(kinds) == 1 and not table:
        error = ambiguous("each file may be a sample", shapes, path)
        files, rows = (
            shlex.quote(f"{glob.escape(str(path))}/*{SUFFIX}"),
            sum(a.shape[0] for a in arrays.values()),
        )
        ways = [
            (f"{files} --sample-axis none", f"{len(arrays)} samples, one in each file"),
            (f"{files} --sample-axis first", f"{rows} samples, one in each row of each file"),
        ]
        raise AmbiguousError(error.reason, [*ways, *error.readings], where=path, fix=error.fix)
    return choose(shapes, mode, path, named=bool(options.fields), more=more)
