"""HDF5 outputs: every schema survives, h5py agrees, and the bytes depend only on the samples.

In groups, h5py reports each of them in one range.
"""

from __future__ import annotations

import errno
import json
import resource
from contextlib import ExitStack, closing, contextmanager

import h5py
import numpy as np
import pytest
from hdf5_files import HDF5
from record_checks import feed, with_rows, write_groups
from support import create, fails, random_batch, schemas, write_batch

from dsprep.core.groups import Grouping, even, plain
from dsprep.core.schema import Batch, Field, Ragged, Schema
from dsprep.errors import DsprepError, FormatError, UnsupportedError, UsageError
from dsprep.formats.options import Compression, OpenOptions, WriteOptions

SCHEMAS = dict(schemas())
PLAIN = WriteOptions()
GZIP = WriteOptions(compress=Compression("gzip", 1))
CHUNK = WriteOptions(chunk=3)
MIXED = SCHEMAS["mixed"]


def read_all(path):
    with HDF5.open(path, OpenOptions(), None) as source:
        return source.read(0, len(source))


def grouped(batch, per_group, align):
    return with_rows(even(len(next(iter(batch.values()))), per_group, align), batch)


def known_rows(batch):
    ragged = {n: len(c.values) for n, c in batch.items() if isinstance(c, Ragged)}
    return plain(len(next(iter(batch.values()))), ragged)


@pytest.mark.parametrize("options", [PLAIN, CHUNK], ids=["plain", "chunk"])
@pytest.mark.parametrize(("dtype", "count"), [("<f4", 5), ("<f8", 4)])
def test_another_file_in_place_of_the_unfinished_one(tmp_path, options, dtype, count):
    schema, other = (Schema((Field("x", np.dtype(d), (3,)),)) for d in ("<f4", dtype))
    writer = create(HDF5, tmp_path / "a", schema, 4, options, None)
    state = json.loads(json.dumps(writer.checkpoint()))
    writer.close()
    create(HDF5, tmp_path / "a", other, count, options, None).close()
    with pytest.raises(DsprepError, match="start again with restart=True"):
        create(HDF5, tmp_path / "a", schema, 4, options, state)


def test_attributes_survive(tmp_path):
    attrs = {
        "text": "wörter",
        "number": 3,
        "ratio": np.float32(0.1),
        "list": np.arange(5, dtype=">i2"),
        "names": np.array(["a", "größer"]),
        "raw": b"bytes",
        "zeros": b"a\0\0",
        "large": np.zeros(20_000),
    }
    schema = Schema(
        (Field("x", np.dtype("<f4"), attrs=attrs), Field.opaque("b", attrs=attrs)), attrs
    )
    batch = random_batch(schema, 3)
    assert HDF5.check(schema, PLAIN) == ()
    write_batch(HDF5, tmp_path / "a", schema, batch)
    with HDF5.open(tmp_path / "a", OpenOptions(), None) as source:
        for found in (source.schema.attrs, *(f.attrs for f in source.schema)):
            assert set(found) == set(attrs)
            for key, value in attrs.items():
                np.testing.assert_array_equal(found[key], value)
    bad = Schema((Field("x", np.dtype("<f4"), attrs={"o": object()}),), {"nul": "a\0b", "n": 1})
    assert HDF5.check(bad, PLAIN) == ("attribute nul of the dataset", "attribute o of field x")


@contextmanager
def largest_file(nbytes):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("nbytes", [0, 100_000])
def test_a_disk_that_is_full_when_the_library_writes(ragged, nbytes, tmp_path):
    """The library gives the system's number in a sentence, also when it closes the file."""
    schema = Schema((Field("x", np.dtype("<f4"), (None if ragged else 1000, 10)),))

    def made(stack):
        if not ragged:
            stack.enter_context(largest_file(nbytes))
        writer = create(HDF5, tmp_path / "set.h5", schema, 40, PLAIN, None)
        stack.enter_context(closing(writer))
        feed(writer, random_batch(schema, 40, longest=1000), [0, 40])
        writer.sync()
        stack.enter_context(largest_file(nbytes))
        writer.finish()

    with ExitStack() as stack, pytest.raises(OSError, match="large") as caught:
        made(stack)
    assert caught.value.errno == errno.EFBIG


# --- in groups --------------------------------------------------------------------------------

F4, I8, U1 = np.dtype("<f4"), np.dtype("<i8"), np.dtype("u1")
IMAGES = Schema((Field("label", I8), Field("image", U1, (9, 5))))


def test_ragged_values_come_last_and_unused_space_is_not_read(tmp_path):
    schema = Schema((Field.opaque("jpeg"), Field("y", I8)))
    items = [b"a" * n for n in (5000, 1, 2, 3, 10, 0, 7)]
    batch: Batch = {"jpeg": Ragged.pack(items, schema["jpeg"]), "y": np.arange(7)}
    grouping = grouped(batch, 2, 512)
    groups = write_groups(HDF5, tmp_path / "a", schema, batch, grouping)
    assert groups.blocks.lengths.span(0, 4).tolist() == [48 + n for n in (5001, 5, 10, 7)]
    with HDF5.open(tmp_path / "a", OpenOptions(), None) as source:
        assert source.storage()["jpeg"].access.startswith("one read of 718 B")
    with h5py.File(tmp_path / "a") as file:
        first, count = file["jpeg/first"][:], file["jpeg/count"][:]
        values = file["jpeg/values"]
        assert [values[a : a + n].tobytes() for a, n in zip(first, count, strict=True)] == items
        assert values.chunks == (5001,)


