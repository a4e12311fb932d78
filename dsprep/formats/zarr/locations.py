"""Where the chunks of one array are: every chunk file is looked for, every shard index read.

Directories are listed, which gives the files' sizes; no file is opened but shards, for their
index. What is found is compared with the files' sizes, and stated as a `Grid`. What was done to
chunks before they were stored is stated in the words of `dsprep.core.filters`, as far as that
undoes it, behind elements in C order; for all else `Unlocated` says what it is that only zarr
reads.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dsprep.core import filters
from dsprep.core.schema import Ints, is_extension
from dsprep.errors import FormatError
from dsprep.formats.zarr.chunks import extents, raw_offsets, shard_index
from dsprep.formats.zarr.metadata import WRONG, ArrayMeta, byte_order, named, read_document
from dsprep.formats.zarr.store import Store, Zip, is_number, join
from dsprep.layout.as_json import MAX_CHUNK, file_path
from dsprep.layout.laws import LARGEST, Explicit, Law, affine
from dsprep.layout.model import Blocks, Grid

if TYPE_CHECKING:
    from dsprep.formats.zarr.array import StoredArray

MAX_BLOCKS = 1 << 27
"""Chunks of an array whose offsets are kept in memory, 16 bytes each."""

FEW_BLOCKS = 1 << 20
SPARSE = 256
"""An array of more than `FEW_BLOCKS` chunks has files for at least one in `SPARSE`."""

AT_ONCE = 8
"""Shard indexes that a thread reads between two reports of progress."""

Step = Callable[[int], None]
Filters = tuple[Mapping[str, Any], ...]

NEEDED = {"shuffle": ("elementsize",), "crc32c": ("location",)}
"""Parameters that matter when reading, by codec."""

NUMCODECS = "numcodecs."
"""What v3 puts before the names of codecs that have no specification."""


class Unlocated(Exception):
    """Only zarr reads this; the text is the reason, a clause."""


class Damage(dict[int, FormatError]):
    """What is wrong with an array, by the number of the file along its first axis."""

    def __init__(self, frame: Frame) -> None:
        self._beside = math.prod(frame.along[1:])

    def note(self, number: int, error: FormatError) -> None:
        """Add what is wrong with a file, unless an error is known of a file beside it."""
        self.setdefault(number // self._beside, error)

    def has(self, number: int) -> bool:
        """Whether an error is known of a file, or of one beside it."""
        return number // self._beside in self


def locate(array: StoredArray, step: Step) -> tuple[Grid, Damage]:
    """Return the chunks of an array, none of whose axes is 0, and what is wrong with them.

    Chunks beyond the array's edge belong to no sample and may have any offset: they get the one
    that leaves the laws of the others simple.

    Parameters
    ----------
    step
        Called with a number of files, as they are done.

    Raises
    ------
    Unlocated
        If only zarr reads the chunks.
    FormatError
        If the metadata are damaged, or most files of an array that dsprep wrote are missing.
    """
    meta, store = array.meta, array.store
    known = chunk_filters(store, meta)
    frame = Frame(meta)
    damage = Damage(frame)
    if frame.chunk_nbytes > MAX_CHUNK or frame.nbytes > LARGEST:
        raise Unlocated("only zarr reads arrays as large as this says to be")
    numbers, starts, sizes = _files(array, frame, damage)
    _check_count(array, frame, numbers, damage)
    if meta.sharding is None:
        _check_sizes(array, frame, numbers, sizes, bool(known), damage)
        offsets = np.full((frame.files, 1), -1, np.int64)
        lengths = np.zeros((frame.files, 1), np.int64)
        offsets[numbers, 0], lengths[numbers, 0] = starts, sizes
        step(frame.files)
    else:
        offsets, lengths = _shards(array, frame, numbers, starts, bool(known), step, damage)
    fill = _fill(array, frame, offsets, damage)
    path, per = template(meta), None
    if isinstance(store, Zip):
        path = ""
    elif frame.files == 1:
        path = file_path(path, (0,) * len(frame.shape))
    else:
        per = frame.per
        _fill_free(offsets, lengths, frame, bool(known))
    if per is None:
        offsets, lengths = frame.in_order(offsets), frame.in_order(lengths)
    blocks = Blocks(_law(offsets.reshape(-1)), _law(lengths.reshape(-1)), path)
    grid = Grid(blocks, frame.shape, meta.dtype.itemsize, frame.chunk, per, known, None, fill)
    return grid, damage


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
        """Return which chunks are not beyond the array's edge: shape ``(files, inside)``.

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


