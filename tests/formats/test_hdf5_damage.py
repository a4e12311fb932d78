"""HDF5 files that are damaged, hostile or unfit: always one clear error of our own.

The library holds Python's lock while it hangs in a damaged heap of variable-length values, so such
files are read in processes of their own.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import h5py
import hdf5plugin
import numpy as np
import pytest
from hdf5_files import HDF5, opened
from support import STRUCT, fails, random_array, random_batch, raw, schemas, write_batch

import dsprep
from dsprep.core.schema import Field, Schema
from dsprep.errors import (
    DsprepError,
    FormatError,
    MissingExtra,
)
from dsprep.formats.hdf5.heaps import Heaps
from dsprep.formats.options import Compression, OpenOptions, WriteOptions
from dsprep.storage.paths import open_file

X = random_array(np.dtype("<f4"), (20, 6, 4))


def test_a_missing_filter_is_named(tmp_path, monkeypatch):
    with h5py.File(tmp_path / "a", "w") as file:
        file.create_dataset("x", data=X, chunks=(4, 6, 4), **hdf5plugin.Zstd())
    monkeypatch.setattr("h5py.h5z.filter_avail", lambda code: code != 32015)
    with pytest.raises(MissingExtra, match=r"32015.*dsprep\[hdf5plugin\]"):
        opened(tmp_path / "a")


@pytest.mark.parametrize("text", ['"O"', '"<f8"', "{}", "[", "[" * 5000, '{"base": "<f4"}', "3"])
def test_stand_ins_that_do_not_fit(tmp_path, text):
    with h5py.File(tmp_path / "a", "w") as file:
        file["x"] = np.zeros((3, 2), "u2")
        file["x"].attrs["dsprep_dtype"] = np.bytes_(text)
    fails(lambda: opened(tmp_path / "a"), FormatError, "dsprep_dtype")


def test_text_of_numbers_that_are_not_characters(tmp_path):
    schema = Schema((Field("t", np.dtype("<U2")),))
    write_batch(HDF5, tmp_path / "a", schema, {"t": np.array(["ab", "c"])})
    with h5py.File(tmp_path / "a", "r+") as file:
        file["t"][1, 1] = 0x110000
    with opened(tmp_path / "a") as source:
        assert source[0]["t"] == "ab"
        with pytest.raises(FormatError, match="field t holds numbers that are not characters"):
            source.read(0, 2)


def test_hostile_sizes(tmp_path):
    with h5py.File(tmp_path / "a", "w") as file:
        file.create_dataset("x", (2, 1 << 50), "f4", chunks=(1, 1024))
    with opened(tmp_path / "a") as source, pytest.raises(FormatError, match="fit into memory"):
        source.read(0, 1)
    with h5py.File(tmp_path / "b", "w") as file:
        g = file.create_group("r")
        g.attrs["dsprep_kind"] = np.bytes_("array")
        g["values"], g["first"], g["count"] = (
            np.arange(9),
            np.array([0, 2**62]),
            np.array([2**62, 9]),
        )
        file["y"] = [1, 2]
    with opened(tmp_path / "b") as source, pytest.raises(FormatError, match="index does not fit"):
        source.read(0, 2)
    with h5py.File(tmp_path / "b", "r+") as file:
        del file["r/count"]
    fails(lambda: opened(tmp_path / "b"), FormatError, "not a ragged field")


def read_whole(path):
    with opened(path) as source:
        for start in range(0, min(len(source), 40), 8):
            source.read(start, min(start + 8, len(source)))
        source.storage()
        source.sizes(0, min(len(source), 40))
        for column in source.extents().columns.values():
            if column.grid is not None:
                blocks = column.grid.blocks
                offsets = blocks.offsets.span(0, blocks.count)
                lengths = blocks.lengths.span(0, blocks.count)
                assert (offsets + lengths <= path.stat().st_size).all()
                assert ((offsets > 0) | (lengths == 0)).all()


KINDS = ("tables", "plain", "gzip", "latest")


def damaged_files(tmp_path):
    """Write files to be damaged, one of another program and two of our own."""
    with h5py.File(tmp_path / "tables", "w") as file:
        gz = {"compression": "gzip", "maxshape": (None,), "chunks": (16,)}
        extents = np.zeros((2, 15), np.dtype([("first", "<u8"), ("N", "<u4")]))
        for table, each in zip(extents, (3, 4), strict=True):
            table["first"], table["N"] = np.arange(15) * each, each
        file.create_dataset("g/extents", data=extents[0][:5], **gz)
        file.create_dataset("g/voxel_extents", data=extents[1], **gz)
        file.create_dataset("g/voxels", data=random_array(STRUCT, (60,)), **gz)
        file.create_dataset("g/text", data=["a", "bc", "def", "", "e"], dtype=h5py.string_dtype())
        file["label"] = np.arange(5)
        file["label"].attrs["unit"] = "none"
    mixed = dict(schemas())["mixed"]
    write_batch(HDF5, tmp_path / "plain", mixed, random_batch(mixed, 9))
    options = WriteOptions(compress=Compression("gzip"))
    write_batch(HDF5, tmp_path / "gzip", mixed, random_batch(mixed, 9), options)
    with h5py.File(tmp_path / "latest", "w", libver="latest") as file:
        file.create_dataset("x", data=X, chunks=(3, 4, 3))
        file.create_dataset("z", data=X, chunks=(5, 6, 4), shuffle=True, compression="gzip")
        file.create_dataset("p", data=np.arange(60), chunks=(9,))
        file["p_first"], file["p_count"] = np.arange(0, 60, 3), np.full(20, 3)
    return [(tmp_path / n).read_bytes() for n in KINDS]


def test_truncated_files_are_refused(tmp_path):
    for data in damaged_files(tmp_path):
        for size in range(0, len(data) - 1, max(1, len(data) // 30)):
            (tmp_path / "cut").write_bytes(data[:size])
            fails(lambda: read_whole(tmp_path / "cut"), DsprepError)


FLIPS = """
import sys, random
from pathlib import Path
folder, *sys.path[:2] = sys.argv[1:]
from dsprep.errors import DsprepError
from test_hdf5_damage import KINDS, read_whole
rng = random.Random(0)
for name in KINDS * 40:
    path = Path(folder) / name
    broken = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 4))):
        broken[rng.randrange(min(len(broken), 9000))] = rng.randrange(256)
    path.with_suffix(".broken").write_bytes(broken)
    try:
        read_whole(path.with_suffix(".broken"))
    except DsprepError:
        pass
