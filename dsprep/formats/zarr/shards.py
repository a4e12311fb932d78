"""The index of a shard: where each of its chunks lies.

A shard (codec ``sharding_indexed`` of Zarr v3) is one file that holds many chunks. Its index has
one entry of two little-endian uint64 per chunk, offset in the file and number of bytes, in C
order; both are `MISSING` for a chunk that is not there. A CRC-32C of the entries follows. dsprep
writes the chunks one after another and the index at the end.

Source: https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/index.html
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import Ints
from dsprep.errors import FormatError

MISSING = 2**64 - 1
ENTRY = 16
CRC = 4


def index_nbytes(chunks: int, crc: bool = True) -> int:
    """Return the bytes of the index of a shard of `chunks` chunks."""
    return ENTRY * chunks + CRC * crc


def build_index(sizes: NDArray[np.int64], chunks: int) -> bytes:
    """Return the index of a shard of `chunks` chunks of which the first ``len(sizes)`` exist.

    Parameters
    ----------
    sizes
        Bytes of each chunk that exists; they lie one after another from offset 0.
    """
    return placed_index(np.cumsum(sizes) - sizes, sizes, chunks)


def placed_index(offsets: NDArray[np.int64], sizes: NDArray[np.int64], chunks: int) -> bytes:
    """Return the index of a shard of `chunks` chunks of which the first ``len(sizes)`` exist.

    Parameters
    ----------
    offsets, sizes
        Place in the file, and bytes, of each chunk that exists.
    """
    import google_crc32c

    entries = np.full((chunks, 2), MISSING, "<u8")
    entries[: len(sizes), 0] = offsets
    entries[: len(sizes), 1] = sizes
    data = entries.tobytes()
    return data + int(google_crc32c.value(data)).to_bytes(CRC, "little")


def entries(data: bytes, crc: bool, where: object) -> NDArray[np.uint64]:
    """Return the entries of an index, shape ``(chunks, 2)``: offset and bytes of each chunk.

    Parameters
    ----------
    data
        The whole index.
    crc
        Whether it ends in a CRC-32C.
    where
        The file, for messages.

    Raises
    ------
    FormatError
        If the CRC differs.
    """
    import google_crc32c

    body = data[:-CRC] if crc else data
    if crc and int(google_crc32c.value(body)) != int.from_bytes(data[-CRC:], "little"):
        raise FormatError("the CRC of the shard index is wrong", where=where)
    return np.frombuffer(body, "<u8").reshape(-1, 2)


def extents(index: NDArray[np.uint64], shard_nbytes: int, where: object) -> tuple[Ints, Ints]:
    """Return offset and bytes of each chunk of a shard, -1 and 0 where it is missing.

    Parameters
    ----------
    index
        As from `entries`.
    shard_nbytes
        Bytes of the file.
    where
        The file, for messages.

    Raises
    ------
    FormatError
        If an entry does not lie within the file, or has no bytes.
    """
    missing = (index == MISSING).all(axis=1)
    offsets, sizes = index[:, 0], index[:, 1]
    nbytes = np.uint64(shard_nbytes)
    # Compared so that no sum of two large numbers is needed.
    bad = ~missing & (
        (sizes == 0) | (sizes > nbytes) | (offsets > nbytes - np.minimum(sizes, nbytes))
    )
    if bad.any():
        raise _wrong(index, int(bad.argmax()), f"bytes within {shard_nbytes}", where)
    return (
        np.where(missing, -1, offsets.view(np.int64)),
        np.where(missing, 0, sizes.view(np.int64)),
    )


def raw_offsets(
    index: NDArray[np.uint64], chunk_nbytes: int, shard_nbytes: int, where: object
) -> Ints:
    """Return the offset of each chunk of a shard without compression, -1 where it is missing.

    Parameters
    ----------
    index, shard_nbytes, where
        As for `extents`.
    chunk_nbytes
        Bytes of one chunk; all are alike.

    Raises
    ------
    FormatError
        If an entry does not lie within the file, or has another size.
    """
    offsets, sizes = extents(index, shard_nbytes, where)
    bad = (offsets >= 0) & (sizes != chunk_nbytes)
    if bad.any():
        raise _wrong(index, int(bad.argmax()), f"{chunk_nbytes} bytes", where)
    return offsets


def _wrong(index: NDArray[np.uint64], i: int, expected: str, where: object) -> FormatError:
    return FormatError(
        f"entry {i} of the shard index is wrong",
        where=where,
        expected=expected,
        found=f"{index[i, 1]} bytes at {index[i, 0]}",
    )
