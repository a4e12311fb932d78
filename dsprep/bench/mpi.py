"""The ranks of a benchmark as those of an MPI job, on as many nodes as that has.

Each MPI process starts a process that measures, as it would alone; the gate that these wait at is
then one of all MPI processes. The first one plans, prepares the data and reports what was found.
"""

from __future__ import annotations

import os
import secrets
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from dsprep.bench.running import end, follow, open_gate, start
from dsprep.bench.task import Failure, Result, Task
from dsprep.errors import MissingExtra

_WAITS, _DONE, _FAILED = range(3)
_PAUSE = 1e-4
"""Seconds between two looks whether all have come: waiting ranks must not take processors."""


class Ranks:
    """All processes of an MPI job, told from the first one.

    Attributes
    ----------
    size
        How many there are.
    """

    def __init__(self, comm: Any) -> None:
        self._comm, self.size = comm, int(comm.Get_size())

    def run(self, task: Task, ranks: int, timeout: float) -> list[Result] | Failure:
        """Run a task on all ranks; see `dsprep.bench.running.run`."""
        key = f"bench-{os.getpid()}-{secrets.token_hex(4)}"
        one = replace(task, world_size=self.size, key=key, everywhere=True)
        self._comm.bcast((one, timeout), root=0)
        found = self._comm.gather(_measure(self._comm, one, timeout), root=0)
        for number, each in enumerate(found):
            if isinstance(each, Failure):
                return Failure(f"rank {number}: {each.reason}")
        if any(each is None for each in found):
            return Failure("some ranks ended before the others")
        return list(found)


@contextmanager
def opened() -> Iterator[Ranks]:
    """Give the ranks to the first process; in others, do what it says and leave the program.

    Raises
    ------
    MissingExtra
        If mpi4py is not installed.
    """
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise MissingExtra(
            "several processes were started, and measuring together takes mpi4py",
            fix="pip install 'dsprep[mpi]', or start one process with --ranks",
        ) from error
    comm = MPI.COMM_WORLD
    if comm.Get_rank() != 0:
        while (what := comm.bcast(None, root=0)) is not None:
            comm.gather(_measure(comm, *what), root=0)
        raise SystemExit(0)
    try:
        yield Ranks(comm)
    finally:
        comm.bcast(None, root=0)


def _measure(comm: Any, task: Task, timeout: float) -> Result | Failure | None:
    """Run this rank of a task; return its result, why there is none, or None.

    None, if another rank failed.
    """
    try:
        rank = start(replace(task, rank=comm.Get_rank()))
    except OSError as error:
        _all(comm, _FAILED)  # the others wait for this one
        return Failure(f"it cannot be started: {error}")
    deadline = time.monotonic() + timeout
    try:
        while True:
            waits = follow([rank], deadline)
            failed = isinstance(rank.outcome, Failure)
            states = _all(comm, _WAITS if waits else _FAILED if failed else _DONE)
            if set(states) != {_WAITS}:
                return rank.outcome
            open_gate([rank])
    finally:
        end(rank)


def _all(comm: Any, mine: int) -> list[int]:
    """Return what all ranks say, without keeping a processor busy while they come."""
    found = array("i", [0]) * comm.Get_size()
    request = comm.Iallgather(array("i", [mine]), found)
    while not request.Test():
        time.sleep(_PAUSE)
    return list(found)
