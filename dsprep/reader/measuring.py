"""Which engine reads a dataset best, and by how many threads: measured, for a moment, and kept.

A mount differs from the next one by more than a table of file systems could say, so some ranges
of the dataset are read as training would read them: none of them twice, those of the engines that
are compared by turns, and none that lies in the page cache already unless all does. What was found
is remembered in the process, and for a week in a small file of the user. A measurement never
raises, prints nothing, and has no influence on the order of samples.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import socket
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from dsprep.errors import UsageError
from dsprep.plan import show_nbytes
from dsprep.reader import engines
from dsprep.reader.caching import ready, resident
from dsprep.reader.engines import Engine
from dsprep.reader.memory import HUGE, anonymous
from dsprep.reader.remembering import Choice, recall, remember
from dsprep.reading.files import File
from dsprep.schema import Bytes
from dsprep.storage import free_memory
from dsprep.stripes import mounts

Range: TypeAlias = tuple[Path, int, int]
"""A file, an offset and a number of bytes."""

SMALL = 64 << 20
"""Bytes of a dataset that is read before a measurement would pay."""

SECONDS = 0.25
"""That a measurement takes at most, but for the read that is under way then."""

ENGINES_SHARE = 0.6
"""Share of it for comparing engines; the rest is for numbers of threads."""

MOST = 256 << 20
"""Bytes that it takes at most from the storage, reached by storage of more than 1 GB/s only."""

RUN = 32 << 20
"""Bytes that one engine reads in a row: in less, reading ahead does not get up to speed."""

SHARE = 8 << 20
"""Bytes that each of several threads reads in a row."""

CALL = 4 << 20
"""Bytes of one read."""

SPOTS = 64
"""Places in the data that are tried at most."""

DIRECT_GAIN = 1.2
"""How much faster direct reads have to be."""

THREADS_GAIN = 1.3
"""How much faster twice as many threads have to be."""

CACHED = 0.9
"""Share of the data in the page cache from which on all of it counts as being there."""

CACHE = 0.8
"""Share of the free memory that is expected to serve as page cache while training goes on."""

Spot: TypeAlias = tuple[File, int, int]
"""A file, an offset and a number of bytes."""


def choose(
    ranges: Sequence[Range],
    *,
    nbytes: int | None = None,
    decoded: bool = False,
    engine: str = "auto",
    threads: int | None = None,
    again: bool = True,
) -> Choice:
    """Return how to read a dataset on the mount where it lies.

    Parameters
    ----------
    ranges
        Some of its groups, or of what is read at a time; a few hundred from all over it are
        enough.
    nbytes
        Of the dataset; None: those of the ranges.
    decoded
        Whether samples have to be decoded: then that decides, and every core helps.
    engine, threads
        What the user asked for; ``"auto"`` and None: what is best.
    again
        Whether it is read more than once: then the page cache is of use if it is large enough.
    """
    name = "buffered" if engine == "auto" else engine
    if engine != "auto" and threads is not None:
        return Choice(engine, threads, "as asked")
    if decoded:
        return Choice(name, threads or cores(), "decoding takes longer than reading")
    total = sum(r[2] for r in ranges) if nbytes is None else nbytes
    if total < SMALL:
        return Choice(
            name, threads or 1, f"{show_nbytes(total)} are read before a measurement would pay"
        )
    try:
        cache = CACHE * free_memory() / total if again else 0.0
        return _found(ranges, cache, engine, threads)
    except Exception as error:
        return Choice(name, threads or 1, f"it could not be measured: {error}")


def _found(ranges: Sequence[Range], cache: float, engine: str, threads: int | None) -> Choice:
    """Recall a choice, or measure and remember it.

    Parameters
    ----------
    cache
        Share of the data that the page cache will hold after an epoch; may exceed 1.
    """
    trials = Trials(ranges)
    share = 0.0 if engine == "direct" else trials.look()
    cached = max(cache, share)
    facts = []
    if engine != "direct":
        facts.append(f"{share:.0%} of the data is in the page cache")
        if min(1, cache) > share:
            facts.append(f"{min(1, cache):.0%} will be after an epoch")
    if engine == "auto" and cached >= CACHED:
        engine = "buffered"
    if engine != "auto" and threads is not None:
        return Choice(engine, threads, "; ".join(facts))
    state = "warm" if share >= CACHED else "cold"
    if engine == "auto":
        state += f" {round(2 * cached) / 2}"  # coarse: a measurement fills the cache a little
    key = _key(ranges[0][0], state, engine, threads)
    found = recall(key)
    if found is None:
        count = len(facts)
        found = _measured(trials, cached, engine, threads, facts)
        if len(facts) > count:
            remember(key, found)
    return found


def _measured(
    trials: Trials, cached: float, engine: str, threads: int | None, facts: list[str]
) -> Choice:
    """Return what reads fastest.

    Parameters
    ----------
    cached
        Share of the data that buffered reads will find in the page cache, at next to no cost.
    facts
        What is known already.
    """
    best = Way("buffered" if engine == "auto" else engine, threads or 1)
    if engine == "auto":
        other = Way("direct", best.threads)
        trials.allow(ENGINES_SHARE)
        if trials.better(best, other, DIRECT_GAIN / (1 - cached), RUN, 2, facts):
            best = other
    trials.allow(1.0)
    most = cores()
    while threads is None and best.threads < most:
        other = Way(best.engine, min(2 * best.threads, most))
        rounds = 2 if other.threads == 2 else 1
        if not trials.better(best, other, THREADS_GAIN, SHARE, rounds, facts):
            break
        best = other
    return Choice(best.engine, best.threads, "; ".join(facts))


def _key(path: Path, state: str, engine: str, threads: int | None) -> str:
    """Return what a choice holds for: this host, this mount, and what was asked."""
    at = path.absolute()
    device = at.stat().st_dev
    at = at.resolve()
    while not at.is_mount():
        at = at.parent
    kind = dict(mounts()).get(str(at), "unknown")
    facts = [socket.gethostname(), device, str(at), kind, cores(), state, engine, threads]
    return json.dumps(facts)


def cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0))


# --- measuring -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """An engine and a number of threads."""

    engine: str
    threads: int

    def __str__(self) -> str:
        return f"{self.engine} by {self.threads} thread{'s' * (self.threads > 1)}"


class Trials:
    """Reads of some places of a dataset, in random order, in this way or that.

    Parameters
    ----------
    ranges
        Where the places are taken from.
    """

    def __init__(self, ranges: Sequence[Range]) -> None:
        self._began = time.perf_counter()
        self._end = self._began + SECONDS
        self._left = MOST
        self._again = False  # places may be read more than once
        self._engines: dict[str, Engine] = {}
        self._memory: Bytes | None = None
        self._spots: list[Spot] = []
        dice = random.Random()  # not the same places for every rank
        files: dict[Path, File] = {}
        few = dice.sample(list(ranges), min(SPOTS, len(ranges)))
        each = -(-SPOTS // len(few))
        for path, offset, nbytes in few:
            if time.perf_counter() > self._end - SECONDS / 2:  # files that open slowly
                break
            if path not in files:
                files[path] = File(path)
            # At a distance, so that what is read ahead of one place is none of another one.
            count = max(1, nbytes // (2 * RUN))
            for i in dice.sample(range(count), min(each, count)):
                at = 2 * RUN * i
                self._spots.append((files[path], offset + at, min(RUN, nbytes - at)))
        dice.shuffle(self._spots)

    def allow(self, share: float) -> None:
        """Let trials go on until a share of all the time is over."""
        self._end = self._began + share * SECONDS

    def look(self) -> float:
        """Return the share of the data that is in the page cache, and go on with the rest."""
        known: list[tuple[float, Spot]] = []
        unknown = []
        for number, spot in enumerate(self._spots):
            share = resident(*spot)
            if share is None and number < SPOTS // 8:  # this makes the kernel read ahead
                share = ready(spot[0], spot[1] + spot[2] // 2)
            if share is None:
                unknown.append(spot)
            else:
                known.append((share, spot))
        share = statistics.fmean(s for s, _ in known) if known else 0.0
        if share >= CACHED:
            self._again = True
            self._spots = [spot for s, spot in known if s == 1] or self._spots
        else:
            self._spots = unknown or [spot for s, spot in known if s == 0]
        return share

    def better(
        self, known: Way, other: Way, gain: float, nbytes: int, rounds: int, facts: list[str]
    ) -> bool:
        """Return whether another way is faster than a known one, as far as time and data last.

        Parameters
        ----------
        gain
            How much faster it has to be.
        nbytes
            That each thread of the other way reads.
        rounds
            How often both are tried, by turns.
        facts
            Takes the speeds.
        """
        speeds: dict[Way, list[float]] = {known: [], other: []}
        if self._again:
            rounds, nbytes = 5, max(CALL, 8 * CALL // other.threads)
        for number in range(rounds):
            for way in (known, other) if number % 2 == 0 else (other, known):
                spots = self._take(nbytes * other.threads, nbytes)
                if not spots or time.perf_counter() > self._end:
                    break
                try:
                    speed = self._speed(way, spots)
                except UsageError as error:  # not on this file system
                    facts.append(f"{way}: {error}")
                    return False
                if speed:
                    speeds[way].append(speed)
        if not min(map(len, speeds.values())):
            return False
        # What is read twice may as well be read often: what others disturb does not count.
        a, b = (max(s) if self._again else statistics.median(s) for s in speeds.values())
        facts.append(f"{known} {a / 1e9:.2f} GB/s, {other} {b / 1e9:.2f} GB/s")
        return b >= gain * a > 0

    def _take(self, total: int, most: int) -> list[Spot]:
        """Return the next places, each once unless all is cached; none if there are too few.

        Parameters
        ----------
        total
            Bytes wanted; fewer if there are many small places.
        most
            Bytes of each.
        """
        found: list[Spot] = []
        have = 0
        while have < total and have < self._left and self._spots:
            file, offset, nbytes = spot = self._spots.pop()
            if self._again:
                self._spots.insert(0, spot)
            found.append((file, offset, min(nbytes, most)))
            have += found[-1][2]
        if not self._again:
            self._left -= have
        return found if len(found) >= total // most else []

    def _speed(self, way: Way, spots: list[Spot]) -> float:
        """Return the bytes per second by which places are read; 0 if time was up too soon."""
        engine = self._engines.get(way.engine)
        if engine is None:
            engine = self._engines[way.engine] = engines.make(way.engine)
        if self._memory is None:
            self._memory = np.frombuffer(anonymous(RUN + HUGE), np.uint8)
            self._memory[:: mmap.PAGESIZE] = 0  # so that the pages are there
        base = self._memory.ctypes.data + 64  # as most samples lie: at no block
        jobs = list(enumerate(spots))
        done: list[int] = []
        errors: list[Exception] = []
        begin = threading.Event()

        def read() -> None:
            begin.wait()
            try:
                while jobs and time.perf_counter() < self._end:
                    number, (file, offset, nbytes) = jobs.pop()
                    for at in range(0, nbytes, CALL):
                        size = min(CALL, nbytes - at)
                        to = base + (number * CALL + at) % RUN
                        engine.read(file, offset + at, np.array([[to, size]], np.int64))
                        done.append(size)
                        if time.perf_counter() > self._end:
                            return
            except IndexError:  # another thread took the last one
                return
            except Exception as error:
                errors.append(error)

        workers = [
            threading.Thread(target=read, name="dsprep-measure", daemon=True)
            for _ in range(way.threads)
        ]
        for worker in workers:
            worker.start()
        began = time.perf_counter()
        begin.set()
        for worker in workers:
            worker.join()
        if errors:
            raise errors[0]
        took = time.perf_counter() - began
        if took > 0 and (not jobs or sum(done) >= CALL * way.threads):
            return sum(done) / took
        return 0.0
