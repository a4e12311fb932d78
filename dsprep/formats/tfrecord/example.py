"""The wire format of ``tf.train.Example``: where values are in a record, and how to write them.

::

    Example    { Features features = 1; }
    Features   { map<string, Feature> feature = 1; }      (entries { key = 1; value = 2; })
    Feature    { BytesList = 1 | FloatList = 2 | Int64List = 3 }
    BytesList  { repeated bytes value = 1; }
    FloatList  { repeated float value = 1 [packed]; }
    Int64List  { repeated int64 value = 1 [packed]; }

(``tensorflow/core/example/feature.proto``, and Protocol Buffers' "Encoding"). Nothing is copied:
the result is `Spans` in the buffer that holds the records. `parse` takes any one message and judges
it. Records of one dataset nearly always have the same features in the same order and differ in
lengths alone: `parse_together` walks them side by side, accepts only what is certain, and returns
None for anything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import Array, Bytes, Ints
from dsprep.core.spans import offsets_of
from dsprep.formats.protobuf import (
    Spans,
    Together,
    Viewed,
    WireError,
    expect,
    read_fields,
    varint,
)

BYTES, FLOAT, INT64 = 1, 2, 3
TYPES = {BYTES: "bytes", FLOAT: "float", INT64: "int64"}
"""Field number in Feature to the name used in options and messages."""

LARGEST = (1 << 31) - 1
"""Bytes of a message that Protocol Buffers can parse."""
PADDING_TAG = 15 << 3 | 2
"""The first bytes of the padding after the features of an Example."""
PADDED_VARINT = 10
"""Bytes of each int64 that dsprep writes, so that all records have one size."""


@dataclass
class Value:
    """One feature of one record: its list's field number, and its values' ranges in the buffer.

    For `BYTES` each range is one value. For `FLOAT` and `INT64` the ranges, joined, are the
    packed values, whether the record has them packed or not.
    """

    type: int
    ranges: list[tuple[int, int]]


# --- reading ---------------------------------------------------------------------------------


def parse(data: Viewed, start: int, stop: int) -> dict[str, Value]:
    """Return the features of the Example at ``start:stop`` of `data`.

    As in every Protocol Buffers parser, unknown fields are skipped, a key that comes twice counts
    as its last, and a list that comes in parts is joined. Raises `WireError` if it is not an
    Example, or is a SequenceExample with feature lists.
    """
    values: dict[str, Value] = {}
    for number, wire, a, b in read_fields(data, start, stop):
        if number == 2:
            raise WireError("feature lists, as in a SequenceExample")
        if number != 1:
            continue
        if wire != 2:
            raise WireError("features are not a message")
        for inner, wire_inner, c, d in read_fields(data, a, b):
            if inner != 1 or wire_inner != 2:
                raise WireError("an unknown field among the features")
            key, value = _entry(data, c, d)
            if value is None:
                values.pop(key, None)
            else:
                values[key] = value
    return values


def _entry(data: Viewed, start: int, stop: int) -> tuple[str, Value | None]:
    key, value = b"", None
    for number, wire, a, b in read_fields(data, start, stop):
        if wire != 2:
            raise WireError("a map entry of numbers")
        if number == 1:
            key = bytes(data[a:b])
        elif number == 2:
            value = _feature(data, a, b)
    try:
        return key.decode(), value
    except UnicodeDecodeError as error:
        raise WireError("a feature's name is not UTF-8") from error


def _feature(data: Viewed, start: int, stop: int) -> Value | None:
    value: Value | None = None
    for number, wire, a, b in read_fields(data, start, stop):
        if number not in TYPES or wire != 2:
            raise WireError("a feature of an unknown list")
        if value is None or value.type != number:
            value = Value(number, [])
        for inner, wire_inner, c, d in read_fields(data, a, b):
            plain = {BYTES: 2, FLOAT: 5, INT64: 0}[number]
            if inner != 1 or wire_inner not in (plain, 2):
                raise WireError(f"not a value of a {TYPES[number]} list")
            if number == FLOAT and (d - c) % 4:
                raise WireError("half a float")
            if d > c or number == BYTES:
                value.ranges.append((c, d))
    return value


def join(values: Sequence[Value | None], type_: int) -> Spans:
    """Return one feature of n records, of which some may lack it."""
    ranges = [r for v in values if v is not None for r in v.ranges]
    starts, stops = np.array(ranges, np.int64).reshape(-1, 2).T
    counts = np.array([0 if v is None else len(v.ranges) for v in values], np.int64)
    totals = np.diff(offsets_of(stops - starts)[offsets_of(counts)])
    return Spans(starts.copy(), stops - starts, totals, counts, type_)


def parse_together(buffer: Bytes, starts: Ints, lengths: Ints) -> dict[str, Spans] | None:
    """Return the features of records that have the same features in the same order, one range each.

    The messages are ``buffer[start:start + length]``. None if they differ in more than the lengths
    of their values, or are anything out of the ordinary.
    """
    begin = int(starts[0])
    try:
        first = parse(buffer.data, begin, begin + int(lengths[0]))
        return _walk(Together(buffer, starts, starts + lengths), first)
    except WireError:
        return None


def _walk(at: Together, first: Mapping[str, Value]) -> dict[str, Spans]:
    at.take(b"\x0a")
    stop = at.stops()
    padded = stop != at.ends
    if padded.any():  # behind the features there may be padding, and nothing else
        padding = Together(at.buffer, stop[padded], at.ends[padded])
        padding.take(bytes([PADDING_TAG]))
        expect((padding.stops() == padding.ends).all())
    features = {}
    for name, value in first.items():
        expect(len(value.ranges) < 2)
        nbytes = sum(b - a for a, b in value.ranges)
        head = entry_head(name.encode(), value.type, nbytes)
        if at.are_at(head):
            at.at += len(head)
            sizes = np.full(len(stop), nbytes, np.int64)
        else:
            sizes = _take_entry(at, name.encode(), value.type)
        features[name] = Spans(at.at.copy(), sizes, sizes, type=value.type)
        at.at += sizes
    expect((at.at == stop).all())
    return features


def _take_entry(at: Together, name: bytes, type_: int) -> Ints:
    """Return the lengths of the values of a feature, which each has next, and go to them."""
    at.take(b"\x0a")
    stop = at.stops()
    at.take(b"\x0a" + varint(len(name)) + name + b"\x12")
    expect((at.stops() == stop).all())
    at.take(bytes([type_ << 3 | 2]))
    expect((at.stops() == stop).all())
    full: NDArray[np.bool_] = at.at < stop  # an empty list has no values at all
    expect((type_ != BYTES or full.all()) and (at.peek(1)[full] == 0x0A).all())
    before = at.at.copy()
    at.at += 1
    sizes = np.where(full, at.number(), 0)
    at.at = np.where(full, at.at, before)
    expect((at.at + sizes == stop).all() and (type_ != FLOAT or not (sizes % 4).any()))
    return sizes


# --- writing ---------------------------------------------------------------------------------


@lru_cache(1 << 14)
def entry_head(name: bytes, type_: int, nbytes: int) -> bytes:
    """Return what comes before the `nbytes` of values of a feature that has one range."""
    inner = b"\x0a" + varint(nbytes) if nbytes or type_ == BYTES else b""
    values = bytes([type_ << 3 | 2]) + varint(len(inner) + nbytes) + inner
    feature = b"\x0a" + varint(len(name)) + name + b"\x12" + varint(len(values) + nbytes) + values
    return b"\x0a" + varint(len(feature) + nbytes) + feature


@lru_cache(1 << 14)
def example_head(nbytes: int) -> bytes:
    """Return what comes before the `nbytes` of all entries."""
    return b"\x0a" + varint(nbytes)


def padding_head(nbytes: int) -> bytes:
    """Return how `nbytes` of padding behind an Example's features begin; zeros follow.

    It is field 15, bytes, which Example does not have and every parser skips. 1 byte is too few.
    The length takes more bytes than it needs where no other number would come out right.
    """
    width = next(w for w in range(1, 6) if nbytes - 1 - w < 1 << 7 * w)
    length = nbytes - 1 - width
    digits = [length >> 7 * k & 127 | 128 for k in range(width)]
    digits[-1] &= 127
    return bytes([PADDING_TAG, *digits])


def encode_varints(values: Array, out: NDArray[np.uint8]) -> None:
    """Write integers as varints of `PADDED_VARINT` bytes; `out` is ``(*values.shape, 10)``."""
    bits = values.astype(np.int64).view(np.uint64)
    for k in range(PADDED_VARINT - 1):
        out[..., k] = (bits >> np.uint64(7 * k)).astype(np.uint8) | 128
    out[..., PADDED_VARINT - 1] = bits >> np.uint64(63)
