"""Encoding of chunks as HDF5's filters do it, without the library and its lock."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

from dsprep.core.storage import Buffer, as_bytes

if TYPE_CHECKING:
    from dsprep.core.schema import Array
    from dsprep.formats.hdf5.plan import FieldPlan


def encode_chunk(rows: Array, p: FieldPlan, chunk_rows: int) -> Buffer:
    """Return `rows` as one chunk of the dataset that `p` describes.

    Parameters
    ----------
    rows
        uint8, shape ``(n * row_nbytes,)``, with ``n <= chunk_rows``; zeros fill what is missing.
    chunk_rows
        The rows of a whole chunk.
    """
    missing = chunk_rows * p.field.row_nbytes - len(rows)
    if missing:
        rows = np.concatenate([rows, np.zeros(missing, np.uint8)])
    if p.shuffle:
        # First the first byte of all elements, then the second of all: filter 2 of HDF5.
        rows = np.ascontiguousarray(rows.reshape(-1, p.carrier.stored.itemsize).T).reshape(-1)
    if p.codec == "gzip":
        return zlib.compress(as_bytes(rows), p.level)
    if p.codec == "zstd":
        from numcodecs.zstd import Zstd

        return bytes(Zstd(level=p.level).encode(rows))
    return rows
