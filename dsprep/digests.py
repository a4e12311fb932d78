"""CRC-32C of byte ranges that are written in parts, in any order.

The CRC of two ranges one behind another follows from their CRCs and the length of the second:
appending n zero bytes multiplies a CRC by x^(8n) modulo the polynomial (Mark Adler's
``crc32_combine`` in zlib rests on the same fact).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from dsprep.schema import Array
from dsprep.storage import as_bytes, pread_into

_WINDOW = 4 << 20  # bytes read back at a time
_POLYNOMIAL = 0x82F63B78  # Castagnoli's, bits reversed: the highest bit is x^0


def crc32c(data: Array | bytes, crc: int = 0) -> int:
    """Return the CRC-32C of `data` behind what has the CRC `crc`; releases the GIL.

    `data` is bytes, or a C-contiguous array of any dtype.
    """
    from google_crc32c import extend

    view: Any = data if isinstance(data, bytes) else as_bytes(data)
    return int(extend(crc, _buffer(view)))


def _buffer(view: Any) -> Any:
    return view if isinstance(view, bytes) else np.frombuffer(view, np.uint8)


def read_crc32c(fd: int, begin: int, end: int, where: object) -> int:
    """Return the CRC-32C of the bytes ``begin .. end`` of a file, in bounded memory.

    Raises
    ------
    FormatError
        If the file ends first.
    """
    window = np.empty(min(_WINDOW, max(0, end - begin)), np.uint8)
    crc = 0
    for at in range(begin, end, _WINDOW):
        part = window[: min(_WINDOW, end - at)]
        pread_into(fd, part, at, where)
        crc = crc32c(part, crc)
    return crc


def _times(a: int, b: int) -> int:
    """Return the product of two polynomials modulo that of the CRC."""
    out = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            out ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return out


@lru_cache(maxsize=4096)
def _shift(nbytes: int) -> int:
    """Return x^(8 * nbytes) modulo the polynomial."""
    power, out = 0x00800000, 0x80000000  # x^8 and 1
    while nbytes:
        if nbytes & 1:
            out = _times(out, power)
        power = _times(power, power)
        nbytes >>= 1
    return out


def combine(first: int, second: int, second_nbytes: int) -> int:
    """Return the CRC of two ranges one behind another, the second of that many bytes."""
    return _times(first, _shift(second_nbytes)) ^ second
