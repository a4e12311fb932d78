"""Stores that others wrote, whole and damaged: read as zarr-python reads them, or refused."""

from __future__ import annotations

import re
import struct
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from support import fails, random_array, random_batch, raw, write_batch
from zarr.core.dtype import VariableLengthBytes
from zarr_stores import (
    F4,
    ZARR,
    create,
    edit,
    new_store,
    opened,
    zip_up,
)

import dsprep
from dsprep.core import filters
from dsprep.core.schema import Field, Ragged, Schema
from dsprep.errors import (
    AmbiguousError,
    DsprepError,
    FormatError,
    MissingExtra,
    SchemaError,
)
from dsprep.formats import recognise
from dsprep.formats.options import OpenOptions
from dsprep.formats.zarr.array import StoredArray

pytestmark = [
    # dtypes without a v3 specification: zarr-python reads them, and warns
    pytest.mark.filterwarnings("ignore:.*does not have a Zarr V3 specification"),
]


X = random_array(F4, (23, 4, 6))


SPELLINGS = {"c/": ("default", "/"), ".": ("v2", "."), "/": ("v2", "/")}


@pytest.mark.parametrize("stated", SPELLINGS)
@pytest.mark.parametrize("written", [*SPELLINGS, "none"])
def test_chunks_of_another_spelling_are_not_missing(
    tmp_path: Path, written: str, stated: str
) -> None:
    def spelling(keys: str) -> dict[str, Any]:
        name, separator = SPELLINGS[keys]
        return {"name": name, "configuration": {"separator": separator}}

    root, keys = new_store(tmp_path / "a"), spelling("/" if written == "none" else written)
    array = root.create_array("x", shape=(4, 4), dtype=F4, chunks=(2, 2), chunk_key_encoding=keys)
    if written != "none":
        array[2:] = 1  # and the others are not stored
    edit(tmp_path / "a" / "x" / "zarr.json", chunk_key_encoding=spelling(stated))
    with opened(tmp_path / "a", axis="first") as source:
        if written in ("none", stated):
            assert source[3]["x"].tolist() == [float(written != "none")] * 4
            return
        fails(lambda: source.read(0, 4), FormatError, "chunk_key_encoding")


def test_what_samples_have_no_place_for_is_said(tmp_path: Path) -> None:
    root = zarr.create_group(tmp_path / "a", attributes={"kept": 1})
    create(root, "x", X, dimension_names=["time", None, "lat"])
    create(root, "deep/z", X[:, 0, 0])
    root["deep"].attrs["note"] = "n"
    with opened(tmp_path / "a") as source:
        assert source.notes == (
            "samples are counted along time",
            "attributes of deep are not kept",
        )
    with opened(tmp_path / "a", "deep/z") as source:
        assert source.notes == ()


@pytest.mark.parametrize("kind", ["compressed", "shards", "strings", "foreign"])
def test_a_large_chunk_is_decoded_once(tmp_path: Path, monkeypatch, kind: str) -> None:
    values = random_array(F4, (230, 4, 6))
    root = zarr.create_group(tmp_path / "a", zarr_format=2 if kind == "foreign" else 3)
    if kind == "strings":
        values = np.array([str(i) for i in range(230)], object)
        root.create_array("x", shape=(230,), dtype=str, chunks=(100,))[:] = values
    else:
        how = {"chunks": (100, 4, 6), "compressors": "auto"}
        how |= {"shards": (200, 4, 6)} if kind == "shards" else {}
        how |= {"filters": [numcodecs.Delta("<i4", "<i4")]} if kind == "foreign" else {}
        create(root, "x", values, **how)
    decoded: list[object] = []
    by_zarr = kind in ("strings", "foreign")
    owner, name = (StoredArray, "_decode") if by_zarr else (filters, "decode")
    real = getattr(owner, name)

    def counted(*args):
        decoded.append(args)
        time.sleep(0.01)
        return real(*args)

    monkeypatch.setattr(owner, name, counted)

    def same(found, start: int) -> bool:
        expected = values[start : start + len(found)]
        return list(found) == list(expected) if kind == "strings" else raw(found) == raw(expected)

    with opened(tmp_path / "a") as source:
        assert all(same(source.read(i, min(230, i + 7))["x"], i) for i in range(0, 230, 7))
        assert len(decoded) == 3
        decoded.clear()
        with ThreadPoolExecutor(8) as pool:
            parts = list(pool.map(lambda i: source.read(i, i + 7)["x"], range(0, 90, 7)))
        assert len(decoded) == 1
        assert all(same(part, 7 * i) for i, part in enumerate(parts))


