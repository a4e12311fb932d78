"""How a sample becomes one LMDB value, and a value a sample again.

LMDB keeps one byte string per key and knows no types. The encoding, used for all that dsprep
writes; a sidecar, or the user, gives the schema when reading:

1. if the sample has two or more ragged fields (`bytes` and `str` are ragged too): for each, in
   schema order, the bytes of its value as little-endian u64;
2. the fixed fields in schema order, each in C order with the dtype's own bytes and byte order,
   without any padding between them; padding inside a structured dtype is zero;
3. the ragged fields in schema order, each its rows one after another; `str` as UTF-8.

So one `bytes` field is the value itself, and fixed fields alone are a packed C struct. A value may
be empty. ``decode(encode(batch)) == batch``, bit for bit.

With one value per group (`Packing`), a value is, integers little-endian:

1. a head of 48 bytes: ``dsprepG`` and the byte 1; the samples of the group, its capacity, and the
   number of its first sample, u64 each; 16 bytes that stand for the schema (BLAKE2b of its JSON);
2. for each fixed field, in schema order: its values of all samples in C order, as one array of
   shape ``(capacity, *shape)``, with the dtype's own bits; padding in structured dtypes is zero;
3. for each ragged field (`bytes` and `str` too): the bytes of each sample's value as u64, shape
   ``(capacity,)``;
4. for each ragged field: the values of all samples one after another.

Where groups are even, the capacity of all is that of the first. The last one may have fewer
samples, and zeros in the places of the others: so a field has the same offset in every value,
and is an array in chunks for the sidecar. Otherwise the capacity is the number of samples.

The sidecar has the fields; the head makes sure that they are those of the file.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import as_strided

from dsprep.core.groups import Grouping
from dsprep.core.schema import (
    Arena,
    Array,
    Batch,
    Bytes,
    Column,
    Field,
    Ints,
    Ragged,
    Schema,
    without_padding,
)
from dsprep.core.spans import move_spans, offsets_of
from dsprep.errors import FormatError, UnsupportedError

MAX_VALUE = (1 << 32) - 1
"""LMDB's limit, in bytes."""


