"""The directory with all copies: how much they may take, and what is removed to make room.

A directory is of one user.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

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
    remove_unused,
)
from dsprep.core.units import as_nbytes
from dsprep.errors import UsageError
from dsprep.storage.locking import Lock
from dsprep.storage.trees import remove

LOCK = "dsprep-cache.lock"

PATIENCE = 60.0
"""Seconds that another process, which may have been stopped, is waited for."""

SHARE = 0.75
"""Default share of the free space and its own copies that a cache may take."""


Size: TypeAlias = int | str | None
"""How much copies may take: bytes, text such as ``"1.6TB"``, or a share of what is free and what
they take already, such as ``"75%"``; None: `SHARE`."""


def parse_size(size: Size) -> int | float:
    """Return bytes, or a share."""
    if size is None:
        return SHARE
    if not (isinstance(size, str) and size.strip().endswith("%")):
        return as_nbytes(size)
    try:
        share = float(size.strip()[:-1]) / 100
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UsageError(f"{size!r} is not a share", expected="above 0 %, at most 100 %")
    return share


def size_limit(size: Size, root: Path, used: int) -> int:
    """Return the bytes that all copies below a directory may take, of which some are used."""
    space, allowed = os.statvfs(root), parse_size(size)
    most_nbytes = space.f_bavail * space.f_frsize + used
    return min(most_nbytes, int(allowed * (most_nbytes if isinstance(allowed, float) else 1)))


@dataclass(frozen=True)
class CopyInfo:
    """Facts about a copy, found without using it.

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


def find_root(path: Path, *, create: bool) -> Path:
    """Return a directory of copies, which is made if it may be.

    What a copy holds is given out as the dataset, so nobody else may write to it.

    Raises
    ------
    UsageError
        If it is not there, and not to be made; or others may write to it.
    OSError
        If it cannot be made.
    """
    if create:
        path.mkdir(0o700, parents=True, exist_ok=True)
    elif not path.is_dir():
        raise UsageError("there is no such directory", where=path)
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UsageError(
            "others may write to the directory of a cache",
            where=path,
            fix=f"name one that is not there yet, such as {path}/{os.geteuid()}, or chmod go-w it",
        )
    return path


class CacheFolder:
    """A directory of copies, made if it is not there; see `find_root`.

    Parameters
    ----------
    root
        The directory.
    size
        How much all copies may take.
    create
        Whether it is made.
    """

    def __init__(self, root: str | Path, size: Size = None, *, create: bool = True) -> None:
        self.root, self._size = find_root(Path(root), create=create), size
        parse_size(size)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep all others from making or removing copies."""
        lock = Lock(self.root / LOCK, seconds=PATIENCE)
        try:
            yield
        finally:
            lock.release()

    def names(self) -> list[str]:
        """Return the names of all directories that may be copies."""
        return sorted(p.name for p in self.root.glob(f"[!.]*{SUFFIX}") if p.is_dir())

    def remove_unfinished(self) -> None:
        """Remove what ended processes were making or removing; with the directory locked."""
        for path in self.root.glob(f".*{UNFINISHED}"):
            remove(path)

    def used(self) -> int:
        """Return the bytes that all copies take."""
        return sum(map(self.resident, self.names()))

    def open(self, facts: Facts) -> Copy:
        """Open a copy; make it if it is not there, and remove what was left unfinished.

        Unfinished are mini-epochs that are not complete and that nobody uses: of jobs that were
        killed.
        """
        with self.locked():
            self.remove_unfinished()
            for name in self.names():
                info = self.info(name) if name != facts.name else None
                if info and (info.problem or (info.part and not info.complete)):
                    remove_unused(self.root / name)
            path = self.root / facts.name
            room = facts.nbytes
            if not path.exists() and self.make_room(room, facts.name) < room:
                raise OSError(errno.ENOSPC, "there is no room for one more copy", str(path))
            return Copy.create(path, facts)

    def room(self) -> int:
        """Return the bytes that copies may take now."""
        used = self.used()
        return size_limit(self._size, self.root, used) - used

    def make_room(self, nbytes: int, kept: str) -> int:
        """Return the bytes that may be taken, after removing unused copies to free `nbytes`.

        Those that have not been used for longest go first. To be called with the directory locked.
        """
        self.remove_unfinished()
        room = self.room()
        for name in sorted(self.names(), key=self._last_use):
            if room >= nbytes:
                break
            if name != kept and not remove_unused(self.root / name):
                room = self.room()
        return room

    def remove(self, name: str, *, dry_run: bool = False) -> str:
        """Remove a copy unless somebody uses it; see `dsprep.cache.copies.remove_unused`."""
        with self.locked():
            return remove_unused(self.root / name, dry_run=dry_run)

    # --- what is known of a copy without using it --------------------------------------------

    def info(self, name: str) -> CopyInfo:
        """Return facts about a copy."""
        path, nbytes, used = self.root / name, self.resident(name), self._last_use(name)
        in_use = self._is_used(name)
        try:
            facts, started = Facts.parse((path / FACTS).read_bytes())
            states = np.fromfile(path / "state", np.uint8)
            problem = None if is_synced(path, started) else NOT_SYNCED
        except (OSError, ValueError) as error:
            return CopyInfo(path, "", "", 0, 0, nbytes, used, in_use, False, str(error))
        ready, coming = int((states == READY).sum()), (states == ASKED) | (states == PLANNED)
        words, counts = (facts.dataset, facts.part), (len(states), ready)
        complete = ready > 0 and not bool(coming.any()) and problem is None
        return CopyInfo(path, *words, *counts, nbytes, used, in_use, complete, problem)

    def infos(self) -> list[CopyInfo]:
        """Return facts about all copies."""
        return [self.info(name) for name in self.names()]

    def resident(self, name: str) -> int:
        """Return the bytes that the files of a copy take."""
        with contextlib.suppress(FileNotFoundError):
            return sum(p.lstat().st_blocks * 512 for p in (self.root / name).iterdir())
        return 0  # it is gone, or just going

    def _last_use(self, name: str) -> float:
        try:
            return (self.root / name / "use").stat().st_mtime
        except OSError:
            return 0.0

    def _is_used(self, name: str) -> bool:
        try:
            Lock(self.root / name / "use").release()
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False
