"""``dsprep bench storage``: figures are those of the storage, and nothing of it stays there."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import cli

from dsprep.bench.storage import fit, worker
from dsprep.planning.storage_figures import StorageFigures
from dsprep.storage.mounts import mount_of

TINY = ("bench", "storage", "--size", "8MiB", "--seconds", "1", "--streams", "1,2")


@pytest.fixture
def place(tmp_path):
    """A directory to measure, in which nothing is left."""
    path = tmp_path / "storage"
    path.mkdir()
    yield path
    assert list(path.iterdir()) == []


RATES = st.floats(1e6, 1e12)


@given(RATES, st.floats(0.3, 30), st.sets(st.integers(2, 64), min_size=2, max_size=6))
def test_the_fit_finds_the_numbers_that_rates_were_made_of(alone, share, counts):
    """A is `share` times W: from some streams on, all of them saturate."""
    true = StorageFigures(
        call_seconds=0.0, stream_bytes_per_second=alone, total_bytes_per_second=alone * share
    )
    totals = [(p, p * true.bytes_per_second(p)) for p in sorted({1, *counts})]
    found, together = fit(totals)
    part = (max(counts) - 1) / share
    if part / (1 + part) < 0.25:
        assert together is None
        assert alone * 0.74 < found <= alone * (1 + 1e-9)
    else:
        assert found == pytest.approx(alone, rel=1e-6)
        assert together == pytest.approx(alone * share, rel=1e-6)


def test_a_tiny_run_writes_a_file_that_is_read_back(place, tmp_path):
    out = tmp_path / "storage.json"
    done = cli(*TINY, place, "--out", out, "--json")
    figures = StorageFigures.load(out)
    assert StorageFigures.from_json(json.loads(done.out)) == figures
    assert [count for count, _ in figures.streams_measured] == [1, 2]
    assert [nbytes for nbytes, *_ in figures.transfers_measured] == [4096, 65536, 1 << 20, 8 << 20]
    assert figures.spread_nbytes == 1 << 20
    assert figures.rounds_ratio is None or figures.rounds_ratio >= 1
    assert figures.opens_per_second > 0
    assert (figures.nodes, figures.direct) == (1, False)
    assert figures.mount.split()[0] == mount_of(place.resolve()).kind
    assert abs(datetime.fromisoformat(figures.measured_on) - datetime.now(UTC)).seconds < 600
    assert "buffered reads of 1 MiB by each stream" in figures.obtained
    assert "workers: 1, nodes: 1, files of 8 MiB" in figures.obtained
    assert "writes up to 8 MiB and 1,000 small files" in done.err
    assert str(place) in done.err


def test_two_processes_each_read_what_the_other_wrote(place):
    done = cli(*TINY, place, "--executor", "processes", "--workers", 2)
    assert "workers: 2, nodes: 1, files of 4 MiB" in done.out
    assert "streams: 2" in done.out
    assert "a thread gets" in done.out


def test_what_fails_on_the_way_leaves_nothing(place, monkeypatch):
    def fail(job):
        raise OSError(28, "No space left on device", str(job.folder))

    monkeypatch.setattr(worker, "read", fail)
    assert "No space left on device" in cli(*TINY, place, code=1).err
