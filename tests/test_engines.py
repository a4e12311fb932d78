"""Every engine puts the same bytes where they belong, and says what is wrong with a file."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import fails

from dsprep.errors import FormatError, UsageError
from dsprep.reader import engines
from dsprep.reader.engines import Unavailable, direct
from dsprep.reader.memory import PAGE
from dsprep.storage import copying, scatter
from dsprep.storage.paths import open_file
from dsprep.storage.ring import Ring

NAMES = engines.NAMES
SIZE = 1_300_123
DATA = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("engines") / "data"
    path.write_bytes(DATA.tobytes())
    return path


@pytest.fixture(scope="module", autouse=True)
def _o_direct(path):
    """Everything here is about file systems that know it; what others say is tested below."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("the file system of the tests has no O_DIRECT")


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch):
    monkeypatch.setattr(direct, "WINDOW", 64 << 10)
    monkeypatch.setattr(direct, "PART", 16 << 10)
    monkeypatch.setattr(direct, "DEPTH", 3)


@pytest.fixture
def refused(monkeypatch):
    """The kernel has no io_uring for direct reads."""
    monkeypatch.setattr(direct, "ring", lambda: None)


def scattered(spans, seed=0):
    """Give each span a place of its own, in random order.

    Returns
    -------
    Ranges and their places, and a function that returns what arrived, span by span.
    """
    offsets, lengths = (np.array(column, np.int64) for column in zip(*spans, strict=True))
    order = np.random.default_rng(seed).permutation(len(spans))
    at = np.zeros(len(spans), np.int64)
    at[order] = np.cumsum(lengths[order] + 3) - lengths[order] - 3
    out = np.full(int(lengths.sum()) + 3 * len(spans), 7, np.uint8)

    def arrived():
        ends = at[order] + lengths[order]
        assert all((out[e : e + 3] == 7).all() for e in ends), "something lies between the places"
        return [out[a : a + n].tobytes() for a, n in zip(at, lengths, strict=True)]

    return list(scatter.runs(offsets, lengths, at + out.ctypes.data)), arrived


def read(engine, file, spans, seed=0):
    runs, arrived = scattered(spans, seed)
    done = [engine.read_runs(file, scatter.one_range(*run)) for run in runs]
    assert all(calls >= 1 for (calls, _), (_, p) in zip(done, runs, strict=True) if p[:, 1].sum())
    return arrived()


def expected(spans):
    return [DATA[o : o + n].tobytes() for o, n in spans]


