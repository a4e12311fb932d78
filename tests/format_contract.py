"""What every format promises, as one class of tests: a format's tests subclass `FormatContract`.

The samples come from memory, and what was written is compared with them bit for bit: by the
format's own source, through the sidecar, and, where the subclass has one, by a foreign library.
"""

from __future__ import annotations

import gc
import itertools
import os
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from record_checks import group_bytes
from support import (
    MemorySource,
    assert_same_batch,
    check_layout,
    create,
    epochs,
    fails,
    forked,
    kill_at,
    random_batch,
    raw,
    take,
)

import dsprep
from dsprep import formats
from dsprep.core.groups import plain
from dsprep.core.schema import Arena, Batch, Field, Ragged, Schema
from dsprep.errors import ChangedError, DsprepError, FormatError
from dsprep.formats.options import OpenOptions, WriteOptions
from dsprep.reading.layout_reader import LayoutReader
from dsprep.source.dataset import open_dataset
from dsprep.storage.trees import data_files, remove
from dsprep.verbs.check import check
from dsprep.verbs.convert import plan_job
from dsprep.verbs.repack import RepackOptions, plan_repack, run_repack
from dsprep.writing import shards, staging, transfer
from dsprep.writing.job import RunOptions
from dsprep.writing.run import run_job

FIXED = Schema((Field("x", np.dtype("<f4"), (5, 3)), Field("y", np.dtype(">i8"))))
RAGGED = Schema((*FIXED, Field("r", np.dtype("<u2"), (None, 2)), Field.opaque("b")))
QUICK = RunOptions(durable=False, workers=2)
COUNT = 37


