"""The encoding of a sample as one LMDB value, and back.

LMDB keeps one byte string per key and knows no types. The encoding, used for all that dsprep
writes; a sidecar, or the user, gives the schema when reading:

1. if the sample has two or more ragged fields (`bytes` and `str` are ragged too): for each, in
   schema order, the bytes of its value as little-endian u64;
2. the fixed fields in schema order, each in C order with the dtype's own bytes and byte order,
   without any padding between them; padding inside a structured dtype is zero;
3. the ragged fields in schema order, each its rows one after another; `str` as UTF-8.

So one `bytes` field is the value itself, and fixed fields alone are a packed C struct. A value may
be empty. ``decode(encode(batch)) == batch``, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dsprep.core.schema import Array, Batch, Bytes, Column, Ints, Schema
from dsprep.errors import FormatError, UnsupportedError
from dsprep.formats.fields import ENCODED
from dsprep.formats.stored_rows import RowSpans
from dsprep.layout.model import Part
from dsprep.reading.records import Taken, take_field

MAX_VALUE = (1 << 32) - 1
"""LMDB's limit, in bytes."""


class Values:
    """The encoding of samples of one schema.

    Every value begins with `head` bytes: the table of lengths and the fixed fields.
    """

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.fixed = [f for f in schema if not f.ragged]
        self.ragged = [f for f in schema if f.ragged]
        for f in self.ragged:
            if not f.row_nbytes:
                raise UnsupportedError(
                    f"field {f} has rows of zero bytes, whose number would be lost",
                    expected="a fixed shape, or inner axes above zero",
                )
        self.table = 8 * len(self.ragged) if len(self.ragged) > 1 else 0
        self.head = self.table + schema.fixed_nbytes
        if self.head > MAX_VALUE:
            raise UnsupportedError(
                "a sample is larger than an LMDB value can be",
                expected=f"at most {MAX_VALUE} bytes",
                found=self.head,
            )

    def parts(self) -> dict[str, Part]:
        """Return the place of each field in a value; those behind a ragged one have none."""
        parts, at = dict[str, Part](), self.table
        for f in self.fixed:
            parts[f.name] = Part(at, f.row_nbytes)
            at += f.row_nbytes
        return parts | {f.name: Part() if self.table else Part(at) for f in self.ragged}

    def encode(self, batch: Batch) -> list[RowSpans]:
        """Return the parts of each value, in the order in which they follow one another."""
        fixed = [RowSpans.of(batch[f.name], f) for f in self.fixed]
        ragged = [RowSpans.of(batch[f.name], f) for f in self.ragged]
        if not self.table:
            return fixed + ragged
        table = np.stack([part.lengths for part in ragged], axis=1).astype("<u8")
        return [RowSpans.of_rows(table, self.table), *fixed, *ragged]

    def decode(
        self, data: Bytes, starts: Ints, lengths: Ints, label: Callable[[int], str]
    ) -> Batch:
        """Return the samples whose values are ``data[starts[i]:][:lengths[i]]``.

        Raises `FormatError` if value i does not fit the schema; ``label(i)`` is its name.
        """
        sizes = self._ragged_sizes(data, starts, lengths, label)
        taken, parts, columns = Taken(data, starts, lengths), self.parts(), dict[str, Column]()
        for f in self.fixed:
            part = parts[f.name]
            columns[f.name] = take_field(taken, f, part, part.at or 0, label)
        starts = starts + self.head
        for f, each in zip(self.ragged, sizes, strict=True):
            columns[f.name] = take_field(Taken(data, starts, each), f, Part(), 0, label)
            starts = starts + each
        return {f.name: columns[f.name] for f in self.schema}

    def _ragged_sizes(
        self, data: Bytes, starts: Ints, lengths: Ints, label: Callable[[int], str]
    ) -> list[Ints]:
        """Return the bytes of each ragged field in every value."""
        self.check_lengths(lengths, label)
        left = lengths - self.head
        if not self.table:
            return [left] if self.ragged else []
        table = data[starts[:, None] + np.arange(self.table)].view("<u8")
        bad = (table > left.astype(np.uint64)[:, None]).any(axis=1)
        sizes = list(table.astype(np.int64).T)
        bad |= np.sum(sizes, axis=0) != left
        for f, size in zip(self.ragged, sizes, strict=True):
            bad |= size % f.row_nbytes != 0
        expected = "lengths of fields, of whole rows, that add up to the value's"
        self._refuse(bad, lengths, expected, label)
        return sizes

    def check_lengths(self, lengths: Ints, label: Callable[[int], str]) -> None:
        """Raise `FormatError` unless values of these lengths can be such samples.

        Without a table of lengths in the values, that is all there is to check.
        """
        left, expected = lengths - self.head, f"{self.head} bytes"
        bad = (left < 0) | ((left > 0) & (not self.ragged))
        for f in self.ragged if not self.table else ():
            bad, expected = bad | (left % f.row_nbytes != 0), f"{expected}, and whole rows of {f}"
        self._refuse(bad, lengths, expected, label)

    def _refuse(self, bad: Array, sizes: Ints, expected: str, label: Callable[[int], str]) -> None:
        """Raise `FormatError` for the first value whose `bad` is set."""
        if bad.any():
            i = int(bad.argmax())
            raise FormatError(
                f"the value does not fit {self.schema}",
                where=label(i),
                expected=expected,
                found=f"{sizes[i]} bytes",
                fix=f"name its fields with --field NAME:DTYPE[SHAPE]; {ENCODED}",
            )
