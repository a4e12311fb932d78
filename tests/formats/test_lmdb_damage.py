"""No file makes the reader do anything but raise a DsprepError."""

from __future__ import annotations

import struct
from contextlib import closing

import lmdb
import numpy as np
import pytest
from support import fails

from dsprep.errors import DsprepError, FormatError
from dsprep.formats.lmdb import Lmdb
from dsprep.formats.lmdb.parse import Records
from dsprep.formats.options import OpenOptions
from dsprep.storage.paths import Candidate

LMDB = Lmdb()
PSIZE = 4096


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A file with branch, leaf and overflow pages and a named database."""
    path = tmp_path_factory.mktemp("good") / "a"
    rng = np.random.default_rng(0)
    with lmdb.open(str(path), map_size=1 << 26, max_dbs=2) as env:
        for db in (None, env.open_db(b"named")):
            for start in range(0, 600, 200):
                with env.begin(write=True, db=env.open_db(None) if db is None else db) as txn:
                    for i in range(start, start + 200):
                        size = 5000 if i % 50 == 0 else int(rng.integers(0, 150))
                        txn.put(b"%08d" % i, bytes([i % 256]) * size)
    return (path / "data.mdb").read_bytes()


def read_all(path, **options):
    with LMDB.open(path, OpenOptions(**options), None) as source:
        for start in range(0, len(source), 128):
            source.read(start, min(start + 128, len(source)))
        source.sizes(0, len(source))
        return len(source)


def only_known_errors(path, **options):
    message = f"{path} is read"
    try:
        read_all(path, **options)
    except DsprepError as error:
        message = str(error)
    assert "\n" not in message
    assert str(path) in message


def test_the_good_file_is_good(tmp_path, good):
    path = tmp_path / "a.mdb"
    path.write_bytes(good)
    assert read_all(path) == 600
    assert read_all(path, database="named") == 600


def test_flipped_bytes(tmp_path, good):
    path = tmp_path / "a.mdb"
    rng = np.random.default_rng(1)
    pages = len(good) // PSIZE
    heads = np.concatenate([np.arange(16, 160), PSIZE + np.arange(160)])
    for trial in range(150):
        data = bytearray(good)
        if trial < 60:  # the metas
            places = rng.choice(heads, 2)
        else:  # headers and pointers of pages, then anywhere
            page = rng.integers(2, pages, 12)
            places = page * PSIZE + rng.integers(0, 64 if trial < 130 else PSIZE, 12)
        for at in places.tolist():
            data[at] = int(rng.integers(0, 256))
        path.write_bytes(data)
        only_known_errors(path)
        if trial % 7 == 0:
            only_known_errors(path, database="named", order="file")


def roots(data):
    """(offset of the main root, depth) in the newest meta."""
    txns = [struct.unpack_from("<Q", data, n * PSIZE + 16 + 24 + 96 + 8)[0] for n in (0, 1)]
    return txns.index(max(txns)) * PSIZE + 16 + 24 + 48


def patched(good, offset, fmt, *values):
    data = bytearray(good)
    struct.pack_into(fmt, data, offset, *values)
    return data


def test_trees_that_run_in_circles(tmp_path, good):
    path = tmp_path / "a.mdb"
    at = roots(good)
    root = struct.unpack_from("<Q", good, at + 40)[0]
    data = bytearray(good)
    base = root * PSIZE
    count = (struct.unpack_from("<H", good, base + 12)[0] - 16) // 2
    for slot in range(count):  # every child is the root itself
        node = base + struct.unpack_from("<H", good, base + 16 + 2 * slot)[0]
        struct.pack_into("<HHH", data, node, root & 0xFFFF, root >> 16, 0)
    for depth in (2, 3, 20, 32):
        struct.pack_into("<H", data, at + 6, depth)
        path.write_bytes(data)
        fails(lambda: read_all(path), FormatError)
    for depth in (0, 1, 3, 33, 65535):
        path.write_bytes(patched(good, at + 6, "<H", depth))
        fails(lambda: read_all(path), FormatError)
    for page in (0, 1, len(good) // PSIZE, 1 << 40, (1 << 64) - 2):
        path.write_bytes(patched(good, at + 40, "<Q", page))
        fails(lambda: read_all(path), FormatError)


def test_values_that_share_one_large_run(tmp_path):
    """Many nodes that point to one value must not cost memory for many."""
    path = tmp_path / "a"
    with lmdb.open(str(path), map_size=1 << 26) as env, env.begin(write=True) as txn:
        for i in range(100):
            txn.put(b"%08d" % i, bytes(200_000 if i == 0 else 3000))
    file = path / "data.mdb"
    data = bytearray(file.read_bytes())
    with closing(Records(path, file, OpenOptions())) as records:
        nodes = records.nodes(np.arange(100))
        leaf = int(records.pages.meta.main.root)
        first = int(nodes.offset[0]) // PSIZE
        places = (nodes.inline_at + leaf * PSIZE).tolist()
    for at in places:
        struct.pack_into("<I", data, at - 16, 200_000)
        struct.pack_into("<Q", data, at, first)
    file.write_bytes(data)
    fails(lambda: LMDB.open(path, OpenOptions(), None), FormatError, "values overlap")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ((16 + 4, "<I", 2), "LMDB 0.9"),
        ((16, ">I", 0xBEEFC0DE), "LMDB 0.9"),
        ((12, "<III", 0xBEEFC0DE, 1, 0), "LMDB 0.9"),
        ((16, "<QII", 0, 0xBEEFC0DE, 2), "LMDB 0.9"),
        ((16 + 24, "<I", 5000), "page size"),
        ((16 + 24, "<I", 0), "page size"),
        ((10, "<H", 2), "meta page"),
        ((16 + 24 + 4, "<H", 251), "meta page"),
        ((PSIZE + 16, "<I", 0), "second meta"),
    ],
)
def test_other_kinds_of_file(tmp_path, good, change, says):
    path = tmp_path / "a.mdb"
    path.write_bytes(patched(good, *change))
    assert LMDB.recognises(Candidate(path))
    with pytest.raises(FormatError, match=says):
        read_all(path)
