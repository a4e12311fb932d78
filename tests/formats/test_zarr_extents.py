"""Where samples of a store lie: read by pread from there, they are what zarr-python reads."""

from __future__ import annotations

import itertools
import os
import re
import zipfile
from contextlib import suppress
from pathlib import Path

import google_crc32c
import numcodecs
import numpy as np
import pytest
import zarr
from record_checks import located
from support import fails, random_array, random_batch, raw, write_batch
from zarr.codecs import (
    BloscCodec,
    BytesCodec,
    Crc32cCodec,
    GzipCodec,
    ShardingCodec,
    TransposeCodec,
    ZstdCodec,
)
from zarr_stores import (
    F4,
    ZARR,
    complete,
    create,
    edit,
    new_store,
    opened,
    zip_up,
)

from dsprep.core.schema import Arena, Field, Schema
from dsprep.errors import DsprepError, FormatError
from dsprep.formats import recognise
from dsprep.formats.options import Compression, OpenOptions, WriteOptions

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have a Zarr V3 specification"),
    pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr"),
    pytest.mark.filterwarnings("ignore:Combining a .sharding_indexed"),
]

X = random_array(F4, (23, 4, 6))


# --- what zarr-python wrote ----------------------------------------------------------------------

WAYS = {
    "plain": {"chunks": (5, 4, 6)},
    "split": {"chunks": (5, 3, 4)},
    "one-chunk": {"chunks": (40, 4, 6)},
    "rows": {"chunks": (1, 1, 6)},
    "compressed": {"chunks": (5, 4, 6), "compressors": "auto"},
}
V2_WAYS = {
    "slashes": {"chunks": (5, 3, 6), "chunk_key_encoding": {"name": "v2", "separator": "/"}},
    "shuffle": {"chunks": (5, 4, 6), "filters": [numcodecs.Shuffle(4)]},
    "shuffle-zlib": {
        "chunks": (5, 3, 6),
        "filters": [numcodecs.Shuffle(4)],
        "compressors": numcodecs.Zlib(3),
    },
    "crc": {"chunks": (5, 4, 6), "filters": [numcodecs.Fletcher32(), numcodecs.CRC32C()]},
    "fortran": {"chunks": (5, 4, 6), "order": "F"},
    **{
        f"compressed-{c.codec_id}": {"chunks": (5, 3, 4), "compressors": c}
        for c in (
            numcodecs.Zlib(),
            numcodecs.Zstd(),
            numcodecs.Blosc("zstd", shuffle=2),
            numcodecs.LZ4(),
            numcodecs.BZ2(),
        )
    },
}
V3_WAYS = {
    "dots": {"chunks": (5, 3, 6), "chunk_key_encoding": {"name": "default", "separator": "."}},
    "v2-keys": {"chunks": (5, 3, 6), "chunk_key_encoding": {"name": "v2", "separator": "/"}},
    "big-endian": {"chunks": (5, 4, 6), "serializer": BytesCodec(endian="big")},
    "gzip": {"chunks": (5, 3, 4), "compressors": GzipCodec()},
    "zstd": {"chunks": (5, 3, 4), "compressors": ZstdCodec(checksum=True)},
    "blosc": {"chunks": (5, 3, 4), "compressors": BloscCodec()},
    "crc": {"chunks": (5, 3, 4), "compressors": [ZstdCodec(), Crc32cCodec()]},
    "numcodecs": {
        "chunks": (5, 3, 4), "filters": None,
        "compressors": [
            {"name": "numcodecs.shuffle", "configuration": {"elementsize": 4}},
            {"name": "numcodecs.zlib", "configuration": {"level": 1}},
            {"name": "numcodecs.fletcher32", "configuration": {}},
        ],
    },
    "shards": {"chunks": (2, 4, 6), "shards": (6, 4, 6)},
    "shards-zstd": {"chunks": (2, 4, 6), "shards": (6, 4, 6), "compressors": ZstdCodec()},
    "shards-split-inside": {"chunks": (2, 2, 2), "shards": (6, 4, 4)},
    "shards-split-blosc": {"chunks": (2, 3, 4), "shards": (6, 6, 8), "compressors": BloscCodec()},
    "shards-big-endian": {
        "chunks": (2, 4, 6), "shards": (6, 4, 6), "serializer": BytesCodec(endian="big"),
    },
    **{
        f"shards-index-{place}{'-crc' * crc}{'-gzip' * gzip}": {
            "chunks": (6, 4, 8),
            "serializer": ShardingCodec(
                chunk_shape=(2, 2, 4),
                codecs=[BytesCodec(), *([GzipCodec()] if gzip else [])],
                index_codecs=[BytesCodec(), *([Crc32cCodec()] if crc else [])],
                index_location=place,
            ),
        }
        for place in ("start", "end") for crc in (False, True) for gzip in (False, True)
    },
}  # fmt: skip
ZIPPED = {"plain", "split", "slashes", "compressed", "shards", "shards-zstd", "shards-split-blosc"}
ALL_WAYS = [
    pytest.param(v, how, zipped, id=f"v{v}-{n}{'-zip' * zipped}")
    for v, ways in ((2, {**WAYS, **V2_WAYS}), (3, {**WAYS, **V3_WAYS}))
    for n, how in ways.items()
    for zipped in (False, True)[: 1 + (n in ZIPPED)]
]


