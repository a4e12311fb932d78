"""Random orders are permutations, repeatable, and the same through memory and through files."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support import MemorySource, assert_same_batch, random_batch, some_schemas, take, written

import dsprep
from dsprep.core import permutation
from dsprep.core.gather import LONG
from dsprep.core.gather import take as gather
from dsprep.core.permutation import SORTED, Permutation
from dsprep.core.schema import Arena, Field, Schema, batch_nbytes, concatenate
from dsprep.errors import FormatError
from dsprep.sidecar.spec import sidecar_path
from dsprep.storage import scatter
from dsprep.writing import buckets, shuffle
from dsprep.writing.shuffle import ShuffledSource

SCHEMAS = some_schemas()


# --- permutations ----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 3, 10, 257, SORTED, SORTED + 1, 100_003, 1 << 18])
def test_it_is_a_permutation(count):
    order = Permutation(7, count)
    places = np.arange(count)
    samples = order.forward(places)
    assert samples.dtype == np.int64
    assert np.array_equal(np.sort(samples), places)
    assert np.array_equal(order.inverse(samples), places)


@pytest.mark.parametrize("count", [2, 300, 9000, SORTED])
@pytest.mark.parametrize("bits", [1, 20, 40, 56])
def test_the_order_is_that_of_all_bits_of_the_hashes(count, bits, monkeypatch):
    """Also where the bits by which they are sorted first are equal."""
    numbers = np.random.default_rng(count).permutation(count).astype(np.uint64)
    hashes = numbers << np.uint64(max(0, bits - 16))
    monkeypatch.setattr(permutation, "mix", lambda *_: hashes)
    order = Permutation(7, count).forward(np.arange(count))
    assert np.array_equal(order, np.argsort(hashes))


def test_a_huge_order_takes_no_memory():
    count = 10**15 + 7
    order = Permutation(1, count)
    places = np.concatenate([np.arange(50_000), count - 1 - np.arange(50_000)])
    samples = order.forward(places)
    assert samples.min() >= 0
    assert samples.max() < count
    assert np.array_equal(order.inverse(samples), places)
    assert 0.45 < samples.mean() / count < 0.55


def test_the_order_is_frozen():
    # Datasets that were shuffled with a seed are told apart by these numbers for ever.
    assert Permutation(42, 10).forward(np.arange(10)).tolist() == FROZEN_SMALL
    assert Permutation(42, 10**6).forward(np.arange(5)).tolist() == FROZEN_LARGE
    assert Permutation(43, 10**6).forward(np.arange(5)).tolist() != FROZEN_LARGE


FROZEN_SMALL = [8, 4, 6, 5, 7, 3, 0, 2, 9, 1]
FROZEN_LARGE = [50113, 616944, 164031, 666375, 249609]


# --- sources ---------------------------------------------------------------------------------


class Forgetful(MemorySource):
    """A source that knows no sizes of ragged samples, and counts the samples read."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.count, self.lock = 0, threading.Lock()

    def read(self, start, stop, arena=None):
        with self.lock:
            self.count += stop - start
        return super().read(start, stop, arena)


class Knowing(Forgetful):
    def sizes(self, start, stop):
        out = np.full(stop - start, self.schema.fixed_nbytes, np.int64)
        for f in self.schema:
            if f.ragged:
                out += self._batch[f.name][start:stop].lengths * f.row_nbytes
        return out


def expected(source, seed):
    order = Permutation(seed, len(source)).forward(np.arange(len(source)))
    parts = [source.read(i, i + 1) for i in order.tolist()]
    return concatenate(source.schema, parts)


@pytest.fixture
def tiny(monkeypatch):
    """Pieces so small that a few samples make many runs and buckets; files that stay."""
    monkeypatch.setattr(shuffle, "UNSYNCED_NBYTES", 0)
    monkeypatch.setattr(shuffle, "PIECE_NBYTES", 64)
    monkeypatch.setattr(shuffle, "SEGMENT_NBYTES", 16)


SOME = ("mixed", "fixed-<f4", "ragged-|S7", "empty-axis", "bytes")


