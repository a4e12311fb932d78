"""Files that people take for datasets: what they are is said, and the way out."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr
from typer.testing import CliRunner

import dsprep
from dsprep.cli import app
from dsprep.errors import FormatError, MissingExtra
from dsprep.formats import foreign

LFS = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
HEADS = {
    "Git LFS pointer": (LFS.encode(), "git lfs pull"),
    "MATLAB": (b"MATLAB 5.0 MAT-file, Platform: GLNXA64" + bytes(90), "-v7.3"),
    "HDF4": (b"\x0e\x03\x13\x01" + bytes(60), "h4toh5"),
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


# --- any other file --------------------------------------------------------------------------


def zipped(name: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(name, "x")
    return out.getvalue()


OBJECT = {"image": [1, 2, 3], "label": "cat", "weight": 0.5}
CONTENTS = {
    "Arrow": b"ARROW1\0\0" + bytes(90),
    "GRIB": b"GRIB" + bytes(90),
    "image": b"\x89PNG\r\n\x1a\n" + bytes(90),
    "compressed": gzip.compress(b"x" * 900),
    "ZIP archive": zipped("a.txt"),
    "pickle": zipped("archive/data.pkl"),
    "of zeros": bytes(900),
    "just a line": b"just a line of text",
    "empty": b"",
}


@pytest.mark.parametrize("kind", CONTENTS)
def test_what_any_other_file_is(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(CONTENTS[kind])
    with pytest.raises(FormatError) as caught:
        dsprep.open(path)
    assert kind.replace("\\\\", "\\") in str(caught.value)
    assert "expected hdf5" in str(caught.value)
    assert caught.value.fix


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("value", [OBJECT, [1, 2], (1, "a"), np.arange(4), {}], ids=repr)
def test_pickles_are_named_and_not_opened(tmp_path: Path, protocol: int, value: object) -> None:
    path = tmp_path / "data.pkl"
    path.write_bytes(pickle.dumps(value, protocol))
    with pytest.raises(FormatError, match=r"this is a pickle .*unpickles nothing.*dsprep.write"):
        dsprep.open(path)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"a.dat": b"\1", "b.dat": b"\2"}, "2 other files, such as a.dat"),
        ({}, "found nothing"),
    ],
)
def test_what_a_directory_holds(tmp_path: Path, files: dict[str, bytes], words: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(FormatError, match=words) as caught:
        dsprep.open(tmp_path)
    assert not files or "dsprep.write(" in str(caught.value)


def test_nothing_makes_it_fail(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    path = tmp_path / "data.bin"
    for content in CONTENTS.values():
        for _ in range(3):
            data = bytearray(content[:300])
            for at in rng.integers(0, max(1, len(data)), 3).tolist() if data else ():
                data[at] = int(rng.integers(256))
            for cut in (len(data), 9, 5, 2, 1):
                path.write_bytes(data[:cut])
                with pytest.raises(FormatError):
                    raise foreign.refused(path, ["hdf5"])


TABLES = {
    "Delta Lake": ("deltalake", "_delta_log/00000000000000000000.json"),
    "Apache Hudi": ("hudi", ".hoodie/hoodie.properties"),
    "Apache Iceberg": ("pyiceberg", "metadata/00002-1a2b.metadata.json"),
    "Iceberg": ("pyiceberg", "metadata/version-hint.text"),
}


@pytest.mark.parametrize("kind", TABLES)
def test_tables_whose_files_hold_overwritten_rows(tmp_path: Path, kind: str) -> None:
    """They are refused as a directory, in one and by a glob; a file that is named is read."""
    library, member = TABLES[kind]
    table = tmp_path / "tables" / "t"
    (table / member).parent.mkdir(parents=True)
    (table / member).write_text("{}")
    (table / "data" / "day=1").mkdir(parents=True)
    for i in range(2):
        with h5py.File(table / "data" / "day=1" / f"{i}.h5", "w") as file:
            file["x"] = np.arange(3)
    for path in (table, table.parent, f"{table}/data/*/*.h5", f"{table}/**/*.h5"):
        with pytest.raises(FormatError, match="table whose files") as caught:
            dsprep.open(path)
        assert f"read it with {library}" in str(caught.value)
        assert "dsprep.write(" in str(caught.value)
        done = CliRunner().invoke(app, ["convert", str(path), str(tmp_path / "out.zarr")])
        assert (done.exit_code, (tmp_path / "out.zarr").exists()) == (1, False)
    with dsprep.open(table / "data" / "day=1" / "1.h5") as source:
        assert len(source) == 3
    (table / member).unlink()
    (table / member).parent.rmdir()
    with dsprep.open(table) as source:
        assert len(source) == 6
