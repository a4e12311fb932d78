"""The wire format of Protocol Buffers, as far as records of samples need it: see "Encoding" there.

A message is a row of fields: a tag, which is the varint ``number << 3 | wire type``, and a value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol


class WireError(ValueError):
    """The bytes are not the message that they should be."""


class Viewed(Protocol):
    """Bytes, one at a time or some of them: a `memoryview`, or what reads them when asked."""

    def __getitem__(self, key: Any, /) -> Any:
        """Return the byte at an index, or the bytes in a slice."""


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


def read_varints(data: Viewed, stop: int) -> Iterator[int]:
    """Yield the numbers of 64 bits up to `stop`; `WireError` if one does not end there."""
    pos = 0
    while pos < stop:
        value, pos = read_varint(data, pos, stop)
        yield value & (1 << 64) - 1


def read_field(data: Viewed, pos: int, stop: int) -> tuple[int, int, int, int]:
    """Return ``(number, wire type, start, stop)`` of the field at `pos` of a message.

    Raises
    ------
    WireError
        If it does not end before `stop`, or is not a field.
    """
    tag, pos = read_varint(data, pos, stop)
    wire = tag & 7
    start = pos
    if wire == 0:
        _, pos = read_varint(data, pos, stop)
    elif wire == 1:
        pos += 8
    elif wire == 5:
        pos += 4
    elif wire == 2:
        length, start = read_varint(data, pos, stop)
        pos = start + length
    else:
        raise WireError(f"wire type {wire}")
    if pos > stop or tag < 8:
        raise WireError("a field reaches outside its message")
    return tag >> 3, wire, start, pos


def read_fields(data: Viewed, pos: int, stop: int) -> list[tuple[int, int, int, int]]:
    """Return what `read_field` returns for every field of the message at ``pos:stop``."""
    numbers = []
    while pos < stop:
        numbers.append(read_field(data, pos, stop))
        pos = numbers[-1][3]
    return numbers


def varint(value: int) -> bytes:
    """Return `value` in the fewest bytes."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
