"""Files that people take for datasets: what they are is said, and the way out."""

from __future__ import annotations

import gzip
import io
import pickle
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest
from support import cli_error

import dsprep
from dsprep.errors import FormatError

LFS = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


# --- any other file --------------------------------------------------------------------------


def zipped(name: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(name, "x")
    return out.getvalue()


CONTENTS = {
    "Git LFS pointer": LFS.encode(),
    "MATLAB": b"MATLAB 5.0 MAT-file, Platform: GLNXA64" + bytes(90),
    "HDF4": b"\x0e\x03\x13\x01" + bytes(60),
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


def test_pickles_are_named_and_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "data.pkl"
    for protocol, value in ((2, {"image": [1, 2, 3]}), (5, [1, 2]), (4, np.arange(4))):
        path.write_bytes(pickle.dumps(value, protocol))
        with pytest.raises(FormatError, match=r"this is a pickle .*dsprep.write"):
            dsprep.open(path)


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
        cli_error("convert", path, tmp_path / "out.zarr")
        assert not (tmp_path / "out.zarr").exists()
    with dsprep.open(table / "data" / "day=1" / "1.h5") as source:
        assert len(source) == 3
    (table / member).unlink()
    (table / member).parent.rmdir()
    with dsprep.open(table) as source:
        assert len(source) == 6
