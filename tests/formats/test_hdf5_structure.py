"""Ragged data by index tables, and files with a group per sample; doubt is refused."""

from __future__ import annotations

import re
from dataclasses import replace

import h5py
import numpy as np
import pytest
from hdf5_files import HDF5, opened, options
from support import NESTED, STRUCT, random_array, random_batch, raw, write_batch

import dsprep
from dsprep.core.schema import Arena, Field, Schema
from dsprep.errors import FormatError, SchemaError, UsageError

EXTENT = np.dtype([("first", "<u8"), ("N", "<u4"), ("ID", "<u4")])


def larcv(path, events=5, seed=0, planes=3):
    """Write a file with the structure of larcv3: two and three levels of tables."""
    rng = np.random.default_rng(seed)

    def table(counts, *, ids=True):
        out = np.zeros(len(counts), EXTENT if ids else EXTENT[["first", "N"]])
        out["N"], out["first"] = counts, np.cumsum(counts) - counts
        return out

    with h5py.File(path, "w") as file:

        def put(name, data):
            file.create_dataset(name, data=data, compression="gzip", maxshape=(None,))

        put("Events/event_id", np.zeros(events, [("run", "<i8"), ("event", "<i8")]))
        for group in ("sparse", "cluster"):
            put(f"Data/{group}_group/extents", table(np.full(events, planes), ids=False))
        voxels = rng.integers(0, 9, events * planes)
        put("Data/sparse_group/voxel_extents", table(voxels))
        put("Data/sparse_group/image_meta", np.arange(events * planes) * 1.5)
        put("Data/sparse_group/voxels", random_array(STRUCT, (int(voxels.sum()),)))
        clusters = rng.integers(0, 5, events * planes)
        put("Data/cluster_group/projection_extents", table(clusters))
        sizes = rng.integers(0, 4, int(clusters.sum()))
        put("Data/cluster_group/cluster_extents", table(sizes))
        put("Data/cluster_group/voxels", random_array(STRUCT, (int(sizes.sum()),), 5))
        particles = rng.integers(1, 7, events)
        put("Data/particle_group/extents", table(particles, ids=False))
        put("Data/particle_group/particles", random_array(NESTED, (int(particles.sum()),)))


@pytest.mark.parametrize(("events", "seed"), [(12, 2), (1, 3)])
def test_tables_over_several_levels(tmp_path, events, seed):
    larcv(tmp_path / "a", events, seed)
    with opened(tmp_path / "a") as source, h5py.File(tmp_path / "a") as file:
        assert len(source) == events
        assert set(source.schema.names) == {
            "Events/event_id",
            "Data/sparse_group/voxel_extents",
            "Data/sparse_group/image_meta",
            "Data/sparse_group/voxels",
            "Data/cluster_group/projection_extents",
            "Data/cluster_group/cluster_extents",
            "Data/cluster_group/voxels",
            "Data/particle_group/particles",
        }
        whole = source.read(0, events, Arena())
        for i in range(events):
            sample = source[i]
            for name, values in sample.items():
                assert raw(values) == raw(whole[name][i])
            g = file["Data/cluster_group"]
            first, n = g["extents"][i]
            planes = g["projection_extents"][first : first + n]
            begin, end = int(planes["first"][0]), int(planes["first"][-1] + planes["N"][-1])
            clusters = g["cluster_extents"][begin:end]
            found = sample["Data/cluster_group/cluster_extents"]
            assert raw(found) == raw(clusters)
            begin = int(clusters["first"][0]) if len(clusters) else 0
            end = begin + int(clusters["N"].sum())
            assert raw(sample["Data/cluster_group/voxels"]) == raw(g["voxels"][begin:end])
            assert sample["Data/sparse_group/image_meta"].tolist() == [
                (3 * i + k) * 1.5 for k in range(3)
            ]
        sizes = source.sizes(0, events)
        assert sizes.tolist() == [
            sum(np.asarray(v).nbytes for v in source[i].values()) for i in range(events)
        ]
        assert (
            "rows by Data/sparse_group/extents and"
            in source.storage()["Data/sparse_group/voxels"].storage
        )
        access = source.storage()["Data/sparse_group/voxels"].access
        assert access.endswith(", after reads of 2 index tables")


def test_explicit_tables(tmp_path):
    larcv(tmp_path / "a")
    s = "Data/sparse_group"
    with opened(
        tmp_path / "a", f"v={s}/voxels@{s}/extents@{s}/voxel_extents", "e=Events/event_id"
    ) as source:
        assert source.schema.names == ("v", "e")
        with opened(tmp_path / "a") as auto:
            for i in range(5):
                assert raw(source[i]["v"]) == raw(auto[i][f"{s}/voxels"])
    with h5py.File(tmp_path / "b", "w") as file:
        file["values"] = np.arange(10)
        file["where/from"], file["where/rows"] = [0, 4, 4], [4, 0, 6]
        file["triples"], file["floats"] = np.zeros((3, 3), int), np.zeros((3, 2))
        file["labels"], file["texts"] = [1, 2, 3], ["text"] * 10
    with opened(tmp_path / "b", "x=values@where/from,where/rows", "labels") as source:
        assert [len(source[i]["x"]) for i in range(3)] == [4, 0, 6]
    for bad, error in (
        ("x=values@where/from", UsageError),
        ("x=values@triples", UsageError),
        ("x=values@floats", UsageError),
        ("x=values@nothing", SchemaError),
        ("x=nothing@where/from,where/rows", SchemaError),
        ("x=labels@where/from,where/rows", FormatError),
        ("x=texts@where/from,where/rows", UsageError),  # h5py would write beyond the memory
    ):
        with pytest.raises(error), opened(tmp_path / "b", bad) as source:
            source.read(0, len(source))


