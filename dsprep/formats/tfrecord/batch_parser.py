"""Many messages of ``tf.train.Example`` taken apart at once, in as many steps as one of them has.

Records of one dataset nearly always have the same features in the same order and differ in lengths
alone. All are walked side by side, with one numpy operation per step. Only what is certain is
accepted: anything else ends the walk, and ``example.parse`` judges the records one by one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dsprep.formats.tfrecord.example import BYTES, FLOAT, PADDING_TAG, TYPES, FeatureSpans


class Lockstep:
    """One position in each of n messages, all moved by the same rules.

    `Disagree` is raised as soon as the messages differ in anything but lengths.
    """

    class Disagree(Exception):
        """The messages differ; a signal, not an error."""

    def __init__(self, buffer: NDArray[np.uint8], starts: NDArray[np.int64]) -> None:
        self.buffer, self.pos = buffer, starts.copy()
        self.limit = len(buffer)

    def peek(self, count: int) -> NDArray[np.uint8]:
        """Return the next `count` bytes of each, shape ``(n, count)``."""
        if int(self.pos.max()) + count > self.limit:
            raise self.Disagree
        window: NDArray[np.uint8] = self.buffer[self.pos[:, None] + np.arange(count)]
        return window

    def same(self, count: int) -> bytes:
        """Return the next `count` bytes, which all share."""
        bytes_ = self.peek(count)
        if not (bytes_ == bytes_[0]).all():
            raise self.Disagree
        self.pos += count
        return bytes(bytes_[0])

    def length(self) -> NDArray[np.int64]:
        """Return the varint of at most 5 bytes that each has next."""
        value = np.zeros(len(self.pos), np.int64)
        more = np.ones(len(self.pos), bool)
        for shift in range(0, 35, 7):
            byte = self.peek(1)[:, 0].astype(np.int64)
            value += np.where(more, (byte & 127) << shift, 0)
            self.pos += more
            more &= byte > 127
            if not more.any():
                return value
        raise self.Disagree

    def expect(self, condition: bool | np.bool_) -> None:
        """Go on only if `condition`."""
        if not condition:
            raise self.Disagree


def parse_together(
    buffer: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> dict[str, FeatureSpans] | None:
    """Return the features of records that have the same features in the same order, one range each.

    The messages are ``buffer[start:start + length]``. None if they differ in more than the lengths
    of their values, or are anything out of the ordinary.
    """
    try:
        return _walk(Lockstep(buffer, starts), starts + lengths)
    except Lockstep.Disagree:
        return None


def _walk(at: Lockstep, ends: NDArray[np.int64]) -> dict[str, FeatureSpans]:
    features: dict[str, FeatureSpans] = {}
    at.expect(at.same(1) == b"\x0a")
    ends = _before_padding(at, ends)
    while (at.pos < ends).any():
        at.expect((at.pos < ends).all() and at.same(1) == b"\x0a")
        entry = at.length() + at.pos
        at.expect((entry <= ends).all() and at.same(1) == b"\x0a")
        size = at.length()
        at.expect((size == size[0]).all() and size[0] < 1 << 12)
        key = at.same(int(size[0])).decode("utf-8", "replace")
        at.expect(key not in features and "\ufffd" not in key and at.same(1) == b"\x12")
        at.expect((at.length() + at.pos == entry).all())
        tag = at.same(1)[0]
        number = tag >> 3
        at.expect(tag & 7 == 2 and number in TYPES)
        stop = at.length() + at.pos
        at.expect((stop == entry).all())
        full = at.pos < stop  # an empty list has no values at all
        if full.any():
            value_at, values = _packed(at, full)
        else:
            value_at, values = at.pos.copy(), np.zeros(len(ends), np.int64)
        at.expect((value_at + values == entry).all())
        at.expect(number != FLOAT or not (values % 4).any())
        at.expect(number != BYTES or full.all())
        features[key] = FeatureSpans(number, value_at, values, values)
        at.pos = entry.copy()
    return features


def _before_padding(at: Lockstep, ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where the features end, behind which there may be padding, and nothing else."""
    stop = at.length() + at.pos
    padded = stop != ends
    if padded.any():
        at.expect((stop <= ends).all())
        _expect_padding(Lockstep(at.buffer, stop[padded]), ends[padded])
    return stop


def _expect_padding(at: Lockstep, ends: NDArray[np.int64]) -> None:
    """Go on only if all are at a field of padding that ends at `ends`."""
    at.expect(at.same(1)[0] == PADDING_TAG)
    at.expect((at.length() + at.pos == ends).all())


TAIL = 6
"""Bytes behind the features that are looked at: the tag and the length of padding."""


def is_padding(tails: NDArray[np.uint8], nbytes: NDArray[np.int64]) -> bool:
    """Whether messages end in padding and nothing else.

    `tails` are the 6 bytes behind the features of each, shape ``(n, 6)``, of which `nbytes` count:
    at least 1.
    """
    starts = np.arange(len(tails), dtype=np.int64) * tails.shape[1]
    at = Lockstep(np.ascontiguousarray(tails).reshape(-1), starts)
    try:
        _expect_padding(at, starts + nbytes)
    except Lockstep.Disagree:
        return False
    return True


def _packed(at: Lockstep, full: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where the one value of each list begins and how long it is; 0 where not `full`."""
    before = at.pos.copy()
    at.expect((at.peek(1)[full] == 0x0A).all())
    at.pos += 1
    sizes = at.length()
    return np.where(full, at.pos, before), np.where(full, sizes, 0)
