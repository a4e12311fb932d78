"""Members of ZIP files: where their bytes are, and what `zipfile` raises for damaged ones.

Source: PKWARE's APPNOTE, sections 4.3.7 (local file header) and 4.4.4 (general purpose flag).
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from dsprep.errors import FormatError
from dsprep.storage.base import Handle, stream
from dsprep.storage.checksums import Members
from dsprep.storage.paths import open_file

LOCAL_HEADER = 30
"""Bytes of a local header, less the name and the extra field."""

UTF8 = 0x800
"""The flag of a member whose name is not in the code page 437."""

ZIP_ERRORS = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    zlib.error,
    struct.error,
    NotImplementedError,
    RuntimeError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
)
"""What `zipfile` raises for files that are damaged or encrypted."""


def begin(file: Handle, info: zipfile.ZipInfo, where: str, known: bytes = b"") -> int:
    """Return the offset of a member's bytes, which only its local header says.

    `known`: the bytes from there on, if they were read already.

    Raises
    ------
    FormatError
        If that header is not where the central directory says, or is another member's.
    """
    at = info.header_offset
    own = info.orig_filename.encode("utf-8" if info.flag_bits & UTF8 else "cp437")
    size = LOCAL_HEADER + len(own)
    header = known[:size] if len(known) >= size else (file.pread(size, at) if at >= 0 else b"")
    name, extra = struct.unpack("<2H", header[26:LOCAL_HEADER]) if len(header) == size else (0, 0)
    if header[:4] != b"PK\3\4" or header[LOCAL_HEADER:] != own or name != len(own):
        raise FormatError("the local header of a ZIP member is wrong", where=where)
    return int(at + size + extra)


@contextmanager
def opened_zip(file: Handle) -> Iterator[zipfile.ZipFile]:
    """Open a ZIP file; `FormatError` if it is truncated or damaged."""
    try:
        with zipfile.ZipFile(stream(file)) as archive:
            yield archive
    except ZIP_ERRORS as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError("the ZIP file is truncated or damaged", where=file.path) from error


def stored_members(path: Path) -> Members | None:
    """Return the members of a ZIP file that are stored as they are; None of what is none.

    Raises
    ------
    FormatError, OSError
        If it is damaged or gone.
    """
    if path.is_dir():
        return None
    with closing(open_file(path)) as file:
        if file.pread(4, 0) != b"PK\3\4":
            return None
        plain: list[tuple[int, int, int, str]] = []
        with opened_zip(file) as archive:
            for info in archive.NameToInfo.values():  # of names that come twice, the last one
                if info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1:
                    at = begin(file, info, f"{path}, {info.filename}")
                    plain.append((at, info.file_size, info.CRC, info.filename))
    plain.sort()
    starts, sizes, crcs = np.array([m[:3] for m in plain], np.int64).reshape(-1, 3).T
    return Members(tuple(m[3] for m in plain), starts, sizes, crcs)
