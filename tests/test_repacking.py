"""Repacking: the same values, groups that one read fetches, splits that do not leak."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from oracles import SUFFIX
from record_checks import taken
from support import (
    MIXED,
    assert_same_batch,
    cli,
    cli_error,
    fails,
    files_of,
    flip,
    random_batch,
    reading,
    written,
)

import dsprep
from dsprep.core.schema import Field, Schema
from dsprep.errors import FormatError, TargetError, UsageError
from dsprep.reader.units import group_edges
from dsprep.source.from_sidecar import SidecarSource
from dsprep.storage import scatter
from dsprep.verbs import repack
from dsprep.writing import run as making
from dsprep.writing import shuffle
from dsprep.writing.job import RunOptions
from dsprep.writing.staging import Staging

FIXED = Schema(
    (
        Field("image", np.dtype("<f4"), (40, 30)),
        Field("label", np.dtype("<i8")),
        Field("id", np.dtype(">u2"), (3,)),
    )
)
TARGETS = [*sorted(SUFFIX), "zip"]
COUNT = 700


def name_of(target: str) -> str:
    return "out.zarr.zip" if target == "zip" else f"out{SUFFIX[target]}"


@pytest.fixture(scope="module")
def origins(tmp_path_factory):
    """Two datasets, with their samples."""
    made = {}
    for name, schema in (("fixed", FIXED), ("mixed", MIXED)):
        path = tmp_path_factory.mktemp("origin") / "origin.h5"
        batch = random_batch(schema, COUNT, seed=1)
        if name == "mixed":
            batch["label"] = np.arange(COUNT, dtype="<i8")
        else:
            batch["label"] = np.arange(COUNT, dtype="<i8") // 7
        made[name] = schema, batch, written(path, schema, batch)
    return made


@pytest.fixture
def origin(origins):
    return origins["fixed"][2]


def repacked(path: Path, target: Path, **options):
    options = {"buffer_size": 64, "stripe_size": "4KiB", "durable": False, **options}
    return dsprep.repack(path, target, **options)


@pytest.mark.parametrize("target", TARGETS)
def test_groups_in_any_order(target, origins, tmp_path):
    schema, batch, origin = origins["mixed"]
    out = tmp_path / name_of(target)
    plan = repacked(origin, out).parts[0][0]
    with dsprep.open(out) as source:
        assert isinstance(source, SidecarSource)
        order = np.random.default_rng(0).permutation(COUNT)
        assert_same_batch(source.sidecar.read(order), taken(batch, schema, order), schema)
        edges = group_edges(source.sidecar)
        assert len(edges) - 1 == plan.groups
        assert edges[-1] == COUNT


@pytest.mark.parametrize("target", ["hdf5", "lmdb", "tfrecord", "zip"])
def test_one_read_fetches_a_group(target, origins, tmp_path, monkeypatch):
    schema, batch, origin = origins["fixed"]
    out = tmp_path / name_of(target)
    report = repacked(origin, out)
    assert report.parts[0][0].plans[0].reads == 1
    calls = []
    with dsprep.Sidecar.open(out) as opened:
        opened.read(slice(0, 64))  # opens files and reads small tables
        for module, name in ((os, "preadv"), (scatter, "_call")):
            real = getattr(module, name)
            counted = lambda *a, real=real: calls.append(a) or real(*a)  # noqa: E731
            monkeypatch.setattr(module, name, counted)
        found = opened.read(slice(128, 192))
    assert len(calls) == 1
    assert_same_batch(found, taken(batch, schema, range(128, 192)), schema)


def test_verify_compares_checksums(origin, tmp_path):
    """Damage that the cheap check cannot see, in a field that is not compared."""
    out = tmp_path / "out.h5"
    repacked(origin, out, stripe_size="64KiB")
    with dsprep.Sidecar.open(out) as opened:
        _, _, offset, _ = opened.locate([330], "image")
    flip(out, int(offset[0]) + 7, keep_time=True)
    with dsprep.Sidecar.open(out) as opened:
        opened.read([330], ["label"])
        opened.read([5, 300], verify="full")
        fails(lambda: opened.read([5, 331], verify="full"), FormatError, "group 5")
    label = reading("label")
    with dsprep.open(origin, label) as a, dsprep.open(out, label) as b:
        assert isinstance(b, SidecarSource)
        verdict = dsprep.verify(a, b)
    assert not verdict.same
    assert "group 5" in verdict.problems[0]
    assert any("CRC-32C of group 5" in p.what for p in dsprep.check(out, full=True))


@pytest.mark.parametrize("memory", ["64MB", "1.5MB"])
def test_a_global_shuffle(memory, origins, tmp_path):
    schema, batch, origin = origins["fixed"]
    options = {"shuffle": 5, "memory": memory, "workers": 1}
    try:
        repacked(origin, tmp_path / "a.h5", **options)
    except UsageError:
        options["memory"] = "48MB"
        repacked(origin, tmp_path / "a.h5", **options)
    repacked(origin, tmp_path / "b.h5", **options)
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()
    with dsprep.open(tmp_path / "a.h5") as source:
        found = source[:]
    order = np.lexsort([found["image"][:, 0, 0].view("<u4"), found["label"]])
    same = np.lexsort([batch["image"][:, 0, 0].view("<u4"), batch["label"]])
    assert_same_batch(taken(found, schema, order), taken(batch, schema, same), schema)
    assert (found["label"] != batch["label"]).mean() > 0.9
    content = json.loads((tmp_path / "a.h5.dsprep.json").read_text())
    assert content["lineage"]["shuffle"] == 5


def test_splits_do_not_leak(origin, tmp_path):
    shares = "train=0.7,val=0.2,test=0.1"
    report = repacked(
        origin, tmp_path / "set.h5", split=shares, group_by="label", shuffle=2, duplicate=2
    )
    assert [p.split for p, _ in report.parts] == ["train", "val", "test"]
    seen, total = [], 0
    for name in ("train", "val", "test"):
        with dsprep.open(tmp_path / f"set-{name}.h5") as source:
            labels = source[:]["label"]
        counts = np.bincount(labels)
        assert set(counts[counts > 0].tolist()) == {14 if name == "train" else 7}
        if name != "train":
            assert (np.diff(labels) >= 0).all()  # in their own order
        seen.append(set(labels.tolist()))
        total += len(labels) // (2 if name == "train" else 1)
    assert total == COUNT
    assert sum(map(len, seen)) == len(set.union(*seen))


@pytest.mark.parametrize("target", ["hdf5", "tfrecord"])
def test_groups_never_straddle_files(target, origins, tmp_path):
    schema, batch, origin = origins["fixed"]
    report = repacked(origin, tmp_path / "out", to=target, shard_size=200)
    assert [len(s) for s in report.parts[0][0].shards] == [192, 192, 192, 124]
    with dsprep.open(tmp_path / "out") as source:
        assert_same_batch(source[:], batch, schema)
        assert group_edges(source.sidecar).tolist() == [*range(0, 641, 64), 700]


def test_groups_outlive_a_new_sidecar(origins, tmp_path):
    """No file tells its groups: they are kept while the data are as they were."""
    origin = origins["fixed"][2]
    out = tmp_path / "out"
    repacked(origin, out, to="hdf5", buffer_size=100, shard_size=200)
    with dsprep.Sidecar.open(out) as opened:
        before = opened.content.layouts
    assert dsprep.provenance(out).content.layouts == before
    file = sorted(out.iterdir())[1]
    os.utime(file)
    touched = dsprep.provenance(out).content
    assert touched.layouts == before
    assert touched.files[1].identity.is_exact(file)
    with dsprep.Sidecar.open(out) as opened:
        offsets = opened.locate(range(200, 400), "image")[2].tolist()
    for offset in offsets:  # some of them are in blocks that are sampled
        flip(file, offset)
    after = dsprep.provenance(out).content.layouts
    assert after[0]["columns"] == before[0]["columns"]
    assert "groups" not in after[0]
    assert dsprep.check(out, full=True) == []


def test_the_lineage_names_what_ran(origins, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lib/dsprep/__main__.py", "repack", "a", "b"])
    repacked(origins["fixed"][2], tmp_path / "out.h5")
    content = json.loads((tmp_path / "out.h5.dsprep.json").read_text())
    assert content["lineage"]["command"] == "dsprep repack a b"


@pytest.mark.parametrize("words", ["-b 0", "--split a=2", "--group-by label"])
def test_wrong_usage_is_one_line(words, origins, tmp_path):
    words = words.split()
    assert words[-2] in cli_error("repack", origins["fixed"][2], tmp_path / "o.h5", *words, code=2)
    assert not list(tmp_path.iterdir())


def test_warnings_are_of_the_json(origins, tmp_path):
    words = ("-b", "1MiB", "--ranks", "50", "--epochs", "900", "--json", "--dry-run")
    found = cli("repack", origins["fixed"][2], tmp_path / "out.h5", *words).json()
    assert (found["format"], found["parts"][0]["groups"]) == ("hdf5", 4)
    assert [w for w in ("ranks", "N/G") if w not in str(found["warnings"])] == []


class Killed(BaseException):
    """Stands for the end of the process."""


def test_interrupted_splits_go_on_with_what_is_missing(origin, tmp_path, monkeypatch):
    whole, done = tmp_path / "whole", []
    whole.mkdir()
    options = {"split": "train=0.5,val=0.3,test=0.2", "shuffle": 1}
    repacked(origin, whole / "set.h5", **options)

    def or_die(patch, owner, name, after):
        real = getattr(owner, name)

        def wrapped(*args, **kwargs):
            if isinstance(sys.exception(), Killed):  # it cleans up
                return real(*args, **kwargs)
            if len(done) == after:
                raise Killed
            done.append(name)
            return real(*args, **kwargs)

        patch.setattr(owner, name, wrapped)

    for after in (0, 2, 3, 4, 6, 7, 8):
        broken = tmp_path / f"{after}"
        broken.mkdir()
        done.clear()
        with monkeypatch.context() as patch:
            or_die(patch, making, "make_output", after)
            or_die(patch, Staging, "publish", after)
            or_die(patch, Staging, "discard", after)
            with pytest.raises(Killed):
                repacked(origin, broken / "set.h5", **options)
        seen = [p for p in broken.iterdir() if p.suffix == ".h5"]
        assert len(seen) == min(3, max(0, after - 3))  # none before all have been made
        if after < 7:
            report = repacked(origin, broken / "set.h5", **options)
            assert [r.copied == 0 for _, r in report.parts] == [i < after for i in range(3)]
        else:  # all had been made: only records of it are left
            fails(lambda: repacked(origin, broken / "set.h5", **options), TargetError, "exists")
        assert files_of(broken) == files_of(whole)


def test_all_targets_are_checked_before_one_is_made(origin, tmp_path):
    (tmp_path / "set-test.h5").write_bytes(b"precious")
    with pytest.raises(TargetError, match="exists"):
        repacked(origin, tmp_path / "set.h5", split="train=0.5,test=0.5")
    assert [p.name for p in tmp_path.iterdir()] == ["set-test.h5"]


@pytest.mark.parametrize("name", ["o.zip", "o.zarr.zip"])
def test_parts_and_shards_of_zip_stores_are_zip_stores(name, origins, tmp_path):
    schema, batch, origin = origins["fixed"]
    repacked(origin, tmp_path / name, to="zarr", split="a=0.5,b=0.5")
    ending = name[1:]
    for part in "ab":
        assert zipfile.is_zipfile(tmp_path / f"{name[0]}-{part}{ending}")
    repacked(origin, tmp_path / name, to="zarr", shard_size=192)
    assert all(map(zipfile.is_zipfile, (tmp_path / name).iterdir()))
    with dsprep.open(tmp_path / name) as source:
        assert_same_batch(source[:], batch, schema)


def test_a_killed_first_pass_is_continued(origin, tmp_path, monkeypatch):
    """Its record is not discarded with the rest, and its files go in the end."""
    options = {"shuffle": 5, "memory": "40MB", "workers": 1, "durable": True}
    monkeypatch.setattr(shuffle, "_choose", lambda *_: "buckets")
    monkeypatch.setattr(shuffle, "UNSYNCED_NBYTES", 0)
    repacked(origin, tmp_path / "a.h5", **options)

    def die(*_):
        raise Killed

    monkeypatch.setattr(making, "write_shard", die)
    with pytest.raises(Killed):
        repacked(origin, tmp_path / "b.h5", **options)
    assert (tmp_path / ".b.h5.dsprep-partial" / "shuffle" / "part-0").exists()
    monkeypatch.undo()
    monkeypatch.setattr(shuffle, "_choose", lambda *_: "buckets")
    monkeypatch.setattr(shuffle, "UNSYNCED_NBYTES", 0)
    monkeypatch.setattr(shuffle, "write_runs", die)  # nothing is dealt again
    repacked(origin, tmp_path / "b.h5", **options)
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()
    assert not (tmp_path / ".b.h5.dsprep-partial").exists()


def test_the_source_is_never_the_target(origin):
    fails(lambda: repacked(origin, origin), UsageError, "holds the source")


def test_all_splits_fit_or_none_is_made(origin, tmp_path, monkeypatch):
    options = {"split": "a=0.5,b=0.5"}
    needed = 700 * FIXED.fixed_nbytes
    free = [needed * 3 // 4]  # for one of two
    monkeypatch.setattr("dsprep.writing.job.free_nbytes", lambda path: free[0])
    fails(lambda: repacked(origin, tmp_path / "set.h5", **options), TargetError, "not enough space")
    assert not list(tmp_path.iterdir())
    free[0] = 2 * needed
    repacked(origin, tmp_path / "set.h5", **options)
    fails(lambda: repacked(origin, tmp_path / "set.h5", **options), TargetError, "exists")
    free[0] = needed * 3 // 4  # the old ones stay until all new ones are complete
    with pytest.raises(TargetError, match="not enough space"):
        repacked(origin, tmp_path / "set.h5", overwrite=True, **options)


@pytest.mark.parametrize(
    ("command", "source", "target", "refused"),
    [
        ("repack", "set", "set/x.h5", True),
        ("convert", "set", "set/deep/x.zarr", True),
        ("repack", "set/*.h5", "set/x.zarr", False),
        ("convert", "set/a?.h5", "set/x.h5", False),
    ],
)
def test_the_target_is_no_part_of_the_source_to_come(
    command, source, target, refused, origin, tmp_path, monkeypatch
):
    (tmp_path / "set" / "deep").mkdir(parents=True)
    for name in ("a1.h5", "a2.h5"):
        (tmp_path / "set" / name).write_bytes(origin.read_bytes())
    monkeypatch.chdir(tmp_path)
    for more in (["--dry-run"], []):
        done = cli(command, source, target, *more, code=2 if refused else 0)
        if refused:
            assert f"the target is in {source}" in done.said
            assert not (tmp_path / target).exists()


@pytest.mark.parametrize("target", ["hdf5", "zarr", "zip"])
def test_groups_of_ragged_samples_keep_within_the_bytes_asked_for(target, origins, tmp_path):
    _, _, origin = origins["mixed"]
    options, memory = repack.RepackOptions(buffer_size="16KiB"), RunOptions(memory=1 << 30)
    with dsprep.open(origin) as source:
        plan = repack.plan_repack(source, tmp_path / name_of(target), options, memory)
        assert 4096 < plan.parts[0].plans[0].group_nbytes <= 16 << 10
    report = repacked(origin, tmp_path / name_of(target), buffer_size="16KiB")
    assert report.parts[0][0].groups > 2
