"""The ranks of an MPI job: the first one plans and publishes, the others do tasks."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from typing import Any

from dsprep.errors import MissingExtra, UsageError

ADVICE = "if an MPI process is lost, repeat the command: it goes on with what is missing"
"""Told beforehand: mpiexec ends all processes then, without a word of theirs."""


@contextmanager
def opened(workers: int | None, scheduler: str | None) -> Iterator[Executor]:
    """Give the other ranks to the first one; in those, do its tasks and then leave the program.

    Raises
    ------
    MissingExtra
        If mpi4py is not installed.
    UsageError
        If there is only one rank.
    """
    try:
        from mpi4py import MPI
        from mpi4py.futures import MPICommExecutor
    except ImportError as error:
        raise MissingExtra(
            "several processes were started, and working together takes mpi4py",
            fix="pip install 'dsprep[mpi]', or start one process with --executor threads",
        ) from error
    if MPI.COMM_WORLD.Get_size() < 2:
        raise UsageError(
            "there is one MPI process",
            expected="two or more: the first one hands out the work",
            fix="start it with mpiexec -n 4 dsprep ..., or srun -n 4 dsprep ...",
        )
    pool: Any
    with ExitStack() as stack:
        pool = stack.enter_context(MPICommExecutor(MPI.COMM_WORLD, root=0))
        if pool is not None:  # other ranks have worked until all was done
            pool.advice = ADVICE
            pool.waited_for = False
            try:
                yield pool
            except KeyboardInterrupt:
                stack.pop_all()  # some may be lost; nobody waits for them: see `launched.leave`
                raise
    if pool is None:
        raise SystemExit(0)
