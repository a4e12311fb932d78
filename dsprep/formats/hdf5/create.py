"""The HDF5 objects of an output: the same bytes for the same schema, whenever they are made.

No object keeps a time. The bounds are those of HDF5 1.10, so that readers of that age open the
file. Links keep the order in which they were made: that of the schema.

In groups, chunks get their places in turn. HDF5 allocates a chunk when it is first written to. So
one element of each chunk is written, group by group, before there are any samples: the chunks of a
group are then back to back. An unnamed dataset has a chunk behind each group that fills the rest of
the last stripe; it vanishes, and nothing is written to its bytes. All places are read back from the
file; nothing rests on this order but speed.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.core.schema import DIMENSIONS, DType, Field, Ints, Schema, StaticArray, name_axes
from dsprep.errors import FormatError, UnsupportedError
from dsprep.formats.hdf5.attributes import (
    CAPACITY_ATTRIBUTE,
    KIND_ATTRIBUTE,
    LAYOUT_ATTRIBUTE,
    STATIC_ATTRIBUTE,
    mark,
    write_attributes,
)
from dsprep.formats.hdf5.dimensions import NO_VARIABLE
from dsprep.formats.hdf5.dtypes import DTYPE_ATTRIBUTE, Carrier
from dsprep.formats.hdf5.guard import SIGNATURE, hdf5_errors
from dsprep.formats.hdf5.locate import locate_grid
from dsprep.formats.hdf5.plan import FieldPlan, Hdf5Plan
from dsprep.formats.located import Unlocated
from dsprep.layout.model import Grid
from dsprep.storage.paths import open_file
from dsprep.storage.ranges import pread_most, pwrite_all, truncate

_ZSTD = 32015  # registered with the HDF Group; hdf5plugin provides it
_ALIGN_FROM = 1 << 20
_PAGE = 4096

_PROBE_NBYTES = 4096
"""More than HDF5 sets aside for small pieces of data (2048), so that it ends where all others
begin."""


@contextmanager
def build(path: Path, file: Hdf5Plan, metadata: int = 0) -> Iterator[Any]:
    """Make an `h5py.File` at `path` with all groups, datasets and attributes, open in the block.

    Contiguous datasets and unfiltered chunks are allocated already, unless the file is in groups:
    then no chunk is, and the caller allocates them in turn. What is allocated follows on what was
    allocated before, without gaps, as long as the metadata fit in the `metadata` bytes that are
    set aside for them at the beginning.
    """
    # Opened by ourselves first: the system's own words for a folder without permission.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666))
    group = file.grouping.samples if file.grouped else 0
    with hdf5_errors(path, "the file cannot be made"), _new_file(path, metadata) as made:
        made.attrs.create(LAYOUT_ATTRIBUTE, 1, dtype="<i4")
        write_attributes(made, file.schema.attrs)
        for p in file.plans:
            _add(made, p, file.count, file.totals.get(p.field.name, 0), group)
        static = file.schema.static
        for s in static:
            _add_static(_group(made, s.field.name.rpartition("/")[0]), s)
        if static:
            mark(made, STATIC_ATTRIBUTE, "\0".join(s.field.name for s in static))
        if any(DIMENSIONS in f.attrs for f in (*file.schema, *(s.field for s in static))):
            _attach_scales(made, name_axes(file.schema, file.count))
        yield made


def check(schema: Schema, plans: Sequence[FieldPlan]) -> list[str]:
    """Make every dataset once in memory; return the attributes that are lost, a clause each.

    Raises
    ------
    UnsupportedError
        If the HDF5 library refuses one.
    """
    import h5py

    with h5py.File(io.BytesIO(), "w", libver=("v110", "v110")) as file:
        lost = [f"attribute {n} of the dataset" for n in write_attributes(file, schema.attrs)]
        for p in plans:
            try:
                names = _add(file, p, 0, 0)
            except (TypeError, ValueError, RuntimeError, OSError, KeyError) as error:
                raise UnsupportedError(
                    f"HDF5 cannot hold field {p.field}: {error}",
                    fix="choose another dtype with --cast, or fewer members",
                ) from error
            lost += [f"attribute {n} of field {p.field.name}" for n in names]
    return lost


def _new_file(path: Path, metadata: int) -> Any:
    """Return an empty file; with `metadata` bytes set aside, data follow in order of allocation."""
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
    access.set_file_locking(False, True)
    create = h5p.create(h5p.FILE_CREATE)
    create.set_link_creation_order(h5p.CRT_ORDER_TRACKED | h5p.CRT_ORDER_INDEXED)
    create.set_obj_track_times(False)
    if metadata:
        create.set_file_space_strategy(h5f.FSPACE_STRATEGY_AGGR, False, 1)
    return h5py.File(h5f.create(os.fsencode(path), h5f.ACC_TRUNC, create, access))


def _add(file: Any, p: FieldPlan, count: int, total: int, samples: int = 0) -> list[str]:
    """Add one field, `samples` per group if grouped; return attributes that HDF5 cannot hold."""
    outer, _, name = p.field.name.rpartition("/")
    parent, rows, is_count = _group(file, outer), count, not samples
    if p.field.ragged:
        parent, name, rows = _group(file, p.field.name), "values", total
        mark(parent, KIND_ATTRIBUTE, p.field.kind)
        lost = write_attributes(parent, p.field.attrs)
    dataset = _dataset(
        parent, name, p.shape(rows), p.carrier.stored, p.chunk_rows(rows), p, is_count
    )
    if not p.field.ragged:
        lost = write_attributes(dataset, p.field.attrs)
    else:
        for part in ("first", "count"):
            chunk = min(samples, count)
            _dataset(parent, part, (count,), np.dtype("<i8"), chunk, None, is_count)
        if samples:
            mark(parent, CAPACITY_ATTRIBUTE, str(p.chunk))
    if p.carrier.foreign:
        mark(dataset, DTYPE_ATTRIBUTE, p.carrier.attribute())
    return lost


def _add_static(parent: Any, static: StaticArray) -> None:
    """Add an array that belongs to all samples; text is of varying length."""
    import h5py

    values, name = np.asarray(static.values), static.field.name.rpartition("/")[2]
    dtype: Any = values.dtype
    if dtype.kind == "U":
        values, dtype = values.astype(object), h5py.string_dtype()
    made = parent.create_dataset(name, data=values, dtype=dtype, track_times=False)
    write_attributes(made, static.field.attrs)


def _attach_scales(file: Any, axes: Mapping[str, Sequence[str]]) -> None:
    """Give the axes of datasets their names, as netCDF-4 does: by scales, which take no space."""
    import h5py
    from h5py import h5d, h5ds, h5p, h5s, h5t

    for path, known in axes.items():
        if not isinstance(dataset := file.get(path), h5py.Dataset):
            continue
        if [*known] == [path]:
            h5ds.set_scale(dataset.id, path.encode())
            continue
        for k in range(dataset.ndim):  # some may be of what stands in for a dtype
            name = known[k] if k < len(known) else f"{path.rpartition('/')[2]}_{k}"
            if name not in file:
                create = h5p.create(h5p.DATASET_CREATE)
                create.set_obj_track_times(False)
                create.set_alloc_time(h5d.ALLOC_TIME_LATE)
                space = h5s.create_simple(dataset.shape[k : k + 1])
                scale = h5d.create(file.id, name.encode(), h5t.IEEE_F32BE, space, create)
                h5ds.set_scale(scale, b"%s.%10d" % (NO_VARIABLE.encode(), dataset.shape[k]))
            if h5ds.is_scale(file[name].id):
                h5ds.attach_scale(dataset.id, file[name].id, k)


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
    name: str | None,
    shape: tuple[int, ...],
    dtype: DType,
    chunk: int,
    p: FieldPlan | None,
    early: bool,
) -> Any:
    """Add a dataset of `chunk` rows per chunk (0: contiguous); without `name`, in no group."""
    import h5py
    from h5py import h5d, h5p, h5s, h5t, h5z

    create = h5p.create(h5p.DATASET_CREATE)
    create.set_obj_track_times(False)
    create.set_fill_time(h5d.FILL_TIME_NEVER)
    codec, level = (None, 0) if p is None else (p.codec, p.level)
    if chunk:
        create.set_chunk((chunk, *shape[1:]))
        if p is not None and p.shuffle:
            create.set_shuffle()
        if codec == "gzip":
            create.set_deflate(level)
        elif codec == "zstd":
            create.set_filter(_ZSTD, h5z.FLAG_MANDATORY, (level,))
    if not chunk or (early and codec is None):
        # Early allocation gives every byte its place now, and plain writes fill it.
        create.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    elif chunk >= shape[0] and codec is None:
        # HDF5 1.14 forgets the place of an only chunk that it allocates for itself alone.
        create.set_alloc_time(h5d.ALLOC_TIME_LATE)
    element = h5t.py_create(dtype, logical=True)
    space = h5s.create_simple(shape)
    path = None if name is None else name.encode()
    return h5py.Dataset(h5d.create(parent.id, path, element, space, create))


# --- offsets ----------------------------------------------------------------------------------


def allocate(path: Path, file: Hdf5Plan) -> None:
    """Make the file with an offset for every sample; raise `OSError` if there is no space."""
    if not file.grouped:
        _check_size(path, sum(int(p.used.sum()) * p.row_nbytes for p in file.parts))
        with build(path, file):
            return
    with _made(path, file) as made:
        _touch(made, file)


def find(path: Path, file: Hdf5Plan) -> list[Grid]:
    """Return the grid of chunks of each part.

    Raises
    ------
    FormatError
        If the file is not the one that was made for these samples.
    """
    import h5py

    grids = []
    with (
        hdf5_errors(path, "the unfinished file cannot be continued"),
        closing(open_file(path)) as disk,
        h5py.File(path, "r", locking=False) as opened,
    ):
        for part in file.parts:
            grid = None
            with suppress(Unlocated):
                grid = locate_grid(opened[part.path], disk, f"{path}, field {part.path}")
            nbytes = part.rows * part.row_nbytes
            if (
                grid is None
                or (grid.shape, grid.chunk[0]) != (part.shape, part.chunk or part.rows)
                or grid.shape[0] * grid.row_nbytes != nbytes
                or grid.fill is not None
            ):
                raise FormatError(
                    f"the unfinished file has no space for {part.path}",
                    where=path,
                    fix="start again with --restart",
                )
            grids.append(grid)
    return grids


def by_group(grids: Sequence[Grid], file: Hdf5Plan) -> tuple[Ints, Ints]:
    """Return begin and bytes of all chunks in groups: int64, shape ``(parts, groups)``."""
    count = file.grouping.count
    both = np.zeros((2, len(grids), count), np.int64)
    for i, grid in enumerate(grids):
        both[:, i] = grid.blocks.offsets.span(0, count), grid.blocks.lengths.span(0, count)
    return both[0], both[1]


def regular(offsets: Ints, sizes: Ints, file: Hdf5Plan) -> bool:
    """Return whether groups have no gaps inside; unencoded ones are aligned and evenly apart."""
    if file.codec or not offsets.size:
        return np.array_equal(offsets[1:], offsets[:-1] + sizes[:-1])
    begins = np.cumsum([0, *(p.nbytes for p in file.parts[:-1])])
    starts = offsets[0, 0] + np.arange(offsets.shape[1], dtype=np.int64) * file.stride
    expected = starts + begins[:, None]
    return int(offsets[0, 0]) % file.grouping.align == 0 and np.array_equal(offsets, expected)


def write_groups(path: Path, file: Hdf5Plan, groups: Iterator[Sequence[Any]]) -> list[Grid]:
    """Make the file from encoded chunks, whose sizes are their own; return what `find` returns.

    `groups` gives the groups in order, each as the bytes of its parts.
    """
    with _made(path, file) as made:
        _write(made, file, groups)
    return find(path, file)


# --- in the open file -------------------------------------------------------------------------


@contextmanager
def _made(path: Path, file: Hdf5Plan) -> Iterator[Any]:
    """Make the file, with space for all its metadata at the beginning."""
    _check_size(path, file.metadata + file.grouping.align + file.grouping.count * file.stride)
    with build(path, file, file.metadata) as made:
        yield made
    _without_times(path)


def _check_size(path: Path, nbytes: int) -> None:
    """Raise `OSError` if no file may have that size: the HDF5 library would crash."""
    with path.open("wb") as file:
        truncate(file.fileno(), nbytes)


def _touch(made: Any, file: Hdf5Plan) -> None:
    """Give the chunks their places, group by group."""
    lead = _lead(made, file.grouping.align)
    touches = [_toucher(made[p.path], p.chunk) for p in file.parts]
    groups, pad = file.grouping.count, file.stride - file.group_nbytes
    gaps = _unnamed(made, groups * pad, pad) if pad and groups > 1 else None
    gap = None if gaps is None else _toucher(gaps, pad)
    for g in range(groups):
        for touch in touches:
            touch(g)
        if gap is not None and g + 1 < groups:
            gap(g)
    del lead, gaps


def _toucher(dataset: Any, chunk: int) -> Callable[[int], None]:
    """Return what writes the first element of a chunk."""
    from h5py import h5s

    rank = len(dataset.shape)
    ones = (1,) * rank
    inner = (0,) * (rank - 1)
    one, space = h5s.create_simple(ones), dataset.id.get_space()
    element, value = dataset.id.get_type(), np.zeros(ones, dataset.dtype)
    select, write = space.select_hyperslab, dataset.id.write

    def touch(group: int) -> None:
        select((group * chunk, *inner), ones)
        write(one, space, value, element)

    return touch


def _write(made: Any, file: Hdf5Plan, groups: Iterator[Sequence[Any]]) -> None:
    """Write all chunks, each group from the beginning of a stripe on."""
    align, count = file.grouping.align, file.grouping.count
    lead = _lead(made, align)
    gaps = None
    if align > 1 and count > 1:
        gaps = _unnamed(made, count * align, align, filtered=True)
    zeros = bytes(align)
    parts = [(made[p.path].id, p.chunk, len(made[p.path].shape)) for p in file.parts]
    at = 0
    for g, chunks in enumerate(groups):
        if gaps is not None and at % align:
            gaps.id.write_direct_chunk((g * align,), zeros[: -at % align])
        at = 0
        for (dataset, chunk, rank), data in zip(parts, chunks, strict=True):
            dataset.write_direct_chunk((g * chunk, *(0,) * (rank - 1)), data)
            at += len(data)
    del lead, gaps


def _lead(made: Any, align: int) -> list[Any]:
    """Fill the file up to a multiple of `align`; what does so vanishes with the result."""
    probe = _unnamed(made, _PROBE_NBYTES)
    end = int(probe.id.get_offset()) + _PROBE_NBYTES
    rest = -end % align
    return [probe, _unnamed(made, rest)] if rest else [probe]


def _unnamed(made: Any, nbytes: int, chunk: int = 0, *, filtered: bool = False) -> Any:
    """Return a dataset of bytes without a name: it is gone as soon as nobody holds it."""
    # Only filtered chunks may differ in size.
    byte = np.dtype(np.uint8)
    p = FieldPlan(Field("x", byte), Carrier(byte, byte), chunk, "gzip" if filtered else None, 1)
    return _dataset(made, None, (nbytes,), byte, chunk, p, early=False)


# --- times ------------------------------------------------------------------------------------

_TIMES, _PHASES = 0x20, 0x10
_NONE = (1 << 64) - 1
_LARGEST = 1 << 16


def _without_times(path: Path) -> None:
    """Set the times of the superblock extension to 0, if there is one that has times."""
    # The library keeps times in every object header unless told not to, but takes no such setting
    # for the extension, which it makes where a file has a strategy for its space. Superblock
    # versions 2 and 3 have its address at byte 20; an object header of version 2 is ``OHDR``, its
    # version, flags, with flag 0x20 four times of 4 bytes, with flag 0x10 four more bytes, then the
    # size of its messages in ``1 << (flags & 3)`` bytes, the messages, and the checksum of all
    # that.
    from numcodecs.jenkins import jenkins_lookup3

    with path.open("r+b") as file:
        fd = file.fileno()
        head = pread_most(fd, 48, 0)
        address = int.from_bytes(head[20:28], "little")
        if head[:8] != SIGNATURE or head[8] not in (2, 3) or address == _NONE:
            return
        header = bytearray(pread_most(fd, _LARGEST, address))
        if header[:5] != b"OHDR\x02" or not header[5] & _TIMES:
            return
        flags = header[5]
        at = 6 + 16 + (4 if flags & _PHASES else 0)
        width = 1 << (flags & 3)
        end = at + width + int.from_bytes(header[at : at + width], "little")
        header[6:22] = bytes(16)
        header[end : end + 4] = jenkins_lookup3(bytes(header[:end]), 0).to_bytes(4, "little")
        pwrite_all(fd, [header[: end + 4]], address)