"""


def test_flipped_bytes_never_escape(tmp_path):
    """In a process of its own, so that a crash of the library would show as such."""
    here = Path(__file__).parent
    damaged_files(tmp_path)
    command = [sys.executable, "-c", FLIPS, tmp_path, here, here.parent]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_damaged_chunk_is_named(tmp_path, shuffle):
    with h5py.File(tmp_path / "a", "w") as file:
        x = file.create_dataset("x", data=X, chunks=(5, 6, 4), compression="gzip", shuffle=shuffle)
        chunk = x.id.get_chunk_info(2)
    data = bytearray((tmp_path / "a").read_bytes())
    data[chunk.byte_offset + 30] ^= 0xFF
    (tmp_path / "a").write_bytes(data)
    with opened(tmp_path / "a") as source:
        assert raw(source.read(0, 10)["x"]) == raw(X[:10])
        with pytest.raises(FormatError, match=f"a, field x, offset {chunk.byte_offset}: a chunk"):
            source.read(8, 12)


def test_a_chunk_that_expands_without_end(tmp_path):
    """Neither one that holds more than it should, nor one that claims more than it can hold."""
    for stored, rows in ((1 << 22, 5000), (16, 1 << 24)):
        with h5py.File(tmp_path / "a", "w") as file:
            x = file.create_dataset("x", (rows,), "u1", chunks=(rows,), compression="gzip")
            x.id.write_direct_chunk((0,), zlib.compress(bytes(stored), 9))
        with opened(tmp_path / "a") as source, pytest.raises(FormatError, match="a chunk"):
            source.read(0, rows)


def test_a_chunk_without_filters_has_the_size_of_a_chunk(tmp_path):
    """Of a shorter one the library reads what there is, and leaves its memory as it was."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        x = file.create_dataset("x", (20, 40), "<i4", chunks=(5, 40))
        x[:] = 1
        x.id.write_direct_chunk((10, 0), bytes(225))
    with opened(path) as source, pytest.raises(FormatError, match="800 bytes, found 225"):
        source.read(8, 12)


