"""Every format to every format keeps every bit: one suite, checked with the formats' libraries."""

from __future__ import annotations

import itertools
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from oracles import READ, SUFFIX
from support import (
    DTYPES,
    MemorySource,
    assert_same_batch,
    random_batch,
    some_schemas,
    take,
    write_batch,
)

import dsprep
from dsprep import formats
from dsprep.core.groups import plain
from dsprep.core.schema import Field, Ragged, Schema
from dsprep.formats.options import WriteOptions
from dsprep.storage.trees import tree_nbytes
from dsprep.verbs.convert import ConvertOptions, plan_job
from dsprep.writing.job import RunOptions
from dsprep.writing.run import run_job

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

FORMATS = sorted(READ)
PAIRS = [*itertools.pairwise(FORMATS), (FORMATS[-1], FORMATS[0])]
"""Each format is read once and written once: neither knows of the other."""


def everything() -> Schema:
    """One field of every dtype and kind, fixed and ragged."""
    fields = []
    for i, dtype in enumerate(DTYPES):
        fields.append(Field(f"fixed{i}", dtype, (3, 2)))
        fields.append(Field(f"scalar{i}", dtype))
        fields.append(Field(f"ragged{i}", dtype, (None, 2)))
    fields += [
        Field("five", np.dtype("<f4"), (2, 1, 3, 2, 2)),
        Field("none", np.dtype("<f4"), (0, 3)),
        Field("flat", np.dtype("<f4"), (None,)),
        Field("ints", np.dtype("<i8"), (None,)),
        Field("time", np.dtype("<M8[ns]")),
        Field("quarter", np.dtype(ml_dtypes.float8_e4m3fn), (5,)),
        Field.opaque("blob"),
        Field.opaque("name", "str"),
        Field("deep/er/field", np.dtype("<i2"), (2,), attrs={"unit": "K", "scale": 2.5}),
    ]
    return Schema(tuple(fields), {"title": "naïve", "version": 3})


SOME = Schema(
    (
        *some_schemas()["mixed"],
        *(Field(f"x{i}", DTYPES[i], (3, 2)) for i in (1, 8, 11, 16, 18, 20, 22, 24)),
        *(Field(f"r{i}", DTYPES[i], (None, 2)) for i in (0, 10, 21, 23)),
    )
)
"""A field of every size and kind, where all of them would take long."""


def write(format: str, directory: Path, schema: Schema, batch, **options) -> Path:
    """Write samples from memory as a dataset of `format`."""
    origin = directory / "origin"
    origin.touch()
    target = directory / f"first{SUFFIX[format]}"
    source = MemorySource(schema, batch, origin)
    run_job(
        plan_job(source, target, ConvertOptions(write=WriteOptions(**options))),
        RunOptions(workers=2),
    )
    return target


@pytest.fixture(scope="module")
def firsts(tmp_path_factory):
    """The dataset with everything in it, in each format."""
    schema = everything()
    batch = random_batch(schema, 11, seed=5)
    made = {}
    for format in FORMATS:
        made[format] = write(format, tmp_path_factory.mktemp(format), schema, batch)
    return schema, batch, made


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_every_pair_keeps_every_bit(a, b, firsts, tmp_path):
    schema, batch, made = firsts
    target = tmp_path / f"out{SUFFIX[b]}"
    report = dsprep.convert(made[a], target, workers=2)
    assert report.samples == 11
    assert_same_batch(READ[b](target, schema), batch, schema)
    with dsprep.open(target) as source, dsprep.open(made[a]) as original:
        assert source.schema == schema
        assert dict(source.schema.attrs) == dict(schema.attrs)
        attrs = [dict(source.schema[f.name].attrs) for f in schema]
        assert attrs == [dict(f.attrs) for f in schema]
        assert_same_batch(source[:], batch, schema)
        assert dsprep.verify(original, source).same


@pytest.mark.parametrize("format", FORMATS)
def test_single_fields_of_every_kind(format, tmp_path):
    for name, schema in some_schemas().items():  # others are in `everything`
        directory = tmp_path / name.replace("<", "l").replace(">", "b").replace("|", "")
        directory.mkdir()
        count = 1 if name == "mixed" else 9
        batch = random_batch(schema, count, seed=2)
        path = write(format, directory, schema, batch)
        assert_same_batch(READ[format](path, schema), batch, schema)
        with dsprep.open(path) as source:
            assert source.schema == schema
            assert len(source) == count
            assert_same_batch(source[2:7], take(batch, 2, 7), schema)


