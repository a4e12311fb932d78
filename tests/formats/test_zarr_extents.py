"""Where samples of a store lie: read by pread from there, they are what zarr-python reads."""

from __future__ import annotations

import json
import os
import random
import shutil
import zipfile
from pathlib import Path

import numcodecs
import numpy as np
import pytest
import zarr
from support import random_array, random_batch, raw, write_batch
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
    check,
    complete,
    create,
    edit,
    new_store,
    no_waiting_for_the_disk,
    opened,
    read_field,
    whole_array,
    zip_up,
)

from dsprep.core.schema import Arena, Field, Ragged, Schema
from dsprep.errors import DsprepError, FormatError
from dsprep.formats import recognise
from dsprep.formats.base import Compression, WriteOptions
from dsprep.layout.laws import Affine
from dsprep.layout.laws.periodic import fit as fit_periodic

__all__ = ["no_waiting_for_the_disk"]  # a fixture of all tests here

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
    "one-large-chunk": {"chunks": (40, 9, 7)},
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
            numcodecs.GZip(),
            numcodecs.Zstd(),
            numcodecs.Blosc("lz4"),
            numcodecs.Blosc("zstd", shuffle=2),
            numcodecs.LZ4(),
            numcodecs.BZ2(),
        )
    },
}
V3_WAYS = {
    "dots": {"chunks": (5, 3, 6), "chunk_key_encoding": {"name": "default", "separator": "."}},
    "v2-keys": {"chunks": (5, 3, 6), "chunk_key_encoding": {"name": "v2", "separator": "/"}},
    "v2-dots": {"chunks": (5, 4, 6), "chunk_key_encoding": {"name": "v2", "separator": "."}},
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
    "one-shard": {"chunks": (2, 4, 6), "shards": (30, 4, 6)},
    "shards-zstd": {"chunks": (2, 4, 6), "shards": (6, 4, 6), "compressors": ZstdCodec()},
    "shards-split": {"chunks": (2, 2, 4), "shards": (6, 2, 4)},
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
        layout = check(path, source)
        arena = Arena()
        for start, stop in ((0, 23), (4, 5), (5, 17), (22, 23)):
            found = source.read(start, stop, arena)
            x = found["deep/down/x"]
            assert x.dtype == source.schema["deep/down/x"].dtype
            assert x.astype("<f4").tobytes() == X[start:stop].tobytes()
            assert found["y"].tolist() == list(range(start, stop))
        assert all(layout.access for layout in source.storage().values())
    assert layout.columns["y"].grid.fill is None
    assert bool(layout.unlocated) == (how.get("order") == "F")
    if not layout.unlocated:
        found = read_field(path, layout.columns["deep/down/x"], Field("x", F4, (4, 6)), 23)
        order = source.schema["deep/down/x"].dtype
        assert [raw(np.frombuffer(b, order).astype(F4)) for b in found] == [raw(x) for x in X]


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("version", [2, 3])
def test_missing_chunks_are_fill_values(tmp_path: Path, version: int, zipped: bool) -> None:
    path = tmp_path / ("a.zip" if zipped else "a")
    nan = np.array([0x7FA12345], "<u4").view(F4)[0]
    root = new_store(path, version)
    ways = [{"chunks": (2, 3)}, {"chunks": (2, 2), "compressors": "auto"}]
    if version == 3:
        ways += [{"chunks": (1, 2), "shards": (4, 4)}]
        ways += [{"chunks": (1, 2), "shards": (4, 4), "compressors": "auto"}]
    for i, how in enumerate(ways):
        for k, fill in enumerate((7.5, 0, float(nan))):
            values = np.full((17, 3), fill, F4)
            values[[0, 5, 6, 16]] = 1
            create(root, f"x{i}{k}", values, fill_value=fill, **how)
            root.create_array(
                f"none{i}{k}",
                shape=(17, 3),
                dtype=">f4" if version == 2 else F4,
                fill_value=fill,
                filters=None,
                **{"compressors": None, **how},
            )
    values = {name: np.asarray(array[...]) for name, array in root.arrays()}
    complete(root)
    with opened(path) as source:
        layout = check(path, source)
        for start, stop in ((0, 17), (3, 6), (16, 17)):
            for name, column in source.read(start, stop).items():
                native = column.astype(values[name].dtype)
                assert raw(native) == raw(values[name][start:stop]), name
        assert not layout.unlocated
        assert all(c.grid.fill is not None for c in layout.columns.values())
        some = layout.columns["none00"].grid
        assert isinstance(some.blocks.offsets, Affine)
        assert some.blocks.offsets.to_json(None) == -1


def test_v2_without_a_fill_value(tmp_path: Path) -> None:
    root = zarr.create_group(tmp_path / "a", zarr_format=2)
    array = root.create_array("x", shape=(9, 2), chunks=(2, 2), dtype="<i4", fill_value=None)
    array[:3] = 5
    with opened(tmp_path / "a") as source:
        check(tmp_path / "a", source)


V2_TYPES = [">f8", "|S7", "<U3", ">U2", "<M8[ns]", ">i2", "?", "<c16", "|V5",
            [("a", ">i4"), ("b", "<f8"), ("c", "S3")]]  # fmt: skip


@pytest.mark.parametrize("dtype", V2_TYPES, ids=str)
@pytest.mark.parametrize("compress", [None, "auto"])
def test_dtypes_of_v2(tmp_path: Path, dtype, compress) -> None:
    values = random_array(np.dtype(dtype), (11, 3))
    root = zarr.create_group(tmp_path / "a", zarr_format=2)
    array = root.create_array("x", shape=(15, 3), dtype=np.dtype(dtype), chunks=(4, 2),
                              compressors=compress, filters=None)  # fmt: skip
    array[:11] = values
    with opened(tmp_path / "a") as source:
        layout = check(tmp_path / "a", source)
        assert not layout.unlocated
        assert source.schema["x"].dtype == np.dtype(dtype)
        found = read_field(tmp_path / "a", layout.columns["x"], source.schema["x"], 15)
    if np.dtype(dtype).kind not in "SUV":
        assert b"".join(found[:11]) == values.tobytes()


def test_shapes_at_the_root_and_without_axes(tmp_path: Path) -> None:
    for version in (2, 3):
        path = tmp_path / f"root{version}"
        zarr.create_array(path, data=X, chunks=(5, 4, 3), zarr_format=version, compressors=None)
        with opened(path) as source:
            assert check(path, source).columns["data"].grid.shape == (23, 4, 6)
        path = tmp_path / f"whole{version}"
        root = zarr.create_group(path, zarr_format=version)
        create(root, "x", X, chunks=(5, 4, 3))
        create(root, "y", np.array(3.5), compressors="auto")
        create(root, "gone", np.zeros((), "<i2"))
        create(root, "none", np.zeros((0, 3)))
        with opened(path, axis="none") as source:
            layout = check(path, source)
            assert layout.count == 1
            assert not layout.unlocated
            assert layout.columns["x"].lines == 23
            assert layout.columns["y"].grid.shape == (1,)
            assert layout.columns["none"].grid is None


@pytest.mark.parametrize("dtype", [">f4", "<U3", "<M8[ms]", "<c16", ">i8", "?"])
@pytest.mark.parametrize("endian", ["little", "big"])
def test_dtypes_of_v3(tmp_path: Path, dtype: str, endian: str) -> None:
    values = random_array(np.dtype(dtype), (11, 3))
    array = zarr.create_array(tmp_path / "a", shape=(15, 3), dtype=np.dtype(dtype), chunks=(4, 2),
                              compressors=None, serializer=BytesCodec(endian=endian))  # fmt: skip
    array[:11] = values
    with opened(tmp_path / "a") as source:
        layout = check(tmp_path / "a", source)
        assert not layout.unlocated
        field = source.schema["data"]
        found = read_field(tmp_path / "a", layout.columns["data"], field, 15)
        assert np.frombuffer(b"".join(found), field.dtype).astype(dtype).tobytes() == (
            np.asarray(array[:]).astype(dtype).tobytes()
        )


def test_structures_of_v3(tmp_path: Path) -> None:
    values = random_array(np.dtype([("a", "<i4"), ("b", "<f8")]), (11,))
    path = tmp_path / "a"
    array = zarr.create_array(path, shape=(11,), dtype=values.dtype, chunks=(4,), compressors=None)
    array[:] = values
    with opened(path) as source:
        assert not check(path, source).unlocated
    codec = {"name": "bytes", "configuration": {"endian": "big"}}
    document = json.loads((path / "zarr.json").read_text())
    (path / "zarr.json").write_text(json.dumps({**document, "codecs": [codec]}))
    with opened(path) as source:
        assert "big-endian" in source.extents().unlocated["data"]


def test_keys_at_the_root_and_roots_in_a_folder(tmp_path: Path) -> None:
    for version in (2, 3):
        path = tmp_path / f"a{version}"
        keys = {"name": "v2", "separator": "/"}
        zarr.create_array(path, data=X, chunks=(5, 2, 3), zarr_format=version, compressors=None,
                          chunk_key_encoding=keys)  # fmt: skip
        with opened(path) as source:
            grid = check(path, source).columns["data"].grid
        assert grid.blocks.path == "{0}/{1}/{2}"
        assert grid.fill is None
        zip_up(path, tmp_path / f"{version}.zip", "in/here")
        with opened(tmp_path / f"{version}.zip") as source:
            grid = check(tmp_path / f"{version}.zip", source).columns["data"].grid
        assert (grid.blocks.path, grid.files, grid.fill) == ("", None, None)


def test_links(tmp_path: Path) -> None:
    path = tmp_path / "a"
    zarr.create_array(path, data=X, chunks=(5, 2, 6), compressors=None)
    (path / "c/1").rename(tmp_path / "elsewhere")
    (path / "c/1").symlink_to(tmp_path / "elsewhere")
    with opened(path) as source:
        assert check(path, source).columns["data"].grid.fill is None
    for name in ("0", "1"):
        shutil.move(path / "c" / name, tmp_path / f"moved{name}")
        (path / "c" / name).symlink_to("../c")
    with opened(path) as source, pytest.raises(FormatError, match="links"):
        source.extents()


UNLOCATED = {
    "fortran": (2, {"chunks": (5, 4, 6), "order": "F"}, "Fortran"),
    "delta": (2, {"chunks": (5, 4, 6), "filters": [numcodecs.Delta("<f4")]}, "delta"),
    "lzma": (2, {"chunks": (5, 4, 6), "compressors": numcodecs.LZMA()}, "lzma"),
    "crc-before": (
        2,
        {"chunks": (5, 4, 6), "compressors": numcodecs.CRC32C(location="start")},
        "crc32c",
    ),
    "transpose": (
        3,
        {"chunks": (5, 4, 6), "filters": [TransposeCodec(order=(2, 1, 0))]},
        "transpose",
    ),
    "shards-transpose": (
        3,
        {
            "chunks": (2, 4, 6),
            "shards": (6, 4, 6),
            "filters": [TransposeCodec(order=(2, 1, 0))],
        },
        "transpose",
    ),
    "shards-in-shards": (
        3,
        {
            "chunks": (6, 4, 6),
            "serializer": ShardingCodec(
                chunk_shape=(6, 4, 6), codecs=[ShardingCodec(chunk_shape=(2, 4, 6))]
            ),
        },
        "sharding_indexed",
    ),
    "shards-encoded": (
        3,
        {
            "chunks": (6, 4, 6),
            "serializer": ShardingCodec(chunk_shape=(2, 4, 6)),
            "compressors": ZstdCodec(),
        },
        "as a whole",
    ),
    "index-encoded": (
        3,
        {
            "chunks": (6, 4, 6),
            "serializer": ShardingCodec(
                chunk_shape=(2, 4, 6), index_codecs=[BytesCodec(endian="big"), Crc32cCodec()]
            ),
        },
        "index",
    ),
}


@pytest.mark.parametrize("name", UNLOCATED)
def test_what_only_zarr_reads_is_said(tmp_path: Path, name: str) -> None:
    version, how, reason = UNLOCATED[name]
    root = zarr.create_group(tmp_path / "a", zarr_format=version)
    create(root, "x", X, **how)
    create(root, "y", np.arange(23), chunks=(7,))
    with opened(tmp_path / "a") as source:
        layout = source.extents()
    assert list(layout.columns) == ["y"]
    assert list(layout.unlocated) == ["x"]
    assert "only zarr reads" in layout.unlocated["x"]
    assert reason in layout.unlocated["x"]


def test_strings_and_compressed_members_are_not_located(tmp_path: Path) -> None:
    root = zarr.create_group(tmp_path / "a", zarr_format=3)
    array = root.create_array("s", shape=(5,), dtype=str, chunks=(2,))
    array[:] = np.array(["a", "", "ccc", "d", "e"], object)
    create(root, "x{0}", np.arange(5), chunks=(2,))
    create(root, "x", np.arange(5), chunks=(2,))
    with opened(tmp_path / "a") as source:
        layout = check(tmp_path / "a", source)
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
    "v3-plain": WriteOptions(chunk=3, zarr_shard=0),
    "v3-default": WriteOptions(),
    "v2": WriteOptions(chunk=3, zarr_format=2),
    "v2-blosc": WriteOptions(chunk=3, zarr_format=2, compress=Compression("blosc")),
}