def test_two_members_of_one_name(tmp_path):
    """The library finds one of them by both names: the other would be missing in silence."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        for i in range(12):
            file[f"s{i}/image"] = np.full((3, 4), i)
    data = path.read_bytes()
    assert data.count(b"s3\0") == 1
    path.write_bytes(data.replace(b"s3\0", b"s2\0"))
    with pytest.raises(FormatError, match=r"a.h5, /: a group holds two objects of the name s2"):
        opened(path)


# --- values of variable length, and their heap ------------------------------------------------

READ = """
import faulthandler, json, pathlib, sys
from dsprep.errors import DsprepError
from dsprep.formats.options import OpenOptions
from dsprep.formats.hdf5 import Hdf5
path = pathlib.Path(sys.argv[1])
data = path.read_bytes()
for edits in json.loads(sys.argv[2]):
    damaged = bytearray(data)
    for at, byte in edits:
        damaged[at] = byte
    path.write_bytes(damaged)
    faulthandler.dump_traceback_later(40, exit=True)  # of this one
    try:
        with Hdf5().open(path, OpenOptions(), None) as source:
            source.read(0, len(source))
            print("; ".join(source.notes))
    except DsprepError as error:
        print(str(error).replace(chr(10), " "))
"""


def outcomes(path, *edits):
    """Read a file with each of these edits, `(offset, byte)`; a hang or a crash fails the test."""
    command = [sys.executable, "-c", READ, str(path), json.dumps(edits)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def words(count):
    return ["é☃" * (i % 4) + str(i) * (i % 7) for i in range(count)]


def test_every_byte_of_a_heap(tmp_path):
    path = tmp_path / "a"
    with h5py.File(path, "w") as file:
        file.create_dataset("s", data=words(7), dtype=h5py.string_dtype())
        file["x"] = np.zeros(7)
        file["x"].attrs["unit"] = "µm"
    with h5py.File(path) as file:
        rows = file["s"].id.get_offset()
    heap = path.read_bytes().index(b"GCOL")
    places = (*range(heap, heap + 330), *range(rows, rows + 7 * 16))
    found = [
        "is damaged" in text for text in outcomes(path, *([(at, 255 * (at % 2))] for at in places))
    ]
    assert found.count(False) > 50
    assert found.count(True) > 25


def test_collections_within_each_other(tmp_path):
    path = tmp_path / "a"
    with h5py.File(path, "w") as file:
        head = b"GCOL\1\0\0\0"
        (tmp_path / "heap").write_bytes((head + (4096).to_bytes(8, "little")) * 999)
        heaps = Heaps(open_file(tmp_path / "heap"), file)
    rows = np.zeros((900, 16), np.uint8)
    rows[:, 4:12] = (16 * np.arange(1, 901)).astype("<u8")[:, None].view("u1")
    fails(lambda: heaps.read(rows, 1, path), FormatError, "is damaged")


def test_missing_chunks_and_other_fill_values(tmp_path):
    """What was never written has no items, with any filter, unless the file says otherwise."""
    path = tmp_path / "a"
    with h5py.File(path, "w") as file:
        for i, filters in enumerate(({}, {"compression": "gzip"})):
            part = file.create_dataset(
                f"s{i}", (20,), h5py.string_dtype(), chunks=(4,), maxshape=(None,), **filters
            )
            part[5:7] = ["a", "bc"]
        file.create_dataset("never", (20,), h5py.vlen_dtype("f4"))
        file.create_dataset("filled", (20,), h5py.string_dtype(), fillvalue="none", chunks=(4,))
    with opened(path, "never", "s0", "s1") as source:
        batch = source.read(4, 9)
        for i in range(2):
            assert list(batch[f"s{i}"]) == ["", "a", "bc", "", ""]
        assert batch["never"].lengths.tolist() == [0] * 5
    with opened(path, "filled") as source, pytest.raises(FormatError, match="fill value"):
        source.read(0, 1)


@pytest.mark.parametrize("version", ["earliest", "latest"])
def test_attributes_that_lie_in_a_heap(tmp_path, version):
    """All are found in the object's header or its own heap, and a damaged one is left out."""
    path, count = tmp_path / "a", 2 if version == "earliest" else 40
    with h5py.File(path, "w", libver=version, userblock_size=512) as file:
        file["x"] = np.zeros(7)
        for i in range(count):
            file["x"].attrs[f"é{i}"] = f"text {i}" * (i % 3)
            file["x"].attrs[f"list{i}"] = ["a", "b" * i]
            file["x"].attrs[f"number{i}"] = i
    with opened(path) as source, h5py.File(path) as file:
        found = source.schema["x"].attrs
        assert not source.notes
        assert set(found) == set(file["x"].attrs)
        assert all(np.array_equal(v, file["x"].attrs[k]) for k, v in found.items())
    data = path.read_bytes()
    at = data.index(b"text 1") - 8
    assert data[at] == 6  # the bytes of the object, as its descriptor says
    assert "left out attributes of x: é1" in outcomes(path, [(at, 7)])[0]


