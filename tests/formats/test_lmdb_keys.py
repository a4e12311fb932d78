"""What the keys of a database say is not lost: names, families of keys, facts, counters."""

from __future__ import annotations

import pickle
import struct
import zlib

import numpy as np
import pytest
from lmdb_builds import put
from support import fails, reading

import dsprep
from dsprep.errors import AmbiguousError, SchemaError, UsageError
from dsprep.formats.lmdb import Lmdb

LMDB = Lmdb()
FIELDS = ("image", "label")


def opened(path, *specs, **options):
    return LMDB.open(path, reading(*specs, **options), None)


def text_set(n, *, start=1, left_out=(), total=None, width=9):
    """Records as deep-text-recognition-benchmark and MJSynth have them."""
    for i in range(start, start + n):
        if i not in left_out:
            yield b"image-%0*d" % (width, i), b"\x89PNG" + bytes([i % 256]) * (i % 3000)
            yield b"label-%0*d" % (width, i), b"word%d" % i
    if total is not None:
        yield b"num-samples", b"%d" % total


COUNTERS = {
    "decimal": (lambda i: b"%08d" % i, {}),
    "from 1": (lambda i: b"%06d" % (i + 1), {}),
    "around": (lambda i: b"img_%07d.jpg" % i, {}),
    "hex": (lambda i: b"%08x" % i, {}),
    "HEX": (lambda i: b"k%06X" % i, {}),
    "big": (lambda i: struct.pack(">Q", i), {}),
    "big from printable": (lambda i: struct.pack(">Q", i + 40), {}),
    "integer": (lambda i: struct.pack("<Q", i), {"integerkey": True}),
    "integer 4": (lambda i: struct.pack("<I", i), {"integerkey": True}),
}


@pytest.mark.parametrize("n", [1, 2, 300, 20_000])
@pytest.mark.parametrize("kind", COUNTERS)
def test_a_counter_is_no_field(tmp_path, kind, n):
    key, how = COUNTERS[kind]
    path = put(
        tmp_path / "db",
        ((key(i), b"%d" % i) for i in range(n)),
        name=b"named" if how else None,
        **how,
    )
    with opened(path, database="named" if how else None) as source:
        if n == 1 and kind in ("hex", "HEX"):
            return
        assert source.schema.names == ("value",)
        assert not source.notes
        assert source[n - 1]["value"] == b"%d" % (n - 1)


NAMES = {
    "names": [b"cat", b"dog", b"owl.jpg"],
    "gaps": [b"%08d" % (i * i) for i in range(900)],
    "one missing": [b"%08d" % i for i in range(40_000) if i != 39_000],
    "unpadded": [b"%d" % i for i in range(900)],
    "letters": [b"a", b"b", b"c"],
    "classes": [b"n%02d_%05d" % (c, i) for c in range(40) for i in range(30)],
    "few classes": [b"n%02d_%05d" % (c, i) for c in range(4) for i in range(30)],
    "files": [b"%05d_%s.jpg" % (i, w) for i, w in enumerate((b"cat", b"dog", b"owl") * 30)],
    "random": [np.random.default_rng(i).bytes(8) for i in range(500)],
}


@pytest.mark.parametrize("suffix", [".h5", ".tfrecord", ".zarr", ".lmdb"])
@pytest.mark.parametrize("kind", NAMES)
def test_other_keys_are_kept(tmp_path, kind, suffix):
    keys = sorted(NAMES[kind])
    path = put(tmp_path / "db", ((k, b"value of " + k) for k in keys))
    with opened(path) as source:
        assert source.schema.names == ("value", "key")
        assert list(source.read(0, len(keys))["key"]) == keys
        assert any("not a counter" in note for note in source.notes)
    if suffix != ".h5" and kind not in ("names", "gaps"):
        return
    target = tmp_path / f"out{suffix}"
    dsprep.convert(path, target)
    with dsprep.open(path) as a, dsprep.open(target) as b:
        assert list(b[0 : len(keys)]["key"]) == keys
        assert dsprep.verify(a, b).same
    dsprep.provenance(path)
    with dsprep.open(path) as a, dsprep.open(target) as b:
        assert dsprep.verify(a, b).same
    with dsprep.Sidecar.open(path) as sidecar:
        assert sidecar.read([0], ["value"])["value"][0] == b"value of " + keys[0]


def test_numbers_in_their_order_are_a_counter(tmp_path):
    path = put(tmp_path / "db", ((b"%d" % i, b"%d" % i) for i in range(300)))
    with opened(path, order="numeric") as source:
        assert source.schema.names == ("value",)
        assert source[10]["value"] == b"10"
    with opened(path, order="file") as source:
        assert source.schema.names == ("value", "key")


