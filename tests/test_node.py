"""Ranks of a node whose samples another process reads get what they would read themselves."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import dataset, epochs, fails, raw, schemas
from test_mini_epochs import Comm, Scripted

import dsprep
from dsprep.core.schema import Field, Ragged, Schema
from dsprep.errors import ReadError, UsageError
from dsprep.reader import node
from dsprep.reader.node import client as node_client
from dsprep.reader.node import root as node_root
from dsprep.reader.ranks import RankInfo

COUNT = 203
SCHEMA = Schema((Field("x", np.dtype("<f4"), (40, 7)), Field("y", np.dtype("<i8"))))
MIXED = dict(schemas())["mixed"]
RISING = 1, 1, 2, 2, 3, 3


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    monkeypatch.setattr(node_client, "WAIT_SECONDS", 600)
    before = set(threading.enumerate())
    yield
    gc.collect()
    assert not [t for t in set(threading.enumerate()) - before if t.is_alive()]
    assert not node_root._services


@pytest.fixture
def impatient(limits, monkeypatch):
    """Who is not read for says so at once, and who cannot read for others."""
    monkeypatch.setattr(node_client, "WAIT_SECONDS", 0)
    monkeypatch.setattr(node_root, "BIND_SECONDS", 0.1)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return dataset(tmp_path_factory.mktemp("node"), "hdf5", SCHEMA, COUNT)[0]


class Ranks:
    """Readers of a node, all in this process."""

    def __init__(self, monkeypatch, path, size=4, **options):
        self.env, self.path, self.size = monkeypatch, path, size
        self.options = {"batch_size": 16, "buffer_size": 50, "seed": 5, **options}
        self.key = f"{os.getpid()}-{time.monotonic_ns()}"
        self.readers: dict[int, dsprep.Reader] = {}

    def make(self, rank, k=1, **more):
        self.env.setenv("LOCAL_RANK", str(rank))
        self.env.setenv("LOCAL_WORLD_SIZE", str(self.size))
        place = {"rank": rank, "world_size": self.size}
        self.env.setenv("MASTER_PORT", self.key)
        options = {**self.options, "readers_per_node": k, **more}
        reader = self.readers[rank] = dsprep.Reader(self.path, **options, **place)
        return reader

    def alone(self, rank, **more):
        options = {**self.options, **more}
        return dsprep.Reader(self.path, rank=rank, world_size=self.size, **options)

    def close(self):
        for reader in reversed(self.readers.values()):
            reader.close()


@pytest.fixture
def ranks(monkeypatch, data):
    made = []

    def make(path=data, **options):
        made.append(Ranks(monkeypatch, path, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def bits(batch):
    def of(column):
        if isinstance(column, Ragged):
            return raw(column.values), column.offsets.tobytes(), column.values.shape
        return raw(column), column.dtype, column.shape

    return {name: of(column) for name, column in batch.items()}


# --- the same batches ------------------------------------------------------------------------


def drawn(sample, out, rng):
    out["drawn"][:] = rng.random(2)


EACH = dsprep.each(drawn, {"drawn": ("f8", (2,))})


@pytest.mark.parametrize(
    ("k", "options"),
    [
        (1, {}),
        (2, {"remainder": "drop"}),
        (3, {"remainder": "pad", "shuffle": "global"}),
        (2, {"transform": EACH}),
        (1, {"path": MIXED}),
        (1, {"mini_epochs": 3, "repeats": RISING, "buffer_size": 20, "batch_size": 8}),
    ],
)
def test_the_same_batches(k, options, ranks, tmp_path):
    if "path" in options:
        options = {"path": dataset(tmp_path, "tfrecord", options["path"], 61)[0]}
    node_ranks = ranks(**options, epochs=2)
    for rank in range(4):
        node_ranks.make(rank, k)
    for rank in range(4):
        reader = node_ranks.readers[rank]
        with node_ranks.alone(rank) as alone:
            expected = [bits(b) for b in epochs(alone, 2)]
            found = [bits(b) for b in epochs(reader, 2)]
            assert found == expected
            counted = [(s.samples, s.batches, s.units, s.reads, s.nbytes) for s in reader.stats[:2]]
            assert counted == [
                (s.samples, s.batches, s.units, s.reads, s.nbytes) for s in alone.stats[:2]
            ]
        assert isinstance(reader._node, node_client.Client) == (rank >= k)
        assert reader.epoch == 2


def test_batches_stay_while_they_are_held_and_memory_is_used_again(ranks):
    node_ranks = ranks(size=2, epochs=3, batch_size=5)
    node_ranks.make(0)
    with node_ranks.alone(1) as alone:
        expected = [bits(b) for b in epochs(alone, 3)]
    reader = node_ranks.make(1)
    for batch in reader:
        del batch
    assert len(reader._running._source.memories) == 1
    assert Path("/proc/self/maps").read_text().count("memfd:dsprep") == 2  # here and there
    reader.set_epoch(0)
    kept = list(epochs(reader, 3))  # far more than there are buffers
    assert [bits(b) for b in kept] == expected
    node_ranks.close()
    gc.collect()
    assert [bits(b) for b in kept] == expected
    kept[0]["x"][:] = 1  # theirs to change
    del kept
    gc.collect()
    assert "memfd:dsprep" not in Path("/proc/self/maps").read_text()


def test_resume_at_any_step(ranks):
    node_ranks = ranks(size=2, epochs=2)
    node_ranks.make(0)
    reader = node_ranks.make(1)
    with node_ranks.alone(1) as alone:
        expected = [bits(b) for b in epochs(alone, 2)]
    for stop in (0, 1, 3, len(expected) // 2 + 1):
        found = []
        with node_ranks.make(1) as first:
            batches = epochs(first)
            found += [bits(next(batches)) for _ in range(stop)]
            state = json.loads(json.dumps(first.state_dict()))
            batches.close()
        with node_ranks.make(1, epochs=1) as second:
            second.load_state_dict(state)
            found += [bits(b) for b in second]
            found += [bits(b) for b in second] if second.epoch < 2 else []
        assert found == expected
    with node_ranks.alone(1) as alone:  # the state is that of any other reader
        alone.load_state_dict(state)
        assert bits(next(iter(alone))) == expected[stop]
    reader.close()


def test_repeats_that_adapt(ranks):
    """The process that reads for a rank learns from it which pass comes."""
    node_ranks = ranks(size=2, mini_epochs=3, comm=Comm())
    readers = [node_ranks.make(rank, repeats=Scripted(2, 1, 1)) for rank in range(2)]
    assert isinstance(readers[1]._node, node_client.Client)
    found, over = [], []
    for _ in range(4):
        found += [[bits(b) for b in reader] for reader in readers]
        over.append([reader.report(loss=1.0) for reader in readers])
    assert over == [[False] * 2, [True] * 2, [True] * 2, [True] * 2]
    with node_ranks.alone(0, repeats=(2, 1)) as a, node_ranks.alone(1, repeats=(2, 1)) as b:
        assert found == [[bits(batch) for batch in reader] for _ in range(4) for reader in (a, b)]


def test_loops_end_in_any_way(ranks):
    node_ranks = ranks(size=2)
    node_ranks.make(0)
    reader = node_ranks.make(1)
    for end in range(24):  # more than messages fit into a queue
        batches = iter(reader)
        if end % 2:
            next(batches)
        if end % 3:
            batches.close()
        del batches
        reader.set_epoch(0)
    with contextlib.suppress(KeyError):
        for _ in reader:
            raise KeyError
    gc.collect()
    reader.set_epoch(0)
    with node_ranks.alone(1) as alone:
        assert [bits(b) for b in reader] == [bits(b) for b in alone]


# --- who reads for whom ----------------------------------------------------------------------


def test_several_readers_find_their_own(ranks, data, tmp_path):
    other = dataset(tmp_path, "hdf5", MIXED, 50)[0]
    one, two, three = ranks(size=2), ranks(size=2, batch_size=3), ranks(other, size=2)
    two.key = three.key = one.key
    for each in (one, two, three):
        each.make(0)
    for each in (three, two, one):
        reader = each.make(1)
        with each.alone(1) as alone:
            assert [bits(b) for b in reader] == [bits(b) for b in alone]


def test_a_rank_waits_for_its_root(ranks):
    node_ranks = ranks(size=2)
    reader = node_ranks.make(1)
    found = []
    thread = threading.Thread(target=lambda: found.extend(map(bits, reader)))
    thread.start()
    time.sleep(0.1)
    node_ranks.make(0)
    thread.join(600)
    with node_ranks.alone(1) as alone:
        assert found == [bits(b) for b in alone]


def test_a_missing_root_is_named(ranks, impatient):
    node_ranks = ranks(size=4)
    reader = node_ranks.make(3, k=2)
    with pytest.raises(ReadError, match="local rank 1 of this node does not read for rank 3"):
        next(iter(reader))
    node_ranks.make(1, k=2)
    assert len(list(reader)) == len(reader)


@pytest.mark.parametrize("other", [{"seed": 6}, {"batch_size": 8}, {"repeats": 2}])
def test_another_order_is_refused(other, ranks, impatient):
    node_ranks = ranks(size=2, mini_epochs=3, repeats=RISING, buffer_size=20)
    node_ranks.make(0, **other)
    fails(lambda: next(iter(node_ranks.make(1))), ReadError, "no process with the same Reader")


def test_one_name_is_one_process(ranks, impatient, monkeypatch):
    node_ranks, names = ranks(size=2), []
    address = node.wire.address
    monkeypatch.setattr(node.wire, "address", lambda *words: names.append(words) or address(*words))
    node_ranks.make(0).close()
    with contextlib.closing(node.wire.new_socket()) as sock:
        sock.bind(address(*names[0]))
        fails(lambda: node_ranks.make(0), UsageError, "another process reads for this node")
    node_ranks.make(0)


def test_where_all_read_nobody_serves(ranks):
    node_ranks = ranks(size=3)
    assert node_ranks.make(1, k=3)._node is None
    assert node_ranks.make(1, k=7)._node is None
    assert node_ranks.make(1, k=2)._node is None  # nobody else: ranks 0 and 2 are the other's


def test_the_rank_within_the_node_is_needed(data, monkeypatch):
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        "dsprep.reader.loader.detect", lambda *_: RankInfo(1, 2, None, None, "a test")
    )
    fails(lambda: dsprep.Reader(data, 4, readers_per_node=1), UsageError, "LOCAL_RANK")


def test_jobs_are_told_from_each_other(monkeypatch):
    for name in node.JOB:
        monkeypatch.delenv(name, raising=False)
    keys = {node.job_key()}
    for name, value in [("SLURM_JOB_ID", 1), ("SLURM_STEP_ID", 1), ("MASTER_PORT", 7)]:
        monkeypatch.setenv(name, str(value))
        keys.add(node.job_key())
        assert (str(os.getppid()) in node.job_key()) == (name == "SLURM_JOB_ID")
    assert len(keys) == 4


# --- ends ------------------------------------------------------------------------------------


def test_ranks_go_on_alone_when_the_reader_is_closed(ranks):
    node_ranks = ranks(size=3, epochs=2)
    root = node_ranks.make(0)
    first, second = node_ranks.make(1), node_ranks.make(2)
    with node_ranks.alone(1) as alone, node_ranks.alone(2) as other:
        expected = [bits(b) for b in epochs(alone, 2)]
        others = [bits(b) for b in epochs(other, 2)]
    batches = epochs(first, 2)
    found = [bits(next(batches)) for _ in range(3)]
    some = iter(second)
    bits(next(some))
    some.close()  # between loops
    second.set_epoch(0)
    root.close()
    assert found + [bits(b) for b in batches] == expected
    assert [bits(b) for b in epochs(second, 2)] == others
    assert second.epoch == 2


def test_a_reader_that_is_forgotten_ends(ranks):
    node_ranks = ranks(size=2)
    node_ranks.make(0)
    batches = iter(node_ranks.make(1))
    next(batches)
    del node_ranks.readers[0]
    gc.collect()
    assert not node_root._services
    assert len(list(batches)) == len(node_ranks.readers[1]) - 1
    del batches, node_ranks.readers[1]


def test_errors_of_the_other_process_come_here(ranks, tmp_path):
    path, _ = dataset(tmp_path, "hdf5", SCHEMA, COUNT)
    node_ranks = ranks(path, size=2)
    node_ranks.make(0)
    reader = node_ranks.make(1, epochs=5)
    batches = epochs(reader)
    next(batches)
    with path.open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(ReadError) as caught:
        for _ in batches:
            pass
    assert caught.value.sample >= 0
    assert reader._running.closed


# --- processes -------------------------------------------------------------------------------

RANK = """
import hashlib, json, os, sys, time
import dsprep
from dsprep.reader.node import client as node_client
node_client.WAIT_SECONDS = 600
config = json.loads(sys.argv[1])
rank, pause = config["rank"], config["pause"]
def digest(batch):
    return hashlib.sha1(b"".join(c.tobytes() for c in batch.values())).hexdigest()
