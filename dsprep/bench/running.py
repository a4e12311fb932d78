"""Starting the processes of a run, keeping them in step, and taking what they found."""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import IO, Any

from dsprep.bench.task import Failure, Result, Task

TIMEOUT = 900.0
"""Seconds that a run may take."""


@dataclass
class Rank:
    """A process, whether it waits at the gate, and what came of it in the end."""

    number: int
    process: subprocess.Popen[bytes]
    line: Connection[Any, Any]
    errors: IO[bytes]
    waiting: bool = False
    outcome: Result | Failure | None = None

    def hear(self) -> None:
        """Take what it says; see `dsprep.bench.child`."""
        try:
            said = self.line.recv()
        except (EOFError, OSError):
            said = _last_words(self)
        if said is None:
            self.waiting = True
        else:
            self.outcome = said if isinstance(said, Result) else Failure(said)


def run(task: Task, ranks: int = 1, timeout: float = TIMEOUT) -> list[Result] | Failure:
    """Run a task by `ranks` new processes; return what each measured, or why they did not."""
    key = f"bench-{os.getpid()}-{secrets.token_hex(4)}"
    started: list[Rank] = []
    try:
        for rank in range(ranks):
            mine = replace(task, rank=rank, world_size=ranks, key=key)
            started.append(start(mine))
        deadline = time.monotonic() + timeout
        while follow(started, deadline):
            open_gate(started)
        who = "rank {}: " if ranks > 1 else ""
        for one in started:
            if isinstance(one.outcome, Failure):
                return Failure(who.format(one.number) + one.outcome.reason)
        return [one.outcome for one in started if isinstance(one.outcome, Result)]
    finally:
        for one in started:
            end(one)


def start(task: Task) -> Rank:
    """Start the process of one rank."""
    ours, theirs = Pipe()
    errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by end)
    try:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "dsprep.bench.child", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                pass_fds=[theirs.fileno()],
                env=_environment(),
                start_new_session=True,  # with its own workers, so that all can be ended
            )
        with suppress(OSError):  # it has ended; what it printed says why
            ours.send(task)
    except BaseException:
        ours.close()
        errors.close()
        raise
    return Rank(task.rank, process, ours, errors)


def _environment() -> dict[str, str]:
    """Return this process's, in which a rank must not find that it is another program's."""
    foreign = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "MV2_")
    told = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        told.pop(name, None)
    return {**told, "PYTHONWARNINGS": "ignore", "TF_CPP_MIN_LOG_LEVEL": "3"}


def follow(ranks: Sequence[Rank], deadline: float) -> bool:
    """Listen until all ranks wait at the gate or are done; return whether the gate is to open.

    It is not once a rank has failed, or time is over.
    """
    while any(not r.waiting and r.outcome is None for r in ranks):
        lines = {r.line: r for r in ranks if r.outcome is None}
        ready = wait(list(lines), max(0.0, deadline - time.monotonic()))
        if not ready:
            slow = next(r for r in lines.values() if not r.waiting)
            slow.outcome = Failure("it took too long and was ended (--timeout allows more)")
        for line in ready:
            lines[line].hear()  # type: ignore[index]
        if any(isinstance(r.outcome, Failure) for r in ranks):
            return False
    return any(r.outcome is None for r in ranks)


def open_gate(ranks: Sequence[Rank]) -> None:
    """Let the ranks that wait at the gate go on."""
    for rank in ranks:
        if rank.waiting and rank.outcome is None:
            rank.waiting = False
            with suppress(OSError):  # it has ended; its line says so next
                rank.line.send(None)


def _last_words(rank: Rank) -> str:
    """Return how a process ended that sent no result."""
    try:
        code = rank.process.wait(5)
    except subprocess.TimeoutExpired:
        return "its line to the benchmark broke"
    rank.errors.seek(max(0, rank.errors.seek(0, os.SEEK_END) - 4096))
    lines = rank.errors.read().decode(errors="replace").strip().splitlines()
    how = f"ended by signal {-code}" if code < 0 else f"ended with status {code}"
    return f"{how}: {lines[-1].strip()[:300]}" if lines else how


def end(rank: Rank) -> None:
    """End a process and those that it started, if they still run."""
    rank.line.close()
    pid = rank.process.pid
    with suppress(ProcessLookupError):
        watched = os.pidfd_open(pid)
        select.select([watched], [], [], 10 if isinstance(rank.outcome, Result) else 0.2)
        os.close(watched)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # its session is its own; it is not reaped before this
    rank.process.wait()
    rank.errors.close()
