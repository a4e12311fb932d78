"""The superblock: where an HDF5 file says of itself how it is stored, read without the library.

Source: HDF5 File Format Specification, section II.A, "Disk Format: Level 0A - Format Signature
and Superblock". It stands at the beginning, or at 512, 1024, 2048, ... behind a user block.

The HDF5 library keeps times in every object header unless told not to, but takes no such wish for
the superblock extension, which it makes where a file has a strategy for its space; `without_times`
takes them out. Superblock versions 2 and 3 have the address of the extension at byte 20; an object
header of version 2 is ``OHDR``, its version, flags, with flag 0x20 four times of 4 bytes, with flag
0x10 four more bytes, then the size of its messages in ``1 << (flags & 3)`` bytes, the messages, and
the checksum of all that, Jenkins' lookup3.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from dsprep.core.storage import pread_most, pwrite_all
from dsprep.errors import FormatError

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_SIZES = (2, 4, 8, 16, 32)
_LONGEST = 28 + 4 * max(_SIZES)


_TIMES, _PHASES = 0x20, 0x10
_NONE = (1 << 64) - 1
_MASK = (1 << 32) - 1
_LARGEST = 1 << 16


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


# --- times ------------------------------------------------------------------------------------


def without_times(path: Path) -> None:
    """Set the times of the superblock extension to 0, if there is one that has times."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        head = pread_most(fd, 48, 0)
        if head[:8] != _SIGNATURE or head[8] not in (2, 3):
            return
        address = int.from_bytes(head[20:28], "little")
        if address == _NONE:
            return
        header = bytearray(pread_most(fd, _LARGEST, address))
        if header[:5] != b"OHDR\x02" or not header[5] & _TIMES:
            return
        flags = header[5]
        at = 6 + 16 + (4 if flags & _PHASES else 0)
        width = 1 << (flags & 3)
        end = at + width + int.from_bytes(header[at : at + width], "little")
        if lookup3(header[:end]) != int.from_bytes(header[end : end + 4], "little"):
            return  # not as it is understood here: it stays as it is
        header[6:22] = bytes(16)
        header[end : end + 4] = lookup3(header[:end]).to_bytes(4, "little")
        pwrite_all(fd, [header[: end + 4]], address)
    finally:
        os.close(fd)


def _turn(value: int, bits: int) -> int:
    return (value << bits | value >> (32 - bits)) & _MASK


def lookup3(data: bytes | bytearray) -> int:
    """Return Bob Jenkins' ``hashlittle`` of `data` with an initial value of 0."""
    a = b = c = (0xDEADBEEF + len(data)) & _MASK
    rest = bytes(data)
    while len(rest) > 12:
        a, b, c = _add(a, b, c, rest[:12])
        for x, y, z in ((4, 6, 8), (16, 19, 4)):
            a = ((a - c) & _MASK) ^ _turn(c, x)
            c = (c + b) & _MASK
            b = ((b - a) & _MASK) ^ _turn(a, y)
            a = (a + c) & _MASK
            c = ((c - b) & _MASK) ^ _turn(b, z)
            b = (b + a) & _MASK
        rest = rest[12:]
    if not rest:
        return c
    a, b, c = _add(a, b, c, rest.ljust(12, b"\0"))
    for x, y, z in ((14, 11, 25), (16, 4, 14)):
        c = ((c ^ b) - _turn(b, x)) & _MASK
        a = ((a ^ c) - _turn(c, y)) & _MASK
        b = ((b ^ a) - _turn(a, z)) & _MASK
    return ((c ^ b) - _turn(b, 24)) & _MASK


def _add(a: int, b: int, c: int, block: bytes) -> tuple[int, int, int]:
    words = [int.from_bytes(block[k : k + 4], "little") for k in (0, 4, 8)]
    return (a + words[0]) & _MASK, (b + words[1]) & _MASK, (c + words[2]) & _MASK
