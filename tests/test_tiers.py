"""The model of two tiers gives what the paper printed, as far as that can be computed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dsprep
from dsprep.errors import UsageError
from dsprep.planning.storage_figures import StorageFigures
from dsprep.planning.waiting import Job
from dsprep.reader.mini_epochs import MiniEpochs
from dsprep.verbs.plan_read import plan_read
from dsprep.verbs.tiers import drawn, fitted

GB, TB = 1e9, 1e12


def plan_of(edges, nbytes, nodes=64, ranks_per_node=8, batch_size=2, compute=0.012, **others):
    job = Job(nodes, ranks_per_node, batch_size, compute)
    tiers = {"capacity": int(1.6 * TB), "pfs": 400 * GB, "epochs": 90, **others}
    return fitted(edges, nbytes, job, **tiers)


def edges_of(groups, samples=16):
    return np.arange(groups + 1, dtype=np.int64) * samples


def test_what_is_drawn():
    """The paper gives 30.4 GB/s for 128 repeats of what consumes 3.8 TB/s; a TB of 1024 GB."""
    assert drawn(3.8 * 1024, 400, [128]) == pytest.approx(30.4)
    assert drawn(3.8 * 1024, 400, [1]) == 400


def test_the_knee():
    """The paper: from 10 repeats on, 65,000 samples per second; the model gives 9.73."""
    assert pytest.approx(9.73, abs=0.005) == 3.8 * 1024 / 400
    one = {"nodes": 1, "ranks_per_node": 1, "batch_size": 1, "compute": 1.0, "pfs": 400.0}
    plan = plan_of(edges_of(1000, 1), 3.8 * 1024, capacity=10**6, **one)
    assert plan.repeats == 10
    assert plan.at(9).throughput < plan.consumed
    assert plan.at(10).throughput == plan.consumed
    assert plan.before.stalled == pytest.approx(1 - 400 / 3891.2)
    assert plan.after.stalled == 0


@given(
    st.integers(2, 400),
    st.integers(1, 30),
    st.integers(1, 5),
    st.integers(1000, 10**7),
)
def test_two_mini_epochs_fit(groups, samples, nodes, capacity):
    edges = edges_of(groups, samples)
    try:
        plan = plan_of(edges, 100.0, nodes=nodes, capacity=capacity)
    except UsageError:
        assert capacity < (100 * samples + 8192) * (groups + 8 * nodes)  # groups are not cut
        return
    assert plan.largest <= capacity
    if plan.fits:
        assert plan.mini_epochs == 1
        return
    assert plan.largest < capacity / 2
    mini = MiniEpochs(plan.mini_epochs, (1,), pools=nodes)
    for part in range(plan.mini_epochs):
        found = mini.groups(edges, 3, mini.at(part), shuffled=True)
        share = -(-len(found) // nodes) + 1
        assert share * samples * 100 <= plan.largest + 2 * samples * 100


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 40))
def test_how_often_samples_are_seen(epochs, parts, repeats):
    """Counted pass by pass, as the Reader goes through the parts of each epoch."""
    plan = plan_of(edges_of(400), 1.0, epochs=epochs)
    plan = replace(plan, mini_epochs=parts, fits=False)
    plan = replace(plan, pfs=plan.consumed * plan.copied / (repeats - 0.5))
    assert plan.repeats == repeats
    mini = MiniEpochs(parts, (repeats,))
    seen = [0] * parts
    for number in range(plan.passes):
        seen[mini.at(number).part] += 1
    assert plan.passes_per_sample == (min(seen), max(seen))
    assert plan.never_seen == pytest.approx(seen.count(0) / parts)
    assert plan.reader["epochs"] * repeats * parts >= plan.passes


@pytest.mark.filterwarnings("ignore::dsprep.reader.cached.CacheWarning")  # copies fall behind
def test_arguments_of_the_reader(tmp_path):
    """With them it goes through the passes of the plan, on the node's own cache."""
    path = tmp_path / "x.h5"
    dsprep.write(path, ({"x": np.full(50, i, "f4")} for i in range(64)), buffer_size="4")
    job = Job(nodes=1, ranks_per_node=2, batch_size=1, compute=0.012)
    rate = 2 * 200 / 0.012 / 2.5
    figures = StorageFigures(
        call_seconds=0, stream_bytes_per_second=rate, total_bytes_per_second=rate
    )

    def planned(job=job, **tier):
        return plan_read(path, job, figures, tier={"epochs": 3, **tier}).tier

    plan = planned(capacity=80_000)
    assert (plan.groups, plan.mini_epochs, plan.repeats, plan.fits) == (16, 5, 3, False)
    where = {"rank": 0, "world_size": 1, "cache": dsprep.Cache(tmp_path / "cache", 80_000)}
    with dsprep.Reader(path, 4, **plan.reader, **where) as reader:
        seen = np.zeros(64, int)
        for _ in range(plan.passes):
            for batch in reader:
                seen[batch["x"][:, 0].astype(int)] += 1
    assert plan.passes_per_sample == (seen.min(), seen.max()) == (3, 3)
    whole = planned(capacity=10**6).reader
    assert whole == {"epochs": 3}
    shared = planned(replace(job, nodes=3), capacity=90_000).reader
    assert shared["mini_epochs"] == MiniEpochs(shared["mini_epochs"].parts, (1,), False, 3)