class SourceContract:
    """The tests of what is read; see the two below.

    Attributes
    ----------
    format
        The name of the format.
    suffix
        Of its files; may be another one than the first of the format's.
    schema
        Fields that it can hold.
    open
        How it is opened.
    located
        Whether all fields have offsets in a sidecar, of a file as `make` makes it: not grouped,
        and grouped.
    simple
        Whether one range of bytes holds each fixed field of a sample, as it is in memory.
    """

    format: str
    suffix: str = ""
    schema: Schema = FIXED
    open: OpenOptions = OpenOptions()
    located: tuple[bool, bool] = (True, True)
    simple: bool = True

    @pytest.fixture(params=[False])
    def grouped(self, request):
        return request.param

    @pytest.fixture(autouse=True)
    def _samples(self, tmp_path):
        self.known = formats.load(self.format)
        self.target = tmp_path / f"out{self.suffix or self.known.suffixes[0]}"
        self.take(random_batch(self.schema, COUNT, seed=len(self.format), longest=9))

    def take(self, batch: Batch) -> None:
        """Let these be the samples."""
        self.batch = batch

    def make(self, grouped: bool) -> None:
        """Make the dataset at `target`, and its sidecar if it can have one."""
        raise NotImplementedError

    def assert_kept(self, grouped: bool = False) -> None:
        for way in ("strict", "library") if self.located[grouped] else ("library",):
            with open_dataset(self.target, self.open, through=way) as source:
                assert len(source) == COUNT
                assert_same_batch(source[:], self.batch, self.schema)
                assert_same_batch(source[3:11], take(self.batch, 3, 11), self.schema)

    def test_closed(self, grouped):
        """What was read and closed holds no file, without waiting for a garbage collection."""
        self.make(grouped)
        gc.collect()
        gc.disable()
        try:
            for way in ("library", "auto"):
                with open_dataset(self.target, self.open, through=way) as source:
                    source.storage()
                    source[3], source[:]
            if self.located[grouped]:
                check(self.target, full=True)
            assert self.files_open() == []
        finally:
            gc.enable()

    def files_open(self) -> list[str]:
        found = []
        for fd in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):
                found.append(str(fd.readlink()))
        return [path for path in found if path.startswith(str(self.target))]

    def extents(self):
        """Yield (sample, field, file, offset, length) of what is stored as its plain bytes."""
        with dsprep.Sidecar.open(self.target) as opened:
            layout = opened.layout(0)
            parts = {} if layout.records is None else layout.records.parts
            hidden = {n for n, part in parts.items() if part.at is None}  # a recipe finds them
            names = [n for n in self.schema.names if n not in {*layout.unlocated, *hidden}]
            for row in opened.rows(slice(0, COUNT), names) if names else ():
                i, name, file, offset, length, inside, _ = row
                if inside is None:
                    path = opened.dataset.parent / file
                    if not path.exists():
                        path = opened.dataset / file
                    yield i, name, path, offset, length

    def test_extents(self, grouped):
        self.make(grouped)
        if not self.located[grouped]:
            return
        found: dict[tuple[int, str], bytes] = {}
        for i, name, path, offset, length in self.extents():
            with path.open("rb") as file:
                file.seek(offset)
                found[i, name] = found.get((i, name), b"") + file.read(length)
        for (i, name), data in found.items():
            column = self.batch[name][i : i + 1]
            expected = column.values if isinstance(column, Ragged) else column
            assert data == raw(expected), (i, name)

    def test_one_sample(self, grouped, monkeypatch):
        """One sample is what it is among others, however it is asked for."""
        self.make(grouped)
        if not self.located[grouped]:
            return
        last = Schema((self.schema.fields[-1],))
        with dsprep.Sidecar.open(self.target) as sidecar, open_dataset(self.target) as source:
            for i in range(COUNT):
                expected = take(self.batch, i, i + 1)
                assert_same_batch(sidecar.read([i]), expected, self.schema)
                assert_same_batch(sidecar.read(i, last.names), expected, last)
                for other in (i - COUNT, np.int64(i), np.array([i]), slice(i, i + 1)):
                    assert_same_batch(sidecar.read(other), expected, self.schema)
                assert_same_batch(source.read(i, i + 1), expected, self.schema)
            if self.simple:
                monkeypatch.delattr(LayoutReader, "read")  # the way for all other samples
                fixed = [f.name for f in self.schema if not f.ragged]
                for i in range(COUNT):
                    assert list(sidecar.read([i], fixed)) == fixed
            for wrong in (COUNT, -COUNT - 1, [COUNT]):
                with pytest.raises(IndexError):
                    sidecar.read(wrong)

    def test_rewritten(self, grouped):
        """What was written to since it was opened is not read any more, whichever way."""
        self.make(grouped)
        for way in ("strict", "library") if self.located[grouped] else ("library",):
            with open_dataset(self.target, self.open, through=way) as source:
                source[:]
                self.rewrite()
                for start, stop in ((0, COUNT), (3, 4), (5, 9)):
                    fails(lambda: source.read(start, stop), FormatError)
            self.rewrite()
        if self.located[grouped]:
            with dsprep.Sidecar.open(self.target) as sidecar:
                sidecar.read(slice(0, COUNT))
                self.rewrite()
                for samples in (3, slice(0, COUNT), [3], [2, 30, 4, 4]):
                    for names in (self.schema.names, self.schema.names[:1]):
                        fails(lambda: sidecar.read(samples, names), ChangedError)

    def test_cached(self, grouped, tmp_path):
        """A Reader with a cache gives what it gives without one, and reads all again from there."""
        self.make(grouped)
        if not self.located[grouped]:
            return
        options = {"seed": 3, "epochs": 2, "buffer_size": 8}
        with (
            dsprep.Reader(self.target, 5, **options) as plain,
            dsprep.Reader(self.target, 5, cache=tmp_path / "cache", **options) as cached,
        ):
            for expected, found in zip(epochs(plain, 2), epochs(cached, 2), strict=True):
                assert_same_batch(found, expected, self.schema)
            stats = cached.stats[1]
        assert (stats.cache_nbytes, stats.copied_nbytes) == (stats.nbytes, 0)
        assert stats.cache_units == stats.units > 0

    def rewrite(self) -> None:
        """Write all data anew, in place, with another last byte; twice, it is as before."""
        for path in data_files(self.target):
            before, data = path.stat(), path.read_bytes()
            while path.stat().st_mtime_ns == before.st_mtime_ns:
                with path.open("r+b") as file:
                    file.write(data[:-1] + bytes([data[-1] ^ 1]))

    def test_truncated(self):
        self.make(False)
        for share in (0.0, 0.5, 0.99):
            self.damaged(lambda data, share=share: data[: int(len(data) * share)])

    def test_flipped_bits(self, grouped):
        self.make(grouped)
        if self.located[grouped]:
            dsprep.provenance(self.target, checksums=True)
        rng = np.random.default_rng(zlib.crc32(self.format.encode()))

        def flip(data):
            at = int(rng.integers(0, len(data)))
            data[at] ^= 1 << int(rng.integers(0, 8))
            return data

        for _ in range(4):
            self.damaged(flip)

    def damaged(self, change) -> None:
        """Change the largest data file, not its time stamp: checking notices, nothing crashes."""
        largest = max(data_files(self.target), key=lambda p: p.stat().st_size)
        before, status = largest.read_bytes(), largest.stat()
        largest.write_bytes(change(bytearray(before)))
        os.utime(largest, ns=(status.st_atime_ns, status.st_mtime_ns))
        try:
            located = any(self.located)
            assert not located or check(self.target, full=True)
            for through in ("strict", "library") if located else ("library",):
                with (
                    suppress(DsprepError, OSError),
                    open_dataset(self.target, self.open, through=through) as source,
                ):
                    source[:]
        finally:
            largest.write_bytes(before)