WORDS = ["", "a", "naïve", "日本", "nul\0inside"]


CODECS = {
    "gzip": zarr.codecs.GzipCodec(),
    "blosc": zarr.codecs.BloscCodec(),
    "v2": numcodecs.GZip(1),
    "none": None,
}


@pytest.mark.parametrize("codec", CODECS)
def test_strings_and_byte_strings(tmp_path: Path, codec: str) -> None:
    root = zarr.create_group(tmp_path / "a", zarr_format=2 if codec == "v2" else 3)
    how = {"shape": (5,), "chunks": (2,), "compressors": CODECS[codec]}
    root.create_array("s", dtype=str, fill_value="none", **how)[:] = np.array(WORDS, object)
    data = root.create_array("b", dtype=VariableLengthBytes(), **how)
    data[:] = np.array([w.encode() for w in WORDS], object)
    with opened(tmp_path / "a") as source:
        assert [source.schema[name].kind for name in "sb"] == ["str", "bytes"]
        assert list(source[:]["s"]) == WORDS
        assert list(source.read(1, 4)["b"]) == [w.encode() for w in WORDS[1:4]]
        assert source.sizes(0, 5) is None
    with opened(tmp_path / "a", "n=b:str") as source:
        assert list(source[:]["n"]) == WORDS
    (tmp_path / "a" / ("s/1" if codec == "v2" else "s/c/1")).unlink()
    with opened(tmp_path / "a", "s") as source:
        assert list(source[:]["s"]) == [*WORDS[:2], "none", "none", WORDS[4]]


@pytest.mark.parametrize("name", ["pickle", "msgpack2", "vlen-array"])
def test_python_objects_are_refused_by_name(tmp_path: Path, name: str) -> None:
    root = zarr.create_group(tmp_path / "a", zarr_format=2)
    root.create_array("s", shape=(5,), dtype=str)
    create(root, "x", X, chunks=(5, 4, 6))
    create(root, "good", X, chunks=(5, 4, 6))
    edit(tmp_path / "a/s/.zarray", filters=[{"id": name}])
    if name == "pickle":
        edit(tmp_path / "a/x/.zarray", compressor={"id": name})
    for fields in ("s", "x")[: 1 + (name == "pickle")]:
        with pytest.raises(FormatError, match=name):
            opened(tmp_path / "a", fields)
    with opened(tmp_path / "a", "good") as source:
        assert source.schema.names == ("good",)


def test_which_arrays_are_fields(tmp_path: Path) -> None:
    root = zarr.create_group(tmp_path / "a")
    for name, shape in {"x": (8, 3), "y": (8,), "mean": (3,), "version": ()}.items():
        create(root, name, np.ones(shape, F4))
    fails(lambda: opened(tmp_path / "a"), AmbiguousError)
    with opened(tmp_path / "a", axis="first") as source:
        assert (source.schema.names, len(source)) == (("x", "y"), 8)
        assert all(name in "".join(source.notes) for name in ("mean", "version"))
    with opened(tmp_path / "a", axis="none") as source:
        assert (source[0]["version"], source.read(0, 1)["y"].shape) == (1, (1, 8))
    for names, error in ((("x", "mean"), SchemaError), (("z",), SchemaError)):
        with pytest.raises(error, match=names[-1]):
            opened(tmp_path / "a", *names)


