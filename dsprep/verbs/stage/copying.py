"""The copying: what is needed goes into copies of a cache, if there is room for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from dsprep.cache.copier import Copier
from dsprep.cache.copies import ABSENT, ASKED, LEFT_OUT, PLANNED, READY, REFUSED, Copy, Facts
from dsprep.cache.folder import CacheFolder, size_limit
from dsprep.cache.pieces import Pieces
from dsprep.core.schema import Array, Ints
from dsprep.core.units import show_nbytes
from dsprep.errors import TargetError, UsageError
from dsprep.reader.cached import Cache
from dsprep.writing.staging import RESUME_HINT

PAUSE = 0.2
"""Seconds between two checks of what another process has copied."""


class PiecesNeeded:
    """Pieces that are needed of one copy, those first that are needed first.

    Attributes
    ----------
    facts
        Of the copy.
    groups
        int64, shape ``(n,)``: the pieces.
    table
        int64, shape ``(3, n)``: of each how many ranges, their bytes, and what they take of a tier.
    """

    def __init__(self, pieces: Pieces, facts: Facts, groups: Ints) -> None:
        self.facts, self.groups = facts, groups
        self.table = np.zeros((3, len(groups)), np.int64)
        for i, group in enumerate(groups.tolist()):
            piece = pieces[group]
            self.table[:, i] = len(piece.ranges), piece.nbytes, piece.taken
        _, self.nbytes, self.taken = self.table

    def index(self, copy: Copy) -> Ints:
        """Return the rows of the pieces in the tables of the copy: int64."""
        slots: Ints = np.searchsorted(copy.numbers, self.groups)
        return slots

    def states(self, copy: Copy | None) -> Array:
        """Return the state of each piece: uint8, shape ``(n,)``; None: there is no copy."""
        if copy is None:
            return np.full(len(self.groups), ABSENT, np.uint8)
        slot_states: Array = copy.states()[self.index(copy)]
        return slot_states


@dataclass(frozen=True)
class Outcome:
    """The bytes that were copied, or would be.

    Attributes
    ----------
    there, copied, left_out
        Bytes that had been there, were copied, and found no room.
    refused
        What did not have its checksum, one sentence each.
    """

    there: int
    copied: int
    left_out: int
    refused: tuple[str, ...] = ()


def look(wants: Sequence[PiecesNeeded], how: Cache, partial: bool) -> Outcome:
    """Return the outcome that `copy_all` would have, or raise its `TargetError`."""
    states, folder = [], None
    with suppress(OSError, UsageError):
        folder = CacheFolder(how.root, create=False)
    for want in wants:
        copy = None
        with suppress(OSError, ValueError, KeyError, TypeError):
            copy = None if folder is None else Copy(folder.root / want.facts.name)
        states.append(want.states(copy))
    left = _left_out(wants, states, how, folder, partial)
    there = _total(wants, states, READY)
    return Outcome(there, sum(int(w.nbytes.sum()) for w in wants) - there - left, left)


def copy_all(
    pieces: Pieces,
    wants: Sequence[PiecesNeeded],
    how: Cache,
    threads: int,
    partial: bool,
    progress: Callable[[int, int], None] | None,
) -> Outcome:
    """Copy what is needed and not there; in the end it is on the disk.

    `partial`: what does not fit is left out, which is what is needed last.

    Raises
    ------
    TargetError
        If it does not fit, and nothing may be left out.
    OSError, DsprepError
        If the dataset cannot be read, or the copies not be written.
    """
    folder = CacheFolder(how.root, how.size)
    copies = _opened(folder, wants)
    before = [want.states(copy) for want, copy in zip(wants, copies, strict=True)]
    _left_out(wants, before, how, folder, partial)
    missing = sum(int(w.nbytes.sum()) for w in wants) - _total(wants, before, READY)
    there, drawn = 0, _CopyProgress(missing, progress)
    refused: list[str] = []
    copier = Copier(pieces, folder, threads, how.throttle(), drawn.add, refused.append)
    for want, copy in zip(wants, copies, strict=True):
        there += _fill(copier, copy, want)
    after = [want.states(copy) for want, copy in zip(wants, copies, strict=True)]
    left = _total(wants, after, LEFT_OUT)
    if left and not partial:
        raise TargetError(
            f"{show_nbytes(left)} of what is needed found no room, as the disk is full or its "
            "quota is reached; the rest is there",
            where=how.root,
            fix="make room and run it again, or add --partial",
        )
    return Outcome(there, _total(wants, after, READY) - there, left, tuple(refused))


def _opened(folder: CacheFolder, wants: Sequence[PiecesNeeded]) -> list[Copy]:
    """Return all copies, open."""
    # One that was being filled when a run was killed comes first: opening another one removes it.
    infos = [folder.info(want.facts.name) for want in wants]
    order = sorted(range(len(wants)), key=lambda i: infos[i].complete or not infos[i].ready)
    opened = {i: folder.open(wants[i].facts) for i in order}
    return [opened[i] for i in range(len(wants))]


def _fill(copier: Copier, copy: Copy, want: PiecesNeeded) -> int:
    """Fill a copy as soon as no other process does; return the bytes that it has by then."""
    stopping, there = threading.Event(), 0

    def ask() -> None:
        nonlocal there
        states = want.states(copy)
        there = int(want.nbytes[states == READY].sum())
        again = want.index(copy)[(states == LEFT_OUT) | (states == REFUSED)]
        for i in again.tolist():
            copy.set_state(i, ASKED)
        copy.ask(want.groups)

    try:
        while not copier.fill(copy, stopping.is_set, ask):
            time.sleep(PAUSE)
    except BaseException as error:  # threads that copy end with the block that they are at
        stopping.set()
        error.add_note(RESUME_HINT)
        raise
    return there


def _left_out(
    wants: Sequence[PiecesNeeded],
    states: Sequence[Array],
    how: Cache,
    folder: CacheFolder | None,
    partial: bool,
) -> int:
    """Return the bytes for which there cannot be room, whatever else is removed."""
    # Raises `TargetError` if there are some, and nothing may be left out.
    left_out = [~np.isin(each, (READY, PLANNED)) for each in states]
    taken = np.concatenate([w.taken[new] for w, new in zip(wants, left_out, strict=True)])
    nbytes = np.concatenate([w.nbytes[new] for w, new in zip(wants, left_out, strict=True)])
    there = next(p for p in (how.root.absolute(), *how.root.absolute().parents) if p.is_dir())
    used = kept = 0
    if folder is not None:
        used = folder.used()
        kept = sum(folder.resident(want.facts.name) for want in wants)
    room = max(0, size_limit(how.size, there, used) - kept)
    if int(taken.sum()) <= room:
        return 0
    if partial:
        return int(nbytes[np.cumsum(taken) > room].sum())
    raise TargetError(
        f"{show_nbytes(int(taken.sum()))} are needed, and the cache may take {show_nbytes(room)} "
        "more",
        where=how.root,
        fix="stage fewer epochs, give --cache-size, make room, or add --partial to stage what is "
        "read first",
    )


def _total(wants: Sequence[PiecesNeeded], states: Sequence[Array], state: int) -> int:
    """Return the bytes of all pieces in a state."""
    return sum(int(w.nbytes[s == state].sum()) for w, s in zip(wants, states, strict=True))


class _CopyProgress:
    """Counts bytes that threads have copied."""

    def __init__(self, total: int, progress: Callable[[int, int], None] | None) -> None:
        self._total, self._progress, self._done = total, progress, 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if self._progress is not None:
                self._progress(min(self._done, self._total), self._total)
