"""Giving the chunks of a grouped HDF5 file their places.

HDF5 allocates a chunk when it is first written to. So one element of each chunk is written, group
by group, before there are any samples: the chunks of a group then lie one behind another. An
unnamed dataset has a chunk behind each group that fills the rest of the last stripe; it vanishes,
and its bytes are holes.

All places are read back from the file; nothing rests on this order but speed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.core.schema import Ints
from dsprep.errors import FormatError
from dsprep.formats.hdf5.create import build_grouped
from dsprep.formats.hdf5.grids import chunk_table
from dsprep.formats.hdf5.group_plan import GroupedFile
from dsprep.formats.hdf5.guard import library
from dsprep.formats.hdf5.timestamps import without_times

_TRIES = 3
_PROBE_NBYTES = 4096
"""More than HDF5 sets aside for small pieces of data (2048), so that it ends where all others
begin."""


def allocate(path: Path, file: GroupedFile) -> None:
    """Make the file with a place for every sample.

    Raises
    ------
    OSError
        If there is no place for it.
    """
    for attempt in range(_TRIES):
        with _made(path, file, attempt) as made:
            _touch(made, file)
        if regular(find(path, file)[0], file):
            return


def find(path: Path, file: GroupedFile) -> tuple[Ints, Ints]:
    """Return where the chunks of all parts lie.

    Returns
    -------
    addresses, sizes
        int64, shape ``(parts, groups)``: their first bytes, and how many they take.

    Raises
    ------
    FormatError
        If the file is not the one that was made for these groups.
    """
    import h5py

    shape = len(file.parts), file.grouping.count
    addresses, sizes = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    problem = "the unfinished file cannot be continued"
    with library(path, problem), h5py.File(path, "r", locking=False) as opened:
        nbytes = path.stat().st_size
        for k, part in enumerate(file.parts):
            dataset = opened[part.path]
            table = chunk_table(dataset, nbytes) if dataset.chunks else None
            if table is None or len(table) != shape[1] or bool((table["address"] <= 0).any()):
                raise FormatError(
                    f"the unfinished file has no place for {part.path}",
                    where=path,
                    fix="start again with --restart",
                )
            addresses[k], sizes[k] = table["address"], table["nbytes"]
    return addresses, sizes


def regular(addresses: Ints, file: GroupedFile) -> bool:
    """Whether groups lie as planned: aligned, at equal distances, without gaps inside."""
    if not addresses.size:
        return True
    begins = np.cumsum([0, *(p.nbytes for p in file.parts[:-1])])
    starts = addresses[0, 0] + np.arange(addresses.shape[1], dtype=np.int64) * file.stride
    expected = starts + begins[:, None]
    return int(addresses[0, 0]) % file.grouping.align == 0 and np.array_equal(addresses, expected)


def place(path: Path, file: GroupedFile, groups: Callable[[], Iterator[Sequence[Any]]]) -> None:
    """Make the file from encoded chunks, whose sizes are their own.

    Parameters
    ----------
    groups
        Gives the groups in order, each as the bytes of its parts; may be called again.
    """
    for attempt in range(_TRIES):
        with _made(path, file, attempt) as made:
            _write(made, file, groups())
        addresses, sizes = find(path, file)
        if together(addresses, sizes) and not (addresses[:1] % file.grouping.align).any():
            return


def together(addresses: Ints, sizes: Ints) -> bool:
    """Whether the chunks of every group lie one behind another."""
    return np.array_equal(addresses[1:], addresses[:-1] + sizes[:-1])


# --- in the open file -------------------------------------------------------------------------


@contextmanager
def _made(path: Path, file: GroupedFile, attempt: int) -> Iterator[Any]:
    """Make the file, with more space for metadata at each attempt."""
    metadata = file.metadata << (2 * attempt)
    groups = file.grouping.count
    _check_size(path, metadata + file.grouping.align + groups * file.stride)
    args = (file.plans, file.count, file.totals, file.grouping.samples, metadata)
    with (
        library(path, "the file cannot be made"),
        build_grouped(path, file.schema, *args) as made,
    ):
        yield made
    without_times(path)


def _check_size(path: Path, nbytes: int) -> None:
    """Raise `OSError` if the file system cannot hold a file of that size.

    The HDF5 library crashes when it finds out by itself.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        os.ftruncate(fd, nbytes)
    finally:
        os.close(fd)


def _touch(made: Any, file: GroupedFile) -> None:
    """Give the chunks their places, group by group."""
    lead = _lead(made, file.grouping.align)
    touches = [_toucher(made[p.path], p.chunk) for p in file.parts]
    groups, pad = file.grouping.count, file.stride - file.group_nbytes
    gaps = _gaps(made, groups, pad, filtered=False) if pad and groups > 1 else None
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


def _write(made: Any, file: GroupedFile, groups: Iterator[Sequence[Any]]) -> None:
    """Write all chunks, each group from the beginning of a stripe on."""
    align, count = file.grouping.align, file.grouping.count
    lead = _lead(made, align)
    gaps = _gaps(made, count, align, filtered=True) if align > 1 and count > 1 else None
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


def _unnamed(made: Any, nbytes: int) -> Any:
    """Return a contiguous dataset without a name: it is gone as soon as nobody holds it."""
    return _dataset(made, nbytes, 0, filtered=False)


def _gaps(made: Any, count: int, nbytes: int, *, filtered: bool) -> Any:
    """Return an unnamed dataset of `count` chunks; only filtered ones may differ in size."""
    return _dataset(made, count * nbytes, nbytes, filtered=filtered)


def _dataset(made: Any, nbytes: int, chunk: int, *, filtered: bool) -> Any:
    import h5py
    from h5py import h5d, h5p, h5s, h5t

    create = h5p.create(h5p.DATASET_CREATE)
    create.set_obj_track_times(False)
    create.set_fill_time(h5d.FILL_TIME_NEVER)
    if chunk:
        create.set_chunk((chunk,))
    else:
        create.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    if filtered:
        create.set_deflate(1)
    space = h5s.create_simple((nbytes,))
    return h5py.Dataset(h5d.create(made.id, None, h5t.STD_U8LE, space, create))