# --- damage --------------------------------------------------------------------------------------


def read_all(path: Path) -> None:
    with opened(path) as source:
        if len(source) > 1000:
            raise FormatError("more samples than were ever there")
        source.read(0, len(source))
        for i in range(0, len(source), 7):
            source.read(i, min(i + 7, len(source)))
        source.storage()


@pytest.mark.parametrize(
    ("first", "count"),
    [
        ([0, 2, 5, 6], [2, 3, 1, 5]),  # beyond the end
        ([0, 2, 5, 6], [2, 3, 1, 2]),  # short of the end
        ([0, 2, 4, 6], [2, 3, 2, 3]),  # overlapping
        ([1, 2, 5, 6], [1, 3, 1, 3]),  # not from the start
        ([0, 2**62, 5, 6], [2**62, 3, 1, 3]),
        ([0, 2, 5, 6], [2, 3, 1, 2**63 - 1]),
        ([-5, 2, 5, 6], [7, 3, 1, 3]),
    ],
)
def test_first_and_count_must_divide_the_values(tmp_path: Path, first: list, count: list) -> None:
    schema = Schema((Field("r", F4, (None,)),))
    batch = {"r": Ragged.from_lengths(np.arange(9, dtype=F4), np.array([2, 3, 1, 3]))}
    write_batch(ZARR, tmp_path / "a", schema, batch)
    zarr.open_array(tmp_path / "a/r/first")[...] = np.array(first, "i8")
    zarr.open_array(tmp_path / "a/r/count")[...] = np.array(count, "i8")
    for samples in ((0, 4), (3, 4)):
        with opened(tmp_path / "a") as source, pytest.raises(FormatError, match="do not divide"):
            source.read(*samples)


def configured(name: str, **configuration: Any) -> dict[str, Any]:
    return {"name": name, "configuration": configuration}


SHAPES = [[-1, 3], [10**15, 10**6], [2**63], [3.5], ["3"], [True], None, {}, [[1]], [1] * 40]
SHARDS = {"chunk_shape": [5, 2, 3], "codecs": ["bytes"], "index_codecs": ["bytes"]}
CHANGES = [
    *({"shape": shape} for shape in SHAPES),
    {"shape": [5, 10**15]},
    *(
        {"data_type": stated}
        for stated in (
            "nothing",
            configured("null_terminated_bytes", length_bytes=0),
            configured("structured", fields=[["a", "string"]]),
            "r7",
            None,
        )
    ),
    *(
        {"chunk_grid": configured("regular", chunk_shape=sizes)}
        for sizes in ([5], [-5, 4, 6], [5, 4, 10**17])
    ),
    {"chunk_grid": configured("rectilinear")},
    {"chunk_key_encoding": {"name": "secret"}},
    {"chunk_key_encoding": configured("default", separator="../")},
    {"chunk_key_encoding": configured("default", zeparator=".")},
    *(
        {"codecs": codecs}
        for codecs in (
            [configured("bytes", endian="middle")],
            [configured("bytes", eneian="big")],
            [configured("sharding_indexed")],
            [configured("sharding_indexed", **SHARDS, index_location="middle")],
            [configured("sharding_indexed", **SHARDS, inde8_location="start")],
            [{"name": "numcodecs.pickle"}, {"name": "bytes"}],
            7,
            [7],
        )
    ),
    {"storage_transformers": [{"name": "x"}]},
    {"zarr_format": 4},
    {"node_type": "chunk"},
]