spans_of_data = st.lists(
    st.one_of(
        st.tuples(st.integers(0, SIZE), st.integers(0, 40_000)),
        st.tuples(st.integers(0, SIZE // PAGE), st.integers(0, 30)).map(
            lambda t: (t[0] * PAGE, t[1] * PAGE)
        ),
        st.tuples(st.integers(SIZE - 9000, SIZE), st.integers(0, 9000)),
        st.tuples(st.integers(0, 100_000), st.integers(200_000, 400_000)),
    ),
    min_size=1,
    max_size=30,
).map(lambda spans: sorted((o, min(n, SIZE - o)) for o, n in spans))


@pytest.mark.parametrize("name", NAMES)
def test_random_places(name, path):
    file, engine = open_file(path), engines.make(name)

    @settings(max_examples=60, deadline=None)
    @given(spans_of_data, st.integers(0, 99))
    def check(spans, seed):
        assert read(engine, file, spans, seed) == expected(spans)

    check()


def test_an_engine_that_does_not_exist():
    fails(lambda: engines.make("io_uring"), UsageError, "one of buffered, direct")


def scatter_spans(file, spans, near=scatter.NEAR):
    """Read spans one after another into memory; return calls, bytes asked for, and what came."""
    offsets, lengths = (np.array(column, np.int64) for column in zip(*spans, strict=True))
    out = np.zeros(int(lengths.sum()), np.uint8)
    to = np.cumsum(lengths) - lengths + out.ctypes.data
    calls, nbytes = file.read_runs(scatter.runs(offsets, lengths, to, near))
    return calls, nbytes, out.tobytes()


@pytest.mark.parametrize(
    ("spans", "near", "calls", "nbytes"),
    [
        ([(i * 1000, 600) for i in range(200)], scatter.NEAR, 1, 199 * 1000 + 600),
        (
            [(0, 10), (scatter.NEAR + 11, 10)],
            scatter.NEAR,
            2,
            20,
        ),  # a gap of more than a call
        ([(0, 10), (scatter.NEAR + 10, 10)], scatter.NEAR, 1, scatter.NEAR + 20),
        ([(0, 60_000), (100_000, 60_000), (250_000, 40_000)], 100_000, 1, 290_000),  # in a group
        ([(0, 60_000), (100_000, 60_000), (250_000, 40_000)], scatter.NEAR, 3, 160_000),
        ([(0, 10), (100_000, 10), (250_000, 10)], 1 << 20, 3, 30),  # more gaps than bytes
    ],
)
def test_gaps_are_read_where_that_saves_calls(spans, near, calls, nbytes, path):
    assert scatter_spans(open_file(path), spans, near) == (calls, nbytes, b"".join(expected(spans)))


def test_places_are_counted_as_the_kernel_takes_them(path, monkeypatch):
    """At most `IOV_MAX` a call; neighbours that stay neighbours are one."""
    counts, call = [], scatter._call
    monkeypatch.setattr(scatter, "_call", lambda *a: counts.append(a[2]) or call(*a))
    spans = [(i * 10, 10) for i in range(10_000)]
    assert scatter_spans(open_file(path), spans)[0] == 1
    assert counts == [1]
    runs, _ = scattered([(i * 100, 100) for i in range(2500)])
    assert engines.make("buffered").read_runs(open_file(path), scatter.one_range(*runs[0]))[0] == 3


@pytest.mark.parametrize("name", NAMES)
def test_several_threads(name, path):
    file, engine = open_file(path), engines.make(name)
    wrong = []

    def work(seed):
        dice = np.random.default_rng(seed)
        for _ in range(5):
            starts = np.sort(dice.integers(0, SIZE - 30_000, 20)).tolist()
            spans = [(o, int(dice.integers(0, 30_000))) for o in starts]
            if read(engine, file, spans, seed) != expected(spans):
                wrong.append(spans)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("name", NAMES)
def test_descriptors_and_maps_go_with_the_file(name, path):
    def held():
        maps = Path("/proc/self/maps").read_text().count(str(path))
        return len(os.listdir("/proc/self/fd")), maps  # noqa: PTH208

    engine = engines.make(name)
    read(engine, open_file(path), [(0, 100)])
    before = held()
    for _ in range(100):
        read(engine, open_file(path), [(0, 5000), (100_000, 5000)])
    assert held() == before


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [0, 1, 9_999, 40_960, 99_999])
def test_a_file_that_was_truncated(name, size, tmp_path):
    path = tmp_path / "data"
    path.write_bytes(DATA[:100_000].tobytes())
    file, engine = open_file(path), engines.make(name)
    read(engine, file, [(0, 1000)])
    os.truncate(path, size)
    fails(lambda: read(engine, file, [(0, 100_000)]), FormatError, "ends too early")
    if size:
        assert read(engine, file, [(0, size)]) == expected([(0, size)])


def test_a_file_that_is_truncated_while_it_is_read(tmp_path, refused, monkeypatch):
    path = tmp_path / "data"
    path.write_bytes(DATA.tobytes())
    real, turns = direct.Opened.read, iter(range(100))

    def late(*arguments):
        if next(turns) == 1:
            os.truncate(path, 50_000)
        return real(*arguments)

    monkeypatch.setattr(direct.Opened, "read", late)
    with pytest.raises(FormatError, match="ends too early"):
        read(engines.make("direct"), open_file(path), [(0, SIZE)])


@pytest.mark.parametrize("denied", [None, errno.EPERM, errno.ENOSYS])
def test_without_process_vm_readv(denied, path, monkeypatch):
    def refuse(*_):
        copying.ctypes.set_errno(denied)
        return -1

    monkeypatch.setattr(copying, "_call", denied and refuse)
    spans = [(i * 1000, 700) for i in range(500)]
    assert read(engines.make("direct"), open_file(path), spans) == expected(spans)


# --- direct reads ----------------------------------------------------------------------------


