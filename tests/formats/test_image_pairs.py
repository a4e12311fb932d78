"""Image folders whose files of equal names are one sample, and tables of labels anywhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from image_files import fill, png, read
from test_cli import fails, run

import dsprep
from dsprep.core.schema import FieldSpec
from dsprep.errors import DsprepError, FormatError, UsageError
from dsprep.formats.images.pairs import role_of
from dsprep.formats.options import OpenOptions
from dsprep.sidecar.sidecar import StaleError
from dsprep.source.dataset import open_dataset
from dsprep.verbs.check import check


def fields(*texts: str) -> tuple[FieldSpec, ...]:
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


def test_images_and_masks(tmp_path):
    root = paired(tmp_path / "set")
    samples, notes = read(root)
    assert [s["name"] for s in samples] == [str(i) for i in range(12)]
    for s in samples:
        assert s["images"] == (root / "images" / f"{s['name']}.jpg").read_bytes()
        assert s["masks"] == (root / "masks" / f"{s['name']}.png").read_bytes()
    assert any("equal names" in note for note in notes)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["LR/1.png", "HR/1.png"], {"LR", "HR"}),
        (["images/1.jpg", "labels/1.txt"], {"images", "labels"}),
        (["JPEGImages/a.jpg", "Annotations/a.xml"], {"JPEGImages", "Annotations"}),
        (["images/x/1.png", "images/y/1.png", "masks/x/1.png", "masks/y/1.png"], None),
        (["images/img_1.png", "images/img_2.png", "gt/gt_img_1.txt", "gt/gt_img_2.txt"], None),
        (["rgb/1_l.png", "rgb/2_l.png", "depth/1_d.png", "depth/2_d.png"], {"rgb", "depth"}),
        ([*(f"{d}{i}{e}" for i in (21, 22) for d, e in (("images/", "_training.tif"),
                                                        ("1st_manual/", "_manual1.gif")))], None),
        (["HR/1.png", "HR/2.png", "LR_bicubic/X2/1x2.png", "LR_bicubic/X2/2x2.png"], None),
        (["train/1.jpg", "train/2.jpg", "train_masks/1_mask.gif", "train_masks/2_mask.gif"], None),
    ],
)  # fmt: skip
def test_files_that_belong_together(names, expected, tmp_path):
    root = tree(tmp_path / "set", *names)
    samples, _ = read(root)
    folders = expected or {name.split("/")[0] for name in names}
    assert {*samples[0]} == {*folders, "name"}
    assert len(samples) * len(folders) == len(names)
    found = sorted(s[f] for s in samples for f in folders)
    assert found == sorted((root / name).read_bytes() for name in names)
    for s in samples:  # what a file is called says which it belongs to
        assert all(s["name"] in n for n in names if (root / n).read_bytes() in s.values())


@pytest.mark.parametrize(
    "names",
    [
        ["Cat/0.jpg", "Cat/1.jpg", "Dog/0.jpg", "Dog/1.jpg"],
        ["with_mask/0.jpg", "without_mask/0.jpg"],
        ["image/1.png", "cat/1.png"],
    ],
)
def test_classes_with_equal_names_are_classes(names, tmp_path):
    samples, notes = read(fill(tmp_path / "set", *names))
    assert [s["name"] for s in samples] == sorted(names)
    assert samples[0]["label"] == 0
    assert any("--labels pairs" in note for note in notes)
    samples, _ = read(tmp_path / "set", labels="pairs")
    assert 2 * len(samples) == len(names)


def test_roles():
    found = {n: role_of(n) for n in ("JPEGImages", "gtFine", "left_img8bit", "cat", "PNGMasks")}
    assert {n: [*r] for n, r in found.items()} == {
        "JPEGImages": ["image"],
        "gtFine": ["partner"],
        "left_img8bit": ["image"],
        "cat": [],
        "PNGMasks": ["partner"],
    }


def test_missing_partners(tmp_path):
    root = paired(tmp_path / "set")
    for i in (3, 7):
        (root / "masks" / f"{i}.png").unlink()
    with pytest.raises(FormatError, match=r"2 of 12 .*masks.*images/3\.jpg.*3, 7.*drop-rows"):
        read(root)
    samples, notes = read(root, nulls="drop-rows")
    assert [s["name"] for s in samples] == [str(i) for i in range(12) if i not in (3, 7)]
    assert any("3, 7: no file in masks" in note for note in notes)
    assert {*read(root, nulls="drop-columns")[0][0]} == {"images", "name"}
    assert {*read(root, fields=fields("x=images"))[0][0]} == {"x"}
    (root / "list.txt").write_text("\n".join(str(i) for i in (9, 2, 5)))
    samples, _ = read(root, labels=str(root / "list.txt"))
    assert [s["name"] for s in samples] == ["2", "5", "9"]
    assert samples[2]["masks"] == (root / "masks" / "9.png").read_bytes()
    (root / "list.txt").write_text("3\n5\n")
    with pytest.raises(FormatError, match=r"masks.*images/3\.jpg"):
        read(root, labels=str(root / "list.txt"))


def test_numbers_are_not_cut(tmp_path):
    """Masks called 11 to 13 are not those of images 1 to 3."""
    names = [f"images/img_{i}.png" for i in (1, 2, 3)] + [f"masks/mask_1{i}.png" for i in (1, 2, 3)]
    with pytest.raises(FormatError, match="have no file"):
        read(fill(tmp_path / "set", *names))


def test_parts_of_a_dataset_are_not_mixed(tmp_path):
    names = [
        f"{d}/{s}/{i}.png" for d in ("images", "masks") for s in ("train", "val") for i in "12"
    ]
    root = fill(tmp_path / "set", *names)
    with pytest.raises(UsageError, match="--field images/train --field masks/train"):
        read(root)
    samples, _ = read(root, fields=fields("image=images/train", "mask=masks/train", "name"))
    assert [s["name"] for s in samples] == ["1", "2"]
    assert samples[1]["mask"] == (root / "masks/train/2.png").read_bytes()
    flat = fill(tmp_path / "flat", "train_images/1.png", "train_masks/1.png", "test_images/2.png")
    with pytest.raises(UsageError, match="--field train_images --field train_masks"):
        read(flat)


def test_patterns_of_names(tmp_path):
    tails = ("color.png", "labelIds.png", "polygons.json")
    names = [f"leftImg8bit/x/x_{i}_leftImg8bit.png" for i in (1, 2)]
    names += [f"gtFine/x/x_{i}_gtFine_{tail}" for i in (1, 2) for tail in tails]
    root = fill(tmp_path / "set", *names)
    with pytest.raises(UsageError, match=r"gtFine/\*_gtFine_labelIds\.png"):
        read(root)
    samples, _ = read(root, fields=fields("image=leftImg8bit", "label=gtFine/*_labelIds.png"))
    assert samples[1]["label"] == (root / "gtFine/x/x_2_gtFine_labelIds.png").read_bytes()
    beside = fill(tmp_path / "one", *(f"p/p_{i}{m}.tif" for i in (1, 2) for m in ("", "_mask")))
    with pytest.raises(UsageError, match=r"'image=\*\.tif' --field 'mask=\*_mask\.tif'"):
        read(beside)
    samples, _ = read(beside, fields=fields("image=*.tif", "mask=*_mask.tif"))
    assert samples[1]["image"] == (beside / "p/p_2.tif").read_bytes()
    assert samples[1]["mask"] == (beside / "p/p_2_mask.tif").read_bytes()


def test_what_may_be_classes_or_fields(tmp_path):
    root = fill(tmp_path / "set", *(f"{d}/{i}.png" for d in ("low", "high") for i in range(3)))
    with pytest.raises(UsageError, match=r"--labels pairs.*--labels folders"):
        read(root)
    assert {*read(root, labels="pairs")[0][0]} == {"low", "high", "name"}
    assert read(root, labels="folders")[0][0]["class"] == "high"
    (root / "low" / "1.png").rename(root / "low" / "9.png")
    assert read(root)[0][0]["class"] == "high"


# --- everything works with them ----------------------------------------------------------------


def test_commands(tmp_path):
    root = paired(tmp_path / "set")
    assert "2 files a sample" in run("inspect", root).out
    assert run("provenance", root, "--checksums").code == 0
    assert "a file for each sample" in run("provenance", root, "--show").out
    located = run("provenance", root, "--locate", "7").out
    assert "set/images/7.jpg" in located
    assert "set/masks/7.png" in located
    assert "valid" in run("provenance", root, "--check", "full").out
    for target in ("o.h5", "o.tfrecord", "o.zarr", "o.lmdb"):
        assert run("repack", root, tmp_path / target, "-b", "4").code == 0
        assert "same: all 12" in run("verify", root, tmp_path / target).out
    (root / "masks" / "5.png").unlink()
    assert "--nulls drop-rows" in fails("convert", root, tmp_path / "x.h5", code=None)


@pytest.mark.parametrize("options", [{}, {"engine": "direct"}, {"shuffle": "global"}])
def test_reader(options, tmp_path):
    root = paired(tmp_path / "set", 150)
    dsprep.provenance(root)
    seen = []
    with dsprep.Reader(root, batch_size=16, seed=2, **options) as reader:
        for batch in reader:
            for i, name in enumerate(batch["name"]):
                assert batch["images"][i] == (root / "images" / f"{name}.jpg").read_bytes()
                assert batch["masks"][i] == (root / "masks" / f"{name}.png").read_bytes()
                seen.append(int(name))
    assert sorted(seen) == list(range(150))
    order = np.random.default_rng(0).integers(0, 150, 40)
    with dsprep.Sidecar.open(root) as sidecar:
        masks = sidecar.read(order, ["masks"])["masks"]
        assert [*masks] == [(root / "masks" / f"{i}.png").read_bytes() for i in order]
        one = sidecar.read(7, ["name", "masks"])
        assert [*one["masks"]] == [(root / "masks/7.png").read_bytes()]


def test_sidecars_notice_other_labels(tmp_path):
    names = [f"images/{i}.png" for i in range(4)] + [f"labels/{i}.txt" for i in range(4)]
    root = tree(tmp_path / "set", *names)
    dsprep.provenance(root)
    assert not check(root, full=True)
    (root / "labels" / "1.txt").rename(root / "labels" / "x.txt")
    with pytest.raises(StaleError):
        dsprep.Sidecar.open(root)
    (root / "labels" / "x.txt").rename(root / "labels" / "1.txt")
    (root / "labels" / "1.txt").write_text("longer than before")
    with pytest.raises(StaleError):
        dsprep.Sidecar.open(root)


# --- tables ------------------------------------------------------------------------------------


def test_labels_that_repeat_are_no_names_of_files(tmp_path):
    root = fill(tmp_path / "set", *(f"{i}.png" for i in range(5)))
    (root / "t.csv").write_text("label,id\n" + "".join(f"{i % 3},{i}\n" for i in range(5)))
    samples, notes = read(root)
    assert [(s["name"], s["label"]) for s in samples] == [(f"{i}.png", i % 3) for i in range(5)]
    assert any("the column id names the files" in note for note in notes)
    (root / "t.csv").write_text("label,id\n" + "".join(f"{4 - i},{i}\n" for i in range(5)))
    assert [s["label"] for s in read(root)[0]] == [4, 3, 2, 1, 0]


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
    assert "same: all 3" in run("verify", root, tmp_path / "out.h5").out
    lines(root / "metadata.jsonl", *rows[:2])
    with pytest.raises(StaleError):
        dsprep.Sidecar.open(root)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"file_name": "1.png"}\n{"file_name": "1.png"}\n', "two rows name the same file"),
        ('{"file_name": "3.png"}\n', "column of the table names"),
        ('{"name": "1.png"}\n', "line 1.*names no file"),
        ('{"file_name": 1}\n', "line 1.*names no file"),
        ('{"file_name": "1.png"}\n[1]\n', "line 2.*names no file"),
        ('{"file_name": "1.png", "x": 1, "x": 2}\n', "not JSON.*one name"),
        ('{"file_name": "1.png"\n', "line 1.*not JSON"),
        ('{"file_name": "1.png", "x": ' + "[" * 100_000 + "\n", "line 1.*not JSON"),
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
    table.write_text("path,y\n/data/photos/1.png,7\n/data/photos/2.png,8\n")
    assert [s["y"] for s in read(root, labels=str(table))[0]] == [7, 8]
    assert [s["y"] for s in read(root, labels=str(table.parent))[0]] == [7, 8]
    monkeypatch.chdir(tmp_path)
    options = OpenOptions(labels="./meta/labels.csv")
    monkeypatch.chdir(root)
    dsprep.provenance(root, options=options)
    with open_dataset(root) as source:  # as the sidecar was made
        assert source[1]["y"] == 8
    assert not check(root, full=True)
    table.write_text(table.read_text().replace("8", "9"))
    assert any("y" in str(p) for p in check(root, full=True))
    with pytest.raises(UsageError, match=r"no table none\.csv.*\./labels\.csv"):
        read(root, labels="none.csv")
    with pytest.raises(UsageError, match=r"no table"):
        read(root, labels="./none.csv")
    masks = fill(tmp_path / "masks", "1.png", "2.png")
    with pytest.raises(UsageError, match=f"{tmp_path} --field photos --field masks"):
        read(root, labels=str(masks))
    assert read(tmp_path, fields=fields("photos", "masks"))[0][1]["masks"] == png(1, 3)


def test_long_lines_are_refused_before_they_are_taken(tmp_path):
    from test_bombs import peak_nbytes

    root = fill(tmp_path / "set", "1.png", "2.png")
    for name, begin in (
        ("t.csv", b"id,y\n1,"),
        ("metadata.jsonl", b'{"file_name": "1.png", "y": "'),
    ):
        with (root / name).open("wb") as file:
            file.write(begin)
            for _ in range(150):
                file.write(b"x" * (1 << 20))

        def look():
            with pytest.raises(FormatError, match=r"line \d.*too long|too long.*line \d|limit"):
                read(root)

        assert peak_nbytes(look) < 100 << 20
        (root / name).unlink()


def test_tables_that_memory_does_not_hold(tmp_path, monkeypatch):
    from dsprep.formats.images import table

    root = fill(tmp_path / "set", "1.png")
    (root / "t.csv").write_text("id,y\n1,2\n" + "\n" * 1000)
    monkeypatch.setattr(table, "free_memory", lambda: 1000)
    with pytest.raises(FormatError, match="memory is too small"):
        read(root)


def test_ways_out_work(tmp_path):
    """Each refusal names options that read the folder."""
    voc = [f"JPEGImages/{i}.jpg" for i in range(6)] + [f"Annotations/{i}.xml" for i in range(6)]
    voc += [f"SegmentationClass/{i}.png" for i in range(3)]
    pets = [f"images/{i}.jpg" for i in range(4)]
    pets += [f"annotations/polygons/{i}.xml" for i in range(4)]
    pets += [f"annotations/xmls/{i}.xml" for i in range(4)]
    camvid = [
        f"{d}/{i}.png" for d in ("train", "trainannot", "test", "testannot") for i in range(3)
    ]
    yolo = [f"obj/{i}.{e}" for i in range(3) for e in ("jpg", "txt")]
    video = [f"v{k}/{d}/{i}.png" for k in (1, 2) for d in ("images", "masks") for i in range(2)]
    for k, (names, count) in enumerate(((voc, 6), (pets, 4), (camvid, 3), (yolo, 3), (video, 4))):
        root = tree(tmp_path / f"set{k}", *names)
        with pytest.raises(DsprepError) as refused:
            read(root)
        found = re.findall(r"((?:--field '?[^' ,;]+'? ?)+)", str(refused.value))
        specs = [f for f in found[0].replace("'", "").split() if f != "--field"]
        samples, _ = read(root, fields=fields(*specs))
        assert len(samples) == count, (specs, refused.value)
        assert len(samples[0]) == len(specs) > 1


def test_folders_of_classes_in_a_folder_of_images(tmp_path):
    root = fill(tmp_path / "set", "images/a/1.png", "images/b/2.png")
    with pytest.raises(UsageError, match=r"set/images"):
        read(root)
    assert [s["label"] for s in read(root / "images")[0]] == [0, 1]
