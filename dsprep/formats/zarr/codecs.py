"""Encoding chunks: the same bytes whenever and wherever it is done.

The metadata names the codec to zarr-python (`v3`, `v2`); `encode` makes the bytes with numcodecs,
whose formats the codecs of Zarr are, except that gzip gets no time stamp. Blosc compresses with
LZ4 behind a byte shuffle: fast enough to read that training does not wait for it.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from typing import Any

import numpy as np

from dsprep.core.schema import Array
from dsprep.core.storage import as_bytes
from dsprep.formats.base import Compression
from dsprep.formats.zarr.plan import ArrayPlan

LEVELS = {"gzip": 5, "zstd": 3, "blosc": 5}
"""Where the user names none."""

MAX_TYPESIZE = 255


def level(compression: Compression) -> int:
    """Return the level of the codec."""
    return LEVELS[compression.codec] if compression.level is None else compression.level


def typesize(plan: ArrayPlan) -> int:
    """Return the bytes of an element as the user knows it, for blosc's shuffle."""
    size = plan.carrier.dtype.itemsize * (plan.carrier.trailing or (1,))[0]
    return size if size <= MAX_TYPESIZE else 1


def v3(compression: Compression, plan: ArrayPlan) -> Any:
    """Return the codec for zarr-python's v3 arrays."""
    from zarr import codecs

    if compression.codec == "gzip":
        return codecs.GzipCodec(level=level(compression))
    if compression.codec == "zstd":
        return codecs.ZstdCodec(level=level(compression))
    return codecs.BloscCodec(
        cname="lz4", clevel=level(compression), shuffle="shuffle", typesize=typesize(plan)
    )


def v2(compression: Compression) -> Any:
    """Return the codec for zarr-python's v2 arrays."""
    import numcodecs

    if compression.codec == "gzip":
        return numcodecs.GZip(level(compression))
    if compression.codec == "zstd":
        return numcodecs.Zstd(level(compression))
    return numcodecs.Blosc("lz4", level(compression), numcodecs.Blosc.SHUFFLE)


def encoder(compression: Compression | None, plan: ArrayPlan) -> Callable[[Array], Any]:
    """Return the function that turns one chunk (uint8, C-contiguous) into its stored bytes."""
    if compression is None:
        return as_bytes
    if compression.codec == "gzip":
        return lambda chunk: gzip.compress(as_bytes(chunk), level(compression), mtime=0)
    import numcodecs
    import zarr  # noqa: F401  (tells blosc to use no threads: with them its bytes vary)

    if compression.codec == "zstd":
        return numcodecs.Zstd(level(compression)).encode  # type: ignore[no-any-return]
    blosc = numcodecs.Blosc(
        "lz4", level(compression), numcodecs.Blosc.SHUFFLE, typesize=typesize(plan)
    )
    return blosc.encode  # type: ignore[no-any-return]


def encode_file(rows: Array, plan: ArrayPlan, encode: Callable[[Array], Any]) -> list[Any]:
    """Return the chunks of one file, encoded.

    Parameters
    ----------
    rows
        uint8, shape ``(n, row_nbytes)``: the rows in the file; the last chunk is filled up with
        zeros.
    """
    chunks = []
    for start in range(0, len(rows), plan.chunk):
        part = rows[start : start + plan.chunk]
        if len(part) < plan.chunk:
            part = np.concatenate(
                [part, np.zeros((plan.chunk - len(part), part.shape[1]), np.uint8)]
            )
        chunks.append(encode(part))
    return chunks
