"""HDF5 outputs: every schema survives, h5py agrees, and the bytes depend only on the samples."""

from __future__ import annotations

import errno
import json
import resource
from contextlib import closing
from pathlib import Path

import h5py
import numpy as np
import pytest
from support import NESTED, assert_same_batch, random_batch, raw, schemas, take, write_batch

from dsprep.core.schema import Arena, Batch, Field, Ragged, Schema
from dsprep.errors import DsprepError, UnsupportedError, UsageError
from dsprep.formats.base import Compression, OpenOptions, WriteOptions
from dsprep.formats.hdf5 import Hdf5

HDF5 = Hdf5()
SCHEMAS = dict(schemas())
PLAIN = WriteOptions()
GZIP = WriteOptions(compress=Compression("gzip", 1))
OPTIONS = {
    "plain": PLAIN,
    "chunk": WriteOptions(chunk=3),
    "gzip": GZIP,
    "gzip-chunk": WriteOptions(compress=Compression("gzip"), chunk=4),
    "zstd": WriteOptions(compress=Compression("zstd"), chunk=2),
}
MIXED = SCHEMAS["mixed"]


@pytest.fixture(autouse=True)
def _no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of small files: whether they survive a power cut is not the question here."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(f"os.{name}", lambda fd: None)


def read_all(path: Path) -> Batch:
    with HDF5.open(path, OpenOptions(), None) as source:
        return source.read(0, len(source))


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_every_schema_survives(tmp_path: Path, schema: Schema) -> None:
    for name, options in OPTIONS.items():
        batch = random_batch(schema, 7)
        path = tmp_path / name
        write_batch(HDF5, path, schema, batch, options, (2, 5))
        assert HDF5.recognises(path)
        with HDF5.open(path, OpenOptions(), None) as source:
            assert len(source) == 7
            assert source.schema == schema
            assert source.notes == ()
            assert_same_batch(source.read(0, 7, Arena()), batch, schema)
            assert_same_batch(source.read(1, 5), take(batch, 1, 5), schema)
            assert_same_batch(source.read(3, 3), take(batch, 3, 3), schema)


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("options", [PLAIN, GZIP, OPTIONS["chunk"]], ids=["plain", "gzip", "chunk"])
def test_no_sample_and_one_sample(tmp_path: Path, count: int, options: WriteOptions) -> None:
    for name in ("mixed", "empty-axis", "five-d", "scalar-<f4", "ragged-bfloat16", "str"):
        schema = SCHEMAS[name]
        batch = random_batch(schema, count)
        write_batch(HDF5, tmp_path / name, schema, batch, options)
        assert_same_batch(read_all(tmp_path / name), batch, schema)
        with HDF5.open(tmp_path / name, OpenOptions(), None) as source:
            assert len(source) == count


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_h5py_reads_what_was_written(tmp_path: Path, options: WriteOptions) -> None:
    schema = MIXED.replace(*MIXED, Field("nested", NESTED, (2,)), Field("yes", np.dtype("?")))
    batch = random_batch(schema, 9)
    write_batch(HDF5, tmp_path / "a.h5", schema, batch, options, (3,))
    with h5py.File(tmp_path / "a.h5") as file:
        assert list(file) == [
            "image",
            "label",
            "points",
            "hits",
            "jpeg",
            "name",
            "group",
            *("nested", "yes"),
        ]
        for f in schema:
            column = batch[f.name]
            if not isinstance(column, Ragged):
                assert file[f.name].dtype == f.dtype
                assert raw(file[f.name][()]) == raw(column), f
                continue
            group = file[f.name]
            assert group.attrs["dsprep_kind"].decode() == f.kind
            for i in range(9):
                first, count = group["first"][i], group["count"][i]
                assert raw(group["values"][first : first + count]) == raw(
                    column[i].encode() if f.kind == "str" else column[i]
                )


def test_stand_ins_are_named(tmp_path: Path) -> None:
    for name in ("fixed-bfloat16", "fixed-<U3"):
        schema = SCHEMAS[name]
        batch = random_batch(schema, 3)
        write_batch(HDF5, tmp_path / name, schema, batch)
        with h5py.File(tmp_path / name) as file:
            dataset = file["x"]
            assert json.loads(dataset.attrs["dsprep_dtype"]) in ("bfloat16", "<U3")
            assert dataset[()].tobytes() == batch["x"].tobytes()
    said = HDF5.plan(SCHEMAS["fixed-bfloat16"], PLAIN).stored
    assert said["x"] == "contiguous uint16 (bfloat16 bits)"
    small = Schema((Field("x", np.dtype("<i4")),))
    said = HDF5.plan(small, GZIP).stored
    assert said["x"].startswith("chunks of up to 262,144 samples, int32, shuffle, gzip:")


