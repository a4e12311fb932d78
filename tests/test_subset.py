"""Subsets, conditions and weights: which samples come, on which ranks, and what is read for it."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import cli, cli_error, fails

import dsprep
from dsprep.core.schema import Array, Ragged, decode_dtype
from dsprep.errors import DsprepError, UsageError
from dsprep.reader.order import Assignment, Epoch, ResumePoint, Weights
from dsprep.reader.subset import numbers_of
from dsprep.reader.where import Where

N = 1000


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset in groups of 50: the sample's number, a label, text, a vector."""
    directory = tmp_path_factory.mktemp("subset")
    rng = np.random.default_rng(0)
    with h5py.File(directory / "plain.h5", "w") as file:
        file["i"] = np.arange(N)
        file["label"] = rng.integers(0, 10, N).astype("u1")
        file["y"] = rng.normal(size=N).astype("f4")
        file["x"] = np.arange(N * 25, dtype="f4").reshape(N, 25)
        file["word"] = np.array([f"w{i % 7}" for i in range(N)], dtype=h5py.string_dtype())
    dsprep.repack(directory / "plain.h5", directory / "g.h5", buffer_size="50", durable=False)
    return directory / "g.h5"


def columns(path: Path) -> dict[str, Array]:
    with h5py.File(path.with_name("plain.h5")) as file:
        return {name: file[name][:] for name in file}


def came(reader: dsprep.Reader) -> list[int]:
    return [int(i) for batch in reader for i in batch["i"]]


CONDITIONS = {
    "label in (3, 5) and y > 0": lambda c: np.isin(c["label"], (3, 5)) & (c["y"] > 0),
    "not label == 3": lambda c: c["label"] != 3,
    "label not in [1, 2] or -0.5 < y <= 0.5": lambda c: (
        ~np.isin(c["label"], (1, 2)) | ((c["y"] > -0.5) & (c["y"] <= 0.5))
    ),
    "label + 250 > 255": lambda c: c["label"].astype(int) + 250 > 255,
    "label - 5 < 0": lambda c: c["label"] < 5,
    "word == 'w3'": lambda c: c["word"] == b"w3",
    "word in ('w1', 'w2') and i % 2 == 0": lambda c: (
        np.isin(c["word"].astype("S"), [b"w1", b"w2"]) & (c["i"] % 2 == 0)
    ),
    "len(word) == 2": lambda c: np.ones(N, bool),
    "x[0] >= 5000 and any(x % 25 == 3)": lambda c: c["x"][:, 0] >= 5000,
    'field("i") < 7': lambda c: c["i"] < 7,
    "abs(y) < 1 and isfinite(y)": lambda c: np.abs(c["y"]) < 1,
}


