"""What dsprep writes as Zarr reads back bit by bit, in dsprep and in zarr-python."""

from __future__ import annotations

import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import zarr
from oracles import read_arrays
from support import STRUCT, assert_same_batch, fails, random_batch, take, write_batch
from zarr_stores import F4, SCHEMAS, ZARR, check, opened

from dsprep.core.schema import Arena, Field, Schema
from dsprep.errors import UnsupportedError, UsageError
from dsprep.formats.options import Compression, WriteOptions

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


def check_library(path: Path, schema: Schema, batch: dict) -> None:
    """zarr-python sees the same bits, by the documented encoding."""
    store = zarr.storage.ZipStore(path, mode="r") if path.is_file() else str(path)
    root = zarr.open_group(store, mode="r")
    assert root.attrs["dsprep_fields"] == list(schema.names)
    assert_same_batch(read_arrays(root, schema, lambda node: node.attrs), batch, schema)
    if path.is_file():
        root.store.close()


FEW = ("mixed", "empty-axis", "ragged-<f4")
CASES = [
    pytest.param(name, options, count, id=f"{name}-{label}-{count}")
    for label, options in OPTIONS.items()
    for name in SCHEMAS
    if label == "small" or name in FEW or (label == "v2-small" and name not in FEW)
    for count in (11, *((0, 1) if name == "mixed" and label in ("default", "v2-small") else ()))
]


@pytest.mark.parametrize(("name", "options", "count"), CASES)
def test_every_schema_comes_back(
    tmp_path: Path, name: str, options: WriteOptions, count: int
) -> None:
    schema = SCHEMAS[name]
    batch = random_batch(schema, count, seed=len(name))
    path = tmp_path / ("d.zarr.zip" if (len(name) + count) % 4 == 3 else "d.zarr")
    write_batch(ZARR, path, schema, batch, options, cuts=(1, 3, 4, 8))
    check_library(path, schema, batch)
    with opened(path) as source:
        assert source.schema == schema
        assert source.notes == ()
        arena = Arena()
        for start, stop in ((0, count), (0, 1), (3, 8), (10, 11), (5, 5)):
            if stop <= count:
                found = source.read(start, stop, arena)
                assert_same_batch(found, take(batch, start, stop), schema)
        assert not check(path, source).unlocated


@pytest.mark.parametrize("codec", ["none", "gzip", "zstd", "blosc"])
def test_the_same_values_give_the_same_bytes(tmp_path: Path, monkeypatch, codec: str) -> None:
    """Whatever the time, the layout in memory, the padding and the name of an integer type."""
    schema = Schema((Field("x", F4, (300, 2)), Field("s", STRUCT), Field("n", np.dtype("q"))))
    batch = random_batch(schema, 200)
    noisy = np.full((200, 16), 0xAB, "u1").view(STRUCT).reshape(200)
    for name in STRUCT.names or ():
        noisy[name] = batch["s"][name]
    other = {"x": np.asfortranarray(batch["x"]), "s": noisy, "n": batch["n"].astype("<i8")}
    plain = Schema((*schema.fields[:2], Field("n", np.dtype("i8"))))
    options = WriteOptions(compress=Compression.parse(codec))
    write_batch(ZARR, tmp_path / "a", schema, batch, options)
    monkeypatch.setattr(time, "time", lambda: 5e8)
    write_batch(ZARR, tmp_path / "b", plain, other, options)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_other_dtypes_have_documented_stand_ins(tmp_path: Path) -> None:
    dtypes = {
        "bf": (np.dtype(ml_dtypes.bfloat16), np.dtype("u2"), (4, 3)),
        "f8": (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype("u1"), (4, 3)),
        "s": (np.dtype("S7"), np.dtype("u1"), (4, 3, 7)),
        "u": (np.dtype("<U3"), np.dtype("u4"), (4, 3, 3)),
        "t": (np.dtype("<M8[ns]"), np.dtype("i8"), (4, 3)),
        "d": (np.dtype("<m8[25s]"), np.dtype("i8"), (4, 3)),
        "v": (np.dtype("V5"), np.dtype("u1"), (4, 3, 5)),
        "r": (STRUCT, np.dtype("u1"), (4, 3, 16)),
        "bu": (np.dtype(">U3"), np.dtype("u4"), (4, 3, 3)),
    }
    plain_names = ["i1", "<u2", ">i4", "<f2", "<f4", ">f8", "?", "<c8"]
    dtypes |= {n: (np.dtype(n), np.dtype(n).newbyteorder("="), (4, 3)) for n in plain_names}
    schema = Schema(tuple(Field(n, d, (3,)) for n, (d, _, _) in dtypes.items()))
    batch = random_batch(schema, 4)
    for version in (2, 3):
        path = tmp_path / f"v{version}.zarr"
        write_batch(ZARR, path, schema, batch, WriteOptions(zarr_format=version))
        with opened(path) as source:
            assert_same_batch(source[:], batch, schema)
    root = zarr.open_group(tmp_path / "v3.zarr", mode="r")
    assert {n: (d, root[n].dtype, root[n].shape) for n, (d, _, _) in dtypes.items()} == dtypes
    assert [n for n in dtypes if "dsprep_dtype" not in root[n].attrs] == plain_names


