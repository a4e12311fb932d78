"""At most n readers at a time, whoever comes, goes or dies."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support import MPIEXEC, dataset
from test_node import COUNT, SCHEMA, bits

import dsprep
from dsprep.reader.node import job_key
from dsprep.reader.node.tokens import Local, Stagger
from dsprep.reader.node.wire import address


@pytest.fixture
def key():
    return f"{os.getpid()}-{time.monotonic_ns()}"


@pytest.fixture(autouse=True)
def nothing_left(key):
    yield
    names = [address("token", key, i)[1:] for i in range(5)]
    used = Path("/proc/net/unix").read_text()
    assert not [n for n in names if n in used]


def never():
    return False


def overlap(spans: list[tuple[float, float]]) -> int:
    """How many spans there are at a time at most."""
    changes = sorted([(a, 1) for a, _ in spans] + [(b, -1) for _, b in spans])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


# --- in threads of one process, each a reader of its own -------------------------------------


class Readers:
    """Threads that hold a token now and then, and note when."""

    def __init__(self, key: str, count: int) -> None:
        self.key, self.count = key, count
        self.held: list[tuple[float, float, int]] = []
        self.threads: list[threading.Thread] = []

    def start(self, rank: int, times: int, seconds: float = 0.002, late: float = 0.0) -> None:
        def run() -> None:
            time.sleep(late)
            stagger = Stagger(Local(self.key, self.count), 1)
            for _ in range(times):
                with stagger(never):
                    begin = time.monotonic()
                    time.sleep(seconds)
                    self.held.append((begin, time.monotonic(), rank))

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()

    def join(self) -> None:
        for thread in self.threads:
            thread.join(600)
            assert not thread.is_alive()


@pytest.mark.parametrize(("readers", "count"), [(4, 1), (5, 2), (3, 5)])
def test_at_most_n_at_a_time(readers, count, key):
    these = Readers(key, count)
    for rank in range(readers):
        these.start(rank, 5 + rank % 3, late=0.01 * (rank % 2))
    these.join()
    assert len(these.held) == sum(5 + rank % 3 for rank in range(readers))
    assert overlap([h[:2] for h in these.held]) <= count


def test_nobody_waits_for_one_that_does_not_read(key):
    idle = Stagger(Local(key, 1), 1)
    with idle(never):
        pass
    these = Readers(key, 1)
    these.start(1, 20, 0.0)
    these.join()
    these = Readers(f"{key}, numbers alike", 2)
    for _ in range(4):
        these.start(0, 2, 0.1)
    these.join()
    assert overlap([h[:2] for h in these.held]) == 2  # the other token is not left unused


def test_threads_of_a_reader_share_a_token(key):
    stagger, other = Stagger(Local(key, 1), 2), Stagger(Local(key, 1), 1)
    both = threading.Barrier(2)
    done = []

    def read() -> None:
        with stagger(never):
            both.wait(600)
        done.append(1)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert len(done) == 2
    spans = []

    def again() -> None:
        for _ in range(20):
            with stagger(never):
                spans.append(time.monotonic())
                time.sleep(0.002)

    threads = [threading.Thread(target=again) for _ in range(2)]
    for thread in threads:
        thread.start()
    with other(never):  # they do not keep it for ever
        at = time.monotonic()
    for thread in threads:
        thread.join(600)
    assert at < spans[-1]


# --- in processes ----------------------------------------------------------------------------

HOLD = """
import json, sys, time
from dsprep.reader.node.tokens import Local, Stagger
key, count, rank, times, seconds = json.loads(sys.argv[1])
stagger = Stagger(Local(key, count), 1)
for _ in range(times):
    with stagger(lambda: False):
        begin = time.monotonic()
        print("in", flush=True)
        time.sleep(seconds)
        end = time.monotonic()
    print(json.dumps([begin, end]), flush=True)
