"""TFRecord without TensorFlow: every schema comes back bit for bit, resumed or not."""

from __future__ import annotations

import gzip
import struct
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_checks import entry, frame, message, write_records
from support import assert_same_batch, fails, random_batch, reading, schemas, write_batch

from dsprep.core.schema import Batch, Field, Ragged, Schema
from dsprep.errors import FormatError, SchemaError, TargetError, UnsupportedError, UsageError
from dsprep.formats import load
from dsprep.formats.base import Source
from dsprep.formats.options import Compression, WriteOptions
from dsprep.formats.tfrecord import example
from dsprep.formats.tfrecord.example import BYTES, FLOAT, INT64, parse_together
from dsprep.storage.paths import Candidate

TFR = load("tfrecord")
ALL = dict(schemas())
F4, I8 = np.dtype("<f4"), np.dtype("<i8")


def build(**features: tuple[int, bytes]) -> bytes:
    """One Example of features that have one range of values each."""
    return message(*(entry(name, type_, data) for name, (type_, data) in features.items()))


def ints(*values: int) -> bytes:
    return b"".join(example.varint(v % (1 << 64)) for v in values)


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def opened(path: Path, *specs: str, hint: Schema | None = None, **options: object) -> Source:
    return TFR.open(path, reading(*specs, **options), hint)


def read_all(source: Source) -> Batch:
    return source.read(0, len(source))


# --- round trips ---


def test_a_field_called_record_is_written_as_raw_records(tmp_path: Path) -> None:
    schema = Schema((Field.opaque("record"),))
    payloads = [b"", b"\x00\xff", build(x=(INT64, ints(5))), b"z" * 300]
    batch: Batch = {"record": Ragged.pack(payloads, schema.fields[0])}
    write_batch(TFR, tmp_path / "a", schema, batch)
    assert (tmp_path / "a").read_bytes() == b"".join(map(frame, payloads))
    for options in ({}, {"records": "opaque"}):
        with opened(tmp_path / "a", **options) as source:
            assert_same_batch(read_all(source), batch, schema)


@pytest.mark.parametrize(
    ("field", "feature"),
    [
        (Field("x", np.dtype("u1"), (3, 2)), "int64"),
        (Field("x", np.dtype("?"), (3,)), "int64"),
        (Field("x", np.dtype(">i4")), "int64"),
        (Field("x", np.dtype("<i2"), (None,)), "int64"),
        (Field("x", F4, (2000,)), "float"),
        (Field("x", F4, (2,)), "bytes"),
        (Field("x", I8, (None,)), "bytes"),
    ],
    ids=str,
)
def test_feature_types_that_are_asked_for(tmp_path: Path, field: Field, feature: str) -> None:
    schema, options = Schema((field,)), WriteOptions(features={"x": feature})
    batch = random_batch(schema, 9)
    write_batch(TFR, tmp_path / "a", schema, batch, options)
    with opened(tmp_path / "a", hint=schema) as source:
        assert_same_batch(read_all(source), batch, schema)
    assert f"{feature}_list" in TFR.plan(schema, options).stored["x"]


@pytest.mark.parametrize(
    ("field", "feature"),
    [
        (Field("x", np.dtype("<u8")), "int64"),
        (Field("x", np.dtype("<f2")), "float"),
        (Field("x", np.dtype(">f4")), "float"),
        (Field("x", F4, (None, 3)), "float"),
        (Field.opaque("x", "str"), "int64"),
        (Field("x", F4, (None, 0)), None),
        (Field("x", np.dtype("u1"), (1 << 31,)), None),
    ],
    ids=str,
)
def test_what_no_list_can_hold_is_refused(field: Field, feature: str | None) -> None:
    options = WriteOptions(features={"x": feature} if feature else {})
    fails(lambda: TFR.plan(Schema((field,)), options), UnsupportedError)


@pytest.mark.parametrize("codec", ["zlib", "zstd", "blosc"])
def test_other_codecs_are_refused(codec: str) -> None:
    with pytest.raises(UnsupportedError, match="gzip"):
        TFR.plan(ALL["bytes"], WriteOptions(compress=Compression(codec)))


def test_an_unknown_name_among_the_feature_types_is_refused() -> None:
    with pytest.raises(UsageError, match="nope"):
        TFR.plan(ALL["bytes"], WriteOptions(features={"nope": "bytes"}))


def test_losses_name_what_the_sidecar_keeps() -> None:
    schema = Schema(
        (Field("x", np.dtype("<f2"), (9,), attrs={"unit": "m"}), Field("y", F4)), {"by": "me"}
    )
    lost = " ".join(TFR.check(schema, WriteOptions()))
    assert "hold attributes" in lost
    assert "shape of x" in lost
    assert TFR.check(Schema((Field("y", F4, (3,)),)), WriteOptions()) == ()


# --- what is found in files of others ---


