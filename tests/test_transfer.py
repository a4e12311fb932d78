"""The copy loop: order of places, errors, positions to continue from. With a writer in memory."""

from __future__ import annotations

import random
import sys
import threading
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from support import MemorySource, random_batch, take

import dsprep
from dsprep import formats
from dsprep.core.schema import Field, Schema
from dsprep.errors import FormatError
from dsprep.formats.base import Writer
from dsprep.storage import durable as disk
from dsprep.storage.trees import data_files
from dsprep.writing import shards
from dsprep.writing.plan import pieces
from dsprep.writing.transfer import ShardCopy

SCHEMA = Schema((Field("x", np.dtype("<i8"), (1000,)), Field.opaque("b")))
BATCH = random_batch(SCHEMA, 5000, longest=40)


class ListWriter(Writer):
    """Appends samples to a list at places that `reserve` gives, with random delays."""

    def __init__(self, out, place=0, fail_at=None, stage="write"):
        self.out, self.place, self.fail_at, self.stage = out, place, fail_at, stage
        self.events = []
        self.lock = threading.Lock()
        self.rng = random.Random(3)

    def maybe_fail(self, stage, start):
        if self.rng.random() < 0.3:
            time.sleep(0.002 * self.rng.random())
        if stage == self.stage and self.fail_at is not None and start >= self.fail_at:
            raise OSError(28, "No space left on device", "out")

    def encode(self, batch, start, arena):
        self.maybe_fail("encode", start)
        return {"start": start, "samples": [int(v[0]) for v in batch["x"]]}

    def reserve(self, piece):
        self.maybe_fail("reserve", piece["start"])
        piece["at"] = self.place
        self.place += len(piece["samples"])

    def write(self, piece):
        self.maybe_fail("write", piece["start"])
        with self.lock:
            for i, sample in enumerate(piece["samples"]):
                self.out[piece["at"] + i] = sample
            self.events.append(("write", piece["at"], len(piece["samples"])))

    def checkpoint(self):
        return {"place": self.place}

    def start_sync(self):
        with self.lock:
            self.events.append(("start", 0, 0))

    def sync(self):
        with self.lock:
            self.events.append(("sync", 0, 0))

    def finish(self):
        pass

    def close(self):
        pass


def copy(writer, saved, workers=3, done=0, checkpoint_nbytes=1 << 20, source=None):
    source = source or MemorySource(SCHEMA, BATCH)

    def save(samples, state):
        with writer.lock:
            saved.append((samples, state["place"], list(writer.events)))

    ranges = pieces(source, unit=writer.unit, after=done)
    return ShardCopy(source, writer, (0, 5000), ranges, {}, workers, save, checkpoint_nbytes)


EXPECTED = [int(v[0]) for v in BATCH["x"]]


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_samples_arrive_in_order_with_any_number_of_workers(workers):
    out, saved = {}, []
    done = list(copy(ListWriter(out), saved, workers).run())
    assert [out[i] for i in range(5000)] == EXPECTED
    assert sum(n for n, _ in done) == 5000
    payload = sum(int(c.nbytes) for c in take(BATCH, 0, 5000).values())
    assert sum(nbytes for _, nbytes in done) == payload


@pytest.mark.parametrize("workers", [1, 4])
def test_a_position_is_saved_only_when_all_before_it_is_written_and_synced(workers):
    out, saved = {}, []
    done = list(copy(ListWriter(out), saved, workers).run())
    # Of positions that are reached together, as a late piece ends, the last alone is saved.
    assert len(saved) == len(done) if workers == 1 else 0 < len(saved) <= len(done)
    assert saved[-1][0] == 5000
    for samples, place, events in saved:
        assert samples == place
        last_sync = max(i for i, e in enumerate(events) if e[0] == "sync")
        covered = sorted((at, n) for kind, at, n in events[:last_sync] if kind == "write")
        reached = 0
        for at, n in covered:
            if at != reached:
                break
            reached = at + n
        assert reached >= place


