"""Running what is compared in processes of its own, from a page cache in a known state."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from dsprep.bench import caches
from dsprep.bench.scratch.folder import sync_tree
from dsprep.storage import remove, sync_directory, tree_nbytes

STILL_HELD = 0.02
"""Share of the data in the page cache from which on a run was not cold."""

FETCHED = 0.9
"""Share of the data that a cold run has to fetch where the kernel does not tell what it holds."""

ARGUMENTS = 1 << 20
"""Bytes of arguments that every system takes."""


@dataclass(frozen=True)
class Taken:
    """What one run took.

    Attributes
    ----------
    measures
        By the names of `dsprep.bench.model.MEASURES`.
    startup
        Seconds of the whole process before and behind what it did: interpreter and imports.
    problem
        Why it does not count; empty if it does.
    more
        What else the process told.
    """

    measures: dict[str, float]
    startup: float | None = None
    problem: str = ""
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cold:
    """The state of the page cache that runs begin with.

    Attributes
    ----------
    files
        The files that are read.
    cold
        Whether they are dropped from it, or read into it.
    """

    files: tuple[Path, ...]
    cold: bool

    def settle(self) -> str:
        """Bring about the state; return why that did not work, else nothing."""
        if not self.cold:
            caches.fill(self.files)
            return ""
        caches.drop(self.files)
        held = caches.held(self.files)
        if held is not None and held > STILL_HELD:
            return f"not cold: {held:.0%} of the data stayed in the page cache"
        return ""

    def lacking(self) -> str:
        """Return how much of the data the page cache could not take, if it was to have all."""
        held = None if self.cold else caches.held(self.files)
        if held is None or held > 1 - STILL_HELD:
            return ""
        return f"not all warm: the page cache had {held:.0%} of the data"

    def check(self, taken: Taken) -> Taken:
        """Return what a run that read all took, with a problem if the data were not fetched."""
        if not self.cold or caches.held(self.files[:1]) is not None:
            return taken
        nbytes = sum(f.stat().st_size for f in self.files)
        if taken.measures.get("device_bytes", nbytes) < FETCHED * nbytes:
            return replace(taken, problem="it cannot be told whether the data came from the device")
        return taken


def run_child(task: dict[str, Any], folder: Path, sync: Path | None = None) -> Taken:
    """Run ``child`` with a task; `sync`: what is to be on the disk when the time is taken."""
    fd, name = tempfile.mkstemp(prefix=".result-", dir=folder)
    os.close(fd)
    result = Path(name)
    command = [sys.executable, "-m", "dsprep.bench.copying.child", json.dumps(task), name]
    try:
        began = time.perf_counter()
        status, errors = _run(command)
        if sync is not None and sync.exists():
            to_disk(sync)
        seconds = time.perf_counter() - began
        if status:
            return Taken({}, problem=_last_words(status, errors))
        told: dict[str, Any] = json.loads(result.read_text())
    finally:
        remove(result)
    within = told.pop("seconds")
    names = ("read_bytes", "device_bytes", "cpu_seconds", "peak_rss_bytes", "locate_per_second")
    measures = {n: float(told.pop(n)) for n in names if n in told}
    startup = None if sync is not None else seconds - within
    return Taken({"seconds": seconds, **measures}, startup, more=told)


def run_cp(files: Sequence[Path], folder: Path, sync: bool) -> Taken:
    """Copy files and directories by ``cp`` into a new folder, which is removed again.

    Its bytes are really copied, also where the file system could share them.
    """
    target = Path(tempfile.mkdtemp(prefix="cp-", dir=folder))
    program = cp_program()
    names = [str(f) for f in files]
    try:
        if program is None or sum(map(len, names)) > ARGUMENTS:
            task = {"do": "copy", "files": names, "target": str(target), "libraries": []}
            taken = run_child(task, folder, target if sync else None)
        else:
            parents = ["--parents"] if len({f.name for f in files}) < len(files) else []
            taken = _cp([*program, *parents, "--", *names, str(target)], target if sync else None)
        taken.measures["size_bytes"] = float(tree_nbytes(target))
        return taken
    finally:
        remove(target)


@cache
def cp_program() -> tuple[str, ...] | None:
    """Return ``cp`` with the options that it understands here, None if there is none."""
    if shutil.which("cp") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        one = Path(folder, "one")
        one.write_bytes(b"1")
        full = ("cp", "-r", "--reflink=never")
        return full if not _run([*full, str(one), str(one) + "2"])[0] else ("cp", "-r")


def _cp(command: list[str], sync: Path | None) -> Taken:
    began = time.perf_counter()
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors) as process,
    ):
        try:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            ended = time.perf_counter()
            counts = _io(process.pid)  # of a process that has ended, until it is waited for
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        except BaseException:
            process.kill()
            raise
        if process.returncode:
            errors.seek(0)
            return Taken({}, problem=_last_words(process.returncode, errors.read()))
    if sync is not None:
        to_disk(sync)
        ended = time.perf_counter()
    return Taken({"seconds": ended - began, "cpu_seconds": used.ru_utime + used.ru_stime, **counts})


def _io(pid: int) -> dict[str, float]:
    try:
        lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    told = dict(line.split(": ") for line in lines)
    return {"read_bytes": float(told["rchar"]), "device_bytes": float(told["read_bytes"])}


def _run(command: list[str]) -> tuple[int, bytes]:
    """Run a program; return its exit status and what it wrote to stderr."""
    told = {**os.environ, "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=told
    ) as process:
        try:
            errors = process.communicate()[1]
        except BaseException:
            process.kill()
            raise
    return process.returncode, errors


def _last_words(status: int, errors: bytes) -> str:
    lines = errors.decode(errors="replace").strip().splitlines()
    words = lines[-1].removeprefix("dsprep: error: ") if lines else ""
    return words or f"it ended with status {status}"


def to_disk(path: Path) -> None:
    """Wait until a file or a folder and all in it is on the disk."""
    if path.is_dir():
        sync_tree(path)
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    sync_directory(path.parent)
