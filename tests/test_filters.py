"""Filters undone: as numcodecs and h5py apply them, and nothing else than that."""

from __future__ import annotations

import io
import itertools
import os
import struct
import tracemalloc
import zlib
from typing import Any

import h5py
import numcodecs
import numpy as np
import pytest
from google_crc32c import value
from hypothesis import given, settings
from hypothesis import strategies as st
from numcodecs.fletcher32 import Fletcher32
from support import fails

from dsprep.core.filters import check, decode, inflate
from dsprep.errors import FormatError


def fletcher32(data: bytes) -> bytes:
    return bytes(Fletcher32().encode(np.frombuffer(data, "u1")))


ENCODERS: dict[str, Any] = {
    "zlib": lambda d: numcodecs.Zlib(1).encode(d),
    "gzip": lambda d: numcodecs.GZip(1).encode(d),
    "zstd": lambda d: numcodecs.Zstd(1).encode(d),
    "blosc": lambda d: numcodecs.Blosc("lz4", 5, numcodecs.Blosc.BITSHUFFLE).encode(d),
    "lz4": lambda d: numcodecs.LZ4().encode(d),
    "bz2": lambda d: numcodecs.BZ2(1).encode(d),
    "fletcher32": fletcher32,
    "crc32c": lambda d: d + value(d).to_bytes(4, "little"),
}
COMPRESSORS = ("zlib", "gzip", "zstd", "blosc", "lz4", "bz2")


def encode(data: bytes, filters: list[dict[str, Any]], mask: int = 0) -> bytes:
    for i, f in enumerate(filters):
        if mask >> i & 1:
            continue
        if f["id"] == "shuffle":
            size = f["elementsize"]
            n = len(data) // size
            whole = np.frombuffer(data[: n * size], "u1").reshape(n, size)
            data = np.ascontiguousarray(whole.T).tobytes() + data[n * size :]
        else:
            data = bytes(ENCODERS[f["id"]](data))
    return data


filter_lists = st.lists(
    st.one_of(
        st.sampled_from([{"id": n} for n in ENCODERS]),
        st.builds(
            lambda n: {"id": "shuffle", "elementsize": n}, st.sampled_from([1, 2, 3, 8, 65, 5000])
        ),
    ),
    max_size=4,
)
contents = st.one_of(
    st.binary(min_size=1, max_size=300),
    st.builds(lambda b, n: b * n, st.binary(min_size=1, max_size=9), st.integers(1, 4000)),
)


@settings(max_examples=300, deadline=None)
@given(contents, filter_lists, st.integers(0, 15))
def test_round_trips(data: bytes, filters: list[dict[str, Any]], mask: int) -> None:
    check(filters, "test")
    stored = encode(data, filters, mask)
    for given_ in (stored, memoryview(stored), np.frombuffer(stored, "u1")):
        found = decode(given_, filters, mask, len(data), "test")
        assert found.dtype == np.uint8
        assert found.ndim == 1
        assert found.tobytes() == data
    for wrong in {0, len(data) - 1, len(data) + 1, 2 * len(data)} - {len(data)}:
        fails(lambda: decode(stored, filters, mask, wrong, "test"), FormatError)


@settings(max_examples=300, deadline=None)
@given(
    contents,
    filter_lists,
    st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=3),
    st.integers(0, 400),
)
def test_damage_is_an_error_or_another_content_of_the_same_size(
    data: bytes, filters: list[dict[str, Any]], flips: list[tuple[int, int]], cut: int
) -> None:
    stored = bytearray(encode(data, filters))
    for at, byte in flips:
        stored[at % len(stored)] = byte
    try:
        found = decode(bytes(stored[: len(stored) - cut]), filters, 0, len(data), "test")
    except FormatError:
        return
    assert len(found) == len(data)


@pytest.mark.parametrize("name", ["fletcher32", "crc32c"])
def test_checksums_are_compared(name: str) -> None:
    data = os.urandom(1001)
    stored = encode(data, [{"id": name}])
    for at, bit in itertools.product((0, 500, 1000, 1001, 1004), range(8)):
        flipped = bytearray(stored)
        flipped[at] ^= 1 << bit
        with pytest.raises(FormatError, match="checksum"):
            decode(bytes(flipped), [{"id": name}], 0, 1001, "chunk 7")
    assert decode(stored, [{"id": name}], 0, 1001, "test").tobytes() == data
    for short in range(4):
        fails(lambda: decode(stored[:short], [{"id": name}], 0, 1001, "test"), FormatError)


def test_fletcher32_with_swapped_halves_as_hdf5_1_6_2_wrote_it() -> None:
    stored = bytearray(fletcher32(bytes(range(100))))
    stored[-4:] = [stored[-3], stored[-4], stored[-1], stored[-2]]
    assert decode(bytes(stored), [{"id": "fletcher32"}], 0, 100, "t").tobytes() == bytes(range(100))