@pytest.mark.parametrize(("version", "how", "zipped"), ALL_WAYS)
def test_arrays_of_zarr_python(tmp_path: Path, version: int, how: dict, zipped: bool) -> None:
    path = tmp_path / ("a.zip" if zipped else "a")
    root = new_store(path, version, attributes={"title": "t"})
    create(root, "deep/down/x", X, **how)
    create(root, "y", np.arange(23, dtype="i2"), chunks=(7,))
    complete(root)
    assert recognise(path) is ZARR
    with opened(path) as source:
        assert source.schema.names == ("deep/down/x", "y")
        assert source.schema.attrs == {"title": "t"}
        layout = located(ZARR, path)[0]
        arena = Arena()
        for start, stop in ((0, 23), (4, 5), (5, 17), (22, 23)):
            found = source.read(start, stop, arena)
            x = found["deep/down/x"]
            assert x.dtype == source.schema["deep/down/x"].dtype
            assert x.astype("<f4").tobytes() == X[start:stop].tobytes()
            assert found["y"].tolist() == list(range(start, stop))
        assert all(layout.access for layout in source.storage().values())
    assert layout.columns["y"].grid.fill is None
    foreign = how.get("order") == "F" or "fletcher32" in str(how) or how.get("filters")
    assert bool(layout.unlocated) == bool(foreign)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("version", [2, 3])
def test_missing_chunks_are_fill_values(tmp_path: Path, version: int, zipped: bool) -> None:
    path = tmp_path / ("a.zip" if zipped else "a")
    nan = float(np.array([0x7FA12345], "<u4").view(F4)[0])
    root, shards = new_store(path, version), {"chunks": (1, 2), "shards": (4, 4)}
    ways = [{"chunks": (2, 3)}, {"chunks": (2, 2), "compressors": "auto"}]
    ways += [shards, {**shards, "compressors": "auto"}] if version == 3 else []
    for (i, how), fill in itertools.product(enumerate(ways), (7.5, 0, nan)):
        values = np.full((17, 3), fill, F4)
        values[[0, 5, 6, 16]] = 1
        create(root, f"x{i}-{fill}", values, fill_value=fill, **how)
        empty = {"dtype": ">f4" if version == 2 else F4, "fill_value": fill, "filters": None}
        root.create_array(f"none{i}-{fill}", shape=(17, 3), **{"compressors": None, **empty, **how})
    expected = {name: np.asarray(array[...]) for name, array in root.arrays()}
    complete(root)
    with opened(path, axis="first") as source:
        layout, _ = located(ZARR, path, OpenOptions(sample_axis="first"))
        for start, stop in ((0, 17), (3, 6), (16, 17)):
            for name, column in source.read(start, stop).items():
                native = column.astype(expected[name].dtype)
                assert raw(native) == raw(expected[name][start:stop]), name
        assert not layout.unlocated
        assert all(c.grid.fill is not None for c in layout.columns.values())


