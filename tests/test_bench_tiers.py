"""``dsprep bench read`` with tiers: what comes is right, from the tier it is said to come from."""

from __future__ import annotations

import json
from dataclasses import replace

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import cli, random_batch, write_batch

import dsprep
from dsprep import formats
from dsprep.bench import child, running, sums, tiering
from dsprep.bench.strategies import MET, THROTTLED, TIERED, find
from dsprep.bench.strategies.base import Strategy
from dsprep.bench.summary import StrategyFacts, row
from dsprep.bench.task import Task
from dsprep.cache.copier import Throttle
from dsprep.core.schema import Field, Schema
from dsprep.source.dataset import open_dataset

N, GROUP, BATCH = 61, 6, 5
SCHEMA = Schema((Field("x", np.dtype("<f4"), (50, 7)), Field("tokens", np.dtype("<i2"), (None,))))


@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    """A repacked dataset: its path and what is known of it."""
    folder = tmp_path_factory.mktemp("tiers")
    source, path = folder / "a.h5", folder / "grouped.h5"
    write_batch(formats.load("hdf5"), source, SCHEMA, random_batch(SCHEMA, N, seed=2))
    dsprep.repack(source, path, buffer_size=GROUP, durable=False)
    with open_dataset(path) as opened:
        expected = sums.of_source(opened, N)
    return path, StrategyFacts(
        expected=expected, payload=expected.nbytes, cold=False, computes=True
    )


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


def measured(task, facts):
    strategy = Strategy(task, find(task.strategy).load())
    return row(task.strategy, [[child.run(task, strategy, lambda: None)]], facts)


def stored(path):
    """Bytes of all groups."""
    with dsprep.Sidecar.open(path) as sidecar:
        return int(sidecar.layout(0).groups.blocks.lengths.span(0, -(-N // GROUP)).sum())


def test_the_first_epoch_copies_all_and_later_ones_nothing(grouped, task):
    path, facts = grouped
    first = measured(task("cache-first", epochs=2), facts)
    later = measured(task("cache-next", epochs=2), facts)
    assert (first.problems, later.problems) == ((), ())
    assert first.median("hit_percent") == later.median("hit_percent") == 100
    copied = first.measures["copied_bytes"]
    assert copied.least == copied.most >= stored(path)  # each of the epochs began without a copy
    assert later.median("copied_bytes") == later.median("drawn_gb_per_second") == 0


@pytest.mark.parametrize("repeats", [1, 3])
def test_each_sample_of_a_part_comes_as_often_as_it_is_passed(grouped, task, repeats):
    path, facts = grouped
    asked = task(MET, repeats=repeats, epochs=2)
    found = measured(asked, replace(facts, times=repeats, capacity=1e6))
    assert found.problems == ()
    rate = repeats * facts.payload / found.median("epoch_seconds") / 1e9
    assert found.median("gb_per_second") == pytest.approx(rate, rel=0.5)
    assert found.median("model_drawn_gb_per_second") <= 1e-3
    copied = found.measures["copied_bytes"]
    assert copied.least + copied.most >= stored(path)  # two epochs, each part copied ahead
    once = measured(replace(asked, key="b"), replace(facts, times=repeats + 1))
    assert any("wrong samples" in p for p in once.problems)


@pytest.mark.parametrize("cold", [False, True])
def test_ranks_that_begin_anew_remove_what_they_shared_once_all_have_closed_it(
    grouped, task, cold, monkeypatch
):
    path, facts = grouped
    asked = task("cache-first", epochs=3, check=False, cold=cold)
    results = running.run(asked, ranks=2)
    assert isinstance(results, list), results
    found = row("cache-first", [results], replace(facts, checked=False))
    assert [p for p in found.problems if "cold" not in p] == []
    assert cold or found.median("hit_percent") == 100
    assert cold or found.median("copied_bytes") >= stored(path)
    assert list(asked.tier.iterdir()) == []


# --- the throttle ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", THROTTLED)
def test_all_that_comes_from_the_capacity_tier_is_throttled(grouped, task, name, monkeypatch):
    _, facts = grouped
    taken = []
    monkeypatch.setattr(Throttle, "take", lambda self, nbytes, *stop: taken.append(nbytes))
    asked = task(name, tier_bandwidth="1GB/s", check=False, warmup=0, epochs=1)
    found = measured(asked, replace(facts, checked=False))
    assert found.problems == ()
    drawn = found.median("drawn_gb_per_second") * 1e9 * found.median("epoch_seconds")
    assert min(taken) > 0  # what comes from the cache waits for nobody
    assert sum(taken) >= drawn * 0.999 > 0
    if name not in TIERED:
        assert sum(taken) == pytest.approx(drawn)
        assert found.median("hit_percent") == 0


# --- the model, and what is written about it -------------------------------------------------


@given(st.floats(1e6, 1e12), st.floats(1e6, 1e12), st.integers(1, 500))
def test_the_model_stalls_below_the_knee_only(consumed, capacity, repeats):
    found = tiering.model(consumed, capacity, repeats)
    throughput, drawn = (found[k] for k in ("model_gb_per_second", "model_drawn_gb_per_second"))
    assert throughput == pytest.approx(min(consumed, repeats * capacity) / 1e9)
    assert drawn == pytest.approx(min(consumed / repeats, capacity) / 1e9)


# --- the command -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "data.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.random.default_rng(0).random((400, 300), np.float32)
    return path


def test_a_sweep_of_repeats_by_command(data, tmp_path):
    out, page, tier = tmp_path / "r.json", tmp_path / "r.html", tmp_path / "tier"
    tier.mkdir()
    command = ["bench", "read", str(data), "-s", "met", "--sweep", "repeats=1,2", "--warm"]
    more = ["--mini-epochs", "3", "--compute", "1ms", "--tier-bandwidth", "20MB/s", "-r", "1"]
    files = ["--tier", str(tier), "--json", str(out), "--html", str(page)]
    done = cli(*command, *more, *files)
    label = tiering.label("20MB/s")
    assert all(label in text for text in (done.out, page.read_text(), out.read_text()))
    rows = json.loads(out.read_text())["strategies"]  # no others, to which repeats are nothing
    for one, times in zip(rows, (1, 2), strict=True):
        assert (one["name"], one["value"]) == ("met", str(times))
        values = {name: m["value"] for name, m in one["measures"].items()}
        assert one["problems"] == []
        assert values["hit_percent"] == 100
        seconds = values["epoch_seconds"]
        assert values["gb_per_second"] * seconds == pytest.approx(times * 400 * 1200 / 1e9)
        assert values["model_gb_per_second"] <= times * 0.02 * 1.001
    assert list(tier.iterdir()) == []