def test_fields_are_discovered(tmp_path: Path) -> None:
    payloads = [
        build(
            x=(BYTES, bytes([i] * i)),
            y=(FLOAT, floats(1, 2, i)),
            k=(INT64, ints(-i)),
            r=(INT64, ints(*range(i))),
        )
        for i in range(9)
    ]
    with opened(write_records(tmp_path / "a", *payloads)) as source:
        assert str(source.schema) == "x: bytes, y: float32[3], k: int64, r: int64[None]"
        batch = read_all(source)
        assert batch["k"].tolist() == [-i for i in range(9)]
        assert batch["y"][:, 2].tolist() == list(range(9))
        assert batch["x"][5] == b"\5" * 5
        assert batch["r"][4].tolist() == [0, 1, 2, 3]
        assert source[-1]["k"] == -8


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"\x12\x02\x0a\x00", "SequenceExample"),
        (b"\xff\xff\xff", "varint"),
        (b"", "no features"),
        (b"hello world, this is text", ""),
    ],
)
def test_other_records_are_kept_whole(tmp_path: Path, payload: bytes, why: str) -> None:
    with opened(write_records(tmp_path / "f", payload, payload)) as source:
        assert str(source.schema) == "record: bytes"
        assert why in source.notes[0]
        assert source[1]["record"] == payload


def test_types_that_are_asked_for(tmp_path: Path) -> None:
    values = np.arange(24, dtype=">i2").reshape(4, 3, 2)
    payloads = [
        build(x=(BYTES, v.tobytes()), y=(FLOAT, floats(*range(8))), k=(INT64, ints(7)))
        for v in values
    ]
    path = write_records(tmp_path / "f", *payloads)
    with opened(path, "big=x:>i2[3,2]", "y:float32[4,2]", "k:uint8") as source:
        batch = read_all(source)
        assert list(batch) == ["big", "y", "k"]
        assert batch["big"].dtype == ">i2"
        assert batch["big"].tolist() == values.tolist()
        assert batch["y"].shape == (4, 4, 2)
        assert batch["k"].dtype == np.uint8
    with opened(path, "x:int16[None,2]") as source:
        assert source.read(1, 3)["x"].lengths.tolist() == [3, 3]
    for wrong, error in (
        ("y:float64[4]", UsageError),
        ("y:float32[3]", UsageError),
        ("k:uint64", UsageError),
        ("x:int16[4,2]", UsageError),
        ("x:int16[None,4]", UsageError),
        ("z", SchemaError),
    ):
        with pytest.raises(error):
            opened(path, wrong)


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (build(x=(INT64, ints(1, 2))), "another type"),
        (b"\x12\x00", "not a tf.train.Example"),
    ],
)
def test_a_record_of_another_schema_is_named(tmp_path: Path, bad: bytes, what: str) -> None:
    good = build(x=(FLOAT, floats(1, 2)))
    if len(bad) < len(good):  # so that its length does not give it away
        bad += b"\x7a" + bytes([len(good) - len(bad) - 2]) + bytes(len(good) - len(bad) - 2)
    path = tmp_path / "f"
    path.write_bytes(frame(good) * 1000 + frame(bad) + frame(good) * 1000)
    with pytest.raises(FormatError, match=f"record 1000.*{what}") as caught:
        opened(path)
    assert "--raw-records" in str(caught.value)
    with opened(path, records="opaque") as source:
        assert len(source) == 2001
    known = Schema((Field("x", F4, (2,)),))
    with opened(path, hint=known) as source:  # as another process opens it
        assert source.read(0, 900)["x"].shape == (900, 2)
        with pytest.raises(FormatError, match=f"record 1000.*{what}"):
            source.read(900, 1100)


@pytest.mark.parametrize("widths", [(4,), (4, 12)])  # records of one size, and of several
def test_a_feature_that_one_record_has_is_not_lost(tmp_path: Path, widths: tuple[int, ...]) -> None:
    payloads = [build(x=(FLOAT, bytes(widths[i % len(widths)]))) for i in range(1000)]
    payloads[777] = build(x=(FLOAT, bytes(4)), z=(BYTES, b"lost?"))
    payloads.append(build(x=(FLOAT, bytes(400))))  # so that 777 is not the longest
    path = write_records(tmp_path / "a.tfrecord", *payloads)
    with opened(path) as source:
        assert source.schema.names == ("x", "z")
        assert list(source.read(700, 800)["z"])[76:79] == [b"", b"lost?", b""]
    hint = Schema((Field("x", F4, (None,)),))
    with opened(path, hint=hint) as source:
        source.read(0, 777)
        source.read(778, 1001)
        for start, stop in ((777, 778), (700, 800)):
            with pytest.raises(FormatError, match="feature z was not known") as caught:
                source.read(start, stop)
            assert "a.tfrecord, record 777" in str(caught.value)
            assert "dsprep provenance" in str(caught.value)
    with opened(path, hint=hint) as source, pytest.raises(FormatError, match="is a feature z"):
        source.check_types()
    with opened(path, "x", hint=hint) as source:
        assert len(source.read(0, 1001)["x"]) == 1001
    with opened(path, records="opaque") as source:
        assert len(source.read(777, 778)["record"].values) == len(payloads[777])