@pytest.mark.parametrize(
    ("name", "kind", "through"),
    [(n, Forgetful, "buckets") for n in SCHEMAS]
    + [(n, Forgetful, "memory") for n in SOME]
    + [(n, Knowing, how) for n in ("mixed", "bytes") for how in ("memory", "buckets")],
)
def test_every_schema(name, kind, through, tmp_path, tiny):
    schema = SCHEMAS[name]
    batch = random_batch(schema, 53, seed=4)
    source = kind(schema, batch)
    memory = 1 << 30 if through == "memory" else max(8, batch_nbytes(batch) // 4)
    with ShuffledSource(source, 5, memory, tmp_path / "s", workers=2) as shuffled:
        if batch_nbytes(batch):
            assert shuffled.how == through
        assert len(shuffled) == 53
        found = [shuffled.read(i, min(53, i + 7), Arena()) for i in range(0, 53, 7)]
        assert_same_batch(concatenate(schema, found), expected(source, 5), schema)
        source.count = 0
        assert_same_batch(shuffled.read(50, 53), take(expected(source, 5), 50, 53), schema)
        assert source.count == 53  # by what is expected
        assert_same_batch(shuffled.read(50, 50), take(batch, 0, 0), schema)
        if shuffled.how == "buckets":
            used = sum(p.stat().st_size for p in (tmp_path / "s").rglob("*") if p.is_file())
            assert used <= shuffled.scratch_nbytes * (2 if kind is Forgetful else 1)
        else:
            assert not (tmp_path / "s").exists()
        shuffled.clean()
        assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize(
    ("name", "options", "how"),
    [
        ("x.h5", {}, "direct"),
        ("x.h5", {"chunk": 4, "compress": "gzip:1"}, "buckets"),
        ("x.zarr", {"chunk": 1}, "direct"),
    ],
)
def test_large_samples_that_are_read_at_random(name, options, how, beside, tmp_path, monkeypatch):
    monkeypatch.setattr(shuffle, "DIRECT_NBYTES", 64)
    origin, path = written(tmp_path / "origin.h5", X, 60), tmp_path / name
    if options:
        dsprep.convert(origin, path, **options)
    else:
        path = origin
    if not beside:
        sidecar_path(path).unlink(missing_ok=True)
    elif path == origin:
        dsprep.provenance(path)
    with dsprep.open(path) as source:
        want = expected(source, 3)
        with ShuffledSource(source, 3, 1000, tmp_path / "s") as shuffled:
            assert shuffled.how == how
            assert_same_batch(shuffled.read(0, 60), want, X)
            shuffled.clean()


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_samples(count, tmp_path):
    schema = SCHEMAS["mixed"]
    source = MemorySource(schema, random_batch(schema, count))
    for memory in (1, 1 << 20):
        with ShuffledSource(source, 5, memory, tmp_path / f"{memory}") as shuffled:
            found = shuffled.read(0, count)
            assert_same_batch(found, expected(source, 5) if count else source.read(0, 0), schema)


X = Schema((Field("x", np.dtype("<i8"), (8,)), Field("y", np.dtype("<i4"))))


def numbered(count):
    y = np.arange(count, dtype="<i4")
    return Forgetful(X, {"x": y[:, None] * 8 + np.arange(8, dtype="<i8"), "y": y})


def test_any_number_of_threads_at_any_place(tmp_path, tiny):
    source = numbered(2000)
    want = expected(source, 1)
    source.count = 0
    with ShuffledSource(source, 1, 16_000, tmp_path / "s", workers=3) as shuffled:
        starts = np.random.default_rng(0).permutation(np.arange(0, 2000, 37)).tolist()

        def check(start):
            stop = min(2000, start + 37)
            assert_same_batch(shuffled.read(start, stop), take(want, start, stop), X)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(check, sorted(starts)))
            list(pool.map(check, starts))
        assert len(shuffled._served._loaded) <= 2
    assert source.count == 2000  # the first pass only


