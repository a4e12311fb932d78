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

COUNT, BATCH, EPOCHS, STOP = 432, 16, 3, 36
JOB = Path(__file__).with_name("lightning_job.py")


@pytest.mark.parametrize(("ranks", "how"), [(1, "killed"), (1, "max_steps"), (2, "killed")])
def test_a_training_continues_in_mid_epoch(ranks, how, tmp_path):
    """After a checkpoint of the 36th step: in epoch 1 of 27 steps, or in epoch 2 of 14."""
    path = tmp_path / "x.h5"
    samples = ({"x": np.full(4, i, "f4"), "label": np.int64(i)} for i in range(COUNT))
    dsprep.write(path, samples, buffer_size="32", durable=False)
    command = [sys.executable, JOB, path, tmp_path, BATCH, ranks, EPOCHS, how, STOP]
    run = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    per_epoch = -(-COUNT // BATCH // ranks)
    epoch, done = divmod(STOP, per_epoch)
    for number in range(EPOCHS):
        seen = []
        for each in found:
            assert each["steps"] == EPOCHS * per_epoch
            before = each["before"].get(str(number), [])
            if number >= epoch:  # what came after the checkpoint is lost
                before = before[: done * BATCH if number == epoch else 0]
            seen += before + each["after"].get(str(number), [])
        assert sorted(seen) == list(range(COUNT))


@pytest.mark.parametrize(("ranks", "how"), [(1, "killed"), (2, "max_steps")])
def test_a_data_module_continues_every_training(ranks, how, tmp_path):
    """From a checkpoint in the epoch, and from one that is saved after the training has stopped."""
    path, steps, stop = tmp_path / "x.h5", 60, 36
    samples = ({"x": np.full(4, i, "f4"), "label": np.int64(i)} for i in range(COUNT))
    dsprep.write(path, samples, buffer_size="32", durable=False)
    job = JOB.with_name("data_module_job.py")
    command = [sys.executable, job, path, tmp_path, how, BATCH, ranks, steps, stop]
    run = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    validated = 0
    for rank in range(ranks):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        with dsprep.Reader(path, BATCH, seed=1, rank=rank, world_size=ranks) as reader:
            expected = [b["label"].tolist() for _ in range(5) for b in reader][:steps]
        assert found["before"][:stop] == expected[:stop]
        assert found["after"] == expected[stop:]
        assert not [w for w in found["warnings"] if "Dataset" in w or "loader" in w]
        validated += found["validated"][0]
    assert validated == COUNT  # whole, though a check of two steps came before
