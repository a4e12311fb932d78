"""The Reader gives the values that were written, each as often as its policy says."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import image_files
import numpy as np
import pytest
import zarr
from support import (
    MIXED,
    assert_same_batch,
    dataset,
    epochs,
    fails,
    random_batch,
    raw,
    schemas,
    take,
    write_batch,
)
from test_located import FORMATS

import dsprep
from dsprep import formats
from dsprep.core.schema import Batch, Field, Ragged, Schema
from dsprep.errors import UnsupportedError, UsageError
from dsprep.formats.options import OpenOptions, WriteOptions
from dsprep.verbs.provenance import provenance

COUNT = 37
TARGETS = {
    "hdf5": "out.h5",
    "zarr": "out.zarr",
    "zip": "out.zarr.zip",
    "tfrecord": "out.tfrecord",
    "lmdb": "out.lmdb",
}
CODECS = {"hdf5": "gzip", "zarr": "zstd"}


@dataclass(frozen=True)
class Setting:
    """One way of reading."""

    shuffle: str = "group"
    policy: str = "ragged"
    batch_size: int = 8
    world_size: int = 1
    epochs: int = 1
    io_threads: int = 1
    buffers: int = 2
    buffers_mixed: int | None = None
    buffer_size: int | str | None = 10
    transfer_size: int | None = None
    verify: bool = False
    seed: int = 0

    @classmethod
    def drawn(cls, rng: np.random.Generator) -> Setting:
        def one(*of: Any) -> Any:
            return of[int(rng.integers(len(of)))]

        return cls(
            one("group", "global", "none"),
            one("drop", "pad", "ragged"),
            one(1, 3, 8, 20, COUNT, 100),
            one(1, 1, 2, 3, 5),
            one(1, 2),
            one(1, 3),
            one(1, 2, 4),
            one(None, None, 1, 2, 3),
            one(None, 1, 5, 10, "1KiB", 1000),
            one(None, 64, 1000, 4096),
            one(False, True),
            int(rng.integers(1000)),
        )

    def readers(self, path: Path, **more: Any) -> list[dsprep.Reader]:
        options = {**vars(self), **more}
        options["remainder"] = options.pop("policy")
        with dsprep.Sidecar.open(path) as sidecar:  # only groups have checksums
            numbers = [i for i, f in enumerate(sidecar.content.files) if f.samples]
            options["verify"] &= all(sidecar.layout(i).groups is not None for i in numbers)
        return [dsprep.Reader(path, rank=r, **options) for r in range(self.world_size)]


def keys(batch: Batch, schema: Schema) -> list[bytes]:
    """The bits of every sample, all fields together."""
    out = [b""] * len(batch[schema.names[0]])
    for f in schema:
        column = batch[f.name]
        for i in range(len(out)):
            bits = raw(column[i])
            out[i] += len(bits).to_bytes(4, "little") + bits
    return out


def check_types(batch: Batch, schema: Schema) -> int:
    """Compare dtypes and shapes; return the number of samples."""
    assert list(batch) == list(schema.names)
    n = len(batch[schema.names[0]])
    for f in schema:
        column = batch[f.name]
        assert len(column) == n
        if f.ragged:
            assert isinstance(column, Ragged)
            assert column.kind == f.kind
            assert column.values.dtype == f.dtype
            assert column.values.shape[1:] == f.inner
        else:
            assert column.dtype == f.dtype
            assert column.shape == (n, *f.inner)
            assert column.flags.c_contiguous
            assert column.flags.aligned
            assert column.flags.writeable
    return n


def check(path: Path, batch: Batch, schema: Schema, setting: Setting, **more: Any) -> list[Batch]:
    """Read with all ranks; compare bits, how often each sample comes, steps and accounts."""
    count = len(batch[schema.names[0]])
    if setting.policy == "drop" and count and count // setting.world_size < setting.batch_size:
        fails(lambda: setting.readers(path), UsageError, "drop leaves nothing")
        return []
    found: list[list[Batch]] = []
    for reader in setting.readers(path, **more):
        with reader:
            steps = len(reader)
            found.append(list(epochs(reader, setting.epochs)))
            assert len(found[-1]) == steps * setting.epochs
            stats = reader.stats
            assert sum(s.batches for s in stats) == len(found[-1])
            sizes = [check_types(b, schema) for b in found[-1]]
            assert sum(s.samples for s in stats) == sum(sizes)
            assert all(s.nbytes >= 0 and s.reads >= 0 and s.io_seconds >= 0 for s in stats)
    assert len({len(f) for f in found}) == 1
    every = keys(batch, schema)
    steps = len(found[0]) // setting.epochs
    for epoch in range(setting.epochs):
        here = [b for f in found for b in f[epoch * steps : (epoch + 1) * steps]]
        got = [key for b in here for key in keys(b, schema)]
        if setting.policy == "ragged":
            assert Counter(got) == Counter(every)
            assert len(got) == count
        else:
            assert len(got) == setting.world_size * steps * setting.batch_size
            a, b = Counter(got), Counter(every)
            assert a <= b if setting.policy == "drop" else b <= a
        if setting.shuffle == "none" and setting.policy == "ragged":
            assert got == every
    return [b for f in found for b in f]


def settings(name: str, n: int) -> list[Setting]:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return [Setting.drawn(rng) for _ in range(n)]


def combined() -> dict[str, Schema]:
    """Schemas of every dtype, rank and kind; all dtypes of one rank in one dataset."""
    found: dict[str, list[Field]] = {}
    alone = ("scalar-<f4", "fixed->f8", "ragged-<i2")
    for name, schema in schemas():
        kind = name if name in alone else name.partition("-")[0]
        for f in schema:
            known = found.setdefault(kind, [])
            known.append(replace(f, name=f"{f.name}{len(known)}" if known else f.name))
    return {name: Schema(tuple(fields)) for name, fields in found.items()}


SCHEMAS = combined()


def accepted(schema: Schema, *names: str) -> Schema:
    """The fields that some formats have."""

    def has(name: str, f: Field) -> bool:
        try:
            formats.writable(name).check(Schema((f,)), WriteOptions())
        except UnsupportedError:
            return False
        return True

    return Schema(tuple(f for f in schema if all(has(name, f) for name in names)))


def pairs(formats: Iterable[str]) -> list[tuple[str, str]]:
    """All formats with the schema of all kinds, each other schema with one of them in turn."""
    formats = list(formats)
    both = itertools.product(enumerate(SCHEMAS), enumerate(formats))
    return [(f, s) for (i, s), (k, f) in both if s == "mixed" or (i + k) % len(formats) == 0]


@pytest.mark.parametrize(("format", "name"), pairs(FORMATS))
def test_every_schema_with_a_sidecar_only(format, name, tmp_path):
    if schema := accepted(SCHEMAS[name], format):
        batch = random_batch(schema, COUNT, seed=1)
        path = dataset(tmp_path, format, schema, batch)[0]
        for setting in settings(f"{format} {name}", 2):
            check(path, batch, schema, setting)


@pytest.mark.parametrize(("target", "name"), pairs(TARGETS))
def test_every_schema_repacked(target, name, tmp_path):
    to = "zarr" if target == "zip" else target
    drawn = settings(f"{target} {name}", 4)
    known: set[str] = set()
    for origin in ("hdf5", "zarr"):  # neither has all dtypes
        found = accepted(SCHEMAS[name], origin, to)
        schema = Schema(tuple(f for f in found if f.name not in known))
        known |= set(schema.names)
        if not schema:
            continue
        batch = random_batch(schema, COUNT, seed=2)
        path = dataset(tmp_path, origin, schema, batch)[0]
        ragged = to == "zarr" and schema.ragged  # in groups: not compressed
        for compress in (None, CODECS.get(target))[: 1 + (target in CODECS and not ragged)]:
            out = tmp_path / f"{origin}{compress}{TARGETS[target]}"
            options = {"buffer_size": 7, "stripe_size": 4096, "durable": False}
            dsprep.repack(path, out, compress=compress, **options)
            setting = drawn.pop()
            if setting.shuffle != "global" and setting.buffer_size == 10:
                setting = replace(setting, buffer_size=None)
            check(out, batch, schema, setting)


@pytest.mark.parametrize(("format", "per"), [("zarr", 17), ("hdf5", 17), ("tfrecord", 1)])
def test_many_files(format, per, tmp_path):
    count = 60 if per > 1 else 12
    origin, batch = dataset(tmp_path, "hdf5", MIXED, count)
    target = tmp_path / "shards"
    dsprep.convert(origin, target, to=format, shard_size=per, workers=1)
    for k, setting in enumerate(settings(f"{format} {per}", 3 if per > 1 else 2)):
        size = (3, 40, None)[k]
        check(target, batch, MIXED, replace(setting, buffer_size=size, verify=False))


@pytest.mark.parametrize(("kind", "size"), [("npy", 4), ("images", 3), ("zarr", 3)])
@pytest.mark.parametrize("shuffle", ["group", "global"])
def test_few_files_are_opened_for_the_first_batch(kind, size, shuffle, tmp_path, monkeypatch):
    """A file for each sample, within directories or not: read in ranges of a few files."""
    monkeypatch.setattr("dsprep.reader.units.BUFFER_FILES", 4)
    data = tmp_path / "data"
    if kind == "zarr":
        array = zarr.create_array(data, name="x", shape=(10, 2), chunks=(1, 2), dtype="f4")
        array[:] = np.arange(20).reshape(10, 2)
    elif kind == "images":
        image_files.fill(data, *(f"{k}.png" for k in range(10)))
    else:
        data.mkdir()
        for k in range(10):
            np.save(data / f"{k}.npy", np.full((1, 3), k, "f4"))
    provenance(data, OpenOptions(sample_axis="first") if kind == "npy" else None)
    with dsprep.Reader(data, 3, shuffle=shuffle) as reader:
        assert np.diff(reader._order.edges).max() <= size
        assert sum(len(next(iter(batch.values()))) for batch in reader) == 10
    with dsprep.Reader(data, 3, shuffle=shuffle, buffer_size=9) as reader:
        assert np.diff(reader._order.edges).max() == 9  # as asked
    with dsprep.open(data) as source:
        assert "dsprep repack" in dsprep.inspect(source).notes[-1]


def test_encoded_ragged_values_of_many_files(tmp_path):
    """What one thread decodes of one file must outlive what it decodes of the next."""
    batch = random_batch(MIXED, 100, seed=5, longest=50)
    origin = dataset(tmp_path, "hdf5", MIXED, batch)[0]
    target = tmp_path / "shards"
    options = {"shard_size": 10, "workers": 1, "compress": "gzip", "memory": "100GiB"}
    dsprep.convert(origin, target, to="hdf5", **options)
    for threads in (1, 3):
        setting = Setting("none", batch_size=7, buffer_size=50, io_threads=threads)
        check(target, batch, MIXED, setting)
        check(target, batch, MIXED, replace(setting, shuffle="global"))


def test_chunks_that_were_never_written(tmp_path):
    """Fill values in some files of a unit, stored values in others."""
    small = np.arange(60, dtype="<i4").reshape(60, 1)
    large = np.arange(60 * 300, dtype="<f4").reshape(60, 300)
    (tmp_path / "set").mkdir()
    for k in range(3):
        with h5py.File(tmp_path / "set" / f"{k}.h5", "w") as file:
            for name, values in (("small", small), ("large", large)):
                chunks = (5, *values.shape[1:])
                shape = (20, *values.shape[1:])
                made = file.create_dataset(name, shape, values.dtype, chunks=chunks, fillvalue=7)
                made[:10] = values[20 * k : 20 * k + 10]
                if k != 1:
                    made[10:] = values[20 * k + 10 : 20 * k + 20]
    small[30:40] = large[30:40] = 7
    provenance(tmp_path / "set")
    schema = Schema((Field("large", large.dtype, (300,)), Field("small", small.dtype, (1,))))
    batch = {"large": large, "small": small}
    with dsprep.Reader(tmp_path / "set", 1) as reader:
        schema = reader.schema
    batch = {name: batch[name] for name in schema.names}
    for size, shuffle, threads in ((60, "none", 1), (20, "global", 3), (7, "group", 1)):
        setting = Setting(shuffle, buffer_size=size, io_threads=threads, batch_size=7)
        check(tmp_path / "set", batch, schema, setting)


def test_ragged_values_in_several_pieces(tmp_path):
    """As many pieces as samples, though some have two and others none."""
    lengths = np.array([6, 0, 4, 0, 8, 0, 5, 1])
    values = np.arange(24, dtype="<i4")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = file.create_dataset("v", (24,), "<i4", chunks=(4,))
        for k in (3, 1, 0, 5, 2, 4):
            made[4 * k : 4 * k + 4] = values[4 * k : 4 * k + 4]
            file.flush()
        file["table"] = np.stack([np.cumsum(lengths) - lengths, lengths], 1)
    spec = dsprep.FieldSpec.parse("v@table")
    provenance(tmp_path / "a.h5", dsprep.OpenOptions(fields=(spec,)))
    schema = Schema((Field("v", np.dtype("<i4"), (None,)),))
    batch: Batch = {"v": Ragged.from_lengths(values, lengths)}
    for size, shuffle in itertools.product((1, 3, 5, 8), ("none", "group")):
        check(tmp_path / "a.h5", batch, schema, Setting(shuffle, buffer_size=size, batch_size=2))


def test_tiles_masks_and_layouts_of_other_tools(tmp_path):
    """HDF5 chunks cut along inner axes, with filters left out for some chunks."""
    x = np.arange(50 * 12 * 10, dtype="<f4").reshape(50, 12, 10)
    y = np.arange(50, dtype="<i8")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("tiles", data=x, chunks=(7, 5, 4))
        file.create_dataset("packed", data=x, chunks=(7, 12, 10), compression="gzip", shuffle=True)
        masked = file.create_dataset("masked", x.shape, x.dtype, chunks=(5, 12, 10), compression=4)
        for a in range(0, 50, 5):
            if a % 2:
                masked.id.write_direct_chunk((a, 0, 0), x[a : a + 5].tobytes(), 1)
            else:
                masked[a : a + 5] = x[a : a + 5]
        file["y"] = y
    provenance(tmp_path / "a.h5")
    with dsprep.Reader(tmp_path / "a.h5", 1) as reader:
        schema = reader.schema
    batch = {name: y if name == "y" else x for name in schema.names}
    for setting in settings("tiles", 3):
        check(tmp_path / "a.h5", batch, schema, setting)


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("format", ["hdf5", "tfrecord"])
def test_hardly_any_samples(format, count, tmp_path):
    path, batch = dataset(tmp_path, format, MIXED, count)
    for setting in settings(f"{format} {count}", 2):
        if count or setting.policy != "drop":
            check(path, batch, MIXED, setting)
    with dsprep.Reader(path, 4, epochs=None) as reader:
        if not count:
            assert list(reader) == []
        else:
            for _, found in zip(range(5), epochs(reader), strict=False):
                assert_same_batch(found, batch, MIXED)
    out = tmp_path / "repacked.h5"
    dsprep.repack(path, out, durable=False)
    for setting in settings(f"{format} {count} repacked", 1):
        if count or setting.policy != "drop":
            check(out, batch, MIXED, setting)


def test_files_without_samples_between_others(tmp_path):
    (tmp_path / "set").mkdir()
    batch = random_batch(MIXED, 20, seed=8)
    for k, (a, b) in enumerate([(0, 0), (0, 7), (7, 7), (7, 19), (19, 20), (20, 20)]):
        write_batch(formats.load("hdf5"), tmp_path / "set" / f"{k}.h5", MIXED, take(batch, a, b))
    provenance(tmp_path / "set")
    for setting in settings("empty files", 3):
        check(tmp_path / "set", batch, MIXED, setting)


def test_some_fields_in_any_order(tmp_path):
    path, batch = dataset(tmp_path, "hdf5", MIXED, 50)
    for names in (("label",), ("name", "image"), ("points",), tuple(reversed(MIXED.names))):
        schema = Schema(tuple(MIXED[n] for n in names))
        for setting in settings("".join(names), 2):
            check(path, {n: batch[n] for n in names}, schema, setting, fields=names)


def test_the_order_does_not_depend_on_how_it_is_read(tmp_path):
    path, batch = dataset(tmp_path, "zarr", MIXED, 90)
    for shuffle in ("group", "global"):
        base = Setting(shuffle, batch_size=7, world_size=2, buffers_mixed=2, seed=5)
        found = [keys(b, MIXED) for b in check(path, batch, MIXED, base)]
        for other in ({"io_threads": 3, "buffers": 4}, {"transfer_size": 100, "buffers": 1}):
            again = check(path, batch, MIXED, replace(base, **other))
            assert [keys(b, MIXED) for b in again] == found
        for other in ({"seed": 6}, {"buffers_mixed": 1}) if shuffle == "group" else ({"seed": 6},):
            again = check(path, batch, MIXED, replace(base, **other))
            assert [keys(b, MIXED) for b in again] != found


@pytest.mark.parametrize("engine", ["buffered", "direct"])
def test_every_engine(engine, tmp_path):
    batch = random_batch(MIXED, 90, seed=18, longest=100)
    origin = dataset(tmp_path, "hdf5", MIXED, batch)[0]
    for name in ("hdf5", "zip"):
        path = tmp_path / TARGETS[name]
        dsprep.repack(origin, path, buffer_size=13, stripe_size=4096, durable=False)
        (setting,) = settings(f"{engine} {name}", 1)
        setting = replace(setting, transfer_size=setting.transfer_size and 5000, epochs=1)
        check(path, batch, MIXED, setting, engine=engine)
        check(origin, batch, MIXED, replace(setting, buffer_size=11), engine=engine)


@pytest.mark.parametrize(
    ("count", "transform"), [(1, None), (4, lambda batch: batch), (None, None)]
)
def test_a_loop_is_one_epoch_and_len_is_its_steps(count, transform, tmp_path):
    """Whatever `epochs` is, and however loops begin and end."""
    path = dataset(tmp_path, "hdf5", MIXED, 90)[0]
    options: dict[str, Any] = {"buffer_size": 30, "transform": transform}
    with dsprep.Reader(path, 10, **options) as reader:
        expected = [[keys(b, MIXED) for b in reader] for _ in range(6)]
        assert len({key for epoch in expected for key in epoch[0]}) > 40  # epochs differ
        assert [s.epoch for s in reader.stats] == [*range(6)]
    with dsprep.Reader(path, 10, epochs=count, **options) as reader:
        for epoch in (0, 1, 2):  # the loop that everybody writes
            assert (len(reader), reader.epoch, reader.steps_per_epoch) == (9, epoch, 9)
            for step, b in enumerate(reader):
                assert keys(b, MIXED) == expected[epoch][step]
                assert (len(reader), reader.epoch) == (9, epoch)
            assert step == 8
        for step, b in enumerate(reader):  # left early: what is left comes from the next loop
            assert keys(b, MIXED) == expected[3][step]
            if step == 3:
                break
        assert (len(reader), reader.epoch, reader.steps_per_epoch) == (5, 3, 9)
        state = reader.state_dict()
        for step, b in enumerate(reader):
            assert len(reader) == 5
            assert keys(b, MIXED) == expected[3][step + 4]
            if step + 1 == len(reader):
                break  # behind the last batch the epoch is over, also without asking for more
        assert (len(reader), reader.epoch) == (9, 4)
        reader.set_epoch(4)
        assert [keys(b, MIXED) for b in reader] == expected[4]
        reader.set_epoch(1)  # another one than that which is read ahead
        assert [keys(b, MIXED) for b in reader] == expected[1]
        loop = iter(reader)
        fails(lambda: reader.set_epoch(5), UsageError, "being iterated")
        loop.close()
        reader.load_state_dict(state)
        assert (len(reader), reader.epoch) == (5, 3)
        assert [[keys(b, MIXED) for b in reader] for _ in range(2)] == [
            expected[3][4:],
            expected[4],
        ]


def test_between_loops_the_next_epoch_is_read(tmp_path):
    path = dataset(tmp_path, "hdf5", MIXED, 90)[0]

    def read_ahead(reader: dsprep.Reader) -> bool:
        """Whether bytes of the next epoch come while no loop runs."""
        while reader._running is not None and not reader._running.closed:
            if any(s.epoch == reader.epoch and s.units for s in reader.stats):
                return True
            time.sleep(0.001)
        return False

    for count in (1, 3, None):
        with dsprep.Reader(path, 10, buffer_size=30, epochs=count) as reader:
            for epoch in range(5):
                list(reader)
                assert read_ahead(reader) == (count is None or epoch + 1 < count)
            state = reader.state_dict()
            assert (state["epoch"], state["stages"]) == (5, [[1, 10, 0]])
        assert [(s.samples, s.batches, s.units) for s in reader.stats][:5] == [(90, 9, 3)] * 5
        assert not [t for t in threading.enumerate() if t.name.startswith("dsprep-")]
    reader = dsprep.Reader(path, 10, buffer_size=30, epochs=None)
    list(reader)
    del reader  # without close
    assert not [t for t in threading.enumerate() if t.name.startswith("dsprep-")]


# --- accounts --------------------------------------------------------------------------------


def test_the_accounts_add_up(tmp_path):
    schema = Schema((Field("x", np.dtype("<f4"), (300,)), Field("y", np.dtype("<i8"))))
    origin = dataset(tmp_path, "hdf5", schema, 100)[0]
    path = tmp_path / "out.h5"
    dsprep.repack(origin, path, buffer_size=20, stripe_size=4096, durable=False)
    for world in (1, 2):
        for rank in range(world):
            numbers = {"epochs": np.int8(3), "seed": np.int64(3), "buffers_mixed": np.int32(1)}
            place = {"rank": np.int64(rank), "world_size": world}
            with dsprep.Reader(path, np.int64(10), **numbers, **place) as reader:
                list(epochs(reader, 3))
                json.dumps(reader.state_dict())
                found = reader.stats
            assert [s.epoch for s in found] == [0, 1, 2]
            for s in found:
                assert s.samples == 100 // world
                assert s.batches == 10 // world
                assert s.samples * 1208 <= s.nbytes <= s.samples * 1208 + 5 * 4096
                assert s.units == (5 if world == 1 else 3)
                if world == 1:
                    assert s.reads == 5
                assert 0 <= s.first_seconds <= s.exposed_seconds
                assert s.io_seconds > 0
                assert json.loads(json.dumps(s.to_json())) == s.to_json()


def test_all_threads_share_the_first_unit_of_a_loop(tmp_path):
    """So that its first batch is there soon; later units are read by a thread each."""
    x = np.arange(3072 * 1024, dtype=np.int32).reshape(3072, 1024)
    dsprep.write(tmp_path / "x.h5", [{"x": x}], batched=True, buffer_size=1024, durable=False)
    for threads, reads in ((1, 3), (2, 4)):
        with dsprep.Reader(tmp_path / "x.h5", 64, io_threads=threads, shuffle="none") as reader:
            for _ in range(2):
                assert np.array_equal(np.concatenate([batch["x"] for batch in reader]), x)
            assert [(s.units, s.reads) for s in reader.stats] == [(3, reads)] * 2


# --- resuming --------------------------------------------------------------------------------


def rest_of(state: dict[str, Any], path: Path, **options: Any) -> list[bytes]:
    """What all ranks of other readers deliver of the epoch from a state on."""
    world = options.pop("world_size")
    found: list[bytes] = []
    steps = set()
    for rank in range(world):
        with dsprep.Reader(path, rank=rank, world_size=world, **options) as reader:
            reader.load_state_dict(json.loads(json.dumps(state)))
            had = 0
            for b in reader:
                found += keys(b, MIXED)
                had += 1
            steps.add(had)
    assert len(steps) == 1
    return found


@pytest.mark.parametrize("shuffle", ["group", "global", "none"])
def test_going_on_after_any_step(shuffle, tmp_path):
    path, batch = dataset(tmp_path, "tfrecord", MIXED, 47)
    base = {"buffer_size": 9, "shuffle": shuffle, "buffers_mixed": 2, "seed": 3}
    every = Counter(keys(batch, MIXED))
    with dsprep.Reader(path, 5, epochs=2, **base) as reader:
        whole = [keys(b, MIXED) for b in epochs(reader, 2)]
    for done in range(0, len(whole) + 1, 2 if shuffle == "group" else 5):
        with dsprep.Reader(path, 5, epochs=2, **base) as reader:
            loop = epochs(reader)
            for _ in range(done):
                next(loop)
            state = reader.state_dict()
            loop.close()
        text = json.dumps(state)
        assert len(text) < 600
        with dsprep.Reader(path, 5, epochs=1, **base) as reader:
            reader.load_state_dict(json.loads(text))
            if done not in (len(whole) // 2, len(whole)):  # then the next epoch begins
                assert json.loads(json.dumps(reader.state_dict())) == json.loads(text)
            end = 10 if done < 10 else 20
            expected = whole[done:end] if done not in (10, 20) else whole[10:20]
            found = [keys(b, MIXED) for b in reader]
            if done == 20:
                assert Counter(k for b in found for k in b) == every
            else:
                assert found == expected
        if 0 < done <= 10 and done % 3 != 2:  # behind the last step: all of the next epoch
            used = Counter(k for b in whole[: done % 10] for k in b)
            for world, size in ((2, 5), (3, 4)) if done % 3 else ((1, 3),):
                other = {**base, "batch_size": size, "world_size": world}
                rest = rest_of(state, path, **other)
                assert used + Counter(rest) == every


def test_states_of_others_are_refused(tmp_path):
    path, batch = dataset(tmp_path, "hdf5", MIXED, 40)
    base: dict[str, Any] = {"batch_size": 5, "buffer_size": 10, "seed": 1}
    with dsprep.Reader(path, **base) as reader:
        state = reader.state_dict()
    (tmp_path / "other").mkdir()
    other = dataset(tmp_path / "other", "hdf5", MIXED, take(batch, 0, 39))[0]
    for changed in (
        {"seed": 2},
        {"shuffle": "global"},
        {"buffer_size": 11},
        {"buffers_mixed": 2},
        {"remainder": "pad"},
        {"path": other},
    ):
        with dsprep.Reader(**{"path": path, **base, **changed}) as reader:
            before = reader.state_dict()
            fails(lambda: reader.load_state_dict(state), UsageError, "another")
            assert reader.state_dict() == before
    with dsprep.Reader(path, **base) as reader:
        stages: list[Any] = [None, [], 3, [[1]], [[1, 2, -1]], [[0, 5, 1]], [[1, 0, 1]]]
        stages += [[[1, 5, 2.5]], [["a", 1, 1]], [[1 << 40, 5, 1], [1, 5, 0]]]
        damaged: list[Any] = [{}, None, [], "x", {**state, "version": 99}]
        damaged += [{**state, "epoch": e} for e in (-1, None, "x", 1.5, True, 2**63)]
        damaged += [{**state, "stages": each} for each in stages]
        damaged += [{k: v for k, v in state.items() if k != key} for key in state]
        for each in damaged:
            fails(lambda: reader.load_state_dict(each), UsageError)
        assert reader.state_dict() == state
        loop = iter(reader)
        next(loop)
        fails(lambda: reader.load_state_dict(state), UsageError, "being iterated")
        loop.close()
        reader.load_state_dict(state)


def test_states_of_other_data_of_the_same_shape_are_refused(tmp_path):
    """Copies of the same data have the same state; who insists may continue with others."""
    batch, base = random_batch(MIXED, 40, seed=15), {"batch_size": 5, "buffer_size": 10}
    path = dataset(tmp_path, "hdf5", MIXED, batch)[0]
    with dsprep.Reader(path, **base) as reader:
        next(iter(reader))
        state = reader.state_dict()
    (tmp_path / "copy").mkdir()
    shutil.copytree(path.parent, tmp_path / "copy", dirs_exist_ok=True, ignore=lambda *_: ["copy"])
    with dsprep.Reader(tmp_path / "copy" / path.name, **base) as reader:
        reader.load_state_dict(state)
    (tmp_path / "other").mkdir()
    other = dataset(tmp_path / "other", "hdf5", MIXED, 40)[0]
    with dsprep.Reader(other, **base) as reader:
        before = reader.state_dict()
        with pytest.raises(UsageError, match=r"another dataset.*other_data=True"):
            reader.load_state_dict(state)
        assert reader.state_dict() == before
        reader.load_state_dict(state, other_data=True)
        assert reader.state_dict() == {**state, "dataset": before["dataset"]}


def test_wrong_usage_is_told_at_once(tmp_path):
    path = dataset(tmp_path, "hdf5", MIXED, 40)[0]
    values: dict[str, list[Any]] = {
        "batch_size": [0, 2.5, "8", True],
        "buffers": [0],
        "buffers_mixed": [0],
        "buffer_size": [0, "many", -3, 2.5],
        "epochs": [0],
        "io_threads": [0],
        "transfer_size": [0, -1, "big"],
        "transform": [5],
        "seed": ["x", 1.5],
        "shuffle": ["yes"],
        "engine": ["warp", "auto"],
        "fields": [("nothing",), ("image", "image")],
        "verify": [True],  # there is nothing to compare with
        "rank": [1],
    }
    wrong: list[dict[str, Any]] = [{k: v} for k, each in values.items() for v in each]
    wrong += [
        {"remainder": "keep"},
        {"remainder": "drop", "batch_size": 41},
        {"rank": 2, "world_size": 2},
        {"rank": -1, "world_size": 2},
    ]
    for each in wrong:
        with pytest.raises(dsprep.DsprepError):
            dsprep.Reader(path, **{"batch_size": 4, **each})
    with pytest.raises(FileNotFoundError, match="no such dataset"):
        dsprep.Reader(tmp_path / "none.h5", 4)
    fails(lambda: dsprep.Reader([path, 4], 4), UsageError, "a path, or a list of paths")


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        ({"num_workers": 4}, "threads read, so no workers are needed"),
        ({"field": "x"}, "did you mean fields=?"),
        ({"collate_fn": len}, "did you mean collate=?"),
        ({"indices": [1]}, "subset= takes numbers"),
    ],
)
def test_an_unknown_option_names_what_to_do(wrong, remedy, tmp_path):
    with pytest.raises(UsageError, match=f"there is no option {min(wrong)}") as caught:
        dsprep.Reader(tmp_path / "none", 8, **wrong)
    assert remedy in str(caught.value)