"""


@contextlib.contextmanager
def holding(*configs):
    started = []
    try:
        for config in configs:
            command = [sys.executable, "-c", HOLD, json.dumps(config)]
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def spans(process: subprocess.Popen) -> list[tuple[float, float]]:
    text, _ = process.communicate(timeout=600)
    return [tuple(json.loads(t)) for t in text.splitlines() if t.startswith("[")]


def test_a_token_of_one_that_is_killed_comes_back(key):
    with holding((key, 1, 0, 1, 3600)) as (killed,):
        assert killed.stdout.readline() == "in\n"
        with holding(*[(key, 1, rank, 3, 0.01) for rank in (1, 2)]) as others:
            time.sleep(0.3)
            os.kill(killed.pid, signal.SIGKILL)
            began = time.monotonic()
            found = [spans(p) for p in others]
            assert [len(f) for f in found] == [3, 3]
            assert min(f[0][0] for f in found) >= began
            assert overlap([s for f in found for s in f]) == 1


def test_the_turn_of_one_that_is_killed_comes_back(key):
    stagger = Stagger(Local(key, 1), 1)
    with stagger(never), holding((key, 1, 1, 1, 0), (key, 1, 2, 1, 0)) as (killed, other):
        while address("token", key, 0)[1:] not in Path("/proc/net/unix").read_text():
            time.sleep(0.01)  # one of them has its turn
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        stagger._tokens.release(stagger._token)
        assert len(spans(other)) == 1


def test_a_fork_does_not_keep_a_token(key):
    local = Local(key, 1)
    token = local.take(1)
    pid = os.fork()
    if not pid:
        time.sleep(3600)
        os._exit(0)
    try:
        assert local.take(1) is None
        local.release(token)
        with Stagger(local, 1)(never):
            pass
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# --- Readers ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return dataset(tmp_path_factory.mktemp("tokens"), "hdf5", SCHEMA, COUNT)[0]


@pytest.mark.parametrize("threads", [1, 3])
def test_readers(threads, data, key, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", key)
    options = {"batch_size": 16, "buffer_size": 20, "world_size": 3, "epochs": 2}
    more = {"stagger": 1, "io_threads": threads}
    loops = [iter(dsprep.Reader(data, rank=r, **options, **more)) for r in range(3)]
    alone = [list(dsprep.Reader(data, rank=r, **options)) for r in range(3)]
    for expected in zip(*alone, strict=True):
        for loop, batch in zip(loops, expected, strict=True):
            assert bits(next(loop)) == bits(batch)


def test_a_reader_ends_while_it_waits(data, key, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", key)
    local = Local(job_key(), 1)
    token = local.take(1)
    reader = dsprep.Reader(data, 16, rank=1, world_size=2, stagger=1)
    batches = iter(reader)
    batches.close()
    reader.close()
    local.release(token)


MPI = """
import sys, time
from mpi4py import MPI
import numpy as np
import dsprep
comm = MPI.COMM_WORLD
rank, size, count = comm.rank, comm.size, int(sys.argv[2])
from dsprep.reader.node.tokens import Stagger
from dsprep.reader.node.tokens_mpi import board
from dsprep.reader.memory import Stopped
from dsprep.reader.node import job_key

stagger = Stagger(board(comm, count), 1)
if rank == 1:
    time.sleep(0.1)
held = []
for _ in range(5 + 5 * rank):
    with stagger(lambda: False):
        begin = time.monotonic()
        time.sleep(0.002)
        held.append((begin, time.monotonic()))
held = [h for some in comm.allgather(held) for h in some]
changes = sorted([(a, 1) for a, _ in held] + [(b, -1) for _, b in held])
assert max(np.cumsum([c for _, c in changes])) <= count
if rank == 0:
    with stagger(lambda: False):
        comm.barrier()
        time.sleep(0.1)
else:
    comm.barrier()
    end = time.monotonic() + 0.05
    try:
        with stagger(lambda: time.monotonic() > end):
            assert count > 1
    except Stopped:
        assert count < 3
comm.barrier()

with dsprep.Reader(sys.argv[1], 16, buffer_size=20, stagger=count, comm=comm) as reader:
    assert reader.rank_info.world_size == size
    got = sum(len(b["y"]) for b in reader)
assert comm.allreduce(got) == 203
late = dsprep.Reader(sys.argv[1], 16, stagger=count, comm=comm)
if rank:
    time.sleep(0.3)
    assert sum(1 for _ in late) == len(late)
print("done", flush=True)
"""


@pytest.mark.skipif(
    MPIEXEC is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpiexec and mpi4py",
)
@pytest.mark.parametrize("count", [1, 2])
def test_mpi(count, data):
    command = [MPIEXEC, "-n", "3", sys.executable, "-m", "mpi4py", "-c", MPI, data, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.replace("\n", "") == "done" * 3
