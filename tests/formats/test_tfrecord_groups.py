"""TFRecord in groups: contiguous, aligned, read by TensorFlow, the same bytes however written."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from record_checks import feed, group_bytes, with_rows, write_groups
from support import create, fails, random_batch, schemas

from dsprep.core.groups import Grouping, even
from dsprep.core.schema import Batch, Field, Ragged, Schema
from dsprep.errors import UnsupportedError
from dsprep.formats import load
from dsprep.formats.options import Compression, OpenOptions, WriteOptions
from dsprep.formats.tfrecord import features
from dsprep.formats.tfrecord.build import Builder

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

TFR = load("tfrecord")
ALL = dict(schemas())
PLAIN = WriteOptions()


def test_records_keep_one_size_where_that_costs_little(tmp_path: Path) -> None:
    schema = Schema((Field("x", np.dtype("u1"), (5000,)), Field("y", np.dtype("<i8"))))
    batch = random_batch(schema, 150)
    grouping = even(150, 64, 4096)  # 64 bytes per record fill the stripe
    path = tmp_path / "a.tfrecord"
    groups = write_groups(TFR, path, schema, batch, grouping, cuts=(10, 70, 149))
    assert len(group_bytes(path, groups)) == 3
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
            assert group_bytes(path, groups)
            assert groups.blocks.offsets.one(1) == 1024
        return
    raise AssertionError("no size was tried")


def test_raw_records_are_not_padded(tmp_path: Path) -> None:
    schema = Schema((Field.opaque("record"),))
    values = [os.urandom(n) for n in (10, 0, 300, 7, 40)]
    batch: Batch = {"record": Ragged.pack(values, schema.fields[0])}
    grouping = with_rows(even(5, 2, 256), batch)
    plan = TFR.plan(schema, PLAIN, grouping)
    assert not plan.aligned
    path = tmp_path / "a.tfrecord"
    assert group_bytes(path, write_groups(TFR, path, schema, batch, grouping))
    with TFR.open(path, OpenOptions(records="opaque"), None) as source:
        assert list(source.read(0, 5)["record"]) == values


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
