"""Samples that a program gives: what is written of them, and what is left when that fails."""

from __future__ import annotations

import itertools
import json
import signal
import threading
import tracemalloc

import numpy as np
import pytest
from oracles import READ, SUFFIX
from support import assert_same_batch, fails, forked, kill_at, random_batch, schemas, take, written

import dsprep
from dsprep.core.schema import Field, Schema
from dsprep.errors import SchemaError, TargetError, UsageError
from dsprep.storage.trees import data_files
from dsprep.writing import run
from dsprep.writing.samples.spool import Spool
from dsprep.writing.staging import Staging

FORMATS = sorted(SUFFIX)
MIXED = dict(schemas())["mixed"]
PLAIN = Schema((Field("x", np.dtype("<f4"), (4, 3)), Field("label", np.dtype("<i8"))))


def samples_of(batch, schema):
    """Samples as a program gives them: each value an object of its own."""
    count = len(next(iter(batch.values())))
    return [{f.name: batch[f.name][i] for f in schema} for i in range(count)]


def parts(samples, size):
    """Batches of a list of samples."""
    for at in range(0, len(samples), size):
        some = samples[at : at + size]
        yield {name: [s[name] for s in some] for name in some[0]}


def content(path):
    """The bytes of all files of a dataset, by name."""
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in data_files(path)}


def nothing_left(directory, *names):
    assert sorted(p.name for p in directory.iterdir()) == sorted(names)
    assert not [t for t in threading.enumerate() if t.name.startswith("dsprep")]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("form", ["samples", "batches", "length"])
def test_every_kind_of_field_as_its_library_reads_it(tmp_path, format, form):
    batch = random_batch(MIXED, 150)
    samples = samples_of(batch, MIXED)
    given = iter(samples) if form == "samples" else samples
    target = tmp_path / f"out{SUFFIX[format]}"
    report = dsprep.write(
        target,
        parts(samples, 37) if form == "batches" else given,
        schema=MIXED,
        batched=form == "batches",
        buffer_size=40,
        durable=False,
    )
    assert (report.samples, report.target, report.bytes_in) == (150, target, 0)
    assert_same_batch(READ[format](target, MIXED), batch, MIXED)
    with dsprep.open(target) as source:
        assert_same_batch(source[:], batch, MIXED)
    with dsprep.Reader(target, batch_size=32) as reader:
        assert sum(len(b["label"]) for b in reader) == 150
    assert dsprep.check(target) == []
    nothing_left(tmp_path, target.name, report.sidecar.name)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("schema", [PLAIN, MIXED], ids=["plain", "mixed"])
@pytest.mark.parametrize("known", [True, False])
def test_the_files_are_those_of_repack(tmp_path, format, schema, known):
    batch = random_batch(schema, 200)
    before = written(tmp_path / "before.h5", schema, batch)
    options = {"buffer_size": "8KiB", "stripe_size": "4KiB", "durable": False}
    repacked, target = (tmp_path / f"{n}{SUFFIX[format]}" for n in ("repacked", "out"))
    dsprep.repack(before, repacked, **options)
    samples = samples_of(batch, schema)
    dsprep.write(target, samples if known else iter(samples), schema=schema, **options)
    assert content(target) == content(repacked)
    sidecars = (t.with_name(f"{t.name}.dsprep.json") for t in (target, repacked))
    side, other = (json.loads(path.read_text()) for path in sidecars)
    assert side["layouts"] == other["layouts"]
    assert side["lineage"]["command"] == "dsprep.write"
    assert side["lineage"]["source_files"] == 0


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("schema", "memory"), [(PLAIN, None), (MIXED, "64MiB")], ids=["plain", "mixed"]
)
def test_a_shuffle_is_that_of_repack(tmp_path, format, schema, memory):
    batch = random_batch(schema, 300)
    before = written(tmp_path / "before.h5", schema, batch)
    options = {"shuffle": 7, "buffer_size": 64, "durable": False, "memory": memory}
    repacked, target = (tmp_path / f"{n}{SUFFIX[format]}" for n in ("repacked", "out"))
    dsprep.repack(before, repacked, **options)
    dsprep.write(target, samples_of(batch, schema), schema=schema, **options)
    assert content(target) == content(repacked)
    nothing_left(
        tmp_path,
        "before.h5",
        "before.h5.dsprep.json",
        *(t.name + s for t in (target, repacked) for s in ("", ".dsprep.json")),
    )


@pytest.mark.parametrize("format", FORMATS)
def test_no_samples_and_one(tmp_path, format):
    target = tmp_path / f"out{SUFFIX[format]}"
    fails(lambda: dsprep.write(target, []), SchemaError, "there are no samples")
    nothing_left(tmp_path)
    for schema in (PLAIN, {"x": "float32[None,3]", "name": "str"}):
        dsprep.write(target, iter(()), schema=schema, overwrite=True)
        with dsprep.open(target) as source:
            assert len(source) == 0
    one = {"x": np.zeros((2, 3), np.float32), "name": "a"}
    dsprep.write(target, [one], overwrite=True)
    with dsprep.open(target) as source:
        assert source[0]["name"] == "a"


