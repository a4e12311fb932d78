"""What a hostile or clumsy user does to ``dsprep bench``, and what it does then."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import h5py
import numpy as np
import pytest

from dsprep.bench import mpi, running, sums
from dsprep.bench.counters import Counters
from dsprep.bench.evidence import Seen
from dsprep.bench.reading import Settings, bench_read, plan_read
from dsprep.bench.summary import Facts, row
from dsprep.bench.sums import Sums
from dsprep.bench.task import Epoch, Failure, Result
from dsprep.cli.bench.output import check_targets
from dsprep.errors import UsageError
from dsprep.source.dataset import open_dataset
from dsprep.verbs.provenance import provenance

MIB = 1 << 20


def result(device: int, opening: int = 0) -> Result:
    """Return what a rank told that read so many bytes from the device."""
    epoch = Epoch(
        samples=10,
        seconds=1.0,
        waits=(0.5, 0.5),
        computing=0.0,
        skew=0.0,
        counters=Counters(device=device),
        light=0,
        seen=Seen(held=0.0, counts=True, opening=opening),
    )
    return Result(epochs=(epoch,), peak_rss=MIB)


def facts(stored: int | None = None) -> Facts:
    return Facts(expected=Sums(10), payload=8 * MIB, cold=True, computes=False, stored=stored)


def test_compressed_data_are_cold_when_all_their_bytes_were_fetched():
    assert not row("h5py", [[result(2 * MIB)]], facts(2 * MIB)).problems
    assert row("h5py", [[result(MIB)]], facts(2 * MIB)).problems
    assert row("h5py", [[result(2 * MIB)]], facts()).problems
    assert row("h5py", [[result(2 * MIB)]], facts(100 * MIB)).problems


def test_what_opening_brought_in_is_told():
    (why,) = row("h5py", [[result(6 * MIB, 2 * MIB)]], facts()).problems
    assert "opening the files brought in 25%" in why
    (why,) = row("h5py", [[result(6 * MIB, MIB // 2)]], facts()).problems
    assert "75% of the bytes came from a device" in why


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data" / "a.h5"
    path.parent.mkdir()
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file["x"] = rng.random((200, 500), np.float32)
        file["y"] = np.arange(200)
    return path


def test_a_compressed_file_is_read_cold(tmp_path):
    path = tmp_path / "gz.h5"
    values = np.random.default_rng(0).integers(0, 4, (128, 4000)).astype(np.float64)
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=values, chunks=(8, 4000), compression="gzip")
    report = bench_read(plan_read([path], ["h5py"], Settings(repeat=1, threads=1)))
    (found,) = (r for r in report.rows if r.name == "h5py")
    if not any("page cache still held" in p for p in found.problems):  # tmpfs
        assert not any("0%" in p or "1%" in p for p in found.problems)


@pytest.mark.parametrize(
    "wrong",
    [
        {"timeout": float("inf")},
        {"timeout": float("nan")},
        {"timeout": 1e300},
        {"ranks": 10**9},
        {"threads": 10**8},
        {"batch_size": 10**30},
        {"compute": "gemm:\uff14"},
        {"compute": "\u0663ms"},
    ],
)
def test_nonsense_is_refused(data, wrong):
    with pytest.raises(UsageError):
        plan_read([data], ["h5py"], Settings(**wrong))


def test_a_sweep_up_to_nonsense_is_refused(data):
    with pytest.raises(UsageError):
        plan_read([data], ["h5py"], sweep="threads=1..999999999")


def test_a_process_ends_with_the_one_that_started_it():
    child = "from dsprep.bench.child import *; import time; end_with_parent(); "
    child += "print('ready', flush=True); time.sleep(60)"
    parent = f"""
