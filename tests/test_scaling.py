"""`dsprep.mask_and_scale`: packed values become what netCDF4 makes of them."""

import pickle

import numpy as np
import pytest
from support import fails

import dsprep
from dsprep.core.schema import Field, FieldSpec, Ragged, Schema
from dsprep.errors import SchemaError, UsageError
from dsprep.formats.options import OpenOptions
from dsprep.reader.stats import FieldSums

netCDF4 = pytest.importorskip("netCDF4")

PACKED = [
    ("i2", {"scale_factor": 0.01, "add_offset": 250.0}, -32768, "f8"),
    ("i2", {"scale_factor": np.float32(0.5), "add_offset": np.float32(3)}, -1, "f4"),
    ("i2", {"scale_factor": np.float32(0.5)}, None, "f4"),
    ("i4", {"add_offset": np.float32(0.1)}, 7, "f4"),
    ("u1", {"scale_factor": 2.0, "valid_range": np.array([3, 200], "u1")}, 255, "f8"),
    ("i1", {"scale_factor": 0.1, "_Unsigned": "true"}, -1, "f8"),
    ("i1", {"valid_min": np.int8(-100), "valid_max": np.int8(100)}, 0, "f4"),
    ("i4", {"missing_value": np.int32(9)}, None, "f8"),
    ("f4", {"missing_value": np.array([1e20, 4], "f4")}, np.float32(-999), "f4"),
    ("f8", {"scale_factor": 2.0}, np.nan, "f8"),
    ("i2", {"scale_factor": np.int16(3)}, None, "i2"),
]


@pytest.fixture
def packed(tmp_path):
    """Return a file with a variable of 40 samples, and what netCDF4 reads, NaN where masked."""

    def write(dtype, attrs, fill):
        with netCDF4.Dataset(tmp_path / "x.nc", "w") as file:
            file.createDimension("time", 40)
            file.createDimension("lat", 25)
            x = file.createVariable("x", dtype, ("time", "lat"), fill_value=fill)
            x.setncatts(attrs)
            x.set_auto_maskandscale(False)
            stored = np.random.default_rng(1).integers(-128, 128, (40, 25)).astype(dtype)
            stored[3] = attrs.get("missing_value", np.array([5])).reshape(-1)[0]
            stored[4, :3] = 5 if fill is None else fill
            x[:] = stored
        with netCDF4.Dataset(tmp_path / "x.nc") as file:
            x = np.ma.asarray(file["x"][:])
        floats = x.data.astype(np.result_type(x.dtype, np.float32))
        masked = np.ma.getmaskarray(x)
        return tmp_path / "x.nc", np.where(masked, np.nan, floats) if masked.any() else x.data

    return write


@pytest.mark.parametrize(("dtype", "attrs", "fill", "result"), PACKED)
def test_values_and_dtypes(packed, dtype, attrs, fill, result):
    path, expected = packed(dtype, attrs, fill)
    with dsprep.open(path) as source:
        batch = dsprep.mask_and_scale(path, "x")(source[0:40])
        same = dsprep.mask_and_scale(source, "x", dtype="float32")(source[3:5])
    assert batch["x"].dtype == np.dtype(result)
    np.testing.assert_array_equal(batch["x"], expected.astype(result))
    assert same["x"].dtype == np.float32
    np.testing.assert_allclose(same["x"], expected[3:5].astype("f4"), rtol=1e-6)


def test_a_reader_delivers_it_and_a_note_says_so(packed):
    attrs = {"scale_factor": 0.01, "add_offset": 250.0, "units": "K"}
    path, expected = packed("i2", attrs, -32768)
    dsprep.provenance(path)
    with dsprep.open(path) as source:
        assert any("of x are not applied (dsprep.mask_and_scale does)" in n for n in source.notes)
    transform = dsprep.mask_and_scale(path)
    with dsprep.Reader(path, 8, shuffle="none", transform=transform) as reader:
        delivered = np.concatenate([batch["x"] for batch in reader])
    np.testing.assert_array_equal(delivered, expected)


def test_files_of_other_scales_are_refused_and_other_attributes_named(tmp_path):
    for name, scale, units in ("a", 0.5, "h"), ("b", 0.5, "s"), ("c", 0.25, "h"):
        with netCDF4.Dataset(tmp_path / f"{name}.nc", "w") as file:
            file.createDimension("time", 4)
            for variable in ("x", "y") if name != "b" else ("x", "y", "z"):
                file.createVariable(variable, "i2", ("time",))[:] = np.arange(4)
            file["x"].setncatts({"scale_factor": scale})
            file["y"].setncatts({"units": units})
    a, b, c = (tmp_path / f"{name}.nc" for name in "abc")
    x, y = (FieldSpec(name, name) for name in "xy")
    with dsprep.open([a, b], OpenOptions(fields=(x, y))) as source:
        assert [n for n in source.notes if n.endswith("kept: units of y (in 1 of 2 files)")]
    with pytest.raises(SchemaError, match=r"c.nc: scale_factor of x:.*expected 0.5, found 0.25"):
        dsprep.open([a, c])
    fails(lambda: dsprep.open([a, b]), SchemaError, "field z is not in the other")
    with dsprep.open([a, c], OpenOptions(fields=(y,))) as source:
        assert len(source) == 8