@pytest.mark.parametrize("n", [3, 4000])
def test_families_are_fields(tmp_path, n):
    path = put(tmp_path / "db", text_set(n, total=n))
    expected = dict(text_set(n))
    with pytest.raises(AmbiguousError) as caught:
        opened(path)
    assert [option for option, _ in caught.value.readings] == [
        "--field image --field label",
        "--keys-as key",
    ]
    with opened(path, "image", "label") as source:
        assert source.schema.names == ("image", "label")
        assert len(source) == n
        assert len([note for note in source.notes if "num-samples" in note]) == 1
        batch = source.read(0, n)
        assert list(batch["image"]) == [expected[b"image-%09d" % (i + 1)] for i in range(n)]
        assert list(batch["label"]) == [b"word%d" % (i + 1) for i in range(n)]
        sizes = [len(a) + len(b) for a, b in zip(batch["image"], batch["label"], strict=True)]
        assert source.sizes(0, n).tolist() == sizes
        assert set(source.storage()) == {"image", "label"}
    with opened(path, "label:str", "pixels=image") as source:
        assert source[1] == {"label": "word2", "pixels": expected[b"image-000000002"]}
    with opened(path, keys_as="key") as source:
        assert len(source) == 2 * n
    target = tmp_path / "out.h5"
    dsprep.convert(path, target, fields=("label:str", "image"))
    options = reading(*FIELDS)
    dsprep.convert(path, tmp_path / "all.h5", fields=("image", "label"))
    with dsprep.open(path, options) as a, dsprep.open(tmp_path / "all.h5") as b:
        assert dsprep.verify(a, b).same
        with a.opening() as again:
            assert dsprep.verify(a, again).same
    dsprep.provenance(path, options)
    with dsprep.Sidecar.open(path) as sidecar:
        assert sidecar.read([1], FIELDS)["label"][0] == b"word2"
        assert sidecar.read([1, 0], FIELDS)["image"][0] == expected[b"image-000000002"]


@pytest.mark.parametrize(
    ("names", "keys"),
    [
        ("cls jpg", lambda i: (b"%08d.cls" % i, b"%08d.jpg" % i)),
        ("image label", lambda i: (b"s/%d/image" % i, b"s/%d/label" % i)),
        ("img lbl mask", lambda i: (b"img%d" % i, b"lbl%d" % i, b"mask%d" % i)),
        ("value label", lambda i: (b"%06d" % i, b"label-%06d" % i)),
    ],
)
def test_families_of_other_shapes(tmp_path, names, keys):
    n = 150
    path = put(tmp_path / "db", ((k, k + b"!") for i in range(n) for k in keys(i)))
    fails(lambda: opened(path), AmbiguousError)
    with opened(path, *names.split()) as source:
        assert len(source) == n
        batch = source.read(0, n)
        assert [tuple(row) for row in zip(*batch.values(), strict=True)] == [
            tuple(k + b"!" for k in keys(i)) for i in range(n)
        ]


def test_families_with_gaps_keep_the_numbers(tmp_path):
    path = put(tmp_path / "db", text_set(50, left_out=(7, 30)))
    with opened(path, "image", "label", "key") as source:
        assert source.read(5, 8)["key"].tolist() == [6, 8, 9]


def test_a_record_that_a_sample_lacks_is_named(tmp_path):
    """What the refusal says is done, and works."""
    records = dict(text_set(50))
    del records[b"label-000000030"]
    del records[b"image-000000004"]
    path = put(tmp_path / "db", records.items())
    with pytest.raises(SchemaError, match=r"2 of 50 samples lack records.*4, 30.*--skip-key"):
        opened(path, "image", "label")
    keys = ["image-000000030", "label-000000004"]
    with opened(path, "image", "label", skip_keys=tuple(map(str.encode, keys))) as source:
        assert len(source) == 48
    with opened(path, keys_as="key") as source:
        assert source.schema.names == ("value", "key")
        assert len(source) == 98


def test_what_ase_keeps_beside_samples_is_no_sample(tmp_path):
    rows = {b"%d" % i: zlib.compress(b'{"numbers": [1]}') for i in range(1, 13)}
    others = {b"nextid": b"13", b"deleted_ids": b"[]", b"metadata": b"{}"}
    others = {key: zlib.compress(value) for key, value in others.items()}
    path = put(tmp_path / "a.aselmdb", (rows | others).items())
    with opened(path, order="numeric") as source:
        assert len(source) == 12
        assert any("deleted_ids, metadata, nextid" in note for note in source.notes)
    words = [b"cat", b"metadata", b"nextid"]
    path = put(tmp_path / "words", ((w, bytes(16)) for w in words))
    with opened(path) as source:
        assert len(source) == 3


@pytest.mark.parametrize("order", ["key", "numeric", "file"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"num-samples", b"5"),
        (b"length", pickle.dumps(40)),
        (b"__len__", pickle.dumps(70_000)),
        (b"__keys__", pickle.dumps([1, 2])),
    ],
)
def test_facts_are_no_samples(tmp_path, key, value, order):
    records = [*((b"%05d" % i, bytes(12)) for i in range(40)), (key, value)]
    path = put(tmp_path / "db", records)
    with opened(path, "x:float32[3]", order=order) as source:
        assert len(source) == 40
        assert f"left out the keys {key.decode()}" in " ".join(source.notes)


def test_several_records_have_no_order_in_the_file(tmp_path):
    path = put(tmp_path / "db", text_set(20))
    fails(lambda: opened(path, *FIELDS, order="file"), UsageError, "--order file")