@dataclass(frozen=True)
class ValuePart:
    """What one field, or the table of lengths, adds to each of n values.

    Value i gets ``data[starts[i]:][:lengths[i]]``; `data` is uint8, 1-D and contiguous.
    """

    data: Bytes
    starts: Ints
    lengths: Ints


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

    def encode(self, batch: Batch) -> list[ValuePart]:
        """Return the parts of each value, in the order in which they follow one another."""
        fixed = [_fixed_part(batch[f.name], f.row_nbytes) for f in self.fixed]
        ragged = [_ragged_part(batch[f.name], f) for f in self.ragged]
        if not self.table:
            return fixed + ragged
        table = np.stack([part.lengths for part in ragged], axis=1).astype("<u8")
        return [_fixed_part(table, self.table), *fixed, *ragged]

    def decode(self, data: Bytes, lengths: Ints, label: Callable[[int], str]) -> Batch:
        """Return the samples whose values are back to back in `data`, of these lengths.

        Raises `FormatError` if value i does not fit the schema; ``label(i)`` is its name.
        """
        offsets = offsets_of(lengths)
        sizes = self.ragged_sizes(data, offsets, label)
        heads = self._heads(data, offsets)
        columns: Batch = {}
        at = self.table
        for f in self.fixed:
            columns[f.name] = _column(heads[:, at : at + f.row_nbytes], f)
            at += f.row_nbytes
        starts = offsets[:-1] + self.head
        for f, length in zip(self.ragged, sizes, strict=True):
            ends = offsets_of(length)
            flat = np.empty(int(ends[-1]), np.uint8)
            move_spans(data, starts, length, flat, ends[:-1])
            starts = starts + length
            rows = flat.view(f.dtype).reshape(-1, *f.inner)
            columns[f.name] = Ragged.from_lengths(rows, length // f.row_nbytes, f.kind)
        return {f.name: columns[f.name] for f in self.schema}

    def ragged_sizes(self, data: Bytes, offsets: Ints, label: Callable[[int], str]) -> list[Ints]:
        """Return the bytes of each ragged field in each value, checked against the values."""
        lengths = np.diff(offsets)
        self.check_lengths(lengths, label)
        left = lengths - self.head
        if not self.table:
            return [left] if self.ragged else []
        counts = self._heads(data, offsets)[:, : self.table].view("<u8")
        beyond = (counts > left.astype(np.uint64)[:, None]).any(axis=1)
        self._refuse(np.asarray(beyond), lengths, "lengths of fields within the value", label)
        sizes = list(counts.astype(np.int64).T)
        uneven = np.stack(sizes).sum(axis=0) != left
        self._refuse(
            np.asarray(uneven), lengths, "lengths of fields that add up to the value's", label
        )
        for f, size in zip(self.ragged, sizes, strict=True):
            self._refuse(size % f.row_nbytes != 0, size, f"whole rows of {f}", label)
        return sizes

    def check_lengths(self, lengths: Ints, label: Callable[[int], str]) -> None:
        """Raise `FormatError` unless values of these lengths can be such samples.

        Without a table of lengths in the values, that is all there is to check.
        """
        left = lengths - self.head
        least = "at least " if self.ragged else ""
        bad = (left < 0) | ((left > 0) & (not self.ragged))
        self._refuse(bad, lengths, f"{least}{self.head} bytes", label)
        if self.ragged and not self.table:
            f = self.ragged[0]
            self._refuse(left % f.row_nbytes != 0, left, f"whole rows of {f}", label)

    def _refuse(self, bad: Array, found: Ints, expected: str, label: Callable[[int], str]) -> None:
        """Raise `FormatError` for the first value whose `bad` is set."""
        if bad.any():
            i = int(bad.argmax())
            raise FormatError(
                f"the value does not fit {self.schema}",
                where=label(i),
                expected=expected,
                found=f"{found[i]} bytes",
                fix="name its fields with --field NAME:DTYPE[SHAPE]",
            )

    def _heads(self, data: Bytes, offsets: Ints) -> Bytes:
        """Return the first `head` bytes of each value: uint8, shape ``(n, head)``."""
        n = len(offsets) - 1
        out = np.empty(n * self.head, np.uint8)
        places = np.arange(n, dtype=np.int64) * self.head
        move_spans(data, offsets[:-1], np.full(n, self.head, np.int64), out, places)
        return out.reshape(n, self.head)


def total_lengths(parts: list[ValuePart]) -> Ints:
    """Return the bytes of each value: int64, shape ``(n,)``."""
    sizes = parts[0].lengths
    for part in parts[1:]:
        sizes = sizes + part.lengths
    return sizes


def join(parts: list[ValuePart], sizes: Ints, arena: Arena) -> Bytes:
    """Return the values back to back: uint8, shape ``(sum(sizes),)``."""
    n = len(sizes)
    if len(parts) == 1:
        part = parts[0]
        if not n or (np.diff(part.starts) == part.lengths[:-1]).all():
            start = int(part.starts[0]) if n else 0
            return part.data[start : start + int(sizes.sum())]
    places = offsets_of(sizes)
    out = arena.empty("write.values", (int(places[-1]),), np.dtype(np.uint8))
    at = places[:-1]
    for part in parts:
        move_spans(part.data, part.starts, part.lengths, out, at)
        at = at + part.lengths
    return out


def _fixed_part(column: Column, width: int) -> ValuePart:
    """Return what `width` bytes per sample add, copied only if a sample's are not contiguous."""
    array = np.asarray(column)
    n = len(array)
    lengths = np.full(n, width, np.int64)
    if not n * width:
        return ValuePart(np.zeros(0, np.uint8), np.zeros(n, np.int64), lengths)
    array = without_padding(array)
    step = array.strides[0] if n > 1 else width
    if step < width or not array[:1].flags.c_contiguous:
        array, step = np.ascontiguousarray(array), width
    rows = array[:1].reshape(-1).view(np.uint8)
    data = as_strided(rows, ((n - 1) * step + width,), (1,), writeable=False)
    return ValuePart(data, np.arange(n, dtype=np.int64) * step, lengths)


def _ragged_part(column: Column, field: Field) -> ValuePart:
    """Return what a ragged field adds."""
    assert isinstance(column, Ragged)  # the schema says so
    values = np.ascontiguousarray(without_padding(column.values))
    data = values.reshape(-1).view(np.uint8) if values.size else np.zeros(0, np.uint8)
    offsets = column.offsets * field.row_nbytes
    return ValuePart(data, offsets[:-1], np.diff(offsets))


def _column(rows: Bytes, field: Field) -> Array:
    """Return bytes of shape ``(n, row_nbytes)`` as the values of a fixed field."""
    shape = (len(rows), *field.inner)
    if not rows.size:
        return np.empty(shape, field.dtype)
    return rows.view(field.dtype).reshape(shape)


# --- a group as one value ------------------------------------------------------------------

MAGIC = b"dsprepG\1"
HEAD = struct.Struct("<8sQQQ16s")


def is_group(value: bytes) -> bool:
    """Whether a value begins as those of groups do."""
    return value[:8] == MAGIC and len(value) >= HEAD.size


class Packing:
    """The encoding of groups of one schema, for which `digest` stands."""

    def __init__(self, schema: Schema) -> None:
        values = Values(schema)  # what a sample cannot hold, a group cannot
        self.schema, self.fixed, self.ragged = schema, values.fixed, values.ragged
        text = json.dumps(schema.to_json(), sort_keys=True).encode()
        self.digest = hashlib.blake2b(text, digest_size=16).digest()

    def places(self, capacity: int) -> dict[str, int]:
        """Return where each fixed field, and the lengths of each ragged one, begin in a value."""
        places, at = {}, HEAD.size
        for f in self.fixed:
            places[f.name] = at
            at += capacity * f.row_nbytes
        for f in self.ragged:
            places[f.name] = at
            at += 8 * capacity
        return places

    def body(self, capacity: int) -> int:
        """Return the bytes of a value before its ragged values."""
        return HEAD.size + capacity * (self.schema.fixed_nbytes + 8 * len(self.ragged))

    def sizes(self, grouping: Grouping) -> Ints:
        """Return the bytes of each group's value; `UnsupportedError` if LMDB cannot hold one."""
        sizes: Ints = np.array([self.body(n) for n in capacities(grouping).tolist()], np.int64)
        for f in self.ragged:
            if f.name in grouping.rows:
                sizes = sizes + grouping.rows[f.name] * f.row_nbytes
        if int(sizes.max(initial=0)) > MAX_VALUE:
            self.refuse(int(sizes.argmax()), int(sizes.max()))
        return sizes

    def refuse(self, group: int, nbytes: int) -> None:
        """Raise the error for a group that LMDB cannot hold."""
        raise UnsupportedError(
            "a group is larger than an LMDB value can be",
            where=f"group {group}",
            expected=f"at most {MAX_VALUE} bytes",
            found=nbytes,
            fix="choose a smaller --buffer-size, or leave --group-values out",
        )

    def value_schema(self, sizes: Ints) -> Schema:
        """Return the schema of values of these sizes, as the writer of single values takes it."""
        if self.ragged or not len(sizes) or bool((sizes != sizes[0]).any()):
            return Schema((Field.opaque("value"),))
        return Schema((Field("value", np.dtype(np.uint8), (int(sizes[0]),)),))

    def parts(self, batch: Batch, first: int, capacity: int, arena: Arena) -> list[ValuePart]:
        """Return what the value of one group is made of, samples ``first ..``."""
        count = len(next(iter(batch.values())))
        head = HEAD.pack(MAGIC, count, capacity, first, self.digest)
        blocks = [np.frombuffer(head, np.uint8)]
        for f in self.fixed:
            blocks += [
                _flat(np.asarray(batch[f.name]), f.name, arena),
                np.zeros((capacity - count) * f.row_nbytes, np.uint8),
            ]
        columns = []
        for f in self.ragged:
            column = batch[f.name]
            assert isinstance(column, Ragged)  # the schema says so
            table = np.zeros(capacity, "<u8")
            table[:count] = column.lengths * f.row_nbytes
            blocks.append(table.view(np.uint8))
            begin, end = int(column.offsets[0]), int(column.offsets[-1])
            columns.append(_flat(column.values[begin:end], f.name, arena))
        here = np.zeros(1, np.int64)
        return [ValuePart(b, here, np.array([len(b)])) for b in blocks + columns if len(b)]


def capacities(grouping: Grouping) -> Ints:
    """Return for how many samples the value of each group has room."""
    sizes = np.diff(grouping.edges)
    return np.full(len(sizes), sizes.max(initial=0)) if grouping.even else sizes


def _flat(values: Array, name: str, arena: Arena) -> Bytes:
    """Return the bytes of `values` in C order, copied only if they are not contiguous."""
    if not values.size:
        return np.zeros(0, np.uint8)
    values = without_padding(values)
    if not values.flags.c_contiguous:
        copied = arena.empty(f"write.{name}", values.shape, values.dtype)
        copied[...] = values
        values = copied
    return values.reshape(-1).view(np.uint8)
