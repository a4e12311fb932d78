"""Files that people take for datasets: what they are is said, and the way out."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr

import dsprep
from dsprep.errors import FormatError, MissingExtra

LFS = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
HEADS = {
    "Git LFS pointer": (LFS.encode(), "git lfs pull"),
    "netCDF-3": (b"CDF\2" + bytes(60), "nccopy -k nc4"),
    "MATLAB": (b"MATLAB 5.0 MAT-file, Platform: GLNXA64" + bytes(90), "-v7.3"),
    "Portable Database": (b"!<<PDB:II>>!" + bytes(60), "DB_HDF5"),
    "Protein Data Bank": (b"HEADER    HYDROLASE    01-JAN-00   1ABC\n", "h5py"),
    "HDF4": (b"\x0e\x03\x13\x01" + bytes(60), "h4toh5"),
    "NumPy": (b"\x93NUMPY\1\0" + bytes(60), "numpy.load"),
}


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("name", ["a", "a.h5", "a.lmdb", "a.tfrecord"])
def test_what_it_is_and_the_way_out(tmp_path: Path, kind: str, name: str) -> None:
    """Named or in a directory, also beside a dataset, whatever its name ends in."""
    head, fix = HEADS[kind]
    (tmp_path / name).write_bytes(head)
    with pytest.raises(FormatError, match=kind) as caught:
        dsprep.open(tmp_path / name)
    assert fix in str(caught.value)
    if "." in name:
        with pytest.raises(FormatError, match=kind):
            dsprep.open(tmp_path)
        with h5py.File(tmp_path / f"0.{name.partition('.')[2]}", "w") as file:
            file["x"] = np.arange(3)
        with pytest.raises(FormatError):
            dsprep.open(tmp_path)
        assert not [p for p in Path("/proc/self/fd").iterdir() if tmp_path in p.resolve().parents]


def test_filters_that_no_package_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.arange(90.0), chunks=(30,), compression="lzf")
    data = (tmp_path / "a.h5").read_bytes()
    for code, fix in ((305, "ptrepack"), (32015, "hdf5plugin]"), (32099, "h5repack")):
        at = data.index(b"lzf\0") - 8
        assert data[at : at + 2] == (32000).to_bytes(2, "little")
        broken = data[:at] + code.to_bytes(2, "little") + data[at + 2 :]
        (tmp_path / "b.h5").write_bytes(broken)
        monkeypatch.setattr("h5py.h5z.filter_avail", lambda number: number < 300)
        with pytest.raises(MissingExtra, match=f"HDF5 filter {code} ") as caught:
            dsprep.open(tmp_path / "b.h5")
        assert fix in str(caught.value)


@pytest.mark.parametrize("codec", ["pcodec", "zfpy"])
@pytest.mark.parametrize("version", [2, 3])
def test_the_package_of_a_codec_is_named(tmp_path: Path, codec: str, version: int) -> None:
    path = tmp_path / "a.zarr"
    zarr.create_array(path, data=np.ones((4, 2)), zarr_format=version, compressors=None)
    document = path / (".zarray" if version == 2 else "zarr.json")
    meta = json.loads(document.read_text())
    if version == 2:
        meta["compressor"] = {"id": codec}
    else:
        meta["codecs"].append({"name": f"numcodecs.{codec}", "configuration": {}})
    document.write_text(json.dumps(meta))
    with dsprep.open(path) as source, pytest.raises(MissingExtra, match=f"pip install {codec}"):
        source.read(0, 1)
