"""Zarr stores in groups: what other readers see, and where the bytes of each group lie."""

from __future__ import annotations

import itertools
import json
import random
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr
from support import assert_same_batch, check_layout, create, random_batch, raw, take
from zarr_stores import SCHEMAS, ZARR

from dsprep.core.groups import Grouping
from dsprep.core.schema import Arena, Field, Ragged, Schema
from dsprep.errors import UnsupportedError
from dsprep.formats.options import Compression, OpenOptions, WriteOptions
from dsprep.layout.as_json import file_path
from dsprep.storage import checksums
from dsprep.storage.trees import data_files

ALIGN = 4096
CASES = {
    "directory": ("a.zarr", WriteOptions()),
    "v2": ("a.zarr", WriteOptions(zarr_format=2)),
    "zip": ("a.zarr.zip", WriteOptions()),
    "zip-v2": ("a.zarr.zip", WriteOptions(zarr_format=2)),
}
FIXED = Schema(
    (
        Field("g/x", np.dtype("<f4"), (50, 7)),
        Field("z", np.dtype(">u2"), (600,)),
        Field("y", np.dtype("<i8")),
    )
)
pytestmark = pytest.mark.filterwarnings("ignore:.*Duplicate name.*")


def grouped(batch: dict, edges: list[int], align: int = ALIGN) -> Grouping:
    rows = {
        name: np.array([int(c[a:b].lengths.sum()) for a, b in itertools.pairwise(edges)], np.int64)
        for name, c in batch.items()
        if isinstance(c, Ragged)
    }
    return Grouping(np.array(edges, np.int64), align, rows)


def cuts(grouping: Grouping, step: int) -> list[tuple[int, int]]:
    """Pieces of at most `step` samples, none of them in two groups."""
    return [
        (at, min(at + step, b))
        for a, b in itertools.pairwise(grouping.edges.tolist())
        for at in range(a, b, step)
    ]


def feed(writer, batch: dict, todo: list[tuple[int, int]], seed: int | None = None) -> dict:
    made = []
    for a, b in todo:
        made.append(writer.encode(take(batch, a, b), a, Arena()))
        writer.reserve(made[-1])
    if seed is not None:
        random.Random(seed).shuffle(made)
    for piece in made:
        writer.write(piece)
    writer.sync()
    return json.loads(json.dumps(writer.checkpoint()))


def end(writer):
    writer.finish()
    writer.finish()  # may be repeated
    found = writer.groups()
    writer.close()
    writer.clean()
    return found


def write(path, schema, batch, grouping, options=None, step=10**9, seed=None):
    path.parent.mkdir(exist_ok=True)
    writer = create(ZARR, path, schema, grouping, options or WriteOptions(), None)
    feed(writer, batch, cuts(grouping, 10**9 if writer.whole else step), seed)
    groups = end(writer)
    planned = schema is FIXED and (options or WriteOptions()).compress is None
    assert not grouping.edges[-1] or check_layout(ZARR, path, schema, writer) or not planned
    return groups


def contents(path: Path) -> dict[str, bytes]:
    return {
        p.name if p == path else str(p.relative_to(path)): p.read_bytes() for p in data_files(path)
    }


