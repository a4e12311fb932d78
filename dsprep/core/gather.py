"""Samples of a batch in any order, copied by numpy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dsprep.core.schema import (
    Arena,
    Array,
    Batch,
    Ints,
    Ragged,
    Schema,
    concatenate,
    new_array,
)
from dsprep.core.spans import move_spans, offsets_of

LONG = 2048
"""Bytes of a sample from which on it is worth naming it alone: to copy it, or in one call to the
kernel with others, instead of by an index of rows."""


def take(
    schema: Schema, batch: Batch, rows: Ints, arena: Arena | None = None, key: str = "take"
) -> Batch:
    """Return the samples `rows` of `batch`, in that order; a sample may come several times.

    Parameters
    ----------
    rows
        int64, shape ``(n,)``, within the batch.
    arena, key
        Where the memory of the result comes from, and a name that separates it from other uses.
    """
    out: Batch = {}
    for f in schema:
        column = batch[f.name]
        name = f"{key}.{f.name}"
        if isinstance(column, Ragged):
            out[f.name] = take_ragged(column, rows, arena, name)
        else:
            result = new_array(arena, name, (len(rows), *f.inner), f.dtype)
            take_into(result, column, rows)
            out[f.name] = result
    return out


def take_into(out: Array, column: Array, rows: Ints) -> None:
    """Fill the C-contiguous `out` with ``column[rows]``, bit for bit; releases the GIL."""
    if not out.size:
        return
    flat = np.ascontiguousarray(column).reshape(len(column), -1).view(np.uint8)
    # With mode="raise" numpy would fill a copy of `out` first.
    np.take(flat, rows, axis=0, out=out.reshape(len(out), -1).view(np.uint8), mode="clip")


def take_ragged(column: Ragged, rows: Ints, arena: Arena | None = None, key: str = "") -> Ragged:
    """Return the samples `rows` of one ragged field; see `take`."""
    lengths = column.lengths[rows]
    offsets = offsets_of(lengths)
    total = int(offsets[-1])
    values = column.values
    out = new_array(arena, key, (total, *values.shape[1:]), values.dtype)
    if out.size:
        row, flat = out.nbytes // total, np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        starts, to = column.offsets[rows] * row, offsets[:-1] * row
        move_spans(flat, starts, lengths * row, out.reshape(-1).view(np.uint8), to)
    return Ragged(out, offsets, column.kind)


class Assembly:
    """A batch put together from parts: fixed fields in one array, ragged ones joined in the end.

    Parts of ragged fields are kept until then: they must have memory of their own.

    Parameters
    ----------
    schema, count
        The fields and the number of samples.
    arena, key
        As in `take`.
    """

    def __init__(
        self, schema: Schema, count: int, arena: Arena | None = None, key: str = ""
    ) -> None:
        self._schema, self.ragged = schema, Schema(tuple(f for f in schema if f.ragged))
        self._fixed = {
            f.name: new_array(arena, f"{key}.{f.name}", (count, *f.inner), f.dtype)
            for f in schema
            if not f.ragged
        }
        self._parts: dict[int, Batch] = {}

    def put(self, at: int, batch: Batch, rows: Ints | None = None) -> None:
        """Let sample `at` and those after it be those of `batch`, or `rows` of them."""
        for name, out in self._fixed.items():
            column = np.asarray(batch[name])
            if rows is None:
                out[at : at + len(column)] = column
            else:
                take_into(out[at : at + len(rows)], column, rows)
        if self.ragged.fields:
            part = {f.name: batch[f.name] for f in self.ragged}
            self._parts[at] = part if rows is None else take(self.ragged, part, rows)

    def batch(self) -> Batch:
        """Return the samples, when all are there."""
        parts = [self._parts[at] for at in sorted(self._parts)]
        joined = concatenate(self.ragged, parts) if parts else {}
        return {n: self._fixed[n] if n in self._fixed else joined[n] for n in self._schema.names}


def ranges_in(starts: Ints, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield (part, first, last + 1) for the parts that hold some of ``start .. stop``.

    Part i begins at ``starts[i]``, and ends where the next one begins.
    """
    part = max(0, int(np.searchsorted(starts, start, "right")) - 1)
    while start < stop:
        base, end = int(starts[part]), min(stop, int(starts[part + 1]))
        if end > start:
            yield part, start - base, end - base
            start = end
        part += 1