def test_a_run_that_continues_from_nothing_is_refused(tmp_path):
    batch = random_batch(MIXED, 6)
    grouping = grouped(batch, 2, 64)
    for options, state in ((PLAIN, {}), (GZIP, {"streams": [900] * 9})):
        with pytest.raises((DsprepError, FileNotFoundError)):
            create(HDF5, tmp_path / "gone", MIXED, grouping, options, state)
    write_batch(HDF5, tmp_path / "other", MIXED, batch)
    fails(lambda: create(HDF5, tmp_path / "other", MIXED, grouping, PLAIN, {}), FormatError)


@pytest.mark.parametrize("options", [PLAIN, CHUNK], ids=["plain", "chunk"])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_known_rows_make_the_same_file_without_a_spool(tmp_path, options, count):
    batch = random_batch(MIXED, count)
    known = known_rows(batch)
    write_batch(HDF5, tmp_path / "spooled", MIXED, batch, options)
    write_batch(HDF5, tmp_path / "placed", MIXED, batch, options, samples=known)
    assert (tmp_path / "placed").read_bytes() == (tmp_path / "spooled").read_bytes()
    assert HDF5.plan(MIXED, options, known, 1000).scratch_nbytes == 0
    assert HDF5.plan(MIXED, options, plain(count), 1000).scratch_nbytes == 1000


@pytest.mark.parametrize("more", [-1, 1])
def test_rows_that_changed_since_they_were_counted_are_refused(tmp_path, more):
    batch = random_batch(MIXED, 6)
    known = known_rows(batch)
    rows = {name: number + more for name, number in known.rows.items()}
    writer = create(HDF5, tmp_path / "a", MIXED, plain(6, rows), PLAIN, None)

    def run():
        feed(writer, batch, [0, 4, 6])
        writer.finish()

    with closing(writer), pytest.raises(FormatError, match="has changed"):
        run()


@pytest.mark.parametrize(
    ("part", "number", "value"),
    [("first", 1, 1), ("first", 2, 7), ("first", 2, -1), ("count", 0, 99), ("first", 3, 10**9)],
)
def test_gaps_inside_groups_are_damage(tmp_path, part, number, value):
    schema = Schema((Field("x", F4, (None,)),))
    items = [np.arange(n, dtype=F4) for n in (3, 2, 4, 1, 2, 2)]
    batch: Batch = {"x": Ragged.pack(items, schema["x"])}
    write_groups(HDF5, tmp_path / "a", schema, batch, grouped(batch, 2, 64))
    with h5py.File(tmp_path / "a", "r+") as file:
        assert file["x"].attrs["dsprep_capacity"] == b"5"
        assert file["x/first"][:].tolist() == [0, 3, 5, 9, 10, 12]
        file["x"][part][number] = value
    fails(lambda: read_all(tmp_path / "a"), FormatError)


def fields(*names, dtype="<f8", shape=()):
    return Schema(tuple(Field(n, np.dtype(dtype), shape) for n in names))


def written(**how):
    return WriteOptions(**how)


LARGE = fields("x", dtype="<f4", shape=(1 << 20,))
BLOSC = written(compress=Compression("blosc"))


@pytest.mark.parametrize(
    ("schema", "options", "samples", "error", "said"),
    [
        (fields("x", "x/y"), PLAIN, 0, UnsupportedError, "inside field x"),
        (fields("a//b"), PLAIN, 0, UnsupportedError, "cannot hold"),
        (fields("../x"), PLAIN, 0, UnsupportedError, "cannot hold"),
        (fields("x"), BLOSC, 0, UnsupportedError, "gzip"),
        (fields("x"), written(compress=Compression("zlib")), 0, UnsupportedError, "gzip"),
        (fields("x"), written(chunk=0), 0, UsageError, "1 or more"),
        (fields("x"), written(chunk=1 << 31), 0, UnsupportedError, "4 GiB"),
        (fields("x"), written(zarr_format=2), 0, UsageError, "does not apply"),
        (fields("x", shape=(1,) * 32), PLAIN, 0, UnsupportedError, "axes"),
        (
            fields("x", dtype=[(f"member_{i}", "u1") for i in range(5000)]),
            *(PLAIN, 0, UnsupportedError, "cannot hold field x"),
        ),
        (IMAGES, PLAIN, Grouping(np.array([0, 3, 5, 8])), UnsupportedError, "equally many"),
        (LARGE, PLAIN, even(10_000, 1024), UnsupportedError, "at most 1023 samples"),
        (IMAGES, written(chunk=3), even(8, 4), UsageError, "chunk="),
        (IMAGES, BLOSC, even(8, 4), UnsupportedError, "blosc"),
    ],
)
def test_what_does_not_fit_is_refused(schema, options, samples, error, said):
    with pytest.raises(error, match=said):
        HDF5.plan(schema, options, samples or plain(0)), HDF5.check(schema, options)
    HDF5.plan(LARGE, PLAIN, even(10_000, 1023))
