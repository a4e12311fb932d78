"""The directory with all copies: how much they may take, and what is removed to make room."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.cache.copies import (
    ASKED,
    NOT_SYNCED,
    PLANNED,
    READY,
    UNFINISHED,
    Copy,
    Facts,
    is_trusted,
    remove_unused,
)
from dsprep.cache.locks import PATIENCE, Lock
from dsprep.core.schema import Ints
from dsprep.core.storage import remove
from dsprep.errors import UsageError
from dsprep.writing.plan import as_nbytes

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
        found = os.statvfs(root)
        free = found.f_bavail * found.f_frsize
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

    Raises
    ------
    OSError
        If it cannot be made or written to.
    """

    def __init__(self, root: str | Path, *, create: bool = True) -> None:
        self.root = Path(root)
        if create:
            self.root.mkdir(parents=True, exist_ok=True)
        elif not self.root.is_dir():
            raise UsageError("there is no such directory", where=self.root)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep all others from making or removing copies."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        lock = Lock(os.open(self.root / LOCK, flags, 0o666), seconds=PATIENCE)
        try:
            yield
        finally:
            lock.release()

    def paths(self) -> list[Path]:
        """Return the directories of all copies."""
        return sorted(p for p in self.root.iterdir() if _is_copy(p))

    def unfinished(self) -> list[Path]:
        """Return what ended processes were making or removing; ask with the directory locked."""
        found = (p for p in self.root.iterdir() if p.name.startswith("."))
        return sorted(p for p in found if p.name.endswith(UNFINISHED))

    def used(self) -> int:
        """Return the bytes that all copies take."""
        return sum(map(resident, self.paths()))

    def open(self, facts: Facts, edges: Ints, size: Size | None = None) -> Copy:
        """Open a copy; make it if it is not there, and remove what was left unfinished.

        `edges` are those of the pieces of the dataset; `size` is what all copies may take.
        Unfinished are mini-epochs that are not complete and that nobody uses: of jobs that were
        killed.
        """
        wanted = self.root / facts.name
        with self.locked():
            for path in self.unfinished():
                remove(path)
            for path in self.paths():
                info = info_of(path) if path != wanted else None
                if info and (info.problem or (info.part and not info.complete)):
                    remove_unused(path)
            if size is not None and not wanted.exists():
                nbytes = facts.nbytes(edges)
                if self.make_room(nbytes, size, wanted) < nbytes:
                    raise OSError(errno.ENOSPC, "there is no room for one more copy", str(wanted))
            return Copy.create(self.root, facts, edges)

    def make_room(self, nbytes: int, size: Size, kept: Path) -> int:
        """Return how many bytes may be taken; copies that nobody uses are removed for `nbytes`.

        Those that have not been used for longest go first. To be called with the directory locked.
        """
        for path in self.unfinished():
            remove(path)
        used = self.used()
        room = size.limit(self.root, used) - used
        if room >= nbytes:
            return room
        for path in sorted(self.paths(), key=_last_use):
            if path != kept and remove_unused(path):
                used = self.used()
                room = size.limit(self.root, used) - used
                if room >= nbytes:
                    break
        return room

    def remove(self, path: Path) -> bool:
        """Remove a copy unless somebody uses it; return whether it is gone."""
        with self.locked():
            return remove_unused(path)


def info_of(path: Path) -> CopyInfo:
    """Return what is known of the copy in a directory."""
    nbytes, used = resident(path), _last_use(path)
    try:
        facts, started = Facts.parse((path / "copy.json").read_bytes())
        states = np.frombuffer((path / "state").read_bytes(), np.uint8)
    except (OSError, ValueError) as error:
        return CopyInfo(path, "", "", 0, 0, nbytes, used, _is_used(path), False, str(error))
    ready, coming = int((states == READY).sum()), (states == ASKED) | (states == PLANNED)
    words, counts = (facts.dataset, facts.part), (len(states), ready)
    problem = None if is_trusted(path, started) else NOT_SYNCED
    complete = ready > 0 and not bool(coming.any()) and problem is None
    return CopyInfo(path, *words, *counts, nbytes, used, _is_used(path), complete, problem)


def resident(path: Path) -> int:
    """Return the bytes that the files of a copy take."""
    total = 0
    with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                total += entry.stat().st_blocks * 512
    return total


def _is_copy(path: Path) -> bool:
    try:
        return not path.name.startswith(".") and (path / "copy.json").is_file()
    except PermissionError:  # somebody else's
        return False


def _last_use(path: Path) -> float:
    try:
        return (path / "use").stat().st_mtime
    except OSError:
        return 0.0


def _is_used(path: Path) -> bool:
    try:
        fd = os.open(path / "use", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        Lock(fd).release()
    except OSError:
        return True
    return False
