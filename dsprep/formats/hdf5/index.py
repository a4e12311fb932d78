"""The index of a chunked dataset: where each of its chunks lies.

The library walks the index once, whatever its kind, and calls back for each chunk; asking it for
one chunk after another would take hours for a million of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import Ints
from dsprep.errors import FormatError

CHUNK = np.dtype([("address", "<i8"), ("nbytes", "<u4"), ("mask", "<u4")])

_AT_ONCE = 1 << 15
_FEW = 1 << 20


def grid_of(dataset: Any) -> tuple[int, ...]:
    """Return the number of chunks along each axis of an `h5py.Dataset`."""
    return tuple(-(-int(n) // int(c)) for n, c in zip(dataset.shape, dataset.chunks, strict=True))


def chunk_table(
    dataset: Any, file_nbytes: int, progress: Callable[[int], None] | None = None
) -> NDArray[Any] | None:
    """Return where the chunks of a dataset lie.

    Parameters
    ----------
    progress
        Called now and then with the number of chunks found since the last time.

    Returns
    -------
    Array of `CHUNK`, one for each chunk, in C order of the chunks: file offset or -1 if it is not
    stored; bytes on disk; and a bit for each filter that was left out. None if the library
    cannot list them, may list them at wrong places, or nearly none of very many is stored.

    Raises
    ------
    FormatError
        If the index names a chunk twice.
    """
    grid = grid_of(dataset)
    chunks = math.prod(grid)
    if not hasattr(dataset.id, "chunk_iter") or chunks > max(file_nbytes, _FEW):
        return None
    if chunks > _FEW and dataset.id.get_num_chunks() < chunks // 64:
        return None
    table = np.zeros(chunks, CHUNK)
    table["address"] = -1
    shape = np.array(dataset.chunks, np.int64)
    where = f"{dataset.file.filename}, field {str(dataset.name).strip('/')}"
    pending: list[Any] = []
    noted = 0

    def flush() -> None:
        nonlocal noted
        if pending:
            noted += _enter(pending, table, shape, grid, where)
            if progress is not None:
                progress(len(pending))
            pending.clear()

    def note(chunk: Any) -> None:
        pending.append(chunk)
        if len(pending) == _AT_ONCE:
            flush()

    dataset.id.chunk_iter(note)
    flush()
    if dataset.id.get_num_chunks() and misplaced(dataset, table):
        return None
    if noted != int(np.count_nonzero(table["address"] >= 0)):
        raise FormatError("the index of the chunks names one of them twice", where=where)
    return table


def _enter(
    pending: list[Any], table: NDArray[Any], shape: Ints, grid: tuple[int, ...], where: str
) -> int:
    """Put what the library told into the table; return how many chunks that are."""
    n = len(pending)
    corners = chain.from_iterable(map(itemgetter(0), pending))
    places = np.fromiter(corners, np.int64, n * len(grid)).reshape(n, -1) // shape
    address = np.fromiter((-1 if c[2] is None else c[2] for c in pending), np.int64, n)
    nbytes = np.fromiter(map(itemgetter(3), pending), np.int64, n)
    mask = np.fromiter(map(itemgetter(1), pending), np.int64, n)
    # A chunk of no bytes, or beyond the shape, is none; one beyond 4 GiB has no place here.
    inside = (places < np.array(grid)).all(axis=1) & (address >= 0) & (nbytes > 0)
    numbers = np.ravel_multi_index(tuple(places[inside].T), grid)
    if bool((nbytes >> 32).any()):
        raise FormatError(
            "a chunk is larger than the format allows", where=where, found=f"{nbytes.max()} bytes"
        )
    table["address"][numbers] = address[inside]
    table["nbytes"][numbers] = nbytes[inside]
    table["mask"][numbers] = mask[inside] & 0xFFFFFFFF
    return len(numbers)


def misplaced(dataset: Any, table: NDArray[Any]) -> bool:
    """Whether the library may have listed chunks at places that are those of others.

    Releases of HDF5 count wrongly through the index that datasets of its latest format have when
    one axis is unlimited and it is not the first one: axes before that stay at 0, and places along
    it are skipped if those axes may have more than one chunk.
    """
    unlimited = [axis for axis, most in enumerate(dataset.maxshape) if most is None]
    if len(unlimited) != 1:
        return False
    before = slice(unlimited[0])
    most = zip(dataset.maxshape[before], dataset.chunks[before], strict=True)
    if all(n <= c for n, c in most):
        return False
    stored = table["address"] >= 0
    return not bool(stored.all() or stored[math.prod(grid_of(dataset)[unlimited[0] :]) :].any())


def in_file(table: NDArray[Any], file_nbytes: int) -> bool:
    """Whether every chunk is stored, and within the file."""
    outside = table["address"] > file_nbytes - table["nbytes"].astype(np.int64)
    return not bool((table["address"] <= 0).any() or outside.any())


def edges_unfiltered(dataset: Any, table: NDArray[Any], nbytes: int) -> bool:
    """Whether the chunks that stick out of a filtered dataset may be stored without filters.

    That is an option of the dataset (``H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS``) which neither h5py
    nor the chunk's own mask tells. It is ruled out where one of these chunks has another size
    than its content, which is `nbytes`.
    """
    sizes = table["nbytes"].reshape(grid_of(dataset))
    masks = table["mask"].reshape(grid_of(dataset))
    found = False
    for axis, (n, c) in enumerate(zip(dataset.shape, dataset.chunks, strict=True)):
        if n % c:
            edge = np.take(sizes, -1, axis)
            plain = (edge == nbytes) & (np.take(masks, -1, axis) == 0)
            if bool(((edge > 0) & ~plain).any()):
                return False
            found = found or bool(plain.any())
    return found
