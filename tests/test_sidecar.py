"""The sidecar: its JSON, what it is found for, and damaged ones."""

from __future__ import annotations

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from support import fails, some_schemas

import dsprep
from dsprep.core.packing import digest
from dsprep.core.schema import Field, Schema
from dsprep.errors import FormatError
from dsprep.sidecar import sidecar, spec
from dsprep.sidecar.entries import FileEntry
from dsprep.sidecar.spec import Content
from dsprep.storage.identity import Identity
from dsprep.verbs.check import check

ATTRS = {
    "text": "naïve",
    "number": 3,
    "flag": True,
    "real": 2.5,
    "nan": np.float32("nan"),
    "raw": b"\x00\xff",
    "array": np.arange(6, dtype=">i2").reshape(2, 3),
    "scalar": np.float64(-0.0),
    "words": np.array(["a", "日本"], object),
    "none": np.zeros((0, 3), "f4"),
}


def assert_same_attrs(a, b):
    assert a.keys() == b.keys()
    for key in a:
        x, y = a[key], b[key]
        assert type(x) is type(y) or np.asarray(x).dtype == np.asarray(y).dtype, key
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes() or x.tolist() == y.tolist(), key


@pytest.mark.parametrize(("name", "schema"), some_schemas().items())
def test_a_sidecar_survives_a_file(name, schema, tmp_path):
    made = Content(
        "tfrecord",
        schema,
        (
            FileEntry("d/a", 2, Identity(33, 5, 7, {"end": 3}, "abc"), 1, {"block": 3}),
            FileEntry("d/b", 0, Identity(1 << 50)),
        ),
        {"command": "dsprep convert x y"},
        layouts=({"a": 1}, {"b": [2]}),
        reading={"order": "file"},
        companion={"nbytes": 3, "blake2b": "x"},
        notes=("one", "two"),
    )
    spec.write(made, tmp_path / "x.dsprep.json")
    assert spec.read(tmp_path / "x.dsprep.json") == made
    assert [p.name for p in tmp_path.iterdir()] == ["x.dsprep.json"]


def test_attributes_survive(tmp_path):
    schema = Schema((Field("x", np.dtype("f4"), (), "array", ATTRS),), {"of": "the dataset"})
    spec.write(Content("lmdb", schema, ()), tmp_path / "x")
    back = spec.read(tmp_path / "x").schema
    assert_same_attrs(back["x"].attrs, ATTRS)
    assert back.attrs == {"of": "the dataset"}


def make(directory: Path, *names: str) -> list[Path]:
    paths = []
    for name in names:
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"12345")
        paths.append(path)
    return paths


SCHEMA = Schema((Field("x", np.dtype("f4")),))


def described(files, dataset):
    """The sidecar of files that hold nothing a format would know."""
    entries = tuple(FileEntry(str(p.relative_to(dataset)), n, Identity.of(p)) for p, n in files)
    return Content("tfrecord", SCHEMA, entries)


def test_found_beside_a_file_and_beside_its_directory(tmp_path):
    one, two, other = make(tmp_path, "set/one", "set/two", "set/other")
    made = described([(one, 3), (two, 4)], tmp_path / "set")
    assert [f.path for f in made.files] == ["one", "two"]
    spec.write(made, spec.sidecar_path(tmp_path / "set"))
    where = spec.sidecar_path(tmp_path / "set")
    assert spec.find([one, two]) == (made, tmp_path / "set", where)
    alone, _, _ = spec.find([two])
    assert (alone.samples, len(alone.files)) == (4, 1)
    fails(lambda: spec.find([one, other]), FormatError, "does not list")
    assert spec.find([other]) is None  # of a dataset of its own, beside one of several files
    (tmp_path / "set").rename(tmp_path / "moved")  # the sidecar names no place but the dataset's
    spec.sidecar_path(tmp_path / "set").rename(spec.sidecar_path(tmp_path / "moved"))
    found, where, _ = spec.find([tmp_path / "moved/one", tmp_path / "moved/two"])
    assert sidecar.changes(found, where) == []


