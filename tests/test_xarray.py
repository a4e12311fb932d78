"""xarray opens what dsprep writes as it opens the source: dimensions, coordinates, attributes."""

from __future__ import annotations

import filecmp
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import dsprep
from dsprep.core.schema import DIMENSIONS
from dsprep.errors import SchemaError
from dsprep.formats.options import OpenOptions, WriteOptions

xr = pytest.importorskip("xarray")
pytest.importorskip("netCDF4")

PACKED = {"dtype": "i2", "scale_factor": 0.01, "add_offset": 280.0, "_FillValue": -32767}
AREA = np.random.default_rng(1).normal(size=(3, 5))
OLD = WriteOptions(zarr_format=2)


def day(number: int) -> Any:
    """Return four hours of a day."""
    rng = np.random.default_rng(number)
    kelvin = rng.normal(280, 5, (4, 3, 5))
    kelvin[0, 0, :2] = np.nan
    attrs = {"units": "K", "level": 2.5, "n": np.int32(7), "flags": np.array([1, 2], "i4")}
    return xr.Dataset(
        {
            "t": (("time", "lat", "lon"), kelvin, {**attrs, "bad": np.nan}),
            "p": (("time", "lat", "lon"), rng.normal(size=(4, 3, 5)).astype("f4")),
            "k": (("time",), np.arange(4, dtype="i4")),
            "crs": ((), np.int32(1), {"grid_mapping_name": "latitude_longitude"}),
        },
        {
            "time": ("time", np.arange(4) + 4 * number, {"units": "hours since 2000-01-01"}),
            "lat": ("lat", np.array([10, 20, 30], "f4"), {"units": "degrees_north"}),
            "lon": ("lon", np.arange(5.0)),
            "area": (("lat", "lon"), AREA, {"units": "m2"}),
            "names": (("lat",), np.array(["low", "middle", "hígh"], object)),
        },
        {"title": "days", "version": np.int16(3)},
    )


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of netCDF-4 files, one for each day."""
    directory = tmp_path_factory.mktemp("days")
    for number in range(3):
        day(number).to_netcdf(directory / f"day{number}.nc", "w", encoding={"t": PACKED})
    return directory


@cache
def of_source(days: Path) -> Any:
    how = {"data_vars": "minimal", "coords": "minimal", "compat": "override"}
    paths = sorted(map(str, days.glob("day*.nc")))
    with xr.open_mfdataset(
        paths, combine="nested", concat_dim="time", combine_attrs="override", **how
    ) as opened:
        return opened.load()


def of_output(path: Path) -> Any:
    """Return what xarray makes of an output, without dsprep's own attributes."""
    how: dict[str, Any] = {"engine": "netcdf4"}
    target: Any = path
    if ".zarr" in path.suffixes:
        how = {"engine": "zarr", "consolidated": False}
        if path.suffix == ".zip":
            zarr = pytest.importorskip("zarr")
            target = zarr.storage.ZipStore(path, mode="r")
    with xr.open_dataset(target, **how) as opened:
        found = opened.load()
    found.attrs = {name: v for name, v in found.attrs.items() if not name.startswith("dsprep_")}
    return found


WRITTEN = {
    "a.zarr": {},
    "old.zarr": {"write_options": OLD},
    "packed.zarr.zip": {},
    "a.h5": {},
}


@pytest.mark.parametrize("name", WRITTEN)
def test_outputs_are_the_source(days: Path, tmp_path: Path, name: str) -> None:
    expected = of_source(days)
    converted, again, groups = (tmp_path / f"{word}-{name}" for word in ("one", "two", "groups"))
    dsprep.convert(days / "day*.nc", converted, durable=False, **WRITTEN[name])
    xr.testing.assert_identical(of_output(converted), expected)
    if converted.suffix == ".h5":
        dsprep.convert(days / "day*.nc", again, durable=False, **WRITTEN[name])
        assert filecmp.cmp(converted, again, shallow=False)
    if "write_options" not in WRITTEN[name]:
        dsprep.repack(days / "day*.nc", groups, buffer_size=5, durable=False, **WRITTEN[name])
        xr.testing.assert_identical(of_output(groups), expected)
    if not WRITTEN[name]:
        dsprep.convert(converted, tmp_path / "back.zarr", durable=False)
        xr.testing.assert_identical(of_output(tmp_path / "back.zarr"), expected)
    with dsprep.open(converted) as source:
        assert {*source.schema.names} == {"k", "p", "t", "time"}
        assert source.schema["t"].attrs[DIMENSIONS].tolist() == ["time", "lat", "lon"]


