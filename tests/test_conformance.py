"""Every format to every format keeps every bit: one suite, checked with the formats' libraries."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from oracles import READ, SUFFIX
from record_checks import taken
from support import (
    DTYPES,
    assert_same_batch,
    dataset,
    random_batch,
    some_schemas,
    take,
    write_batch,
    written,
)

import dsprep
from dsprep import formats
from dsprep.core.groups import plain
from dsprep.core.schema import Arena, Field, Schema
from dsprep.formats.options import Compression, WriteOptions
from dsprep.sidecar.sidecar import Sidecar
from dsprep.storage.trees import tree_nbytes

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


@pytest.fixture(scope="module")
def firsts(tmp_path_factory):
    """The dataset with everything in it, in each format."""
    schema = everything()
    batch = random_batch(schema, 11, seed=5)
    made = {}
    for format in FORMATS:
        made[format] = written(
            tmp_path_factory.mktemp(format) / f"first{SUFFIX[format]}", schema, batch
        )
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


SCHEMAS = some_schemas()  # others are in `everything`
WAYS = {
    **{format: {} for format in FORMATS},
    "hdf5 gzip": {"chunk": 13, "compress": Compression("gzip")},
    "hdf5 zstd": {"compress": Compression("zstd", 3)},
    "zarr small": {"chunk": 2, "zarr_shard": 6},
    "zarr files": {"chunk": 3, "zarr_shard": 0},
    "zarr v2": {"zarr_format": 2, "chunk": 2},
    "zarr zstd": {"chunk": 2, "zarr_shard": 4, "compress": Compression("zstd")},
    "zarr gzip": {"compress": Compression("gzip", 1)},
    "zarr blosc": {"zarr_shard": 0, "chunk": 3, "compress": Compression("blosc")},
    "zarr v2 zstd": {"zarr_format": 2, "chunk": 3, "compress": Compression("zstd", 5)},
    "zarr v2 blosc": {"zarr_format": 2, "compress": Compression("blosc")},
}
CASES = [
    *((name, way, 37) for name in SCHEMAS for way in FORMATS),
    *((name, way, 37) for name in ("mixed", "empty-axis", "ragged-<f4") for way in list(WAYS)[4:]),
    *(("mixed", way, count) for way in (*FORMATS, "zarr v2") for count in (0, 1)),
]


@pytest.mark.parametrize(("name", "way", "count"), CASES)
def test_every_schema_is_read_in_any_order(name, way, count, tmp_path):
    """By the format's library, its source and the sidecar."""
    schema, format = SCHEMAS[name], way.split()[0]
    batch = random_batch(schema, count, seed=1)
    path = dataset(tmp_path, format, schema, batch, **WAYS[way])[0]
    assert_same_batch(READ[format](path, schema), batch, schema)
    with dsprep.open(path, through="library") as source:
        assert (source.schema, len(source)) == (schema, count)
        for start, stop in ((0, count), (3, 29), (5, 5)):
            if stop <= count:
                assert_same_batch(source[start:stop], take(batch, start, stop), schema)
    rng = np.random.default_rng(0)
    with Sidecar.open(path) as opened:
        assert (opened.schema, len(opened)) == (schema, count)
        ways = [slice(None), slice(3, 29), slice(20, 4, -3), []]
        ways += [5, [5], -1, [-1, 0, -count], rng.integers(0, count, 50)] if count > 5 else []
        for chosen in (*ways, rng.permutation(count)):
            wanted = [chosen] if isinstance(chosen, int) else chosen
            indices = np.arange(count)[wanted if isinstance(wanted, slice) else list(wanted)]
            all_or_none = len(indices) in (0, count)  # all as stored and in another order, or none
            for verify in (None, "header", "full") if all_or_none else (None,):
                found = opened.read(chosen, verify=verify, arena=Arena())
                assert_same_batch(found, taken(batch, schema, indices), schema)
        for field in schema if count > 11 else ():
            alone, schema = opened.read([7, 3, 11], [field.name]), Schema((field,))
            assert_same_batch(alone, taken(batch, schema, [7, 3, 11]), schema)
        if way == "hdf5 gzip" and name == "mixed":
            (extent,) = opened.extents([30], ["image"])
            assert (extent.inside, extent.inside_nbytes) == (4 * 48, 48)


BIG = Schema((Field("x", np.dtype("<u2"), (128, 128, 64, 12)), Field("y", np.dtype("<f4"), (4,))))


@pytest.mark.parametrize("format", FORMATS)
def test_samples_of_25_megabytes(format, tmp_path):
    x = np.arange(2 * 128**3 * 6, dtype="<u2").reshape(2, 128, 128, 64, 12)
    batch = {"x": x, "y": np.arange(8, dtype="<f4").reshape(2, 4)}
    path = written(tmp_path / f"first{SUFFIX[format]}", BIG, batch)
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


def test_values_that_do_not_fit_a_cast_stop_the_conversion(tmp_path):
    schema = Schema((Field("x", np.dtype("<f4"), (2,)),))
    batch = {"x": np.array([[1, 2], [3, 1e30]], "f4")}
    first = written(tmp_path / "first.lmdb", schema, batch)
    target = tmp_path / "cast.h5"
    with pytest.raises(dsprep.DsprepError, match="sample 1, field x"):
        dsprep.convert(first, target, cast={"x": "float16"})
    assert not target.exists()
    dsprep.convert(first, target, cast={"x": "float16"}, samples=":1", restart=True)
    with dsprep.open(target) as source:
        assert source[0]["x"].tolist() == [1, 2]
        assert source.schema["x"].dtype == np.float16
