"""Starting the processes of a run, keeping them in step, and taking what they found."""

from __future__ import annotations

import json
import os
import secrets
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import IO

from dsprep.bench.parent_pipe import ERROR, GATE, RESULT, unpack
from dsprep.bench.results import Result
from dsprep.bench.task import Task

TIMEOUT = 900.0
"""Seconds that a run may take."""


@dataclass(frozen=True)
class Failure:
    """Why a run gave no result."""

    reason: str


@dataclass
class Rank:
    """A process, and what came from it."""

    number: int
    process: subprocess.Popen[bytes]
    line: socket.socket
    errors: IO[bytes]
    data: bytearray = field(default_factory=bytearray)
    waiting: bool = False
    result: Result | None = None
    reason: str | None = None

    @property
    def done(self) -> bool:
        """Whether nothing more is to come."""
        return self.result is not None or self.reason is not None


def run(task: Task, ranks: int = 1, timeout: float = TIMEOUT) -> list[Result] | Failure:
    """Run a task by `ranks` new processes; return what each measured, or why they did not."""
    key = f"bench-{os.getpid()}-{secrets.token_hex(4)}"
    each = [replace(task, rank=r, world_size=ranks, key=key) for r in range(ranks)]
    started: list[Rank] = []
    try:
        for one in each:
            started.append(start(one))  # noqa: PERF401 (those before it are ended if one fails)
        _follow(started, time.monotonic() + timeout)
        failed = [r for r in started if r.reason is not None]
        if failed:
            who = f"rank {failed[0].number}: " if ranks > 1 else ""
            return Failure(f"{who}{failed[0].reason}")
        return [r.result for r in started if r.result is not None]
    finally:
        for rank in started:
            end(rank)


def start(task: Task) -> Rank:
    """Start the process of one rank."""
    ours, theirs = socket.socketpair()
    errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by end)
    try:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "dsprep.bench.child", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                pass_fds=[theirs.fileno()],
                env=_environment(),
                start_new_session=True,  # with its own workers, so that all can be ended
            )
        assert process.stdin is not None
        rank = Rank(task.rank, process, ours, errors)
        with suppress(BrokenPipeError):  # it has ended; what it printed tells why
            process.stdin.write(json.dumps(task.to_json()).encode())
            process.stdin.close()
    except BaseException:
        ours.close()
        errors.close()
        raise
    return rank


def _environment() -> dict[str, str]:
    """Return this process's, in which a rank must not find that it is another program's."""
    foreign = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "MV2_")
    told = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        told.pop(name, None)
    return {**told, "PYTHONWARNINGS": "ignore", "TF_CPP_MIN_LOG_LEVEL": "3"}


def _follow(ranks: Sequence[Rank], deadline: float) -> None:
    """Serve the ranks until all have told a result, one has failed, or time is over."""
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.line, selectors.EVENT_READ, rank)
        while not all(r.done for r in ranks):
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                slow = next(r for r in ranks if not r.done)
                slow.reason = "it took too long and was ended (--timeout allows more)"
                return
            for key, _ in ready:
                rank = key.data
                if hear(rank):
                    selector.unregister(rank.line)
                if rank.reason is not None:
                    return
            if all(r.waiting for r in ranks if not r.done):
                for rank in ranks:
                    if rank.waiting:
                        rank.waiting = False
                        with suppress(ConnectionError):  # it has ended; its line tells so next
                            rank.line.sendall(b".")


def hear(rank: Rank) -> bool:
    """Take what a rank says; return whether it was the last."""
    try:
        came = rank.line.recv(1 << 20)
    except ConnectionError:
        came = b""
    rank.data += came
    while (message := unpack(rank.data)) is not None:
        kind, content = message
        if kind == GATE:
            rank.waiting = True
        elif kind == RESULT:
            rank.result = Result.from_json(content)
        elif kind == ERROR:
            rank.reason = str(content)
    if not came and not rank.done:
        rank.reason = _last_words(rank)
    return not came or rank.done


def _last_words(rank: Rank) -> str:
    """Return how a process ended that told nothing."""
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
        select.select([watched], [], [], 10 if rank.result is not None else 0.2)
        os.close(watched)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # its session is its own; it is not reaped before this
    rank.process.wait()
    rank.errors.close()
