"""The directory with all copies: how much they may take, and what is removed to make room."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.cache.copies import (
    ASKED,
    FACTS,
    NOT_SYNCED,
    PLANNED,
    READY,
    SUFFIX,
    UNFINISHED,
    Copy,
    Facts,
    is_synced,
    remove_unfinished,
    remove_unused,
)
from dsprep.cache.locks import PATIENCE, Lock
from dsprep.cache.root import Root
from dsprep.core.schema import Ints
from dsprep.core.units import as_nbytes
from dsprep.errors import UsageError

LOCK = "dsprep-cache.lock"

SHARE = 0.75
"""Of what is free and what the cache holds, how much it may take by default."""


@dataclass(frozen=True)
class Size:
    """How much copies may take: bytes, or a share of what is free and what they take already."""

    nbytes: int | None = None
    share: float = SHARE

    @classmethod
    def parse(cls, given: int | str | None) -> Size:
        """Return what a number of bytes, or text such as ``"1.6TB"`` or ``"75%"``, means."""
        if given is None:
            return cls()
        if isinstance(given, str) and given.strip().endswith("%"):
            try:
                share = float(given.strip()[:-1]) / 100
            except ValueError:
                share = 0.0
            if not 0 < share <= 1:
                raise UsageError(f"{given!r} is not a share", expected="above 0 %, at most 100 %")
            return cls(None, share)
        return cls(as_nbytes(given))

    def limit(self, root: Path, used: int) -> int:
        """Return the bytes that all copies below a directory may take, of which some are used."""
        space = os.statvfs(root)
        free = space.f_bavail * space.f_frsize
        allowed = int((free + used) * self.share) if self.nbytes is None else self.nbytes
        return min(allowed, free + used)


@dataclass(frozen=True)
class CopyInfo:
    """What is known of a copy without using it.

    Attributes
    ----------
    path
        Its directory.
    dataset
        What it is a copy of.
    part
        A word for the mini-epoch that it holds; empty: of the whole dataset.
    pieces, ready
        Groups, or ranges of samples, that it is for, and that it has.
    nbytes
        That it takes of the tier.
    used
        When it was used last: seconds since 1970.
    in_use
        Whether a process uses it now.
    complete
        Whether it has all that was asked for and there was room for.
    problem
        Why it is worthless; None: it is not.
    """

    path: Path
    dataset: str
    part: str
    pieces: int
    ready: int
    nbytes: int
    used: float
    in_use: bool
    complete: bool
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {**asdict(self), "path": str(self.path)}


class CacheFolder:
    """A directory of copies, made if it is not there.

    Parameters
    ----------
    root
        As the user has named it.
    shared
        Whether copies of everybody count who may write to it; see `dsprep.cache.root`.
    create
        Whether to make it.

    Attributes
    ----------
    root
        The directory with the copies, open: that, or a directory of this user in it.

    Raises
    ------
    UsageError
        If it is not there, and not to be made.
    OSError
        If it cannot be made or written to.
    """

    def __init__(self, root: str | Path, *, shared: bool = False, create: bool = True) -> None:
        self.root = Root.find(Path(root), shared=shared, create=create)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep all others from making or removing copies."""
        lock = Lock(self.root.open_file(LOCK, os.O_RDWR | os.O_CREAT), seconds=PATIENCE)
        try:
            yield
        finally:
            lock.release()

    def names(self) -> list[str]:
        """Return the names of all directories that may be copies."""
        return [
            name
            for name in self.root.names()
            if name.endswith(SUFFIX) and not name.startswith(".") and self._is_directory(name)
        ]

    def unfinished(self) -> list[str]:
        """Return what ended processes were making or removing; ask with the directory locked."""
        names = (name for name in self.root.names() if name.startswith("."))
        return [name for name in names if name.endswith(UNFINISHED) and self._is_directory(name)]

    def _is_directory(self, name: str) -> bool:
        try:
            return stat.S_ISDIR(self.root.stat(name).st_mode)
        except FileNotFoundError:
            return False

    def used(self) -> int:
        """Return the bytes that all copies take."""
        return sum(map(self.resident, self.names()))

    def open(self, facts: Facts, edges: Ints, size: Size | None = None) -> Copy:
        """Open a copy; make it if it is not there, and remove what was left unfinished.

        `edges` are those of the pieces of the dataset; `size` is what all copies may take.
        Unfinished are mini-epochs that are not complete and that nobody uses: of jobs that were
        killed.
        """
        if not self.root.is_writable:  # root's
            return self._complete(facts)
        with self.locked():
            for name in self.unfinished():
                remove_unfinished(self.root, name)
            for name in self.names():
                info = self.info(name) if name != facts.name else None
                if info and (info.problem or (info.part and not info.complete)):
                    remove_unused(self.root, name)
            if size is not None and not self.root.has(facts.name):
                nbytes = facts.nbytes(edges)
                if self.make_room(nbytes, size, facts.name) < nbytes:
                    path = str(self.root.path / facts.name)
                    raise OSError(errno.ENOSPC, "there is no room for one more copy", path)
            return Copy.create(self.root, facts, edges)

    def _complete(self, facts: Facts) -> Copy:
        """Open a copy in a directory in which nothing can be made."""
        copy = Copy(self.root, facts.name)
        if copy.facts != facts or not copy.is_intact:
            raise PermissionError(errno.EACCES, "it is damaged, and root's", str(copy.path))
        return copy

    def make_room(self, nbytes: int, size: Size, kept: str) -> int:
        """Return how many bytes may be taken; copies that nobody uses are removed for `nbytes`.

        Those that have not been used for longest go first. To be called with the directory locked.
        """
        for name in self.unfinished():
            remove_unfinished(self.root, name)
        used = self.used()
        room = size.limit(self.root.inside, used) - used
        if room >= nbytes:
            return room
        for name in sorted(self.names(), key=self._last_use):
            if name != kept and not remove_unused(self.root, name):
                used = self.used()
                room = size.limit(self.root.inside, used) - used
                if room >= nbytes:
                    break
        return room

    def remove(self, name: str, *, dry_run: bool = False) -> str:
        """Remove a copy unless somebody uses it; see `dsprep.cache.copies.remove_unused`."""
        with self.locked():
            return remove_unused(self.root, name, dry_run=dry_run)

    # --- what is known of a copy without using it --------------------------------------------

    def info(self, name: str) -> CopyInfo:
        """Return what is known of a copy."""
        path, nbytes, used = self.root.path / name, self.resident(name), self._last_use(name)
        in_use = self._is_used(name)
        try:
            directory = self.root.copy(name)
            facts, started = Facts.parse(directory.read(FACTS))
            states = np.frombuffer(directory.read("state"), np.uint8)
            problem = None if is_synced(directory, started) else NOT_SYNCED
        except (OSError, ValueError) as error:
            return CopyInfo(path, "", "", 0, 0, nbytes, used, in_use, False, str(error))
        ready, coming = int((states == READY).sum()), (states == ASKED) | (states == PLANNED)
        words, counts = (facts.dataset, facts.part), (len(states), ready)
        complete = ready > 0 and not bool(coming.any()) and problem is None
        return CopyInfo(path, *words, *counts, nbytes, used, in_use, complete, problem)

    def infos(self) -> list[CopyInfo]:
        """Return what is known of all copies."""
        return [self.info(name) for name in self.names()]

    def resident(self, name: str) -> int:
        """Return the bytes that the files of a copy take."""
        total = 0
        with contextlib.suppress(OSError):  # it is gone, or somebody else's
            directory = self.root.directory(name)
            with os.scandir(directory.fd) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
        return total

    def _last_use(self, name: str) -> float:
        try:
            return self.root.directory(name).stat("use").st_mtime
        except OSError:
            return 0.0

    def _is_used(self, name: str) -> bool:
        try:
            fd = self.root.copy(name).open_file("use", os.O_RDWR)
        except OSError:
            return False
        try:
            Lock(fd).release()
        except OSError:
            return True
        return False
