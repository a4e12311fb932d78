"""Preparing data for benchmarks: what is read in place, what is written, and when again."""

from __future__ import annotations

import contextlib

import h5py
import numpy as np
import pytest

import dsprep
from dsprep.bench import scratch
from dsprep.core.schema import FieldSpec
from dsprep.errors import TargetError
from dsprep.formats.options import OpenOptions
from dsprep.storage.trees import remove

ALL = ("source", "groups", "hdf5", "lmdb", "tfrecord", "zarr")


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data" / "train.h5"
    path.parent.mkdir()
    with h5py.File(path, "w") as file:
        file["x"] = np.random.default_rng(0).random((64, 5, 7), dtype="f4")
        file["y"] = np.arange(64)
    return path


def plan(path, containers=ALL, fields=(), **more):
    reading = OpenOptions(fields=tuple(map(FieldSpec.parse, fields)))
    return scratch.plan([path], reading, containers, **more)


def writes(*words, **more):
    return written(plan(*words, **more))


def written(planned):
    return [name for name, form in planned.forms.items() if form.write is not None]


@contextlib.contextmanager
def opened(planned):
    """The forms of a plan, which go in the end."""
    try:
        scratch.prepare(planned)
        yield planned.forms
    finally:
        remove(planned.folder)


def values(path):
    with dsprep.open(path) as source:
        return {k: np.asarray(v) for k, v in source[0 : len(source)].items()}


def same(found, expected):
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], column) for name, column in expected.items())


def test_every_form_holds_the_samples_and_the_data_are_read_in_place(data):
    expected, planned = values(data), plan(data)
    assert planned.in_place == ("hdf5",)
    assert written(planned) == ["source", "groups", "lmdb", "tfrecord", "zarr"]
    assert (planned.samples, planned.of, planned.source) == (64, 64, "hdf5")
    assert planned.payload == 64 * (5 * 7 * 4 + 8)
    assert planned.needed > planned.payload * 4
    assert planned.folder.parent == data.parent
    assert not planned.folder.exists(), "a plan writes nothing"
    with opened(planned) as found:
        assert set(found) == set(ALL)
        assert found["hdf5"] == scratch.Form(path=data)
        for name in ("groups", "lmdb", "tfrecord", "zarr"):
            same(values(found[name].path), expected)
        source = found["source"]
        with dsprep.Reader(source.path, 8, data=source.data, rank=0, world_size=1) as reader:
            assert sum(len(b["y"]) for b in reader) == 64
        with dsprep.Sidecar.open(found["groups"].path) as sidecar:
            each = planned.buffer_nbytes // (planned.payload // planned.samples)
            assert sidecar.layout(0).groups.blocks.count == -(-planned.samples // each)
    assert [p.name for p in data.parent.iterdir()] == ["train.h5"], "all temporary files are gone"


@pytest.mark.parametrize("suffix", [".h5", ".lmdb", ".tfrecord", ".zarr"])
def test_what_dsprep_wrote_is_read_in_place(data, suffix):
    path = data.with_name(f"mine{suffix}")
    dsprep.convert(data, path, durable=False)
    planned = plan(path)
    assert planned.in_place == ("source", planned.source)


def test_nothing_is_written_where_all_is_there(data):
    dsprep.provenance(data)
    planned = plan(data, ["source", "hdf5"])
    assert (planned.in_place, planned.needed) == (("source", "hdf5"), 0)
    scratch.prepare(planned)
    assert planned.forms["source"] == scratch.Form(path=data)
    assert not planned.folder.exists()


def test_groups_are_read_in_place(data):
    path = data.with_name("grouped.h5")
    dsprep.repack(data, path, buffer_size=8)
    planned = plan(path, ["source", "groups", "hdf5"])
    assert planned.in_place == ("source", "groups")
    assert written(planned) == ["hdf5"], "a file in groups is not what h5py users have"
    with dsprep.Sidecar.open(path) as sidecar:
        assert planned.buffer_nbytes == sidecar.layout(0).groups.blocks.lengths.one(0)
    assert writes(path, ["groups"], buffer_size=4) == ["groups"]
    assert writes(path, ["groups"], buffer_size=16) == []
    assert writes(path, ["groups"], limit=1000) == ["groups"]


def test_other_files_are_converted(data):
    other = data.with_name("other.h5")
    with h5py.File(other, "w") as file:
        file["inside/x"] = np.zeros((8, 3))
    assert plan(other, ["hdf5"]).in_place == ("hdf5",)
    one = OpenOptions(sample_axis="none")
    assert written(scratch.plan([other], one, ["hdf5"])) == ["hdf5"], "the file is one sample"
    assert writes(data, ["hdf5"], fields=["x"]) == ["hdf5"]
    assert writes(data, ["source"], fields=["x"]) == ["source"]
    part = data.with_name("part2.h5")
    part.write_bytes(data.read_bytes())
    both = scratch.plan([data, part], OpenOptions(), ["hdf5", "source"])
    assert written(both) == ["hdf5", "source"]
    with opened(both) as found:
        source = found["source"]
        assert source.data == data.parent
        with dsprep.Sidecar.open(source.path, source.data) as sidecar:
            assert len(sidecar) == 128


def test_a_subset(data):
    planned = plan(data, limit=10 * 148 + 5, buffer_size="600B")
    assert (planned.samples, planned.of, planned.payload) == (10, 64, 1480)
    assert planned.buffer_nbytes == 600
    assert planned.not_copied == ("source",)
    expected = {k: v[:10] for k, v in values(data).items()}
    with opened(planned) as found:
        assert found["source"].numbers.tolist() == [*range(10)]
        for name in set(ALL) - {"source"}:
            assert found[name].numbers is None
            same(values(found[name].path), expected)
    assert plan(data, limit=1).samples == 1


def test_no_space(data, monkeypatch):
    monkeypatch.setattr(scratch, "free_nbytes", lambda path: 100)
    planned = plan(data, ["lmdb"])
    with pytest.raises(TargetError, match=r"not enough space .*100 B free.*--scratch"):
        scratch.prepare(planned)
    assert not planned.folder.exists()
