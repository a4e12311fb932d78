"""What records hold is found in all of them: optional features, keys, families, types asked for."""

from __future__ import annotations

import gzip
import shlex
from pathlib import Path

import h5py
import numpy as np
import pytest
from record_checks import frame
from support import fails, random_batch, reading, write_batch

import dsprep
from dsprep import formats
from dsprep.core.schema import Field, FieldSpec, Schema
from dsprep.errors import DsprepError, FormatError, SchemaError, UsageError
from dsprep.formats.options import OpenOptions
from dsprep.formats.tfrecord import example

SUFFIX = {"hdf5": ".h5", "lmdb": ".mdb", "tfrecord": ".tfrecord", "zarr": ".zarr"}
F4 = np.dtype("<f4")


def advised(error: DsprepError) -> tuple[str, ...]:
    """The fields of the options that an error advises."""
    words = shlex.split(str(error).partition("--field")[2])
    return tuple(w for w in words if w != "--field")


# --- all other fields ---


@pytest.mark.parametrize("how", ["sidecar", "library"])
@pytest.mark.parametrize("name", SUFFIX)
def test_a_field_renamed_and_all_others(tmp_path: Path, name: str, how: str) -> None:
    schema = Schema((Field("a", F4, (2,)), Field("b", F4, (3,)), Field("c", F4)))
    origin, path = tmp_path / "o.h5", tmp_path / f"x{SUFFIX[name]}"
    write_batch(formats.load("hdf5"), origin, schema, random_batch(schema, 5))
    dsprep.convert(origin, path)
    options = reading("new=b", "*")
    with dsprep.open(origin) as before, dsprep.open(path, options, through=how) as source:
        assert source.schema.names == ("new", "a", "c")
        assert (source[3]["new"] == before[3]["b"]).all()
        assert (source[3]["c"] == before[3]["c"]).all()
    report, other = tmp_path / "again.h5", tmp_path / f"y{SUFFIX[name]}"
    dsprep.convert(origin, other)
    dsprep.convert(path if name == "lmdb" else [path, other], report, fields=("*", "new=b"))
    with h5py.File(report) as file:
        assert sorted(file) == ["a", "c", "new"]


@pytest.mark.parametrize("spec", ["*=x", "x=*", "*:int64", "*@a"])
def test_all_others_are_asked_for_alone(spec: str) -> None:
    fails(lambda: FieldSpec.parse(spec), UsageError, "alone")


@pytest.mark.parametrize("suffix", [".h5", ".zarr"])
def test_the_advice_for_a_clash_of_names_keeps_every_field(tmp_path: Path, suffix: str) -> None:
    names = ("image", "image/encoded", "label", "width", "height")
    schema = Schema(tuple(Field(n, F4, (2,)) for n in names))
    source, target = tmp_path / "a.tfrecord", tmp_path / f"a{suffix}"
    write_batch(formats.load("tfrecord"), source, schema, random_batch(schema, 4))
    with pytest.raises(DsprepError, match="image") as caught:
        dsprep.convert(source, target)
    fields = advised(caught.value)
    dsprep.convert(source, target, fields=fields)
    with dsprep.open(target) as found:
        assert len(found.schema) == len(names)
        assert "NEW" in found.schema.names


# --- optional features ---

BYTES, FLOAT, INT64 = 1, 2, 3


def record(**features: tuple[int, bytes] | None) -> bytes:
    given = {n: f for n, f in features.items() if f is not None}
    entries = b"".join(
        example.entry_head(n.encode(), t, len(data)) + data for n, (t, data) in given.items()
    )
    return frame(example.example_head(len(entries)) + entries)


def ordinary(i: int, **more: tuple[int, bytes] | None) -> bytes:
    features = {
        "image": (BYTES, bytes([i % 256]) * 60),
        "label": (INT64, example.varint(i % 1000)),
        "score": (FLOAT, np.float32(i).tobytes()),
    }
    return record(**(features | more))


EXTRA = {"extra": (INT64, example.varint(7))}


@pytest.mark.parametrize(
    ("what", "codec"),
    [*((w, "plain") for w in ("missing", "new", "longer")), ("new", "gzip"), ("missing", "large")],
)
def test_what_one_record_alone_has_or_lacks(tmp_path: Path, codec: str, what: str) -> None:
    count, at = (60, 37) if codec == "large" else (1700, 1522)
    big = {"blob": (BYTES, bytes(100_000))} if codec == "large" else {}
    odd = {
        "missing": {"label": None},
        "new": EXTRA,
        "longer": {"score": (FLOAT, np.float32([1, 2]).tobytes())},
    }[what]
    path = tmp_path / "a.tfrecord"
    data = b"".join(ordinary(i, **big, **(odd if i == at else {})) for i in range(count))
    path.write_bytes(gzip.compress(data, 1) if codec == "gzip" else data)
    target = tmp_path / "a.h5"
    dsprep.convert(path, target)
    name = {"missing": "label", "new": "extra", "longer": "score"}[what]
    with dsprep.open(path) as source, dsprep.open(target) as converted:
        assert source.schema[name].shape == (None,)
        assert sum(f.shape == (None,) for f in source.schema if f.kind == "array") == 1
        column = source[0:count][name]
        lengths = {"missing": (1, 0), "new": (0, 1), "longer": (1, 2)}[what]
        assert column.lengths.tolist() == [lengths[i == at] for i in range(count)]
        assert dsprep.verify(source, converted).same
        assert what == "longer" or any("missing in some" in note for note in source.notes)
    if codec != "gzip":
        dsprep.provenance(path)
        with dsprep.open(path, through="strict") as source, dsprep.open(target) as converted:
            assert dsprep.verify(source, converted).same


