"""What the formats of records write: every schema comes back, in groups or not, resumed or not."""

from __future__ import annotations

import json
from typing import NamedTuple

import numpy as np
import pytest
from record_checks import feed, group_bytes, with_rows, write_groups
from support import assert_same_batch, random_batch, schemas, take, write_batch

from dsprep.core.groups import Grouping, even
from dsprep.core.schema import Arena, Field, Ragged, Schema
from dsprep.formats import load
from dsprep.formats.base import Compression, Format, OpenOptions, WriteOptions

GZIP = WriteOptions(compress=Compression("gzip", 1))
VALUES = WriteOptions(group_values=True)


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
    **PLAIN,
    "lmdb-values": Way(load("lmdb"), VALUES),
    "tfrecord-aligned": Way(load("tfrecord"), align=512),
    "tfrecord-gzip-aligned": Way(load("tfrecord"), GZIP, 512),
}
U1, F4 = np.dtype("u1"), np.dtype("<f4")
ALL = dict(schemas())
MIXED_SIZES = Schema((Field.opaque("a"), Field("y", np.dtype("<i4"))))
SOME = {
    **{
        name: ALL[name] for name in ("fixed-<f4", "mixed", "scalar-<i8", "bytes", "ragged-struct16")
    },
    "inline": Schema((Field("x", U1, (5,)),)),
    "overflow": Schema((Field("x", U1, (3000,)),)),
    "big": Schema((Field("x", F4, (1200,)), Field("y", np.dtype("<i8")))),
    "large-and-ragged": Schema((Field("x", F4, (4000,)), Field("p", F4, (None, 700)))),
    "mixed-sizes": MIXED_SIZES,
}


def batch_of(schema, count):
    if schema is MIXED_SIZES:  # some values are in leaves, others on overflow pages
        blobs = [bytes([i % 256]) * (5000 if i % 3 else 7) for i in range(count)]
        y = np.arange(count, dtype="<i4")
        return {"a": Ragged.pack(blobs, schema.fields[0]), "y": y}
    return random_batch(schema, count)


def nbytes_of(batch, schema, i):
    return sum(
        int(batch[f.name].lengths[i]) * f.row_nbytes if f.ragged else f.row_nbytes for f in schema
    )


def target(tmp_path, way, name="a"):
    return tmp_path / f"{name}{way.format.suffixes[-1]}"


@pytest.mark.parametrize("way", PLAIN)
@pytest.mark.parametrize("name", ALL)
def test_every_schema_comes_back(tmp_path, name, way):
    way, schema = PLAIN[way], ALL[name]
    path, batch = target(tmp_path, way), random_batch(schema, 37, longest=9)
    write_batch(way.format, path, schema, batch, way.options, cuts=(1, 5, 30))
    assert way.format.recognises(path)
    with way.format.open(path, OpenOptions(), schema) as source:
        assert len(source) == 37
        assert source.schema == schema
        assert_same_batch(source.read(0, 37), batch, schema)
        assert_same_batch(source.read(0, 37, Arena()), batch, schema)
        for a, b in ((7, 19), (11, 12), (36, 37), (5, 5)):
            assert_same_batch(source.read(a, b), take(batch, a, b), schema)
        assert set(source.storage()) == set(schema.names)
        sizes = source.sizes(3, 20).tolist()
        if way.format.name == "lmdb" or not schema.ragged:
            assert sizes == [nbytes_of(batch, schema, i) for i in range(3, 20)]
    if way.options is not GZIP:
        payload = sum(nbytes_of(batch, schema, i) for i in range(37))
        file = path.stat().st_size
        most = way.format.plan(schema, way.options, 37, payload).nbytes
        assert file <= most
        assert schema.ragged or file == most


