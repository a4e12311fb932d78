"""Locating the chunks of one array: every chunk file is looked for, every shard index read.

Their offsets are compared with the files' sizes and stated as a `Grid`. `locate` does so for the
whole array, whose directories are listed, which gives the files' sizes. No file is opened but
shards, for their index.
"""

from __future__ import annotations

import math
import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import Ints
from dsprep.errors import FormatError
from dsprep.formats.located import Unlocated
from dsprep.formats.zarr.chunks import shard_index
from dsprep.formats.zarr.metadata import ArrayMeta
from dsprep.formats.zarr.store import Store, Zip, is_number, join
from dsprep.layout.as_json import MAX_CHUNK, file_path
from dsprep.layout.laws import LARGEST, Explicit, affine
from dsprep.layout.model import Blocks, Grid
from dsprep.storage.paths import StorePath

if TYPE_CHECKING:
    from dsprep.formats.zarr.array import StoredArray

MAX_BLOCKS = 1 << 27
"""Chunks of an array whose offsets are kept in memory, 16 bytes each."""

FEW_BLOCKS = 1 << 20
SPARSE = 256
"""An array of more than `FEW_BLOCKS` chunks has files for at least one in `SPARSE`."""


def locate(array: StoredArray) -> Grid:
    """Return the chunks of an array, none of whose axes is 0: all of its files are looked for.

    Chunks beyond the array's edge belong to no sample and may have any offset: they get the one
    that leaves the laws of the others simple.

    Raises
    ------
    Unlocated
        If only zarr reads the chunks.
    FormatError
        If a chunk has a wrong size or leaves its file, or a file is missing that dsprep wrote.
    """
    if array.meta.unlocated:
        raise Unlocated(array.meta.unlocated)
    frame = Frame(array.meta)
    files = stored_files(array.store, array.meta)
    if (files[2] < 0).any():
        if isinstance(array.store, Zip):
            raise Unlocated("only zarr reads chunks that the ZIP file has compressed")
        key = _key(array.meta, frame, int(files[0][files[2].argmin()]))
        raise FormatError("this is not a regular file", where=f"{array.store.path}/{key}")
    _check_count(array, frame, files[0])
    offsets, lengths, fill = _chunks(array, frame, files)
    meta, path, per = array.meta, template(array.meta), None
    if isinstance(array.store, Zip):
        path = ""
    elif frame.files == 1:
        path = file_path(path, (0,) * len(frame.shape))
    else:
        per = frame.per
    if per is None:
        offsets, lengths = frame.in_order(offsets), frame.in_order(lengths)
    else:
        fill_free(offsets, lengths, frame.real(), frame.chunk_nbytes * (not meta.filters))
    blocks = blocks_of(offsets, lengths, path)
    return Grid(blocks, frame.shape, meta.dtype.itemsize, frame.chunk, per, meta.filters, fill=fill)


def template(meta: ArrayMeta) -> str:
    """Return the keys of all files: ``{0}``, ``{1}`` stand for their place in the grid."""
    if re.search(r"\{[0-9]+\}", meta.path):
        raise Unlocated("only zarr reads arrays with numbers in braces in their names")
    start, separator = meta.keys
    if not meta.shape:
        return join(meta.path, start.rstrip("./") or "0")
    numbers = separator.join(f"{{{axis}}}" for axis in range(len(meta.shape)))
    return join(meta.path, start + numbers)