TYPES = ["?", "u1", "i8", "f2", ">f4", ">i8", "<c16", "S3", "<U3", ">U2", "M8[ms]", "<m8[s]", "V4",
         [("a", "<i4"), ("b", "<f8")], [("a", ">i4"), ("b", "<f8"), ("c", "S3")]]  # fmt: skip


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("version", ["2", "2 compressed", "3", "3 compressed", "3 big"])
def test_dtypes(tmp_path: Path, dtype: str | list, version: str) -> None:
    dtype = np.dtype(dtype)
    if "3" in version and dtype.names == ("a", "b", "c"):
        return  # v3 has no big-endian members
    values = random_array(dtype, (11, 3))
    how = {"compressors": "auto" if "compressed" in version else None, "filters": None}
    if "3" in version:
        how["serializer"] = BytesCodec(endian="big" if "big" in version else "little")
    array = zarr.create_array(tmp_path / "a", shape=(15, 3), dtype=dtype, chunks=(4, 2),
                              zarr_format=int(version[0]), **how)  # fmt: skip
    array[:11] = values
    with opened(tmp_path / "a") as source:
        assert not located(ZARR, tmp_path / "a")[0].unlocated
        field = source.schema["data"]
        expected = np.asarray(array[:])
        assert raw(source[:]["data"].astype(expected.dtype)) == raw(expected)
    assert field.dtype == dtype or "3" in version


@pytest.mark.parametrize("version", [2, 3])
def test_arrays_at_the_root_and_without_axes(tmp_path: Path, version: int) -> None:
    path, how = tmp_path / "root", {"zarr_format": version, "compressors": None}
    keys = {"name": "v2", "separator": "/"}
    zarr.create_array(path, data=X, chunks=(5, 2, 3), chunk_key_encoding=keys, **how)
    grid = located(ZARR, path)[0].columns["data"].grid
    assert (grid.shape, grid.blocks.path, grid.fill) == ((23, 4, 6), "{0}/{1}/{2}", None)
    zip_up(path, tmp_path / "root.zip", "in/here")
    grid = located(ZARR, tmp_path / "root.zip")[0].columns["data"].grid
    assert (grid.blocks.path, grid.files, grid.fill) == ("", None, None)
    root = zarr.create_group(tmp_path / "whole", zarr_format=version)
    create(root, "x", X, chunks=(5, 4, 3))
    create(root, "y", np.array(3.5), compressors="auto")
    create(root, "gone", np.zeros((), "<i2"))
    create(root, "none", np.zeros((0, 3)))
    layout = located(ZARR, tmp_path / "whole", OpenOptions(sample_axis="none"))[0]
    assert (layout.count, layout.unlocated) == (1, {})
    assert layout.columns["x"].lines == 23
    assert layout.columns["y"].grid.shape == (1,)
    assert layout.columns["none"].grid is None


def inside(**how) -> dict:
    return {"chunks": (6, 4, 6), "serializer": ShardingCodec(chunk_shape=(2, 4, 6), **how)}


