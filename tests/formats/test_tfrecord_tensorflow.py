"""TFRecord against TensorFlow: it reads what we write, and we read what it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from record_checks import write_groups
from support import DTYPES, assert_same_batch, fails, random_batch, raw, reading, take, write_batch

import dsprep
from dsprep.core.groups import Grouping, even
from dsprep.core.schema import Batch, Field, Ragged, Schema
from dsprep.errors import FormatError, SchemaError, UsageError
from dsprep.formats import load
from dsprep.formats.options import Compression, OpenOptions, WriteOptions
from dsprep.formats.tfrecord import features
from dsprep.formats.tfrecord.example import BYTES, FLOAT, INT64
from dsprep.source.dataset import open_dataset
from dsprep.storage.paths import Candidate

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

TFR = load("tfrecord")
GZIP = WriteOptions(compress=Compression("gzip", 1))
WIDE = Schema(
    (
        *(
            Field(f"f{i}", dtype, shape)
            for i, dtype in enumerate(DTYPES)
            for shape in ((3,), (None,))[i % 2 :][:1]
        ),
        Field("floats", np.dtype("<f4"), (2, 3)),
        Field("none", np.dtype("<f4"), (0, 3)),
        Field("many", np.dtype("<f4"), (None,)),
        Field("label", np.dtype("<i8")),
        Field("ints", np.dtype("<i8"), (None,)),
        Field.opaque("jpeg"),
        Field.opaque("name", "str"),
    )
)
FIXED = Schema(
    (
        Field("x", np.dtype("<i2"), (7, 5)),
        Field("y", np.dtype("<f4"), (4,)),
        Field("k", np.dtype("<i8"), (2,)),
        Field("label", np.dtype("<i8")),
    )
)


def expected(tf: Any, schema: Schema, batch: Batch, i: int, options: WriteOptions) -> Any:
    """Sample i as TensorFlow's own message."""
    types = features.plan(schema, options)
    made = {}
    for f in schema:
        value = batch[f.name][i]
        if types[f.name] == BYTES:
            made[f.name] = tf.train.Feature(bytes_list=tf.train.BytesList(value=[raw_bits(value)]))
        elif types[f.name] == FLOAT:
            flat = np.asarray(value).reshape(-1)
            made[f.name] = tf.train.Feature(float_list=tf.train.FloatList(value=flat))
        else:
            assert types[f.name] == INT64
            flat = np.asarray(value).reshape(-1).tolist()
            made[f.name] = tf.train.Feature(int64_list=tf.train.Int64List(value=flat))
    return tf.train.Example(features=tf.train.Features(feature=made))


def raw_bits(value: Any) -> bytes:
    return value.tobytes() if isinstance(value, np.ndarray | np.generic) else raw(value)


def quiet(batch: Batch) -> Batch:
    """The same batch without NaNs in float lists: a NaN is not equal to itself in a message."""
    for column in batch.values():
        values = column.values if isinstance(column, Ragged) else column
        if values.dtype == np.dtype("<f4"):
            values[np.isnan(values)] = -0.0
    return batch


@pytest.mark.parametrize(
    ("options", "grouping"),
    [
        (WriteOptions(), None),
        (GZIP, None),
        (WriteOptions(), even(9, 4, 512)),
        (WriteOptions(), Grouping(np.array([0, 1, 9]), 4096)),
    ],
)
def test_tensorflow_parses_what_we_write(
    tmp_path: Path, tf: Any, options: WriteOptions, grouping: Grouping | None
) -> None:
    """Also where records are padded."""
    path, batch = tmp_path / "a.tfrecord", random_batch(FIXED, 9)
    if grouping is None:
        write_batch(TFR, path, FIXED, batch, options)
    else:
        write_groups(TFR, path, FIXED, batch, grouping, options)
    spec = {
        "x": tf.io.FixedLenFeature([], tf.string),
        "y": tf.io.FixedLenFeature([4], tf.float32),
        "k": tf.io.FixedLenFeature([2], tf.int64),
        "label": tf.io.FixedLenFeature([], tf.int64),
    }
    records = tf.data.TFRecordDataset(str(path), "GZIP" if options is GZIP else "").batch(9)
    found = next(records.map(lambda r: tf.io.parse_example(r, spec)).as_numpy_iterator())
    one = tf.io.parse_single_example(next(iter(records))[0], spec)
    for name in ("y", "k", "label"):
        assert raw(found[name]) == raw(batch[name])  # NaN payloads included
        assert raw(one[name].numpy()) == raw(batch[name][0])
    assert [bytes(x) for x in found["x"]] == [x.tobytes() for x in batch["x"]]


