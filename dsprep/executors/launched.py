"""Whether mpiexec or srun started this process among others: by its environment alone."""

from __future__ import annotations

import os
from collections.abc import Mapping

SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def launched(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher says that there is more than one of this process.

    Of a SLURM job's shell, which counts as a step of one task, the answer is no.
    """
    return any(env.get(name, "").isdecimal() and int(env[name]) > 1 for name in SIZES)
