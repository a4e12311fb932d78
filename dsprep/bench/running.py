"""Starting the processes of a run, keeping them in step, and collecting their results.

They are ranks here (`run`), or those of an MPI job on as many nodes as that has (`MpiJob`): there
each MPI process starts a process that measures, as it would alone, and the gate that these wait at
is one of all MPI processes. The first one plans, prepares the data and reports what was found.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import IO, Any

from dsprep.bench.task import Failure, Result, Task
from dsprep.errors import MissingExtra
from dsprep.storage.trees import remove

TIMEOUT = 3600.0
"""Seconds that a run may take."""

WAITS, DONE, FAILED = range(3)
"""States of a rank of an MPI job, between two gates."""

PAUSE = 1e-4
"""Seconds between two looks whether all MPI processes have come: the ranks need the processors."""


@dataclass
class Rank:
    """A process, whether it waits at the gate, and its result."""

    number: int
    process: subprocess.Popen[bytes]
    line: Connection[Any, Any]
    errors: IO[bytes]
    waiting: bool = False
    outcome: Result | Failure | None = None

    def hear(self) -> None:
        """Receive its next message; see `dsprep.bench.child`."""
        try:
            message = self.line.recv()
        except (EOFError, OSError):
            message = _last_words(self)
        if message is None:
            self.waiting = True
        else:
            self.outcome = message if isinstance(message, Result) else Failure(message)


def run(task: Task, timeout: float = TIMEOUT) -> list[Result] | Failure:
    """Run a task by new processes, its ranks; return what each measured, or why they did not."""
    task = replace(task, world_size=task.ranks, key=_new_key())
    started: list[Rank] = []
    try:
        started.extend(start(replace(task, rank=rank)) for rank in range(task.ranks))
        deadline = time.monotonic() + timeout
        while follow(started, deadline):
            open_gate(started)
        return _results([one.outcome for one in started])
    finally:
        for one in started:
            end(one)
        _clear(task)


def _clear(task: Task) -> None:
    """Remove what a run kept on the fast tier of this node."""
    if task.tier_folder is not None:
        with suppress(OSError):  # another rank of the node removes it
            remove(task.tier_folder)


def _new_key() -> str:
    return f"bench-{os.getpid()}-{secrets.token_hex(4)}"


def _results(outcomes: Sequence[Result | Failure | None]) -> list[Result] | Failure:
    """Return the results of all ranks, or the failure of the first that has one."""
    for number, each in enumerate(outcomes):
        if isinstance(each, Failure):
            return Failure(f"rank {number}: {each.reason}") if len(outcomes) > 1 else each
    results = [each for each in outcomes if isinstance(each, Result)]
    if len(results) < len(outcomes):
        return Failure("some ranks ended before the others")
    return results


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
    """Return this process's environment, without what makes a rank one of another program."""
    foreign = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "MV2_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        kept.pop(name, None)
    return {**kept, "PYTHONWARNINGS": "ignore", "TF_CPP_MIN_LOG_LEVEL": "3"}


def follow(ranks: Sequence[Rank], deadline: float) -> bool:
    """Listen until all ranks wait at the gate or are done; return whether the gate is to open.

    It is not once a rank has failed, or time is over.
    """
    while any(not r.waiting and r.outcome is None for r in ranks):
        lines = {r.line: r for r in ranks if r.outcome is None}
        ready = wait(list(lines), max(0.0, deadline - time.monotonic()))
        if not ready:
            slow = next(r for r in lines.values() if not r.waiting)
            slow.outcome = Failure("it took too long and was ended; --limit has less read")
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


# --- the ranks of an MPI job -----------------------------------------------------------------


class MpiJob:
    """All processes of an MPI job, as seen from the first one."""

    def __init__(self, comm: Any) -> None:
        self._comm, self.size = comm, int(comm.Get_size())

    def run(self, task: Task) -> list[Result] | Failure:
        """Run a task on all ranks; see `run`."""
        task = replace(task, world_size=self.size, key=_new_key(), everywhere=True)
        self._comm.bcast(task, root=0)
        return _results(self._comm.gather(measure(self._comm, task), root=0))


@contextmanager
def joined() -> Iterator[MpiJob]:
    """Give the job to the first process; the others work for it and then leave the program."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise MissingExtra(
            "several processes were started, and measuring together takes mpi4py",
            fix="pip install 'dsprep[mpi]', or start one process with --ranks",
        ) from error
    comm = MPI.COMM_WORLD
    if comm.Get_rank() != 0:
        while (work := comm.bcast(None, root=0)) is not None:
            comm.gather(measure(comm, work), root=0)
        raise SystemExit(0)
    try:
        yield MpiJob(comm)
    finally:
        comm.bcast(None, root=0)


def measure(comm: Any, task: Task, timeout: float = TIMEOUT) -> Result | Failure | None:
    """Run this rank of a task; return its result or why there is none, None: another failed."""
    try:
        rank = start(replace(task, rank=comm.Get_rank()))
    except OSError as error:
        _states(comm, FAILED)  # the others wait for this one
        return Failure(f"it cannot be started: {error}")
    deadline = time.monotonic() + timeout
    try:
        while True:
            waits = follow([rank], deadline)
            failed = isinstance(rank.outcome, Failure)
            if set(_states(comm, WAITS if waits else FAILED if failed else DONE)) != {WAITS}:
                return rank.outcome
            open_gate([rank])
    finally:
        end(rank)
        _clear(task)


def _states(comm: Any, mine: int) -> list[int]:
    """Return the states of all ranks, without keeping a processor busy while they come."""
    states = array("i", [0]) * comm.Get_size()
    request = comm.Iallgather(array("i", [mine]), states)
    while not request.Test():
        time.sleep(PAUSE)
    return list(states)
