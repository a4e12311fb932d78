"""The superblock: where an HDF5 file says of itself how it is stored, read without the library.

Source: HDF5 File Format Specification, section II.A, "Disk Format: Level 0A - Format Signature
and Superblock". It stands at the beginning, or at 512, 1024, 2048, ... behind a user block.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from dsprep.core.storage import pread_most
from dsprep.errors import FormatError

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_SIZES = (2, 4, 8, 16, 32)
_LONGEST = 28 + 4 * max(_SIZES)


@dataclass(frozen=True)
class Superblock:
    """What the superblock tells.

    Attributes
    ----------
    version
        0 to 3.
    end_of_file
        Where the library takes the file to end; it rises when anything is added.
    """

    version: int
    end_of_file: int


def signature(fd: int) -> int | None:
    """Return where the signature stands, or None if the file has none."""
    nbytes, at = os.fstat(fd).st_size, 0
    while at + len(_SIGNATURE) <= nbytes:
        if pread_most(fd, len(_SIGNATURE), at) == _SIGNATURE:
            return at
        at = max(512, 2 * at)
    return None


def read_superblock(path: Path) -> Superblock:
    """Return the superblock of the file at `path`.

    Raises
    ------
    FormatError
        If there is none, or it is damaged.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        at = signature(fd)
        if at is None:
            raise FormatError("the file has no HDF5 signature", where=path)
        return _parse(pread_most(fd, _LONGEST, at), f"{path}, offset {at}")
    finally:
        os.close(fd)


def _parse(head: bytes, where: str) -> Superblock:
    version = head[8] if len(head) > 8 else -1
    if not 0 <= version <= 3:
        raise FormatError(
            "the superblock is of an unknown version", where=where, expected="0 to 3", found=version
        )
    # The sizes of addresses, then the base address and one more address, then the end of the file.
    width_at, addresses = ((13, 24), (13, 28), (9, 12), (9, 12))[version]
    width = head[width_at] if len(head) > width_at else 0
    begin = addresses + 2 * width
    if width not in _SIZES or len(head) < begin + width:
        raise FormatError("the superblock is damaged", where=where, found=f"{len(head)} bytes")
    return Superblock(version, int.from_bytes(head[begin : begin + width], "little"))
