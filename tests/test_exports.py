"""Other readers find the samples by what is exported: zarr with fsspec, DALI, DLIO."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from support import SUFFIX, dataset, describe, fails, random_batch, raw, schemas, take

from dsprep.core.schema import Batch, Field, Schema
from dsprep.errors import FormatError, TargetError, UsageError
from dsprep.formats import recognise
from dsprep.formats.options import Compression
from dsprep.sidecar.export import KINDS, export
from dsprep.sidecar.export import kerchunk as kerchunk_module
from dsprep.sidecar.sidecar import Sidecar
from dsprep.verbs.provenance import provenance

F4, U1, I8 = np.dtype("<f4"), np.dtype("u1"), np.dtype("<i8")
PLAIN = Schema((Field("x", np.dtype(">f4"), (40, 40)), Field("d/y", np.dtype("<f8"), (3,))))


def described(path: Path, schema: Schema | None = None, *files: tuple[Path, int]) -> Sidecar:
    """The sidecar of a dataset; with a schema, of what was written with `write`."""
    if schema is None:
        provenance(path)
    else:
        format = recognise(files[0][0])
        describe(format, schema, [file for file, _ in files], path).save()
    return Sidecar.open(path)


def group(path: Path, **options: Any) -> Any:
    """The references as a group of zarr: the recipe of `dsprep.sidecar.export.kerchunk`."""
    import fsspec
    import zarr
    from zarr.storage import FsspecStore

    fs = fsspec.filesystem(
        "reference", fo=str(path), asynchronous=True, skip_instance_cache=True, **options
    )
    return zarr.open_group(FsspecStore(fs, read_only=True, path=""), mode="r", zarr_format=2)


def references(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    assert found["version"] == 1
    return found["refs"]


def write(directory: Path, format: str, schema: Schema, batch: Batch | int, **options) -> Path:
    return dataset(directory, format, schema, batch, sidecar=False, **{"name": "data", **options})[
        0
    ]


def assert_same(found: Any, batch: Batch, names: Sequence[str]) -> None:
    for name in names:
        array = found[name][...]
        assert array.dtype == batch[name].dtype, name
        assert array.shape == batch[name].shape, name
        assert raw(array) == raw(batch[name]), name


# --- kerchunk --------------------------------------------------------------------------------


def every_field(ragged: bool) -> Schema:
    """Fields of every dtype, rank and kind; all of them, or those of fixed shape."""
    fields: dict[tuple[Any, ...], Field] = {}
    for _, schema in schemas():
        for f in schema:
            if ragged or not f.ragged:
                key = (str(f.dtype), f.dtype.str, f.shape, f.kind)
                fields.setdefault(key, replace(f, name=f"field{len(fields)}"))
    return Schema(tuple(fields.values()))


@pytest.mark.parametrize(
    ("format", "ragged"),
    [*((format, True) for format in SUFFIX), ("lmdb", False), ("tfrecord", False)],
)
def test_zarr_reads_every_field_or_a_note_says_why_not(format, ragged, tmp_path):
    schema = every_field(ragged)
    batch = random_batch(schema, 7)
    path = write(tmp_path, format, schema, batch)
    made = described(path, schema, (path, 7))
    notes: list[str] = []
    (path,) = export(made, "kerchunk", notes=notes)
    refs = references(path)
    names = [n for n in schema.names if f"{n}/.zarray" in refs]
    for name in set(schema.names) - set(names):
        assert any(f"field {name}: " in note for note in notes), name
    assert len(names) + len(notes) == len(schema.names)
    if not ragged and format != "tfrecord":  # which has values of its own for integers
        assert all("Zarr version 2 has no dtype" in note for note in notes)
    assert_same(group(path), batch, names)


def hdf5(path: Path, x: np.ndarray, **options: Any) -> Sidecar:
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=x, **options)
    return described(path)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunks": (5, 6, 3)},
        {"chunks": (4, 4, 2), "compression": "gzip", "shuffle": True},
        {"chunks": (4, 6, 3), "compression": "gzip", "fletcher32": True},
        {"chunks": (1, 6, 3), "shuffle": True},
    ],
    ids=lambda o: "-".join(o) or "contiguous",
)
def test_zarr_reads_arrays_of_hdf5(options, tmp_path):
    x = np.random.default_rng(1).integers(0, 9, (23, 6, 3)).astype(">i4")
    made = hdf5(tmp_path / "a.h5", x, **options)
    (path,) = export(made, "kerchunk")
    assert path == tmp_path / "a.h5.kerchunk.json"
    found = group(path)["x"]
    assert found.attrs["_ARRAY_DIMENSIONS"] == ["sample", "x_1", "x_2"]
    assert found.dtype == x.dtype
    assert np.array_equal(found[...], x)
    if "chunks" in options:
        assert found.chunks == options["chunks"]


def test_chunks_that_hdf5_did_not_store_are_filled(tmp_path):
    strange = np.array([0x7FC00001], "u4").view("f4")[0]
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file.create_dataset("x", (20, 4), "f4", chunks=(4, 4), fillvalue=strange)[8:12] = 3
    with pytest.raises(UsageError, match="field x has chunks that are not stored"):
        export(described(tmp_path / "b.h5"), "kerchunk")
    assert [p.name for p in tmp_path.iterdir() if "kerchunk" in p.name] == []
    with h5py.File(tmp_path / "a.h5", "w") as file:
        x = file.create_dataset("x", (20, 4), "f4", chunks=(4, 4), fillvalue=-0.5, compression=4)
        x[8:12] = 3
    (path,) = export(described(tmp_path / "a.h5"), "kerchunk")
    expected = np.full((20, 4), -0.5, "f4")
    expected[8:12] = 3
    assert np.array_equal(group(path)["x"][...], expected)
    assert sum(isinstance(r, list) for r in references(path).values()) == 1


@pytest.mark.parametrize("sizes", [(6, 4, 3), (5, 0, 7)])
@pytest.mark.parametrize("format", SUFFIX)
def test_chunks_are_counted_through_several_files(format, sizes, tmp_path):
    batch = random_batch(PLAIN, sum(sizes))
    directory = tmp_path / "train"
    directory.mkdir()
    start, files = 0, []
    for k, n in enumerate(sizes):
        part = take(batch, start, start + n)
        files.append((write(directory, format, PLAIN, part, name=f"part{k}"), n))
        start += n
    (path,) = export(described(directory, PLAIN, *files), "kerchunk")
    assert path == tmp_path / "train.kerchunk.json"
    assert_same(group(path), batch, PLAIN.names)


def test_filtered_files_that_end_within_a_chunk_are_left_out(tmp_path):
    directory = tmp_path / "train"
    directory.mkdir()
    for k in range(2):
        with h5py.File(directory / f"{k}.h5", "w") as file:
            file.create_dataset("x", (10, 4), "f4", chunks=(4, 4), compression=1)
            file.create_dataset("y", (10, 5), "f4", chunks=(5, 5), compression=1)
            file["y"][...] = np.arange(50).reshape(10, 5) + k
    notes: list[str] = []
    (path,) = export(described(directory), "kerchunk", notes=notes)
    assert notes == ["left out field x: a file ends within a chunk, and others follow"]
    assert np.array_equal(group(path)["y"][10:], np.arange(50).reshape(10, 5) + 1)


@pytest.mark.parametrize(("version", "shard"), [(2, None), (3, 0), (3, 14)])
@pytest.mark.parametrize("codec", ["zstd", "blosc", None])
def test_zarr_reads_zarr(codec, version, shard, tmp_path):
    x = np.arange(30 * 8, dtype="<i2").reshape(30, 8)
    schema = Schema((Field("x", x.dtype, (8,)),))
    compress = Compression(codec) if codec else None
    options = {"chunk": 7, "zarr_format": version, "zarr_shard": shard}
    path = write(tmp_path, "zarr", schema, {"x": x}, compress=compress, **options)
    (path,) = export(described(path, schema, (path, 30)), "kerchunk")
    found = group(path)["x"]
    assert found.chunks == (7, 8)
    assert np.array_equal(found[...], x)


def test_attributes_are_told_and_what_json_does_not_keep_is_noted(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        x = file.create_dataset("x", data=np.zeros((3, 2)))
        x.attrs["units"] = "mm"
        x.attrs["scale"] = np.arange(3.0)
        x.attrs["pair"] = np.array((1, 2), [("a", "i4"), ("b", "i4")])
        file.attrs["run"] = 7
    notes: list[str] = []
    (path,) = export(described(tmp_path / "a.h5"), "kerchunk", notes=notes)
    found = group(path)
    assert found.attrs["run"] == 7
    assert found["x"].attrs["units"] == "mm"
    assert found["x"].attrs["scale"] == [0, 1, 2]
    assert [n.split(":")[0] for n in notes] == ["left out attribute pair of field x"]


@pytest.mark.parametrize("name", ["a b", "a{b}c", "sä%20tze#?*", "日本"])
def test_names_of_files_are_taken_as_they_are(name, tmp_path):
    directory = tmp_path / name
    directory.mkdir()
    x = np.arange(12.0).reshape(4, 3)
    made = hdf5(directory / f"{name}.h5", x)
    (path,) = export(made, "kerchunk", tmp_path / "out.json")
    assert path == tmp_path / "out.json"
    assert np.array_equal(group(path)["x"][...], x)


def test_a_dataset_that_moved_is_found_by_its_template(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("old").mkdir()
    x = np.arange(12.0).reshape(4, 3)
    hdf5(Path("old/a.h5"), x).close()
    (path,) = export(Sidecar.open("old/a.h5"), "kerchunk")
    assert np.array_equal(group(path)["x"][...], x)
    Path("old").rename("new")
    found = group(tmp_path / "new" / path.name, template_overrides={"d": f"{tmp_path}/new/"})
    assert np.array_equal(found["x"][...], x)


def test_too_many_chunks_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(kerchunk_module, "MAX_REFERENCES", 5)
    schema = Schema((Field("x", F4, (3,)),))
    path = write(tmp_path, "lmdb", schema, random_batch(schema, 6))
    made = described(path, schema, (path, 6))
    fails(lambda: export(made, "kerchunk"), UsageError, "field x has too many chunks")


@pytest.mark.parametrize("kind", list(KINDS))
def test_places_behind_the_end_of_the_file_are_refused(kind, tmp_path):
    schema = Schema((Field.opaque("x"),)) if kind == "dali-idx" else PLAIN
    path = write(tmp_path, "tfrecord", schema, random_batch(schema, 6))
    described(path, schema, (path, 6)).close()
    path.write_bytes(path.read_bytes()[:-5])
    made = Sidecar.open(path, check=False)
    fails(lambda: export(made, kind), FormatError, "not in the file")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "data.tfrecord",
        "data.tfrecord.dsprep.json",
    ]


# --- indexes ---------------------------------------------------------------------------------


def scanned(path: Path) -> list[tuple[int, int]]:
    """Offset and size of every record, header and checksums included."""
    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        (length,) = struct.unpack_from("<q", data, at)
        found.append((at, length + 16))
        at += length + 16
    return found


@pytest.mark.parametrize("field", [Field("x", F4, (30,)), Field.opaque("x")], ids=str)
def test_dali_finds_records(field, tmp_path):
    schema = Schema((field,))
    directory = tmp_path / "train"
    directory.mkdir()
    files = [
        write(directory, "tfrecord", schema, random_batch(schema, n, n), name=f"{n}")
        for n in (4, 9)
    ]
    found = export(described(directory), "dali-idx")
    assert found == [f.with_name(f.name + ".idx") for f in files]
    for file, index in zip(files, found, strict=True):
        expected = "".join(f"{at} {size}\n" for at, size in scanned(file))
        assert index.read_text() == expected


def test_dali_has_no_index_of_other_formats_and_unknown_kinds_are_named(tmp_path):
    made = hdf5(tmp_path / "a.h5", np.zeros((3, 2)))
    for kind, words in (("dali-idx", "TFRecord"), ("parquet", "kerchunk, dali-idx")):
        with pytest.raises(UsageError, match=words):
            export(made, kind)


# --- files -----------------------------------------------------------------------------------


def test_nothing_is_overwritten_unless_asked_for(tmp_path):
    made = hdf5(tmp_path / "a.h5", np.zeros((3, 2)))
    (tmp_path / "a.h5.kerchunk.json").write_text("mine")
    fails(lambda: export(made, "kerchunk"), TargetError, "there already")
    assert (tmp_path / "a.h5.kerchunk.json").read_text() == "mine"


def test_a_dataset_without_samples(tmp_path):
    schema = Schema((Field("x", F4, (3,)),))
    path = write(tmp_path, "tfrecord", schema, random_batch(schema, 0))
    made = described(path, schema, (path, 0))
    assert [p.read_bytes() for p in export(made, "dali-idx")] == [b""]
    (refs,) = export(made, "kerchunk")
    assert group(refs)["x"].shape == (0, 3)
