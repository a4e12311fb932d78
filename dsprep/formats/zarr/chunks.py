"""What is stored of chunks, checked before it is used: headers of codecs, and indexes of shards.

Blosc believes the sizes in the header of a chunk: with a chunk that was cut off it reads beyond
the end of the memory that it was given, and returns what it finds there. Zstd takes as much
memory as the header says. Gzip says nothing, but makes at most some thousand bytes of one.

A shard (codec ``sharding_indexed`` of Zarr v3) is one file that holds many chunks. Its index has
one entry of two little-endian uint64 per chunk, offset in the file and number of bytes, in C
order; both are `MISSING` for a chunk that is not there. A CRC-32C of the entries follows. dsprep
writes the chunks back to back and the index at the end.

Blosc: https://github.com/Blosc/c-blosc/blob/main/README_CHUNK_FORMAT.rst
Zstd: RFC 8878, section 3.1.1.1
Shards: https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/index.html
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from dsprep.core.schema import Ints
from dsprep.errors import DsprepError, FormatError
from dsprep.storage.ranges import ends_early

if TYPE_CHECKING:
    from dsprep.formats.zarr.metadata import ArrayMeta
    from dsprep.formats.zarr.store import Chunk, Store

HEADER = struct.Struct("<4B3I")
"""Version, version of the codec, flags, type size; uncompressed, block and compressed bytes."""

ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
ZSTD_HEADER = 18
"""Bytes of the longest frame header of zstd."""

MAX_CHUNK = 1 << 32
"""Bytes of the largest chunk that is decoded; the codecs themselves stop at 2 GiB."""

COPIED = 2
"""The flag of a chunk that could not be compressed and is kept as it is behind the header."""

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


def check_chunks(store: Store, meta: ArrayMeta, start: int, stop: int) -> None:
    """Look at the encoded chunks with rows ``start <= i < stop`` before they are decoded.

    Raise `FormatError` if a header contradicts metadata or file, or they are too large to decode.
    """
    expected = math.prod(meta.chunk) * meta.dtype.itemsize
    if meta.outer not in ("", "bytes") and expected > MAX_CHUNK:
        raise FormatError(
            "the chunks are too large to decode",
            where=f"{store.path}, array {meta.path or '/'}",
            expected=f"at most {MAX_CHUNK} bytes",
            found=f"{expected}",
        )
    if meta.outer not in ("blosc", "zstd") or stop <= start or not all(meta.shape):
        return
    for key in meta.file_keys(start, stop):
        with store.chunk(key) as chunk:
            if chunk is None:  # missing, or a ZIP member with a CRC of its own
                continue
            if meta.wrapped or "sharding_indexed" not in meta.codecs:
                _check_header(chunk, 0, chunk.nbytes, meta)
            elif meta.sharding is not None:
                offsets, sizes = shard_index(chunk, meta)
                for i in np.flatnonzero(offsets >= 0).tolist():
                    _check_header(chunk, int(offsets[i]), int(sizes[i]), meta)


def _check_header(chunk: Chunk, offset: int, nbytes: int, meta: ArrayMeta) -> None:
    if nbytes < HEADER.size // 2 or offset + nbytes > chunk.nbytes:
        raise FormatError(
            "the chunk is too short",
            where=f"{chunk.where}, offset {offset}",
            expected=f"{nbytes} bytes, at least {HEADER.size // 2}",
            found=f"{max(0, chunk.nbytes - offset)}",
            fix="the file is truncated or still being written",
        )
    size = min(nbytes, ZSTD_HEADER)
    header = chunk.file.pread_exact(size, chunk.offset + offset)
    stored, plain = (_blosc if meta.outer == "blosc" else _zstd)(header, nbytes)
    expected = math.prod(meta.chunk) * meta.dtype.itemsize
    unknown = meta.vlen or meta.wrapped
    wrong = plain is not None and (plain > MAX_CHUNK if unknown else plain != expected)
    if stored != nbytes or wrong:
        raise FormatError(
            f"the {meta.outer} header is wrong",
            where=f"{chunk.where}, offset {offset}",
            expected=f"{nbytes} bytes" + ("" if unknown else f" that hold {expected}"),
            found=f"{stored} bytes that hold {plain}",
            fix="the file is truncated or damaged",
        )


def _blosc(header: bytes, nbytes: int) -> tuple[int, int | None]:
    """Return the stored and the plain bytes of a blosc chunk, as its header has them."""
    if len(header) < HEADER.size:
        return 0, None
    _, _, flags, _, plain, _, stored = HEADER.unpack_from(header)
    if flags & COPIED and plain + HEADER.size != stored:
        return 0, plain
    return stored, plain


def _zstd(header: bytes, nbytes: int) -> tuple[int, int | None]:
    """Return the same of a zstd frame; it does not say how long it is, and may leave out both."""
    if header[:4] != ZSTD_MAGIC:
        return 0, None
    code, single = header[4] >> 6, header[4] >> 5 & 1
    size = (single, 2, 4, 8)[code]
    at = 5 + (not single) + (0, 1, 2, 4)[header[4] & 3]
    if not size:
        return nbytes, None
    plain = int.from_bytes(header[at : at + size], "little")
    return nbytes, plain + 256 if size == 2 else plain


# --- indexes of shards -----------------------------------------------------------------------


def shard_index(shard: Chunk, meta: ArrayMeta) -> tuple[Ints, Ints]:
    """Return offset in the file and bytes of each chunk of a shard, -1 and 0 where it is missing.

    Raises
    ------
    FormatError
        If the index is cut off or damaged, or an entry has no bytes or leaves the file; without
        filters, if it has another size than a chunk.
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
    data = shard.file.pread_blocks(nbytes, [shard.offset + at])[0]  # no more than that of objects
    if len(data) < nbytes:
        raise ends_early(shard.where, shard.offset + at, nbytes, len(data))
    body = data[: ENTRY * chunks]
    if meta.sharding.crc and data != body + _crc(body):
        raise FormatError("the CRC of the shard index is wrong", where=shard.where)
    index = np.frombuffer(body, "<u8").reshape(-1, 2)
    missing = (index == MISSING).all(axis=1)
    offsets, sizes = index[:, 0], index[:, 1]
    limit = np.uint64(shard.nbytes)
    # Compared so that no sum of two large numbers is needed.
    bad = (sizes == 0) | (sizes > limit) | (offsets > limit - np.minimum(sizes, limit))
    full = None if meta.filters or meta.unlocated else math.prod(meta.chunk) * meta.dtype.itemsize
    if full is not None:
        bad |= sizes != full
    bad &= ~missing
    if bad.any():
        i = int(bad.argmax())
        raise FormatError(
            f"entry {i} of the shard index is wrong",
            where=shard.where,
            expected=f"{'some' if full is None else full} bytes within {shard.nbytes}",
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
