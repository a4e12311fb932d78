"""Ranges of open files: reads and writes that are whole or fail.

All of them release the GIL while the kernel works, and handle short reads and writes. No other
module calls ``pread`` or ``preadv`` of the system, except `dsprep.storage.scatter`, whose list of
addresses Python's calls cannot take; a test checks it.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

from dsprep.core.schema import Array
from dsprep.errors import FormatError

Result = TypeVar("Result")

Buffer: TypeAlias = bytes | bytearray | memoryview | Array

IOV_MAX = 1024
"""Buffers per call that Linux takes (``limits.h``)."""

CALL_NBYTES = 512 << 10
"""Bytes per write call. Larger ones often take three to four times as long on Linux 6.18 with
ext4, which then looks for page cache in blocks as large as the call."""

PAUSES = (0.0, 0.001, 0.01, 0.1, 1.0)
"""Seconds to wait before each further try of a call that the kernel answers with EAGAIN."""


def as_bytes(array: Array) -> memoryview:
    """Return the bytes of a C-contiguous array, without a copy."""
    return array.reshape(-1).view(np.uint8).data


def pread_into(fd: int, out: Array, offset: int, where: object) -> None:
    """Fill the C-contiguous array `out` from ``offset`` on.

    Raises
    ------
    FormatError
        If the file ends first.
    """
    view: Any = out if out.dtype.kind in "biufc" else as_bytes(out)  # others are not buffers
    try:
        done = os.preadv(fd, [view], offset)
    except BlockingIOError:
        done = 0  # it is tried again
    except OSError as error:
        raise named(error, fd, offset) from error
    if done != out.nbytes:
        view = as_bytes(out)
        done += preadv_most(fd, view[done:], offset + done)
        if done < len(view):
            raise ends_early(where, offset, len(view), done)


def pread_exact(fd: int, nbytes: int, offset: int, where: object) -> bytes:
    """Return ``nbytes`` bytes from ``offset`` on; for headers, not for payloads.

    Raises
    ------
    FormatError
        If the file ends first.
    """
    data = pread_most(fd, nbytes, offset)
    if len(data) < nbytes:
        raise ends_early(where, offset, nbytes, len(data))
    return data


def close_quietly(fd: int) -> None:
    """Close a file that was only read.

    A server that went away is told of where it was read; what closing says then changes nothing.
    """
    try:  # noqa: SIM105 (of small files this is called for each, and `suppress` costs more)
        os.close(fd)
    except OSError:
        pass


def pread_most(fd: int, nbytes: int, offset: int) -> bytes:
    """Return ``nbytes`` bytes from ``offset`` on, fewer only where the file ends first."""
    data = _again(os.pread, fd, nbytes, offset)
    if 0 < len(data) < nbytes:  # the end of the file, or a short read
        parts, done = [data], len(data)
        while done < nbytes and (more := _again(os.pread, fd, nbytes - done, offset + done)):
            parts.append(more)
            done += len(more)
        data = b"".join(parts)
    return data


def preadv_most(fd: int, view: memoryview, offset: int) -> int:
    """Fill `view` from ``offset`` on; return its bytes, fewer only where the file ends first."""
    done = 0
    while done < len(view) and (got := preadv_once(fd, view[done:], offset + done)):
        done += got
    return done


def preadv_once(fd: int, view: memoryview, offset: int) -> int:
    """Read from ``offset`` on by one call; return the bytes that came, which may be fewer."""
    return _again(os.preadv, fd, [view], offset)


def read_each(
    paths: Sequence[bytes], flags: int, view: memoryview, begins: Sequence[int], ends: Sequence[int]
) -> list[os.stat_result | None]:
    """Fill ``view[begins[i]:ends[i]]`` with regular files of just as many bytes, each by one call.

    Returns what each was after that; None of those with which that does not work.
    """
    statuses: list[os.stat_result | None] = []
    for path, a, b in zip(paths, begins, ends, strict=True):  # the less of Python here the better
        facts = None
        try:
            fd = os.open(path, flags)
            try:
                got = os.preadv(fd, [view[a:b]], 0)
                now = os.fstat(fd)
                if got == b - a == now.st_size and stat.S_ISREG(now.st_mode):
                    facts = now
            finally:
                close_quietly(fd)
        except OSError:
            pass  # reading it alone says what is wrong
        statuses.append(facts)
    return statuses


def _again(call: Callable[..., Result], fd: int, argument: Any, offset: int) -> Result:
    """Return what a system call returns; EAGAIN is tried again (EINTR is by Python itself)."""
    pauses = iter(PAUSES)
    while True:
        try:
            return call(fd, argument, offset)
        except OSError as error:
            pause = next(pauses, None) if isinstance(error, BlockingIOError) else None
            if pause is None:
                raise named(error, fd, offset) from error
        time.sleep(pause)


def fstat(fd: int, offset: int | None = None) -> os.stat_result:
    """Return the status of an open file; an error names it, and where it is read."""
    try:
        return os.fstat(fd)
    except OSError as error:
        raise named(error, fd, offset) from error


def truncate(fd: int, nbytes: int) -> None:
    """Give a file another size; an error names it."""
    try:
        os.ftruncate(fd, nbytes)
    except OSError as error:
        raise named(error, fd) from error


def named(error: OSError, fd: int, offset: int | None = None) -> OSError:
    """Return an error of a system call on a descriptor with the name of the file in it."""
    try:
        path = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115 (it is not a real path)
    except OSError:
        return error
    at = "" if offset is None else f" at offset {offset}"
    return OSError(error.errno, f"{error.strerror}{at}", path)


def ends_early(where: object, offset: int, expected: int, available: int) -> FormatError:
    """Return the error for a file that has fewer bytes from ``offset`` on than expected."""
    return FormatError(
        "the file ends too early",
        where=f"{where}, offset {offset}",
        expected=f"{expected} bytes",
        found=f"{available}",
        fix="the file is truncated or still being written",
    )


def pwrite_all(fd: int, buffers: Sequence[Buffer], offset: int) -> int:
    """Write `buffers` one after another from ``offset`` on; return the bytes written.

    A buffer is `bytes`, a `memoryview` of bytes, or a C-contiguous array of any dtype.
    """
    at = offset
    call: list[memoryview] = []
    size = 0
    for buffer in buffers:
        view = as_bytes(buffer) if isinstance(buffer, np.ndarray) else memoryview(buffer)
        rest = len(view)
        while rest:
            take = min(rest, CALL_NBYTES - size)
            call.append(view if take == len(view) else view[len(view) - rest :][:take])
            size, rest = size + take, rest - take
            if size == CALL_NBYTES or len(call) == IOV_MAX:
                _pwrite_call(fd, call, size, at)
                at += size
                call, size = [], 0
    if call:
        _pwrite_call(fd, call, size, at)
    return at + size - offset


def _pwrite_call(fd: int, views: list[memoryview], size: int, offset: int) -> None:
    """Write at most `IOV_MAX` views of `size` bytes together, in one call if the kernel can."""
    while (wrote := _again(os.pwritev, fd, views, offset)) < size:
        if not wrote:
            raise named(OSError(errno.EIO, "nothing can be written"), fd, offset)
        offset, size = offset + wrote, size - wrote  # interrupted, or the disk is nearly full
        while wrote >= len(views[0]):
            wrote -= len(views.pop(0))
        views[0] = views[0][wrote:]


def copy_range(source: int, target: int, nbytes: int, at: int, to: int) -> None:
    """Copy ``nbytes`` from offset ``at`` of one file to offset ``to`` of another, in the kernel."""
    done = 0
    while done < nbytes:
        try:
            moved = os.copy_file_range(source, target, nbytes - done, at + done, to + done)
        except OSError:  # across file systems, or a kernel that cannot
            moved = 0
        if not moved:  # some file systems say so instead
            chunk = pread_most(source, min(nbytes - done, 8 << 20), at + done)
            moved = pwrite_all(target, [chunk], to + done)
        if not moved:
            raise FormatError("a temporary file is shorter than expected", where=f"offset {at}")
        done += moved