reader = dsprep.Reader(
    config["path"], 16, buffer_size=50, seed=5, epochs=2, rank=rank, world_size=4,
    readers_per_node=config["k"],
)
try:
    for step, batch in enumerate(batch for _ in range(2) for batch in reader):
        print(digest(batch), flush=True)
        if step == pause:
            sys.stdin.readline()
    print("done", flush=True)
    if rank < config["k"]:
        sys.stdin.readline()
except dsprep.DsprepError as error:
    print(type(error).__name__, error, flush=True)
    sys.stdin.readline()
"""


@contextlib.contextmanager
def processes(path: Path, k: int, pause: int, count: int = 4) -> Iterator[list]:
    key = f"{os.getpid()}-{time.monotonic_ns()}"
    started = []
    try:
        for rank in range(count):
            config = {"path": str(path), "rank": rank, "k": k, "pause": pause}
            local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "4", "MASTER_PORT": key}
            env = {**os.environ, **local}
            command = [sys.executable, "-c", RANK, json.dumps(config)]
            pipe = subprocess.PIPE
            started.append(
                subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env)
            )
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def line(process: subprocess.Popen) -> str:
    return process.stdout.readline().strip()


def lines(process: subprocess.Popen) -> list[str]:
    """What it prints until it is done."""
    found = []
    while (text := line(process)) and len(text) == 40:
        found.append(text)
    return [*found, text]


def expected(path: Path, rank: int) -> list[str]:
    import hashlib

    with dsprep.Reader(
        path, 16, buffer_size=50, seed=5, epochs=2, rank=rank, world_size=4
    ) as reader:
        return [
            *(
                hashlib.sha1(b"".join(c.tobytes() for c in b.values())).hexdigest()
                for b in epochs(reader, 2)
            ),
            "done",
        ]


def go_on(process: subprocess.Popen) -> None:
    process.stdin.write("\n")
    process.stdin.flush()


def test_a_process_that_exits_leaves_the_others_to_themselves(data):
    """And it hands out the same until then."""
    with processes(data, 1, pause=2, count=3) as started:
        first = [[line(p) for _ in range(3)] for p in started]
        go_on(started[0])
        assert first[0] + lines(started[0]) == expected(data, 0)
        _, error = started[0].communicate("\n", timeout=600)  # the interpreter ends
        assert not error
        for rank in (1, 2):
            go_on(started[rank])
            assert first[rank] + lines(started[rank]) == expected(data, rank)
            _, error = started[rank].communicate("\n", timeout=600)
            assert not error


def threads_of(process: subprocess.Popen) -> int:
    return len(list(Path(f"/proc/{process.pid}/task").iterdir()))


def test_killed_processes(data):
    """First a rank that is read for, then the one that reads."""
    with processes(data, 1, pause=1) as started:
        for process in started:
            assert len(line(process)) == len(line(process)) == 40
        before = threads_of(started[0])
        os.kill(started[2].pid, signal.SIGKILL)
        while threads_of(started[0]) >= before:  # its pipeline ends
            time.sleep(0.02)
        go_on(started[1])
        assert lines(started[1])[-1] == "done"
        os.kill(started[0].pid, signal.SIGKILL)
        go_on(started[3])
        told = lines(started[3])[-1]
        assert told.startswith("ReadError local rank 0 of this node, which reads for rank 3, ended")
