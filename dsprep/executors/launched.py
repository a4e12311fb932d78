"""Whether mpiexec or srun started this process among others, and how it leaves them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def launched(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher says that there is more than one of this process.

    Of a SLURM job's shell, which counts as a step of one task, the answer is no.
    """
    return any(env.get(name, "").isdecimal() and int(env[name]) > 1 for name in SIZES)


def leave(code: int) -> None:
    """End this rank of an MPI job at once, and all others with the first one, which they serve.

    For a rank that was told to end: where another one is lost, MPI's own end would wait for it
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
