"""Checksums of what was delivered that do not depend on the order of the samples.

The sum, modulo 2**64, of one number per sample, which is mixed from the CRC-32C of all its bytes,
fields in schema order. It differs, but for chance, if a sample is missing, comes twice or has other
bytes; sums of ranks add up to that of the dataset.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dsprep.core.permutation import mix
from dsprep.core.schema import Array, Batch, Column, Field, Ragged, Schema
from dsprep.errors import SchemaError, require
from dsprep.formats.base import Source

KEY = np.uint64(0x9E3779B97F4A7C15)
"""Makes a word of zeros count, too."""

PIECE = 8 << 20
"""Bytes of values that are summed up at a time."""


@dataclass(frozen=True)
class Sums:
    """The sums over samples."""

    samples: int = 0  # how many
    full: int = 0  # see the module
    nbytes: int = 0  # bytes of their values

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.samples + other.samples,
            (self.full + other.full) % 2**64,
            self.nbytes + other.nbytes,
        )


def full(batch: Batch, schema: Schema) -> int:
    """Return the sum over all bytes of a batch."""
    from google_crc32c import extend

    crcs = [0] * len(next(iter(batch.values()))) if len(schema) else []
    for field in schema:
        column = _column(batch, field)
        facts = {"expected": len(crcs), "found": len(column)}
        words = "fields of a batch differ in length"
        require(len(column) == len(crcs), SchemaError, words, **facts)
        ends = np.arange(len(crcs) + 1)
        values = column.values if isinstance(column, Ragged) else column
        ends = (column.offsets if isinstance(column, Ragged) else ends) * field.row_nbytes
        data = np.ascontiguousarray(_clean(values)).reshape(-1).view(np.uint8).tobytes()
        for i, (start, stop) in enumerate(pairwise(ends.tolist())):
            length = (stop - start).to_bytes(8, "little") if field.ragged else b""
            crcs[i] = extend(extend(crcs[i], length), data[start:stop])
    return int(mix(np.array(crcs, np.uint64), KEY).sum(dtype=np.uint64))


def _clean(column: Array) -> Array:
    """Return the values with whatever is between the members of a structured dtype zeroed."""
    if column.dtype.names is None:
        return column
    out = np.zeros(column.shape, column.dtype)
    out[...] = column
    return out


def _column(batch: Batch, field: Field) -> Column:
    words = f"a batch lacks the field {field.name}"
    require(field.name in batch, SchemaError, words, found=", ".join(batch))
    column = batch[field.name]
    if field.ragged:
        return column if isinstance(column, Ragged) else Ragged.pack(list(column), field)
    array = np.asarray(column)
    if array.dtype != field.dtype or array.shape[1:] != field.shape:
        raise SchemaError(
            f"field {field.name} of a batch is wrong",
            expected=f"{field.dtype}{list(field.shape)}",
            found=f"{array.dtype}{list(array.shape[1:])}",
        )
    return array


def nbytes_of(batch: Batch) -> int:
    """Return the bytes of the values of a batch."""
    columns = batch.values()
    return sum(c.values.nbytes if isinstance(c, Ragged) else c.nbytes for c in columns)


def of_source(source: Source, stop: int) -> Sums:
    """Return what the first `stop` samples of a dataset add up to; all of them are read."""
    schema = source.schema
    sizes = source.sizes(0, min(stop, 64))
    mean = 1 << 16 if sizes is None or not len(sizes) else int(sizes.mean())
    step = max(1, PIECE // max(1, mean))
    sums = Sums()
    for at in range(0, stop, step):
        batch = source.read(at, min(stop, at + step))
        sums += Sums(min(stop, at + step) - at, full(batch, schema), nbytes_of(batch))
    return sums