def test_integers_out_of_range_are_refused(tmp_path: Path) -> None:
    path = write_records(tmp_path / "f", *(build(k=(INT64, ints(v))) for v in (1, 200, 300)))
    with opened(path, "k:uint8") as source, pytest.raises(FormatError, match=r"record 2.*300"):
        read_all(source)


def test_a_sidecar_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = write_records(tmp_path / "f", build(k=(INT64, ints(1))))
    for field in (Field("k", F4), Field("z", I8), Field("k", I8, (3,))):
        fails(lambda: opened(path, hint=Schema((field,))), FormatError)


def test_the_sidecar_gives_types_and_attributes(tmp_path: Path) -> None:
    payload = build(x=(BYTES, bytes(6)), k=(INT64, ints(1)))
    path = write_records(tmp_path / "f", payload, payload)
    x = Field("x", np.dtype("<i2"), (3,), attrs={"unit": "m"})
    hint = Schema((x,), {"by": "me"})
    for specs, want in (
        ((), "x: int16[3]"),
        (("new=x",), "new: int16[3]"),
        (("x:int8[6]", "k"), "x: int8[6], k: int64"),
    ):
        with opened(path, *specs, hint=hint) as source:
            assert str(source.schema) == want
            assert source.schema.fields[0].attrs == {"unit": "m"}
            assert source.schema.attrs == {"by": "me"}
    with opened(path, hint=hint, records="opaque") as source:
        assert str(source.schema) == "record: bytes"
        assert source[0]["record"] == payload


# --- compressed files, many records ---


@pytest.mark.parametrize("pack", ["gzip", "members", "zlib"])
def test_packed_files_at_any_place(tmp_path: Path, pack: str) -> None:
    rng = np.random.default_rng(1)
    values = [rng.integers(0, 16, n, "u1").tobytes() for n in rng.integers(0, 20_000, 300)]
    plain = [frame(build(x=(BYTES, v))) for v in values]
    path = tmp_path / "f.tfrecord"
    if pack == "members":
        parts = [gzip.compress(b"".join(plain[i : i + 7]), 1) for i in range(0, 300, 7)]
        path.write_bytes(b"".join(parts))
    else:
        path.write_bytes((gzip if pack == "gzip" else zlib).compress(b"".join(plain), 1))
    assert TFR.recognises(Candidate(path))
    with opened(path) as source:
        assert len(source) == 300
        for start in (250, 0, 10, 299, 120, 121, 3):
            stop = min(300, start + 10)
            batch = source.read(start, stop)
            assert [batch["x"][i] for i in range(stop - start)] == values[start:stop]
        assert source.storage()["x"].codecs == ("zlib" if pack == "zlib" else "gzip",)


def test_packed_files_are_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    make = tempfile.TemporaryFile

    def counted(**options: Any) -> Any:
        made.append(make(**options))
        return made[-1]

    monkeypatch.setattr(tempfile, "TemporaryFile", counted)
    path = tmp_path / "f.tfrecord"
    values = [bytes([i]) * 200_000 for i in range(9)]
    path.write_bytes(gzip.compress(b"".join(frame(build(x=(BYTES, v))) for v in values)))
    with opened(path) as source:
        assert [source[i]["x"] for i in (8, 0, 4)] == [values[i] for i in (8, 0, 4)]
        assert len(made) == 1
        path.write_bytes(path.read_bytes()[::-1])
        with pytest.raises(FormatError, match="changed"):
            source[1]


def test_packed_files_need_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f.tfrecord"
    path.write_bytes(gzip.compress(frame(build(x=(BYTES, bytes(2_000_000))))))
    with Path("/dev/full").open("w+b", buffering=0) as full_disk:
        monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: full_disk)
        fails(lambda: opened(path), TargetError, "set TMPDIR")


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.binary(max_size=200), st.lists(st.integers(0, 300), max_size=3)),
        min_size=1,
        max_size=8,
    )
)
def test_both_parsers_agree(rows: list[tuple[bytes, list[int]]]) -> None:
    messages = [build(x=(BYTES, x), k=(INT64, ints(*k))) for x, k in rows]
    buffer = np.frombuffer(b"".join(map(frame, messages)), np.uint8)
    lengths = np.array(list(map(len, messages)))
    starts = np.cumsum(lengths + 16) - lengths - 4
    each = [
        example.parse(buffer.data, a, a + n) for a, n in zip(starts, lengths.tolist(), strict=True)
    ]
    together = parse_together(buffer, starts, lengths)
    for name in ("x", "k"):
        one = example.join([record[name] for record in each], each[0][name].type)
        want = [r for record in each for r in record[name].ranges]
        assert one.totals.sum() == sum(b - a for a, b in want)
        if together is not None:
            assert together[name].totals.tolist() == one.totals.tolist()
            found = zip(together[name].starts, together[name].lengths, strict=True)
            assert [(a, a + n) for a, n in found if n or name == "x"] == want
