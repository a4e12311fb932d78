"""Arrays that belong to all samples, such as latitudes: found beside the samples, and read."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from dsprep import formats
from dsprep.core.schema import DIMENSIONS, Field, FieldSpec, Ragged, Schema, StaticArray
from dsprep.errors import DsprepError
from dsprep.formats.base import Format, Source
from dsprep.formats.options import OpenOptions
from dsprep.formats.samples import NAMED_NBYTES, listed
from dsprep.sidecar.spec import is_small
from dsprep.source.from_sidecar import SidecarSource
from dsprep.source.joined import JoinedSource


def with_static(schema: Schema, source: Source, target: Format) -> tuple[Schema, tuple[str, ...]]:
    """Return a schema with the static arrays of a source, and a note on those that are left out.

    They are read from each file. Where fields were named, they are those along the same axes.
    """
    arrays: dict[str, StaticArray | None] = {}
    for part in source.parts if isinstance(source, JoinedSource) else (source,):
        arrays = {**_found(part), **arrays}
    kept = {
        name: array
        for name, array in arrays.items()
        if array is not None and (target.keeps_types or is_small(array))
    }
    lost = [name for name in arrays if name not in kept]
    note = f"left out {listed(lost)}: not the same in all files, or too large for {target.name}"
    static = [
        array
        for name, array in kept.items()  # none has the place of a field, or of a group around it
        if not any(f"{f}/".startswith(f"{name}/") or name.startswith(f"{f}/") for f in schema.names)
    ]
    return replace(schema, static=tuple(static)), (note,) * bool(lost)


def _found(source: Source) -> dict[str, StaticArray | None]:
    """Return the static arrays of a source by name; None: it is not the same in all files."""
    while (base := getattr(source, "base", None)) is not None:
        source = base
    arrays: dict[str, StaticArray | None] = {s.field.name: s for s in source.schema.static}
    if not source.format:
        return arrays
    format, others = formats.load(source.format), source.others
    options, paths = source.options, source.files()
    if isinstance(source, SidecarSource):
        others = tuple(s.field.name for s in source.schema.static if s.values is None)
        options = OpenOptions()
    axes = {str(name) for f in source.schema for name in np.ravel(f.attrs.get(DIMENSIONS, ()))}
    if options.fields and axes:
        with (
            suppress(DsprepError),
            format.open(paths[0], replace(options, fields=(), file_field=None), None) as whole,
        ):
            others = whole.others
    for name in others:
        array = _read(format, paths[0], name, options)
        own = [] if array is None else np.ravel(array.field.attrs.get(DIMENSIONS, ())).tolist()
        if not options.fields or (own and axes.issuperset(own)):
            alike = all(_is_same(array, _read(format, p, name, options)) for p in paths[1:])
            arrays[name] = array if alike else None
    return arrays


def _is_same(one: StaticArray | None, other: StaticArray | None) -> bool:
    """Return whether arrays are the same, bit for bit."""
    if one is None or other is None or one.field != other.field:
        return False
    return np.asarray(one.values).tobytes() == np.asarray(other.values).tobytes()


def _read(format: Format, path: Path, name: str, options: OpenOptions) -> StaticArray | None:
    """Return an array of numbers or text of a file, None if there is none."""
    follow = options.follow_external
    for axis in ("none", "first"):  # text of varying length has only the latter
        how = OpenOptions(fields=(FieldSpec(name, name),), sample_axis=axis, follow_external=follow)
        with suppress(DsprepError), format.open(path, how, None) as source:
            column, attrs = source.read(0, len(source))[name], source.schema[name].attrs
            if isinstance(column, Ragged):
                longest = int(column.lengths.max(initial=0))
                if column.kind != "str" or len(column) * longest > NAMED_NBYTES:
                    return None
                column = np.array([*column], str)
            if column.dtype.kind not in "biufSU":
                return None
            values = np.asarray(column[0] if axis == "none" else column)
            return StaticArray(Field(name, values.dtype, values.shape, attrs=attrs), values)
    return None
