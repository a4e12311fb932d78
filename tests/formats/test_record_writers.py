"""What the formats write: groups where they are said to be, the same bytes however made.

That every schema comes back is in ``test_conformance``, and what all formats promise of writing in
``FormatContract``.
"""

from __future__ import annotations

import time
import zipfile
from typing import NamedTuple

import h5py
import numpy as np
import pytest
from oracles import READ
from record_checks import group_bytes, with_rows, write_groups
from support import (
    STRUCT,
    assert_same_batch,
    check_layout,
    random_batch,
    raw,
    some_schemas,
    take,
    write_batch,
)

from dsprep.core.groups import Grouping, even
from dsprep.core.schema import Arena, Field, Ragged, Schema
from dsprep.formats import load, record_writer
from dsprep.formats.base import Format
from dsprep.formats.lmdb.write import LmdbWriter
from dsprep.formats.options import Compression, OpenOptions, WriteOptions
from dsprep.formats.tfrecord.write import TFRecordWriter
from dsprep.storage.trees import data_files

GZIP = WriteOptions(compress=Compression("gzip", 1))


class Way(NamedTuple):
    """A way to write: a format, its options, the stripe size, and the suffix of its files."""

    format: Format
    options: WriteOptions = WriteOptions()
    align: int = 1
    suffix: str = ""


def zarr(suffix=".zarr", version=3, codec=None):
    compress = codec and Compression.parse(codec)
    return Way(load("zarr"), WriteOptions(zarr_format=version, compress=compress), 4096, suffix)


PLAIN = {
    "lmdb": Way(load("lmdb")),
    "tfrecord": Way(load("tfrecord")),
    "tfrecord-gzip": Way(load("tfrecord"), GZIP),
}
EVEN = {
    "hdf5": Way(load("hdf5"), align=512),
    "hdf5-zstd": Way(load("hdf5"), WriteOptions(compress=Compression("zstd")), 512),
    "zarr": zarr(),
    "zarr-v2": zarr(version=2),
    "zarr-zip": zarr(".zarr.zip"),
    "zarr-zip-v2": zarr(".zarr.zip", 2),
}
"""Formats whose groups are equally large."""
PACKED = {"zarr-gzip": zarr(codec="gzip:1"), "zarr-v2-blosc": zarr(version=2, codec="blosc:1")}
"""That hold fields of one size only."""
GROUPED = {
    "lmdb": PLAIN["lmdb"],
    "tfrecord": PLAIN["tfrecord"],
    "tfrecord-aligned": Way(load("tfrecord"), align=512),
    **EVEN,
    **PACKED,
}
U1, F4 = np.dtype("u1"), np.dtype("<f4")
ALL = some_schemas()
MIXED_SIZES = Schema((Field.opaque("a"), Field("y", np.dtype("<i4"))))
FIXED = Schema(
    (Field("g/x", F4, (50, 7)), Field("z", np.dtype(">u2"), (600,)), Field("y", np.dtype("<i8")))
)
SOME = {
    **ALL,
    "inline": Schema((Field("x", U1, (5,)),)),
    "overflow": Schema((Field("x", U1, (3000,)),)),
    "big": Schema((Field("x", F4, (1200,)), Field("y", np.dtype("<i8")))),
    "mixed-sizes": MIXED_SIZES,
    "three": FIXED,
}
UNEVEN = np.array([0, 5, 6, 13, 20, 21], np.int64)


def batch_of(schema, count):
    if schema is MIXED_SIZES:  # some values are in leaves, others on overflow pages
        blobs = [bytes([i % 256]) * (5000 if i % 3 else 7) for i in range(count)]
        y = np.arange(count, dtype="<i4")
        return {"a": Ragged.pack(blobs, schema.fields[0]), "y": y}
    return random_batch(schema, count)


def target(tmp_path, way, name="a"):
    return tmp_path / f"{name}{way.suffix or way.format.suffixes[-1]}"


