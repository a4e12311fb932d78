"""The files of a dataset, opened when they are needed, and some of them kept open."""

from __future__ import annotations

import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from pathlib import Path

from dsprep.core.schema import Bytes, Ints
from dsprep.storage.base import Handle, Known
from dsprep.storage.identity import Status, changed, is_coarse, same_file, status
from dsprep.storage.local import DirectoryGuard
from dsprep.storage.marks import DataFiles, Mark, seal
from dsprep.storage.paths import open_file

KEPT = 64
"""Files that stay open at most."""

SHARE = 8
"""One of so many of all files that this process may have open is kept open here."""

KNOWN = 1 << 16
"""Files that are recognised when they are opened again."""


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
    known
        Returns what is known of a file by entry and path: see `dsprep.storage.base.Known`.
    most
        Files that stay open at most; None: `KEPT`.
    """

    def __init__(
        self,
        inside: DirectoryGuard,
        first: Callable[[int, str, Handle], None] | None = None,
        known: Callable[[int, str], Known | None] | None = None,
        kept_open: int | None = None,
    ) -> None:
        self._inside, self._first, self._recorded = inside, first, known
        self._open: OrderedDict[tuple[int, str], Handle] = OrderedDict()
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        kept = KEPT if kept_open is None else kept_open
        self._kept = kept if limit == resource.RLIM_INFINITY else max(1, min(kept, limit // SHARE))
        self._known: dict[tuple[int, str], Status] = {}
        self._marks: dict[int, Mark] = {}
        self._seen: Mapping[int, DataFiles] = {}
        self._compared: set[int] = set()  # entries whose marks were compared since these are known
        self._root = (-1, "")  # of the entry that was asked for last
        self._lock = threading.Lock()

    def expect(self, marks: Mapping[int, Mark], seen: Mapping[int, DataFiles]) -> None:
        """Take these to be the files of some entries, whatever they were before.

        `seen`: the data files of some of them, when their marks were taken.
        """
        with self._lock:
            self._seen, self._compared = seen, set()
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

    def get(self, entry: int, path: str, root: Callable[[int], Path]) -> Handle:
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
            known = self._open.get(key)
            if known is not None:
                self._open.move_to_end(key)
                return known
        recorded = None if self._recorded is None else self._recorded(entry, path)
        made = open_file(self._name(entry, path, root), recorded)
        self._inside.check(made)
        if self._first and self._marks and entry not in self._marks and key not in self._known:
            self._first(entry, path, made)
        with self._lock:
            self._check(key, made.name, made.status)
            known = self._open.setdefault(key, made)
            if len(self._open) > self._kept:
                self._open.popitem(last=False)
        return known

    def _name(self, entry: int, path: str, root: Callable[[int], Path]) -> str:
        below = self._root
        if below[0] != entry:
            below = self._root = entry, os.fspath(root(entry))
        return f"{below[1]}/{path}" if path else below[1]

    def read_each(
        self,
        entry: int,
        names: Sequence[bytes],
        begins: Ints,
        ends: Ints,
        root: Callable[[int], Path],
        out: Bytes,
    ) -> None:
        """Fill ``out[begins[i]:ends[i]]`` with files of just as many bytes; none is kept open.

        Raises
        ------
        OSError, FormatError
            As `get` and `Handle.read_whole` do.
        """
        seen, above = self._seen.get(entry), self._name(entry, "", root)
        found: Sequence[os.stat_result | None] = [None] * len(names)
        if entry in self._marks:
            found = self._inside.read_each(above, names, begins, ends, out)
        # Looked at after it was read: nobody wrote to it until then if it is as it is expected.
        seals = [
            0 if f is None else hash((name, f.st_size, f.st_mtime_ns, f.st_ctime_ns))
            for name, f in zip(names, found, strict=True)
        ]
        same = repeat(False) if seen is None else seen.has(seals).tolist()
        for i, (facts, is_same) in enumerate(zip(found, same, strict=False)):
            if is_same and facts is not None:
                continue
            path = os.fsdecode(names[i])
            if facts is None:
                self.get(entry, path, root).read_whole(out[begins[i] : ends[i]])
                continue
            with self._lock:
                if self._known.get((entry, path)) != (now := status(facts)):
                    self._check((entry, path), f"{above}/{path}", now)

    def _check(self, key: tuple[int, str], file: str | Path, now: Status) -> None:
        mark, before, unknown = self._marks.get(key[0]), self._known.get(key), None
        if before is None and mark is not None:
            before = mark.status
            if mark.each:
                unknown = self._seen.get(key[0])
                if unknown is not None and unknown.has([seal(os.fsencode(key[1]), now)])[0]:
                    return
                if unknown is not None:
                    unknown.settled = False  # the next check looks at all of them
                # Of many files, only the newest of their change times is known.
                newer = now.ctime_ns > before.ctime_ns
                before = now._replace(ctime_ns=before.ctime_ns) if newer else now
        if before is not None and not same_file(file, before, now):
            raise changed(Path(file), before, now)
        if unknown is not None and mark is not None and key[0] not in self._compared:
            mark.check()  # some clients give the same file other times: this tells
            self._compared.add(key[0])
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
