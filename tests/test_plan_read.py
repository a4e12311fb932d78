"""The planner: laws of the model, queues against a plain queue, the papers, the command."""

from __future__ import annotations

import json
import math
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import cli, fails

import dsprep
from dsprep.errors import FormatError, UsageError
from dsprep.planning.published import parse_storage
from dsprep.planning.shares import Shares
from dsprep.planning.storage_figures import ReadSeconds, StorageFigures
from dsprep.planning.waiting import HAND_OVER, Job, Load, enough, excess, ways
from dsprep.reader.order import Assignment, Start
from dsprep.verbs.plan_read import plan_read

EXAMPLE = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "papers.py"))

SECONDS, RATES = st.floats(1e-5, 1.0), st.floats(1e6, 1e12)


def storage(call=1e-3, stream=5e8, total=None, wide=1.0, **others):
    """Figures whose p99 is `wide` times their p50."""
    spread = {"read_seconds": ReadSeconds(1.0, wide, wide), "spread_nbytes": 1 << 20}
    return StorageFigures(
        call_seconds=call,
        stream_bytes_per_second=stream,
        total_bytes_per_second=total,
        **{**spread, **others},
    )


FIGURES = st.builds(storage, SECONDS, RATES, st.none() | RATES, st.floats(1.0, 20.0))
JOBS = st.builds(
    Job,
    nodes=st.integers(1, 2000),
    ranks_per_node=st.integers(1, 16),
    batch_size=st.integers(1, 500),
    compute=SECONDS,
    threads=st.integers(1, 8),
)


