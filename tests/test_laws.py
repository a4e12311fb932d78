"""Layout laws: exact, small, and not to be fooled by what a sidecar says."""

from __future__ import annotations

import contextlib
import json
import lzma

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import fails

from dsprep.core.packing import (
    Tables,
    from_planes,
    from_varints,
    pack,
    to_planes,
    to_varints,
    unpack,
    unzigzag,
    zigzag,
)
from dsprep.errors import FormatError
from dsprep.layout import laws
from dsprep.layout.laws import LARGEST, Affine, Explicit, Runs, Table, follow, is_exact, runs
from dsprep.layout.laws.periodic import Periodic
from dsprep.layout.laws.periodic import fit as fit_periodic

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
SMALL = st.integers(-(1 << 40), 1 << 40)
STEPS = st.lists(st.tuples(st.integers(1, 9), st.integers(-50, 5000), st.integers(-9000, 9000)))


def stepped(steps) -> np.ndarray:
    """Numbers that rise evenly for a while, again and again."""
    parts, at = [np.zeros(0, np.int64)], 0
    for count, stride, jump in steps:
        at += jump
        parts.append(at + stride * np.arange(count, dtype=np.int64))
        at = int(parts[-1][-1])
    return np.concatenate(parts)


def through_json(law, lengths=None):
    """The law as a reader of the sidecar gets it."""
    tables = Tables()
    text = json.dumps(law.to_json(tables))
    return laws.parse(json.loads(text), law.count, Tables(bytes(tables.written)), lengths)


