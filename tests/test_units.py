"""What is read at a time, and how the reader finds out how to read it."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from support import MemorySource, epochs, random_batch

import dsprep
from dsprep.conversion import plan_job
from dsprep.errors import UsageError
from dsprep.jobs import run_job
from dsprep.reader import loader
from dsprep.reader.units import some_ranges
from dsprep.schema import Field, Schema

SCHEMA = Schema((Field("x", np.dtype("<f4"), (40, 30)), Field("y", np.dtype("<i8"))))
COUNT = 300


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    folder = tmp_path_factory.mktemp("units")
    (folder / "memory").touch()
    source = MemorySource(SCHEMA, random_batch(SCHEMA, COUNT), folder / "memory")
    run_job(plan_job(source, folder / "origin.h5"), source, durable=False)
    return folder / "origin.h5"


@pytest.mark.parametrize("suffix", ["h5", "tfrecord", "lmdb", "zarr", "zarr.zip"])
def test_ranges_hold_the_samples_of_their_units(suffix, origin, tmp_path):
    out = tmp_path / f"out.{suffix}"
    dsprep.repack(origin, out, buffer_size=32, durable=False)
    with (
        dsprep.Sidecar.open(out) as sidecar,
        dsprep.Reader(out, 10, rank=0, world_size=1) as reader,
    ):
        edges = reader._edges
        ranges, decoded = some_ranges(sidecar, edges, ["y", "x"])
        assert not decoded
        assert len(ranges) == len(edges) - 1 == 10
        for (path, offset, nbytes), first in zip(ranges, edges, strict=False):
            data = path.read_bytes()
            assert offset + nbytes <= len(data)
            x = sidecar.read(int(first), ["x"])["x"].tobytes()
            assert x in data[offset : offset + nbytes]
        assert len(some_ranges(sidecar, edges, ["x"], most=4)[0]) == 4
        assert some_ranges(sidecar, edges, []) == ([], False)


def test_filters_are_told(origin, tmp_path):
    out = tmp_path / "out.h5"
    dsprep.repack(origin, out, buffer_size=32, compress="gzip", durable=False)
    with dsprep.Reader(out, 10, rank=0, world_size=1) as reader:
        assert reader.choice.threads == len(os.sched_getaffinity(0))
        assert "decoding" in reader.choice.why


def test_what_was_asked_for_is_not_measured(origin, monkeypatch):
    monkeypatch.setattr(loader, "choose", None)
    with dsprep.Reader(origin, 10, rank=0, world_size=1, engine="mapped", io_threads=3) as reader:
        assert (reader.choice.engine, reader.choice.threads) == ("mapped", 3)


def test_what_was_measured_is_used(origin, monkeypatch):
    asked = []

    def choose(ranges, **facts):
        asked.append((ranges, facts))
        return loader.Choice("direct", 2, "it was faster")

    monkeypatch.setattr(loader, "choose", choose)
    with dsprep.Reader(origin, 10, rank=0, world_size=1, epochs=3) as reader:
        assert reader._settings.engine.name == "direct"
        assert reader._settings.threads == 2
        assert len(list(epochs(reader, 3))) == 3 * 30
    ((ranges, facts),) = asked
    assert ranges
    assert facts["again"]
    assert facts["nbytes"] == origin.stat().st_size


@pytest.mark.parametrize(
    "wrong",
    [
        {"engine": "rocket"},
        {"verify": True},
        {"fields": "label"},
        {"io_threads": 0},
        {"shuffle": "some"},
    ],
)
def test_nonsense_is_refused(wrong, origin):
    with pytest.raises(UsageError):
        dsprep.Reader(origin, 10, rank=0, world_size=1, **wrong)


def test_a_state_with_absurd_ranks_is_refused(origin):
    with dsprep.Reader(origin, 10, rank=0, world_size=1) as reader:
        state = reader.state_dict()
        state["stages"] = [[1 << 40, 10, 1], [1, 10, 0]]
        with pytest.raises(UsageError, match="damaged"):
            reader.load_state_dict(state)


def test_a_missing_sidecar_is_told(tmp_path, origin):
    copy = tmp_path / "copy.h5"
    copy.write_bytes(origin.read_bytes())
    with pytest.raises(FileNotFoundError, match=r"dsprep provenance .*copy\.h5"):
        dsprep.Reader(copy, 10)
    with pytest.raises(FileNotFoundError, match="no such dataset"):
        dsprep.Reader(tmp_path / "nothing.h5", 10)


def test_threads_that_cannot_be_started_leave_none_behind(origin, monkeypatch):
    real, before = threading.Thread.start, threading.active_count()

    def start(thread):
        if thread.name == "dsprep-read-2":
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with dsprep.Reader(origin, 10, rank=0, world_size=1, io_threads=5) as reader:
        with pytest.raises(UsageError, match="5 io_threads"):
            iter(reader)
        assert threading.active_count() == before
    with pytest.raises(UsageError, match="one dataset"):
        dsprep.Reader([origin], 10)
