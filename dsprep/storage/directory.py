"""Directories that are kept open, and names that are looked up in them and lead nowhere else.

Whoever may write to a directory may put a symbolic link, a FIFO, a second name of somebody's file,
or a directory of theirs where something else is expected, also between two looks. So a directory is
opened once, whose it is is asked of what was opened, and a name in it has to be a plain file or a
directory.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Self

from dsprep.storage.ranges import close_quietly, fstat
from dsprep.storage.trees import remove

ROOT = 0
"""The user who may change everything anyway."""

OTHERS = stat.S_IWGRP | stat.S_IWOTH
"""Permissions to write that more than the owner has."""

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Directory:
    """An open directory; closed when nothing refers to it any more.

    Errors of its methods name the path of what they are of.

    Parameters
    ----------
    path
        Where it was when it was opened, for messages.
    fd
        The directory, open; it is closed in the end.

    Attributes
    ----------
    status
        What it was when it was opened.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self.fd = path, fd
        self.status = fstat(fd)

    @classmethod
    def open(cls, path: str | Path, flags: int = os.O_RDONLY) -> Self:
        """Open a directory that the user has named, perhaps by a link.

        With ``O_PATH``, names are looked up in it even if it cannot be read.
        """
        return cls(Path(path), os.open(path, _FLAGS | flags))

    def __del__(self) -> None:
        close_quietly(self.fd)

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Have errors that are raised within name a file of the directory by its whole path."""
        try:
            yield
        except OSError as error:
            words = error.strerror
            if error.errno == errno.ELOOP:
                words = "it is a symbolic link, which is not followed"
            raise OSError(error.errno, words, str(self.path / name)) from error

    @property
    def inside(self) -> Path:
        """A path that leads to it, whatever has its name by now."""
        return Path(f"/proc/self/fd/{self.fd}")

    # --- whose it is -------------------------------------------------------------------------

    @cached_property
    def maker(self) -> int:
        """The user to whom the file system gives what this process makes in it.

        Servers that map users, and many file systems over FUSE, name another one than the process
        has.
        """
        name = f".dsprep-owner-{secrets.token_hex(8)}"
        try:
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self.fd)
        except OSError:
            return os.geteuid()
        try:
            return fstat(fd).st_uid
        finally:
            os.close(fd)
            with suppress(OSError):
                os.unlink(name, dir_fd=self.fd)

    def is_own(self, status: os.stat_result) -> bool:
        """Whether something in it, or it itself, is of the user of this process."""
        return status.st_uid == os.geteuid() or status.st_uid == self.maker

    def is_trusted(self, status: os.stat_result) -> bool:
        """Whether nobody but this user and root can change something in it, or it itself."""
        return not status.st_mode & OTHERS and (status.st_uid == ROOT or self.is_own(status))

    # --- what is in it -----------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return all names in it."""
        return sorted(os.listdir(self.fd))  # noqa: PTH208 (it is no path)

    def stat(self, name: str) -> os.stat_result:
        """Return the status of what has a name, itself if it is a link."""
        with self._naming(name):
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)

    def has(self, name: str) -> bool:
        """Whether there is something of a name."""
        try:
            self.stat(name)
        except FileNotFoundError:
            return False
        return True

    def directory(self, name: str) -> Directory:
        """Open a directory in it, which is not a link."""
        with self._naming(name):
            fd = os.open(name, _FLAGS | os.O_NOFOLLOW, dir_fd=self.fd)
        return Directory(self.path / name, fd)

    def open_file(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Open a plain file in it.

        With ``O_CREAT`` it is made if it is not there; with ``O_EXCL`` too it must not be.

        Raises
        ------
        OSError
            Also if it is a link, or something else than a file, or is to be written to and has
            another name elsewhere.
        """
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # of a FIFO, nobody is waited for
        with self._naming(name):
            if not flags & os.O_CREAT:
                return _plain(os.open(name, flags, dir_fd=self.fd), flags)
            try:
                fd = os.open(name, flags | os.O_EXCL, self.status.st_mode & 0o666, dir_fd=self.fd)
            except FileExistsError:
                if flags & os.O_EXCL:
                    raise
                return _plain(os.open(name, flags & ~os.O_CREAT, dir_fd=self.fd), flags)
            self._share(fd, self.status.st_mode & 0o666)
            return _plain(fd, flags)

    def _share(self, fd: int, mode: int) -> None:
        """Give a new file or directory to all who may write to this one."""
        if self.status.st_mode & OTHERS:
            if fstat(fd).st_gid != self.status.st_gid:
                os.fchown(fd, -1, self.status.st_gid)
            os.fchmod(fd, mode)

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        with os.fdopen(self.open_file(name), "rb") as file:
            return file.read()

    def rename(self, name: str, to: str) -> None:
        """Give what has a name another one in this directory."""
        with self._naming(name):
            os.rename(name, to, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def remove(self, name: str) -> bool:
        """Remove a file, or a directory with all that is in it; see `storage.remove`."""
        try:
            return remove(self.inside / name)
        except OSError as error:
            path = str(error.filename or "").replace(str(self.inside), str(self.path), 1)
            raise OSError(error.errno, error.strerror, path or str(self.path)) from error


def _plain(fd: int, flags: int) -> int:
    """Return an open file that is plain; close what is not, and raise `OSError`."""
    try:
        facts = fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "it is not a plain file")
        if facts.st_nlink > 1 and flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EMLINK, "it has another name, by which somebody may use it")
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NONBLOCK)
    except BaseException:
        close_quietly(fd)
        raise
    return fd