@pytest.mark.parametrize("dtype", ["<i4", ">u8"])
@pytest.mark.parametrize("options", [{"chunks": (2, 2), "compression": "gzip"}])
def test_a_table_of_two_columns(tmp_path, dtype, options):
    index = np.array([(0, 4), (4, 0), (4, 6)], dtype)
    hits = random_array(np.dtype("<f4"), (10, 3))
    with h5py.File(tmp_path / "a", "w") as file:
        file["hits"], file["label"] = hits, np.arange(3)
        file.create_dataset("idx", data=index, **options)
        for name, wrong in (("gap", (5, 5)), ("far", (4, 7))):
            file[name] = np.array([(0, 4), (4, 0), wrong], dtype)
    with opened(tmp_path / "a", "h=hits@idx", "label") as source:
        assert source.schema["h"].shape == (None, 3)
        for i, (first, n) in enumerate(index.tolist()):
            assert raw(source[i]["h"]) == raw(hits[first : first + n])
        sizes = source.sizes(0, 3)
        assert sizes.tolist() == [48 + 8, 8, 72 + 8]
        assert source.storage()["h"].access.endswith(", after a read of its index table")
    for name in ("gap", "far"):
        with (
            opened(tmp_path / "a", f"h=hits@{name}") as source,
            pytest.raises(FormatError, match="does not fit its values"),
        ):
            source.read(0, 3)


def test_own_files_guess_nothing(tmp_path):
    """Fields that look like an index, or like one snapshot per file, are what they were."""
    i8 = np.dtype("<i8")
    schema = Schema((Field("first", i8), Field("count", i8), Field("values", i8)))
    batch = {"first": np.arange(4), "count": np.ones(4, "<i8"), "values": np.arange(4)}
    write_batch(HDF5, tmp_path / "a", schema, batch)
    with opened(tmp_path / "a") as source:
        assert source.schema == schema
    schema = Schema((Field("climate/data", i8, (2,)), Field("climate/labels_0", i8)))
    write_batch(HDF5, tmp_path / "b", schema, random_batch(schema, 3))
    with opened(tmp_path / "b") as source:
        assert len(source) == 3


# --- a group per sample -----------------------------------------------------------------------


def write_samples(path, count, parent="", name="sample{}"):
    """Write a group per sample, in an order that is not the natural one."""
    rng = np.random.default_rng(1)
    with h5py.File(path, "w") as file:
        for i in sorted(range(count), key=str):
            group = file.create_group(f"{parent}/{name.format(i)}".lstrip("/"))
            group["image"] = rng.integers(0, 255, (8, 6, 3), np.uint8)
            group.create_dataset("packed", data=np.full((4, 5), i, "f4"), compression="gzip")
            group["label"], group.attrs["odd"] = np.int64(i), i
            group["meta/points"] = rng.random((i % 5, 3)).astype(">f8")
            group["name"] = f"name {i}" * (i % 3)
        file["image"] = np.zeros(7)
        file["image"].attrs["unit"] = "dB"


@pytest.mark.parametrize("parent", ["", "data/all"])
def test_all_samples_in_natural_order(tmp_path, parent):
    write_samples(tmp_path / "a.h5", 25, parent)
    with (
        dsprep.open(tmp_path / "a.h5", options(axis="groups")) as source,
        h5py.File(tmp_path / "a.h5") as file,
    ):
        assert len(source) == 25
        assert source.schema.names == ("image", "label", "meta/points", "name", "packed")
        assert source.schema["meta/points"].shape == (None, 3)
        notes = "\n".join(source.notes)
        assert "left out image: not in the samples' groups" in notes
        assert re.search(r"attributes of .*sample0, .* and 21 more are not kept", notes), notes
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


def test_named_fields(tmp_path):
    write_samples(tmp_path / "a.h5", 12)
    with dsprep.open(
        tmp_path / "a.h5", options("label", "points=meta/points", axis="groups")
    ) as source:
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
    with pytest.raises(SchemaError, match=r"no field other\*"):
        dsprep.open(tmp_path / "a.h5", options("x=other*/image"))
    with pytest.raises(UsageError, match="a field of this name"):
        dsprep.open(tmp_path / "a.h5", replace(options(axis="groups"), keys_as="label"))
