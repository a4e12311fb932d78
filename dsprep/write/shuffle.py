"""A dataset in random order, in bounded memory whatever its size.

Reading samples of a large file one by one in random order is what this program exists to avoid.
Instead the samples are read once in the order in which they lie and dealt into buckets on disk
(`buckets`), each of which fits in memory and has the samples of one range of the new order. Then
buckets are loaded one after another, and samples are served from them in the new order: the
second pass. Small datasets are kept in memory instead, and large samples whose places are known
are read directly.

The order is that of `permutation.Permutation`: it depends on seed and number of samples alone,
and every sample comes exactly once.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from dsprep.core.gather import take
from dsprep.core.permutation import Permutation
from dsprep.core.schema import Arena, Batch, Ints, Schema, concatenate, empty_batch
from dsprep.core.storage import copy_range, node, pread_into, remove, sync_directory, wait_for
from dsprep.errors import UsageError
from dsprep.formats.base import Source, State
from dsprep.layout.describe import FieldStorage
from dsprep.sidecar.spec import write_json
from dsprep.source.from_sidecar import SidecarSource
from dsprep.write.buckets import BucketReader, RunWriter, index_row_nbytes, payload_sizes
from dsprep.write.plan import PIECE_NBYTES, Shard, pieces, probe_nbytes, show_nbytes
from dsprep.write.split import DerivedSource, SelectedSource
from dsprep.write.transfer import ShardCopy

How: TypeAlias = Literal["memory", "direct", "buckets"]

DIRECT_NBYTES = 1 << 20
"""Bytes of a sample from which on a random read costs hardly more than a sequential one."""

SEGMENT_NBYTES = 256 << 10
"""Bytes of a bucket's segment of one run that make reading it back efficient."""

CHECKPOINT_NBYTES = 1 << 30
"""Payload between two records of how far the first pass has come."""

PIECES = 4
"""Pieces that are in memory at a time in the first pass, at most: one per thread."""

_JOURNAL = "shuffle.json"
_FILES = (_JOURNAL, "runs", "index", "sizes")
_PART = "part-"  # with a number: the files of one of several processes
_STEP = 1 << 18  # samples whose sizes are asked for at a time