@pytest.mark.parametrize("most", [100, 4096, 5000, 20_000])
def test_short_reads(most, path, monkeypatch):
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *a: min(most, real(*a)))
    spans = [(i * 5000, 3000) for i in range(40)]
    assert read(engines.make("direct"), open_file(path), spans) == expected(spans)


@pytest.mark.parametrize("result", [0, 100, 9000, -errno.EAGAIN, -errno.EINTR, -errno.EIO])
def test_parts_that_do_not_come_whole(result, path, monkeypatch):
    """They are read once more, by themselves."""
    each, depths = Ring.each, []

    def less(self, head, starts, lengths, slots):
        depths.append(len(slots))
        for i, slot, got in each(self, head, starts, lengths, slots):
            come = min(result, got) if i % 3 == 1 else got
            ctypes.memset(slot + max(0, come), 0xEE, got - max(0, come))
            yield i, slot, come

    monkeypatch.setattr(Ring, "each", less)
    spans = [(3 + i * 70_000, 60_000) for i in range(18)]
    assert read(engines.make("direct"), open_file(path), spans) == expected(spans)
    assert not depths or set(depths) == {3}


@settings(max_examples=30, deadline=None)
@given(spans=spans_of_data)
def test_direct_reads_without_a_ring(spans, path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "ring", lambda: None)
        assert read(engines.make("direct"), open_file(path), spans) == expected(spans)


def test_interruptions(tmp_path):
    data = np.random.default_rng(1).bytes(8 << 20)
    (tmp_path / "data").write_bytes(data)
    file = open_file(tmp_path / "data")
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        for name in NAMES:
            out = np.empty(len(data), np.uint8)
            places = np.array([[out.ctypes.data, len(out)]], np.int64)
            engines.make(name).read_runs(file, scatter.one_range(0, places))
            assert out.tobytes() == data
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_what_the_system_says_is_passed_on_with_the_offset(path, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(OSError, match="Input/output error at offset 8192") as error:
        read(engines.make("direct"), open_file(path), [(10_000, 100)])
    assert error.value.errno == errno.EIO
    assert error.value.filename == str(path)


def refusing(number):
    """Return a call of the system that is refused."""

    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    return refuse


REFUSALS = [
    ("open", errno.EINVAL),
    ("open", errno.EOPNOTSUPP),
    ("open", errno.ENOENT),
    ("preadv", errno.EINVAL),
]


@pytest.mark.parametrize(("call", "number"), REFUSALS)
def test_what_a_file_system_refuses_is_an_error(call, number, path, monkeypatch):
    file = open_file(path)
    monkeypatch.setattr(os, call, refusing(number))
    with pytest.raises(Unavailable, match=r'refused here .* give engine="buffered"'):
        read(engines.make("direct"), file, [(0, 100)])


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE])
def test_errors_are_not_taken_for_refusals(number, path, monkeypatch):
    file = open_file(path)
    monkeypatch.setattr(os, "open", refusing(number))
    with pytest.raises(OSError, match=os.strerror(number)) as error:
        read(engines.make("direct"), file, [(0, 100)])
    assert error.value.errno == number
    assert error.value.filename == str(path)


@pytest.mark.parametrize("told", [(0, 0), (4, 64 << 20), (4, 12_288)])
def test_a_file_that_the_kernel_says_cannot_be_read_directly(told, path, monkeypatch):
    monkeypatch.setattr(direct, "_dio_align", lambda fd: told)
    with pytest.raises(Unavailable, match="statx gives no alignment"):
        engines.make("direct").prepare(open_file(path))


def test_blocks(path, monkeypatch):
    spans = [(i * 70_000, 60_000) for i in range(18)]
    for block in (8192, 65536):
        monkeypatch.setattr(direct, "block_nbytes", lambda fd, block=block: block)
        assert read(engines.make("direct"), open_file(path), spans) == expected(spans)


def test_memory_of_a_thread_is_bounded(path):
    engine, file = engines.make("direct"), open_file(path)
    read(engine, file, [(0, SIZE)])
    first = engine._own.memory
    assert len(first) < direct.WINDOW + 3 * (2 << 20)
    read(engine, file, [(3, SIZE - 3)])
    assert engine._own.memory is first
