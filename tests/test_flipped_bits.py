"""A flipped bit of any field is noticed wherever the format or the sidecar has a checksum."""

from __future__ import annotations

import json
import re
import shutil

import h5py
import numpy as np
import pytest
import zarr
from sample_files import COUNT, FORMS, SCHEMA, make
from support import fails, flip

import dsprep
from dsprep.errors import DsprepError, FormatError, ReadError, UsageError
from dsprep.reader.checks import UnverifiedWarning
from dsprep.sidecar import sidecar
from dsprep.sidecar.sidecar import Sidecar
from dsprep.verbs.check import check
from dsprep.verbs.provenance import provenance

LOCATED = [form for form in FORMS if form[0] != "tfrecord" or form[2] != "compressed"]
HOW = {"engine": "buffered", "io_threads": 1}
BARE = {"plain.h5", "plain.lmdb", "plain.zarr"}
"""Datasets that have no checksum by themselves."""


@pytest.fixture(scope="module", params=LOCATED, ids=" ".join)
def made(request, tmp_path_factory):
    return make(request.param, tmp_path_factory.mktemp("data"))


def copied(made, directory):
    """A copy of a dataset with its sidecar, which takes it for the original."""
    for path in made.parent.glob(f"{made.name}*"):
        copy = shutil.copytree if path.is_dir() else shutil.copy2
        copy(path, directory / path.name)
    path = directory / made.name
    provenance(path)
    return path


def flip_field(path, field):
    """Flip a bit of a field of a sample, and return which; the time stamp stays."""
    with Sidecar.open(path) as opened:
        rows = opened.extents(slice(17, None), [field])
    row = next(r for r in rows if r.length > 0)
    file, at = path.parent / row.file, row.offset + row.length // 2
    if row.inside is None and SCHEMA[field].ragged:
        at = row.offset + row.length - 1
    flip(file, at, 4, keep_time=True)
    return row.index


def prove(opened, sample, field):
    """Compare a field of a sample with whatever checksum it has."""
    opened.proofs.check(0, np.array([sample]), [field], read=True)
    opened.read([sample], [field])


@pytest.fixture
def unchanged(monkeypatch):
    """From now on datasets pass for those that the sidecars describe: checksums alone are left."""
    return lambda: monkeypatch.setattr(sidecar, "changes", lambda *_, **__: [])


NOTICED = "CRC|checksum|decoded|decompress"


def test_a_flipped_bit_is_noticed(made, request, tmp_path, unchanged):
    """Of a field after the other, so that each format has a turn with all."""
    turn = request.node.callspec.indices["made"]
    field = [name for name in SCHEMA.names if name != "y"][turn % 3]
    assert_noticed(copied(made, tmp_path), field, made.name in BARE, unchanged)


def test_a_flipped_bit_is_noticed_by_checksums_of_a_sidecar(made, tmp_path, unchanged):
    if made.name not in BARE and "grouped" not in made.name:
        return  # as the test above
    path = copied(made, tmp_path)
    if made.name in BARE:
        assert check(path, full=True) == []
        with pytest.raises(UsageError, match=r"provenance .* --checksums"):
            dsprep.Reader(path, 8, verify=True, **HOW)
    assert_noticed(path, "y", True, unchanged)


def assert_noticed(path, field, sums, unchanged):
    """Whatever proves a field notices a bit of it that was flipped."""
    if sums:
        provenance(path, checksums=True)
    assert check(path, full=True) == []
    with Sidecar.open(path) as opened:
        opened.read(slice(0, COUNT), verify="full")
    with dsprep.Reader(path, 8, verify=True, **HOW) as reader:
        assert sum(len(batch["y"]) for batch in reader) == COUNT
        assert all(reader.verified.values())
    sample = flip_field(path, field)
    assert any(re.search(NOTICED, p.what) for p in check(path, full=True))
    unchanged()
    for samples, names in ((slice(0, COUNT), SCHEMA.names), ([sample], [field])):
        with Sidecar.open(path) as opened, pytest.raises(FormatError, match=NOTICED):
            opened.read(samples, names, verify="full")
    for shuffle in ("none", "global"):
        options = {"shuffle": shuffle, "fields": [field], "verify": True, **HOW}
        with (
            dsprep.Reader(path, 8, **options) as reader,
            pytest.raises(ReadError, match=NOTICED) as caught,
        ):
            list(reader)
        named = caught.value.sample
        assert str(caught.value).startswith(f"sample {named} ")
        with Sidecar.open(path) as opened, pytest.raises(FormatError, match=NOTICED):
            prove(opened, named, field)


