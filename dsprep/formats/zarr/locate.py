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
from dsprep.errors import FormatError, require
from dsprep.formats.located import Unlocated
from dsprep.formats.samples import listed
from dsprep.formats.zarr.chunks import shard_index
from dsprep.formats.zarr.metadata import ArrayMeta
from dsprep.formats.zarr.store import DOCUMENTS, Store, Zip, is_number, join
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
    meta, store = array.meta, array.store
    if meta.unlocated:
        raise Unlocated(meta.unlocated)
    nbytes = math.prod(meta.shape) * meta.dtype.itemsize
    if meta.chunk_nbytes > MAX_CHUNK or nbytes > LARGEST:
        raise Unlocated("only zarr reads arrays as large as this says to be")
    check_names(array)
    files, path, per = array.files, template(meta), None
    if (files[2] < 0).any():
        if isinstance(store, Zip):
            raise Unlocated("only zarr reads chunks that the ZIP file has compressed")
        key = _key(meta, int(files[0][files[2].argmin()]))
        raise FormatError("this is not a regular file", where=f"{store.path}/{key}")
    _check_count(array, files[0])
    offsets, lengths = _chunks(array, files)
    real = _real(meta)
    fill = array.fill_value() if (real & (offsets < 0)).any() else None
    if isinstance(store, Zip) or math.prod(meta.along) == 1:
        path = "" if isinstance(store, Zip) else file_path(path, (0,) * len(meta.along))
        offsets, lengths = _in_order(meta, offsets), _in_order(meta, lengths)
    else:
        per = meta.per
        fill_free(offsets, lengths, real, meta.chunk_nbytes * (not meta.filters))
    blocks, shape, chunk = blocks_of(offsets, lengths, path), meta.shape or (1,), meta.chunk or (1,)
    return Grid(blocks, shape, meta.dtype.itemsize, chunk, per, meta.filters, fill=fill)


def template(meta: ArrayMeta) -> str:
    """Return the keys of all files: ``{0}``, ``{1}`` stand for their place in the grid."""
    if re.search(r"\{[0-9]+\}", meta.path):
        raise Unlocated("only zarr reads arrays with numbers in braces in their names")
    start, separator = meta.keys
    if not meta.shape:
        return meta.key()
    numbers = separator.join(f"{{{axis}}}" for axis in range(len(meta.shape)))
    return join(meta.path, start + numbers)


def _real(meta: ArrayMeta) -> NDArray[np.bool_]:
    """Return which chunks are not beyond the array's edge: shape ``(files, chunks in each)``."""
    axes = len(meta.along)
    real = np.ones(meta.along + meta.per, bool)
    for axis, (a, p, n) in enumerate(zip(meta.along, meta.per, meta.chunks, strict=True)):
        sizes = [1] * (2 * axes)
        sizes[axis], sizes[axes + axis] = a, p
        real &= (np.arange(a * p) < n).reshape(sizes)
    return real.reshape(math.prod(meta.along), -1)


def _in_order(meta: ArrayMeta, values: Ints) -> Ints:
    """Return numbers of shape ``(files, chunks in each)`` in C order of the grid of chunks."""
    axes = len(meta.along)
    order = [k for axis in range(axes) for k in (axis, axes + axis)]
    tall = values.reshape(meta.along + meta.per).transpose(order)
    joined = tall.reshape([a * p for a, p in zip(meta.along, meta.per, strict=True)])
    return np.ascontiguousarray(joined[tuple(slice(n) for n in meta.chunks)])


# --- files -----------------------------------------------------------------------------------


def stored_files(store: Store, meta: ArrayMeta) -> Ints:
    """Return number, offset and bytes of each file that is there: shape ``(3, n)``, by number.

    The bytes are -1 where they are not plain bytes of a regular file.
    """
    start, separator = meta.keys
    folder, axes = meta.path, len(meta.shape)
    if separator == "/" and axes:
        folder, start = join(folder, start.rstrip("/")), ""
    entries: list[tuple[int, int, int]] = []
    for name, at, nbytes in store.listed(folder, max(0, axes - 1) * (separator == "/")):
        number = _number(name, start, separator, meta.along) if axes else None
        if not axes and name == (start.rstrip("./") or "0"):
            number = 0
        if number is not None:
            entries.append((number, at, nbytes))
    table = np.array(entries, np.int64).reshape(-1, 3)
    return table[np.argsort(table[:, 0])].T