@pytest.mark.parametrize("how", OPTIONS)
def test_no_samples(tmp_path: Path, how: str) -> None:
    schema = Schema((Field("x", F4, (3,)), Field("r", F4, (None, 2)), Field.opaque("b")))
    write_batch(ZARR, tmp_path / "a", schema, random_batch(schema, 0), OPTIONS[how])
    with opened(tmp_path / "a") as source:
        layout = check(tmp_path / "a", source)
    assert all(c.grid is None for c in layout.columns.values())


def test_bytes_with_a_type(tmp_path: Path) -> None:
    field = Field.opaque("b")
    schema = Schema((field,))
    values = random_array(F4, (13, 6))
    batch = {"b": Ragged.pack([v.tobytes() for v in values], field)}
    write_batch(ZARR, tmp_path / "a", schema, batch)
    for spec, shape in (("b:<f4[6]", (6,)), ("c=b:<f4[None,2]", (None, 2)), ("b:str", (None,))):
        if spec == "b:str":
            continue
        with opened(tmp_path / "a", spec) as source:
            layout = check(tmp_path / "a", source)
            (name,) = source.schema.names
            assert source.schema[name].shape == shape
            found = read_field(tmp_path / "a", layout.columns[name], source.schema[name], 13)
            assert found == [v.tobytes() for v in values]
    with opened(tmp_path / "a", "b:<f4[5]") as source, pytest.raises(FormatError, match="fit"):
        source.extents()
    with opened(tmp_path / "a", "b:<f4[None,5]") as source, pytest.raises(FormatError, match="fit"):
        source.extents()


