"""The benchmark: what is measured is right, what is wrong is reported, nonsense is refused."""

from __future__ import annotations

import os
import pickle
import select
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import h5py
import numpy as np
import pytest
from support import fails

from dsprep.bench import child, counters, running, sums
from dsprep.bench.reading import bench_read, chosen, plan_read
from dsprep.bench.strategies import SETS, STRATEGIES, find
from dsprep.bench.strategies.base import Strategy, Way
from dsprep.bench.summary import against_limit, row
from dsprep.bench.task import Failure, Settings, Task
from dsprep.errors import DsprepError
from dsprep.source.dataset import open_dataset
from dsprep.verbs.provenance import provenance

N = 50
QUICK = Settings(repeat=1, threads=1, cold=False)


@pytest.fixture
def made(tmp_path):
    """A dataset as a task for h5py, and what it adds up to."""
    path = tmp_path / "data" / "a.h5"
    path.parent.mkdir()
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file["x"] = rng.random((N, 40, 30), np.float32)
        file["y"] = rng.integers(0, 9, N)
    with open_dataset(path) as source:
        schema, expected = source.schema, sums.of_source(source, N)
    known = {"schema": schema, "samples": N, "batch_size": 8, "drop": (path,)}
    return Task(strategy="h5py", path=path, **known), expected


def plain(planted=lambda batch, indices: batch, pause=lambda task: None, excess=False):
    """A way of reading samples in shuffled order from memory, in which errors are planted."""

    def opener(task, resources):
        with h5py.File(task.path) as file:
            data = {"x": file["x"][:], "y": file["y"][:]}

        def epoch(number):
            for indices in task.batches(number):
                yield planted({k: v[indices] for k, v in data.items()}, indices)
                pause(task)
            pause(task)
            if excess:
                yield {k: v[:0] for k, v in data.items()}

        return Way(epoch, lambda item: len(item["y"]))

    return opener


def drops(batch, indices):
    return {k: v[indices != 7] for k, v in batch.items()}


def repeats(batch, indices):
    """One sample twice, for another one."""
    for v in batch.values():
        v[-1] = v[0]
    return batch


def corrupts(batch, indices):
    """One bit of one value."""
    if 7 in indices:
        batch["x"][list(indices).index(7), 0, 0] += 1
    return batch


def mixes(batch, indices):
    """The labels of two samples changed places."""
    batch["y"][:2] += np.array([1, -1])
    return batch


class Clocks(threading.local):
    """A clock for each thread, on which nothing but what a test plans takes time."""

    now = 0.0

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clocks(monkeypatch):
    made = Clocks()
    monkeypatch.setattr(child, "now", lambda: made.now)
    monkeypatch.setattr(child, "time", made)
    return made


def slow(clocks):
    """10 ms a batch, and as many to find that it was the last; of two ranks one is slow."""
    return plain(pause=lambda task: clocks.sleep(0.01 * (task.world_size == 1 or task.rank)))


def here(task):
    """Run a task of one rank in this process."""
    return [child.run(task, Strategy(task, find(task.strategy).load()), lambda: None)]


def measured(opener, task, expected):
    return row(task, [[child.run(task, Strategy(task, opener), lambda: None)]], expected)


def test_a_right_reader_gets_numbers(made):
    task, expected = made
    found = measured(plain(), replace(task, epochs=3, warmup=1), expected)
    assert (found.problems, found.runs) == ((), 3)
    assert found.median("samples_per_second") > 0
    assert found.median("first_batch_seconds") <= found.median("exposed_seconds")
    assert found.median("exposed_seconds") <= found.median("epoch_seconds")
    assert found.median("peak_rss_bytes") > 1e6
    rows = against_limit([replace(found, name="pread-limit"), found, replace(found, measures={})])
    assert [r.median("limit_percent") for r in rows] == [pytest.approx(100)] * 2 + [None]


