"""Fields in several files are joined, and the file of a sample is a field, where that is asked."""

from __future__ import annotations

import io
import itertools
import json
import tarfile
from pathlib import Path

import h5py
import lmdb
import numpy as np
import pytest
import zarr
from image_files import png
from support import cli, fails, reading

import dsprep
from dsprep.core.schema import FieldSpec
from dsprep.errors import DsprepError, SchemaError, UsageError
from dsprep.formats.base import Source
from dsprep.formats.options import OpenOptions

N = 30
X = np.random.default_rng(0).integers(0, 255, (N, 4, 5), np.uint8)
Y = np.arange(N)


def hdf5(path: Path, **arrays: np.ndarray) -> Path:
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array
    return path


def joined(paths: object, *fields: str) -> Source:
    return dsprep.open(paths, reading(*fields, join=True))  # type: ignore[arg-type]


@pytest.fixture
def pcam(tmp_path: Path) -> Path:
    """PatchCamelyon's files: one of images, one of labels."""
    data = tmp_path / "pcam"
    data.mkdir()
    hdf5(data / "train_x.h5", x=X)
    hdf5(data / "train_y.h5", y=Y[:, None, None, None])
    return data


# --- joining -----------------------------------------------------------------------------------


def test_files_of_fields_become_one_dataset(pcam: Path, tmp_path: Path) -> None:
    """As a directory, a glob and one by one; by every command that reads."""
    every = (pcam, f"{pcam}/train_*.h5", [pcam / "train_x.h5", pcam / "train_y.h5"])
    for paths in every:
        with joined(paths) as source:
            assert source.schema.names == ("x", "y")
            np.testing.assert_array_equal(source[3:9]["x"], X[3:9])
            np.testing.assert_array_equal(source[3:9]["y"][:, 0, 0, 0], Y[3:9])
            assert len(source.files()) == 2
    text = cli("inspect", pcam, "--join", "--head", 2).out
    assert "x: uint8[4,5]" in text
    assert "y: int64[1,1,1]" in text
    for verb, target in (("convert", "a.tfrecord"), ("repack", "b.h5")):
        cli(verb, pcam, tmp_path / target, "--join", *(("-b", 8) if verb == "repack" else ()))
        cli("verify", pcam, tmp_path / target, "--join")
    with dsprep.Reader(tmp_path / "b.h5", 7) as reader:
        for batch in reader:
            np.testing.assert_array_equal(batch["x"], X[batch["y"].reshape(-1)])


def test_datasets_of_several_files_and_formats_are_joined(tmp_path: Path) -> None:
    for i in range(3):
        (tmp_path / "x").mkdir(exist_ok=True)
        hdf5(tmp_path / "x" / f"{i}.h5", x=X[10 * i : 10 * i + 10])
    np.save(tmp_path / "label.npy", Y)
    zarr.save_group(str(tmp_path / "w.zarr"), w=Y / 2)
    dsprep.provenance(tmp_path / "x")
    paths = [tmp_path / "x", tmp_path / "label.npy", f"{tmp_path}/w.zarr"]
    with joined(paths, "label", "weight=w", "x") as source:
        assert source.schema.names == ("label", "weight", "x")
        for k, (start, stop) in enumerate(((0, 30), (5, 25), (12, 13))):
            batch = source[start:stop]
            np.testing.assert_array_equal(batch["x"], X[start:stop], err_msg=str(k))
            np.testing.assert_array_equal(batch["weight"], Y[start:stop] / 2)
        opening, offset = source.part(14, 18)
        with opening() as part:
            np.testing.assert_array_equal(part[14 - offset : 18 - offset]["x"], X[14:18])
            np.testing.assert_array_equal(part[14 - offset : 18 - offset]["label"], Y[14:18])
    with joined(paths, "label", "x") as source:
        assert len(source.files()) == 4
    with joined(paths, "*", "weight=w") as source:
        assert set(source.schema.names) == {"x", "label", "weight"}
    fails(lambda: joined(paths, "z"), SchemaError, "there is no field z")


