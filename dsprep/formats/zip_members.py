"""Members of ZIP files: where their bytes are, and what `zipfile` raises for damaged ones.

Source: PKWARE's APPNOTE, sections 4.3.7 (local file header) and 4.4.4 (general purpose flag).
"""

from __future__ import annotations

import struct
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from dsprep.errors import FormatError
from dsprep.storage.base import Handle, stream
from dsprep.storage.checksums import check_member, read_crc32
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
"""The errors of `zipfile` for files that are damaged or encrypted."""


HEAD_NBYTES = 512
"""Bytes of a local header that are read of each member of an object: few names are longer."""


@dataclass(frozen=True)
class Member:
    """A member of a ZIP file.

    Attributes
    ----------
    name
        As the central directory has it.
    offset, stored
        Where its bytes are, and how many.
    nbytes, crc32
        Of what it holds.
    method
        How it is compressed, as in `zipfile`; -1: it is encrypted.
    """

    name: str
    offset: int
    stored: int
    nbytes: int
    crc32: int
    method: int

    @property
    def plain(self) -> bool:
        """True if it is stored as it is."""
        return self.method == zipfile.ZIP_STORED

    def check(self, file: Handle) -> None:
        """Raise `FormatError` if the checksum of one that is `plain` is wrong."""
        file.check_same()
        computed = read_crc32(file, self.offset, self.offset + self.nbytes)
        check_member(computed, self.crc32, f"{file.path}, {self.name}")


def member_checks(file: Handle) -> Callable[[Iterable[Member]], None]:
    """Return what compares `plain` members with their checksums, each once, from any thread."""
    checked, lock = set[str](), threading.Lock()

    def check(some: Iterable[Member]) -> None:
        with lock:
            for member in some:
                if member.plain and member.name not in checked:
                    member.check(file)
                    checked.add(member.name)

    return check


def members(file: Handle, archive: zipfile.ZipFile) -> Iterator[Member]:
    """Yield the members but folders; of names that come twice the last one.

    Raises
    ------
    FormatError
        If the local header of one is wrong, or its bytes leave the file.
    """
    infos, heads = [i for i in archive.NameToInfo.values() if not i.is_dir()], dict[int, bytes]()
    if file.fd < 0:  # all at once: each is a request
        offsets = [i.header_offset for i in infos if 0 <= i.header_offset < file.nbytes]
        heads = dict(zip(offsets, file.pread_blocks(HEAD_NBYTES, offsets), strict=True))
    for info in infos:
        where = f"{file.path}, {info.filename}"
        at = begin(file, info, where, heads.get(info.header_offset, b""))
        method = -1 if info.flag_bits & 1 else info.compress_type
        stored, nbytes = info.compress_size, info.file_size
        if at + stored > file.nbytes or (method == zipfile.ZIP_STORED and stored != nbytes):
            raise FormatError(
                "a ZIP member leaves the file",
                where=where,
                expected=f"{nbytes} bytes at {at}",
                found=f"{stored} bytes, of {file.nbytes} in all",
            )
        yield Member(info.filename, at, stored, nbytes, info.CRC, method)


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


def stored_members(path: Path) -> list[Member] | None:
    """Return the members of a ZIP file that are stored as they are, by offset; None of others.

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
        with opened_zip(file) as archive:
            plain = [m for m in members(file, archive) if m.plain]
    return sorted(plain, key=lambda m: m.offset)
