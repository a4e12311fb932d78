"""The bytes of the records, at any offset: of a plain file, or of what a compressed one unpacks to.

`PackedFile` reads GZIP and ZLIB as TensorFlow writes them: one stream over the whole file, or
several one after another. Reading the headers unpacks it in bounded memory. A deflated stream can
only be read from its beginning, so the first read of values unpacks it once more, to a temporary
file, which has no name and goes with the handle.
"""

from __future__ import annotations

import shutil
import struct
import tempfile
import threading
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from dsprep.core.schema import Ints
from dsprep.errors import FormatError, TargetError
from dsprep.formats.tfrecord.example import view
from dsprep.formats.tfrecord.framing import FOOTER, HEADER, TRUNCATED, Index, Scan, is_header
from dsprep.storage.base import Handle
from dsprep.storage.identity import Status
from dsprep.storage.paths import open_file
from dsprep.storage.ranges import pread_into

Packing: TypeAlias = Literal["gzip", "zlib"]

WINDOW = 4 << 20
"""Bytes of one read while the headers are collected."""
SPARSE, SPARSE_APART = 64 << 10, 8 << 20
"""From this record size on, headers are read one by one; below, the whole file is read. The second
one is of a file without a descriptor, each read of which is a request."""
PIECE, PIECES = 16 << 20, 3
"""Bytes of one request for such a file, and how many are under way."""
HOPS = 32
"""Headers of such a file that are read before their records are looked at, while they are kept."""
READERS = 2
"""Threads that read windows of a file."""
AHEAD = 3
"""Windows that are read, or being read, and not yet looked at."""
HEAD = 1 << 20
"""Unpacked bytes of a compressed file that stay in memory: what is looked at when it is opened."""
INPUT = 64 << 10
"""Compressed bytes given to the decoder at a time."""
KEPT, KEPT_SHARE = 64 << 20, 8
"""Bytes of a compressed record that is waited for, and their share of the memory; a larger one is
looked at in a second pass."""
LEAST_RECORD, UNPACKED = 64 << 20, 256
"""A record of a compressed file may have so many bytes, or so many times those of the file."""


def packing(head: bytes) -> Packing | None:
    """Return how a file that begins with `head` is compressed, judged by its magic bytes."""
    if head[:3] == b"\x1f\x8b\x08":
        return "gzip"
    if len(head) >= 2 and head[0] & 0x8F == 8 and int.from_bytes(head[:2], "big") % 31 == 0:
        return "zlib"
    return None


def holds_records(head: bytes) -> bool | None:
    """Whether a file holds records, judged by `head`, its first 1 KiB or all of it.

    None if it is empty, or unpacks to nothing, which is a file of no records.
    """
    if not head:
        return None
    if is_header(head):
        return True
    if packing(head) is None:
        return False
    if stated_nbytes(head) is not None:  # its records may begin behind a long comment
        return True
    decoder = zlib.decompressobj(wbits=32 + 15)
    try:
        start = decoder.decompress(head, HEADER)
    except zlib.error:
        return False
    return None if decoder.eof and not start else is_header(start)


class Look(Protocol):
    """What is given the records while their headers are read."""

    def take(self, buffer: NDArray[np.uint8], starts: Ints, lengths: Ints, at: int) -> None:
        """Take records that are in `buffer`, the bytes from offset `at` on, with their CRCs."""

    def take_on_disk(self, start: int, length: int) -> None:
        """Take a record whose payload begins at offset `start`, and is not in memory."""


def _look(look: Look, window: NDArray[np.uint8], at: int, starts: Ints, lengths: Ints) -> None:
    """Show records to `look`, of which the first ones are in `window`."""
    inside = int(np.searchsorted(starts + lengths + FOOTER, at + len(window), "right"))
    if inside:
        look.take(window, starts[:inside] - at, lengths[:inside], at)
    for start, length in zip(starts[inside:].tolist(), lengths[inside:].tolist(), strict=True):
        look.take_on_disk(start, length)