RENAMED = ("score", "n=label", "*")


@pytest.mark.parametrize(
    ("fields", "first"),
    [((), 0), *((RENAMED, first) for first in range(3)), (("label", "score"), 1)],
)
def test_features_are_those_of_all_files(tmp_path: Path, fields: tuple, first: int) -> None:
    lacking = b"".join(ordinary(i, label=None) for i in range(5))
    full = b"".join(ordinary(i) for i in range(4))
    parts = [lacking, full, b""]
    for k, data in enumerate(parts[first:] + parts[:first]):
        (tmp_path / f"{k}.tfrecord").write_bytes(data)
    options = reading(*fields)
    with dsprep.open(tmp_path, options) as source:
        label = "n" if "n=label" in fields else "label"
        rows = source[0 : len(source)]
        assert set(source.schema.names) >= {label, "score"}
        assert source.schema[label].shape == (None,)
        assert source.schema["score"].shape == ()
        assert sorted(v.tolist() for v in rows[label]) == [[]] * 5 + [[i] for i in range(4)]
        assert sorted(rows["score"].tolist()) == sorted([*range(5), *range(4)])
        opening = source.opening  # as another process opens it
        with opening() as again:
            assert again.schema == source.schema
            assert dsprep.verify(source, again).same
        part, start = source.part(0, len(source))
        with part() as again:
            assert (again.schema, start) == (source.schema, 0)
    dsprep.provenance(tmp_path, options)
    with dsprep.open(tmp_path, through="strict") as again:
        assert dict(again[0:9]).keys() == rows.keys()
        assert list(map(str, again[0:9][label])) == list(map(str, rows[label]))


def test_a_sidecar_that_knows_less_than_the_records_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    path.write_bytes(b"".join(ordinary(i) for i in range(3000)))
    dsprep.provenance(path)
    path.write_bytes(b"".join(ordinary(i, **EXTRA if i == 1522 else {}) for i in range(3000)))
    with pytest.raises(FormatError, match=r"a feature extra, .*; move the sidecar away"):
        dsprep.provenance(path)
    path.with_name(path.name + ".dsprep.json").unlink()
    dsprep.provenance(path)
    with dsprep.open(path, through="strict") as source:
        assert source[1522]["extra"].tolist() == [7]
        assert source[0]["extra"].tolist() == []


def test_files_that_are_no_examples_do_not_mix_with_others(tmp_path: Path) -> None:
    (tmp_path / "0.tfrecord").write_bytes(ordinary(0))
    (tmp_path / "1.tfrecord").write_bytes(frame(b"\xff\xff"))
    fails(lambda: dsprep.open(tmp_path), SchemaError, "--raw-records")
    with dsprep.open(tmp_path, OpenOptions(records="opaque")) as source:
        assert source.schema.names == ("record",)


@pytest.mark.parametrize("first", [True, False])
def test_a_damaged_record_changes_no_fields(tmp_path: Path, first: bool) -> None:
    data = bytearray(b"".join(ordinary(i) for i in range(300)))
    at = data.index(b"label", 0 if first else len(data) // 2)
    data[at] ^= 1
    path = tmp_path / "a.tfrecord"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=r"record \d+, offset \d+: the CRC") as caught:
        dsprep.open(path)
    if not first:
        stop = int(caught.value.fix.split("--samples 0:")[1].split()[0])
        dsprep.convert(path, tmp_path / "a.h5", samples=f"0:{stop}")


@pytest.mark.parametrize("packed", [True, False])
def test_records_that_lie_across_the_windows_that_are_read(tmp_path: Path, packed: bool) -> None:
    sizes = [(1 << 20) - 70 + 9 * i for i in range(6)] + [20, 2_200_000, 400_000, 5]
    odd = len(sizes) - 2
    data = b"".join(
        record(image=(BYTES, bytes(n)), **(EXTRA if i == odd else {})) for i, n in enumerate(sizes)
    )
    path = tmp_path / "a.tfrecord"
    path.write_bytes(gzip.compress(data, 0) if packed else data)
    with dsprep.open(path) as source:
        assert source.schema.names == ("image", "extra")
        assert source[0 : len(sizes)]["extra"].lengths.tolist() == [
            int(i == odd) for i in range(10)
        ]
