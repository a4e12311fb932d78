"""Space on the disk, and bringing files to it: reserved, synced, closed."""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import suppress
from pathlib import Path

from dsprep.storage.libc import c_function
from dsprep.storage.ranges import named

_INT, _LONG = ctypes.c_int, ctypes.c_int64
_allocate = c_function("fallocate64", _INT, _INT, _INT, _LONG, _LONG)
_start_sync = c_function("sync_file_range", _INT, _INT, _LONG, _LONG, ctypes.c_uint)

_KEEP_SIZE = 1
_WAIT_BEFORE, _SYNC_FILE_RANGE_WRITE = 1, 2


def preallocate(fd: int, offset: int, nbytes: int) -> None:
    """Reserve space of a file for writes to come, perhaps behind its end, which does not move.

    They are faster for it, and the file is less fragmented. Where the file system cannot do it, or
    has not that much, nothing is reserved: the writes will say if there is no space. Truncating the
    file, also to the size that it has, releases what was not written.
    """
    if _allocate is not None:
        _allocate(fd, _KEEP_SIZE, offset, nbytes)


def sync(fd: int, *, data: bool = False) -> None:
    """Make a file durable, or only its `data`; an error names it."""
    try:
        (os.fdatasync if data else os.fsync)(fd)
    except OSError as error:
        raise named(error, fd) from error


def start_sync(fd: int) -> None:
    """Have the kernel begin to write a file to the disk, so that a later `sync` waits for little.

    Nothing is durable by that. Errors are left to `sync`, which reports them in any case; systems
    that cannot do it write in their own time.
    """
    if _start_sync is not None:
        _start_sync(fd, 0, 0, _SYNC_FILE_RANGE_WRITE)


def write_error(fd: int) -> None:
    """Raise `OSError` if some of a file, written at any time, could not be brought to the disk.

    Nothing is waited for: of a byte beyond its end, none is on its way.
    """
    if _start_sync is not None and _start_sync(fd, 1 << 62, 1, _WAIT_BEFORE) < 0:
        number = ctypes.get_errno()
        if number not in NEVER:
            raise named(OSError(number, os.strerror(number)), fd)


def close(*fds: int) -> None:
    """Close files that were written to, all of them; an error names the first that it is of.

    Servers with quotas may report only now that there is no space. Descriptors are closed then,
    too, and must not be closed again.
    """
    failed: OSError | None = None
    for fd in fds:
        path = None
        with suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115 (it is not a real path)
        try:
            os.close(fd)
        except OSError as error:
            failed = failed or OSError(error.errno, error.strerror, path)
    if failed is not None:
        raise failed


NEVER = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY)
"""Errors of a file system that does not have a call, whatever it is asked to do by it."""


def sync_directory(path: Path) -> bool:
    """Make the names in the directory `path` durable; return False where that cannot be asked for.

    Some network file systems, and some over FUSE, sync no directories: there names are as durable
    as the server keeps them.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in NEVER:
            raise OSError(error.errno, error.strerror, str(path)) from error
        return False
    finally:
        os.close(fd)
    return True
