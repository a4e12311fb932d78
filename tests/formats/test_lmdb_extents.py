"""Values lie where the extents say, for every schema and every way a database came to be."""

from __future__ import annotations

import os

import numpy as np
import pytest
from lmdb_builds import assert_same_records, contents, datum, put
from record_checks import located
from support import fails, random_batch, reading, schemas, write_batch

from dsprep.core.schema import Field, Schema
from dsprep.errors import ChangedError, FormatError
from dsprep.formats.lmdb import Lmdb
from dsprep.formats.lmdb.fields import Recipe
from dsprep.formats.lmdb.overflow import Frame
from dsprep.formats.options import OpenOptions
from dsprep.layout.laws import Affine
from dsprep.storage import scatter
from dsprep.storage.base import Handle

LMDB = Lmdb()
ALL = dict(schemas())
RNG = np.random.default_rng(11)
DATUM = OpenOptions(values="datum")


@pytest.mark.parametrize("sizes", ["inline", "one page", "large", "mixed", "same"])
@pytest.mark.parametrize("how", ["sorted", "each", "random", "deleted"])
def test_every_record_of_a_foreign_database(tmp_path, sizes, how):
    n = 400
    lengths = {
        "inline": RNG.integers(0, 900, n),
        "one page": np.full(n, 3072),
        "large": RNG.integers(9000, 20000, n),
        "mixed": RNG.choice([0, 1, 50, 2020, 2021, 2022, 2023, 4079, 4080, 4081, 70000], n),
        "same": np.full(n, 9),
    }[sizes]
    records = [(b"%06d" % (i * 7), RNG.bytes(int(k))) for i, k in enumerate(lengths)]
    order = RNG.permutation(n) if how in ("random", "deleted") else None
    gone = [records[i][0] for i in RNG.choice(n, 60, replace=False)] if how == "deleted" else ()
    per_commit = 1 if how == "each" else 37
    path = put(tmp_path / "x", records, per_commit=per_commit, order=order, delete=gone)
    assert_same_records(path)
    stored = [value for _, value in contents(path)]
    for by in ("key", "file"):
        layout, batch = located(LMDB, path, OpenOptions(order=by, keys_as="key"))
        values = list(batch["value"])
        assert values == stored if by == "key" else sorted(values) == sorted(stored)
    assert isinstance(layout.records.blocks.lengths, Affine) == (sizes in ("one page", "same"))
    assert (layout.records.frame is None) == (sizes in ("inline", "same"))


@pytest.mark.parametrize("order", ["key", "file", "numeric"])
@pytest.mark.parametrize("skip", [(), (b"5", b"17")])
def test_order_and_left_out(tmp_path, order, skip):
    records = [(b"%d" % i, RNG.bytes(2500)) for i in RNG.permutation(80)]
    path = put(tmp_path / "x", records, per_commit=9)
    put(path, [(b"a", b"b")], name=b"0named")  # one of the records of the main database
    options = OpenOptions(order=order, skip_keys=skip, keys_as="key")
    layout, batch = located(LMDB, path, options)
    with LMDB.open(path, options, None) as source:
        keys = [bytes(k) for k in source.read(0, len(source))["key"]]
    assert layout.count == 80 - len(skip)
    assert (layout.records.order is None) == (order == "key")
    assert "leaf pages" in layout.unlocated["key"]
    assert list(batch["value"]) == [dict(records)[key] for key in keys]


def test_fields_renamed_and_typed(tmp_path):
    schema = ALL["mixed"]
    path = tmp_path / "x.lmdb"
    write_batch(LMDB, path, schema, random_batch(schema, 20, seed=1))
    located(LMDB, path, hint=schema)
    with LMDB.open(path, reading("pts=points", "y=label", "what=name"), schema) as source:
        recipe = source.extents().records.recipe
        assert recipe["fields"] == {"pts": "points", "y": "label", "what": "name"}
    path = put(tmp_path / "y", [(b"%02d" % i, RNG.bytes(36)) for i in range(30)])
    located(LMDB, path, reading("y:>i4", "x:float32[2,4]"))


