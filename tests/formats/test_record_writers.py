"""What the formats of records write: groups where they are said to be, the same bytes however made.

That every schema comes back is in ``test_conformance``, and what all formats promise of writing in
``FormatContract``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from record_checks import group_bytes, with_rows, write_groups
from support import (
    assert_same_batch,
    check_layout,
    random_batch,
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

GZIP = WriteOptions(compress=Compression("gzip", 1))


class Way(NamedTuple):
    """A way to write: a format, its options, and the stripe size."""

    format: Format
    options: WriteOptions = WriteOptions()
    align: int = 1


PLAIN = {
    "lmdb": Way(load("lmdb")),
    "tfrecord": Way(load("tfrecord")),
    "tfrecord-gzip": Way(load("tfrecord"), GZIP),
}
GROUPED = {
    "lmdb": PLAIN["lmdb"],
    "tfrecord": PLAIN["tfrecord"],
    "tfrecord-aligned": Way(load("tfrecord"), align=512),
}
U1, F4 = np.dtype("u1"), np.dtype("<f4")
ALL = some_schemas()
MIXED_SIZES = Schema((Field.opaque("a"), Field("y", np.dtype("<i4"))))
SOME = {
    **ALL,
    "inline": Schema((Field("x", U1, (5,)),)),
    "overflow": Schema((Field("x", U1, (3000,)),)),
    "big": Schema((Field("x", F4, (1200,)), Field("y", np.dtype("<i8")))),
    "mixed-sizes": MIXED_SIZES,
}
UNEVEN = np.array([0, 5, 6, 13, 20, 21], np.int64)


def batch_of(schema, count):
    if schema is MIXED_SIZES:  # some values are in leaves, others on overflow pages
        blobs = [bytes([i % 256]) * (5000 if i % 3 else 7) for i in range(count)]
        y = np.arange(count, dtype="<i4")
        return {"a": Ragged.pack(blobs, schema.fields[0]), "y": y}
    return random_batch(schema, count)


def target(tmp_path, way, name="a"):
    return tmp_path / f"{name}{way.format.suffixes[-1]}"


def opened(way, path, schema):
    return way.format.open(path, OpenOptions(), schema)


FEW = ("fixed-<f4", "mixed", "bytes", "big", "mixed-sizes")


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, way) for name in SOME for way in ("lmdb", "tfrecord")),
        *((name, way) for name in FEW for way in GROUPED if "-" in way),
    ],
)
def test_groups_are_where_they_are_said_to_be(tmp_path, name, way):
    way, schema = GROUPED[way], SOME[name]
    path, batch = target(tmp_path, way), batch_of(schema, 21)
    for edges in (even(21, 8).edges, UNEVEN, np.array([0, 21])):
        grouping = with_rows(Grouping(edges, way.align), batch)
        groups = write_groups(way.format, path, schema, batch, grouping, way.options, (3, 10, 11))
        assert len(group_bytes(path, groups)) == grouping.count
        assert (groups.first is None) == grouping.even
        begins = groups.blocks.offsets.span(0, grouping.count)
        ends = begins + groups.blocks.lengths.span(0, grouping.count)
        with opened(way, path, schema) as source:
            for a, b in ((0, 21), (3, 17), (20, 21), (4, 4), (5, 6)):
                assert_same_batch(source.read(a, b), take(batch, a, b), schema)
                assert_same_batch(source.read(a, b, Arena()), take(batch, a, b), schema)
            assert_in_groups(source, edges, begins, ends)
            if way.format.name == "lmdb":
                sizes = [nbytes_of(batch, schema, i) for i in range(2, 19)]
                assert (source.sizes(2, 19) >= sizes).all()
        plan = way.format.plan(schema, way.options, grouping)
        nbytes, longest = path.stat().st_size, int((ends - begins).max())
        assert plan.reads == 1
        assert nbytes <= plan.nbytes
        if schema is not MIXED_SIZES or way.format.name != "lmdb":
            assert longest <= plan.group_nbytes  # small values are behind others' large ones
        if way.format.name == "tfrecord":
            assert plan.aligned
            assert not (begins % way.align).any()
            if not schema.ragged:
                assert (nbytes, longest) == (plan.nbytes, plan.group_nbytes)


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


@pytest.mark.parametrize("way", GROUPED)
@pytest.mark.parametrize("name", FEW)
def test_bytes_do_not_depend_on_pieces(name, way, tmp_path):
    way, schema = GROUPED[way], SOME[name]
    batch = batch_of(schema, 40)
    for edges in (even(40, 9).edges, np.array([0, 1, 30, 40])):
        found = set()
        for k, cuts in enumerate([(), tuple(range(40)), (2, 17, 29, 39)]):
            path = target(tmp_path, way, str(k))
            grouping = Grouping(edges, way.align)
            groups = write_groups(way.format, path, schema, batch, grouping, cuts=cuts)
            sums = groups.crc32c.span(0, grouping.count).tolist()
            found.add((path.read_bytes(), str(sums)))
        assert len(found) == 1
        plain = target(tmp_path, way, "plain")
        write_batch(way.format, plain, schema, batch)
        if way.align == 1 and not (schema.ragged and way.format.name == "lmdb"):
            assert plain.read_bytes() == found.pop()[0]


@pytest.mark.parametrize("way", PLAIN)
def test_columns_that_are_not_contiguous(tmp_path, way):
    way, i8, rng = PLAIN[way], np.dtype("<i8"), np.random.default_rng(0)
    schema = Schema(
        (
            Field("x", F4, (4, 3)),
            Field("w", F4, (3000,)),
            Field("i", i8, (2,)),
            Field("r", i8, (None, 2)),
        )
    )
    batch = {
        "x": rng.random((3, 4, 9), np.float32).transpose(2, 1, 0),
        "w": rng.random((9, 2, 3000), np.float32)[::-1, 1],
        "i": rng.integers(-9, 9, (9, 4))[:, ::2],
        "r": Ragged.from_lengths(rng.integers(-9, 9, (36, 4))[:, ::2], np.full(9, 4)),
    }
    path = target(tmp_path, way)
    write_batch(way.format, path, schema, batch, way.options)
    with opened(way, path, schema) as source:
        assert_same_batch(source.read(0, 9), batch, schema)


@pytest.mark.parametrize("way", PLAIN)
def test_padding_bytes_of_structures_are_zero(tmp_path, way):
    way, schema = PLAIN[way], ALL["fixed-struct16"]
    batch = random_batch(schema, 6)
    dirty = {n: c.copy() for n, c in batch.items()}
    for column in dirty.values():
        column.view(np.uint8).reshape(-1, 16)[:, 12:] = 7
    one, other = target(tmp_path, way, "a"), target(tmp_path, way, "b")
    write_batch(way.format, one, schema, batch, way.options)
    write_batch(way.format, other, schema, dirty, way.options)
    assert one.read_bytes() == other.read_bytes()


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
