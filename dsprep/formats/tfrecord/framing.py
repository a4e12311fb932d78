"""Records: where each one is stored, and whether its bytes are the ones that were written.

A TFRecord file is records back to back, nothing before, between or behind them::

    uint64  length of the payload, little-endian
    uint32  masked CRC32C of these 8 bytes
    bytes   payload
    uint32  masked CRC32C of the payload

(``tensorflow/core/lib/io/record_writer.h``). There is no table of contents: `Scan` reads every
header once, trusts no length before its CRC has been compared, and gives the `Blocks` that then
give the offset of any record without I/O.
"""

from __future__ import annotations

import shlex
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import Array, Bytes, Ints
from dsprep.errors import FormatError
from dsprep.layout.laws import Affine, Law, Table
from dsprep.layout.laws.follow import Follow
from dsprep.layout.model import Blocks
from dsprep.storage.base import Handle
from dsprep.storage.checksums import crc32c

HEADER = 12
FOOTER = 4
FRAME = HEADER + FOOTER
"""Bytes of a record beyond its payload."""

LONGEST = 1 << 50
"""A record this long cannot be; sums of the lengths in one window stay within int64."""

TRUNCATED = "the file is truncated or still being written"
MASK = 0xA282EAD8

SHORT = 128 << 10
"""Mean bytes of a record below which the CRCs are computed by one thread at a time."""

_one_at_a_time = threading.Lock()
# A CRC of a few microseconds releases and retakes the GIL. Two threads that do so by turns spend
# most of their time waiting for each other.


