"""NumPy's files as datasets: what numpy writes is read in place, bit for bit; the rest is named."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from dataclasses import replace

import numpy as np
import pytest
from format_contract import ReadOnlyContract
from support import assert_same_batch, fails, raw, reading

import dsprep
from dsprep.core.schema import Field, Schema
from dsprep.errors import (
    DsprepError,
    FormatError,
    SchemaError,
    UnsupportedError,
    UsageError,
)
from dsprep.formats.options import OpenOptions
from dsprep.verbs.check import check


class TestFile(ReadOnlyContract):
    format, suffix = "numpy", ".npy"
    schema = Schema((Field("out", np.dtype(">f4"), (5, 3)),))

    def write(self, path, batch):
        np.save(path, batch["out"])


class TestDirectory(ReadOnlyContract):
    format, suffix = "numpy", "-arrays"

    def write(self, path, batch):
        path.mkdir()
        for name, column in batch.items():
            np.save(path / name, column)


class TestStored(ReadOnlyContract):
    format, suffix = "numpy", ".npz"

    def write(self, path, batch):
        np.savez(path, **batch)


class TestDeflated(ReadOnlyContract):
    format, suffix, simple = "numpy", ".npz", False

    def write(self, path, batch):
        np.savez_compressed(path, **batch)


DTYPES = [
    *("?", "i1", ">i2", "<u4", "<f2", ">f8", "<c8", ">c16", "S5", "<U3", "V6"),
    *("<M8[us]", ">m8[D]", "g"),
    [("id", "<u8"), ("x", ">f4", (3,)), ("in", [("a", "i1"), ("b", "S2")])],
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_dtype(tmp_path, dtype, version):
    """Also a dtype with padding between members; as numpy reads it, and bit for bit."""
    dtype = np.dtype(dtype, align=isinstance(dtype, list))
    data = np.random.default_rng(7).integers(0, 200, (9, 2, dtype.itemsize), np.uint8)
    array = data.view(dtype).reshape(9, 2) if dtype.kind not in "U?" else np.ones((9, 2), dtype)
    with (tmp_path / "x.npy").open("wb") as file:
        np.lib.format.write_array(file, array, version)
    known = np.load(tmp_path / "x.npy")
    with dsprep.open(tmp_path / "x.npy") as source:
        assert source.schema["x"].dtype == known.dtype
        assert source.schema["x"].shape == (2,)
        assert source[:]["x"].tobytes() == known.tobytes() == array.tobytes()


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (4, 0), (1,), (1, 1, 1)])
@pytest.mark.parametrize("save", [np.save, np.savez, np.savez_compressed])
def test_small_shapes(tmp_path, shape, save):
    array = np.full(shape, 3.5)
    path = tmp_path / ("x.npy" if save is np.save else "x.npz")
    save(path, array) if save is np.save else save(path, x=array)
    with dsprep.open(path) as source:
        assert len(source) == (shape[0] if shape else 1)
        assert source[:]["x"].tobytes() == array.tobytes()
        assert source[:]["x"].shape == (shape or (1,))
    if not shape or shape[0]:
        dsprep.provenance(path)
        with dsprep.open(path, through="strict") as source:
            assert source[:]["x"].tobytes() == array.tobytes()


@pytest.mark.parametrize("shape", [(5,), (5, 1), (1, 5), (7, 3), (6, 2, 5), (4, 3, 1, 2)])
@pytest.mark.parametrize("axis", ["first", "none"])
def test_fortran_order(tmp_path, shape, axis):
    array = np.asfortranarray(np.random.default_rng(1).random(shape).astype(">f4"))
    np.save(tmp_path / "x.npy", array)
    np.savez(tmp_path / "x.npz", x=array)
    options = OpenOptions(sample_axis=axis)
    for path in (tmp_path / "x.npy", tmp_path / "x.npz"):
        dsprep.provenance(path, options=options)
        assert check(path, full=True) == []
        for way in ("library", "strict"):
            with dsprep.open(path, options, through=way) as source:
                found = source[:]["x"]
                assert found.tobytes() == np.ascontiguousarray(array).tobytes()
                last = array if axis == "none" else array[-1]
                np.testing.assert_array_equal(source[-1]["x"], last)
        with dsprep.Reader(path, 2) as reader:
            batches = [np.array(batch["x"]).reshape(-1) for batch in reader]
        assert sorted(np.concatenate(batches)) == sorted(array.reshape(-1))


def test_fortran_order_is_refused_where_it_takes_much(tmp_path, monkeypatch):
    array = np.asfortranarray(np.ones((5, 2)))
    np.savez_compressed(tmp_path / "x.npz", x=array)
    np.save(tmp_path / "x.npy", array)
    monkeypatch.setattr("dsprep.formats.npy.arrays.MAX_COLUMNS_NBYTES", 79)
    for path in (tmp_path / "x.npy", tmp_path / "x.npz"):
        fails(lambda: dsprep.open(path), UnsupportedError, "Fortran order", "ascontiguousarray")


def test_objects_are_never_unpickled(tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "trapped"),)

    np.save(tmp_path / "x.npy", np.array([Trap()], object))
    fails(lambda: dsprep.open(tmp_path / "x.npy"), UnsupportedError, "Python objects")
    np.savez(tmp_path / "x.npz", x=np.arange(3), y=np.array([Trap()] * 3, object))
    with dsprep.open(tmp_path / "x.npz") as source:
        assert source.schema.names == ("x",)
        assert "left out y: the array holds Python objects" in source.notes[0]
    with pytest.raises(UnsupportedError, match="Python objects"):
        dsprep.open(tmp_path / "x.npz", reading("y"))
    assert not (tmp_path / "trapped").exists()


def header(text: str, version: int = 1) -> bytes:
    data = text.encode()
    width = "<H" if version == 1 else "<I"
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack(width, len(data)) + data


GOOD = "{'descr': '<i4', 'fortran_order': False, 'shape': (2,)}"


@pytest.mark.parametrize(
    "head",
    [
        b"\x93NUMPY",
        b"\x93NUMPY\1\0\0\0",
        header(GOOD)[:40],
        header(GOOD, 4),
        header(GOOD.replace("False", "print(1)")),
        header(GOOD.replace("(2,)", "(-2,)")),
        header(GOOD.replace("(2,)", "(True,)")),
        header(GOOD.replace("(2,)", "[2]")),
        header(GOOD.replace("(2,)", "(9999999999999999999999,)")),
        header(GOOD.replace("(2,)", "(99999999999, 0)")),
        header(GOOD.replace("(2,)", "(" + "9" * 9000 + ",)"), 2),
        header(GOOD.replace("(2,)", "(" * 9000 + ")" * 9000), 2),
        header(GOOD.replace("(2,)", "-" * 9000 + "1"), 2),
        header(GOOD.replace("<i4", "nothing")),
        header(GOOD.replace("'<i4'", "{'ab': 'i4'}")),
        header(GOOD.replace("'<i4'", "[('a', '<i4'), ('a', '<i4')]")),
        header(GOOD.replace("<i4", "<U0")),
        header(GOOD.replace("<i4", "(2,3)i4")),
        header(GOOD.replace("'shape'", "'form'")),
        header(GOOD + " " * 70_000, 2),
        header("1"),
        header(GOOD) + bytes(7),
    ],
    ids=range(22),
)
def test_hostile_headers(tmp_path, head):
    (tmp_path / "x.npy").write_bytes(head)
    with pytest.raises(DsprepError) as caught:
        dsprep.open(tmp_path / "x.npy")
    assert "x.npy" in str(caught.value)
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", head)
    with pytest.raises(DsprepError, match=r"x.npz, x.npy"):
        dsprep.open(tmp_path / "x.npz")


def test_long_numbers_of_python_2(tmp_path):
    text = "{'descr': [('10L', '<i4')], 'fortran_order': False, 'shape': (2L,), }"
    (tmp_path / "x.npy").write_bytes(header(text) + np.arange(2, dtype="<i4").tobytes())
    with dsprep.open(tmp_path / "x.npy") as source:
        assert source[:]["x"]["10L"].tolist() == [0, 1]


def test_what_is_behind_the_array_is_named(tmp_path):
    with (tmp_path / "x.npy").open("wb") as file:
        np.save(file, np.arange(3))
        np.save(file, np.arange(5))
    with dsprep.open(tmp_path / "x.npy") as source:
        assert len(source) == 3
        assert source.notes == (
            "left out the last 168 bytes: another array, of which a file has one",
        )


# --- members ---------------------------------------------------------------------------------


def test_zip64_and_names(tmp_path):
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name, values in (("a/b.npy", np.arange(4)), ("ü.npy", np.ones((4, 2)))):
            with archive.open(name, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, values)
        archive.writestr("README", "x")
    dsprep.provenance(path)
    assert check(path, full=True) == []
    for way in ("library", "strict"):
        with dsprep.open(path, through=way) as source:
            assert source.schema.names == ("a/b", "ü")
            assert source[2]["a/b"] == 2
    with dsprep.open(path, through="library") as source:
        assert source.notes == ("left out README: no arrays",)


def test_member_checksums(tmp_path):
    """Compared when a member is read, stored or deflated, and by a full check."""
    for save in (np.savez, np.savez_compressed):
        path = tmp_path / f"{save.__name__}.npz"
        save(path, x=np.random.default_rng(1).integers(0, 9, (50, 30)))
        dsprep.provenance(path)
        data, status = bytearray(path.read_bytes()), path.stat()
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        problems = check(path, full=True)
        assert any("CRC-32" in str(p) for p in problems), problems
        path.with_name(f"{path.name}.dsprep.json").unlink()
        with dsprep.open(path) as source, pytest.raises(FormatError, match="CRC-32"):
            source[:]


def test_members_that_cannot_be_read_are_named(tmp_path):
    path = tmp_path / "x.npz"
    array = io.BytesIO()
    np.save(array, np.arange(5))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", array.getvalue())
        archive.writestr("y.npy", array.getvalue(), zipfile.ZIP_LZMA)
    with dsprep.open(path) as source:
        assert source.notes == ("left out y: the ZIP member is compressed by method 14",)
    with pytest.raises(UnsupportedError, match="unzip"):
        dsprep.open(path, reading("y"))
    data = bytearray(path.read_bytes())
    at = data.index(b"PK\1\2")
    data[at + 42 : at + 46] = struct.pack("<I", len(data) - 60)  # where its local header is
    path.write_bytes(data)
    fails(lambda: dsprep.open(path), FormatError, "local header")


# --- directories -----------------------------------------------------------------------------


def test_fields_are_named(tmp_path):
    x, y = np.random.default_rng(0).random((8, 2, 2)), np.arange(8)
    folder = tmp_path / "d"
    folder.mkdir()
    np.save(folder / "images.npy", x)
    np.save(folder / "labels.npy", y)
    np.save(folder / "mean.npy", x.mean(0))
    (folder / "README.md").write_text("x")
    np.savez(tmp_path / "d.npz", images=x, labels=y)
    with dsprep.open(folder, OpenOptions(sample_axis="first")) as source:
        assert source.schema.names == ("images", "labels")
        assert any("README.md" in n for n in source.notes)
        assert any("left out mean" in n for n in source.notes)
    for path in (folder, tmp_path / "d.npz"):
        for texts in (("x=images.npy", "y=labels.npy"), ("x=images", "y=labels.npy")):
            with dsprep.open(path, reading(*texts)) as source:
                assert_same_batch(source[:], {"x": x, "y": y}, source.schema)
                dsprep.provenance(path, options=reading(*texts))
            with dsprep.open(path, through="strict") as source:
                assert source.schema.names == ("x", "y")
                assert source[3]["y"] == 3
        fails(lambda: dsprep.open(path, reading("nothing")), SchemaError, "nothing", "images")
    fails(lambda: dsprep.open(folder, reading("images", "labels", "mean")), SchemaError)
    fails(lambda: dsprep.open(folder, reading("images@labels")), UsageError)


@pytest.fixture
def series(tmp_path):
    rng = np.random.default_rng(3)
    arrays = [rng.random((i % 4, 3)) for i in range(12)]
    (tmp_path / "s").mkdir()
    for i, array in enumerate(arrays):
        np.save(tmp_path / "s" / f"cloud_{i}.npy", array)
    return tmp_path / "s", arrays


def test_a_sample_per_file(series):
    """In natural order; the first axis may vary."""
    folder, arrays = series
    fails(lambda: dsprep.open(folder), SchemaError, "doubtful", "--sample-axis none")
    whole = OpenOptions(sample_axis="none")
    dsprep.provenance(folder, options=whole)
    for way in ("library", "strict"):
        with dsprep.open(folder, whole, through=way) as source:
            assert source.schema["cloud"].shape == (None, 3)
            found = [source[i]["cloud"] for i in range(len(source))]
            assert [raw(a) for a in found] == [raw(a) for a in arrays]
            assert raw(source[2:9]["cloud"].values) == raw(np.concatenate(arrays[2:9]))
    assert check(folder, full=True) == []
    with dsprep.open(folder, replace(whole, fields=reading("x=cloud").fields)) as source:
        assert source.schema.names == ("x",)


def test_files_that_are_no_samples_of_one_field(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((3, 4)))
    np.save(tmp_path / "b.npy", np.zeros((3, 5)))
    with pytest.raises(
        SchemaError, match=r"differ in more .*float64\[3,4\] before b: float64\[3,5\]"
    ):
        dsprep.open(f"{tmp_path}/*.npy", OpenOptions(sample_axis="none"))