def _files(array: StoredArray, frame: Frame, damage: Damage) -> tuple[Ints, Ints, Ints]:
    """Return number, offset and bytes of each file that is there, in the order of the numbers."""
    start, separator = array.meta.keys
    folder, axes = array.meta.path, len(array.meta.shape)
    if separator == "/" and axes:
        folder, start = join(folder, start.rstrip("/")), ""
    single = "" if axes else start.rstrip("./") or "0"
    found: list[tuple[int, int, int]] = []
    depth = max(0, axes - 1) if separator == "/" else 0
    for name, at, nbytes in array.store.listed(folder, depth):
        if single:
            number = 0 if name == single else None
        else:
            number = _number(name, start, separator, frame.along)
        if number is None:
            continue
        if nbytes < 0 and isinstance(array.store, Zip):
            raise Unlocated("only zarr reads chunks that the ZIP file has compressed")
        if nbytes < 0:
            where = f"{array.store.path}/{join(folder, name)}"
            damage.note(number, FormatError("this is not a regular file", where=where))
        found.append((number, at, nbytes))
    table = np.array(found, np.int64).reshape(-1, 3)
    numbers, starts, sizes = table[np.argsort(table[:, 0])].T
    return numbers, starts, sizes


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


def _check_count(array: StoredArray, frame: Frame, numbers: Ints, damage: Damage) -> None:
    """Note the files of dsprep's that are missing; see that the chunks are not too many to list."""
    found = len(numbers)
    missing, blocks = frame.files - found, frame.files * frame.inside
    if blocks > max(FEW_BLOCKS, SPARSE * found * frame.inside) or blocks > MAX_BLOCKS:
        if missing and array.complete:
            raise array.missing(template(array.meta), f"{missing} of {frame.files} files")
        few = f"of which {missing} of {frame.files} files are missing"
        what = few if blocks <= MAX_BLOCKS else f"of {blocks} chunks"
        raise Unlocated(f"only zarr reads arrays {what}")
    if missing and array.complete:
        for number in np.setdiff1d(np.arange(frame.files), numbers).tolist():
            if not damage.has(number):
                damage.note(number, array.missing(_key(array.meta, frame, number)))


def _check_sizes(
    array: StoredArray, frame: Frame, numbers: Ints, sizes: Ints, encoded: bool, damage: Damage
) -> None:
    """Compare the sizes of chunk files with the metadata, as far as these give them."""
    wrong = sizes == 0 if encoded else sizes != frame.chunk_nbytes
    for number, size in zip(numbers[wrong].tolist(), sizes[wrong].tolist(), strict=True):
        if not damage.has(number):
            error = FormatError(
                "the chunk has a wrong size",
                where=f"{array.where}, {_key(array.meta, frame, number)}",
                expected="some bytes" if encoded else f"{frame.chunk_nbytes} bytes",
                found=f"{size}",
                fix="the file is truncated, still being written, or not of this array",
            )
            damage.note(number, error)


def _key(meta: ArrayMeta, frame: Frame, number: int) -> str:
    return file_path(template(meta), [int(n) for n in np.unravel_index(number, frame.along)])


# --- shards ----------------------------------------------------------------------------------


