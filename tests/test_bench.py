"""The benchmark's core: what is measured is right, and what is wrong is told."""

from __future__ import annotations

import os
import pickle
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import random_batch, schemas

from dsprep.bench import caches, child, computing, counters, running, sums
from dsprep.bench.strategies import SETS, STRATEGIES, find
from dsprep.bench.strategies.base import Strategy
from dsprep.bench.summary import Facts, against_limit, row
from dsprep.bench.task import Failure, Task
from dsprep.core.schema import Field, Ragged, Schema
from dsprep.errors import DsprepError, SchemaError, UsageError
from dsprep.source.dataset import open_dataset

N = 50


@pytest.fixture
def made(tmp_path):
    path = tmp_path / "data.h5"
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file["x"] = rng.random((N, 40, 30), np.float32)
        file["y"] = rng.integers(0, 9, N)
    with open_dataset(path) as source:
        task = Task(
            strategy="h5py",
            path=path,
            schema=source.schema,
            samples=N,
            batch_size=8,
            drop=(path,),
        )
        facts = Facts(
            expected=sums.of_source(source, N),
            payload=N * source.schema.fixed_nbytes,
            cold=False,
            computes=False,
        )
    return task, facts


class Plain(Strategy):
    """Samples in shuffled order, from memory."""

    def open(self):
        with h5py.File(self.task.path) as file:
            self.data = {"x": file["x"][:], "y": file["y"][:]}

    def epoch(self, number):
        for indices in self.task.batches(number):
            yield self.planted({k: v[indices] for k, v in self.data.items()}, indices)

    def planted(self, batch, indices):
        return batch

    def size(self, item):
        return len(item["y"])

    def close(self):
        self.data = {}


class Drops(Plain):
    def planted(self, batch, indices):
        keep = indices != 7
        return {k: v[keep] for k, v in batch.items()}


class Repeats(Plain):
    """One sample twice, for another one."""

    def planted(self, batch, indices):
        for v in batch.values():
            v[-1] = v[0]
        return batch


class Corrupts(Plain):
    """One bit of one value, where the light sum does not look."""

    def planted(self, batch, indices):
        if 7 in indices:
            batch["x"][list(indices).index(7), 0, 0] += 1
        return batch


class Mixes(Plain):
    """The labels of two samples changed places."""

    def planted(self, batch, indices):
        batch["y"][:2] += np.array([1, -1])
        return batch


class Excess(Plain):
    def epoch(self, number):
        yield from super().epoch(number)
        yield {k: v[:0] for k, v in self.data.items()}


def measured(strategy, task, facts):
    return row("h5py", [[child.run(task, strategy(task), lambda: None)]], facts)


def test_a_right_reader_gets_numbers(made):
    task, facts = made
    found = measured(Plain, replace(task, epochs=3, warmup=1), facts)
    assert found.problems == ()
    assert found.runs == 3
    assert found.value("samples_per_second") > 0
    assert found.value("first_batch_seconds") <= found.value("exposed_seconds")
    assert found.value("exposed_seconds") <= found.value("epoch_seconds")
    assert found.value("peak_rss_bytes") > 1e6


@pytest.mark.parametrize("wrong", [Drops, Repeats, Corrupts, Mixes, Excess])
def test_a_wrong_reader_gets_none(made, wrong):
    task, facts = made
    found = measured(wrong, task, facts)
    assert found.measures == {}
    assert any("wrong samples" in p for p in found.problems)


@pytest.mark.parametrize("wrong", [Drops, Repeats, Mixes])
def test_repeats_and_losses_are_seen_in_the_measured_epochs_alone(made, wrong):
    task, facts = made
    assert measured(wrong, replace(task, check=False), facts).problems


def test_a_warm_run_is_not_called_cold(made, monkeypatch):
    task, facts = made
    task, facts = replace(task, cold=True), replace(facts, cold=True)
    monkeypatch.setattr(caches, "drop", lambda files: None)
    monkeypatch.setattr(caches, "counts", lambda files, look: True)
    caches.fill(task.drop)
    found = measured(Plain, task, facts)
    assert found.measures == {}
    assert any("not cold" in p for p in found.problems)
    # Even if the cache cannot be looked at: nothing came from the device.
    monkeypatch.setattr(caches.Look, "held", lambda look, files: None)
    found = measured(Plain, task, facts)
    assert any("came from a device" in p for p in found.problems)


