"""TFRecord in groups: contiguous, aligned, read by TensorFlow, the same bytes however written."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from record_checks import feed, group_bytes, with_rows, write_groups
from support import assert_same_batch, create, fails, random_batch, schemas, take

from dsprep.core.groups import Grouping, even
from dsprep.core.schema import Batch, Field, Ragged, Schema
from dsprep.errors import UnsupportedError
from dsprep.formats import load
from dsprep.formats.options import Compression, OpenOptions, WriteOptions
from dsprep.formats.protobuf import read_varint
from dsprep.formats.tfrecord import example, features
from dsprep.formats.tfrecord.build import Builder
from dsprep.formats.tfrecord.example import parse_together
from dsprep.formats.tfrecord.framing import FRAME, HEADER
from dsprep.layout.model import Groups
from dsprep.storage.paths import Candidate

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

TFR = load("tfrecord")
ALL = dict(schemas())
PLAIN = WriteOptions()


def check(path: Path, schema: Schema, batch: Batch, grouping: Grouping, groups: Groups) -> None:
    """The ranges hold the samples of the groups, and their sums are right."""
    assert TFR.recognises(Candidate(path))
    assert groups.blocks.count == grouping.count
    edges = grouping.edges.tolist()
    for g, run in enumerate(group_bytes(path, groups)):
        alone = path.with_name("alone.tfrecord")
        alone.write_bytes(run)
        with TFR.open(alone, OpenOptions(), schema) as source:
            found = source.read(0, len(source))
        assert_same_batch(found, take(batch, edges[g], edges[g + 1]), schema)
    with TFR.open(path, OpenOptions(), schema) as source:
        assert_same_batch(source.read(0, len(source)), batch, schema)
    assert (groups.first is None) == grouping.even


def test_records_keep_one_size_where_that_costs_little(tmp_path: Path) -> None:
    schema = Schema((Field("x", np.dtype("u1"), (5000,)), Field("y", np.dtype("<i8"))))
    batch = random_batch(schema, 150)
    grouping = even(150, 64, 4096)  # 64 bytes per record fill the stripe
    path = tmp_path / "a.tfrecord"
    groups = write_groups(TFR, path, schema, batch, grouping, cuts=(10, 70, 149))
    check(path, schema, batch, grouping, groups)
    plan = TFR.plan(schema, PLAIN, grouping)
    assert 0 < plan.padding <= 0.02 * plan.nbytes
    with TFR.open(path, OpenOptions(), schema) as source:
        assert "constant stride" in next(iter(source.storage().values())).storage
        parts = source.extents().records.parts
    assert parts["x"].at is not None
    assert groups.blocks.offsets.one(1) % 4096 == 0


def test_one_byte_short_of_a_stripe_takes_a_stripe_more(tmp_path: Path) -> None:
    for nbytes in range(440, 520):
        schema = Schema((Field("x", np.dtype("u1"), (nbytes,)),))
        size = Builder(schema, features.plan(schema, PLAIN)).nbytes
        if size % 512 != 511:
            continue
        batch = random_batch(schema, 3)
        for edges in (even(3, 1).edges, np.array([0, 1, 3])):
            grouping = Grouping(edges, 512)
            path = tmp_path / "a.tfrecord"
            groups = write_groups(TFR, path, schema, batch, grouping)
            check(path, schema, batch, grouping, groups)
            assert groups.blocks.offsets.one(1) == 1024
        return
    raise AssertionError("no size was tried")


def records_of(path: Path) -> list[bytes]:
    data, at, out = path.read_bytes(), 0, []
    while at < len(data):
        nbytes = int.from_bytes(data[at : at + 8], "little")
        out.append(data[at + HEADER : at + HEADER + nbytes])
        at += nbytes + FRAME
    return out


def test_padded_records_are_read_side_by_side(tmp_path: Path) -> None:
    schema = ALL["mixed"]
    batch = random_batch(schema, 20)
    path = tmp_path / "a.tfrecord"
    write_groups(TFR, path, schema, batch, even(20, 6, 1024))
    records = records_of(path)
    buffer = np.frombuffer(b"".join(records), np.uint8)
    lengths = np.array([len(r) for r in records])
    assert parse_together(buffer, np.cumsum(lengths) - lengths, lengths) is not None
    spoiled = buffer.copy()
    at = int(np.cumsum(lengths)[5] - lengths[5])
    nbytes, size = read_varint(buffer.data, at + 1, len(buffer))
    size += nbytes - at
    assert spoiled[at + size] == example.PADDING_TAG
    spoiled[at + size] = 14 << 3 | 2
    assert parse_together(spoiled, np.cumsum(lengths) - lengths, lengths) is None


def test_raw_records_are_not_padded(tmp_path: Path) -> None:
    schema = Schema((Field.opaque("record"),))
    values = [os.urandom(n) for n in (10, 0, 300, 7, 40)]
    batch: Batch = {"record": Ragged.pack(values, schema.fields[0])}
    grouping = with_rows(even(5, 2, 256), batch)
    plan = TFR.plan(schema, PLAIN, grouping)
    assert not plan.aligned
    path = tmp_path / "a.tfrecord"
    check(path, schema, batch, grouping, write_groups(TFR, path, schema, batch, grouping))
    assert records_of(path) == values


def test_a_gzip_file_has_no_groups() -> None:
    with pytest.raises(UnsupportedError, match="dsprep convert"):
        TFR.plan(ALL["bytes"], WriteOptions(compress=Compression("gzip", 1)), even(5, 2))


def test_a_sample_that_padding_makes_too_large(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("dsprep.formats.tfrecord.build.LARGEST", 300)
    schema = Schema((Field.opaque("x"),))
    batch: Batch = {"x": Ragged.pack([b"a" * 100, b"b" * 50], schema.fields[0])}
    writer = create(TFR, tmp_path / "a.tfrecord", schema, even(2, 1, 512), PLAIN, None)
    fails(lambda: feed(writer, batch, [0, 1, 2]), UnsupportedError)
    writer.close()
    monkeypatch.setattr("dsprep.formats.tfrecord.plan.LARGEST", 300)
    fixed = Schema((Field("x", np.dtype("u1"), (100,)),))
    assert not TFR.plan(fixed, PLAIN, even(2, 1, 512)).aligned