def test_a_writer_takes_samples_and_batches(tmp_path):
    batch = random_batch(MIXED, 100)
    samples = samples_of(batch, MIXED)
    with dsprep.Writer(tmp_path / "out.h5", schema=MIXED) as writer:
        writer.extend(take(batch, 0, 30))
        for sample in samples[30:50]:
            writer.append(sample)
        writer.extend(take(batch, 50, 50))
        writer.extend(take(batch, 50, 100))
        assert not (tmp_path / "out.h5").exists()
    assert writer.report.samples == 100
    with dsprep.open(tmp_path / "out.h5") as source:
        assert_same_batch(source[:], batch, MIXED)
    fails(lambda: writer.append(samples[0]), UsageError, "with block")
    fails(lambda: dsprep.Writer(tmp_path / "new.h5").append(samples[0]), UsageError, "with block")
    nothing_left(tmp_path, "out.h5", "out.h5.dsprep.json")


class Broken(Exception):
    """What a program raises."""


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("error", "known"), [(Broken, True), (KeyboardInterrupt, False), (GeneratorExit, True)]
)
def test_an_exception_comes_out_and_leaves_nothing(tmp_path, format, error, known):
    big = np.zeros(300_000)
    raised = error("at that sample")

    def give(at):
        for i in range(12):
            if i == at:
                raise raised
            yield {"x": big, "label": i}

    options = {"length": 12} if known else {}
    for at in (0, 4, 11):
        with pytest.raises(error) as found:
            dsprep.write(tmp_path / f"out{SUFFIX[format]}", give(at), **options)
        assert found.value is raised
        assert found.value.__cause__ is None
        nothing_left(tmp_path)


def test_wrong_samples_are_named(tmp_path):
    samples = [{"x": np.zeros((4, 3), np.float32), "label": 1} for _ in range(20)]
    samples[17] = {"x": np.zeros((5, 3), np.float32), "label": 1}
    with pytest.raises(SchemaError) as error:
        dsprep.write(tmp_path / "out.h5", samples)
    assert str(error.value.where) == "sample 17, field x"
    assert 'schema={"x": "float32[None,3]"}' in error.value.fix
    nothing_left(tmp_path)
    dsprep.write(tmp_path / "out.h5", samples, schema={"x": "float32[None,3]"})
    with dsprep.open(tmp_path / "out.h5") as source:
        assert source.schema.names == ("x", "label")
        assert len(source[17]["x"]) == 5


@pytest.mark.parametrize(
    ("count", "ragged", "shuffle"),
    [(0, False, None), (9, True, 1), (9, False, 1), (11, False, None), (11, True, None)],
)
def test_another_number_than_length(tmp_path, shuffle, ragged, count):
    samples = ({"x": b"abc" if ragged else np.zeros(3)} for _ in range(count))
    says = "more samples came" if count > 10 else "fewer samples came"
    with pytest.raises(UsageError, match=f"{says} than length says .*expected 10"):
        dsprep.write(tmp_path / "out.h5", samples, length=10, shuffle=shuffle)
    nothing_left(tmp_path)


def test_what_is_wrong_is_known_before_the_program_runs(tmp_path):
    def never():
        raise AssertionError
        yield

    (tmp_path / "there.h5").write_bytes(b"x")
    fails(lambda: dsprep.write(tmp_path / "there.h5", never()), TargetError, "it exists already")
    fails(lambda: dsprep.write(tmp_path / "none" / "out.h5", never()), TargetError, "no such dir")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    fails(lambda: dsprep.write(tmp_path / "folder", never(), overwrite=True), TargetError, "not ")
    wrong = {"length": -1, "shard_size": 0, "compress": "zstd:x", "memory": "lots"}
    for name, value in {**wrong, "schema": {"x": "nothing"}}.items():
        fails(lambda: dsprep.write(tmp_path / "out.h5", never(), **{name: value}), UsageError)
    with pytest.raises(TypeError, match="'lenght' is not an option"):
        dsprep.write(tmp_path / "out.h5", never(), lenght=3)
    with pytest.raises(UsageError, match="batched=True"):
        dsprep.write(tmp_path / "out.h5", {"x": np.zeros((3, 4))})


@pytest.mark.parametrize("ragged", [False, True])
def test_what_a_format_cannot_hold_is_known_with_the_first_sample(tmp_path, ragged):
    taken = []

    def give():
        for i in range(10):
            taken.append(i)
            yield {"x": np.zeros(3), "more": b"x" if ragged else i}

    with pytest.raises(UsageError, match="buffer_size"):
        dsprep.write(tmp_path / "out.h5", give(), length=10, buffer_size="many")
    with pytest.raises(UsageError, match="compression"):
        dsprep.write(tmp_path / "out.lmdb", give(), length=10, compress="gzip")
    assert taken == [0, 0]
    nothing_left(tmp_path)


