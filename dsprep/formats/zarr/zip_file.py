"""ZIP files: the bytes around their members, and a directory packed into one.

A member is a local header and, directly behind it, its bytes. What lies between members belongs to
none. The central directory at the end names every member and where its header is. Members are
smaller than 4 GiB; the file is not limited (ZIP64).

Source: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

from __future__ import annotations

import shutil
import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path

from dsprep.formats.zarr.plan import LARGEST
from dsprep.storage.durable import sync, sync_directory

BLOCK = 4 << 20

DATE = 1 << 5 | 1
"""1980-01-01: the same samples give the same bytes."""
UTF8 = 0x800
"""Flag: the name is UTF-8."""
UNIX = 3 << 8
"""The system whose file modes `MODE` has."""
MODE = 0o100644 << 16

CRC32_END = 18
"""The end of the CRC-32 in a local header."""

Member = tuple[str, int, int, int]
"""Name, bytes, CRC-32, and the offset of the bytes."""


def is_zip(path: Path) -> bool:
    """Return whether an output is a ZIP file; ``out.zarr.zip.part`` is one in the making."""
    return ".zip" in path.suffixes


def local_header(name: str, nbytes: int, crc32: int) -> bytes:
    """Return the local header of a member."""
    text = name.encode()
    fields = (20, _flags(text), 0, 0, DATE, crc32, nbytes, nbytes, len(text), 0)
    return struct.pack("<4sHHHHHIIIHH", b"PK\3\4", *fields) + text


def _flags(name: bytes) -> int:
    return 0 if name.isascii() else UTF8


def directory(members: Iterable[Member], at: int) -> bytes:
    """Return the central directory and the records that end the file, to be written at `at`."""
    entries = []
    for name, nbytes, crc32, begin in sorted(members, key=lambda member: member[3]):
        text, extra, version = name.encode(), b"", 20
        offset = begin - len(local_header(name, nbytes, crc32))
        if offset > LARGEST:
            extra, offset, version = struct.pack("<HHQ", 1, 8, offset), LARGEST + 1, 45
        head = (UNIX | 45, version, _flags(text), 0, 0, DATE, crc32, nbytes, nbytes)
        tail = (len(text), len(extra), 0, 0, 0, MODE, offset)
        entries.append(struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\1\2", *head, *tail) + text + extra)
    body, count, end = b"".join(entries), len(entries), b""
    nbytes = len(body)
    if count > 0xFFFE or at > LARGEST or nbytes > LARGEST:
        numbers = (44, 45, 45, 0, 0, count, count, nbytes, at)
        end = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", *numbers)
        end += struct.pack("<4sIQI", b"PK\6\7", 0, at + nbytes, 1)
        count, nbytes, at = min(count, 0xFFFF), LARGEST + 1, LARGEST + 1
    return body + end + struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, count, count, nbytes, at, 0)


def pack(root: Path, path: Path, durable: bool) -> None:
    """Make the directory `root` the ZIP file `path`. Can be repeated if interrupted."""
    with path.open("wb") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as target:
            for source in sorted(p for p in root.rglob("*") if p.is_file()):
                info = zipfile.ZipInfo(str(source.relative_to(root)), (1980, 1, 1, 0, 0, 0))
                info.external_attr, info.file_size = MODE, source.stat().st_size
                with source.open("rb") as data, target.open(info, "w") as out:
                    shutil.copyfileobj(data, out, BLOCK)
        if durable:
            file.flush()
            sync(file.fileno())
    if durable:
        sync_directory(path.parent)