@dataclass(frozen=True, kw_only=True)
class FirstPass:
    """The first pass of a shuffle as it travels to other processes.

    Attributes
    ----------
    directory
        Where the parts are written, each in a directory of its own.
    attempts
        A directory of this run, where they lie until they are complete: workers of an earlier
        run of something else find theirs gone.
    schema, seed, samples, per_bucket, piece_nbytes
        What is dealt, and how.
    parts
        Into how many ranges of samples it is cut.
    durable
        Whether to wait for the disk.
    node
        Where `attempts` was made; see `storage.node`.
    """

    directory: Path
    attempts: Path
    schema: Schema
    seed: int
    samples: int
    per_bucket: int
    piece_nbytes: int
    parts: int
    durable: bool
    node: str

    def range(self, part: int) -> tuple[int, int]:
        """Return the samples of a part, half-open."""
        return part * self.samples // self.parts, (part + 1) * self.samples // self.parts

    def place(self, part: int) -> Path:
        """Return the directory of a part; it is there when the part is complete."""
        return self.directory / f"{_PART}{part}"

    def deal(self, part: int, base: Source, offset: int) -> None:
        """Deal the samples of a part; sample `offset` of all is the first one of `base`."""
        start, stop = self.range(part)
        wait_for(self.attempts, self.node)
        own = Path(tempfile.mkdtemp(prefix=f"{part}-", dir=self.attempts))
        order = Permutation(self.seed, self.samples)
        writer = RunWriter(own, self.schema, order, self.per_bucket, None)
        writer.durable = self.durable
        shard = Shard("", start - offset, stop - offset)
        copy = ShardCopy(
            base,
            writer,
            Shard("", -offset, stop - offset),  # samples are numbered as in the whole
            pieces(base, shard, writer.unit, self.piece_nbytes, 0),
            {},
            2,
            lambda samples, position: None,
            None,
        )
        for _ in copy.complete():
            pass
        try:
            own.rename(self.place(part))
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            # Another process, taken for lost, was faster.
        remove(own)
        if self.durable:
            sync_directory(self.directory)


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
        Whether the first pass waits for the disk, so that even a crash of the machine leaves
        what a rerun can continue with.

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
        self._per_bucket = max(1, len(base) if self.how == "memory" else per_bucket)
        buckets = -(-len(base) // self._per_bucket)
        # Each worker has a piece as read and a piece as sorted: half of the memory in all.
        most = max(PIECE_NBYTES, buckets * SEGMENT_NBYTES)
        self._piece_nbytes = max(1, min(most, memory_nbytes // (4 * PIECES)))
        self.scratch_nbytes = 0
        if self.how == "buckets":
            runs = 2 + 2 * payload // self._piece_nbytes + (len(base) >> 20)
            ragged = sum(f.ragged for f in base.schema)
            self.scratch_nbytes = payload + 8 * (ragged + 1) * len(base) + 4096
            self.scratch_nbytes += runs * index_row_nbytes(buckets)
            self.scratch_nbytes += 0 if exact else payload // 20
        self._cache: _BucketCache | None = None
        self._lock, self._sizes_lock = threading.Lock(), threading.Lock()
        self._sizes: Ints | None = None
        self._selected: SelectedSource | None = None
        self._dealt = 0  # into so many parts, if by several processes
        self._node = node()  # whose word it is that they are there

    def __getstate__(self) -> dict[str, Any]:
        # Another process reads the buckets, once they are there, and never the source itself.
        unshared = ("_cache", "_lock", "_sizes_lock", "_sizes", "_selected", "_local")
        state = {k: v for k, v in vars(self).items() if k not in unshared}
        scratch = self.scratch.absolute()
        return {**state, "base": _Dealt(self.base), "scratch": scratch, "_node": node()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._cache, self._sizes, self._selected = None, None, None
        self._lock, self._sizes_lock = threading.Lock(), threading.Lock()
        self._local = threading.local()

    def __len__(self) -> int:
        return len(self.base)

    def order(self, places: Ints) -> Ints:
        """Return which samples of `base` come at some places of the new order."""
        return self._order.forward(places)

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

    @property
    def _buckets(self) -> int:
        return -(-len(self) // self._per_bucket)

    def prepare(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Do the first pass, or what an earlier run left of it.

        Parameters
        ----------
        progress
            Called with (samples done, samples in all).
        """
        with self._lock:
            if self._cache is not None or self.how == "direct":
                return
            if self.how == "buckets":
                if not isinstance(self.base, _Dealt):
                    self._deal(progress or (lambda done, total: None))
                for path in self._directories():
                    wait_for(path / "runs", self._node)
                reader = BucketReader(
                    self._directories(), self.schema, self._order, self._per_bucket
                )
                self._cache = _BucketCache(reader.load, self._per_bucket, len(self), reader.close)
            else:
                self._cache = _BucketCache(lambda _: self._read_all(), self._per_bucket, len(self))

    def _deal(self, progress: Callable[[int, int], None]) -> None:
        """Write the runs."""
        self.scratch.mkdir(parents=True, exist_ok=True)
        job = self._job()
        journal = self._journal(job)
        total = len(self)
        if journal.get("complete"):
            self._dealt = int(journal.get("parts", 0))
            progress(total, total)
            return
        if journal.get("parts"):  # several processes began it
            self._remove()
            journal = {}
        done, state = journal.get("samples", 0), journal.get("state")
        writer = RunWriter(self.scratch, self.schema, self._order, self._per_bucket, state)
        writer.durable = self.durable

        def save(samples: int, at: State) -> None:
            self._save({"job": job, "samples": samples, "state": at})

        shard = Shard("", 0, total)
        copy = ShardCopy(
            self.base,
            writer,
            shard,
            pieces(self.base, shard, writer.unit, self._piece_nbytes, done),
            {},
            min(self._workers, PIECES),
            save,
            CHECKPOINT_NBYTES if self.durable else None,
        )
        with closing(copy.complete()) as written:
            for piece in written:
                done += piece.samples
                progress(done, total)
        self._save({"job": job, "samples": total, "complete": True})

    # --- the first pass by other processes -------------------------------------------------------

    def first_pass(self, wanted: int) -> FirstPass:
        """Return how to deal the samples by several processes, or what is left of it.

        Parameters
        ----------
        wanted
            Into how many parts to cut it, if no earlier run has begun.
        """
        self.scratch.mkdir(parents=True, exist_ok=True)
        job = self._job()
        journal = self._journal(job)
        parts = int(journal.get("parts", 0))
        if not journal:
            parts = max(1, min(wanted, len(self)))
            self._save({"job": job, "samples": 0, "parts": parts})
        directory = self.scratch.absolute()
        return FirstPass(
            directory=directory,
            attempts=Path(tempfile.mkdtemp(prefix=f"{_PART}of-run-", dir=directory)),
            schema=self.schema,
            seed=self.seed,
            samples=len(self),
            per_bucket=self._per_bucket,
            piece_nbytes=self._piece_nbytes,
            parts=parts,
            durable=self.durable,
            node=node(),
        )

    def dealt(self, first_pass: FirstPass) -> None:
        """Record that all parts of the first pass are there."""
        for path in self._parts(first_pass.parts):
            if not path.is_dir():
                wait_for(path / "runs", "any")
        if self.schema.ragged:
            with (self.scratch / "sizes").open("wb") as out:
                for part in range(first_pass.parts):
                    start, stop = first_pass.range(part)
                    with (first_pass.place(part) / "sizes").open("rb") as file:
                        copy_range(
                            file.fileno(), out.fileno(), 8 * (stop - start), 8 * start, 8 * start
                        )
        journal = {"job": self._job(), "samples": len(self), "parts": first_pass.parts}
        self._save({**journal, "complete": True})

    def _parts(self, count: int) -> list[Path]:
        return [self.scratch / f"{_PART}{i}" for i in range(count)]

    def _directories(self) -> list[Path]:
        """Return where the runs lie."""
        return self._parts(self._dealt) if self._dealt else [self.scratch]

    def _job(self) -> str:
        """Return a word that differs where the temporary files would."""
        facts: list[Any] = [2, self.seed, len(self), self._per_bucket, self._piece_nbytes]
        facts += [str(self.path.absolute()), self._identity, self.schema.to_json()]
        return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()

    def _journal(self, job: str) -> dict[str, Any]:
        """Return what an earlier run of the same job recorded, or nothing."""
        try:
            found = json.loads((self.scratch / _JOURNAL).read_text())
            if isinstance(found, dict) and found["job"] == job:
                state = found.get("state")
                numbers = [found["samples"], found.get("parts", 0)]
                numbers += state.values() if state else ()
                right = all(isinstance(n, int) and n >= 0 for n in numbers)
                if right and (found.get("parts") or self._intact(state)):
                    return found
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        self._remove()
        return {}

    def _remove(self) -> None:
        for path in list(self.scratch.iterdir()) if self.scratch.is_dir() else ():
            if path.name in _FILES or path.name.startswith(_PART):
                remove(path)

    def _intact(self, state: State | None) -> bool:
        """Whether the files have the bytes that were recorded."""
        runs, index = ((self.scratch / n).stat().st_size for n in ("runs", "index"))
        row = index_row_nbytes(self._buckets)
        if state is not None:
            return runs >= int(state["end"]) and index >= int(state["runs"]) * row
        if index < row or index % row:
            return False
        return runs == int(_ints(self.scratch / "index", index // 8 - 1, 1)[0])

    def _save(self, journal: dict[str, Any]) -> None:
        write_json(journal, self.scratch / _JOURNAL, durable=self.durable)

    def _read_all(self) -> Batch:
        """Return all samples in source order."""
        ranges = list(pieces(self.base, Shard("", 0, len(self)), 1))
        fixed = {
            f.name: np.empty((len(self), *f.inner), f.dtype) for f in self.schema if not f.ragged
        }
        ragged = Schema(tuple(f for f in self.schema if f.ragged))

        def read(bounds: tuple[int, int]) -> Batch:
            start, stop = bounds
            batch = self.base.read(start, stop, None if ragged.fields else self._arena())
            for name, out in fixed.items():
                out[start:stop] = batch[name]
            return {f.name: batch[f.name] for f in ragged}

        with ThreadPoolExecutor(self._workers) as pool:
            parts = list(pool.map(read, ranges))
        joined = concatenate(ragged, parts) if ragged.fields and parts else {}
        return {n: fixed[n] if n in fixed else joined[n] for n in self.schema.names}

    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        """Return samples ``start <= i < stop`` of the new order; see `Source.read`."""
        if start == stop:
            return empty_batch(self.schema)
        if self.how == "direct":
            return self._direct().read(start, stop, arena)
        self.prepare()
        parts: list[Batch] = []
        while start < stop:
            bucket = start // self._per_bucket
            end = min(stop, (bucket + 1) * self._per_bucket)
            # Parts of one bucket each, so that no thread waits for one while it holds another.
            key = "shuffled" if not parts else f"shuffled{len(parts)}"
            parts.append(self._serve(bucket, start, end, arena, key))
            start = end
        return concatenate(self.schema, parts)

    def _serve(self, bucket: int, start: int, stop: int, arena: Arena | None, key: str) -> Batch:
        cache = self._cache
        if cache is None:
            raise UsageError("the source is closed")
        first = bucket * self._per_bucket
        with cache.bucket(bucket, stop - start) as held:
            if self.how == "buckets":  # in order already; views keep the memory alive
                return {n: c[start - first : stop - first] for n, c in held.batch.items()}
            rows = self._order.forward(np.arange(start, stop, dtype=np.int64))
            return take(self.schema, held.batch, rows, arena, key)

    def _direct(self) -> SelectedSource:
        with self._lock:
            if self._selected is None:
                places = np.arange(len(self), dtype=np.int64)
                self._selected = SelectedSource(self.base, self._order.forward(places))
            return self._selected

    def sizes(self, start: int, stop: int) -> Ints | None:
        """Return the payload bytes of each sample; see `Source.sizes`.

        Ragged samples take 8 bytes each. Where `base` does not know, the first pass tells.
        """
        if not self.schema.ragged:
            return super().sizes(start, stop)
        if self.how == "direct":
            return self._direct().sizes(start, stop)
        with self._sizes_lock:
            if self._sizes is None:
                self._sizes = self._all_sizes()
        return self._sizes[start:stop]

    def _all_sizes(self) -> Ints:
        """Return the bytes of all samples in the new order."""
        out = np.empty(len(self), np.int64)
        recorded: Callable[[int, int], Ints] | None = None
        for start in range(0, len(self), _STEP):
            stop = min(start + _STEP, len(self))
            sizes = self.base.sizes(start, stop) if recorded is None else None
            if sizes is None:
                recorded = self._recorded_sizes() if recorded is None else recorded
                sizes = recorded(start, stop)
            out[self._order.inverse(np.arange(start, stop, dtype=np.int64))] = sizes
        return out

    def _recorded_sizes(self) -> Callable[[int, int], Ints]:
        """Return what gives the bytes of samples in source order, as they were when read."""
        self.prepare()
        if self.how == "buckets":
            path = self.scratch / "sizes"
            return lambda start, stop: _ints(path, start, stop - start)
        cache = self._cache
        if cache is None:
            raise UsageError("the source is closed")
        with cache.bucket(0, 0) as held:
            sizes = payload_sizes(self.schema, held.batch)
        return lambda start, stop: sizes[start:stop]

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
            if self._cache is not None:
                self._cache.close()
            self._cache = None

    def close(self) -> None:
        """Release memory and files, and close `base`; the temporary files stay for a rerun."""
        self._drop()
        super().close()


class _Dealt(Source):
    """What is left of a source whose samples are in buckets: what they are, and how many."""

    def __init__(self, source: Source) -> None:
        self.path, self.schema, self._count = source.path, source.schema, len(source)

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        raise UsageError("the samples are in buckets", where=self.path)

    def storage(self) -> dict[str, FieldStorage]:
        return {}

    def loading_code(self) -> str:
        return ""


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


def _ints(path: Path, start: int, count: int) -> Ints:
    """Return some of the numbers of a file of int64."""
    out = np.empty(count, np.int64)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pread_into(fd, out, 8 * start, path)
    finally:
        os.close(fd)
    return out


def _choose(base: Source, payload: int, mean: int, memory_nbytes: int) -> How:
    # Ragged samples are held twice while they are joined.
    if payload * (2 if base.schema.ragged else 1) <= memory_nbytes or not len(base):
        return "memory"
    located = base
    while isinstance(located, DerivedSource):
        located = located.base
    known = isinstance(located, SidecarSource) and located.resident_nbytes() == 0
    return "direct" if known and mean >= DIRECT_NBYTES else "buckets"


# --- buckets in memory -----------------------------------------------------------------------


class _Held:
    """A bucket that is in memory or on its way there.

    `users` are threads that read from it or wait for it, `unserved` the samples not given out.
    """

    def __init__(self, loading: Future[Batch], samples: int) -> None:
        self.loading, self.users, self.samples, self.unserved = loading, 0, samples, samples

    @property
    def batch(self) -> Batch:
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
        load: Callable[[int], Batch],
        per_bucket: int,
        count: int,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._load, self._per_bucket, self._count, self._close = load, per_bucket, count, close
        self._held: dict[int, _Held] = {}
        self._changed = threading.Condition()
        self._pool = ThreadPoolExecutor(1, "dsprep-shuffle")

    @contextmanager
    def bucket(self, bucket: int, samples: int) -> Iterator[_Held]:
        """Lend a bucket, of which `samples` will be read; waits until it is there."""
        with self._changed:
            while bucket not in self._held and not self._make_room(done_only=False):
                self._changed.wait()
            held = self._held.get(bucket) or self._start(bucket)
            held.users += 1
            if held.unserved < held.samples:  # not the first read: they go on from here
                self._load_ahead(bucket + 1)
        try:
            held.batch  # noqa: B018  (waits, and raises what went wrong)
            yield held
        finally:
            with self._changed:
                held.users -= 1
                held.unserved -= samples
                if held.loading.exception() is not None and self._held.get(bucket) is held:
                    del self._held[bucket]  # so that it is tried again
                if held.unserved <= 0:
                    self._load_ahead(bucket + 1)
                    self._load_ahead(bucket + 2)
                self._changed.notify_all()

    def _load_ahead(self, bucket: int) -> None:
        inside = bucket * self._per_bucket < self._count
        if inside and bucket not in self._held and self._make_room(done_only=True):
            self._start(bucket)

    def _start(self, bucket: int) -> _Held:
        samples = min(self._per_bucket, self._count - bucket * self._per_bucket)
        held = self._held[bucket] = _Held(self._pool.submit(self._load, bucket), samples)
        return held

    def _make_room(self, done_only: bool) -> bool:
        """Drop a bucket that nobody reads if there are too many; return whether there is room."""
        if len(self._held) < self.MOST:
            return True
        idle = [b for b, h in self._held.items() if not h.users and h.loading.done()]
        done = [b for b in idle if self._held[b].unserved <= 0]
        if not done and (done_only or not idle):
            return False
        del self._held[(done or idle)[0]]
        return True

    def close(self) -> None:
        """Forget all buckets."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._held.clear()
        self._close()