def opened(way, path, schema):
    """A file as it is opened, whose schema is known if it does not say it by itself."""
    named = way.format.name in ("hdf5", "zarr")
    return way.format.open(path, OpenOptions(), None if named else schema)


FEW = ("fixed-<f4", "mixed", "bytes", "big", "mixed-sizes")
BASIC = ("lmdb", "tfrecord", "hdf5", "zarr")


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, way) for name in SOME for way in BASIC),
        *((name, way) for name in ("three", "empty-axis", *FEW) for way in GROUPED
          if way not in (*BASIC, *PACKED)),
        *(("three", way) for way in PACKED),
    ],
)  # fmt: skip
def test_groups_are_where_they_are_said_to_be(tmp_path, name, way):
    is_even, way, schema = way not in PLAIN and "tf" not in way, GROUPED[way], SOME[name]
    batch = batch_of(schema, 21)
    for edges in (even(21, 8).edges, np.array([0, 21]), *([] if is_even else [UNEVEN])):
        (tmp_path / str(edges)).mkdir()
        assert_groups(target(tmp_path / str(edges), way), way, schema, batch, edges)


@pytest.mark.parametrize("way", ["hdf5", "zarr", "zarr-gzip"])
@pytest.mark.parametrize("edges", [[0], [0, 1], [0, 1, 2, 3], [0, 4, 8, 9], [0, 5, 10]], ids=str)
def test_groups_of_any_number_and_size(tmp_path, edges, way):
    batch = batch_of(FIXED, edges[-1])
    assert_groups(target(tmp_path, GROUPED[way]), GROUPED[way], FIXED, batch, np.array(edges))


def assert_groups(path, way, schema, batch, edges):
    """Write samples in groups: each is one range of the file, and the samples are the same."""
    n, name = int(edges[-1]), way.format.name
    grouping = with_rows(Grouping(edges, way.align), batch)
    groups = write_groups(way.format, path, schema, batch, grouping, way.options, (3, 10, 11))
    stored = group_bytes(path, groups)
    assert len(stored) == grouping.count
    assert (groups.first is None) == grouping.even
    begins = groups.blocks.offsets.span(0, grouping.count)
    ends = begins + groups.blocks.lengths.span(0, grouping.count)
    with opened(way, path, schema) as source:
        assert source.schema == schema
        for a, b in ((0, n), (3, 17), (20, 21), (4, 4), (5, 6)):
            if b <= n:
                assert_same_batch(source.read(a, b), take(batch, a, b), schema)
                assert_same_batch(source.read(a, b, Arena()), take(batch, a, b), schema)
        assert_in_groups(source, edges, begins, ends)
        if name == "lmdb":
            sizes = [nbytes_of(batch, schema, i) for i in range(2, 19)]
            assert (source.sizes(2, 19) >= sizes).all()
    if name in ("hdf5", "zarr"):
        assert_same_batch(READ[name](path, schema), batch, schema)
    plan, plain = (
        way.format.plan(schema, way.options, grouping, name=path.name),
        not way.options.compress,
    )
    nbytes = sum(file.stat().st_size for file in data_files(path))
    longest = max((ends - begins).tolist(), default=0)
    assert nbytes <= plan.nbytes
    if name == "hdf5":
        assert_chunks(path, begins, ends)
    if name == "zarr":
        assert not plain or plan.nbytes <= nbytes + 150 * 64
        assert not plain or not (begins[ends > begins] % way.align).any()
        if path.is_file():
            with zipfile.ZipFile(path) as members:
                assert members.testzip() is None
        if schema is FIXED and plain:
            for data, a, b in zip(stored, edges[:-1], edges[1:], strict=True):
                assert data.startswith(raw(batch["g/x"][a:b]))
                assert path.is_dir() or raw(batch["y"][a:b]) in data  # the member behind
        return
    assert not (begins % way.align).any()
    if name == "hdf5":
        return
    assert plan.reads == 1
    if schema is not MIXED_SIZES or name != "lmdb":
        assert longest <= plan.group_nbytes  # small values are behind others' large ones
    if name == "tfrecord":
        assert plan.aligned
        if not schema.ragged:
            assert (nbytes, longest) == (plan.nbytes, plan.group_nbytes)