def assert_gives(law, values, lengths=None):
    back = through_json(law, lengths)
    for one in (law, back):
        assert one.count == len(values)
        assert is_exact(one, values)
        order = np.random.default_rng(0).permutation(len(values))
        assert (one.at(order) == values[order]).all()
        some = order[:64].tolist()
        assert [one.one(i) for i in some] == values[some].tolist()
        for a, b in ((0, len(values)), (len(values) // 3, len(values) // 2)):
            assert (one.span(a, b) == values[a:b]).all()
        assert one.words()


@given(st.binary(max_size=3000), st.integers(1, 80))
def test_small_tables_are_packed_as_by_the_preset(plain, times):
    preset = 6 | lzma.PRESET_EXTREME
    assert pack(plain * times) == lzma.compress(plain * times, lzma.FORMAT_ALONE, preset=preset)


@given(st.lists(INT64))
def test_packing_keeps_every_integer(numbers):
    values = np.array(numbers, np.int64)
    assert (unzigzag(zigzag(values)) == values).all()
    assert (from_varints(to_varints(zigzag(values))) == zigzag(values)).all()
    assert (from_planes(to_planes(values)) == values).all()
    assert unpack(pack(to_planes(values))) == to_planes(values)


@given(st.binary(max_size=60))
def test_damaged_tables_are_refused_or_numbers(data):
    for read in (from_varints, from_planes, unpack):
        with contextlib.suppress(ValueError):
            read(data)


def test_a_table_that_explodes_is_refused(monkeypatch):
    monkeypatch.setattr("dsprep.core.packing.LARGEST_PLAIN", 1 << 20)
    bomb = pack(bytes(8 << 20))
    fails(lambda: unpack(bomb), ValueError, "more than")


@given(STEPS)
def test_any_numbers_are_found_again(steps):
    values = stepped(steps)
    for law in (laws.fit(values), runs.fit(values), Table(values)):
        assert_gives(law, values)


@given(st.lists(SMALL, max_size=300))
def test_numbers_without_rule(numbers):
    values = np.array(numbers, np.int64)
    assert_gives(laws.fit(values), values)


@given(
    st.lists(st.integers(0, 9000), max_size=600),
    st.integers(0, 20),
    st.sampled_from([1, 8, 4096]),
    st.integers(0, 1 << 40),
    st.integers(1, 9),
)
def test_blocks_one_behind_another(lengths, frame, align, base, every):
    sizes = np.array(lengths, np.int64)
    taken = follow.sizes(sizes, frame, align)
    offsets = base + np.concatenate([[0], np.cumsum(taken)])[: len(sizes)].astype(np.int64)
    offsets += 77 * (np.arange(len(sizes)) // every)  # something else, now and then
    law = follow.fit(offsets, Table(sizes), frame, align)
    assert_gives(law, offsets, Table(sizes))


@given(
    st.lists(st.integers(-(1 << 45), 1 << 45), min_size=2, max_size=40),
    st.integers(1, 200),
    st.integers(0, 1 << 20),
)
def test_numbers_that_begin_again(numbers, more, at):
    values = np.resize(np.array(numbers, np.int64), len(numbers) + more)
    law = fit_periodic(values, len(numbers))
    assert_gives(law, values)
    values[at % len(values)] += 1
    if more >= len(numbers):
        assert fit_periodic(values, len(numbers)) is None


def test_the_law_of_a_period():
    law = fit_periodic(np.resize(np.arange(0, 400, 4), 1_000_000), 100)
    assert law.to_json(Tables()) == {
        "law": "periodic",
        "period": 100,
        "of": {"law": "affine", "base": 0, "stride": 4},
    }
    assert law.words() == "again every 100: 0 + i * 4"
    far = Periodic(10**9, Affine(1000, 8, 16))
    assert far.at(np.array([0, 999, 1000, 10**9 - 1])).tolist() == [8, 15992, 8, 15992]
    for numbers, count, period in (([7], 5, 1), ([1, 2, 3], 3, 3), ([1, 2, 3], 2, 3), ([1], 0, 3)):
        values = np.resize(np.array(numbers, np.int64), count)
        assert fit_periodic(values, period) is None  # a simpler law serves


def test_the_smallest_law_wins():
    n = 100_000
    assert isinstance(laws.fit(np.arange(n) * 3072 + 16), Affine)
    assert isinstance(laws.fit(np.full(n, 7)), Affine)
    pages = np.arange(n) * 4096 + 4096 * (np.arange(n) // 156)
    assert isinstance(laws.fit(pages), Runs)
    assert laws.packed_nbytes(laws.fit(pages)) < 300
    noise = np.random.default_rng(0).integers(0, 200, n)
    assert isinstance(laws.fit(noise), Table)
    assert laws.packed_nbytes(laws.fit(noise)) < 1.5 * n


def test_a_candidate_is_taken_only_if_exact():
    values = np.arange(5000) * 8 + 8 * (np.arange(5000) // 7)
    right, wrong = Explicit(values), Explicit(values + (np.arange(5000) == 4321))
    assert laws.fit(values, [wrong, right]) is right
    assert isinstance(laws.fit(values, [wrong]), Runs)


def test_a_billion_samples_cost_nothing():
    n = 10**9
    law = through_json(Affine(n, 2048, 3072))
    at = np.random.default_rng(0).integers(0, n, 1000)
    assert (law.at(at) == 2048 + at * 3072).all()
    assert len(json.dumps(law.to_json(Tables()))) < 60
    first = np.arange(0, n, 10**6)
    many = through_json(Runs(n, first, first * 5000 + 7, np.full(len(first), 4096)))
    assert (many.at(at) == (at // 10**6) * 10**6 * 5000 + 7 + at % 10**6 * 4096).all()


RUNS_OF_3 = runs.fit(np.array([0, 5, 6, 99])).to_json(Tables())


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        True,
        "affine",
        [],
        {},
        {"law": 3},
        {"law": "explicit"},
        {"law": "os.system"},
        {"law": "affine"},
        {"law": "affine", "base": 0.5, "stride": 1},
        {"law": "affine", "base": 0, "stride": 1 << 61},
        {"law": "affine", "base": 1 << 59, "stride": 1 << 59},
        1 << 62,
        {"law": "runs", "runs": 3},
        {"law": "runs", "runs": 3, "data": "AAAA"},
        {"law": "runs", "runs": 3, "data": "not base64!"},
        {"law": "runs", "runs": 3, "data": {"at": 0, "nbytes": 9, "blake2b": ""}},
        {"law": "runs", "runs": 3, "data": {"at": -1, "nbytes": 9}},
        {**RUNS_OF_3, "runs": 7},
        {"law": "table", "data": Table(np.arange(3)).to_json(Tables())["data"]},
        {"law": "table", "data": RUNS_OF_3["data"]},
        {"law": "table", "data": Table(np.array([1 << 61] * 4)).to_json(Tables())["data"]},
        {"law": "follow", "rest": 0},
        {"law": "follow"},
        *({"law": "periodic", "period": n, "of": 3} for n in (0, -1, 11, True, 2.0, 1 << 70, None)),
        {"law": "periodic", "of": 3},
        {"law": "periodic", "period": 2},
        {"law": "periodic", "period": 2, "of": {"law": "periodic", "period": 2, "of": 1}},
        {"law": "periodic", "period": 2, "of": {"law": "affine", "base": LARGEST, "stride": 1}},
        {"law": "periodic", "period": 2, "of": {"law": "follow", "rest": 0}},
        {"law": "periodic", "period": 2, "of": {"law": "table", "data": "????"}},
        {"law": "tree"},
        {"law": "replay"},
    ],
)
def test_damaged_laws_are_refused(damaged):
    fails(lambda: laws.parse(damaged, 4, Tables(None, "x.dsprep.json")), FormatError)


def test_runs_must_add_up_and_stay_in_files():
    def made(*rows):
        numbers = []
        for count, stride, jump in rows:
            numbers += [count, *zigzag(np.array([stride, jump], np.int64)).tolist()]
        data = Tables().put(to_varints(np.array(numbers, np.uint64)))
        return {"law": "runs", "runs": len(rows), "data": data}

    assert laws.parse(made((2, 8, 0), (2, 8, 100)), 4, Tables()).count == 4
    for bad in (
        made((5, 8, 0)),
        made((0, 8, 0), (4, 8, 0)),
        made((1 << 63, 1, 0), (4, 8, 0)),
        made((1 << 62, 1, 0), (1 << 62, 1, 0), (4, 1, 1)),
        made((2, 1 << 62, 0), (2, 1, 1)),
        made((2, 1, 1 << 62), (2, 1, 1 << 62)),
        made(*[(1, 0, 1 << 59)] * 4),
    ):
        fails(lambda: laws.parse(bad, 4, Tables()), FormatError)
