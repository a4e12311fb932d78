"""Files with one group per sample; where what the samples are is doubtful, the user is asked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

import dsprep
from dsprep.core.schema import FieldSpec
from dsprep.errors import SchemaError, UsageError
from dsprep.formats.base import OpenOptions


def options(*fields: str, axis: str = "auto") -> OpenOptions:
    return OpenOptions(fields=tuple(map(FieldSpec.parse, fields)), sample_axis=axis)  # type: ignore[arg-type]


def write(path: Path, count: int, parent: str = "", name: str = "sample{}") -> None:
    """Write a group per sample, in an order that is not the natural one."""
    rng = np.random.default_rng(1)
    with h5py.File(path, "w") as file:
        for i in sorted(range(count), key=str):
            group = file.create_group(f"{parent}/{name.format(i)}".lstrip("/"))
            group["image"] = rng.integers(0, 255, (8, 6, 3), np.uint8)
            group.create_dataset("packed", data=np.full((4, 5), i, "f4"), compression="gzip")
            group["label"] = np.int64(i)
            group["meta/points"] = rng.random((i % 5, 3)).astype(">f8")
            group["name"] = f"name {i}" * (i % 3)
        file["image"] = np.zeros(7)
        file["image"].attrs["unit"] = "dB"


@pytest.mark.parametrize("parent", ["", "data/all"])
def test_all_samples_in_natural_order(tmp_path: Path, parent: str) -> None:
    write(tmp_path / "a.h5", 25, parent)
    with dsprep.open(tmp_path / "a.h5") as source, h5py.File(tmp_path / "a.h5") as file:
        assert len(source) == 25
        assert source.schema.names == ("image", "label", "meta/points", "name", "packed")
        assert source.schema["meta/points"].shape == (None, 3)
        assert any("each group is a sample: 25 samples" in note for note in source.notes)
        assert any("left out image: not in the samples' groups" in n for n in source.notes)
        whole = source[:]
        for i in range(25):
            group = file[f"{parent}/sample{i}"]
            sample = source[i]
            assert sample["label"] == whole["label"][i] == i
            assert sample["name"] == group["name"][()].decode()
            for name in ("image", "packed", "meta/points"):
                np.testing.assert_array_equal(sample[name], group[name])
                np.testing.assert_array_equal(whole[name][i], group[name])
            assert sample["meta/points"].dtype == ">f8"
        code = source.loading_code()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "image uint8 (8, 6, 3)" in done.stdout


def test_converted_and_through_a_sidecar(tmp_path: Path) -> None:
    write(tmp_path / "a.h5", 12)
    for name in ("b.h5", "b.lmdb", "b.tfrecord", "b.zarr"):
        dsprep.convert(tmp_path / "a.h5", tmp_path / name, workers=1)
        with dsprep.open(tmp_path / "a.h5") as a, dsprep.open(tmp_path / name) as b:
            assert dsprep.verify(a, b).same
    dsprep.provenance(tmp_path / "a.h5")
    with (
        dsprep.Sidecar.open(tmp_path / "a.h5") as sidecar,
        h5py.File(tmp_path / "a.h5") as file,
    ):
        batch = sidecar.read([11, 2, 7], ["image", "label", "packed"])
        for k, i in enumerate((11, 2, 7)):
            for name in ("image", "label", "packed"):
                np.testing.assert_array_equal(batch[name][k], file[f"sample{i}/{name}"])


def test_many_groups_of_any_name(tmp_path: Path) -> None:
    names = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen", "ibis", "jay", "kea"]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for i, name in enumerate(names):
            file[f"{name}/x"], file[f"{name}/y"] = np.full(3 + i, i), np.arange(3 + i)
    with dsprep.open(tmp_path / "a.h5") as source:
        assert len(source) == 11
        assert source[10]["x"].tolist() == [10] * 13


def splits(file: h5py.File, *parts: tuple[str, int]) -> None:
    for name, count in parts:
        file[f"{name}/x"], file[f"{name}/y"] = np.zeros((count, 5)), np.zeros(count)


def test_splits_and_cameras_are_not_samples(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        splits(file, ("train", 60), ("test", 10))
    with dsprep.open(tmp_path / "a.h5") as source:
        assert (len(source), source.schema.names) == (60, ("train/x", "train/y"))
    with h5py.File(tmp_path / "b.h5", "w") as file:
        for k in range(3):
            file[f"camera{k}/rgb"] = np.zeros((20, 4 + k))
    with dsprep.open(tmp_path / "b.h5") as source:
        assert (len(source), len(source.schema)) == (20, 3)


@pytest.mark.parametrize("kind", ["folds", "shapes", "missing", "parents"])
def test_doubt_is_refused_with_what_each_reading_gives(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        if kind == "folds":
            splits(file, ("fold0", 20), ("fold1", 20), ("fold2", 21))
        for i in range(12 if kind in ("shapes", "missing") else 0):
            file[f"s{i}/image"] = np.zeros((4, 5 + (kind == "shapes" and i == 7)))
            if kind != "missing" or i != 7:
                file[f"s{i}/label"] = i
        for parent in ("train", "val") if kind == "parents" else ():
            for i in range(12):
                file[f"{parent}/s{i}/image"], file[f"{parent}/s{i}/label"] = np.zeros((4, 5)), i
    with pytest.raises(SchemaError, match="groups that are alike may be samples") as caught:
        dsprep.open(path)
    text = str(caught.value)
    assert "--sample-axis first: " in text
    reason, count = {
        "folds": ("the first axis may count samples as well", 3),
        "shapes": (r"image is float64[4,5] in s0 and float64[4,6] in s7", 12),
        "missing": ("s7 differs from the others in label", 11),
        "parents": ("several groups hold such groups", 12),
    }[kind]
    assert reason in text
    with dsprep.open(path, options(axis="first")) as source:
        assert len(source) > 0
    if kind == "parents":
        assert "--field NAME=val/*/image" in text
        with pytest.raises(SchemaError):
            dsprep.open(path, options(axis="groups"))
        with dsprep.open(path, options("x=val/*/image", "y=val/*/label")) as source:
            assert source.schema.names == ("x", "y")
            assert source[11]["y"] == 11
    else:
        with dsprep.open(path, options(axis="groups")) as source:
            assert len(source) == count
            assert "image" in source.schema.names or kind != "missing"


def test_named_fields(tmp_path: Path) -> None:
    write(tmp_path / "a.h5", 12)
    with dsprep.open(tmp_path / "a.h5", options("label", "points=meta/points")) as source:
        assert source.schema.names == ("label", "points")
        assert len(source) == 12
    with dsprep.open(tmp_path / "a.h5", options("sample3/image")) as source:
        assert len(source) == 8
    with dsprep.open(tmp_path / "a.h5", options("image", axis="groups")) as source:
        assert len(source) == 12
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["x"] = np.zeros(3)
    with pytest.raises(SchemaError, match="no groups side by side"):
        dsprep.open(tmp_path / "b.h5", options(axis="groups"))
    dsprep.convert(tmp_path / "a.h5", tmp_path / "a.zarr", fields=["image"])
    with pytest.raises(UsageError, match="groups applies to hdf5"):
        dsprep.open(tmp_path / "a.zarr", options(axis="groups"))


def test_a_table_of_pandas(tmp_path: Path) -> None:
    """Its index internals and arrays without rows are never the dataset."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["table/table"] = np.zeros(10, [("index", "i8"), ("values", "f8", (3,))])
        for name in ("ranges", "sorted", "mbounds", "indices"):
            file[f"table/_i_table/index/{name}"] = np.zeros((0, 2))
        file["table/empty"], file["table/none"] = np.zeros(0), np.zeros((0, 3))
    with dsprep.open(tmp_path / "a.h5") as source:
        assert (len(source), source.schema.names) == (10, ("table/table",))
        notes = "\n".join(source.notes)
        assert "left out table/_i_table: it is an index that PyTables keeps" in notes
        assert "left out table/empty, table/none: first axis 0" in notes


def test_a_file_of_which_most_would_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["a"], file["b"], file["weights"] = np.zeros(30), np.zeros(30), np.zeros((40, 90))
    with pytest.raises(SchemaError, match="most of the file would be left out") as caught:
        dsprep.open(path)
    assert "30 samples of a, b, without weights [40,90]" in str(caught.value)
    with dsprep.open(path, options(axis="first")) as source:
        assert len(source) == 30
    with dsprep.open(path, options("weights")) as source:
        assert len(source) == 40
    with dsprep.open(path, options(axis="none")) as source:
        assert len(source) == 1
