"""Rows of an array on their way to a file: their bytes, and where these go."""

from __future__ import annotations

from collections.abc import Iterator

from dsprep.core.schema import Arena, Array, Ints, copy_members, has_padding, new_array


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