def test_groups_of_a_subset_come_in_order_unless_they_are_shuffled(grouped: Path) -> None:
    for shuffle in ("none", "group"):
        with dsprep.Reader(grouped, 16, subset="i % 3 == 0", shuffle=shuffle, seed=1) as reader:
            found = came(reader)
        groups = [i // 50 for i in found]
        assert sorted(found) == list(range(0, N, 3))
        assert (found == sorted(found), groups == sorted(groups)) == (shuffle == "none",) * 2


@pytest.mark.parametrize("text", CONDITIONS)
def test_conditions_choose_what_numpy_does(grouped: Path, text: str) -> None:
    expected = np.flatnonzero(CONDITIONS[text](columns(grouped)))
    with dsprep.Reader(grouped, 16, subset=text) as reader:
        assert reader.samples == len(expected)
        assert sorted(came(reader)) == expected.tolist()
    kept = list(grouped.parent.glob(".g.h5*.npy"))
    with dsprep.Reader(grouped, 16, subset=text) as reader:
        assert sorted(came(reader)) == expected.tolist()
    assert list(grouped.parent.glob(".g.h5*.npy")) == kept  # it was computed once


def test_what_was_kept_is_computed_again_where_it_is_not_to_trust(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["i"] = np.arange(20)
    dsprep.provenance(tmp_path / "a.h5")

    def use() -> None:
        with dsprep.Reader(tmp_path / "a.h5", 4, subset="i < 7") as reader:
            assert sorted(came(reader)) == [*range(7)]

    use()
    (kept,) = tmp_path.glob(".a.h5*.npy")
    whole = kept.read_bytes()
    np.testing.assert_array_equal(np.load(kept), np.arange(20) < 7)
    for at in (*range(0, len(whole), 29), len(whole) - 20):
        kept.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.warns(UserWarning, match="damaged"):
            use()
        assert kept.read_bytes() == whole


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "cannot be parsed"),
        ("1 < 2", "names no field"),
        ("label", "not yes or no"),
        ("word + 1 == 2", "only compared"),
        ("nosuch > 1", "no field nosuch"),
        ("__import__('os').system('x') == 0", "names no field"),
        ("(lambda: label)() == 0", "none of what"),
        ("x[99] > 0", "out of bounds"),
        ("label and y", "combine comparisons"),
        ("label == " + "9" * 5000, "cannot be parsed|not possible"),
        ("(" * 3000 + "label" + ")" * 3000, "cannot be parsed"),
        ("label == 1" + " or label == 2" * 3000, "more than"),
        ("-" * 5000 + "label == 1", "not possible"),
        ("i > 1/0", "divides by zero"),
    ],
)
def test_other_conditions_are_refused_in_one_line(grouped: Path, text: str, problem: str) -> None:
    with pytest.raises(DsprepError, match=problem) as caught:
        dsprep.Reader(grouped, 16, subset=text)
    assert len(str(caught.value)) < 500


DTYPES = ["?", "i1", "u1", "<i4", ">i8", "<i8", "<u8", "f2", "bfloat16", "<f4", "<f8"]
EDGES = [0, 1, -1, 2, 7, 127, 2**31, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]
FLOATS = [0.0, 0.5, -2.25, 1e4, float("inf"), float("nan")]


@st.composite
def fields(draw: st.DrawFn) -> Array:
    """Draw the values of a field of any dtype."""
    dtype = decode_dtype(draw(st.sampled_from(DTYPES)))
    if dtype.kind not in "biu":
        return np.array(draw(st.lists(st.sampled_from(FLOATS), min_size=4, max_size=4)), dtype)
    least, most = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    one = st.sampled_from([v for v in EDGES if least <= v <= most]) | st.integers(least, most)
    return np.array(draw(st.lists(one, min_size=4, max_size=4)), dtype)


NUMBERS = st.recursive(
    st.sampled_from(["a", "b", "0.5", "-2.25", *map(str, EDGES)]),
    lambda n: (
        st.tuples(n, st.sampled_from(["+", "-", "*", "/", "//", "%"]), n).map(
            lambda t: f"({' '.join(t)})"
        )
        | n.map("abs({})".format)
        | n.map("(-{})".format)
    ),
    max_leaves=4,
)
COMPARISONS = st.one_of(
    st.tuples(NUMBERS, st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), NUMBERS).map(" ".join),
    NUMBERS.map("{} in (0.5, 7, 9223372036854775808)".format),
    st.tuples(NUMBERS, NUMBERS, NUMBERS).map(lambda t: f"{t[0]} <= {t[1]} < {t[2]}"),
    NUMBERS.map("isfinite({})".format),
).filter(re.compile(r"\b[ab]\b").search)
TRUTHS = st.recursive(
    COMPARISONS,
    lambda t: st.tuples(t, st.sampled_from(["and", "or"]), t).map(lambda t: f"({' '.join(t)})"),
    max_leaves=3,
)


