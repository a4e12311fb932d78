"""LMDB in groups, beyond what all records do in groups."""

from __future__ import annotations

import numpy as np
import pytest
from record_checks import write_groups

from dsprep.core.groups import even
from dsprep.core.schema import Field, Schema
from dsprep.formats import load
from dsprep.formats.options import WriteOptions

LMDB = load("lmdb")


@pytest.mark.parametrize("nbytes", [8, 300, 2000, 4020, 4096, 19000])
def test_the_bytes_of_a_group_are_planned_closely(nbytes, tmp_path):
    schema = Schema((Field("x", np.dtype("u1"), (nbytes,)),))
    batch, grouping = {"x": np.zeros((640, nbytes), np.uint8)}, even(640, 64)
    groups = write_groups(LMDB, tmp_path / "x.lmdb", schema, batch, grouping)
    longest = int(groups.blocks.lengths.span(0, grouping.count).max())
    planned = LMDB.plan(schema, WriteOptions(), grouping).group_nbytes
    assert longest <= planned <= longest * 1.02 + 4 * 4096