def test_the_disk_begins_with_each_piece_where_it_will_be_waited_for():
    writer = ListWriter({})
    done = list(copy(writer, [], 1).run())
    kinds = [kind for kind, *_ in writer.events if kind != "sync"]
    assert kinds == ["write", "start"] * len(done)
    writer = ListWriter({})
    ranges = pieces(MemorySource(SCHEMA, BATCH))
    list(ShardCopy(MemorySource(SCHEMA, BATCH), writer, (0, 5000), ranges, {}, 1).run())
    assert {kind for kind, *_ in writer.events} == {"write"}


def test_continuing_from_any_saved_position_gives_the_same():
    out, saved = {}, []
    list(copy(ListWriter(out), saved, 2).run())
    for samples, place, _ in saved:
        rest = {}
        list(copy(ListWriter(rest, place), [], 2, done=samples).run())
        assert [rest[i] for i in range(place, 5000)] == EXPECTED[place:]
        assert min(rest, default=5000) == place


@pytest.mark.parametrize("stage", ["encode", "reserve", "write"])
@pytest.mark.parametrize("workers", [1, 4])
def test_the_first_error_reaches_the_caller_and_all_threads_end(stage, workers):
    before = threading.active_count()
    writer = ListWriter({}, fail_at=2000, stage=stage)
    with pytest.raises(OSError, match="No space left"):
        list(copy(writer, [], workers).run())
    assert threading.active_count() == before


def test_leaving_early_ends_all_threads():
    before = threading.active_count()
    run = copy(ListWriter({}), [], 3).run()
    next(run)
    run.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("verb", [dsprep.convert, dsprep.repack])
@pytest.mark.parametrize("to", formats.WRITTEN)
def test_the_last_sample_is_read_back(verb, to, tmp_path, monkeypatch):
    samples = [{"x": np.full(i % 3, i), "y": i} for i in range(9)]
    dsprep.write(tmp_path / "in.h5", samples, schema={"x": "int64[None]"})
    described = shards.describe_output

    def other(*known):
        return described(*known[:-1], {**known[-1], "y": np.array([7])})

    if verb is dsprep.convert:
        verb(tmp_path / "in.h5", tmp_path / "out", to=to)
    monkeypatch.setattr(shards, "describe_output", other)
    with pytest.raises(FormatError, match="sample 8, field y"):
        verb(tmp_path / "in.h5", tmp_path / "other", to=to)


@pytest.mark.parametrize("name", ["out.h5", "out.zarr", "out.zarr.zip"])
@pytest.mark.parametrize("verb", [dsprep.convert, dsprep.repack])
def test_space_that_was_reserved_and_not_used_is_released(verb, name, tmp_path, monkeypatch):
    with h5py.File(tmp_path / "in.h5", "w") as file:
        file["x"] = np.arange(3_000_000.0).reshape(3000, 1000)
    reserved = []
    real = disk.preallocate

    def reserve(fd, offset, nbytes):
        path = Path(f"/proc/self/fd/{fd}").readlink()
        reserved.append((path.name, nbytes))
        real(fd, offset, nbytes * (1 if name == "out.h5" else 3))  # HDF5 knows its size

    verb(tmp_path / "in.h5", tmp_path / f"first-{name}")  # imports the writer
    for key, module in list(sys.modules.items()):
        if key.startswith("dsprep.formats") and hasattr(module, "preallocate"):
            monkeypatch.setattr(module, "preallocate", reserve)
    verb(tmp_path / "in.h5", tmp_path / name)
    if (verb, name) != (dsprep.convert, "out.zarr.zip"):
        assert max(nbytes for _, nbytes in reserved) >= 1000 * 8
    for path in data_files(tmp_path / name):
        found = path.stat()
        assert found.st_blocks * 512 <= found.st_size + 65536, path
