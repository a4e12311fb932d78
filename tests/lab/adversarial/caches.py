"""SIGKILL at random moments of jobs that fill and read one cache.

Every rank of every job compares each of its batches with that of a Reader without a cache. Ranks
are killed, some after they were stopped for a moment, and started again. Meanwhile the bytes below
the directory are added up; in the end a run that nobody disturbs is right, and has nothing beside
it that was left unfinished.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from support import random_batch

from dsprep.core.schema import Field, Schema
from lab.adversarial import judging, making
from lab.adversarial.judging import Tally

COUNT = 240
FIXED = Schema((Field("image", np.dtype("<f4"), (64, 32)), Field("label", np.dtype("<i8"))))
MIXED = Schema((*FIXED, Field("points", np.dtype("<i2"), (None, 3)), Field.opaque("blob")))
KINDS = {
    "hdf5-groups": FIXED,
    "lmdb-groups": FIXED,
    "tfrecord-groups": MIXED,
    "zarr-groups": FIXED,
    "hdf5-chunks": FIXED,
    "lmdb": MIXED,
    "zarr-chunks": FIXED,
    "tfrecord": MIXED,
}
KILLS = 6
"""Of each trial."""

STALL = 20.0
"""Seconds without a batch after which a rank hangs, on a machine that does other work besides."""

SLOTS = 64
"""Processes of a trial at most."""


@dataclass(frozen=True)
class Job:
    """Options of the Readers of a job, one for each of its ranks."""

    options: dict[str, Any]
    world: int


def drawn(rng: np.random.Generator, nbytes: int) -> tuple[list[Job], int, str]:
    """Return what runs on one cache, its size, and words for that."""
    policy = str(rng.choice(["epoch", "mini-epoch"]))
    size = int(nbytes * rng.choice([0.3, 0.6, 0.9, 1.5, 4.0]))
    common: dict[str, Any] = {"cache_policy": policy, "cache_size": size}
    common["cache_bandwidth"] = int(nbytes * rng.uniform(0.5, 4.0))
    if policy == "mini-epoch":
        parts, recompose = int(rng.integers(2, 5)), bool(rng.random() < 0.6)
        common |= {"mini_epochs": parts, "repeats": int(rng.integers(1, 4))}
        common["recompose"] = recompose
    seeds = rng.integers(0, 2, int(rng.integers(1, 4))).tolist()
    jobs = []
    for seed in seeds:
        more = {"seed": seed, "io_threads": int(rng.integers(1, 3)), "epochs": None}
        more["buffer_size"] = 8
        if rng.random() < 0.2:
            more["shuffle"] = "none"
        jobs.append(Job({**common, **more}, int(rng.integers(1, 3))))
    return jobs, size, f"{policy}, {len(jobs)} jobs" if len(jobs) > 1 else f"{policy}, 1 job"


class Beats:
    """When each process had its last batch, in memory that all share."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8 * SLOTS)
        self.last = np.frombuffer(self._memory, np.float64)

    def beat(self, slot: int) -> None:
        self.last[slot] = time.monotonic()


def compared(
    path: Path, cache: Path, job: Job, rank: int, epochs: int | None = None
) -> Iterator[int]:
    """Read with and without a cache; yield the samples of each batch, which are the same."""
    import dsprep

    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "(?s).*there is no room")
    place = {"rank": rank, "world_size": job.world}
    bare = {k: v for k, v in job.options.items() if not k.startswith("cache")}
    with (
        dsprep.Reader(path, 8, **bare, **place) as plain,
        dsprep.Reader(path, 8, cache=cache, **job.options, **place) as cached,
    ):
        for epoch in count() if epochs is None else range(epochs):
            for expected, found in zip(plain, cached, strict=True):
                if judging.values(found) != judging.values(expected):
                    raise AssertionError(f"WRONG in epoch {epoch}: samples {expected['label']}")
                yield len(found["label"])


