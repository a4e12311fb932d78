"""Where the chunks of one array lie: every chunk file is looked for, every shard index read.

Directories are listed, which tells the files' sizes; no file is opened but shards, for their
index. What is found is compared with the files' sizes, and told as a `Grid`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import Ints
from dsprep.errors import FormatError
from dsprep.formats.zarr.checks import shard_index
from dsprep.formats.zarr.encoding import Unlocated, chunk_filters
from dsprep.formats.zarr.metadata import ArrayMeta
from dsprep.formats.zarr.rows import StoredArray, translated
from dsprep.formats.zarr.shards import extents, raw_offsets
from dsprep.formats.zarr.store import Zip, is_number, join
from dsprep.layout.as_json import MAX_CHUNK, file_path
from dsprep.layout.laws import LARGEST, Explicit, Law, affine
from dsprep.layout.model import Blocks, Grid

MAX_BLOCKS = 1 << 27
"""Chunks of an array whose places are kept in memory, 16 bytes each."""

FEW_BLOCKS = 1 << 20
SPARSE = 256
"""An array of more than `FEW_BLOCKS` chunks has files for at least one in `SPARSE`."""

AT_ONCE = 8
"""Shard indexes that a thread reads between two reports of progress."""

Step = Callable[[int], None]


def stored_grid(array: StoredArray, step: Step) -> Grid:
    """Return the chunks of an array, none of whose axes is 0.

    Blocks that lie beyond the array's edge belong to no sample and may have any place: they get
    the one that leaves the laws of the others simple.

    Parameters
    ----------
    step
        Called with a number of files, as they are done.

    Raises
    ------
    Unlocated
        If only zarr reads the chunks.
    FormatError
        If a chunk has a wrong size or leaves its file, or a file is missing that dsprep wrote.
    """
    meta, store = array.meta, array.store
    filters = chunk_filters(store, meta)
    frame = _Frame(meta)
    if frame.chunk_nbytes > MAX_CHUNK or frame.nbytes > LARGEST:
        raise Unlocated("only zarr reads arrays as large as this says to be")
    numbers, starts, sizes = _files(array, frame)
    _check_count(array, frame, len(numbers))
    if meta.sharding is None:
        _check_sizes(array, frame, numbers, sizes, bool(filters))
        offsets = np.full((frame.files, 1), -1, np.int64)
        lengths = np.zeros((frame.files, 1), np.int64)
        offsets[numbers, 0], lengths[numbers, 0] = starts, sizes
        step(frame.files)
    else:
        offsets, lengths = _shards(array, frame, numbers, starts, bool(filters), step)
    fill = _fill(array, frame, offsets)
    path, per = template(meta), None
    if isinstance(store, Zip):
        path = ""
    elif frame.files == 1:
        path = file_path(path, (0,) * len(frame.shape))
    else:
        per = frame.per
        _fill_free(offsets, lengths, frame, bool(filters))
    if per is None:
        offsets, lengths = frame.in_order(offsets), frame.in_order(lengths)
    blocks = Blocks(_law(offsets.reshape(-1)), _law(lengths.reshape(-1)), path)
    return Grid(blocks, frame.shape, meta.dtype.itemsize, frame.chunk, per, filters, None, fill)


def template(meta: ArrayMeta) -> str:
    """Return the keys of all files: ``{0}``, ``{1}`` stand for their place in the grid.

    Raises
    ------
    Unlocated
        If the array's own name looks like that.
    """
    if re.search(r"\{[0-9]+\}", meta.path):
        raise Unlocated("only zarr reads arrays with numbers in braces in their names")
    start, separator = meta.keys
    if not meta.shape:
        return join(meta.path, start.rstrip("./") or "0")
    numbers = separator.join(f"{{{axis}}}" for axis in range(len(meta.shape)))
    return join(meta.path, start + numbers)


class _Frame:
    """The sizes of an array in files and chunks; an array without axes has one, of size 1.

    Attributes
    ----------
    shape, chunk
        In elements.
    along, per
        Files along each axis, and chunks per file.
    files, inside
        All files, and chunks in each.
    """

    def __init__(self, meta: ArrayMeta) -> None:
        self.shape, self.chunk = meta.shape or (1,), meta.chunk or (1,)
        grid = meta.grid or (1,)
        self.along = tuple(-(-n // g) for n, g in zip(self.shape, grid, strict=True))
        self.per = tuple(g // c for g, c in zip(grid, self.chunk, strict=True))
        self.files, self.inside = math.prod(self.along), math.prod(self.per)
        self.chunk_nbytes = math.prod(self.chunk) * meta.dtype.itemsize
        self.nbytes = math.prod(self.shape) * meta.dtype.itemsize
        self._chunks = tuple(-(-n // c) for n, c in zip(self.shape, self.chunk, strict=True))

    def real(self) -> NDArray[np.bool_] | None:
        """Return which blocks do not lie beyond the array's edge: shape ``(files, inside)``.

        None: all of them.
        """
        axes = len(self.shape)
        found: NDArray[np.bool_] | None = None
        for axis, (a, p, n) in enumerate(zip(self.along, self.per, self._chunks, strict=True)):
            if a * p == n:
                continue
            sizes = [1] * (2 * axes)
            sizes[axis], sizes[axes + axis] = a, p
            part = (np.arange(a * p) < n).reshape(sizes)
            found = part if found is None else found & part
        if found is None:
            return None
        return np.broadcast_to(found, self.along + self.per).reshape(self.files, self.inside)

    def in_order(self, values: Ints) -> Ints:
        """Return numbers of shape ``(files, inside)`` in C order of the grid of chunks."""
        axes = len(self.shape)
        order = [k for axis in range(axes) for k in (axis, axes + axis)]
        tall = values.reshape(self.along + self.per).transpose(order)
        joined = tall.reshape([a * p for a, p in zip(self.along, self.per, strict=True)])
        return np.ascontiguousarray(joined[tuple(slice(n) for n in self._chunks)])

    def origin(self, block: int) -> tuple[int, ...]:
        """Return the first element of a block by its number, file by file."""
        file = np.unravel_index(block // self.inside, self.along)
        chunk = np.unravel_index(block % self.inside, self.per)
        every = zip(file, chunk, self.per, self.chunk, strict=True)
        return tuple((int(f) * p + int(k)) * c for f, k, p, c in every)


# --- files -----------------------------------------------------------------------------------


def _files(array: StoredArray, frame: _Frame) -> tuple[Ints, Ints, Ints]:
    """Return number, offset and bytes of each file that is there, in the order of the numbers."""
    start, separator = array.meta.keys
    folder, axes = array.meta.path, len(array.meta.shape)
    if separator == "/" and axes:
        folder, start = join(folder, start.rstrip("/")), ""
    single = "" if axes else start.rstrip("./") or "0"
    numbers, starts, sizes = [], [], []
    depth = max(0, axes - 1) if separator == "/" else 0
    for name, at, nbytes in array.store.listed(folder, depth):
        if single:
            number = 0 if name == single else None
        else:
            number = _number(name, start, separator, frame.along)
        if number is None:
            continue
        if nbytes < 0:
            if isinstance(array.store, Zip):
                raise Unlocated("only zarr reads chunks that the ZIP file has compressed")
            where = f"{array.store.path}/{join(folder, name)}"
            raise FormatError("this is not a regular file", where=where)
        numbers.append(number)
        starts.append(at)
        sizes.append(nbytes)
    found = np.array(numbers, np.int64)
    order = np.argsort(found)
    return found[order], np.array(starts, np.int64)[order], np.array(sizes, np.int64)[order]


def _number(name: str, start: str, separator: str, along: tuple[int, ...]) -> int | None:
    """Return the number of the file whose key ends in `name`, or None if it is none of these."""
    if not name.startswith(start):
        return None
    words = name[len(start) :].split(separator)
    if len(words) != len(along):
        return None
    number = 0
    for word, n in zip(words, along, strict=True):
        if not is_number(word) or int(word) >= n:
            return None
        number = number * n + int(word)
    return number


def _check_count(array: StoredArray, frame: _Frame, found: int) -> None:
    """See that no file of dsprep's is missing, and that the chunks are not too many to list."""
    missing = frame.files - found
    if missing and array.complete:
        raise FormatError(
            "chunk files are missing",
            where=array.where,
            expected=f"{frame.files} files",
            found=f"{found}",
            fix="restore them",
        )
    blocks = frame.files * frame.inside
    if blocks > max(FEW_BLOCKS, SPARSE * found * frame.inside):
        gone = f"{missing} of {frame.files} files"
        raise Unlocated(f"only zarr reads arrays of which {gone} are missing")
    if blocks > MAX_BLOCKS:
        raise Unlocated(f"only zarr reads arrays of {blocks} chunks")


