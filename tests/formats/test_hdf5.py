"""HDF5: every schema survives, and h5py agrees about every value."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from support import (
    assert_same_batch,
    random_array,
    random_batch,
    raw,
    schemas,
    take,
    write_batch,
)

from dsprep.formats.base import Compression, OpenOptions, WriteOptions
from dsprep.formats.hdf5 import Hdf5
from dsprep.schema import Arena, Field, Ragged, Schema

HDF5 = Hdf5()
SCHEMAS = dict(schemas())
OPTIONS = {
    "plain": WriteOptions(),
    "chunk": WriteOptions(chunk=3),
    "gzip": WriteOptions(compress=Compression("gzip", 1)),
    "gzip-chunk": WriteOptions(compress=Compression("gzip"), chunk=4),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_every_schema_survives(tmp_path: Path, schema: Schema, options: WriteOptions) -> None:
    for count in (7, 1, 0):
        batch = random_batch(schema, count)
        path = tmp_path / f"{count}.h5"
        write_batch(HDF5, path, schema, batch, options, (2, 5))
        assert HDF5.recognises(path)
        with HDF5.open(path, OpenOptions(), None) as source:
            assert len(source) == count
            assert source.schema == schema
            assert_same_batch(source.read(0, count, Arena()), batch, schema)
            assert_same_batch(
                source.read(1, 5) if count > 5 else batch,
                take(batch, 1, 5) if count > 5 else batch,
                schema,
            )