def test_ragged_fields():
    schema = Schema((Field("x", np.dtype(">i2"), (None,), attrs={"scale_factor": 0.5}),))
    column = Ragged(np.arange(10, dtype=">i2"), np.array([2, 5, 9]))
    out = dsprep.mask_and_scale(schema)({"x": column})["x"]
    assert [out[i].tolist() for i in range(2)] == [[1.0, 1.5, 2.0], [2.5, 3.0, 3.5, 4.0]]


def test_what_is_not_packed_is_refused():
    x, b = Field("x", np.dtype("f4"), (3,)), Field.opaque("b")
    fails(lambda: dsprep.mask_and_scale(Schema((x, b))), UsageError, "no field is packed")
    fails(lambda: dsprep.mask_and_scale(Schema((x, b)), "b"), UsageError, "not a field of numbers")
    text = Field("x", np.dtype("i2"), (), attrs={"scale_factor": "0.1"})
    with pytest.raises(UsageError, match="scale_factor of x is not a number"):
        dsprep.mask_and_scale(Schema((text,)))


@pytest.mark.parametrize(("dtype", "attrs", "fill", "result"), PACKED)
def test_statistics_are_of_unpacked_values_without_missing_ones(packed, dtype, attrs, fill, result):
    path, expected = packed(dtype, attrs, fill)
    dsprep.provenance(path)
    found = dsprep.stats(path)["x"]
    absent = 0 if np.isnan(fill or 0) else np.isnan(expected).sum()
    assert (found.missing, found.missing + found.nans) == (absent, np.isnan(expected).sum())
    assert found.mean == pytest.approx(np.nanmean(expected, dtype="f8"), rel=1e-4)
    assert found.std == pytest.approx(np.nanstd(expected, dtype="f8"), rel=1e-4)
    if expected.dtype.kind == "f" and np.isnan(expected).any():
        with pytest.raises(UsageError, match="missing values") as error:
            dsprep.normalise(path, "x")
        assert 'missing="mean"' in error.value.fix
    with dsprep.open(path) as source:
        stored = source[0:40]
    unpack = dsprep.mask_and_scale(path, "x")
    for missing, value in (("mean", 0), ("nan", np.nan)):
        scale = dsprep.normalise(path, "x", missing=missing)
        right = (expected - found.mean) / found.std
        right = np.where(np.isnan(right), value, right)
        for transform in pickle.loads(pickle.dumps((scale, [unpack, scale]))):
            with dsprep.Reader(path, 40, shuffle="none", transform=transform) as reader:
                np.testing.assert_allclose(next(iter(reader))["x"], right, atol=2e-5)
        if dtype != result:  # else nothing shows that they were unpacked
            np.testing.assert_allclose(scale(unpack(dict(stored)))["x"], right, atol=2e-5)


def test_classes_leave_missing_values_out():
    f = Field("y", np.dtype("u1"), attrs={"_FillValue": np.uint8(255)})
    sums = FieldSums.of(f, np.array([1, 255, 2, 1, 255], "u1")).result(f)
    assert (sums.classes, sums.missing, sums.max) == ({1: 2, 2: 1}, 2, 2)


def test_what_is_changed_already_is_refused(packed):
    path, _ = packed("i2", {"scale_factor": 0.01, "add_offset": 250.0}, -32768)
    dsprep.provenance(path)
    unpack, scale = dsprep.mask_and_scale(path), dsprep.normalise(path, "x", missing="nan")
    for wrong in ([scale, unpack], [unpack, unpack], [scale, scale], [unpack, dict, scale, scale]):
        with pytest.raises(UsageError, match=r"field x is (normalised|unpacked) already"):
            dsprep.Reader(path, 4, transform=wrong)
    with dsprep.open(path) as source, pytest.raises(UsageError, match="not as stored"):
        unpack(scale(source[0:4]))


def test_a_batch_with_missing_values_that_the_statistics_do_not_have(packed):
    path, _ = packed("i2", {"scale_factor": 0.01}, -32768)
    scale = dsprep.normalise(path, "x", subset=[0, 1, 2])
    with dsprep.open(path) as source, pytest.raises(UsageError, match="x has missing values"):
        scale(source[4:5])