@pytest.mark.parametrize("changes", CHANGES, ids=lambda c: str(c)[:60])
def test_hostile_metadata_is_refused(tmp_path: Path, changes: dict) -> None:
    create(zarr.create_group(tmp_path / "a"), "x", X, chunks=(5, 4, 6))
    edit(tmp_path / "a" / "x" / "zarr.json", **changes)
    with pytest.raises(DsprepError) as caught:
        read_all(tmp_path / "a")
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"[" * 100_000, b"\xff", b'{"shape": 1e999}'])
def test_metadata_that_is_no_object_is_refused(tmp_path: Path, data: bytes) -> None:
    create(zarr.create_group(tmp_path / "a"), "x", X)
    (tmp_path / "a" / "x" / "zarr.json").write_bytes(data)
    fails(lambda: opened(tmp_path / "a"), FormatError)


def test_unknown_codecs_are_named(tmp_path: Path) -> None:
    create(zarr.create_group(tmp_path / "a"), "x", X)
    codecs = [{"name": "bytes"}, {"name": "imagecodecs_jpegxl"}]
    edit(tmp_path / "a" / "x" / "zarr.json", codecs=codecs)
    with opened(tmp_path / "a") as source, pytest.raises(MissingExtra, match="imagecodecs_jpegxl"):
        source.read(0, 1)


def test_the_dtype_attribute_is_checked(tmp_path: Path) -> None:
    root = zarr.create_group(tmp_path / "a")
    create(root, "x", random_array(np.dtype("u1"), (5, 3, 4)))
    for text in ("nonsense", 5, "<f8", "O", {"names": ["a"]}, {"base": "<f4", "shape": [1]}, "|V0"):
        root["x"].attrs["dsprep_dtype"] = text
        fails(lambda: opened(tmp_path / "a"), FormatError)
    root["x"].attrs["dsprep_dtype"] = "<f4"
    with opened(tmp_path / "a") as source:
        assert source.schema["x"] == Field("x", F4, (3,))


def test_groups_without_arrays_are_refused(tmp_path: Path) -> None:
    zarr.create_group(tmp_path / "group")
    fails(lambda: opened(tmp_path / "group"), FormatError, "no arrays")


