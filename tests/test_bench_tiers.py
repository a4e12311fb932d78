"""``dsprep bench read`` with tiers: what comes is right, from the tier it is said to come from."""

from __future__ import annotations

import json
from dataclasses import replace

import h5py
import numpy as np
import pytest
from support import cli, random_batch, write_batch

import dsprep
from dsprep import formats
from dsprep.bench import child, running, sums
from dsprep.bench.strategies import MET, find
from dsprep.bench.strategies.base import Strategy
from dsprep.bench.summary import row
from dsprep.bench.task import Task
from dsprep.core.schema import Field, Schema
from dsprep.source.dataset import open_dataset

N, GROUP, BATCH = 61, 6, 5
SCHEMA = Schema((Field("x", np.dtype("<f4"), (50, 7)), Field("tokens", np.dtype("<i2"), (None,))))


@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    """A repacked dataset: its path and what it adds up to."""
    folder = tmp_path_factory.mktemp("tiers")
    source, path = folder / "a.h5", folder / "grouped.h5"
    write_batch(formats.load("hdf5"), source, SCHEMA, random_batch(SCHEMA, N, seed=2))
    dsprep.repack(source, path, buffer_size=GROUP, durable=False)
    with open_dataset(path) as opened:
        return path, sums.of_source(opened, N)


@pytest.fixture
def task(grouped, tmp_path):
    """Return a task on it; each of a fast tier of its own."""

    def made(name, **more):
        warmup = int(find(name).settles)
        known = {"schema": SCHEMA, "samples": N, "batch_size": BATCH, "drop": (grouped[0],)}
        known |= {"mini_epochs": 3, "compute": "1us", "threads": 2, "warmup": warmup}
        known |= {"tier": tmp_path, "key": name}
        return Task(strategy=name, path=grouped[0], **{**known, **more})

    return made


def measured(task, expected):
    strategy = Strategy(task, find(task.strategy).load())
    return row(task, [[child.run(task, strategy, lambda: None)]], expected)


def stored(path):
    """Bytes of all groups."""
    with dsprep.Sidecar.open(path) as sidecar:
        return int(sidecar.layout(0).groups.blocks.lengths.span(0, -(-N // GROUP)).sum())


def test_the_first_epoch_copies_all_and_later_ones_nothing(grouped, task):
    path, expected = grouped
    first = measured(task("cache-first", epochs=2), expected)
    later = measured(task("cache-next", epochs=2), expected)
    assert (first.problems, later.problems) == ((), ())
    assert first.median("hit_percent") == later.median("hit_percent") == 100
    copied = first.measures["copied_bytes"]
    assert copied.least == copied.most >= stored(path)  # each of the epochs began without a copy
    assert later.median("copied_bytes") == later.median("drawn_gb_per_second") == 0


@pytest.mark.parametrize("repeats", [1, 3])
def test_each_sample_of_a_part_comes_as_often_as_it_is_passed(grouped, task, repeats):
    path, expected = grouped
    asked = task(MET, repeats=repeats, epochs=2)
    found = measured(asked, expected)
    assert found.problems == ()
    rate = repeats * expected.nbytes / found.median("epoch_seconds") / 1e9
    assert found.median("gb_per_second") == pytest.approx(rate, rel=0.5)
    copied = found.measures["copied_bytes"]
    assert copied.least + copied.most >= stored(path)  # two epochs, each part copied ahead
    strategy = Strategy(replace(asked, key="b"), find(MET).load())
    once = [[child.run(strategy.task, strategy, lambda: None)]]
    other = row(replace(asked, repeats=repeats + 1), once, expected)
    assert any("wrong samples" in p for p in other.problems)


def test_ranks_share_a_copy_that_is_removed_in_the_end(grouped, task):
    path, expected = grouped
    asked = task("cache-first", epochs=3, ranks=2)
    results = running.run(asked)
    assert isinstance(results, list), results
    found = row(asked, [results], expected)
    assert found.problems == ()
    assert found.median("hit_percent") == 100
    assert found.median("copied_bytes") >= stored(path)
    assert list(asked.tier.iterdir()) == []


def test_only_what_comes_from_the_capacity_tier_is_late(grouped, task, monkeypatch):
    late = []
    delay = lambda task: lambda nbytes, calls: late.append(nbytes)  # noqa: E731
    monkeypatch.setattr("dsprep.bench.delays.delay_of", delay)
    how = {"storage": "latency=1us,stream=100GB/s", "warmup": 0}
    found = measured(task("dsprep", **how), grouped[1])
    assert sum(late) == pytest.approx(found.median("asked_bytes"), rel=0.1)
    late.clear()
    copied = measured(task("cache-first", **how), grouped[1])
    assert (copied.median("hit_percent"), late) == (100, [])


# --- the command -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "data.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.random.default_rng(0).random((400, 300), np.float32)
    return path


def test_a_sweep_of_repeats_by_command(data, tmp_path):
    out, tier = tmp_path / "r.json", tmp_path / "tier"
    tier.mkdir()
    command = ["bench", "read", data, "-s", "met", "--sweep", "repeats=1,2", "--compute", "1ms"]
    command += ["--sweep", "mini-epochs=3", "--storage", "latency=1ms,stream=20MB/s", "-r", 1]
    cli(*command, "--limit", "all", "--tier", tier, "--json", out)
    rows = json.loads(out.read_text())["strategies"]  # no others, to which repeats are nothing
    for one, times in zip(rows, (1, 2), strict=True):
        assert (one["name"], one["value"], one["problems"]) == ("met", str(times), [])
        values = {name: m["value"] for name, m in one["measures"].items()}
        assert values["hit_percent"] == 100
        seconds = values["epoch_seconds"]
        assert values["gb_per_second"] * seconds == pytest.approx(times * 400 * 1200 / 1e9)
    assert list(tier.iterdir()) == []
