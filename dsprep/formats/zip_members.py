"""Members of ZIP files: where their bytes are, and what `zipfile` raises for damaged ones.

Source: PKWARE's APPNOTE, sections 4.3.7 (local file header) and 4.4.4 (general purpose flag).
"""

from __future__ import annotations

import struct
import zipfile
import zlib

from dsprep.errors import FormatError
from dsprep.storage.base import Handle

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