@pytest.mark.parametrize(
    "dtype", ["<M8[ns]", ">m8[s]", "V5", ">U2", "float8_e4m3fn", "<f2", "S1", "<c16"]
)
def test_rarer_dtypes_survive(tmp_path: Path, dtype: str) -> None:
    import ml_dtypes

    element = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    parts = [("a", element), ("b", "<i2", (2,))]
    schema = Schema((Field("x", element, (2,)), Field("s", np.dtype(parts))))
    rng = np.random.default_rng(0)
    batch: Batch = {}
    for f in schema:
        nbytes = 5 * f.row_nbytes
        bits = rng.integers(0, 256 if element.kind != "U" else 2, nbytes, "u1")
        if element.kind == "U":
            batch[f.name] = np.zeros((5, *f.inner), f.dtype)
            batch[f.name if f.name == "x" else "s"]["a" if f.name == "s" else ...] = "é"
        else:
            batch[f.name] = bits.view(f.dtype).reshape(5, *f.inner)
    write_batch(HDF5, tmp_path / "a", schema, batch)
    assert_same_batch(read_all(tmp_path / "a"), batch, schema)


def test_padding_is_zeroed_and_strided_columns_are_taken(tmp_path: Path) -> None:
    padded = np.dtype({"names": ["a", "b"], "formats": ["u1", "<f8"], "offsets": [0, 8]})
    schema = Schema((Field("s", padded), Field("x", np.dtype("<i4"), (3,))))
    for name, filler in (("a", 0x00), ("b", 0xFF)):
        s = np.full(6 * 16, filler, "u1").view(padded)
        s["a"], s["b"] = np.arange(6), np.arange(6) / 7
        x = np.full((12, 6), filler, "<i4")
        x[::2, ::2] = np.arange(18).reshape(6, 3)
        write_batch(HDF5, tmp_path / name, schema, {"s": s, "x": x[::2, ::2]})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_large_and_tiny_samples(tmp_path: Path) -> None:
    schema = Schema((Field("x", np.dtype("<f4"), (50, 512, 512)), Field("y", np.dtype("<i8"))))
    batch = {"x": np.ones((1, 50, 512, 512), "<f4"), "y": np.array([-1])}
    write_batch(HDF5, tmp_path / "a", schema, batch)
    assert_same_batch(read_all(tmp_path / "a"), batch, schema)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_bytes_do_not_depend_on_pieces(tmp_path: Path, options: WriteOptions) -> None:
    for name in ("mixed", "fixed-<f4"):
        batch = random_batch(SCHEMAS[name], 23)
        for cuts in ((), (5, 9, 20)):
            write_batch(HDF5, tmp_path / str(len(cuts)), SCHEMAS[name], batch, options, cuts)
        assert (tmp_path / "0").read_bytes() == (tmp_path / "3").read_bytes()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", ["mixed", "fixed-<f4"])
def test_an_interrupted_run_continues_to_the_same_bytes(
    tmp_path: Path, name: str, options: WriteOptions
) -> None:
    schema, count, step = SCHEMAS[name], 48, 12
    batch = random_batch(schema, count)
    write_batch(HDF5, tmp_path / "whole", schema, batch, options, tuple(range(0, count, step)))
    path = tmp_path / "broken"
    writer = HDF5.create(path, schema, count, options, None)
    assert writer.unit == HDF5.plan(schema, options).unit
    step = max(step, writer.unit)

    def put(start: int) -> None:
        piece = writer.encode(take(batch, start, min(start + step, count)), start, Arena())
        writer.reserve(piece)
        writer.write(piece)

    half = count // 2 // step * step
    for start in range(0, half, step):
        put(start)
    state = json.loads(json.dumps(writer.checkpoint()))
    writer.sync()
    if half < count:
        put(half)  # written by the killed run, behind its checkpoint
    writer.close()
    for file in tmp_path.glob("broken.spool/*"):
        file.write_bytes(file.read_bytes()[: -5 or None] + b"scribble" * 9)
    writer = HDF5.create(path, schema, count, options, state)
    for start in range(half, count, step):
        put(start)
    writer.sync()
    writer.finish()
    writer.close()
    writer.clean()
    writer.close()
    assert path.read_bytes() == (tmp_path / "whole").read_bytes()
    assert not (tmp_path / "broken.spool").exists()


def test_another_file_in_place_of_the_unfinished_one(tmp_path: Path) -> None:
    schema = SCHEMAS["fixed-<f4"]
    writer = HDF5.create(tmp_path / "a", schema, 4, PLAIN, None)
    state = json.loads(json.dumps(writer.checkpoint()))
    writer.close()
    HDF5.create(tmp_path / "a", schema, 5, PLAIN, None).close()
    with pytest.raises(DsprepError, match="start again with --restart"):
        HDF5.create(tmp_path / "a", schema, 4, PLAIN, state)


