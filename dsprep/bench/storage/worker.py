"""What a worker of ``bench storage`` does: write files, then time reads and opens by some threads.

Files are read as `dsprep.Reader` reads them: by its engine, in parts of its size, into memory that
has been touched. All times are of whole calls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from dsprep.bench import caches
from dsprep.bench.caches import Watch
from dsprep.bench.counters import fetched
from dsprep.bench.evidence import Seen
from dsprep.bench.received import node
from dsprep.core.schema import Bytes
from dsprep.reader.engines import Engine, make
from dsprep.reader.memory import anonymous
from dsprep.storage.base import Handle
from dsprep.storage.durable import sync
from dsprep.storage.paths import open_file
from dsprep.storage.ranges import pwrite_all

FILES, FILE_NBYTES = 1000, 4096
"""Small files that a worker writes to open them, and the bytes of each."""

PART = 8 << 20
"""Bytes that are written and brought to the storage at a time."""

T = TypeVar("T")

now = time.perf_counter


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a worker does in one phase."""

    folder: Path  # of one worker: its large file, and the small ones
    seconds: float  # after which nothing more is begun
    nbytes: int = 0  # of the large file
    transfer: int = 1  # bytes of a read, of which the file has a whole number
    reads: int | None = None  # at most; None: as many as the file has
    random: bool = True  # whether the reads are in random order, or one after another
    streams: int = 1  # threads, which share the reads
    engine: str = "buffered"
    start: float = 0.0  # the time (of the epoch) at which all workers begin
    tries: bool = True  # whether it tries what the kernel counts; see `Watch`

    @property
    def file(self) -> Path:
        """The large file."""
        return self.folder / "data"

    @property
    def small(self) -> list[Path]:
        """The small files."""
        return [self.folder / f"{k:04}" for k in range(FILES)]


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a worker did in one phase."""

    times: tuple[float, ...] = ()  # seconds of each call
    wall: float = 0.0  # from the first to the end of the last
    amount: int = 0  # bytes that were written or read
    late: float = 0.0  # seconds that it began after the others
    device: int = 0  # bytes that the kernel counted
    seen: Seen | None = None  # what shows whether the reads were cold
    node: str = ""

    @property
    def per_second(self) -> float:
        """Calls per second, of all threads."""
        return len(self.times) / max(self.wall, 1e-9)


def write(job: Job) -> Done:
    """Write the large file, durable and of random bytes, until time is over; then the small ones.

    Raises
    ------
    OSError
        If there is no space, or it cannot be written.
    """
    end, rng, amount = now() + job.seconds, np.random.default_rng(), 0
    job.folder.mkdir()
    with job.file.open("xb", buffering=0) as file:
        while amount < job.nbytes and (not amount or now() < end):
            part = rng.bytes(min(PART, job.nbytes - amount))
            amount += pwrite_all(file.fileno(), [part], amount)
            sync(file.fileno(), data=True)
    end = now() + job.seconds / 4
    for path in job.small:
        path.write_bytes(bytes(FILE_NBYTES))
        if now() > end:
            break
    return Done(amount=amount, node=node())


def read(job: Job) -> Done:
    """Drop the large file from the page cache, and time reads of different parts of it.

    Raises
    ------
    Unavailable
        If the engine does not work here.
    OSError
        If it cannot be read.
    """
    watch = Watch([job.file], job.tries)
    caches.drop([job.file])
    seen = watch.before()
    count = job.nbytes // job.transfer
    parts = np.random.default_rng(0).permutation(count) if job.random else np.arange(count)
    starts = parts[: job.reads] * job.transfer
    file, engine = open_file(job.file), make(job.engine)
    engine.prepare(file)
    readers = [_reader(engine, file, job.transfer) for _ in range(job.streams)]
    late = _until(job.start)
    came, device = watch.received(), fetched()
    times, wall = timed(readers, starts.tolist(), job.seconds)
    return Done(
        times=times,
        wall=wall,
        amount=len(times) * job.transfer,
        late=late,
        device=fetched() - device,
        seen=replace(seen, received=watch.received() - came),
        node=node(),
    )


def _reader(engine: Engine, file: Handle, nbytes: int) -> Callable[[int], object]:
    """Return what reads so many bytes from an offset on, into memory of its own."""
    memory = np.frombuffer(anonymous(nbytes), np.uint8)
    memory[::FILE_NBYTES] = 0
    iovecs = np.array([[memory.ctypes.data, nbytes]], np.int64)

    def read(start: int, memory: Bytes = memory) -> None:
        engine.read(file, start, iovecs)

    return read


def open_files(job: Job) -> Done:
    """Time opening, ``fstat`` and closing of the small files, each once."""
    paths = [path for path in job.small if path.exists()]
    order = np.random.default_rng(0).permutation(len(paths)).tolist()
    late = _until(job.start)
    times, wall = timed([_open] * job.streams, [paths[k] for k in order], job.seconds)
    return Done(times=times, wall=wall, late=late, node=node())


def _open(path: Path) -> None:
    open_file(path).close()


def _until(start: float) -> float:
    """Wait until a time; return the seconds that have passed since."""
    time.sleep(max(0.0, start - time.time()))
    return time.time() - start if start else 0.0


def timed(
    calls: Sequence[Callable[[T], object]], items: Iterable[T], seconds: float
) -> tuple[tuple[float, ...], float]:
    """Return the seconds of each call, and from the first to the end of the last.

    Each of `calls` has a thread, and takes the next of the items, until none is left or `seconds`
    are over; the first item is taken in any case.
    """
    ended = threading.Event()
    queue, times = iter(items), list[float]()  # both of which threads may share
    first = now()

    def work(call: Callable[[T], object]) -> None:
        for item in queue:
            began = now()
            call(item)
            times.append(now() - began)
            if ended.is_set() or now() > first + seconds:
                break

    with ThreadPoolExecutor(len(calls)) as pool:
        try:
            list(pool.map(work, calls))
            return tuple(times), now() - first
        finally:
            ended.set()  # where this one was interrupted, or another thread failed
