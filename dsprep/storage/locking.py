"""One process at a time: ``flock``, or where a file system refuses that, a file made exclusively.

The kernel releases the first when a process ends. The second stays when one is killed: whether
that process is gone, its user decides, who is told its host and number.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

from dsprep.core.closing import failure_closes
from dsprep.storage.ranges import close_quietly, fstat, named, pwrite_all

OWNER = ".owner"
"""The end of the name of the file that is made exclusively, after that of the lock."""

_REFUSED = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC


class Lock:
    """A locked file, made if it is not there; unlocked by `release`, or when nothing refers to it.

    A child that is forked meanwhile does not have it: it would keep it as long as it lives.

    Parameters
    ----------
    path
        The file.
    shared
        Whether others may lock it, too, if they share it.
    seconds
        How long others that exclude this are waited for.
    signed
        Whether others are to be told which process has it.

    Raises
    ------
    BlockingIOError
        If they have not released it then; it is of the file that says who has it.
    FileNotFoundError
        If its directory is not there, or was removed meanwhile.
    OSError
        If the file system cannot lock.
    """

    _fd = -1
    _record: Path | None = None

    def __init__(
        self, path: Path, *, shared: bool = False, seconds: float = 0.0, signed: bool = False
    ) -> None:
        self._fd = os.open(path, _FLAGS, 0o600)
        _locks.add(self)
        end = time.monotonic() + seconds
        with failure_closes(self.release):
            while True:
                try:
                    self._take(path, shared=shared)
                    break
                except BlockingIOError:
                    if time.monotonic() >= end:
                        raise
                    time.sleep(0.005)
            if not os.path.samestat(fstat(self._fd), path.stat()):
                raise FileNotFoundError(errno.ENOENT, "it was removed", str(path))
            if signed:
                pwrite_all(self._fd, [signature().ljust(127).encode() + b"\n"], 0)

    def _take(self, path: Path, *, shared: bool) -> None:
        try:
            fcntl.flock(self._fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        except OSError as error:
            if shared or error.errno not in _REFUSED:
                raise named(error, self._fd) from error
            path = path.with_name(path.name + OWNER)
            with suppress(FileExistsError), path.open("x") as file:
                self._record = path
                file.write(signature())
                return
        else:
            return
        who = path.read_text(errors="replace").strip()
        words = f"in use by {who or 'another process'}"
        raise BlockingIOError(errno.EAGAIN, words, str(path))

    def release(self) -> None:
        """Release it; twice is allowed."""
        record, fd = self._record, self._forget()
        if record is not None:
            record.unlink(missing_ok=True)
        if fd >= 0:
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
            close_quietly(fd)

    def _forget(self) -> int:
        fd, self._fd, self._record = self._fd, -1, None
        return fd

    def __del__(self) -> None:
        self.release()


def signature() -> str:
    """Return who this process is."""
    return f"process {os.getpid()} on {os.uname().nodename}"


_locks: WeakSet[Lock] = WeakSet()


def _forked() -> None:
    for lock in list(_locks):
        close_quietly(lock._forget())


os.register_at_fork(after_in_child=_forked)