BIG = Schema((Field("x", np.dtype("<u2"), (128, 128, 64, 12)), Field("y", np.dtype("<f4"), (4,))))


@pytest.mark.parametrize("format", FORMATS)
def test_samples_of_25_megabytes(format, tmp_path):
    x = np.arange(2 * 128**3 * 6, dtype="<u2").reshape(2, 128, 128, 64, 12)
    batch = {"x": x, "y": np.arange(8, dtype="<f4").reshape(2, 4)}
    path = write(format, tmp_path, BIG, batch)
    assert_same_batch(READ[format](path, BIG), batch, BIG)
    with dsprep.open(path) as source:
        assert np.array_equal(source[1]["x"], x[1])


@pytest.mark.parametrize("format", FORMATS)
def test_the_space_that_is_planned_is_what_is_taken(format, tmp_path):
    """Or little more: it is compared with what the disk has."""
    known, schema = formats.load(format), Schema((Field("x", np.dtype("<f4"), (50,)),))
    options = WriteOptions(chunk=64 if format in ("hdf5", "zarr") else None)
    batch = random_batch(schema, 500)
    write_batch(known, tmp_path / "out", schema, batch, options)
    planned = known.plan(schema, options, plain(500), batch["x"].nbytes).nbytes
    taken = tree_nbytes(tmp_path / "out")
    assert taken <= planned <= 1.1 * taken + (64 << 10)


COMPRESSED = [("hdf5", "zstd:3"), ("zarr", "gzip"), ("zarr", "blosc")]
"""Others are of `FormatContract`."""


@pytest.fixture(scope="module")
def some(tmp_path_factory):
    """A dataset to start from."""
    batch = random_batch(SOME, 11, seed=5)
    return batch, write("lmdb", tmp_path_factory.mktemp("some"), SOME, batch)


@pytest.mark.parametrize(("format", "codec"), COMPRESSED)
def test_compression_keeps_every_bit(format, codec, some, tmp_path):
    if codec.startswith("zstd") and format == "hdf5":
        pytest.importorskip("hdf5plugin")
    batch, origin = some
    target = tmp_path / f"out{SUFFIX[format]}"
    dsprep.convert(origin, target, compress=codec, workers=2)
    assert_same_batch(READ[format](target, SOME), batch, SOME)
    with dsprep.open(target) as source:
        assert_same_batch(source[:], batch, SOME)


def test_values_that_do_not_fit_a_cast_stop_the_conversion(tmp_path):
    schema = Schema((Field("x", np.dtype("<f4"), (2,)),))
    batch = {"x": np.array([[1, 2], [3, 1e30]], "f4")}
    first = write("lmdb", tmp_path, schema, batch)
    target = tmp_path / "cast.h5"
    with pytest.raises(dsprep.DsprepError, match="sample 1, field x"):
        dsprep.convert(first, target, cast={"x": "float16"})
    assert not target.exists()
    dsprep.convert(first, target, cast={"x": "float16"}, samples=":1", restart=True)
    with dsprep.open(target) as source:
        assert source[0]["x"].tolist() == [1, 2]
        assert source.schema["x"].dtype == np.float16


@pytest.mark.parametrize("format", FORMATS)
def test_ragged_values_behave_for_users(format, tmp_path):
    schema = Schema((Field("p", np.dtype("<f4"), (None, 3)), Field.opaque("s", "str")))
    items = [np.full((n, 3), n, "f4") for n in (2, 0, 5)]
    batch = {
        "p": Ragged.pack(items, schema["p"]),
        "s": Ragged.pack(["a", "", "日本"], schema["s"]),
    }
    path = write(format, tmp_path, schema, batch)
    with dsprep.open(path) as source:
        assert [s["p"].shape for s in source] == [(2, 3), (0, 3), (5, 3)]
        assert [s["s"] for s in source] == ["a", "", "日本"]
        assert source[-1]["p"].tolist() == items[2].tolist()
        with pytest.raises(IndexError):
            source[3]
