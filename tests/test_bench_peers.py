"""Other projects' loaders deliver every sample once, and leave nothing behind."""

from __future__ import annotations

import gc
import os
import tempfile
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

from dsprep.bench import counters, sums
from dsprep.bench.strategies import STRATEGIES, find
from dsprep.bench.task import Task
from dsprep.core.schema import Field, Schema
from dsprep.errors import UnsupportedError
from dsprep.source.dataset import open_dataset

# What these packages and torch warn about is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

N = 53
PEERS = [name for name, entry in STRATEGIES.items() if entry.optional]


def need(name):
    for package in find(name).packages:
        pytest.importorskip(package)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "data.h5"
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file["a/x"] = rng.random((N, 20, 3), np.float32)
        file["big"] = rng.integers(-9, 9, (N, 4)).astype(">i2")
        file["flags"] = rng.integers(0, 2, (N, 5)).astype(bool)
        file["pixels"] = rng.integers(0, 60000, (N, 2, 2)).astype(np.uint16)
        file["y"] = rng.integers(0, 9, N)
    with open_dataset(path) as source:
        yield source


@pytest.fixture(autouse=True)
def collected():
    """Ends what numba keeps for FFCV within the test: its finalisers complain."""
    yield
    gc.collect()


def left():
    """What a loader could leave behind: processes, shared memory, temporary files of its own."""
    shared = set(Path("/dev/shm").iterdir())
    return counters.descendants(os.getpid()), shared, set(Path(tempfile.gettempdir()).glob("0*_*"))


def settled(before):
    """Whether nothing is left; ended processes may take a moment."""
    for _ in range(100):
        processes, *files = left()
        # Python's own, which runs until this process ends.
        others = {p for p in processes if b"resource_tracker" not in command(p)}
        if others <= set(before[0]) and tuple(files) == before[1:]:
            return True
        time.sleep(0.05)
    return False


def command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def made(name, source, folder, **more):
    target = folder / "own"
    find(name).load().write(source, target)
    task = Task(
        strategy=name, path=target, schema=source.schema, samples=N, batch_size=8, seed=1, **more
    )
    return find(name).load()(task)


def epoch(strategy, number):
    """Samples, their sums, and the labels in the order they came."""
    task, samples, total, order = strategy.task, 0, 0, []
    steps = 0
    for item in strategy.epoch(number):
        batch = strategy.batch(item)
        samples += strategy.size(item)
        total += sums.full(batch, task.schema)
        order += np.array(batch["a/x"])[:, 0, 0].tolist()
        steps += 1
        assert strategy.size(item) <= task.batch_size
    assert steps <= task.steps
    return samples, total % 2**64, order


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", PEERS)
def test_every_sample_comes_once_and_nothing_is_left(name, threads, source, tmp_path):
    need(name)
    before = left()
    expected = sums.of_source(source, N)
    strategy = made(name, source, tmp_path, threads=threads)
    orders = []
    for _ in range(2):
        strategy.open()
        for number in range(2):
            samples, total, order = epoch(strategy, number)
            assert (samples, total) == (expected.samples, expected.full)
            orders.append(order)
        strategy.close()
        strategy.close()
        assert settled(before), left()
    assert orders[0] != orders[1]
    assert orders[0] != sorted(orders[0])


@pytest.mark.parametrize("name", PEERS)
def test_one_may_stop_early(name, source, tmp_path):
    need(name)
    before = left()
    strategy = made(name, source, tmp_path, threads=2)
    strategy.open()
    items = strategy.epoch(0)
    next(items)
    del items
    strategy.close()
    assert settled(before), left()


@pytest.mark.parametrize("name", PEERS)
def test_ranks_share_or_refuse(name, source, tmp_path):
    need(name)
    expected = sums.of_source(source, N)
    samples = total = 0
    for rank in range(2):
        folder = tmp_path / str(rank)
        folder.mkdir()
        strategy = made(name, source, folder, rank=rank, world_size=2)
        if name != "ffcv":
            with pytest.raises(UnsupportedError, match="--ranks 1"):
                strategy.open()
            continue
        strategy.open()
        found = epoch(strategy, 0)
        strategy.close()
        samples, total = samples + found[0], total + found[1]
    if name == "ffcv":
        assert (samples, total % 2**64) == (expected.samples, expected.full)


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize(
    "field", [Field.opaque("v"), Field("v", np.dtype("f4"), (None, 2)), Field("v", "f4", (0,))]
)
def test_other_fields_are_refused(name, field, tmp_path):
    class Odd:
        schema = Schema((field,))

    with pytest.raises(UnsupportedError, match="field v"):
        find(name).load().write(Odd(), tmp_path / "own")
    assert not (tmp_path / "own").exists()