def test_renamed_fields(tmp_path: Path) -> None:
    schema = Schema((Field("x", F4, (3,)), Field("y", F4)))
    write_batch(ZARR, tmp_path / "a", schema, random_batch(schema, 9))
    with opened(tmp_path / "a", "z=x") as source:
        assert list(check(tmp_path / "a", source).columns) == ["z"]


# --- laws ----------------------------------------------------------------------------------------


def test_regular_shards_are_periodic(tmp_path: Path) -> None:
    schema = Schema((Field("x", F4, (3,)),))
    write_batch(ZARR, tmp_path / "a", schema, random_batch(schema, 95), OPTIONS["v3"])
    root = zarr.create_group(tmp_path / "b")
    create(root, "x", random_array(F4, (95, 4)), chunks=(2, 2), shards=(6, 4))
    for name in ("a", "b"):
        with opened(tmp_path / name) as source:
            grid = check(tmp_path / name, source).columns["x"].grid
        blocks = grid.blocks
        assert blocks.path == "x/c.{0}.{1}" if name == "a" else "x/c/{0}/{1}"
        assert isinstance(blocks.lengths, Affine)
        period = 3 if name == "a" else 6
        law = fit_periodic(blocks.offsets.span(0, blocks.count), period)
        assert law is not None
        assert law.period == period


