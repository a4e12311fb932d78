"""What dsprep writes as Zarr reads back bit by bit, in dsprep and in zarr-python."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import zarr
from support import (
    DTYPES,
    STRUCT,
    assert_same_batch,
    random_array,
    random_batch,
    raw,
    schemas,
    take,
    write_batch,
)

from dsprep.errors import UnsupportedError, UsageError
from dsprep.formats import by_suffix, load, recognise
from dsprep.formats.base import Compression, OpenOptions, WriteOptions
from dsprep.formats.zarr.grid import plan_arrays
from dsprep.schema import Arena, Field, Ragged, Schema

ZARR = load("zarr")
F4 = np.dtype("<f4")
SCHEMAS = dict(schemas())

OPTIONS = {
    "default": WriteOptions(),
    "small": WriteOptions(chunk=2, zarr_shard=6),
    "files": WriteOptions(chunk=3, zarr_shard=0),
    "v2": WriteOptions(zarr_format=2),
    "v2-small": WriteOptions(zarr_format=2, chunk=2),
    "zstd": WriteOptions(compress=Compression("zstd"), chunk=2, zarr_shard=4),
    "gzip": WriteOptions(compress=Compression("gzip", 1)),
    "blosc": WriteOptions(compress=Compression("blosc"), zarr_shard=4),
    "blosc-files": WriteOptions(compress=Compression("blosc"), zarr_shard=0, chunk=3),
    "v2-zstd": WriteOptions(zarr_format=2, compress=Compression("zstd", 5), chunk=3),
    "v2-blosc": WriteOptions(zarr_format=2, compress=Compression("blosc")),
}


def contents(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {"": path.read_bytes()}
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def opened(path: Path, **options: object):
    return ZARR.open(path, OpenOptions(**options), None)


def check_library(path: Path, schema: Schema, batch: dict) -> None:
    """zarr-python sees the same bits, by the documented encoding."""
    store = zarr.storage.ZipStore(path, mode="r") if path.is_file() else str(path)
    root = zarr.open_group(store, mode="r")
    assert root.attrs["dsprep_fields"] == list(schema.names)
    for f in schema:
        column = batch[f.name]
        if not isinstance(column, Ragged):
            assert np.ascontiguousarray(root[f.name][...]).tobytes() == flat(column), f
            continue
        group = root[f.name]
        assert group.attrs["dsprep_kind"] == f.kind
        assert np.ascontiguousarray(group["values"][...]).tobytes() == flat(column.values), f
        assert group["count"][...].tolist() == column.lengths.tolist()
        assert group["first"][...].tolist() == column.offsets[:-1].tolist()
    if path.is_file():
        root.store.close()


def flat(array: np.ndarray) -> bytes:
    """As stored: big-endian v3 arrays come back native, so numbers are compared as native."""
    if array.dtype.names is None and array.dtype.kind in "iufc":
        array = array.astype(array.dtype.newbyteorder("="))
    return array.tobytes()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", SCHEMAS)
def test_every_schema_comes_back(tmp_path: Path, name: str, options: WriteOptions) -> None:
    schema, path = SCHEMAS[name], tmp_path / "d.zarr"
    batch = random_batch(schema, 11, seed=len(name))
    write_batch(ZARR, path, schema, batch, options, cuts=(1, 3, 4, 8))
    assert ZARR.recognises(path)
    assert recognise(path) is ZARR
    with opened(path) as source:
        assert len(source) == 11
        assert source.schema == schema
        assert source.notes == ()
        arena = Arena()
        for start, stop in ((0, 11), (0, 1), (3, 8), (10, 11), (5, 5)):
            found = source.read(start, stop, arena)
            assert_same_batch(found, take(batch, start, stop), schema)
        assert set(source.layouts()) == set(schema.names)
