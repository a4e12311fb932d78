"""Image folders of which several files are one sample, and tables of labels anywhere."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from image_files import fill, read
from support import cli, fails

import dsprep
from dsprep.core.schema import FieldSpec
from dsprep.errors import AmbiguousError, DsprepError, FormatError, UsageError
from dsprep.formats.options import OpenOptions
from dsprep.sidecar.sidecar import StaleError
from dsprep.source.dataset import open_dataset
from dsprep.verbs.check import check


def specs(*texts: str) -> tuple[FieldSpec, ...]:
    return tuple(map(FieldSpec.parse, texts))


def tree(root: Path, *names: str) -> Path:
    """Make images, and files of text, by these paths."""
    fill(root, *names)
    for name in names:
        if name.endswith((".txt", ".xml")):
            (root / name).write_text(f"text of {name}")
    return root


def paired(root: Path, count: int = 12) -> Path:
    return tree(
        root,
        *(f"images/{i}.jpg" for i in range(count)),
        *(f"masks/{i}.png" for i in range(count)),
    )


# --- what is one sample ------------------------------------------------------------------------

PAIRS = ("images=images/*.jpg", "masks=masks/*.png")


def options(error: AmbiguousError) -> list[tuple[list[str], dict[str, str]]]:
    """Return the fields of each reading that has some, and what is done of what is incomplete."""
    found = []
    for option, _ in error.readings:
        words = shlex.split(option.removesuffix(" --nulls drop-rows"))
        if words[0] == "--field":
            found.append((words[1::2], {"nulls": "drop-rows"} if "--nulls" in option else {}))
    return found


def test_images_and_masks(tmp_path):
    root = paired(tmp_path / "set")
    with pytest.raises(AmbiguousError, match="--labels folders: 24 samples") as caught:
        read(root)
    assert options(caught.value) == [([*PAIRS], {})]
    samples, _ = read(root, *PAIRS, "name")
    assert [s["name"] for s in samples] == [str(i) for i in range(12)]
    for s in samples:
        assert s["images"] == (root / "images" / f"{s['name']}.jpg").read_bytes()
        assert s["masks"] == (root / "masks" / f"{s['name']}.png").read_bytes()


CITY = [f"leftImg8bit/x/x_{i}_leftImg8bit.png" for i in "12"]
CITY += [f"gtFine/x/x_{i}_gtFine_{k}" for i in "12" for k in ("color.png", "labelIds.png")]
VOC = [f"JPEGImages/{i}.jpg" for i in range(6)] + [f"Annotations/{i}.xml" for i in range(6)]
VOC += [f"SegmentationClass/{i}.png" for i in range(3)]
DRIVE = [f"images/{i}_training.tif" for i in (21, 22)] + [f"manual/{i}_man.gif" for i in (21, 22)]


@pytest.mark.parametrize(
    ("names", "fields", "count"),
    [
        (["LR/1.png", "HR/1.png"], ["HR=HR/*.png", "LR=LR/*.png"], 1),
        (["images/img_1.png", "images/img_2.png", "gt/gt_img_1.txt", "gt/gt_img_2.txt"], None, 2),
        (["rgb/1_l.png", "rgb/2_l.png", "depth/1_d.png", "depth/2_d.png"], None, 2),
        (DRIVE, None, 2),
        (["HR/1.png", "HR/2.png", "LR/X2/1x2.png", "LR/X2/2x2.png"], None, 2),
        (["train/1.jpg", "train/2.jpg", "train_masks/1_m.gif", "train_masks/2_m.gif"], None, 2),
        ([f"{d}/{k}/{i}.png" for d in ("images", "masks") for k in "xy" for i in "12"], None, 4),
        (
            [f"v{k}/{d}/{i}.png" for k in "12" for d in ("images", "masks") for i in "34"],
            ["images=*/images/*.png", "masks=*/masks/*.png"],
            4,
        ),
        ([f"obj/{i}.{e}" for i in range(3) for e in ("jpg", "txt")], None, 3),
        (
            [f"{i}{m}.tif" for i in ("a_1", "a_2") for m in ("", "_mask")],
            ["mask=*_mask.tif", "tif=*.tif"],
            2,
        ),
        (CITY, None, 2),
        (VOC, None, 3),
        (["Cat/0.jpg", "Cat/1.jpg", "Dog/0.jpg", "Dog/1.jpg"], None, 2),
    ],
)
def test_readings_are_named_and_work(names, fields, count, tmp_path):
    """Files that go together: each reading can be pasted, and gives as many samples as it says."""
    root = tree(tmp_path / "set", *names)
    with pytest.raises(AmbiguousError) as caught:
        read(root)
    found, gives = options(caught.value), dict(caught.value.readings).values()
    assert fields is None or fields in [sorted(texts) for texts, _ in found]
    for texts, more in found:
        samples, _ = read(root, *texts, "name", **more)
        assert f"{len(samples)} samples of {len(texts)} files" in gives
        for s in samples:  # what a file is called says which it belongs to
            paths = [n for n in names if (root / n).read_bytes() in s.values()]
            assert len(paths) == len(texts)
            assert all(s["name"].rpartition("/")[2] in n for n in paths)
    assert count in {len(read(root, *texts, **more)[0]) for texts, more in found}


def test_patterns(tmp_path):
    root = tree(tmp_path / "set", *CITY)
    samples, _ = read(
        root, "image=leftImg8bit/*/*_leftImg8bit.png", "y=gtFine/*/*_gtFine_color.png"
    )
    assert samples[1]["y"] == (root / "gtFine/x/x_2_gtFine_color.png").read_bytes()
    assert samples[1]["image"] == (root / "leftImg8bit/x/x_2_leftImg8bit.png").read_bytes()
    with pytest.raises(UsageError, match=r"no file matches z/\*"):
        read(root, "image=leftImg8bit/*/*.png", "y=z/*.png")
    with pytest.raises(FormatError, match="x_1_gtFine"):
        read(root, "image=leftImg8bit/*/*.png", "y=gtFine/*/*.png")


def test_missing_partners(tmp_path):
    root = paired(tmp_path / "set")
    for i in (3, 7):
        (root / "masks" / f"{i}.png").unlink()
    fails(lambda: read(root, *PAIRS), FormatError, "2 of 12 ", "masks/*.png", "3, 7", "drop-rows")
    samples, notes = read(root, *PAIRS, "name", nulls="drop-rows")
    assert [s["name"] for s in samples] == [str(i) for i in range(12) if i not in (3, 7)]
    assert any("3, 7: no file masks" in note for note in notes)
    assert len(read(root, PAIRS[0])[0]) == 12
    (root / "list.csv").write_text(
        "file_name,y\n" + "".join(f"images/{i}.jpg,{i}\n" for i in (9, 2))
    )
    samples, _ = read(root, *PAIRS, "y", nulls="drop-rows", labels="list.csv")
    assert [s["y"] for s in samples] == [2, 9]
    assert samples[1]["masks"] == (root / "masks" / "9.png").read_bytes()


# --- tables ------------------------------------------------------------------------------------


def lines(path: Path, *rows: dict) -> None:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")


def test_hugging_face(tmp_path):
    root = fill(tmp_path / "set", "a/1.png", "a/2.png", "b/1.png")
    rows = [
        {"file_name": "a/2.png", "text": "two", "n": 2, "box": [1, 2.5], "ok": True, "odd": None},
        {"file_name": "b/1.png", "text": "grün", "n": -1, "box": [3, 4], "ok": False, "odd": [1]},
        {"file_name": "a/1.png", "text": "", "n": 2**62, "box": [0, 0], "ok": True},
    ]
    lines(root / "metadata.jsonl", *rows)
    samples, notes = read(root)
    assert [s["name"] for s in samples] == ["a/1.png", "a/2.png", "b/1.png"]
    assert [s["text"] for s in samples] == ["", "two", "grün"]
    assert [int(s["n"]) for s in samples] == [2**62, 2, -1]
    assert [s["box"].tolist() for s in samples] == [[0, 0], [1, 2.5], [3, 4]]
    assert [bool(s["ok"]) for s in samples] == [True, True, False]
    assert [*samples[0]][1:] == ["text", "n", "box", "ok", "odd", "name"]
    assert [json.loads(s["odd"]) for s in samples] == [None, None, [1]]
    assert any("odd of metadata.jsonl" in note for note in notes)
    dsprep.provenance(root)
    with open_dataset(root, through="strict") as source:
        assert [s["text"] for s in source] == ["", "two", "grün"]
    dsprep.convert(root, tmp_path / "out.h5")
    assert "same: all 3" in cli("verify", root, tmp_path / "out.h5").out
    lines(root / "metadata.jsonl", *rows[:2])
    fails(lambda: dsprep.Sidecar.open(root), StaleError)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"file_name": "1.png"}\n{"file_name": "1.png"}\n', "two rows name the same image"),
        ('{"file_name": "3.png"}\n', "names no image"),
        ('{"name": "1.png"}\n', "no column file_name"),
        ('{"file_name": null}\n', "names no image"),
        ('{"file_name": "1.png"}\n[1]\n', "damaged"),
        ('{"file_name": "1.png"}\n{"file_name": "1.png"\n', "damaged: line 2"),
        ('{"file_name": "1.png", "x": ' + "[" * 100_000 + "\n", "damaged"),
        ("\n\n", "no rows"),
        ('{"file_name": "1.png", "image": 1}\n', "name of another field"),
    ],
)
def test_damaged_lines(text, match, tmp_path):
    root = fill(tmp_path / "set", "1.png", "2.png")
    (root / "metadata.jsonl").write_text(text)
    with pytest.raises(DsprepError, match=match):
        read(root)


def test_values_that_no_type_holds_exactly(tmp_path):
    root = fill(tmp_path / "set", "1.png", "2.png")
    for a, b in ((2**63, 1), (2**53 + 1, 0.5), (True, 1), ("x", 1), ([1], [1, 2]), ({}, {})):
        lines(root / "metadata.jsonl", {"file_name": "1", "v": a}, {"file_name": "2", "v": b})
        assert [json.loads(s["v"]) for s in read(root)[0]] == [a, b]


def test_tables_elsewhere(tmp_path, monkeypatch):
    root = fill(tmp_path / "photos", "1.png", "2.png")
    (tmp_path / "meta").mkdir()
    table = tmp_path / "meta" / "labels.csv"
    table.write_text("path,y\n1.png,7\n2.png,8\n")
    assert [s["y"] for s in read(root, labels=f"{table}:path")[0]] == [7, 8]
    monkeypatch.chdir(tmp_path)
    options = OpenOptions(labels="./meta/labels.csv:path")
    monkeypatch.chdir(root)
    dsprep.provenance(root, options=options)
    with open_dataset(root) as source:  # as the sidecar was made
        assert source[1]["y"] == 8
    assert not check(root, full=True)
    table.write_text(table.read_text().replace("8", "9"))
    assert any("y" in str(p) for p in check(root, full=True))
    for name in ("none.csv", "./none.csv", str(tmp_path / "meta")):
        fails(lambda: read(root, labels=name), UsageError, "no table")


def test_tables_that_memory_does_not_hold(tmp_path, monkeypatch):
    from dsprep.formats.images import table

    root = fill(tmp_path / "set", "1.png")
    (root / "t.csv").write_text("file_name,y\n1,2\n" + "\n" * 1000)
    monkeypatch.setattr(table, "free_memory", lambda: 1000)
    fails(lambda: read(root, labels="t.csv"), FormatError, "too large")
