"""A ring reads what plain reads do, and leaves nothing in flight, whatever happens."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import threading
import time
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import fails, forked

from dsprep.errors import FormatError
from dsprep.storage import ring as module
from dsprep.storage import scatter
from dsprep.storage.ring import Ring, ring
from dsprep.storage.scatter import Runs

SIZE = 1 << 20

needs_ring = pytest.mark.skipif(ring() is None, reason="the kernel refuses io_uring")


@pytest.fixture(scope="module")
def data():
    return np.random.default_rng(1).integers(0, 256, SIZE, "u1")


@pytest.fixture(scope="module")
def file(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("ring") / "data"
    data.tofile(path)
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.fixture(scope="module", autouse=True)
def by_a_ring():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scatter, "SEVERAL", 0)
        yield


def read(fd, starts, edges, places, where="it"):
    return scatter.read_files([(fd, Runs(starts, edges, places), where)])


def asked(starts, counts, size, gap=0):
    """Ranges of `counts` places of `size` bytes each, and the memory that they go to."""
    counts = np.asarray(counts)
    edges = np.concatenate(([0], np.cumsum(counts)))
    out = np.zeros((int(edges[-1]), size + gap), np.uint8)
    places = np.empty((len(out), 2), np.int64)
    places[:, 0] = out.ctypes.data + np.arange(len(out)) * (size + gap)
    places[:, 1] = size
    return np.asarray(starts, np.int64), edges, places, out


def expected(data, starts, edges, out, size):
    wanted = np.zeros_like(out)
    for start, (a, b) in zip(starts, pairwise(edges), strict=True):
        wanted[a:b, :size] = data[start : start + (b - a) * size].reshape(b - a, size)
    return wanted


@needs_ring
@given(
    ranges=st.lists(st.tuples(st.integers(0, SIZE - 8000), st.integers(0, 4)), max_size=700),
    size=st.integers(0, 1999),
    entries=st.sampled_from([1, 4, 256]),
)
def test_what_it_reads(data, file, ranges, size, entries):
    starts, counts = [r[0] for r in ranges], [r[1] for r in ranges]
    starts, edges, places, out = asked(starts, counts or np.zeros(0, int), size, gap=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scatter, "ring", lambda: Ring(entries))
        calls, nbytes = read(file, starts, edges, places)
    np.testing.assert_array_equal(out, expected(data, starts, edges, out, size))
    assert nbytes == sum(counts) * size
    if entries == 256:
        assert calls <= 2 + len(starts) // 64


def test_more_places_than_one_call_takes(data, file):
    starts, edges, places, out = asked([0, 5000, 9000], [1, 3000, 2], 11)
    read(file, starts, edges, places)
    np.testing.assert_array_equal(out, expected(data, starts, edges, out, 11))


def test_the_end_of_the_file(data, file):
    starts, edges, places, out = asked([0, SIZE - 50, SIZE + 9, 100], [1, 2, 1, 1], 40)
    fails(lambda: read(file, starts, edges, places, "/some/file"), FormatError, "ends")
    np.testing.assert_array_equal(out[0], data[:40])


@needs_ring
def test_errors_name_the_file_and_the_offset(file, tmp_path):
    only_writes = os.open(tmp_path / "w", os.O_WRONLY | os.O_CREAT)
    starts, edges, places, _ = asked([7] * 300, [1] * 300, 10)
    with pytest.raises(OSError, match=r"at offset 7: '/some/file'") as caught:
        read(only_writes, starts, edges, places, "/some/file")
    os.close(only_writes)
    assert caught.value.errno == errno.EBADF
    places[150, 0] = 16  # an address that is not ours
    with pytest.raises(OSError, match="Bad address"):
        read(file, starts, edges, places, "/some/file")
    places[:, 0] = places[0, 0]
    read(file, starts, edges, places, "/some/file")


@needs_ring
@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.EBADF])
@pytest.mark.parametrize("which", [0, 1, 3])
def test_entering_that_fails(number, which, data, file, monkeypatch):
    """What a ring does not take is read without it."""
    real, entered = module._call, []

    def call(what, *rest):
        if what == module._ENTER:
            entered.append(rest)
            if len(entered) == which + 1:
                ctypes.set_errno(number)
                return -1
        return real(what, *rest)

    monkeypatch.setattr(module, "_call", call)
    own = Ring()
    monkeypatch.setattr(scatter, "ring", lambda: own)
    for _ in range(2):
        starts, edges, places, out = asked(np.arange(900) * 1000, [1] * 900, 300)
        _, nbytes = read(file, starts, edges, places)
        np.testing.assert_array_equal(out, expected(data, starts, edges, out, 300))
        assert nbytes == 900 * 300
    assert len(entered) > which + 1


@needs_ring
def test_a_handler_of_a_signal_reads_without_the_ring_in_use(data, file, monkeypatch):
    take, inside = Ring._take, []

    def interrupted(self, got):
        if not inside:
            inside.append(ring())
            starts, edges, places, out = asked(np.arange(50) * 1000, [1] * 50, 300)
            read(file, starts, edges, places)
            np.testing.assert_array_equal(out, expected(data, starts, edges, out, 300))
        return take(self, got)

    monkeypatch.setattr(Ring, "_take", interrupted)
    starts, edges, places, out = asked(np.arange(600) * 1000, [1] * 600, 300)
    read(file, starts, edges, places)
    np.testing.assert_array_equal(out, expected(data, starts, edges, out, 300))
    assert inside == [None]
    assert ring() is not None


@needs_ring
@given(
    ranges=st.lists(st.tuples(st.integers(0, SIZE), st.integers(1, 2000)), max_size=80),
    depth=st.integers(1, 9),
    entries=st.sampled_from([1, 4, 256]),
    stop=st.integers(1, 80),
    failing=st.sets(st.integers(0, 60), max_size=3),
)
def test_one_after_another_through_slots(data, file, ranges, depth, entries, stop, failing):
    """Also where the ring takes nothing at times; and one that is left early leaves nothing."""
    own, memory, real, calls = Ring(entries), np.empty((depth, 2000), np.uint8), module._call, []

    def call(what, *rest):
        if what == module._ENTER and rest[1]:
            calls.append(1)
            if len(calls) in failing:
                ctypes.set_errno(errno.EBUSY)
                return -1
        return real(what, *rest)

    starts, lengths = (np.array([r[k] for r in ranges], np.int64) for k in (0, 1))
    slots = memory.ctypes.data + np.arange(depth) * 2000
    come = set()
    with (
        pytest.MonkeyPatch.context() as patch,
        closing(own.each(module.READ | file << 32, starts, lengths, slots)) as each,
    ):
        patch.setattr(module, "_call", call)
        for i, slot, got in each:
            wanted = data[starts[i] : starts[i] + lengths[i]]
            assert got == len(wanted) or (failing and not got)
            assert (memory[(slot - slots[0]) // 2000, :got] == wanted[:got]).all()
            memory[(slot - slots[0]) // 2000] = 7
            come.add(i)
            if len(come) == stop:
                break
    assert len(come) == min(stop, len(ranges))
    assert own._words[own._head] == own._words[own._posted] == own._words[own._taken]
    assert not own.busy


@needs_ring
def test_an_interrupt_leaves_nothing_in_flight():
    """Requests at a pipe stay in flight until someone writes: the exception waits for them."""
    assert forked(interrupted_reads) == 0  # so that no interrupt can reach the other tests


def interrupted_reads():
    own, (reads, writes) = ring(), os.pipe()
    signal.signal(signal.SIGUSR1, lambda *_: 1 // 0)  # any exception of a handler
    starts, edges, places, out = asked([-1, -1], [1, 1], 4)  # -1: where the pipe is

    def disturb():
        for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGINT):
            time.sleep(0.05)
            signal.pthread_kill(threading.main_thread().ident, number)
        time.sleep(0.2)
        os.write(writes, b"12345678")

    threading.Thread(target=disturb).start()
    with pytest.raises(KeyboardInterrupt):
        read(reads, starts, edges, places)
    assert sorted(map(bytes, out)) == [b"1234", b"5678"]
    assert own._words[own._head] == own._words[own._posted] == own._words[own._taken]


@needs_ring
def test_threads_and_forks_have_rings_of_their_own(data, file):
    here = ring()
    assert ring() is here
    found = []

    def reads():
        starts, edges, places, out = asked(np.arange(300) * 1000, [1] * 300, 200)
        read(file, starts, edges, places)
        found.append((ring(), (out == expected(data, starts, edges, out, 200)).all()))

    threads = [threading.Thread(target=reads) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(r) for r, _ in found} | {id(here)}) == 5
    assert all(good for _, good in found)
    pid = os.fork()
    if pid == 0:
        reads()
        os._exit(0 if found[-1][0] is not here and found[-1][1] else 1)
    assert os.waitpid(pid, 0)[1] == 0
    reads()
    assert found[-1][0] is here


def refusals(monkeypatch):
    monkeypatch.setattr(module, "_own", threading.local())
    monkeypatch.setattr(module, "_refused", threading.Event())


def descriptors():
    found = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sorted(str(path.readlink()) for path in found)


def read_some(data, file):
    """Read twenty ranges; return the calls made."""
    starts, edges, places, out = asked(np.arange(20) * 1000, [1] * 20, 300)
    calls, _ = read(file, starts, edges, places)
    np.testing.assert_array_equal(out, expected(data, starts, edges, out, 300))
    return calls


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EINVAL, errno.ENOMEM])
def test_where_the_kernel_refuses(number, data, file, monkeypatch):
    """Ranges are read one by one, and it is not asked again."""
    asks = []

    def refused(*_):
        asks.append(1)
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(module, "_call", refused)
    refusals(monkeypatch)
    with pytest.raises(OSError, match="io_uring is refused"):
        Ring()
    before = len(asks)
    assert [read_some(data, file) for _ in range(2)] == [20, 20]
    assert len(asks) == 2 * before


@needs_ring
@pytest.mark.parametrize("left", [0, 1, 2])
def test_few_descriptors(left, data, file, monkeypatch):
    """A ring that finds no descriptor, or none for its mappings, leaves none behind."""
    refusals(monkeypatch)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = descriptors()
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + left, hard))
    try:
        assert read_some(data, file) == 20
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert descriptors() == before
    assert ring() is None