GOOD = Content("hdf5", SCHEMA, (FileEntry("a", 1, Identity(2)),)).to_json()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        *(
            json.dumps({**GOOD, **change}).encode()
            for change in (
                *({"dsprep_sidecar": version} for version in ("x", "1", 0, -1, 1.9, True, None, 3)),
                *(
                    {"schema": [{"name": "x", "dtype": "f4", "shape": s}]}
                    for s in ([8.5], [3, True])
                ),
                {"schema": [{"name": "x", "dtype": "9f4", "shape": []}]},
                {"schema": [{"name": "x", "dtype": "O", "shape": []}]},
                {"schema": {}},
                {"files": [{"path": "a"}]},
                {"files": 3},
                *(
                    {"files": [{**GOOD["files"][0], **bad}]}
                    for bad in (
                        {"path": "/etc/passwd"},
                        {"path": "a/../../b"},
                        {"path": 3},
                        {"path": "\ud800"},
                        {"samples": True},
                        {"nbytes": True},
                        {"samples": -1},
                        {"samples": 1.5},
                        {"samples": 1 << 70},
                        {"nbytes": "many"},
                        {"mtime_ns": -1},
                        {"facts": []},
                        {"layout": -1},
                        {"crc32c": 3},
                    )
                ),
                {"layouts": [{}], "files": [{**GOOD["files"][0], "layout": 1}]},
                {"layouts": 3},
                {"layouts": [3]},
                {"lineage": 3},
                {"reading": []},
                {"companion": 3},
                {"notes": 3},
                {"attrs": {"x": 3}},
                {"attrs": {"x": {"a": {"dtype": "f4", "shape": [3], "data": ""}}}},
                {"attrs": {"x": {"a": json.loads("[" * 70 + "]" * 70)}}},
                {"attrs": {"x": {"a": None}}},
                {"attrs": {"x": {"a": {"strings": [["a"]], "shape": [1]}}}},
            )
        ),
    ],
)
def test_damage_is_one_clear_error(text, tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(text)
    fails(lambda: spec.read(tmp_path / "x"), FormatError, "sidecar")


@pytest.mark.parametrize(
    "entry", [b'{"path": ".", "samples": 1, "nbytes": 1}', b"{}", b"[]", b'"x"'], ids=str
)
def test_more_than_a_sidecar_lists_is_refused_before_it_is_parsed(entry, tmp_path, monkeypatch):
    """Three million files took 39 s and 1.5 GB; as small ones, here."""
    monkeypatch.setattr(spec, "_MAX_COUNTS", tuple((mark, n >> 10) for mark, n in spec._MAX_COUNTS))
    path, count = tmp_path / "x.dsprep.json", 13 << 10
    path.write_bytes(b'{"dsprep_sidecar": 1, "files": [' + b",".join([entry] * count) + b"]}")
    monkeypatch.setattr(json, "loads", lambda text: pytest.fail("it was parsed"))
    fails(lambda: spec.read(path), FormatError, "more than 1,048,576 files", "dsprep repack")
    assert len(check([path])) == 1


def test_sidecars_written_at_the_same_time_are_whole(tmp_path):
    path = tmp_path / "a.h5.dsprep.json"

    def write(k):
        for _ in range(20):
            spec.write_json({"k": str(k) * 10_000 * (k + 1)}, path, durable=False)
            assert len(set(json.loads(path.read_text())["k"])) == 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert list(tmp_path.iterdir()) == [path]


def many(count, **columns):
    """Rows of which one key or several differ, or are the same."""
    made = []
    for i in range(count):
        row = {"path": f"d/\udcff{i}.npy", "samples": 1, "nbytes": 7}
        row |= {k: v[i % len(v)] for k, v in columns.items()}
        made.append(FileEntry.from_json({k: v for k, v in row.items() if v is not None}))
    return Content("numpy", SCHEMA, tuple(made), layouts=({"a": 1}, {"b": 1}))


COLUMNS = {
    "alike": {"mtime_ns": [5], "sampled": ["0123456789abcdef"], "facts": [{"end": 3}]},
    "numbers": {"samples": [0, 300], "nbytes": [2**40, 1], "mtime_ns": [0, 2**64 - 1]},
    "layouts": {"layout": [0, 1], "files": [2, 70_000], "sampled": ["00000000000000ff", "f" * 16]},
    "texts": {"sampled": ["", "0" * 16], "etag": ['"a"', ""], "mtime_ns": [None, 5]},
    "objects": {"facts": [{"end": 3}, {}], "crc32c": [{"block": 1, "data": "x"}, None]},
}


@pytest.mark.parametrize("name", COLUMNS)
def test_very_many_files_are_columns_of_the_companion(name, tmp_path):
    made, path, tables = many(spec.MANY, **COLUMNS[name]), tmp_path / "x.dsprep.json", b"12345"
    made = replace(made, companion={"nbytes": len(tables), "blake2b": digest(tables)})
    spec.write(made, path, tables)
    back = spec.read(path)
    for same in (back, pickle.loads(pickle.dumps(back))):
        assert tuple(same.files) == made.files
        assert (same.counts.tolist(), same.nbytes) == (made.counts.tolist(), made.nbytes)
        assert replace(same, files=made.files) == made
    assert spec.read_tables(back, path, tmp_path) == tables
    text, companion = path.read_bytes(), path.with_name("x.dsprep.bin").read_bytes()
    assert spec.encode(back, tables) == spec.encode(made, tables) == (text, companion)
    assert json.loads(text)["dsprep_sidecar"] == 2
    few = replace(made, files=made.files[1:])
    assert json.loads(spec.encode(few, tables)[0]) == few.to_json()
    assert few.to_json()["dsprep_sidecar"] == 1


@pytest.mark.parametrize(
    "change",
    [
        {"count": 10**15},
        {"count": -1},
        {"nbytes": 10**9},
        {"at": 8},
        {"blake2b": "0"},
        {"columns": {}},
        {"columns": 3},
        {"path": {"all": "x"}},
        {"path": {"at": 0, "width": 3, "nbytes": 5}},
        {"path": {"at": 0, "width": 2, "nbytes": 5}},
        {"path": {"at": 10**9, "width": 2, "nbytes": 5}},
        {"samples": {"all": -1}},
        {"samples": {"all": "many"}},
        {"samples": {"at": 0, "width": 8}},
        {"layout": {"all": 2}},
        {"path": None},
    ],
    ids=str,
)
def test_damaged_columns_are_one_clear_error(change, tmp_path):
    path = tmp_path / "x.dsprep.json"
    spec.write(many(spec.MANY), path)
    content = json.loads(path.read_bytes())
    files = content["files"]
    for key, value in change.items():
        (files if key in files else files["columns"])[key] = value
    path.write_text(json.dumps(content))
    fails(lambda: spec.read(path), FormatError, "sidecar")


def test_a_row_of_columns_is_checked_when_it_is_used(tmp_path):
    made = many(spec.MANY)
    files = (*made.files[:-1], replace(made.files[0], path="../x"))
    spec.write(replace(made, files=files), tmp_path / "x.dsprep.json")
    back = spec.read(tmp_path / "x.dsprep.json")
    assert back.files[0] == made.files[0]
    with pytest.raises(FormatError, match="leaves the dataset"):
        back.files[-1]
    (tmp_path / "x.dsprep.bin").unlink()
    fails(lambda: spec.read(tmp_path / "x.dsprep.json"), FormatError)


def test_a_file_that_is_gone_is_not_left_out(tmp_path):
    folder = tmp_path / "d"
    folder.mkdir()
    for i in range(3):
        with h5py.File(folder / f"{i}.h5", "w") as file:
            file["x"] = np.arange(4)
    dsprep.provenance(folder)
    (folder / "1.h5").unlink()
    with pytest.raises(FormatError, match=r"lists a file that is not there .*expected 1.h5"):
        dsprep.open(folder)
    with dsprep.open([folder / "0.h5", folder / "2.h5"]) as source:  # which are asked for alone
        assert len(source) == 8