def _check_sizes(
    array: StoredArray, frame: _Frame, numbers: Ints, sizes: Ints, encoded: bool
) -> None:
    """Compare the sizes of chunk files with the metadata, as far as these tell them."""
    wrong = sizes == 0 if encoded else sizes != frame.chunk_nbytes
    if wrong.any():
        i = int(wrong.argmax())
        raise FormatError(
            "the chunk has a wrong size",
            where=f"{array.where}, {_key(array.meta, frame, int(numbers[i]))}",
            expected="some bytes" if encoded else f"{frame.chunk_nbytes} bytes",
            found=f"{sizes[i]}",
            fix="the file is truncated, still being written, or not of this array",
        )


def _key(meta: ArrayMeta, frame: _Frame, number: int) -> str:
    return file_path(template(meta), [int(n) for n in np.unravel_index(number, frame.along)])


# --- shards ----------------------------------------------------------------------------------


def _shards(
    array: StoredArray, frame: _Frame, numbers: Ints, starts: Ints, encoded: bool, step: Step
) -> tuple[Ints, Ints]:
    """Return offset and bytes of each chunk, shape ``(files, inside)``, from the indexes."""
    offsets = np.full((frame.files, frame.inside), -1, np.int64)
    lengths = np.zeros((frame.files, frame.inside), np.int64)

    def read(first: int) -> int:
        some = slice(first, first + AT_ONCE)
        for number, start in zip(numbers[some].tolist(), starts[some].tolist(), strict=True):
            at, nbytes = _index(array, frame, number, encoded)
            offsets[number] = np.where(at < 0, -1, at + start)
            lengths[number] = nbytes
        return len(numbers[some])

    firsts = range(0, len(numbers), AT_ONCE)
    if len(firsts) < 2:
        for first in firsts:
            step(read(first))
        return offsets, lengths
    with ThreadPoolExecutor(min(8, 2 * len(os.sched_getaffinity(0)))) as pool:
        for done in pool.map(read, firsts):
            step(done)
    return offsets, lengths


