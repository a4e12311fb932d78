"""Databases built with py-lmdb, and what dsprep's own walk of their pages finds in them."""

from __future__ import annotations

import random
from collections import namedtuple
from functools import cache, partial
from pathlib import Path

import lmdb
import numpy as np

from dsprep.core.schema import Arena
from dsprep.formats.lmdb import Lmdb
from dsprep.formats.lmdb.pages import Pages
from dsprep.formats.lmdb.parse import named_databases
from dsprep.formats.options import OpenOptions
from dsprep.storage.paths import open_file

POOL = random.Random(1).randbytes(1 << 16)
KEYS = {
    "be8": lambda i: i.to_bytes(8, "big"),
    "be4": lambda i: i.to_bytes(4, "big"),
    "dec9": lambda i: b"%09d" % i,
    "dec255": lambda i: b"%0255d" % i,
    "dec500": lambda i: b"%0500d" % i,
}


def value(i, size):
    """A value that no other sample has, nor itself at another place."""
    start = i * 7919 % 4096
    return i.to_bytes(8, "little")[:size] + _pool(size)[start : start + max(0, size - 8)]


@cache
def _pool(size):
    return POOL * (size // len(POOL) + 2) if size > len(POOL) - 4096 else POOL


def build(
    path,
    n,
    size,
    *,
    key="be8",
    commit=None,
    append=True,
    named=False,
    order=None,
    compact=False,
    then=None,
    together=False,
):
    """Write a database; `size` and `commit` may be one number or as many as needed.

    `then` gets a transaction of its own at the end; `together`: the named database is created in
    the first.
    """
    for old in (Path(path), Path(f"{path}-lock")):
        old.unlink(missing_ok=True)
    env = lmdb.open(
        str(path), subdir=False, map_size=1 << 36, max_dbs=2, sync=False, metasync=False
    )
    db = env.open_db(b"train") if named and not together else None
    make = KEYS[key]
    numbers = iter(range(n) if order is None else order)
    if commit is None:
        plan = [n]
    elif isinstance(commit, int):
        plan = [min(commit, n - at) for at in range(0, n, commit)]
    else:
        plan = commit
    one = isinstance(size, int)
    for records in plan:
        with env.begin(write=True, db=db) as transaction:
            if db is None and named:
                db = env.open_db(b"train", txn=transaction)
            put = partial(transaction.put, db=db)
            for _ in range(records):
                i = int(next(numbers))
                put(make(i), value(i, size if one else int(size[i])), append=append)
    if then is not None:
        with env.begin(write=True, db=db) as transaction:
            then(transaction)
    if compact:
        copy = Path(f"{path}.copy")
        with copy.open("wb") as file:
            env.copyfd(file.fileno(), compact=True)
        env.close()
        copy.replace(path)
    else:
        env.close()
    return path


def put(path, records, *, per_commit=10**9, name=None, delete=(), order=None, subdir=True, **how):
    """Put records, in this order, with a commit every few of them; then delete some keys."""
    records = list(records)
    todo = records if order is None else [records[i] for i in order]
    with lmdb.open(str(path), map_size=1 << 30, max_dbs=4, sync=False, subdir=subdir) as env:
        db = env.open_db(name, **how)
        for start in range(0, len(todo), per_commit):
            with env.begin(write=True, db=db) as transaction:
                for key, data in todo[start : start + per_commit]:
                    transaction.put(key, data)
        for key in delete:
            with env.begin(write=True, db=db) as transaction:
                assert transaction.delete(key)
    return path


def contents(path, name=None, **how):
    """All records, as py-lmdb reads them."""
    with (
        lmdb.open(str(path), subdir=path.is_dir(), readonly=True, lock=False, max_dbs=4) as env,
        env.begin(db=env.open_db(name, create=False, **how) if name else None) as transaction,
    ):
        return list(transaction.cursor())


def assert_same_records(path, name=None, **how):
    records = contents(path, name, **how)
    options = OpenOptions(keys_as="key", database=name.decode() if name else None)
    with Lmdb().open(path, options, None) as source:
        assert len(source) == len(records)
        whole = source.read(0, len(source))
        assert list(zip(whole["key"], whole["value"], strict=True)) == records
        for arena in (None, Arena()):
            for start in range(0, len(records), 97):
                batch = source.read(start, min(start + 97, len(source)), arena)
                part = records[start : start + 97]
                assert [bytes(k) for k in batch["key"]] == [k for k, _ in part]
                assert [bytes(v) for v in batch["value"]] == [v for _, v in part]
        assert source.sizes(0, len(source)).tolist() == [len(k) + len(v) for k, v in records]


def varint(number):
    """A number as protobuf writes it."""
    number &= (1 << 64) - 1
    out = b""
    while number > 127:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def datum(shape=None, data=None, label=None, floats=None, packed=True, encoded=None, extra=b""):
    """A Caffe Datum."""
    out = b"".join(bytes([k << 3]) + varint(n) for k, n in enumerate(shape or (), 1))
    if data is not None:
        out += bytes([4 << 3 | 2]) + varint(len(data)) + data
    if label is not None:
        out += bytes([5 << 3]) + varint(label)
    if floats is not None and packed:
        out += bytes([6 << 3 | 2]) + varint(4 * len(floats)) + floats.tobytes()
    elif floats is not None:
        out += b"".join(bytes([6 << 3 | 5]) + f.tobytes() for f in floats)
    if encoded is not None:
        out += bytes([7 << 3, encoded])
    return out + extra


Found = namedtuple("Found", "psize offsets sizes key_sizes transaction named")


def walk(path, named=False):
    """What dsprep's walk finds: no law is involved."""
    file = open_file(path)
    try:
        pages = Pages(file)
        database = named_databases(pages)[b"train"] if named else pages.meta.main
        columns = [
            (nodes.offset, nodes.size, nodes.key_size)
            for _, nodes in pages.every_node(pages.leaves(database))
        ]
    finally:
        file.close()
    empty = [np.zeros(0, np.int64)] * 3
    offsets, sizes, keys = (
        np.concatenate([c[k] for c in columns] or empty[:1]).astype(np.int64) for k in range(3)
    )
    ends = int(keys.min(initial=1 << 16)), int(keys.max(initial=0))
    transaction = pages.meta.transaction
    return Found(pages.psize, offsets, sizes, ends, transaction, named)


def read_back(path, offsets, named=False):
    """Count the records whose value py-lmdb gives is not what lies at its offset."""
    records, data = contents(path, b"train" if named else None), path.read_bytes()
    wrong = sum(
        data[at : at + len(v)] != v for (_, v), at in zip(records, offsets.tolist(), strict=False)
    )
    return wrong + abs(len(records) - len(offsets))
