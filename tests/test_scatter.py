"""Ranges of a file go where they are sent, in few calls, also when the kernel cuts them short."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsprep.core import pread
from dsprep.errors import FormatError

DATA = np.random.default_rng(0).bytes(300_000)


@pytest.fixture(scope="module")
def fd(tmp_path_factory):
    path = tmp_path_factory.mktemp("scatter") / "data"
    path.write_bytes(DATA)
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


def sent(fd, spans, seed=0):
    """Send each span to a place of its own, in random order; return what arrived."""
    lengths = np.array([n for _, n in spans], np.int64)
    order = np.random.default_rng(seed).permutation(len(spans))
    places = np.zeros(len(spans), np.int64)
    places[order] = np.cumsum(lengths[order]) - lengths[order]
    out = np.full(int(lengths.sum()) + 8, 7, np.uint8)
    offsets = np.array([o for o, _ in spans], np.int64)
    calls = pread.scatter(fd, offsets, lengths, places + out.ctypes.data, "data")
    assert (out[-8:] == 7).all()
    return calls, [
        out[p : p + n].tobytes() for p, n in zip(places.tolist(), lengths.tolist(), strict=True)
    ]


@given(
    st.lists(
        st.tuples(st.integers(0, 250_000), st.integers(0, 40_000)), min_size=1, max_size=40
    ).map(sorted),
    st.integers(0, 1000),
)
def test_every_range_arrives(fd, spans, seed):
    spans = [(o, min(n, len(DATA) - o)) for o, n in spans]
    (_, nbytes), found = sent(fd, spans, seed)
    assert found == [DATA[o : o + n] for o, n in spans]
    assert nbytes >= len(set().union(*(range(o, o + n) for o, n in spans)))


def test_gaps_cost_no_call_and_far_ranges_one(fd):
    near = [(i * 1000, 600) for i in range(200)]
    assert sent(fd, near)[0] == (1, 199 * 1000 + 600)
    assert sent(fd, [(0, 10), (pread.NEAR + 11, 10)])[0] == (2, 20)
    assert sent(fd, [(0, 10), (pread.NEAR + 10, 10)])[0] == (1, pread.NEAR + 20)


def test_more_places_than_the_kernel_takes(fd):
    calls, found = sent(fd, [(i * 100, 100) for i in range(2500)])
    assert calls == (3, 250_000)
    assert b"".join(found) == DATA[:250_000]


def test_neighbours_that_stay_neighbours_are_one_place(fd, monkeypatch):
    counts = []
    call = pread._call
    monkeypatch.setattr(pread, "_call", lambda *a: counts.append(a[2]) or call(*a))
    out = np.empty(100_000, np.uint8)
    offsets = np.arange(0, 100_000, 10, dtype=np.int64)
    lengths = np.full(len(offsets), 10, np.int64)
    pread.scatter(fd, offsets, lengths, offsets + out.ctypes.data, "data")
    assert counts == [1]
    assert out.tobytes() == DATA[:100_000]


def test_short_reads_and_interruptions_are_continued(fd, monkeypatch):
    call, turn = pread._call, iter(range(10**6))

    def poor(fd, places, count, offset):
        if next(turn) % 3 == 0:
            pread.ctypes.set_errno(4)
            return -1
        import ctypes

        first = (ctypes.c_int64 * 2).from_address(places)
        whole = first[1]
        first[1] = min(whole, 333)
        got = call(fd, places, 1, offset)
        first[1] = whole
        return got

    monkeypatch.setattr(pread, "_call", poor)
    spans = [(i * 1500, 1000) for i in range(50)]
    assert sent(fd, spans)[1] == [DATA[o : o + n] for o, n in spans]


def test_the_end_of_the_file_is_named(fd):
    with pytest.raises(FormatError, match="data, offset 299000: the file ends too early") as error:
        sent(fd, [(299_000, 2000)])
    assert (error.value.expected, error.value.found) == ("2000 bytes", "1000")


def test_what_the_system_says_is_passed_on(fd, tmp_path):
    closed = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="offset 5"):
            sent(closed, [(5, 10)])
    finally:
        os.close(closed)


def test_wide_gaps_are_read_along_within_a_group(fd):
    spans = [(0, 60_000), (100_000, 60_000), (250_000, 40_000)]
    offsets, lengths = (np.array(c, np.int64) for c in zip(*spans, strict=True))
    out = np.zeros(160_000, np.uint8)
    to = np.cumsum(lengths) - lengths + out.ctypes.data
    assert pread.scatter(fd, offsets, lengths, to, "data", 100_000) == (1, 290_000)
    assert out.tobytes() == b"".join(DATA[o : o + n] for o, n in spans)
    assert pread.scatter(fd, offsets, lengths, to, "data")[0] == 3
    few = np.full(3, 10, np.int64)  # more gaps than bytes: not worth it
    assert pread.scatter(fd, offsets, few, to, "data", 1 << 20) == (3, 30)
