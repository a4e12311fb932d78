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
from dsprep.bench.evidence import COLD, HELD, Evidence, Seen, server_words
from dsprep.bench.scratch.folder import sync_tree
from dsprep.bench.watching import Server, Watch
from dsprep.core.storage import remove, sync_directory, tree_nbytes

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
    evidence
        Of cold runs: what shows that it was one.
    """

    measures: dict[str, float]
    startup: float | None = None
    problem: str = ""
    more: dict[str, Any] = field(default_factory=dict)
    evidence: Evidence | None = None


class Cold:
    """The state of the caches that runs begin with.

    Parameters
    ----------
    files
        The files that are read.
    cold
        Whether they are dropped from the page cache, or read into it.
    server
        What is done about the cache of the server.
    """

    def __init__(self, files: Sequence[Path], cold: bool, server: Server | None = None) -> None:
        self.files, self.cold, self.server = tuple(files), cold, server or Server()
        self._watch = Watch(self.files, tries=cold)
        self._words = server_words(self.server.warm, self.server.evict)

    def settle(self) -> Seen | None:
        """Bring about the state; return what is seen of a cold one.

        Raises
        ------
        UsageError
            If the server's cache cannot be dropped.
        """
        if not self.cold or self.server.warm:
            caches.fill(self.files)
        if not self.cold:
            return None
        caches.drop(self.files)
        self.server.drop()
        return replace(self._watch.before(), received=self._watch.received())

    def lacking(self) -> str:
        """Return how much of the data the page cache could not take, if it was to have all."""
        held = None if self.cold else self._watch.held()
        if held is None or held > 1 - HELD:
            return ""
        return f"not all warm: the page cache had {held:.0%} of the data"

    def judged(self, taken: Taken, seen: Seen | None, all_read: bool) -> Taken:
        """Return what a run took with the evidence that it was cold, and what contradicts it.

        Parameters
        ----------
        seen
            What `settle` returned.
        all_read
            Whether it had to fetch all bytes of the files.
        """
        if seen is None or not taken.measures:
            return taken
        seen = replace(seen, received=self._watch.received() - seen.received)
        least = sum(f.stat().st_size for f in self.files) if all_read else None
        device = int(taken.measures.get("device_bytes", 0))
        if seen.counts and seen.held is not None and least and device < COLD * least:
            seen = replace(seen, counts=None)  # a copy may share what it copies, and fetch nothing
        found = Evidence.of([seen], device, least, self._words)
        if found.counts is False:
            taken.measures.pop("device_bytes", None)
            if found.network is not None:
                taken.measures["network_bytes"] = float(found.network)
        return replace(taken, evidence=found, problem=taken.problem or found.problem)


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
