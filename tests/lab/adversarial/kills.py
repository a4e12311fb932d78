"""SIGKILL at random moments of convert and repack.

After each kill the target is wholly the old or wholly the new one, with its types; the same
command then ends in the same bytes as a run that nobody disturbed; and nothing is left, neither
files nor processes nor shared memory.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.errors import DsprepError
from dsprep.storage.atomic import KEPT, partial_path
from dsprep.writing import plan, shards
from lab.adversarial import judging, making
from lab.adversarial.judging import Tally

COUNT = 250
Work = Callable[..., Callable[[], object]]
"""What a child does in a folder; and, if so asked, by which call of the system it is killed."""

CALLS = ("open", "read", "pread", "preadv", "write", "pwrite", "pwritev", "fsync", "fdatasync")
CALLS = (*CALLS, "rename", "replace", "unlink", "mkdir", "rmdir", "close", "ftruncate")
PIECES = "--samples-per-file", "65"
PROCESSES = "--executor", "processes", "--workers", "2"
SHUFFLED = *making.GROUPS[1:], "--shuffle", "3"


@dataclass(frozen=True)
class Case:
    """One command: the samples' kind, the target's name, and options."""

    command: str
    schema: making.Schema
    target: str
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        told = ("overwrite", "processes", "shuffle", "compress")
        words = [o.lstrip("-") for o in self.options]
        to = words[words.index("to") + 1] + " shards" if "to" in words else self.target[4:]
        return " ".join([self.command, to, *(w for w in words if w in told)])


def cases() -> list[Case]:
    """Return what is killed: every format, alone and in place of an old one, and processes."""
    found = []
    for target in ("set.h5", "set.lmdb", "set.tfrecord", "set.zarr", "set.zarr.zip"):
        fixed = making.FIXED if target == "set.h5" else making.MIXED
        found += [
            Case("convert", making.MIXED, target),
            Case("convert", making.MIXED, target, ("--overwrite",)),
            Case("repack", fixed, target, (*making.GROUPS[1:], "--overwrite")),
        ]
    for to in ("hdf5", "lmdb", "tfrecord", "zarr"):
        shards = "--to", to, *PIECES
        found += [
            Case("convert", making.MIXED, "set", (*shards, "--overwrite")),
            Case("convert", making.MIXED, "set", (*shards, *PROCESSES)),
            Case("convert", making.MIXED, "set", (*shards, *PROCESSES, "--overwrite")),
            Case("repack", making.FIXED, "set", (*making.GROUPS[1:], *shards, *PROCESSES)),
        ]
    found += [
        Case("repack", making.FIXED, "set.h5", (*SHUFFLED, "--overwrite")),
        Case("convert", making.MIXED, "set.tfrecord", ("--compress", "gzip:1", "--overwrite")),
    ]
    return found


class Counted:
    """Counts the calls of the system about a folder, and kills this process at one of them."""

    def __init__(self, folder: Path, at: int) -> None:
        self.folder, self.at, self.count = str(folder), at, 0
        for name in CALLS:
            setattr(os, name, self.wrapped(getattr(os, name)))
        io.open = self.wrapped(io.open)  # of Path.open

    def wrapped(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], int | str | Path) and self.concerns(args[0]):
                self.count += 1
                if self.count == self.at:
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    def concerns(self, first: int | str | Path) -> bool:
        try:
            name = Path(f"/proc/self/fd/{first}").readlink() if isinstance(first, int) else first
        except OSError:
            return False
        return str(name).startswith(self.folder)


@dataclass(frozen=True)
class Known:
    """What an undisturbed run of a case makes.

    Attributes
    ----------
    before
        A folder as it is when the command begins, with the old dataset if there is one.
    after
        Digests of that folder when it has ended.
    old, new
        The values of both datasets; old None: there is none.
    seconds
        How long it takes.
    calls
        Calls of the system that it makes about files in the folder; 0: not counted.
    """

    work: Work
    before: Path
    after: dict[str, str]
    old: judging.Values | None
    new: judging.Values
    seconds: float
    calls: int


def work_of(case: Case, source: Path) -> Work:
    """Return what a child does in a folder; in small pieces, so that there are many moments."""

    def work(folder: Path, at: int = 0) -> Callable[[], object]:
        words = (case.command, source, folder / case.target, *case.options)
        if "processes" in case.options:
            return judging.program(*words)
        run = judging.command(*words)

        def small() -> None:
            shards.CHECKPOINT_NBYTES = 30_000
            for name in ("pieces", "group_pieces"):
                cut = getattr(plan, name)
                less = lambda *a, cut=cut, **k: cut(*a, **{"target": 20_000, **k})  # noqa: E731
                setattr(shards, name, less)
            counted = Counted(folder, at)
            try:
                run()
            finally:
                (folder.parent / "calls").write_text(str(counted.count))

        return small

    return work


def undisturbed(case: Case, folder: Path) -> Known:
    folder.mkdir()
    versions = {}
    for version in (0, 1):
        own = folder / f"version-{version}"
        own.mkdir()
        batch = making.samples(case.schema, COUNT, version)
        versions[version] = making.origin(own, case.schema, batch)
    before, after = folder / "before", folder / "after"
    before.mkdir()
    old = None
    if "--overwrite" in case.options:
        done(work_of(case, versions[0])(before), folder)
        old = judging.read(before / case.target)
    shutil.copytree(before, after)
    work = work_of(case, versions[1])
    (folder / "calls").write_text("0")
    seconds = done(work(after), folder)
    calls = int((folder / "calls").read_text())
    new = judging.read(after / case.target)
    return Known(work, before, judging.contents(after), old, new, seconds, calls)


def done(work: Callable[[], object], folder: Path) -> float:
    """Run a command that must not fail; return its seconds."""
    ended = judging.forked(work, folder, seconds=600)
    if ended.code:
        raise RuntimeError(f"undisturbed, it ended with {ended.code}: {ended.err}")
    return ended.seconds


def trials(numbers: Iterator[int], tally: Tally, folder: Path, options: argparse.Namespace) -> None:
    judging.adopt()
    known: dict[Case, Known] = {}
    every = cases()
    for number in numbers:
        case = every[number % len(every)]
        if options.kind and not any(k in case.name for k in options.kind):
            continue
        if case not in known:
            known[case] = undisturbed(case, folder / f"case-{number % len(every)}")
        rng = np.random.default_rng([options.seed, number])
        here = folder / "here"
        shutil.copytree(known[case].before, here)
        what = trial(case, known[case], here, folder, rng)
        if tally.judge(number, case.name, what) and options.keep:
            here.rename(folder / f"trial-{number}")
        else:
            shutil.rmtree(here)


def trial(case: Case, known: Known, here: Path, folder: Path, rng: np.random.Generator) -> str:
    """Kill one run and continue it; return what came out, with "!" in front of a finding."""
    memory = judging.shared_memory()
    processes = "processes" in case.options
    # Half of all kills near the end, where the result is put in place.
    share = rng.uniform(0.0, 1.0) if rng.random() < 0.5 else rng.uniform(0.7, 1.0)
    if known.calls and rng.random() < 0.7:
        victims = "the process"
        child = judging.Child(known.work(here, 1 + int(share * known.calls)), folder)
    else:
        child = judging.Child(known.work(here), folder)
        time.sleep(share * known.seconds)
        victims = kill(child.pid, rng, processes)
    ended = child.wait()
    if ended.hung:
        return f"!hang after {victims} was killed"
    left = judging.orphans()
    if left:
        return f"!{len(left)} processes left after {victims} was killed"
    if victims == "a worker" and ended.code:
        wrong = judging.complaint(ended)
        if wrong:
            return f"!a worker was killed: {wrong}"
    state = visible(case, known, here)
    if state.startswith("!"):
        return state
    working = partial_path(here / case.target)
    complete = state == "new" and not (working / "state.json").exists()
    if complete and known.old is None and working.exists():
        for name in KEPT:  # killed before its last acts
            (working / name).unlink(missing_ok=True)
        working.rmdir()
        state = "new, a lock beside it"
    elif not complete or known.old is not None:
        again = judging.forked(known.work(here), folder)
        wrong = judging.complaint(again, refused=False)
        if wrong:
            return f"!{state} after the kill, the same command again: {wrong}"
    differs = judging.differing(judging.contents(here), known.after)
    if differs:
        return f"!{state} after the kill, and in the end other files | {differs}"
    names = judging.left_in_memory(memory)
    if names:
        return f"!left in /dev/shm | {sorted(names)}"
    return f"{state}, same bytes" if ended.code else "ended before"


def kill(pid: int, rng: np.random.Generator, processes: bool) -> str:
    """Kill the process; or all of its group, or one of those that it started."""
    how = int(rng.integers(3)) if processes else 0
    if how == 2:
        below = Path(f"/proc/{pid}/task/{pid}/children")
        workers = below.read_text().split() if below.exists() else []
        if workers:
            os.kill(int(rng.choice(workers)), signal.SIGKILL)
            return "a worker"
    if how == 1:
        os.killpg(pid, signal.SIGKILL)
        return "the group"
    os.kill(pid, signal.SIGKILL)
    return "the process"


def visible(case: Case, known: Known, here: Path) -> str:
    """Return which dataset lies under the target's name after a kill."""
    target = here / case.target
    if not target.exists():
        return "!the old dataset is gone" if known.old is not None else "nothing"
    try:
        found = judging.read(target)
    except (DsprepError, OSError) as error:
        if known.old is not None:
            return f"!neither old nor new can be read | {error}"
        return "new, refused until it is continued"
    return judging.whose(found, {"new": known.new, "old": known.old})
