"""LMDB in groups, beyond what all records do in groups."""

from __future__ import annotations

import lmdb
import numpy as np
import pytest
from record_checks import write_groups
from support import schemas

from dsprep.core.groups import even
from dsprep.core.schema import Field, Schema
from dsprep.errors import UnsupportedError
from dsprep.formats import load
from dsprep.formats.options import OpenOptions, WriteOptions

LMDB = load("lmdb")
ALL = dict(schemas())


def opened(path, schema, **options):
    return LMDB.open(path, OpenOptions(**options), schema)


@pytest.mark.parametrize("nbytes", [8, 300, 2000, 4020, 4096, 19000])
def test_the_bytes_of_a_group_are_planned_closely(nbytes, tmp_path):
    schema = Schema((Field("x", np.dtype("u1"), (nbytes,)),))
    batch, grouping = {"x": np.zeros((640, nbytes), np.uint8)}, even(640, 64)
    groups = write_groups(LMDB, tmp_path / "x.lmdb", schema, batch, grouping)
    longest = int(groups.blocks.lengths.span(0, grouping.count).max())
    planned = LMDB.plan(schema, WriteOptions(), grouping).groups.group_nbytes
    assert longest <= planned <= longest * 1.02 + 3 * 4096


def test_values_that_are_groups_are_refused_or_kept_whole(tmp_path):
    """A former option wrote one value per group; its files have no offsets of samples."""
    path = tmp_path / "a.mdb"
    values = [b"dsprepG\1" + bytes(72) for _ in range(3)]
    with lmdb.open(str(path), subdir=False) as env, env.begin(write=True) as txn:
        for i, value in enumerate(values):
            txn.put(b"%08d" % i, value)
    with pytest.raises(UnsupportedError, match="group of samples"):
        opened(path, ALL["mixed"])
    with opened(path, None) as source:
        assert [source[i]["value"] for i in range(3)] == values
        assert any("groups" in note for note in source.notes)
