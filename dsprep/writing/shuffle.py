"""A dataset in random order, in bounded memory whatever its size.

Reading samples of a large file one by one in random order is what this program exists to avoid.
Instead the samples are read once in the order in which they are stored and dealt into buckets on
disk (`buckets`), each of which fits in memory and has the samples of one range of the new order.
Then buckets are loaded one after another, and samples are served from them in the new order: the
second pass. Small datasets are kept in memory instead, as one bucket, and large samples whose
extents are known are read directly.

The first pass is cut into parts, ranges of samples, each of which is dealt into a file of its own,
by threads of this process or by the workers of an executor. Where it takes long, a part that is
there is complete, and a rerun deals the others. What is dealt again in seconds is not waited for
until it is on the disk, and a rerun deals all of it again.

The order is that of `permutation.Permutation`: it depends on seed and number of samples alone,
and every sample comes exactly once.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias

from typing_extensions import override

from dsprep.core.gather import LONG, Assembly, take
from dsprep.core.permutation import Permutation
from dsprep.core.schema import Arena, Batch, Ints, Schema, empty_batch
from dsprep.errors import FormatError
from dsprep.formats.base import Opening, Source
from dsprep.layout.describe import FieldStorage
from dsprep.sidecar.spec import read_record, write_record
from dsprep.source.derived import DerivedSource
from dsprep.storage.durable import sync, sync_directory
from dsprep.storage.nodes import wait_for
from dsprep.storage.trees import remove
from dsprep.writing.buckets import MOST, BucketReader, index_nbytes, write_runs
from dsprep.writing.plan import PIECE_NBYTES, payload_nbytes, pieces
from dsprep.writing.tasks import Task, begin_attempts, run_tasks

How: TypeAlias = Literal["memory", "direct", "buckets"]

Bucket: TypeAlias = tuple[Batch, Ints | None]
"""Samples, and which of them comes at each position of the new order; None: they are in it."""

DIRECT_NBYTES = 1 << 20
"""Bytes of a sample from which on a random read costs hardly more than a sequential one."""

SEGMENT_NBYTES = 256 << 10
"""Bytes of a bucket's segment of one run that make reading it back efficient."""

PART_NBYTES = 128 << 20
"""Payload of a part of a first pass, about."""

MOST_PARTS = 256
"""Parts of a first pass at most: the second pass has a file of each open, of 1024 by default."""

PIECES = 4
"""Pieces that are in memory at a time in the first pass, at most: one per thread."""

UNSYNCED_NBYTES = 4 << 30
"""Up to so many bytes, temporary files are made again by a rerun, not synced."""

_JOURNAL = "shuffle.json"


def _deal_part(
    base: Opening | Source,
    offset: int,
    samples: tuple[int, int],
    order: Permutation,
    per_bucket: int,
    piece_nbytes: int,
    durable: bool,
    directory: Path,
) -> None:
    """Deal a range of samples into a directory; sample `offset` of all is the first of `base`."""
    start, stop = samples
    with (
        nullcontext(base) if isinstance(base, Source) else base() as source,
        (directory / "runs").open("xb", buffering=0) as file,
    ):
        arena, ranges = Arena(), pieces(source, start - offset, stop - offset, target=piece_nbytes)
        batches = ((a + offset, source.read(a, b, arena)) for a, b in ranges)
        write_runs(file, source.schema, order, per_bucket, batches)
        if durable:
            sync(file.fileno(), data=True)
            sync_directory(directory)


def open_buckets(
    path: Path, schema: Schema, samples: int, per_bucket: int, files: Sequence[Path]
) -> BucketSource:
    """Return the samples that were dealt into files."""
    for each in files:
        wait_for(each)  # another node may have made it
    reader = BucketReader(files, schema, samples, per_bucket)
    return BucketSource(path, schema, samples, per_bucket, reader.load, reader)