def _index(array: StoredArray, frame: _Frame, number: int, encoded: bool) -> tuple[Ints, Ints]:
    """Return the index of one shard, checked."""
    meta = array.meta
    key = _key(meta, frame, number)
    with array.store.chunk(key) as shard:
        if shard is None:
            raise FormatError("a shard has vanished", where=f"{array.where}, {key}")
        index = shard_index(shard, meta)
        if encoded:
            return extents(index, shard.nbytes, shard.where)
        offsets = raw_offsets(index, frame.chunk_nbytes, shard.nbytes, shard.where)
        return offsets, np.where(offsets < 0, 0, frame.chunk_nbytes)


# --- laws ------------------------------------------------------------------------------------


def _law(values: Ints) -> Law:
    return affine.fit(values) or Explicit(values)


def _fill(array: StoredArray, frame: _Frame, offsets: Ints) -> bytes | None:
    """Return one element of what zarr reads where a chunk is missing, or None if none is."""
    missing, real = offsets < 0, frame.real()
    if real is not None:
        missing &= real
    if not missing.any():
        return None
    if not array.meta.shape:
        found = array.scalar()
    else:
        at = frame.origin(int(missing.reshape(-1).argmax()))
        with translated(array.where):
            found = np.asarray(array.library()[tuple(slice(n, n + 1) for n in at)])
    return found.astype(array.meta.dtype, copy=False).tobytes()


def _fill_free(offsets: Ints, lengths: Ints, frame: _Frame, encoded: bool) -> None:
    """Give places to the blocks beyond the array's edge.

    Of chunks that all have one size, those of the first file that has such a chunk, or behind the
    chunk before; else no bytes at the end of the chunks before.
    """
    real = frame.real()
    if real is None:
        return
    free = ~real
    if encoded:
        ends = np.maximum.accumulate(np.where(real, offsets + lengths, 0), axis=1)
        offsets[free] = np.maximum(ends, 0)[free]
        lengths[free] = 0
        return
    columns = np.arange(frame.inside)
    known = real & (offsets >= 0)
    first = known.argmax(axis=0)
    there = known[first, columns]
    place = offsets[first, columns]
    before = np.maximum.accumulate(np.where(there, columns, -1))
    behind = (columns - before) * frame.chunk_nbytes + np.where(before < 0, 0, place[before])
    period = np.where(there, place, behind)
    offsets[free] = np.broadcast_to(period, offsets.shape)[free]
    lengths[free] = frame.chunk_nbytes