@given(fields(), fields(), TRUTHS)
@settings(max_examples=100, deadline=None)
def test_every_sample_is_judged_as_python_does(a: Array, b: Array, text: str) -> None:
    batch, expected = {"a": a, "b": b}, []
    known = {"isfinite": math.isfinite, "abs": abs, "__builtins__": {}}
    for x, y in zip(a, b, strict=True):
        values = (float(v) if v.dtype.kind not in "biu" else v.item() for v in (x, y))
        try:
            expected.append(eval(text, known, dict(zip("ab", values, strict=True))))
        except ZeroDivisionError:
            expected.append(None)
    found: list[Any] | None = None
    problem = ""
    try:
        found = Where(text)(batch).tolist()
    except UsageError as error:
        problem = str(error)
    early = re.search("<|[/%] 0", text)  # Python may leave a chain before it divides
    divides = "divides by zero" in problem and (bool(early) or None in expected)
    assert found == expected or divides


def test_values_keep_their_meaning() -> None:
    for dtype in map(decode_dtype, ("f2", "bfloat16", "f4", "f8")):
        stored = np.array([0.1, 0.2, 7], dtype)
        for text in ("a == 0.1", "0.1 >= a", "a in (0.1, 3)", "not a > 0.1", "v[1] == 0.1"):
            batch = {"a": stored, "v": np.stack([stored * 0, stored], 1)}
            assert Where(text)(batch).tolist() == [True, False, False], (text, dtype)
        assert Where("a < 1e300")({"a": np.array([np.inf, 1], dtype)}).tolist() == [False, True]
    ends = np.array([0, 5, 10, 2**40])
    assert Where("a != 0 and 10 / a == 2")({"a": ends}).tolist() == [False, True, False, False]
    vectors = {"x": np.array([[1, 5, 9], [2, 2, 2], [8, 0, 0]]), "y": np.array([4, 2, 9])}
    assert Where("any(x > y)")(vectors).tolist() == [True, False, False]
    column = {"x": np.array([[1], [5], [9]]), "y": np.array([4, 2, 9])}
    assert Where("any(x > y)")(column).tolist() == [False, True, False]
    fails(lambda: Where("a > 0")({"a": np.zeros(3, np.longdouble)}), UsageError, "not compared")
    big = np.array([2**63 + 1, 5], np.uint64)
    assert Where("a > 9223372036854775808")({"a": big}).tolist() == [True, False]
    assert Where("a - 6 < 0")({"a": big[1:]}).tolist() == [True]
    text = Ragged(np.frombuffer("caf\u00e9".encode(), np.uint8), np.array([0, 5]), "str")
    assert Where("t == 'caf\u00e9'")({"t": text}).tolist() == [True]
    assert Where("isnan(a)")({"a": np.array([np.nan, 1])}).tolist() == [True, False]


def test_subsets_by_numbers_masks_and_files(grouped: Path, tmp_path: Path) -> None:
    numbers = np.array([7, 3, 999, 500])
    np.save(tmp_path / "kept.npy", numbers)
    mask = np.zeros(N, bool)
    mask[numbers] = True
    for subset in (numbers, numbers.tolist(), mask, str(tmp_path / "kept.npy")):
        with dsprep.Reader(grouped, 3, subset=subset) as reader:
            assert sorted(came(reader)) == [3, 7, 500, 999]
            assert reader.stats[-1].samples == 4
    masked = np.ma.masked_array(numbers, [0, 1, 0, 0])
    assert numbers_of(np.ma.masked_array(numbers), N).tolist() == [3, 7, 500, 999]
    for wrong in ([1, 1], [-1], [N], [0.5], [[1]], mask[:5], [*range(N), 3], masked, "nosuch.npy"):
        fails(lambda: numbers_of(wrong, N), UsageError)
    with pytest.raises(UsageError, match="masked"):
        dsprep.Reader(grouped, 3, weights=np.ma.masked_less(np.arange(N), 5))
    huge = tmp_path / "huge.npy"  # its 80 GB are a hole
    np.save(huge, np.zeros(2, np.int64))
    header = huge.read_bytes()[:128].replace(b"(2,), }" + b" " * 10, b"(10000000000,), }")
    huge.write_bytes(header)
    os.truncate(huge, 128 + 80_000_000_000)
    fails(lambda: numbers_of(huge, N), UsageError, "sample 0 comes twice")


