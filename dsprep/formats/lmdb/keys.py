"""The keys that dsprep gives to samples: from a sample's number, rising as the numbers rise.

LMDB sorts keys as byte strings. Numbers sort as their samples do only if all have the same width,
so a key is a format string with the one field ``index``, decimal or hexadecimal, padded with
zeros: ``{index:08d}``, ``img_{index:010d}``, ``{index:08x}``. The name ``u64be`` stands for 8-byte
big-endian integers. Whether the keys rise follows from the width alone, without making them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from dsprep.core.schema import Bytes, Ints
from dsprep.errors import UsageError
from dsprep.formats.options import WriteOptions

MAX_KEY = 511
"""LMDB's limit, in bytes."""

_FORMAT = re.compile(r"([^{}]*)\{index(?::(?:0(\d{1,3}))?([dxX]?))?\}([^{}]*)", re.S)
_DIGITS = {"": b"0123456789", "d": b"0123456789", "x": b"0123456789abcdef"}
_DIGITS["X"] = _DIGITS["x"].upper()


@dataclass(frozen=True)
class Keys:
    """The keys of a dataset: ``before``, the number in `width` digits, ``after``.

    `digits` are those of the number's base; without any it is a big-endian integer of 8 bytes.
    """

    before: bytes
    after: bytes
    width: int
    digits: bytes

    @property
    def nbytes(self) -> int:
        """Bytes of every key."""
        return len(self.before) + self.width + len(self.after)

    def make(self, index: Ints) -> Bytes:
        """Return the keys of the samples with these numbers: uint8, shape ``(n, nbytes)``."""
        out = np.empty((len(index), self.nbytes), np.uint8)
        if not self.digits:
            out[:] = index.astype(">u8").view(np.uint8).reshape(-1, 8)
            return out
        first = len(self.before)
        out[:, :first] = np.frombuffer(self.before, np.uint8)
        out[:, first + self.width :] = np.frombuffer(self.after, np.uint8)
        table, base = np.frombuffer(self.digits, np.uint8), len(self.digits)
        for at in range(first + self.width - 1, first - 1, -1):
            rest = index // base
            out[:, at] = table[index - rest * base]
            index = rest
        return out

    def one(self, index: int) -> bytes:
        """Return the key of sample `index`."""
        return self.make(np.array([index])).tobytes()


def plan_keys(key_format: str, count: int) -> Keys:
    """Return the keys of `count` samples; the default format grows to the width it needs.

    Raises `UsageError` if the keys would not rise with the samples, or are too long for LMDB.
    """
    if key_format == "u64be":
        return Keys(b"", b"", 8, b"")
    match = _FORMAT.fullmatch(key_format)
    if match is None:
        raise UsageError(
            f"keys {key_format!r} are not understood",
            expected="text and one field {index}, padded with zeros such as {index:08d}; or u64be",
        )
    before, padded, base, after = match.groups()
    digits = _DIGITS[base or ""]
    width = int(padded or 1)
    last = max(0, count - 1)
    needed = len(f"{last:x}" if len(digits) == 16 else str(last))
    if key_format == WriteOptions().key_format:
        width = max(width, needed)
    if needed > max(1, width):
        raise UsageError(
            f"keys {key_format} do not sort in sample order: numbers have up to {needed} digits",
            fix=f"use {{index:0{max(8, needed)}d}}",
        )
    keys = Keys(before.encode(), after.encode(), max(1, width), digits)
    if not 1 <= keys.nbytes <= MAX_KEY:
        raise UsageError(
            f"keys {key_format!r} are {keys.nbytes} bytes long", expected=f"1 to {MAX_KEY}"
        )
    return keys
