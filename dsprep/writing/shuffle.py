"""A dataset in random order, in bounded memory whatever its size.

Reading samples of a large file one by one in random order is what this program exists to avoid.
Instead the samples are read once in the order in which they are stored and dealt into buckets on
disk (`buckets`), each of which fits in memory and has the samples of one range of the new order.
Then buckets are loaded one after another, and samples are served from them in the new order: the
second pass. Small datasets are kept in memory instead, and large samples whose extents are known
are read directly.

The first pass is cut into parts, ranges of samples, each of which is dealt into a directory of its
own, by threads of this process or by the workers of an executor. A part that is there is complete;
a rerun deals the others. What is dealt again in seconds is not waited for until it is on the disk:
a rerun after a crash of the machine, or on another one, deals it again. Buckets whose samples are
on the disk in the output are released (`ShuffledSource.release`).

The order is that of `permutation.Permutation`: it depends on seed and number of samples alone,
and every sample comes exactly once.
"""

from __future__ import annotations

import errno
import hashlib
import json
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, TypeAlias

import numpy as np
from typing_extensions import override

from dsprep import executors
from dsprep.core.gather import LONG, Assembly, take
from dsprep.core.permutation import Permutation
from dsprep.core.schema import Arena, Batch, Ints, Schema, empty_batch
from dsprep.core.units import show_nbytes
from dsprep.errors import FormatError, UsageError
from dsprep.formats.base import Opening, Source
from dsprep.layout.describe import FieldStorage
from dsprep.sidecar.spec import read_record, write_record
from dsprep.source.derived import DerivedSource, probe_nbytes
from dsprep.storage.durable import sync_directory
from dsprep.storage.nodes import boot, node, wait_for
from dsprep.storage.trees import remove
from dsprep.writing.buckets import (
    MOST,
    Bucket,
    BucketReader,
    RunWriter,
    index_row_nbytes,
    intact,
    payload_sizes,
    read_ints,
)
from dsprep.writing.plan import PIECE_NBYTES, Shard, pieces
from dsprep.writing.stripes import LOCAL, file_system
from dsprep.writing.transfer import Done, ShardCopy

How: TypeAlias = Literal["memory", "direct", "buckets"]

DIRECT_NBYTES = 1 << 20
"""Bytes of a sample from which on a random read costs hardly more than a sequential one."""

SEGMENT_NBYTES = 256 << 10
"""Bytes of a bucket's segment of one run that make reading it back efficient."""

PART_NBYTES = 128 << 20
"""Payload of a part of a first pass, about."""

MOST_PARTS = 256
"""Parts of a first pass at most: the second pass has two files of each open, of 1024 by default."""

PIECES = 4
"""Pieces that are in memory at a time in the first pass, at most: one per thread."""

UNSYNCED_NBYTES = 4 << 30
"""Up to so many bytes, temporary files on a local file system are made again after a crash, not
synced."""

_JOURNAL = "shuffle.json"
_PART = "part-"  # with a number
_RUN = "run-"  # of the first pass: where its parts are until they are complete
_STEP = 1 << 18  # samples whose sizes are asked for at a time


