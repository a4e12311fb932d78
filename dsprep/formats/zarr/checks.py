"""What has to be checked before the bytes of a file are given to a library.

Blosc believes the sizes in the header of a chunk: with a chunk that was cut off it reads beyond
the end of the memory that it was given, and returns what it finds there.

Header: https://github.com/Blosc/c-blosc/blob/main/README_CHUNK_FORMAT.rst
"""

from __future__ import annotations

import itertools
import math
import struct

import numpy as np
from numpy.typing import NDArray

from dsprep.errors import FormatError
from dsprep.formats.zarr.metadata import ArrayMeta
from dsprep.formats.zarr.shards import MISSING, entries, index_nbytes
from dsprep.formats.zarr.store import Chunk, Store
from dsprep.storage import pread_exact

HEADER = struct.Struct("<4B3I")
"""Version, version of the codec, flags, type size; uncompressed, block and compressed bytes."""

COPIED = 2
"""The flag of a chunk that could not be compressed and is kept as it is behind the header."""


def shard_index(shard: Chunk, meta: ArrayMeta) -> NDArray[np.uint64]:
    """Return the entries of a shard's index; see `shards.entries`.

    Raises
    ------
    FormatError
        If the file is shorter than the index, or the index is damaged.
    """
    if meta.sharding is None:
        raise FormatError("the array has no shards", where=shard.where)
    chunks = math.prod(g // c for g, c in zip(meta.grid, meta.chunk, strict=True))
    nbytes = index_nbytes(chunks, meta.sharding.crc)
    if nbytes > shard.nbytes:
        raise FormatError(
            "the shard is shorter than its index",
            where=shard.where,
            expected=f"more than {nbytes} bytes",
            found=f"{shard.nbytes}",
            fix="the file is truncated or still being written",
        )
    at = 0 if meta.sharding.at_start else shard.nbytes - nbytes
    data = pread_exact(shard.fd, nbytes, shard.offset + at, shard.where)
    return entries(data, meta.sharding.crc, shard.where)


def check_blosc(store: Store, meta: ArrayMeta, start: int, stop: int) -> None:
    """Raise `FormatError` if a chunk with rows ``start <= i < stop`` has a wrong blosc header."""
    if not meta.blosc or stop <= start or not all(meta.shape):
        return
    rows = range(start // meta.grid[0], -(-stop // meta.grid[0]))
    others = (range(-(-n // g)) for n, g in zip(meta.shape[1:], meta.grid[1:], strict=True))
    for numbers in itertools.product(rows, *others):
        with store.chunk(meta.key(*numbers)) as chunk:
            if chunk is None:  # missing, or a ZIP member with a CRC of its own
                continue
            if meta.grid == meta.chunk:
                _check_header(chunk, 0, chunk.nbytes, meta)
            elif meta.sharding is not None:
                for offset, nbytes in shard_index(chunk, meta).tolist():
                    if (offset, nbytes) != (MISSING, MISSING):
                        _check_header(chunk, offset, nbytes, meta)


def _check_header(chunk: Chunk, offset: int, nbytes: int, meta: ArrayMeta) -> None:
    if nbytes < HEADER.size or offset + nbytes > chunk.nbytes:
        raise FormatError(
            "the chunk is too short",
            where=f"{chunk.where}, offset {offset}",
            expected=f"{nbytes} bytes, at least {HEADER.size}",
            found=f"{max(0, chunk.nbytes - offset)}",
            fix="the file is truncated or still being written",
        )
    header = pread_exact(chunk.fd, HEADER.size, chunk.offset + offset, chunk.where)
    _, _, flags, _, plain, _, stored = HEADER.unpack(header)
    expected = math.prod(meta.chunk) * meta.dtype.itemsize
    wrong = stored != nbytes or (not meta.vlen and plain != expected)
    if wrong or (flags & COPIED and plain + HEADER.size != stored):
        raise FormatError(
            "the blosc header is wrong",
            where=f"{chunk.where}, offset {offset}",
            expected=f"{nbytes} bytes" + ("" if meta.vlen else f" that hold {expected}"),
            found=f"{stored} bytes that hold {plain}",
            fix="the file is truncated or damaged",
        )
