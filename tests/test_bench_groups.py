"""The group-wise strategies, the limit, LMDBIO's steps: the right samples, and how they come."""

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
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest

import dsprep
from dsprep.bench.strategies import find, group, limit
from dsprep.bench.strategies.lmdbio import Assignment
from dsprep.bench.strategies.lmdbio import node as lmdbio_node
from dsprep.bench.strategies.lmdbio import records as lmdbio_records
from dsprep.bench.task import Task
from dsprep.core.schema import Ragged
from dsprep.errors import DsprepError, UsageError
from dsprep.reader.engines import direct

COUNT = 103
STEPS = ["lmm", "dm", "dio", "prov", "coal", "stag"]


def values(count=COUNT):
    rng = np.random.default_rng(7)
    x = rng.random((count, 5, 31), np.float32)
    return x, np.arange(count, dtype=np.int64)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """The dataset as it is, repacked, and as an LMDB."""
    folder = tmp_path_factory.mktemp("data")
    source = folder / "source.h5"
    x, y = values()
    with h5py.File(source, "w") as file:
        file["x"], file["y"] = x, y
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
    return find(name).load()(task)


def delivered(strategy, number):
    """The samples' numbers, as they came; their values are compared."""
    x, _ = values()
    found, steps = [], 0
    for item in strategy.epoch(number):
        batch = strategy.batch(item)
        assert strategy.size(item) == len(batch["y"]) <= strategy.task.batch_size
        assert np.array_equal(batch["x"], x[batch["y"]])
        assert batch["x"].dtype == x.dtype
        found += batch["y"].tolist()
        steps += 1
        del item, batch
    assert steps <= strategy.task.steps
    return found


def held():
    """Descriptors, threads and mappings of files of this process that can be told apart."""
    gc.collect()
    files = [str(p.readlink()) for p in Path("/proc/self/fd").iterdir() if p.is_symlink()]
    maps = Path("/proc/self/maps").read_text()
    data = [f for f in files if ".lmdb" in f or ".h5" in f or "dsprep" in f]
    return data, [w for w in ("all.lmdb", "groups.h5", "memfd:dsprep") if w in maps]


# --- the limit -------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch):
    """File, offset and bytes of every read call of the limit."""
    calls = []

    def preadv(fd, buffers, offset, flags=0):
        got = real(fd, buffers, offset, flags)
        calls.append((offset, got))
        return got

    real = os.preadv
    monkeypatch.setattr(os, "preadv", preadv)
    return calls


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("more", [{}, {"threads": 3}, {"transfer_size": 1000}, {"batch_size": 40}])
def test_the_limit_reads_all_bytes_of_groups_once(world, more, places, asked):
    with dsprep.Sidecar.open(places["groups"]) as sidecar:
        blocks = sidecar.layout(0).groups.blocks
        want = [(blocks.offsets.one(i), blocks.lengths.one(i)) for i in range(blocks.count)]
    for number in range(2):
        sizes = []
        asked.clear()
        for rank in range(world):
            strategy = made("pread-limit", places, rank=rank, world_size=world, **more)
            strategy.open()
            mine = list(map(strategy.size, strategy.epoch(number)))
            assert len(mine) <= strategy.task.steps
            assert max(mine) <= strategy.task.batch_size
            sizes += mine
            strategy.close()
        assert sum(sizes) == COUNT
        covered = sorted(asked)
        assert sum(n for _, n in covered) == sum(n for _, n in want)
        assert all(a + n <= b for (a, n), (b, _) in pairwise(covered))
        if "transfer_size" in more:
            assert max(n for _, n in covered) <= 1000
    assert held() == ([], [])


def test_the_limit_is_as_many_groups_ahead_as_there_are_buffers(places, asked):
    strategy = made("pread-limit", places, batch_size=10)
    strategy.open()
    items = strategy.epoch(0)
    for step in range(1, 9):
        assert next(items) == 10
        deadline = time.monotonic() + 5
        while len(asked) < step + 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)
        assert len(asked) == step + 2
    strategy.close()
    items.close()


def test_the_limit_reads_directly(places):
    strategy = made("pread-limit", places, engine="direct", transfer_size=4096)
    strategy.open()
    try:
        assert sum(strategy.epoch(0)) == COUNT
    except UsageError:
        pytest.skip("no direct reads on this file system")
    finally:
        strategy.close()


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


