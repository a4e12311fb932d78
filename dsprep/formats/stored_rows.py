"""Rows of an array on their way to a file: their bytes, and where these go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided

from dsprep.core.schema import (
    Arena,
    Array,
    Bytes,
    Column,
    Field,
    Ints,
    Ragged,
    copy_members,
    has_padding,
    new_array,
    without_padding,
)


@dataclass(frozen=True)
class RowSpans:
    """The bytes that one part of a record, such as a field, adds to each of n records.

    Record i gets ``data[starts[i]:][:lengths[i]]``; `data` is uint8, 1-D and contiguous.
    """

    data: Bytes
    starts: Ints
    lengths: Ints

    @classmethod
    def of(cls, column: Column, field: Field) -> RowSpans:
        """Return the bytes of a field, copied only where those of a sample are not contiguous."""
        if not isinstance(column, Ragged):
            return cls.of_rows(column, field.row_nbytes)
        values = np.ascontiguousarray(without_padding(column.values))
        data = values.reshape(-1).view(np.uint8) if values.size else np.zeros(0, np.uint8)
        offsets = column.offsets * field.row_nbytes
        return cls(data, offsets[:-1], np.diff(offsets))

    @classmethod
    def of_rows(cls, array: Array, width: int) -> RowSpans:
        """Return the bytes of rows of `width` bytes each; see `of`."""
        n = len(array)
        lengths = np.full(n, width, np.int64)
        if not n * width:
            return cls(np.zeros(0, np.uint8), np.zeros(n, np.int64), lengths)
        array = without_padding(array)
        step = array.strides[0] if n > 1 else width
        if step < width or not array[:1].flags.c_contiguous:
            array, step = np.ascontiguousarray(array), width
        rows = array[:1].reshape(-1).view(np.uint8)
        data = as_strided(rows, ((n - 1) * step + width,), (1,), writeable=False)
        return cls(data, np.arange(n, dtype=np.int64) * step, lengths)


def contiguous(rows: Array, arena: Arena, key: str) -> Array:
    """Return `rows` as a C-contiguous array whose padding bytes are zero.

    Padding holds whatever memory held before: it must neither leak nor make two outputs differ.
    """
    padded = has_padding(rows.dtype)
    if rows.flags.c_contiguous and not padded:
        return rows
    out = new_array(arena, key, rows.shape, rows.dtype)
    if padded:
        out.reshape(-1).view("u1")[...] = 0
    copy_members(rows, out)
    return out


def spans(
    offsets: Ints, chunk: int, row_nbytes: int, start: int, stop: int
) -> Iterator[tuple[int, int, int]]:
    """Yield ``(offset, first, last)``: rows ``first <= i < last`` are from `offset` on.

    `chunk` rows are contiguous, those of each chunk from its offset on. Chunks that follow each
    other in the file are joined.
    """
    at = start
    while at < stop:
        number = at // chunk
        offset = int(offsets[number]) + (at - number * chunk) * row_nbytes
        end = min((number + 1) * chunk, stop)
        while end < stop:
            number += 1
            if int(offsets[number]) != offset + (end - at) * row_nbytes:
                break
            end = min((number + 1) * chunk, stop)
        yield offset, at, end
        at = end