def read_index(file: Handle, look: Look | None = None, stop: int | None = None) -> Index:
    """Read all headers, and show every record to `look`; of a compressed file, unpack it once.

    With `stop` those of the first records only, and nothing behind them.

    Raises `FormatError` if the stream or a header is damaged, or either ends too early.
    """
    if isinstance(file, PackedFile):
        return file.unpack(look, stop)
    size = file.nbytes
    if file.fd < 0 and int.from_bytes(file.pread(8, 0), "little") < SPARSE_APART:
        return _read_through(file, _pieces(file), look, KEPT, stop)
    here: tuple[NDArray[np.uint8], int] = np.empty(0, np.uint8), 0

    def taken(starts: Ints, lengths: Ints) -> None:
        if look is not None:
            _look(look, *here, starts, lengths)

    scan = Scan(file.path, size, taken if look is not None else None, stop)
    window = np.empty(min(WINDOW, size), np.uint8)
    while scan.position + HEADER <= size and not scan.full:
        if scan.length >= sparse(file):
            here = np.empty(0, np.uint8), 0
            if scan.hop(file, HOPS if file.fd < 0 else 4096):
                continue
        begin = scan.position
        part = window[: min(WINDOW, size - begin)]
        file.read_into(part, begin)
        here = part, begin
        scan.take(part, begin)
        if scan.length < sparse(file):
            # They overlap, so that every header is whole in one of them.
            starts = range(scan.position, size - HEADER + 1, WINDOW - HEADER)
            for at, part in windows(file, starts, WINDOW):
                here = part, at
                scan.take(part, at)
                if scan.full:
                    break
    return scan.index(size)


def sparse(file: Handle) -> int:
    """Return from which record size on reading what is needed of each takes less than all."""
    return SPARSE if file.fd >= 0 else SPARSE_APART


def _pieces(file: Handle) -> Iterator[bytes]:
    """Yield all bytes of a file, some long reads at a time."""
    for start in range(0, file.nbytes, PIECES * PIECE):
        stop = min(start + PIECES * PIECE, file.nbytes)
        yield from file.pread_blocks(PIECE, range(start, stop, PIECE))


def _wanted(pieces: Iterable[bytes], scan: Scan) -> Iterator[bytes]:
    """Yield bytes that come one after another until `scan` has the records that it wants."""
    end = 0
    try:
        for data in pieces:
            end += len(data)
            yield data
            if scan.full and scan.position <= end:
                return
    except FormatError as error:
        whole = scan.count - (scan.position > end)
        raise error.with_fix(scan.advice(whole, scan.position)) from error


def _read_through(
    file: Handle, pieces: Iterable[bytes], look: Look | None, kept: int, stop: int | None
) -> Index:
    """Read all headers, and show all records, of bytes that come one after another."""
    begun: list[tuple[int, int]] = []  # a record that is not all in the window
    far: list[tuple[int, int]] = []  # those that are too large to wait for

    def taken(starts: Ints, lengths: Ints) -> None:
        inside = starts + lengths + FOOTER <= at + len(window)
        if look is not None and inside.any():
            look.take(window, starts[inside] - at, lengths[inside], at)
        for record in zip(starts[~inside].tolist(), lengths[~inside].tolist(), strict=True):
            (begun if record[1] <= kept else far).append(record)

    stored = file.stored.nbytes if isinstance(file, PackedFile) else file.nbytes
    end = None if isinstance(file, PackedFile) else file.nbytes
    scan = Scan(file.path, end, taken if look is not None else None, stop)
    parts: list[bytes] = []  # of a record that has begun, or of a header
    have = at = 0
    for data in _wanted(pieces, scan):
        parts.append(data)
        have += len(data)
        if begun and at + have < sum(begun[0]) + FOOTER:
            continue
        window = np.frombuffer(b"".join(parts), np.uint8)
        if begun:
            taken(*np.array([begun.pop()], np.int64).T)
        scan.take(window, at)
        if scan.length > max(LEAST_RECORD, UNPACKED * stored):
            raise FormatError(
                f"record {scan.count - 1} unpacks to far more than the file holds",
                where=file.path,
                expected=f"at most {UNPACKED} times its {stored} bytes",
                found=f"{scan.length} bytes",
                fix=f"if that is right, unpack it first: gzip -dc {file.path.name} > FILE",
            )
        needed = begun[0][0] if begun else scan.position
        used = min(len(window), max(0, needed - at))
        parts, have, at = [window[used:].tobytes()], len(window) - used, at + used
    index = scan.index(at + have)
    for start, length in far:
        assert look is not None
        look.take_on_disk(start, length)
    return index