@pytest.mark.parametrize("name", ["a.tfrecord", "a.lmdb"])
def test_a_sidecar_keeps_what_its_format_does_not(days: Path, tmp_path: Path, name: str) -> None:
    dsprep.convert(days / "day*.nc", tmp_path / name, durable=False)
    dsprep.convert(tmp_path / name, tmp_path / "back.h5", durable=False)
    xr.testing.assert_identical(of_output(tmp_path / "back.h5"), of_source(days))


def test_some_samples_and_some_fields(days: Path, tmp_path: Path) -> None:
    """The coordinates of what is taken go with it; through a sidecar, too."""
    expected = of_source(days).isel(time=slice(2, 7))
    dsprep.convert(days / "day*.nc", tmp_path / "a.zarr", samples="2:7", durable=False)
    xr.testing.assert_identical(of_output(tmp_path / "a.zarr"), expected)
    dsprep.convert(days / "day*.nc", tmp_path / "t.h5", fields=["t", "time"], durable=False)
    found = of_output(tmp_path / "t.h5")
    xr.testing.assert_identical(found, of_source(days).drop_vars(["p", "k", "crs"]))


FIRST = OpenOptions(sample_axis="first")


def test_arrays_that_files_do_not_share_are_left_out(tmp_path: Path) -> None:
    for number in range(2):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["x"], file["y"] = np.zeros((40, 3)), np.zeros(40)
            file["classes"], file["run"] = [b"cat", b"dog"], number
    report = dsprep.convert(
        tmp_path / "?.h5", tmp_path / "out.h5", open_options=FIRST, durable=False
    )
    assert any("left out run: not the same in all files" in note for note in report.notes)
    with h5py.File(tmp_path / "out.h5") as file:
        assert [*file["classes"]] == [b"cat", b"dog"]
        assert "run" not in file
    with dsprep.open(tmp_path / "out.h5") as source:
        assert source.schema.names == ("x", "y")
    fields = ["x", "y", "classes"]
    with pytest.raises(SchemaError, match="classes has no value for each sample of x") as error:
        dsprep.convert(tmp_path / "0.h5", tmp_path / "no.h5", fields=fields, open_options=FIRST)
    assert "leave out --field classes" in error.value.fix


def test_a_grid_that_is_as_long_as_there_are_samples(tmp_path: Path) -> None:
    """What is kept beside the samples never becomes a field, whatever its length."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["grid"], file["y"] = np.zeros((40, 3)), np.arange(12.0), np.zeros(40)
    for name in ("b.h5", "b.zarr", "c.zarr.zip"):
        target = tmp_path / name
        dsprep.convert(tmp_path / "a.h5", target, samples="0:12", open_options=FIRST, durable=False)
        with dsprep.open(tmp_path / name) as source:
            assert [s.field.name for s in source.schema.static] == ["grid"]
        (tmp_path / f"{name}.dsprep.json").unlink()
        with dsprep.open(tmp_path / name) as source:
            assert (len(source), source.schema.names) == (12, ("x", "y"))
            assert source.others == ("grid",)


def test_a_new_store_is_opened_by_xarray(tmp_path: Path) -> None:
    """Without names the axes get some."""
    dsprep.write(tmp_path / "a.zarr", [{"x": np.full((2, 3), i), "y": i} for i in range(5)])
    found = of_output(tmp_path / "a.zarr")
    assert found["x"].dims == ("sample", "x_1", "x_2")
    assert found["y"].dims == ("sample",)
    with dsprep.open(tmp_path / "a.zarr") as source:
        assert source.schema["x"].attrs == {}
