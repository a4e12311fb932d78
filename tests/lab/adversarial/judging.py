"""What is a finding, and what came out of how many trials."""

from __future__ import annotations

import hashlib
import os
import resource
import select
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from support import raw

from dsprep.core.schema import Batch, Ragged

SECONDS = 60.0
"""What a command on a few kilobytes may take, on a machine that does other work besides."""

RSS = 1 << 30
"""Bytes that it may take more than the process that it was forked from."""


# --- what came out ---------------------------------------------------------------------------


@dataclass
class Tally:
    """Outcomes, counted by class; and what should not have come out, each with its trial."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    findings: list[tuple[int, str, str]] = field(default_factory=list)

    def judge(self, number: int, kind: str, what: str) -> bool:
        """Count what came out; "!" in front makes it a finding, " | " parts it from details."""
        what, _, detail = what.partition(" | ")
        if what.startswith("!"):
            self.counts[kind, f"FINDING {what[1:]}"] += 1
            self.findings.append((number, f"{kind}: {what[1:]}", detail))
        else:
            self.counts[kind, what] += 1
        return what.startswith("!")

    def merge(self, other: Tally) -> None:
        self.counts.update(other.counts)
        self.findings += other.findings

    def show(self, most: int = 10) -> Iterator[str]:
        """Say what came out, and `most` of the findings of each sort."""
        kinds: dict[str, list[str]] = {}
        for (kind, outcome), count in sorted(self.counts.items()):
            kinds.setdefault(kind, []).append(f"{outcome} {count:,}")
        for kind, outcomes in kinds.items():
            yield f"{kind:<24} {', '.join(outcomes)}"
        shown: Counter[str] = Counter()
        for number, what, detail in sorted(self.findings):
            shown[what] += 1
            if shown[what] <= most:
                yield f"\nFINDING trial {number}: {what}\n{detail}".rstrip()


# --- values ----------------------------------------------------------------------------------

Values = dict[str, tuple[str, str]]
"""Of each field its type, and a digest of its bits."""


def values(batch: Batch) -> Values:
    """Return what tells batches apart: any bit, length, type or name."""
    found: Values = {}
    for name, column in batch.items():
        ragged = isinstance(column, Ragged)
        array = np.asarray(column.values if ragged else column)
        bits = raw(array) + (np.asarray(column.lengths).tobytes() if ragged else b"")
        shape = [None if ragged else len(array), *array.shape[1:]]
        kind = f"{column.kind if ragged else 'fixed'} {array.dtype.str} {shape}"
        found[name] = kind, hashlib.blake2b(bits, digest_size=8).hexdigest()
    return found


def read(path: Path, **options: object) -> Values:
    """Open a dataset as a program would, and return what all of it holds."""
    import dsprep

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with dsprep.open(path, **options) as source:
            return values(source[:])


# --- processes -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How a child came to its end.

    Attributes
    ----------
    code
        Its exit status; negative: the signal that ended it.
    hung
        Whether it was killed since it took too long.
    seconds, grown
        What it took, and bytes of memory more than its parent had.
    """

    code: int
    hung: bool
    seconds: float
    grown: int
    out: str
    err: str


def forked(work: Callable[[], object], folder: Path, *, seconds: float = SECONDS) -> Ended:
    """Do `work` in a child, with a time limit."""
    return Child(work, folder).wait(seconds)


class Child:
    """A forked process that does `work` and is the leader of a group of its own."""

    def __init__(self, work: Callable[[], object], folder: Path) -> None:
        self._streams = [folder / "stdout", folder / "stderr"]
        self._began = time.monotonic()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(work)
        with suppress(PermissionError, ProcessLookupError):
            os.setpgid(self.pid, self.pid)

    def _run(self, work: Callable[[], object]) -> None:
        code = 1
        try:
            os.setpgid(0, 0)
            for fd, path in enumerate(self._streams, 1):
                opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
                os.dup2(opened, fd)
                os.close(opened)
            sys.stdout, sys.stderr = (os.fdopen(fd, "w", 1, closefd=False) for fd in (1, 2))
            signal.signal(signal.SIGINT, signal.default_int_handler)
            work()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def wait(self, seconds: float = SECONDS) -> Ended:
        """Wait for its end; kill it, and all of its group, when the time is over."""
        watched = os.pidfd_open(self.pid)
        try:
            left = max(0.0, self._began + seconds - time.monotonic())
            hung = not select.select([watched], [], [], left)[0]
        finally:
            os.close(watched)
        if hung:
            os.killpg(self.pid, signal.SIGKILL)
        _, status, usage = os.wait4(self.pid, 0)
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        out, err = (p.read_text(errors="replace") if p.exists() else "" for p in self._streams)
        took = time.monotonic() - self._began
        grown = max(0, usage.ru_maxrss - own) << 10
        return Ended(os.waitstatus_to_exitcode(status), hung, took, grown, out, err)


# --- what is left ----------------------------------------------------------------------------


@contextmanager
def limited(nbytes: int) -> Iterator[None]:
    """Let this process, and those that it forks, have so many bytes of addresses more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    old = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + nbytes
    resource.setrlimit(resource.RLIMIT_AS, (most, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)


def alive(pid: int) -> bool:
    """Return whether a child still runs."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
