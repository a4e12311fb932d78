"""Whether data are still those that were opened: what the file system tells of every file.

A mark is taken before anything is read. It travels with the work to other processes and is
compared before and after each part of it, so that no output mixes old data with new. That takes a
``stat`` of each file, and reads only where that does not decide.

What decides is size, time stamp and change time: nobody can set the last one, so a file that was
written to and given its time stamp back is noticed. Inodes are hints: clients such as sshfs number
files by themselves, and anew when they have forgotten them. Where change times are whole seconds,
as there, a mark also has a digest of sampled blocks, which decides for another inode.

On another node, or another mount, inodes, devices and on some file systems change times differ for
the same file. There sizes, time stamps and the digest are compared. The process that hands the work
out compares all of it in the end. Clients keep attributes and missing names for a while, too: what
seems to be changed or missing is opened first, which asks the server, and on another node it is
given `nodes.PATIENCE`.

What this job itself writes, under its lock, is another matter: nobody else can write to it, and
some clients and servers move its times by up to a second when it has long been closed. Of that,
sizes are compared; see `sole_writer`.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, overload

import numpy as np
from numpy.typing import NDArray

from dsprep.errors import DsprepError
from dsprep.storage.identity import (
    SECOND,
    UNITS,
    ChangedError,
    Status,
    changed,
    is_coarse,
    same_time,
    sole_writer,
    status,
)
from dsprep.storage.nodes import node, pauses, revalidate
from dsprep.storage.paths import StorePath, open_file, status_of
from dsprep.storage.trees import data_entries

SETTLED_NS = 2 * SECOND
"""How long ago what is looked at was changed last, so that a change from then on has another time:
kernels count change times in steps of some ms, and the clock of a server may be another one."""

BLOCKS = 16
BLOCK_NBYTES = 4096


def mount_of(facts: os.stat_result) -> str:
    """Return a word for this node and the mount of a file: where inodes mean the same."""
    return f"{node()} {facts.st_dev}"


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
        Of a directory: a digest of the name, size and time stamp (to two seconds) of each data
        file.
    times
        Of a directory: a digest of the exact times of each data file.
    at
        On which node and mount it was taken.
    sampled
        The digest of sampled blocks, where the change time is coarse; see `sample`.
    locked
        Whether this job writes it and nobody else can: sizes alone are compared then, also of its
        files while they are read; see `sole_writer`.
    """

    path: Path
    status: Status
    files: int = 1
    each: str = ""
    times: str = ""
    at: str = ""
    sampled: str = ""
    locked: bool = False

    @classmethod
    def of(cls, path: Path, *, sampled: bool = False) -> Self:
        """Return the mark of `path` as it is now; `sampled`: with its digest in any case.

        Raises
        ------
        OSError
            If it is gone, or cannot be looked at.
        """
        mark, files = cls.with_files(path)
        return replace(mark, sampled=sample(files)) if sampled or is_coarse(mark.status) else mark

    @classmethod
    def with_files(cls, path: Path, *, refresh: bool = False) -> tuple[Self, DataFiles]:
        """Return the mark of `path` without its digest, and its data files with their sizes.

        `refresh`: the server is asked, whatever the client has kept.
        """
        if refresh:
            revalidate(path)
        is_stored = isinstance(path, StorePath)
        began, own = 0 if is_stored else time.time_ns(), path.stat()
        if not stat.S_ISDIR(own.st_mode):
            alone = DataFiles(
                path, b"", array("q", [0]), array("q", [own.st_size]), watched={path: status(own)}
            )
            alone.settle(began, own.st_ctime_ns)
            return cls(path, status(own), at=mount_of(own)), alone
        names, ends, sizes, seals = bytearray(), array("q"), array("q"), array("q")
        folders: dict[str | Path, Status] = {}

        def watch(folder: str | Path) -> None:
            folders[folder] = status(Path(folder).stat())

        nbytes = newest = latest = 0
        lines, times = (hashlib.blake2b(digest_size=8) for _ in range(2))
        root = len(os.fsencode(path).rstrip(b"/")) + 1
        for entry in data_entries(path) if is_stored else data_entries(path, watch):
            if refresh:
                revalidate(Path(entry.path))
            facts = status_of(entry)
            mtime, ctime, size = facts.st_mtime_ns, facts.st_ctime_ns, facts.st_size
            name = os.fsencode(entry.path)[root:]
            names += name
            ends.append(len(names))
            sizes.append(size)
            seals.append(hash((name, size, mtime, ctime)))
            nbytes, newest, latest = nbytes + size, max(newest, mtime), max(latest, ctime)
            lines.update(b"%b\0%d\0%d\n" % (name, size, mtime // UNITS[-1]))
            times.update(b"%b\0%d\0%d\n" % (name, mtime, ctime))
        each, exact = (state.hexdigest() if names else "" for state in (lines, times))
        combined = Status(own.st_ino, nbytes, newest, latest)
        files = DataFiles(path, names, ends, sizes, seals, folders)
        files.settle(began, latest)
        return cls(path, combined, len(sizes), each, exact, mount_of(own)), files

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON, without its path."""
        return {k: v for k, v in vars(self).items() if k != "path"}

    @classmethod
    def from_json(cls, json: Any, path: Path) -> Self:
        """Return what `to_json` wrote, for what now lies at `path`.

        Raises
        ------
        TypeError, ValueError, KeyError
            If it is something else.
        """
        return cls(path, **{**json, "status": Status(*map(int, json["status"]))})

    def check(self) -> None:
        """Raise `ChangedError` unless all is still as it was, other `OSError` if that is unknown.

        Of a directory the names of the data files count too, and the status of each.
        """
        now = self._now(refresh=False)
        if now is not None and self.is_same(now):
            return
        far = not self.at.startswith(f"{node()} ")
        for pause in (0.0, *pauses()):
            time.sleep(pause)
            now = self._now(refresh=True)
            if now is not None and self.is_same(now):
                return
            newer = now is not None and now.status.mtime_ns >= self.status.mtime_ns
            if not far or (newer and not self.locked):
                break  # clients keep what is older, not what is newer
        if now is None or now.status[1:] != self.status[1:]:
            raise changed(self.path, self.status, None if now is None else now.status)
        raise ChangedError(
            "the file was replaced while it was read"
            if not self.each
            else "a file in the directory was replaced while it was read",
            where=self.path,
            fix="start again once nobody writes to it",
        )

    def is_untouched(self) -> bool:
        """Whether status, names and times are the same now, on this mount; nothing is opened."""
        now = self._now(refresh=False)
        return now is not None and replace(now, path=self.path, sampled=self.sampled) == self

    @property
    def lasting(self) -> list[Any]:
        """What stays the same on every node, mount and after a restart, as JSON."""
        _, nbytes, mtime, _ = self.status
        return [self.files, nbytes, mtime // UNITS[-1], self.each]

    @property
    def exact(self) -> list[Any]:
        """What else stays the same until someone writes to the data, on this mount."""
        return [self.at, *self.status[2:], self.times]

    def _now(self, *, refresh: bool) -> Mark | None:
        try:
            return Mark.with_files(self.path, refresh=refresh)[0]
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            return None

    def is_same(self, now: Mark) -> bool:
        """Whether what is there `now` is what it was; its digest is taken where that decides."""
        if self.locked:
            return self.has_sizes(now)
        if not self.is_alike(now):
            return False
        here = self.at == now.at
        exact = same_time(self.status.ctime_ns, now.status.ctime_ns) and self.times == now.times
        if here and not exact:
            return False
        if not self.sampled or (exact and not self.each and self.status.inode == now.status.inode):
            return True
        return self.has_sampled()

    def has_sizes(self, now: Mark) -> bool:
        """Whether there are as many files and bytes."""
        return (self.status.nbytes, self.files) == (now.status.nbytes, now.files)

    def is_alike(self, now: Mark) -> bool:
        """Whether sizes, names and time stamps are the same, as far as times are kept."""
        mine, other = self.status, now.status
        return self.has_sizes(now) and self.each == now.each and same_time(mine[2], other[2])

    def has_sampled(self) -> bool:
        """Whether the sampled blocks of what lies there now are those of the digest."""
        return sample(Mark.with_files(self.path)[1]) == self.sampled


def seal(name: bytes, now: Status) -> int:
    """Return what is another number when a file is: of its path, size, and both of its times."""
    return hash((name, *now[1:]))


class DataFiles(Sequence[tuple[Path, int]]):
    """The data files of a file or directory with their sizes, by path; see `data_files`.

    Parameters
    ----------
    root
        The file or directory.
    names, ends
        Paths from there in order, back to back, and where each of them ends.
    sizes
        Bytes of each.
    seals
        Of a directory, the `seal` of each.
    watched
        What else was looked at, and its status: the folders, before they were listed; or the file.

    Attributes
    ----------
    settled
        Whether whatever changes any of it from now on gives it another change time.
    """

    def __init__(
        self,
        root: Path,
        names: bytes | bytearray,
        ends: array[int],
        sizes: array[int],
        seals: array[int] | None = None,
        watched: Mapping[str | Path, Status] = MappingProxyType({}),
    ) -> None:
        self.sizes, self.watched, self.settled = sizes, dict(watched), False
        self._root, self._names, self._ends = root, names, ends
        self._seals = np.sort(np.array(seals or (), np.int64))
        self._others: list[bytes] | None = None

    def settle(self, at: int, latest: int) -> None:
        """Find out whether it is `settled`, of when looking began and the latest change time."""
        latest = max([latest, *(seen.ctime_ns for seen in self.watched.values())])
        self.settled = latest % SECOND != 0 and latest < at - SETTLED_NS

    def has(self, seals: Sequence[int]) -> NDArray[np.bool_]:
        """Return which seals are those of files, bool of shape ``(n,)``."""
        some = np.array(seals, np.int64)
        at = np.searchsorted(self._seals, some)
        return np.searchsorted(self._seals, some, "right") > at

    def is_same(self, compared: Iterable[bytes]) -> bool:
        """Whether there are the same files, and all is what it was.

        `compared`: the paths from the root of files that are compared when they are read, which
        are not looked at here.
        """
        if self._others is None:
            names, left = bytes(self._names), set(compared)
            ends = zip((0, *self._ends), self._ends, strict=False)
            self._others = [name for a, b in ends if (name := names[a:b]) and name not in left]
        try:
            for path, seen in self.watched.items():
                revalidate(Path(path))
                if status(Path(path).stat()) != seen:
                    return False
            now = [seal(name, status(self._path(name).stat())) for name in self._others]
        except OSError:
            return False
        return bool(self.has(now).all())

    def _path(self, name: bytes) -> Path:
        return self._root / os.fsdecode(name)

    @classmethod
    def none(cls, root: Path) -> Self:
        """Return no files."""
        return cls(root, b"", array("q"), array("q"))

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, number: int) -> tuple[Path, int]: ...

    @overload
    def __getitem__(self, number: slice) -> list[tuple[Path, int]]: ...

    def __getitem__(self, number: int | slice) -> Any:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        number %= len(self)
        name = self._names[self._ends[number - 1] if number else 0 : self._ends[number]]
        return self._path(bytes(name)), self.sizes[number]


def sample(files: Sequence[tuple[Path, int]], blocks: int = BLOCKS) -> str:
    """Return the digest of blocks spread over files: the first, the last, and those between."""
    files = files if isinstance(files, DataFiles) else sorted(files)
    sizes = files.sizes if isinstance(files, DataFiles) else [size for _, size in files]
    total = sum(sizes)
    state = hashlib.blake2b(digest_size=8)
    last = max(0, total - BLOCK_NBYTES)
    positions = sorted({last * k // (blocks - 1) for k in range(blocks)})
    number = begin = 0
    offsets: dict[int, list[int]] = {}
    for position in positions if files else ():
        while number < len(files) - 1 and position >= begin + sizes[number]:
            begin += sizes[number]
            number += 1
        offsets.setdefault(number, []).append(position - begin)
    for number, within in offsets.items():
        with closing(open_file(files[number][0])) as file:
            for block in file.pread_blocks(BLOCK_NBYTES, within):
                state.update(block)
    return state.hexdigest()


@contextmanager
def unchanged(marks: Iterable[Mark]) -> Iterator[None]:
    """Raise `ChangedError` if data are not those of the marks, before or after what is done.

    That is also raised where what is done fails: its own error may just be a consequence.
    """
    marks = tuple(marks)
    with sole_writer(*(mark.path for mark in marks if mark.locked)):
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