def test_what_the_limit_cannot_read_is_told(places):
    strategy = made("pread-limit", places)
    strategy.open()
    strategy._table.lengths[:] += 1 << 30  # behind the end of the file
    strategy._buffers = [np.empty(4 << 20, np.uint8)] * 2
    with pytest.raises(DsprepError):
        list(strategy.epoch(0))
    strategy.close()
    task = task_of("pread-limit", places["source"])
    with pytest.raises(UsageError, match="no groups"):
        limit.Limit(task).open()


# --- overlap ---------------------------------------------------------------------------------


def reads_while_computing(name, places, monkeypatch):
    """How many reads ran while a step computed, of all."""
    computing = threading.Event()
    seen = []

    class Slow:
        name = "buffered"

        def __init__(self):
            self._real = dsprep.reader.engines.Buffered()

        def read(self, *call):
            at = [computing.is_set()]
            time.sleep(0.004)
            at.append(computing.is_set())
            seen.append(any(at))
            return self._real.read(*call)

    monkeypatch.setattr(group, "make", lambda name: Slow())
    monkeypatch.setattr("dsprep.reader.loader.make", lambda name: Slow())
    strategy = made(name, places)
    strategy.open()
    items = iter(strategy.epoch(0))
    while (item := next(items, None)) is not None:
        computing.set()
        time.sleep(0.006)
        computing.clear()
        del item
    strategy.close()
    return sum(seen), len(seen)


def test_groups_are_read_before_or_while_others_are_used(places, monkeypatch):
    both, every = reads_while_computing("group", places, monkeypatch)
    assert both == 0
    assert every >= 11
    both, every = reads_while_computing("group-db", places, monkeypatch)
    assert both > every // 2