import subprocess, sys, time
p = subprocess.Popen([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE)
p.stdout.readline(); print(p.pid, flush=True); time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        pid = int(process.stdout.readline())
        watched = os.pidfd_open(pid)
        process.kill()
        try:
            assert running.select.select([watched], [], [], 10)[0]
        finally:
            os.close(watched)


def test_a_rank_that_ends_at_the_gate_is_told(tmp_path):
    """It said that it is there, and was killed before the answer: no broken pipe for the user."""
    ours, theirs = Pipe()
    process = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    process.wait()
    with (tmp_path / "errors").open("w+b") as errors, ours:
        rank = running.Rank(0, process, ours, errors)
        theirs.send(None)
        theirs.close()
        deadline = time.monotonic() + 5
        assert running.follow([rank], deadline)
        running.open_gate([rank])
        assert not running.follow([rank], deadline)
    assert rank.outcome == Failure("ended by signal 9")


def test_a_batch_without_samples_adds_nothing(data):
    with open_dataset(data) as source:
        batch, schema = source.read(0, 0), source.schema
    assert sums.lightly(schema)(batch) == 0
    assert sums.full(batch, schema) == 0


def test_fewer_samples_than_ranks(tmp_path):
    with h5py.File(tmp_path / "one.h5", "w") as file:
        file["x"] = np.random.default_rng(0).random((1, 1000))
    settings = Settings(repeat=1, threads=1, ranks=2, cold=False)
    report = bench_read(plan_read([tmp_path / "one.h5"], ["group", "dsprep"], settings))
    assert not [r for r in report.rows if r.problems]


@pytest.mark.parametrize("beside", [False, True])
def test_fields_without_places_are_read_from_a_copy(tmp_path, beside):
    path = tmp_path / "part.h5"
    with h5py.File(path, "w") as file:
        file["y"] = np.arange(20)
        ragged = file.create_dataset("x", (20,), h5py.vlen_dtype(np.float32))
        for i in range(20):
            ragged[i] = np.arange(i + 1, dtype=np.float32)
    if beside:
        provenance([path])
    work = plan_read([path], ["provenance"], Settings(repeat=1, threads=1, cold=False))
    assert any("not every field can be located" in n for n in work.notes)
    assert not [r for r in bench_read(work).rows if r.problems]


def test_only_json_is_printed():
    check_targets(json=Path("-"))
    for option in ("html", "csv"):
        with pytest.raises(UsageError, match="needs a file"):
            check_targets(**{option: Path("-")})


def test_bytes_are_counted_where_sizes_can_only_be_guessed(tmp_path):
    path = tmp_path / "ragged.h5"
    with h5py.File(path, "w") as file:
        ragged = file.create_dataset("x", (60,), h5py.vlen_dtype(np.float32))
        for i in range(60):
            ragged[i] = np.zeros(1 if i < 59 else 5000, np.float32)
        file["y"] = np.arange(60, dtype=np.int64)
    work = plan_read([path], ["h5py"], Settings(repeat=1, threads=1, cold=False))
    guessed = [replace(plan, payload=60 * 1000) for plan in work.plans]
    report = bench_read(replace(work, plans=tuple(guessed)))
    assert report.dataset["payload_nbytes"] == 4 * (59 + 5000) + 60 * 8
    with open_dataset(path) as source:
        assert sums.of_source(source, 60).nbytes == 4 * (59 + 5000) + 60 * 8


class TwoRanks:
    """What the first of two MPI processes sees, the other of which has done its part."""

    def __init__(self):
        self.told = []

    def Get_rank(self):
        return 0

    def Get_size(self):
        return 2

    def Iallgather(self, mine, found):
        self.told.append(mine[0])
        found[0], found[1] = mine[0], 1
        return self

    def Test(self):
        return True


def test_ranks_do_not_wait_for_one_that_cannot_start(monkeypatch):
    def start(task):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(mpi, "start", start)
    monkeypatch.setattr(mpi, "replace", lambda task, **_: task)
    comm = TwoRanks()
    assert "Too many open files" in mpi._measure(comm, None, 5.0).reason
    assert comm.told == [mpi._FAILED]


def test_ranks_do_not_wait_for_one_that_ends_at_the_gate(tmp_path, monkeypatch):
    class Met(TwoRanks):
        def Iallgather(self, mine, found):
            super().Iallgather(mine, found)
            found[1] = mine[0]
            return self

    ours, theirs = Pipe()
    process = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    process.wait()
    monkeypatch.setattr(mpi, "replace", lambda task, **_: task)
    with (tmp_path / "errors").open("w+b") as errors, ours:
        rank = running.Rank(0, process, ours, errors)
        monkeypatch.setattr(mpi, "start", lambda task: rank)
        theirs.send(None)
        theirs.close()
        comm = Met()
        assert mpi._measure(comm, None, 5.0) == Failure("ended by signal 9")
    assert comm.told == [mpi._WAITS, mpi._FAILED]
