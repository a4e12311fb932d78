"""Calls of the system that fail: EIO, short reads, EINTR, ENOSPC, EMFILE, fsync and rename.

Whatever fails in a conversion, it ends in one clear line and leaves nothing under the target's
name but the old dataset; or in the right data. The same command then ends in the right data.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import io
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.storage import scatter
from lab.adversarial import judging, making
from lab.adversarial.judging import Tally

COUNT = 200
READS = ("pread", "preadv", "read", "readv", "open", "scandir", "listdir", "stat")
WRITES = ("pwrite", "pwritev", "write", "writev", "fsync", "fdatasync", "rename", "replace")
WRITES = (*WRITES, "mkdir", "ftruncate", "posix_fallocate", "copy_file_range", "unlink")
FAULTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "ENOSPC": (errno.ENOSPC, WRITES),
    "EIO, reading": (errno.EIO, READS),
    "EIO, writing": (errno.EIO, WRITES),
    "EINTR": (errno.EINTR, ("pread", "preadv", "read", "readv")),
    "EMFILE": (errno.EMFILE, ("open",)),
    "EACCES": (errno.EACCES, ("open", "mkdir", "rename", "replace", "unlink")),
    "short reads": (0, ("pread", "preadv", "read", "readv")),
    "short writes": (0, ("pwrite", "pwritev", "write", "writev")),
    "few files": (0, ()),
    "file size limit": (0, ()),
}
SOURCES = ("hdf5", "hdf5-chunks", "lmdb", "tfrecord", "zarr-shards", "zarr-zip", "tfrecord-groups")
TARGETS = ("set.h5", "set.lmdb", "set.tfrecord", "set.zarr", "set.zarr.zip")


class Fault:
    """Makes one call fail, the one with the number `at`, or all from there on."""

    def __init__(self, name: str, at: int, lasting: bool, under: Path) -> None:
        self.name, self.at, self.lasting, self.under = name, at, lasting, str(under)
        self.code, calls = FAULTS[name]
        self.count = 0
        for call in calls:
            if hasattr(os, call):
                setattr(os, call, self.wrapped(call, getattr(os, call)))
        if "open" in calls:
            io.open = self.wrapped("open", io.open)  # of Path.open; `open` stays
        if "preadv" in calls:
            scatter._call = self.scattered(scatter._call)

    def due(self, first: object) -> bool:
        if not self.concerns(first):
            return False
        self.count += 1
        return self.count == self.at or (self.lasting and self.count > self.at)

    def concerns(self, first: object) -> bool:
        """Whether a call is about the datasets, not Python's own modules."""
        try:
            if isinstance(first, int):
                first = Path(f"/proc/self/fd/{first}").readlink()
            return os.fsdecode(os.fspath(first)).startswith(self.under)  # type: ignore[arg-type]
        except (OSError, TypeError):
            return False

    def wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.due(args[0] if args else None):
                return real(*args, **kwargs)
            if self.code == errno.EINTR:
                raise InterruptedError(self.code, os.strerror(self.code))
            if self.code:
                path = args[0] if isinstance(args[0], str | os.PathLike) else None
                raise OSError(self.code, os.strerror(self.code), path)
            return self.short(name, real, args)

        return call

    def short(self, name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Do a part of what is asked for."""
        fd, what, *rest = args
        if name in ("preadv", "readv", "pwritev", "writev"):
            first = memoryview(what[0]).cast("B")
            return real(fd, [first[: max(1, len(first) // 2)]], *rest)
        if name in ("pread", "read"):
            return real(fd, max(1, what // 2), *rest)
        data = memoryview(what).cast("B")
        return real(fd, data[: max(1, len(data) // 2)], *rest)

    def scattered(self, real: Callable[..., int]) -> Callable[..., int]:
        def call(fd: int, places: int, count: int, offset: int) -> int:
            if not self.due(fd):
                return real(fd, places, count, offset)
            if self.code:
                ctypes.set_errno(self.code)
                return -1
            entries = np.frombuffer((ctypes.c_int64 * 2).from_address(places), np.int64).copy()
            entries[1] = max(1, entries[1] // 2)
            return real(fd, entries.ctypes.data, 1, offset)

        return call


def limited(name: str, at: int) -> None:
    """Set the system's own limits."""
    if name == "few files":
        few = len(list(Path("/proc/self/fd").iterdir())) + at % 24
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (at * 3000, at * 3000))


def trials(numbers: Iterator[int], tally: Tally, folder: Path, options: argparse.Namespace) -> None:
    batch = making.samples(making.MIXED, COUNT)
    old_batch = making.samples(making.MIXED, COUNT // 4, 1)
    for name, samples in (("new", batch), ("old", old_batch)):
        (folder / name).mkdir()
        making.origin(folder / name, making.MIXED, samples)
    known = {"new": judging.values(batch), "old": judging.values(old_batch)}
    made: dict[str, Path] = {}
    names = list(FAULTS)
    for number in numbers:
        rng = np.random.default_rng([options.seed, number])
        name = names[number % len(names)]
        kind = SOURCES[number // len(names) % len(SOURCES)]
        if kind not in made:
            made[kind] = making.make(kind, folder / "new" / "origin.tfrecord", folder / kind)
        here = folder / "here"
        here.mkdir()
        try:
            what = trial(name, made[kind], here, folder, known, rng)
        finally:
            shutil.rmtree(here)
        what += f" | from {kind}" if " | " not in what else f"; from {kind}"
        tally.judge(number, name, what)


def trial(
    name: str,
    source: Path,
    here: Path,
    folder: Path,
    known: dict[str, judging.Values | None],
    rng: np.random.Generator,
) -> str:
    shutil.copytree(source.parent, here / "source", copy_function=shutil.copy2)
    path, target = here / "source" / source.name, here / str(rng.choice(TARGETS))
    grouped = bool(rng.random() < 0.3) and target.suffix not in (".h5", ".zip")
    command = list(making.GROUPS) if grouped else ["convert"]
    command[1:1] = [path, target]
    if grouped:
        command += ["-j", 1]
    overwrite = bool(rng.random() < 0.4)
    if overwrite:
        making.dsprep("convert", folder / "old" / "origin.tfrecord", target, "--no-sync")
        command.append("--overwrite")
    at, lasting = int(rng.geometric(0.04)), bool(rng.random() < 0.3)

    def work() -> None:
        if FAULTS[name][1]:
            Fault(name, at, lasting, here)
        else:
            limited(name, at)
        judging.command(*command)()

    ended = judging.forked(work, folder)
    wrong = judging.complaint(ended)
    if wrong:
        return f"!{wrong}"
    there = "nothing"
    if target.exists():
        there = judging.whose(judging.read(target), known)
        if there.startswith("!"):
            return f"{there}, exit status {ended.code}"
    if overwrite and there == "nothing":
        return "!the old dataset is gone"
    if ended.code == 0 and there != "new":
        return f"!exit status 0, but {there}"
    if ended.code == 0:
        return "right in spite of it"
    again = judging.forked(judging.command(*command), folder)
    if again.code and there != "new":
        return f"!the same command again fails | {judging.first_error(again)}"
    found = judging.whose(judging.read(target), known)
    return "refused, then right" if found == "new" else f"!the same command again: {found}"
