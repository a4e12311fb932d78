"""Fields lie where the extents say, in files of dsprep's and of TensorFlow's making."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import record_checks
from record_checks import entry, message, write_groups
from record_checks import write_records as write
from support import assert_same_batch, fails, random_batch, reading, schemas, write_batch

from dsprep.core.groups import Grouping, even
from dsprep.core.schema import Field, Schema
from dsprep.errors import FormatError, UnsupportedError
from dsprep.formats import load
from dsprep.formats.base import Source
from dsprep.formats.options import Compression, WriteOptions
from dsprep.formats.tfrecord import example
from dsprep.formats.tfrecord.example import BYTES, FLOAT, INT64
from dsprep.formats.tfrecord.fields import example as recipe
from dsprep.layout.model import FileLayout

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

TFR = load("tfrecord")
ALL = dict(schemas())
RNG = np.random.default_rng(12)
F4, U1, I8 = np.dtype("<f4"), np.dtype("u1"), np.dtype("<i8")


def opened(path: Path, *specs: str, hint: Schema | None = None, **options: Any) -> Source:
    return TFR.open(path, reading(*specs, **options), hint)


def located(path: Path, *specs: str, hint: Schema | None = None, **options: Any) -> FileLayout:
    layout, _ = record_checks.located(TFR, path, reading(*specs, **options), hint)
    assert layout.records.frame == {"name": "tfrecord"}
    return layout


# --- what dsprep writes ---


def test_other_lists(tmp_path: Path) -> None:
    schema = Schema((Field("a", np.dtype("?")), Field("b", np.dtype("<i2"), (2,)), Field("c", I8)))
    path = tmp_path / "x.tfrecord"
    options = WriteOptions(features={"a": "int64", "b": "int64", "c": "bytes"})
    write_batch(TFR, path, schema, random_batch(schema, 30), options)
    layout = located(path, hint=schema)
    assert [n for n, p in layout.records.parts.items() if p.at is not None] == ["c"]


def test_fields_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    write_batch(TFR, path, ALL["mixed"], random_batch(ALL["mixed"], 30))
    layout = located(path, "pts=points:float32[None,3]", "y=label", "jpeg")
    assert layout.records.recipe["others"] is True


def test_whole_records(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tfrecord", *(RNG.bytes(12 * i) for i in range(20)))
    assert located(path, records="opaque").records.recipe is None
    located(path, "x=record:float32[None,3]", records="opaque")
    fails(lambda: opened(path, "x=record:float32[6]", records="opaque"), FormatError, "record 0")
    path = write(tmp_path / "y.tfrecord", *(RNG.bytes(24) for i in range(20)))
    located(path, "x=record:float32[6]", records="opaque")


def test_compressed_files_have_no_offsets(tmp_path: Path) -> None:
    path = tmp_path / "x.tfrecord"
    options = WriteOptions(compress=Compression("gzip"))
    write_batch(TFR, path, ALL["mixed"], random_batch(ALL["mixed"], 30), options)
    with opened(path) as source, pytest.raises(UnsupportedError, match=r"gzip stream.*convert"):
        source.extents()


# --- what others write ---


@pytest.mark.parametrize("pad", [0, 50])
@pytest.mark.parametrize(("a", "b"), [(40, 60), (4000, 6000)])
def test_records_of_one_length_that_are_not_alike(tmp_path: Path, a: int, b: int, pad: int) -> None:
    """The lengths of two features differ, and their sum does not; or their order does."""
    x, y = RNG.bytes(a), RNG.bytes(b)
    one = message(entry("a", BYTES, x), entry("b", BYTES, y))
    padded = [one + padding(pad)] if pad else []
    others = [
        message(entry("a", BYTES, y), entry("b", BYTES, x)),
        message(entry("b", BYTES, y), entry("a", BYTES, x)),
        one,
    ]
    for other in others:
        assert len(one) == len(other)
        path = write(tmp_path / "x.tfrecord", *[one] * 30, *padded, other, *[one] * 5)
        layout = located(path)
        assert {part.at is None for part in layout.records.parts.values()} == {other is not one}


def test_numbers_that_are_not_packed(tmp_path: Path) -> None:
    """Where such a number ends, only its own bytes say."""

    def loose(name: str, data: bytes) -> bytes:
        values = bytes([INT64 << 3 | 2, len(data)]) + data
        inner = b"\x0a" + bytes([len(name)]) + name.encode() + b"\x12" + bytes([len(values)])
        return b"\x0a" + bytes([len(inner) + len(values)]) + inner + values

    one = message(loose("n", b"\x08" + b"\xff" * 9 + b"\x01"))
    five = message(loose("n", b"\x08\x05\x08\x06\x08\x07\x08\x01\x08\x81\x01"))
    path = write(tmp_path / "x.tfrecord", one, one, five, one)
    with opened(path) as source:
        found = source.read(0, 4)["n"]
        assert [list(row) for row in found] == [[-1], [-1], [5, 6, 7, 1, 129], [-1]]
    located(path)


def counted_reads(monkeypatch: Any) -> list[int]:
    """The bytes of every read of a file from now on."""
    read: list[int] = []
    real = os.pread

    def counted(*args: Any) -> bytes:
        data = real(*args)
        read.append(len(data))
        return data

    monkeypatch.setattr(os, "pread", counted)
    return read


@pytest.mark.parametrize("align", [1, 1 << 16])
def test_of_large_records_only_headers_are_read(
    tmp_path: Path, monkeypatch: Any, align: int
) -> None:
    fields = [Field("x", U1, (66_000,)), Field("y", F4, (3,)), Field("z", U1, (4000,))]
    schema = Schema((*fields, *([Field("label", I8)] if align == 1 else [])))
    path, n = tmp_path / "x.tfrecord", 330
    write_groups(TFR, path, schema, random_batch(schema, n), even(n, 11, align))
    read = counted_reads(monkeypatch)
    with opened(path, hint=schema) as source:
        del read[:]
        layout = source.extents()
        assert 0 < sum(read) < path.stat().st_size / 10
        assert [p.at is None for p in layout.records.parts.values()] == (
            [False] * 3 + [True] * (align == 1)
        )
        lengths = layout.records.blocks.lengths.span(0, n)
        assert (len(set(lengths.tolist())) > 1) == (align > 1)
    data = bytearray(path.read_bytes())
    data[layout.records.blocks.offsets.one(n // 2) + layout.records.parts["z"].at - 1] ^= (
        1  # a length before a value
    )
    path.write_bytes(data)
    with pytest.raises(FormatError), opened(path, hint=schema, check_crc=False) as source:
        source.extents()


# --- padded records ---


def padding(nbytes: int) -> bytes:
    return example.padding_head(nbytes).ljust(nbytes, b"\0")


@pytest.mark.parametrize("label", ["fixed-<f4", "fixed-<i8", "mixed", "ragged-<f4", "str"])
def test_last_records_of_groups_may_be_padded(tmp_path: Path, label: str) -> None:
    schema = ALL[label]
    batch = random_batch(schema, 21, seed=4)
    for k, edges in enumerate(([0, 5, 6, 13, 20, 21], [0, 1, 2, 21], [0, 20, 21])):
        grouping = Grouping(np.array(edges), 512)
        path = tmp_path / f"{k}.tfrecord"
        write_groups(TFR, path, schema, batch, grouping)
        layout = located(path, hint=schema)
        if not schema.ragged:
            assert len(set(layout.records.blocks.lengths.span(0, 21).tolist())) > 1
            for f in schema:
                assert (layout.records.parts[f.name].at is None) == (f.dtype == I8)


@pytest.mark.parametrize("nbytes", [100, 9000])
@pytest.mark.parametrize(
    "tail", [b"\x7a", b"\x7a\x05\0", b"\x7a\x01\0\0", b"\x7a" + b"\xff" * 9], ids=repr
)
def test_padding_that_is_not_whole(tmp_path: Path, nbytes: int, tail: bytes) -> None:
    plain = message(entry("x", BYTES, RNG.bytes(nbytes)))
    for behind in (0, 5):
        path = write(tmp_path / "x.tfrecord", *[plain] * 5, plain + tail, *[plain] * behind)
        for hint in (None, Schema((Field.opaque("x"),))):
            fails(lambda: opened(path, hint=hint), FormatError, "record 5")


# --- hostile sidecars ---


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"features": None},
        {"features": ["x"]},
        {"features": {"x": "x"}},
        {"features": {"x": ["x"]}},
        {"features": {"x": ["x", "double"]}},
        {"features": {"x": ["x", 1]}},
        {"features": {"x": [[], "bytes"]}},
        {"features": {"x": ["x", "int64"]}},
        {"features": {"x": ["x", "bytes"]}, "others": 1},
        {"features": {"x": ["x", "bytes"], "other": 7}},
    ],
    ids=str,
)
def test_hostile_parameters(params: Any) -> None:
    fails(lambda: recipe(params, Schema((Field("x", F4),))), FormatError)


def test_hostile_schemas_and_records() -> None:
    rng = np.random.default_rng(1)
    kinds = [
        Field("x", F4, (None,)),
        Field("x", F4, (1 << 40,)),
        Field("x", F4, (0, 1 << 40)),
        Field("x", F4, (None, 0)),
        Field.opaque("x"),
        Field("x", I8, (2,)),
    ]
    good = message(entry("x", FLOAT, b"\0" * 8))
    for field in kinds:
        for name in ("bytes", "float", "int64"):
            schema = Schema((field,))
            try:
                made = recipe({"features": {"x": ["x", name]}}, schema)
            except FormatError:
                continue
            for _ in range(60):
                n = int(rng.integers(0, 5))
                data = np.frombuffer(good * 6, np.uint8).copy()
                data[rng.integers(0, len(data), 4)] = rng.integers(0, 256, 4)
                starts = rng.integers(0, 4, n) * len(good) + rng.integers(0, 2)
                lengths = rng.choice([len(good), 0, 5, len(good) - 1], n)
                for start, length in zip(starts, lengths, strict=True):
                    one = made.one(data[start : start + length])
                    if one is not None:
                        same = made.decode(data, np.array([start]), np.array([length]), str)
                        assert_same_batch(one, same, schema)
                try:
                    found = made.decode(data, starts, lengths, str)
                except FormatError:
                    continue
                assert len(found["x"]) == n