def check(path, schema, batch, groups, grouping, plain: bool = True) -> None:
    """Values by dsprep; ranges and sums by pread; of fixed fields, values by zarr-python."""
    with ZARR.open(path, OpenOptions(), None) as source:
        assert_same_batch(source.read(0, len(source)), batch, schema)
    edges = grouping.edges.tolist()
    assert groups.blocks.count == len(edges) - 1
    for g, (a, b) in enumerate(itertools.pairwise(edges)):
        offset, nbytes = groups.blocks.offsets.one(g), groups.blocks.lengths.one(g)
        inside = file_path(groups.blocks.path, [g // (groups.files or 1)])
        data = (path / inside if inside else path).read_bytes()[offset : offset + nbytes]
        assert len(data) == nbytes
        assert not nbytes or checksums.crc32c(data) == groups.crc32c.one(g)
        assert not plain or not nbytes or offset % grouping.align == 0
        if plain and schema is FIXED:
            assert data.startswith(raw(batch["g/x"][a:b]))
            assert path.is_dir() or raw(batch["y"][a:b]) in data  # the member behind
    assert groups.first is None
    if path.is_file():
        with zipfile.ZipFile(path) as members:
            assert members.testzip() is None
    store = zarr.storage.ZipStore(path, mode="r") if path.is_file() else str(path)
    root = zarr.open_group(store, mode="r")
    for name in (f.name for f in schema if f.dtype.kind in "iuf" and not f.ragged):
        assert raw(root[name][...].astype(schema[name].dtype)) == raw(batch[name])
    root.store.close()


FEW = ("mixed", "empty-axis", "ragged-<f4")


@pytest.mark.parametrize(
    ("name", "case"),
    [(n, c) for c in CASES for n in SCHEMAS if c == "directory" or n in FEW],
)
def test_every_schema_comes_back(tmp_path: Path, name: str, case: str) -> None:
    schema, (file, options) = SCHEMAS[name], CASES[case]
    batch = random_batch(schema, 13)
    grouping = grouped(batch, [0, 5, 10, 13])
    groups = write(tmp_path / file, schema, batch, grouping, options, step=3, seed=1)
    check(tmp_path / file, schema, batch, groups, grouping)
    plan = ZARR.plan(schema, options, grouping, name=file)
    sizes = [p.stat().st_size for p in data_files(tmp_path / file)]
    assert all(sizes)  # arrays without bytes have no files
    stored = sum(sizes)
    assert stored <= plan.nbytes <= stored + 150 * 64


EDGES = [[0], [0, 1], [0, 9], [0, 1, 2, 3], [0, 4, 8, 9], [0, 5, 10]]


@pytest.mark.parametrize("codec", [None, "zstd:1"])
@pytest.mark.parametrize("edges", EDGES, ids=str)
def test_groups_of_any_size(tmp_path: Path, edges: list[int], codec: str | None) -> None:
    options = WriteOptions(compress=codec and Compression.parse(codec))
    grouping, made = grouped(batch := random_batch(FIXED, edges[-1]), edges), []
    for step, seed in ((10**9, None), *(() if codec else ((2, 3),))):
        path = tmp_path / f"{step}" / "a.zarr"
        groups = write(path, FIXED, batch, grouping, options, step, seed)
        check(path, FIXED, batch, groups, grouping, not codec)
        made.append(contents(path))
    assert all(each == made[0] for each in made)


@pytest.mark.parametrize(("case", "codec"), [("directory", "gzip:1"), ("v2", "blosc:1")])
def test_compressed_groups(tmp_path: Path, case: str, codec: str) -> None:
    file, options = CASES[case]
    options = replace(options, compress=Compression.parse(codec))
    batch = random_batch(FIXED, 123)
    grouping = grouped(batch, [*range(0, 123, 10), 123])
    groups = write(tmp_path / file, FIXED, batch, grouping, options, seed=1)
    check(tmp_path / file, FIXED, batch, groups, grouping, plain=False)
    plan = ZARR.plan(FIXED, options, grouping, name=file)
    assert sum(p.stat().st_size for p in data_files(tmp_path / file)) <= plan.nbytes


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    schema = Schema((Field("x", np.dtype("u1"), (5,)),))
    ragged = Schema((Field("x", np.dtype("u1"), (None,)),))
    grouping = Grouping(np.array([0, 2, 4]), 1, {"x": np.array([3, 4])})
    with pytest.raises(UnsupportedError, match="HDF5"):
        ZARR.plan(ragged, WriteOptions(compress=Compression("zstd")), grouping)
    options = WriteOptions(compress=Compression("zstd"))
    with pytest.raises(UnsupportedError, match="HDF5"):
        ZARR.plan(schema, options, Grouping(np.array([0, 2, 4])), name="a.zip")


def test_padding_is_small_and_told() -> None:
    x, z = (Field(name, np.dtype("u1"), (1 << 20,)) for name in "xz")
    y, grouping = Field("y", np.dtype("<i8")), Grouping(np.arange(0, 641, 64), 1 << 20)
    for fields, name, reads in (((x, y), "", 2), ((x, y, z), "", 3), ((x, y, z), "a.zip", 1)):
        plan = ZARR.plan(Schema(fields), WriteOptions(), grouping, name=name)
        assert (plan.aligned, plan.reads) == (True, reads)
        assert plan.padding <= 0.02 * plan.nbytes
