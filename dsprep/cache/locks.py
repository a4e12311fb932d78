"""Locks on files of a cache: ``flock``, which the kernel releases when a process ends."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from contextlib import suppress
from weakref import WeakSet

from dsprep.storage.ranges import close_quietly, named

PATIENCE = 60.0
"""Seconds that another process, which may have been stopped, is waited for."""


class Lock:
    """A locked file; released by `release`, or when nothing refers to it any more.

    A child that is forked meanwhile does not have it: it would keep it as long as it lives.

    Parameters
    ----------
    fd
        The file, open; it is closed in the end.
    shared
        Whether others may lock it, too, if they share it.
    seconds
        How long others that exclude this are waited for.

    Raises
    ------
    BlockingIOError
        If they have not released it then.
    OSError
        If the file system cannot lock.
    """

    def __init__(self, fd: int, *, shared: bool = False, seconds: float = 0.0) -> None:
        self._fd = fd
        how, end = fcntl.LOCK_SH if shared else fcntl.LOCK_EX, time.monotonic() + seconds
        try:
            while not _tried(fd, how):
                if time.monotonic() >= end:
                    raise named(BlockingIOError(errno.EAGAIN, "it stays locked"), fd)
                time.sleep(0.005)
        except BaseException:
            self._forget()
            raise
        _locks.add(self)

    def release(self) -> None:
        """Release it; twice is allowed."""
        if self._fd >= 0:
            with suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            self._forget()

    def _forget(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close_quietly(fd)

    def __del__(self) -> None:
        self.release()


_locks: WeakSet[Lock] = WeakSet()


def _forked() -> None:
    for lock in list(_locks):
        lock._forget()


os.register_at_fork(after_in_child=_forked)


def _tried(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise named(error, fd) from error
    return True