def mask(crcs: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return CRCs in the form in which they are stored."""
    turned = (crcs >> np.uint32(15)) | (crcs << np.uint32(17))
    masked: NDArray[np.uint32] = turned + np.uint32(MASK)
    return masked


def unmask(stored: int) -> int:
    """Return the CRC that is stored as `stored`."""
    turned = stored - MASK & 0xFFFFFFFF
    return (turned << 15 | turned >> 17) & 0xFFFFFFFF


@cache
def _tables() -> NDArray[np.uint32]:
    """Return the CRC32C of a byte that k zero bytes follow, shape ``(8, 256)``."""
    tables = np.zeros((8, 256), np.uint32)
    row = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        row = np.where(row & 1, (row >> 1) ^ np.uint32(0x82F63B78), row >> 1).astype(np.uint32)
    tables[0] = row
    for k in range(1, 8):
        tables[k] = (tables[k - 1] >> 8) ^ row[tables[k - 1] & 0xFF]
    return tables


def crc_of_lengths(lengths: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Return the masked CRC32C of each row of 8 bytes; `lengths` has shape ``(n, 8)``."""
    tables = _tables()
    start = np.array([0xFF] * 4 + [0] * 4, np.uint8)
    crcs = np.zeros(len(lengths), np.uint32)
    for k in range(8):
        crcs ^= tables[7 - k][lengths[:, k] ^ start[k]]
    return mask(~crcs)


def headers(lengths: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return the 12-byte headers of records with these payload lengths, shape ``(n, 12)``."""
    out = np.empty((len(lengths), HEADER), np.uint8)
    out[:, :8] = lengths.astype("<u8").view(np.uint8).reshape(-1, 8)
    out[:, 8:] = crc_of_lengths(out[:, :8]).astype("<u4").view(np.uint8).reshape(-1, 4)
    return out


def payload_crcs(
    buffer: NDArray[np.uint8], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.uint32]:
    """Return the masked CRC32C of each ``buffer[start:start + length]``."""
    ranges = zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
    short = len(lengths) > 1 and int(lengths.sum()) < len(lengths) * SHORT
    with _one_at_a_time if short else nullcontext():
        from google_crc32c import extend

        return mask(np.array([extend(0, buffer[a:b]) for a, b in ranges], np.uint32))


def payload_right(data: Any, start: int, length: int) -> bool:
    """Return whether the payload ``data[start:start + length]`` has the CRC that follows it."""
    crc, stop = 0, start + length
    for a in range(start, stop, 1 << 20):
        crc = crc32c(bytes(data[a : min(stop, a + (1 << 20))]), crc)
    return unmask(int.from_bytes(data[stop : stop + FOOTER], "little")) == crc


def is_header(data: bytes) -> bool:
    """Return whether `data` begins with a record header whose CRC is right."""
    if len(data) < HEADER:
        return False
    head = np.frombuffer(data, np.uint8, HEADER).reshape(1, HEADER)
    return bool(head[0, 8:].view("<u4")[0] == crc_of_lengths(head[:, :8])[0])


NAME = "tfrecord"
"""The name of `Frame` in layouts."""


class Frame:
    """The header and footer of a record; see ``dsprep.reading.records``."""

    before = HEADER
    after = FOOTER

    def __init__(self, params: Mapping[str, Any]) -> None:
        return

    def wrong(self, before: Bytes, offsets: Ints, lengths: Ints) -> NDArray[np.bool_]:
        """Return which records do not have a header for a payload of that length."""
        return np.asarray((before != headers(lengths)).any(axis=1))

    def payload_wrong(
        self, buffer: Bytes, starts: Ints, lengths: Ints, after: Bytes
    ) -> NDArray[np.bool_]:
        """Return which payloads differ from the CRC behind them."""
        stored = np.ascontiguousarray(after).view("<u4").reshape(-1)
        return np.asarray(payload_crcs(buffer, starts, lengths) != stored)


def blocks_of(lengths: Law) -> Blocks:
    """Return where the payloads of records are that have these lengths."""
    offsets: Law = Follow(lengths, Affine(lengths.count, HEADER), FRAME)
    if isinstance(lengths, Affine):
        offsets = Affine(lengths.count, HEADER, lengths.base + FRAME)
    return Blocks(offsets, lengths)


def lengths_of(lengths: NDArray[Any]) -> Law:
    """Return the smallest law of these lengths."""
    first = int(lengths[0]) if len(lengths) else 0
    return Affine(len(lengths), first) if (lengths == first).all() else Table(lengths)


class Scan:
    """Collects the headers of a file of `end` bytes from front to back.

    `position` is where the next header begins, `count` the whole records seen so far, `length` the
    payload bytes of the last. Nothing is looked at behind record `stop`.
    """

    def __init__(self, where: object, end: int, stop: int | None = None) -> None:
        self.where, self.end = where, end
        self._stop = LONGEST if stop is None else stop
        self.position = self.count = self.length = 0
        self._is_cut = False
        self._parts: list[Array] = []

    @property
    def done(self) -> bool:
        """True if there are no more headers, or all records were taken that are wanted."""
        ended = self._is_cut or self.position + HEADER > self.end
        return ended or self.count >= self._stop

    def take(self, window: NDArray[np.uint8], at: int) -> tuple[Ints, Ints]:
        """Take every header that is completely in `window`, the bytes from offset `at` on.

        Returns the offsets and the lengths of their payloads.
        """
        last = len(window) - HEADER
        pos = self.position - at
        if pos > last or self.done:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        heads = []
        stride = int(window[pos : pos + 8].view("<u8")[0]) + FRAME
        if stride <= (last - pos) // 8:  # try whether records of this length follow
            rows = (last - pos) // stride + 1
            view = np.lib.stride_tricks.as_strided(window[pos:], (rows, HEADER), (stride, 1))
            same = (view == view[0]).all(axis=1)
            run = rows if same.all() else int(same.argmin())
            heads.append(view[:run])
            pos += run * stride
        begins = []
        get = window.data
        while pos <= last:
            begins.append(pos)
            pos += int.from_bytes(get[pos : pos + 8], "little") + FRAME
        heads.append(window[np.array(begins, np.int64)[:, None] + np.arange(HEADER)])
        return self._accept(np.concatenate(heads))

    def hop(self, file: Handle, limit: int) -> tuple[Ints, Ints]:
        """Take up to `limit` headers of a file, each by a read of its own; see `take`."""
        heads, pos = bytearray(), self.position
        while pos + HEADER <= self.end and len(heads) < limit * HEADER:
            heads += file.pread_exact(HEADER, pos)
            pos += int.from_bytes(heads[-HEADER:-4], "little") + FRAME
        return self._accept(np.frombuffer(heads, np.uint8).reshape(-1, HEADER))

    def _accept(self, heads: NDArray[np.uint8]) -> tuple[Ints, Ints]:
        """Append the whole records of these headers, shape ``(n, 12)``, whose CRCs are right."""
        heads = np.ascontiguousarray(heads[: self._stop - self.count])
        lengths = heads[:, :8].copy().view("<u8").reshape(-1)
        stored = heads[:, 8:].copy().view("<u4").reshape(-1)
        bad = (stored != crc_of_lengths(heads[:, :8])) | (lengths >= LONGEST)
        good = int(bad.argmax()) if bad.any() else len(heads)
        sizes = lengths[:good].astype(np.int64)
        ends = self.position + np.cumsum(sizes + FRAME)
        complete = int(np.searchsorted(ends, self.end, "right"))
        self._is_cut = complete < good
        if complete:
            longest = int(sizes[:complete].max())
            self._parts.append(
                sizes[:complete].astype(np.uint32 if longest < 1 << 32 else np.int64)
            )
            self.count += complete
            self.position, self.length = int(ends[complete - 1]), int(sizes[complete - 1])
        if good < len(heads) and not self._is_cut:
            raise FormatError(
                f"the header of record {self.count} is damaged",
                where=f"{self.where}, offset {self.position}",
                expected="a length with its CRC32C",
                fix="the file is damaged there, or is not a TFRecord file",
            ).with_fix(self.advice())
        return ends[:complete] - sizes[:complete] - FOOTER, sizes[:complete]

    def advice(self) -> str:
        """Return what to do with a file of which the records so far are whole."""
        if not self.count:
            return ""
        line = f"dsprep convert {shlex.quote(str(self.where))} OUT --samples 0:{self.count}"
        cut = f"truncate -s {self.position} of a copy"
        return f"{line} takes the records before it, as does {cut}"

    def blocks(self) -> Blocks:
        """Return the payloads of a file whose headers were taken; `FormatError` if it is cut."""
        end = self.position if self.count >= self._stop else self.end
        if self.position < end:
            raise FormatError(
                f"the file ends inside record {self.count}",
                where=f"{self.where}, offset {self.position}",
                expected=f"more than {end} bytes",
                fix=TRUNCATED,
            ).with_fix(self.advice())
        return blocks_of(lengths_of(np.concatenate([np.zeros(0, np.uint32), *self._parts])))
