"""Rows ``start .. stop`` of one array, by the shortest way.

Chunks that lie in the open (no compression, no filters, only the first axis split) are read with
one pread per run of neighbouring rows, straight into place, from any number of threads. Those
with codecs of `dsprep.core.filters` are decoded by it, which takes no more memory than a chunk may
have. All else goes through zarr-python: it knows every codec, and the fill value of chunks that
are not there.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsprep.core import filters
from dsprep.core.schema import Arena, Array, new_array
from dsprep.core.storage import pread_exact, pread_into
from dsprep.errors import DsprepError, FormatError, MissingExtra
from dsprep.formats.zarr.attributes import FIELDS
from dsprep.formats.zarr.blocks import LastBlock
from dsprep.formats.zarr.checks import MAX_CHUNK, check_chunks, check_size, shard_index
from dsprep.formats.zarr.encoding import NUMCODECS, Filters, Unlocated, chunk_filters
from dsprep.formats.zarr.metadata import ArrayMeta
from dsprep.formats.zarr.shards import extents, raw_offsets
from dsprep.formats.zarr.store import Chunk, Store, join

KEPT = 1 << 29
"""Bytes of the largest block of decoded rows that is kept for the next read."""

EDGES = 8
"""Reads of more chunks than this decode those at their two ends for themselves."""

LARGE = 256 << 20
"""Bytes of rows above which a read first looks whether the files can hold so much."""


@contextmanager
def translated(where: object) -> Iterator[None]:
    """Turn what libraries raise on damaged data into `FormatError`.

    Errors of the system and dsprep's own pass through.
    """
    try:
        yield
    except MemoryError as error:
        raise FormatError("a chunk or sample does not fit into memory", where=where) from error
    except DsprepError:
        raise
    except Exception as error:  # the codecs raise whatever they like
        if isinstance(error, OSError) and error.errno is not None:
            raise  # `gzip.BadGzipFile` is an OSError too, but has no number
        reason = f"{type(error).__name__}: {str(error)[:300]}"
        raise FormatError(f"the data cannot be read ({reason})", where=where) from error


class StoredArray:
    """One array of a store, opened for reading.

    Attributes
    ----------
    complete
        Whether dsprep wrote it, so that a missing file is damage and not the fill value.
    """

    def __init__(self, meta: ArrayMeta, store: Store) -> None:
        self.meta = meta
        self.store = store
        self.where = f"{store.path}, array {meta.path or '/'}"
        self.complete = False
        self._array: Any = None
        self._block: LastBlock[Array] = LastBlock()
        self._lock = threading.Lock()
        self._filters = lru_cache(maxsize=1)(self._find_filters)
        self._index = lru_cache(maxsize=16)(self._load_index)

    def __len__(self) -> int:
        return self.meta.shape[0]

    def read(self, start: int, stop: int, arena: Arena | None = None, key: str = "") -> Array:
        """Return rows ``start <= i < stop``: C-contiguous, dtype and row shape as stored."""
        meta = self.meta
        shape = (stop - start, *meta.shape[1:])
        if not meta.raw:
            return (
                self._decoded(start, stop, arena, key)
                if math.prod(shape)
                else np.empty(shape, meta.dtype)
            )
        if math.prod(shape) == 0:
            return np.empty(shape, meta.dtype)
        self._check_stored(start, stop)
        with translated(self.where):
            out = new_array(arena, key, shape, meta.dtype)
        flat = out.reshape(stop - start, -1).view(np.uint8)
        rows = meta.grid[0]
        for i in range(start // rows, -(-stop // rows)):
            first, last = max(start, i * rows), min(stop, (i + 1) * rows)
            part = flat[first - start : last - start]
            with self.store.chunk(meta.key(i)) as chunk:
                if chunk is None:
                    out[first - start : last - start] = self._by_library(first, last)
                    continue
                self.store.prove(meta.key(i))
                if meta.sharding is None:
                    self._pread(chunk, part, (first - i * rows) * meta.row_nbytes)
                else:
                    self._from_shard(chunk, i, first - i * rows, part, out, start)
        return out

    def _check_stored(self, start: int, stop: int) -> None:
        """Before much memory is taken for rows, see that the files hold about as much."""
        nbytes = (stop - start) * self.meta.row_nbytes
        if nbytes <= LARGE:
            return
        rows = self.meta.grid[0]
        held = 0
        for i in range(start // rows, -(-stop // rows)):
            with self.store.chunk(self.meta.key(i)) as chunk:
                held += chunk.nbytes if chunk else min(LARGE, rows * self.meta.row_nbytes)
        if held < nbytes:
            raise FormatError(
                "the chunks are too short",
                where=f"{self.where}, rows {start} to {stop}",
                expected=f"{nbytes} bytes",
                found=f"{held}",
                fix="the array is damaged, or far larger than what was written of it",
            )

    def _pread(self, chunk: Chunk, out: Array, offset: int) -> None:
        if offset + out.nbytes > chunk.nbytes:
            raise FormatError(
                "the chunk is too short",
                where=chunk.where,
                expected=f"at least {offset + out.nbytes} bytes",
                found=f"{chunk.nbytes}",
                fix="the file is truncated or still being written",
            )
        pread_into(chunk.fd, out, chunk.offset + offset, chunk.where)

    # --- shards --------------------------------------------------------------------------------

    def _from_shard(
        self, shard: Chunk, i: int, first: int, part: Array, out: Array, start: int
    ) -> None:
        """Fill `part` with the rows ``first ..`` of shard `i`."""
        rows, nbytes = self.meta.chunk[0], self.meta.row_nbytes
        last = first + len(part)
        offsets = self._index(i)[first // rows : -(-last // rows)]
        joints = (np.diff(offsets) != rows * nbytes) | (offsets[:-1] < 0)
        edges = [0, *(np.flatnonzero(joints) + 1).tolist(), len(offsets)]
        for a, b in itertools.pairwise(edges):
            from_row = max(first, (first // rows + a) * rows)
            to_row = min(last, (first // rows + b) * rows)
            run = part[from_row - first : to_row - first]
            if offsets[a] < 0:
                at = i * self.meta.grid[0]
                values = self._by_library(at + from_row, at + to_row)
                out[at + from_row - start : at + to_row - start] = values
            else:
                inside = (from_row - (first // rows + a) * rows) * nbytes
                self._pread(shard, run, int(offsets[a]) + inside)

    def _load_index(self, i: int) -> NDArray[np.int64]:
        meta = self.meta
        with self.store.chunk(meta.key(i)) as shard:
            if shard is None:
                raise FormatError("a shard has vanished", where=self.where)
            chunk_nbytes = meta.chunk[0] * meta.row_nbytes
            return raw_offsets(shard_index(shard, meta), chunk_nbytes, shard.nbytes, shard.where)

    # --- zarr-python ---------------------------------------------------------------------------

    def resident_nbytes(self) -> int:
        """Return the bytes of decoded chunks that reading holds: a block, and one being made."""
        meta = self.meta
        if meta.raw or meta.vlen or not meta.shape:
            return 0
        chunk = min(math.prod(meta.chunk) * meta.dtype.itemsize, MAX_CHUNK)
        block = min(meta.chunk[0], len(self)) * meta.row_nbytes
        return 2 * (max(chunk, block) if block <= KEPT else chunk)

    def _decoded(self, start: int, stop: int, arena: Arena | None, key: str) -> Array:
        """Return rows ``start <= i < stop``, of which there are some, of chunks to be decoded.

        Where a read begins or ends inside a chunk, the next one needs that chunk too: its rows
        are decoded once and kept.
        """
        rows = self.meta.chunk[0]
        inside = start % rows or (stop % rows and stop < len(self))
        large = rows * self.meta.row_nbytes > KEPT or stop - start > EDGES * rows
        if large or not inside:
            return self._by_library(start, stop)
        with translated(self.where):
            out = new_array(arena, key, (stop - start, *self.meta.shape[1:]), self.meta.dtype)
        for i in range(start // rows, -(-stop // rows)):
            edges = i * rows, min((i + 1) * rows, len(self))
            first, last = max(start, edges[0]), min(stop, edges[1])
            if (first, last) == edges:
                out[first - start : last - start] = self._by_library(first, last)
            else:
                block = self._block.get(i, partial(self._by_library, *edges))
                out[first - start : last - start] = block[first - edges[0] : last - edges[0]]
        return out

    def _check_complete(self, start: int, stop: int) -> None:
        """Raise `FormatError` if a file that dsprep wrote is missing."""
        for key in self.meta.file_keys(start, stop) if self.complete else ():
            if not self.store.has(key):
                raise FormatError(
                    "a chunk file is missing",
                    where=f"{self.store.path}, {key}",
                    fix="restore it; if zarr-python removed it because it held zeros only, "
                    f"remove the attribute {FIELDS} of the store",
                )

    def _find_filters(self) -> Filters | None:
        """Return what was done to the chunks; None if only zarr-python can undo it."""
        if not self.meta.shape:
            return None
        try:
            return chunk_filters(self.store, self.meta)
        except Unlocated:
            return None

    def _by_filters(self, start: int, stop: int, known: Filters) -> Array:
        """Return rows whose chunks `dsprep.core.filters` decodes."""
        meta = self.meta
        out = np.empty((stop - start, *meta.shape[1:]), meta.dtype)
        for numbers in meta.file_numbers(start, stop):
            corner = [n * g for n, g in zip(numbers, meta.grid, strict=True)]
            key = meta.key(*numbers)
            with self.store.chunk(key) as file:
                if file is None:
                    self._place_by_library(out, start, stop, corner, meta.grid)
                    continue
                self.store.prove(key)
                if meta.sharding is None:
                    self._place(out, start, stop, corner, file, 0, file.nbytes, known)
                    continue
                for at, offset, nbytes in self._in_shard(file, corner, start, stop):
                    if offset < 0:
                        self._place_by_library(out, start, stop, at, meta.chunk)
                    else:
                        self._place(out, start, stop, at, file, offset, nbytes, known)
        return out

    def _in_shard(
        self, shard: Chunk, corner: Sequence[int], start: int, stop: int
    ) -> Iterator[tuple[list[int], int, int]]:
        """Yield the corner, offset (-1: missing) and bytes of chunks with rows of a shard."""
        meta = self.meta
        offsets, sizes = extents(shard_index(shard, meta), shard.nbytes, shard.where)
        rows = meta.chunk[0]
        low = (max(start, corner[0]) - corner[0]) // rows
        high = -(-(min(stop, corner[0] + meta.grid[0]) - corner[0]) // rows)
        within = [range(0, g, c) for g, c in zip(meta.grid, meta.chunk, strict=True)]
        per = math.prod(map(len, within[1:]))
        part = slice(low * per, high * per)
        inside = itertools.product(within[0][low:high], *within[1:])
        for place, offset, nbytes in zip(
            inside, offsets[part].tolist(), sizes[part].tolist(), strict=True
        ):
            yield [a + b for a, b in zip(corner, place, strict=True)], offset, nbytes

    def _box(
        self, corner: Sequence[int], size: Sequence[int], start: int, stop: int
    ) -> tuple[slice, ...] | None:
        """Return the part of the rows ``start .. stop`` that a chunk has; None if it has none."""
        low = [max(corner[0], start), *corner[1:]]
        most = [min(stop, self.meta.shape[0]), *self.meta.shape[1:]]
        high = [min(a + n, top) for a, n, top in zip(corner, size, most, strict=True)]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return None
        return tuple(slice(a, b) for a, b in zip(low, high, strict=True))

    def _place(
        self,
        out: Array,
        start: int,
        stop: int,
        corner: Sequence[int],
        file: Chunk,
        offset: int,
        nbytes: int,
        known: Filters,
    ) -> None:
        """Decode the chunk at `corner` of the array to its place in the rows from `start` on."""
        meta = self.meta
        box = self._box(corner, meta.chunk, start, stop)
        if box is None:
            return
        where = f"{file.where}, offset {offset}"
        stored = pread_exact(file.fd, nbytes, file.offset + offset, where)
        size = math.prod(meta.chunk) * meta.dtype.itemsize
        chunk = filters.decode(stored, known, 0, size, where).view(meta.dtype).reshape(meta.chunk)
        inner = tuple(slice(s.start - a, s.stop - a) for s, a in zip(box, corner, strict=True))
        out[slice(box[0].start - start, box[0].stop - start), *box[1:]] = chunk[inner]

    def _place_by_library(
        self, out: Array, start: int, stop: int, corner: Sequence[int], size: Sequence[int]
    ) -> None:
        """Do the same where there is no chunk, or where it is compressed by ZIP."""
        box = self._box(corner, size, start, stop)
        if box is not None:
            found = np.asarray(self.library()[box])
            out[slice(box[0].start - start, box[0].stop - start), *box[1:]] = found

    def _by_library(self, start: int, stop: int) -> Array:
        with translated(f"{self.where}, rows {start} to {stop}"):
            self._check_complete(start, stop)
            known = self._filters()
            if known is not None:
                check_size(self.store, self.meta)
                return self._by_filters(start, stop, known)
            check_chunks(self.store, self.meta, start, stop)
            found = np.asarray(self.library()[start:stop])
            if found.shape != (stop - start, *self.meta.shape[1:]):
                raise FormatError("the data have the wrong shape", where=self.where)
            return np.ascontiguousarray(found).astype(self.meta.dtype, copy=False)

    def objects(self, start: int, stop: int) -> list[Any]:
        """Return elements ``start <= i < stop`` of an array whose elements vary in length."""
        with translated(f"{self.where}, rows {start} to {stop}"):
            check_chunks(self.store, self.meta, start, stop)
            found: list[Any] = np.asarray(self.library()[start:stop]).tolist()
            return found

    def scalar(self) -> Array:
        """Return the value of an array without axes, as shape ``()``."""
        with translated(self.where):
            return np.asarray(self.library()[()]).astype(self.meta.dtype, copy=False)

    def library(self) -> Any:
        """Return zarr-python's array, opened once."""
        with self._lock:
            if self._array is None:
                self.check_codecs()
                import zarr

                with translated(self.where):
                    store, prefix = self.store.library()
                    path = join(prefix, self.meta.path)
                    self._array = zarr.open_array(
                        store=store, path=path, mode="r", zarr_format=self.meta.version
                    )
            return self._array

    def check_codecs(self) -> None:
        """Raise `MissingExtra` if a codec is not installed."""
        from numcodecs.registry import codec_registry, entries
        from zarr.registry import get_codec_class

        for name in self.meta.codecs:
            # Of these zarr has the names, and numcodecs the codecs.
            bare = name.removeprefix(NUMCODECS)
            known = bare in codec_registry or bare in entries
            if self.meta.version == 3 and (known or bare == name):
                try:
                    known = get_codec_class(name) is not None
                except (KeyError, ValueError):  # of zarr before 3.2, and its UnknownCodecError
                    known = False
            if not known:
                raise MissingExtra(
                    f"codec {name} is not installed",
                    where=self.where,
                    fix=_package(name),
                )


_PACKAGES = {"pcodec": "pcodec", "zfpy": "zfpy", "msgpack2": "msgpack", "crc32c": "crc32c"}
"""Codecs that numcodecs has only where another package is installed."""


def _package(codec: str) -> str:
    """Return how to install a codec."""
    name = codec.removeprefix(NUMCODECS)
    if name.startswith("imagecodecs_"):
        return "pip install imagecodecs, and register its codecs: imagecodecs.numcodecs"
    if name in _PACKAGES:
        return f"pip install {_PACKAGES[name]}"
    return "install the package that provides it to zarr"
