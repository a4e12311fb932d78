"""The protocol buffer wire format, as far as Caffe and TensorFlow records need it.

A message is a sequence of fields; a field is a tag, ``number << 3 | type``, and a value: type 0 is
a varint (seven bits per byte, lowest first, the eighth says that more follow), type 2 a varint
length and that many bytes. Specification: https://protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Iterable


def varint(value: int) -> bytes:
    """Return `value` as a varint; negative numbers are 64-bit two's complement."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def integer(number: int, value: int) -> bytes:
    """Return a field that holds an integer."""
    return varint(number << 3) + varint(value)


def blob(number: int, value: bytes) -> bytes:
    """Return a field that holds bytes, a string, a message or packed numbers."""
    return varint(number << 3 | 2) + varint(len(value)) + value


def packed(number: int, values: Iterable[int]) -> bytes:
    """Return a field that holds packed integers."""
    return blob(number, b"".join(map(varint, values)))
