"""What `synth` writes is what the real writers write, as h5py, py-lmdb and a bare parser see it."""

from __future__ import annotations

import pickletools
import shlex
from pathlib import Path

import lmdb
import pytest
from support import fails

import dsprep
from dsprep.errors import TargetError, UsageError
from dsprep.formats.options import OpenOptions
from dsprep.synth import describe, names, synth

TINY = 1 / 32


def contents(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {"": path.read_bytes()}
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def listing(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


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
        fails(call, UsageError, "cosmoflow-h5, ", "oc20")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["oc20", "caffe-cifar"])
def test_an_existing_target_is_replaced_only_if_asked(name, tmp_path):
    out = tmp_path / "new" / "x"
    synth(name, out, samples=2, scale=TINY)
    before = contents(out)
    fails(lambda: synth(name, out, samples=3, scale=TINY), TargetError, "exists already")
    assert contents(out) == before
    (out.parent / "x.dsprep.json").write_text("{}")
    synth(name, out, samples=3, scale=TINY, overwrite=True)
    assert contents(out) != before
    other = "ffn-coords" if name == "caffe-cifar" else "deepcam"  # a file in place of a directory
    synth(other, out, samples=1, scale=TINY, overwrite=True)
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


def lmdb_items(path: Path) -> tuple[dict[bytes, bytes], int]:
    with (
        lmdb.open(str(path), subdir=path.is_dir(), readonly=True, lock=False) as environment,
        environment.begin() as transaction,
    ):
        return dict(transaction.cursor()), environment.info()["last_txnid"]


@pytest.mark.parametrize(
    ("name", "scale", "count", "key", "shape", "commits"),
    [("cifar", 1, 12, b"%05d", [3, 32, 32], 1), ("imageset", TINY, 1001, b"%08d_n", [3, 8, 8], 2)],
)
def test_caffe(name, scale, count, key, shape, commits, tmp_path):
    made = synth(f"caffe-{name}", tmp_path / "x", samples=count, scale=scale).path
    assert listing(made) == ["data.mdb"]
    items, found = lmdb_items(made)
    assert found == commits
    assert all(k.startswith(key % i) for i, k in enumerate(items))
    with dsprep.open(made, OpenOptions(values="datum")) as source:
        assert (source.schema["data"].dtype, source.schema["data"].shape) == ("u1", tuple(shape))
        assert source[0]["label"] < 1000
        assert len(source) == count


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
