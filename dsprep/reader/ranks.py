"""The rank of this process, of how many: as the caller says, or else its launcher.

Nothing is imported and nothing is communicated: libraries are asked only if the program has
imported and initialised them. Environment variables, as their launchers document them:

torchrun
    ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE`` (PyTorch, "torchrun (Elastic
    Launch)", section "Environment Variables").
Open MPI
    ``OMPI_COMM_WORLD_RANK``, ``_SIZE``, ``_LOCAL_RANK``, ``_LOCAL_SIZE`` (Open MPI 5,
    "Environment variables set for MPI applications").
MVAPICH2
    ``MV2_COMM_WORLD_RANK``, ``_SIZE``, ``_LOCAL_RANK``, ``_LOCAL_SIZE`` (its user guide).
PMI: MPICH, Intel MPI, HPE Cray PALS
    ``PMI_RANK``, ``PMI_SIZE``, which Hydra sets for each process; and of the node
    ``MPI_LOCALRANKID``, ``MPI_LOCALNRANKS`` (Hydra) or ``PMI_LOCAL_RANK``, ``PMI_LOCAL_SIZE``
    (PALS).
SLURM
    ``SLURM_PROCID``, ``SLURM_STEP_NUM_TASKS``, ``SLURM_LOCALID``, ``SLURM_NODEID`` and
    ``SLURM_STEP_TASKS_PER_NODE``, such as ``4(x2),3`` (srun(1), "OUTPUT ENVIRONMENT VARIABLES").
    Only srun sets those of the step. ``SLURM_NTASKS`` and ``SLURM_PROCID=0`` are also set in a
    batch script and may be in an interactive shell, where one process runs, not so many; steps
    numbered from 0xfffffff0 on are such scripts and shells (slurm.h).
PMIx
    ``PMIX_RANK``; a variable with the number of processes does not exist in its standard.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from dsprep.errors import UsageError

FIX = "give rank= and world_size=, or start the program with one launcher"


@dataclass(frozen=True)
class RankInfo:
    """One process of a job."""

    rank: int
    world_size: int
    local_rank: int | None  # of those of its node; None where that is not known
    local_size: int | None
    source: str  # what says so, for a person

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} ({self.source})"


_SPECIAL_STEPS = 0xFFFFFFF0

_LAUNCHERS: tuple[tuple[str, str, str | None], ...] = (
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MVAPICH2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMI", "PMI_RANK", "PMI_SIZE"),
    ("SLURM", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("PMIx", "PMIX_RANK", None),
)
"""The variables that launchers set: of the rank, and of the number of processes."""

_LOCAL = (
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)
"""The same of the node."""


def detect(rank: int | None = None, world_size: int | None = None) -> RankInfo:
    """Return the rank of this process, and the world size.

    The first of these that knows: the arguments, ``torch.distributed``, mpi4py (of more than one
    process), the environment; else it is alone.

    Raises
    ------
    UsageError
        If only one of the two is known, or they cannot be.
    """
    env = os.environ
    if rank is not None or world_size is not None:
        if rank is None or world_size is None:
            given, missing = (
                ("rank", "world_size") if world_size is None else ("world_size", "rank")
            )
            raise UsageError(f"{given} is given without {missing}", fix="give both, or neither")
        return _checked_rank_info(rank, world_size, env, "as given", "rank", "world_size")
    torch = sys.modules.get("torch.distributed")
    if torch is not None and torch.is_available() and torch.is_initialized():
        return _checked_rank_info(
            torch.get_rank(), torch.get_world_size(), env, "torch.distributed"
        )
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        world = mpi.COMM_WORLD
        if world.Get_size() > 1:  # 1: imported by a program that another launcher started
            return _checked_rank_info(world.Get_rank(), world.Get_size(), env, "mpi4py, COMM_WORLD")
    return _from_environment(env)


def _from_environment(env: Mapping[str, str]) -> RankInfo:
    """Return the ranks of the first launcher whose variables are all set."""
    problem = variable = ""
    for launcher, rank, size in _LAUNCHERS:
        here = [name for name in (rank, size) if name and name in env]
        if launcher == "SLURM" and not _in_step(env):
            continue
        if size is not None and len(here) == 2:
            (number, count), source = (_number(env, n) for n in here), f"{launcher}: {rank}, {size}"
            return _checked_rank_info(number, count, env, source, rank, size)
        if here and not variable:
            variable = f"{here[0]}={env[here[0]]}"
            problem = f"{here[0]} is set without {size if here[0] == rank else rank}"
            if size is None:
                problem = f"{rank} is set, but {launcher} does not say of how many processes"
    if variable:
        raise UsageError(problem, found=variable, fix=FIX)
    source = "no launcher found"
    if "SLURM_JOB_ID" in env:
        source += "; in a SLURM job, but not started by srun"
    return RankInfo(0, 1, 0, 1, source)


def _checked_rank_info(
    rank: int,
    world_size: int,
    env: Mapping[str, str],
    source: str,
    rank_name: str = "rank",
    size_name: str = "world size",
) -> RankInfo:
    """Return a rank, checked, with its number on its node where that is known."""
    for name, value in ((rank_name, rank), (size_name, world_size)):
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise UsageError(f"{name} is {value!r}", expected="a whole number", fix=FIX)
    rank, world_size = rank.__index__(), world_size.__index__()
    if world_size < 1 or not 0 <= rank < world_size:
        raise UsageError(
            f"{rank_name} is {rank} and {size_name} is {world_size}",
            expected="ranks from 0 on, fewer than there are processes",
            fix=FIX,
        )
    local_rank, local_size = (0, 1) if world_size == 1 else _local(env, world_size)
    return RankInfo(rank, world_size, local_rank, local_size, source)


def _local(env: Mapping[str, str], world_size: int) -> tuple[int, int] | tuple[None, None]:
    """Return rank and number of processes on this node, as far as a launcher states them."""
    for names in _LOCAL:
        if all(name in env for name in names):
            rank, size = (_number(env, name) for name in names)
            return (rank, size) if rank < size <= world_size else (None, None)
    tasks = _tasks(env.get("SLURM_STEP_TASKS_PER_NODE", ""), env.get("SLURM_NODEID", ""))
    if tasks is not None and "SLURM_LOCALID" in env and _in_step(env):
        rank = _number(env, "SLURM_LOCALID")
        if rank < tasks <= world_size:
            return rank, tasks
    return None, None


def _in_step(env: Mapping[str, str]) -> bool:
    """Return whether srun started this process, to run as many times as there are tasks."""
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", "")).strip()
    special = step.isdecimal() and len(step) < 19 and int(step) >= _SPECIAL_STEPS
    return "SLURM_STEP_NUM_TASKS" in env and "SLURM_PROCID" in env and not special


def _tasks(text: str, node: str) -> int | None:
    """Return the tasks on a node.

    >>> [_tasks("4(x2),3", node) for node in "0123"]
    [4, 4, 3, None]
    """
    if not re.fullmatch(r"\d{1,9}", node, re.ASCII):
        return None
    before = 0
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", part.strip(), re.ASCII)
        if match is None:
            return None
        before += int(match[2] or 1)
        if int(node) < before:
            return int(match[1])
    return None


def _number(env: Mapping[str, str], name: str) -> int:
    text = env[name].strip()
    if not re.fullmatch(r"\d{1,18}", text, re.ASCII):
        raise UsageError(f"{name} is {text!r}", expected="a whole number, 0 or more", fix=FIX)
    return int(text)
