"""Zarr stores in groups: what other readers see, and where the bytes of each group lie."""

from __future__ import annotations

import gc
import itertools
import json
import random
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr
from support import assert_same_batch, random_batch, raw, take
from zarr_stores import SCHEMAS, ZARR, no_waiting_for_the_disk

import dsprep
from dsprep.core import checksums
from dsprep.core.groups import Grouping
from dsprep.core.schema import Arena, Field, Ragged, Schema
from dsprep.core.storage import data_files
from dsprep.errors import UnsupportedError
from dsprep.formats.base import Compression, OpenOptions, WriteOptions
from dsprep.layout.as_json import file_path

__all__ = ["no_waiting_for_the_disk"]  # a fixture of all tests here

ALIGN = 4096
pytestmark = pytest.mark.filterwarnings("ignore:.*Duplicate name.*")


def grouped(batch: dict, edges: list[int], align: int = ALIGN) -> Grouping:
    rows = {
        name: np.array([int(c[a:b].lengths.sum()) for a, b in itertools.pairwise(edges)], np.int64)
        for name, c in batch.items()
        if isinstance(c, Ragged)
    }
    return Grouping(np.array(edges, np.int64), align, rows)


def pieces_of(grouping: Grouping, step: int) -> list[tuple[int, int]]:
    return [
        (at, min(at + step, b))
        for a, b in itertools.pairwise(grouping.edges.tolist())
        for at in range(a, b, step)
    ]


def write(path, schema, batch, grouping, options=None, step=10**9, seed=None):
    options = options or WriteOptions()
    writer = ZARR.create(path, schema, grouping, options, None)
    made = []
    for a, b in pieces_of(grouping, step):
        made.append(writer.encode(take(batch, a, b), a, Arena()))
        writer.reserve(made[-1])
    if seed is not None:
        random.Random(seed).shuffle(made)
    for piece in made:
        writer.write(piece)
    writer.sync()
    writer.finish()
    found = writer.groups()
    writer.close()
    writer.clean()
    return found


