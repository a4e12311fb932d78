"""The sidecar: its JSON, what it is found for, and damaged ones."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support import some_schemas

from dsprep.core.schema import Field, Schema
from dsprep.errors import FormatError
from dsprep.sidecar import sidecar, spec
from dsprep.sidecar.spec import Content, FileEntry
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
        {"future": [1, {"a": None}]},
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
    with pytest.raises(FormatError, match="does not list"):
        spec.find([one, other])
    (tmp_path / "set").rename(tmp_path / "moved")  # the sidecar names no place but the dataset's
    spec.sidecar_path(tmp_path / "set").rename(spec.sidecar_path(tmp_path / "moved"))
    found, where, _ = spec.find([tmp_path / "moved/one", tmp_path / "moved/two"])
    assert sidecar.changes(found, where) == []


def test_changes_are_noticed(tmp_path):
    one, two = make(tmp_path, "one", "two")
    made = described([(one, 3), (two, 4)], tmp_path)
    assert sidecar.changes(made, tmp_path) == []
    one.write_bytes(b"123456")
    two.unlink()
    assert sidecar.changes(made, tmp_path) == [
        "one: it has 6 bytes, expected 5",
        "two: it is missing",
    ]


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
                *({"dsprep_sidecar": version} for version in ("x", "1", 0, -1, 1.9, True, None, 2)),
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
    monkeypatch.setattr(spec, "PAUSES", (0.0,))
    (tmp_path / "x").write_bytes(text)
    with pytest.raises(FormatError, match="sidecar"):
        spec.read(tmp_path / "x")


@pytest.mark.parametrize(
    "entry", [b'{"path": ".", "samples": 1, "nbytes": 1}', b"{}", b"[]", b'"x"'], ids=str
)
def test_more_than_a_sidecar_lists_is_refused_before_it_is_parsed(entry, tmp_path, monkeypatch):
    """Three million files took 39 s and 1.5 GB; as small ones, here."""
    monkeypatch.setattr(spec, "_MAX_COUNTS", tuple((mark, n >> 10) for mark, n in spec._MAX_COUNTS))
    path, count = tmp_path / "x.dsprep.json", 13 << 10
    path.write_bytes(b'{"dsprep_sidecar": 1, "files": [' + b",".join([entry] * count) + b"]}")
    monkeypatch.setattr(json, "loads", lambda text: pytest.fail("it was parsed"))
    with pytest.raises(FormatError, match=r"more than 1,048,576 files.*dsprep repack"):
        spec.read(path)
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


def test_unknown_keys_of_files_are_kept(tmp_path):
    json_ = {**GOOD, "zzz": 1, "files": [{**GOOD["files"][0], "www": {"a": [4]}}]}
    (tmp_path / "x").write_text(json.dumps(json_))
    back = spec.read(tmp_path / "x").to_json()
    assert back["zzz"] == 1
    assert back["files"][0]["www"] == {"a": [4]}