def test_plain_chunks_are_affine(tmp_path: Path) -> None:
    root = zarr.create_group(tmp_path / "a")
    create(root, "x", random_array(F4, (95, 4)), chunks=(2, 2))
    with opened(tmp_path / "a") as source:
        blocks = check(tmp_path / "a", source).columns["x"].grid.blocks
    assert blocks.offsets.to_json(None) == 0
    assert blocks.lengths.to_json(None) == 16


# --- damage --------------------------------------------------------------------------------------


def damaged_store(path: Path, how: dict) -> Path:
    root = zarr.create_group(path)
    create(root, "x", X, **{"chunk_key_encoding": {"name": "default", "separator": "."}, **how})
    return path / "x" / "c.1.0.0"


@pytest.mark.parametrize("way", ["plain", "zstd", "shards", "shards-zstd", "shards-index-start"])
def test_truncated_chunks(tmp_path: Path, way: str) -> None:
    file = damaged_store(tmp_path / "a", {**WAYS, **V3_WAYS}[way])
    data = file.read_bytes()
    for nbytes in sorted({0, 1, 15, 100, len(data) // 2, len(data) - 1}):
        file.write_bytes(data[:nbytes])
        with opened(tmp_path / "a") as source:
            if way == "zstd" and nbytes:  # a chunk of any size may be one: decoding tells
                with pytest.raises(FormatError):
                    check(tmp_path / "a", source)
            else:
                with pytest.raises(FormatError):
                    source.extents()
    file.write_bytes(data + b"\0")
    if way == "plain":
        with opened(tmp_path / "a") as source, pytest.raises(FormatError, match="wrong size"):
            source.extents()


def test_entries_beyond_the_file(tmp_path: Path) -> None:
    how = {
        "chunks": (6, 4, 6),
        "serializer": ShardingCodec(
            chunk_shape=(2, 4, 6), codecs=[BytesCodec(), ZstdCodec()], index_codecs=[BytesCodec()]
        ),
    }
    file = damaged_store(tmp_path / "a", how)
    data = file.read_bytes()
    for offset, nbytes in (
        (len(data), 1),
        (len(data) - 1, 2),
        (0, len(data) + 1),
        (2**64 - 2, 2**64 - 1),
        (2**63, 1),
        (1, 2**64 - 1),
        (2**64 - 1, 1),
        (5, 0),
    ):
        entry = np.array([offset, nbytes], "<u8").tobytes()
        file.write_bytes(data[:-32] + entry + data[-16:])
        with opened(tmp_path / "a") as source, pytest.raises(FormatError, match="entry 1 "):
            source.extents()


@pytest.mark.parametrize("zipped", [False, True])
def test_a_missing_file_of_dsprep_is_damage(tmp_path: Path, zipped: bool) -> None:
    schema = Schema((Field("x", F4, (3,)), Field("r", F4, (None,))))
    for how in OPTIONS:
        path = tmp_path / how
        write_batch(ZARR, path, schema, random_batch(schema, 20), OPTIONS[how])
        for lost in ("x", "r/values"):
            (at, *_) = sorted(
                p for p in (path / lost).iterdir() if p.suffix != ".json" and p.name[0] != "."
            )
            data = at.read_bytes()
            at.unlink()
            target = path
            if zipped:
                target = tmp_path / f"{how}.zip"
                zip_up(path, target)
            with opened(target) as source, pytest.raises(FormatError, match="missing"):
                source.extents()
            at.write_bytes(data)


def test_no_pipe_is_waited_for(tmp_path: Path) -> None:
    file = damaged_store(tmp_path / "a", WAYS["plain"])
    file.unlink()
    os.mkfifo(file)
    with opened(tmp_path / "a") as source, pytest.raises(FormatError, match="regular"):
        source.extents()


def test_what_is_no_chunk_is_passed_over(tmp_path: Path) -> None:
    file = damaged_store(tmp_path / "a", WAYS["plain"])
    for name in (
        "c.01.0.0",
        "c.9.0.0",
        "c.1.0",
        "c.1.0.0.0",
        "c.x.0.0",
        "c.-1.0.0",
        "c.\u0661.0.0",
    ):
        file.with_name(name).write_bytes(b"x")
    file.with_name("c.0.1.0").symlink_to("nowhere")
    with opened(tmp_path / "a") as source:
        check(tmp_path / "a", source)


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": [2**62, 4, 6]},
        {"shape": [2**60, 1, 1]},
        {"shape": [2**40, 4, 6], "chunk": [1, 1, 1]},
        {"shape": [2**40, 4, 6], "chunk": [2**40, 4, 6]},
        {"shape": [2**20, 2**10, 2**10], "chunk": [1, 1, 1]},
        {"shape": [1] * 31 + [2**35], "chunk": [1] * 32},
    ],
)
def test_impossible_sizes(tmp_path: Path, changes: dict) -> None:
    damaged_store(tmp_path / "a", WAYS["plain"])
    file = tmp_path / "a/x/zarr.json"
    document = json.loads(file.read_text())
    document["shape"] = changes["shape"]
    if "chunk" in changes:
        document["chunk_grid"]["configuration"]["chunk_shape"] = changes["chunk"]
    file.write_text(json.dumps(document))
    try:
        with opened(tmp_path / "a") as source:
            layout = source.extents()
    except FormatError:
        return
    assert "x" in layout.unlocated


