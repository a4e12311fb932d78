"""Preparing data for benchmarks: what is read in place, what is written, and when again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import h5py
import numpy as np
import pytest

import dsprep
from dsprep.bench import scratch, strategies
from dsprep.bench.scratch import folder as scratch_folder
from dsprep.bench.strategies import Entry
from dsprep.core.schema import FieldSpec
from dsprep.errors import DsprepError, FormatError, TargetError, UnsupportedError, UsageError
from dsprep.formats.base import OpenOptions

ALL = ("source", "groups", "hdf5", "lmdb", "tfrecord", "zarr")


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    path = folder / "train.h5"
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file["x"] = rng.random((64, 5, 7), dtype="f4")
        file["y"] = np.arange(64)
    return path


def plan(path, containers=ALL, fields=(), **more):
    reading = OpenOptions(fields=tuple(map(FieldSpec.parse, fields)))
    return scratch.plan([path], reading, containers, **more)


def values(path, **more):
    with dsprep.open(path, **more) as source:
        return {k: np.asarray(v) for k, v in source[0 : len(source)].items()}


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, column in expected.items():
        assert np.array_equal(found[name], column)


def test_a_plain_file_is_read_in_place(data):
    planned = plan(data)
    assert planned.in_place == ("hdf5",)
    assert planned.writes == ("source", "groups", "lmdb", "tfrecord", "zarr")
    assert (planned.samples, planned.of, planned.source) == (64, 64, "hdf5")
    assert planned.payload == 64 * (5 * 7 * 4 + 8)
    assert planned.temporary
    assert not planned.folder.exists(), "a plan writes nothing"
    assert planned.folder.parent == data.parent
    assert planned.needed > planned.payload * 4


def test_every_form_holds_the_samples(data):
    expected = values(data)
    planned = plan(data)
    with scratch.opened([planned]) as prepare:
        made = prepare(planned)
        assert set(made) == set(ALL)
        for name in ("groups", "lmdb", "tfrecord", "zarr"):
            assert not made[name].in_place
            assert made[name].nbytes > 0
            same(values(made[name].path), expected)
        assert made["hdf5"] == scratch.Prepared(data, data.stat().st_size, True)
        with dsprep.Reader(
            made["source"].path, 8, data=made["source"].data, rank=0, world_size=1
        ) as r:
            assert sum(len(b["y"]) for b in r) == 64
        with dsprep.Sidecar.open(made["groups"].path) as opened:
            assert opened.layout(0).groups.blocks.count == scratch_groups(planned)
    assert [p.name for p in data.parent.iterdir()] == ["train.h5"], "all temporary files are gone"


def scratch_groups(planned):
    each = planned.payload // planned.samples
    return -(-planned.samples // (planned.buffer_nbytes // each))


def test_temporary_folder_goes_when_interrupted(data):
    planned = plan(data, ["lmdb"])
    with pytest.raises(KeyboardInterrupt), scratch.opened([planned]) as prepare:  # noqa: PT012
        prepare(planned)
        assert planned.folder.exists()
        raise KeyboardInterrupt
    assert not planned.folder.exists()


def test_nothing_is_written_where_all_is_there(data):
    dsprep.provenance(data)
    planned = plan(data, ["source", "hdf5"])
    assert planned.in_place == ("source", "hdf5")
    assert not planned.writes
    assert planned.needed == 0
    with scratch.opened([planned]) as prepare:
        made = prepare(planned)
        assert not planned.folder.exists()
    assert made["source"].path == data
    assert made["source"].data is None


@pytest.mark.parametrize("format", ["hdf5", "lmdb", "tfrecord", "zarr"])
def test_what_dsprep_wrote_is_read_in_place(data, format):
    path = data.with_name("mine" + {"hdf5": ".h5"}.get(format, f".{format}"))
    dsprep.convert(data, path)
    planned = plan(path)
    assert planned.in_place == ("source", format)


def test_groups_are_read_in_place(data):
    path = data.with_name("grouped.h5")
    dsprep.repack(data, path, buffer_size=8)
    planned = plan(path, ["source", "groups", "hdf5"])
    assert planned.in_place == ("source", "groups")
    assert planned.writes == ("hdf5",), "a file in groups is not what h5py users have"
    with dsprep.Sidecar.open(path) as opened:
        assert planned.buffer_nbytes == opened.layout(0).groups.blocks.lengths.one(0)
    smaller = plan(path, ["groups"], buffer_size=4)
    assert smaller.writes == ("groups",)
    assert plan(path, ["groups"], buffer_size=16).in_place == ("groups",)
    assert plan(path, ["groups"], limit=1000).writes == ("groups",)


def test_other_files_are_converted(data, tmp_path):
    other = data.with_name("other.h5")
    with h5py.File(other, "w") as file:
        file["inside/x"] = np.zeros((8, 3))
    assert plan(other, ["hdf5"]).in_place == ("hdf5",)
    one = OpenOptions(sample_axis="none")
    assert scratch.plan([other], one, ["hdf5"]).writes == ("hdf5",), "the file is one sample"
    assert plan(data, ["hdf5"], fields=["x"]).writes == ("hdf5",)
    assert plan(data, ["source"], fields=["x"]).same == {"source": "hdf5"}
    part = data.with_name("part2.h5")
    part.write_bytes(data.read_bytes())
    both = scratch.plan([data, part], OpenOptions(), ["hdf5", "source"])
    assert both.writes == ("hdf5", "source")
    with scratch.opened([both]) as prepare:
        made = prepare(both)
        assert made["source"].data == data.parent
        with dsprep.Sidecar.open(made["source"].path, made["source"].data) as opened:
            assert len(opened) == 128


def test_foreign_records_are_converted(data):
    path = data.with_name("odd.lmdb")
    dsprep.convert(data, path, write_options=dsprep.WriteOptions(key_format="k{index:05d}"))
    assert plan(path, ["lmdb"]).writes == ("lmdb",)
    dsprep.convert(data, data.with_name("z.tfrecord"), compress="gzip")
    planned = plan(data.with_name("z.tfrecord"), ["source", "tfrecord"])
    assert planned.same == {"source": "tfrecord"}
    assert planned.writes == ("tfrecord",)
    assert any("cannot be located" in n for n in planned.notes)


def test_a_subset(data):
    planned = plan(data, limit=10 * 148 + 5, buffer_size="600B")
    assert (planned.samples, planned.of, planned.payload) == (10, 64, 1480)
    assert planned.buffer_nbytes == 600
    assert planned.in_place == ()
    expected = {k: v[:10] for k, v in values(data).items()}
    with scratch.opened([planned]) as prepare:
        made = prepare(planned)
        assert made["source"] == made["hdf5"]
        for name in ALL:
            same(values(made[name].path), expected)
    assert plan(data, limit=1).samples == 1


def test_a_subset_of_ragged_samples(tmp_path):
    source = tmp_path / "r.h5"
    with h5py.File(source, "w") as file:
        lengths = np.arange(1, 41)
        file["first"] = np.cumsum(lengths) - lengths
        file["count"] = lengths
        file["values"] = np.arange(lengths.sum(), dtype="f8")
    path = tmp_path / "r.lmdb"
    dsprep.convert(source, path, fields=["v=values@first,count"])
    planned = plan(path, ["groups", "source", "zarr"], limit=8 * 15)
    assert (planned.samples, planned.payload) == (5, 120)
    with scratch.opened([planned]) as prepare:
        made = prepare(planned)
        with dsprep.open(made["groups"].path) as opened:
            assert [len(opened[i]["v"]) for i in range(5)] == [1, 2, 3, 4, 5]


def test_a_folder_is_kept_and_used_again(data, tmp_path):
    folder = tmp_path / "kept"
    containers = ("groups", "lmdb")
    first = plan(data, containers, folder=folder)
    assert not first.temporary
    with scratch.opened([first]) as prepare:
        made = prepare(first)
    inode = made["lmdb"].path.stat().st_ino
    again = plan(data, (*containers, "zarr"), folder=folder)
    assert again.cached == containers
    assert again.writes == ("zarr",)
    assert again.needed < first.needed
    found = scratch.prepare(again)
    assert found["lmdb"].path.stat().st_ino == inode
    assert plan(data, ["groups"], folder=folder, buffer_size=3).writes == ("groups",)
    assert plan(data, ["lmdb"], folder=folder, limit=500).writes == ("lmdb",)


def test_changed_data_are_converted_again(data, tmp_path):
    folder = tmp_path / "kept"
    old = scratch.prepare(plan(data, ["lmdb"], folder=folder))["lmdb"].path
    with h5py.File(data, "a") as file:
        file["y"][0] = 77
    os.utime(data, ns=(1, 1))
    planned = plan(data, ["lmdb"], folder=folder)
    assert planned.writes == ("lmdb",)
    made = scratch.prepare(planned)["lmdb"].path
    assert values(made)["y"][0] == 77
    assert not old.exists(), "what can never be used again is removed"


def truncated(content):
    return content[:-5]


def overwritten(content):
    middle = len(content) // 2
    return content[:middle] + b"\xff" * 64 + content[middle + 64 :]


@pytest.mark.parametrize("damage", [truncated, overwritten])
def test_what_is_damaged_is_written_again(data, tmp_path, damage):
    folder = tmp_path / "kept"
    path = scratch.prepare(plan(data, ["tfrecord"], folder=folder))["tfrecord"].path
    assert not plan(data, ["tfrecord"], folder=folder).writes
    path.write_bytes(damage(path.read_bytes()))
    planned = plan(data, ["tfrecord"], folder=folder)
    assert planned.writes == ("tfrecord",)
    same(values(scratch.prepare(planned)["tfrecord"].path), values(data))


class Peer:
    fail = False

    @staticmethod
    def write(source, target):
        target.mkdir()
        (target / "one").write_bytes(b"1" * len(source))
        if Peer.fail:
            raise KeyboardInterrupt


@pytest.fixture
def peer(monkeypatch):
    class Known(Entry):
        def load(self):
            return Peer

    monkeypatch.setitem(strategies.STRATEGIES, "peer", Known("x:Y", "own", "", optional=True))
    monkeypatch.setattr(Peer, "fail", False)
    return Peer


def test_own_form(data, tmp_path, peer, monkeypatch):
    folder = tmp_path / "kept"
    peer.fail = True
    with pytest.raises(KeyboardInterrupt):
        scratch.prepare(plan(data, ["own:peer"], folder=folder, limit=1000))
    assert [p.name for p in folder.iterdir()] == [".lock"]
    planned = plan(data, ["own:peer"], folder=folder, limit=1000)
    assert planned.writes == ("own:peer",), "an interrupted form is not taken for a whole one"
    left = planned.items["own:peer"].directory
    (left.with_name(f"{left.name}.partial")).mkdir()  # a killed run cannot tidy up
    peer.fail = False
    made = scratch.prepare(planned)["own:peer"]
    assert (made.path / "one").read_bytes() == b"1" * 6
    assert plan(data, ["own:peer"], folder=folder, limit=1000).cached == ("own:peer",)

    def broken(source, target):
        raise ZeroDivisionError("a bug of the peer")

    monkeypatch.setattr(Peer, "write", staticmethod(broken))
    with pytest.raises(DsprepError, match=r"peer could not write .*ZeroDivisionError"):
        scratch.prepare(plan(data, ["own:peer"], folder=folder))
    monkeypatch.setattr(Peer, "write", staticmethod(lambda source, target: None))
    with pytest.raises(OSError, match="wrote nothing"):
        scratch.prepare(plan(data, ["own:peer"], folder=folder))


def test_what_cannot_be_had_says_why(data, monkeypatch):
    missing = Entry("x:Y", "own", "", ("no_such_package",), optional=True)
    monkeypatch.setitem(strategies.STRATEGIES, "gone", missing)
    planned = plan(data, ["own:gone", "hdf5"])
    assert planned.impossible == {"own:gone": "no_such_package is not installed"}
    made = scratch.prepare(planned)
    assert set(made) == {"hdf5"}
    with pytest.raises(UnsupportedError, match="no_such_package"):
        made["own:gone"]


def test_no_space(data, monkeypatch):
    monkeypatch.setattr(scratch_folder, "free_nbytes", lambda path: 100)
    planned = plan(data, ["lmdb"])
    with pytest.raises(TargetError, match=r"not enough space .*100 B free.*--scratch"):
        scratch.prepare(planned)
    assert not planned.folder.exists()


def test_two_at_once(data, tmp_path):
    folder = tmp_path / "kept"
    folder.mkdir()
    planned = plan(data, ["lmdb"], folder=folder)
    with scratch_folder.locked(folder), pytest.raises(TargetError, match="another dsprep bench"):
        scratch.prepare(planned)


def test_buffers(data):
    assert plan(data, ["groups"]).buffer_nbytes == 64 * 148 // 8
    assert plan(data, ["groups"], buffer_size="auto").buffer_nbytes == 64 * 148 // 8
    assert plan(data, ["groups"], buffer_size=16).buffer_nbytes == 16 * 148
    assert plan(data, ["groups"], buffer_size="16").group_text == "16"
    assert plan(data, ["groups"], buffer_size="1B").buffer_nbytes == 148
    assert plan(data, ["groups"], limit=1).buffer_nbytes == 148


def test_wrong_usage(data, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="not a form"):
        plan(data, ["parquet"])
    with pytest.raises(UsageError, match="--buffer-size"):
        plan(data, ["groups"], buffer_size="much")
    with pytest.raises(UsageError, match="not a folder"):
        plan(data, ["groups"], folder=data)
    with pytest.raises(UsageError, match="part of the dataset"):
        plan(data.parent, ["groups"], folder=data.parent / "inside")
    assert plan(data.parent, ["groups"]).folder.parent == tmp_path
    empty = tmp_path / "empty.h5"
    with h5py.File(empty, "w") as file:
        file["x"] = np.zeros((0, 3))
    with pytest.raises(FormatError, match="no samples"):
        plan(empty, ["groups"])
    monkeypatch.setattr(scratch_folder.os, "access", lambda path, mode: False)
    with pytest.raises(UsageError, match="--scratch"):
        plan(data, ["groups"])
    with pytest.raises(UsageError, match="--scratch"):
        plan(data, ["groups"], folder=tmp_path / "new")


def test_remarks(data, tmp_path, monkeypatch):
    packed = data.with_name("packed.h5")
    dsprep.convert(data, packed, compress="gzip")
    assert any("compressed" in n for n in plan(packed, ["groups"]).notes)
    memory = Path("/dev/shm")
    if memory.is_dir() and memory.stat().st_dev != tmp_path.stat().st_dev:
        notes = plan(data, ["lmdb"], folder=memory / "dsprep-none").notes
        assert any("another file system" in n for n in notes)


def test_zarr_has_few_files_and_small_chunks():
    from dsprep.core.schema import Field, Schema

    small = Schema((Field("x", np.dtype("f4"), (8,)),))
    large = Schema((Field("x", np.dtype("f4"), (64, 64)), Field("y", np.dtype("i8"), ())))
    assert scratch_options(small, 10_000) == (128, 0)
    assert scratch_options(large, 1000) == (1, 0)
    assert scratch_options(large, 100_000) == (1, 256)


def scratch_options(schema, samples):
    from dsprep.bench.scratch.planning import zarr_options

    options = zarr_options(schema, samples)
    return options.chunk, options.zarr_shard


def test_told_of_is_json(data, tmp_path):
    folder = tmp_path / "kept"
    made = scratch.prepare(plan(data, ["zarr"], folder=folder))["zarr"]
    told = json.loads((made.path.parent / "made.json").read_bytes())
    assert told["from"]["container"] == "zarr"
    assert told["mark"]["status"][1] == made.nbytes