class Frame:
    """The sizes of an array in files and chunks; an array without axes has one, of size 1.

    Attributes
    ----------
    shape, chunk
        In elements.
    along, per
        Files along each axis, and chunks per file.
    files, inside
        All files, and chunks in each.
    chunks
        Chunks along each axis.
    """

    def __init__(self, meta: ArrayMeta) -> None:
        self.shape, self.chunk = meta.shape or (1,), meta.chunk or (1,)
        grid = meta.grid or (1,)
        self.along = tuple(-(-n // g) for n, g in zip(self.shape, grid, strict=True))
        self.per = tuple(g // c for g, c in zip(grid, self.chunk, strict=True))
        self.files, self.inside = math.prod(self.along), math.prod(self.per)
        self.chunk_nbytes = math.prod(self.chunk) * meta.dtype.itemsize
        self.chunks = tuple(-(-n // c) for n, c in zip(self.shape, self.chunk, strict=True))
        if self.chunk_nbytes > MAX_CHUNK or math.prod(self.shape) * meta.dtype.itemsize > LARGEST:
            raise Unlocated("only zarr reads arrays as large as this says to be")

    def real(self) -> NDArray[np.bool_] | None:
        """Return which chunks are not beyond the array's edge: shape ``(files, inside)``.

        None: all of them.
        """
        axes = len(self.shape)
        inside_edge: NDArray[np.bool_] | None = None
        for axis, (a, p, n) in enumerate(zip(self.along, self.per, self.chunks, strict=True)):
            if a * p == n:
                continue
            sizes = [1] * (2 * axes)
            sizes[axis], sizes[axes + axis] = a, p
            part = (np.arange(a * p) < n).reshape(sizes)
            inside_edge = part if inside_edge is None else inside_edge & part
        if inside_edge is None:
            return None
        return np.broadcast_to(inside_edge, self.along + self.per).reshape(self.files, self.inside)

    def in_order(self, values: Ints) -> Ints:
        """Return numbers of shape ``(files, inside)`` in C order of the grid of chunks."""
        axes = len(self.shape)
        order = [k for axis in range(axes) for k in (axis, axes + axis)]
        tall = values.reshape(self.along + self.per).transpose(order)
        joined = tall.reshape([a * p for a, p in zip(self.along, self.per, strict=True)])
        return np.ascontiguousarray(joined[tuple(slice(n) for n in self.chunks)])

    def missing(self, offsets: Ints) -> tuple[int, ...] | None:
        """Return the first element of a chunk that is missing, by offsets file by file."""
        missing, real = offsets < 0, self.real()
        if real is not None:
            missing &= real
        if not missing.any():
            return None
        block = int(missing.reshape(-1).argmax())
        file = np.unravel_index(block // self.inside, self.along)
        chunk = np.unravel_index(block % self.inside, self.per)
        every = zip(file, chunk, self.per, self.chunk, strict=True)
        return tuple((int(f) * p + int(k)) * c for f, k, p, c in every)


# --- files -----------------------------------------------------------------------------------


def stored_files(store: Store, meta: ArrayMeta) -> Ints:
    """Return number, offset and bytes of each file that is there: shape ``(3, n)``, by number.

    The bytes are -1 where they are no plain bytes of a regular file.
    """
    start, separator = meta.keys
    folder, axes = meta.path, len(meta.shape)
    along = tuple(-(-n // g) for n, g in zip(meta.shape, meta.grid, strict=True))
    if separator == "/" and axes:
        folder, start = join(folder, start.rstrip("/")), ""
    entries: list[tuple[int, int, int]] = []
    for name, at, nbytes in store.listed(folder, max(0, axes - 1) * (separator == "/")):
        number = _number(name, start, separator, along)
        if not axes:
            number = 0 if name == (start.rstrip("./") or "0") else None
        if number is not None:
            entries.append((number, at, nbytes))
    table = np.array(entries, np.int64).reshape(-1, 3)
    return table[np.argsort(table[:, 0])].T


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


def _check_count(array: StoredArray, frame: Frame, numbers: Ints) -> None:
    """See that no file of dsprep's is missing, and that the chunks are not too many to list."""
    present = len(numbers)
    missing, blocks = frame.files - present, frame.files * frame.inside
    if missing and array.complete:
        there = np.append(numbers, frame.files)
        first = int((there != np.arange(present + 1)).argmax())
        key = _key(array.meta, frame, first)
        raise array.missing(key, f"{missing} of {frame.files} files are missing")
    if blocks > max(FEW_BLOCKS, SPARSE * present * frame.inside):
        absent = f"{missing} of {frame.files} files"
        raise Unlocated(f"only zarr reads arrays of which {absent} are missing")
    if blocks > MAX_BLOCKS:
        raise Unlocated(f"only zarr reads arrays of {blocks} chunks")


def _chunks(array: StoredArray, frame: Frame, files: Ints) -> tuple[Ints, Ints, bytes | None]:
    """Return offset and bytes of each chunk, -1 and 0 where it is missing, and the fill value.

    `files` are as from `stored_files`. The numbers have the shape ``(files, inside)``.
    """
    numbers, starts, sizes = files
    encoded = bool(array.meta.filters)
    offsets = np.full((frame.files, frame.inside), -1, np.int64)
    lengths = np.zeros((frame.files, frame.inside), np.int64)
    if array.meta.sharding is not None:
        _read_shards(array, frame, files, (offsets, lengths))
    else:
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
        offsets[numbers, 0], lengths[numbers, 0] = starts, sizes
    missing = frame.missing(offsets)
    fill = None if missing is None else array.element(missing).tobytes()
    return offsets, lengths, fill


def _key(meta: ArrayMeta, frame: Frame, number: int) -> str:
    return file_path(template(meta), [int(n) for n in np.unravel_index(number, frame.along)])


def _read_shards(array: StoredArray, frame: Frame, files: Ints, out: tuple[Ints, Ints]) -> None:
    """Put what the indexes of shards give into offsets and bytes of chunks."""

    def read(entry: tuple[int, int]) -> None:
        number, start = entry
        key = _key(array.meta, frame, number)
        with array.store.chunk(key) as shard:
            if shard is None:
                raise FormatError("a shard has vanished", where=f"{array.where}, {key}")
            at, nbytes = shard_index(shard, array.meta)
        out[0][number], out[1][number] = np.where(at < 0, -1, at + start), nbytes

    waits = isinstance(array.store.path, StorePath)  # for answers
    with ThreadPoolExecutor(64 if waits else min(8, len(os.sched_getaffinity(0)))) as pool:
        list(pool.map(read, files[:2].T.tolist()))


# --- laws ------------------------------------------------------------------------------------


def blocks_of(offsets: Ints, lengths: Ints, path: str) -> Blocks:
    """Return blocks by the smallest laws that are found at once."""
    laws = [
        affine.fit(each) or Explicit(each) for each in (offsets.reshape(-1), lengths.reshape(-1))
    ]
    return Blocks(laws[0], laws[1], path)


def fill_free(
    offsets: Ints, lengths: Ints, real: NDArray[np.bool_] | None, chunk_nbytes: int
) -> None:
    """Give offsets to the chunks beyond the array's edge: those that are not `real`.

    Of chunks that all have `chunk_nbytes`, those of the first file that has such a chunk, or behind
    the chunk before; if that is 0, no bytes at the end of the chunks before. All have the shape
    ``(files, chunks in each)``; None: all are real.
    """
    if real is None:
        return
    free = ~real
    if not chunk_nbytes:
        ends = np.maximum.accumulate(np.where(real, offsets + lengths, 0), axis=1)
        offsets[free] = np.maximum(ends, 0)[free]
        lengths[free] = 0
        return
    columns = np.arange(real.shape[1])
    known = real & (offsets >= 0)
    first = known.argmax(axis=0)
    there = known[first, columns]
    begins = offsets[first, columns]
    before = np.maximum.accumulate(np.where(there, columns, -1))
    behind = (columns - before) * chunk_nbytes + np.where(before < 0, 0, begins[before])
    period = np.where(there, begins, behind)
    offsets[free] = np.broadcast_to(period, offsets.shape)[free]
    lengths[free] = chunk_nbytes
