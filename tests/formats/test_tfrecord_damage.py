"""Damaged and hostile TFRecord files: one clear error, and never bytes that were not written."""

from __future__ import annotations

import gzip
import os
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
from record_checks import frame
from support import assert_same_batch, fails, random_batch, reading, schemas, take, write_batch

import dsprep
from dsprep.core.schema import Batch, Field, Schema
from dsprep.errors import DsprepError, FormatError
from dsprep.formats import load
from dsprep.formats.options import OpenOptions
from dsprep.formats.tfrecord import framing
from dsprep.storage.paths import Candidate

TFR = load("tfrecord")
ALL = dict(schemas())
SCHEMA = Schema((Field("x", np.dtype("<f4"), (3,)),))
X = random_batch(SCHEMA, 12)


def header(length: int) -> bytes:
    return framing.headers(np.array([length], np.uint64).view(np.int64)).tobytes()


def read(path: Path, hint: Schema | None = None, **options: object) -> Batch:
    with TFR.open(path, OpenOptions(**options), hint) as source:
        return source.read(0, len(source))


@pytest.fixture(params=["plain", "gzip", "zlib"])
def intact(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Schema, Batch]:
    schema, path = ALL["mixed"], tmp_path / "a.tfrecord"
    batch = random_batch(schema, 12)
    write_batch(TFR, path, schema, batch)
    if request.param != "plain":
        pack = gzip.compress if request.param == "gzip" else zlib.compress
        path.write_bytes(pack(path.read_bytes(), 6))
    return path, schema, batch


def test_truncated_anywhere(intact: tuple[Path, Schema, Batch]) -> None:
    path, schema, batch = intact
    data, advised = path.read_bytes(), 0
    for length in sorted(
        {*range(1, len(data), 97), *range(1, 40, 3), *range(len(data) - 20, len(data))}
    ):
        path.write_bytes(data[:length])
        TFR.recognises(Candidate(path))
        try:
            found = read(path, schema)
        except DsprepError as error:
            whole = re.search(r"--samples 0:(\d+) ", str(error))
            if whole is not None:
                stop = int(whole[1])
                found = read(path, schema, stop=stop)
                assert_same_batch(found, take(batch, 0, stop), schema)
                advised += 1
                fails(lambda: read(path, schema, stop=stop + 1), FormatError)
            continue
        # cut between two records it is a shorter dataset, which nothing in the file contradicts
        assert_same_batch(found, take(batch, 0, len(found["label"])), schema)
    assert advised > 5 or data[:2] == b"\x1f\x8b" or data[:1] == b"\x78"  # whole or refused


def test_what_is_whole_is_converted(tmp_path: Path) -> None:
    write_batch(TFR, tmp_path / "a", SCHEMA, X)
    (tmp_path / "cut").write_bytes((tmp_path / "a").read_bytes()[:-1])
    with pytest.raises(FormatError, match=r"truncate -s (\d+)") as caught:
        dsprep.convert(tmp_path / "cut", tmp_path / "out.h5")
    dsprep.convert(tmp_path / "cut", tmp_path / "out.h5", samples="2:11")
    with dsprep.open(tmp_path / "out.h5") as source:
        assert_same_batch(source[:], take(X, 2, 11), SCHEMA)
    os.truncate(tmp_path / "cut", int(re.findall(r"truncate -s (\d+)", str(caught.value))[0]))
    assert_same_batch(read(tmp_path / "cut", SCHEMA), take(X, 0, 11), SCHEMA)


def test_messages_say_where(tmp_path: Path) -> None:
    path, good = tmp_path / "a.tfrecord", frame(b"x" * 100)
    path.write_bytes(good * 18 + good[:60])
    fails(lambda: read(path), FormatError, "a.tfrecord, offset 2088: ", " inside record 18")
    path.write_bytes(good * 18 + good[:7])
    fails(lambda: read(path), FormatError, "offset 2088: the file ends inside record 18")
    path.write_bytes(good * 5 + b"\1" + good[1:] + good)
    fails(lambda: read(path), FormatError, "offset 580: the header of record 5 is damaged")
    path.write_bytes(good * 5 + good[:50] + b"y" + good[51:] + good)
    with pytest.raises(FormatError, match="record 5, offset 592: the CRC of the payload"):
        read(path, records="opaque")
    assert read(path, records="opaque", check_crc=False)["record"][5][38:39] == b"y"


@pytest.mark.parametrize("length", [1 << 20, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_lengths_that_lie(tmp_path: Path, length: int, pack) -> None:
    path = tmp_path / "a.tfrecord"
    for before in (0, 1, 100):
        path.write_bytes(pack(frame(b"x") * before + header(length) + b"y" * 50))
        fails(lambda: read(path), FormatError)


def test_an_empty_file_is_an_empty_dataset(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecords"
    path.touch()
    assert TFR.recognises(Candidate(path))
    with TFR.open(path, OpenOptions(), None) as source:
        assert len(source) == 0
        assert source.notes == ("there are no records",)
    with TFR.open(path, reading("new=old:int16[3]"), None) as source:
        assert str(source.schema) == "new: int16[3]"
        assert source.read(0, 0)["new"].shape == (0, 3)
