"""CRCs of byte ranges that are written in parts, in any order, perhaps with holes between them.

The CRC of two ranges one behind another follows from their CRCs and the length of the second:
appending n zero bytes multiplies a CRC by x^(8n) modulo the polynomial (Mark Adler's
``crc32_combine`` in zlib rests on the same fact).
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from dsprep.core.schema import Array, Bytes
from dsprep.errors import FormatError
from dsprep.storage.base import Handle
from dsprep.storage.ranges import CALL_NBYTES, Buffer, as_bytes, pwrite_all

_WINDOW = 4 << 20  # bytes read back at a time
ONES = 0xFFFFFFFF


def crc32c(data: Array | bytes, crc: int = 0) -> int:
    """Return the CRC-32C of `data` behind what has the CRC `crc`; releases the GIL.

    `data` is bytes, or a C-contiguous array of any dtype.
    """
    from google_crc32c import extend

    view: Any = data if isinstance(data, bytes) else as_bytes(data)
    return int(extend(crc, _buffer(view)))


def _buffer(view: Any) -> Any:
    return view if isinstance(view, bytes) else np.frombuffer(view, np.uint8)


def pwrite_crc32c(fd: int, buffers: Sequence[Buffer], offset: int, crc: int = 0) -> int:
    """Write `buffers` one after another; return their CRC-32C behind what has the CRC `crc`.

    Each part is summed right before it is written, when that brings it into the cache.
    """
    at, call, size = offset, list[memoryview](), 0
    for buffer in buffers:
        view = as_bytes(buffer) if isinstance(buffer, np.ndarray) else memoryview(buffer)
        for begin in range(0, len(view), CALL_NBYTES):
            part = view[begin : begin + CALL_NBYTES]
            if size + len(part) > CALL_NBYTES:
                at += pwrite_all(fd, call, at)
                call, size = [], 0
            crc = crc32c(np.frombuffer(part, np.uint8), crc)
            call.append(part)
            size += len(part)
    pwrite_all(fd, call, at)
    return crc


def read_crc32c(
    file: Handle, begin: int, end: int, crc: int = 0, window: Bytes | None = None
) -> int:
    """Return the CRC-32C of the bytes ``begin .. end`` of a file behind what has the CRC `crc`.

    In bounded memory, that of `window` if it is given. Raises `FormatError` if the file ends first.
    """
    for part in _windows(file, begin, end, window):
        crc = crc32c(part, crc)
    return crc


def read_crc32(file: Handle, begin: int, end: int) -> int:
    """Return ZIP's CRC-32 of the bytes ``begin .. end`` of a file; see `read_crc32c`."""
    crc = 0
    for part in _windows(file, begin, end):
        crc = zlib.crc32(as_bytes(part), crc)
    return crc


def _windows(file: Handle, begin: int, end: int, window: Bytes | None = None) -> Iterator[Bytes]:
    """Yield the bytes of a file in parts, which are valid until the next one is asked for."""
    if window is None:
        window = np.empty(min(_WINDOW, max(0, end - begin)), np.uint8)
    for at in range(begin, end, max(1, len(window))):
        part = window[: min(len(window), end - at)]
        file.pread_into(part, at)
        yield part


def check_member(computed: int, expected: int, where: object) -> None:
    """Raise `FormatError` if the CRC-32 of a member of a ZIP file is not the expected one."""
    if computed != expected:
        raise FormatError(
            "the CRC-32 of a ZIP member is wrong",
            where=where,
            expected=f"{expected:#010x}",
            found=f"{computed:#010x}",
            fix="the file was changed or is damaged",
        )


@dataclass(frozen=True)
class Crc:
    """A CRC of 32 bits that begins and ends with all bits inverted.

    `polynomial` has its bits reversed: the highest bit is x^0. `of` returns the CRC of bytes or of
    a C-contiguous array.
    """

    polynomial: int
    of: Callable[[Array | bytes], int]

    def combine(self, first: int, second: int, second_nbytes: int) -> int:
        """Return the CRC of two ranges one behind another, the second of that many bytes."""
        return _times(first, _shift(self.polynomial, second_nbytes), self.polynomial) ^ second

    def zeros(self, nbytes: int) -> int:
        """Return the CRC of zero bytes."""
        return _times(ONES, _shift(self.polynomial, nbytes), self.polynomial) ^ ONES

    def joined(self, parts: Iterable[tuple[int, int, int]], nbytes: int) -> int:
        """Return the CRC of a range of `nbytes`, from parts in it and zeros between them.

        Parameters
        ----------
        parts
            Offset, bytes and CRC of each, in the order of the offsets, which do not overlap.
        """
        crc = at = 0
        for offset, size, part in parts:
            if offset > at:
                crc = self.combine(crc, self.zeros(offset - at), offset - at)
            crc = self.combine(crc, part, size)
            at = offset + size
        return self.combine(crc, self.zeros(nbytes - at), nbytes - at) if nbytes > at else crc


def _times(a: int, b: int, polynomial: int) -> int:
    """Return the product of two polynomials modulo that of the CRC."""
    out = 0
    while a:
        if a & 0x80000000:
            out ^= b
        a = a << 1 & ONES
        b = b >> 1 ^ (polynomial if b & 1 else 0)
    return out


@lru_cache(maxsize=4096)
def _shift(polynomial: int, nbytes: int) -> int:
    """Return x^(8 * nbytes) modulo the polynomial."""
    power, out = 0x00800000, 0x80000000  # x^8 and 1
    while nbytes:
        if nbytes & 1:
            out = _times(out, power, polynomial)
        power = _times(power, power, polynomial)
        nbytes >>= 1
    return out


CRC32C = Crc(0x82F63B78, crc32c)
CRC32 = Crc(
    0xEDB88320, lambda data: zlib.crc32(data if isinstance(data, bytes) else as_bytes(data))
)
"""ZIP's: IEEE 802.3, see APPNOTE 4.4.7."""


def combine(first: int, second: int, second_nbytes: int) -> int:
    """Return the CRC-32C of two ranges one behind another, the second of that many bytes."""
    return CRC32C.combine(first, second, second_nbytes)


class Sums:
    """CRC-32Cs of parts of groups, which threads write in any order."""

    def __init__(self) -> None:
        self._parts: dict[int, list[tuple[int, int, int]]] = {}
        self._lock = threading.Lock()

    def add(self, group: int, offset: int, nbytes: int, crc: int) -> None:
        """Take the sum of the `nbytes` at `offset`, which belong to `group`."""
        with self._lock:
            self._parts.setdefault(group, []).append((offset, nbytes, crc))

    def of(self, group: int, begin: int, end: int, used: int | None = None) -> int | None:
        """Return the sum of ``begin .. end``, or None if no parts are exactly that.

        With `used`, the parts are so many bytes, and what is between them is zero.
        """
        parts = [
            p for p in sorted(self._parts.get(group, ())) if begin < p[0] + p[1] and p[0] < end
        ]
        edges = [(begin, 0, 0), *parts, (end, 0, 0)]
        apart = all(a[0] + a[1] <= b[0] for a, b in pairwise(edges))
        if not apart or sum(n for _, n, _ in parts) != (end - begin if used is None else used):
            return None
        return CRC32C.joined(((at - begin, n, crc) for at, n, crc in parts), end - begin)
