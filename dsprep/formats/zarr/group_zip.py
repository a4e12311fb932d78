"""The parts of a ZIP file whose members are stored as they are, at places of our choice.

A member is a local header and, right behind it, its bytes. What lies between members is nobody's.
The central directory at the end names every member and where its header is; without it, the file
is no ZIP file. Members are smaller than 4 GiB; the file is not limited (ZIP64).

Source: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

LOCAL = 30
"""Bytes of a local header without the name."""
LARGEST = 0xFFFFFFFE
"""Bytes of the largest member; one more means that ZIP64 has the number."""
DATE = 1 << 5 | 1
"""1980-01-01: the same samples give the same bytes."""
UTF8 = 0x800
"""Flag: the name is UTF-8."""
UNIX = 3 << 8
"""The system whose file modes `MODE` has."""
MODE = 0o100644 << 16

Member = tuple[str, int, int, int]
"""Name, bytes, CRC-32, and the offset of the local header."""


def header_nbytes(name: str) -> int:
    """Return the bytes of the local header of a member."""
    return LOCAL + len(name.encode())


def local_header(name: str, nbytes: int, crc32: int) -> bytes:
    """Return what is right before the bytes of a member."""
    text = name.encode()
    fields = (20, _flags(text), 0, 0, DATE, crc32, nbytes, nbytes, len(text), 0)
    return struct.pack("<4sHHHHHIIIHH", b"PK\3\4", *fields) + text


def _flags(name: bytes) -> int:
    return 0 if name.isascii() else UTF8


def directory(members: Iterable[Member], at: int) -> bytes:
    """Return the central directory and the records that end the file, to be written at `at`."""
    entries, count = [], 0
    for name, nbytes, crc32, offset in members:
        text, extra, version = name.encode(), b"", 20
        if offset > LARGEST:
            extra, offset, version = struct.pack("<HHQ", 1, 8, offset), LARGEST + 1, 45
        head = (UNIX | 45, version, _flags(text), 0, 0, DATE, crc32, nbytes, nbytes)
        tail = (len(text), len(extra), 0, 0, 0, MODE, offset)
        entries.append(struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\1\2", *head, *tail) + text + extra)
        count += 1
    body = b"".join(entries)
    end = b""
    if count > 0xFFFE or at > LARGEST or len(body) > LARGEST:
        numbers = (44, 45, 45, 0, 0, count, count, len(body), at)
        end = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", *numbers)
        end += struct.pack("<4sIQI", b"PK\6\7", 0, at + len(body), 1)
    short, long = min(count, 0xFFFF), 0xFFFFFFFF
    if end:
        at, nbytes = long, long
    else:
        nbytes = len(body)
    return body + end + struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, short, short, nbytes, at, 0)
