"""The group-wise strategies, the limit, LMDBIO's steps: what they read, and when."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest

import dsprep
from dsprep.bench.strategies import SETS, find, group
from dsprep.bench.strategies.base import Strategy
from dsprep.bench.strategies.lmdbio import Assignment
from dsprep.bench.strategies.lmdbio import records as lmdbio_records
from dsprep.bench.task import Task
from dsprep.errors import UsageError
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


@pytest.mark.filterwarnings("ignore::dsprep.reader.engines.EngineWarning")
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
def test_groups_are_read_before_or_while_others_are_used(name, overlaps, places, monkeypatch):
    computing = threading.Event()
    seen = []  # of every read, whether it ran while a step computed
    overlapped = threading.Semaphore(0)

    class Slow:
        name, why = "buffered", None

        def __init__(self):
            self._real = dsprep.reader.engines.Engine()

        def read_runs(self, *call):
            at = [computing.is_set()]
            time.sleep(0.004)
            at.append(computing.is_set())
            seen.append(any(at))
            if any(at):
                overlapped.release()
            return self._real.read_runs(*call)

    monkeypatch.setattr(group, "make", lambda name: Slow())
    monkeypatch.setattr("dsprep.reader.setup.make", lambda name: Slow())
    with opened(name, places) as strategy:
        items = iter(strategy.epoch(0))
        while (item := next(items, None)) is not None:
            computing.set()
            overlapped.acquire(timeout=0.1 if overlaps else 0.006)
            computing.clear()
            del item
    assert len(seen) >= 11
    assert any(seen) == overlaps


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


RUN = """
import hashlib, json, os, pickle, sys
import numpy as np
from dsprep.bench.strategies import find
from dsprep.bench.strategies.base import Strategy

tasks, dies = pickle.loads(bytes.fromhex(sys.argv[1]))
out = []
for task in tasks:
    strategy = Strategy(task, find(task.strategy).load())
    epochs = []
    for number in range(3):
        if number != 1:  # as in cold runs: all open it once more
            strategy.open()
        ids, sums = [], []
        for step, item in enumerate(strategy.epoch(number)):
            if dies == task.rank and step == 2:
                os._exit(9)
            ids += item["y"].tolist()
            sums += [hashlib.sha1(np.ascontiguousarray(r)).hexdigest() for r in item["x"]]
        epochs.append([step + 1, ids, sums])
    strategy.close()
    out.append(epochs)
maps = open("/proc/self/maps").read()
assert "data.mdb" not in maps and "memfd:dsprep" not in maps
print(json.dumps(out))
"""


def run_ranks(cases, places, dies=-1):
    """Run each of three ranks in a process; return exit codes, outputs and errors."""
    tasks = [
        task_of(step, places["lmdb"], world_size=3, key=os.urandom(8).hex(), **more)
        for step, more in cases
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = []
    for rank in range(3):
        mine = pickle.dumps(([replace(task, rank=rank) for task in tasks], dies)).hex()
        ranks.append(subprocess.Popen([sys.executable, "-c", RUN, mine], **pipes))
    try:
        ended = [r.communicate(timeout=240) for r in ranks]
    finally:
        for r in ranks:
            r.kill()
    return [r.returncode for r in ranks], [o for o, _ in ended], [e for _, e in ended]


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


def test_ranks_in_processes_share_the_records(places):
    codes, outputs, errors = run_ranks(CASES, places)
    assert codes == [0] * 3, errors
    want = [hashlib.sha1(row).hexdigest() for row in X]
    for (name, more), *ranks in zip(CASES, *map(json.loads, outputs), strict=True):
        for number in range(3):
            ids = []
            for steps, mine, sums in (epochs[number] for epochs in ranks):
                assert steps <= -(-COUNT // (3 * 8))
                assert sums == [want[i] for i in mine], (name, more)
                ids += mine
            assert sorted(ids) == list(range(COUNT)), (name, more)
        if name not in ("lmdbio-coal", "lmdbio-stag"):
            starts = [epochs[0][1][:8] for epochs in ranks]
            assert starts == [list(range(8 * r, 8 * r + 8)) for r in range(3)], (name, more)
    assert not list(Path("/dev/shm").glob("*dsprep*"))


@pytest.mark.parametrize(("step", "dies"), [("prov", 1)])
def test_who_loses_its_neighbour_fails_soon(step, dies, places):
    codes, _, errors = run_ranks([(f"lmdbio-{step}", {})], places, dies)
    assert codes == [9 if rank == dies else 1 for rank in range(3)]
    assert all("gone" in error for rank, error in enumerate(errors) if rank != dies), errors


def test_each_step_reads_as_it_says(places, asked, monkeypatch):
    walked, real = [], lmdbio_records.Cursor.values

    def counted(self, first, stop):
        walked.append((first, stop))
        return real(self, first, stop)

    def turning(real):
        def wrapped(*args):
            turns.append(len(asked))
            return real(*args)

        return wrapped

    monkeypatch.setattr(lmdbio_records.Cursor, "values", counted)
    for call in ("take", "release"):
        monkeypatch.setattr(Local, call, turning(getattr(Local, call)))
    calls, turns = {}, []
    for name in STEPS:
        with opened(name, places) as strategy:
            asked.clear()
            walked.clear()
            found = [i for item in strategy.epoch(0) for i in item["y"].tolist()]
            assert found == list(range(COUNT))
        calls[name.removeprefix("lmdbio-")] = len(asked), len(walked)
        expected = [0, 0, 0, 1, 1, 1, 1, 2] if name == "lmdbio-stag" else []
        assert turns == expected  # a read while it has a token
    steps = -(-COUNT // 8)
    assert calls["lmm"] == calls["dm"] == (0, steps)
    assert calls["dio"] == (steps, steps)
    assert calls["prov"] == (steps, 0)
    assert calls["coal"] == calls["stag"] == (2, 0)  # all full steps; the last records
