"""Classic netCDF files: what netCDF's own library writes and reads, and what no library writes."""

from __future__ import annotations

import os

import numpy as np
import pytest
from format_contract import ReadOnlyContract
from netcdf_files import Classic, Var
from support import cli_error, fails, raw, reading

import dsprep
from dsprep.core.schema import DIMENSIONS, Field, Schema
from dsprep.errors import DsprepError, FormatError, SchemaError, UsageError

MODELS = {1: "NETCDF3_CLASSIC", 2: "NETCDF3_64BIT_OFFSET", 5: "NETCDF3_64BIT_DATA"}
TYPES = ("i1", "S1", ">i2", ">i4", ">f4", ">f8", "u1", ">u2", ">u4", ">i8", ">u8")


def types(version):
    return TYPES if version == 5 else TYPES[:6]


def values(dtype, shape, seed=0):
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "S":
        return rng.integers(97, 123, shape).astype("u1").view("S1")
    return rng.integers(0, 100, shape).astype(dtype)


def opened(path, *fields, **options):
    return dsprep.open(path, reading(*fields, **options))


# --- the contract ------------------------------------------------------------------------------


class Written(ReadOnlyContract):
    """Files that netCDF's own library wrote."""

    format = "netcdf"
    version = 1
    records = True

    def write(self, path, batch):
        netcdf4 = pytest.importorskip("netCDF4")
        with netcdf4.Dataset(path, "w", format=MODELS[self.version]) as file:
            count = len(next(iter(batch.values())))
            file.createDimension("n", None if self.records else count)
            for f in self.schema:
                column, axes = batch[f.name], ["n"]
                if f.dtype.kind == "S" and f.dtype.itemsize > 1:
                    column = column.view("S1").reshape(*column.shape, f.dtype.itemsize)
                for n in column.shape[1:]:
                    axes.append(f"d{n}")
                    if axes[-1] not in file.dimensions:
                        file.createDimension(axes[-1], n)
                variable = file.createVariable(f.name, column.dtype.str[1:], axes)
                variable.set_auto_maskandscale(False)
                variable.set_auto_chartostring(False)
                variable[:] = column


class TestCdf1(Written):
    schema = Schema(
        (
            Field("x", np.dtype(">f4"), (5, 3)),
            Field("odd", np.dtype(">i2"), (3,)),
            Field("name", np.dtype("S7")),
            Field("y", np.dtype(">f8")),
        )
    )


class TestCdf2(TestCdf1):
    version, records = 2, False


class TestCdf5(Written):
    version, suffix = 5, ".nc5"
    schema = Schema(tuple(Field(f"v{i}", np.dtype(t), (3,)) for i, t in enumerate(TYPES) if i != 1))


# --- values ------------------------------------------------------------------------------------


def test_large_variables_in_files_with_holes(tmp_path):
    """Sizes over 4 GB do not fit into the header of CDF-2, nor records over 2**31 into that."""
    row = 1 << 20
    one = np.zeros((1, row), "i1")
    for name, dims, version in (("fix", "n", 2), ("records", "records", 2), ("five", "n", 5)):
        count = 5000
        file = Classic({"x": Var(one, [dims, "k"])}, version, numrecs=count)
        file.dims = {dims: 0 if dims == "records" else count, "k": row}
        at = file.begins()["x"]
        path = tmp_path / f"{name}.nc"
        path.write_bytes(file.header({"x": at}))
        os.truncate(path, at + count * row)
        with path.open("r+b") as out:
            out.seek(at + 4999 * row + 17)
            out.write(b"\x05")
        with dsprep.open(path) as source:
            assert len(source) == count
            assert source[4999]["x"][17] == 5


# --- which variables are fields ----------------------------------------------------------------


def forecast(count=4, **options):
    """A file as models write them: records, coordinates, a scalar."""
    return Classic(
        {
            "time": Var(np.arange(count, dtype="f8"), ["records"], {"units": "days since 2000"}),
            "lat": Var(np.arange(3, dtype="f4"), ["lat"]),
            "crs": Var(np.array(7, "i4"), [], {"kind": "grid"}),
            "t2m": Var(
                values("i2", (count, 3, 5)),
                ["records", "lat", "lon"],
                {"scale_factor": 0.5, "add_offset": 1.0, "_FillValue": np.int16(-1)},
            ),
        },
        **options,
    )


def test_records_are_samples(tmp_path):
    path = forecast(attrs={"title": "all", "n": np.arange(2, dtype="i2")}).write(tmp_path / "a.nc")
    with dsprep.open(path) as source:
        assert source.schema.names == ("time", "t2m")
        assert source.schema.attrs["title"] == "all"
        assert source.schema.attrs["n"].tolist() == [0, 1]
        attrs = {"units": "days since 2000", DIMENSIONS: np.array(["records"])}
        assert source.schema["time"].attrs == attrs
        assert source.schema["t2m"].attrs[DIMENSIONS].tolist() == ["records", "lat", "lon"]
        assert source.others == ("lat", "crs")
        assert source.schema["t2m"].attrs["scale_factor"] == 0.5
        assert type(source.schema["t2m"].attrs["_FillValue"]) is np.int16
        assert "left out lat, crs: not per sample" in source.notes[0]
        assert source.storage()["time"].storage.startswith("records of 38 bytes, all fields")
    with opened(path, sample_axis="none") as source:
        assert len(source) == 1
        assert source[0]["crs"] == 7
        assert source.schema["t2m"].shape == (4, 3, 5)
    with opened(path, "latitude=lat") as source:
        assert source.schema.names == ("latitude",)
        assert len(source) == 3
    with opened(path, "t=t2m") as source:
        assert len(source) == 4
        assert len(source.notes) == 2
    with pytest.raises(SchemaError, match="lat has no value for each sample of t2m"):
        opened(path, "lat", "t2m")
    fails(lambda: opened(path, "nosuch"), SchemaError, "there is no field nosuch")
    for options in (reading("x=t2m@lat"), reading(order="file")):
        with pytest.raises((SchemaError, UsageError)):
            dsprep.open(path, options)


