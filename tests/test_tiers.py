"""The model of two tiers gives what the paper printed, as far as that can be computed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsprep.errors import UsageError
from dsprep.reader.mini_epochs import MiniEpochs
from dsprep.verbs.tiers import Tiers, drawn, fitted

GB, TB = 1e9, 1e12


def tiers(**others):
    given = {
        "capacity": int(1.6 * TB),
        "nodes": 64,
        "ranks_per_node": 8,
        "batch_size": 2,
        "compute": 0.012,
        "pfs": 400 * GB,
        "passes": 90,
    }
    return Tiers(**{**given, **others})


def edges_of(groups, samples=16):
    return np.arange(groups + 1, dtype=np.int64) * samples


def test_what_is_drawn():
    """S002 gives 30.4 GB/s for 128 repeats of what consumes 3.8 TB/s; a TB of 1024 GB."""
    assert drawn(3.8 * 1024, 400, [128]) == pytest.approx(30.4)
    assert drawn(3.8 * 1024, 400, [1]) == 400


def test_the_knee():
    """S002: from 10 repeats on, 65,000 samples per second; the model gives 9.73."""
    assert pytest.approx(9.73, abs=0.005) == 3.8 * 1024 / 400
    one = {"nodes": 1, "ranks_per_node": 1, "batch_size": 1, "compute": 1.0, "pfs": 400.0}
    plan = fitted(edges_of(1000, 1), 3.8 * 1024, tiers(capacity=10**6, **one))
    assert plan.repeats == 10
    assert plan.rate(9) < plan.consumed
    assert plan.rate(10) == plan.consumed
    assert plan.stalled == (pytest.approx(1 - 400 / 3891.2), 0)


@pytest.mark.parametrize(("mean", "printed"), [(55, 90.7), (35, 147)])
def test_repeats_that_vary_draw_more(mean, printed):
    """Of the distributions only the means are printed: a bound from below, and one from above."""
    least = drawn(3.8 * 1024, 400, [mean])
    rng = np.random.default_rng(1)
    found = []
    for sigma in (0.3, 0.5, 0.8, 1.0):
        factors = rng.lognormal(0, sigma, 4000)
        repeats = np.maximum(1, np.round(factors * mean / factors.mean())).astype(int).tolist()
        found.append(drawn(3.8 * 1024, 400, repeats))
    assert least < printed < max(found) < 400
    assert found == sorted(found)


@given(
    st.integers(2, 400),
    st.integers(1, 30),
    st.integers(1, 5),
    st.integers(1000, 10**7),
)
def test_two_mini_epochs_fit(groups, samples, nodes, capacity):
    edges = edges_of(groups, samples)
    try:
        plan = fitted(edges, 100.0, tiers(nodes=nodes, capacity=capacity))
    except UsageError:
        assert capacity < 100 * samples * (groups + 8 * nodes)  # groups are not cut
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


def test_warnings():
    def words(**others):
        return " ".join(fitted(edges_of(400_000), 6e7, tiers(**others)).warnings)

    assert "never seen" in words(passes=3, pfs=40 * GB)
    assert "64" in words(pfs=10 * GB)
    assert "mini-epochs: with more" in words(capacity=10**10)
    assert "waits for the fast tier" in words(fast=1 * GB)
    assert words(passes=2 * fitted(edges_of(400_000), 6e7, tiers()).repeats) == ""


@pytest.mark.parametrize("wrong", [{"capacity": 0}, {"compute": 0.0}, {"pfs": -1.0}, {"passes": 0}])
def test_numbers_that_are_not_possible(wrong, tmp_path):
    from dsprep.verbs.tiers import plan_tiers

    with pytest.raises(UsageError, match=next(iter(wrong))):
        plan_tiers(tmp_path, tiers(**wrong))


def test_a_tier_that_is_too_small():
    with pytest.raises(UsageError, match="too small"):
        fitted(edges_of(10), 1e9, tiers(capacity=10**9))
