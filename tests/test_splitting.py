"""Splits are exact, repeatable and do not leak; selections and copies read as they should."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import DTYPES, MemorySource, assert_same_batch, fails, random_batch, raw, schemas

import dsprep
from dsprep.core.schema import Arena, Field, Ragged, Schema, concatenate
from dsprep.errors import SchemaError, UsageError
from dsprep.source import derived
from dsprep.source.derived import DerivedSource
from dsprep.verbs.repack import RepackOptions, plan_repack
from dsprep.writing import split
from dsprep.writing.split import assign, group_labels, parse_split

SCHEMAS = dict(schemas())
THIRDS = [("train", 0.8), ("val", 0.1), ("test", 0.1)]


def grouped(source, shares, seed, name="k"):
    labels = group_labels(source, source.schema[name])
    return assign(len(source), shares, seed, labels)


def numbered(count):
    schema = Schema((Field("y", np.dtype("<i8")),))
    return MemorySource(schema, {"y": np.arange(count)})


def test_parsing():
    assert parse_split("a=0.75, b=.25") == [("a", 0.75), ("b", 0.25)]
    assert parse_split("all=1") == [("all", 1.0)]
    for text in ("", "a", "a=1,a=0", "a=0.5", "a=0.5,b=0.6", "a=x", "a/b=1", ".a=1", "a=nan"):
        fails(lambda: parse_split(text), UsageError)


@given(st.integers(3, 300), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_every_sample_lands_in_one_split(count, seed):
    found = assign(count, THIRDS, seed)
    assert list(found) == ["train", "val", "test"]
    assert np.array_equal(np.sort(np.concatenate(list(found.values()))), np.arange(count))
    for name, share in THIRDS:
        assert (np.diff(found[name]) > 0).all()
        assert abs(len(found[name]) - share * count) < 1.5
        assert len(found[name]) > 0


def test_counts_are_exact_and_repeatable():
    made = [assign(1000, THIRDS, seed) for seed in (1, 1, 2)]
    found, again, other = ({n: v.tolist() for n, v in split.items()} for split in made)
    assert [len(v) for v in found.values()] == [800, 100, 100]
    assert found == again
    assert found["val"] != other["val"]
    fails(lambda: assign(2, THIRDS, 1), UsageError)


def keyed(values, kind="array"):
    """A source whose field k has the values, and another field."""
    values = list(values)
    if kind == "array":
        column = np.array(values)
        field = Field("k", column.dtype, column.shape[1:])
    else:
        field = Field.opaque("k", kind)
        column = Ragged.pack(values, field)
    y = np.arange(len(values))
    schema = Schema((Field("y", np.dtype("<i8")), field))
    return MemorySource(schema, {"y": y, "k": column}), values


KEYS = {
    "int": lambda i: (i * 7919) % 40,
    "text": lambda i: f"patient{(i * 7919) % 40}",
    "pair": lambda i: [float((i * 7919) % 40), 1.5],
    "long": lambda i: [(i * 7919) % 40] * 9,
}


@pytest.mark.parametrize("name", KEYS)
def test_nothing_leaks(name):
    values = [KEYS[name](i) for i in range(1000)]
    source, values = keyed(values)
    found = grouped(source, THIRDS, 3)
    keys = {n: {str(values[i]) for i in v.tolist()} for n, v in found.items()}
    assert sum(map(len, keys.values())) == len(set.union(*keys.values()))
    assert np.array_equal(np.sort(np.concatenate(list(found.values()))), np.arange(1000))
    assert [len(v) for v in found.values()] == [800, 100, 100]  # 40 keys of 25 samples each


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_of_every_dtype(dtype):
    schema = Schema((Field("k", dtype),))
    batch = random_batch(schema, 6, seed=1)
    rows = np.random.default_rng(0).integers(0, 6, 100)
    source = MemorySource(schema, {"k": batch["k"][rows]})
    if dtype.names:  # padding is not part of the value
        source._batch["k"] = source._batch["k"].copy()
    labels = group_labels(source, schema["k"])
    bits = [raw(batch["k"][i]) for i in rows.tolist()]
    assert len(set(zip(bits, labels.tolist(), strict=True))) == len(set(bits))
    assert len(set(labels.tolist())) == len(set(bits))


def test_padding_of_structures_is_no_part_of_the_key():
    dtype = np.dtype({"names": ["a"], "formats": ["<i4"], "offsets": [4], "itemsize": 16})
    raw = np.random.default_rng(0).integers(0, 256, (20, 16), "u1")
    raw[:, 4:8] = 7
    schema = Schema((Field("k", dtype),))
    source = MemorySource(schema, {"k": raw.reshape(-1).view(dtype)})
    assert set(group_labels(source, schema["k"]).tolist()) == {0}


def test_unequal_groups_and_refusals():
    source, _values = keyed([0] * 90 + [1] * 6 + [2] * 4)
    found = grouped(source, THIRDS, 0)
    assert [len(v) for v in found.values()] == [90, 6, 4]
    fails(lambda: grouped(source, [(f"{i}", 0.25) for i in range(4)], 0), UsageError, "found 3")
    fails(lambda: grouped(source, THIRDS, 0, "nosuch"), SchemaError)
    big = Schema((Field("k", np.dtype("u1"), (5000,)),))
    with pytest.raises(SchemaError):
        grouped(MemorySource(big, {"k": np.zeros((3, 5000), "u1")}), THIRDS, 0)
    fails(lambda: grouped(keyed([])[0], THIRDS, 0), UsageError)


# --- sources ---------------------------------------------------------------------------------

INDICES = {
    "rising": np.array([0, 1, 2, 5, 9, 10, 30, 49]),
    "run": np.arange(10, 40),
    "falling": np.arange(50)[::-1].copy(),
    "repeated": np.array([3, 3, 3, 4, 0, 0]),
    "random": np.random.default_rng(0).permutation(50),
    "none": np.zeros(0, np.int64),
}


@pytest.mark.parametrize("join", [0, 1 << 20])
@pytest.mark.parametrize("which", INDICES)
@pytest.mark.parametrize("name", ["mixed", "fixed-<f4", "empty-axis"])
def test_selected(name, which, join, monkeypatch):
    monkeypatch.setattr(derived, "JOIN_NBYTES", join)
    schema, indices = SCHEMAS[name], INDICES[which]
    source = MemorySource(schema, random_batch(schema, 50, seed=3))
    selected = DerivedSource(source, indices)
    assert len(selected) == len(indices)
    half = len(indices) // 2
    for start, stop in ((0, len(indices)), (half, len(indices)), (0, half), (half, half)):
        want = [source.read(i, i + 1) for i in indices[start:stop].tolist()]
        want = concatenate(schema, want) if want else source.read(0, 0)
        for arena in (None, Arena()):
            assert_same_batch(selected.read(start, stop, arena), want, schema)
    assert (selected.sizes(0, len(indices)) is None) == (schema.ragged and len(indices) > 0)


@pytest.mark.parametrize("name", ["mixed", "fixed-<f4"])
def test_duplicated(name):
    schema = SCHEMAS[name]
    source = MemorySource(schema, random_batch(schema, 7))
    twice = DerivedSource(source, times=3)
    assert len(twice) == 21
    for start, stop in ((0, 21), (5, 9), (6, 7), (7, 7), (2, 20)):
        want = [source.read(i % 7, i % 7 + 1) for i in range(start, stop)]
        want = concatenate(schema, want) if want else source.read(0, 0)
        assert_same_batch(twice.read(start, stop, Arena()), want, schema)
    fails(lambda: DerivedSource(source, times=0), UsageError)
    assert len(DerivedSource(MemorySource(schema, random_batch(schema, 0)), times=3)) == 0


@pytest.mark.parametrize(
    ("count", "shares", "sizes"),
    [
        (11, [0.5, 0.3, 0.2], [6, 3, 2]),  # 5.5, 3.3, 2.2: the largest remainder
        (10, [0.25, 0.25, 0.5], [3, 2, 5]),  # a tie goes to the earlier one
        (3, [0.98, 0.01, 0.01], [1, 1, 1]),
    ],
)
def test_shares_are_whole_by_largest_remainders(count, shares, sizes):
    assert split._shares(count, shares) == sizes


def test_groups_of_some_samples_of_some_samples(tmp_path):
    schema = {"x": "int64[None]"}
    samples = ({"x": np.arange(i + 1)} for i in range(15))
    dsprep.write(tmp_path / "all.h5", samples, length=15, schema=schema, durable=False)
    chosen = [3, 7, 9, 14]
    with dsprep.open(tmp_path / "all.h5") as source:
        selected = DerivedSource(source, np.array(chosen))
        options = RepackOptions(split="a=0.5,b=0.5", shuffle=1)
        plan = plan_repack(selected, tmp_path / "out.h5", options)
    assert sum(part.payload for part in plan.parts) == sum(i + 1 for i in chosen) * 8
