"""The ranks of an MPI job: the first one plans and publishes, the others do tasks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from typing import Any

from dsprep.errors import MissingExtra, UsageError

SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
ADVICE = "if an MPI process is lost, repeat the command: it continues with what is missing"
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
            pool.by_reference = True
            try:
                yield pool
            except KeyboardInterrupt:
                stack.pop_all()  # some may be lost; nobody waits for them: see `leave`
                raise
    if pool is None:
        raise SystemExit(0)


def launched(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher says that there is more than one of this process.

    Of a SLURM job's shell, which counts as a step of one task, the answer is no.
    """
    return any(env.get(name, "").isdecimal() and int(env[name]) > 1 for name in SIZES)


def leave(code: int) -> None:
    """End this rank of an MPI job at once, and all others with the first one, which they serve.

    For a rank that has to end: where another one is lost, MPI's own end would wait for it
    without end. Does nothing in other programs.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    if mpi.COMM_WORLD.Get_size() > 1:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if mpi.COMM_WORLD.Get_rank() == 0:
            mpi.COMM_WORLD.Abort(code)
        os._exit(code)