def check_names(array: StoredArray) -> None:
    """Raise `FormatError` if there are files of an array, none of which its metadata name."""
    store, meta = array.store, array.meta
    if array.files.size or not meta.shape:
        return
    folders = (
        (name, join(meta.path, name), depth)
        for name in store.children(meta.path)
        for depth in range(len(meta.shape))
    )
    names = {name for name, folder, depth in folders if next(store.listed(folder, depth), None)}
    names |= {name for name, *_ in store.listed(meta.path, 0)} - DOCUMENTS
    names = {name for name in names if name[0] != "."}
    require(
        not names,
        FormatError,
        "files of an array have other names than its metadata give to chunks",
        where=array.where,
        expected=f"names such as {meta.key()}",
        found=listed([join(meta.path, name) for name in sorted(names)]),
        fix="if they are its chunks, rename them or state "
        '"chunk_key_encoding" in zarr.json, "dimension_separator" in .zarray',
    )


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


def _check_count(array: StoredArray, numbers: Ints) -> None:
    """Check that no file of dsprep's is missing, and that the chunks are few enough to list."""
    meta, present, files = array.meta, len(numbers), math.prod(array.meta.along)
    missing, inside = files - present, math.prod(meta.per)
    if missing and array.complete:
        first = int((np.append(numbers, files) != np.arange(present + 1)).argmax())
        raise array.missing(_key(meta, first), f"{missing} of {files} files are missing")
    if files * inside > min(MAX_BLOCKS, max(FEW_BLOCKS, SPARSE * present * inside)):
        raise Unlocated(f"only zarr reads {files * inside} chunks in {present} of {files} files")


def _chunks(array: StoredArray, files: Ints) -> tuple[Ints, Ints]:
    """Return offset and bytes of each chunk, -1 and 0 if missing: ``(files, chunks in each)``."""
    meta, (numbers, starts, sizes) = array.meta, files
    shape = math.prod(meta.along), math.prod(meta.per)
    offsets, lengths = np.full(shape, -1, np.int64), np.zeros(shape, np.int64)

    def read(entry: tuple[int, int]) -> None:
        number, start = entry
        key = _key(meta, number)
        with array.store.chunk(key) as shard:
            if shard is None:
                raise FormatError("a shard has vanished", where=f"{array.where}, {key}")
            at, nbytes = shard_index(*shard, meta, f"{array.store.path}, {key}")
        offsets[number], lengths[number] = np.where(at < 0, -1, at + start), nbytes

    if meta.sharding is not None:
        waits = isinstance(array.store.path, StorePath)  # for answers
        with ThreadPoolExecutor(64 if waits else min(8, len(os.sched_getaffinity(0)))) as pool:
            list(pool.map(read, files[:2].T.tolist()))
        return offsets, lengths
    wrong = sizes == 0 if meta.filters else sizes != meta.chunk_nbytes
    if wrong.any():
        i = int(wrong.argmax())
        raise FormatError(
            "the chunk has a wrong size",
            where=f"{array.where}, {_key(meta, int(numbers[i]))}",
            expected="some bytes" if meta.filters else f"{meta.chunk_nbytes} bytes",
            found=f"{sizes[i]}",
            fix="the file is truncated, still being written, or not of this array",
        )
    offsets[numbers, 0], lengths[numbers, 0] = starts, sizes
    return offsets, lengths


def _key(meta: ArrayMeta, number: int) -> str:
    return file_path(template(meta), [int(n) for n in np.unravel_index(number, meta.along)])


# --- laws ------------------------------------------------------------------------------------


def blocks_of(offsets: Ints, lengths: Ints, path: str) -> Blocks:
    """Return blocks by the smallest laws that are found at once."""
    laws = [
        affine.fit(each) or Explicit(each) for each in (offsets.reshape(-1), lengths.reshape(-1))
    ]
    return Blocks(laws[0], laws[1], path)


def fill_free(offsets: Ints, lengths: Ints, real: NDArray[np.bool_], chunk_nbytes: int) -> None:
    """Give offsets to the chunks beyond the array's edge: those that are not `real`.

    Of chunks that all have `chunk_nbytes`, those of the first file that has such a chunk, or behind
    the chunk before; if that is 0, no bytes at the end of the chunks before. All have the shape
    ``(files, chunks in each)``.
    """
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