@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_bomb_is_refused_before_memory_is_taken(name: str) -> None:
    bomb = encode(bytes(64 << 20), [{"id": name}])
    filters = [{"id": name}]
    tracemalloc.start()
    fails(lambda: decode(bomb, filters, 0, 1000, "test"), FormatError)
    with pytest.raises(FormatError):  # claims more than any codec gives
        decode(b"x" * 100, filters, 0, 1 << 40, "test")
    fails(lambda: decode(b"x" * 100, filters * 3, 0, 1 << 40, "test"), FormatError)
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


def test_a_bomb_below_another_codec() -> None:
    filters = [{"id": "zlib"}, {"id": "zlib"}]
    bomb = zlib.compress(zlib.compress(bytes(64 << 20)))
    tracemalloc.start()
    fails(lambda: decode(bomb, filters, 0, 1000, "test"), FormatError)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_zstd_that_does_not_tell_its_size() -> None:
    frames = [  # of ``zstd -c``, which read a pipe; with and without its own checksum
        (b"sample " * 40, "28b52ffd04587500003873616d706c652001000e528b11f330638a"),
        (b"sample " * 40, "28b52ffd00587500003873616d706c652001000e528b11"),
        (
            b"abc" * 100_000,
            (
                "28b52ffd04685c0000186162630100faffe66e08440000"
                "000100fdffe60e08450000000100dd131d000149c1711e"
            ),
        ),
    ]
    for data, text in frames:
        frame = bytes.fromhex(text)
        assert decode(frame, [{"id": "zstd"}], 0, len(data), "test").tobytes() == data
        for wrong in (len(data) - 1, len(data) + 1):
            fails(lambda: decode(frame, [{"id": "zstd"}], 0, wrong, "test"), FormatError)


def test_blosc_is_not_believed_about_its_length() -> None:
    stored = bytearray(encode(os.urandom(5000), [{"id": "blosc"}]))
    struct.pack_into("<I", stored, 12, len(stored) + 1)
    fails(lambda: decode(bytes(stored), [{"id": "blosc"}], 0, 5000, "test"), FormatError, "header")


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"id": None},
        {"id": "pickle"},
        {"id": "json2"},
        {"id": "lzma"},
        {"id": ["zlib"]},
        {"id": "shuffle"},
        {"id": "shuffle", "elementsize": 0},
        {"id": "shuffle", "elementsize": True},
        {"id": "shuffle", "elementsize": 1 << 40},
        {"id": "shuffle", "elementsize": "4"},
        {"id": "zlib", "level": [1]},
        {"id": "zlib", "dict": "x"},
        {"id": "crc32c", "location": "start"},
    ],
)
def test_unknown_filters_and_parameters(bad: dict[str, Any]) -> None:
    fails(lambda: check([{"id": "zlib"}, bad], "field x"), FormatError, "field x")
    if "level" not in bad and "dict" not in bad and "location" not in bad:
        fails(lambda: decode(bytes(100), [bad], 0, 100, "field x"), FormatError)


@pytest.mark.parametrize("elements", [1, 2, 359, 360, 361, 50_000])
@pytest.mark.parametrize("dtype", ["u1", "<i2", ">f8", "S7"])
def test_chunks_that_h5py_wrote(elements: int, dtype: str) -> None:
    rng = np.random.default_rng(elements)
    x = rng.integers(0, 200, (elements, np.dtype(dtype).itemsize), "u1").view(dtype)[:, 0]
    with h5py.File(io.BytesIO(), "w") as file:
        for gzip, shuffle, checked in itertools.product((None, 4), (False, True), (False, True)):
            made = file.create_dataset(
                None, data=x, chunks=x.shape, compression=gzip, shuffle=shuffle, fletcher32=checked
            )
            filters: list[dict[str, Any]] = []
            if shuffle:
                filters.append({"id": "shuffle", "elementsize": x.dtype.itemsize})
            if gzip:
                filters.append({"id": "zlib", "level": 4})
            if checked:
                filters.append({"id": "fletcher32"})
            mask, stored = made.id.read_direct_chunk((0,))
            assert decode(stored, filters, mask, x.nbytes, "test").tobytes() == x.tobytes()


@pytest.mark.parametrize("nbytes", [0, 1000, 4 << 20, (4 << 20) + 1, 5_000_000])
def test_inflating_in_steps(nbytes: int) -> None:
    whole = np.random.default_rng(0).integers(0, 3, nbytes, dtype=np.uint8).tobytes()
    packed = zlib.compress(whole, 1)
    assert inflate(packed, nbytes).tobytes() == whole
    assert len(inflate(packed, max(0, nbytes - 9))) == min(nbytes, max(0, nbytes - 9) + 1)
    for cut in (len(packed) // 2, len(packed) - 1):
        with pytest.raises(zlib.error):
            inflate(packed[:cut], nbytes)
    assert inflate(packed + b"more", nbytes).tobytes() == whole
    assert len(inflate(zlib.compress(bytes(nbytes)), nbytes)) == nbytes
    with pytest.raises(zlib.error):
        inflate(b"\xff" * 100, nbytes)
