"""Directories of datasets: the files in them, their bytes, and removing them."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from operator import attrgetter
from pathlib import Path

from dsprep.storage.mounts import existing
from dsprep.storage.paths import DirectoryEntry, StorePath, as_path, open_file, scan, status_of

HIDDEN = (".nfs", ".fuse_hidden")
"""The beginnings of names of removed files that are still open, on clients of NFS and FUSE."""


def remove(path: Path) -> bool:
    """Remove a file or a whole directory, if it is there.

    Returns
    -------
    Whether it is gone: files that are open may stay as `HIDDEN`, and then the directories they
    are in; so do directories in which this client does not see all that its server has.
    """
    if path.is_dir() and not path.is_symlink():
        return soon(lambda: _tree_removed(path))
    return is_gone(path.unlink)


SOON = 1.0
"""Seconds that `soon` waits."""


def soon(is_removed: Callable[[], bool]) -> bool:
    """Return whether something is gone, perhaps after a moment for files of this process.

    Clients over FUSE may tell their server that a file was closed when `close` has long returned.
    """
    until = time.monotonic() + SOON
    while not is_removed():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def _tree_removed(path: Path) -> bool:
    """Remove all of a directory that can be removed; return whether it is gone."""

    def fail(error: OSError) -> None:
        raise error

    for directory, folders, files in os.walk(path, topdown=False, onerror=fail):
        for name in (*files, *folders):
            each = Path(directory, name)
            is_gone(each.rmdir if name in folders and not each.is_symlink() else each.unlink)
    return is_gone(path.rmdir)


def is_gone(remove: Callable[[], None]) -> bool:
    """Remove a file or an empty directory; return False if it is in use, or not empty."""
    try:
        remove()
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


SIDECARS = (".dsprep.json", ".dsprep.bin")
"""The ends of names of files that are beside datasets, and not part of them."""

WORKING = ".dsprep-partial"
"""The end of names of directories in which datasets are made."""


def data_files(path: Path) -> Iterator[Path]:
    """Yield the files that hold the data of `path`: itself, or all under a directory.

    Not among them are LMDB's lock file, which readers create and change, what is beside datasets
    that are parts of the directory, and removed files that are still open (`HIDDEN`).
    """
    if not path.is_dir():
        yield path
        return
    for entry in data_entries(path):
        yield as_path(entry.path)


def sized_files(path: Path) -> Iterator[tuple[Path, int]]:
    """Yield `data_files` with their sizes."""
    if not path.is_dir():
        yield path, path.stat().st_size
        return
    for entry in data_entries(path):
        yield as_path(entry.path), status_of(entry).st_size


def data_entries(directory: Path) -> Iterator[DirectoryEntry]:
    """Yield the entries of `data_files` under a directory, in the order of their paths.

    The entries of one directory are in memory at a time. Directories below that are gone, or may
    not be read, count as empty; any other error is raised.
    """
    waiting = [_entries(directory)]
    while waiting:
        if not waiting[-1]:
            waiting.pop()
            continue
        entry = waiting[-1].pop()
        name = entry.name
        if not _is_directory(entry):
            if name != "lock.mdb" and not name.endswith(SIDECARS) and not name.startswith(HIDDEN):
                yield entry
        elif not name.endswith(WORKING) and not entry.is_symlink():
            below: list[DirectoryEntry] = []
            with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                below = _entries(entry.path)
            waiting.append(below)


def _entries(directory: str | Path) -> list[DirectoryEntry]:
    """Return what is in a directory, the last name first."""
    return sorted(scan(directory), key=attrgetter("name"), reverse=True)


def _is_directory(entry: DirectoryEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def tree_nbytes(path: Path) -> int:
    """Return the bytes of a file, or of all data files under a directory."""
    return sum(nbytes for _, nbytes in sized_files(path))


def free_nbytes(path: Path) -> int:
    """Return the bytes that this user can still write to the file system of `path`."""
    return shutil.disk_usage(existing(path)).free


def drop_cached(paths: Iterable[Path]) -> None:
    """Drop data files from the page cache, as ``posix_fadvise(2)`` can without being root.

    What is not yet on the disk is written first. Pages that a process has mapped stay, and all
    where a file system cannot do it; of stores nothing is in that cache.
    """
    for path in paths:
        for file in map(open_file, data_files(path) if not isinstance(path, StorePath) else ()):
            with suppress(OSError):
                os.fdatasync(file.fd)
                os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