def test_types_of_no_known_kind(tmp_path):
    """The library crashes on a type of variable length that is neither a string nor a sequence."""
    path = tmp_path / "a"
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros(7)
        file["x"].attrs["unit"] = "m"
        file.create_dataset("s", data=["a", "b"], dtype=h5py.string_dtype())
    data = path.read_bytes()
    places = [i for i in range(len(data) - 12) if data[i : i + 2] == b"\x19\x01"]
    assert len(places) >= 2
    assert len(outcomes(path, *([(at + 1, 255)] for at in places))) == len(places)


def test_groups_whose_table_is_damaged(tmp_path):
    """The library crashes where it sorts the links of a large group and meets a wrong checksum."""
    path = tmp_path / "a"
    for tracked in (False, True):
        with h5py.File(path, "w", libver="latest", track_order=tracked) as file:
            names = [f"field{i}" for i in range(30)]
            for name in reversed(names):
                file[name] = np.arange(4)
                file.attrs[name] = 1
        with opened(path) as source, h5py.File(path) as file:
            assert list(source.schema.names) == list(file)
        data = bytearray(path.read_bytes())
        places = [at for at in range(len(data)) if data[at : at + 4] in (b"FHDB", b"BTLF")]
        texts = outcomes(path, *([(at + 30, data[at + 30] ^ 1)] for at in places))
        assert any("checksum" in text for text in texts)


@pytest.mark.parametrize("kind", ["lzf", "compact"])
def test_storage_that_only_the_library_knows(tmp_path, kind):
    path = tmp_path / "a"
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros(7)
        text = h5py.string_dtype()
        if kind == "lzf":
            file.create_dataset("s", (7,), text, chunks=(2,), compression="lzf")
        else:
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plist.set_layout(h5py.h5d.COMPACT)
            space = h5py.h5s.create_simple((7,))
            h5py.h5d.create(file.id, b"s", h5py.h5t.py_create(text, logical=True), space, plist)
    with opened(path) as source:
        assert "s" not in source.schema.names
        assert any("left out s: it" in n and kind in n for n in source.notes)


@pytest.mark.parametrize("byte", [0, 2])
def test_chunks_that_are_not_where_the_index_lists_them(byte, tmp_path):
    """By a damaged index the library finds other chunks than it lists: it reads them itself."""
    path = tmp_path / "set.h5"
    with h5py.File(path, "w", libver="earliest") as file:
        file.create_dataset("x", data=np.arange(480, dtype="i4").reshape(12, 40), chunks=(4, 8))
    data = bytearray(path.read_bytes())
    key = data.index(struct.pack("<QQQ", 8, 16, 0))
    data[key + byte] ^= 0xFC
    path.write_bytes(data)
    with h5py.File(path) as file:
        expected = file["x"][...]
    with dsprep.open(path, OpenOptions(sample_axis="first")) as source:
        assert np.array_equal(source[:]["x"], expected)