@pytest.mark.parametrize("dtype", ["f4,(07,2)f4", "(((", "<U99999999999999"])
@pytest.mark.parametrize("at", ["dtype", "attribute"])
def test_dtypes_that_numpy_cannot_parse(tmp_path: Path, dtype: str, at: str) -> None:
    root = zarr.create_group(tmp_path / "a", zarr_format=2)
    create(root, "x", X, chunks=(5, 4, 6))
    file = tmp_path / "a/x" / (".zarray" if at == "dtype" else ".zattrs")
    edit(file, **{"dtype" if at == "dtype" else "dsprep_dtype": dtype})
    with pytest.raises(DsprepError):
        opened(tmp_path / "a")


def test_zip_members_before_the_file(tmp_path: Path) -> None:
    schema = Schema((Field("x", F4, (3,)),))
    path = tmp_path / "a.zip"
    write_batch(ZARR, path, schema, random_batch(schema, 20))
    data = bytearray(path.read_bytes())
    end = data.rindex(b"PK\5\6")
    at = int.from_bytes(data[end + 16 : end + 20], "little") + 1000
    data[end + 16 : end + 20] = at.to_bytes(4, "little")  # so all offsets are 1000 too large
    path.write_bytes(data)
    with pytest.raises(FormatError, match="leaves the file"):
        opened(path)


