"""Checking sidecars: every kind of damage is found."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import h5py
import lmdb
import numpy as np
import pytest
import zarr
from support import flip, flip_sampled, reading

import dsprep
from dsprep import formats
from dsprep.core.schema import Field, Schema
from dsprep.formats.options import OpenOptions
from dsprep.layout.laws import Affine, Explicit
from dsprep.layout.locate import locate
from dsprep.layout.model import Blocks, Column, FileLayout, Grid
from dsprep.sidecar import spec
from dsprep.sidecar.sidecar import Sidecar
from dsprep.verbs.check import check, extents
from dsprep.verbs.check.extents import wrong_extents
from dsprep.verbs.provenance import provenance

N = 200
X = np.random.default_rng(3).integers(0, 256, (N, 50), "u1")


def make_hdf5(path):
    with h5py.File(path, "w") as file:
        file["x"] = X
        file.attrs["title"] = "a"


def make_chunks(path):
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=X, chunks=(16, 50), compression="gzip")


def make_zarr(path):
    group = zarr.open_group(path, mode="w")
    array = group.create_array("x", shape=X.shape, chunks=(16, 50), shards=(64, 50), dtype="u1")
    array[...] = X


def make_lmdb(path):
    with lmdb.open(str(path), map_size=1 << 28, subdir=False, lock=False) as env:
        for a in range(0, N, 20):
            with env.begin(write=True) as txn:
                for i in range(a, a + 20):
                    txn.put(b"%08d" % i, X[i].tobytes() * 60)


def make_tfrecord(path):
    from oracles import tensorflow

    with tensorflow().io.TFRecordWriter(str(path)) as writer:
        for i in range(N):
            writer.write(X[i, : 20 + i % 30].tobytes())


MAKE = {
    "d.h5": make_hdf5,
    "c.h5": make_chunks,
    "d.zarr": make_zarr,
    "d.lmdb": make_lmdb,
    "d.tfrecord": make_tfrecord,
}
OPTIONS = {"d.tfrecord": OpenOptions(records="opaque")}


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("originals")
    for name, make in MAKE.items():
        make(root / name)
    return root


@pytest.fixture(params=MAKE)
def data(request, originals, tmp_path) -> Path:
    """A dataset with its sidecar."""
    return put(originals, tmp_path, request.param)


def put(originals, tmp_path, name, **options) -> Path:
    path = tmp_path / name
    source = originals / name
    shutil.copytree(source, path) if source.is_dir() else shutil.copy(source, path)
    provenance(path, OPTIONS.get(name), **options)
    return path


def payload_file(path) -> tuple[Path, int]:
    """A file that holds sample 100, and an offset of bytes of it."""
    with Sidecar.open(path) as opened:
        row = opened.extents([100])[0]
    return path.parent / row.file, row.offset + row.length // 2


def texts(path, **options) -> str:
    found = check(path, **options)
    return "\n".join(map(str, found))


def test_nothing_is_wrong(data):
    assert check(data) == []
    assert check(data, full=True) == []
    assert check(spec.sidecar_path(data), full=True) == []
    with Sidecar.open(data) as opened:
        assert check(opened) == []


@pytest.mark.parametrize("to", formats.WRITTEN)
def test_nothing_is_wrong_of_structures_in_folders(to, tmp_path):
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file["events/id"] = np.zeros(N, [("run", "<i8"), ("event", "<i8")])
        file["events/x"] = X
    dsprep.repack(tmp_path / "in.h5", tmp_path / "out", to=to)
    assert check(spec.sidecar_path(tmp_path / "out"), full=True) == []


def test_bytes_changed_in_place(data):
    flip_sampled(data)
    assert "content changed" in texts(data)
    assert "content changed" in texts(data, full=True)


@pytest.mark.parametrize("name", MAKE)
def test_checksums_find_what_nothing_else_does(name, originals, tmp_path):
    path = put(originals, tmp_path, name, checksums=True)
    file, offset = payload_file(path)
    assert check(path, full=True) == []
    flip(file, offset, keep_time=True)
    assert "CRC-32C of bytes 0 to" in texts(path, full=True)


def test_the_first_damaged_record_is_named(originals, tmp_path):
    path = put(originals, tmp_path, "d.tfrecord")
    with Sidecar.open(path) as opened:
        rows = opened.extents([3, 77, 150])
    for row in rows:
        flip(path, row.offset + 1, keep_time=True)
    assert ", sample 3, offset" in texts(path, full=True)


def test_appended_and_truncated(data):
    file, offset = payload_file(data)
    with file.open("ab") as opened:
        opened.write(b"more")
    assert "bytes, expected" in texts(data)
    os.truncate(file, offset)
    for full in (False, True):
        assert "bytes, expected" in texts(data, full=full)


def edit(path, change):
    where = spec.sidecar_path(path)
    content = json.loads(where.read_text())
    change(content)
    where.write_text(json.dumps(content))


EDITS = {
    "future": (lambda c: c.update(dsprep_sidecar=3), "later version"),
    "no files": (lambda c: c.pop("files"), "KeyError: 'files'"),
    "a file's size": (lambda c: c["files"][0].update(nbytes="many"), "specification"),
    "samples": (lambda c: c.update(samples=3), "another number of samples"),
    "too few": (lambda c: c["files"][0].update(samples=10), "number of samples"),
    "format": (lambda c: c.update(format="nosuch"), "no known format"),
    "dtype": (lambda c: c["schema"][0].update(dtype="O"), "does not describe a field"),
    "name": (lambda c: c["schema"][0].update(name="other"), "other fields than the schema"),
    "reading": (lambda c: c.update(reading={"order": "sideways"}), "reading options"),
    "layouts": (lambda c: c.update(layouts=[{}]), "other fields than the schema"),
    "digest": (lambda c: c["files"][0].update(sampled="00", mtime_ns=1), "sampled blocks differ"),
    "path": (lambda c: c["files"][0].update(path="../x"), "leaves the dataset"),
}
FULL = {
    "type": (
        lambda c: c["schema"][0].update(dtype="|i1"),
        "its schema is not that of the sidecar",
    ),
    "attribute": (
        lambda c: c["attrs"][""].update(title="b"),
        "its attribute title is not that of the sidecar",
    ),
}
"""What the cheap check does not find."""


@pytest.mark.parametrize("edited", [*EDITS, *FULL])
def test_an_edited_sidecar(edited, originals, tmp_path):
    path = put(originals, tmp_path, "d.h5")
    change, word = {**EDITS, **FULL}[edited]
    edit(path, change)
    for full in (edited in FULL, True):
        assert word in texts(path, full=full)


def blocks_of(content):
    layout = content["layouts"][0]
    return layout["records"] if "records" in layout else layout["columns"]["x"]


@pytest.mark.parametrize("name", ["d.h5", "d.tfrecord", "d.lmdb"])
def test_laws_that_give_other_places(name, originals, tmp_path):
    path = put(originals, tmp_path, name)

    def change(content):
        blocks_of(content)["offsets"] = 100

    edit(path, change)
    assert check(path) == []  # all of them are in the file
    (found,) = [p for p in check(path, full=True) if "another extent" in p.what]
    assert found.found.endswith(" at 100")


def test_laws_that_leave_the_file(data):
    def change(content):
        blocks_of(content)["offsets"] = 1 << 50

    edit(data, change)
    for full in (False, True):
        assert "the sidecar gives an extent that is not in the file" in texts(data, full=full)


def test_the_companion(tmp_path):
    path = tmp_path / "r.h5"
    counts = np.random.default_rng(1).integers(0, 99, 1 << 15)
    with h5py.File(path, "w") as file:
        file["values"] = np.arange(counts.sum())
        file["index"] = np.stack([np.cumsum(counts) - counts, counts], 1)
    provenance(path, reading("v=values@index"))
    where = spec.sidecar_path(path)
    companion = where.with_name(spec.companion_name(where))
    kept = companion.read_bytes()
    companion.write_bytes(kept[:-1] + b"!")
    assert "companion is of another sidecar" in texts(path)
    companion.unlink()
    assert "companion of the sidecar is missing" in texts(path, full=True)


def test_all_at_once(originals, tmp_path):
    root = tmp_path / "set"
    root.mkdir()
    for i in range(5):
        shutil.copy(originals / "d.h5", root / f"{i}.h5")
    provenance(root)
    os.truncate(root / "0.h5", 3000)
    (root / "1.h5").unlink()
    (root / "3.h5").write_bytes(b"nothing")
    make_hdf5(root / "9.h5")
    for full in (False, True):
        named = {Path(p.where).name for p in check(root, full=full)}
        assert named == {"0.h5", "1.h5", "3.h5", "9.h5"}


def test_ragged_rows_that_do_not_exist(tmp_path):
    path = tmp_path / "r.h5"
    with h5py.File(path, "w") as file:
        file["values"] = np.arange(100)
        file["index"] = np.stack([np.arange(10) * 10, np.full(10, 10)], 1)
    provenance(path, reading("v=values@index"))
    assert check(path, full=True) == []
    for key, value in (("count", 1 << 40), ("first", -5), ("first", 99)):
        edit(path, lambda c, k=key, v=value: c["layouts"][0]["columns"]["v"].update({k: v}))
        assert "rows that do not exist" in texts(path)
    edit(path, lambda c: c["schema"][0].update(shape=[None, 0]))
    assert "rows of no bytes" in texts(path, full=True)


# --- comparing layouts -----------------------------------------------------------------------


def grid(**more):
    arguments = {"shape": (10, 4), "itemsize": 2, "chunk": (3, 4)} | more
    offsets = arguments.pop("offsets", [0, 24, 48, 72])
    blocks = Blocks(Explicit(np.array(offsets)), Affine(len(offsets), 24))
    return FileLayout(10, None, {"x": Column(Grid(blocks, **arguments))})


SCHEMA = Schema((Field("x", np.dtype("<i2"), (4,)),))


@pytest.mark.parametrize(
    ("other", "word"),
    [
        (grid(), ""),
        (grid(offsets=[0, 24, 50, 72]), "another extent"),
        (grid(filters=({"id": "zlib"},)), "filters"),
        (grid(fill=b"ab"), "fill"),
        (grid(shape=(9, 4)), "shape"),
        (FileLayout(10, None, {}, {"x": "so"}), "kind of storage"),
    ],
)
def test_columns_are_compared(other, word, tmp_path):
    (tmp_path / "x").write_bytes(bytes(100))
    found = [*wrong_extents(other, SCHEMA, tmp_path / "x", 0, grid())]
    assert [word] * len(found) == [word for p in found if word in p.what and "x" in str(p.where)]
    assert bool(found) == bool(word)


def test_a_sample_of_a_chunk_that_leaves_the_file(tmp_path):
    path = tmp_path / "chunks.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.arange(1000, dtype="<i4"), chunks=(100,))
    provenance(path)
    with Sidecar.open(path) as opened:
        offset = opened.extents([950])[0].offset
    os.truncate(path, offset)  # the second half of the last chunk is gone
    known = {"nbytes": offset, "mtime_ns": path.stat().st_mtime_ns}
    edit(path, lambda content: content["files"][0].update(known))
    found = [p for p in check(path) if p.what.startswith("the sidecar gives an extent")]
    assert [p.where for p in found] == [f"{path}, sample 999, field x"]


def test_bounds_of_many_samples_are_those_of_chunks(tmp_path, monkeypatch):
    path = tmp_path / "many.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (1 << 31,), "u1", chunks=(1 << 22,), compression="gzip")
        file["x"][:4] = 7
    provenance(path)
    located = []
    monkeypatch.setattr(
        extents, "locate", lambda *given: located.append(len(given[2])) or locate(*given)
    )
    assert check(path) == []
    assert sum(located) <= 2 * 512
