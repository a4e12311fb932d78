"""A worker of ``bench storage``: writes files, then times reads and opens by some threads.

Files are read as `dsprep.Reader` reads them: by its engine, in parts of its size, into memory that
has been touched. All times are of whole calls.
"""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from dsprep.bench import caches
from dsprep.bench.counters import fetched
from dsprep.reader.engines import make
from dsprep.reader.memory import anonymous
from dsprep.storage.durable import sync
from dsprep.storage.paths import open_file
from dsprep.storage.ranges import pwrite_all
from dsprep.storage.scatter import one_range
from dsprep.storage.trees import drop_cached

FILES, FILE_NBYTES = 1000, 4096
"""Small files that a worker writes to open them, and the bytes of each."""

PART = 8 << 20
"""Bytes that are written and brought to the storage at a time."""

READS = 2048
"""Reads that are timed in a phase, at most."""

T = TypeVar("T")

now = time.perf_counter


@dataclass(frozen=True, kw_only=True)
class Job:
    """The work of a worker in one phase."""

    folder: Path  # of one worker: its large file, and the small ones
    seconds: float  # after which nothing more is begun
    nbytes: int  # of the large file
    transfer: int = 1  # bytes of a read, of which the file has a whole number
    random: bool = True  # whether the reads are in random order, or one after another
    streams: int = 1  # threads, which share the reads
    engine: str = "buffered"
    start: float = 0.0  # the time (of the epoch) at which all workers begin


class Done(NamedTuple):
    """The times of a worker in one phase."""

    times: Sequence[float]  # seconds of each call
    per_second: float  # calls, of all threads
    late: float  # seconds that it began after the others
    device: int = 0  # bytes that the kernel counted
    resident: float | None = None  # share of the file in the page cache before; None: unknown
    node: str = ""  # the name of the machine


def write(job: Job) -> int:
    """Write the large file, durable and of random bytes, until time is over; then the small ones.

    Returns the bytes of the large one.

    Raises
    ------
    OSError
        If there is no space, or it cannot be written.
    """
    end, rng, written = now() + job.seconds, np.random.default_rng(), 0
    job.folder.mkdir()
    with (job.folder / "data").open("xb", buffering=0) as file:
        while written < job.nbytes and (not written or now() < end):
            part = rng.bytes(min(PART, job.nbytes - written))
            written += pwrite_all(file.fileno(), [part], written)
            sync(file.fileno(), data=True)
    for number in range(FILES):
        if not number or now() < end + job.seconds / 4:
            (job.folder / f"{number:04}").write_bytes(bytes(FILE_NBYTES))
    return written


def read(job: Job) -> Done:
    """Drop the large file from the page cache, and time reads of different parts of it.

    Raises
    ------
    Unavailable
        If the engine does not work here.
    OSError
        If it cannot be read.
    """
    path, count = job.folder / "data", job.nbytes // job.transfer
    drop_cached([path])
    resident = caches.resident([path])
    parts = np.random.default_rng(0).permutation(count) if job.random else np.arange(count)
    file, engine = open_file(path), make(job.engine)
    engine.prepare(file)
    memory = np.frombuffer(anonymous(job.streams * job.transfer), np.uint8)
    memory[::FILE_NBYTES] = 0

    def reader(number: int) -> Callable[[int], object]:
        address = memory.ctypes.data + number * job.transfer
        iovecs = np.array([[address, job.transfer]], np.int64)
        return lambda start: engine.read_runs(file, one_range(start, iovecs))

    device = fetched()
    readers = [reader(number) for number in range(job.streams)]
    done = timed(readers, (parts[:READS] * job.transfer).tolist(), job)
    return done._replace(device=fetched() - device, resident=resident, node=platform.node())


def open_files(job: Job) -> Done:
    """Time opening, ``fstat`` and closing of the small files, each once."""
    paths = sorted(job.folder.glob("[0-9]*"))
    np.random.default_rng(0).shuffle(paths)
    return timed([lambda path: open_file(path).close()] * job.streams, paths, job)


def timed(calls: Sequence[Callable[[T], object]], items: Iterable[T], job: Job) -> Done:
    """Time calls, when all workers begin.

    Each of `calls` has a thread, and takes the next of the items, until none is left or the time of
    the job is over; the first item is taken in any case.
    """
    time.sleep(max(0.0, job.start - time.time()))
    late = time.time() - job.start if job.start else 0.0
    ended, first = threading.Event(), now()
    queue, times = iter(items), list[float]()  # both of which threads may share

    def work(call: Callable[[T], object]) -> None:
        for item in queue:
            began = now()
            call(item)
            times.append(now() - began)
            if ended.is_set() or now() > first + job.seconds:
                break

    with ThreadPoolExecutor(len(calls)) as pool:
        try:
            list(pool.map(work, calls))
            return Done(times, len(times) / (now() - first), late)
        finally:
            ended.set()  # where this one was interrupted, or another thread failed
