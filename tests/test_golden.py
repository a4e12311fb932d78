"""Sidecars written by earlier versions are read as they were meant.

``golden/set.*`` are small datasets with the sidecars that version 1 of the specification gave
them, ``*.extents.json`` the places of some of their samples, and ``laws.json`` laws with some of
their numbers. They are never written again: a change that breaks them needs a new version.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from support import MIXED, SUFFIX, assert_same_batch, random_batch

from dsprep.core.packing import Tables
from dsprep.layout import laws
from dsprep.sidecar.sidecar import Sidecar
from dsprep.source.dataset import open_dataset

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("format", sorted(SUFFIX))
def test_old_sidecars_are_read(format, tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "golden")  # other inodes, so a copy
    batch = random_batch(MIXED, 12, seed=99)
    path = tmp_path / "golden" / f"set{SUFFIX[format]}"
    with Sidecar.open(path) as opened:
        assert_same_batch(opened.read(slice(None)), batch, MIXED)
        expected = json.loads((GOLDEN / f"{format}.extents.json").read_text())
        assert [e.to_json() for e in opened.extents([0, 5, 11])] == expected
    with open_dataset(path, through="strict") as source:
        assert source.schema == MIXED
        assert_same_batch(source[:], batch, MIXED)
    with open_dataset(path, through="library") as source:
        assert_same_batch(source[:], batch, MIXED)


@pytest.mark.parametrize("golden", json.loads((GOLDEN / "laws.json").read_text()), ids=str)
def test_old_laws_give_the_same_numbers(golden):
    lengths = None
    if "lengths" in golden:
        lengths = laws.parse(golden["lengths"], golden["count"], Tables())
    law = laws.parse(golden["law"], golden["count"], Tables(), lengths)
    assert law.at(np.array(golden["indices"])).tolist() == golden["numbers"]
