"""Ragged data in HDF5: index tables are found, followed and shown."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import h5py
import ml_dtypes
import numpy as np
import pytest
from support import NESTED, STRUCT, random_array, random_batch, raw, schemas, write_batch

from dsprep.core.schema import Arena, Field, FieldSpec, Ragged, Schema
from dsprep.errors import FormatError, SchemaError, UsageError
from dsprep.formats.base import Compression, OpenOptions, WriteOptions
from dsprep.formats.hdf5 import Hdf5
from dsprep.formats.hdf5.source import Hdf5Source

HDF5 = Hdf5()
EXTENT = np.dtype([("first", "<u8"), ("N", "<u4"), ("ID", "<u4")])


def opened(path: Path, *fields: str, axis: str = "auto") -> Hdf5Source:
    specs = tuple(map(FieldSpec.parse, fields))
    source = HDF5.open(path, OpenOptions(fields=specs, sample_axis=axis), None)  # type: ignore[arg-type]
    assert isinstance(source, Hdf5Source)
    return source


def larcv(path: Path, events: int = 5, seed: int = 0, planes: int = 3) -> None:
    """Write a file with the structure of larcv3: two and three levels of tables."""
    rng = np.random.default_rng(seed)

    def table(counts: np.ndarray, *, ids: bool = True) -> np.ndarray:
        out = np.zeros(
            len(counts),
            EXTENT
            if ids
            else np.dtype(
                {
                    "names": ["first", "N"],
                    "formats": ["<u8", "<u4"],
                    "offsets": [0, 8],
                    "itemsize": 16,
                }
            ),
        )
        out["N"] = counts
        out["first"] = np.cumsum(counts) - counts
        return out

    with h5py.File(path, "w") as file:
        gz = {"compression": "gzip", "maxshape": (None,)}
        file.create_dataset(
            "Events/event_id", data=np.zeros(events, [("run", "<i8"), ("event", "<i8")]), **gz
        )
        g = file.create_group("Data/sparse_group")
        g.create_dataset("extents", data=table(np.full(events, planes), ids=False), **gz)
        voxels = rng.integers(0, 9, events * planes)
        g.create_dataset("voxel_extents", data=table(voxels), **gz)
        g.create_dataset("image_meta", data=np.arange(events * planes) * 1.5, **gz)
        g.create_dataset("voxels", data=random_array(STRUCT, (int(voxels.sum()),)), **gz)
        c = file.create_group("Data/cluster_group")
        c.create_dataset("extents", data=table(np.full(events, planes), ids=False), **gz)
        clusters = rng.integers(0, 5, events * planes)
        c.create_dataset("projection_extents", data=table(clusters), **gz)
        sizes = rng.integers(0, 4, int(clusters.sum()))
        c.create_dataset("cluster_extents", data=table(sizes), **gz)
        c.create_dataset("voxels", data=random_array(STRUCT, (int(sizes.sum()),), 5), **gz)
        p = file.create_group("Data/particle_group")
        particles = rng.integers(1, 7, events)
        p.create_dataset("extents", data=table(particles, ids=False), **gz)
        p.create_dataset("particles", data=random_array(NESTED, (int(particles.sum()),)), **gz)


@pytest.mark.parametrize(("events", "seed"), [(5, 0), (5, 1), (12, 2), (1, 3), (40, 4)])
def test_tables_over_several_levels(tmp_path: Path, events: int, seed: int) -> None:
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
            assert found["N"].tolist() == clusters["N"].tolist()
            total = 0
            for row, cluster in zip(found, clusters, strict=True):
                a, b = int(row["first"]), int(row["first"] + row["N"])
                assert a == total  # counts from the sample's own first voxel
                total = b
                c, d = int(cluster["first"]), int(cluster["first"] + cluster["N"])
                assert raw(sample["Data/cluster_group/voxels"][a:b]) == raw(g["voxels"][c:d])
            assert len(sample["Data/cluster_group/voxels"]) == total
            assert sample["Data/sparse_group/image_meta"].tolist() == [
                (3 * i + k) * 1.5 for k in range(3)
            ]
        sizes = source.sizes(0, events)
        assert sizes is not None
        assert sizes.tolist() == [
            sum(np.asarray(v).nbytes for v in source[i].values()) for i in range(events)
        ]
        assert (
            "rows by Data/sparse_group/extents and"
            in source.layouts()["Data/sparse_group/voxels"].storage
        )
        access = source.layouts()["Data/sparse_group/voxels"].access
        assert access.endswith(", after reads of 2 index tables")


def test_explicit_tables(tmp_path: Path) -> None:
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
        file["labels"] = [1, 2, 3]
    with opened(tmp_path / "b", "x=values@where/from,where/rows", "labels") as source:
        assert [len(source[i]["x"]) for i in range(3)] == [4, 0, 6]
    for bad, error in (
        ("x=values@where/from", UsageError),
        ("x=values@triples", UsageError),
        ("x=values@floats", UsageError),
        ("x=values@nothing", SchemaError),
        ("x=nothing@where/from,where/rows", SchemaError),
        ("x=labels@where/from,where/rows", FormatError),
    ):
        with pytest.raises(error), opened(tmp_path / "b", bad) as source:
            source.read(0, len(source))


@pytest.mark.parametrize("dtype", ["<i4", ">u8", "<i8"])
@pytest.mark.parametrize("options", [{}, {"chunks": (2, 2), "compression": "gzip"}])
def test_a_table_of_two_columns(tmp_path: Path, dtype: str, options: dict[str, object]) -> None:
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
        assert sizes is not None
        assert sizes.tolist() == [48 + 8, 8, 72 + 8]
        assert source.layouts()["h"].access.endswith(", after a read of its index table")
        code = source.loading_code()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == "h float32 (4, 3)"
    for name in ("gap", "far"):
        with (
            opened(tmp_path / "a", f"h=hits@{name}") as source,
            pytest.raises(FormatError, match="does not fit its values"),
        ):
            source.read(0, 3)


@pytest.mark.parametrize(
    "names",
    [
        ("first", "count", "values"),
        ("start", "len", "data"),
        ("x_start", "x_len", "x_data"),
        ("offsets", "lengths", "v"),
    ],
)
def test_pairs_of_datasets(tmp_path: Path, names: tuple[str, str, str]) -> None:
    counts = np.array([2, 0, 5, 1])
    with h5py.File(tmp_path / "a", "w") as file:
        file[f"g/{names[0]}"], file[f"g/{names[1]}"] = np.cumsum(counts) - counts, counts
        file[f"g/{names[2]}"] = random_array(np.dtype("<f8"), (8, 3))
        file["label"] = np.arange(4)
    with opened(tmp_path / "a") as source, h5py.File(tmp_path / "a") as file:
        assert source.schema.names == (f"g/{names[2]}", "label")
        ragged = source.read(0, 4)[f"g/{names[2]}"]
        assert isinstance(ragged, Ragged)
        assert ragged.lengths.tolist() == counts.tolist()
        assert raw(ragged.values) == raw(file[f"g/{names[2]}"][()])


def test_an_index_with_gaps_is_not_used(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a", "w") as file:
        file["g/first"], file["g/count"] = [0, 3, 5], [2, 2, 3]
        file["g/values"] = np.arange(8)
        file["label"] = np.arange(3)
    with opened(tmp_path / "a") as source:
        assert set(source.schema.names) == {"g/first", "g/count", "label"}
        assert any("g/values" in n and "gaps" in n for n in source.notes)


def test_own_files_guess_nothing(tmp_path: Path) -> None:
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


def test_threads_read_side_by_side(tmp_path: Path) -> None:
    larcv(tmp_path / "a", 40)
    wrong: list[object] = []
    with opened(tmp_path / "a") as source:
        whole = source.read(0, 40)

        def work(k: int) -> None:
            arena = Arena()
            for start in range(k, 36, 4):
                for name, column in source.read(start, start + 3, arena).items():
                    if raw(column.values if isinstance(column, Ragged) else column) != raw(
                        whole[name][start : start + 3].values
                        if isinstance(column, Ragged)
                        else whole[name][start : start + 3]
                    ):
                        wrong.append((start, name))

        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    # Names that count rows are rebased per sample, so they too are the same in any range.
    assert wrong == []


@pytest.mark.parametrize("kind", ["larcv", "mixed", "types", "whole"])
def test_the_loading_code_runs(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.h5"
    if kind == "larcv":
        larcv(path)
    elif kind == "whole":
        with h5py.File(path, "w") as file:
            file["x"], file["y"], file["t"] = np.zeros((3, 4)), np.zeros(2), "text"
    else:
        schema = dict(schemas())["mixed"]
        if kind == "types":
            odd = np.dtype([("a", ml_dtypes.bfloat16), ("b", "<U2", (2,))])
            schema = Schema(
                (
                    Field("x", odd, (2,)),
                    Field("u", np.dtype("<U3"), (None,)),
                    Field("h", np.dtype(ml_dtypes.bfloat16)),
                )
            )
            batch = {
                "x": np.zeros((2, 2), odd),
                "u": Ragged.pack([["a"], ["b", "c"]], schema["u"]),
                "h": np.zeros(2, ml_dtypes.bfloat16),
            }
            write_batch(HDF5, path, schema, batch)
        else:
            write_batch(
                HDF5,
                path,
                schema,
                random_batch(schema, 4),
                WriteOptions(compress=Compression("zstd")),
            )
    with opened(path) as source:
        code, sample = source.loading_code(), source[0]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == len(sample)
    for line, (name, value) in zip(lines, sample.items(), strict=True):
        array = np.asarray(value)
        assert line.startswith(f"{name} ")
        if array.dtype.kind not in "SUO":
            assert line == f"{name} {array.dtype} {array.shape}"