@pytest.mark.parametrize("wrong", [drops, repeats, corrupts, mixes, "excess"])
def test_a_wrong_reader_gets_none(made, wrong):
    opener = plain(excess=True) if wrong == "excess" else plain(wrong)
    found = measured(opener, *made)
    assert found.measures == {}
    assert any("wrong samples" in p for p in found.problems)


def test_a_warm_run_is_not_called_cold(made, monkeypatch):
    task = replace(made[0], cold=True)
    monkeypatch.setattr(child, "drop_cached", lambda files: None)
    [path.read_bytes() for path in task.drop]
    found = measured(plain(), task, made[1])
    assert found.measures == {}
    assert any("not cold" in p for p in found.problems)


def test_the_consumer_s_waits_are_what_is_exposed(made, clocks):
    task = replace(made[0], compute="5ms")
    value, steps = measured(slow(clocks), task, made[1]).median, task.steps
    assert value("exposed_seconds") == pytest.approx(0.01 * (steps + 1))
    assert value("compute_seconds") == pytest.approx(0.005 * steps)
    assert value("epoch_seconds") == pytest.approx(0.015 * steps + 0.01)
    share = value("compute_seconds") / value("epoch_seconds")
    assert value("utilisation_percent") == pytest.approx(100 * share)
    waits = value("wait_p50_seconds"), value("wait_p99_seconds")  # those for batches
    assert waits == pytest.approx((0.01, 0.01))
    assert value("first_batch_seconds") == 0