@dataclass(frozen=True, kw_only=True)
class FirstPass:
    """The first pass of a shuffle as it travels to other processes.

    Attributes
    ----------
    directory
        Where the parts are written, each in a directory of its own.
    attempts
        A directory of this run, where they are until they are complete: workers of an earlier
        run find theirs gone.
    path, schema, seed, samples, per_bucket, piece_nbytes
        What is dealt, and how.
    parts
        Into how many ranges of samples it is cut.
    durable
        Whether to wait for the disk.
    node
        Where `attempts` was made; see `storage.node`.
    released
        Buckets before this one have been released.
    """

    directory: Path
    attempts: Path
    path: Path
    schema: Schema
    seed: int
    samples: int
    per_bucket: int
    piece_nbytes: int
    parts: int
    durable: bool
    node: str
    released: int

    @property
    def buckets(self) -> int:
        """How many buckets there are."""
        return -(-self.samples // self.per_bucket)

    def range(self, part: int) -> tuple[int, int]:
        """Return the samples of a part, half-open."""
        return part * self.samples // self.parts, (part + 1) * self.samples // self.parts

    def directory_of(self, part: int) -> Path:
        """Return the directory of a part; it is there when the part is complete."""
        return self.directory / f"{_PART}{part}"

    def missing(self) -> list[int]:
        """Return the parts that are not there; what is there and not whole is removed."""
        pieces_ = []
        for part in range(self.parts):
            path = self.directory_of(part)
            if not intact(path, self.buckets):
                pieces_.append(part)
                if path.exists():
                    remove(path)
        return pieces_

    def deal(
        self, part: int, base: Source, offset: int, threads: int
    ) -> Generator[Done, None, None]:
        """Deal the samples of a part; sample `offset` of all is the first one of `base`."""
        start, stop = self.range(part)
        wait_for(self.attempts, self.node)
        own = Path(tempfile.mkdtemp(prefix=f"{part}-", dir=self.attempts))
        order = Permutation(self.seed, self.samples)
        writer = RunWriter(own, self.schema, order, self.per_bucket)
        # Nobody learns of a crash of another node, which takes what is not on the disk.
        writer.durable = self.durable or node() != self.node
        shard = Shard("", start - offset, stop - offset)
        copy = ShardCopy(
            base,
            writer,
            Shard("", -offset, stop - offset),  # samples are numbered as in the whole
            pieces(base, shard, writer.unit, self.piece_nbytes),
            {},
            threads,
        )
        with closing(copy.complete()) as dealt:
            yield from dealt
        try:
            own.rename(self.directory_of(part))
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            # Another process, taken for lost, was faster.
        remove(own)
        if writer.durable:
            sync_directory(self.directory)


@dataclass(frozen=True)
class _Task:
    """A part of a first pass, and how the samples that it needs are opened."""

    first_pass: FirstPass
    number: int
    base: Opening
    offset: int


def _deal(task: _Task) -> None:
    with task.base.opened() as base:
        for _ in task.first_pass.deal(task.number, base, task.offset, threads=2):
            pass


class BucketSource(Source):
    """Samples in the order of a shuffle whose first pass is done."""

    def __init__(self, first_pass: FirstPass) -> None:
        self._first_pass, self.path, self.schema = first_pass, first_pass.path, first_pass.schema
        self._per_bucket = first_pass.per_bucket
        directories = [first_pass.directory_of(i) for i in range(first_pass.parts)]
        for path in directories:
            wait_for(path / "runs", first_pass.node)
        self.reader = BucketReader(
            directories, self.schema, len(self), self._per_bucket, first_pass.released
        )
        self._cache = _BucketCache(self.reader.load, self._per_bucket, len(self), self.reader.close)
        self._lock = threading.Lock()
        self._sizes: Ints | None = None

    def __len__(self) -> int:
        return self._first_pass.samples

    @override
    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        if start == stop:
            return empty_batch(self.schema)
        found = None
        if start // self._per_bucket != (stop - 1) // self._per_bucket:
            found = Assembly(self.schema, stop - start, arena, "shuffled")
        at = start
        while at < stop:
            # Parts of one bucket each, so that no thread waits for one while it holds another.
            bucket = at // self._per_bucket
            first = bucket * self._per_bucket
            end = min(stop, first + self._per_bucket)
            with self._cache.bucket(bucket, end - at) as held:  # views keep the memory alive
                batch, rows = held.samples.part(at - first, end - first)
                if found is not None:
                    found.put(at - start, batch, rows)
                elif rows is not None:
                    return take(self.schema, batch, rows, arena, "shuffled")
                else:
                    return batch
            at = end
        assert found is not None
        return found.batch()

    def recorded_sizes(self) -> Ints:
        """Return the payload bytes of all samples in source order, as they were when read."""
        pass_ = self._first_pass
        ranges = map(pass_.range, range(pass_.parts))
        return np.concatenate(
            [
                read_ints(pass_.directory_of(i) / "sizes", start, stop - start)
                for i, (start, stop) in enumerate(ranges)
            ]
        )

    @override
    def sizes(self, start: int, stop: int) -> Ints | None:
        if not self.schema.ragged:
            return super().sizes(start, stop)
        with self._lock:
            if self._sizes is None:
                order = Permutation(self._first_pass.seed, len(self))
                self._sizes = _in_order(order, self.recorded_sizes())
        return self._sizes[start:stop]

    def storage(self) -> dict[str, FieldStorage]:
        """Return nothing: they are temporary files."""
        return {}

    def close(self) -> None:
        """Close the files."""
        self._cache.close()


@dataclass(frozen=True, kw_only=True)
class Buckets(Opening):
    """Samples in the order of a shuffle whose first pass is done; its files are not read again."""

    first_pass: FirstPass

    def open(self) -> Source:
        """Open the buckets."""
        return BucketSource(self.first_pass)


class _MemorySource(DerivedSource):
    """The samples of another source in a new order, all kept in memory when one is asked for."""

    def __init__(self, base: Source, order: Permutation, threads: int) -> None:
        super().__init__(base)
        self._order, self._threads = order, threads
        self._lock = threading.Lock()
        self._batch: Batch | None = None

    def __len__(self) -> int:
        return len(self.base)

    def numbers(self, indices: Ints) -> Ints:
        return self._order.forward(indices)

    def all(self) -> Batch:
        """Return all samples in source order."""
        with self._lock:
            if self._batch is None:
                self._batch = self._read_all()
            return self._batch

    def _read_all(self) -> Batch:
        assembly = Assembly(self.schema, len(self))

        def read(bounds: tuple[int, int]) -> None:
            start, stop = bounds
            arena = None if assembly.ragged.fields else self.own_arena()
            assembly.put(start, self.base.read(start, stop, arena))

        with ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(read, pieces(self.base, Shard("", 0, len(self)), 1)))
        return assembly.batch()

    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        rows = self.numbers(np.arange(start, stop, dtype=np.int64))
        return take(self.schema, self.all(), rows, arena, "shuffled")

    def recorded_sizes(self) -> Ints:
        """Return the payload bytes of all samples in source order."""
        return payload_sizes(self.schema, self.all())

    def close(self) -> None:
        self._batch = None  # the base is closed by the source that this one serves