def assert_chunks(path, begins, ends):
    """As h5py reports them, the chunks of a group lie in its range, one behind another."""
    groups = [[] for _ in begins]

    def visit(name, item):
        if isinstance(item, h5py.Dataset) and item.chunks:
            for i in range(item.id.get_num_chunks()):
                info = item.id.get_chunk_info(i)
                place = info.byte_offset, info.byte_offset + info.size
                groups[info.chunk_offset[0] // item.chunks[0]].append(place)

    with h5py.File(path) as file:
        file.visititems(visit)
    for begin, end, chunks in zip(begins, ends, map(sorted, groups), strict=True):
        assert chunks[0][0] == begin
        assert [a for _, a in chunks[:-1]] == [a for a, _ in chunks[1:]]
        assert end <= chunks[-1][1]
    assert (begins[1:] >= ends[:-1]).all()


def assert_in_groups(source, edges, begins, ends):
    """Every sample that has an offset is in the range of its group."""
    records = source.extents().records
    if records is not None:
        offsets = records.blocks.offsets.span(0, 21)
        which = np.searchsorted(edges, np.arange(21), "right") - 1
        assert (offsets >= begins[which]).all()
        assert (offsets + records.blocks.lengths.span(0, 21) <= ends[which]).all()


def nbytes_of(batch, schema, i):
    return sum(
        int(batch[f.name].lengths[i]) * f.row_nbytes if f.ragged else f.row_nbytes for f in schema
    )


def contents(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in data_files(path)}


@pytest.mark.parametrize("way", [*BASIC, "tfrecord-aligned", "zarr-zip"])
@pytest.mark.parametrize("name", FEW)
def test_bytes_do_not_depend_on_pieces(name, way, tmp_path):
    is_even, way, schema = way in EVEN, GROUPED[way], SOME[name]
    batch = batch_of(schema, 40)
    for edges in (even(40, 9).edges, *([] if is_even else [np.array([0, 1, 30, 40])])):
        grouped, plain = [], []
        for k, cuts in enumerate([(), tuple(range(40)), (2, 17, 29, 39)]):
            path = target(tmp_path, way, f"{len(edges)}{k}")
            grouping = Grouping(edges, way.align)
            groups = write_groups(way.format, path, schema, batch, grouping, cuts=cuts)
            grouped.append((contents(path), groups.crc32c.span(0, grouping.count).tolist()))
            path = target(tmp_path, way, f"plain{len(edges)}{k}")
            write_batch(way.format, path, schema, batch, way.options, cuts)
            plain.append(contents(path))
        assert grouped[0] == grouped[1] == grouped[2]
        assert plain[0] == plain[1] == plain[2]
        if way.align == 1 and not (schema.ragged and way.format.name == "lmdb"):
            assert plain[0] == grouped[0][0]


SAME = {
    **PLAIN,
    "hdf5": EVEN["hdf5"],
    **{f"zarr-{codec}": zarr(codec=codec) for codec in ("none", "gzip", "zstd", "blosc")},
}


@pytest.mark.parametrize("way", SAME)
def test_the_same_values_give_the_same_bytes(tmp_path, way, monkeypatch):
    """Whatever the time, the layout in memory, the padding and the name of an integer type."""
    way, i8 = SAME[way], np.dtype("<i8")
    fields = Field("x", F4, (4, 3)), Field("w", F4, (3000,)), Field("i", i8, (2,))
    schema = Schema((*fields, Field("r", i8, (None, 2)), Field("s", STRUCT), Field("n", i8)))
    clean, dirty = random_batch(schema, 9), {}
    clean["s"] = clean["s"].copy()
    clean["s"].view(U1).reshape(9, 16)[:, 12:] = 0
    dirty["s"] = clean["s"].copy()
    dirty["s"].view(U1).reshape(9, 16)[:, 12:] = 7
    dirty["x"] = np.asfortranarray(clean["x"])
    dirty["w"] = np.repeat(clean["w"][::-1], 2, 0)[::-2]
    dirty["i"] = np.repeat(clean["i"], 2, 1)[:, ::2]
    r = clean["r"]
    dirty["r"] = Ragged.from_lengths(np.repeat(r.values, 2, 1)[:, ::2], r.lengths)
    dirty["n"] = clean["n"].astype("q")
    one, other = target(tmp_path, way, "a"), target(tmp_path, way, "b")
    write_batch(way.format, one, schema, clean, way.options)
    monkeypatch.setattr(time, "time", lambda: 5e8)
    write_batch(way.format, other, schema, {f.name: dirty[f.name] for f in schema}, way.options)
    assert contents(one) == contents(other)
    with opened(way, one, schema) as source:
        assert_same_batch(source.read(0, 9), clean, schema)


@pytest.mark.parametrize("way", PLAIN)
def test_space_is_reserved_ahead_and_what_is_left_over_released(tmp_path, way, monkeypatch):
    way, schema, reserved, plain = PLAIN[way], SOME["overflow"], [], record_writer.preallocate

    def preallocate(fd, offset, nbytes):
        reserved.append((offset, offset + nbytes))
        plain(fd, offset, nbytes)

    monkeypatch.setattr(record_writer, "preallocate", preallocate)
    path, batch = target(tmp_path, way), batch_of(schema, 600)
    write_batch(way.format, path, schema, batch, way.options, tuple(range(50, 600, 50)))
    found = path.stat()
    assert [begin for begin, _ in reserved] == [0, *(end for _, end in reserved[:-1])]
    assert reserved[-1][1] >= found.st_size
    assert len(reserved) < 6
    assert found.st_blocks * 512 <= found.st_size + (64 << 10)


@pytest.mark.parametrize(
    ("name", "align"), [*((name, 1) for name in SOME), *((name, 512) for name in FEW)]
)
def test_the_layout_that_was_written_is_the_one_that_is_found(tmp_path, monkeypatch, name, align):
    tfrecord, schema = load("tfrecord"), SOME[name]
    path, batch = tmp_path / "a.tfrecord", batch_of(schema, 21)
    finish, written = TFRecordWriter.finish, []
    monkeypatch.setattr(
        TFRecordWriter, "finish", lambda writer: (written.append(writer), finish(writer))
    )
    for edges in (None, even(21, 8).edges, UNEVEN):
        samples = 21 if edges is None else with_rows(Grouping(edges, align), batch)
        if edges is None:
            write_batch(tfrecord, path, schema, batch, GZIP)
            assert written[-1].layout() is None
            write_batch(tfrecord, path, schema, batch)
        else:
            write_groups(tfrecord, path, schema, batch, samples)
        if not check_layout(tfrecord, path, schema, written[-1]):
            assert not schema.ragged
            assert not all(f.row_nbytes for f in schema)


@pytest.mark.parametrize("suffix", [".lmdb", ".mdb"])
@pytest.mark.parametrize("name", [n for n in SOME if SOME[n].ragged])
def test_lmdb_knows_where_it_put_ragged_samples(tmp_path, monkeypatch, name, suffix):
    lmdb, schema, written = load("lmdb"), SOME[name], []
    finish = LmdbWriter.finish
    monkeypatch.setattr(
        LmdbWriter, "finish", lambda writer: (written.append(writer), finish(writer))
    )
    for count, pieces in ((1, ()), (21, (3, 10)), (2500, range(90, 2500, 90))):
        path, batch = tmp_path / f"{count}{suffix}", batch_of(schema, count)
        write_batch(lmdb, path, schema, batch, cuts=tuple(pieces))
        assert check_layout(lmdb, path, schema, written[-1])
