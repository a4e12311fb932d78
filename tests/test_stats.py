"""Statistics are numpy's, of any dtype and format, kept until the data change; normalise."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import fails
from typer.testing import CliRunner

import dsprep
from dsprep.cli import app
from dsprep.core.schema import Field, Ragged, decode_dtype
from dsprep.errors import DsprepError, UsageError
from dsprep.reader import stats as module
from dsprep.reader.stats import FieldSums, Moments

N = 400
RNG = np.random.default_rng(7)
X = RNG.normal(3, 2, (N, 6)).astype("f4")
X[5, 1:4] = np.nan, np.inf, -np.inf
COLUMNS = {
    "x": X,
    "label": RNG.integers(-3, 4, N).astype("i8"),
    "good": RNG.integers(0, 2, N).astype(bool),
    "big": RNG.choice(np.array([-(2**63), 2**63 - 1, 0]), N),
    "many": np.arange(N * 10, dtype="u4").reshape(N, 10)[:, 0] * 1000,
}
WORDS = [f"w{i % 7}é" for i in range(N)]
TOKENS = [np.arange(i % 9, dtype="i4") for i in range(N)]


def samples():
    for i in range(N):
        yield {name: c[i] for name, c in COLUMNS.items()} | {"word": WORDS[i], "t": TOKENS[i]}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the same samples in all formats, and in several files."""
    directory = tmp_path_factory.mktemp("stats")
    for name in ("a.h5", "a.zarr", "a.tfrecord", "a.lmdb"):
        dsprep.write(directory / name, samples(), schema={"t": "int32[None]"}, durable=False)
    dsprep.convert(directory / "a.h5", directory / "shards", to="hdf5", shard_size="8KiB")
    return directory


def close(found: dsprep.reader.stats.FieldStats, values: np.ndarray) -> None:
    """Assert that statistics are those of numpy in long double."""
    flat = values.reshape(-1)
    nans, finite = np.isnan(flat), flat[np.isfinite(flat)]
    assert (found.count, found.nans) == (flat.size, nans.sum())
    assert found.infinities == flat.size - len(finite) - found.nans
    assert (found.min, found.max) == (finite.min(), finite.max())
    wide = finite.astype(np.longdouble)
    scale = float(wide.std()) + abs(float(wide.mean())) * 1e-3
    assert found.mean == pytest.approx(float(wide.mean()), rel=1e-12, abs=1e-12 * scale)
    assert found.std == pytest.approx(float(wide.std()), rel=1e-9, abs=1e-300)


