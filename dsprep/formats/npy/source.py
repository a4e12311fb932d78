"""NumPy arrays as samples: which axis counts them, and what is compared before they are read."""

from __future__ import annotations

import glob
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from dsprep.core.closing import failure_closes
from dsprep.core.schema import Field, FieldSpec, Schema
from dsprep.errors import AmbiguousError
from dsprep.formats.choice import choose_fields
from dsprep.formats.fields import missing_field
from dsprep.formats.index_tables import LocatedRows
from dsprep.formats.located import LocatedSource, Parsed
from dsprep.formats.npy.arrays import (
    SUFFIX,
    Arrays,
    StoredArray,
    name_of,
    of_archive,
    of_directory,
    of_file,
)
from dsprep.formats.options import OpenOptions
from dsprep.formats.ragged import ArrayTree, Routes, table_paths
from dsprep.formats.samples import SampleAxis, Sized, ambiguous
from dsprep.formats.zip_members import member_checks
from dsprep.layout.laws import Explicit
from dsprep.layout.model import FileLayout
from dsprep.reading.files import Files
from dsprep.storage.base import Handle
from dsprep.storage.local import DirectoryGuard
from dsprep.storage.paths import open_file

PROVED = 64 << 20
"""Bytes of a stored ZIP member up to which its CRC-32 is compared when it is first read."""


def open_numpy(path: Path, options: OpenOptions, hint: Schema | None) -> LocatedSource:
    """Open a file, or a directory whose files are fields, for reading; see `base.Format.open`."""
    file = None if path.is_dir() else open_file(path)
    files = Files(DirectoryGuard(path, options.follow_external), lambda _: path)
    opened = partial(files.get, 0) if file is None else file.opened
    close = files.close if file is None else file.close
    with failure_closes(close):
        inside = _arrays(path, file, opened, options, hint)
        specs = tuple(_known(s, inside) for s in options.fields)

        def open_rows(name: str) -> LocatedRows:
            array, where = inside.arrays[name], f"{path}, array {name}"
            if file is not None and array.member is not None:
                array.member.check(file)
            field, count = Field(name, array.dtype, array.shape[1:]), (*array.shape, 1)[0]
            return LocatedRows(field, count, array.column(whole_file=False), opened, where)

        _check(inside, specs, options, path)
        options = replace(options, fields=specs)
        tree = ArrayTree(inside.arrays, {"": ()})
        axis, routes = choose_fields(tree, open_rows, options, path, refused=inside.refused)
        parsed = _parsed(axis, routes, inside, hint)
        values = {name: inside.arrays[name] for name, _ in routes.values()}
        members = [a.member for a in values.values() if a.member and a.nbytes <= PROVED]
        if file is not None and members:
            check = member_checks(file)
            parsed = replace(parsed, prove=lambda *_: check(members))
        return LocatedSource(path, parsed, options, opened, close)


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


def _known(spec: FieldSpec, inside: Arrays) -> FieldSpec:
    """Return what is asked for by the name of an array where it is given as that of its file."""
    names = {*inside.arrays, *inside.refused}

    def known(path: str) -> str:
        return path if path in names else name_of(path)

    index = tuple(",".join(map(known, table_paths(entry))) for entry in spec.index)
    return replace(spec, path=known(spec.path), index=index)


def _check(inside: Arrays, specs: tuple[FieldSpec, ...], options: OpenOptions, path: Path) -> None:
    """Raise the error for arrays that are asked for and cannot be read."""
    # Or `AmbiguousError`, if all of the files of a directory are the same kind of array, so that
    # each may be a sample.
    arrays = inside.arrays
    for name in (s.path for s in specs) if specs or arrays else inside.refused:
        if name in inside.refused:
            raise inside.refused[name]
        if name not in arrays:
            raise missing_field(name, inside.names, path)
    if options.sample_axis != "auto" or not path.is_dir() or len(arrays) < 2:
        return
    kinds = {(a.dtype.str, a.shape[1:], len(a.shape)) for a in arrays.values()}
    table = max(kinds)[2] < 2 and len({a.shape for a in arrays.values()}) == 1
    if len(kinds) == 1 and not table:
        sized = {n: Sized(a.shape, a.nbytes, dtype=a.dtype) for n, a in arrays.items()}
        error = ambiguous("each file may be a sample", sized, path)
        files = shlex.quote(f"{glob.escape(str(path))}/*{SUFFIX}")
        rows = sum(a.shape[0] for a in arrays.values())
        ways = [
            (f"{files} --sample-axis none", f"{len(arrays)} samples, one in each file"),
            (f"{files} --sample-axis first", f"{rows} samples, one in each row of each file"),
        ]
        raise AmbiguousError(error.reason, [*ways, *error.readings], where=path, fix=error.fix)


def _parsed(axis: SampleAxis, routes: Routes, inside: Arrays, hint: Schema | None) -> Parsed:
    known = {} if hint is None or not axis.whole_file else {f.name: f for f in hint}
    fields, columns = {}, {}
    for n, (values, route) in routes.items():
        array = inside.arrays[values]
        if route is not None:
            fields[n] = Field(n, array.dtype, (None, *array.shape[1:]))
            first, end = route.spans(array.shape[0])
            rows = Explicit(first), Explicit(end - first)
            columns[n] = replace(array.column(whole_file=False), first=rows[0], count=rows[1])
            continue
        fields[n] = _field(n, array, known.get(n), axis.whole_file)
        columns[n] = array.column(whole_file=axis.whole_file, ragged=fields[n].ragged)
    return Parsed(
        version=inside.version,
        fields=fields,
        layout=FileLayout(axis.count, columns=columns),
        notes=(*inside.notes, *axis.notes),
        others=axis.others,
    )


def _field(name: str, array: StoredArray, hint: Field | None, whole_file: bool) -> Field:
    """Return the field of an array; of a whole one as in `hint`, where its first axis varies."""
    shape: tuple[int | None, ...] = array.shape if whole_file else array.shape[1:]
    if hint is not None and hint.ragged and array.shape and hint.inner == array.shape[1:]:
        shape = hint.shape
    return Field(name, array.dtype, shape)
