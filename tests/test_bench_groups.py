"""The group-wise strategies, the limit, LMDBIO's steps: what they read, and when."""

from __future__ import annotations

import gc
import multiprocessing
import os
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest

import dsprep
from dsprep.bench import child
from dsprep.bench.strategies import SETS, find
from dsprep.bench.strategies.base import Strategy
from dsprep.bench.strategies.lmdbio import Assignment
from dsprep.bench.strategies.lmdbio import records as lmdbio_records
from dsprep.bench.task import Task
from dsprep.errors import DsprepError, UsageError
from dsprep.reader.engines import direct
from dsprep.reader.node.tokens import Local

COUNT = 103
X = np.random.default_rng(7).random((COUNT, 5, 31), np.float32)
STEPS = SETS["lmdbio"][1:]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """The dataset as it is, repacked, and as an LMDB."""
    folder = tmp_path_factory.mktemp("data")
    source = folder / "source.h5"
    with h5py.File(source, "w") as file:
        file["x"], file["y"] = X, np.arange(COUNT, dtype=np.int64)
    dsprep.provenance(source)
    dsprep.repack(source, folder / "groups.h5", buffer_size="10", durable=False)
    dsprep.convert(source, folder / "all.lmdb", durable=False)
    return {"source": source, "groups": folder / "groups.h5", "lmdb": folder / "all.lmdb"}


def task_of(name, path, **more):
    with dsprep.Sidecar.open(path) as sidecar:
        known = {"schema": sidecar.schema, "samples": len(sidecar)}
    return Task(strategy=name, path=path, **{"batch_size": 8, **known, **more})


def made(name, places, **more):
    task = task_of(name, places[find(name).container], **more)
    return Strategy(task, find(name).load())


def opened(name, places, **more):
    strategy = made(name, places, **more)
    strategy.open()
    return closing(strategy)


def held():
    """What of the datasets and of shared memory this process has open or mapped."""
    gc.collect()
    files = [str(p.readlink()) for p in Path("/proc/self/fd").iterdir() if p.is_symlink()]
    maps = Path("/proc/self/maps").read_text()
    data = [f for f in files if ".lmdb" in f or ".h5" in f or "dsprep" in f]
    return data, [w for w in ("all.lmdb", "groups.h5", "memfd:dsprep") if w in maps]


# --- the limit -------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch):
    """Offset and bytes of every read call."""
    calls, real = [], os.preadv

    def preadv(fd, buffers, offset, flags=0):
        got = real(fd, buffers, offset, flags)
        calls.append((offset, got))
        return got

    monkeypatch.setattr(os, "preadv", preadv)
    return calls


@pytest.mark.parametrize(
    ("world", "more"), [(1, {"threads": 3}), (3, {"transfer_size": 1000}), (3, {"batch_size": 40})]
)
def test_the_limit_reads_all_bytes_of_groups_once(world, more, places, asked):
    with dsprep.Sidecar.open(places["groups"]) as sidecar:
        blocks = sidecar.layout(0).groups.blocks
        stored = sum(blocks.lengths.one(i) for i in range(blocks.count))
    for number in range(2):
        sizes = []
        asked.clear()
        for rank in range(world):
            with opened("pread-limit", places, rank=rank, world_size=world, **more) as strategy:
                mine = list(map(strategy.way.size, strategy.epoch(number)))
                assert len(mine) <= strategy.task.steps
                assert max(mine) <= strategy.task.batch_size
            sizes += mine
        assert sum(sizes) == COUNT
        covered = sorted(asked)
        assert sum(n for _, n in covered) == stored
        assert all(a + n <= b for (a, n), (b, _) in pairwise(covered))
        assert max(n for _, n in covered) <= more.get("transfer_size", stored)
    assert held() == ([], [])


@pytest.mark.parametrize("name", ["dsprep", "pread-limit"])
def test_no_figures_of_another_engine_than_the_one_that_was_asked_for(name, places, monkeypatch):
    monkeypatch.setattr(direct, "_dio_align", lambda fd: (0, 0))
    strategy = made(name, places, engine="direct")
    with pytest.raises(UsageError, match="O_DIRECT is refused here"):  # noqa: PT012
        strategy.open()
        assert name == "pread-limit", "which opens the files when it reads them"
        list(strategy.epoch(0))
    strategy.close()


# --- overlap ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "overlaps"), [("group", False), ("group-db", True)])
def test_groups_are_read_before_or_while_others_are_used(name, overlaps, places):
    strategy = made(name, places, storage="latency=10ms,stream=1GB/s", compute="20ms")
    (epoch,) = child.run(strategy.task, strategy, lambda: None).epochs
    assert (epoch.exposed < 0.08) == overlaps  # of 11 groups