@pytest.mark.parametrize("longest", [LONG, 0])
@pytest.mark.parametrize("name", ["mixed", "five-d"])
def test_what_was_read_stays_when_memory_is_used_again(longest, name, tmp_path, tiny, monkeypatch):
    monkeypatch.setattr(buckets, "LONG", longest)
    monkeypatch.setattr(scatter, "IOV_MAX", scatter.IOV_MAX if longest else 3)
    schema = SCHEMAS[name]
    source = MemorySource(schema, random_batch(schema, 400, longest=50))
    want = expected(source, 3)
    with ShuffledSource(source, 3, batch_nbytes(want) // 8, tmp_path / "s") as shuffled:
        kept = [shuffled.read(i, i + 10) for i in range(0, 400, 10)]
        assert_same_batch(concatenate(schema, kept), want, schema)
        del kept
        for i in range(0, 400, 10):
            assert_same_batch(shuffled.read(i, i + 10), take(want, i, i + 10), schema)
        assert 0 < len(shuffled._served.reader._free) < 9  # not one for each time


def test_a_finished_first_pass_is_used_again(tmp_path, tiny):
    source = numbered(1000)
    want = expected(source, 1)
    for again in (False, True):
        source.count = 0
        with ShuffledSource(source, 1, 20_000, tmp_path / "s") as shuffled:
            assert_same_batch(shuffled.read(0, 1000), want, X)
        assert source.count == (0 if again else 1000)
    known = {"base": source, "seed": 1, "memory_nbytes": 20_000, "scratch": tmp_path / "s"}
    for other in ({"seed": 2}, {"identity": "another"}, {"memory_nbytes": 30_000}):
        with ShuffledSource(**known | other) as shuffled:
            source.count = 0
            shuffled.prepare()
            assert source.count == 1000
            assert_same_batch(shuffled.read(0, 1000), expected(source, other.get("seed", 1)), X)


class Killed(Exception):
    pass


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", ["mixed", "five-d"])
def test_a_killed_first_pass_goes_on(name, again, tmp_path, tiny, monkeypatch):
    """Parts that are there are not dealt again, by threads or by the workers of an executor."""
    monkeypatch.setattr(shuffle, "PART_NBYTES", 2000)
    schema = SCHEMAS[name]
    source = Knowing(schema, random_batch(schema, 300, seed=2))
    want, memory = expected(source, 9), batch_nbytes(source.read(0, 300)) // 5
    (tmp_path / "memory").touch()
    source.path, source.opening = tmp_path / "memory", lambda: source

    def make(workers):
        return ShuffledSource(source, 9, memory, tmp_path / "s", workers=workers)

    def kill(start, stop, arena=None):
        if source.count >= 150:
            raise Killed
        return Knowing.read(source, start, stop, arena)

    source.count = 0
    with make(1) as shuffled:
        source.read = kill
        with pytest.raises(Killed):
            shuffled.prepare()
        del source.read
    first = source.count
    with make(2) as shuffled, ThreadPoolExecutor(2) as pool:
        shuffled.prepare(pool if again else None)
        assert len(list((tmp_path / "s").iterdir())) > 5
        assert 50 < source.count - first < 250
        assert_same_batch(shuffled.read(0, 300), want, schema)
        opening, at = shuffled.part(40, 60)
        with opening() as other:
            assert_same_batch(other.read(40 - at, 60 - at), take(want, 40, 60), schema)
        shuffled.clean()
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("limit", [0, 1 << 40])
def test_files_that_were_not_waited_for_are_not_trusted(
    limit, durable, tmp_path, tiny, monkeypatch
):
    monkeypatch.setattr(shuffle, "UNSYNCED_NBYTES", limit)
    synced = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    source, lasting = numbered(1000), durable and not limit
    for again in (False, True):
        source.count = 0
        with ShuffledSource(source, 1, 20_000, tmp_path / "s", durable=durable) as shuffled:
            assert_same_batch(shuffled.read(0, 1000), expected(source, 1), X)
            assert source.count == (0 if again and lasting else 1000) + 1000
    assert bool(synced) == lasting


def test_a_disk_that_fails_later(tmp_path, tiny, monkeypatch):
    source = numbered(1000)
    with ShuffledSource(source, 1, 20_000, tmp_path / "s") as shuffled:
        shuffled.prepare()

        def fail(fd):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(buckets, "write_error", fail)
        with pytest.raises(OSError, match="Input/output"):
            shuffled.read(0, 1000)


@pytest.mark.parametrize("where", ["position", "truncated", "empty", "runs", "index"])
def test_damaged_files_are_refused(where, tmp_path, tiny, monkeypatch):
    monkeypatch.setattr(shuffle, "PART_NBYTES", 10_000)
    source = numbered(1000)
    with ShuffledSource(source, 1, 20_000, tmp_path / "s") as shuffled:
        shuffled.prepare()
    path = tmp_path / "s" / "part-1" / "runs"
    data = bytearray(path.read_bytes())
    match where:
        case "position":
            data[0] ^= 1
        case "truncated":
            del data[100:]
        case "empty":
            data.clear()
        case "runs":
            data[-8:] = np.int64(1 << 61).tobytes()
        case "index":
            data[-16:-8] = np.int64(1 << 61).tobytes()  # where the last segment ends
    path.write_bytes(data)
    shuffled = ShuffledSource(source, 1, 20_000, tmp_path / "s")
    with shuffled, pytest.raises(FormatError, match="part-"):
        shuffled.read(0, 1000)


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_damaged_journal(content, tmp_path, tiny):
    source = numbered(1000)
    for again in (False, True):
        with ShuffledSource(source, 1, 20_000, tmp_path / "s") as shuffled:
            assert_same_batch(shuffled.read(0, 1000), expected(source, 1), X)
        assert again or (tmp_path / "s" / "shuffle.json").write_text(content)


def test_an_error_of_the_source_is_raised_and_nothing_hangs(tmp_path, tiny):
    class Broken(Forgetful):
        def read(self, start, stop, arena=None):
            raise OSError("no")

    for memory in (20_000, 1 << 20):
        source = Broken(X, numbered(1000)._batch)
        with ShuffledSource(source, 1, memory, tmp_path / "s") as shuffled:
            for _ in range(2):
                with pytest.raises(OSError, match="no"):
                    shuffled.read(0, 10)


def test_gathering_long_and_short_samples():
    schema = SCHEMAS["mixed"]
    for longest in (3, 3000):
        batch = random_batch(schema, 40, longest=longest)
        rows = np.random.default_rng(1).integers(0, 40, 60)
        want = concatenate(schema, [take(batch, i, i + 1) for i in rows.tolist()])
        assert_same_batch(gather(schema, batch, rows), want, schema)
        assert_same_batch(gather(schema, batch, rows, Arena()), want, schema)
