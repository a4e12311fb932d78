"""What is compressed far beyond what it should hold is refused before it takes the memory."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import google_crc32c
import h5py
import numpy as np
import pytest
from support import fails

import dsprep
from dsprep.errors import FormatError
from dsprep.formats.tfrecord import example, framing

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
    from dsprep.formats.zarr import chunks

    monkeypatch.setattr(chunks, "MIN_ELEMENTS_NBYTES", 1 << 20)
    monkeypatch.setattr(chunks, "free_memory", lambda: 4 << 20)
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
        fails(lambda: dsprep.open(path), FormatError, "unpacks to far more", "gzip -dc")

    assert peak_nbytes(look) < ROOM


# --- --memory, of whole commands ---

MB = 1 << 20
PROGRAM = """
import resource, sys
from dsprep.cli import app
try:
    app(sys.argv[1:], standalone_mode=True)
finally:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print("peak", peak * 1024, file=sys.stderr)
"""


def command(*words):
    """The exit status, the output and the peak memory of a command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "MALLOC_ARENA_MAX": "2"},
    )
    said, peak = done.stderr.rsplit("peak ", 1)
    return done.returncode, done.stdout + said, int(peak)


@pytest.fixture(scope="module")
def parquet(tmp_path_factory):
    """Files of a few kB in which a column has far more, with one that has little."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder = tmp_path_factory.mktemp("parquet")

    def write(name, x, **options):
        table = pa.table({"little": pa.array(range(len(x))), "x": x})
        pq.write_table(table, folder / f"{name}.parquet", compression="zstd", **options)

    def lists(items, count):
        edges = pa.array(np.linspace(0, len(items), count + 1).astype("i4"))
        return pa.ListArray.from_arrays(edges, items)

    values = [bytes([i]) * (16 * MB) for i in range(8)]
    write("page", pa.array(values, pa.binary()), use_dictionary=False)
    write("dictionary", pa.array(values, pa.binary()))
    word = pa.array([b"1" * (5 * MB)])
    many = pa.DictionaryArray.from_arrays(pa.array(np.zeros(50, "i4")), word)
    write("stated", many)
    write("numbers", lists(pa.array(np.zeros(20_000_000, "i8")), 100))
    write("strings", lists(pa.array([b"2" * (3 * MB)] * 60, pa.binary()), 20))
    write("small", pa.array([b"3"]))
    return folder


@pytest.fixture(scope="module")
def usual(parquet):
    """What a command takes whatever it reads."""
    return command("inspect", parquet / "small.parquet")[2]


@pytest.mark.parametrize("name", ["stated", "numbers", "strings"])
def test_little_is_decoded_at_a_time(name, parquet, usual, tmp_path):
    path, out = parquet / f"{name}.parquet", tmp_path / "x.h5"
    commands = [("inspect", path, "--head", "2")]
    if name == "strings":
        commands += [("convert", path, out, "-j", 2)]
    for words in commands:
        memory = 100 if words[0] == "inspect" else 180
        status, said, peak = command(*words, "--memory", f"{memory}MiB")
        assert status == 0, said
        assert peak < usual + memory * MB, (words, peak)


@pytest.mark.parametrize("name", ["page", "dictionary"])
def test_pages_beyond_the_memory_are_refused(name, parquet, usual):
    path = parquet / f"{name}.parquet"
    words = ["inspect", path] if name == "page" else ["convert", path, parquet / "out.h5"]
    status, said, peak = command(*words, "--memory", "100MiB")
    assert status == 2
    assert "row group 0, column x: a row group cannot be decoded in the memory allowed" in said
    assert said.count("\n") == 1
    assert peak < usual + 20 * MB
    if name == "dictionary":
        return  # from here on it goes the same way
    needed = re.search(r"--memory of at least ([\d.]+ \w+)", said)[1].replace(" ", "")
    status, said, peak = command("inspect", path, "--memory", needed)
    assert status == 0, said
    assert peak < usual + 300 * MB
    status, said, peak = command("inspect", path, "--field", "little", "--memory", "64MiB")
    assert status == 0, said
    assert peak < usual + 20 * MB


def test_long_records_of_a_compressed_file(tmp_path, usual):
    """Two records of 48 MiB that are compressed 100 times."""
    size, path, rng = 48 * MB, tmp_path / "x.tfrecord", np.random.default_rng(0)
    block = rng.integers(0, 2, MB // 16, "u1").tobytes().ljust(MB, b"\0")
    head = example.entry_head(b"x", example.BYTES, size)
    head = example.example_head(len(head) + size) + head
    crc = masked_crc([head, *[block] * (size // MB)])
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(2):
            file.write(framing.headers(np.array([len(head) + size])).tobytes())
            file.write(head)
            for _ in range(size // MB):
                file.write(block)
            file.write(crc)
    status, said, peak = command("inspect", path, "--memory", "60MiB")
    assert status == 2
    assert "sample 0 cannot be read in the memory allowed" in said
    assert peak < usual + 40 * MB
    status, said, peak = command("inspect", path, "--memory", "101MB", "--head", "2")
    assert status == 0, said
    assert peak < usual + 100 * MB
    status, said, peak = command("convert", path, tmp_path / "x.h5", "--memory", "60MiB")
    assert (status, "one worker does not fit" in said) == (2, True)
    assert peak < usual + 40 * MB


def masked_crc(parts):
    """The masked CRC-32C of some bytes."""
    crc = 0
    for part in parts:
        crc = google_crc32c.extend(crc, part)
    return framing.mask(np.array([crc], np.uint32)).astype("<u4").tobytes()