class ShuffledSource(DerivedSource):
    """The samples of another source in random order.

    Nothing is read or written before `prepare`, which the first read calls if nobody else did.

    Parameters
    ----------
    base
        The source; closing this closes it.
    seed
        Of the order.
    memory_nbytes
        Bytes that may be held: at most two buckets, or all samples.
    scratch
        A directory of its own for temporary files, created when needed. A rerun with the same
        base, seed and memory continues with what it finds there, whatever happened to the first.
    workers
        Threads of the first pass. The samples do not depend on it.
    identity
        Words that tell the base from others of the same path, number and schema.
    durable
        Whether the first pass waits for the disk, if it is a long one, so that even a crash of the
        machine leaves what a rerun can continue with.

    Attributes
    ----------
    how
        ``"memory"``: all samples are kept in memory; ``"direct"``: samples are read one by one;
        ``"buckets"``: through temporary files.
    durable
        As given; may be changed before `prepare`.
    scratch_nbytes
        Bytes of temporary files; an estimate if the samples are of unknown sizes.
    """

    def __init__(
        self,
        base: Source,
        seed: int,
        memory_nbytes: int,
        scratch: Path,
        *,
        workers: int = 1,
        identity: str = "",
        durable: bool = True,
    ) -> None:
        super().__init__(base)
        self.seed, self.scratch, self._workers = seed, scratch, workers
        self._order = Permutation(seed, len(base))
        self._identity, self.durable = identity, durable
        payload, exact = _payload(base)
        mean = self._mean = max(1, -(-payload // max(1, len(base))))
        self.how: How = _choose(base, payload, mean, memory_nbytes)
        per_bucket = min(memory_nbytes // 3, payload // 2) // mean
        per_bucket = min(MOST, per_bucket)
        self._per_bucket = max(1, len(base) if self.how == "memory" else per_bucket)
        self._buckets = -(-len(base) // self._per_bucket)
        # Each worker has a piece as read and, if samples are short, as sorted.
        limit = max(PIECE_NBYTES, self._buckets * SEGMENT_NBYTES)
        copies = 1 if mean >= LONG * len(base.schema) else 2
        self._piece_nbytes = max(1, min(limit, memory_nbytes // (copies * PIECES)))
        self.scratch_nbytes = 0
        if self.how == "buckets":
            runs = 2 + 2 * payload // self._piece_nbytes + (len(base) >> 20)
            ragged = sum(f.ragged for f in base.schema)
            each = 4 + 8 * ragged + 8 * (ragged > 0)
            self.scratch_nbytes = payload + each * len(base) + 4096
            self.scratch_nbytes += runs * index_row_nbytes(self._buckets)
            self.scratch_nbytes += 0 if exact else payload // 20
        self._first_pass: FirstPass | None = None  # when it is done
        self._journal: dict[str, Any] = {"released": 0}
        self._served: BucketSource | _MemorySource | None = None
        self._lock, self._sizes_lock = threading.Lock(), threading.Lock()
        self._sizes: Ints | None = None

    def __len__(self) -> int:
        return len(self.base)

    def numbers(self, indices: Ints) -> Ints:
        """Return which samples of `base` come at some positions of the new order."""
        return self._order.forward(indices)

    @property
    def described(self) -> str:
        """How the order is made, for a person."""
        words = {
            "memory": "all samples are kept in memory",
            "direct": "samples are large: they are read one by one",
            "buckets": f"in two passes, through {show_nbytes(self.scratch_nbytes)} of "
            f"temporary files, {self._buckets} buckets",
        }
        return words[self.how]

    def prepare(
        self,
        executor: Executor | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Do the first pass, or what earlier runs left of it.

        Parameters
        ----------
        executor
            Who does it; None: threads of this process.
        progress
            Called with (samples done, samples in all).

        Raises
        ------
        DsprepError, OSError
            If the data are damaged or a worker was lost; a rerun does the parts that are missing.
        """
        with self._lock:
            if self._served is not None or self.how == "direct":
                return
            if self.how == "memory":
                self._served = _MemorySource(self.base, self._order, self._workers)
                return
            first_pass = self._begin()
            self._do(first_pass, executor, progress)
            self._first_pass, self._served = first_pass, BucketSource(first_pass)

    def _begin(self) -> FirstPass:
        """Return what is to be done; what other runs left is removed if it is not of use."""
        self.scratch.mkdir(parents=True, exist_ok=True)
        facts: list[Any] = [4, self.seed, len(self), self._per_bucket, self._piece_nbytes]
        facts += [str(self.path.absolute()), self._identity, self.schema.to_json()]
        job = hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()
        durable = self.durable and not self._made_again_soon()
        journal = self._recorded(job)
        if journal is None:
            self._remove()
            parts = max(1, min(MOST_PARTS, -(-self.scratch_nbytes // PART_NBYTES), len(self)))
            parts += parts % 2 if 1 < parts < len(self) else 0  # two are dealt side by side
            journal = {"job": job, "parts": parts, "node": "", "released": 0}
        # Where files are that may not be on the disk; never again empty for these.
        journal["node"] = journal["node"] or ("" if durable else node())
        self._journal = journal
        self._save_journal()
        for path in self.scratch.glob(f"{_RUN}*"):
            remove(path)
        directory = self.scratch.absolute()
        return FirstPass(
            directory=directory,
            attempts=Path(tempfile.mkdtemp(prefix=_RUN, dir=directory)),
            path=self.path,
            schema=self.schema,
            seed=self.seed,
            samples=len(self),
            per_bucket=self._per_bucket,
            piece_nbytes=self._piece_nbytes,
            parts=journal["parts"],
            durable=durable,
            node=node(),
            released=journal["released"],
        )

    def _made_again_soon(self) -> bool:
        """Whether to deal the samples again after a crash rather than wait for the disk now."""
        local = boot() and file_system(self.scratch.resolve()) in LOCAL
        return bool(local) and self.scratch_nbytes <= UNSYNCED_NBYTES

    def _save_journal(self) -> None:
        write_record(self._journal, self.scratch / _JOURNAL, durable=self.durable)

    def _recorded(self, job: str) -> dict[str, Any] | None:
        """Return the journal of an earlier run of the same job whose files are to be trusted."""
        with suppress(FormatError):
            journal = read_record(self.scratch / _JOURNAL)
            if journal.get("job") == job and journal["node"] in ("", node()):
                return journal
        return None

    def release(self, first: int) -> None:
        """Free the space of the samples before this one, which are not read again.

        Called when the output has them, durably. A rerun that needs them all the same deals all
        samples again: see `need`.
        """
        served = self._served
        bucket = self._buckets if first == len(self) else first // self._per_bucket
        if isinstance(served, BucketSource) and bucket > self._journal["released"]:
            self._journal["released"] = bucket
            self._save_journal()
            served.reader.release(bucket)

    def need(self, first: int) -> None:
        """Deal the samples from this one on again if an earlier run released them."""
        if self.how == "buckets" and first < self._journal["released"] * self._per_bucket:
            self._drop()
            self._remove()

    def _do(
        self,
        first_pass: FirstPass,
        executor: Executor | None,
        progress: Callable[[int, int], None],
    ) -> None:
        """Deal the parts that are missing."""
        missing, total = first_pass.missing(), len(self)
        done = total - sum(stop - start for start, stop in map(first_pass.range, missing))
        progress(done, total)
        if executor is None:
            with closing(self._deal_here(first_pass, missing)) as dealt:
                for piece in dealt:
                    done += piece.samples
                    progress(done, total)
        else:
            tasks = (_Task(first_pass, i, *self.base.part(*first_pass.range(i))) for i in missing)
            for task, _ in executors.run(executor, _deal, tasks):
                start, stop = first_pass.range(task.number)
                done += stop - start
                progress(done, total)
            for i in missing:
                if not first_pass.directory_of(i).is_dir():  # another node has made it
                    wait_for(first_pass.directory_of(i) / "runs", "any")
        remove(first_pass.attempts)

    def _deal_here(
        self, first_pass: FirstPass, missing: Sequence[int]
    ) -> Generator[Done, None, None]:
        """Deal parts by threads of this process, two side by side: a file is written by one."""
        threads = min(self._workers, PIECES)
        side = min(2, threads, len(missing))
        if side < 2:
            for i in missing:
                yield from first_pass.deal(i, self.base, 0, threads)
            return
        todo, pieces = iter(missing), SimpleQueue[Done | BaseException | None]()
        stopped = threading.Event()

        def work() -> None:
            last: BaseException | None = None
            try:
                for i in todo:
                    with closing(first_pass.deal(i, self.base, 0, threads // side)) as dealt:
                        for piece in dealt:
                            pieces.put(piece)
                            if stopped.is_set():
                                return
            except BaseException as error:
                last = error
            finally:
                pieces.put(last)

        with ThreadPoolExecutor(side, "dsprep-shuffle") as pool:
            for _ in range(side):
                pool.submit(work)
            try:
                while side:
                    piece = pieces.get()
                    if isinstance(piece, BaseException):
                        raise piece
                    if piece is None:
                        side -= 1
                    else:
                        yield piece
            finally:
                stopped.set()

    def _remove(self) -> None:
        for path in list(self.scratch.iterdir()) if self.scratch.is_dir() else ():
            if path.name == _JOURNAL or path.name.startswith((_PART, _RUN)):
                remove(path)

    def _prepared(self) -> BucketSource | _MemorySource:
        self.prepare()
        served = self._served
        if served is None:
            raise UsageError("the source is closed")
        return served

    @override
    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        if start == stop:
            return empty_batch(self.schema)
        if self.how == "direct":
            return super().read(start, stop, arena)
        return self._prepared().read(start, stop, arena)

    def sizes(self, start: int, stop: int) -> Ints | None:
        """Return the payload bytes of each sample; see `Source.sizes`.

        Ragged samples take 8 bytes each. Where `base` does not know, the first pass tells.
        """
        if self.how == "direct" or not self.schema.ragged:
            return super().sizes(start, stop)
        with self._sizes_lock:
            if self._sizes is None:
                self._sizes = _in_order(self._order, self._all_sizes())
        return self._sizes[start:stop]

    def _all_sizes(self) -> Ints:
        """Return the bytes of all samples in source order."""
        out = np.empty(len(self), np.int64)
        for start in range(0, len(self), _STEP):
            stop = min(start + _STEP, len(self))
            sizes = self.base.sizes(start, stop)
            if sizes is None:
                return self._prepared().recorded_sizes()
            out[start:stop] = sizes
        return out

    @override
    def part(self, start: int, stop: int) -> tuple[Opening, int]:
        # Samples that were dealt into buckets are read from those.
        if self.how != "buckets":
            return super().part(start, stop)
        self.prepare()
        assert self._first_pass is not None
        return Buckets(first_pass=self._first_pass), 0

    def resident_nbytes(self) -> int:
        """Return what is held besides the samples asked for: buckets, or what `base` holds."""
        if self.how == "direct":
            return self.base.resident_nbytes()
        return self._mean * self._per_bucket * min(2, self._buckets)

    def clean(self) -> None:
        """Remove the temporary files, when they are no longer needed."""
        self._drop()
        self._remove()
        if self.scratch.is_dir() and not any(self.scratch.iterdir()):
            self.scratch.rmdir()

    def _drop(self) -> None:
        with self._lock:
            if self._served is not None:
                self._served.close()
            self._served = self._first_pass = None

    def close(self) -> None:
        """Release memory and files, and close `base`; the temporary files stay for a rerun."""
        self._drop()
        super().close()


def _in_order(order: Permutation, values: Ints) -> Ints:
    """Return numbers of samples in source order as they come in the new one."""
    out = np.empty_like(values)
    for start in range(0, len(values), _STEP):
        stop = min(start + _STEP, len(values))
        out[order.inverse(np.arange(start, stop, dtype=np.int64))] = values[start:stop]
    return out


def _payload(source: Source) -> tuple[int, bool]:
    """Return the bytes of all samples, and whether that is exact or an estimate."""
    count = len(source)
    if not source.schema.ragged:
        return source.schema.fixed_nbytes * count, True
    total = 0
    for start in range(0, count, _STEP):
        sizes = source.sizes(start, min(count, start + _STEP))
        if sizes is None:
            return probe_nbytes(source, 0, count) * count, False
        total += int(sizes.sum())
    return total, True


def _choose(base: Source, payload: int, mean: int, memory_nbytes: int) -> How:
    # Ragged samples are held twice while they are joined.
    if payload * (2 if base.schema.ragged else 1) <= memory_nbytes or not len(base):
        return "memory"
    located = base
    while isinstance(located, DerivedSource):
        located = located.base
    known = located.random_access and located.resident_nbytes() == 0
    return "direct" if known and mean >= DIRECT_NBYTES else "buckets"


# --- buckets in memory -----------------------------------------------------------------------


class _Held:
    """A bucket that is in memory or on its way there.

    `users` are threads that read from it or wait for it; it has `count` samples, of which
    `unserved` have not been given out.
    """

    def __init__(self, loading: Future[Bucket], count: int) -> None:
        self.loading, self.users, self.count, self.unserved = loading, 0, count, count

    @property
    def samples(self) -> Bucket:
        return self.loading.result()


class _BucketCache:
    """At most two buckets in memory, the next of which is loaded while one is served.

    Parameters
    ----------
    load
        Returns the samples of a bucket.
    per_bucket, count
        Samples of a bucket, and of all.
    close
        Called when nothing is loaded any more.
    """

    MOST = 2

    def __init__(
        self,
        load: Callable[[int], Bucket],
        per_bucket: int,
        count: int,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._load, self._per_bucket, self._count, self._close = load, per_bucket, count, close
        self._buckets_in_memory: dict[int, _Held] = {}
        self._last = -1  # the bucket that was asked for last
        self._changed = threading.Condition()
        self._pool = ThreadPoolExecutor(1, "dsprep-shuffle")

    @contextmanager
    def bucket(self, bucket: int, samples: int) -> Iterator[_Held]:
        """Lend a bucket, of which `samples` will be read; waits until it is there."""
        with self._changed:
            while bucket not in self._buckets_in_memory and not self._make_room(done_only=False):
                self._changed.wait()
            entry = self._buckets_in_memory.get(bucket) or self._start(bucket)
            entry.users += 1
            if 0 <= bucket - self._last <= 1:  # they are read in order
                self._load_ahead(bucket + 1)
            self._last = bucket
        try:
            entry.samples  # noqa: B018  (waits, and raises what went wrong)
            yield entry
        finally:
            with self._changed:
                entry.users -= 1
                entry.unserved -= samples
                if (
                    entry.loading.exception() is not None
                    and self._buckets_in_memory.get(bucket) is entry
                ):
                    del self._buckets_in_memory[bucket]  # so that it is tried again
                if entry.unserved <= 0:
                    self._load_ahead(bucket + 1)
                    self._load_ahead(bucket + 2)
                self._changed.notify_all()

    def _load_ahead(self, bucket: int) -> None:
        inside = bucket * self._per_bucket < self._count
        if inside and bucket not in self._buckets_in_memory and self._make_room(done_only=True):
            self._start(bucket)

    def _start(self, bucket: int) -> _Held:
        count = min(self._per_bucket, self._count - bucket * self._per_bucket)
        entry = self._buckets_in_memory[bucket] = _Held(
            self._pool.submit(self._load, bucket), count
        )
        return entry

    def _make_room(self, done_only: bool) -> bool:
        """Drop a bucket that nobody reads if there are too many; return whether there is room."""
        if len(self._buckets_in_memory) < self.MOST:
            return True
        idle = [b for b, h in self._buckets_in_memory.items() if not h.users and h.loading.done()]
        done = [b for b in idle if self._buckets_in_memory[b].unserved <= 0]
        if not done and (done_only or not idle):
            return False
        del self._buckets_in_memory[(done or idle)[0]]
        return True

    def close(self) -> None:
        """Forget all buckets."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._buckets_in_memory.clear()
        self._close()
