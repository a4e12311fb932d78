"""Data for training, validation and test are never read as one dataset unasked."""

from __future__ import annotations

import io
import re
import shlex
import tarfile
from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr
from support import fails
from typer.testing import CliRunner

import dsprep
from dsprep.cli import app
from dsprep.core.schema import FieldSpec
from dsprep.errors import AmbiguousError, DsprepError, SchemaError, UsageError
from dsprep.formats.options import OpenOptions
from dsprep.formats.splits import by_part, parts_of, without_part
from dsprep.synth import synth

X, Y = np.arange(18, dtype="<f4").reshape(6, 3), np.arange(6)


def hdf5(path: Path, **arrays: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array


@pytest.mark.parametrize(
    ("part", "names"),
    {
        "train": "train X_train x_train trainX xtrain train2017 TRAIN-00000 trainset a/Train/b",
        "validation": "val dev valid_7 y_val validation val2017 evalSet evaluation",
        "test": "test ytest testX x_test test-data Testing",
        "": "contest latest attest value device trained valley x strain evaluate",
    }.items(),
)
def test_words_of_names(part: str, names: str) -> None:
    for name in names.split():
        assert parts_of(name) == ({part} if part else set()), name


def test_names_without_their_part() -> None:
    names = ["x_train", "train/x", "xtrain", "a_train_b", "train", "train-0", "x"]
    assert [without_part(n) for n in names] == ["x", "x", "x", "a_b", "", "0", "x"]
    assert by_part(["train_test.h5", "x"]) == {"test and train": ["train_test.h5"], "": ["x"]}


LAYOUTS = {
    "shards": [f"{part}-0000{i}-of-00003.h5" for part in ("train", "test") for i in range(3)],
    "folders": [f"{part}/{i}.h5" for part in ("train", "valid", "test") for i in range(2)],
    "deep": [f"{site}/{part}/{i}.h5" for site in "ab" for part in ("train", "dev") for i in (1, 2)],
    "single": ["train.h5", "val.h5"],
    "beside others": ["part_1.h5", "part_12.h5", "test.h5"],
    "behind": ["a_train.h5", "b_train.h5", "a_test.h5", "b_test.h5"],
    "digits": ["train2017_1.h5", "train2017_2.h5", "val2017_1.h5", "val2017_2.h5"],
    "magic": ["[x]/train_1.h5", "[x]/train_2.h5", "[x]/test.h5"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_of_parts(tmp_path: Path, layout: str) -> None:
    """A directory is refused, and what the refusal names is read: each file once."""
    root = tmp_path / "test data"
    for i, name in enumerate(LAYOUTS[layout]):
        hdf5(root / name, x=np.full((2, 3), i))
    with pytest.raises(UsageError, match="name one of them: ") as caught:
        dsprep.open(root)
    assert caught.value.fix is not None
    text = caught.value.fix.removeprefix("name one of them: ").partition("; ")[0]
    ways = [w.rstrip(",") for w in shlex.split(text.replace(", or ", " "))]
    every: list[float] = []
    for way in ways:
        with dsprep.open(way) as source:
            stated = {parts_of(str(p.relative_to(root))) for p in source.files()}
            assert len(stated) == 1
            every += source[:]["x"][:, 0].tolist()
    assert sorted(every) == sorted([*range(len(LAYOUTS[layout]))] * 2)
    with dsprep.open(ways) as source:  # asked for
        assert len(source) == len(every)


def test_what_is_asked_for_is_read(tmp_path: Path) -> None:
    for name in ("train_0.h5", "test_0.h5"):
        hdf5(tmp_path / "data" / name, x=X)
    (tmp_path / "data" / "list.txt").write_text("train_0.h5\ntest_0.h5\n")
    data = tmp_path / "data"
    for paths in (f"{data}/*.h5", [*data.glob("*.h5")], f"@{data}/list.txt"):
        with dsprep.open(paths) as source:
            assert len(source) == 12
    fails(lambda: dsprep.open(data), UsageError)
    dsprep.provenance(f"{data}/*.h5")  # from now on a sidecar says what the dataset is
    with dsprep.open(data) as source:
        assert len(source) == 12
    with dsprep.Reader(data, 4) as reader:
        assert sum(len(batch["x"]) for batch in reader) == 12


ARRAYS = {"x_train": X, "y_train": Y, "x_test": X[:4] + 1, "y_test": Y[:4] + 1}


def write(form: str, path: Path, arrays: dict[str, np.ndarray]) -> Path:
    if form == "npz":
        np.savez(path / "a.npz", **arrays)
        return path / "a.npz"
    if form == "npy":
        (path / "a").mkdir()
        for name, array in arrays.items():
            np.save(path / "a" / f"{name}.npy", array)
        return path / "a"
    if form == "zarr":
        group = zarr.open_group(path / "a.zarr", mode="w")
        for name, array in arrays.items():
            group.create_array(name, data=array)
        return path / "a.zarr"
    hdf5(path / "a.h5", **arrays)
    return path / "a.h5"


@pytest.mark.parametrize(("form", "rows"), [("npz", 6), ("npy", 4), ("zarr", 6), ("hdf5", 4)])
def test_arrays_of_parts(tmp_path: Path, form: str, rows: int) -> None:
    """A file is refused, and the fields that the refusal names are read."""
    arrays = {n: a[:rows] if "test" in n else a for n, a in ARRAYS.items()}
    arrays |= {"x_test": X[:rows] + 1, "y_test": Y[:rows] + 1}
    path = write(form, tmp_path, arrays)
    with pytest.raises(AmbiguousError, match="named as parts of a dataset") as caught:
        dsprep.open(path)
    assert len(caught.value.readings) == 2
    for way, gives in caught.value.readings:
        fields = tuple(map(FieldSpec.parse, re.findall("--field (\\S+)", way)))
        with dsprep.open(path, OpenOptions(fields=fields)) as source:
            assert source.schema.names == ("x", "y")
            added = int("test" in way)
            assert gives.startswith(f"{len(source)} samples")
            assert source[:]["x"].tolist() == (X[: rows if added else 6] + added).tolist()
        out = tmp_path / f"{added}.h5"
        words = ["convert", str(path), str(out), *shlex.split(way)]
        assert CliRunner().invoke(app, words).exit_code == 0


def test_an_array_of_one_part_is_a_field(tmp_path: Path) -> None:
    with dsprep.open(write("hdf5", tmp_path, {"x": X, "valid": Y > 2})) as source:
        assert set(source.schema.names) == {"x", "valid"}


def test_an_array_with_and_without_a_part(tmp_path: Path) -> None:
    with pytest.raises(AmbiguousError, match="named as parts"):
        dsprep.open(write("npz", tmp_path, {"x": X, "y": Y, "x_test": X, "y_test": Y}))


def tar(path: Path, names: list[str]) -> None:
    with tarfile.open(path, "w") as archive:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 4
            archive.addfile(info, io.BytesIO(b"data"))


def test_members_of_parts(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    tar(path, [f"{part}/{i}.jpg" for part in ("train", "test") for i in range(3)])
    fails(lambda: dsprep.open(path), SchemaError, "--keys-as key")
    with dsprep.open(path, OpenOptions(keys_as="key")) as source:
        assert [s["key"] for s in source][::3] == [b"train/0", b"test/0"]
    tar(path, [f"{name}/{i}.jpg" for name in ("bus", "train") for i in range(3)])
    with dsprep.open(path) as source:  # classes
        assert len(source) == 6


@pytest.mark.parametrize("name", ["deepcam", "cosmoflow-tfrecord"])
def test_real_record_structures(tmp_path: Path, name: str) -> None:
    path = synth(name, tmp_path / name, samples=20, scale=0.01).path
    fails(lambda: dsprep.open(path), DsprepError, "parts of a dataset")