def test_finish_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = random_batch(MIXED, 10)
    write_batch(HDF5, tmp_path / "whole", MIXED, batch, GZIP, (4,))
    path = tmp_path / "x"
    writer = HDF5.create(path, MIXED, 10, GZIP, None)
    piece = writer.encode(batch, 0, Arena())
    writer.reserve(piece)
    writer.write(piece)
    state = writer.checkpoint()
    writer.sync()
    with monkeypatch.context() as patch:
        patch.setattr("dsprep.formats.hdf5.spool.pwrite_all", _no_space)
        with pytest.raises(OSError, match="full"):
            writer.finish()
    writer.close()
    for _ in range(2):  # the second time everything is done already
        writer = HDF5.create(path, MIXED, 10, GZIP, state)
        writer.finish()
        writer.close()
        assert path.read_bytes() == (tmp_path / "whole").read_bytes()
    writer.clean()
    assert not (tmp_path / "x.spool").exists()
    with pytest.raises(DsprepError, match="start again with --restart"):
        HDF5.create(path, MIXED, 10, GZIP, state)


def _no_space(*_: object) -> int:
    raise OSError(28, "the disk is full")


def test_attributes_survive(tmp_path: Path) -> None:
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
    assert HDF5.plan(schema, PLAIN).notes == ()
    write_batch(HDF5, tmp_path / "a", schema, batch)
    with HDF5.open(tmp_path / "a", OpenOptions(), None) as source:
        for found in (source.schema.attrs, *(f.attrs for f in source.schema)):
            assert set(found) == set(attrs)
            for key, value in attrs.items():
                np.testing.assert_array_equal(found[key], value)
    bad = Schema((Field("x", np.dtype("<f4"), attrs={"o": object()}),), {"nul": "a\0b", "n": 1})
    assert HDF5.plan(bad, PLAIN).notes == ("attribute nul of the dataset", "attribute o of field x")


@pytest.mark.parametrize(
    ("names", "options", "error", "said"),
    [
        (["x", "x/y"], PLAIN, UnsupportedError, "inside field x"),
        (["a//b"], PLAIN, UnsupportedError, "no place"),
        (["../x"], PLAIN, UnsupportedError, "no place"),
        (["x"], WriteOptions(compress=Compression("blosc")), UnsupportedError, "gzip"),
        (["x"], WriteOptions(compress=Compression("zlib")), UnsupportedError, "gzip"),
        (["x"], WriteOptions(chunk=0), UsageError, "1 or more"),
        (["x"], WriteOptions(chunk=1 << 31), UnsupportedError, "4 GiB"),
        (["x"], WriteOptions(zarr_format=2), UsageError, "does not apply"),
    ],
)
def test_what_does_not_fit_is_refused(
    names: list[str], options: WriteOptions, error: type[Exception], said: str
) -> None:
    schema = Schema(tuple(Field(n, np.dtype("<f8")) for n in names))
    with pytest.raises(error, match=said):
        HDF5.plan(schema, options)


def test_too_many_axes_and_members_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="axes"):
        HDF5.plan(Schema((Field("x", np.dtype("u1"), (1,) * 32),)), PLAIN)
    many = np.dtype([(f"member_{i}", "u1") for i in range(5000)])
    with pytest.raises(UnsupportedError, match="cannot hold field x"):
        HDF5.plan(Schema((Field("x", many),)), PLAIN)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_estimate_is_close(tmp_path: Path, options: WriteOptions) -> None:
    schema = Schema((Field("x", np.dtype("<f4"), (64, 64)), Field("y", np.dtype("u1"))))
    batch = random_batch(schema, 64)
    write_batch(HDF5, tmp_path / "a", schema, batch, options)
    payload = sum(c.nbytes for c in batch.values())
    expected = HDF5.plan(schema, options, 64, payload).nbytes
    size = (tmp_path / "a").stat().st_size
    assert size <= expected
    if options.compress is None:
        assert expected <= size + (64 << 10)


def test_a_missing_folder_is_the_systems_own_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        HDF5.create(tmp_path / "no" / "a.h5", SCHEMAS["fixed-<f4"], 3, PLAIN, None)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("nbytes", [0, 3000, 20_000, 100_000])
def test_a_disk_that_is_full_when_the_library_writes(ragged: bool, nbytes: int, tmp_path: Path):
    """The library tells the system's number in a sentence, also when it closes the file."""
    schema = Schema((Field("x", np.dtype("<f4"), (None if ragged else 1000, 10)),))
    batch = random_batch(schema, 40, longest=1000)
    path = tmp_path / "set.h5"

    def made() -> None:
        with closing(HDF5.create(path, schema, 40, PLAIN, None)) as writer:
            if ragged:
                piece = writer.encode(batch, 0, Arena())
                writer.reserve(piece)
                writer.write(piece)
                limit(nbytes)
                writer.finish()

    def limit(nbytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if not ragged:
            limit(nbytes)
        with pytest.raises(OSError, match="large") as caught:
            made()
        assert caught.value.errno == errno.EFBIG
    finally:
        limit(soft)
