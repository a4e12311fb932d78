"""The Reader in MPI jobs: every sample once over all ranks, whoever waits for whom."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from support import MPIEXEC

import dsprep

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or MPIEXEC is None,
    reason="mpi4py or mpiexec is missing",
)

SCRIPT = Path(__file__).with_name("mpi_reader.py")
REPEATS = Path(__file__).with_name("repeats_job.py")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mpi")
    with h5py.File(folder / "source.h5", "w") as file:
        ids = np.arange(203)
        file["id"] = ids
        file["x"] = np.repeat(ids[:, None], 50, axis=1).astype("f4")
    dsprep.repack(folder / "source.h5", folder / "data.h5", buffer_size=8, durable=False)
    return folder / "data.h5"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_every_sample_comes_once_over_all_ranks(data, ranks):
    runs_right(SCRIPT, data, ranks)


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_follow_rank_0_in_repeats_that_adapt(data, ranks):
    runs_right(REPEATS, data, ranks, "id")


def runs_right(script, data, ranks, *more):
    done = subprocess.run(
        [MPIEXEC, "-n", str(ranks), sys.executable, str(script), str(data), *more],
        capture_output=True,
        text=True,
        timeout=240,  # a deadlock shows here
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"right with {ranks} ranks"
