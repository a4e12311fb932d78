"""Lightning's Trainer continues where it was stopped, to the sample: it counts steps by `len`."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import dsprep

if not all(map(find_spec, ("torch", "lightning"))):
    pytest.skip("needs torch and lightning", allow_module_level=True)

COUNT, BATCH, STEPS, STOP = 432, 16, 60, 36
JOB = Path(__file__).with_name("lightning_job.py")


@pytest.mark.parametrize(
    ("what", "ranks", "how"),
    [
        ("batches", 2, "killed"),
        ("batches", 1, "max_steps"),
        ("module", 1, "killed"),
        ("module", 2, "max_steps"),
    ],
)
def test_a_training_continues_in_mid_epoch(what, ranks, how, tmp_path):
    """From a checkpoint in the epoch, and from one that is saved after the training has stopped."""
    path = tmp_path / "x.h5"
    samples = ({"x": np.full(4, i, "f4"), "label": np.int64(i)} for i in range(COUNT))
    dsprep.write(path, samples, buffer_size="32", durable=False)
    command = [sys.executable, JOB, path, tmp_path, what, how, BATCH, ranks, STEPS, STOP]
    run = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    validated = 0
    for rank in range(ranks):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        with dsprep.Reader(path, BATCH, seed=1, rank=rank, world_size=ranks) as reader:
            expected = [b["label"].tolist() for _ in range(5) for b in reader][:STEPS]
        assert found["before"][:STOP] == expected[:STOP]
        assert found["after"] == expected[STOP:]
        if what == "module":
            assert not [w for w in found["warnings"] if "Dataset" in w or "loader" in w]
            validated += found["validated"][0]
    assert what == "batches" or validated == COUNT  # whole, though a check of two steps came before
