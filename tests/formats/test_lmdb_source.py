"""Databases that LMDB itself made are read as py-lmdb reads them, record by record."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from lmdb_builds import assert_same_records, put
from support import reading

from dsprep.core.schema import Field, Schema
from dsprep.errors import ChangedError, FormatError, SchemaError, UsageError
from dsprep.formats.lmdb import Lmdb
from dsprep.formats.options import OpenOptions

LMDB = Lmdb()


@pytest.mark.parametrize("nbytes", [8, 5000])
def test_commits_of_others_are_noticed_and_never_read(nbytes, tmp_path):
    """After two commits LMDB uses pages again that this has found values in."""
    records = [(b"%08d" % i, b"a" * nbytes) for i in range(200)]
    put(tmp_path / "a", records)
    with LMDB.open(tmp_path / "a", OpenOptions(), None) as source:
        assert set(source[0:200]["value"]) == {b"a" * nbytes}
        for letter in (b"b", b"c", b"d"):
            put(tmp_path / "a", [(key, letter * nbytes) for key, _ in records])
            with pytest.raises((ChangedError, FormatError)):
                source[0:200]


def test_integer_and_reverse_keys(tmp_path):
    records = [(i.to_bytes(8, "little"), b"%d" % i) for i in (3, 256, 1, 70000, 2)]
    put(tmp_path / "a", records, name=b"ints", integerkey=True)
    assert_same_records(tmp_path / "a", b"ints", integerkey=True)
    put(tmp_path / "b", [(b"ab", b"1"), (b"ba", b"2")], name=b"r", reverse_key=True)
    assert_same_records(tmp_path / "b", b"r", reverse_key=True)


def test_named_databases(tmp_path):
    path = tmp_path / "a"
    put(path, [(b"%d" % i, b"train%d" % i) for i in range(300)], name=b"train")
    put(path, [(b"%d" % i, b"val%d" % i * 900) for i in range(30)], name=b"val")
    put(path, [], name=b"none")
    assert_same_records(path, b"train")
    assert_same_records(path, b"val")
    assert_same_records(path, b"none")
    with pytest.raises(SchemaError, match=r"only named databases .*none, train, val.*--db NAME"):
        LMDB.open(path, OpenOptions(), None)
    with pytest.raises(SchemaError, match=r"no database test .*none, train, val"):
        LMDB.open(path, OpenOptions(database="test"), None)
    put(path, [(b"a", b"1"), (b"o", b"2"), (b"z", b"3")])
    with LMDB.open(path, OpenOptions(), None) as source:
        assert [s["value"] for s in source] == [b"1", b"2", b"3"]
        assert "left out the named databases none, train, val" in source.notes


def test_skipped_keys_and_numeric_order(tmp_path):
    path = tmp_path / "a"
    records = [(b"%d" % i, b"v%d" % i) for i in range(1200)]
    put(path, [*records, (b"length", pickle.dumps(1200))], per_commit=1)
    with LMDB.open(path, OpenOptions(), None) as source:
        assert len(source) == 1200
        assert any("the keys length: facts" in note for note in source.notes)
        assert any("10 comes before 2" in note for note in source.notes)
    put(tmp_path / "b", [*records, (b"cat", b"")])
    with pytest.raises(UsageError, match=r"not a decimal number .*b'cat'"):
        LMDB.open(tmp_path / "b", OpenOptions(order="numeric"), None)
    skip = (b"length", b"30", b"absent")
    with LMDB.open(path, OpenOptions(skip_keys=skip, keys_as="k"), None) as source:
        kept = [r for r in sorted(records) if r[0] != b"30"]
        assert [(s["k"], s["value"]) for s in source] == kept
        assert "left out the keys 30, length" in source.notes
    options = OpenOptions(order="numeric", skip_keys=(b"length",), keys_as="k")
    with LMDB.open(path, options, None) as source:
        assert [(s["k"], s["value"]) for s in source] == records
        assert not any("10 comes before 2" in note for note in source.notes)


def test_pickles_stay_closed(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("unpickled",))

    value = pickle.dumps(Bomb(), protocol=4)
    put(tmp_path / "a", [(b"%d" % i, value) for i in range(3)])
    with LMDB.open(tmp_path / "a", OpenOptions(), None) as source:
        assert source[1]["value"] == value
        assert any("pickles" in note for note in source.notes)


def test_a_schema_that_does_not_fit(tmp_path):
    put(tmp_path / "a", [(b"a", bytes(12)), (b"b", bytes(13))])
    cases = [
        Schema((Field("x", np.dtype("f4"), (3,)),)),
        Schema((Field("x", np.dtype("f4"), (None, 3)),)),
        Schema((Field.opaque("x"), Field.opaque("y"))),
        Schema((Field("x", np.dtype("f4"), (4,)), Field.opaque("y"))),
    ]
    for schema in cases:
        with pytest.raises(FormatError, match=r"sample [01], key b'[ab]': the value does not fit"):
            LMDB.open(tmp_path / "a", OpenOptions(), schema)
    with pytest.raises(UsageError, match="only the last field may vary"):
        LMDB.open(tmp_path / "a", reading("x:float32[None]", "y:int8"), None)
    with pytest.raises(SchemaError, match="no field y"):
        LMDB.open(tmp_path / "a", reading("x:float32", "y"), None)


def test_duplicates_are_refused(tmp_path):
    put(tmp_path / "a", [(b"a", b"1"), (b"a", b"2")], name=b"d", dupsort=True)
    with pytest.raises(FormatError, match="DUPSORT"):
        LMDB.open(tmp_path / "a", OpenOptions(database="d"), None)
