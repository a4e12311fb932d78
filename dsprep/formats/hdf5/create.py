"""The HDF5 objects of an output: the same bytes for the same schema, whenever they are made.

No object keeps a time. The bounds are those of HDF5 1.10, so that readers of that age open the
file. Links keep the order in which they were made: that of the schema.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.core.schema import DType, Schema
from dsprep.errors import UnsupportedError
from dsprep.formats.hdf5.attributes import (
    CAPACITY_ATTRIBUTE,
    KIND_ATTRIBUTE,
    LAYOUT_ATTRIBUTE,
    mark,
    write_attributes,
)
from dsprep.formats.hdf5.dtypes import DTYPE_ATTRIBUTE
from dsprep.formats.hdf5.plan import FieldPlan

_ZSTD = 32015  # registered with the HDF Group; hdf5plugin provides it
_ALIGN_FROM = 1 << 20
_PAGE = 4096


def build(
    path: Path, schema: Schema, plans: Sequence[FieldPlan], count: int, totals: Mapping[str, int]
) -> Any:
    """Return a new `h5py.File` at `path` with all groups, datasets and attributes.

    Contiguous datasets and unfiltered chunks have their place in the file already.

    Parameters
    ----------
    totals
        The number of rows of each ragged field, by name.
    """
    # Opened by ourselves first: the system's own words for a folder without permission.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666))
    file = _new_file(path)
    try:
        _fill(file, schema, plans, count, totals, 0)
    except BaseException:
        file.close()
        raise
    return file


def build_grouped(
    path: Path,
    schema: Schema,
    plans: Sequence[FieldPlan],
    count: int,
    totals: Mapping[str, int],
    group: int,
    metadata: int,
) -> Any:
    """Return what `build` does, but no chunk has a place yet: the caller gives them in turn.

    What is allocated from now on follows on what was allocated before, without gaps, as long as
    the metadata fit in the `metadata` bytes that are set aside for them at the beginning.

    Parameters
    ----------
    group
        Samples per group, which are those per chunk of ``first`` and ``count``.
    """
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666))
    file = _new_file(path, metadata)
    try:
        _fill(file, schema, plans, count, totals, group)
    except BaseException:
        file.close()
        raise
    return file


def _fill(
    file: Any,
    schema: Schema,
    plans: Sequence[FieldPlan],
    count: int,
    totals: Mapping[str, int],
    group: int,
) -> None:
    """Add attributes and fields to an empty file."""
    file.attrs.create(LAYOUT_ATTRIBUTE, 1, dtype="<i4")
    write_attributes(file, schema.attrs)
    for p in plans:
        _add(file, p, count, totals.get(p.field.name, 0), group)


def check(schema: Schema, plans: Sequence[FieldPlan]) -> None:
    """Make every dataset once in memory.

    Raises
    ------
    UnsupportedError
        If the HDF5 library refuses one.
    """
    with _new_file(None) as file:
        for p in plans:
            try:
                _add(file, p, 0, 0)
            except (TypeError, ValueError, RuntimeError, OSError, KeyError) as error:
                raise UnsupportedError(
                    f"HDF5 cannot hold field {p.field}: {error}",
                    fix="choose another dtype with --cast, or fewer members",
                ) from error


def lost_attributes(schema: Schema) -> list[str]:
    """Return the attributes that HDF5 cannot hold, one clause each."""
    lost = []
    with _new_file(None) as file:
        lost += [f"attribute {n} of the dataset" for n in write_attributes(file, schema.attrs)]
        for i, f in enumerate(schema):
            group = file.create_group(f"{i}")
            lost += [f"attribute {n} of field {f.name}" for n in write_attributes(group, f.attrs)]
    return lost


def _new_file(path: Path | None, metadata: int = 0) -> Any:
    """Return an empty file, in memory if there is no path.

    With `metadata` bytes set aside, data follow each other in the order of their allocation: no
    space is used again, no chunk waits in a cache, and nothing is aligned.
    """
    import h5py
    from h5py import h5f, h5p

    access = h5p.create(h5p.FILE_ACCESS)
    access.set_libver_bounds(h5f.LIBVER_V110, h5f.LIBVER_V110)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    if metadata:
        access.set_meta_block_size(metadata)
        access.set_cache(0, 0, 0, 1.0)
    else:
        access.set_alignment(_ALIGN_FROM, _PAGE)
    if path is None:
        access.set_fapl_core(1 << 16, False)
    else:
        access.set_file_locking(False, True)
    create = h5p.create(h5p.FILE_CREATE)
    create.set_link_creation_order(h5p.CRT_ORDER_TRACKED | h5p.CRT_ORDER_INDEXED)
    create.set_obj_track_times(False)
    if metadata:
        create.set_file_space_strategy(h5f.FSPACE_STRATEGY_AGGR, False, 1)
    name = b"memory" if path is None else os.fsencode(path)
    return h5py.File(h5f.create(name, h5f.ACC_TRUNC, create, access))


def _add(file: Any, p: FieldPlan, count: int, total: int, samples: int = 0) -> None:
    """Add one field to an open file, of which each group has `samples` if it is in groups."""
    outer, _, name = p.field.name.rpartition("/")
    parent = _group(file, outer)
    if not p.field.ragged:
        chunk = p.chunk_rows(count)
        dataset = _dataset(parent, name, p.shape(count), p.carrier.stored, chunk, p, not samples)
        write_attributes(dataset, p.field.attrs)
    else:
        group = _group(file, p.field.name)
        mark(group, KIND_ATTRIBUTE, p.field.kind)
        write_attributes(group, p.field.attrs)
        chunk, whole = p.chunk_rows(total), not samples
        dataset = _dataset(group, "values", p.shape(total), p.carrier.stored, chunk, p, whole)
        for part in ("first", "count"):
            chunk = min(samples, count)
            _dataset(group, part, (count,), np.dtype("<i8"), chunk, None, whole)
        if samples:
            mark(group, CAPACITY_ATTRIBUTE, str(p.chunk))
    if p.carrier.foreign:
        mark(dataset, DTYPE_ATTRIBUTE, p.carrier.attribute())


def _group(file: Any, path: str) -> Any:
    """Return the group at `path`, made with its parents if it is not there."""
    import h5py
    from h5py import h5g, h5p

    group = file
    for name in filter(None, path.split("/")):
        if name not in group:
            create = h5p.create(h5p.GROUP_CREATE)
            create.set_link_creation_order(h5p.CRT_ORDER_TRACKED | h5p.CRT_ORDER_INDEXED)
            create.set_obj_track_times(False)
            group = h5py.Group(h5g.create(group.id, name.encode(), gcpl=create))
        else:
            group = group[name]
    return group


def _dataset(
    parent: Any,
    name: str,
    shape: tuple[int, ...],
    dtype: DType,
    chunk: int,
    p: FieldPlan | None,
    early: bool,
) -> Any:
    """Add a dataset with chunks of that many rows; contiguous if 0.

    Parameters
    ----------
    p
        Tells the filters; None: there are none.
    early
        Whether chunks without filters have their place now.
    """
    import h5py
    from h5py import h5d, h5p, h5s, h5t, h5z

    create = h5p.create(h5p.DATASET_CREATE)
    create.set_obj_track_times(False)
    create.set_fill_time(h5d.FILL_TIME_NEVER)
    if chunk:
        create.set_chunk((chunk, *shape[1:]))
        if p is not None and p.shuffle:
            create.set_shuffle()
        if p is not None and p.codec == "gzip":
            create.set_deflate(p.level)
        elif p is not None and p.codec == "zstd":
            create.set_filter(_ZSTD, h5z.FLAG_MANDATORY, (p.level,))
    if not chunk or (early and (p is None or p.codec is None)):
        # Early allocation gives every byte its place now, and plain writes fill it.
        create.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    elif chunk >= shape[0] and (p is None or p.codec is None):
        # HDF5 1.14 forgets the place of an only chunk that it allocates for itself alone.
        create.set_alloc_time(h5d.ALLOC_TIME_LATE)
    element = h5t.py_create(dtype, logical=True)
    space = h5s.create_simple(shape)
    return h5py.Dataset(h5d.create(parent.id, name.encode(), element, space, create))
