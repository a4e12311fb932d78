"""Caffe's Datum messages, made by hand as protobuf writes them."""

from __future__ import annotations

import numpy as np
import pytest
from lmdb_builds import datum, put, varint
from support import fails, reading

from dsprep.core.schema import Ragged
from dsprep.errors import DsprepError, FormatError, SchemaError
from dsprep.formats.lmdb import Lmdb
from dsprep.formats.options import OpenOptions

LMDB = Lmdb()
DATUM = OpenOptions(values="datum")


RNG = np.random.default_rng(0)


def keyed(values):
    return [(b"%08d" % i, value) for i, value in enumerate(values)]


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 2, 3), (3, 300, 100)])
def test_images_and_labels_of_any_width(tmp_path, shape):
    images = RNG.integers(0, 256, (300, *shape), "u1")
    labels = RNG.choice([0, 1, 127, 128, 999, 70000, 2**31 - 1, -1, -(2**31)], 300)
    labels[7] = 0
    values = [
        datum(shape, x.tobytes(), None if i == 7 else int(y), encoded=0 if i % 2 else None)
        for i, (x, y) in enumerate(zip(images, labels, strict=True))
    ]
    with LMDB.open(put(tmp_path / "a", keyed(values)), DATUM, None) as source:
        assert str(source.schema) == f"data: uint8[{','.join(map(str, shape))}], label: int32"
        for start, stop in ((0, 300), (7, 8), (3, 3), (100, 250)):
            batch = source.read(start, stop)
            assert np.array_equal(batch["data"], images[start:stop])
            assert batch["label"].dtype == np.int32
            assert batch["label"].tolist() == labels[start:stop].tolist()
        assert source.sizes(0, 2).tolist() == [images[0].nbytes + 4] * 2


@pytest.mark.parametrize("packed", [False, True])
def test_floats(tmp_path, packed):
    x = RNG.integers(0, 256, (50, 2, 3, 4, 4), "u1").view("<f4")[..., 0]
    values = [datum((2, 3, 4), None, i, v.reshape(-1), packed=packed) for i, v in enumerate(x)]
    with LMDB.open(put(tmp_path / "a", keyed(values)), DATUM, None) as source:
        batch = source.read(0, 50)
        assert batch["data"].dtype == np.float32
        assert batch["data"].tobytes() == x.tobytes()
        assert batch["label"].tolist() == list(range(50))


def test_encoded_images_stay_encoded(tmp_path):
    data = [RNG.bytes(int(n)) for n in RNG.integers(10, 5000, 60)]
    values = [datum((3, 9, 9), d, i, encoded=1) for i, d in enumerate(data)]
    with LMDB.open(put(tmp_path / "a", keyed(values)), DATUM, None) as source:
        assert str(source.schema) == "data: bytes, label: int32"
        batch = source.read(0, 60)
        assert list(batch["data"]) == data
        assert any("encoded" in note for note in source.notes)


def test_shapes_that_vary(tmp_path):
    shapes = [(1, int(h), int(w)) for h, w in RNG.integers(1, 40, (80, 2))]
    data = [RNG.bytes(h * w) for _, h, w in shapes]
    values = [datum(s, d, 5) for s, d in zip(shapes, data, strict=True)]
    with LMDB.open(put(tmp_path / "a", keyed(values)), DATUM, None) as source:
        assert source.schema.names == ("data", "label", "channels", "height", "width")
        batch = source.read(0, 80)
        assert isinstance(batch["data"], Ragged)
        assert list(batch["data"]) == data
        sides = zip(batch["channels"], batch["height"], batch["width"], strict=True)
        assert list(sides) == shapes


def test_unknown_fields_and_selection(tmp_path):
    extra = bytes([9 << 3]) + varint(300) + bytes([10 << 3 | 1]) + bytes(8)
    extra += bytes([11 << 3 | 2, 2]) + b"zz" + bytes([12 << 3 | 5]) + bytes(4)
    values = [datum((1, 1, 4), bytes([i] * 4), i, extra=extra) for i in range(20)]
    put(tmp_path / "a", keyed(values))
    options = reading("y=label", values="datum", keys_as="key")
    with LMDB.open(tmp_path / "a", options, None) as source:
        assert source.schema.names == ("y", "key")
        assert source[19]["y"] == 19
        assert source[19]["key"] == b"00000019"
    options = reading("image", values="datum")
    fails(lambda: LMDB.open(tmp_path / "a", options, None), SchemaError, "no field image")


def test_one_message_of_another_shape(tmp_path):
    values = [datum((1, 4, 9), bytes(36), i % 100) for i in range(500)]
    values[321] = datum((1, 9, 4), bytes(36), 21)
    with (
        LMDB.open(put(tmp_path / "a", keyed(values)), DATUM, None) as source,
        pytest.raises(FormatError, match=r"sample 321, .*another shape"),
    ):
        source.read(0, 500)


def test_damaged_messages(tmp_path):
    good = datum((1, 4, 4), bytes(16), 300, encoded=0)
    for trial in range(80):
        bad = bytearray(good)
        for at in RNG.integers(0, len(bad), 3):
            bad[at] = RNG.integers(0, 256)
        value = bytes(bad[: RNG.integers(0, len(bad) + 1)]) if trial % 2 else bytes(bad)
        values = [good] * 70
        values[RNG.integers(0, 70)] = value
        path = tmp_path / str(trial % 5)
        path.exists() and (path / "data.mdb").unlink()
        message = "sample"
        try:
            with LMDB.open(put(path, keyed(values)), DATUM, None) as source:
                source.read(0, 70)
        except DsprepError as error:
            message = str(error)
        assert "sample" in message or "probe" in message
