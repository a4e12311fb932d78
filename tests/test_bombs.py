"""What is compressed far beyond what it should hold is refused before it takes the memory."""

from __future__ import annotations

import bz2
import gzip
import json
import struct
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest

import dsprep
from dsprep.errors import FormatError
from dsprep.formats.tfrecord import framing

BOMB = 128 << 20
ROOM = 48 << 20
"""Bytes that reading a bomb may take: far less than what it holds."""


@pytest.fixture(scope="module")
def bombs():
    """Streams of a few hundred kB that hold `BOMB` bytes."""
    zeros = bytes(BOMB)
    return {
        "gzip": gzip.compress(zeros, 1),
        "zlib": zlib.compress(zeros, 1),
        "bz2": bz2.compress(zeros, 1),
    }


def peak_nbytes(what):
    """Return by how much the memory of this process rose at most, while `what` was called."""
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before = resident("VmRSS")
    what()
    return resident("VmHWM") - before


def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def refused(path):
    def look():
        with pytest.raises(FormatError), dsprep.open(path) as source:
            source[:]

    assert peak_nbytes(look) < ROOM


@pytest.mark.parametrize("kind", ["rows", "tiles", "holes"])
def test_hdf5(kind, bombs, tmp_path):
    path = tmp_path / "x.h5"
    chunks = (5, 40_000) if kind != "tiles" else (5, 20_000)
    with h5py.File(path, "w") as file:
        made = file.create_dataset("x", (10, 40_000), "u1", chunks=chunks, compression="gzip")
        if kind != "holes":  # else only the library knows what is in the other chunks
            made[...] = 1
        made.id.write_direct_chunk((0, 0), bombs["zlib"])
    refused(path)


def zarr_v2(path, chunk, codec, filters=None, dtype="|u1"):
    (path / "x").mkdir(parents=True)
    (path / ".zgroup").write_text('{"zarr_format": 2}')
    document = {"zarr_format": 2, "shape": [10, 20], "chunks": [5, 20], "dtype": dtype}
    document |= {"compressor": codec, "fill_value": 0, "order": "C", "filters": filters}
    (path / "x/.zarray").write_text(json.dumps(document))
    for key in ("0.0", "1.0"):
        (path / "x" / key).write_bytes(chunk)


@pytest.mark.parametrize("codec", ["gzip", "zlib", "bz2"])
def test_zarr(codec, bombs, tmp_path):
    zarr_v2(tmp_path / "x.zarr", bombs[codec], {"id": codec, "level": 1})
    refused(tmp_path / "x.zarr")


def test_zarr_in_shards(bombs, tmp_path):
    import zarr

    path = tmp_path / "x.zarr"
    group = zarr.open_group(path, mode="w")
    codec = zarr.codecs.GzipCodec(level=1)
    size = {"shape": (10, 20), "chunks": (5, 20), "shards": (10, 20), "dtype": "u1"}
    group.create_array("x", **size, compressors=codec)[...] = 1
    (shard,) = [p for p in (path / "x/c").rglob("*") if p.is_file()]
    from dsprep.formats.zarr.chunks import build_index

    nbytes = len(bombs["gzip"])
    index = build_index(np.array([nbytes, nbytes]), 2)
    shard.write_bytes(2 * bombs["gzip"] + index)
    refused(path)


def test_zarr_of_varying_length(bombs, tmp_path, monkeypatch):
    from dsprep.formats.zarr import fields

    monkeypatch.setattr(fields, "LEAST_ROOM", 1 << 20)
    monkeypatch.setattr(fields, "free_memory", lambda: 4 << 20)
    path = tmp_path / "x.zarr"
    zarr_v2(path, bombs["gzip"], {"id": "gzip", "level": 1}, [{"id": "vlen-utf8"}], "|O")
    document = json.loads((path / "x/.zarray").read_text())
    document |= {"shape": [10], "chunks": [5]}
    (path / "x/.zarray").write_text(json.dumps(document))
    for k in (0, 1):
        (path / f"x/{k}.0").rename(path / f"x/{k}")
    refused(path)


def test_tfrecord(bombs, tmp_path):
    length = struct.pack("<Q", BOMB)
    head = (
        length + framing.crc_of_lengths(np.frombuffer(length, "u1")[None]).astype("<u4").tobytes()
    )
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    data = [packer.compress(head)]
    data += [packer.compress(bytes(1 << 20)) for _ in range(BOMB >> 20)]
    data += [packer.compress(bytes(4)), packer.flush()]
    path = tmp_path / "x.tfrecord"
    path.write_bytes(b"".join(data))

    def look():
        with pytest.raises(FormatError, match=r"far more than the file holds.*gzip -dc"):
            dsprep.open(path)

    assert peak_nbytes(look) < ROOM


@pytest.mark.parametrize("dtype", [">u1", "<u1", "|u1", ">u2", "<f4"])
@pytest.mark.parametrize("codec", [None, "gzip", "bz2"])
def test_zarr_v2_of_any_byte_order(dtype, codec, tmp_path):
    values = np.arange(100, dtype=np.dtype(dtype)).reshape(5, 20)
    pack = {None: bytes, "gzip": gzip.compress, "bz2": bz2.compress}[codec]
    given = None if codec is None else {"id": codec, "level": 1}
    zarr_v2(tmp_path / "x.zarr", pack(values.tobytes()), given, dtype=dtype)
    with dsprep.open(tmp_path / "x.zarr") as source:
        assert source[:]["x"].tolist() == [*values.tolist(), *values.tolist()]
        assert source[3:4]["x"].tolist() == values[3:4].tolist()
