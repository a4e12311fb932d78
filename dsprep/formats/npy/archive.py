"""Where the members of a ZIP file of NumPy arrays (``.npz``) lie.

The central directory is read by Python's own parser, ZIP64 included. Where the bytes of a member
begin only its local header says. What a member holds that is stored as it is can be read in place;
a deflated one is a chunk that is decoded as a whole.

Source: APPNOTE.TXT, ".ZIP File Format Specification", sections 4.3.7, 4.3.12 and 4.4.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass

from dsprep.errors import FormatError, UnsupportedError
from dsprep.formats.zip_members import begin, opened_zip
from dsprep.storage.base import Handle

MAX_INFLATED = 1 << 30
"""Bytes of the largest deflated member that is read: it is decoded as a whole."""


@dataclass(frozen=True)
class Member:
    """A member that is stored, or deflated.

    Attributes
    ----------
    name
        As the central directory has it.
    offset, stored
        Where its bytes are, and how many.
    nbytes, crc32
        Of what it holds.
    deflated
        Whether it is compressed.
    """

    name: str
    offset: int
    stored: int
    nbytes: int
    crc32: int
    deflated: bool

    def head(self, file: Handle, nbytes: int) -> bytes:
        """Return the first bytes of what it holds, fewer than `nbytes` only at its end."""
        data = file.pread(min(nbytes, self.stored), self.offset)
        if not self.deflated:
            return data
        try:
            return zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, nbytes)
        except zlib.error as error:
            raise FormatError(
                f"the ZIP member cannot be decoded: {error}", where=f"{file.path}, {self.name}"
            ) from error


def members(file: Handle) -> tuple[list[Member], dict[str, UnsupportedError]]:
    """Return the members in their order in the file, and why some cannot be read.

    Raises
    ------
    FormatError
        If the file is truncated or damaged.
    """
    located: list[Member] = []
    refused: dict[str, UnsupportedError] = {}
    with opened_zip(file) as archive:
        for info in archive.NameToInfo.values():
            where = f"{file.path}, {info.filename}"
            reason = _refused(info)
            if reason:
                refused[info.filename] = UnsupportedError(
                    f"the ZIP member {reason}",
                    where=where,
                    fix=f"unpack it: unzip {file.path} -d DIR",
                )
            elif not info.is_dir():
                located.append(_located(file, info, where))
    located.sort(key=lambda m: m.offset)
    return located, refused


def _refused(info: zipfile.ZipInfo) -> str:
    if info.flag_bits & 1:
        return "is encrypted"
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return f"is compressed by method {info.compress_type}"
    if info.compress_type == zipfile.ZIP_DEFLATED and info.file_size > MAX_INFLATED:
        return f"is deflated and has {info.file_size} bytes, more than {MAX_INFLATED}"
    return ""


def _located(file: Handle, info: zipfile.ZipInfo, where: str) -> Member:
    member = Member(
        name=info.filename,
        offset=begin(file, info, where),
        stored=info.compress_size,
        nbytes=info.file_size,
        crc32=info.CRC,
        deflated=info.compress_type == zipfile.ZIP_DEFLATED,
    )
    same = member.deflated or member.stored == member.nbytes
    if not same or member.offset + member.stored > file.nbytes:
        raise FormatError(
            "a ZIP member leaves the file",
            where=where,
            expected=f"{member.nbytes} bytes at {member.offset}",
            found=f"{member.stored} bytes, of {file.nbytes} in all",
        )
    return member