def trials(numbers: Iterator[int], tally: Tally, folder: Path, options: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    made: dict[str, Path] = {}
    for number in numbers:
        kind = list(KINDS)[number % len(KINDS)]
        if options.kind and kind not in options.kind:
            continue
        if kind not in made:
            own = folder / f"source-{kind}"
            own.mkdir()
            batch = random_batch(KINDS[kind], COUNT, seed=3) | {"label": np.arange(COUNT)}
            origin = making.origin(own, KINDS[kind], batch)
            made[kind] = making.make(kind, origin, folder / kind)
        rng = np.random.default_rng([options.seed, number])
        here = folder / "here"
        here.mkdir()
        words, what = Trial(made[kind], here, rng).run()
        if tally.judge(number, words, what) and options.keep:
            here.rename(folder / f"trial-{number}")
        else:
            shutil.rmtree(here)


class Trial:
    """Some jobs on one cache, of which ranks are killed."""

    def __init__(self, path: Path, here: Path, rng: np.random.Generator) -> None:
        self.path, self.here, self.rng = path, here, rng
        self.cache, self.beats, self.slots = here / "cache", Beats(), count()
        self.jobs, self.size, self.words = drawn(rng, size_of(path))
        self.most = 0
        self.running: dict[int, tuple[Job, int, judging.Child]] = {}

    def run(self) -> tuple[str, str]:
        """Return words for the trial, and what came out."""
        try:
            what = self._kill() or self._after()
        finally:
            for _, _, child in self.running.values():
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        return self.words, what

    def _start(self, job: Job, rank: int) -> None:
        slot = next(self.slots)
        own = self.here / f"process-{slot}"
        own.mkdir()
        self.beats.beat(slot)

        def work() -> None:
            for _ in compared(self.path, self.cache, job, rank):
                self.beats.beat(slot)

        self.running[slot] = job, rank, judging.Child(work, own)

    def _kill(self) -> str:
        """Kill and start again; return what should not have come out."""
        for job in self.jobs:
            for rank in range(job.world):
                self._start(job, rank)
        for _ in range(KILLS):
            wrong = self._watch(float(self.rng.uniform(0.05, 0.9)))
            if wrong:
                return wrong
            slot = int(self.rng.choice(list(self.running)))
            job, rank, child = self.running[slot]
            if self.rng.random() < 0.2:
                os.kill(child.pid, signal.SIGSTOP)
                wrong = self._watch(0.3)
            os.kill(child.pid, signal.SIGKILL)
            self.running.pop(slot)
            ended = child.wait()
            if wrong or ended.code != -signal.SIGKILL:
                return wrong or f"!ended by itself | {ended.err[-2000:]}"
            self._start(job, rank)
        wrong = self._watch(0.5)
        if not wrong:  # all at once
            for _, _, child in self.running.values():
                os.kill(child.pid, signal.SIGKILL)
            for _, _, child in self.running.values():
                child.wait()
            self.killed = KILLS + len(self.running)
            self.running.clear()
        return wrong

    def _watch(self, seconds: float) -> str:
        """Look at what is going on; return what should not."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.most = max(self.most, nbytes_below(self.cache))
            for slot, (_, _, child) in self.running.items():
                if not judging.alive(child.pid):
                    self.running.pop(slot)
                    return f"!a rank failed | {child.wait().err[-3000:]}"
                if time.monotonic() - self.beats.last[slot] > STALL:
                    return f"!no batch for {STALL:.0f} s"
            time.sleep(0.02)
        if self.most > self.size:
            return f"!{self.most:,} bytes in a cache of {self.size:,}"
        return ""

    def _after(self) -> str:
        """Run one job that nobody disturbs; return what came out."""
        left = [p.name for p in self.cache.iterdir() if p.name.startswith(".")]
        job = Job(self.jobs[0].options, 1)

        def work() -> None:
            epochs = int(job.options.get("mini_epochs", 1)) + 1
            if sum(compared(self.path, self.cache, job, 0, epochs)) < COUNT:
                raise AssertionError("samples are missing")

        ended = judging.forked(work, self.here)
        if ended.code:
            return f"!the next run is wrong | {ended.err[-3000:]}"
        names = [p.name for p in self.cache.iterdir() if p.name.startswith(".")]
        if names:
            return f"!left | {names}"
        if nbytes_below(self.cache) > self.size:
            return "!more in the cache than it may have"
        left_over = self._unfinished()
        if left_over > 2:  # what this run was at last, and what came next
            return f"!{left_over} parts that are not complete are left"
        return f"exact after {self.killed} kills" + (", of removing or making" if left else "")

    def _unfinished(self) -> int:
        from dsprep.cache.folder import CacheFolder

        found = CacheFolder(self.cache).infos()
        return sum(
            info.in_use or bool(info.part and info.ready and not info.complete) for info in found
        )


def size_of(path: Path) -> int:
    """Return the bytes of a dataset."""
    return nbytes_below(path) if path.is_dir() else path.stat().st_size


def nbytes_below(path: Path) -> int:
    """Return the bytes that all files below a directory take of the disk."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):
                total += Path(folder, name).stat().st_blocks * 512
    return total
