"""The files of a dataset, opened when they are needed, and some of them kept open."""

from __future__ import annotations

import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from dsprep.core.schema import Bytes, Ints
from dsprep.layout.model import misfit
from dsprep.storage.marks import ChangedError, Mark, Status, changed, is_coarse, same_file, status
from dsprep.storage.ranges import close_quietly, fstat, pread_into
from dsprep.storage.scatter import NEAR, read_spans
from dsprep.storage.trees import DirectoryGuard

KEPT = 64
"""Files that stay open at most."""

SHARE = 8
"""One of so many of all files that this process may have open is kept open here."""

KNOWN = 1 << 16
"""Files that are recognised when they are opened again."""


class File:
    """A file open for reading, closed when nothing refers to it any more.

    `where` is its path as it was opened, `status` and `nbytes` are what it was then. What reads it
    looks at it afterwards, and raises `ChangedError` if it is not the same any more: see
    `check_same`.
    """

    def __init__(self, path: str | Path, fd: int | None = None) -> None:
        self.fd = -1
        self.where = path
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if fd is None else fd
        found = fstat(self.fd)
        self.status, self._links = status(found), found.st_nlink
        self.nbytes = self.status[1]

    @property
    def path(self) -> Path:
        """Its path."""
        return Path(self.where)

    def close(self) -> None:
        """Close it at once; closing twice is allowed."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            close_quietly(fd)

    def __del__(self) -> None:
        self.close()

    def read_into(self, out: Bytes, offset: int) -> None:
        """Fill `out` from `offset` on."""
        pread_into(self.fd, out, offset, self.where)
        self.check_same(offset)

    def read_checked(self, out: Bytes, offset: int, what: str) -> None:
        """Fill `out` from `offset` on, which may be anything; see `check`."""
        if not 0 <= offset <= self.nbytes - len(out):
            self.check(np.array([offset]), np.array([len(out)]), what)
        if len(out):
            self.read_into(out, offset)

    def read_spans(
        self, offsets: Ints, lengths: Ints, out: Bytes, places: Ints, near: int = NEAR
    ) -> None:
        """Read ranges into `out`; see `dsprep.storage.scatter.read_spans`."""
        read_spans(self.fd, offsets, lengths, out, places, self.where, near)
        self.check_same(int(offsets[0]) if len(offsets) else None)

    def itself(self, path: str) -> File:
        """Return this file, whatever the path: what opens the files of a dataset of one file."""
        del path
        return self

    def size(self) -> int:
        """Return its size now."""
        return fstat(self.fd).st_size

    def check_same(self, offset: int | None = None) -> None:
        """Raise `ChangedError` if the file was written to since it was opened.

        Another name, or one less when another file takes its place, changes its change time, too.
        Where that cannot be seen, the error has the file and the `offset` that was read.
        """
        found = fstat(self.fd, offset)
        now = status(found)
        if now != self.status and not same_file(self.where, self.status, now):
            renamed = same_file(self.where, self.status, (*now[:3], self.status[3]))
            if not renamed or found.st_nlink == self._links:
                raise changed(self.path, self.status, now)
            self.status, self._links = now, found.st_nlink

    def check_end(self, end: int) -> None:
        """Raise `ChangedError` unless it ends at `end`, as when its records were located."""
        if end != self.nbytes:
            raise ChangedError(
                "the file has another size than when it was located",
                where=self.path,
                expected=f"{end:,} bytes",
                found=f"{self.nbytes:,} bytes",
                fix="where a sidecar gives the size, write it again with dsprep provenance; "
                "otherwise start again once nobody writes to it",
            )

    def check(self, offsets: Ints, lengths: Ints, what: str) -> None:
        """Raise `FormatError` unless every range, int64 of shape ``(n,)``, lies within the file.

        The ranges may be anything; `what` names them in the message.
        """
        bad = (offsets < 0) | (lengths < 0) | (lengths > self.nbytes)
        bad |= offsets > self.nbytes - lengths
        if bad.any():
            i = int(bad.argmax())
            raise misfit(
                f"gives an extent of {what} that is not in the file",
                self.path,
                f"within {self.nbytes} bytes",
                f"{lengths[i]} bytes at {offsets[i]}",
            )


class Files:
    """The files that were opened last; safe to use from several threads.

    A file that is dropped from here stays open as long as someone reads it.

    Parameters
    ----------
    inside
        Where the files have to be.
    first
        Called with entry, path and file when one is opened for the first time of an entry of which
        `expect` was told nothing, though of others; raises if it is not the one that is meant.
    most
        Files that stay open at most; None: `KEPT`.
    """

    def __init__(
        self,
        inside: DirectoryGuard,
        first: Callable[[int, str, File], None] | None = None,
        most: int | None = None,
    ) -> None:
        self._inside, self._first = inside, first
        self._open: OrderedDict[tuple[int, str], File] = OrderedDict()
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        kept = KEPT if most is None else most
        self._kept = kept if limit == resource.RLIM_INFINITY else max(1, min(kept, limit // SHARE))
        self._known: dict[tuple[int, str], Status] = {}
        self._marks: dict[int, Mark] = {}
        self._root = (-1, "")  # of the entry that was asked for last
        self._lock = threading.Lock()

    def expect(self, marks: Mapping[int, Mark]) -> None:
        """Take these to be the files of some entries, whatever they were before."""
        with self._lock:
            if marks != self._marks:
                self._open.clear()
                self._known.clear()
                self._marks = dict(marks)

    def recognise(self, entry: int, path: str, file: Path, now: Status) -> None:
        """Raise `ChangedError` if a file, which is at `file`, is not what it was before; see `get`.

        What is seen for the first time, or is what it is expected to be, is remembered.
        """
        with self._lock:
            self._check((entry, path), file, now)

    def get(self, entry: int, path: str, root: Callable[[int], Path]) -> File:
        """Return the file at `path` below file entry number `entry`, open; `root` has its path.

        Raises
        ------
        OSError
            If it cannot be opened.
        ChangedError
            If it is not the file that it was before, or that it is expected to be.
        FormatError
            If a link leads out of the dataset's directory.
        """
        key = entry, path
        with self._lock:
            found = self._open.get(key)
            if found is not None:
                self._open.move_to_end(key)
                return found
        below = self._root
        if below[0] != entry:
            below = self._root = entry, os.fspath(root(entry))
        made = File(f"{below[1]}/{path}" if path else below[1])
        self._inside.check(made.fd, made.where)
        if self._first and self._marks and entry not in self._marks and key not in self._known:
            self._first(entry, path, made)
        with self._lock:
            self._check(key, made.where, made.status)
            found = self._open.setdefault(key, made)
            if len(self._open) > self._kept:
                self._open.popitem(last=False)
        return found

    def _check(self, key: tuple[int, str], file: str | Path, now: Status) -> None:
        mark, before = self._marks.get(key[0]), self._known.get(key)
        if before is None and mark is not None:
            before = mark.status
            if mark.each:  # of many files, only the newest of their change times is known
                before = (*now[:3], min(now[3], before[3]))
        if before is not None and not same_file(file, before, now):
            raise changed(Path(file), before, now)
        if before is None or before[0] == now[0] or not is_coarse(before):
            pass  # else neither another inode nor the same change time says much
        elif mark is not None and mark.sampled and not mark.each and not mark.has_sampled():
            raise changed(Path(file), before, now)
        if len(self._known) < KNOWN:
            self._known[key] = now

    def close(self) -> None:
        """Forget all files."""
        with self._lock:
            self._open.clear()