ROWS, TURNED = {"chunks": (5, 4, 6)}, {"filters": [TransposeCodec(order=(2, 1, 0))]}
UNLOCATED = {
    "Fortran": (2, {**ROWS, "order": "F"}),
    "delta": (2, {**ROWS, "filters": [numcodecs.Delta("<f4")]}),
    "lzma": (2, {**ROWS, "compressors": numcodecs.LZMA()}),
    "crc32c": (2, {**ROWS, "compressors": numcodecs.CRC32C(location="start")}),
    "transpose": (3, {**ROWS, **TURNED}),
    "codec transpose": (3, {"chunks": (2, 4, 6), "shards": (6, 4, 6), **TURNED}),
    "sharding_indexed": (3, inside(codecs=[ShardingCodec(chunk_shape=(2, 4, 6))])),
    "as a whole": (3, {**inside(), "compressors": ZstdCodec()}),
    "index": (3, inside(index_codecs=[BytesCodec(endian="big"), Crc32cCodec()])),
}


@pytest.mark.parametrize("reason", UNLOCATED)
def test_what_only_zarr_reads_is_said(tmp_path: Path, reason: str) -> None:
    version, how = UNLOCATED[reason]
    root = zarr.create_group(tmp_path / "a", zarr_format=version)
    create(root, "x", X, **how)
    create(root, "y", np.arange(23), chunks=(7,))
    with opened(tmp_path / "a") as source:
        layout = source.extents()
        assert list(layout.columns) == ["y"]
        assert list(layout.unlocated) == ["x"]
        assert re.search(f"only zarr reads .*{reason}", layout.unlocated["x"])
        if reason != "delta":  # it loses bits
            assert source.read(3, 20)["x"].tobytes() == X[3:20].tobytes()


def test_strings_and_compressed_members_are_not_located(tmp_path: Path) -> None:
    root = zarr.create_group(tmp_path / "a", zarr_format=3)
    array = root.create_array("s", shape=(5,), dtype=str, chunks=(2,))
    array[:] = np.array(["a", "", "ccc", "d", "e"], object)
    create(root, "x{0}", np.arange(5), chunks=(2,))
    create(root, "x", np.arange(5), chunks=(2,))
    layout, _ = located(ZARR, tmp_path / "a")
    assert sorted(layout.unlocated) == ["s", "x{0}"]
    zip_up(tmp_path / "a", tmp_path / "a.zip", how=zipfile.ZIP_DEFLATED)
    with opened(tmp_path / "a.zip") as source:
        layout = source.extents()
    assert sorted(layout.unlocated) == ["s", "x", "x{0}"]
    assert "ZIP" in layout.unlocated["x"]


# --- what dsprep wrote ---------------------------------------------------------------------------

OPTIONS = {
    "v3": WriteOptions(chunk=2, zarr_shard=6),
    "v3-zstd": WriteOptions(chunk=2, zarr_shard=6, compress=Compression("zstd")),
    "v2-blosc": WriteOptions(chunk=3, zarr_format=2, compress=Compression("blosc")),
}