def test_fields_of_one_name_are_called_as_their_files(tmp_path: Path) -> None:
    hdf5(tmp_path / "images.h5", data=X)
    hdf5(tmp_path / "labels.h5", data=Y)
    with joined(tmp_path) as source:
        assert source.schema.names == ("images", "labels")
        np.testing.assert_array_equal(source[4]["images"], X[4])
    with joined(tmp_path, "y=labels", "images") as source:
        assert source.schema.names == ("y", "images")
        assert source[4]["y"] == 4
    hdf5(tmp_path / "more.h5", data=Y, w=Y)
    with joined(tmp_path) as source:
        assert source.schema.names == ("images", "labels", "more_data", "w")


def test_what_cannot_be_joined_is_refused(pcam: Path, tmp_path: Path) -> None:
    fails(lambda: dsprep.open(pcam), SchemaError, "--join")
    hdf5(pcam / "train_z.h5", z=Y[:-1])
    with pytest.raises(SchemaError, match=r"train_z.h5: .*expected 30 as .*train_x.h5, found 29"):
        joined(pcam)
    fails(lambda: joined(pcam / "train_x.h5"), UsageError, "more than one dataset")
    with pytest.raises(UsageError, match="values does not apply"):
        dsprep.open(pcam, OpenOptions(join=True, values="datum"))
    with pytest.raises(UsageError, match="--file-field"):
        dsprep.open(pcam, OpenOptions(join=True, file_field="f"))
    assert "dsprep repack SRC... DST --join" in cli("provenance", pcam, "--join", code=2).err


def keyed(path: Path, kind: str, keys: list[str], folder: str = "") -> Path:
    """Write samples, of which each holds its number, by these keys."""
    values = {key: bytes([i]) * 4 for i, key in enumerate(keys)}
    if kind == "tar":
        with tarfile.open(path, "w") as archive:
            for key, value in values.items():
                member = tarfile.TarInfo(f"{folder}{key}.bin")
                member.size = 4
                archive.addfile(member, io.BytesIO(value))
    elif kind == "lmdb":
        with lmdb.open(str(path), subdir=False) as env, env.begin(write=True) as transaction:
            for key, value in values.items():
                transaction.put(key.encode(), value)
    elif kind == "images":
        for i, key in enumerate(keys):
            (path / f"{key}.png").parent.mkdir(parents=True, exist_ok=True)
            (path / f"{key}.png").write_bytes(png(i))
    else:
        with h5py.File(path, "w") as file:
            for key, value in values.items():
                file[f"{key}/v"] = np.frombuffer(value, np.uint8)
    return path


KEYS = ["s01", "s02", "s11", "s30"]
KINDS = ["tar", "lmdb", "images", "groups"]


@pytest.mark.parametrize("kinds", itertools.combinations_with_replacement(KINDS, 2))
def test_samples_of_other_keys_are_not_joined(tmp_path: Path, kinds: tuple[str, str]) -> None:
    options = OpenOptions(join=True, sample_axis="groups" if "groups" in kinds else "auto")
    first = keyed(tmp_path / "first", kinds[0], KEYS)
    same, other = (
        keyed(tmp_path / name, kinds[1], keys)
        for name, keys in (("same", KEYS), ("other", [*KEYS[:2], "s12", "s30"]))
    )
    for sidecar in (False, True):
        if sidecar and "groups" not in kinds:  # those have no offsets
            for path in (first, other):
                dsprep.provenance(path)
            fails(lambda: joined([first, other]), SchemaError, "sample 2")
        with dsprep.open([first, same], options) as source:
            assert len(source) == 4
        with pytest.raises(SchemaError, match=r"sample 2.*expected s11.*found s12"):
            dsprep.open([first, other], options)


