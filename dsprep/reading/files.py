"""The files of a dataset, opened when they are needed, and some of them kept open."""

from __future__ import annotations

import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dsprep.core.schema import Bytes, Ints
from dsprep.errors import changed
from dsprep.storage.base import Handle
from dsprep.storage.identity import Identity
from dsprep.storage.local import DirectoryGuard
from dsprep.storage.paths import open_file

KEPT = 64
"""Files that stay open at most."""

SHARE = 8
"""One of so many of all files that this process may have open is kept open here."""

KNOWN = 1 << 16
"""Files that are recognised when they are opened again."""


def most_open(count: int = KEPT) -> int:
    """Return the number of files that may be open together, at most `most`."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return count if limit == resource.RLIM_INFINITY else max(1, min(count, limit // SHARE))


class Files:
    """The files that were opened last; safe to use from several threads.

    A file that is dropped from here stays open as long as someone reads it.

    Parameters
    ----------
    inside
        The directory that must hold the files.
    root
        Returns the path of a file entry, by its number.
    recorded
        Returns what is known of an entry.
    stated
        Returns what the format states about a path, for what is recorded of that.
    kept_open
        Files that stay open at most; None: `KEPT`.

    Attributes
    ----------
    expects
        Whether entries have to be what is recorded of them; else each file has to be what it was
        when it was opened first.
    """

    expects = False

    def __init__(
        self,
        inside: DirectoryGuard,
        root: Callable[[int], Path],
        recorded: Callable[[int], Identity] | None = None,
        stated: Callable[[Path], Mapping[str, Any]] = lambda path: {},
        kept_open: int | None = None,
    ) -> None:
        self._inside, self._path_of, self._recorded, self._stated = inside, root, recorded, stated
        self._open: OrderedDict[tuple[int, str], Handle] = OrderedDict()
        self._kept = most_open(KEPT if kept_open is None else kept_open)
        self._known: dict[tuple[int, str], tuple[int, int]] = {}  # sizes and time stamps
        self._newest: dict[int, int | None] = {}  # of entries that have other ones than recorded
        self._root = (-1, "")  # of the entry that was asked for last
        self._lock = threading.Lock()

    def get(self, entry: int, path: str) -> Handle:
        """Return the file at `path` below file entry number `entry`, open.

        Raises
        ------
        OSError
            If it cannot be opened.
        ChangedError
            If it is not the file that it was before, or that is recorded.
        FormatError
            If a link leads out of the dataset's directory.
        """
        key = entry, path
        with self._lock:
            opened = self._open.get(key)
            if opened is not None:
                self._open.move_to_end(key)
                return opened
        recorded = None if self._recorded is None else self._recorded(entry)
        known = recorded if recorded is not None and recorded.is_object and not path else None
        made = open_file(self._name(entry, path), known)
        self._inside.check(made)
        with self._lock:
            if known is None or made.fd >= 0:  # else each read names the version
                self._check(key, made.name, (made.nbytes, made.mtime_ns))
            if self.expects:
                made.judge = partial(self._judge, entry)
            opened = self._open.setdefault(key, made)
            if len(self._open) > self._kept:
                self._open.popitem(last=False)
        return opened

    def _name(self, entry: int, path: str) -> str:
        below = self._root
        if below[0] != entry:
            below = self._root = entry, os.fspath(self._path_of(entry))
        return f"{below[1]}/{path}" if path else below[1]

    def read_each(
        self, entry: int, names: Sequence[bytes], begins: Ints, ends: Ints, out: Bytes
    ) -> None:
        """Fill ``out[begins[i]:ends[i]]`` with files of just as many bytes; none is kept open.

        Raises
        ------
        OSError, FormatError
            As `get` and `Handle.read_whole` do.
        """
        statuses: Sequence[os.stat_result | None] = [None] * len(names)
        if self.expects:
            statuses = self._inside.read_each(self._name(entry, ""), names, begins, ends, out)
        newest = self._newest_of(entry)
        # Looked at after it was read: nobody wrote to it until then if it is not newer.
        for i, facts in enumerate(statuses):
            if facts is not None and newest is not None and facts.st_mtime_ns <= newest:
                continue
            path = os.fsdecode(names[i])
            if facts is None:
                self.get(entry, path).read_whole(out[begins[i] : ends[i]])
                continue
            with self._lock:
                now = facts.st_size, facts.st_mtime_ns
                self._check((entry, path), self._name(entry, path), now)
            newest = self._newest_of(entry)

    def _newest_of(self, entry: int) -> int | None:
        """Return the time stamp that a file entry is known to have; None: it is not known."""
        if entry in self._newest or not self.expects or self._recorded is None:
            return self._newest.get(entry)
        return self._recorded(entry).mtime_ns

    def _check(self, key: tuple[int, str], file: str | Path, now: tuple[int, int]) -> None:
        """Raise `ChangedError` if a file, of this size and time stamp, is not what it should be."""
        (entry, path), before = key, self._known.get(key)
        if before == now:
            return
        if self._recorded is None or not self.expects:
            if before is not None:
                raise changed(file, "it was replaced or written to")
        else:
            newest = self._newest_of(entry)
            same = now == (self._recorded(entry).nbytes, newest)
            if path:  # of many files, only the newest time stamp is known
                same = before is None and newest is not None and now[1] <= newest
            if not same and (how := self._judge(entry)) is not None:
                raise changed(file, how)
        if len(self._known) < KNOWN:
            self._known[key] = now

    def _judge(self, entry: int) -> str | None:
        """Return how a file entry differs from its recorded identity; None if it does not."""
        assert self._recorded is not None
        path = self._path_of(entry)
        now = Identity.look(path)
        how = self._recorded(entry).differs(path, now, self._stated)
        if how is None:
            self._newest[entry] = now.mtime_ns
        return how

    def close(self) -> None:
        """Forget all files."""
        with self._lock:
            self._open.clear()
