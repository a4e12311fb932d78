"""What `inspect` says a random sample costs is what reading one takes: pieces, and their bytes."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from support import random_batch, reading, write_batch
from zarr.abc.store import SuffixByteRequest

from dsprep import formats
from dsprep.core.schema import Field, Schema
from dsprep.formats.options import WriteOptions
from dsprep.source.dataset import open_dataset
from dsprep.storage import scatter
from dsprep.verbs.inspect import inspect

COUNT, INNER = 600, (3, 32, 32)
X = np.random.default_rng(0).integers(0, 250, (COUNT, *INNER)).astype("u1")
SAMPLE = X[0].nbytes
CHOSEN = (7, 300, 599, 42)  # far from each other; the first one warms caches


def told(path: Path) -> tuple[float, float, str]:
    with open_dataset(path) as source:
        (facts,) = inspect(source).fields
    stored = facts.storage
    assert stored is not None
    assert stored.reads is not None
    assert stored.read_nbytes is not None
    return stored.reads, stored.read_nbytes, stored.access


# --- HDF5, as the library reads it -------------------------------------------------------------


class Counted(io.FileIO):
    """A file that notes how much is read at a time."""

    sizes: list[int]

    def readinto(self, buffer: Any) -> int:
        done = super().readinto(buffer)
        self.sizes.append(done)
        return done


# With the shuffle filter alone, a chunk is stored in as many bytes as it has.
HDF5 = {
    "contiguous": ({}, 1, SAMPLE),
    "filtered": ({"chunks": (50, 3, 32, 32), "shuffle": True}, 1, 50 * SAMPLE),
    "tiled": ({"chunks": (250, 1, 4, 8), "shuffle": True}, 96, 250 * SAMPLE),
    "uneven": ({"chunks": (10, 2, 32, 32), "shuffle": True}, 2, 10 * 4 * 1024),
    "unfiltered": ({"chunks": (100, 1, 16, 16)}, 12, 100 * SAMPLE),
}


@pytest.mark.parametrize("name", HDF5)
def test_hdf5(name: str, tmp_path: Path) -> None:
    options, reads, nbytes = HDF5[name]
    path = tmp_path / "set.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=X, **options)
    raw = Counted(path)
    raw.sizes = []
    piece = nbytes // reads
    with h5py.File(raw, "r") as file:
        for i in CHOSEN:
            raw.sizes.clear()
            assert (file["x"][i] == X[i]).all()
            found = [size for size in raw.sizes if size == piece]  # others are of indexes
            if i != CHOSEN[0]:
                assert (len(found), sum(found)) == (reads, nbytes)
    raw.close()
    counted, total, access = told(path)
    assert (counted, total) == (reads, nbytes)
    if nbytes > SAMPLE:
        times = nbytes / SAMPLE
        assert f": {times:.0f}x the bytes" in access or f": {times:.1f}x the bytes" in access
    if reads > 1:
        assert f"in {reads} chunks" in access


def test_the_rows_of_a_sample_may_cross_chunks(tmp_path: Path) -> None:
    lengths = np.random.default_rng(1).integers(0, 60, 400)
    ends = np.cumsum(lengths)
    path = tmp_path / "set.h5"
    index = np.zeros(400, [("first", "<i8"), ("count", "<i8")])
    index["first"], index["count"] = ends - lengths, lengths
    with h5py.File(path, "w") as file:
        rows = file.create_dataset(
            "rows", data=np.arange(ends[-1]), chunks=(32,), compression="gzip"
        )
        file["index"] = index
        chunks = 0
        for low, high in zip(ends - lengths, ends, strict=True):
            if high > low:
                chunks += len(list(rows.iter_chunks((slice(int(low), int(high)),))))
    wanted = reading("rows@index")
    with open_dataset(path, wanted) as source:
        layout = source.storage()["rows"]
    assert layout.reads == pytest.approx(chunks / 400, rel=0.05)
    assert layout.read_nbytes == pytest.approx(chunks / 400 * 32 * 8, rel=0.05)


# --- Zarr, as zarr-python reads it -------------------------------------------------------------


class Store(zarr.storage.LocalStore):
    """A store that notes how many bytes each request for a part of an array gets."""

    got: list[int]

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        found = await super().get(key, prototype, byte_range)
        index = isinstance(byte_range, SuffixByteRequest)  # of a shard
        if found is not None and not index and not key.endswith((".json", ".zarray", ".zattrs")):
            self.got.append(len(found.to_bytes()))
        return found


ZARR = {
    "chunks": ({"chunks": (50, 2, 32, 32)}, 2, 50 * 4 * 1024),
    "tiled": ({"chunks": (250, 1, 4, 8)}, 96, 250 * SAMPLE),
    "shards": ({"chunks": (10, 1, 32, 32), "shards": (100, 3, 32, 32)}, 3, 10 * SAMPLE),
}


@pytest.mark.parametrize("name", ZARR)
def test_zarr(name: str, tmp_path: Path) -> None:
    options, reads, nbytes = ZARR[name]
    path = tmp_path / "set.zarr"
    root = zarr.open_group(path, mode="w")
    array = root.create_array(
        "x", shape=X.shape, dtype=X.dtype, compressors=None, filters=None, fill_value=255, **options
    )
    array[...] = X
    store = Store(path, read_only=True)
    store.got = []
    read = zarr.open_array(store, path="x", mode="r")
    for i in CHOSEN:
        store.got.clear()
        assert (read[i] == X[i]).all()
        merged = name == "shards" and len(store.got) == 1  # into one request, by newer ones
        assert merged or (len(store.got), sum(store.got)) == (reads, nbytes)
    counted, total, access = told(path)
    assert (counted, total) == (reads, nbytes)
    assert f"in {reads} chunks" in access
    assert "x the bytes that are wanted" in access


# --- what dsprep reads by itself ---------------------------------------------------------------

OWN = {
    "hdf5": ("hdf5", ".h5", {}),
    "hdf5-chunks": ("hdf5", ".h5", {"chunk": 16}),
    "lmdb": ("lmdb", ".lmdb", {}),
    "lmdb-leaf": ("lmdb", ".lmdb", {}),
    "tfrecord": ("tfrecord", ".tfrecord", {}),
    "zarr": ("zarr", ".zarr", {}),
    "zip": ("zarr", ".zarr.zip", {}),
}


@pytest.mark.parametrize("name", OWN)
def test_reads_of_our_own(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    format, suffix, options = OWN[name]
    schema = Schema((Field("x", np.dtype("u1"), (9,) if "leaf" in name else (32, 32, 9)),))
    batch = random_batch(schema, 64, seed=1)
    path = tmp_path / f"set{suffix}"
    write_batch(formats.load(format), path, schema, batch, WriteOptions(**options))
    reads, nbytes, _ = told(path)
    sizes: list[int] = []
    for call in ("pread", "preadv"):
        real = getattr(os, call)

        def counted(*args: Any, real: Any = real) -> Any:
            done = real(*args)
            sizes.append(done if isinstance(done, int) else len(done))
            return done

        monkeypatch.setattr(os, call, counted)
    call = scatter._call

    def scattered(*args: Any) -> int:
        sizes.append(call(*args))
        return sizes[-1]

    monkeypatch.setattr(scatter, "_call", scattered)
    with open_dataset(path) as source:
        source.read(3, 4)
        for i in (60, 11, 35):
            sizes.clear()
            source.read(i, i + 1)
            assert len(sizes) == reads
            assert sum(sizes) == pytest.approx(nbytes, abs=64)