@pytest.mark.parametrize("how", ["v3", "v3-zstd", "v2", "zip"])
def test_mutations(tmp_path: Path, how: str) -> None:
    """Bytes changed anywhere: a layout whose places are in the files, or a clear error."""
    schema = Schema((Field("x", F4, (3,)), Field("r", F4, (None,))))
    path = tmp_path / ("a.zip" if how == "zip" else "a")
    write_batch(ZARR, path, schema, random_batch(schema, 20), OPTIONS.get(how))
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    rng = random.Random(7)
    for _ in range(60):
        file = rng.choice(files)
        data = file.read_bytes()
        hurt = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            hurt[rng.randrange(len(hurt))] = rng.choice([0, 255, 48, 57, rng.randrange(256)])
        if rng.random() < 0.2:
            del hurt[rng.randrange(len(hurt)) :]
        file.write_bytes(hurt)
        try:
            with opened(path) as source:
                layout = source.extents()
                for column in layout.columns.values():
                    if column.grid is not None:
                        whole_array(path, column.grid)
        except DsprepError:
            pass
        file.write_bytes(data)


# --- identity ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["v3", "v2", "zip"])
def test_identity(tmp_path: Path, how: str) -> None:
    schema = Schema((Field("x", F4, (3,)), Field("g/r", F4, (None,))))
    path = tmp_path / ("a.zip" if how == "zip" else "a")
    write_batch(ZARR, path, schema, random_batch(schema, 20), OPTIONS.get(how))
    facts = ZARR.identity(path).values
    assert ZARR.identity(path).values == facts
    (digest,) = facts.values()
    assert len(digest) == 16
    if how == "zip":
        assert list(facts) == ["zip_directory"]
        write_batch(ZARR, path, schema, random_batch(schema, 20, seed=1))
        assert ZARR.identity(path).values != facts
        path.write_bytes(b"")
        ZARR.identity(path)
        return
    assert list(facts) == ["documents"]
    shutil.copytree(path, tmp_path / "copy")
    assert ZARR.identity(tmp_path / "copy").values == facts
    documents = [
        p for p in path.rglob("*") if p.name in ("zarr.json", ".zarray", ".zgroup", ".zattrs")
    ]
    assert len(documents) >= 7
    for file in documents:
        data = file.read_bytes()
        file.write_bytes(data + b"\n")
        assert ZARR.identity(path).values != facts
        file.write_bytes(data)
    (path / "g" / ".zmetadata").write_bytes(b"{}")
    assert ZARR.identity(path).values != facts
    (path / ("zarr.json" if how == "v3" else ".zgroup")).write_bytes(b"{")
    if how == "v3":
        with pytest.raises(FormatError):
            ZARR.identity(path)


def test_identity_of_no_store(tmp_path: Path) -> None:
    with pytest.raises(FormatError):
        ZARR.identity(tmp_path)