def test_damaged_npy_files_are_errors(grouped: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(N))
    whole, path = (tmp_path / "a.npy").read_bytes(), tmp_path / "b.npy"
    changes = {b"(1000,)": b"((1000,", b"'<i8'": b"'<i8 ", b"'descr'": b"'de\0cr'", b"<i8": b"08i"}
    damaged = [whole.replace(*change) for change in changes.items()]
    for content in (*damaged, whole[:-1], whole[:60], b"", b"\x93NUMPY"):
        path.write_bytes(content)
        for argument in ("subset", "weights"):
            fails(lambda: dsprep.Reader(grouped, 3, **{argument: str(path)}), DsprepError, "b.npy")
    path.unlink()
    os.mkfifo(path)
    fails(lambda: dsprep.Reader(grouped, 3, subset=str(path)), DsprepError, "regular")


def test_parts_of_a_split_are_disjoint_and_complete(grouped: Path) -> None:
    shares = {"train": 0.8, "val": 0.2}

    def part(name: str, **more: object) -> list[int]:
        subset = dsprep.Subset(split=(name, shares), **more)
        with dsprep.Reader(grouped, 16, subset=subset) as reader:
            return came(reader)

    train, val = part("train"), part("val")
    assert len(train) == 800
    assert sorted(train + val) == list(range(N))
    label = columns(grouped)["label"]
    train, val = part("train", group_by="label"), part("val", group_by="label")
    assert not set(label[train]) & set(label[val])
    assert sorted(train + val) == list(range(N))
    both = part("train", where="y > 0")
    assert set(both) == set(part("train")) & set(np.flatnonzero(columns(grouped)["y"] > 0).tolist())
    for wrong in (("test", shares), ("train", {"train": 0.5}), ("train",), "train"):
        fails(lambda: dsprep.Subset(split=wrong), UsageError)


def test_only_groups_with_samples_are_read(grouped: Path) -> None:
    with dsprep.Reader(grouped, 16, subset=np.arange(200, 300), io_threads=1) as reader:
        assert sorted(came(reader)) == list(range(200, 300))
        wanted = 100 * (8 + 1 + 4 + 100 + 2)
        assert reader.stats[-1].nbytes <= 1.2 * wanted


@pytest.mark.parametrize("weights", [None, "label"])
def test_states_of_other_subsets_are_refused(grouped: Path, weights: str | None) -> None:
    more = {"weights": weights, "seed": 5}
    with dsprep.Reader(grouped, 8, subset="label != 4", **more) as reader:
        state = reader.state_dict()
    with (
        dsprep.Reader(grouped, 8, subset="label != 5", **more) as reader,
        pytest.raises(UsageError, match=r"another (subset|weights)"),
    ):
        reader.load_state_dict(state)


def test_weights_draw_as_often_as_asked(grouped: Path) -> None:
    label = columns(grouped)["label"].astype(float)
    with dsprep.Reader(grouped, 50, weights=label, epochs=20) as reader:
        epochs = [came(reader) for _ in range(20)]
    assert all(len(epoch) == N for epoch in epochs)
    assert sorted(epochs[0]) != sorted(epochs[1])
    times = np.bincount(np.concatenate(epochs), minlength=N)
    assert times[label == 0].sum() == 0
    expected = label / label.sum() * N * 20
    by_label = [(times[label == v].sum(), expected[label == v].sum()) for v in range(1, 10)]
    assert all(abs(a - b) < 6 * b**0.5 for a, b in by_label)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_every_kept_sample_comes_once(data: st.DataObject) -> None:
    stored = np.append(0, np.cumsum(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=9))))
    n = int(stored[-1])
    kept = np.flatnonzero(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    if not len(kept):
        return
    shuffle = data.draw(st.sampled_from(["group", "global", "none"]))
    weights = Weights(np.ones(len(kept))) if data.draw(st.booleans()) else None
    edges, mixed = np.searchsorted(kept, stored), data.draw(st.integers(1, 4))
    world, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7))
    order = Assignment(edges, shuffle, 3, mixed, "ragged", world, size, None, stored, kept, weights)
    sequence = order.sequence(2)
    expected = kept if weights is None else kept[weights.draw(3, 2)]
    steps = data.draw(st.integers(0, 3))
    found = []
    first, rest = Epoch(sequence, (), "ragged"), None
    rest = Epoch(sequence, (ResumePoint(world, size, steps),), "ragged")
    other = data.draw(st.integers(1, 4))
    for epoch, ranks, whole in ((first, world, False), (rest, other, True)):
        for rank in range(ranks):
            share = epoch.share(ranks, rank, size)
            left = share.count if whole else share.delivered(min(steps, share.steps))
            for unit in epoch.units(share):
                unit = unit.part(0, min(len(unit), left))
                left -= len(unit)
                samples, slots = sequence.slots(unit)
                assert sorted(slots) == list(range(len(unit)))
                found += samples.tolist()
    assert sorted(found) == expected.tolist()


