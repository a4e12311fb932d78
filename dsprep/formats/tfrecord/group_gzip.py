"""GZIP members of groups, which tell their size, and are filled up to whole stripes.

A reader of GZIP sees one stream, whatever members it is made of (RFC 1952, section 2.2). In the
header of each member an extra field with the name ``dS`` tells the bytes of the member as u64
little-endian, so that members can be found without being unpacked; a comment fills it up. (Empty
members do not serve as filling: tf.data takes the first one for the end of the file.)
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from dsprep.core.storage import pread_most
from dsprep.errors import FormatError
from dsprep.formats.tfrecord.example import view

_MAGIC = b"\x1f\x8b\x08"
_FEXTRA, _FCOMMENT = 4, 16
_UNKNOWN_SYSTEM = 255
_HEAD = struct.Struct("<3sB4xBB")
_EXTRA = struct.Struct("<H2sHQ")
_TAIL = struct.Struct("<II")

HEADER = _HEAD.size + _EXTRA.size
"""Bytes of a member's header without a comment."""


def member(level: int, blocks: Iterable[NDArray[np.uint8]], align: int = 1) -> list[bytes]:
    """Return what `blocks` become as one member, in parts, of a multiple of `align` bytes.

    The bytes are the same however the blocks are cut.
    """
    packer = zlib.compressobj(level, zlib.DEFLATED, -15)
    parts, crc, nbytes = [b""], 0, 0
    for block in blocks:
        data = view(block)
        parts.append(packer.compress(data))
        crc, nbytes = zlib.crc32(data, crc), nbytes + len(data)
    parts += [packer.flush(), _TAIL.pack(crc, nbytes & 0xFFFFFFFF)]
    total = HEADER + sum(map(len, parts))
    missing = -total % align
    comment = b" " * (missing - 1) + b"\0" if missing else b""
    head = _HEAD.pack(_MAGIC, _FEXTRA | (_FCOMMENT if missing else 0), 0, _UNKNOWN_SYSTEM)
    parts[0] = head + _EXTRA.pack(12, b"dS", 8, total + missing) + comment
    return parts


def nbytes_at(fd: int, offset: int, where: object) -> int:
    """Return the bytes of the member at `offset`.

    Raises
    ------
    FormatError
        If no member that `member` made is there.
    """
    nbytes = told(pread_most(fd, HEADER, offset))
    if nbytes is not None:
        return nbytes
    raise FormatError(
        "there is no group where one was written",
        where=f"{where}, offset {offset}",
        fix="the file was changed while it was being written",
    )


def told(head: bytes) -> int | None:
    """Return the bytes of the member that begins with `head`; None if `member` did not make it."""
    if len(head) >= HEADER and head[:3] == _MAGIC and head[3] & ~_FCOMMENT == _FEXTRA:
        length, name, size, nbytes = _EXTRA.unpack_from(head, _HEAD.size)
        if (length, name, size) == (12, b"dS", 8) and nbytes > HEADER:
            return int(nbytes)
    return None
