"""Whoever does the work, the result has the same bytes, and nothing that is killed spoils it."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import executor_job
import h5py
import numpy as np
import pytest
from support import (
    MPIEXEC,
    Answer,
    MemorySource,
    assert_same_batch,
    cli,
    fails,
    random_batch,
    written,
)

import dsprep
from dsprep import errors, executors
from dsprep.core.schema import Field, Schema
from dsprep.errors import AmbiguousError, DsprepError, ExecutorError, ReadError, UsageError
from dsprep.executors import processes
from dsprep.executors.mpi import launched
from dsprep.sidecar.spec import sidecar_path
from dsprep.verbs import verify
from dsprep.writing import create_sidecar, plan, shards, shuffle, tasks

SCRIPT = Path(executor_job.__file__)
COUNT = 300
FIXED = Schema((Field("x", np.dtype("<f4"), (6, 5)), Field("y", np.dtype("<i8"))))
MIXED = Schema((*FIXED, Field("r", np.dtype("<i2"), (None, 3)), Field.opaque("b")))
HAVE = {
    "processes": True,
    "mpi": importlib.util.find_spec("mpi4py") is not None and MPIEXEC is not None,
    "dask": importlib.util.find_spec("distributed") is not None,
}
needs = {
    name: pytest.mark.skipif(not there, reason=f"needs dsprep[{name}]")
    for name, there in HAVE.items()
}
POOLS = [pytest.param(name, marks=needs[name]) for name in ("processes", "dask")]


def mpiexec(*words, ranks=3):
    """Run Python in ranks, which are killed together if they take too long."""
    child = subprocess.Popen(
        [MPIEXEC, "-n", str(ranks), sys.executable, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = child.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGTERM)  # mpiexec ends its ranks
        child.wait(20)
        raise
    return subprocess.CompletedProcess(words, child.returncode, out, err)


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    """Sources with and without sidecars, of one file and of several, and damaged ones."""
    folder = tmp_path_factory.mktemp("origin")
    for name, schema, suffix in (("fixed", FIXED, ".h5"), ("mixed", MIXED, ".tfrecord")):
        one = written(folder / f"{name}{suffix}", schema, COUNT)
        for files in ("files", "wrong") if name == "fixed" else ("files",):
            target = folder / f"{name}-{files}"
            to = "hdf5" if name == "fixed" else "tfrecord"
            dsprep.convert(one, target, to=to, shard_size=110)
            if name == "fixed":
                sidecar_path(target).unlink()  # read by the library
    with h5py.File(executor_job.files(folder / "fixed-wrong")[1], "r+") as file:
        for i in (3, 50, 60, 70):
            file["y"][i] += 1
    options = {"shard_size": 110, "compress": "gzip:1", "chunk": 10}
    dsprep.convert(folder / "fixed.h5", folder / "damaged", to="hdf5", **options)
    sidecar_path(folder / "damaged").unlink()
    path = executor_job.files(folder / "damaged")[1]
    with h5py.File(path) as file:
        place = file["x"].id.get_chunk_info_by_coord((40, 0, 0)).byte_offset
    data = bytearray(path.read_bytes())
    data[place : place + 100] = bytes(100)
    path.write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def expected(origin, tmp_path_factory):
    """What one process makes."""
    folder = tmp_path_factory.mktemp("one")
    executor_job.do_all(origin, folder, None, range(len(executor_job.CASES)))
    return executor_job.digests(folder)


@pytest.fixture(scope="module")
def pool():
    """Executors by name, each started once."""
    made = {}

    def get(name):
        if name not in made:
            context = executors.opened(name, workers=2)
            made[name] = (context, context.__enter__())
        return made[name][1]

    yield get
    for context, _ in made.values():
        context.__exit__(None, None, None)


def same(found, expected):
    assert sorted(found) == sorted(expected)
    assert [name for name in expected if found[name] != expected[name]] == []


def test_the_same_bytes(pool, origin, expected, tmp_path):
    numbers = range(len(executor_job.CASES))
    executor_job.do_all(origin, tmp_path, pool("processes"), numbers)
    same(executor_job.digests(tmp_path), expected)


def few(expected):
    """What comes of the cases that other executors do."""
    others = {f"{n}" for n in range(len(executor_job.CASES)) if n not in executor_job.FEW}
    return {name: v for name, v in expected.items() if name.partition("-")[0] not in others}


@needs["dask"]
def test_the_same_bytes_from_dask(pool, origin, expected, tmp_path):
    executor_job.do_all(origin, tmp_path, pool("dask"))
    same(executor_job.digests(tmp_path), few(expected))


@needs["mpi"]
def test_the_same_bytes_from_ranks(origin, expected, tmp_path):
    done = mpiexec(SCRIPT, "all", origin, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    same(executor_job.digests(tmp_path), few(expected))


# --- faults ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(origin, tmp_path_factory):
    """What `executor_job.killed` makes if nothing is killed."""
    folder = tmp_path_factory.mktemp("whole")
    executor_job.killed(origin, folder / "set", None)
    return executor_job.digests(folder)


def assert_whole(folder, whole):
    same(executor_job.digests(folder), whole)
    assert sorted(p.name for p in folder.iterdir()) == sorted({n.split("/")[0] for n in whole})


@needs["dask"]
def test_a_killed_dask_worker_costs_nothing(pool, origin, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "do", executor_job.killing)
    executor_job.killed(origin, tmp_path / "set", pool("dask"))
    assert_whole(tmp_path, whole)


def lose_a_process(origin, target, monkeypatch):
    """Be killed with some shards complete and some not; return how many are."""
    with monkeypatch.context() as patch, executors.opened("processes", workers=2) as some:
        patch.setattr(tasks, "do", executor_job.killing)
        with pytest.raises(
            ExecutorError, match=r"samples .* of set-.*: a worker was lost .*repeat the command"
        ):
            executor_job.killed(origin, target, some)
    assert not target.exists()
    root = target.parent / f".{target.name}.dsprep-partial"
    return len([*root.glob("shard-*.json")])


def interrupt(source, target, monkeypatch, after, **options):
    """Interrupt threads in the middle of a shard, with the position in it recorded."""
    cut = plan.pieces

    def stop(samples, nbytes):
        if samples >= after:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shards, "pieces", lambda *a, **k: cut(*a, **{**k, "target": 400}))
        patch.setattr(shards, "CHECKPOINT_NBYTES", 500)
        with pytest.raises(KeyboardInterrupt):
            dsprep.convert(source, target, workers=1, progress=stop, **options)
    state = (target.parent / ".set.dsprep-partial" / "state.json").read_text()
    assert '"writer": {' in state


@pytest.fixture
def swept():
    """Take away what MPICH leaves in memory when ranks are killed."""
    before = set(Path("/dev/shm").iterdir())
    yield
    left = set(Path("/dev/shm").glob("mpich_shm_*")) - before
    maps = ""
    for process in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            maps += process.read_text()
    for path in left:
        if str(path) not in maps:  # no test that runs at the same time has it
            path.unlink(missing_ok=True)


@pytest.mark.parametrize("where", ["tasks", "results"])
def test_an_interrupt_waits_for_nobody_who_may_be_lost(where):
    release = threading.Event()

    def tasks():
        yield from (0, 1, 2)
        if where == "tasks":
            raise KeyboardInterrupt

    def taken(pool):
        given = executors.run(pool, lambda i: i and release.wait(30), tasks())
        with contextlib.closing(given) as results:
            for _ in results:
                raise KeyboardInterrupt

    with ThreadPoolExecutor(2) as pool:
        pool.waited_for = False
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            taken(pool)
        assert time.monotonic() - began < 20  # one is still under way
        release.set()


@needs["mpi"]
def test_the_first_rank_ends_though_another_one_answers_no_more(origin, tmp_path, swept):
    words = [MPIEXEC, "-n", "3", sys.executable, SCRIPT, "stop", origin, tmp_path / "set"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(list(map(str, words)), start_new_session=True, **pipes) as job:
        try:
            end = time.monotonic() + 600
            while not (tmp_path / ".set.dsprep-partial" / "stopped").exists():
                assert job.poll() is None, job.communicate()
                assert time.monotonic() < end
                time.sleep(0.02)
            first = int((tmp_path / "first").read_text())
            os.kill(first, signal.SIGTERM)
            _, printed = job.communicate(timeout=600)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGTERM)
    # the launcher may end before it has passed on what the rank printed
    assert printed.count("dsprep: error: ended by SIGTERM; run the same command again") <= 1
    assert "Abort(143)" in printed or "ended by SIGTERM" in printed
    assert "Traceback" not in printed
    assert job.returncode


def test_threads_processes_threads_processes(pool, origin, whole, tmp_path, monkeypatch):
    source, options = origin / "mixed.tfrecord", {"to": "tfrecord", "shard_size": 30}
    interrupt(source, tmp_path / "set", monkeypatch, 50, **options)
    done = lose_a_process(origin, tmp_path / "set", monkeypatch)
    assert 0 < done < 10
    interrupt(source, tmp_path / "set", monkeypatch, 250, **options)
    report = executor_job.killed(origin, tmp_path / "set", pool("processes"))
    assert 30 * done <= report.resumed < COUNT
    assert_whole(tmp_path, whole)


@needs["mpi"]
def test_a_killed_rank(origin, whole, tmp_path, swept):
    done = mpiexec(SCRIPT, "kill", origin, tmp_path / "set")
    assert done.returncode != 0
    assert not (tmp_path / "set").exists()
    root = tmp_path / ".set.dsprep-partial"
    assert (root / "killed").exists()
    words = ("convert", origin / "mixed.tfrecord", tmp_path / "set", "--to", "tfrecord")
    done = mpiexec("-m", "dsprep", *words, "--shard-size", 30, ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("if an MPI process is lost, repeat the command") == 1
    assert_whole(tmp_path, whole)


@pytest.mark.parametrize("name", ["threads", "processes", pytest.param("mpi", marks=needs["mpi"])])
def test_damaged_data_are_told_in_one_line(name, origin, tmp_path):
    sources = executor_job.files(origin / "damaged")
    words = ["convert", *sources, tmp_path / "set", "--to", "tfrecord", "--shard-size", 30]
    if name == "mpi":
        ended = mpiexec("-m", "dsprep", *words, ranks=2)
        done = Answer(ended.returncode, ended.stdout, ended.stderr)
    else:
        more = ["--executor", name, *(["--workers", 2] if name == "processes" else [])]
        done = cli(*words, *more, code=None)
    assert done.code == 1
    (line,) = [w for w in done.err.splitlines() if not w.startswith("dsprep: note: ")]
    assert line.startswith(f"dsprep: error: {sources[1]}")
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize("to", ["zarr", "tfrecord"])  # a directory and a file
def test_two_attempts_at_a_shard(to, origin, tmp_path, monkeypatch):
    options = {"to": to, "shard_size": 100}
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    dsprep.convert(origin / "mixed.tfrecord", tmp_path / "one" / "set", **options)
    monkeypatch.setattr(tasks, "do", executor_job.twice)
    with ThreadPoolExecutor(1) as threads:
        options["executor"] = threads
        dsprep.convert(origin / "mixed.tfrecord", tmp_path / "two" / "set", **options)
    assert_whole(tmp_path / "two", executor_job.digests(tmp_path / "one"))


# --- the seam ----------------------------------------------------------------------------------


@pytest.mark.parametrize("many", [1, 100, None])
def test_processes_examine_files(many, origin, tmp_path, monkeypatch):
    """As many as asked, or, of many files, unasked."""
    made = []

    def opened(workers, scheduler):
        made.append((workers, ThreadPoolExecutor(2)))
        return made[0][1]

    monkeypatch.setattr(processes, "opened", opened)
    monkeypatch.setattr(create_sidecar, "PROCESS_FILES", many or 100)
    more = () if many else ("--executor", "processes", "--workers", 3)
    files = executor_job.files(origin / "fixed-files")
    cli("provenance", *files, "--out", tmp_path / "s.json", *more)
    ((workers, pool),) = made
    assert bool(pool._threads) == (many != 100)
    assert many or workers == 3


def test_few_tasks_are_under_way_and_the_first_error_is_raised():
    under_way = most = begun = 0
    lock = threading.Lock()

    def work(task):
        nonlocal under_way, most
        time.sleep(0.001 * (task % 3))
        with lock:
            under_way -= 1
        if task == 30:
            raise ValueError(task)
        return -task

    def tasks():
        nonlocal under_way, most, begun
        for task in range(100):
            begun += 1
            with lock:
                under_way += 1
                most = max(most, under_way)
            yield task

    found = []
    with ThreadPoolExecutor(3) as pool, pytest.raises(ValueError, match="30"):
        found.extend(executors.run(pool, work, tasks(), lambda: 5))
    assert all(a == -b for a, b in found)
    assert most <= 5
    assert begun < 40
    with ThreadPoolExecutor(3) as pool:
        assert sorted(executors.run(pool, abs, range(-200, 0))) == [(i, -i) for i in range(-200, 0)]
        assert list(executors.run(pool, abs, [])) == []


@pytest.mark.parametrize(("workers", "most"), [(None, 64), (9216, 18432)])
def test_as_many_tasks_are_under_way_as_keep_all_workers_busy(workers, most):
    tasks = itertools.count()
    with ThreadPoolExecutor(1) as pool:
        pool.num_workers = workers
        next(executors.run(pool, abs, tasks))
    assert next(tasks) == most


@pytest.mark.parametrize("name", POOLS)
def test_errors_come_whole_from_other_processes(name, pool):
    with pytest.raises(ReadError) as caught:
        list(executors.run(pool(name), executor_job.slow, range(8)))
    assert str(caught.value) == "here: damaged"
    assert (caught.value.sample, caught.value.where) == (7, "here")
    assert list(executors.run(pool(name), executor_job.slow, [1])) == [(1, -1)]


FACTS = {"where": "f", "expected": 1, "fix": "mend it"}
OTHER = AmbiguousError("why", [("--sample-axis first", "3 samples")], where="f", fix="ask")
ERRORS = [
    kind("wrong", **FACTS, **({"sample": 3} if kind is ReadError else {}))
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, DsprepError) and kind is not AmbiguousError
]


@pytest.mark.parametrize("error", [OTHER, *ERRORS], ids=lambda error: type(error).__name__)
def test_errors_are_pickled(error):
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
    assert error is OTHER or str(error) == "f: wrong (expected 1); mend it"


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, False),
        ({"PMI_SIZE": "4", "PMI_RANK": "0"}, True),
        ({"PMI_SIZE": "1"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"MV2_COMM_WORLD_SIZE": "8"}, True),
        ({"SLURM_NTASKS": "64", "SLURM_STEP_NUM_TASKS": "1"}, False),  # a job's shell
        ({"SLURM_NTASKS": "64", "SLURM_STEP_NUM_TASKS": "64"}, True),
        ({"SLURM_NTASKS": "64"}, False),
        ({"PMI_SIZE": "many"}, False),
    ],
)
def test_launched(env, expected):
    assert launched(env) is expected


def test_wrong_names():
    with pytest.raises(UsageError, match="is a scheduler of Dask, not of processes"):
        executors.opened("processes:tcp://host:1")
    fails(lambda: executors.opened("spark"), UsageError, "one of threads, processes, mpi, dask")
    with executors.opened("threads") as none:
        assert none is None


# --- what outlives its run ---------------------------------------------------------------------


def test_a_worker_of_an_earlier_run_puts_nothing_into_a_later_one(origin, tmp_path, monkeypatch):
    """Its run was killed, and a run of something else began at the same place."""
    left = []

    def keep(task):
        left.append(task)
        raise ReadError("stopped", 1)

    options = {"to": "tfrecord", "shard_size": 100}
    source, target = origin / "mixed.tfrecord", tmp_path / "set"
    root = tmp_path / ".set.dsprep-partial"
    with ThreadPoolExecutor(1) as threads:
        with monkeypatch.context() as patch:
            patch.setattr(tasks, "do", keep)
            fails(lambda: dsprep.convert(source, target, executor=threads, **options), ReadError)
            options["compress"] = "gzip:1"
            with pytest.raises(ReadError):
                dsprep.convert(source, target, executor=threads, restart=True, **options)
        with pytest.raises(FileNotFoundError):
            tasks.do(left[0])
        assert not list(root.glob("shard-*.json"))
        assert not list((root / "data" / "set").iterdir())


def test_a_place_in_files_that_are_removed_is_forgotten_first(origin, tmp_path, monkeypatch):
    """Threads, then processes without waiting for the disk, then threads: Zarr holes read as 0."""
    options = {"to": "zarr", "shard_size": 100}
    (tmp_path / "one").mkdir()
    dsprep.convert(origin / "fixed.h5", tmp_path / "one" / "set", **options)
    target = tmp_path / "two" / "set"
    target.parent.mkdir()

    def fail(task):
        raise ReadError("stopped", 1)

    interrupt(origin / "fixed.h5", target, monkeypatch, 50, **options)
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as threads:
        patch.setattr(tasks, "do", fail)
        with pytest.raises(ReadError):
            dsprep.convert(origin / "fixed.h5", target, durable=False, executor=threads, **options)
    dsprep.convert(origin / "fixed.h5", target, **options)
    assert_whole(target.parent, executor_job.digests(tmp_path / "one"))


def test_processes_end_with_the_one_that_started_them():
    code = (
        "import os, signal\nfrom dsprep import executors\n"
        "if __name__ == '__main__':\n"
        "    with executors.opened('processes', workers=1) as pool:\n"
        "        print(pool.submit(os.getpid).result(), flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    deadline = time.monotonic() + 600
    while Path(f"/proc/{int(done.stdout)}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{int(done.stdout)}").exists()


# --- where other processes are -----------------------------------------------------------------


def test_buckets_are_read_from_another_directory(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(shuffle, "_choose", lambda *_: "buckets")
    monkeypatch.setattr(shuffle, "PART_NBYTES", 3000)
    base = MemorySource(MIXED, random_batch(MIXED, 40), Path("data"))
    source = shuffle.ShuffledSource(base, 5, 4000, Path("scratch"))
    expected = source.read(0, 40)
    before = executor_job.digests(tmp_path / "here")
    assert {name.split("/")[1] for name in before} > {"part-0", "part-1"}
    sent = pickle.dumps(source.part(0, 40))
    monkeypatch.chdir(tmp_path / "there")
    opening, at = pickle.loads(sent)
    with opening() as other:
        assert_same_batch(other.read(0 - at, 40 - at), expected, MIXED)
    assert not list((tmp_path / "there").iterdir())
    source.close()
    assert executor_job.digests(tmp_path / "here") == before


def test_differences_are_told_with_their_place_in_the_file(origin, monkeypatch):
    """Whoever compares opens the files of its ranges alone."""
    monkeypatch.setattr(verify, "RANGES", 1)
    wrong = executor_job.files(origin / "fixed-wrong")
    monkeypatch.setattr(verify, "_ranges", lambda *_: iter([(0, 110), (110, 220), (220, 300)]))
    with (
        ThreadPoolExecutor(1) as threads,
        dsprep.open(origin / "fixed.h5") as a,
        dsprep.open(wrong) as b,
    ):
        found = verify.verify(a, b, executor=threads)
        assert found == verify.verify(a, b)
    assert found.differences[0].where_b == f"{wrong[1]} (sample 3 there)"
