"""What `synth` writes is what the real writers write, as h5py, py-lmdb and a bare parser see it."""

from __future__ import annotations

import pickletools
import shlex
from pathlib import Path

import h5py
import lmdb
import numpy as np
import pytest

from dsprep.errors import TargetError, UsageError
from dsprep.synth import describe, names, synth

TINY = 1 / 32


def contents(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {"": path.read_bytes()}
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def listing(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


# --- a parser that shares nothing with the writer --------------------------------------------


def varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 0x80:
            return value, at


def message(data: bytes) -> list[tuple[int, int | bytes]]:
    fields, at = [], 0
    while at < len(data):
        tag, at = varint(data, at)
        value, at = varint(data, at)
        if tag & 7 == 2:
            value, at = data[at : at + value], at + value
        fields.append((tag >> 3, value))
    assert at == len(data)
    return fields


# --- what holds for every dataset ------------------------------------------------------------


@pytest.mark.parametrize("name", names())
def test_same_arguments_same_bytes_and_other_seed_other_bytes(name, tmp_path):
    seen = []
    made = synth(name, tmp_path / "a", samples=3, scale=TINY, progress=lambda *a: seen.append(a))
    synth(name, tmp_path / "b", samples=3, scale=TINY)
    synth(name, tmp_path / "c", samples=3, scale=TINY, seed=1)
    a, b, c = (contents(tmp_path / x) for x in "abc")
    assert a == b
    assert a.keys() == c.keys()
    assert a != c
    assert listing(tmp_path) == ["a", "b", "c"]
    assert (made.files, made.samples) == (len(a), 3)
    assert made.nbytes == sum(map(len, a.values()))
    words = shlex.split(made.open_hint)
    assert words[:2] == ["dsprep", "inspect"]
    assert Path(words[2]).exists()
    assert seen[-1] == (3, 3)
    assert seen == sorted(seen)
    assert synth(name, tmp_path / "one", samples=1, scale=TINY).samples == 1
    assert 20 < len(describe(name)) < 100
    assert "\n" not in describe(name)


def test_unknown_name_is_refused_with_the_names(tmp_path):
    for call in (lambda: describe("mnist"), lambda: synth("mnist", tmp_path / "x")):
        with pytest.raises(UsageError, match=r"cosmoflow-h5, .*nova"):
            call()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["oc20", "caffe-cifar"])
def test_an_existing_target_is_replaced_only_if_asked(name, tmp_path):
    out = tmp_path / "new" / "x"
    synth(name, out, samples=2, scale=TINY)
    before = contents(out)
    with pytest.raises(TargetError, match="exists already"):
        synth(name, out, samples=3, scale=TINY)
    assert contents(out) == before
    (out.parent / "x.dsprep.json").write_text("{}")
    synth(name, out, samples=3, scale=TINY, overwrite=True)
    assert contents(out) != before
    synth(
        "nova" if name == "caffe-cifar" else "deepcam", out, samples=1, scale=TINY, overwrite=True
    )
    assert listing(out.parent) == ["x"]


def test_an_interrupted_run_leaves_nothing(tmp_path):
    def interrupt(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    for name in ("oc20", "caffe-cifar", "cosmoflow-tfrecord", "deepcam", "cosmic-tagger"):
        with pytest.raises(KeyboardInterrupt):
            synth(name, tmp_path / "x", samples=4, scale=TINY, progress=interrupt)
        assert not list(tmp_path.iterdir())


# --- the record structures -------------------------------------------------------------------


def test_deepcam(tmp_path):
    synth("deepcam", tmp_path / "x", samples=4, scale=TINY)
    files = sorted((tmp_path / "x" / "train").iterdir())
    assert [p.name for p in files] == [f"data-1996-01-01-{h:02d}-0.h5" for h in (0, 3, 6)]
    assert len(list((tmp_path / "x" / "validation").glob("data-*.h5"))) == 1
    samples = []
    for path in files:
        with h5py.File(path) as file:
            data, labels = file["climate/data"], file["climate/labels_0"]
            assert (data.shape, data.dtype) == ((24, 36, 16), np.float32)
            assert (labels.shape, labels.dtype) == ((24, 36), np.int64)
            assert set(np.unique(labels)) <= {0, 1, 2}
            samples.append(data[:])
    with h5py.File(tmp_path / "x" / "stats.h5") as file:
        every = np.stack(samples).astype(np.float64)
        assert file["climate/count"][()] == 3
        np.testing.assert_allclose(file["climate/mean"][:], every.mean((0, 1, 2)), rtol=1e-5)
        np.testing.assert_allclose(file["climate/sqmean"][:], (every**2).mean((0, 1, 2)), rtol=1e-5)
        np.testing.assert_array_equal(file["climate/minval"][:], every.min((0, 1, 2)))
        np.testing.assert_array_equal(file["climate/maxval"][:], every.max((0, 1, 2)))


def lmdb_items(path: Path) -> tuple[dict[bytes, bytes], int]:
    with (
        lmdb.open(str(path), subdir=path.is_dir(), readonly=True, lock=False) as environment,
        environment.begin() as transaction,
    ):
        return dict(transaction.cursor()), environment.info()["last_txnid"]


def test_caffe_cifar(tmp_path):
    synth("caffe-cifar", tmp_path / "x", samples=12, scale=1)
    assert listing(tmp_path / "x") == ["data.mdb"]
    items, commits = lmdb_items(tmp_path / "x")
    assert list(items) == [b"%05d" % i for i in range(12)]
    assert commits == 1
    for value in items.values():
        assert len(value) == 3083
        *sizes, (_, data), (_, label) = message(value)
        assert sizes == [(1, 3), (2, 32), (3, 32)]
        assert len(data) == 3072
        assert 0 <= label < 10


def test_caffe_imageset_commits_every_thousand(tmp_path):
    synth("caffe-imageset", tmp_path / "x", samples=1001, scale=TINY)
    items, commits = lmdb_items(tmp_path / "x")
    assert commits == 2
    assert len(items) == 1001
    for i, (key, value) in enumerate(items.items()):
        assert key.startswith(b"%08d_n" % i)
        assert key.endswith(b".JPEG")
        found = dict(message(value))
        assert (found[1], found[2], found[3], found[7]) == (3, 8, 8, 0)
        assert len(found[4]) == 3 * 8 * 8


def test_oc20(tmp_path):
    synth("oc20", tmp_path / "data.0000.lmdb", samples=12, scale=0.2)
    assert listing(tmp_path) == ["data.0000.lmdb"]
    items, commits = lmdb_items(tmp_path / "data.0000.lmdb")
    assert commits == 13
    assert list(items) == sorted([b"%d" % i for i in range(12)] + [b"length"])
    sizes = [len(value) for key, value in items.items() if key != b"length"]
    assert len(set(sizes)) > 6
    dangerous = {"GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ"}
    for value in items.values():  # a pickle of plain values: no code would run
        assert value.startswith(b"\x80\x05")
        assert not dangerous & {opcode.name for opcode, _, _ in pickletools.genops(value)}
    numbers = [a for o, a, _ in pickletools.genops(items[b"length"]) if o.name == "BININT1"]
    assert numbers == [12]


def test_cosmic_tagger(tmp_path):
    synth("cosmic-tagger", tmp_path / "x.h5", samples=3, scale=0.1)
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["Events/event_id"].shape == (3,)
        wire = file["Data/sparse2d_sbndwire_group"]
        labels = file["Data/sparse2d_sbnd_cosmicseg_group"]
        for group in (wire, labels):
            assert all((d.compression, d.compression_opts) == ("gzip", 1) for d in group.values())
            assert group["extents"][:].tolist() == [(0, 3), (3, 3), (6, 3)]
            planes = group["voxel_extents"][:]
            ends = np.cumsum(planes["N"])
            np.testing.assert_array_equal(planes["first"], ends - planes["N"])
            assert ends[-1] == len(group["voxels"])
            assert planes["ID"].tolist() == [0, 1, 2] * 3
            meta = group["image_meta"][:]
            assert (meta["number_of_voxels"] == (205, 128)).all()
            for first, count, _ in planes.tolist():
                ids = group["voxels"][first : first + count]["id"].astype(np.int64)
                assert (np.diff(ids) > 0).all()
                assert ids.max() < 205 * 128
        np.testing.assert_array_equal(wire["voxels"]["id"], labels["voxels"]["id"])
        assert set(np.unique(labels["voxels"]["value"])) == {0, 1, 2}