@pytest.mark.parametrize("codec", ["", "GZIP", "ZLIB"])
@pytest.mark.parametrize("schema", [WIDE, FIXED], ids=["wide", "fixed"])
def test_we_read_what_tensorflow_writes(
    tmp_path: Path, tf: Any, schema: Schema, codec: str
) -> None:
    path, batch = tmp_path / "a.tfrecord", quiet(random_batch(schema, 31))
    with tf.io.TFRecordWriter(str(path), codec) as writer:
        for i in range(31):  # in the unstable order of a map
            writer.write(expected(tf, schema, batch, i, WriteOptions()).SerializeToString())
    assert TFR.recognises(Candidate(path))
    with TFR.open(path, OpenOptions(), schema) as source:
        assert len(source) == 31
        assert_same_batch(source.read(0, 31), batch, schema)
        assert_same_batch(source.read(30, 31), take(batch, 30, 31), schema)
    with TFR.open(path, OpenOptions(), None) as source:
        assert sorted(source.schema.names) == sorted(schema.names)
        assert source.read(3, 4)["label"].tolist() == batch["label"][3:4].tolist()


WORDS = [[b"cat", b"", b"dog"], [b"\0"], [], [b"one", b"two"], [b"last\0"]]


def detections(tf: Any, words: list[bytes], i: int, **more: Any) -> bytes:
    """A record as of the Object Detection API."""
    lists = {"bytes": tf.train.BytesList, "float": tf.train.FloatList, "int64": tf.train.Int64List}

    def feature(kind: str, values: Any) -> Any:
        return tf.train.Feature(**{f"{kind}_list": lists[kind](value=values)})

    features = {
        "image/encoded": feature("bytes", [b"jpeg" * i]),
        "image/height": feature("int64", [i]),
        "image/object/bbox/xmin": feature("float", [k / 7 for k in range(len(words))]),
        "image/object/class/text": feature("bytes", words),
        **{name: feature(*given) for name, given in more.items()},
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def write_payloads(tf: Any, path: Path, payloads: list[bytes], codec: str = "") -> Path:
    with tf.io.TFRecordWriter(str(path), codec) as writer:
        for payload in payloads:
            writer.write(payload)
    return path


def strings(batch: Batch, name: str) -> list[list[bytes]]:
    """The byte strings of each record, from the field that has them back to back."""
    found = []
    for data, lengths in zip(batch[name], batch[f"{name}.lengths"], strict=True):
        ends = np.cumsum(lengths)
        found.append([data[b - n : b] for b, n in zip(ends, lengths, strict=True)])
        assert sum(lengths) == len(data)
    return found


@pytest.mark.parametrize("codec", ["", "GZIP"])
@pytest.mark.parametrize("count", [5, 200])
def test_several_byte_strings_are_read_with_their_lengths(
    tmp_path: Path, tf: Any, codec: str, count: int
) -> None:
    words = [WORDS[i % 5] for i in range(count)]
    payloads = [detections(tf, w, i) for i, w in enumerate(words)]
    path, text = tmp_path / "a.tfrecord", "image/object/class/text"
    write_payloads(tf, path, payloads, codec)
    with dsprep.open(path) as source:
        assert sorted(source.schema.names) == [
            *("image/encoded", "image/height", "image/object/bbox/xmin", text, f"{text}.lengths")
        ]
        assert any(text in n and "several byte strings in some records" in n for n in source.notes)
        batch = source[:]
        assert strings(batch, text) == words
        assert list(batch["image/encoded"]) == [b"jpeg" * i for i in range(count)]
        assert [source[i][f"{text}.lengths"].tolist() for i in (0, 2, 4)] == [[3, 0, 3], [], [5]]
        source.check_types()
    for name in ("image/encoded", text, f"{text}.lengths"):
        with dsprep.open(path, reading(f"new={name}")) as source:
            assert list(map(raw, source[:]["new"])) == list(map(raw, batch[name]))
            assert any("left out" in note and "image/height" in note for note in source.notes)
    with pytest.raises(UsageError, match="leave the type out"):
        dsprep.open(path, reading(f"{text}:S3[None]"))
    for other in ("a.h5", "b.tfrecord"):
        dsprep.convert(path, tmp_path / other)
        with dsprep.open(path) as a, dsprep.open(tmp_path / other) as b:
            assert dsprep.verify(a, b).same
    with open_dataset(tmp_path / "b.tfrecord", through="library") as source:
        assert_same_batch(source[:], batch, source.schema)
        source.check_types()
    if not codec:
        dsprep.provenance(path)
        with dsprep.open(path) as source:
            assert "sidecar" in source.version
            assert strings(source[:], text) == words
            assert strings({n: c[3:4] for n, c in source[:].items()}, text) == words[3:4]
        assert dsprep.check(path, full=True) == []
        with dsprep.Sidecar.open(path) as sidecar:
            for i in (0, 1, 2, 4):
                assert strings(sidecar.read([i]), text) == [words[i]]


def test_several_byte_strings_in_some_of_the_files(tmp_path: Path, tf: Any) -> None:
    """The files agree whatever the first one has; other features do not matter to --field."""
    for name, words in (("a", [[b"x"], []]), ("b", [[b"y"], [b"y", b"z"]]), ("c", [])):
        write_payloads(tf, tmp_path / f"{name}.tfrecord", [detections(tf, w, 3) for w in words])
    text = "image/object/class/text"
    with dsprep.open(tmp_path) as source:
        assert strings(source[:], text) == [[b"x"], [], [b"y"], [b"y", b"z"]]
        assert strings(source[0:1], text) == [[b"x"]]
        assert source.part(0, 2)[0]()[:][f"{text}.lengths"].lengths.tolist() == [1, 0]
    odd = [detections(tf, [], 3, z=("int64", [1])), detections(tf, [], 4, z=("bytes", [b"1"]))]
    write_payloads(tf, tmp_path / "d.tfrecord", [*odd, detections(tf, [], 3, only=("int64", [1]))])
    with pytest.raises(FormatError, match=r"d.tfrecord, record 1.*feature z is of another type"):
        dsprep.open(tmp_path)
    with dsprep.open(tmp_path, reading("image/height", "n=only")) as source:
        assert [str(f) for f in source.schema] == ["image/height: int64", "n: int64[None]"]
        assert source[:]["image/height"].tolist() == [3, 3, 3, 3, 3, 4, 3]
        assert source[:]["n"].lengths.tolist() == [0] * 6 + [1]
    with pytest.raises(SchemaError, match="there is no field nowhere"):
        dsprep.open(tmp_path, reading("nowhere"))


def test_a_feature_called_as_lengths_are(tmp_path: Path, tf: Any) -> None:
    """What is in the file is never taken for what dsprep adds, in one file or several."""
    a, b = tmp_path / "a.tfrecord", tmp_path / "b.tfrecord"
    lengths = {"image/object/class/text.lengths": ("int64", [7])}
    write_payloads(tf, a, [detections(tf, [b"x", b"y"], 1, **lengths)] * 2)
    with dsprep.open(a) as source:
        assert "image/object/class/text" not in source.schema.names
        assert source[:]["image/object/class/text.lengths"].tolist() == [7, 7]
        assert any("left out image/object/class/text: several" in note for note in source.notes)
    write_payloads(tf, a, [detections(tf, [b"x", b"y"], 1)])
    write_payloads(tf, b, [detections(tf, [b"x"], 1, **lengths)])
    fails(lambda: dsprep.open(tmp_path), SchemaError)
