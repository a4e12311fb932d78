"""Checksums of what was delivered that do not depend on the order of the samples.

The sum, modulo 2**64, of one number per sample. It differs, but for chance, if a sample is missing,
comes twice or has other bytes; sums of ranks add up to that of the dataset.

`full`
    The number is mixed from the CRC-32C of all bytes of the sample, fields in schema order.
`light`
    The number is mixed from 8 bytes in the middle of each of the largest fields, or from the
    lengths of the samples where all fields are ragged: cheap enough to be taken while epochs are
    measured, between one wait for a batch and the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from dsprep.core.permutation import mix
from dsprep.core.schema import Array, Batch, Column, Field, Ragged, Schema
from dsprep.errors import SchemaError
from dsprep.formats.base import Source

Words: TypeAlias = NDArray[np.uint64]

KEY = np.uint64(0x9E3779B97F4A7C15)
"""Makes a word of zeros count, too."""

LOOKED_AT = 4
"""Fields that the light sum looks at, at most."""

PIECE = 8 << 20
"""Bytes of values that are summed up at a time."""


@dataclass(frozen=True)
class Sums:
    """What samples add up to."""

    samples: int = 0  # how many
    # full, light: see the module
    full: int = 0
    light: int = 0
    nbytes: int = 0  # bytes of their values

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.samples + other.samples,
            (self.full + other.full) % 2**64,
            (self.light + other.light) % 2**64,
            self.nbytes + other.nbytes,
        )


def mixed(words: Words) -> Words:
    """Return words whose bits depend on all bits of those given."""
    return mix(words, KEY)


def total(words: Words) -> int:
    """Return the sum of mixed words, modulo 2**64."""
    return int(mixed(words).sum(dtype=np.uint64))


def full(batch: Batch, schema: Schema) -> int:
    """Return the sum over all bytes of a batch."""
    from google_crc32c import extend

    crcs: list[int] | None = None
    for field in schema:
        rows = _rows(batch, field)
        if crcs is None:
            crcs = [0] * len(rows)
        if len(rows) != len(crcs):
            raise SchemaError(
                "fields of a batch differ in length", expected=len(crcs), found=len(rows)
            )
        for i, row in enumerate(rows):
            length = len(row).to_bytes(8, "little") if field.ragged else b""
            crcs[i] = extend(extend(crcs[i], length), row)
    return total(np.array(crcs or [], np.uint64))


def _rows(batch: Batch, field: Field) -> list[bytes]:
    """Return the bytes of each sample of a field."""
    column = _column(batch, field)
    if isinstance(column, Ragged):
        values = np.ascontiguousarray(_clean(column.values))
        data, size = values.reshape(-1).view(np.uint8).tobytes(), field.row_nbytes
        ends = (column.offsets * size).tolist()
        return [data[a:b] for a, b in pairwise(ends)]
    size = field.row_nbytes
    data = np.ascontiguousarray(_clean(column)).reshape(-1).view(np.uint8).tobytes()
    return (
        [data[a : a + size] for a in range(0, size * len(column), size)]
        if size
        else ([b""] * len(column))
    )


def _clean(column: Array) -> Array:
    """Return the values with whatever is between the members of a structured dtype zeroed."""
    if column.dtype.names is None:
        return column
    out = np.zeros(column.shape, column.dtype)
    out[...] = column
    return out


def _column(batch: Batch, field: Field) -> Column:
    column = batch.get(field.name)
    if column is None:
        raise SchemaError(f"a batch lacks the field {field.name}", found=", ".join(batch))
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


def lightly(schema: Schema) -> Callable[[Batch], int]:
    """Return the function that gives the light sum of batches of a schema."""
    fixed = [f for f in schema if not f.ragged and f.row_nbytes]
    if not fixed:
        return lambda batch: _lengths(batch, schema)
    fields = sorted(fixed, key=lambda f: -f.row_nbytes)[:LOOKED_AT]

    def sum_of(batch: Batch) -> int:
        words = _middles(batch, fields[0])
        for field in fields[1:]:  # mixed together, so that labels belong to their samples
            words = mixed(words) ^ _middles(batch, field)
        return total(words)

    return sum_of


def _middles(batch: Batch, field: Field) -> Words:
    """Return 8 bytes, or fewer, of the middle of a field of each sample."""
    column = np.asarray(_column(batch, field))
    if not len(column):  # a rank that has run out of samples before the others
        return np.zeros(0, np.uint64)
    count = field.row_nbytes // field.dtype.itemsize
    take = min(count, max(1, 8 // field.dtype.itemsize))
    first = count // 2 - take // 2
    some = np.ascontiguousarray(column.reshape(len(column), -1)[:, first : first + take])
    data = _clean(some).view(np.uint8).reshape(len(column), -1)[:, :8]
    words = np.zeros((len(column), 8), np.uint8)
    words[:, : data.shape[1]] = data
    return words.view(np.uint64)[:, 0]


def _lengths(batch: Batch, schema: Schema) -> int:
    sum_ = 0
    for field in schema:
        column = _column(batch, field)
        lengths = np.diff(column.offsets) if isinstance(column, Ragged) else np.zeros(len(column))
        sum_ += total(lengths.astype(np.uint64))
    return sum_ % 2**64


def _nbytes(column: Column) -> int:
    return column.values.nbytes if isinstance(column, Ragged) else column.nbytes


def of_source(source: Source, stop: int) -> Sums:
    """Return what the first `stop` samples of a dataset add up to; all of them are read."""
    schema = source.schema
    light = lightly(schema)
    sizes = source.sizes(0, min(stop, 64))
    mean = 1 << 16 if sizes is None or not len(sizes) else int(sizes.mean())
    step = max(1, PIECE // max(1, mean))
    sums = Sums()
    for at in range(0, stop, step):
        batch = source.read(at, min(stop, at + step))
        nbytes = sum(_nbytes(_column(batch, field)) for field in schema)
        sums += Sums(min(stop, at + step) - at, full(batch, schema), light(batch), nbytes)
    return sums
