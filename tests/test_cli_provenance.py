"""``dsprep provenance`` as a user types it."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path

import h5py
import lmdb
import numpy as np
import pytest
import zarr
from oracles import SUFFIX, tensorflow
from test_cli import fails, run

import dsprep
from dsprep.sidecar import spec

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
    done = run("provenance", path, *FIELDS[format])
    assert done.code == 0, done.err
    assert str(spec.sidecar_path(path)) in done.out
    assert "100 in 1 file" in done.out
    shown = run("provenance", path, "--show")
    assert shown.code == 0
    for word in ("payload", "per sample", "offsets", "decode", "with "):
        assert word in shown.out, word
    told = json.loads(run("provenance", path, "--show", "--json").out)
    assert told["samples"] == N
    assert 0 < told["payload_share"] <= 1
    found = json.loads(run("provenance", path, "--locate", "5,90:100,-1,:2", "--json").out)
    samples = [5, *range(90, 100), 99, 0, 1]
    names = list(dict.fromkeys(row["field"] for row in found))
    assert [row["index"] for row in found] == [i for i in samples for _ in names]
    for row in found:
        assert list(row) == ["index", "field", "file", "offset", "length"]
        with (tmp_path / row["file"]).open("rb") as file:
            got = os.pread(file.fileno(), row["length"], row["offset"])
        assert got == stored(format, row["index"], row["field"]), row
    for how in (["--check"], ["--check", "full"], ["--check=full"], ["--check=cheap"]):
        done = run("provenance", path, *how)
        assert done.code == 0, done.out
        assert done.out.startswith("valid: ")
    assert json.loads(run("provenance", "--check", path, "--json").out) == {
        "valid": True,
        "full": False,
        "problems": [],
    }


def test_creation_tells_what_it_made(made, tmp_path):
    path = tmp_path / "d.h5"
    shutil.copy(made / "d.h5", path)
    dry = json.loads(run("provenance", path, "--dry-run", "--json").out)
    keys = {"path", "nbytes", "written", "format", "files", "samples", "fields", "notes"}
    assert set(dry) == keys
    assert not dry["written"]
    assert dry["fields"] == {"x": "2,048 + i * 24", "y": "4,448 + i * 8"}
    assert list(tmp_path.iterdir()) == [path]
    assert "Nothing was written" in run("provenance", path, "--dry-run").out
    elsewhere = tmp_path / "side" / "s.dsprep.json"
    elsewhere.parent.mkdir()
    done = json.loads(run("provenance", path, "--out", elsewhere, "--checksums", "--json").out)
    assert done["written"]
    assert done["nbytes"] == elsewhere.stat().st_size
    rows = json.loads(
        run("provenance", path, "--out", elsewhere, "--locate", "3", "--field", "y", "--json").out
    )
    assert rows == [
        {"index": 3, "field": "y", "file": "../d.h5", "offset": 4472, "length": 8},
    ]
    assert run("provenance", path, "--out", elsewhere, "--check", "full").code == 0
    assert not spec.sidecar_path(path).exists()


def test_places_in_chunks(tmp_path):
    values = np.arange(400, dtype="<i4").reshape(100, 4)
    with h5py.File(tmp_path / "c.h5", "w") as file:
        file.create_dataset("z", data=values, chunks=(7, 4), compression="gzip")
    done = run("provenance", tmp_path / "c.h5", "--locate", "9", "--json")
    assert "there was no sidecar; wrote" in done.err
    (row,) = json.loads(done.out)
    assert list(row)[5:] == ["inside", "inside_nbytes"]
    assert (row["inside"], row["inside_nbytes"]) == (32, 16)
    import zlib

    with (tmp_path / "c.h5").open("rb") as file:
        chunk = zlib.decompress(os.pread(file.fileno(), row["length"], row["offset"]))
    assert chunk[32:48] == values[9].tobytes()
    table = run("provenance", tmp_path / "c.h5", "--locate", "9").out.splitlines()
    assert table[0].split()[:5] == ["index", "field", "file", "offset", "length"]
    assert table[1].split()[:3] == ["9", "z", "c.h5"]
    assert "undo zlib" in run("provenance", tmp_path / "c.h5", "--show").out


def test_the_history_of_a_database(tmp_path):
    with lmdb.open(str(tmp_path / "h.lmdb"), map_size=1 << 30, sync=False) as env:
        for a in range(0, 1000, 100):
            with env.begin(write=True) as txn:
                for i in range(a, a + 100):
                    txn.put(b"%08d" % i, b"x" * 5000, append=True)
    run("provenance", tmp_path / "h.lmdb")
    shown = run("provenance", tmp_path / "h.lmdb", "--show").out
    assert "commit interval 100" in shown
    assert "leaf" in shown
    facts = json.loads(run("provenance", tmp_path / "h.lmdb", "--show", "--json").out)
    assert facts["layouts"][0]["made with"]["commit interval"] == 100
    assert run("provenance", tmp_path / "h.lmdb", "--law", "replay").code == 0
    assert run("provenance", tmp_path / "h.lmdb", "--law", "runs").code == 0
    assert "runs" in run("provenance", tmp_path / "h.lmdb", "--show").out
    text = fails("provenance", tmp_path / "h.lmdb", "--law", "affine", code=2)
    assert "does not give every offset exactly" in text
    assert "one of affine" in fails("provenance", tmp_path / "h.lmdb", "--law", "magic", code=2)


def test_a_stale_sidecar_is_not_used(made, tmp_path):
    path = tmp_path / "d.h5"
    shutil.copy(made / "d.h5", path)
    run("provenance", path)
    with h5py.File(path, "a") as file:
        file["more"] = np.arange(N)
    for use in (["--show"], ["--locate", "1"], ["--export", "kerchunk"]):
        text = fails("provenance", path, *use)
        assert f"dsprep provenance {path}" in text
    assert run("provenance", path, "--check").code == 1
    assert run("provenance", path).code == 0
    assert "more" in run("provenance", path, "--show").out


def test_what_has_no_places(tmp_path):
    with gzip.open(tmp_path / "x.tfrecord.gz", "wb") as file:
        tf = tensorflow()
        with tf.io.TFRecordWriter(str(tmp_path / "plain")) as writer:
            writer.write(b"abc")
        file.write((tmp_path / "plain").read_bytes())
    with h5py.File(tmp_path / "v.h5", "w") as file:
        made = file.create_dataset("s", (3,), dtype=h5py.string_dtype())
        made[:] = ["abc"] * 3
    with lmdb.open(str(tmp_path / "dup.lmdb"), max_dbs=1, map_size=1 << 24) as env:
        db = env.open_db(b"d", dupsort=True)
        with env.begin(write=True) as txn:
            txn.put(b"k", b"1", db=db)
            txn.put(b"k", b"2", db=db)
    (tmp_path / "nothing").mkdir()
    for name in ("x.tfrecord.gz", "v.h5"):
        for use in ([], ["--show"]):
            assert "dsprep convert" in fails("provenance", tmp_path / name, *use), name
    assert "DUPSORT" in fails("provenance", tmp_path / "dup.lmdb", "--db", "d").upper()
    assert "no dataset" in fails("provenance", tmp_path / "nothing")
    assert "there is no sidecar" in fails("provenance", tmp_path / "v.h5", "--check")


def test_a_sidecar_without_places_is_checked(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(10)
    target = tmp_path / "a.tfrecord.gz"
    dsprep.convert(tmp_path / "a.h5", target, to="tfrecord", compress="gzip")
    assert run("provenance", target, "--check").code == 0
    assert run("provenance", target, "--check", "full").code == 0
    assert "dsprep convert" in fails("provenance", target, "--locate", "0")


def test_fields_only_the_library_reads(tmp_path):
    with h5py.File(tmp_path / "m.h5", "w") as file:
        file["x"] = np.arange(3)
        made = file.create_dataset("s", (3,), dtype=h5py.string_dtype())
        made[:] = ["abc"] * 3
    path = tmp_path / "m.h5"
    run("provenance", path)
    shown = run("provenance", path, "--show").out
    assert "no offsets" in shown
    assert "dsprep convert" in shown
    done = run("provenance", path, "--locate", ":", "--json")
    assert {row["field"] for row in json.loads(done.out)} == {"x"}
    assert "field s cannot be located" in done.err
    fails("provenance", path, "--locate", ":", "--field", "s", code=2)
    assert run("provenance", path, "--check", "full").code == 0


WRONG = [
    ("--show --locate 1", 2, "do not go together"),
    ("--show --law runs", 2, "--law"),
    ("--check --checksums", 2, "--check"),
    ("--locate x", 2, "names no samples"),
    ("--locate 1:2:3", 2, "names no samples"),
    ("--locate 100", 2, "no sample 100"),
    ("--locate 1 --field nosuch", 1, "nosuch"),
    ("--locate 1 --field x:float32[6]", 2, "other options"),
    ("--locate 1 --sample-axis none", 2, "other options"),
    ("--export nosuch", 2, "no export nosuch"),
]


def test_wrong_usage(made, tmp_path):
    path = tmp_path / "d.h5"
    shutil.copy(made / "d.h5", path)
    run("provenance", path)
    for options, code, word in WRONG:
        assert word in fails("provenance", path, *options.split(), code=code)


def test_only_a_sidecar_is_replaced(made, tmp_path):
    path, other = tmp_path / "d.h5", tmp_path / "notes.txt"
    shutil.copy(made / "d.h5", path)
    other.write_text("mine")
    before, pipe = path.read_bytes(), tmp_path / "pipe"
    os.mkfifo(pipe)  # it stands for a device
    for out in (path, other, tmp_path, pipe):
        assert "a sidecar cannot be written here" in fails("provenance", path, "--out", out, code=2)
    assert path.read_bytes() == before
    assert other.read_text() == "mine"
    assert pipe.is_fifo()


def test_one_file_of_many(made, tmp_path):
    root = tmp_path / "set"
    root.mkdir()
    for i in range(3):
        shutil.copy(made / "d.h5", root / f"{i}.h5")
    run("provenance", root)
    rows = json.loads(run("provenance", root, "--locate", "205", "--field", "y", "--json").out)
    assert rows == [
        {"index": 205, "field": "y", "file": "set/2.h5", "offset": 4448 + 40, "length": 8}
    ]
    alone = run("provenance", root / "2.h5", "--locate", "5", "--field", "y", "--json")
    assert json.loads(alone.out)[0]["offset"] == 4448 + 40
    assert run("provenance", root / "2.h5", "--check", "full").code == 0
    assert not spec.sidecar_path(root / "2.h5").exists()
