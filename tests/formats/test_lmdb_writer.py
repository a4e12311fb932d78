"""The bytes that dsprep writes are those of LMDB's own compact copy."""

from __future__ import annotations

import lmdb
import numpy as np
import pytest
from support import fails, random_batch, write_batch

from dsprep.core.groups import plain
from dsprep.core.schema import Batch, Field, Ragged, Schema
from dsprep.errors import UnsupportedError, UsageError
from dsprep.formats.lmdb import Lmdb
from dsprep.formats.lmdb.keys import plan_keys
from dsprep.formats.lmdb.tree import PSIZE, Tree
from dsprep.formats.options import OpenOptions, WriteOptions

LMDB = Lmdb()


def compact_copy(folder, keys, values):
    """What LMDB makes of the records in one sorted transaction and a compact copy."""
    (folder / "copy").mkdir()
    with lmdb.open(str(folder / "built"), map_size=1 << 34, sync=False) as env:
        with env.begin(write=True) as txn:
            for key, value in zip(keys, values, strict=True):
                txn.put(key, value, append=True)
        env.copy(str(folder / "copy"), compact=True)
    return (folder / "copy" / "data.mdb").read_bytes()


def blank(data):
    """The file with zeros in all that LMDB leaves as it was in memory, and in the map sizes."""
    pages = np.frombuffer(data, np.uint8).copy().reshape(-1, PSIZE)
    pages[:2, 32:40] = 0
    words = pages.view("<u2")
    page = 2
    while page < len(pages):
        words[page, 4] = 0
        flags, lower, upper = words[page, 5:8].tolist()
        if flags == 4:
            page += int(pages[page, 12:16].view("<u4")[0])
            continue
        assert flags in (1, 2)
        pages[page, lower:upper] = 0
        for at in words[page, 8 : lower // 2].tolist():
            low, high, node_flags, key = words[page, at // 2 : at // 2 + 4].tolist()
            size = 0 if flags == 1 else 8 if node_flags & 1 else low | high << 16
            end = at + 8 + key + size
            pages[page, end : end + end % 2] = 0
            if flags == 2 and node_flags & 1:
                first = int(pages[page, end - 8 : end].copy().view("<u8")[0])
                value_end = first * PSIZE + 16 + (low | high << 16)
                pages.reshape(-1)[value_end : -(-value_end // PSIZE) * PSIZE] = 0
        page += 1
    return pages


def assert_same_file(folder, keys, values, schema, batch, key_format, cuts=()):
    options = WriteOptions(key_format=key_format)
    write_batch(LMDB, folder / "ours.mdb", schema, batch, options, cuts)
    ours = (folder / "ours.mdb").read_bytes()
    found, expected = blank(ours), blank(compact_copy(folder, keys, values))
    assert found.shape == expected.shape
    assert np.array_equal(found, expected)
    payload = sum(map(len, values))
    estimate = LMDB.plan(schema, options, plain(len(values)), payload).nbytes
    assert estimate >= len(ours)
    assert schema.ragged or estimate == len(ours)


COUNTS = {1: 20000, 8: 50000, 100: 3000, 1500: 700, 19276: 200, 1 << 20: 12}


@pytest.mark.parametrize(
    "size",
    [1, 7, 8, 100, 1500, 2021, 2022, 2023, 2024, 4079, 4080, 4081, 8176, 8177, 19276, 1 << 20],
)
def test_fixed_size(tmp_path, size):
    key_format = "u64be" if size % 3 == 0 else "{index:08d}"
    rng = np.random.default_rng(size)
    most = COUNTS.get(size, 320)
    for count in sorted({0, 1, 3, 156, 157, most}):
        if count > most:
            continue
        folder = tmp_path / str(count)
        folder.mkdir()
        x = rng.integers(0, 256, (count, size), "u1")
        keys = plan_keys(key_format, count)
        schema = Schema((Field("x", np.dtype("u1"), (size,)),))
        assert_same_file(
            folder,
            [row.tobytes() for row in keys.make(np.arange(count))],
            [row.tobytes() for row in x],
            schema,
            {"x": x},
            key_format,
            tuple(rng.integers(0, count + 1, 3).tolist()),
        )


@pytest.mark.parametrize(("width", "count"), [(100, 5000), (250, 900), (503, 400)])
def test_deep_trees_of_long_keys(tmp_path, width, count):
    key_format = f"key_{{index:0{width}x}}.."
    x = np.arange(count, dtype="<i8")
    keys = plan_keys(key_format, count)
    keys = [row.tobytes() for row in keys.make(np.arange(count))]
    assert keys == [key_format.format(index=i).encode() for i in range(count)]
    schema = Schema((Field("x", np.dtype("<i8")),))
    assert_same_file(
        tmp_path, keys, [v.tobytes() for v in x], schema, {"x": x}, key_format, (7, 300)
    )


@pytest.mark.parametrize("longest", [60, 600, 3000, 20000])
def test_sizes_that_vary(tmp_path, longest):
    rng = np.random.default_rng(longest)
    values = [rng.bytes(n) for n in rng.integers(0, longest, 4000 if longest < 1000 else 900)]
    values[5:7] = [b"", bytes(5_000_003)]
    schema = Schema((Field.opaque("b"),))
    batch: Batch = {"b": Ragged.pack(values, schema["b"])}
    keys = [b"%08d" % i for i in range(len(values))]
    assert_same_file(tmp_path, keys, values, schema, batch, "{index:08d}")


def test_pieces_that_end_where_the_last_leaves_are_unknown(tmp_path):
    """The tree stays the one that LMDB builds, whatever the cut."""
    schema = Schema((Field.opaque("b"),))
    fanout = Tree(8).fanout
    for leaves in (1, 2, fanout - 1, fanout, fanout + 1, 2 * fanout - 1, 2 * fanout):
        values = [b"%0255d" % i for i in range(14 * leaves - 3)]
        batch: Batch = {"b": Ragged.pack(values, schema["b"])}
        for cuts in ((), tuple(range(max(0, len(values) - 60), len(values), 7))):
            path = tmp_path / f"{leaves}-{len(cuts)}.mdb"
            write_batch(LMDB, path, schema, batch, cuts=cuts)
            with lmdb.open(str(path), subdir=False, readonly=True, lock=False) as env:
                stat = env.stat()
                assert stat["leaf_pages"] == leaves
                level, branches = leaves, 0
                while level > 1:
                    level = (level - 2) // (fanout - 1) + 1
                    branches += level
                assert stat["branch_pages"] == branches
                with env.begin() as txn:
                    assert [v for _, v in txn.cursor()] == values
                    assert all(txn.get(b"%08d" % i) == values[i] for i in range(0, len(values), 13))


@pytest.mark.parametrize(
    ("key_format", "count"),
    [
        ("{index}", 11),
        ("{index:03d}", 1001),
        ("{index:8d}", 11),
        ("{index:>8}", 11),
        ("{index!r}", 11),
        ("{index:08d}{index:08d}", 11),
        ("{index:{index}d}", 11),
        ("key", 11),
        ("{index:08d", 11),
        ("{index:0512d}", 11),
    ],
)
def test_keys_that_do_not_rise_are_refused(key_format, count):
    fails(lambda: plan_keys(key_format, count), UsageError, "keys")


def test_what_lmdb_cannot_hold_is_refused():
    with pytest.raises(UnsupportedError, match="rows of zero bytes"):
        LMDB.plan(Schema((Field("x", np.dtype("f4"), (None, 0)),)), WriteOptions())
    with pytest.raises(UnsupportedError, match="larger than an LMDB value"):
        LMDB.plan(Schema((Field("x", np.dtype("f8"), (1 << 29,)),)), WriteOptions())


def test_a_written_database_can_be_appended_to(tmp_path):
    schema = Schema((Field("x", np.dtype("<f4"), (1000,)),))
    batch = random_batch(schema, 500)
    path = tmp_path / "o.lmdb"
    write_batch(LMDB, path, schema, batch)
    with lmdb.open(str(path), map_size=1 << 26) as env:
        for i in range(500, 600):
            with env.begin(write=True) as txn:
                txn.put(b"%08d" % i, b"%d" % i)
        assert env.stat()["entries"] == 600
        with env.begin() as txn:
            found = [v for _, v in txn.cursor()]
    assert found[:500] == [row.tobytes() for row in batch["x"]]
    with LMDB.open(path, OpenOptions(), None) as source:
        assert [source[i]["value"] for i in range(600)] == found