class BucketSource(Source):
    """Samples in a new order, from buckets, of which the next is loaded while one is served.

    Parameters
    ----------
    path, schema
        Of what has the samples.
    samples, per_bucket
        In all, and of a bucket.
    load
        Returns a bucket.
    reader
        From which; closed with this.
    """

    def __init__(
        self,
        path: Path,
        schema: Schema,
        samples: int,
        per_bucket: int,
        load: Callable[[int], Bucket],
        reader: BucketReader | None = None,
    ) -> None:
        self.path, self.schema, self.reader = path, schema, reader
        self._samples, self._per_bucket, self._load = samples, per_bucket, load
        self._loaded: dict[int, Future[Bucket]] = {}
        self._unserved: dict[int, int] = {}  # of these, the samples that have not been asked for
        self._last = -1  # the bucket that was asked for last
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, "dsprep-shuffle")

    def __len__(self) -> int:
        return self._samples

    @override
    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        if start == stop:
            return empty_batch(self.schema)
        size = self._per_bucket
        edges = [start, *range((start // size + 1) * size, stop, size), stop]
        assembly = None
        if len(edges) > 2:
            assembly = Assembly(self.schema, stop - start, arena, "shuffled")
        for first, last in pairwise(edges):
            batch, rows = self._bucket(first // size, last - first)
            inside = slice(first % size, first % size + last - first)
            if rows is None:
                batch = {name: column[inside] for name, column in batch.items()}
            else:
                rows = rows[inside]
            if assembly is not None:
                assembly.put(first - start, batch, rows)
            elif rows is not None:
                batch = take(self.schema, batch, rows, arena, "shuffled")
        return batch if assembly is None else assembly.batch()

    def _bucket(self, number: int, samples: int) -> Bucket:
        """Return a bucket once it is read; after its last samples only readers of it keep it."""
        with self._lock:
            if number not in self._loaded:
                while len(self._loaded) > 1:
                    del self._loaded[min(self._loaded)]
                self._begin(number)
            bucket = self._loaded[number]
            self._unserved[number] -= samples
            if self._unserved[number] <= 0 and self._per_bucket < self._samples:
                del self._loaded[number]
            if 0 <= number - self._last <= 1:  # they are read in order
                for ahead in range(number + 1, number + 3):
                    if len(self._loaded) < 2:
                        self._begin(ahead)
            self._last = number
        return bucket.result()

    def _begin(self, number: int) -> None:
        """Begin to load a bucket."""
        left = self._samples - number * self._per_bucket
        if left > 0 and number not in self._loaded:
            self._loaded[number] = self._pool.submit(self._load, number)
            self._unserved[number] = min(left, self._per_bucket)

    def storage(self) -> dict[str, FieldStorage]:
        """Return nothing: they are temporary files."""
        return {}

    def close(self) -> None:
        """Let go of memory and files."""
        self._pool.shutdown(cancel_futures=True)
        self._loaded.clear()
        if self.reader is not None:
            self.reader.close()


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
        payload, _ = payload_nbytes(base, 0, len(base))
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
            runs = 2 * PIECES + 2 * payload // self._piece_nbytes + (len(base) >> 20)
            each = 4 + 8 * sum(f.ragged for f in base.schema)
            more = 4096 + payload // 20 * base.schema.ragged + runs * index_nbytes(self._buckets)
            self.scratch_nbytes = payload + each * len(base) + more
        self._opening: Callable[[], BucketSource] | None = None  # when all is dealt
        self._served: BucketSource | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.base)

    def numbers(self, indices: Ints) -> Ints:
        """Return the samples of `base` at some positions of the new order: int64."""
        return self._order.forward(indices)

    def prepare(self, executor: Executor | None = None) -> None:
        """Do the first pass, or what earlier runs left of it.

        Parameters
        ----------
        executor
            Who does it; None: threads of this process.

        Raises
        ------
        DsprepError, OSError
            If the data are damaged or a worker was lost; a rerun does the parts that are missing.
        """
        with self._lock:
            if self._served is not None or self.how == "direct":
                return
            n = len(self)
            if self.how == "memory":
                self._served = BucketSource(self.path, self.schema, n, n, self._load_all)
                return
            files = self._deal(executor)
            self._opening = partial(
                open_buckets, self.path, self.schema, n, self._per_bucket, files
            )
            self._served = self._opening()

    def _load_all(self, _: int) -> Bucket:
        """Return all samples, as the one bucket."""
        assembly = Assembly(self.schema, len(self))

        def read(bounds: tuple[int, int]) -> None:
            start, stop = bounds
            arena = None if assembly.ragged.fields else self.own_arena()
            assembly.put(start, self.base.read(start, stop, arena))

        with ThreadPoolExecutor(self._workers) as pool:
            list(pool.map(read, pieces(self.base, 0, len(self))))
        return assembly.batch(), self._order.all()

    def _deal(self, executor: Executor | None) -> list[Path]:
        """Deal the parts that are missing; what other runs left is removed if it is not of use."""
        parts = PIECES * -(-self.scratch_nbytes // (PIECES * PART_NBYTES))  # of equal size
        parts = min(len(self), MOST_PARTS, parts)
        facts: list[Any] = [5, self.seed, len(self), self._per_bucket, self._piece_nbytes, parts]
        facts += [str(self.path.absolute()), self._identity, self.schema.to_json()]
        job = json.dumps(facts)
        lasting = self.durable and self.scratch_nbytes > UNSYNCED_NBYTES
        journal, known = self.scratch / _JOURNAL, dict[str, Any]()
        with suppress(FormatError):
            known = read_record(journal)
        if not lasting or known.get("job") != job:
            remove(self.scratch)
        self.scratch.mkdir(parents=True, exist_ok=True)
        if lasting and known.get("job") != job:
            write_record({"job": job}, journal)
        attempts = begin_attempts(self.scratch)
        made = [attempts.parent / f"part-{i}" for i in range(parts)]
        edges = [i * len(self) // parts for i in range(parts + 1)]
        threads = ThreadPoolExecutor(min(self._workers, PIECES), "dsprep-shuffle")

        def task(i: int) -> Task[None]:
            base: Opening | Source
            base, offset, samples = self.base, 0, (edges[i], edges[i + 1])
            if executor is not None:
                base, offset = self.base.part(*samples)
            # Nobody learns of a crash of another node, which takes what is not on the disk.
            durable = lasting or executor is not None
            how = self._order, self._per_bucket, self._piece_nbytes, durable
            return Task(
                attempts=attempts,
                name=made[i].name,
                subject=made[i].name,
                durable=durable,
                make=partial(_deal_part, base, offset, samples, *how),
            )

        missing = (task(i) for i in range(parts) if not made[i].exists())
        with threads, closing(run_tasks(executor or threads, missing)) as done:
            for _ in done:
                pass
        return [path / "runs" for path in made]

    @override
    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        if self.how == "direct":
            return super().read(start, stop, arena)
        self.prepare()
        served = self._served
        assert served is not None
        return served.read(start, stop, arena)

    @override
    def part(self, start: int, stop: int) -> tuple[Opening, int]:
        # Samples that were dealt into buckets are read from those.
        if self.how != "buckets":
            return super().part(start, stop)
        self.prepare()
        assert self._opening is not None
        return self._opening, 0

    def resident_nbytes(self) -> int:
        """Return the bytes held besides the samples requested: buckets, or those of `base`."""
        if self.how == "direct":
            return self.base.resident_nbytes()
        return self._mean * self._per_bucket * min(2, self._buckets)

    def clean(self) -> None:
        """Remove the temporary files, when they are no longer needed."""
        self._drop()
        remove(self.scratch)

    def _drop(self) -> None:
        with self._lock:
            if self._served is not None:
                self._served.close()
            self._served = self._opening = None

    def close(self) -> None:
        """Release memory and files, and close `base`; the temporary files stay for a rerun."""
        self._drop()
        super().close()


def _choose(base: Source, payload: int, mean: int, memory_nbytes: int) -> How:
    # Ragged samples are held twice while they are joined.
    if payload * (2 if base.schema.ragged else 1) <= memory_nbytes or not len(base):
        return "memory"
    located = base
    while isinstance(located, DerivedSource):
        located = located.base
    known = located.random_access and located.resident_nbytes() == 0
    return "direct" if known and mean >= DIRECT_NBYTES else "buckets"