def test_damaged_zip_files_are_refused(tmp_path: Path) -> None:
    schema, path = Schema((Field("x", F4, (3,)),)), tmp_path / "a.zip"
    write_batch(ZARR, path, schema, random_batch(schema, 9))
    whole = path.read_bytes()
    end = whole.rindex(b"PK\5\6") + 16
    at = int.from_bytes(whole[end : end + 4], "little") + 1000  # so all offsets are too large
    moved = whole[:end] + at.to_bytes(4, "little") + whole[end + 4 :]
    for data in (*(whole[:cut] for cut in (4, 30, len(whole) // 2, len(whole) - 1)), moved):
        path.write_bytes(data)
        assert recognise(path) is ZARR
        with pytest.raises(FormatError, match=f"{re.escape(str(path))}.* ZIP "):
            read_all(path)


def test_zip_bombs_are_refused(tmp_path: Path) -> None:
    create(zarr.create_group(tmp_path / "a"), "x", X)
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for member in ("zarr.json", "x/zarr.json"):
            target.write(tmp_path / "a" / member, member)
        target.writestr("x/c/0/0/0", b"\0" * 2208)
    data = bytearray(path.read_bytes())
    at = data.rindex(b"PK\1\2")
    data[at + 24 : at + 28] = struct.pack("<I", 2**31)
    path.write_bytes(data)
    with opened(path) as source, pytest.raises(FormatError, match="too large"):
        source.read(0, 1)


def test_groups_without_end_are_refused(tmp_path: Path) -> None:
    create(zarr.create_group(tmp_path / "a"), "x", X)
    (tmp_path / "a" / "again").symlink_to(tmp_path / "a")
    fails(lambda: opened(tmp_path / "a"), FormatError, "without end")


@pytest.mark.parametrize("codec", [numcodecs.GZip(1), numcodecs.Blosc(), None], ids=str)
def test_a_chunk_that_claims_many_strings_is_refused(tmp_path: Path, codec) -> None:
    root = zarr.create_group(tmp_path / "a", zarr_format=2)
    array = root.create_array("s", shape=(5,), dtype=str, chunks=(5,), compressors=codec)
    array[:] = np.array(WORDS, object)
    claim = struct.pack("<I", 2**32 - 1) + b"\0" * 20
    chunk = tmp_path / "a" / "s" / "0"
    for data in (claim, claim[:2]):
        chunk.write_bytes(codec.encode(data) if codec else data)
        with opened(tmp_path / "a") as source, pytest.raises(FormatError, match="elements"):
            source.read(0, 5)


def test_one_array_that_cannot_be_a_field_leaves_the_others(tmp_path: Path) -> None:
    """It is not damaged: a note names it, and asking for it says why it is refused."""
    root = zarr.open_group(tmp_path / "a", mode="w")
    create(root, "x", np.arange(12.0).reshape(6, 2))
    strings = root.create_array("names", shape=(6, 2), dtype="str")
    strings[...] = "a"
    create(root, "odd", np.arange(6))
    edit(tmp_path / "a/odd/zarr.json", data_type="int7")
    with opened(tmp_path / "a") as source:
        assert source.schema.names == ("x",)
        notes = "\n".join(source.notes)
        assert "left out names: strings along 2 axes" in notes
        assert "left out odd: unknown data type int7" in notes
    for name, why in (("names", "2 axes"), ("odd", "int7")):
        with pytest.raises(FormatError, match=why):
            opened(tmp_path / "a", name)
    with opened(tmp_path / "a", "x") as source:
        assert not source.notes


@pytest.mark.parametrize("version", [2, 3])
def test_a_zip_that_has_lost_its_root_is_not_its_first_array(version: int, tmp_path: Path) -> None:
    root = zarr.open_group(tmp_path / "a", mode="w", zarr_format=version)
    for name in ("x", "y"):
        create(root, name, np.arange(6))
    (tmp_path / "a" / ("zarr.json" if version == 3 else ".zgroup")).unlink()
    path = zip_up(tmp_path / "a", tmp_path / "a.zarr.zip")
    assert recognise(path) is ZARR
    fails(lambda: opened(path), FormatError, "has lost the root of one ", "found x, y", "unpack")


def write_pyramid(group: zarr.Group, shape: tuple[int, ...], axes: str) -> None:
    """Write an image as OME-NGFF 0.4 and 0.5 keep it."""
    for level in range(3):
        some = tuple(n >> level if name in "yx" else n for n, name in zip(shape, axes, strict=True))
        create(group, str(level), random_array(F4, some))
    levels = [{"path": str(level)} for level in range(3)]
    stated = {"multiscales": [{"axes": [{"name": n} for n in axes], "datasets": levels}]}
    group.attrs.update(stated if group.metadata.zarr_format == 2 else {"ome": stated})


@pytest.mark.parametrize("version", [2, 3])
def test_images_and_plates_are_asked_about(tmp_path: Path, version: int) -> None:
    """What the message says to name is read: a level, or an image for each sample."""
    write_pyramid(zarr.create_group(tmp_path / "t", zarr_format=version), (6, 2, 16, 16), "tcyx")
    root = zarr.create_group(tmp_path / "p", zarr_format=version)
    for image in ("A/1/0", "A/1/1", "B/2/0"):
        write_pyramid(root.create_group(image), (1, 16, 16), "cyx")
    for name in "tp":
        with pytest.raises(SchemaError, match=r"--field 0.*'PLATE/\*/\*/\*/0' --sample-axis none"):
            opened(tmp_path / name)
    with opened(tmp_path / "t", "1", axis="first") as source:
        assert (len(source), source.schema["1"].shape) == (6, (2, 8, 8))
    with dsprep.open(f"{tmp_path}/p/*/*/*/0", OpenOptions(sample_axis="none")) as source:
        assert len(source) == 3
        assert raw(source[2][source.schema.names[0]]) == raw(root["B/2/0/0"][...])
