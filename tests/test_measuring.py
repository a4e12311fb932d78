"""What a measurement decides, that it is short and quiet, and what is remembered of it."""

from __future__ import annotations

import gc
import json
import os
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from dsprep.errors import UsageError
from dsprep.reader import caching, engines, measuring, remembering
from dsprep.reader.measuring import Choice, Trials, Way, choose
from dsprep.reading.files import File

SIZE = 24 << 20


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    """Nothing is known, and nothing is left in the user's own cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(remembering, "_known", {})


@pytest.fixture
def small(monkeypatch):
    """Measure files of a few MB."""
    monkeypatch.setattr(measuring, "SMALL", 1)
    monkeypatch.setattr(measuring, "RUN", 64 << 10)
    monkeypatch.setattr(measuring, "SHARE", 16 << 10)
    monkeypatch.setattr(measuring, "CALL", 8 << 10)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("measuring") / "data"
    with path.open("wb") as out:
        out.write(np.random.default_rng(0).bytes(SIZE))
        out.flush()
        os.fsync(out.fileno())
    return path


@pytest.fixture
def ranges(path):
    return [(path, at, 1 << 20) for at in range(0, SIZE, 1 << 20)]


@pytest.fixture
def machine(monkeypatch, small):
    """A machine of eight cores whose speeds, and what is cached, a test decides."""

    class Machine:
        def __init__(self):
            self.speeds, self.share = {}, 0.0
            self.tried, self.spots = [], []

        def speed(self, trials, way, spots):
            self.tried.append(way)
            self.spots += [(s[0].path, s[1]) for s in spots]
            assert len(spots) >= way.threads
            return self.speeds.get((way.engine, way.threads), 1e9)

    machine = Machine()
    monkeypatch.setattr(Trials, "_speed", lambda *a: machine.speed(*a))
    monkeypatch.setattr(Trials, "look", lambda trials: machine.share)
    monkeypatch.setattr(measuring, "cores", lambda: 8)
    monkeypatch.setattr(measuring, "SECONDS", 60)
    return machine


# --- what is not measured --------------------------------------------------------------------


def test_what_needs_no_measurement(monkeypatch, ranges):
    monkeypatch.setattr(measuring, "Trials", None)
    monkeypatch.setattr(measuring, "cores", lambda: 8)
    assert choose(ranges, engine="direct", threads=3) == Choice("direct", 3, "as asked")
    found = choose(ranges, decoded=True)
    assert (found.engine, found.threads) == ("buffered", 8)
    assert choose(ranges, decoded=True, threads=2).threads == 2
    found = choose(ranges)
    assert (found.engine, found.threads) == ("buffered", 1)
    assert "25.2 MB" in found.why
    found = choose(ranges, engine="mapped", nbytes=100)
    assert (found.engine, found.threads) == ("mapped", 1)


@pytest.mark.usefixtures("small")
def test_what_cannot_be_measured_is_buffered(ranges, tmp_path):
    for bad in ([(tmp_path / "none", 0, 1 << 20)], [(tmp_path, 0, 1 << 20)]):
        found = choose(bad, nbytes=1 << 30)
        assert (found.engine, found.threads) == ("buffered", 1)
    assert choose([], nbytes=1 << 30).threads == 1
    assert choose([(ranges[0][0], 1 << 40, 1 << 20)], nbytes=1 << 30, again=False).threads == 1
    assert not remembering._known


@pytest.mark.usefixtures("small")
def test_errors_of_the_system_are_kept_to_itself(monkeypatch, ranges):
    def fail():
        raise OSError("no /proc")

    monkeypatch.setattr(measuring, "free_memory", fail)
    assert "no /proc" in choose(ranges).why


# --- what is decided -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("direct", "share", "again", "expected"),
    [
        (1.1, 0.0, False, "buffered"),
        (1.3, 0.0, False, "direct"),
        (1.3, 0.5, False, "buffered"),
        (2.5, 0.5, False, "direct"),
        (9.0, 1.0, False, "buffered"),
        (9.0, 0.0, True, "buffered"),  # 24 MB will be in the cache
    ],
)
def test_direct_reads_have_to_be_clearly_faster(direct, share, again, expected, machine, ranges):
    machine.speeds = {("direct", 1): direct * 1e9}
    machine.share = share
    found = choose(ranges, again=again)
    assert found.engine == expected
    assert found.threads == 1


def test_engines_are_tried_by_turns_on_different_data(machine, ranges):
    choose(ranges, again=False, threads=1)
    assert [w.engine for w in machine.tried] == ["buffered", "direct", "direct", "buffered"]
    assert len(set(machine.spots)) == len(machine.spots) == 4


@pytest.mark.parametrize("engine", ["buffered", "direct", "mapped"])
@pytest.mark.parametrize(
    ("speeds", "expected"),
    [((1, 1.2, 9, 9), 1), ((1, 1.4, 1.5, 9), 2), ((1, 2, 3, 3.5), 4), ((1, 2, 4, 8), 8)],
)
def test_threads_have_to_pay(engine, speeds, expected, machine, ranges):
    machine.speeds = {(engine, 2**i): s * 1e9 for i, s in enumerate(speeds)}
    found = choose(ranges * 4, engine=engine)
    assert (found.engine, found.threads) == (engine, expected)
    assert "GB/s" in found.why


def test_as_many_threads_as_cores(machine, ranges, monkeypatch):
    monkeypatch.setattr(measuring, "cores", lambda: 3)
    machine.speeds = {("buffered", 2): 2e9, ("buffered", 3): 3e9}
    assert choose(ranges, engine="buffered").threads == 3


def test_the_number_of_threads_may_be_given(machine, ranges):
    machine.speeds = {("direct", 4): 3e9}
    found = choose(ranges * 2, threads=4, again=False)
    assert (found.engine, found.threads) == ("direct", 4)
    assert {w.threads for w in machine.tried} == {4}


def test_an_engine_that_fails_is_not_taken(monkeypatch, machine, ranges):
    def speed(trials, way, spots):
        if way.engine == "direct":
            raise UsageError("not here")
        return 1e9

    monkeypatch.setattr(Trials, "_speed", speed)
    found = choose(ranges, again=False)
    assert found.engine == "buffered"
    assert "not here" in found.why


def test_too_little_data_proves_nothing(machine, ranges):
    machine.speeds = {("direct", 1): 9e9, ("buffered", 2): 9e9}
    found = choose([(ranges[0][0], 0, 1000)], nbytes=1 << 40, again=False)
    assert (found.engine, found.threads) == ("buffered", 1)
    assert not remembering._known


# --- reading ---------------------------------------------------------------------------------


def drop(path):
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.mark.usefixtures("small")
def test_a_measurement_is_short_and_leaves_nothing(ranges, capfd):
    def held():
        return threading.active_count(), len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    choose(ranges[:2], again=False)  # what is loaded once
    gc.collect()  # what other tests left
    before, dice, numbers = held(), random.getstate(), np.random.get_state()[1].tolist()
    for engine in engines.NAMES:
        for _ in range(3):
            remembering._known.clear()
            drop(ranges[0][0])
            began = time.perf_counter()
            found = choose(ranges, engine=engine, again=False)
            assert time.perf_counter() - began < 5
            assert found.engine in engines.NAMES[1:]
            assert 1 <= found.threads <= measuring.cores()
            assert "could not" not in found.why
    assert held() == before
    assert random.getstate() == dice
    assert np.random.get_state()[1].tolist() == numbers
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("small")
def test_slow_storage_ends_it(ranges, monkeypatch):
    class Slow:
        name = "slow"
        calls = 0

        def read(self, file, start, places):
            Slow.calls += 1
            time.sleep(0.1)
            return 1, 1

    monkeypatch.setattr(engines, "make", lambda name: Slow())
    monkeypatch.setattr(Trials, "look", lambda trials: 0.0)
    began = time.perf_counter()
    found = choose(ranges, again=False)
    assert Slow.calls <= 4
    assert time.perf_counter() - began < 2
    assert (found.engine, found.threads) == ("buffered", 1)


@pytest.mark.usefixtures("small")
def test_no_more_is_read_than_allowed(ranges, monkeypatch):
    monkeypatch.setattr(measuring, "MOST", 200 << 10)
    monkeypatch.setattr(measuring, "THREADS_GAIN", 0.0)
    asked = []
    make = engines.make

    def counting(name):
        engine = make(name)
        read = engine.read
        monkeypatch.setattr(
            engine, "read", lambda f, s, p: asked.append((s, int(p[:, 1].sum()))) or read(f, s, p)
        )
        return engine

    monkeypatch.setattr(engines, "make", counting)
    monkeypatch.setattr(Trials, "look", lambda trials: 0.0)
    monkeypatch.setattr(measuring, "cores", lambda: 4)
    choose(ranges, again=False)
    assert 0 < sum(n for _, n in asked) <= (200 << 10) + measuring.RUN
    assert len(asked) == len(set(asked)), "something was read twice"


def test_what_is_in_the_page_cache(path):
    file = File(path)
    os.pread(file.fd, 1 << 20, 1 << 20)
    assert caching.resident(file, (1 << 20) + 5, 100_000) == 1
    assert caching.ready(file, (1 << 20) + 5) in (1, None)
    for _ in range(20):  # the kernel keeps some pages at times
        drop(path)
        if caching.resident(file, 0, SIZE) == 0:
            break
        time.sleep(0.1)
    else:
        pytest.skip("a file system in memory, or a machine that drops nothing")
    assert caching.resident(file, 2 << 20, 1 << 20) == 0
    assert caching.ready(file, 5 << 20) in (0, None)
    assert caching.resident(file, 1 << 40, 1 << 20) is None
    assert caching.resident(file, SIZE, 1) is None


def test_the_kernel_is_not_believed_about_files_of_others(path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert caching.resident(File(path), 0, 100) is None


@pytest.mark.usefixtures("small")
def test_the_page_cache_is_looked_at(ranges, monkeypatch):
    monkeypatch.setattr(measuring, "resident", lambda *_: 1.0)
    trials = Trials(ranges)
    assert trials.look() == 1
    assert trials._again
    half = [0.0, 1.0] * 50
    monkeypatch.setattr(measuring, "resident", lambda *_: half.pop())
    trials = Trials(ranges)
    count = len(trials._spots)
    assert trials.look() == pytest.approx(0.5, abs=0.1)
    assert count // 2 <= len(trials._spots) <= count // 2 + 1
    monkeypatch.setattr(measuring, "resident", lambda *_: None)
    monkeypatch.setattr(measuring, "ready", lambda *_: None)
    trials = Trials(ranges)
    assert trials.look() == 0
    assert len(trials._spots) == count


# --- remembering -----------------------------------------------------------------------------


@pytest.fixture
def measured(machine, monkeypatch):
    """The number of measurements."""
    done = []
    real = measuring._measured
    monkeypatch.setattr(measuring, "_measured", lambda *a: done.append(1) or real(*a))
    return done


def file():
    return Path(os.environ["XDG_CACHE_HOME"]) / "dsprep" / "engines.json"


def test_in_the_process_and_for_the_next_one(measured, machine, ranges):
    machine.speeds = {("buffered", 2): 2e9}
    first = choose(ranges)
    assert choose(ranges) == first
    assert measured == [1]
    remembering._known.clear()
    found = choose(ranges)
    assert (found.engine, found.threads) == (first.engine, first.threads) == ("buffered", 2)
    assert found.why == f"remembered: {first.why}"
    assert measured == [1]
    assert os.listdir(file().parent) == [file().name]  # noqa: PTH208


def test_each_thing_asked_is_a_thing_of_its_own(measured, machine, ranges, monkeypatch):
    choose(ranges)
    choose(ranges, engine="direct")
    choose(ranges, again=False)
    choose(ranges, again=False, threads=1)
    machine.share = 1.0
    choose(ranges)
    monkeypatch.setattr(measuring.socket, "gethostname", lambda: "elsewhere")
    choose(ranges)
    assert len(measured) == 6
    assert len(json.loads(file().read_bytes())["choices"]) == 6


def test_for_a_week(measured, ranges, monkeypatch):
    now = time.time()
    choose(ranges)
    for days, count in ((6.9, 1), (7.1, 2)):
        remembering._known.clear()
        monkeypatch.setattr(remembering.time, "time", lambda days=days: now + days * 86400)
        choose(ranges)
        assert len(measured) == count
    assert len(json.loads(file().read_bytes())["choices"]) == 1


def test_a_bounded_number(ranges):
    for i in range(remembering.KEPT + 20):
        remembering.remember(f"key {i}", Choice("buffered", 1, "because"))
    assert len(json.loads(file().read_bytes())["choices"]) == remembering.KEPT
    remembering._known.clear()
    assert remembering.recall("key 0") is None
    assert remembering.recall(f"key {remembering.KEPT + 19}") is not None


DAMAGE = [
    b"",
    b"\xff\x00{",
    b"[]",
    b"[" * 100_000,
    b'{"version": 2, "choices": []}',
    b'{"version": 1}',
    b'{"version": 1, "choices": 5}',
    b'{"version": 1, "choices": [5, [], ["KEY", 1, 2, 3, 4]]}',
    b'{"version": 1, "choices": [["KEY", "auto", 1, "why", 1e99]]}',
    b'{"version": 1, "choices": [["KEY", "buffered", 0, "why", NOW]]}',
    b'{"version": 1, "choices": [["KEY", "buffered", 1e9, "why", NOW]]}',
    b'{"version": 1, "choices": [["KEY", "buffered", 1, "why", NaN]]}',
    b'{"version": 1, "choices": [["KEY", "os.system", 1, "why", NOW]]}',
    b" " * ((1 << 20) + 1),
]


@pytest.mark.parametrize("content", DAMAGE, ids=range(len(DAMAGE)))
def test_damage_is_as_good_as_nothing(content, measured, ranges):
    choose(ranges)
    key = next(iter(remembering._known))
    remembering._known.clear()
    content = content.replace(b'"KEY"', json.dumps(key).encode())
    file().write_bytes(content.replace(b"NOW", str(time.time()).encode()))
    choose(ranges)
    assert len(measured) == 2
    remembering._known.clear()
    choose(ranges)  # it was mended
    assert len(measured) == 2


@pytest.mark.parametrize("where", ["a file", "no home"])
def test_where_nothing_can_be_kept(where, measured, ranges, tmp_path, monkeypatch):
    if where == "a file":
        (tmp_path / "cache").write_bytes(b"")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")

        def homeless():
            raise RuntimeError("no home")

        monkeypatch.setattr(remembering.Path, "home", homeless)
    choose(ranges)
    choose(ranges)
    assert measured == [1]


def test_a_failed_write_leaves_no_file(measured, ranges, monkeypatch):
    def fail(*_):
        raise OSError("no space")

    monkeypatch.setattr(remembering.Path, "replace", fail)
    choose(ranges)
    assert os.listdir(file().parent) == []  # noqa: PTH208


def test_ways_are_named():
    assert str(Way("direct", 1)) == "direct by 1 thread"
    assert str(Way("buffered", 8)) == "buffered by 8 threads"