class ReadOnlyContract(SourceContract):
    """The tests of a format that is only read. A subclass gives `format`, `write` and the rest."""

    def write(self, path: Path, batch: Batch) -> None:
        """Write the samples, preferably with another library."""
        raise NotImplementedError

    def make(self, grouped: bool) -> None:
        assert not grouped
        self.write(self.target, self.batch)
        if self.located[grouped]:
            dsprep.provenance(self.target, options=self.open)

    def test_read(self, grouped):
        self.make(grouped)
        assert formats.recognise(self.target) is self.known
        self.assert_kept(grouped)
        with open_dataset(self.target, self.open, through="library") as source:
            assert set(source.storage()) == set(self.schema.names)

    def test_reader(self, grouped):
        self.make(grouped)
        if not self.located[grouped]:
            return
        found: dict[str, list[bytes]] = {name: [] for name in self.schema.names}
        with dsprep.Reader(self.target, batch_size=5, seed=3) as reader:
            for batch in reader:
                for name, values in found.items():
                    column = batch[name]
                    values += [raw(column[i : i + 1]) for i in range(len(column))]
        for name, values in found.items():
            expected = [raw(self.batch[name][i : i + 1]) for i in range(COUNT)]
            assert sorted(values) == sorted(expected), name

    def test_copied(self, grouped, tmp_path):
        self.make(grouped)
        dsprep.convert(self.target, tmp_path / "copy.h5", open_options=self.open)
        dsprep.repack(
            self.target, tmp_path / "packed.tfrecord", buffer_size="8", open_options=self.open
        )
        for path in (tmp_path / "copy.h5", tmp_path / "packed.tfrecord"):
            with open_dataset(path) as source:
                assert_same_batch(source[:], self.batch, self.schema)


