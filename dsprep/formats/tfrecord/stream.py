"""The bytes of the records: of a plain file, or of what a compressed one unpacks to.

GZIP and ZLIB run over the whole file, as TensorFlow writes them: one stream, or several one after
another, which can only be read from the beginning. `Unpacked` does so once, when it is opened, to a
temporary file, which has no name and goes with the handle.
"""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from typing_extensions import override

from dsprep.core.closing import failure_closes
from dsprep.core.schema import Bytes
from dsprep.errors import FormatError, TargetError
from dsprep.formats.tfrecord.framing import FOOTER, HEADER, Scan, is_header
from dsprep.formats.tfrecord.parse import Discovery
from dsprep.layout.model import Blocks
from dsprep.storage.base import Handle
from dsprep.storage.local import LocalFile
from dsprep.storage.paths import open_file

Packing: TypeAlias = Literal["gzip", "zlib"]

WINDOW, WINDOW_APART = 4 << 20, 16 << 20
"""Bytes of one read while the headers are collected. The second one is of a file without a
descriptor, each read of which is a request."""
SPARSE, SPARSE_APART = 64 << 10, 8 << 20
"""From this record size on, headers are read one by one; below, the whole file is read."""
HOPS, HOPS_APART = 4096, 32
"""Headers that are read before their records are looked at, while they are kept."""
INPUT = 1 << 20
"""Compressed bytes given to the decoder at a time, and unpacked ones taken from it."""
LEAST_UNPACKED, UNPACKED = 64 << 20, 256
"""A compressed file may have so many bytes, or unpack to so many times its own."""


def packing(head: bytes) -> Packing | None:
    """Return how a file that begins with `head` is compressed, judged by its magic bytes."""
    if head[:3] == b"\x1f\x8b\x08":
        return "gzip"
    if len(head) >= 2 and head[0] & 0x8F == 8 and int.from_bytes(head[:2], "big") % 31 == 0:
        return "zlib"
    return None


def holds_records(head: bytes) -> bool | None:
    """Return whether a file holds records, judged by `head`, its first 1 KiB or all of it.

    None if that unpacks to nothing, as a file of no records does.
    """
    if is_header(head):
        return True
    if head and packing(head) is None:
        return False
    try:
        start = zlib.decompressobj(wbits=32 + 15).decompress(head, HEADER)
    except zlib.error:
        return False
    return is_header(start) if start else None


class Unpacked(LocalFile):
    """The bytes of a file that `codec` compressed as a whole; `FormatError` if it is damaged."""

    def __init__(self, stored: Handle, codec: Packing) -> None:
        self.fd, self.codec, self.stored = -1, codec, stored
        folder = tempfile.gettempdir()
        with tempfile.TemporaryFile(dir=folder) as unpacked:
            for data in self._pieces():
                try:
                    unpacked.write(data)
                    unpacked.flush()
                except OSError as error:
                    raise TargetError(
                        f"{stored.path.name} cannot be unpacked there, which reading it takes",
                        where=folder,
                        found=error.strerror,
                        fix="set TMPDIR to a directory with more space",
                    ) from error
            super().__init__(stored.name, os.dup(unpacked.fileno()))

    def _pieces(self) -> Iterator[bytes]:
        decoder, given, at = None, b"", 0
        room = max(LEAST_UNPACKED, UNPACKED * self.stored.nbytes)
        while True:
            if not given:
                given = self.stored.pread(INPUT, at)
                at += len(given)
            if decoder is None:
                if not given:
                    return
                given = given.lstrip(b"\0")  # zeros behind the last stream are padding
                decoder = zlib.decompressobj(wbits=32 + 15) if given else None
                continue
            try:
                data = decoder.decompress(given, INPUT)
            except zlib.error as error:
                raise self._damaged("is damaged", f"before offset {at}") from error
            if not given and not data and not decoder.eof:
                raise self._damaged("ends too early", f"offset {at}")
            given = decoder.unused_data if decoder.eof else decoder.unconsumed_tail
            decoder = None if decoder.eof else decoder
            room -= len(data)
            if room < 0:
                raise self._damaged("unpacks to far more than the file holds", f"offset {at}")
            yield data

    def _damaged(self, problem: str, where: str) -> FormatError:
        return FormatError(
            f"the {self.codec} stream {problem}",
            where=f"{self.stored.path}, {where}",
            fix="the file is damaged, truncated or still being written; gzip -dc FILE > PLAIN "
            "unpacks what is whole of it",
        )

    @override
    def check_same(self, offset: int | None = None) -> None:
        self.stored.check_same()

    @override
    def close(self) -> None:
        super().close()
        self.stored.close()


def open_stream(path: Path) -> Handle:
    """Return the bytes of the file `path`, unpacked if need be."""
    file = open_file(path)
    with failure_closes(file.close):
        head = file.pread(1024, 0)
        codec = None if is_header(head) else packing(head)
        return file if codec is None else Unpacked(file, codec)


def read_blocks(file: Handle, look: Discovery | None = None, stop: int | None = None) -> Blocks:
    """Read all headers, and show every record to `look`.

    With `stop` those of the first records only, and nothing behind them. Raises `FormatError` if a
    header is damaged, or the file ends too early.
    """
    scan = Scan(file.path, file.nbytes, stop)
    large = int.from_bytes(file.pread(8, 0), "little") >= sparse(file)
    while not scan.done:
        if large:
            hops = HOPS if file.fd >= 0 else HOPS_APART
            for start, length in zip(*scan.hop(file, hops), strict=True):
                if look is not None:
                    look.take_on_disk(int(start), int(length))
        else:
            _read_windows(file, scan, look)
        large = scan.length >= sparse(file)
    return scan.blocks()


def sparse(file: Handle) -> int:
    """Return from which record size on reading what is needed of each takes less than all."""
    return SPARSE if file.fd >= 0 else SPARSE_APART


def _read_windows(file: Handle, scan: Scan, look: Discovery | None) -> None:
    """Take headers, and show records, in long reads, until records are large."""
    waiting = np.zeros((2, 0), np.int64)  # records that end in the next window
    for at, window in _windows(file, scan.position, sparse(file) + HEADER + FOOTER):
        starts, lengths = np.concatenate([waiting, scan.take(window, at)], axis=1)
        complete = int(np.searchsorted(starts + lengths + FOOTER, at + len(window), "right"))
        if look is not None and complete:
            look.take(window, starts[:complete] - at, lengths[:complete], at)
        waiting = np.stack([starts[complete:], lengths[complete:]])
        if scan.done or scan.length >= sparse(file):
            break
    if look is not None:
        for start, length in waiting.T.tolist():
            look.take_on_disk(start, length)


def _windows(file: Handle, start: int, room: int) -> Iterator[tuple[int, Bytes]]:
    """Yield the bytes of the file from `start` on, and where they are, each with `room` before."""
    # They are valid until the next ones are asked for.
    nbytes = WINDOW if file.fd >= 0 else WINDOW_APART
    buffer = np.empty(room + nbytes, np.uint8)
    for begin in range(start, file.nbytes, nbytes):
        at = max(start, begin - room)
        window = buffer[: min(begin + nbytes, file.nbytes) - at]
        file.read_into(window, at)
        yield at, window