@pytest.mark.parametrize("label", ["small", "v2-small", "zstd", "blosc-files"])
def test_the_cut_into_pieces_leaves_no_trace(tmp_path: Path, label: str) -> None:
    schema, made = SCHEMAS["mixed"], []
    batch = random_batch(schema, 23)
    for i, cuts in enumerate([(), (1, 2, 3, 5, 8, 13, 21), (20,)]):
        write_batch(ZARR, tmp_path / f"{i}.zarr", schema, batch, OPTIONS[label], cuts)
        made.append(contents(tmp_path / f"{i}.zarr"))
    assert made[0] == made[1] == made[2]


def test_attributes(tmp_path: Path) -> None:
    kept = {"unit": "mm", "scale": 2.5, "list": np.array([1, 2]), "names": np.array(["a"])}
    kept |= {"top": np.float32(np.inf), "_FillValue": np.float32(-1.5)}
    lost = {"blob": b"\xff", "z": 1j, "struct": np.zeros(1, STRUCT)}
    field = Field("x", F4, (2,), attrs={**kept, **lost})
    schema = Schema((field, Field.opaque("w", "str", {"lang": "de"})), {"text": b"ascii"})
    losses = ZARR.check(schema, WriteOptions())
    assert [any(f" {name} " in clause for clause in losses) for name in lost] == [True] * 3
    write_batch(ZARR, tmp_path / "d", schema, random_batch(schema, 2))
    with opened(tmp_path / "d") as source:
        attrs = {k: np.asarray(v).tolist() for k, v in source.schema["x"].attrs.items()}
        assert attrs == {k: np.asarray(v).tolist() for k, v in kept.items()}
        assert source.schema["w"].attrs == {"lang": "de"}
        assert source.schema.attrs == {"text": "ascii"}


@pytest.mark.parametrize(
    "options",
    [
        WriteOptions(zarr_format=1),
        WriteOptions(chunk=0),
        WriteOptions(chunk=4, zarr_shard=6),
        WriteOptions(zarr_format=2, zarr_shard=8),
        WriteOptions(zarr_shard=-1),
        WriteOptions(compress=Compression("zlib")),
        WriteOptions(key_format="{index}"),
    ],
)
def test_options_that_contradict_are_refused(options: WriteOptions) -> None:
    fails(lambda: ZARR.plan(SCHEMAS["mixed"], options), UsageError)


@pytest.mark.parametrize(
    "names",
    [("a", "a/b"), ("..",), ("a//b",), ("/a",), ("zarr.json",), ("__x",), ("a\\b",), ("x" * 256,)],
)
def test_names_that_zarr_cannot_hold_are_refused(names: tuple[str, ...]) -> None:
    schema = Schema(tuple(Field(n, F4) for n in names))
    fails(lambda: ZARR.plan(schema, WriteOptions()), UnsupportedError)
