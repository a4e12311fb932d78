"""The files of a dataset, opened when they are needed, and some of them kept open."""

from __future__ import annotations

import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from dsprep.errors import FormatError
from dsprep.schema import Ints

KEPT = 64
"""Files that stay open at most."""

SHARE = 8
"""One of so many of all files that this process may have open is kept open here."""


class File:
    """A file open for reading, closed when nothing refers to it any more.

    Attributes
    ----------
    fd
        Its descriptor.
    nbytes
        Its size when it was opened.
    path
        Where it is.
    """

    def __init__(self, path: Path) -> None:
        self.fd = -1
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        found = os.fstat(self.fd)
        self.nbytes = found.st_size
        self._time = found.st_mtime_ns

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    def size(self) -> int:
        """Return its size now."""
        return os.fstat(self.fd).st_size

    def check_same(self) -> None:
        """Raise `FormatError` if the file was written to since it was opened."""
        found = os.fstat(self.fd)
        if found.st_size != self.nbytes or found.st_mtime_ns != self._time:
            raise FormatError(
                "the file changed while it was read",
                where=self.path,
                expected=f"{self.nbytes} bytes of time stamp {self._time}, as when it was opened",
                found=f"{found.st_size} bytes of {found.st_mtime_ns}",
                fix="start again once nobody writes to it",
            )

    def check(self, offsets: Ints, lengths: Ints, what: str) -> None:
        """Raise `FormatError` unless every range lies within the file.

        Parameters
        ----------
        offsets, lengths
            int64, shape ``(n,)``, from a sidecar: they may be anything.
        what
            What they are, for the message.
        """
        bad = (offsets < 0) | (lengths < 0) | (lengths > self.nbytes)
        bad |= offsets > self.nbytes - lengths
        if bad.any():
            i = int(bad.argmax())
            raise FormatError(
                f"the sidecar gives a place of {what} that is not in the file",
                where=self.path,
                expected=f"within {self.nbytes} bytes",
                found=f"{lengths[i]} bytes at {offsets[i]}",
                fix="write the sidecar again with dsprep provenance",
            )


class Files:
    """The files that were opened last; safe to use from several threads.

    A file that is dropped from here stays open as long as someone reads it.
    """

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[int, str], File] = OrderedDict()
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._kept = KEPT if limit == resource.RLIM_INFINITY else max(1, min(KEPT, limit // SHARE))
        self._lock = threading.Lock()

    def get(self, entry: int, path: str, root: Callable[[int], Path]) -> File:
        """Return a file, open.

        Parameters
        ----------
        entry
            The number of the file entry.
        path
            The file's path below it; empty for itself.
        root
            Gives the path of a file entry.

        Raises
        ------
        OSError
            If it cannot be opened.
        """
        key = entry, path
        with self._lock:
            found = self._open.get(key)
            if found is not None:
                self._open.move_to_end(key)
                return found
        made = File(root(entry) / path if path else root(entry))
        with self._lock:
            found = self._open.setdefault(key, made)
            if len(self._open) > self._kept:
                self._open.popitem(last=False)
        return found

    def close(self) -> None:
        """Forget all files."""
        with self._lock:
            self._open.clear()