@pytest.mark.parametrize("way", PLAIN)
@pytest.mark.parametrize("name", ["fixed-<f4", "mixed", "inline", "overflow", "bytes"])
def test_a_resumed_run_ends_in_the_same_bytes(tmp_path, name, way):
    way, schema = PLAIN[way], SOME[name]
    count, edges = 400, [0, 60, 130, 260, 330, 400]
    batch = batch_of(schema, count)
    whole, broken = target(tmp_path, way, "whole"), target(tmp_path, way, "broken")
    write_batch(way.format, whole, schema, batch, way.options, cuts=edges[1:-1])
    writer = way.format.create(broken, schema, count, way.options, None)
    feed(writer, batch, edges[:4])
    state = json.loads(json.dumps(writer.checkpoint()))
    writer.sync()
    reached = broken.stat().st_size
    feed(writer, batch, edges[3:5])
    writer.close()
    writer.close()
    with broken.open("r+b") as file:
        file.seek(reached)
        file.write(b"\xa5" * 3_000_000)
    writer = way.format.create(broken, schema, count, way.options, state)
    feed(writer, batch, edges[3:], backwards=True)
    writer.finish()
    assert broken.read_bytes() == whole.read_bytes()
    if way.options is not GZIP and not (schema.ragged and way.format.name == "lmdb"):
        cut = target(tmp_path, way, "cut")
        write_batch(way.format, cut, schema, batch, cuts=(1, 7, 333))
        assert cut.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("way", GROUPED)
@pytest.mark.parametrize("count", [0, 1, 7])
def test_few_samples_in_groups(count, way, tmp_path):
    way = GROUPED[way]
    for name in ("fixed-<f4", "mixed"):
        schema, batch = ALL[name], random_batch(ALL[name], count)
        plain = target(tmp_path, way, "plain")
        if way.options is not VALUES:
            write_batch(way.format, plain, schema, batch, way.options)
            with way.format.open(plain, OpenOptions(), schema) as source:
                assert_same_batch(source.read(0, count), batch, schema)
        for per_group in (1, 3, 100):
            path = target(tmp_path, way)
            grouping = with_rows(even(count, per_group, way.align), batch)
            groups = write_groups(way.format, path, schema, batch, grouping, way.options)
            assert len(group_bytes(path, groups)) == -(-count // per_group)
            assert path.stat().st_size <= way.format.plan(schema, way.options, grouping).nbytes
            with way.format.open(path, OpenOptions(), schema) as source:
                assert_same_batch(source.read(0, count), batch, schema)


@pytest.mark.parametrize("way", ["lmdb", "tfrecord", "tfrecord-aligned"])
@pytest.mark.parametrize("name", ["fixed-<f4", "mixed", "bytes", "big", "mixed-sizes"])
def test_bytes_of_groups_do_not_depend_on_pieces(name, way, tmp_path):
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


@pytest.mark.parametrize("way", GROUPED)
@pytest.mark.parametrize("name", ["fixed-<f4", "mixed", "big"])
def test_resumed_groups(name, way, tmp_path):
    way, schema = GROUPED[way], SOME[name]
    path, whole = target(tmp_path, way, "resumed"), target(tmp_path, way, "whole")
    batch = batch_of(schema, 40)
    for edges in (even(40, 8).edges, np.array([0, 8, 17, 24, 32, 40])):
        grouping = with_rows(Grouping(edges, way.align), batch)
        expected = write_groups(way.format, whole, schema, batch, grouping, way.options)
        writer = way.format.create(path, schema, grouping, way.options, None)
        at = edges[:4].tolist() if writer.whole else [0, 5, 8, int(edges[2]), 20]
        feed(writer, batch, at)
        state = json.loads(json.dumps(writer.checkpoint()))
        writer.sync()
        feed(writer, batch, [at[-1], int(edges[4] if writer.whole else edges[3])])
        writer.close()
        with path.open("ab") as file:
            file.write(b"garbage" * 10_000)
        writer = way.format.create(path, schema, grouping, way.options, state)
        feed(writer, batch, sorted({at[-1], *edges[edges >= at[-1]].tolist()}), backwards=True)
        writer.finish()
        writer.close()
        assert path.read_bytes() == whole.read_bytes()
        assert group_bytes(path, writer.groups()) == group_bytes(whole, expected)


@pytest.mark.parametrize("way", PLAIN)
def test_columns_that_are_not_contiguous(tmp_path, way):
    way = PLAIN[way]
    i8 = np.dtype("<i8")
    schema = Schema((Field("x", F4, (4, 3)), Field("i", i8, (2,)), Field("r", i8, (None, 2))))
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.random((3, 4, 9), np.float32).transpose(2, 1, 0),
        "i": rng.integers(-9, 9, (9, 4))[:, ::2],
        "r": Ragged.from_lengths(rng.integers(-9, 9, (36, 4))[:, ::2], np.full(9, 4)),
    }
    path = target(tmp_path, way)
    write_batch(way.format, path, schema, batch, way.options)
    with way.format.open(path, OpenOptions(), schema) as source:
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
