"""Reading from a copy on a faster tier: which copies there are to be, and what is read from them.

Two policies; neither changes what comes, nor when:

``"epoch"``
    One copy of the dataset, or of as much of it as there is room for, which is never replaced:
    in a permutation no sample is more likely than others to come again soon, so that replacing
    gains nothing (Mohan et al., section 4.1).
``"mini-epoch"``
    A copy of each mini-epoch: of the one that is under way, and of the next one, which is filled
    meanwhile (Xu et al., section III). A copy is removed when its mini-epoch is over, unless epochs
    always have the same parts and there is room.

A thread here fills the copies, unless another process of the node does. What is to come is waited
for, so that the slower tier gives each byte once; what is not, is read from the dataset itself, as
is everything once a copy fails.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from weakref import WeakValueDictionary, finalize, ref

import numpy as np

from dsprep.cache.copier import NO_SPACE, Copier, Throttle
from dsprep.cache.copies import ASKED, PLANNED, READY, Copy, Facts
from dsprep.cache.folder import CacheFolder, parse_size
from dsprep.cache.pieces import Pieces
from dsprep.core.schema import Ints
from dsprep.core.units import parse_rate
from dsprep.errors import DsprepError, UsageError
from dsprep.reader.ledger import Ledger
from dsprep.reader.memory import Stopped
from dsprep.reader.order import Assignment, EpochSegment, Sequence
from dsprep.sidecar.sidecar import Sidecar

POLICIES = ("epoch", "mini-epoch")

PAUSE = 0.05
"""Seconds between two looks at what is to be filled."""

IDLE_SECONDS = 5.0
"""Seconds to wait for a copy that nobody fills."""

SLOW_SECONDS = 60.0
"""Seconds to wait for a copy that is being filled while nothing arrives."""


class CacheWarning(UserWarning):
    """A cache cannot be used, or not for all data; the dataset itself is read instead."""


@dataclass(frozen=True)
class Cache:
    """A directory of a faster tier, in which a `Reader` keeps groups.

    Parameters
    ----------
    path
        The directory.
    size
        Bytes that it may take: a number, text such as ``"1.6TB"``, or ``"75%"`` of what is free
        there and what the cache has already, the default.
    policy
        ``"epoch"``: keep what there is room for, and replace nothing; ``"mini-epoch"``, the default
        with mini-epochs: keep the one that is under way, and copy the next one meanwhile.
    bandwidth
        Bytes per second, or text such as ``"2GB/s"``, that are copied at most; None: all there is.

    Raises
    ------
    UsageError
        If one of them is not possible.
    """

    path: str | Path
    size: int | str | None = None
    policy: Literal["epoch", "mini-epoch"] | None = None
    bandwidth: int | str | None = None

    def __post_init__(self) -> None:
        if self.policy not in (None, *POLICIES):
            expected = "one of " + ", ".join(POLICIES)
            raise UsageError(f"policy of a cache is {self.policy!r}", expected=expected)
        parse_size(self.size)
        self.throttle()

    @property
    def root(self) -> Path:
        """The directory."""
        return Path(self.path)

    def throttle(self) -> Throttle:
        """Return the throttle of bytes that are copied."""
        rate = f"{self.bandwidth}B/s" if isinstance(self.bandwidth, int) else self.bandwidth
        return Throttle(parse_rate(rate) if rate else None)


class Staged:
    """A copy that is in use, and the dataset as it is read from it."""

    def __init__(self, copy: Copy, sidecar: Sidecar, fail: Callable[[BaseException], None]) -> None:
        self.copy, self.sidecar, self._fail = copy, sidecar.through(copy.file), fail
        self.failed = self.is_whole = False
        self.new = True  # nothing was asked for
        # At once, where the sidecar, which refers to itself, goes when garbage is collected; and
        # not by `__del__`, within which `WeakValueDictionary` still gives out the object.
        finalize(self, _close, copy, self.sidecar).atexit = False

    def fail(self, error: BaseException) -> None:
        """Stop reading from it, because of an error."""
        if not self.failed:
            self.failed = True
            self._fail(error)

    @property
    def is_filled(self) -> bool:
        """True if nothing more of it will arrive."""
        try:
            return self.failed or self.copy.is_filled
        except (OSError, DsprepError) as error:
            self.fail(error)
            return True

    def is_there(self, pieces: Ints, patient: bool, stopped: Callable[[], bool]) -> bool:
        """Return whether pieces can be read from it.

        Parameters
        ----------
        pieces
            Numbers of the pieces, int64, rising, at least one.
        patient
            Whether to wait for those that are to come.
        stopped
            Whether to wait no longer; `Stopped` is raised then.
        """
        index = None if self.failed else self.copy.index(pieces)
        if index is None:
            return False
        if bool((self.copy.states_at(index) == READY).all()):
            self.is_whole = self.is_whole or bool((self.copy.states() == READY).all())
            return True
        return patient and self._arrived(index, stopped)

    def _arrived(self, index: Ints, stopped: Callable[[], bool]) -> bool:
        """Wait until pieces are there; return whether they are."""
        alive = progress = looked = time.monotonic()
        count, pause = -1, 0.001
        while not self.failed:
            if stopped():
                raise Stopped
            states = self.copy.states_at(index)
            if bool((states == READY).all()):
                return True
            if not bool(((states == READY) | (states == PLANNED) | (states == ASKED)).all()):
                return False
            now = time.monotonic()
            if now - looked > 10 * PAUSE:
                looked = now
                done = int((self.copy.states() == READY).sum())
                if done != count:
                    count, progress = done, now
                if self.copy.is_filled_by_somebody():
                    alive = now
                if now - alive > IDLE_SECONDS or now - progress > SLOW_SECONDS:
                    self.fail(TimeoutError("nothing has arrived in it for too long"))
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        return False


def _close(copy: Copy, sidecar: Sidecar) -> None:
    copy.close()
    sidecar.close()


class Reading:
    """The reads of a rank in a pass, and the copy that serves them.

    Attributes
    ----------
    current, coming
        The copy that has it, and that of the next mini-epoch; None: there is none.
    """

    def __init__(
        self, pieces: Pieces, order: Assignment, current: Staged | None, coming: Staged | None
    ) -> None:
        self.current, self.coming = current, coming
        self._pieces, self._patient = pieces, order.shuffle != "global"
        self._all = order.mini is None or order.mini.pools == 1  # of the pass is in its copy

    def find(self, samples: Ints, stopped: Callable[[], bool]) -> tuple[Staged | None, float]:
        """Return the copy from which samples are read, None: the dataset; and seconds waited."""
        if self.current is None or not len(samples):
            return None, 0.0
        if self._all and self.current.is_whole and not self.current.failed:
            return self.current, 0.0
        began = time.perf_counter()
        pieces = self._pieces.of(samples)
        try:
            there = self.current.is_there(pieces, self._patient, stopped)
        except (OSError, DsprepError) as error:
            self.current.fail(error)
            there = False
        return self.current if there else None, time.perf_counter() - began


def _is_kept(staged: Staged) -> bool:
    """Return whether there is nothing to do for a copy."""
    try:
        done = staged.is_filled and staged.copy.is_synced
    except OSError as error:
        staged.fail(error)
    return staged.failed or done


class ReaderCache:
    """The copies of a Reader; closed by `close`.

    Parameters
    ----------
    sidecar, names
        The dataset, and the fields that are read.
    order
        Which samples come when.
    cache, threads
        Where they are, and how many threads copy.
    ledger
        Where what is copied is counted.
    """

    def __init__(
        self,
        sidecar: Sidecar,
        names: tuple[str, ...],
        order: Assignment,
        cache: Cache,
        threads: int,
        ledger: Ledger,
    ) -> None:
        self._sidecar, self._order, self._options, self._ledger = sidecar, order, cache, ledger
        self._threads = threads
        self._pieces = Pieces(sidecar, order.stored_edges, names)
        self._folder: CacheFolder | None = None
        self._copier: Copier | None = None
        self._open: WeakValueDictionary[str, Staged] = WeakValueDictionary()
        self._readings: tuple[ref[Reading], ...] = ()
        self._last: dict[int, Reading] = {}  # by rank
        self._over: set[str] = set()  # names of copies
        self._number = 0  # of the pass
        self._warned = self._refusing = False
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._closing, self._wake = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    # --- what is read ------------------------------------------------------------------------

    def begin(self, segment: EpochSegment) -> Reading:
        """Return the reads of a rank in a pass; begin to fill missing copies."""
        with self._lock:
            self._number, staged = segment.number, list[Staged | None]()
            try:
                for facts, sequence in self._parts(segment):
                    staged.append(self._staged(facts))
                    self._ask(staged[-1], sequence, segment)
            except (OSError, DsprepError, ValueError, KeyError, TypeError) as error:
                # The tables of a next mini-epoch find room at the latest when it begins.
                if not staged or getattr(error, "errno", None) not in NO_SPACE:
                    self._note(error)
            current, coming = [*staged, None, None][:2]
            reading = Reading(self._pieces, self._order, current, coming)
            before = self._last.get(segment.rank)
            self._last[segment.rank] = reading
            self._readings = (*map(ref, self._alive()), ref(reading))
            if before is not None and not self._keeps:
                self._let_go(before, reading)
            if self._thread is None and not (self._closing.is_set() or self._is_idle):
                self._start()
            self._wake.set()
        return reading

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="dsprep-cache", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # there are too many
            self._thread = None
            self._note(error)

    def _ask(self, staged: Staged | None, sequence: Sequence, segment: EpochSegment) -> None:
        """Queue what a rank needs, in its order, then the rest of a mini-epoch."""
        if staged is None:
            return
        world, n = self._order.world_size, len(sequence)
        low, high = (r * n // world for r in (segment.rank, segment.rank + 1))
        part = bool(staged.copy.facts.part)
        groups = sequence.groups_at(low, high)
        if part or self._order.shuffle == "global":
            groups = np.concatenate([groups, np.setdiff1d(staged.copy.numbers, groups)])
        staged.copy.ask(groups)
        if part or staged.new:
            staged.copy.ask_again()
        staged.new = False

    @property
    def _keeps(self) -> bool:
        """Return whether a copy may be needed again after its pass."""
        mini = self._order.mini
        return self._options.policy == "epoch" or mini is None or not mini.recompose

    def _let_go(self, before: Reading, now: Reading) -> None:
        """Note that copies are removed as soon as nobody uses them."""
        kept = {s.copy.name for s in (now.current, now.coming) if s is not None}
        self._over -= kept
        self._over |= {
            s.copy.name for s in (before.current, before.coming) if s and s.copy.name not in kept
        }

    def _parts(self, segment: EpochSegment) -> list[tuple[Facts, Sequence]]:
        """Return the passes that should have copies: this one, and the next mini-epoch."""
        order = self._order
        if self._options.policy == "epoch" or order.mini is None or segment.mini_pass is None:
            return [(Facts.of(self._pieces), segment.epoch.sequence)]
        passes = (segment.mini_pass, segment.epoch.sequence), order.after(segment.mini_pass)
        return [(Facts.of(self._pieces, order.pool(p, segment.rank)), s) for p, s in passes]

    def _staged(self, facts: Facts) -> Staged | None:
        """Return the copy that these facts identify, open."""
        staged = self._open.get(facts.name)
        if staged is None:
            if self._folder is None:
                self._folder = CacheFolder(self._options.root, self._options.size)
                how = self._threads, self._options.throttle(), self._draw, self._refused
                self._copier = Copier(self._pieces, self._folder, *how)
            copy = self._folder.open(facts)
            staged = Staged(copy, self._sidecar, self._note)
            self._open[facts.name] = staged
        staged.copy.touch()
        staged.is_whole = False  # some of it may have been found wrong
        return staged

    def _draw(self, nbytes: int) -> None:
        self._ledger.add(self._number, copied_nbytes=nbytes)

    def _note(self, error: BaseException) -> None:
        """Warn once that the cache cannot be used."""
        if not self._warned:
            self._warned = True
            self._warn(
                f"the cache {self._options.root} cannot be used, so data come from "
                f"{self._sidecar.dataset} itself: {error}"
            )

    def _refused(self, text: str) -> None:
        """Warn once that a piece was damaged."""
        if not self._refusing:
            self._refusing = True
            self._warn(f"{text}. If there are more, they are not listed")

    def _warn(self, text: str) -> None:
        warnings.warn(text, CacheWarning, stacklevel=2)

    @property
    def is_ahead(self) -> bool:
        """True if nothing more of the next mini-epoch will arrive."""
        return all(r.coming is None or r.coming.is_filled for r in self._alive())

    # --- what is filled ----------------------------------------------------------------------

    def _alive(self) -> list[Reading]:
        return [reading for each in self._readings if (reading := each()) is not None]

    def _needed(self) -> list[Staged]:
        """Return the copies to fill, those being read first."""
        readings = self._alive()
        staged = [r.current for r in readings] + [r.coming for r in readings]
        return list(dict.fromkeys(s for s in staged if s is not None and not s.failed))

    def _run(self) -> None:
        while not self._ends():
            self._wake.wait(PAUSE)
            self._wake.clear()
            self._work()

    def _ends(self) -> bool:
        """Return whether the thread may end: there is nothing to do for now."""
        with self._lock:
            if self._closing.is_set() or self._is_idle:
                self._thread = None
            return self._thread is None

    @property
    def _is_idle(self) -> bool:
        """Return whether everything needed is there, and nothing has to be removed."""
        return not self._over and all(map(_is_kept, self._needed()))

    def _work(self) -> None:
        """Remove copies that are over, and fill those needed, without holding them in use."""
        again = self._remove_old()
        for staged in self._needed():
            if self._closing.is_set():
                return
            self._fill(staged, again)

    def _fill(self, staged: Staged, again: bool) -> None:
        assert self._copier is not None
        try:
            if again:
                staged.copy.ask_again()
            if not _is_kept(staged):
                self._copier.fill(staged.copy, lambda: self._is_outdated(staged))
        except Exception as error:  # whatever it is, others wait for this thread
            staged.fail(error)

    def _is_outdated(self, staged: Staged) -> bool:
        """Return whether another copy is to be filled now, or its filler has ended."""
        needed = self._needed()
        if self._closing.is_set() or staged not in needed:
            return True
        sooner = needed[: needed.index(staged)]
        return any(not (s.is_filled or s.copy.is_filled_by_somebody()) for s in sooner)

    def _remove_old(self) -> bool:
        """Remove copies that are over, unless somebody uses them still; return whether one was."""
        removed = set()
        for name in list(self._over):
            with suppress(OSError):
                if self._folder is not None and not self._folder.remove(name):
                    removed.add(name)
        self._over -= removed
        return bool(removed)

    def close(self) -> None:
        """End the thread; copies stay."""
        if self._pid != os.getpid():  # of a fork: all of it is the parent's
            return
        with self._lock:
            thread = self._thread
            self._closing.set()
            self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(5.0)
        with self._lock:
            self._last.clear()
            if thread is None or not thread.is_alive():
                for staged in self._open.values():
                    staged.copy.close()  # others may remove it, also before this is collected
