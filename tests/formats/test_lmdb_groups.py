"""LMDB in groups, beyond what all records do in groups: one value per group, and its limits."""

from __future__ import annotations

import lmdb
import numpy as np
import pytest
from record_checks import group_bytes, with_rows, write_groups
from support import assert_same_batch, random_batch, schemas

from dsprep.core.groups import Grouping, even
from dsprep.core.schema import Field, Schema
from dsprep.errors import DsprepError, UnsupportedError, UsageError
from dsprep.formats import load
from dsprep.formats.lmdb.values import HEAD
from dsprep.formats.options import OpenOptions, WriteOptions

LMDB = load("lmdb")
ALL = dict(schemas())
SAMPLES, VALUES = WriteOptions(), WriteOptions(group_values=True)
ORDER = np.random.default_rng(3).permutation(21)
BIG = Schema((Field("x", np.dtype("<f4"), (1200,)), Field("y", np.dtype("<i8"))))


def opened(path, schema, **options):
    return LMDB.open(path, OpenOptions(**options), schema)


def values_of(path):
    env = lmdb.open(str(path), subdir=path.is_dir(), readonly=True, lock=False)
    with env, env.begin() as txn:
        return [bytes(v) for _, v in txn.cursor()]


@pytest.mark.parametrize("nbytes", [8, 300, 2000, 4020, 4096, 19000])
def test_the_bytes_of_a_group_are_planned_closely(nbytes, tmp_path):
    schema = Schema((Field("x", np.dtype("u1"), (nbytes,)),))
    batch, grouping = {"x": np.zeros((640, nbytes), np.uint8)}, even(640, 64)
    groups = write_groups(LMDB, tmp_path / "x.lmdb", schema, batch, grouping)
    longest = int(groups.blocks.lengths.span(0, grouping.count).max())
    planned = LMDB.plan(schema, SAMPLES, grouping).groups.group_nbytes
    assert longest <= planned <= longest * 1.02 + 3 * 4096


@pytest.mark.parametrize("name", ["fixed-<f4", "mixed", "scalar-bfloat16", "str"])
def test_one_value_per_group(name, tmp_path, capsys):
    schema, batch = ALL[name], random_batch(ALL[name], 21)
    for edges in (even(21, 8).edges, np.array([0, 5, 6, 13, 20, 21])):
        path = tmp_path / "a.lmdb"
        grouping = with_rows(Grouping(edges), batch)
        groups = write_groups(LMDB, path, schema, batch, grouping, VALUES)
        assert group_bytes(path, groups) == values_of(path)
        with opened(path, schema) as source:
            layout = source.extents()
            assert layout.columns.keys() | layout.unlocated.keys() == set(schema.names)
            assert bool(layout.columns) == (grouping.even and any(not f.ragged for f in schema))
            located = Schema(tuple(f for f in schema if f.name in layout.columns))
            found = source.records.reader(layout, located, str).read(ORDER, located.names)
            expected = {n: batch[n][ORDER] for n in located.names}
            assert_same_batch(found, expected, located)
            exec(source.loading_code(), {})
        printed = capsys.readouterr().out
        assert all(n in printed for n in schema.names)
        with opened(path, None) as source:
            assert len(source) == grouping.count
            assert any("groups" in note for note in source.notes)


def test_options_and_limits(tmp_path):
    with pytest.raises(UsageError):
        LMDB.create(tmp_path / "a.mdb", BIG, 5, VALUES, None)
    large = Schema((Field("x", np.dtype("u1"), (1 << 30,)),))
    with pytest.raises(UnsupportedError, match="group 0"):
        LMDB.plan(large, VALUES, even(12, 4))
    assert LMDB.plan(large, VALUES, even(12, 3)).groups.group_nbytes == (3 << 30) + HEAD.size
    rows = {"b": np.array([10, 1 << 32])}
    with pytest.raises(UnsupportedError, match="group 1"):
        LMDB.plan(Schema((Field.opaque("b"),)), VALUES, Grouping(np.array([0, 1, 2]), 1, rows))
    batch = random_batch(BIG, 6)
    write_groups(LMDB, tmp_path / "b.mdb", BIG, batch, even(6, 3), VALUES)
    with pytest.raises(UsageError):
        opened(tmp_path / "b.mdb", BIG, keys_as="key")


def test_a_damaged_group_is_an_error(tmp_path):
    schema, path = ALL["mixed"], tmp_path / "a.mdb"
    groups = write_groups(LMDB, path, schema, random_batch(schema, 30), even(30, 10), VALUES)
    data = path.read_bytes()
    head = HEAD.size + 10 * schema.fixed_nbytes + 8 * 10 * 4
    rng = np.random.default_rng(0)
    wrong = 0
    for _ in range(100):
        spoiled = bytearray(data)
        at = groups.blocks.offsets.one(int(rng.integers(3))) + int(rng.integers(head))
        spoiled[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(spoiled)
        try:
            with opened(path, schema) as source:
                for a in range(0, len(source), 7):
                    source.read(a, min(a + 7, len(source)))
        except DsprepError:
            wrong += 1
    assert wrong > 10