def test_dropping_drops(made):
    task, _ = made
    look = caches.look(task.drop)
    caches.fill(task.drop)
    assert look.held(task.drop) > 0.9
    for _ in range(20):  # the kernel may hold pages for a moment
        caches.drop(task.drop)
        if look.held(task.drop) < 0.02:
            break
        time.sleep(0.05)
    assert look.held(task.drop) < 0.02


def test_the_consumer_s_waits_are_what_is_exposed(made):
    task, facts = made

    class Slow(Plain):
        def epoch(self, number):
            for item in super().epoch(number):
                time.sleep(0.01)
                yield item

    found = measured(Slow, replace(task, compute="5ms"), replace(facts, computes=True))
    steps = task.steps
    assert 0.01 * steps <= found.value("exposed_seconds") < 0.01 * steps + 0.5
    assert 0.005 * steps <= found.value("compute_seconds")
    share = found.value("compute_seconds") / found.value("epoch_seconds")
    assert found.value("utilisation_percent") == pytest.approx(100 * share)
    assert share < 0.6
    assert found.value("wait_p50_seconds") >= 0.01
    total = found.value("exposed_seconds") + found.value("compute_seconds")
    assert found.value("epoch_seconds") == pytest.approx(total, rel=0.05)


def test_checking_is_not_measured(made, monkeypatch):
    task, facts = made
    light = sums.lightly(task.schema)
    monkeypatch.setattr(sums, "lightly", lambda schema: lambda b: time.sleep(0.05) or light(b))
    found = measured(Plain, task, facts)
    assert found.problems == ()
    assert found.value("epoch_seconds") < 0.05 * task.steps