def test_keys_that_only_count_are_joined_with_any(tmp_path: Path) -> None:
    counter = keyed(tmp_path / "c.lmdb", "lmdb", [f"{i:08d}" for i in range(4)])
    tar = keyed(tmp_path / "t.tar", "tar", KEYS)
    with joined([counter, tar]) as source:
        assert [source[i]["bin"] for i in range(4)] == [bytes([i]) * 4 for i in range(4)]
    plain = hdf5(tmp_path / "y.h5", y=Y[:4])
    with joined([tar, plain]) as source:
        assert source[3]["y"] == 3
    folder = keyed(tmp_path / "z.tar", "tar", ["3", "17"], "some/folder/")
    with pytest.raises(SchemaError, match="sample 0"):
        joined([folder, keyed(tmp_path / "o.tar", "tar", ["3", "17"])])


# --- the file of a sample ------------------------------------------------------------------------


@pytest.fixture
def volumes(tmp_path: Path) -> Path:
    """Slices of three volumes, a file each, of which the second has none."""
    data = tmp_path / "volumes"
    data.mkdir()
    for name, (first, last) in {"1": (0, 12), "2": (12, 12), "10": (12, N)}.items():
        hdf5(data / f"{name}.h5", slice=X[first:last], y=Y[first:last])
    return data


NUMBERS = np.repeat([0, 2], [12, N - 12])


def test_the_file_is_a_field(volumes: Path, tmp_path: Path) -> None:
    with dsprep.open(volumes, OpenOptions(file_field="volume")) as source:
        assert str(source.schema["volume"]) == "volume: int64"
        np.testing.assert_array_equal(source[0:N]["volume"], NUMBERS)
        assert source[12]["volume"] == 2
        opening, offset = source.part(20, 25)
        with opening() as part:
            assert part[20 - offset : 25 - offset]["volume"].tolist() == [2] * 5
    assert "volume: int64" in cli("inspect", volumes, "--file-field", "volume").out
    for target, more in (("a.tfrecord", ()), ("b.zarr", ("--field", "slice"))):
        cli("convert", volumes, tmp_path / target, "--file-field", "volume", *more)
        with dsprep.open(tmp_path / target) as source:
            np.testing.assert_array_equal(source[0:N]["volume"], NUMBERS)
        cli("verify", volumes, tmp_path / target, "--file-field", "volume", *more)
    cli("repack", volumes, tmp_path / "set", "--file-field", "volume", "-b", 4, "--shuffle", 1,
         "--split", "a=0.5,b=0.5", "--group-by", "volume", "--to", "hdf5")  # fmt: skip
    parts = []
    for part in ("a", "b"):
        with dsprep.open(tmp_path / f"set-{part}.h5") as source:
            parts.append({s["volume"] for s in source})
    assert not parts[0] & parts[1]


def test_a_sidecar_has_the_file_as_a_field(volumes: Path) -> None:
    cli("provenance", volumes, "--file-field", "volume")
    cli("provenance", volumes, "--check", "--full")
    assert cli("provenance", volumes, "--locate", 5, "--json").json()
    with dsprep.Reader(volumes, 7) as reader:
        for batch in reader:
            np.testing.assert_array_equal(batch["volume"], NUMBERS[batch["y"]])
    for options in (None, OpenOptions(file_field="volume"), OpenOptions(fields=(spec("y"),))):
        with dsprep.open(volumes, options, through="strict") as source:
            np.testing.assert_array_equal(source[0:N]["volume"], NUMBERS)
    cli("provenance", volumes)  # again, as the sidecar states
    with dsprep.Sidecar.open(volumes) as sidecar:
        assert sidecar.read([3, 29], ["volume"])["volume"].tolist() == [0, 2]
    path = volumes.with_name("volumes.dsprep.json")
    content = json.loads(path.read_text())
    assert content["reading"] == {"file_field": "volume"}
    last = content["layouts"][-1]
    assert last["given"] == {"volume": {"which": 2}}
    last["given"] = {"volume": {"which": 1}}
    path.write_text(json.dumps(content))
    assert "volume" in cli("provenance", volumes, "--check", "--full", code=None).said


def spec(text: str) -> FieldSpec:
    return FieldSpec.parse(text)


def test_a_name_that_is_taken_is_refused(volumes: Path) -> None:
    with pytest.raises(DsprepError, match="--file-field y: there is a field of this name"):
        dsprep.open(volumes, OpenOptions(file_field="y"))
