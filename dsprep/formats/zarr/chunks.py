"""The stored bytes of chunks, checked before it is used: compressed sizes, and indexes of shards.

Libraries trust what a chunk says of itself: Blosc reads beyond the memory that it was given, and
Zstd takes as much memory as a header says. So a chunk that they are going to decode is unpacked
by `dsprep.core.filters` first.

A shard (codec ``sharding_indexed`` of Zarr v3) is one file that holds many chunks. Its index has
one entry of two little-endian uint64 per chunk, offset in the file and number of bytes, in C
order; both are `MISSING` for a chunk that is not there. A CRC-32C of the entries follows. dsprep
writes the chunks back to back and the index at the end.

Shards: https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/index.html
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from dsprep.core.filters import COMPRESSORS, unpack
from dsprep.core.memory import free_memory
from dsprep.core.schema import Ints
from dsprep.errors import DsprepError, FormatError
from dsprep.storage.ranges import ends_early

if TYPE_CHECKING:
    from dsprep.formats.zarr.array import StoredArray
    from dsprep.formats.zarr.metadata import ArrayMeta
    from dsprep.storage.base import Handle

NUMCODECS = "numcodecs."
"""The prefix of v3 to the names of codecs that have no specification."""

MAX_CHUNK = 1 << 32
"""Bytes of the largest chunk that is decoded; the codecs themselves stop at 2 GiB."""

SLACK = 1 << 20
"""Bytes that a codec may unpack beyond twice those of a chunk, since filters may widen elements."""

MIN_ELEMENTS_NBYTES = 64 << 20
"""Bytes that elements of varying length in one chunk may always take, else a quarter of what is
free."""

MISSING = 2**64 - 1
ENTRY = 16
CRC = 4


@contextmanager
def library_errors(where: object) -> Iterator[None]:
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


def read_chunks(array: StoredArray, keys: Iterable[str]) -> dict[str, bytes]:
    """Return the files of chunks that are there, for a library to decode, by key.

    Raise `FormatError` if what they hold is too large to decode; or they are not there, though
    dsprep wrote them. Of elements that vary in length, the number that a chunk claims to hold is
    compared with the metadata: the codec takes memory for as many.
    """
    meta, files = array.meta, dict[str, bytes]()
    for key in keys:
        data = array.store.document(key, MAX_CHUNK)
        if data is not None:
            files[key] = data
        elif array.complete:
            raise array.missing(key)
    expected = math.prod(meta.grid) * meta.dtype.itemsize
    outer = meta.wrapped or "sharding_indexed" not in meta.codecs
    codec = meta.codecs[-1].removeprefix(NUMCODECS) if meta.codecs and outer else ""
    inside = set(meta.codecs) & {"blosc", "zstd"} - {codec}
    if inside or expected > MAX_CHUNK:
        kind = f"of {min(inside)} inside such shards or codecs" if inside else "as large as these"
        raise FormatError(
            f"chunks {kind} are not read",
            where=array.where,
            found=f"{expected} bytes each",
            fix="write them with one compressor, without shards in shards",
        )
    limit = 2 * expected + SLACK
    if meta.vlen:
        limit = max(MIN_ELEMENTS_NBYTES, free_memory() // 4)
    for key, data in files.items():
        where, plain = f"{array.store.path}, {key}", data
        if codec in COMPRESSORS:
            plain = unpack(data, {"id": codec}, limit, where)[:4].tobytes()
        if meta.vlen and (count := int.from_bytes(plain[:4], "little")) != meta.grid[0]:
            what = "the chunk holds another number of elements"
            raise FormatError(what, where=where, expected=meta.grid[0], found=count)
    return files


# --- indexes of shards -----------------------------------------------------------------------


def shard_index(
    file: Handle, offset: int, nbytes: int, meta: ArrayMeta, where: str
) -> tuple[Ints, Ints]:
    """Return offset in the file and bytes of each chunk of a shard, -1 and 0 where it is missing.

    Raises
    ------
    FormatError
        If the index is cut off or damaged, or an entry has no bytes or leaves the file; without
        filters, if it has another size than a chunk.
    """
    assert meta.sharding is not None
    at_start, crc = meta.sharding
    chunks = math.prod(g // c for g, c in zip(meta.grid, meta.chunk, strict=True))
    size = index_nbytes(chunks, crc)
    at = offset + (0 if at_start else max(0, nbytes - size))
    data = b""
    if size <= nbytes:  # no more than that of objects
        data = file.pread_blocks(size, [at])[0]
    if len(data) < size:
        raise ends_early(where, at, size, len(data))
    body = data[: ENTRY * chunks]
    if crc and data != body + _crc(body):
        raise FormatError("the CRC of the shard index is wrong", where=where)
    index = np.frombuffer(body, "<u8").reshape(-1, 2)
    missing = (index == MISSING).all(axis=1)
    offsets, sizes = index[:, 0], index[:, 1]
    limit = np.uint64(nbytes)
    # Compared so that no sum of two large numbers is needed.
    bad = (sizes == 0) | (sizes > limit) | (offsets > limit - np.minimum(sizes, limit))
    full = "some"
    if not (meta.filters or meta.unlocated):
        full = str(math.prod(meta.chunk) * meta.dtype.itemsize)
        bad |= sizes != int(full)
    bad &= ~missing
    if bad.any():
        i = int(bad.argmax())
        raise FormatError(
            f"entry {i} of the shard index is wrong",
            where=where,
            expected=f"{full} bytes within {nbytes}",
            found=f"{sizes[i]} bytes at {offsets[i]}",
        )
    signed = index.view(np.int64)
    return np.where(missing, -1, signed[:, 0]), np.where(missing, 0, signed[:, 1])


def index_nbytes(chunks: int, crc: bool = True) -> int:
    """Return the bytes of the index of a shard of `chunks` chunks."""
    return ENTRY * chunks + CRC * crc


def build_index(sizes: Ints, chunks: int, offsets: Ints | None = None) -> bytes:
    """Return the index of a shard of `chunks` chunks of which the first ``len(sizes)`` exist.

    `sizes` are their bytes; `offsets` in the file, None if they are contiguous from 0 on.
    """
    entries = np.full((chunks, 2), MISSING, "<u8")
    entries[: len(sizes), 0] = np.cumsum(sizes) - sizes if offsets is None else offsets
    entries[: len(sizes), 1] = sizes
    body = entries.tobytes()
    return body + _crc(body)


def _crc(data: bytes) -> bytes:
    import google_crc32c

    return int(google_crc32c.value(data)).to_bytes(CRC, "little")
