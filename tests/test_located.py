"""Reading through sidecars: the same bits as the formats' own libraries, in any order."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from record_checks import taken
from support import (
    MIXED,
    SUFFIX,
    assert_same_batch,
    dataset,
    describe,
    fails,
    flip,
    random_batch,
    take,
)

import dsprep
from dsprep import formats
from dsprep.core.schema import Arena, Field, Schema
from dsprep.errors import DsprepError, FormatError, SchemaError
from dsprep.formats.options import Compression, OpenOptions
from dsprep.sidecar import spec
from dsprep.sidecar.sidecar import Sidecar, StaleError
from dsprep.source.dataset import open_dataset
from dsprep.source.from_sidecar import SidecarSource
from dsprep.storage.trees import data_files
from dsprep.verbs.provenance import provenance

FORMATS = sorted(formats.WRITTEN)


@pytest.mark.parametrize("format", FORMATS)
def test_many_files_are_one_dataset(format, tmp_path):
    origin, batch = dataset(tmp_path, "hdf5", MIXED, 100)
    target = tmp_path / "shards"
    dsprep.convert(origin, target, to=format, shard_size=17, workers=1)
    with dsprep.open(target) as source:
        assert isinstance(source, SidecarSource)
        assert source.schema == MIXED
        assert_same_batch(source[:], batch, MIXED)
        assert_same_batch(source[15:40], take(batch, 15, 40), MIXED)
        order = np.random.default_rng(1).permutation(100)
        assert_same_batch(source.sidecar.read(order), taken(batch, MIXED, order), MIXED)
        with open_dataset(target, through="library") as native:
            assert type(native) is not SidecarSource
            sizes, expected = source.sizes(3, 90), native.sizes(3, 90)
            assert sizes is None or expected is None or (sizes == expected).all()
            assert source.locate(40) == native.locate(40)
    some = sorted(target.iterdir())[1:3]
    with dsprep.open([str(p) for p in some]) as source:  # also a part of it
        assert isinstance(source, SidecarSource)
        assert_same_batch(source[:], take(batch, 17, 51), MIXED)


def test_how_it_was_read_is_remembered(tmp_path):
    """A sidecar made with options serves those who open the dataset without them."""
    import lmdb

    with lmdb.open(str(tmp_path / "db"), map_size=1 << 24) as env, env.begin(write=True) as txn:
        for i in range(12):
            txn.put(str(i).encode(), np.full(3, i, "<i4").tobytes())
        txn.put(b"length", b"12")
    spec = dsprep.FieldSpec.parse("v:int32[3]")
    options = dsprep.OpenOptions(fields=(spec,), order="numeric", skip_keys=(b"length",))
    made = provenance(tmp_path / "db", options)
    assert made.content.reading == {
        "fields": ["v:int32[3]"],
        "order": "numeric",
        "skip_keys": ["length"],
    }
    for through in ("sidecar", "library"):
        with open_dataset(tmp_path / "db", through=through) as source:
            assert isinstance(source, SidecarSource) == (through == "sidecar")
            assert source.schema.names == ("v",)
            assert source[:]["v"][:, 0].tolist() == list(range(12))
    provenance(tmp_path / "db")  # made again, it knows the types still, but not the order
    with dsprep.open(tmp_path / "db", dsprep.OpenOptions(order="file")) as source:
        assert not isinstance(source, SidecarSource)


# --- staleness -------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_any_change_is_noticed(format, tmp_path):
    """When a sidecar is opened, and later."""
    schema = Schema((Field("x", np.dtype("<f4"), (100,)),))
    path = dataset(tmp_path, format, schema, 40)[0]
    data = max(data_files(path), key=lambda file: file.stat().st_size)
    kept = data.read_bytes()
    for change in (kept + b"\0", kept[:-1], kept[::-1], None):
        data.write_bytes(kept)
        describe(formats.load(format), schema, [path], path).save(durable=False)
        with Sidecar.open(path) as opened:
            opened.check()
            data.unlink() if change is None else data.write_bytes(change)
            os.utime(data, (1, 1 << 33)) if change is not None else None
            with pytest.raises((StaleError, FileNotFoundError)):
                opened.check()
        with pytest.raises((StaleError, FileNotFoundError)):
            Sidecar.open(path)
        with pytest.raises((DsprepError, FileNotFoundError)):
            open_dataset(path, through="strict")


def test_records_prove_themselves(tmp_path):
    """With verify, bytes that moved or changed since the sidecar was written are noticed."""
    schema = Schema((Field("x", np.dtype("<f4"), (1500,)),))
    batch = random_batch(schema, 30, seed=10)
    for format, verify in (("lmdb", "header"), ("tfrecord", "header"), ("tfrecord", "full")):
        (tmp_path / (format + verify)).mkdir()
        path = dataset(tmp_path / (format + verify), format, schema, batch)[0]
        with Sidecar.open(path) as opened:
            _, _, offset, _ = opened.locate([12], "x")
            part = opened.layout(0).records.parts["x"].at
        file = path / "data.mdb" if format == "lmdb" else path
        at = int(offset[0]) + 100
        if verify == "header":  # before the record, not the field
            at = int(offset[0]) - part - (16 if format == "lmdb" else 12)
        flip(file, at)
        with Sidecar.open(path, check=False) as opened:
            opened.read(range(12), verify=verify)
            opened.read([12])
            for chosen in ([12], slice(None), [20, 12, 3]):
                with pytest.raises(FormatError, match=r"offset|provenance"):
                    opened.read(chosen, verify=verify)


# --- hostile sidecars ------------------------------------------------------------------------


def mutations(json_, rng):
    """Change one value somewhere in a JSON tree."""
    places = []

    def walk(node, path):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in items:
            places.append((path, key))
            if isinstance(value, dict | list):
                walk(value, [*path, key])

    walk(json_, [])
    path, key = places[int(rng.integers(len(places)))]
    node = json_
    for step in path:
        node = node[step]
    old = node[key]
    choices = [None, -1, 0, 1, 3.5, "x", "../../etc", [], {}, True]
    choices += [1 << 40, 1 << 62, 1 << 70, -(1 << 60)]
    if isinstance(old, int):
        choices += [old + 1, old - 1, old * 2, -old, old + 4096]
    if isinstance(old, str) and old:
        i = int(rng.integers(len(old)))
        choices += [old[:i] + "A" + old[i + 1 :], old[:-4], old * 2]
    choice = choices[int(rng.integers(len(choices)))]
    if rng.random() < 0.1:
        del node[key]
    else:
        node[key] = choice
    return path, key, choice


@pytest.mark.parametrize("format", FORMATS)
def test_hostile_sidecars_are_refused_or_harmless(format, tmp_path):
    batch = random_batch(MIXED, 60, seed=11)
    options = {"chunk": 7, "compress": Compression("gzip")} if format in ("hdf5", "zarr") else {}
    path = dataset(tmp_path, format, MIXED, batch, **options)[0]
    provenance(path, checksums=True)
    where = spec.sidecar_path(path)
    good = where.read_text()
    rng = np.random.default_rng(12)
    refused = 0
    for _ in range(100):
        content = json.loads(good)
        for _ in range(int(rng.integers(1, 3))):
            mutations(content, rng)
        where.write_text(json.dumps(content))
        try:
            with Sidecar.open(path, check=False) as opened:
                n = min(len(opened), 60)
                opened.read(slice(0, n))
                opened.read(rng.integers(0, n, 9), verify="full") if n else None
                opened.extents(slice(0, min(n, 5)))
        except (DsprepError, FileNotFoundError, IsADirectoryError, NotADirectoryError):
            refused += 1
    assert refused > 30


@pytest.mark.parametrize("format", FORMATS)
def test_a_sidecar_that_is_made_again_keeps_what_only_it_knew(format, tmp_path):
    fields = (
        Field("x", np.dtype("<i2"), (3,), "array", {"unit": "K"}),
        Field("y", np.dtype("<f4"), (), "array", {"mean": np.float32(2)}),
    )
    schema = Schema(fields, {"title": "of the dataset"})
    origin = dataset(tmp_path, "hdf5", schema, 30)[0]
    for target in (tmp_path / "one" / f"a{SUFFIX[format]}", tmp_path / "many"):
        target.parent.mkdir(exist_ok=True)
        per = 11 if target.name == "many" else None
        dsprep.convert(origin, target, to=format, shard_size=per, workers=1)
        before = spec.read(spec.sidecar_path(target))
        made = provenance(target)
        assert made.content.schema == schema
        assert made.content.schema.attrs == schema.attrs
        assert [f.attrs for f in made.content.schema] == [f.attrs for f in schema]
        assert made.content.layouts == before.layouts
        assert made.content.lineage["source"] == before.lineage["source"]


def test_chunks_that_are_kept_are_not_in_memory_that_is_used_again(tmp_path):
    path = tmp_path / "a.h5"
    rng = np.random.default_rng(0)
    # Named as memory of the reader might be called; chunks whose content is stored as it is.
    expected = {n: rng.integers(0, 99, (6, 7)) for n in ("columns", "range", "spans")}
    with h5py.File(path, "w") as file:
        for name, x in expected.items():
            file.create_dataset(name, data=x, chunks=(6, 7), fletcher32=name != "columns")
        file.create_dataset("chunked", data=expected["range"], chunks=(2, 3))
        file.create_dataset("deflated", data=expected["spans"], chunks=(2, 7), compression=1)
    expected |= {"chunked": expected["range"], "deflated": expected["spans"]}
    provenance(path, dsprep.OpenOptions(sample_axis="first"))
    arena = Arena()
    with Sidecar.open(path) as opened:
        for _ in range(60):
            names = [str(n) for n in rng.permutation(list(expected))[: rng.integers(1, 6)]]
            chosen = rng.integers(0, 6, rng.integers(1, 5))
            found = opened.read(chosen, names, arena=arena)
            for name in names:
                np.testing.assert_array_equal(found[name], expected[name][chosen])


@pytest.mark.parametrize("names", [{}, {"file_field": "part"}])
def test_each_file_is_looked_at_once_and_again_only_if_it_changed(names, tmp_path, monkeypatch):
    monkeypatch.setattr("dsprep.verbs.provenance.MANY", 4)
    opened, open_file, looked = Counter(), os.open, []

    def counted(path, *how, **more):
        opened[Path(os.fsdecode(path)).name] += Path(os.fsdecode(path)).suffix == ".npy"
        return open_file(path, *how, **more)

    monkeypatch.setattr(os, "open", counted)
    data = tmp_path / "data"
    data.mkdir()
    for i in range(6):
        np.save(data / f"x{i}.npy", np.full((2 + i % 2, 3), i, "f4"))
    options = OpenOptions(sample_axis="first", **names)

    def made():
        opened.clear()
        content = provenance(data, options).content
        looked[:] = [opened[f"x{i}.npy"] for i in range(7)]
        with open_dataset(data, through="strict") as source:
            values = source[:][source.schema.names[0]][:, 0].tolist()
        assert values == [float(x[0]) for p in sorted(data.iterdir()) for x in np.load(p)]
        return replace(content, lineage={}, files=tuple(content.files))

    first = made()
    assert looked[1:] == [1] * 5 + [0]
    assert (made(), looked) == (first, [0] * 7)
    np.save(data / "x3.npy", np.full((3, 3), 9, "f4"))
    np.save(data / "x6.npy", np.full((1, 3), 7, "f4"))
    second = made()
    assert looked[1:] == [0, 0, 1, 0, 0, 1]
    spec.sidecar_path(data).unlink()
    assert made() == second != first
    np.save(data / "x0.npy", np.full((1, 3), 7, "f8"))
    fails(lambda: provenance(data, options), SchemaError)