@pytest.mark.parametrize("kind", ["cifar", "labels", "floats", "shapes"])
def test_datum(tmp_path, kind):
    values = []
    for i in range(70):
        shape = (3, 4 + (i % 3 if kind == "shapes" else 0), 5)
        size = int(np.prod(shape))
        label = i * 5 if kind in ("labels", "shapes") else i % 10
        floats = RNG.random(size, np.float32) if kind == "floats" else None
        data = None if kind == "floats" else RNG.bytes(size)
        values.append(datum(shape, data, label, floats))
    path = put(tmp_path / "x", [(b"%05d_x" % i, v) for i, v in enumerate(values)], per_commit=9)
    layout, _ = located(LMDB, path, DATUM)
    assert layout.records.parts["data"].at is None
    assert layout.records.parts["label"].at is None
    if kind == "shapes":
        located(LMDB, path, reading("pixels=data:uint8[None,5]", "label", values="datum"))
        options = reading("pixels=data:uint8[60]", values="datum")
        with LMDB.open(path, options, None) as source, pytest.raises(FormatError, match="pixels"):
            source.read(0, 6)


def test_the_leaves_alone_are_read(tmp_path, monkeypatch):
    path = tmp_path / "x.lmdb"
    schema = Schema((Field("x", np.dtype("u1"), (3072,)), Field("y", np.dtype("<i8"))))
    write_batch(LMDB, path, schema, random_batch(schema, 4000))
    read = []
    for module, name in ((os, "preadv"), (scatter, "_call")):
        real = getattr(module, name)
        counted = lambda *a, real=real: read.append(real(*a)) or read[-1]  # noqa: E731
        monkeypatch.setattr(module, name, counted)
    with LMDB.open(path, OpenOptions(), schema) as source:
        source.extents()
    assert 0 < sum(read) < (path / "data.mdb").stat().st_size / 100


def test_keys_of_a_file_that_changed_are_refused(tmp_path, monkeypatch):
    path = put(tmp_path / "x", [(b"%04d" % i, RNG.bytes(100)) for i in range(100)])
    with LMDB.open(path, OpenOptions(keys_as="key"), None) as source:
        page = source.extents().records.blocks.offsets.one(0) // 4096
        with (path / "data.mdb").open("r+b") as file:
            file.seek(page * 4096 + 12)
            file.write((16 + 2).to_bytes(2, "little"))
        fails(lambda: source.read(0, 9), ChangedError, "time stamp")
        monkeypatch.setattr(Handle, "check_same", lambda file, offset=None: None)  # the same time
        fails(lambda: source.read(0, 9), FormatError, "changed since it was opened")


def test_facts_change_with_every_transaction(tmp_path):
    path = put(tmp_path / "x", [(b"a", b"b")])
    first = LMDB.facts(path)
    assert first["transaction"] == 1
    put(path, [(b"c", b"d")])
    second = LMDB.facts(path)
    assert second["transaction"] == 2
    assert second["root"] != first["root"]
    assert second["last_page"] >= first["last_page"]
    (path / "data.mdb").write_bytes(b"x" * 10000)
    fails(lambda: LMDB.facts(path), FormatError)


HOSTILE = [None, 3, -1, 2**70, True, "x", [], {}, [1, 2], [[]], {"name": 3}, [{"name": "x"}]]
TWO = Schema((Field.opaque("a"), Field.opaque("b")))


@pytest.mark.parametrize("value", HOSTILE, ids=repr)
def test_hostile_parameters(value):
    fails(lambda: Frame({"psize": value}), FormatError)
    fails(lambda: Recipe({"schema": value if value != [] else None}, TWO), FormatError)
    good = {"name": "datum", "shape": [1, 2, 3], "floats": False, "sides": False}
    assert Recipe(good, TWO)
    for key in ("shape", "floats", "sides"):
        if not (value is None and key == "shape") and not (value is True and key != "shape"):
            fails(lambda: Recipe(good | {key: value}, TWO), FormatError)
    if value not in ({}, {"name": 3}):
        fails(lambda: Recipe({"schema": TWO.to_json(), "fields": value}, TWO), FormatError)
    if value is not None:
        fails(lambda: Recipe(good | {"fields": {"a": value}}, TWO), FormatError)