def test_ranks_meet_at_every_step(made):
    task, facts = made
    barrier, results = threading.Barrier(2), {}

    class Late(Plain):
        def epoch(self, number):
            for item in super().epoch(number):
                time.sleep(0.01 * self.task.rank)
                yield item

    def one(rank):
        mine = replace(task, rank=rank, world_size=2)
        results[rank] = child.run(mine, Late(mine), lambda: barrier.wait(20))

    threads = [threading.Thread(target=one, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = row("h5py", [[results[0], results[1]]], facts)
    assert found.problems == ()
    assert results[0].epochs[0].skew >= 0.01 * (task.steps // 2 - 1)
    assert results[1].epochs[0].skew < results[0].epochs[0].skew
    assert found.value("skew_seconds") > 0


def test_a_result_travels(made):
    task, _ = made
    found = child.run(task, Plain(task), lambda: None)
    assert pickle.loads(pickle.dumps(found)) == found
    assert pickle.loads(pickle.dumps(task)) == task


# --- sums -------------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", [pytest.param(s, id=n) for n, s in schemas()])
def test_sums_do_not_depend_on_order_or_cuts(schema):
    batch = random_batch(schema, 9, seed=3)
    order = np.random.default_rng(1).permutation(9)

    def rows(numbers):
        out = {}
        for f in schema:
            column = batch[f.name]
            if isinstance(column, Ragged):
                out[f.name] = Ragged.pack([column[int(i)] for i in numbers], f)
            else:
                out[f.name] = column[numbers]
        return out

    light = sums.lightly(schema)
    whole = sums.full(batch, schema), light(batch)
    parts = [rows(order[:4]), rows(order[4:])]
    assert sum(sums.full(p, schema) for p in parts) % 2**64 == whole[0]
    assert sum(light(p) for p in parts) % 2**64 == whole[1]
    if any(f.ragged or f.row_nbytes for f in schema):
        twice = rows(np.array([0, *order[1:]]))
        if any(not np.array_equal(_bits(twice, f), _bits(rows(order), f)) for f in schema):
            assert sums.full(twice, schema) != whole[0]


def _bits(batch, field):
    column = batch[field.name]
    values = column.values if isinstance(column, Ragged) else column
    return np.frombuffer(np.ascontiguousarray(values).tobytes(), np.uint8)


@given(st.lists(st.binary(max_size=20), min_size=1, max_size=20), st.data())
@settings(max_examples=50, deadline=None)
def test_a_changed_byte_changes_the_sum(values, data):
    field = Field.opaque("v")
    schema = Schema((field,))
    whole = sums.full({"v": Ragged.pack(values, field)}, schema)
    at = data.draw(st.integers(0, len(values) - 1))
    other = data.draw(st.binary(max_size=20).filter(lambda b: b != values[at]))
    changed = [*values[:at], other, *values[at + 1 :]]
    same = sorted(changed) == sorted(values)
    assert (sums.full({"v": Ragged.pack(changed, field)}, schema) == whole) == same


def test_batches_of_another_form_are_refused():
    schema = Schema((Field("x", np.dtype("f4"), (2,)),))
    for wrong in ({}, {"x": np.zeros((3, 2))}, {"x": np.zeros((3, 3), "f4")}):
        with pytest.raises(SchemaError):
            sums.full(wrong, schema)


# --- computing, counters ----------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "12", "ms", "-1ms", "gemm:0", "gemm:x", "1e9s", "0ms"])
def test_compute_is_understood_or_refused(text):
    with pytest.raises(UsageError):
        computing.parse(text)


def test_compute_takes_its_time():
    began = time.perf_counter()
    computing.make("20ms")()
    assert time.perf_counter() - began >= 0.02
    assert computing.make("gemm:8")() is not None
    assert computing.make("none")() is None


def test_counters_see_reads_and_children(tmp_path):
    file = tmp_path / "f"
    file.write_bytes(bytes(1 << 20))
    before = counters.count()
    file.read_bytes()
    after = counters.count() - before
    assert after.asked >= 1 << 20
    assert after.calls >= 1
    code = "import sys,time; sum(range(3_000_000)); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        assert process.pid in counters.descendants(os.getpid())
        alive = counters.count()
        process.stdin.close()
    ended = counters.count()
    assert alive.cpu - before.cpu > 0.02
    assert ended.cpu >= alive.cpu - 0.05  # what it did is not lost


# --- processes --------------------------------------------------------------------------------


def test_processes_run_in_step(made):
    task, facts = made
    found = running.run(replace(task, strategy="dummy"), ranks=3)
    assert [len(r.epochs) for r in found] == [1, 1, 1]
    assert sum(r.epochs[0].samples for r in found) == N
    assert row("dummy", [found], facts).problems == ()


def test_what_fails_is_told(made, tmp_path):
    task, facts = made
    found = running.run(replace(task, path=tmp_path / "none.h5"), ranks=2)
    assert isinstance(found, Failure)
    assert "none.h5" in found.reason
    told = row("h5py", [found], facts)
    assert told.measures == {}
    assert told.problems[0].startswith("failed: rank")


def script(tmp_path, text):
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_crash_and_a_hang_are_told(made, tmp_path, monkeypatch):
    task, _ = made
    monkeypatch.setattr(running.sys, "executable", script(tmp_path, "echo boom >&2; exit 3"))
    assert running.run(task).reason == "ended with status 3: boom"
    monkeypatch.setattr(running.sys, "executable", script(tmp_path, "kill -9 $$"))
    assert running.run(task).reason == "ended by signal 9"
    hang = f"sleep 100 & echo $! > {tmp_path}/pid; wait"
    monkeypatch.setattr(running.sys, "executable", script(tmp_path, hang))
    assert "took too long" in running.run(task, timeout=0.5).reason
    pid = (tmp_path / "pid").read_text().strip()
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists():
            break
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()  # nor is anything left that it started


# --- the table and the limit --------------------------------------------------------------------


def test_the_table_is_true():
    for name, entry in STRATEGIES.items():
        if entry.missing:
            continue
        assert issubclass(entry.load(), Strategy), name
    for names in SETS.values():
        assert set(names) <= set(STRATEGIES)
    with pytest.raises(DsprepError, match="not a strategy"):
        find("nosuch")


def test_shares_of_the_limit(made):
    task, facts = made
    one = measured(Plain, task, facts)
    rows = against_limit([replace(one, name="pread-limit"), one, replace(one, measures={})])
    assert rows[0].value("limit_percent") == pytest.approx(100)
    assert rows[1].value("limit_percent") == pytest.approx(100)
    assert rows[2].value("limit_percent") is None
