"""The law of numbers that begin again."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsprep.core.packing import Tables
from dsprep.errors import FormatError
from dsprep.layout.laws import LARGEST, Affine, Runs
from dsprep.layout.laws.periodic import Periodic, fit


def again(values: list[int], count: int) -> np.ndarray:
    return np.resize(np.array(values, np.int64), count)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-(1 << 45), 1 << 45), min_size=2, max_size=40),
    st.integers(1, 200),
)
def test_what_is_fitted_is_found_again(values: list[int], more: int) -> None:
    expected = again(values, len(values) + more)
    law = fit(expected, len(values))
    assert law is not None
    tables = Tables()
    text = json.dumps(law.to_json(tables))
    found = Periodic.from_json(
        json.loads(text), law.count, Tables(bytes(tables.written)), lengths=None
    )
    for some in (law, found):
        assert some.count == len(expected)
        assert np.array_equal(some.span(0, some.count), expected)
        assert np.array_equal(some.span(1, some.count - 1), expected[1:-1])
        at = np.arange(some.count)[::-3].copy()
        assert np.array_equal(some.at(at), expected[at])


def test_the_inner_law_is_the_smallest() -> None:
    law = fit(again(list(range(0, 400, 4)), 1_000_000), 100)
    assert law is not None
    assert isinstance(law.of, Affine)
    assert law.to_json(Tables()) == {
        "law": "periodic",
        "period": 100,
        "of": {"law": "affine", "base": 0, "stride": 4},
    }
    assert law.words() == "again every 100: 0 + i * 4"
    halves = fit(again([0, 4, 8, 100, 104, 108], 50), 6)
    assert halves is not None
    assert isinstance(halves.of, Runs)


@pytest.mark.parametrize("at", [0, 9, 10, 55, 98, 99])
def test_one_other_number_is_noticed(at: int) -> None:
    values = again(list(range(10)), 100)
    assert fit(values, 10) is not None
    values[at] += 1
    assert fit(values, 10) is None


def test_no_law_where_a_simpler_one_serves() -> None:
    assert fit(again([7], 5), 1) is None
    assert fit(again([1, 2, 3], 3), 3) is None
    assert fit(again([1, 2, 3], 2), 3) is None
    assert fit(np.zeros(0, np.int64), 3) is None


def test_indices_of_a_thousand_million_samples() -> None:
    law = Periodic(10**9, Affine(1000, 8, 16))
    assert law.at(np.array([0, 999, 1000, 10**9 - 1])).tolist() == [8, 15992, 8, 15992]


@pytest.mark.parametrize(
    "json",
    [
        {},
        {"period": 3},
        {"of": 3},
        {"period": 0, "of": 3},
        {"period": -1, "of": 3},
        {"period": 11, "of": 3},
        {"period": True, "of": 3},
        {"period": 2.0, "of": 3},
        {"period": 1 << 70, "of": 3},
        {"period": 2, "of": "x"},
        {"period": 2, "of": [1, 2]},
        {"period": 2, "of": {"law": "nothing"}},
        {"period": 2, "of": {"law": "periodic", "period": 2, "of": 1}},
        {"period": 2, "of": {"law": "follow", "rest": 0}},
        {"period": 2, "of": {"law": "affine", "base": LARGEST, "stride": 1}},
        {"period": 2, "of": {"law": "table", "data": "????"}},
        {"period": 2, "of": {"law": "runs", "runs": 1, "data": None}},
    ],
)
def test_hostile_laws_are_refused(json: dict) -> None:
    with pytest.raises(FormatError):
        Periodic.from_json({"law": "periodic", **json}, 10, Tables(), None)
