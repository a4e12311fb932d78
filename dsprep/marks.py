"""Whether data are still those that were opened: what the file system tells of every file.

A mark is taken before anything is read. It travels with the work to other processes and is
compared before and after each part of it, so that no output mixes old data with new. That takes a
``stat`` of each file and no reads.

A mark has the change time too, which nobody can set: a file that was written to and given its
time stamp back is noticed. It has no device number, which differs between the nodes of a cluster.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeAlias

from dsprep.errors import DsprepError, FormatError
from dsprep.storage import data_files

Status: TypeAlias = tuple[int, int, int, int]
"""Inode, size, time stamp and change time of a file, both in ns."""


class ChangedError(FormatError):
    """Data changed while they were read."""


def status(found: os.stat_result) -> Status:
    """Return what of a file's status changes when it is written to or replaced."""
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def changed(path: Path, before: Status, now: Status | None) -> ChangedError:
    """Return the error for a file that was replaced, written to, or (None) removed."""
    return ChangedError(
        "the file changed while it was read",
        where=path,
        expected=_told(before, now),
        found="nothing there" if now is None else _told(now, before),
        fix="start again once nobody writes to it",
    )


def _told(one: Status, other: Status | None) -> str:
    """Return what of a status differs from the other one, all of it if there is none."""
    inode, nbytes, mtime, ctime = one
    words = f"inode {inode}", f"{nbytes:,} bytes", f"time stamp {mtime}", f"change time {ctime}"
    return ", ".join(w for k, w in enumerate(words) if other is None or one[k] != other[k])


@dataclass(frozen=True)
class Mark:
    """What a file, or all data files of a directory together, were when they were looked at.

    Attributes
    ----------
    path
        The file or directory.
    status
        Its inode, the bytes of all data files, and their newest time stamp and change time.
    files
        Data files.
    each
        Of a directory: a digest of the name and status of each data file.
    """

    path: Path
    status: Status
    files: int = 1
    each: str = ""

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return the mark of `path` as it is now.

        Raises
        ------
        OSError
            If it is gone, or cannot be looked at.
        """
        return cls.with_files(path)[0]

    @classmethod
    def with_files(cls, path: Path) -> tuple[Self, list[tuple[Path, int]]]:
        """Return the mark of `path`, and its data files with their sizes."""
        own = path.stat()
        files: list[tuple[Path, int]] = []
        nbytes = newest = latest = 0
        lines = []
        for file in data_files(path):
            found = own if file == path else file.stat()
            files.append((file, found.st_size))
            nbytes += found.st_size
            newest = max(newest, found.st_mtime_ns)
            latest = max(latest, found.st_ctime_ns)
            if file != path:
                lines.append(f"{file.relative_to(path)}\0{status(found)}\n")
        each = "\n".join(sorted(lines)).encode("utf-8", "surrogateescape")
        digest = hashlib.blake2b(each, digest_size=8).hexdigest() if lines else ""
        return cls(path, (own.st_ino, nbytes, newest, latest), len(files), digest), files

    def check(self) -> None:
        """Raise `ChangedError` unless all is still as it was, other `OSError` if that is unknown.

        Of a directory the names of the data files count too, and the status of each.
        """
        try:
            now = Mark.of(self.path)
        except FileNotFoundError:
            raise changed(self.path, self.status, None) from None
        if now == self:
            return
        if now.status != self.status:
            raise changed(self.path, self.status, now.status)
        raise ChangedError(
            "a file in the directory was replaced while it was read",
            where=self.path,
            fix="start again once nobody writes to it",
        )


@contextmanager
def unchanged(marks: Iterable[Mark]) -> Iterator[None]:
    """Raise `ChangedError` if data are not those of the marks, before or after what is done.

    That is also raised where what is done fails: its own error may just be a consequence.
    """
    marks = tuple(marks)
    check(marks)
    try:
        yield
    except (DsprepError, OSError):
        check(marks)
        raise
    check(marks)


def check(marks: Iterable[Mark]) -> None:
    """Raise `ChangedError` if data are not those of the marks."""
    for mark in marks:
        mark.check()
