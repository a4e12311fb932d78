"""What dsprep reaches: every goal of its design, each beside its limit in the same run.

    python examples/throughput.py --list
    python examples/throughput.py --directory /fast/scratch --keep            # all rows, some time
    python examples/throughput.py --rows reader convert-lmdb --runs 7 --json figures.json
    python examples/throughput.py train.h5 --rows convert repack              # your own data

A row compares something with its limit: the Reader with plain ``preadv``, a conversion with ``cp``
of the source and fsync, and so on. The two take turns, in pairs; printed are the median of the
ratios (limit's seconds / dsprep's, so 1.00 is the limit) and the lowest and highest. A first pair
does not count. Rows of another unit say which. Data are made once, in a temporary directory or in
``--directory``, which decides what storage is measured; ``--keep`` leaves them there for the next
run. Cold means dropped from this machine's page cache; a file server keeps its own. Ratios of an
idle machine say more than those of a busy one.
"""

from __future__ import annotations

import argparse
import asyncio
import compileall
import ctypes
import json
import math
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import h5py
import lmdb
import numpy as np

import dsprep
from dsprep import executors

PEERS = {
    path.stem.removeprefix("use_"): f"{path}:make"
    for path in sorted((Path(__file__).parent / "peers").glob("use_*.py"))
} | {"tfrecord": "tfrecord", "torch": "torch"}
SUFFIXES = {"hdf5": ".h5", "lmdb": ".lmdb", "tfrecord": ".tfrecord", "zarr": ".zarr"}
SEVERAL = {**SUFFIXES, "zip": ".zarr.zip"}  # what repack writes
IOV_MAX = 1024
BATCH = 256

now = time.perf_counter


@dataclass
class Figure:
    """What a row found: a value for each pair of runs, and remarks."""

    values: list[float]
    words: str = ""


@dataclass
class Row:
    """A goal, and how it is measured."""

    name: str
    run: Callable[..., Figure]
    goal: str
    words: str
    given: dict[str, Any] = field(default_factory=dict)


# --- data -----------------------------------------------------------------------------------------