def test_audit_stage_and_repack_take_subsets(grouped: Path, tmp_path: Path) -> None:
    label = columns(grouped)["label"]
    common = ["audit", grouped, "-P", 3, "-M", 8, "--subset", "label in (3, 5)", "--json"]
    report = cli(*common).json()
    count = int(np.isin(label, (3, 5)).sum())
    assert (report["samples"], report["kept"]) == (count, True)
    more = ["--weights", "label", "--resume-at", "3"]
    assert "--resume-ranks" in cli_error(*common, *more, code=None)
    report = cli(*common, *more, "--resume-ranks", 2).json()
    assert report["kept"]
    assert report["epochs"][0]["drawn"][0] < count

    target = tmp_path / "some.h5"
    subset = "train of train=0.5,val=0.5 by label"
    cli("repack", grouped, target, "--subset", subset, "-b", 20)
    with dsprep.Reader(grouped, 9, subset=subset) as reader:
        expected = sorted(came(reader))
    with h5py.File(target) as file:
        assert file["i"][:].tolist() == expected
    both = tmp_path / "both.h5"
    dsprep.repack(grouped, both, subset="label == 1", split="train=0.5,val=0.5", durable=False)
    parts = [h5py.File(tmp_path / f"both-{n}.h5")["i"][:].tolist() for n in ("train", "val")]
    assert sorted(parts[0] + parts[1]) == np.flatnonzero(label == 1).tolist()

    cache = tmp_path / "cache"
    dsprep.stage(grouped, 1, 8, cache, ranks_per_node=1, subset=np.arange(200, 300))
    staged = sum(f.stat().st_blocks * 512 for f in cache.rglob("*") if f.is_file())
    assert staged < grouped.stat().st_size / 2
    with dsprep.Reader(grouped, 8, subset=np.arange(200, 300), cache=cache) as reader:
        assert sorted(came(reader)) == list(range(200, 300))
        assert reader.stats[-1].cache_nbytes == reader.stats[-1].nbytes > 0


@pytest.mark.parametrize("pools", [1, 2])
def test_mini_epochs_of_a_subset(grouped: Path, tmp_path: Path, pools: int) -> None:
    subset = "label in (1, 2, 3) and (i < 300 or i > 600)"
    cut = dsprep.MiniEpochs(3, pools=pools)
    more = {"mini_epochs": cut, "repeats": 2, "subset": subset, "epochs": 1}
    seen: list[int] = []
    for rank in range(2):
        cache = tmp_path / f"cache{rank}"
        with dsprep.Reader(grouped, 8, rank=rank, world_size=2, cache=cache, **more) as reader:
            for _ in range(6):
                seen += came(reader)
    with dsprep.Reader(grouped, 8, subset=subset) as reader:
        assert sorted(seen) == sorted(came(reader) * 2)
    report = dsprep.audit(grouped, 2, 8, subset=subset, mini_epochs=3, repeats=2, pools=pools)
    assert report.kept
    with pytest.raises(UsageError, match="weights draw samples anew"):
        dsprep.Reader(grouped, 8, mini_epochs=2, weights="label")