@pytest.mark.parametrize("name", ["a.h5", "a.zarr", "a.tfrecord", "a.lmdb", "shards"])
def test_all_formats_have_the_statistics_of_numpy(made: Path, name: str) -> None:
    found = dsprep.stats(made / name)
    for field, column in COLUMNS.items():
        close(found[field], column)
    assert found["label"].classes == dict(sorted(Counter(COLUMNS["label"].tolist()).items()))
    assert [*found["good"].classes] == [False, True]
    assert found["big"].classes == Counter(COLUMNS["big"].tolist())
    assert found["x"].classes is None
    assert found["word"].classes == Counter(WORDS)
    assert found["word"].lengths == (4, 4.0, 4)
    assert found["t"].lengths == (0, pytest.approx(np.mean([*map(len, TOKENS)])), 8)
    close(found["t"], np.concatenate(TOKENS))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["f2", "bfloat16", "f4", "f8", ">f4", "u1", "i2", "i8", ">i8", "u8", "?"]),
    st.integers(1, 300),
    st.integers(0, 40),
    st.integers(1, 64),
    st.integers(0, 2**32),
)
def test_large_offsets_cost_no_digits(
    kind: str, count: int, power: int, block: int, seed: int
) -> None:
    rng, dtype = np.random.default_rng(seed), decode_dtype(kind)
    if dtype.kind in "fV":
        top = {2: 4, 4: 18, 8: 40}[dtype.itemsize]
        values = (rng.normal(size=count) + 2.0 ** min(power, top)).astype(dtype)
    else:
        high = 2 if dtype.kind == "b" else int(np.iinfo(dtype).max)
        values = (high - rng.integers(0, min(high, 100), count, dtype="u8")).astype(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        one, other = Moments(), Moments()
        one.add(values[: count // 3])
        other.add(values[count // 3 :])
        one.merge(other)
    numbers = (values.astype("f8") if dtype.kind == "V" else values).tolist()
    exact = [Fraction(n) for n in numbers]
    mean = sum(exact) / count
    assert one.count == count
    assert (one.low, one.high) == (min(numbers), max(numbers))
    assert float(one.base + one.offset) == pytest.approx(float(mean), rel=1e-14)
    squares = float(sum((v - mean) ** 2 for v in exact))
    assert one.m2 == pytest.approx(squares, rel=1e-9, abs=1e-18 * one.high**2)


def test_extremes_and_too_many_classes() -> None:
    label = Field("y", np.dtype("i8"))
    ends = np.array([-(2**63), 2**63 - 1] * 50)
    found = FieldSums.of(label, ends).result(label)
    assert found.std == pytest.approx(2.0**63)
    assert found.classes == {-(2**63): 50, 2**63 - 1: 50}
    sums = FieldSums.of(label, np.arange(600))
    sums.merge(FieldSums.of(label, np.arange(300, 900)))
    assert len(sums.result(label).classes) == 900
    sums.merge(FieldSums.of(label, np.arange(900, 1500)))
    assert sums.result(label).classes is None
    text = Field("s", np.dtype("u1"), (None,), "str")
    long = Ragged.pack(["a" * 1000], text)
    assert FieldSums.of(text, long).result(text).classes is None


def test_an_empty_dataset(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "e.h5", "w") as file:
        file["x"] = np.zeros((0, 3), "f4")
    found = dsprep.stats(tmp_path / "e.h5")["x"]
    assert (found.samples, found.count, found.mean, found.std) == (0, 0, None, None)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    with h5py.File(tmp_path / "p.h5", "w") as file:
        file["x"] = np.arange(4000, dtype="f4").reshape(1000, 4)
        file["y"] = np.arange(1000) % 3
    return tmp_path / "p.h5"


def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list that gets the first sample of each piece that is read."""
    starts: list[int] = []
    pieces = module.pieces

    def noted(source):
        starts.extend(start for start, _ in pieces(source))
        return pieces(source)

    monkeypatch.setattr(module, "pieces", noted)
    return starts


@pytest.mark.parametrize("sidecar", [False, True])
def test_kept_until_the_data_change(
    plain: Path, sidecar: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sidecar:
        dsprep.provenance(plain)
        before = plain.with_name("p.h5.dsprep.json").read_bytes()
    starts = reads(monkeypatch)
    first = dsprep.stats(plain)
    assert starts
    starts.clear()
    assert dsprep.stats(plain) == first
    assert dsprep.stats(plain, "x")["x"] == first["x"]  # those of all fields serve
    assert not starts
    if sidecar:
        assert plain.with_name("p.h5.dsprep.json").read_bytes() == before
        assert not dsprep.check(plain)
    with h5py.File(plain, "r+") as file:
        file["x"][500, 2] = -9
        file["x"][0, 0] = file["y"][999] = 1  # in the first and the last block
    if sidecar:
        with pytest.raises(dsprep.StaleError):
            dsprep.stats(plain)
        dsprep.provenance(plain)
    assert dsprep.stats(plain)["x"].min == -9
    whole = {kept: kept.read_text() for kept in plain.parent.glob(".stats-*")}
    for old, new in (('"count": ', '"count": 1'), ('"files": [', '"files": [1, '), ("{", "")):
        starts.clear()
        for kept, text in whole.items():
            kept.write_text(text.replace(old, new, 1))
        with pytest.warns(UserWarning, match="damaged"):
            assert dsprep.stats(plain)["x"].min == -9
        assert starts


def test_of_a_subset(plain: Path) -> None:
    split = "train of train=0.5,val=0.5"
    found = dsprep.stats(plain, "x", split)["x"]
    dsprep.provenance(plain)
    with dsprep.Reader(plain, 50, subset=split) as reader:
        x = np.concatenate([batch["x"].copy() for batch in reader])
    close(found, x)
    assert found == dsprep.stats(plain, "x", split)["x"]
    assert dsprep.stats(plain, subset="y == 2")["y"].classes == {2: 333}
    fails(lambda: dsprep.stats(plain, "nosuch"), DsprepError, "no field")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mini_epochs": 4, "repeats": 3},
        {"engine": "direct"},
        {"shuffle": "global", "io_threads": 3},
        {"weights": "w"},
        {"remainder": "pad", "world_size": 3, "rank": 2},
        {"verify": True, "io_threads": 2, "epochs": 2},
    ],
    ids=str,
)
def test_normalised_batches_of_a_reader(tmp_path: Path, options: dict) -> None:
    x = np.random.default_rng(1).normal(100, 5, (300, 8)).astype("f4")
    with h5py.File(tmp_path / "p.h5", "w") as file:
        file["x"], file["i"], file["w"] = x, np.arange(300), np.arange(300) % 5
        file["u"] = (x > 100).astype("u1")
    dsprep.repack(tmp_path / "p.h5", tmp_path / "g.h5", buffer_size="50", durable=False)
    wide = x.astype("f8")
    expected = (wide - wide.mean()) / wide.std()
    u = (x > 100).astype("f8")
    transform = dsprep.normalise(tmp_path / "g.h5", "x", "u")
    seen = 0
    with dsprep.Reader(tmp_path / "g.h5", 16, transform=transform, **options) as reader:
        for batch in reader:
            assert batch["x"].dtype == batch["u"].dtype == np.float32
            np.testing.assert_allclose(batch["x"], expected[batch["i"]], atol=1e-5)
            ones = (u - u.mean()) / u.std()
            np.testing.assert_allclose(batch["u"], ones[batch["i"]], atol=1e-5)
            seen += len(batch["i"])
    assert seen
    with h5py.File(tmp_path / "p.h5") as file:
        assert (file["x"][:] == x).all()


def test_normalise_takes_statistics_and_ragged_fields(made: Path) -> None:
    found = dsprep.stats(made / "a.h5")
    batch = {"t": Ragged.pack(TOKENS, Field("t", np.dtype("i4"), (None,)))[10:20]}
    out = dsprep.normalise(found, "t")(batch)["t"]
    for row, tokens in zip(out, TOKENS[10:20], strict=True):
        np.testing.assert_allclose(row, (tokens - found["t"].mean) / found["t"].std, atol=1e-6)
    for fields in ((), ("word",), ("nosuch",)):
        with pytest.raises(UsageError, match=r"no field|no mean"):
            dsprep.normalise(found, *fields)
    constant = module.FieldStats(2, 2, 5, 5, 5.0, 0.0)
    assert not dsprep.normalise({"x": constant}, "x")({"x": np.array([5, 5])})["x"].any()


def test_the_command(plain: Path) -> None:
    def run(*words: str) -> str:
        done = CliRunner().invoke(app, ["inspect", str(plain), *words])
        assert done.exit_code == 0, done.output
        return done.stdout

    shown = run("--stats")
    assert "0.0 to 3,999.0" in shown
    assert "1,999.5, standard deviation 1,154.7" in shown
    assert "3: 0 334, 1 333, 2 333" in shown
    content = json.loads(run("--stats", "--json", "--subset", "y == 1"))["stats"]
    assert content["y"]["classes"] == [[1, 333]]
    assert content["x"]["samples"] == 333
    assert "stats" not in json.loads(run("--json"))
    done = CliRunner().invoke(app, ["inspect", str(plain), "--subset", "y == 1"])
    assert done.exit_code == 2