def load_of(job, samples=100_000, units=16, nbytes=20_000.0):
    """What an epoch reads where every rank has as many samples."""
    steps = -(-samples // job.batch_size)
    return Load(samples, units, steps, nbytes, nbytes * samples * job.ranks, 3)


# --- the closed form -----------------------------------------------------------------------------


@given(SECONDS, st.floats(0.01, 1.5), st.integers(1, 10**6))
def test_the_slowest_read(mean, sigma, ranks):
    """Of one: the mean. More ranks wait longer, and no longer than the sum of all."""
    assert excess(mean, sigma, 1) == pytest.approx(mean, rel=1e-4)
    slowest = excess(mean, sigma, ranks)
    assert mean * (1 - 1e-4) <= slowest <= excess(mean, sigma, 2 * ranks) * (1 + 1e-9)
    assert slowest <= mean * ranks * (1 + 1e-4)
    assert excess(mean, 0.0, ranks) == mean
    hidden = excess(mean, sigma, ranks, mean)
    assert slowest - mean * (1 + 1e-4) <= hidden <= slowest


@settings(max_examples=6)
@given(JOBS, FIGURES, st.floats(1.0, 10.0))
def test_the_laws_of_waiting(job, figures, factor):
    load = load_of(job)
    found = ways(job, load, figures)
    slack = 1 + 1e-6
    for way in found.values():
        assert 0 <= way.later_seconds <= way.exposed_seconds * slack
        assert way.exposed_seconds <= (way.io_seconds + load.steps * HAND_OVER) * slack
        assert way.skew_seconds >= -1e-9 * way.io_seconds
        assert 0 < way.utilisation <= 1
    assert found["group-db"].exposed_seconds <= found["group"].exposed_seconds * slack
    assert found["group"].io_seconds <= found["sample"].io_seconds * slack
    if job.threads == 1:
        assert found["dsprep"] == replace(found["group-db"], name="dsprep")
    faster = replace(figures, stream_bytes_per_second=factor * figures.stream_bytes_per_second)
    more = replace(job, nodes=2 * job.nodes)
    for name in ("sample", "group", "group-db"):
        assert ways(job, load, faster)[name].exposed_seconds <= found[name].exposed_seconds * slack
        other = ways(more, load, figures)[name]
        assert other.io_seconds >= found[name].io_seconds / slack
        assert other.slowest_seconds >= found[name].slowest_seconds / slack


def test_the_double_buffer_is_the_recursion():
    """Unit after unit, as two buffers allow it, without spread."""
    job = Job(nodes=1, ranks_per_node=1, batch_size=10, compute=0.01)
    for stream in (1e6, 1e7, 3e7, 1e9):
        load, figures = load_of(job, 1000, 8, 1e4), storage(0.002, stream)
        read, beside = 0.002 + 1000 / 8 * 1e4 / stream, 0.01 * 100 / 8
        now = waited = 0.0
        ready = read
        for _ in range(8):
            begin = max(now, ready)
            waited, ready = waited + begin - now, max(ready, now) + read
            ready, now = begin + read, begin + beside
        found = ways(job, load, figures)["group-db"].exposed_seconds
        assert found == pytest.approx(waited + 100 * HAND_OVER)


@given(JOBS, FIGURES)
def test_a_group_that_is_enough_is_hidden(job, figures):
    samples = enough(job, load_of(job), figures)
    w = figures.bytes_per_second(job.ranks)
    if samples is None:
        assert job.compute / job.batch_size <= 20_000 / w
    else:
        read = figures.call_seconds + samples * 20_000 / w
        assert read <= samples / job.batch_size * job.compute * (1 + 1e-6)


def test_measured_streams_are_interpolated():
    figures = storage(0.0, 1e8, 1e9, streams_measured=((1, 1e8), (4, 2e8), (2, 1.9e8)))
    assert [figures.bytes_per_second(p) * p for p in (1, 2, 4)] == pytest.approx([1e8, 1.9e8, 2e8])
    assert 1 / figures.bytes_per_second(14) == pytest.approx(4 / 2e8 + 10 / 1e9)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=60),
    st.integers(1, 30),
    st.integers(1, 3),
)
def test_shares_are_the_units_of_the_reader(sizes, ranks, mixed):
    edges = np.append(0, np.cumsum(sizes))
    order = Assignment(edges, "group", 3, mixed, "ragged", ranks, 4)
    shares = Shares.of(order.sequence(0), ranks)
    for rank in range(ranks):
        segment = order.segment(rank, Start(0, (), 0, 1))
        units = [*segment.epoch.units(segment.share)]
        assert shares.samples[rank] == segment.share.count == sum(map(len, units))
        assert -(-(shares.stop[rank] - shares.first[rank]) // mixed) == len(units)


# --- the papers ----------------------------------------------------------------------------------


def test_the_papers():
    cells = EXAMPLE["papers"]()
    lee = [c for c in cells if c.source.startswith("Lee") and not c.calibrated]
    free = [c for c in lee if not c.is_nothing]
    assert (len(free), sum(c.within(1.25) for c in free)) == (19, 15)
    assert all(c.within(2) for c in lee)
    assert all(c.within(1.06 if "with A" in c.row else 1.02) for c in cells if c.calibrated)
    by = {(c.source, c.row, c.column): c for c in cells}
    assert by["Lee et al., Cori CosmoFlow", "64 GPUs, s", "TF"].ours == pytest.approx(23.0, abs=0.1)
    for source in {c.source for c in lee}:  # the orders of the ways are theirs
        for row in {c.row for c in lee if c.source == source}:
            four = [c for c in lee if (c.source, c.row) == (source, row)]
            assert sorted(range(4), key=lambda i: four[i].paper) == sorted(
                range(4), key=lambda i: four[i].ours
            )
    assert by["Xu et al.", "nm = rf = 128, GB/s", "drawn"].ours == pytest.approx(30.4)
    assert by["Mathuriya et al.", "b*S/t, MB/s/node", "BW_min"].within(1.001)
    ladder = [c for c in cells if c.source.startswith("Pumma") and c.ours is not None]
    assert all(c.within(2) for c in ladder)


# --- figures of storage --------------------------------------------------------------------------


@given(FIGURES)
def test_figures_are_kept_as_json(figures):
    figures = replace(figures, streams_measured=((1, 2.0),), transfers_measured=((4096, 1.0, 2.0),))
    figures = replace(figures, rounds_ratio=1.5)
    assert StorageFigures.from_json(json.loads(json.dumps(figures.to_json()))) == figures


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"call_seconds": None}, "call_seconds is None"),
        ({"call_seconds": math.nan}, "call_seconds is nan"),
        ({"transfers_measured": [[4096, 2**64, 1e-4]]}, "transfers_measured is 1844"),
        ({"read_seconds": {"p50": 2, "p99": 1, "p999": 3}}, "do not rise"),
        ({"latency": 1}, "no field 'latency'"),
        ({"name": 3}, "name is not a text"),
        ({"kind": "read"}, "not of dsprep bench storage"),
    ],
)
def test_impossible_figures(change, words, tmp_path):
    path = tmp_path / "storage.json"
    path.write_text(json.dumps({**storage().to_json(), **change}))
    with pytest.raises(FormatError, match=words) as caught:
        parse_storage(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_figures_by_hand():
    text = "latency=1ms, stream=500MB/s, total=20GB/s, p50=80ms, p99=150ms, read=8MB, opens=1e4"
    figures = parse_storage(text)
    assert (figures.call_seconds, figures.total_bytes_per_second) == (1e-3, 20e9)
    assert (figures.read_seconds.p99, figures.spread_nbytes) == (0.15, 8_000_000)


# --- the verb and the command --------------------------------------------------------------------

HAND = "latency=2ms,stream=50MB/s,total=400MB/s"
JOB = "--nodes 4 --ranks-per-node 2 -M 4 --compute 10ms"


@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "x<&.h5"
    rows = ({"x": np.full(25_000, i, "f4")} for i in range(256))
    dsprep.write(path, rows, buffer_size="8")
    return path


def test_a_plan_is_that_of_the_model(grouped):
    found = cli("plan", grouped, *JOB.split(), "--storage", HAND, "--json").json()
    assert found["load"]["samples"] == 32
    assert found["load"]["units"] == 4
    assert found["needed_bytes_per_second"] == pytest.approx(8 * 4 * 100_000 / 0.01)
    assert (found["group_samples"], found["group_steps"]) == (8, 2)
    w = 1 / (1 / 50e6 + 7 / 400e6)
    beside, taking = 0.02, 8 * HAND_OVER
    each, read = 0.002 + 1e5 / w, 0.002 + 8e5 / w
    waits = {name: way["exposed_seconds"] for name, way in found["ways"].items()}
    assert waits["sample"] == pytest.approx(32 * each + taking)
    assert waits["group"] == pytest.approx(4 * read + taking)
    assert waits["group-db"] == pytest.approx(4 * read - 3 * beside + taking)
    later = found["ways"]["group-db"]["later_seconds"]
    assert later == pytest.approx(4 * (read - beside) + taking)
    saved = 32 * (0.002 + 1e5 / w) - 4 * (read - beside)
    assert found["repack"]["epochs"] == pytest.approx(2 * 25.6e6 / (8 * w) / saved)


def test_a_cache_and_mini_epochs(grouped):
    job = Job(nodes=4, ranks_per_node=2, batch_size=4, compute=1e-3)
    figures = parse_storage(HAND)
    plan = plan_read(grouped, job, figures, tier={"capacity": 7_000_000, "epochs": 20})
    assert plan.tier.pfs == pytest.approx(figures.copy_rate(4))
    assert 1 - plan.ways["met"].utilisation == pytest.approx(plan.tier.after.stalled)
    assert plan.ways["cache-next"].later_seconds == 0  # 28 MB hold all of it
    fails(lambda: plan_read(grouped, replace(job, compute=0.0), figures), UsageError, "compute")