@pytest.mark.parametrize(
    ("kind", "field"), [("plain", "x"), ("plain", "name"), ("grouped", "y"), ("grouped", "ragged")]
)
def test_a_damaged_zip_member_is_not_accepted(kind, field, tmp_path, unchanged):
    path = make(("zarr", ".zarr.zip", kind), tmp_path)
    flip_field(path, field)
    unchanged()
    for through in ("sidecar", "library"):
        if through == "library":
            path.with_name(path.name + ".dsprep.json").unlink()
        with dsprep.open(path) as source, pytest.raises(FormatError, match="CRC-32"):
            source[:]
        fails(lambda: dsprep.convert(path, tmp_path / f"{through}.h5"), DsprepError, "CRC-32")
        with pytest.raises(DsprepError, match="CRC-32"):
            dsprep.repack(path, tmp_path / f"{through}-grouped.h5", buffer_size=8)
    fails(lambda: provenance(path, checksums=True), FormatError, "CRC-32")


@pytest.mark.parametrize("kind", ["plain", "grouped"])
def test_no_checksum_is_made_of_damaged_records(kind, tmp_path):
    path = make(("tfrecord", ".tfrecord", kind), tmp_path)
    flip_field(path, "x")
    fails(lambda: provenance(path, checksums=True), FormatError, "CRC of the payload")


def test_a_sidecar_whose_checksums_cover_a_part_says_so(tmp_path):
    path = make(("zarr", ".zarr", "grouped"), tmp_path)
    kept = path.with_name(path.name + ".dsprep.json")
    content = json.loads(kept.read_text())
    rest = [layout["groups"].pop("rest") for layout in content["layouts"]]
    assert rest[0]["fields"]
    kept.write_text(json.dumps(content))
    with pytest.warns(UnverifiedWarning, match="no checksum covers .*y") as found:
        reader = dsprep.Reader(path, 8, verify=True, **HOW)
    assert "--checksums" in str(found[0].message)
    assert reader.verified["x"] == "CRC-32C of its group"
    assert reader.verified["y"] is None
    assert "y, ragged, name by nothing" in repr(reader)
    reader.close()
    fails(lambda: dsprep.Reader(path, 8, verify=True, fields=["y"]), UsageError, "no checksums")


VALUES = np.random.default_rng(5).integers(0, 256, (COUNT, 50), "u1")


def fletcher32(path):
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=VALUES, chunks=(8, 50), fletcher32=True)


def crc32c(path):
    codecs = {"compressors": zarr.codecs.Crc32cCodec()}
    zarr.create_array(path / "x", data=VALUES, chunks=(8, 50), **codecs)
    zarr.open_group(path, mode="a")


@pytest.mark.parametrize(("write", "name"), [(fletcher32, "x.h5"), (crc32c, "x.zarr")])
def test_checksums_of_chunks_by_other_writers(write, name, tmp_path, unchanged):
    path = tmp_path / name
    write(path)
    provenance(path)
    sample = flip_field(path, "x")
    unchanged()
    with dsprep.Reader(path, 8, verify=True, **HOW) as reader:
        assert reader.verified == {"x": "checksum of its chunk"}
        fails(lambda: list(reader), DsprepError, "checksum")
    with Sidecar.open(path) as opened, pytest.raises(FormatError, match="checksum does not fit"):
        opened.read([sample])
    path.with_name(path.name + ".dsprep.json").unlink()
    with dsprep.open(path) as source, pytest.raises(FormatError, match="checksum"):
        source[:]


def test_a_damaged_index_of_a_shard_is_noticed(tmp_path):
    path = tmp_path / "x.zarr"
    group = zarr.open_group(path, mode="w")
    sizes = {"chunks": (8, 50), "shards": (40, 50), "compressors": zarr.codecs.GzipCodec()}
    group.create_array("x", shape=VALUES.shape, dtype="u1", **sizes)[...] = VALUES
    (shard,) = [p for p in (path / "x/c").rglob("*") if p.is_file()]
    data = bytearray(shard.read_bytes())
    data[-12] ^= 1
    shard.write_bytes(data)
    with dsprep.open(path) as source, pytest.raises(FormatError, match="CRC of the shard index"):
        source[:]
    fails(lambda: provenance(path), FormatError, "CRC of the shard index")
