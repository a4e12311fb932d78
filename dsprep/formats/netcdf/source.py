"""A classic netCDF file as samples.

Where variables have the records' dimension, a record is a sample, and its fields lie side by side.
Otherwise variables that share their first dimension are fields, each an array of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dsprep.core.closing import failure_closes
from dsprep.core.schema import DIMENSIONS, DType, Field
from dsprep.errors import FormatError
from dsprep.formats import samples
from dsprep.formats.fields import missing_field
from dsprep.formats.located import LocatedSource, Parsed
from dsprep.formats.netcdf.header import Header, Variable, read_header
from dsprep.formats.options import OpenOptions
from dsprep.formats.samples import SampleAxis, listed
from dsprep.formats.splits import check_arrays
from dsprep.layout.laws import Affine
from dsprep.layout.model import Blocks, Column, FileLayout, Grid, Part, Records
from dsprep.storage.base import Handle
from dsprep.storage.paths import open_file

MAX_STRING = 1 << 20
"""Characters along the last axis up to which they are one string."""

Variables = Mapping[str, Variable]


def open_netcdf(path: Path, options: OpenOptions) -> LocatedSource:
    """Open a classic netCDF file for reading; see `base.Format.open`."""
    file = open_file(path)
    with failure_closes(file.close):
        return LocatedSource(path, parse(file, options), options, file.opened, file.close)


def parse(file: Handle, options: OpenOptions) -> Parsed:
    """Return the parsed contents of a file."""
    header = read_header(file)
    variables = _requested(header, options, file.path)
    axis = _sample_axis(header, variables, options, file.path)
    variables = {name: variables[name] for name in axis.names}
    unapplied = samples.unapplied({name: v.attrs for name, v in variables.items()})
    return Parsed(
        version=f"netCDF classic, CDF-{header.version}",
        fields={name: _field(header, v, axis.whole_file) for name, v in variables.items()},
        layout=_layout(header, variables, axis),
        attrs=header.attrs,
        notes=(*axis.notes, *unapplied),
        others=axis.others,
    )


# --- which variables are fields ----------------------------------------------------------------


def _requested(header: Header, options: OpenOptions, path: Path) -> dict[str, Variable]:
    """Return the variables that the user named, or all, by their names."""
    variables = {v.name: v for v in header.variables}
    if not variables:
        raise FormatError("the file holds no variables", where=path)
    paths = {spec.spelled for spec in options.fields}
    for name in sorted(paths - variables.keys()):
        raise missing_field(name, variables, path)
    return {name: v for name, v in variables.items() if name in paths or not paths}


def _sample_axis(
    header: Header, variables: Variables, options: OpenOptions, path: Path
) -> SampleAxis:
    """Return the variables that are fields, and the number of their samples."""
    mode, named = options.sample_axis, bool(options.fields)
    # Where there are no records yet, one is judged.
    rows = {name: max(1, header.records) if v.record else 1 for name, v in variables.items()}
    arrays = {
        n: samples.Sized(
            header.shape(v),
            rows[n] * v.nbytes,
            header.dimensions[v.dimensions[0]] if v.dimensions else "",
            v.dtype,
        )
        for n, v in variables.items()
    }
    if not named and mode == "auto":
        check_arrays(arrays, path)
    inside = tuple(name for name, v in variables.items() if v.record)
    if inside and mode != "none":
        others = [name for name, v in variables.items() if not v.record]
        static = samples.static_among(arrays, inside)
        notes = [f"left out {listed([*static])}: {samples.STATIC}"] if static else []
        if lost := [name for name in others if name not in static]:
            notes.append(f"left out {listed(lost)}: no dimension of records")
        notes.append(samples.counted_along(arrays[inside[0]].axis))
        axis = SampleAxis(header.records, False, inside, tuple(notes), static)
    else:
        axis = samples.choose(arrays, mode, path, named=named)
    for name in sorted(variables.keys() - set(axis.names)) if named else ():
        raise samples.not_of_samples(name, "no dimension of records", axis, path)
    return axis


# --- what they are, and where they lie ---------------------------------------------------------


def _form(shape: tuple[int, ...], dtype: DType) -> tuple[tuple[int, ...], DType]:
    """Return shape and dtype of a value; characters along its last axis are a string."""
    if dtype.kind == "S" and shape and 0 < shape[-1] <= MAX_STRING:
        return shape[:-1], np.dtype(f"S{shape[-1]}")
    return shape, dtype


def _field(header: Header, v: Variable, whole_file: bool) -> Field:
    shape = header.shape(v)
    shape, dtype = _form(shape if whole_file else shape[1:], v.dtype)
    names = [header.dimensions[d] for d in v.dimensions[: len(shape) + (not whole_file)]]
    attrs = {**v.attrs, DIMENSIONS: np.array(names)} if names else v.attrs
    return Field(v.name, dtype, shape, attrs=attrs)


def _layout(header: Header, variables: Variables, axis: SampleAxis) -> FileLayout:
    """Return where samples lie: as records, or as arrays of their own."""
    if axis.whole_file or not any(v.record for v in variables.values()):
        columns = {n: _column(header, v, axis.whole_file) for n, v in variables.items()}
        return FileLayout(axis.count, columns=columns)
    base = min(v.begin for v in variables.values())
    end = max(v.begin + v.nbytes for v in variables.values())
    parts = {n: Part(v.begin - base, v.nbytes) for n, v in variables.items()}
    offsets = Affine(header.records, base, header.stride)
    blocks = Blocks(offsets, Affine(header.records, end - base))
    return FileLayout(header.records, Records(blocks, parts))


def _column(header: Header, v: Variable, whole_file: bool) -> Column:
    """Return a variable as an array in chunks: a chunk for each record, or one in all."""
    shape = header.shape(v)
    if 0 in shape:
        return Column(None)
    inner, dtype = _form(shape[1:], v.dtype)
    rows, apart = (*shape, 1)[0], v.record and header.stride > v.nbytes
    count, stride = (rows, header.stride) if apart else (1, 0)
    nbytes = v.nbytes if apart or not v.record else v.nbytes * rows
    grid = Grid(
        blocks=Blocks(Affine(count, v.begin, stride), Affine(count, nbytes)),
        shape=(rows, *inner),
        itemsize=dtype.itemsize,
        chunk=(1 if apart else rows, *inner),
    )
    return Column(grid, lines=rows if whole_file else 1)
