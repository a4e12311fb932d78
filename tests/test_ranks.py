"""Which process this is: whatever started it."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from dsprep.errors import UsageError
from dsprep.reader.ranks import RankInfo, _tasks, detect

PREFIXES = ("OMPI_", "PMI", "MPI_", "MV2_", "SLURM_")
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
OMPI = {f"OMPI_COMM_WORLD_{k}": v for k, v in (("RANK", "3"), ("SIZE", "6"))}
OMPI_LOCAL = {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
MV2 = {k.replace("OMPI", "MV2"): v for k, v in {**OMPI, **OMPI_LOCAL}.items()}
PMI = {"PMI_RANK": "2", "PMI_SIZE": "4"}
HYDRA = {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
PALS = {"PMI_LOCAL_RANK": "0", "PMI_LOCAL_SIZE": "2"}
SLURM_JOB = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "7", "SLURM_NTASKS_PER_NODE": "4"}
SLURM_STEP = {
    **SLURM_JOB,
    "SLURM_PROCID": "6",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
}


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    import os

    for name in list(os.environ):
        if name in NAMES or name.startswith(PREFIXES):
            monkeypatch.delenv(name)
    for module in ("torch.distributed", "mpi4py.MPI"):
        monkeypatch.setitem(sys.modules, module, None)


@pytest.fixture
def env(monkeypatch):
    def put(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return put


def test_alone():
    assert detect() == RankInfo(0, 1, 0, 1, "no launcher found")


@pytest.mark.parametrize(
    ("values", "numbers", "source"),
    [
        (TORCHRUN, (5, 8, 1, 4), "torchrun"),
        (OMPI, (3, 6, None, None), "Open MPI"),
        ({**OMPI, **OMPI_LOCAL}, (3, 6, 1, 2), "Open MPI"),
        (MV2, (3, 6, 1, 2), "MVAPICH2"),
        (PMI, (2, 4, None, None), "PMI"),
        ({**PMI, **HYDRA}, (2, 4, 0, 2), "PMI"),
        ({**PMI, **PALS}, (2, 4, 0, 2), "PMI"),
        (SLURM_STEP, (6, 7, 2, 3), "SLURM"),
        ({**SLURM_STEP, **OMPI, **OMPI_LOCAL}, (3, 6, 1, 2), "Open MPI"),
        ({**SLURM_STEP, **TORCHRUN}, (5, 8, 1, 4), "torchrun"),
        ({**SLURM_STEP, "PMIX_RANK": "6"}, (6, 7, 2, 3), "SLURM"),
        ({"PMIX_RANK": "3", **OMPI}, (3, 6, None, None), "Open MPI"),
        ({"WORLD_SIZE": "2", **OMPI}, (3, 6, None, None), "Open MPI"),
    ],
)
def test_launchers(env, values, numbers, source):
    env(**values)
    found = detect()
    assert (found.rank, found.world_size, found.local_rank, found.local_size) == numbers
    assert found.source.startswith(source)
    assert f"rank {found.rank} of {found.world_size} ({source}" in str(found)


def test_a_batch_script_is_one_process(env):
    """sbatch sets SLURM_PROCID=0 and SLURM_NTASKS for the script itself, which runs once."""
    env(**SLURM_JOB, SLURM_PROCID="0", SLURM_LOCALID="0")
    found = detect()
    assert (found.rank, found.world_size) == (0, 1)
    assert "not started by srun" in found.source


def test_an_interactive_shell_is_one_process(env):
    env(**SLURM_JOB)
    assert detect().world_size == 1
    env(**{**SLURM_STEP, "SLURM_STEP_ID": str(0xFFFFFFFA), "SLURM_PROCID": "0"})
    assert detect().world_size == 1
    env(SLURM_STEP_ID="0")
    assert detect().world_size == 7


def test_tasks_of_a_node():
    assert [_tasks("4(x2),3,1(x3)", str(node)) for node in range(7)] == [4, 4, 3, 1, 1, 1, None]
    for text in ("", "x", "4(x", "4(x2", "-1", "4;3"):
        assert _tasks(text, "0") is None
    assert _tasks("4", "") is None
    assert _tasks("4", "9" * 40) is None


def test_given_numbers_win(env):
    env(**TORCHRUN)
    assert detect(np.int64(1), 2).source == "as given"
    assert (detect(0, 1).local_rank, detect(0, 1).local_size) == (0, 1)


@pytest.mark.parametrize(
    ("rank", "size", "said"),
    [
        (1, None, "rank is given without world_size"),
        (None, 1, "world_size is given without rank"),
        (2, 2, "rank is 2 and world_size is 2"),
        (-1, 2, "rank is -1"),
        (0, 0, "world_size is 0"),
        ("0", 1, "rank is '0'"),
        (0.0, 1, "rank is 0.0"),
        (True, 2, "rank is True"),
    ],
)
def test_impossible_arguments(rank, size, said):
    with pytest.raises(UsageError, match=said):
        detect(rank, size)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"RANK": "0"}, "RANK is set without WORLD_SIZE"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE is set without RANK"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK is 4 and WORLD_SIZE is 4"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "RANK is '-1'"),
        ({"RANK": "one", "WORLD_SIZE": "4"}, "RANK is 'one'"),
        ({"RANK": "1", "WORLD_SIZE": ""}, "WORLD_SIZE is ''"),
        ({"RANK": "1", "WORLD_SIZE": "9" * 5000}, "WORLD_SIZE is '999"),
        ({"PMIX_RANK": "3"}, "PMIx does not say of how many"),
        ({"PMI_SIZE": "3"}, "PMI_SIZE is set without PMI_RANK"),
        ({**TORCHRUN, "LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'"),
    ],
)
def test_nonsense_in_the_environment(env, values, said):
    env(**values)
    with pytest.raises(UsageError, match=said) as caught:
        detect()
    assert "give rank= and world_size=" in str(caught.value)


def test_numbers_of_a_node_that_do_not_fit_are_not_used(env):
    env(**{**TORCHRUN, "LOCAL_RANK": "4"})
    assert (detect().local_rank, detect().local_size) == (None, None)


def fake_torch(rank, size, initialised=True):
    return SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: initialised,
        get_rank=lambda: rank,
        get_world_size=lambda: size,
    )


def fake_mpi(rank, size, initialised=True, finalised=False):
    world = SimpleNamespace(Get_rank=lambda: rank, Get_size=lambda: size)
    return SimpleNamespace(
        COMM_WORLD=world, Is_initialized=lambda: initialised, Is_finalized=lambda: finalised
    )


def test_torch_comes_before_the_environment(monkeypatch, env):
    env(**TORCHRUN)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", fake_mpi(1, 3))
    monkeypatch.setitem(sys.modules, "torch.distributed", fake_torch(7, 8))
    assert detect() == RankInfo(7, 8, 1, 4, "torch.distributed")
    monkeypatch.setitem(sys.modules, "torch.distributed", fake_torch(7, 8, initialised=False))
    assert detect().source == "mpi4py, COMM_WORLD"


def test_mpi4py(monkeypatch, env):
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", fake_mpi(1, 3))
    assert detect() == RankInfo(1, 3, None, None, "mpi4py, COMM_WORLD")
    env(**TORCHRUN)
    assert detect().world_size == 3
    for idle in (fake_mpi(0, 1), fake_mpi(1, 3, initialised=False), fake_mpi(1, 3, finalised=True)):
        monkeypatch.setitem(sys.modules, "mpi4py.MPI", idle)
        assert detect().source.startswith("torchrun")