def test_no_records_yet(tmp_path):
    with dsprep.open(forecast(0).write(tmp_path / "a.nc")) as source:
        assert len(source) == 0
        assert source.schema.names == ("time", "t2m")
        assert source[:]["t2m"].shape == (0, 3, 5)
    with opened(tmp_path / "a.nc", sample_axis="none") as source:
        assert source[0]["t2m"].shape == (0, 3, 5)


def test_characters_are_strings(tmp_path):
    words = np.array([b"storm", b"", b"a\0b\0c"], "S5").view("S1").reshape(3, 5)
    pairs = np.array([[b"ab", b"c"]] * 3, "S2").view("S1").reshape(3, 2, 2)
    path = Classic(
        {
            "name": Var(words, ["records", "length"]),
            "pair": Var(pairs, ["records", "two", "two"]),
            "mark": Var(np.array([b"x", b"y", b""], "S1"), ["records"]),
        }
    ).write(tmp_path / "a.nc")
    with dsprep.open(path) as source:
        assert [str(f) for f in source.schema] == ["name: S5", "pair: S2[2]", "mark: S1"]
        assert source[0]["name"] == b"storm"
        assert raw(source[:]["name"]) == raw(words)
        assert source[2]["pair"].tolist() == [b"ab", b"c"]
    with opened(path, sample_axis="none") as source:
        assert source.schema["name"].dtype == "S5"
        assert source.schema["name"].shape == (3,)
        assert source.schema["mark"].dtype == "S3"
        assert source[0]["mark"] == b"xy"


# --- headers that are wrong --------------------------------------------------------------------

X = values("f4", (4, 3))
WRONG = {
    "unknown version": (Classic({"x": Var(X, "nk")}, 3), "unknown version"),
    "no variables": (Classic({}), "no variables"),
    "name with a slash": (Classic({"x": Var(X, "nk", name=b"../x")}), "not one that netCDF allows"),
    "control character": (Classic({"x": Var(X, "nk", name=b"a\n")}), "not one that netCDF allows"),
    "name of other bytes": (Classic({"x": Var(X, "nk", name=b"\xe9")}), "not UTF-8"),
    "the same name": (Classic({"x": Var(X, "nk"), "y": Var(X, "nk", name=b"x")}), "same name"),
    "in the header": (Classic({"x": Var(X, "nk", begin=16)}), "the header overlaps"),
    "far away": (Classic({"x": Var(X, "nk", begin=(1 << 63) + 5)}, 2), "truncated"),
    "a stream": (
        Classic({"x": Var(X, ["records", "k"])}, 1, numrecs=(1 << 32) - 1),
        "records open",
    ),
    "many records": (Classic({"x": Var(X, ["records", "k"])}, 1, numrecs=1 << 31), "truncated"),
    "long axes": (
        Classic({"x": Var(X, "nk")}, 5, dims={"n": (1 << 64) - 1, "k": (1 << 64) - 1}),
        "truncated",
    ),
    "two of records": (
        Classic({"x": Var(X, "nk")}, dims={"n": 0, "k": 0}),
        "two dimensions have no length",
    ),
    "records second": (
        Classic({"x": Var(X, "nk")}, dims={"n": 4, "k": 0}),
        "another place than the first",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_headers_are_refused(kind, tmp_path):
    file, message = WRONG[kind]
    path = tmp_path / "a.nc"
    begins = dict.fromkeys(file.variables, 200)
    begins |= file.begins()
    path.write_bytes(file.header(begins).ljust(2000, b"\0"))
    with pytest.raises(FormatError, match=message) as caught:
        dsprep.open(path)
    assert str(path) in str(caught.value)
    assert cli_error("inspect", path, code=None)


@pytest.mark.parametrize("count", [1 << 16, (1 << 32) - 1])
def test_counts_that_are_wrong_take_no_memory(count, tmp_path):
    """Any word of the header may be a large number."""
    data = forecast(attrs={"title": "all"}).to_bytes()
    path = tmp_path / "a.nc"
    for at in range(4, 400, 4):
        path.write_bytes(data[:at] + count.to_bytes(4, "big") + data[at + 4 :])
        try:
            with dsprep.open(path) as source:
                source[:]
        except DsprepError:
            pass


def test_attributes_are_kept_under_names_that_can_be_shown(tmp_path):
    x = Var(X, "nk", {"a": "1", "b/c": "2", "latin": b"\xe9", "text": "zwölf\0", "none": ""})
    data = Classic({"x": x}, attrs={"aa": "1", "bb": "2"}).to_bytes().replace(b"bb", b"aa")
    path = tmp_path / "a.nc"
    path.write_bytes(data)
    with dsprep.open(path) as source:
        assert source.schema.attrs == {"aa": "1"}
        attrs = dict(source.schema["x"].attrs)
    assert attrs.pop(DIMENSIONS).tolist() == ["n", "k"]
    assert attrs == {"a": "1", "'b/c'": "2", "latin": b"\xe9", "text": "zwölf", "none": ""}
