"""Many messages of ``tf.train.Example`` taken apart at once, in as many steps as one of them has.

Records of one dataset nearly always have the same features in the same order and differ in lengths
alone. All are walked side by side, with one numpy operation per step, in the order that the first
one has. Only what is certain is accepted: of anything else `example.parse` judges each record.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import Bytes, Ints
from dsprep.formats.protobuf import WireError, varint
from dsprep.formats.tfrecord.example import (
    BYTES,
    FLOAT,
    PADDING_TAG,
    FeatureSpans,
    Value,
    entry_head,
    parse,
)


def parse_together(buffer: Bytes, starts: Ints, lengths: Ints) -> dict[str, FeatureSpans] | None:
    """Return the features of records that have the same features in the same order, one range each.

    The messages are ``buffer[start:start + length]``. None if they differ in more than the lengths
    of their values, or are anything out of the ordinary.
    """
    begin = int(starts[0])
    try:
        first = parse(buffer.data, begin, begin + int(lengths[0]))
        return _walk(_Positions(buffer, starts), starts + lengths, first)
    except WireError:
        return None


class _Positions:
    """A position in each of n messages; `WireError` as soon as one is not as the others."""

    def __init__(self, buffer: Bytes, starts: Ints) -> None:
        self.buffer, self.at = buffer, starts.copy()

    def peek(self, count: int) -> Bytes:
        """Return the next `count` bytes of each, shape ``(n, count)``; anything behind the end."""
        places = self.at[:, None] + np.arange(count)
        if int(self.at.max()) + count > len(self.buffer):
            places = np.minimum(places, len(self.buffer) - 1)
        window: Bytes = self.buffer[places]
        return window

    def are_at(self, data: bytes) -> bool:
        """Whether all have these bytes next."""
        return bool((self.peek(len(data)) == np.frombuffer(data, np.uint8)).all())

    def take(self, data: bytes) -> None:
        """Go behind these bytes, which all have next."""
        expect(self.are_at(data))
        self.at += len(data)

    def length(self) -> Ints:
        """Return the varint of at most 5 bytes that each has next."""
        value = np.zeros(len(self.at), np.int64)
        more = np.ones(len(self.at), bool)
        for shift in range(0, 35, 7):
            byte = self.peek(1)[:, 0].astype(np.int64)
            value += np.where(more, (byte & 127) << shift, 0)
            self.at += more
            more &= byte > 127
            if not more.any():
                return value
        raise WireError("a length of more than 5 bytes")


def expect(condition: bool | np.bool_) -> None:
    """Go on only if `condition`."""
    if not condition:
        raise WireError("the records are not alike")


def _walk(at: _Positions, ends: Ints, first: Mapping[str, Value]) -> dict[str, FeatureSpans]:
    at.take(b"\x0a")
    stop = at.length() + at.at
    padded = stop != ends
    if padded.any():  # behind the features there may be padding, and nothing else
        padding = _Positions(at.buffer, stop[padded])
        padding.take(bytes([PADDING_TAG]))
        expect((padding.length() + padding.at == ends[padded]).all())
    features = {}
    for name, value in first.items():
        expect(len(value.ranges) < 2 and not value.loose)
        nbytes = sum(b - a for a, b in value.ranges)
        head = entry_head(name.encode(), value.type, nbytes)
        if at.are_at(head):
            at.at += len(head)
            sizes = np.full(len(ends), nbytes, np.int64)
        else:
            sizes = _entry(at, name.encode(), value.type)
        features[name] = FeatureSpans(value.type, at.at.copy(), sizes, sizes)
        at.at += sizes
    expect((at.at == stop).all())
    return features


def _entry(at: _Positions, name: bytes, type_: int) -> Ints:
    """Return the lengths of the values of a feature, which each has next, and go to them."""
    at.take(b"\x0a")
    stop = at.length() + at.at
    at.take(b"\x0a" + varint(len(name)) + name + b"\x12")
    expect((at.length() + at.at == stop).all())
    at.take(bytes([type_ << 3 | 2]))
    expect((at.length() + at.at == stop).all())
    full: NDArray[np.bool_] = at.at < stop  # an empty list has no values at all
    expect(type_ != BYTES or full.all())
    before = at.at.copy()
    expect((at.peek(1)[full] == 0x0A).all())
    at.at += 1
    sizes = np.where(full, at.length(), 0)
    at.at = np.where(full, at.at, before)
    expect((at.at + sizes == stop).all() and (type_ != FLOAT or not (sizes % 4).any()))
    return sizes