def test_ranks_meet_at_every_step(made, clocks):
    task, expected = made
    barrier, times, results = threading.Barrier(2), [0.0, 0.0], [None, None]

    def one(rank):
        def meet():
            times[rank] = clocks.now
            barrier.wait(60)
            latest = max(times)
            barrier.wait(60)
            clocks.now = latest

        mine = replace(task, rank=rank, world_size=2)
        results[rank] = child.run(mine, Strategy(mine, slow(clocks)), meet)

    threads = [threading.Thread(target=one, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = row(task, [results], expected)
    assert found.problems == ()
    steps = replace(task, world_size=2).steps
    skews = [result.epochs[0].skew for result in results]
    assert skews == [pytest.approx(0.01 * (steps - 1)), 0]
    assert found.median("skew_seconds") == pytest.approx(np.mean(skews))
    assert pickle.loads(pickle.dumps((task, results))) == (task, results)  # they travel


# --- computing, counters ----------------------------------------------------------------------


def test_counters_see_reads_and_children(tmp_path):
    file = tmp_path / "f"
    file.write_bytes(bytes(1 << 20))
    before = counters.count()
    file.read_bytes()
    after = counters.count() - before
    assert (after.requested >= 1 << 20, after.calls >= 1) == (True, True)
    code = "import sys,time; sum(range(3_000_000)); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        assert process.pid in counters.descendants(os.getpid())
        alive = counters.count()
        process.stdin.close()
    assert alive.cpu - before.cpu > 0.02
    assert counters.count().cpu >= alive.cpu - 0.05  # what it did is not lost


# --- processes --------------------------------------------------------------------------------


def test_a_crash_and_a_hang_are_reported(made, tmp_path, monkeypatch):
    def ended(text, **more):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(running.sys, "executable", str(path))
        return running.run(made[0], **more).reason

    assert ended("echo boom >&2; exit 3") == "ended with status 3: boom"
    assert ended("kill -9 $$") == "ended by signal 9"
    assert "took too long" in ended(f"sleep 100 & echo $! > {tmp_path}/pid; wait", timeout=2.0)
    pid = (tmp_path / "pid").read_text().strip()
    for _ in range(3000):
        if not Path(f"/proc/{pid}").exists():
            break
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()  # nor is anything left that it started


def test_a_process_ends_with_the_one_that_started_it():
    code = "from dsprep.bench.child import *; import time; end_with_parent(); "
    code += "print('ready', flush=True); time.sleep(60)"
    parent = f"""
import subprocess, sys, time
p = subprocess.Popen([sys.executable, "-c", {code!r}], stdout=subprocess.PIPE)
p.stdout.readline(); print(p.pid, flush=True); time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        watched = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
        try:
            assert select.select([watched], [], [], 60)[0]
        finally:
            os.close(watched)


@pytest.fixture
def killed(tmp_path):
    """A rank that said that it is at the gate, and was killed before the answer."""
    ours, theirs = Pipe()
    process = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    process.wait()
    with (tmp_path / "errors").open("w+b") as errors, ours:
        theirs.send(None)
        theirs.close()
        yield running.Rank(0, process, ours, errors)


def test_a_rank_that_ends_at_the_gate_is_reported(killed):
    deadline = time.monotonic() + 60
    assert running.follow([killed], deadline)
    running.open_gate([killed])
    assert not running.follow([killed], deadline)
    assert killed.outcome == Failure("ended by signal 9")


class Comm:
    """What the first of two MPI processes sees, the other of which is done."""

    def Get_rank(self):
        return 0

    def Get_size(self):
        return 2

    def Iallgather(self, mine, states):
        self.told, states[:] = mine[0], type(states)("i", [mine[0], running.DONE])
        return self

    def Test(self):
        return True


def test_ranks_do_not_wait_for_one_that_cannot_start(made, monkeypatch):
    def start(task):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(running, "start", start)
    comm = Comm()
    assert "Too many open files" in running.measure(comm, made[0], 5.0).reason
    assert comm.told == running.FAILED


# --- what users do ------------------------------------------------------------------------------


def test_the_table_is_true():
    for name, entry in STRATEGIES.items():
        assert entry.missing or callable(entry.load()), name
    assert {name for names in SETS.values() for name in names} <= set(STRATEGIES)
    fails(lambda: find("nosuch"), DsprepError, "not a strategy")


def test_peers_are_those_that_are_installed(monkeypatch):
    installed = lambda name: name in ("lance", "zarrs")  # noqa: E731
    monkeypatch.setattr("dsprep.bench.strategies.find_spec", installed)
    names = chosen(["peers"], Settings())[1:]
    assert [Path(name).name for name in names] == ["use_lance.py:make", "use_zarrs.py:make"]


def test_fields_that_cannot_be_located_are_not_read_so(tmp_path):
    path = tmp_path / "part.h5"
    with h5py.File(path, "w") as file:
        file["y"] = np.arange(20, dtype=np.int64)
        ragged = file.create_dataset("x", (20,), h5py.vlen_dtype(np.float32))
        for i in range(20):
            ragged[i] = np.zeros(1 if i < 19 else 5000, np.float32)
    provenance([path])
    assert "provenance" not in plan_read([path]).names
    report = bench_read(plan_read([path], ["provenance", "dsprep"], QUICK))
    assert {r.name for r in report.rows if r.problems} == {"provenance"}
    assert report.dataset["payload_nbytes"] == 4 * (19 + 5000) + 20 * 8


def test_reads_are_delayed_as_on_another_storage(tmp_path):
    """A call for each sample makes nearly all of it, so reading in groups is as much faster."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.random.default_rng(0).random((64, 10), np.float32)
    ways = ["h5py", "zarr", "lmdb-get", "lmdbio-prov", "group", "dsprep"]
    settings = replace(QUICK, storage="latency=10ms,stream=1GB/s", buffer_size="16", batch_size=16)
    report = bench_read(plan_read([tmp_path / "a.h5"], ways, settings), runner=here)
    assert [r.problems for r in report.rows] == [()] * 7
    waited = {r.name: r.median("exposed_seconds") for r in report.rows}
    assert min(waited[name] for name in ways[:3]) > 64 * 0.01
    for name in ("pread-limit", "lmdbio-prov", "group", "dsprep"):
        assert 0.01 < waited[name] < waited["h5py"] / 4, name
    assert "delayed by --storage latency=10ms,stream=1GB/s, 10 ms a call" in " ".join(report.answer)
    with pytest.raises(DsprepError, match="reads by itself"):
        plan_read([tmp_path / "a.h5"], [f"{__file__}:here"], settings)
