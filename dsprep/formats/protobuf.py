"""The wire format of Protocol Buffers, as far as records of samples need it: see "Encoding" there.

A message is a row of fields: a tag, which is the varint ``number << 3 | wire type``, and a value.
Nothing is copied: values are `Spans` of the buffer that holds the messages. `read_fields` takes any
one message; messages that differ in lengths and values alone are walked `Together`, with one numpy
operation for each step that one of them takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided

from dsprep.core.schema import Arena, Bytes, Ints, new_array
from dsprep.core.spans import move_spans, offsets_of

Viewed: TypeAlias = Any
"""Bytes, one at a time or a slice of them: a `memoryview`, or what reads them when asked."""


class WireError(ValueError):
    """The bytes are not the message that they should be."""


@dataclass
class Spans:
    """The values of one field of n messages.

    The ranges ``starts`` and ``lengths`` in the buffer are in the order of the messages, of which
    each has `totals` bytes in `counts` ranges; None: in one. `type` is what the caller calls it.
    """

    starts: Ints
    lengths: Ints
    totals: Ints
    counts: Ints | None = None
    type: int = 0

    def gather(self, buffer: Bytes, arena: Arena | None = None, key: str = "") -> Bytes:
        """Return the bytes of all ranges, one after another; of one range a view."""
        if len(self.lengths) == 1:
            return buffer[int(self.starts[0]) :][: int(self.lengths[0])]
        out = new_array(arena, key, (int(self.lengths.sum()),), np.dtype(np.uint8))
        move_spans(buffer, self.starts, self.lengths, out, offsets_of(self.lengths)[:-1])
        return out

    def rows(self, buffer: Bytes, nbytes: int, arena: Arena | None = None, key: str = "") -> Bytes:
        """Return values of `nbytes` each, shape ``(n, nbytes)``: a view if evenly spaced."""
        count, steps = len(self.totals), np.diff(self.starts)
        if self.counts is None and count > 1 and steps[0] >= nbytes and (steps == steps[0]).all():
            first = buffer[int(self.starts[0]) :]
            return as_strided(first, (count, nbytes), (int(steps[0]), 1), writeable=False)
        return self.gather(buffer, arena, key).reshape(count, nbytes)


def read_varint(data: Viewed, pos: int, stop: int) -> tuple[int, int]:
    """Return ``(value, end)`` of the varint at `pos`, which has to end before `stop`."""
    value = shift = 0
    while pos < stop and shift < 70:
        byte = data[pos]
        pos += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, pos
        shift += 7
    raise WireError("a varint does not end")


def read_fields(data: Viewed, pos: int, stop: int) -> list[tuple[int, int, int, int]]:
    """Return ``(number, wire type, start, stop)`` of every field of the message at ``pos:stop``.

    Raises
    ------
    WireError
        If one does not end before `stop`, or is not a field.
    """
    fields = []
    while pos < stop:
        tag, start = read_varint(data, pos, stop)
        wire = tag & 7
        if wire == 0:
            _, pos = read_varint(data, start, stop)
        elif wire == 2:
            length, start = read_varint(data, start, stop)
            pos = start + length
        elif wire in (1, 5):
            pos = start + (8 if wire == 1 else 4)
        else:
            raise WireError(f"wire type {wire}")
        if pos > stop or tag < 8:
            raise WireError("a field reaches outside its message")
        fields.append((tag >> 3, wire, start, pos))
    return fields


def varint(value: int) -> bytes:
    """Return `value` in the fewest bytes."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode_varints(data: Bytes, totals: Ints) -> tuple[Ints, Ints]:
    """Return the int64 values in `data`, and how many each message has.

    The varints of the messages are back to back, `totals` bytes of each. Raises `WireError` if one
    does not end within its message and 10 bytes.
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


# --- many messages ---------------------------------------------------------------------------


def expect(condition: bool | np.bool_) -> None:
    """Go on only if `condition`."""
    if not condition:
        raise WireError("the messages are not alike")


class Together:
    """A position in each of n messages; `WireError` as soon as one is not as the others.

    `at` are the positions in `buffer`, `ends` where the messages end.
    """

    def __init__(self, buffer: Bytes, starts: Ints, ends: Ints) -> None:
        self.buffer, self.at, self.ends = buffer, starts.copy(), ends

    def peek(self, count: int) -> Bytes:
        """Return the next `count` bytes of each, shape ``(n, count)``; anything behind the end."""
        positions = self.at[:, None] + np.arange(count)
        if int(self.at.max()) + count > len(self.buffer):
            positions = np.minimum(positions, len(self.buffer) - 1)
        window: Bytes = self.buffer[positions]
        return window

    def are_at(self, data: bytes) -> bool:
        """Return whether all have these bytes next."""
        return bool((self.peek(len(data)) == np.frombuffer(data, np.uint8)).all())

    def take(self, data: bytes) -> None:
        """Go behind these bytes, which all have next."""
        expect(self.are_at(data))
        self.at += len(data)

    def number(self) -> Ints:
        """Return the varint that each has next, and go behind it."""
        value = np.zeros(len(self.at), np.int64)
        more = np.ones(len(self.at), bool)
        for shift in range(0, 70, 7):
            byte = self.peek(1)[:, 0].astype(np.int64)
            value += np.where(more, (byte & 127) << shift, 0)
            self.at += more
            more &= byte > 127
            if not more.any():
                return value
        raise WireError("a varint does not end")

    def stops(self) -> Ints:
        """Return where the bytes end whose length each has next, and go behind the length."""
        lengths = self.number()
        expect(((lengths >= 0) & (lengths <= self.ends - self.at)).all())
        return lengths + self.at

    def fields(
        self, first: Sequence[tuple[int, int, int, int]]
    ) -> list[tuple[int, int, Ints, Ints]]:
        """Return what `read_fields` does for each, of messages with the fields of the `first`."""
        fields = []
        for number, wire, _, _ in first:
            self.take(varint(number << 3 | wire))
            start = self.at.copy()
            if wire == 0:
                self.number()
            elif wire == 2:
                stop = self.stops()
                start, self.at = self.at.copy(), stop
            else:
                self.at += 8 if wire == 1 else 4
            fields.append((number, wire, start, self.at.copy()))
        expect((self.at == self.ends).all())
        return fields