# --- LMDBIO ----------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [0, 1, 7, 64, 103, 500])
@pytest.mark.parametrize(("ranks", "roots"), [(1, 1), (3, 1), (3, 2), (5, 2), (4, 4)])
@pytest.mark.parametrize("steps", [1, 3])
def test_records_are_dealt_once(samples, ranks, roots, steps):
    deal = Assignment(samples, ranks, 4, roots, steps)
    got, done = [[] for _ in range(ranks)], 0
    for window in deal.windows():
        read = [deal.span(window, j) for j in range(roots)]
        assert [read[0][0], *(b for _, b in read)] == [
            window.start,
            *(a for a, _ in read[1:]),
            window.stop,
        ]
        for step in range(window.steps):
            for rank in range(ranks):
                low, high = deal.part(window, rank, step)
                first, stop = read[deal.root_of(rank)]
                assert first <= low <= high <= stop
                assert high - low <= 4
                got[rank] += range(low, high)
        done += window.steps
    assert sorted(i for mine in got for i in mine) == list(range(samples))
    assert done == -(-samples // (ranks * 4))
    if steps == 1 and samples >= ranks * 4:
        assert [r[:4] for r in got] == [list(range(4 * k, 4 * k + 4)) for k in range(ranks)]


RUN = """
import json, os, pickle, sys, hashlib
from dsprep.bench.strategies import find
from dsprep.bench.strategies.lmdbio import node as lmdbio_node
import numpy as np
task = pickle.loads(bytes.fromhex(sys.argv[1]))
lmdbio_node.OPEN_SECONDS = 10
dies = int(sys.argv[2])
strategy = find(task.strategy).load()(task)
out = []
strategy.open()
for number in range(3):
    if number == 2:  # as in cold runs: all open it anew
        strategy.close()
        strategy.open()
    ids, sums = [], []
    for step, item in enumerate(strategy.epoch(number)):
        if dies == task.rank and step == 2:
            os._exit(9)
        ids += item["y"].tolist()
        sums += [hashlib.sha1(np.ascontiguousarray(r)).hexdigest() for r in item["x"]]
    out.append([step + 1, ids, sums])
strategy.close()
maps = open("/proc/self/maps").read()
assert "data.mdb" not in maps and "dsprep-lmdbio" not in maps
print(json.dumps(out))
"""


def run_ranks(tasks, dies=-1):
    """Run each rank in a process; return exit codes, outputs and errors."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RUN, pickle.dumps(t).hex(), str(dies)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for t in tasks
    ]
    try:
        ended = [r.communicate(timeout=50) for r in ranks]
    finally:
        for r in ranks:
            r.kill()
    return [r.returncode for r in ranks], [o for o, _ in ended], [e for _, e in ended]


def tasks_of(step, places, world, **more):
    key = os.urandom(8).hex()
    return [
        task_of(f"lmdbio-{step}", places["lmdb"], rank=r, world_size=world, key=key, **more)
        for r in range(world)
    ]


@pytest.mark.parametrize(
    ("step", "world", "more"),
    [
        ("lmm", 2, {}),
        ("lmm", 3, {"readers_per_node": 2}),
        ("dm", 3, {"readers_per_node": 3}),
        ("dio", 3, {"readers_per_node": 2}),
        ("prov", 2, {"transfer_size": 4096}),
        ("coal", 3, {"readers_per_node": 2, "buffer_nbytes": 40_000}),
        ("stag", 3, {"readers_per_node": 2, "buffer_nbytes": 40_000}),
        ("stag", 3, {"readers_per_node": 3, "stagger": 2}),
    ],
)
def test_ranks_in_processes_share_the_records(step, world, more, places):
    tasks = tasks_of(step, places, world, **more)
    codes, outputs, errors = run_ranks(tasks)
    assert codes == [0] * world, errors
    x, _ = values()
    want = [hashlib.sha1(row).hexdigest() for row in x]
    found = list(map(json.loads, outputs))
    for number in range(3):
        ids = []
        for rank in range(world):
            steps, mine, sums = found[rank][number]
            assert steps <= tasks[0].steps
            assert sums == [want[i] for i in mine]
            ids += mine
        assert sorted(ids) == list(range(COUNT))
    if step in ("lmm", "dm", "dio", "prov"):
        assert [f[0][1][:8] for f in found] == [list(range(8 * r, 8 * r + 8)) for r in range(world)]
    assert not list(Path("/dev/shm").glob("*dsprep*"))


@pytest.mark.parametrize(("step", "dies"), [("lmm", 0), ("prov", 1)])
def test_who_loses_its_neighbour_fails_soon(step, dies, places):
    began = time.monotonic()
    codes, _, errors = run_ranks(tasks_of(step, places, 3), dies)
    assert codes[dies] == 9
    assert all(code == 1 for rank, code in enumerate(codes) if rank != dies)
    assert all("gone" in error for rank, error in enumerate(errors) if rank != dies)
    assert time.monotonic() - began < 9


def test_who_waits_for_nobody_gives_up(places, monkeypatch):
    monkeypatch.setattr(lmdbio_node, "OPEN_SECONDS", 0.1)
    for rank, missing in ((0, "rank 1"), (1, "the process that reads")):
        strategy = made("lmdbio-lmm", places, rank=rank, world_size=2, key=os.urandom(8).hex())
        with pytest.raises(DsprepError, match=f"{missing}.* did not come"):
            strategy.open()
        assert held() == ([], [])


def test_each_step_reads_as_it_says(places, asked, monkeypatch):
    walked = []
    real = lmdbio_records.Cursor.values

    def counted(self, first, stop):
        walked.append((first, stop))
        return real(self, first, stop)

    monkeypatch.setattr(lmdbio_records.Cursor, "values", counted)
    calls = {}
    for step in STEPS:
        asked.clear()
        walked.clear()
        strategy = made(f"lmdbio-{step}", places)
        strategy.open()
        asked.clear()
        assert delivered(strategy, 0) == list(range(COUNT))
        strategy.close()
        calls[step] = len(asked), len(walked)
    steps = -(-COUNT // 8)
    assert calls["lmm"] == calls["dm"] == (0, steps)
    assert calls["dio"] == (steps, steps)
    assert calls["prov"] == (steps, 0)
    assert calls["coal"] == calls["stag"] == (2, 0)  # all full steps; the last records


def test_records_of_every_size_come_whole(tmp_path):
    rng = np.random.default_rng(3)
    items = [rng.integers(0, 255, n, np.uint8) for n in rng.integers(0, 9000, 90)]
    source = tmp_path / "ragged.h5"
    with h5py.File(source, "w") as file:
        data = file.create_dataset("b", (len(items),), h5py.vlen_dtype(np.uint8))
        for i, item in enumerate(items):
            data[i] = item
        file["y"] = np.arange(len(items))
    path = tmp_path / "ragged.lmdb"
    dsprep.convert(source, path, durable=False)
    for step in STEPS:
        strategy = made(f"lmdbio-{step}", {"lmdb": path}, buffer_nbytes=100_000)
        strategy.open()
        got = []
        for batch in strategy.epoch(0):
            assert isinstance(batch["b"], Ragged)
            got += [batch["b"][k] for k in range(len(batch["b"]))]
        strategy.close()
        assert len(got) == len(items)
        assert all(np.array_equal(a, b) for a, b in zip(got, items, strict=True))