class FormatContract(SourceContract):
    """The tests of what is read and written. A subclass gives `format`, and what else differs.

    Attributes
    ----------
    options
        How the format writes.
    located
        Of an output as `convert` and as `repack` write it.
    """

    schema: Schema = RAGGED
    options: WriteOptions = WriteOptions()

    @pytest.fixture(params=[False, True])
    def grouped(self, request):
        return request.param

    def oracle(self, path: Path) -> Batch | None:
        """Return all samples as another library reads them; None: there is none."""
        return None

    @pytest.fixture(autouse=True)
    def _samples(self, tmp_path):
        self.known = formats.load(self.format)
        (tmp_path / "in").mkdir()
        self.memory = tmp_path / "in" / "memory"
        self.memory.touch()
        self.take(random_batch(self.schema, COUNT, seed=len(self.format), longest=9))
        self.target = tmp_path / f"out{self.suffix or self.known.suffixes[0]}"

    def take(self, batch: Batch) -> None:
        """Let these be the samples."""
        self.batch = batch
        self.source = MemorySource(self.schema, batch, self.memory)

    def make(self, grouped: bool) -> None:
        (self.repack if grouped else self.convert)()

    def convert(self, run: RunOptions = QUICK, **options) -> Path:
        how = {"to": self.format, "write": self.options, **options}
        run_job(plan_job(self.source, self.target, **how), run)
        return self.target

    def repack(self, run: RunOptions = QUICK, size: int = 8, **options) -> Path:
        how = RepackOptions(
            buffer_size=str(size), stripe_size="4KiB", to=self.format, write=self.options, **options
        )
        run_repack(plan_repack(self.source, self.target, how, run), run, measure=False)
        return self.target

    def part(self):
        """The part of a repack in groups of eight."""
        how = RepackOptions(buffer_size="8", to=self.format, write=self.options)
        return plan_repack(self.source, self.target, how).parts[0]

    def assert_kept(self, grouped: bool = False) -> None:
        super().assert_kept(grouped)
        if self.target.is_file() or not list(self.target.glob("*-of-*")):
            found = self.oracle(self.target)
            if found is not None:
                assert_same_batch(found, self.batch, self.schema)

    def test_fixed(self, grouped):
        """Fields of one size are as the layout says, too."""
        self.schema = FIXED
        self.take(random_batch(FIXED, COUNT))
        self.test_extents(grouped)

    # --- what is written ---------------------------------------------------------------------

    def test_round_trip(self):
        self.convert()
        assert formats.recognise(self.target) is self.known
        self.assert_kept()
        with open_dataset(self.target) as source:
            assert set(source.storage()) == set(self.schema.names)

    def test_files(self):
        self.convert(shard_size=10)
        assert len([p for p in self.target.iterdir() if not p.name.endswith(".json")]) == 4
        self.assert_kept()

    def test_no_samples(self):
        self.take(take(self.batch, 0, 0))
        self.convert()
        with open_dataset(self.target) as source:
            assert len(source) == 0
            assert source.schema.names == self.schema.names

    def test_plan(self, grouped):
        payload = sum(int(c.nbytes) for c in self.batch.values())
        if grouped:
            part = self.part()
            expected, stored = part.estimate, part.plans[0].stored
            self.repack()
        else:
            plan = self.known.plan(
                self.schema, self.options, plain(COUNT), payload, self.target.name
            )
            expected, stored = plan.nbytes, plan.stored
            self.convert()
        assert set(stored) == set(self.schema.names)
        assert sum(p.stat().st_size for p in data_files(self.target)) <= expected

    def test_groups(self):
        self.repack(size=8)
        self.assert_kept(grouped=True)
        if not self.located[1]:
            return
        with dsprep.Sidecar.open(self.target) as opened:
            groups = opened.layout(0).groups
        edges = groups.edges(COUNT)
        assert edges[0] == 0
        assert edges[-1] == COUNT
        assert (np.diff(edges) > 0).all()
        assert not check(self.target, full=True)
        assert len(group_bytes(self.target, groups)) == len(edges) - 1

    def digest(self) -> dict[str, bytes]:
        files = data_files(self.target)
        return {str(p.relative_to(self.target.parent)): p.read_bytes() for p in files}

    def test_continued(self, grouped, tmp_path):
        """A writer that continues from a checkpoint ends in the same bytes."""
        if grouped:
            part = self.part()
            samples, unit = part.shards[0].grouping, 8
        else:
            samples, unit = COUNT, 1

        def pieces(writer, start, stop):
            step = -(-4 // writer.unit) * writer.unit if not grouped else unit
            return list(itertools.pairwise([*range(start, stop, step), stop]))

        def feed(writer, start, stop):
            for a, b in pieces(writer, start, stop):
                piece = writer.encode(take(self.batch, a, b), a, Arena())
                writer.reserve(piece)
                writer.write(piece)
            writer.sync()

        def end(writer, path):
            writer.finish()
            writer.close()
            check_layout(self.known, path, self.schema, writer)
            writer.clean()

        whole, broken = (tmp_path / n / self.target.name for n in ("whole", "broken"))
        for path in (whole, broken):
            path.parent.mkdir()
        writer = create(self.known, whole, self.schema, samples, self.options, None)
        feed(writer, 0, COUNT)
        end(writer, whole)
        half = 16 if grouped else min(COUNT, -(-16 // writer.unit) * writer.unit)
        writer = create(self.known, broken, self.schema, samples, self.options, None)
        feed(writer, 0, half)
        state = writer.checkpoint()
        if half < COUNT:
            feed(writer, half, min(COUNT, half + unit * 4))  # is written again
        writer.close()
        writer = create(self.known, broken, self.schema, samples, self.options, state)
        feed(writer, half, COUNT)
        end(writer, broken)
        self.target = whole
        expected = self.digest()
        self.target = broken
        assert self.digest() == expected

    def test_killed(self, grouped, tmp_path, monkeypatch):
        """A run that is killed anywhere leaves no output, and the next one ends in its bytes."""
        cut = shards.group_pieces if grouped else shards.pieces
        name = "group_pieces" if grouped else "pieces"
        monkeypatch.setattr(shards, name, lambda *a, **k: cut(*a, **{**k, "target": 600}))
        monkeypatch.setattr(shards, "CHECKPOINT_NBYTES", 1200)
        make = self.repack if grouped else self.convert
        run = RunOptions(workers=1)
        make(run)
        expected = self.digest()
        for fuse in (3, 8, 15, 40):
            for path in list(tmp_path.iterdir()):
                if path.name != "in":
                    remove(path)
            self.kill_after(fuse, make, run)
            if self.target.exists():
                assert self.digest() == expected
            make(RunOptions(workers=2, overwrite=True))
            assert self.digest() == expected
            assert not [p for p in tmp_path.iterdir() if "partial" in p.name]

    def kill_after(self, fuse: int, make, run: RunOptions) -> None:
        """Make the output in a child that is killed at its step number `fuse`."""

        def work() -> None:
            around = kill_at(fuse)
            around(transfer.ShardCopy, "_copy")
            for name in ("save", "publish", "discard"):
                around(staging.Staging, name)
            make(run)

        forked(work)
