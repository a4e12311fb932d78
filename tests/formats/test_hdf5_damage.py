"""HDF5 files that are damaged, hostile or unfit: always one clear error of our own."""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path

import h5py
import hdf5plugin
import numpy as np
import pytest
from support import STRUCT, random_array, random_batch, raw, schemas, write_batch

from dsprep.core.schema import FieldSpec
from dsprep.errors import DsprepError, FormatError, MissingExtra, SchemaError, UsageError
from dsprep.formats.base import Compression, OpenOptions, WriteOptions
from dsprep.formats.hdf5 import Hdf5
from dsprep.formats.hdf5.source import Hdf5Source

HDF5 = Hdf5()
X = random_array(np.dtype("<f4"), (20, 6, 4))


def opened(path: Path, *fields: str, axis: str = "auto") -> Hdf5Source:
    specs = tuple(map(FieldSpec.parse, fields))
    source = HDF5.open(path, OpenOptions(fields=specs, sample_axis=axis), None)  # type: ignore[arg-type]
    assert isinstance(source, Hdf5Source)
    return source


def test_fields_that_disagree(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a", "w") as file:
        file["x"], file["y"], file["stats"] = np.zeros((9, 2)), np.zeros(9), np.zeros(3)
    with opened(tmp_path / "a") as source:
        assert source.schema.names == ("x", "y")
        assert "stats" in source.notes[0]
    with pytest.raises(SchemaError, match=r"a: field stats .*expected 9, found 3"):
        opened(tmp_path / "a", "x", "y", "stats")
    with pytest.raises(SchemaError, match=r"no field z .*one of"):
        opened(tmp_path / "a", "z")
    with pytest.raises(UsageError, match="already has a type"):
        opened(tmp_path / "a", "x:int8")


def test_empty_files_and_wrong_files(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("no HDF5 " * 999)
    with h5py.File(tmp_path / "nothing", "w"):
        pass
    for name in ("empty", "text"):
        assert not HDF5.recognises(tmp_path / name)
    assert not HDF5.recognises(tmp_path)
    assert not HDF5.recognises(tmp_path / "missing")
    for name in ("empty", "text", "nothing"):
        with pytest.raises(FormatError):
            opened(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        opened(tmp_path / "missing")


def test_a_missing_filter_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with h5py.File(tmp_path / "a", "w") as file:
        file.create_dataset("x", data=X, chunks=(4, 6, 4), **hdf5plugin.Zstd())
    monkeypatch.setattr("h5py.h5z.filter_avail", lambda code: code != 32015)
    with pytest.raises(MissingExtra, match=r"32015.*dsprep\[hdf5plugin\]"):
        opened(tmp_path / "a")


@pytest.mark.parametrize("text", ['"O"', '"<f8"', "{}", "[", "[" * 5000, '{"base": "<f4"}', "3"])
def test_stand_ins_that_do_not_fit(tmp_path: Path, text: str) -> None:
    with h5py.File(tmp_path / "a", "w") as file:
        file["x"] = np.zeros((3, 2), "u2")
        file["x"].attrs["dsprep_dtype"] = np.bytes_(text)
    with pytest.raises(FormatError, match="dsprep_dtype"):
        opened(tmp_path / "a")


def test_text_that_is_none(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a", "w") as file:
        file["x"] = np.full((3, 2), 0x110000, "u4")
        file["x"].attrs["dsprep_dtype"] = np.bytes_('"<U2"')
    with opened(tmp_path / "a") as source, pytest.raises(FormatError, match="no characters"):
        source.read(0, 3)


def test_hostile_sizes(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a", "w") as file:
        file.create_dataset("x", (2, 1 << 50), "f4", chunks=(1, 1024))
    with pytest.raises(FormatError, match="cannot be right"):
        opened(tmp_path / "a")
    with h5py.File(tmp_path / "b", "w") as file:
        g = file.create_group("r")
        g.attrs["dsprep_kind"] = np.bytes_("array")
        g["values"], g["first"], g["count"] = (
            np.arange(9),
            np.array([0, 2**62]),
            np.array([2**62, 9]),
        )
        file["y"] = [1, 2]
    with opened(tmp_path / "b") as source, pytest.raises(FormatError, match="index does not fit"):
        source.read(0, 2)
    with h5py.File(tmp_path / "b", "r+") as file:
        del file["r/count"]
    with pytest.raises(FormatError, match="lacks its dataset count"):
        opened(tmp_path / "b")


def read_whole(path: Path) -> None:
    with opened(path) as source:
        for start in range(0, min(len(source), 40), 8):
            source.read(start, min(start + 8, len(source)))
        source.layouts()
        source.sizes(0, min(len(source), 40))


def damaged_files(tmp_path: Path) -> list[bytes]:
    """Write files to be damaged, one of another program and two of our own."""
    with h5py.File(tmp_path / "tables", "w") as file:
        gz = {"compression": "gzip", "maxshape": (None,), "chunks": (16,)}
        extents = np.zeros((2, 15), np.dtype([("first", "<u8"), ("N", "<u4")]))
        for table, each in zip(extents, (3, 4), strict=True):
            table["first"], table["N"] = np.arange(15) * each, each
        file.create_dataset("g/extents", data=extents[0][:5], **gz)
        file.create_dataset("g/voxel_extents", data=extents[1], **gz)
        file.create_dataset("g/voxels", data=random_array(STRUCT, (60,)), **gz)
        file.create_dataset("g/text", data=["a", "bc", "def", "", "e"], dtype=h5py.string_dtype())
        file["label"] = np.arange(5)
        file["label"].attrs["unit"] = "none"
    mixed = dict(schemas())["mixed"]
    write_batch(HDF5, tmp_path / "plain", mixed, random_batch(mixed, 9))
    options = WriteOptions(compress=Compression("gzip"))
    write_batch(HDF5, tmp_path / "gzip", mixed, random_batch(mixed, 9), options)
    return [(tmp_path / n).read_bytes() for n in ("tables", "plain", "gzip")]


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    for data in damaged_files(tmp_path):
        for size in range(0, len(data) - 1, max(1, len(data) // 60)):
            (tmp_path / "cut").write_bytes(data[:size])
            with pytest.raises(DsprepError):
                read_whole(tmp_path / "cut")


FLIPS = """
import sys, random
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from dsprep.errors import DsprepError
from test_hdf5_damage import read_whole
path, seed = Path(sys.argv[1]), int(sys.argv[2])
data, rng = path.read_bytes(), random.Random(seed)
for _ in range(80):
    broken = bytearray(data)
    for _ in range(rng.choice((1, 1, 4))):
        broken[rng.randrange(min(len(broken), 9000))] = rng.randrange(256)
    path.with_suffix(".broken").write_bytes(broken)
    try:
        read_whole(path.with_suffix(".broken"))
    except DsprepError:
        pass
"""


def test_flipped_bytes_never_escape(tmp_path: Path) -> None:
    """In a process of its own, so that a crash of the library would show as such."""
    here = Path(__file__).parent
    damaged_files(tmp_path)
    for seed, name in enumerate(("tables", "plain", "gzip")):
        arguments = [tmp_path / name, seed, here, here.parent]
        done = subprocess.run(
            [sys.executable, "-c", FLIPS, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_damaged_chunk_is_named(tmp_path: Path, shuffle: bool) -> None:
    with h5py.File(tmp_path / "a", "w") as file:
        x = file.create_dataset("x", data=X, chunks=(5, 6, 4), compression="gzip", shuffle=shuffle)
        chunk = x.id.get_chunk_info(2)
    data = bytearray((tmp_path / "a").read_bytes())
    data[chunk.byte_offset + 30] ^= 0xFF
    (tmp_path / "a").write_bytes(data)
    with opened(tmp_path / "a") as source:
        assert raw(source.read(0, 10)["x"]) == raw(X[:10])
        with pytest.raises(FormatError, match=f"a, field x, offset {chunk.byte_offset}: a chunk"):
            source.read(8, 12)


def test_a_chunk_that_expands_without_end(tmp_path: Path) -> None:
    """Neither one that holds more than it should, nor one that claims more than it can hold."""
    for stored, rows in ((1 << 22, 5000), (16, 1 << 24)):
        with h5py.File(tmp_path / "a", "w") as file:
            x = file.create_dataset("x", (rows,), "u1", chunks=(rows,), compression="gzip")
            x.id.write_direct_chunk((0,), zlib.compress(bytes(stored), 9))
        with opened(tmp_path / "a") as source, pytest.raises(FormatError, match="a chunk"):
            source.read(0, rows)


def test_a_chunk_without_filters_has_the_size_of_a_chunk(tmp_path: Path) -> None:
    """Of a shorter one the library reads what there is, and leaves its memory as it was."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        x = file.create_dataset("x", (20, 40), "<i4", chunks=(5, 40))
        x[:] = 1
        x.id.write_direct_chunk((10, 0), bytes(225))
    with HDF5.open(path, OpenOptions(), None) as source:
        assert (source.read(0, 10)["x"] == 1).all()
        with pytest.raises(FormatError, match=r"chunk at \(10, 0\).*800 bytes, found 225"):
            source.read(8, 12)
