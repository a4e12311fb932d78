"""What dsprep writes as Zarr: types, attributes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import zarr
from support import STRUCT, assert_same_batch, fails, random_batch, write_batch
from zarr_stores import F4, ZARR, opened

from dsprep.core.groups import Grouping
from dsprep.core.schema import Field, Schema
from dsprep.errors import UnsupportedError, UsageError
from dsprep.formats.options import Compression, WriteOptions


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
    fails(lambda: ZARR.plan(Schema((Field("x", F4),)), options), UsageError)


@pytest.mark.parametrize(
    "names",
    [("a", "a/b"), ("..",), ("a//b",), ("/a",), ("zarr.json",), ("__x",), ("a\\b",), ("x" * 256,)],
)
def test_names_that_zarr_cannot_hold_are_refused(names: tuple[str, ...]) -> None:
    schema = Schema(tuple(Field(n, F4) for n in names))
    fails(lambda: ZARR.plan(schema, WriteOptions()), UnsupportedError)


# --- in groups ---


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    schema = Schema((Field("x", np.dtype("u1"), (5,)),))
    ragged = Schema((Field("x", np.dtype("u1"), (None,)),))
    grouping = Grouping(np.array([0, 2, 4]), 1, {"x": np.array([3, 4])})
    with pytest.raises(UnsupportedError, match="HDF5"):
        ZARR.plan(ragged, WriteOptions(compress=Compression("zstd")), grouping)
    options = WriteOptions(compress=Compression("zstd"))
    with pytest.raises(UnsupportedError, match="HDF5"):
        ZARR.plan(schema, options, Grouping(np.array([0, 2, 4])), name="a.zip")


def test_padding_is_small_and_told() -> None:
    x, z = (Field(name, np.dtype("u1"), (1 << 20,)) for name in "xz")
    y, grouping = Field("y", np.dtype("<i8")), Grouping(np.arange(0, 641, 64), 1 << 20)
    for fields, name, reads in (((x, y), "", 2), ((x, y, z), "", 3), ((x, y, z), "a.zip", 1)):
        plan = ZARR.plan(Schema(fields), WriteOptions(), grouping, name=name)
        assert (plan.aligned, plan.reads) == (True, reads)
        assert plan.padding <= 0.02 * plan.nbytes