# --- LMDBIO ----------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [0, 7, 103])
@pytest.mark.parametrize(("ranks", "roots"), [(1, 1), (3, 1), (3, 2), (5, 2), (4, 4)])
@pytest.mark.parametrize("steps", [1, 3])
def test_records_are_assigned_once(samples, ranks, roots, steps):
    assigned = Assignment(samples, ranks, 4, roots, steps)
    got, done = [[] for _ in range(ranks)], 0
    for window in assigned.windows():
        read = [assigned.span(window, j) for j in range(roots)]
        assert (read[0][0], read[-1][1]) == window[:2]
        assert all(stop == start for (_, stop), (start, _) in pairwise(read))
        for step in range(window[2]):
            for rank in range(ranks):
                low, high = assigned.part(window, rank, step)
                first, stop = read[assigned.root_of(rank)]
                assert first <= low <= high <= min(stop, low + 4)
                got[rank] += range(low, high)
        done += window[2]
    assert sorted(i for mine in got for i in mine) == list(range(samples))
    assert done == -(-samples // (ranks * 4))
    if steps == 1 and samples >= ranks * 4:
        assert [r[:4] for r in got] == [list(range(4 * k, 4 * k + 4)) for k in range(ranks)]


def delivered(task, stops):
    """The samples of each step of three epochs, or what went wrong; one rank may stop early."""
    strategy, found = Strategy(task, find(task.strategy).load()), []
    try:
        for number in range(3):
            if number != 1:  # as in cold runs: all open it once more
                strategy.open()
            found.append([])
            for item in strategy.epoch(number):
                if stops == task.rank and len(found[-1]) == 2:
                    return "stopped"
                assert all((X[i] == x).all() for i, x in zip(item["y"], item["x"], strict=True))
                found[-1].append(item["y"].tolist())
    except DsprepError as error:
        return str(error)
    finally:
        strategy.close()
    return found


def run_ranks(name, places, stops=-1, **more):
    """What each of three ranks delivers, in a process of its own."""
    task = task_of(name, places["lmdb"], world_size=3, key=os.urandom(8).hex(), **more)
    with multiprocessing.get_context("fork").Pool(3) as pool:
        ranks = [(replace(task, rank=rank), stops) for rank in range(3)]
        return pool.starmap_async(delivered, ranks, 1).get(240)


CASES = [
    ("lmdbio-lmm", {}),
    ("lmdbio-lmm", {"readers_per_node": 2}),
    ("lmdbio-dm", {"readers_per_node": 3}),
    ("lmdbio-dio", {"readers_per_node": 2}),
    ("lmdbio-prov", {"transfer_size": 4096}),
    ("lmdbio-coal", {"readers_per_node": 2, "buffer_nbytes": 40_000}),
    ("lmdbio-stag", {"readers_per_node": 2, "buffer_nbytes": 40_000}),
    ("lmdbio-stag", {"readers_per_node": 3, "stagger": 2}),
]


@pytest.mark.parametrize(("name", "more"), CASES)
def test_ranks_in_processes_share_the_records(name, more, places):
    ranks = run_ranks(name, places, **more)
    for epochs in zip(*ranks, strict=True):
        assert all(len(steps) <= -(-COUNT // (3 * 8)) for steps in epochs)
        ids = [i for steps in epochs for step in steps for i in step]
        assert sorted(ids) == list(range(COUNT))
    if name not in ("lmdbio-coal", "lmdbio-stag"):
        firsts = [epochs[0][0] for epochs in ranks]
        assert firsts == [list(range(8 * r, 8 * r + 8)) for r in range(3)]
    assert not list(Path("/dev/shm").glob("*dsprep*"))


def test_who_loses_its_neighbour_fails_soon(places):
    first, stopped, last = run_ranks("lmdbio-prov", places, stops=1)
    assert stopped == "stopped"
    assert "gone" in first
    assert "gone" in last


def test_each_step_reads_as_it_says(places, monkeypatch):
    calls, turns = [], []
    reads = lambda task: lambda nbytes, count: calls.append(count)  # noqa: E731
    monkeypatch.setattr(lmdbio_records, "delay_of", reads)
    real = Local.take
    monkeypatch.setattr(Local, "take", lambda *args: turns.append(len(calls)) or real(*args))
    for name in STEPS:
        calls.clear()
        with opened(name, places) as strategy:
            found = [i for item in strategy.epoch(0) for i in item["y"].tolist()]
        assert found == list(range(COUNT))
        steps, rest = divmod(COUNT, 8)
        each = {"lmm": [8] * steps + [rest], "dm": [8] * steps + [rest]}  # by page faults
        each |= {"dio": [1] * (steps + 1), "prov": [1] * (steps + 1)}
        assert calls == each.get(name.removeprefix("lmdbio-"), [1, 1])  # all full steps; the rest
        assert bool(turns) == (name == "lmdbio-stag")