def windows(file: Handle, starts: range, nbytes: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Yield each start, and up to `nbytes` from there on, read by threads ahead of their use.

    The bytes are valid until the next window is asked for.
    """

    def read(k: int) -> tuple[int, NDArray[np.uint8]]:
        at = starts[k]
        out = buffers[k % AHEAD][: min(nbytes, file.nbytes - at)]
        file.read_into(out, at)
        return at, out

    buffers = [np.empty(nbytes, np.uint8) for _ in range(min(AHEAD, len(starts)))]
    pending: deque[Future[tuple[int, NDArray[np.uint8]]]] = deque()
    with ThreadPoolExecutor(READERS) as pool:
        for k in range(len(starts)):
            if len(pending) == AHEAD:
                yield pending.popleft().result()
            pending.append(pool.submit(read, k))
        while pending:
            yield pending.popleft().result()


class _Cursor:
    """A decoder, the offset in the file of what it takes next, and that of what comes out next."""

    def __init__(self, file: PackedFile) -> None:
        self.file, self.at, self.position = file, 0, 0
        self._decoder: zlib._Decompress | None = None
        self._tail = b""

    def read(self, limit: int) -> bytes:
        """Return 1 to `limit` bytes, or none at the end of the file."""
        file = self.file
        while True:
            if not self._tail:
                self._tail = file.stored.pread(INPUT, self.at)
                self.at += len(self._tail)
            given = self._tail
            if self._decoder is None:
                if not given.strip(b"\0"):  # zeros after the last stream are padding
                    if given:
                        self._tail = b""
                        continue
                    return b""
                self._decoder = zlib.decompressobj(wbits=32 + 15)
            try:
                data = self._decoder.decompress(given, limit)
            except zlib.error as error:
                raise file.damaged(self) from error
            if self._decoder.eof:
                self._tail, self._decoder = self._decoder.unused_data, None
            else:
                self._tail = self._decoder.unconsumed_tail
                if not given and not data:
                    raise FormatError(
                        f"the {file.codec} stream ends too early",
                        where=f"{file.path}, offset {self.at}",
                        fix=TRUNCATED,
                    )
            if data:
                self.position += len(data)
                return data


class PackedFile(Handle):
    """A file compressed as a whole with GZIP or ZLIB; its offsets are those of the unpacked bytes.

    `nbytes` are the bytes that it unpacks to, once its index has been read, and `kept` those of a
    record that is looked at in memory.
    """

    def __init__(self, stored: Handle, codec: Packing, kept: int = KEPT) -> None:
        self.stored, self.name, self.status = stored, stored.name, stored.status
        self.codec, self._kept = codec, kept
        self.nbytes = 0
        self._head = b""
        self._unpacked: IO[bytes] | None = None
        self._lock = threading.Lock()  # over making it

    def damaged(self, cursor: _Cursor) -> FormatError:
        """Return the error for compressed bytes that cannot be."""
        return FormatError(
            f"the {self.codec} stream is damaged",
            where=f"{self.path}, before offset {cursor.at}",
        )

    def unpack(self, look: Look | None = None, stop: int | None = None) -> Index:
        """Read all headers; see `read_index`."""

        def pieces() -> Iterator[bytes]:
            cursor = _Cursor(self)
            while data := cursor.read(1 << 20):
                self._head += data[: HEAD - len(self._head)]
                self.nbytes = cursor.position
                yield data

        return _read_through(self, pieces(), look, self._kept, stop)

    def _descriptor(self) -> int:
        """Return the descriptor of the temporary file of the unpacked bytes."""
        with self._lock:
            if self._unpacked is None:
                self._unpacked = self._to_disk()
            return self._unpacked.fileno()

    def _to_disk(self) -> IO[bytes]:
        """Return a temporary file without a name, which has the unpacked bytes."""
        folder = tempfile.gettempdir()
        if shutil.disk_usage(folder).free < self.nbytes:
            raise self._no_space(folder)
        cursor = _Cursor(self)
        unpacked = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed with the handle)
        try:
            while cursor.position < self.nbytes and (data := cursor.read(INPUT)):
                try:
                    unpacked.write(data)
                    unpacked.flush()
                except OSError as error:
                    raise self._no_space(folder) from error
            if cursor.position < self.nbytes:
                raise FormatError(
                    "the file has changed since its records were counted",
                    where=self.path,
                    expected=f"{self.nbytes} unpacked bytes",
                    found=cursor.position,
                )
        except BaseException:
            with suppress(OSError):
                unpacked.close()
            raise
        return unpacked

    def _no_space(self, folder: str) -> TargetError:
        return TargetError(
            f"{self.path.name} cannot be unpacked there, which reading its values takes",
            where=folder,
            expected=f"space for {self.nbytes} bytes",
            found=f"{shutil.disk_usage(folder).free} bytes",
            fix="set TMPDIR to a directory with more space",
        )

    @override
    def pread(self, nbytes: int, offset: int) -> bytes:
        out = np.empty(max(0, min(nbytes, self.nbytes - offset)), np.uint8)
        self.read_into(out, offset)
        return out.tobytes()

    @override
    def identify(self, offset: int | None = None) -> Status:
        return self.stored.identify(offset)

    @override
    def close(self) -> None:
        self.stored.close()
        if self._unpacked is not None:
            self._unpacked.close()

    @override
    def read_into(self, out: NDArray[np.uint8], offset: int) -> None:
        if offset + len(out) <= len(self._head):
            out[:] = np.frombuffer(self._head, np.uint8)[offset : offset + len(out)]
        else:
            pread_into(self._descriptor(), out, offset, self.path)
        self.check_same()


def open_stream(path: Path, memory: int) -> Handle:
    """Return the bytes of the file `path`, unpacked if need be, in so much memory."""
    file = open_file(path)
    head = file.pread(1024, 0)
    codec = None if is_header(head) else packing(head)
    kept = min(KEPT, memory // KEPT_SHARE)
    return file if codec is None else PackedFile(file, codec, kept)


# --- members of groups ---------------------------------------------------------------------

# A reader of GZIP sees one stream, whatever members it is made of (RFC 1952, section 2.2). In the
# header of a group's member an extra field with the name ``dS`` states the bytes of the member as
# u64 little-endian, so that members can be found without being unpacked; a comment fills it up to
# a whole stripe. (Empty members do not serve: tf.data takes the first one for the end of the file.)

_MAGIC = b"\x1f\x8b\x08"
_FEXTRA, _FCOMMENT = 4, 16
_UNKNOWN_SYSTEM = 255
_HEAD = struct.Struct("<3sB4xBB")
_EXTRA = struct.Struct("<H2sHQ")
_TAIL = struct.Struct("<II")

MEMBER = _HEAD.size + _EXTRA.size
"""Bytes of the header of a group's member, without a comment."""


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
    total = MEMBER + sum(map(len, parts))
    missing = -total % align
    comment = b" " * (missing - 1) + b"\0" if missing else b""
    head = _HEAD.pack(_MAGIC, _FEXTRA | (_FCOMMENT if missing else 0), 0, _UNKNOWN_SYSTEM)
    parts[0] = head + _EXTRA.pack(12, b"dS", 8, total + missing) + comment
    return parts


def nbytes_at(file: Handle, offset: int) -> int:
    """Return the bytes of the member at `offset`; `FormatError` if `member` did not make it."""
    nbytes = stated_nbytes(file.pread(MEMBER, offset))
    if nbytes is not None:
        return nbytes
    raise FormatError(
        "there is no group where one was written",
        where=f"{file.name}, offset {offset}",
        fix="the file was changed while it was being written",
    )


def stated_nbytes(head: bytes) -> int | None:
    """Return the bytes of the member that begins with `head`; None if `member` did not make it."""
    if len(head) >= MEMBER and head[:3] == _MAGIC and head[3] & ~_FCOMMENT == _FEXTRA:
        length, name, size, nbytes = _EXTRA.unpack_from(head, _HEAD.size)
        if (length, name, size) == (12, b"dS", 8) and nbytes > MEMBER:
            return int(nbytes)
    return None
