"""The bytes of the records: of a plain file, or of what a compressed one unpacks to.

GZIP and ZLIB run over the whole file, as TensorFlow writes them: one stream, or several one after
another, which can only be read from the beginning. `Unpacked` does so once, when it is opened, to a
temporary file, which has no name and goes with the handle.
"""

from __future__ import annotations

import os
import tempfile
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Literal, TypeAlias

import numpy as np
from typing_extensions import override

from dsprep.core.schema import Bytes
from dsprep.errors import FormatError, TargetError
from dsprep.formats.tfrecord.framing import FOOTER, HEADER, TRUNCATED, Scan, is_header
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
READERS = 2
"""Threads that read windows of a file."""
AHEAD = 3
"""Windows that are read, or being read, and not yet looked at."""
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
    """Whether a file holds records, judged by `head`, its first 1 KiB or all of it.

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
    """What a file compressed as a whole by `codec` unpacks to.

    `damage` is the error at which that ended before the end of the file, if it did.
    """

    def __init__(self, stored: Handle, codec: Packing) -> None:
        self.fd, self.codec, self.stored = -1, codec, stored
        self.damage: FormatError | None = None
        folder = tempfile.gettempdir()
        with tempfile.TemporaryFile(dir=folder) as unpacked:
            self._unpack(unpacked, folder)
            super().__init__(stored.name, os.dup(unpacked.fileno()))

    def _unpack(self, unpacked: IO[bytes], folder: str) -> None:
        limit, nbytes = max(LEAST_UNPACKED, UNPACKED * self.stored.nbytes), 0
        try:
            for data in self._pieces():
                nbytes += len(data)
                if nbytes > limit:
                    raise FormatError(
                        "the file unpacks to far more than it holds",
                        where=self.stored.path,
                        expected=f"at most {UNPACKED} times its {self.stored.nbytes} bytes",
                        fix="if that is right, unpack it first: gzip -dc FILE > PLAIN",
                    )
                try:
                    unpacked.write(data)
                    unpacked.flush()
                except OSError as error:
                    raise TargetError(
                        f"{self.stored.path.name} cannot be unpacked there, which reading it takes",
                        where=folder,
                        found=error.strerror,
                        fix="set TMPDIR to a directory with more space",
                    ) from error
        except FormatError as error:
            self.damage = error

    def _pieces(self) -> Iterator[bytes]:
        decoder, given, at = None, b"", 0
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
                where = f"{self.stored.path}, before offset {at}"
                raise FormatError(f"the {self.codec} stream is damaged", where=where) from error
            if not given and not data and not decoder.eof:
                raise FormatError(
                    f"the {self.codec} stream ends too early",
                    where=f"{self.stored.path}, offset {at}",
                    fix=TRUNCATED,
                )
            given = decoder.unused_data if decoder.eof else decoder.unconsumed_tail
            decoder = None if decoder.eof else decoder
            yield data

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
    head = file.pread(1024, 0)
    codec = None if is_header(head) else packing(head)
    return file if codec is None else Unpacked(file, codec)


def read_blocks(file: Handle, look: Discovery | None = None, stop: int | None = None) -> Blocks:
    """Read all headers, and show every record to `look`.

    With `stop` those of the first records only, and nothing behind them.

    Raises `FormatError` if the stream or a header is damaged, or either ends too early.
    """
    scan = Scan(file.path, file.nbytes, stop)
    damage = file.damage if isinstance(file, Unpacked) else None
    try:
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
        blocks = scan.blocks()
    except FormatError as error:
        if damage is None:
            raise
        raise damage.with_fix(scan.advice(packed=True)) from error
    if damage is not None and (stop is None or blocks.count < stop):
        raise damage.with_fix(scan.advice(packed=True))
    return blocks


def sparse(file: Handle) -> int:
    """Return from which record size on reading what is needed of each takes less than all."""
    return SPARSE if file.fd >= 0 else SPARSE_APART


def _read_windows(file: Handle, scan: Scan, look: Discovery | None) -> None:
    """Take headers, and show records, in long reads, until records are large."""
    room = sparse(file) + HEADER + FOOTER
    kept = np.empty(0, np.uint8)  # of a header or a record that ends in the next window
    waiting = np.zeros((2, 0), np.int64)
    for at, memory in _windows(file, scan.position, room):
        window = memory[room - len(kept) :]
        window[: len(kept)] = kept
        begin = at - len(kept)
        starts, lengths = np.concatenate([waiting, scan.take(window, begin)], axis=1)
        whole = int(np.searchsorted(starts + lengths + FOOTER, begin + len(window), "right"))
        if look is not None and whole:
            look.take(window, starts[:whole] - begin, lengths[:whole], begin)
        waiting = np.stack([starts[whole:], lengths[whole:]])
        if scan.done or scan.length >= sparse(file):
            break
        needed = scan.position if whole == len(starts) else int(starts[whole]) - HEADER
        kept = window[needed - begin :].copy()
    if look is not None:
        for start, length in waiting.T.tolist():
            look.take_on_disk(start, length)


def _windows(file: Handle, start: int, room: int) -> Iterator[tuple[int, Bytes]]:
    """Yield offsets from `start` on, and `room` bytes of memory with those of the file behind them.

    They are read by threads ahead of their use, and valid until the next ones are asked for.
    """
    nbytes = WINDOW if file.fd >= 0 else WINDOW_APART
    starts = range(start, file.nbytes, nbytes)

    def read(k: int) -> tuple[int, Bytes]:
        at = starts[k]
        memory = buffers[k % AHEAD][: room + min(nbytes, file.nbytes - at)]
        if file.fd >= 0:
            file.read_into(memory[room:], at)
        else:  # by one request
            memory[room:] = np.frombuffer(file.pread_blocks(len(memory) - room, [at])[0], np.uint8)
        return at, memory

    buffers = [np.empty(room + nbytes, np.uint8) for _ in range(min(AHEAD, len(starts)))]
    pending: deque[Future[tuple[int, Bytes]]] = deque()
    with ThreadPoolExecutor(READERS) as pool:
        for k in range(len(starts)):
            if len(pending) == AHEAD:
                yield pending.popleft().result()
            pending.append(pool.submit(read, k))
        while pending:
            yield pending.popleft().result()