def test_samples_may_be_changed_after_they_were_given(tmp_path):
    def give():
        x, rows = np.zeros(400_000), np.zeros(3)
        sample = {"x": x, "rows": rows}
        for i in range(20):
            x[:], rows[:] = i, i
            yield sample

    for options in ({"length": 20}, {}):
        dsprep.write(tmp_path / "out.h5", give(), overwrite=True, **options)
        with dsprep.open(tmp_path / "out.h5") as source:
            batch = source[:]
        assert (batch["x"] == np.arange(20)[:, None]).all()
        assert (batch["rows"] == np.arange(20)[:, None]).all()


def test_errors_of_the_disk_come_out(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    sample = {"x": np.zeros(100_000)}
    with monkeypatch.context() as patched:
        patched.setattr("dsprep.writing.samples.spool.pwrite_all", full)
        with pytest.raises(OSError, match="No space"):
            dsprep.write(tmp_path / "out.h5", itertools.repeat(sample))
    nothing_left(tmp_path)
    monkeypatch.setattr("dsprep.writing.transfer.ShardCopy._copy", full)
    with pytest.raises(OSError, match="No space"):
        dsprep.write(tmp_path / "out.h5", itertools.repeat(sample), length=10_000)
    nothing_left(tmp_path)


@pytest.mark.parametrize("known", [True, False])
def test_memory_is_bounded(tmp_path, known):
    def give(count):
        for i in range(count):
            yield {"x": np.full(25_000, i), "y": i, **({} if known else {"text": "abc" * 100})}

    peaks = []
    for count in (400, 800):
        tracemalloc.start()
        options = {"length": count if known else None, "buffer_size": 20, "memory": "96MiB"}
        target = tmp_path / "out.tfrecord"
        dsprep.write(target, give(count), overwrite=True, durable=False, **options)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + (12 << 20)


@pytest.mark.parametrize(("memory", "spilled"), [(0, False), (600, False), (1 << 20, True)])
def test_a_spool_is_read_in_any_order(tmp_path, memory, spilled):
    batch = random_batch(MIXED, 100)
    with Spool(tmp_path / "out", MIXED, memory) as spool:
        for start, stop in ((0, 1), (1, 20), (20, 41), (41, 100)):
            spool.put(take(batch, start, stop))
        spool.finish()
        assert (spool.resident_nbytes() > 0) == (memory > 0)
        if spilled:
            spool.spill()
            assert spool.resident_nbytes() == 0
        assert list(tmp_path.iterdir()) == []
        ranges = ((0, 100), (39, 42), (99, 100), (5, 5), (100, 100), (0, 41), (0, 1), (1, 20))
        for start, stop in ranges:
            assert_same_batch(spool.read(start, stop), take(batch, start, stop), MIXED)
        assert spool.sizes(3, 60).tolist() == [
            sum(c.nbytes for c in take(batch, i, i + 1).values()) for i in range(3, 60)
        ]
        assert spool.rows("jpeg", 0, len(spool)).tolist() == batch["jpeg"].lengths.tolist()


def killed(step, target, samples):
    """Write samples in a process that is killed at a step."""

    def work():
        around = kill_at(step)
        for name in ("save", "publish", "_put_sidecar", "discard"):
            around(Staging, name)
        around(run, "join_sidecars")
        dsprep.write(target, samples)

    return forked(work)


@pytest.mark.parametrize(("step", "known"), [(1, False), (4, True), (7, False), (10, True)])
def test_after_a_kill_the_same_call_starts_over(tmp_path, step, known):
    target = tmp_path / "out.h5"
    samples = [{"x": np.full(3, i)} for i in range(9)]
    assert killed(step, target, samples if known else iter(samples)) == -signal.SIGKILL
    there = target.exists()
    if there:
        with dsprep.open(target) as source:
            assert len(source) == 9
        fails(lambda: dsprep.write(target, [{"x": 1}]), TargetError, "exists already")
    dsprep.write(target, [{"x": 1}], overwrite=there)
    with dsprep.open(target) as source:
        assert source[:]["x"].tolist() == [1]
    nothing_left(tmp_path, "out.h5", "out.h5.dsprep.json")


def test_rows_of_no_bytes_are_refused(tmp_path):
    for options in ({}, {"schema": {"x": "float32[None,0,3]"}}):
        with pytest.raises(SchemaError, match="field x has rows of no bytes"):
            dsprep.write(tmp_path / "out", [{"x": [np.zeros((0, 3), "f4")]}], **options)
    nothing_left(tmp_path)
