"""``dsprep provenance`` as a user types it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import h5py
import lmdb
import numpy as np
import pytest
import zarr
from oracles import SUFFIX, tensorflow
from support import cli

FORMATS = sorted(SUFFIX)
N = 100
X = np.arange(6 * N, dtype="<f4").reshape(N, 2, 3)
Y = np.arange(N, dtype="<i8") * 3


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The same samples in every format, made by the formats' own libraries."""
    root = tmp_path_factory.mktemp("made")
    with h5py.File(root / "d.h5", "w") as file:
        file["x"], file["y"] = X, Y
    group = zarr.open_group(root / "d.zarr", mode="w")
    for name, values in (("x", X), ("y", Y)):
        shape = (16, *values.shape[1:])
        array = group.create_array(
            name, shape=values.shape, chunks=shape, dtype=values.dtype, compressors=None
        )
        array[...] = values
    values = [X[i].tobytes() + Y[i].tobytes() for i in range(N)]
    with lmdb.open(str(root / "d.lmdb"), map_size=1 << 30) as env, env.begin(write=True) as txn:
        for i, value in enumerate(values):
            txn.put(b"%08d" % i, value)
    tf = tensorflow()
    with tf.io.TFRecordWriter(str(root / "d.tfrecord")) as writer:
        for value in values:
            writer.write(value)
    return root


FIELDS = {
    "hdf5": [],
    "zarr": [],
    "lmdb": ["--field", "value:uint8[32]"],
    "tfrecord": ["--raw-records", "--field", "record:uint8[32]"],
}


def stored(format: str, index: int, field: str) -> bytes:
    if field == "x":
        return X[index].tobytes()
    return Y[index].tobytes() if field == "y" else X[index].tobytes() + Y[index].tobytes()


@pytest.fixture
def data(request, made, tmp_path):
    format = request.param
    path = tmp_path / f"d{SUFFIX[format]}"
    source = made / path.name
    shutil.copytree(source, path) if source.is_dir() else shutil.copy(source, path)
    return format, path


@pytest.mark.parametrize("data", FORMATS, indirect=True)
def test_create_show_locate_check(data, tmp_path):
    format, path = data
    cli("provenance", path, *FIELDS[format])
    told = cli("provenance", path, "--show", "--json").json()
    assert told["samples"] == N
    found = cli("provenance", path, "--locate", "5,90:100,-1,:2", "--json").json()
    samples = [5, *range(90, 100), 99, 0, 1]
    names = list(dict.fromkeys(row["field"] for row in found))
    assert [row["index"] for row in found] == [i for i in samples for _ in names]
    for row in found:
        assert list(row) == ["index", "field", "file", "offset", "length"]
        with (tmp_path / row["file"]).open("rb") as file:
            got = os.pread(file.fileno(), row["length"], row["offset"])
        assert got == stored(format, row["index"], row["field"]), row
    assert cli("provenance", path, "--check", "--full").out.startswith("valid: ")
    told = cli("provenance", "--check", path, "--json").json()
    assert told == {"valid": True, "full": False, "problems": []}


def test_the_history_of_a_database(tmp_path):
    with lmdb.open(str(tmp_path / "h.lmdb"), map_size=1 << 30, sync=False) as env:
        for a in range(0, 1000, 100):
            with env.begin(write=True) as txn:
                for i in range(a, a + 100):
                    txn.put(b"%08d" % i, b"x" * 5000, append=True)
    cli("provenance", tmp_path / "h.lmdb")
    shown = cli("provenance", tmp_path / "h.lmdb", "--show").out
    assert "commit interval 100" in shown
    assert "leaf" in shown
    facts = cli("provenance", tmp_path / "h.lmdb", "--show", "--json").json()
    assert facts["layouts"][0]["made with"]["commit interval"] == 100
