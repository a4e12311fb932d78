"""The wire format of ``tf.train.Example``: where values are in a record, and how to write them.

::

    Example    { Features features = 1; }
    Features   { map<string, Feature> feature = 1; }      (entries { key = 1; value = 2; })
    Feature    { BytesList = 1 | FloatList = 2 | Int64List = 3 }
    BytesList  { repeated bytes value = 1; }
    FloatList  { repeated float value = 1 [packed]; }
    Int64List  { repeated int64 value = 1 [packed]; }

(``tensorflow/core/example/feature.proto``, and Protocol Buffers' "Encoding"). Nothing is copied:
the result is `FeatureSpans` in the buffer that holds the records. `parse` takes any one message and
judges it; `batch_parser.parse_together` walks records of the same features side by side, and
returns None for others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import Array
from dsprep.formats.protobuf import Viewed, WireError, read_fields, varint

BYTES, FLOAT, INT64 = 1, 2, 3
TYPES = {BYTES: "bytes", FLOAT: "float", INT64: "int64"}
"""Field number in Feature to the name used in options and messages."""

LARGEST = (1 << 31) - 1
"""Bytes of a message that Protocol Buffers can parse."""
PADDING_TAG = 15 << 3 | 2
"""What padding behind the features of an Example begins with."""
PADDED_VARINT = 10
"""Bytes of each int64 that dsprep writes, so that all records have one size."""


@dataclass
class Value:
    """One feature of one record: its list's field number, and its values' ranges in the buffer.

    For `BYTES` each range is one value. For `FLOAT` and `INT64` the ranges, joined, are the
    packed values, whether the record has them packed or not; `loose` says that an int64 is not, so
    that its own bytes state where it ends.
    """

    type: int
    ranges: list[tuple[int, int]]
    loose: bool = False


@dataclass
class FeatureSpans:
    """One feature of n records.

    The ranges ``starts`` and ``lengths`` in the buffer are in the order of the records, of which
    each has `totals` bytes in `counts` ranges; None: in one.
    """

    type: int
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    totals: NDArray[np.int64]
    counts: NDArray[np.int64] | None = None


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
            value.loose |= wire_inner == 0
            if d > c or number == BYTES:
                value.ranges.append((c, d))
    return value


def glue(features: Mapping[str, Value], begin: int, end: int) -> list[tuple[int, int]] | None:
    """Return the ranges of the message ``begin:end`` outside of its values.

    Messages of one length that agree in them have the same features at the same places. None if
    a feature has several ranges, or no byte string where there should be one.
    """
    if any(len(v.ranges) > 1 or (v.type == BYTES and not v.ranges) for v in features.values()):
        return None
    ranges = sorted(r for value in features.values() for r in value.ranges)
    edges = [begin, *(edge for r in ranges for edge in r), end]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def join(values: Sequence[Value | None], type_: int) -> FeatureSpans:
    """Return one feature of n records, of which some may lack it, as `FeatureSpans`."""
    ranges = [r for v in values if v is not None for r in v.ranges]
    table = np.array(ranges, np.int64).reshape(-1, 2)
    counts = np.array([0 if v is None else len(v.ranges) for v in values], np.int64)
    lengths = table[:, 1] - table[:, 0]
    sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    return FeatureSpans(type_, table[:, 0].copy(), lengths, np.diff(sums[edges]), counts=counts)


def decode_varints(
    data: NDArray[np.uint8], totals: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the int64 values in `data`, and how many each record has.

    The varints of the records are back to back, `totals` bytes of each. Raises `WireError` if one
    does not end within its record and 10 bytes.
    """
    ends = np.flatnonzero(data < 128)
    starts = np.concatenate([np.zeros(1, np.int64), ends + 1])[:-1]
    edges = np.cumsum(totals)
    sizes = ends - starts + 1
    last = edges[totals > 0] - 1
    if (data[last] > 127).any() or (sizes > 10).any():
        raise WireError("a varint does not end")
    values = np.zeros(len(ends), np.uint64)
    for k in range(int(sizes.max(initial=0))):
        has = sizes > k
        part = (data[starts[has] + k] & 127).astype(np.uint64)
        values[has] |= part << np.uint64(7 * k)
    before = np.concatenate([np.zeros(1, np.int64), np.searchsorted(ends, edges)])
    return values.view(np.int64), np.diff(before)


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