@dataclass
class Lab:
    """Where and how to measure; each dataset is made when it is first asked for."""

    folder: Path
    options: argparse.Namespace
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))

    @property
    def nbytes(self) -> int:
        return int(self.options.gigabytes * 1e9)

    @property
    def sample(self) -> int:
        return round(self.options.sample_kb * 1e3)

    def made(self, name: str, file: str, make: Callable[[Path], object]) -> Path:
        """Return a file that `make` writes, unless it is there; its directory appears complete."""
        folder = self.folder / name
        if not folder.exists():
            print(f"making {name}", file=sys.stderr, flush=True)
            partial_ = self.folder / f"{name}.partial"
            shutil.rmtree(partial_, ignore_errors=True)
            partial_.mkdir(parents=True)
            make(partial_ / file)
            for path in filter(Path.is_file, partial_.rglob("*")):
                sync(path)
            partial_.rename(folder)
        return folder / file

    def arrays(self, name: str, count: int, **fields: tuple[tuple[int, ...], str]) -> Path:
        """Return an HDF5 file of so many samples, without sidecar; shape and dtype by field."""

        def make(path: Path) -> None:
            with h5py.File(path, "w") as out:
                for key, (shape, dtype) in fields.items():
                    whole = out.create_dataset(key, (count, *shape), dtype)
                    step = max(1, (16 << 20) // (whole.dtype.itemsize * math.prod(shape)))
                    block = 1e6 * np.random.default_rng(0).random((step, *shape))
                    for i in range(0, count, step):
                        whole[i : i + step] = np.roll(block, i + 1)[: count - i].astype(dtype)

        return self.made(f"{name}-{count}", "data.h5", make)

    def plain(self, sample: int | None = None, **more: tuple[tuple[int, ...], str]) -> Path:
        """Return samples of ``x``, float32[n, 3], and ``y``, float32[19]."""
        rows = max(1, (sample or self.sample) // 12)
        name = "-".join(["plain", str(12 * rows), *more])
        count = max(8, self.nbytes // (12 * rows + 76))
        return self.arrays(name, count, x=((rows, 3), "f4"), y=((19,), "f4"), **more)

    def source(self, sample: int | None = None, format: str = "hdf5") -> Path:
        """Return what is converted: the user's own data, if some were given."""
        plain = self.options.data or self.plain(sample)
        if format == "hdf5":
            return plain
        name = f"{'own' if self.options.data else plain.parent.name}-{format}"
        file = f"data{SUFFIXES[format]}"
        return self.made(name, file, lambda out: dsprep.convert(plain, out, to=format))

    def grouped(self, plain: Path, group: int) -> Groups:
        """Return a dataset repacked to groups of so many bytes."""
        with dsprep.open(plain) as opened:
            each = group // opened.schema.fixed_nbytes
        name, repack = f"{plain.parent.name}-groups-{each}", partial(dsprep.repack, plain)
        return Groups.of(self.made(name, "data.h5", partial(repack, buffer_size=each)), each)

    def database(self, sample: int) -> Path:
        """Return an LMDB database as users write them: py-lmdb, a commit every 1000 records."""
        count = max(256, self.nbytes // sample)

        def make(path: Path) -> None:
            rng = np.random.default_rng(0)
            with lmdb.open(str(path), map_size=1 << 40, sync=False) as env:
                for start in range(0, count, 1000):
                    with env.begin(write=True) as txn:
                        for i in range(start, min(start + 1000, count)):
                            txn.put(b"%08d" % i, rng.bytes(sample), append=True)
                env.sync(True)

        return self.made(f"database-{sample}-{self.nbytes}", "data.lmdb", make)

    def ragged(self, sample: int = 0) -> Path:
        """Return an HDF5 file of rows of float32[3] of another number for each sample."""
        size = sample or self.sample

        def make(path: Path) -> None:
            rng = np.random.default_rng(0)
            most = max(2, size // 6)
            counts = rng.integers(1, most, max(8, self.nbytes // (6 * most)))
            first = np.concatenate([[0], np.cumsum(counts)[:-1]])
            with h5py.File(path, "w") as out:
                x = out.create_group("x")
                x["first"], x["count"] = first, counts
                x["values"] = rng.random((int(counts.sum()), 3), np.float32)

        return self.made(f"ragged-{size}-{self.nbytes}", "data.h5", make)


def sync(path: Path) -> None:
    """Wait until a file is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def files_of(path: Path) -> list[Path]:
    return [path] if path.is_file() else [p for p in sorted(path.rglob("*")) if p.is_file()]


def drop(path: Path) -> None:
    """Drop a dataset from the page cache."""
    for file in files_of(path):
        fd = os.open(file, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def warm(path: Path) -> None:
    """Read a dataset into the page cache."""
    room = memoryview(bytearray(8 << 20))
    for file in files_of(path):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(room):
                pass


def memory(nbytes: int) -> np.ndarray:
    """Return page-aligned memory that is there already, in huge pages where there are some."""
    held = mmap.mmap(-1, nbytes + (4 << 20))
    held.madvise(mmap.MADV_HUGEPAGE)
    room = np.frombuffer(held, np.uint8)
    at = -room.ctypes.data % (2 << 20)
    room = room[at : at + nbytes]
    room[::4096] = 0
    return room


# --- measuring ------------------------------------------------------------------------------------


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = now()
    work()
    return now() - began


def paired(
    lab: Lab,
    limit: Callable[[int], float],
    measured: Callable[[int], float],
    before: Callable[[], object] = lambda: None,
) -> tuple[list[float], float, float]:
    """Let both take turns, called with the number of the run; each returns its seconds.

    Returns the ratios, and the fewest seconds of either.
    """
    ratios, best = [], [float("inf")] * 2
    for run in range(lab.options.runs + 1):
        seconds = [0.0, 0.0]
        for which in (0, 1) if run % 2 else (1, 0):
            before()
            seconds[which] = (limit, measured)[which](run)
        if run:
            ratios.append(seconds[0] / seconds[1])
            best = [min(pair) for pair in zip(best, seconds, strict=True)]
    return ratios, *best


def rates(nbytes: int, limit: float, measured: float, name: str = "limit") -> str:
    return f"{name} {nbytes / limit / 1e9:.2f} GB/s, dsprep {nbytes / measured / 1e9:.2f}"


# --- the Reader -----------------------------------------------------------------------------------


@dataclass
class Groups:
    """A repacked dataset in one file, and the ranges of its groups."""

    path: Path
    columns: list[list[tuple[int, int, int]]]  # offset, bytes, samples of each field of each group

    @classmethod
    def of(cls, path: Path, each: int) -> Groups:
        columns = []
        with dsprep.Sidecar.open(path) as sidecar:
            for start in range(0, len(sidecar), each):
                columns.append([])
                for name in sidecar.schema.names:
                    offset, length = sidecar.locate(slice(start, start + each), name)[2:]
                    nbytes = int(offset[-1] + length[-1] - offset[0])
                    columns[-1].append((int(offset[0]), nbytes, len(offset)))
        return cls(path, columns)

    @property
    def nbytes(self) -> int:
        return sum(nbytes for columns in self.columns for _, nbytes, _ in columns)

    @cached_property
    def ranges(self) -> list[tuple[int, int]]:
        """Offset and bytes of each group."""
        found = []
        for columns in self.columns:
            start = min(offset for offset, _, _ in columns)
            found.append((start, max(offset + n for offset, n, _ in columns) - start))
        return found


def epoch(reader: dsprep.Reader) -> float:
    """Run through an epoch; return seconds."""
    began, samples, name = now(), 0, reader.schema.names[-1]
    for batch in reader:
        samples += len(batch[name])
    assert samples == reader.samples
    return now() - began


def by_threads(threads: int, items: Sequence, work: Callable) -> float:
    """Have threads, each with its number, work on what they take of some items; return seconds."""
    shared = iter(items)
    workers = [threading.Thread(target=work, args=(k, shared)) for k in range(1, threads)]
    began = now()
    for worker in workers:
        worker.start()
    work(0, shared)
    for worker in workers:
        worker.join()
    return now() - began


def plain_reads(groups: Groups, threads: int, scatter: bool) -> Callable[..., float]:
    """Return what reads all groups by preadv, each thread into one of two buffers in turn.

    With `scatter` samples go to permuted slots, which are prepared here; else a group is one range.
    It takes a seed of the order of the groups, or None, and returns seconds.
    """
    rng = np.random.default_rng(0)

    def room(start: int, columns: list[tuple[int, int, int]]) -> list[tuple[int, list]]:
        """Return offsets from that of the group, and where to read to, at most IOV_MAX slots."""
        if not scatter:
            return [(0, [memory(max(n for _, n in groups.ranges))])]
        found = []
        for offset, nbytes, count in columns:
            view, each = memoryview(memory(nbytes)), nbytes // count
            order = rng.permutation(count).tolist()
            for first in range(0, count, IOV_MAX):
                some = [view[i * each : (i + 1) * each] for i in order[first : first + IOV_MAX]]
                found.append((offset - start + first * each, some))
        return found

    first = groups.ranges[0][0], groups.columns[0]
    rooms = [[room(*first) for _ in range(2)] for _ in range(threads)]
    last = len(groups.ranges) - 1 if scatter else -1  # it may be shorter
    last_room = room(groups.ranges[-1][0], groups.columns[-1])

    def read(seed: int | None = None) -> float:
        order = range(len(groups.ranges))
        if seed is not None:
            order = np.random.default_rng(seed).permutation(len(groups.ranges)).tolist()

        def work(k: int, shared: Iterator[int]) -> None:
            for turn, number in enumerate(shared):
                offset, nbytes = groups.ranges[number]
                for at, slots in last_room if number == last else rooms[k][turn % 2]:
                    if scatter:
                        done = os.preadv(file.fileno(), slots, offset + at)
                        assert done == sum(map(len, slots))
                        continue
                    while at < nbytes:
                        at += os.preadv(file.fileno(), [slots[0][at:nbytes]], offset + at)

        with groups.path.open("rb", buffering=0) as file:
            return by_threads(threads, order, work)

    return read


def reader(lab: Lab, threads: int | None = None, cold: bool = False, small: bool = False) -> Figure:
    sample, group = (3072, 8 << 20) if small else (None, 40_000_000)
    groups = lab.grouped(lab.plain(sample), group)
    arguments = {} if threads is None else {"io_threads": threads}
    plain = plain_reads(groups, 1 if cold else threads or lab.cores, small)
    warm(groups.path)
    with dsprep.Reader(groups.path, BATCH, rank=0, world_size=1, **arguments) as opened:
        found, *best = paired(
            lab,
            lambda run: plain(None if cold else run),
            lambda run: epoch(opened),
            partial(drop, groups.path) if cold else int,
        )
        return Figure(found, f"{rates(groups.nbytes, *best)} by {opened.threads}")


def first_batch(lab: Lab) -> Figure:
    groups, found = lab.grouped(lab.plain(), 5_000_000), []
    warm(groups.path)
    with dsprep.Reader(groups.path, BATCH, rank=0, world_size=1) as opened:
        epoch(opened)  # imports, and takes memory
        for _ in range(20 * lab.options.runs):
            began = now()
            loop = iter(opened)
            next(loop)
            found.append(1e3 * (now() - began))
            loop.close()
    return Figure(found, "median of so many loops")


def first_epoch(lab: Lab) -> Figure:
    groups = lab.grouped(lab.plain(), 40_000_000)
    warm(groups.path)

    def first(run: int) -> float:
        arguments = {"rank": 0, "world_size": 1}
        with dsprep.Reader(groups.path, BATCH, **arguments) as opened:
            return epoch(opened)

    with dsprep.Reader(groups.path, BATCH, rank=0, world_size=1) as opened:
        epoch(opened), epoch(opened)
        found, *best = paired(lab, lambda run: epoch(opened), first)
    return Figure(found, rates(groups.nbytes, *best, "later ones"))


def reader_tiny(lab: Lab) -> Figure:
    plain = lab.arrays("tiny", max(4096, 2 * lab.nbytes // 104), x=((25,), "f4"), y=((), "i4"))
    groups, batch = lab.grouped(plain, 32 << 20), 4096
    room = memory(max(n for _, n in groups.ranges))
    into = [memory(nbytes) for _, nbytes, _ in groups.columns[0]]
    rng = np.random.default_rng(0)

    def limit(run: int) -> float:
        began = now()
        with groups.path.open("rb", buffering=0) as file:
            for number in rng.permutation(len(groups.columns)).tolist():
                (start, nbytes), columns = groups.ranges[number], groups.columns[number]
                assert os.preadv(file.fileno(), [room[:nbytes]], start) == nbytes
                order = rng.permutation(columns[0][2])
                for (offset, n, count), out in zip(columns, into, strict=True):
                    rows = room[offset - start : offset - start + n].reshape(count, -1)
                    rows = rows.view(np.dtype((np.void, rows.shape[1])))[:, 0]
                    np.take(rows, order, out=out[:n].view(rows.dtype), mode="clip")
                for first in range(0, len(order), batch):
                    {k: out[first : first + batch] for k, out in enumerate(into)}
        return now() - began

    warm(groups.path)
    with dsprep.Reader(groups.path, batch, rank=0, world_size=1) as opened:
        found, *best = paired(lab, limit, lambda run: epoch(opened))
        return Figure(found, rates(groups.nbytes, *best))


def images(lab: Lab, threads: int) -> Figure:
    """Compare with open, read and close, each thread into one of as many buffers as it needs."""
    count, each, batch = max(64, lab.nbytes // 90_000), 90_000, 64

    def make(folder: Path) -> None:
        rng = np.random.default_rng(0)
        for i in range(count):
            path = folder / f"c{i * 10 // count}" / f"{i:07d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"\xff\xd8\xff\xe0\x00\x10JFIF\x00" + rng.bytes(each - 10))
        dsprep.provenance(folder, labels="folders")

    path = lab.made("images", "data", make)
    paths = [os.fspath(file) for file in files_of(path)]
    rooms = [memory(max(64, (64 << 20) // each) * each).reshape(-1, each) for _ in range(threads)]

    def limit(run: int) -> float:
        def work(k: int, shared: Iterator[str]) -> None:
            for i, name in enumerate(shared):
                fd = os.open(name, os.O_RDONLY)
                assert os.readv(fd, [rooms[k][i % len(rooms[k])]]) == each
                os.close(fd)

        order = np.random.default_rng(run).permutation(len(paths)).tolist()
        return by_threads(threads, [paths[i] for i in order], work)

    warm(path)
    arguments = {"rank": 0, "world_size": 1, "io_threads": threads}
    with dsprep.Reader(path, batch, **arguments) as opened:
        found, *best = paired(lab, limit, lambda run: epoch(opened))
    return Figure(found, rates(count * each, *best))


def exposed(lab: Lab) -> Figure:
    groups = lab.grouped(lab.plain(), 40_000_000)
    warm(groups.path)
    found = []
    with dsprep.Reader(groups.path, BATCH, rank=0, world_size=1) as opened:
        work = max(0.002, 2 * min(epoch(opened), epoch(opened)) / opened.steps_per_epoch)
        for _ in range(lab.options.runs):
            for _ in opened:
                time.sleep(work)
            last = opened.stats[-1]
            found.append(last.exposed_seconds - last.first_seconds)
        batches = opened.steps_per_epoch
    each = 1e3 * statistics.median(found) / batches
    return Figure(found, f"{batches} batches of {1e3 * work:.1f} ms; {each:.3f} ms a batch")


# --- samples through the sidecar ------------------------------------------------------------------


def located(lab: Lab) -> Path:
    """Return an HDF5 dataset with three fields and its sidecar."""
    path = lab.plain(z=((), "i8"))
    if not path.with_name("data.h5.dsprep.json").exists():
        dsprep.provenance(path)
    return path


def sample(lab: Lab, fields: Sequence[str]) -> Figure:
    path, count = located(lab), 1000
    rng, found = np.random.default_rng(0), []
    with dsprep.Sidecar.open(path) as sidecar, path.open("rb") as file:
        ranges = [tuple(a.tolist() for a in sidecar.locate(slice(None), n)[2:]) for n in fields]
        warm(path)
        bare = []
        for _ in range(lab.options.runs + 1):
            order, began = rng.integers(0, len(sidecar), count).tolist(), now()
            for i in order:
                sidecar.read([i], fields)
            half = now()
            for i in order:
                for offset, length in ranges:
                    os.preadv(file.fileno(), [np.empty(length[i], np.uint8)], offset[i])
            found.append(1e6 * (half - began) / count)
            bare.append(1e6 * (now() - half) / count)
    return Figure(found[1:], f"a bare loop {statistics.median(bare[1:]):.1f} us")


def batch(lab: Lab, fields: Sequence[str], flight: int = 0) -> Figure:
    path, batches = located(lab), 8 if flight else 40
    with dsprep.Sidecar.open(path) as sidecar, path.open("rb") as file:
        ranges = [tuple(a.tolist() for a in sidecar.locate(slice(None), n)[2:]) for n in fields]
        each = sum(length[0] for _, length in ranges)
        room = memory(BATCH * each)
        ring = Flight(file.fileno(), flight) if flight else None

        def orders(run: int) -> list[list[int]]:
            order = np.random.default_rng(run).permutation(len(sidecar))[: batches * BATCH]
            return [part.tolist() for part in np.array_split(order, batches)]

        def limit(run: int) -> float:
            view, some = memoryview(room), orders(run)
            began = now()
            for order in some:
                if ring is not None:
                    ring.read(np.take(ranges[0][0], order), room, ranges[0][1][0])
                    continue
                at = 0
                for offset, length in ranges:
                    for i in order:
                        os.preadv(file.fileno(), [view[at : at + length[i]]], offset[i])
                        at += length[i]
            return now() - began

        def measured(run: int) -> float:
            some, arena = orders(run), dsprep.Arena()
            return timed(lambda: [sidecar.read(order, fields, arena=arena) for order in some])

        warm(path)
        nothing = partial(drop, path) if flight else int
        found, *best = paired(lab, limit, measured, nothing)
    words = rates(BATCH * batches * each, *best)
    return Figure(found, words if ring is None else f"{words}, {ring.words}")


class Flight:
    """Reads of one size, many of them in flight: by io_uring, else by so many threads."""

    def __init__(self, fd: int, depth: int) -> None:
        self.fd, self.words = fd, "by io_uring"
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._call.restype = ctypes.c_long
        asked = np.zeros(30, "<u4")  # struct io_uring_params
        self._ring = self._call(425, depth, ctypes.c_void_p(asked.ctypes.data))
        if self._ring < 0:
            self.words = f"by {min(depth, 32)} threads"
            return
        self._entries, results = int(asked[0]), int(asked[1])
        sq, cq = asked[10:20].tolist(), asked[20:30].tolist()
        rings = mmap.mmap(self._ring, max(sq[6] + 4 * self._entries, cq[5] + 16 * results))
        words = np.frombuffer(rings, "<u4")
        self._tail, self._head, self._done = (words[i // 4 :] for i in (sq[1], cq[0], cq[1]))
        words[sq[6] // 4 :][: self._entries] = np.arange(self._entries)
        self._results = np.frombuffer(rings, "<i4", 4 * results, cq[5]).reshape(-1, 4)
        submit = mmap.mmap(self._ring, 64 * self._entries, offset=0x10000000)
        self._submit = np.frombuffer(submit, "<u8").reshape(-1, 8)

    def read(self, offsets: np.ndarray, room: np.ndarray, nbytes: int) -> None:
        """Read `nbytes` from each offset, as many as the depth, into consecutive slots."""
        count = len(offsets)
        if self._ring < 0:
            view = memoryview(room)

            def work(k: int, shared: Iterator[int]) -> None:
                for i in shared:
                    slot = view[i * nbytes : (i + 1) * nbytes]
                    assert os.preadv(self.fd, [slot], offsets[i]) == nbytes

            by_threads(min(count, 32), range(count), work)
            return
        some = np.zeros((count, 8), "<u8")
        some[:, 0] = 22 | self.fd << 32  # IORING_OP_READ
        some[:, 1] = offsets
        some[:, 2] = room.ctypes.data + nbytes * np.arange(count, dtype="<u8")
        some[:, 3] = nbytes
        self._submit[(int(self._tail[0]) + np.arange(count)) % self._entries] = some
        self._tail[0] += count
        submit, wanted = count, count
        while wanted:
            entered = self._call(426, self._ring, submit, wanted, 1, None, 0)
            assert entered >= 0, os.strerror(ctypes.get_errno())
            submit -= entered
            head = int(self._head[0])
            came = (int(self._done[0]) - head) % 2**32
            at = (head + np.arange(came)) % len(self._results)
            assert (self._results[at, 2] == nbytes).all()
            self._head[0] += came
            wanted -= came


def lmdb_cold(lab: Lab, single: bool = False) -> Figure:
    path, group, few = lab.database(lab.sample), 256, 500
    if not path.with_name("data.lmdb.dsprep.json").exists():
        dsprep.provenance(path)

    def gets(run: int) -> float:
        with lmdb.open(str(path), readonly=True, lock=False, readahead=False) as env:
            order = np.random.default_rng(run).permutation(env.stat()["entries"])[:few].tolist()
            began = now()
            with env.begin(buffers=True) as txn:
                for i in order:
                    np.frombuffer(txn.get(b"%08d" % i), np.uint8).copy()
            return (now() - began) / len(order)

    def reads(run: int) -> float:
        rng = np.random.default_rng(run)
        with dsprep.Sidecar.open(path) as sidecar:
            sidecar.read(0)  # imports and opens
            arena, count = dsprep.Arena(), len(sidecar)
            starts = rng.permutation(np.arange(0, count, group)).tolist()
            began = now()
            if single:
                for i in (order := rng.permutation(count)[:few].tolist()):
                    sidecar.read(i)
                return (now() - began) / len(order)
            for start in starts:
                part = sidecar.read(slice(start, min(start + group, count)), arena=arena)
                rng.permutation(len(part["value"]))  # the order in which they are handed out
            return (now() - began) / count

    found, get, read = paired(lab, gets, reads, partial(drop, path))
    return Figure(found, f"{1 / get:,.0f} gets/s, dsprep {1 / read:,.0f} samples/s")


# --- other loaders --------------------------------------------------------------------------------


def peer(lab: Lab, name: str) -> Figure:
    """Compare the Reader with another loader on its own format, by ``dsprep bench read``."""
    report = lab.folder / f"{name}.json"
    command = [sys.executable, "-m", "dsprep", "bench", "read", str(lab.plain()), "-q"]
    command += [
        "--warm",
        "--threads",
        "2",
        "-M",
        str(BATCH),
        "-r",
        "2",
        "--sweep",
        f"epochs={lab.options.runs}",
    ]
    command += ["-s", "dsprep", "-s", PEERS[name], "--limit", "all", "--json", str(report)]
    command += ["--scratch", str(lab.folder / "forms")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not report.exists():
        raise OSError(done.stderr.strip() or f"bench read ended with {done.returncode}")
    rows = {row["name"]: row for row in json.loads(report.read_text())["strategies"]}
    report.unlink()
    if rows[PEERS[name]]["problems"]:
        raise OSError("; ".join(rows[PEERS[name]]["problems"]))
    ours, theirs = (rows[n]["measures"]["gb_per_second"] for n in ("dsprep", PEERS[name]))
    ends = (("least", "most"), ("value", "value"), ("most", "least"))
    words = f"{name} {theirs['value']:.2f} GB/s, dsprep {ours['value']:.2f}"
    return Figure([ours[a] / theirs[b] for a, b in ends], words)


# --- writing --------------------------------------------------------------------------------------


def against(
    lab: Lab, source: Path, suffix: str, limit: Callable, write: Callable, name: str
) -> Figure:
    """Compare writing a dataset with its limit; both get the path of the output."""
    out = lab.folder / f"out{suffix}"

    def clear() -> None:
        for path in lab.folder.glob("out*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    warm(source)
    found, *best = paired(
        lab, lambda run: timed(partial(limit, out)), lambda run: timed(partial(write, out)), clear
    )
    clear()
    nbytes = sum(file.stat().st_size for file in files_of(source))
    return Figure(found, rates(nbytes, *best, name=name))


def against_cp(lab: Lab, source: Path, suffix: str, write: Callable[[Path], object]) -> Figure:
    """Compare writing a dataset with `cp` of its source, both until all is on the disk."""

    def copied(out: Path) -> None:
        subprocess.run(["cp", "-r", "--reflink=never", str(source), str(out)], check=True)
        for file in files_of(out):
            sync(file)

    return against(lab, source, suffix, copied, write, "cp")


def convert(lab: Lab, to: str, format: str = "hdf5", ragged: int | None = None) -> Figure:
    """Convert samples of one size; or `ragged` ones of so many bytes, 0: as the others."""
    source = lab.source(format=format) if ragged is None else lab.ragged(ragged)
    return against_cp(lab, source, SUFFIXES[to], partial(dsprep.convert, source, to=to))


def processes(lab: Lab) -> Figure:
    """Convert to eight files by two processes, which are started before; of two threads."""
    source = lab.source()
    size = f"{source.stat().st_size // 8}B"
    cut = partial(dsprep.convert, source, to="hdf5", shard_size=size)
    with executors.opened("processes", workers=2) as pool:
        by_processes, by_threads = partial(cut, executor=pool), partial(cut, workers=2)
        return against(lab, source, "", by_threads, by_processes, "threads")


def write(lab: Lab, to: str, known: bool) -> Figure:
    """Write samples that a generator gives, views of arrays; of converting the same ones."""
    source = lab.source()
    with dsprep.open(source) as opened:
        arrays, count = opened[:], len(opened)

    def written(out: Path) -> None:
        samples = ({name: column[i] for name, column in arrays.items()} for i in range(count))
        dsprep.write(out, samples, length=count if known else None)

    return against(
        lab, source, SUFFIXES[to], partial(dsprep.convert, source, to=to), written, "convert"
    )


def repack(lab: Lab, to: str, sample: int | None = None) -> Figure:
    source, size = lab.source(sample), lab.options.buffer_size
    return against_cp(lab, source, SEVERAL[to], partial(dsprep.repack, source, buffer_size=size))


def shuffle(lab: Lab) -> Figure:
    source = lab.source()
    memory = max(52 << 20, source.stat().st_size // 8)
    write = partial(dsprep.repack, source, shuffle=0, memory=memory, buffer_size=f"{memory // 16}B")
    return against_cp(lab, source, ".h5", write)


# --- object stores --------------------------------------------------------------------------------


@contextmanager
def served(*paths: Path) -> Iterator[str]:
    """Serve files as objects, 30 ms to the first byte and 100 MB/s a stream; yield their bucket."""
    program = Path(__file__).resolve().parents[1] / "tests" / "object_server.py"
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            url, bucket = f"http://127.0.0.1:{port}", f"b{port}"
            objects = {f"{bucket}/{path.name}": path.read_bytes() for path in paths}
            for name, data in ({bucket: b""} | objects).items():
                request = urllib.request.Request(f"{url}/{name}", method="PUT")
                urllib.request.urlopen(request, data).close()
            urllib.request.urlopen(f"{url}/-set?latency=0.03&bandwidth=1e8").close()
            os.environ |= {
                "AWS_ENDPOINT_URL": url,
                "AWS_REGION": "none",
                "AWS_ACCESS_KEY_ID": "none",
                "AWS_SECRET_ACCESS_KEY": "none",
            }
            yield f"s3://{bucket}"
        finally:
            server.kill()


def ranges_of_objects(bucket: str) -> Callable[..., float]:
    """Return what gets ranges of an object, so many in flight, and drops them; it returns seconds.

    That is what a program does by hand.
    """
    import obstore
    from obstore.store import from_url

    store = from_url(bucket, client_options={"allow_http": True, "pool_max_idle_per_host": "256"})

    def read(key: str, ranges: Sequence[tuple[int, int]], flight: int) -> float:
        async def run() -> None:
            turn = asyncio.Semaphore(flight)

            async def get(start: int, nbytes: int) -> None:
                async with turn:
                    body = await obstore.get_range_async(store, key, start=start, length=nbytes)
                    assert len(body) == nbytes

            await asyncio.gather(*(get(*each) for each in ranges))

        return timed(lambda: asyncio.run(run()))

    return read


def objects_groups(lab: Lab) -> Figure:
    groups = lab.grouped(lab.plain(), 4_900_000)
    path, sizes = groups.path, ((1 << 20, 64), (2 << 20, 64), (4 << 20, 32))
    sidecar = path.with_name(f"{path.name}.dsprep.json")
    with served(path, sidecar) as bucket:
        plain, nbytes = ranges_of_objects(bucket), groups.nbytes

        def limit(run: int) -> float:
            each, flight = sizes[run % 3]
            cuts = range(0, nbytes, each)
            return plain(path.name, [(a, min(each, nbytes - a)) for a in cuts], flight)

        def measured(run: int) -> float:
            with dsprep.Reader(f"{bucket}/{path.name}", 64) as opened:
                return epoch(opened)

        found, *best = paired(lab, limit, measured)
    return Figure(found, rates(nbytes, *best, name="loop"))


def objects_batch(lab: Lab, fields: Sequence[str]) -> Figure:
    path = located(lab)
    with served(path, path.with_name(f"{path.name}.dsprep.json")) as bucket:
        plain = ranges_of_objects(bucket)
        with dsprep.Sidecar.open(f"{bucket}/{path.name}") as sidecar:
            where = [tuple(a.tolist() for a in sidecar.locate(slice(None), n)[2:]) for n in fields]

            def order(run: int) -> list[int]:
                return np.random.default_rng(run).permutation(len(sidecar))[:BATCH].tolist()

            def limit(run: int) -> float:
                some = [(offset[i], length[i]) for offset, length in where for i in order(run)]
                return plain(path.name, some, (64, 128, 256)[run % 3])

            found, *best = paired(
                lab, limit, lambda run: timed(lambda: sidecar.read(order(run), fields))
            )
    words = f"loop {1e3 * best[0]:.0f} ms, dsprep {1e3 * best[1]:.0f}"
    return Figure(found, words)


def objects_repack(lab: Lab) -> Figure:
    path = located(lab)
    with served(path, path.with_name(f"{path.name}.dsprep.json")) as bucket:
        import obstore
        from obstore.store import from_url

        store = from_url(bucket, client_options={"allow_http": True})
        plain, nbytes = ranges_of_objects(bucket), path.stat().st_size
        cuts = [(a, min(4 << 20, nbytes - a)) for a in range(0, nbytes, 4 << 20)]

        def limit(run: int) -> float:
            there = plain(path.name, cuts, 32)  # and what came is here, as it would be
            put = partial(obstore.put, store, "copy", path, chunk_size=16 << 20, max_concurrency=8)
            return there + timed(put)

        def measured(run: int) -> float:
            source, target = f"{bucket}/{path.name}", f"{bucket}/out.h5"
            repack = partial(dsprep.repack, source, target, overwrite=True, buffer_size="8MiB")
            return timed(repack)

        found, *best = paired(lab, limit, measured)
    return Figure(found, rates(nbytes, *best, name="down and up"))


# --- sidecars, memory, start ----------------------------------------------------------------------


def index(lab: Lab, sample: int) -> Figure:
    path, found = lab.database(sample), []
    with (path / "data.mdb").open("rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
    for _ in range(lab.options.runs + 1):
        drop(path)
        before = fetched()
        dsprep.provenance(path, write=False)
        found.append(100 * (fetched() - before) / nbytes)
    return Figure(found[1:], "by the kernel from the storage, read-ahead included")


def fetched() -> int:
    """Return the bytes that the storage gave this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def billion(lab: Lab) -> Path:
    """Return an HDF5 file of 1e9 samples, most of it a hole, with its sidecar."""

    def make(path: Path) -> None:
        with h5py.File(path, "w") as out:
            x = out.create_dataset("x", (10**9, 25), "f4", fill_time="never")
            x[-1] = 1
        dsprep.provenance(path)

    return lab.made("billion", "data.h5", make)


def sidecar_bytes(lab: Lab) -> Figure:
    return Figure([billion(lab).with_name("data.h5.dsprep.json").stat().st_size])


def sidecar_open(lab: Lab) -> Figure:
    path, found = billion(lab), []
    for _ in range(lab.options.runs + 1):
        began = now()
        with dsprep.Sidecar.open(path):
            found.append(1e3 * (now() - began))
    return Figure(found[1:])


def sidecar_lookups(lab: Lab) -> Figure:
    indices = np.random.default_rng(0).integers(0, 10**9, 10**6)
    with dsprep.Sidecar.open(billion(lab)) as sidecar:
        found = [timed(lambda: sidecar.locate(indices, "x")) for _ in range(lab.options.runs + 1)]
    return Figure([len(indices) / seconds / 1e6 for seconds in found[1:]])


FIRST = """
import resource, sys, time, dsprep
Reader, began = dsprep.Reader, time.perf_counter()
with Reader(sys.argv[1], 256, rank=0, world_size=1) as reader:
    next(iter(reader))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(time.perf_counter() - began, peak)
"""


def billion_reader(lab: Lab) -> Figure:
    """Seconds to the first batch of 1e9 samples, in a process of its own that has imported all."""
    command = [sys.executable, "-c", FIRST, str(billion(lab))]
    printed = [subprocess.check_output(command, text=True).split() for _ in range(3)]
    return Figure([float(words[0]) for words in printed], f"{float(printed[-1][1]):.0f} MB in all")


CHILD = """
import sys, dsprep
def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
what, source, target, asked = sys.argv[1:]
if what == "reader":
    with dsprep.Reader(source, 256, rank=0, world_size=1, epochs=2) as reader:
        for _ in range(2):
            for batch in reader:
                pass
else:
    getattr(dsprep, what)(source, target, memory=int(asked), durable=False, overwrite=True)
print(peak())
"""


def peak(lab: Lab, what: str) -> Figure:
    asked, found, last = 64 << 20, [], 0
    for _ in range(min(3, lab.options.runs)):
        peaks = []
        for part in (0.25, 1.0):
            some = Lab(lab.folder, argparse.Namespace(**vars(lab.options)))
            some.options.gigabytes *= part
            out = lab.folder / "out.h5"
            source = some.grouped(some.plain(), 8 << 20).path if what == "reader" else some.plain()
            command = [sys.executable, "-c", CHILD, what, str(source), str(out), str(asked)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            peaks.append(int(done.stdout) * 1024)
            for path in lab.folder.glob("out*"):
                path.unlink()
        found.append((peaks[1] - peaks[0]) / 1e6)
        last = peaks[1]
    buffers = "2 groups of 8 MiB" if what == "reader" else f"--memory {asked / 1e6:.0f} MB"
    return Figure(found, f"{last / 1e6:.0f} MB in all, {buffers}")


def start(lab: Lab, word: str) -> Figure:
    compileall.compile_dir(Path(dsprep.__file__).parent, quiet=2)  # as installing does
    command = partial(
        subprocess.run, [sys.executable, "-m", "dsprep", word], capture_output=True, check=True
    )
    return Figure([timed(command) for _ in range(lab.options.runs + 1)][1:])


# --- the table ------------------------------------------------------------------------------------


def rows() -> Iterator[Row]:
    """Yield every row of the table of goals."""
    three = ("x", "y", "z")
    yield Row("reader-warm", reader, ">= 0.85", "default arguments, of preadv by all cores")
    yield Row("reader-warm-1", reader, ">= 0.95", "one thread, of preadv by one", {"threads": 1})
    yield Row("reader-cold", reader, ">= 0.98", "of a sequential read", {"cold": True})
    for n in (1, 2):
        given = {"threads": n, "small": True}
        yield Row(f"reader-3k-{n}", reader, ">= 0.9", "of as many threads of preadv", given)
    yield Row("first-batch", first_batch, "<= 2 ms", "of a loop, 5 MB groups")
    yield Row("first-epoch", first_epoch, ">= 0.95", "of a Reader, of its later ones, warm")
    yield Row("reader-tiny", reader_tiny, ">= 0.8", "104 B samples, of one read and take")
    for n in (1, 2):
        words = "90 kB files in place, of open, read and close by as many threads"
        yield Row(f"image-folder-{n}", images, ">= 0.8", words, {"threads": n})
    for name in PEERS:
        goal = ">= 2" if name == "ffcv" else ">= 8"
        yield Row(f"peer-{name}", peer, goal, "dsprep / it, warm, two threads", {"name": name})
    yield Row("sample-1", sample, "<= 30 us", "Sidecar.read([i]), one field", {"fields": ("x",)})
    yield Row("sample-3", sample, "<= 60 us", "three fields", {"fields": three})
    yield Row("batch-1", batch, ">= 0.9", "256 random, of a preadv loop", {"fields": ("x",)})
    yield Row("batch-3", batch, ">= 0.9", "the same, three fields", {"fields": three})
    given = {"fields": ("x",), "flight": BATCH}
    yield Row("batch-cold", batch, ">= 0.9", "cold, of 256 reads in flight", given)
    yield Row("lmdb-cold", lmdb_cold, ">= 15", "LMDB in groups, cold, of py-lmdb gets")
    yield Row("lmdb-cold-single", lmdb_cold, "", "one pread a sample", {"single": True})
    yield Row("exposed", exposed, "<= 0.005 s", "waits of an epoch after its first batch")
    for to in SUFFIXES:
        yield Row(f"convert-{to}", convert, ">= 1", "HDF5, of cp", {"to": to})
    for to in SUFFIXES:
        given = {"to": to, "format": "tfrecord"}
        yield Row(f"tfrecord-{to}", convert, ">= 0.8", "from TFRecord, of cp", given)
    for to in SUFFIXES:
        goal = ">= 0.8" if to == "hdf5" else ">= 0.85"
        yield Row(f"ragged-{to}", convert, goal, "HDF5, of cp", {"to": to, "ragged": 0})
    for to in SUFFIXES:
        given = {"to": to, "ragged": 2000}
        yield Row(f"ragged-{to}-2k", convert, ">= 0.5", "samples of 2 kB, of cp", given)
    for to in SEVERAL:
        yield Row(f"repack-{to}", repack, ">= 0.95", "19 kB samples, of cp", {"to": to})
    for to in SEVERAL:
        given = {"to": to, "sample": 1 << 20}
        yield Row(f"repack-{to}-1M", repack, ">= 0.95", "1 MiB samples, of cp", given)
    for to in SUFFIXES:
        given = {"to": to, "known": True}
        yield Row(f"write-{to}", write, ">= 0.95", "dsprep.write with length, of convert", given)
    for to in SUFFIXES:
        given = {"to": to, "known": False}
        yield Row(f"write-unknown-{to}", write, ">= 0.85", "the same without length", given)
    yield Row(
        "processes", processes, ">= 1", "HDF5 in eight files by two processes, of two threads"
    )
    yield Row("shuffle", shuffle, ">= 0.5", "all samples, by 1/8 of the memory, of cp")
    yield Row("objects-groups", objects_groups, ">= 0.85", "first epoch, of a loop of get_range")
    given = {"fields": ("x",)}
    yield Row("objects-batch-1", objects_batch, ">= 0.9", "256 random, of such a loop", given)
    given = {"fields": ("x", "y")}
    yield Row("objects-batch-2", objects_batch, ">= 1.2", "the same, two fields", given)
    yield Row("objects-repack", objects_repack, ">= 0.8", "bucket to bucket, of down and up")
    yield Row("index-5k", index, "<= 1 %", "bytes read of an LMDB file", {"sample": 5000})
    yield Row("index-19k", index, "<= 1 %", "the same", {"sample": 19_200})
    yield Row("sidecar-bytes", sidecar_bytes, "<= 1024 B", "of 1e9 regular samples")
    yield Row("sidecar-open", sidecar_open, "<= 10 ms", "the same")
    yield Row("sidecar-lookups", sidecar_lookups, ">= 10 M/s", "random samples of 1e9")
    yield Row("reader-1e9", billion_reader, "<= 1 s", "opened, and the first batch of 1e9 samples")
    for what in ("convert", "repack", "reader"):
        yield Row(f"memory-{what}", peak, "<= 16 MB", "more for 4 times the data", {"what": what})
    for word in ("help", "version"):
        yield Row(word, start, "<= 0.3 s", "the process", {"word": f"--{word}"})


# --- the table ------------------------------------------------------------------------------------


def show(row: Row, found: Figure | str) -> None:
    """Print a line of the table."""
    if isinstance(found, str):
        print(f"{row.name:<22}{row.goal:>11}   not measured: {found}", flush=True)
        return
    median, low, high = statistics.median(found.values), min(found.values), max(found.values)
    digits = 2 if median < 100 else 0
    numbers = f"{median:>9.{digits}f}  ({low:.{digits}f} to {high:.{digits}f})"
    words = "; ".join(filter(None, (row.words, found.words)))
    print(f"{row.name:<22}{row.goal:>11}{numbers:<30}{words}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", nargs="?", type=Path, help="what to convert and repack; else made")
    parser.add_argument("--rows", nargs="+", default=[""], help="beginnings of their names")
    parser.add_argument("--runs", type=int, default=5, help="pairs of each row")
    parser.add_argument("--gigabytes", type=float, default=0.5, help="size of what is made")
    parser.add_argument("--sample-kb", type=float, default=19.2, help="its samples, mostly")
    parser.add_argument("--buffer-size", default="64MiB", help="groups of repack")
    parser.add_argument("--quick", action="store_true", help="16 MB and one pair, to try it")
    parser.add_argument("--directory", type=Path, help="where data are made, and so measured")
    parser.add_argument("--keep", action="store_true", help="leave them there for the next run")
    parser.add_argument("--json", type=Path, help="write all values")
    parser.add_argument("--list", action="store_true", help="name the rows, and stop")
    options = parser.parse_args()
    if options.quick:
        options.gigabytes, options.runs = min(options.gigabytes, 0.016), 1
    chosen = [row for row in rows() if row.name.startswith(tuple(options.rows))]
    if not chosen:
        sys.exit("throughput: there are no such rows; --list names all")
    if options.list:
        print(*(f"{row.name:<22}{row.goal:>11}  {row.words}" for row in chosen), sep="\n")
        return
    report = {}
    with tempfile.TemporaryDirectory(dir=options.directory) as temporary:
        folder = options.directory if options.keep and options.directory else Path(temporary)
        lab = Lab(folder, options)
        for row in chosen:
            try:
                found = row.run(lab, **row.given)
                words = "; ".join(filter(None, (row.words, found.words)))
                report[row.name] = {"goal": row.goal, "words": words, "values": found.values}
            except (dsprep.DsprepError, OSError, ImportError, subprocess.SubprocessError) as error:
                found = " ".join(str(error).split())
                report[row.name] = {"goal": row.goal, "words": row.words, "problem": found}
            show(row, found)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
