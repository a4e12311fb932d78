"""Folders of images: a file per sample, labels by folders or tables, and nothing decoded."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from format_contract import COUNT, ReadOnlyContract
from image_files import FOLDERS, fill, locate, png, read
from support import fails, reading

import dsprep
from dsprep import formats
from dsprep.core.packing import Tables
from dsprep.core.schema import Field, Ragged, Schema
from dsprep.errors import (
    AmbiguousError,
    DsprepError,
    FormatError,
    SchemaError,
    TargetError,
    UsageError,
)
from dsprep.formats.options import OpenOptions
from dsprep.reading import each
from dsprep.sidecar.sidecar import StaleError
from dsprep.source.dataset import open_dataset
from dsprep.verbs.check import check

SCHEMA = Schema(
    (
        Field.opaque("image"),
        Field("label", np.dtype("<i8")),
        Field.opaque("class", "str"),
        Field.opaque("name", "str"),
    )
)


def assert_same(a: Path, b: Path) -> None:
    with open_dataset(a) as one, open_dataset(b) as other:
        assert dsprep.verify(one, other).same


class TestImages(ReadOnlyContract):
    """The library is the file system: what `open` and `read` give."""

    format, suffix, schema, simple = "images", ".folder", SCHEMA, False
    open = FOLDERS

    @pytest.fixture(autouse=True)
    def _samples(self, tmp_path):
        self.known = formats.load(self.format)
        self.target = tmp_path / f"out{self.suffix}"
        classes = ["Zebra", "cat", "dog 1", "dog 2"]  # capitals come first
        names = [f"{classes[i * 4 // COUNT]}/{i}.{'PNG' if i % 3 else 'jpg'}" for i in range(COUNT)]
        label = np.array([i * 4 // COUNT for i in range(COUNT)])
        self.take(
            {
                "image": Ragged.pack([png(i, 3 + i) for i in range(COUNT)], SCHEMA["image"]),
                "label": label,
                "class": Ragged.pack([classes[k] for k in label], SCHEMA["class"]),
                "name": Ragged.pack(names, SCHEMA["name"]),
            }
        )

    def write(self, path, batch):
        for name, data in zip(batch["name"], batch["image"], strict=True):
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(data)


# --- which files, in which order, of which class ---------------------------------------------


def test_order(tmp_path):
    root = fill(tmp_path / "set", "b/10.png", "b/9.png", "B/1.png", "b/z/1.png", "a10/x.png")
    fill(root, "a9/x.png", "b/a.JPG", "b/A.jpg")
    samples, notes = read(root, labels="folders")
    found = [(s["label"], s["class"], s["name"]) for s in samples]
    classes = ["B", "a10", "a9", "b"]
    inside = ["b/9.png", "b/10.png", "b/A.jpg", "b/a.JPG", "b/z/1.png"]
    names = ["B/1.png", "a10/x.png", "a9/x.png", *inside]
    assert found == [(classes.index(n.split("/")[0]), n.split("/")[0], n) for n in names]
    assert [s["image"] for s in samples] == [(root / n).read_bytes() for n in names]
    assert not notes


def test_what_is_left_out_is_named(tmp_path):
    root = fill(tmp_path / "set", "a/1.png", "a/.2.png", ".hidden/3.png", "b/4.png")
    (root / "a" / "Thumbs.db").write_bytes(b"\0")
    (root / "readme.txt").write_bytes(b"words")
    (root / "c").mkdir()
    os.mkfifo(root / "a" / "pipe.png")
    (root / "b" / "5.png").touch()
    samples, notes = read(root, labels="folders")
    assert [s["name"] for s in samples] == ["a/1.png", "b/4.png", "b/5.png"]
    assert samples[2]["image"] == b""
    text = "\n".join(notes)
    for word in ("a/.2.png", ".hidden", "Thumbs.db", "readme.txt", "pipe.png", "1 file is empty"):
        assert word in text, word
    assert "left out c: no images in it" in text
    with open_dataset(root, FOLDERS) as source:
        assert json.loads(source.schema["label"].attrs["classes"]) == ["a", "b", "c"]


def test_folders_are_asked_about(tmp_path):
    """Each reading is named, with its samples, and does what it says."""
    splits = fill(tmp_path / "splits", "train/cat/1.png", "val/cat/2.png", "val/cat/3.png")
    with pytest.raises(AmbiguousError) as caught:
        read(splits)
    assert dict(caught.value.readings) == {
        "--labels folders": "3 samples of 2 classes",
        "--labels none": "3 samples without labels",
    }
    assert str(splits / "train") in str(caught.value)
    assert len(read(splits, labels="none")[0]) == 3
    assert [s["class"] for s in read(splits, labels="folders")[0]] == ["train", "val", "val"]
    assert [s["class"] for s in read(splits / "train", labels="folders")[0]] == ["cat"]
    mixed = fill(tmp_path / "mixed", "1.png", "cat/2.png")
    fails(lambda: read(mixed), AmbiguousError, "1 samples of 1 classes, without 1 beside")
    samples, notes = read(mixed, labels="folders")
    assert [s["name"] for s in samples] == ["cat/2.png"]
    assert any("1.png" in note for note in notes)
    with pytest.raises(FormatError, match="no folders with images"):
        read(fill(tmp_path / "flat", "1.png"), labels="folders")
    fails(lambda: read(mixed, labels="x.csv"), UsageError, "no table x.csv")
    parts = fill(tmp_path / "parts", "train_1.png", "test_2.png")
    fails(lambda: read(parts), AmbiguousError, "parts of several datasets")
    assert len(read(parts, "image=train_*.png")[0]) == 1


def test_folders_beside_other_datasets(tmp_path):
    """Pictures beside a dataset do not make a dataset of images of it."""
    root = fill(tmp_path / "run", "plot.png", "plots/1.png", "plots/2.png")
    data = root / "data.tfrecord"
    dsprep.convert(fill(tmp_path / "set", "1.png", "2.png"), data)
    Path(f"{data}.dsprep.json").unlink()
    with open_dataset(root) as source:
        assert source.files() == [data]
        assert any("plot.png" in note for note in source.notes)
    data.rename(root / "data.bin")  # of which only the first bytes say what it is
    with open_dataset(root) as source:
        assert len(source) == 2
    deep = fill(tmp_path / "deep", *(f"a/{i}.png" for i in range(4)))
    (root / "data.bin").rename(deep / "a" / "b.tfrecord")
    with open_dataset(deep) as source:
        assert source.files() == [deep / "a" / "b.tfrecord"]


# --- names and links -------------------------------------------------------------------------


def test_hostile_names(tmp_path):
    names = ["a/new\nline.png", "a/x..png", "a/ .png", "a/\\.png", "a/'; rm.png", "a../b.. /x.png"]
    names += ["a/" + "x" * 251 + ".png", "{0}/{1}.png"]
    root = fill(tmp_path / "set", *names)
    samples, _ = read(root, labels="folders")
    assert sorted(s["name"] for s in samples) == sorted(names)
    locate(root)
    with open_dataset(root, through="strict") as source:
        for sample in source:
            assert (root / sample["name"]).read_bytes() == sample["image"]
    assert not check(root, full=True)
    dsprep.convert(root, tmp_path / "out.h5")
    assert_same(root, tmp_path / "out.h5")


def test_names_that_are_not_utf8(tmp_path):
    root = fill(tmp_path / "set", b"a/\xff.png", b"\xfe/1.png")
    samples, notes = read(root, labels="folders")
    assert [(s["class"], s["name"]) for s in samples] == [
        (b"a", b"a/\xff.png"),
        (b"\xfe", b"\xfe/1.png"),
    ]
    assert any("not UTF-8" in note for note in notes)
    locate(root)
    with open_dataset(root, through="strict") as source:
        assert [s["image"] for s in source] == [s["image"] for s in samples]
    dsprep.convert(root, tmp_path / "out.tfrecord")
    assert_same(root, tmp_path / "out.tfrecord")


def test_links(tmp_path):
    (tmp_path / "here").mkdir()
    root = fill(tmp_path / "here" / "set", "a/1.png")
    (root / "a" / "2.png").symlink_to("1.png")
    assert [s["image"] for s in read(root, labels="folders")[0]] == [
        (root / "a" / "1.png").read_bytes()
    ] * 2
    outside = fill(tmp_path / "outside", "3.png")
    (root / "a" / "3.png").symlink_to(outside / "3.png")
    with pytest.raises(FormatError, match=r"leads out of the directory.*follow-external"):
        read(root, labels="folders")
    assert len(read(root, labels="folders", follow_external=True)[0]) == 3
    dsprep.provenance(root, options=OpenOptions(labels="folders", follow_external=True))
    with dsprep.Sidecar.open(root) as sidecar:
        assert len(sidecar.read([0], ["image"])["image"][0])
        fails(lambda: sidecar.read([2], ["image"]), FormatError, "leads out of")
    (root / "a" / "3.png").unlink()
    (tmp_path / "here" / "set.dsprep.json").unlink()
    (root / "a" / "4.png").symlink_to("nothing.png")
    fails(lambda: read(root, labels="folders"), FormatError, "leads nowhere")
    (root / "a" / "4.png").unlink()
    (root / "b").symlink_to(outside)
    fails(lambda: read(root, labels="folders"), FormatError, "a folder is a symbolic link")


# --- tables ----------------------------------------------------------------------------------

ROWS = (
    "file,label,weight,split\nb.png,3,0.5,train\na.png,-1,nan,test\nc.jpg,9007199254740993,1e3,\n"
)


def test_a_table(tmp_path):
    root = fill(tmp_path / "set", "a.png", "b.png", "c.jpg", "d.png")
    path = root / "labels.csv"
    path.write_text(ROWS)
    with pytest.raises(AmbiguousError) as caught:
        read(root)
    ways = {"--labels none": "4 samples without labels"}
    ways["--labels labels.csv:file"] = "3 labelled samples"
    assert dict(caught.value.readings) == ways
    options = OpenOptions(labels="labels.csv:file")
    samples, notes = read(root, labels="labels.csv:file")
    assert [s["name"] for s in samples] == ["a.png", "b.png", "c.jpg"]
    assert [s["label"] for s in samples] == [-1, 3, 2**53 + 1]
    assert [s["split"] for s in samples] == ["test", "train", ""]
    assert np.isnan(samples[0]["weight"])
    assert [s["weight"] for s in samples[1:]] == [0.5, 1000.0]
    assert list(samples[0]) == ["image", "label", "weight", "split", "name"]
    assert any("left out d.png: not in" in note for note in notes)
    dsprep.provenance(root, options=options)
    with open_dataset(root, through="strict") as source:
        for one, other in zip(source, samples, strict=True):
            assert {n: repr(v) for n, v in one.items()} == {n: repr(v) for n, v in other.items()}
    assert not check(root, full=True)
    dsprep.convert(root, tmp_path / "out.zarr")
    assert_same(root, tmp_path / "out.zarr")
    path.write_text(ROWS.replace("test", "tset"))
    fails(lambda: dsprep.Sidecar.open(root), StaleError, "table")


@pytest.mark.parametrize(
    ("names", "text", "table"),
    [
        (["x/1.png", "x/2.png"], "file_name;y\nx/2.png;7\nx/1.png;8\n", "t.csv"),
        (["x/1.png", "x/2.png"], "\ufefffile_name\ty\r\nx/1\t8\r\nx/2\t7\r\n", "t.csv"),
        (["1.png", "2.png"], 'y,"id"\n7,"2"\n\n8,1\n', "t.csv:id"),
        (["1.png", "2.png"], ",a:b,y\n0,./2.png,7\n1,1.png,8\n", "t.csv:a:b"),
        (["1.png", "2.png"], '[{"id": 2, "y": 7}, {"id": 1, "y": 8}]', "t.json:id"),
    ],
)
def test_ways_to_name_files(tmp_path, names, text, table):
    root = fill(tmp_path / "set", *names)
    (root / table.split(":")[0]).write_text(text)
    for labels in (table, f"{root}/{table}"):
        samples, _ = read(root, labels=labels)
        assert [(s["name"], int(s["y"])) for s in samples] == [(names[0], 8), (names[1], 7)]


def test_metadata_go_first(tmp_path):
    root = fill(tmp_path / "set", "cat/2.png", "dog/3.png")
    (root / "other.csv").write_text("id,y\n1,3\n")
    (root / "metadata.csv").write_text("file_name,y\ncat/2.png,3\n")
    assert [(s["name"], s["y"]) for s in read(root)[0]] == [("cat/2.png", 3)]
    assert list(read(root, labels="none")[0][0]) == ["image", "name"]
    assert [s["class"] for s in read(root, labels="folders")[0]] == ["cat", "dog"]
    (root / "metadata.jsonl").write_text('{"file_name": "cat/2.png"}')
    fails(lambda: read(root), AmbiguousError, "--labels metadata.csv")
    locate(root)
    with open_dataset(root) as source:  # as the sidecar was made
        assert source.schema.names == ("image", "label", "class", "name")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b"id,y\n1,2\n3,4\n", "row 2 names no image.*id: 3"),
        (b"x,y\n1,7\n2,8\n", r"no column id.*--labels t\.csv:x \(2\)"),
        (b"id,y\n1,2\n1,3\n", "two rows name the same image"),
        (b"id,y\n1,2,3\n", "damaged.*3 cells"),
        (b"id,y\n", "no rows"),
        (b"", "no rows"),
        (b"id,y,y\n1,2,3\n", "one name"),
        (b"id,name\n1,cat\n", "name of another field"),
        (b'id,y\n1,"2\n', "damaged"),
        (b"id,y\n1,\xff\n", "not UTF-8"),
        (b"id,y\n1,a\0b\n", "NUL|damaged"),
    ],
)
def test_damaged_tables(tmp_path, text, match):
    root = fill(tmp_path / "set", "1.png", "2.png")
    (root / "t.csv").write_bytes(text)
    with pytest.raises(DsprepError, match=match):
        read(root, labels="t.csv:id")


def test_types_of_columns(tmp_path):
    columns = {
        "int": ["0", "-5", "999999999999999999"],
        "wide": ["1152921504606846976", "0", "-9223372036854775808"],
        "long": ["9223372036854775808", "0.5", "1"],
        "zeros": ["007", "1", "2"],
        "float": ["1", ".5", "-2.e-3"],
        "text": ["1", "", "x"],
        "under": ["1_0", "2", "3"],
    }
    root = fill(tmp_path / "set", "1.png", "2.png", "3.png")
    rows = [",".join(["id", *columns])]
    rows += [",".join([str(i + 1), *(c[i] for c in columns.values())]) for i in range(3)]
    (root / "t.csv").write_text("\n".join(rows))
    with open_dataset(root, OpenOptions(labels="t.csv:id")) as source:
        kinds = {f.name: f.dtype.str if f.kind == "array" else f.kind for f in source.schema}
        samples = list(source)
    assert kinds["int"] == "<i8"
    assert kinds["float"] == "<f8"
    assert kinds["wide"] == "<i8"
    assert {kinds[n] for n in ("long", "zeros", "text", "under")} == {"str"}
    assert [str(s["wide"]) for s in samples] == columns["wide"]
    assert [s["long"] for s in samples] == columns["long"]
    assert [s["float"] for s in samples] == [1, 0.5, -0.002]


# --- changes ---------------------------------------------------------------------------------


def test_changes_are_noticed(tmp_path):
    root = fill(tmp_path / "set", *(f"{c}/{i}.png" for c in "ab" for i in range(5)))
    locate(root)
    away, one = tmp_path / "away", root / "a" / "1.png"

    def add():
        fill(root, "a/99.png")
        return (root / "a" / "99.png").unlink

    def remove():
        one.rename(away)
        return lambda: away.rename(one)

    def replace():
        data = one.read_bytes()
        one.write_bytes(data[:-1])
        return lambda: one.write_bytes(data)

    for change in (add, remove, replace):
        back = change()
        fails(lambda: dsprep.Sidecar.open(root), StaleError)
        assert check(root)
        back()
        dsprep.Sidecar.open(root).close()


def test_folders_of_other_classes_are_not_one_dataset(tmp_path):
    parts = [fill(tmp_path / f"part{i}", "cat/1.png", f"{d}/2.png") for i, d in enumerate("xxy")]
    with open_dataset(parts[:2], FOLDERS) as source:
        assert source[:]["label"].tolist() == [0, 1, 0, 1]
    fails(lambda: open_dataset(parts, FOLDERS), SchemaError, "classes of label")
    with open_dataset(parts, OpenOptions(labels="none")) as source:
        assert len(source) == 6


def test_photos_are_never_replaced(tmp_path):
    data = fill(tmp_path / "set", "1.png")
    photos = fill(tmp_path / "photos", "1.png", "2.png")
    with pytest.raises(TargetError, match="not replaced"):
        dsprep.convert(data, photos, to="zarr", overwrite=True)
    assert len(list(photos.iterdir())) == 2


# --- reading ---------------------------------------------------------------------------------


def test_fields_are_chosen(tmp_path):
    root = fill(tmp_path / "set", *(f"{c}/{i}.png" for c in "ab" for i in range(5)))
    for _ in range(2):
        with open_dataset(root, reading("y=label", "path=name", labels="folders")) as source:
            assert source.schema.names == ("y", "path")
            assert source[7] == {"y": 1, "path": "b/2.png"}
        locate(root)
    fails(lambda: read(root, "image:uint8[3]", labels="folders"), UsageError, "cannot have a type")
    with dsprep.Reader(root, batch_size=4, fields=["label"], seed=0) as reader:
        assert sorted(np.concatenate([b["label"] for b in reader])) == [0] * 5 + [1] * 5


def test_reading_in_parts(tmp_path, monkeypatch):
    """What is taken before the files have been seen is bounded."""
    root = fill(tmp_path / "set", *(f"a/{i}.png" for i in range(30)))
    expected = [s["image"] for s in read(root, labels="folders")[0]]
    monkeypatch.setattr(each, "TRUSTED", 200)
    assert [s["image"] for s in read(root, labels="folders")[0]] == expected
    locate(root)
    order = np.random.default_rng(0).integers(0, 30, 100)
    with dsprep.Sidecar.open(root) as sidecar:
        found = sidecar.read(order, ["image", "name"])
        assert list(found["image"]) == [expected[i] for i in order]
        assert list(found["name"]) == [f"a/{i}.png" for i in order]


# --- the sidecar -----------------------------------------------------------------------------


def own_files(image):
    """Names of images as sidecars had them until `files` were there."""
    return {"offsets": 0, "parts": {"image": [0, None]}, **image}


OLD = (
    {"offsets": 1},
    {"order": 0},
    {"parts": {"image": [1, None]}},
    {"names": 3},
)
HOSTILE = {
    "long": lambda j: j["files"]["image"].update(lengths=1 << 50),
    "negative": lambda j: j["files"]["image"].update(lengths=-1),
    "no names": lambda j: j["files"]["image"].pop("names"),
    "numbers": lambda j: j["files"].update(label=j["files"]["image"]),
    "more": lambda j: j["files"].update(more=j["files"]["image"]),
    "no object": lambda j: j.update(files=3),
    "which": lambda j: j["given"]["class"].update(which=7),
    "words": lambda j: j["given"]["class"].pop("words"),
    "values": lambda j: j["given"]["label"].update(values={"count": 1, "data": ""}),
    "no label": lambda j: j["given"].pop("label"),
    "given": lambda j: j.update(given=3),
}


def test_hostile_sidecars(tmp_path):
    root = fill(tmp_path / "set", *(f"a/{i}.png" for i in range(9)))
    locate(root)
    path = tmp_path / "set.dsprep.json"
    known = path.read_text()

    def read_all(change):
        changed = json.loads(known)
        change(changed["layouts"][0])
        path.write_text(json.dumps(changed))
        with dsprep.Sidecar.open(root) as sidecar:
            sidecar.layout(0)
            sidecar.read(slice(None))

    def names(data, count=9):
        packed = {"count": count, "data": Tables().put(data)}
        return lambda j: j["files"]["image"].update(names=packed)

    def as_before(edit):
        return lambda j: j.update(records=own_files(j.pop("files")["image"]) | edit)

    for name in (b"/etc/passwd", b"../x", b"a/../../x", b"..", b".", b"", b"a//b", b"a/", b"a/."):
        data = b"".join(b"a/%d.png\0" % i for i in range(8)) + name + b"\0"
        fails(lambda: read_all(names(data)), FormatError, "leaves the dataset")
    damaged = [names(b"a/0.png\0" * 8), names(b"a" * 9), names(b"a\0" * 9, 8)]
    for change in (*damaged, *HOSTILE.values(), *map(as_before, OLD)):
        fails(lambda: read_all(change), FormatError)
    read_all(as_before({}))