def check(path, schema, batch, groups, grouping) -> None:
    """Values by dsprep; ranges and sums by pread."""
    with ZARR.open(path, OpenOptions(), None) as source:
        assert_same_batch(source.read(0, len(source)), batch, schema)
    gc.collect()
    edges = grouping.edges.tolist()
    assert groups.blocks.count == len(edges) - 1
    for g, (a, b) in enumerate(itertools.pairwise(edges)):
        offset, nbytes = groups.blocks.offsets.one(g), groups.blocks.lengths.one(g)
        inside = file_path(groups.blocks.path, [g // (groups.files or 1)])
        if not nbytes:
            continue
        with (path / inside if inside else path).open("rb") as file:
            file.seek(offset)
            data = file.read(nbytes)
        assert len(data) == nbytes
        assert offset % grouping.align == 0
        assert checksums.crc32c(data) == groups.crc32c.one(g)
        if path.is_file() and grouping.even:
            for column in batch.values():
                values = column[a:b].values if isinstance(column, Ragged) else column[a:b]
                assert raw(values) in data or values.dtype.names
    if groups.first is not None:
        assert groups.first.span(0, groups.first.count).tolist() == edges[:-1]


def contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in data_files(path)}


CASES = {
    "directory": ("a.zarr", WriteOptions()),
    "files": ("a.zarr", WriteOptions(zarr_shard=0)),
    "v2": ("a.zarr", WriteOptions(zarr_format=2)),
    "zip": ("a.zarr.zip", WriteOptions()),
    "zip-v2": ("a.zarr.zip", WriteOptions(zarr_format=2)),
}


FEW = ("mixed", "empty-axis", "ragged-<f4", "scalar-<f4", "<U3", "bfloat16")


@pytest.mark.parametrize(
    ("name", "case"),
    [(n, c) for c in CASES for n in SCHEMAS if c in ("directory", "zip") or n in FEW],
)
def test_every_schema_comes_back(tmp_path: Path, name: str, case: str) -> None:
    schema, (file, options) = SCHEMAS[name], CASES[case]
    batch = random_batch(schema, 11)
    grouping = grouped(batch, [0, 4, 8, 11])
    groups = write(tmp_path / file, schema, batch, grouping, options, step=3, seed=1)
    check(tmp_path / file, schema, batch, groups, grouping)
    plan = ZARR.plan(schema, options, grouping, name=file).groups
    stored = sum(p.stat().st_size for p in data_files(tmp_path / file))
    assert stored <= plan.nbytes <= stored + 150 * 64


@pytest.mark.parametrize("file", ["a.zarr", "a.zarr.zip"])
@pytest.mark.parametrize(
    "edges", [[0], [0, 1], [0, 9], [0, 1, 2, 3], [0, 3, 10], [0, 6, 9, 15, 16], [0, 5, 10]]
)
def test_groups_of_any_size(tmp_path: Path, file: str, edges: list[int]) -> None:
    schema = SCHEMAS["mixed"]
    batch = random_batch(schema, edges[-1])
    grouping = grouped(batch, edges)
    for step, seed in ((10**9, None), (2, 3), (1, 4)):
        path = tmp_path / str(step) / file
        path.parent.mkdir()
        check(path, schema, batch, write(path, schema, batch, grouping, None, step, seed), grouping)
    kept = [contents(tmp_path / str(step)) for step in (10**9, 2, 1)]
    assert kept[0] == kept[1] == kept[2]


@pytest.mark.parametrize("file", ["a.zarr", "a.zarr.zip"])
def test_zarr_python_sees_the_same_values(tmp_path: Path, file: str) -> None:
    schema = Schema((Field("g/x", np.dtype("<f4"), (50, 7)), Field("y", np.dtype("<i8"))))
    batch = random_batch(schema, 23)
    grouping = grouped(batch, [0, 10, 20, 23])
    groups = write(tmp_path / file, schema, batch, grouping, step=4)
    if file.endswith(".zip"):
        with zipfile.ZipFile(tmp_path / file) as members:
            assert members.testzip() is None
        store = zarr.storage.ZipStore(tmp_path / file, mode="r")
    else:
        store = zarr.storage.LocalStore(tmp_path / file)
    group = zarr.open_group(store, mode="r")
    for i in range(23):
        assert raw(group["g/x"][i]) == raw(batch["g/x"][i])
        assert raw(group["y"][i]) == raw(batch["y"][i])
    store.close()
    path = tmp_path / file
    path = path / groups.blocks.path if groups.blocks.path else path
    data = path.read_bytes()
    for g, (a, b) in enumerate(itertools.pairwise(grouping.edges)):
        at = groups.blocks.offsets.one(g)
        part = data[at : at + groups.blocks.lengths.one(g)]
        assert part.startswith(raw(batch["g/x"][a:b]))
        assert part.endswith(raw(batch["y"][a:b]))  # the copy, or the member behind


@pytest.mark.parametrize("done", [0, 3, 5, 8, 10, 14, 16])
@pytest.mark.parametrize("file", ["a.zarr", "a.zarr.zip"])
def test_an_interrupted_run_continues_to_the_same_bytes(
    tmp_path: Path, file: str, done: int
) -> None:
    schema = SCHEMAS["mixed"]
    batch = random_batch(schema, 16)
    grouping = grouped(batch, [0, 5, 10, 15, 16])
    whole, path = tmp_path / "whole", tmp_path / "part"
    whole.mkdir(), path.mkdir()
    expected = write(whole / file, schema, batch, grouping)
    writer = ZARR.create(path / file, schema, grouping, WriteOptions(), None)
    cuts = sorted({0, done, *grouping.edges.tolist()})
    todo = list(itertools.pairwise(cuts))
    for a, b in todo:
        if b > done:
            break
        piece = writer.encode(take(batch, a, b), a, Arena())
        writer.reserve(piece)
        writer.write(piece)
    state = json.loads(json.dumps(writer.checkpoint()))
    writer.sync()
    for a, b in todo:
        if b > done:
            piece = writer.encode(random_batch(schema, b - a, seed=9, longest=0), a, Arena())
            piece.first_row = dict.fromkeys(piece.counts, 0)  # no rows at all
            if a in grouping.edges:
                writer.write(piece)
    writer.close()
    for stored in data_files(path / file):
        with stored.open("ab") as f:
            f.write(b"garbage" * 3000)
    writer = ZARR.create(path / file, schema, grouping, WriteOptions(), state)
    for a, b in todo:
        if b > done:
            piece = writer.encode(take(batch, a, b), a, Arena())
            writer.reserve(piece)
            writer.write(piece)
    writer.finish()
    writer.finish()
    found = writer.groups()
    writer.close()
    a, b = contents(path), contents(whole)
    assert a.keys() == b.keys()
    assert [k for k in a if a[k] != b[k]] == []
    assert found.crc32c.span(0, 4).tolist() == expected.crc32c.span(0, 4).tolist()


def test_several_shards(tmp_path: Path) -> None:
    schema = SCHEMAS["mixed"]
    batch = random_batch(schema, 23)
    grouping = grouped(batch, [0, 5, 10, 15, 20, 23])
    groups = write(tmp_path / "a.zarr", schema, batch, grouping, WriteOptions(zarr_shard=10))
    assert groups.files == 2
    check(tmp_path / "a.zarr", schema, batch, groups, grouping)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    schema = Schema((Field("x", np.dtype("u1"), (5,)),))
    uneven = Grouping(np.array([0, 2, 5, 7]))
    with pytest.raises(UnsupportedError):
        ZARR.plan(schema, WriteOptions(zarr_format=2), uneven)
    ragged = Schema((Field("x", np.dtype("u1"), (None,)),))
    grouping = Grouping(np.array([0, 2, 4]), 1, {"x": np.array([3, 4])})
    with pytest.raises(UnsupportedError, match="HDF5"):
        ZARR.plan(ragged, WriteOptions(compress=Compression("zstd")), grouping)


def test_padding_is_small_and_told(tmp_path: Path) -> None:
    schema = Schema((Field("x", np.dtype("u1"), (1 << 20,)), Field("y", np.dtype("<i8"))))
    grouping = Grouping(np.arange(0, 641, 64), 1 << 20)
    plan = ZARR.plan(schema, WriteOptions(), grouping).groups
    assert (plan.aligned, plan.reads) == (True, 2)
    assert "copy of y behind it for readers" in plan.how
    assert plan.padding <= 0.02 * plan.nbytes
    both = Schema((*schema, Field("z", np.dtype("u1"), (1 << 20,))))
    assert plan.group_nbytes == 64 * ((1 << 20) + 8)
    wide = ZARR.plan(both, WriteOptions(), grouping).groups
    assert (wide.reads, wide.group_nbytes) == (3, 64 * ((2 << 20) + 8))
    assert ZARR.plan(both, WriteOptions(), grouping, name="a.zip").groups.reads == 1


PACKED = Schema(
    (
        Field("g/x", np.dtype("<f4"), (50, 7)),
        Field("y", np.dtype("<i8")),
        Field("z", np.dtype(">u2"), (600,)),
    )
)


def some_values(count: int) -> dict:
    batch = random_batch(PACKED, count)
    batch["z"] = np.repeat(np.arange(count, dtype=">u2")[:, None], 600, axis=1)
    return batch


@pytest.mark.parametrize("codec", ["zstd:1", "gzip:1", "blosc:1"])
@pytest.mark.parametrize("case", CASES)
def test_compressed_groups(tmp_path: Path, case: str, codec: str) -> None:
    file, options = CASES[case]
    options = replace(options, compress=Compression.parse(codec))
    path, batch = tmp_path / file, some_values(123)
    grouping = grouped(batch, [*range(0, 123, 10), 123])
    groups = write(path, PACKED, batch, grouping, options, seed=1)
    zipped = file.endswith(".zip")
    store = zarr.storage.ZipStore(path, mode="r") if zipped else zarr.storage.LocalStore(path)
    group = zarr.open_group(store, mode="r")
    for name, column in batch.items():
        assert raw(group[name][:].astype(column.dtype)) == raw(column)  # it swaps bytes
    store.close()
    with ZARR.open(path, OpenOptions(), None) as source:
        assert_same_batch(source.read(0, 123), batch, PACKED)
    gc.collect()
    if zipped:
        with zipfile.ZipFile(path) as members:
            assert members.testzip() is None
    for g in range(grouping.count):
        offset, nbytes = groups.blocks.offsets.one(g), groups.blocks.lengths.one(g)
        inside = file_path(groups.blocks.path, [g // (groups.files or 1)])
        data = (path / inside if inside else path).read_bytes()[offset : offset + nbytes]
        assert len(data) == nbytes > 0
        assert checksums.crc32c(data) == groups.crc32c.one(g)
    plan = ZARR.plan(PACKED, options, grouping, name=file).groups
    assert sum(p.stat().st_size for p in data_files(path)) <= plan.nbytes
    assert plan.padding <= 0.03 * plan.nbytes
    assert [p.name for p in tmp_path.iterdir()] == [file]


@pytest.mark.parametrize("file", ["a.zarr", "a.zarr.zip"])
@pytest.mark.parametrize("edges", [[0], [0, 1], [0, 9], [0, 1, 2, 3], [0, 6, 9, 15, 16]])
@pytest.mark.parametrize("codec", ["none", "zstd:1"])
def test_large_fields_in_groups_of_any_size(
    tmp_path: Path, file: str, edges: list[int], codec: str
) -> None:
    batch = some_values(edges[-1])
    options = WriteOptions(compress=Compression.parse(codec))
    write(tmp_path / file, PACKED, batch, grouped(batch, edges), options)
    with ZARR.open(tmp_path / file, OpenOptions(), None) as source:
        assert_same_batch(source.read(0, len(source)), batch, PACKED)
    gc.collect()


@pytest.mark.parametrize("done", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_an_interrupted_compression_continues_to_the_same_bytes(
    tmp_path: Path, case: str, done: int
) -> None:
    file, options = CASES[case]
    shard = 10 if case == "directory" else options.zarr_shard
    options = replace(options, compress=Compression("zstd", 1), zarr_shard=shard)
    batch = some_values(18)
    grouping = grouped(batch, [0, 5, 10, 15, 18])
    whole, path = tmp_path / "whole", tmp_path / "part"
    whole.mkdir(), path.mkdir()
    expected = write(whole / file, PACKED, batch, grouping, options)
    state = None
    for until in (done, 4):
        writer = ZARR.create(path / file, PACKED, grouping, options, state)
        for a, b in pieces_of(grouping, 10**9):
            if a < (0 if state is None else state["samples"]) or a >= grouping.edges[until]:
                continue
            piece = writer.encode(take(batch, a, b), a, Arena())
            writer.reserve(piece)
            writer.write(piece)
        state = json.loads(json.dumps(writer.checkpoint()))
        writer.sync()
        if until == done and state["samples"] < 18:
            writer.close()
            for stored in data_files(path / file):
                with stored.open("ab") as f:
                    f.write(b"garbage" * 3000)
    writer.finish()
    writer.finish()
    found = writer.groups()
    writer.close()
    writer.clean()
    assert contents(path) == contents(whole)
    assert found.crc32c.span(0, 4).tolist() == expected.crc32c.span(0, 4).tolist()


@pytest.mark.parametrize("file", ["a.zarr", "a.zarr.zip"])
def test_repack_compresses(tmp_path: Path, file: str) -> None:
    batch = some_values(70)
    origin = tmp_path / "origin.zarr"
    write(origin, PACKED, batch, grouped(batch, [0, 70]))
    options = {"buffer_size": 16, "stripe_size": "4KiB", "durable": False}
    dsprep.repack(origin, tmp_path / file, compress="zstd:1", **options)
    with dsprep.open(tmp_path / file) as source:
        assert_same_batch(source[:], batch, PACKED)
    assert dsprep.check(tmp_path / file, full=True) == []