def _shards(
    array: StoredArray,
    frame: Frame,
    numbers: Ints,
    starts: Ints,
    encoded: bool,
    step: Step,
    damage: Damage,
) -> tuple[Ints, Ints]:
    """Return offset and bytes of each chunk, shape ``(files, inside)``, from the indexes."""
    offsets = np.full((frame.files, frame.inside), -1, np.int64)
    lengths = np.zeros((frame.files, frame.inside), np.int64)

    def read(first: int) -> int:
        some = slice(first, first + AT_ONCE)
        for number, start in zip(numbers[some].tolist(), starts[some].tolist(), strict=True):
            try:
                at, nbytes = _index(array, frame, number, encoded)
            except FormatError as error:
                damage.note(number, error)
                continue
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


def _index(array: StoredArray, frame: Frame, number: int, encoded: bool) -> tuple[Ints, Ints]:
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


def _fill(array: StoredArray, frame: Frame, offsets: Ints, damage: Damage) -> bytes | None:
    """Return one element of what zarr reads where a chunk is missing, or None if none is."""
    missing, real = offsets < 0, frame.real()
    for line in damage:
        missing.reshape(frame.along[0], -1)[line] = False
    if real is not None:
        missing &= real
    if not missing.any():
        return None
    at = frame.origin(int(missing.reshape(-1).argmax())) if array.meta.shape else ()
    return array.element(at).tobytes()


def _fill_free(offsets: Ints, lengths: Ints, frame: Frame, encoded: bool) -> None:
    """Give offsets to the chunks beyond the array's edge.

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


# --- filters ---------------------------------------------------------------------------------


def chunk_filters(store: Store, meta: ArrayMeta) -> Filters:
    """Return the filters of the chunks, in the order of writing.

    Raises
    ------
    Unlocated
        If they are not known, or elements do not lie in C order.
    FormatError
        If the metadata have been damaged since the store was opened.
    """
    if meta.vlen:
        raise Unlocated("only zarr reads elements of varying length")
    key = join(meta.path, "zarr.json" if meta.version == 3 else ".zarray")
    document = read_document(store, key)
    if document is None:
        raise FormatError("the metadata have vanished", where=f"{store.path}, {key}")
    try:
        return (_v3 if meta.version == 3 else _v2)(document, meta)
    except FormatError:
        raise
    except WRONG as error:
        where = f"{store.path}, {key}"
        raise FormatError(f"the metadata is wrong ({error})", where=where) from error


def _v2(document: Mapping[str, Any], meta: ArrayMeta) -> Filters:
    if document.get("order", "C") != "C" and len(meta.shape) > 1:
        raise Unlocated("only zarr reads chunks in Fortran order")
    codecs = [*(document.get("filters") or []), document.get("compressor")]
    return _known([(c["id"], c) for c in codecs if c is not None])


def _v3(document: Mapping[str, Any], meta: ArrayMeta) -> Filters:
    codecs = [named(c) for c in document["codecs"]]
    if codecs[0][0] == "sharding_indexed":
        if len(codecs) > 1:
            raise Unlocated("only zarr reads shards that are encoded as a whole")
        if meta.sharding is None:
            raise Unlocated("only zarr reads shards whose index is encoded otherwise")
        codecs = [named(c) for c in codecs[0][1]["codecs"]]
    if codecs[0][0] != "bytes":
        raise Unlocated(f"only zarr reads codec {codecs[0][0]}")
    # zarr-python passes over the order of bytes of these.
    composed = meta.dtype.names is not None or is_extension(meta.dtype)
    if composed and meta.dtype.itemsize > 1 and byte_order(codecs) == ">":
        raise Unlocated(f"only zarr reads big-endian {meta.dtype}")
    return _known(codecs[1:])


def _known(codecs: Sequence[tuple[str, Mapping[str, Any]]]) -> Filters:
    """Return the codecs as filters, with the parameters that matter."""
    found = []
    for name, configuration in codecs:
        id = name.removeprefix(NUMCODECS)
        kept = {k: configuration[k] for k in NEEDED.get(id, ()) if k in configuration}
        try:
            filters.check([{"id": id, **kept}], name)
        except FormatError as error:
            raise Unlocated(f"only zarr reads codec {name}") from error
        found.append({"id": id, **kept})
    return tuple(found)
