"""Byte order of HDF5's variable-length types: every way of reading gives the values written.

h5py labels the bytes of such values as of the machine's order, whatever order they have.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

import dsprep
from dsprep.formats.base import OpenOptions
from dsprep.formats.hdf5 import Hdf5

PLAIN = ["u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16", "?"]
DTYPES = [np.dtype(f"{order}{kind}") for kind in PLAIN for order in "<>"]
DTYPES += [
    h5py.enum_dtype({"A": 1, "B": 2}, basetype=">i4"),
    np.dtype([("a", ">i4"), ("b", "<f2")]),
    np.dtype([("a", ">i4", (2,)), ("b", [("c", ">u8"), ("d", "S3")])]),
    np.dtype("S5"),
]


def items(dtype: np.dtype, count: int = 6) -> list[np.ndarray]:
    """Return ragged values, most of whose bytes tell the orders apart."""
    rng = np.random.default_rng(3)
    found = []
    for i in range(count):
        data = rng.integers(1, 100, (i % 4, dtype.itemsize), np.uint8)
        rows = data.reshape(-1).view(np.dtype(dtype.str) if dtype.names is None else dtype)
        found.append(rows.reshape(-1) if dtype.kind != "b" else rows.view("u1") % 2 == 1)
    return found


def write(path: Path, dtype: np.dtype, values: list[np.ndarray], **how: object) -> None:
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("v", (len(values),), h5py.vlen_dtype(dtype), **how)
        for i, value in enumerate(values):
            dataset[i] = value


@pytest.mark.parametrize("how", [{}, {"chunks": (2,), "compression": "lzf"}], ids=["", "lzf"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_way_of_reading(tmp_path: Path, dtype: np.dtype, how: dict[str, object]) -> None:
    """Also where the library has to decode the chunks."""
    values = items(dtype)
    write(tmp_path / "a.h5", dtype, values, **how)
    bits = [v.tobytes() for v in values]
    with Hdf5().open(tmp_path / "a.h5", OpenOptions(), None) as source:
        field = source.schema["v"]
        assert field.dtype.newbyteorder("=") == values[0].dtype.newbyteorder("=")
        column = source[:]["v"]
        assert column.values.dtype == field.dtype  # type: ignore[union-attr]
        for seen in (
            [column[i] for i in range(len(values))],
            [source[i]["v"] for i in range(len(values))],
            [sample["v"] for sample in source],
        ):
            assert [s.dtype for s in seen] == [field.dtype] * len(values)
            assert [s.tobytes() for s in seen] == bits


@pytest.mark.parametrize("dtype", [">u4", ">f8", ">c8", "<u4"])
def test_converted_cast_and_through_a_sidecar(tmp_path: Path, dtype: str) -> None:
    values = items(np.dtype(dtype))
    write(tmp_path / "a.h5", np.dtype(dtype), values)
    wide = {"u": ">i8", "f": "<f8", "c": "<c16"}[np.dtype(dtype).kind]
    for name in ("b.h5", "b.lmdb", "b.tfrecord", "b.zarr"):
        dsprep.convert(tmp_path / "a.h5", tmp_path / name, workers=1)
        with dsprep.Sidecar.open(tmp_path / name) as sidecar:
            column = sidecar.read(range(len(values)), ["v"])["v"]
        assert [c.tobytes() for c in column] == [v.tobytes() for v in values]
        dsprep.convert(tmp_path / "a.h5", tmp_path / f"c{name}", cast={"v": wide}, workers=1)
        with dsprep.open(tmp_path / f"c{name}") as source:
            cast = source[:]["v"]
        assert cast.values.dtype == np.dtype(wide)  # type: ignore[union-attr]
        for got, value in zip(cast, values, strict=True):
            np.testing.assert_array_equal(got, value.astype(wide))


def test_the_printed_program_and_attributes(tmp_path: Path) -> None:
    write(tmp_path / "a.h5", np.dtype(">u4"), [np.array([1, 2], ">u4")] * 3)
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        kind = h5py.h5t.py_create(h5py.vlen_dtype(">u4"), logical=True)
        space = h5py.h5s.create(h5py.h5s.SCALAR)
        attribute = h5py.h5a.create(file["v"].id, b"scale", kind, space)
        value = np.empty((), h5py.vlen_dtype("<u4"))
        value[()] = np.array([1, 2], "<u4")
        attribute.write(value)
    with Hdf5().open(tmp_path / "a.h5", OpenOptions(), None) as source:
        assert source.schema["v"].attrs["scale"].tolist() == [1, 2]  # type: ignore[union-attr]
        code = source.loading_code() + "print(value.tolist())\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["v >u4 (2,)", "[1, 2]"]
