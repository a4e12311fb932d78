"""What dsprep writes as LMDB it reads back bit for bit, and so does py-lmdb."""

from __future__ import annotations

import lmdb
import numpy as np
from support import assert_same_batch, random_batch, write_batch

from dsprep.core.schema import Arena, Batch, Field, FieldSpec, Ragged, Schema
from dsprep.formats.base import OpenOptions, WriteOptions
from dsprep.formats.lmdb import Lmdb

LMDB = Lmdb()
F4 = np.dtype("<f4")


def records(path, name=None):
    with (
        lmdb.open(str(path), subdir=path.is_dir(), readonly=True, lock=False, max_dbs=4) as env,
        env.begin(db=env.open_db(name)) as txn,
    ):
        return list(txn.cursor())


def test_a_value_of_50_mb_and_empty_values(tmp_path):
    schema = Schema((Field.opaque("b"),))
    values = [b"", bytes(50_000_003), b"", b"x", b""]
    batch: Batch = {"b": Ragged.pack(values, schema["b"])}
    write_batch(LMDB, tmp_path / "o.mdb", schema, batch)
    assert [v for _, v in records(tmp_path / "o.mdb")] == values
    with LMDB.open(tmp_path / "o.mdb", OpenOptions(), None) as source:
        assert [source[i]["value"] for i in range(5)] == values


def test_strided_columns_and_padding(tmp_path):
    padded = np.dtype(
        {"names": ["a", "b"], "formats": ["u1", "<f8"], "offsets": [0, 8], "itemsize": 16}
    )
    schema = Schema((Field("x", F4, (3000,)), Field("s", padded)))
    x = np.random.default_rng(0).standard_normal((40, 2, 3000)).astype("f4")
    s = np.full(40 * 16, 255, "u1").view(padded)
    batch: Batch = {"x": x[:, 1], "s": s}
    write_batch(LMDB, tmp_path / "o.mdb", schema, batch, cuts=(7,))
    value = records(tmp_path / "o.mdb")[3][1]
    assert value == x[3, 1].tobytes() + b"\xff" + bytes(7) + b"\xff" * 8
    batch["x"] = x[::-1, 0]
    write_batch(LMDB, tmp_path / "p.mdb", schema, batch)
    with LMDB.open(tmp_path / "p.mdb", OpenOptions(), schema) as source:
        assert_same_batch(source.read(0, 40), batch, schema)


def test_finish_may_be_repeated(tmp_path):
    schema = Schema((Field("x", F4, (700,)),))
    batch = random_batch(schema, 9)
    path = tmp_path / "o.mdb"
    writer = LMDB.create(path, schema, 9, WriteOptions(), None)
    piece = writer.encode(batch, 0, Arena())
    writer.reserve(piece)
    writer.write(piece)
    state = writer.checkpoint()
    writer.finish()
    first = path.read_bytes()
    writer = LMDB.create(path, schema, 9, WriteOptions(), state)
    writer.finish()
    assert path.read_bytes() == first


def test_selecting_and_renaming_fields(tmp_path):
    schema = Schema((Field("x", F4, (3,)), Field("y", np.dtype("<i8")), Field.opaque("b")))
    batch = random_batch(schema, 20)
    write_batch(LMDB, tmp_path / "o.lmdb", schema, batch)
    options = OpenOptions(fields=(FieldSpec.parse("label=y"),), keys_as="key")
    with LMDB.open(tmp_path / "o.lmdb", options, schema) as source:
        assert source.schema.names == ("label", "key")
        assert source.read(2, 4)["label"].tolist() == batch["y"][2:4].tolist()
        assert source.sizes(0, 20).tolist() == [16] * 20
    options = OpenOptions(keys_as="key")
    with LMDB.open(tmp_path / "o.lmdb", options, schema) as source:
        assert source.schema.names == ("x", "y", "b", "key")
        assert source[3]["key"] == b"00000003"


def test_fields_with_dtypes(tmp_path):
    schema = Schema((Field("x", F4, (3,)), Field("y", np.dtype("<i8")), Field("p", F4, (None, 2))))
    batch = random_batch(schema, 20)
    write_batch(LMDB, tmp_path / "o.lmdb", schema, batch)
    specs = tuple(map(FieldSpec.parse, ("x:float32[3]", "y:int64", "p:float32[None,2]")))
    with LMDB.open(tmp_path / "o.lmdb", OpenOptions(fields=specs), None) as source:
        assert_same_batch(source.read(0, 20), batch, schema)


def test_a_written_database_can_be_appended_to(tmp_path):
    schema = Schema((Field("x", F4, (1000,)),))
    batch = random_batch(schema, 500)
    path = tmp_path / "o.lmdb"
    write_batch(LMDB, path, schema, batch)
    with lmdb.open(str(path), map_size=1 << 26) as env:
        for i in range(500, 600):
            with env.begin(write=True) as txn:
                txn.put(b"%08d" % i, b"%d" % i)
        assert env.stat()["entries"] == 600
    found = records(path)
    assert len(found) == 600
    assert [v for _, v in found[:500]] == [row.tobytes() for row in batch["x"]]
    with LMDB.open(path, OpenOptions(), None) as source:
        assert [source[i]["value"] for i in range(600)] == [v for _, v in found]