# --- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["plain", "zstd", "shards", "shards-zstd", "shards-index-start"])
def test_chunks_that_are_cut_off_or_no_files(tmp_path: Path, way: str) -> None:
    file = damaged_store(tmp_path / "a", {**WAYS, **V3_WAYS}[way])
    data = file.read_bytes()
    cuts = [data[:n] for n in sorted({0, 1, 15, 100, len(data) // 2, len(data) - 1})]
    for damaged in (*cuts, *([data + b"0"] if way == "plain" else []), None):
        if damaged is None:
            file.unlink()
            os.mkfifo(file)
        else:
            file.write_bytes(damaged)
        with opened(tmp_path / "a") as source:
            if way != "zstd" or not damaged:  # a chunk of any size may be one: decoding tells
                fails(lambda: source.extents(), FormatError)
            for _ in range(2):  # what is wrong is not kept
                fails(lambda: source.read(0, 23), FormatError)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_the_index_of_a_shard_is_checked(tmp_path: Path, codec: str) -> None:
    inner = {"codecs": [BytesCodec(), *([ZstdCodec()] if codec == "zstd" else [])]}
    file = damaged_store(tmp_path / "a", inside(**inner))
    data = file.read_bytes()
    body, most = len(data) - 52, len(data)
    wrong = [(most, 1), (most - 1, 2), (0, most + 1), (2**64 - 2, 2**64 - 1), (2**63, 1),
             (1, 2**64 - 1), (2**64 - 1, 1), (5, 0), (0, 191)]  # fmt: skip
    for offset, nbytes in wrong[: len(wrong) - (codec == "zstd")]:
        entries = bytearray(data[body:-4])
        entries[16:32] = np.array([offset, nbytes], "<u8").tobytes()
        crc = google_crc32c.value(bytes(entries)).to_bytes(4, "little")
        file.write_bytes(data[:body] + entries + crc)
        with opened(tmp_path / "a") as source:
            for call in (source.extents, lambda: source.read(0, 23)):
                fails(call, FormatError, "entry 1 ")
    file.write_bytes(data[:-4] + b"0000")
    with opened(tmp_path / "a") as source, pytest.raises(FormatError, match="CRC"):
        source.read(0, 23)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("how", OPTIONS)
def test_a_missing_file_of_dsprep_is_damage(tmp_path: Path, how: str, zipped: bool) -> None:
    schema = Schema((Field("x", F4, (3,)), Field("r", F4, (None,))))
    write_batch(ZARR, tmp_path / "a", schema, random_batch(schema, 20), OPTIONS[how])
    lost = {}
    for name, part in (("x", "x"), ("r", "r/first")):
        files = [p for p in (tmp_path / "a" / part).iterdir() if p.name[-1] in "0123456789"]
        lost[name] = f"{part}/{min(files).name}"
        min(files).unlink()
    path = tmp_path / "a"
    if zipped:  # and compressed, so that zarr-python reads it
        path = zip_up(path, tmp_path / "a.zip", how=zipfile.ZIP_DEFLATED)
    for name, key in lost.items():
        with opened(path, name) as source:
            for read in (lambda s: s.read(0, 20), lambda s: s.extents())[: 1 + (not zipped)]:
                with pytest.raises(FormatError, match=f"{key}: a chunk file is missing"):
                    read(source)


def damaged_store(path: Path, how: dict) -> Path:
    root = zarr.create_group(path)
    create(root, "x", X, **{"chunk_key_encoding": {"name": "default", "separator": "."}, **how})
    return path / "x" / "c.1.0.0"


@pytest.mark.parametrize(
    ("shape", "chunk"),
    [
        ([2**62, 4, 6], None),
        ([2**40, 4, 6], [1, 1, 1]),
        ([2**40, 4, 6], [2**40, 4, 6]),
        ([2**20, 2**10, 2**10], [1, 1, 1]),
        ([1] * 31 + [2**35], [1] * 32),
    ],
)
def test_impossible_sizes(tmp_path: Path, shape: list, chunk: list | None) -> None:
    damaged_store(tmp_path / "a", WAYS["plain"])
    grid = {"name": "regular", "configuration": {"chunk_shape": chunk or [5, 4, 6]}}
    edit(tmp_path / "a/x/zarr.json", shape=shape, chunk_grid=grid)
    with suppress(FormatError), opened(tmp_path / "a") as source:
        assert "x" in source.extents().unlocated


@pytest.mark.parametrize("dtype", ["f4,(07,2)f4", "(((", "<U99999999999999"])
@pytest.mark.parametrize(("file", "key"), [(".zarray", "dtype"), (".zattrs", "dsprep_dtype")])
def test_dtypes_that_numpy_cannot_parse(tmp_path: Path, dtype: str, file: str, key: str) -> None:
    create(zarr.create_group(tmp_path / "a", zarr_format=2), "x", X, chunks=(5, 4, 6))
    edit(tmp_path / "a/x" / file, **{key: dtype})
    fails(lambda: opened(tmp_path / "a"), DsprepError)
