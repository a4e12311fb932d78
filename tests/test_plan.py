"""Cutting into shards and pieces, casts, ranges and sizes: pure, so checked by laws."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import MemorySource, fails

from dsprep.core.schema import Field, Ragged, Schema
from dsprep.core.units import parse_nbytes
from dsprep.errors import SchemaError, UsageError
from dsprep.formats.options import OpenOptions, check_options
from dsprep.reader.units import even_edges
from dsprep.writing import plan
from dsprep.writing.plan import (
    apply_casts,
    cast_schema,
    make_casts,
    parse_range,
    payload_nbytes,
    pieces,
    shards_by_bytes,
    shards_by_samples,
)

RAGGED = Schema((Field.opaque("b"),))


class Sized(MemorySource):
    """Ragged samples whose sizes are known without reading."""

    def __init__(self, sizes):
        self.known = np.asarray(sizes, np.int64)
        values = np.zeros(int(self.known.sum()), "u1")
        super().__init__(RAGGED, {"b": Ragged.from_lengths(values, self.known, "bytes")})

    def sizes(self, start, stop):
        return self.known[start:stop]


class Unsized(Sized):
    def sizes(self, start, stop):
        return None


sizes = st.lists(st.integers(0, 60), max_size=60)


def greedy(sizes, start, stop, unit, limit):
    """The rule, one unit at a time: the oracle for the vectorised cut."""
    edges, used = [start], 0
    for at in range(start, stop, unit):
        size = sum(sizes[at : min(at + unit, stop)])
        if at != edges[-1] and used + size > limit:
            edges.append(at)
            used = 0
        used += size
    return [*edges, stop] if start < stop else [start]


@given(sizes, st.integers(1, 100))
def test_shards_by_bytes_follow_the_rule(sizes, limit):
    found = shards_by_bytes(Sized(sizes), 0, len(sizes), limit)
    edges = greedy(sizes, 0, len(sizes), 1, limit)
    assert found == (list(itertools.pairwise(edges)) or [(0, 0)])


@given(sizes, st.integers(1, 7), st.integers(1, 100), st.integers(0, 20))
def test_pieces_follow_the_rule_and_can_continue_anywhere(sizes, unit, target, start):
    start = min(start, len(sizes))
    source, stop = Sized(sizes), len(sizes)
    found = list(pieces(source, start, stop, unit, target))
    edges = greedy(sizes, start, len(sizes), unit, target)
    assert found == list(itertools.pairwise(edges))
    for i, (_, end) in enumerate(found):
        again = pieces(source, start, stop, unit, target, after=end - start)
        assert list(again) == found[i + 1 :]


@given(sizes, st.integers(1, 7), st.integers(1, 100))
def test_pieces_of_unknown_sizes_cover_everything_once(sizes, unit, target):
    source = Unsized(sizes)
    found = list(pieces(source, unit=unit, target=target))
    assert [i for a, b in found for i in range(a, b)] == list(range(len(sizes)))
    assert all(a % unit == 0 and a < b for a, b in found)
    for i, (_, stop) in enumerate(found):
        assert list(pieces(source, unit=unit, target=target, after=stop)) == found[i + 1 :]


def test_shards_by_samples():
    assert shards_by_samples(0, 10, 4) == [(0, 4), (4, 8), (8, 10)]
    assert shards_by_samples(5, 5, 4) == [(5, 5)]
    fails(lambda: shards_by_samples(0, 10, 0), UsageError)


def cast(values, name, column=None):
    schema = Schema((Field("x", values.dtype, values.shape[1:]),))
    casts = make_casts(schema, {"x": np.dtype(name)})
    assert cast_schema(schema, casts)["x"].dtype == np.dtype(name)
    return apply_casts({"x": values}, casts, 100)["x"]


def test_casts_that_fit():
    x = np.array([[0.0, -1.5], [np.inf, 65504.0]], "f4")
    assert cast(x, "f2").tolist() == x.tolist()
    assert np.isnan(cast(np.array([np.nan], "f4"), "f2")[0])
    assert cast(np.array([1, 255]), "u1").tolist() == [1, 255]
    assert cast(np.array([1.0, -3.0]), "i2").tolist() == [1, -3]
    assert cast(np.array([True, False]), "f4").tolist() == [1.0, 0.0]
    assert cast(np.zeros((0, 3)), "i4").shape == (0, 3)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        (np.array([1.0, 1e30], "f4"), "f2"),
        (np.array([1, 256]), "u1"),
        (np.array([1, -1]), "u8"),
        (np.array([1.0, np.nan]), "i4"),
        (np.array([1.0, 1.5]), "i4"),
        (np.array([1.0, 1e30]), "i8"),
    ],
)
def test_casts_that_lose_values_name_the_sample(values, name):
    fails(lambda: cast(values, name), SchemaError, "sample 101, field x")


def test_cast_of_ragged_names_the_sample():
    schema = Schema((Field("x", np.dtype("i8"), (None, 2)),))
    casts = make_casts(schema, {"x": np.dtype("i1")})
    values = np.array([[1, 2], [3, 4], [5, 600]])
    with pytest.raises(SchemaError, match="sample 12, field x"):
        apply_casts({"x": Ragged.from_lengths(values, np.array([2, 0, 1]))}, casts, 10)


def texts(*words, kind="bytes"):
    flat = np.frombuffer(b"".join(words), np.uint8)
    return Ragged.from_lengths(flat, np.array([len(word) for word in words]), kind)


def test_text_is_cast_to_the_numbers_that_it_states():
    schema = Schema((Field.opaque("cls", attrs={"unit": "class"}), Field.opaque("w", "str")))
    casts = make_casts(schema, {"cls": np.dtype("i2"), "w": np.dtype("f4")})
    result = cast_schema(schema, casts)["cls"]
    assert (result.kind, result.shape, result.attrs) == ("array", (), {"unit": "class"})
    batch = {"cls": texts(b"6", b"-7", b"012\n"), "w": texts(b"1.5", b"1e3", b"-2", kind="str")}
    out = apply_casts(batch, casts, 0)
    assert (out["cls"].dtype, out["w"].dtype) == (np.int16, np.float32)
    assert out["cls"].tolist() == [6, -7, 12]
    assert out["w"].tolist() == [1.5, 1000.0, -2.0]


@pytest.mark.parametrize("text", [b"cat", b"", b"1.5", b"70000", b"9" * 30])
def test_text_that_states_no_such_number_names_the_sample(text):
    casts = make_casts(Schema((Field.opaque("cls"),)), {"cls": np.dtype("i2")})
    with pytest.raises(SchemaError, match="sample 11, field cls"):
        apply_casts({"cls": texts(b"6", text)}, casts, 10)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0:10", (0, 10)),
        (":", (0, 50)),
        ("-5:", (45, 50)),
        ("40:50", (40, 50)),
        ("9:9", (9, 9)),
        ("-50:-1", (0, 49)),
    ],
)
def test_ranges(text, expected):
    assert parse_range(text, 50) == expected


@pytest.mark.parametrize("text", ["5", "a:b", "1:2:3", "", "40:51", "-51:", "51:", "9:3"])
def test_bad_ranges(text):
    fails(lambda: parse_range(text, 50), UsageError)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1B", 1), ("4GiB", 4 << 30), ("256 MiB", 256 << 20), ("2kB", 2000), ("1.5M", 1_500_000)],
)
def test_sizes(text, nbytes):
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "0", "-1", "1XB", "nan", "inf", "1e400", "1", "4", "4096", "B"]
)
def test_bad_sizes(text):
    fails(lambda: parse_nbytes(text), UsageError)


def test_options_have_only_values_that_they_can_have():
    check_options(OpenOptions(order="file"), frozenset({"order"}), "lmdb")
    with pytest.raises(UsageError, match="one of key, file, numeric"):
        check_options(OpenOptions(order="sideways"), frozenset({"order"}), "lmdb")
    with pytest.raises(UsageError, match="--order does not apply to hdf5"):
        check_options(OpenOptions(order="file"), frozenset({"fields"}), "hdf5")


class Sized:
    """A source of byte strings that states their sizes, or cannot."""

    schema = RAGGED

    def __init__(self, sizes):
        self._sizes = sizes

    def sizes(self, start, stop):
        return None if self._sizes is None else np.array(self._sizes[start:stop])


def test_payload_is_that_of_the_samples_or_of_a_probe(monkeypatch):
    assert payload_nbytes(Sized([50, 60, 5, 1, 9, 70]), 2, 5) == (15, 9)
    monkeypatch.setattr(plan, "probe_nbytes", lambda source, start, stop: 7)
    assert payload_nbytes(Sized(None), 2, 5) == (21, 7)


@pytest.mark.parametrize(
    ("files", "samples", "edges"),
    [
        ((10, 0, 7), 4, [0, 4, 8, 10, 14, 17]),  # no range goes beyond its file
        ((1, 1, 1, 1), 3, [0, 3, 4]),  # files of less than a range
        ((10,), 4, [0, 4, 8, 10]),
        ((1,) * 7, 5, [0, 3, 6, 7]),  # no more than 3 files
        ((1, 1, 1, 9), 5, [0, 3, 8, 12]),
    ],
)
def test_ranges_of_a_dataset_without_groups(files, samples, edges):
    content = SimpleNamespace(counts=np.array(files, np.int64))
    assert even_edges(SimpleNamespace(content=content), samples, files=3).tolist() == edges
