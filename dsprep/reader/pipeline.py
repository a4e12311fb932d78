"""The threads: one plans, some read, and the consumer takes batches as they are ready.

::

    planner                    readers (io_threads)            consumer
    units -> slots, places --> parts -> engine -> memory --+
      ^          |                                         |
      |          +----------- fills, in order ----------------> batches
      +--------------------- blocks that nobody holds <--------+

The planner takes the blocks of a unit before it plans it, so at most as many units are under way
as there is memory for: with two buffers, one is filled while the other is drained (Lee et al.,
section III-B).
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import numpy as np

from dsprep.core.schema import Arena, Batch, Bytes, Ints, Ragged
from dsprep.errors import DsprepError, FormatError, ReadError, UsageError
from dsprep.reader.cached import ReaderCache, Reading, Staged
from dsprep.reader.engines import Engine
from dsprep.reader.filling import Fill, ReadPart, Slice
from dsprep.reader.ledger import Ledger
from dsprep.reader.memory import Allocate, Block, Pool, Stopped, anonymous
from dsprep.reader.order import Assignment, EpochSegment, Segments
from dsprep.reader.unit_plan import SMALL, UnitPlanner
from dsprep.storage.base import Handle
from dsprep.storage.scatter import Runs, one_range, stepped

JOIN_SECONDS = 5.0
"""Seconds for which `Pipeline.close` waits for reads in progress. A thread whose read hangs, as on
a server that is away, is abandoned: it keeps its file and memory alive, and ends when the read
does."""


@dataclass(frozen=True)
class PipelineSettings:
    """PipelineSettings of a pipeline."""

    engine: Engine
    threads: int  # that read
    buffers: int  # units that are in memory at a time
    unit_samples: int  # of the largest unit
    first: int = 1  # threads at most that share the first unit of a loop
    align: int = 1 << 20  # bytes at whose multiples a unit is cut for several threads
    transfer: int | None = None  # bytes of a read call at most; None: a thread's part of a unit
    allocate: Allocate = anonymous
    token: Callable[[Callable[[], bool]], AbstractContextManager[Any]] = nullcontext
    """Held while reading: staggering. It is passed a function that returns whether the pipeline was
    closed, and raises `Stopped` then."""
    ahead: bool = True  # whether a unit is read before the consumer waits for it
    cache: ReaderCache | None = None

    @property
    def parts(self) -> int:
        """Parts of a unit at most, so that all threads read: one where each has a unit to read."""
        return -(-self.threads // max(1, self.buffers - 1))


@dataclass(frozen=True)
class ReadTask:
    """The reading of a Reader, regardless of its rank."""

    planner: UnitPlanner
    order: Assignment
    settings: PipelineSettings


class Pools:
    """The memory of a reader, which it keeps from one loop to the next.

    `more` blocks are for batches that somebody else may hold.
    """

    def __init__(self, planner: UnitPlanner, settings: PipelineSettings, more: int = 0) -> None:
        count = -(-settings.buffers * settings.unit_samples // planner.delivery.capacity) + 2 + more
        self.blocks = Pool(planner.delivery.block_nbytes, count, settings.allocate)
        self.values = {
            f.name: Pool(1, settings.buffers + 1 + more, settings.allocate)
            if f.ragged
            else Pool(1, settings.buffers)
            for f in planner.fields
            if f.ragged or f.row_nbytes < SMALL
        }
        self.each = [self.blocks, *self.values.values()]


class BatchSource(Protocol):
    """A source of batches, one after another: a `Pipeline`, or another process."""

    closed: bool

    def take(self, segment: EpochSegment, step: int, count: int) -> Batch:
        """Return the batch of the next step, which has `count` samples."""

    def end(self, segment: EpochSegment, last: bool) -> None:
        """Note that the steps of an epoch are over, and whether it was the last one."""

    def close(self) -> None:
        """Stop reading; batches that were handed out stay valid."""


class Steps:
    """The batches of some epochs, which may be endless, step by step, with their statistics.

    `segment` is what comes next; None after the last batch of the last epoch.
    """

    def __init__(self, source: BatchSource, segments: Segments, ledger: Ledger) -> None:
        self._source, self._ledger, self._coming = source, ledger, segments()
        self.segment = next(self._coming, None)
        self.close = source.close

    @property
    def closed(self) -> bool:
        """True if the source was closed."""
        return self._source.closed

    def batches(self) -> Iterator[tuple[EpochSegment, int, Batch]]:
        """Yield every batch of one epoch with that epoch and the number of its step.

        The next epoch, if there is one, comes from the next call, and is read ahead meanwhile.
        Raises `ReadError` if samples cannot be read.
        """
        segment = self.segment
        if segment is None:
            return
        at = segment.share.delivered(segment.first)
        for step in range(segment.first, segment.stop):
            began = time.perf_counter()
            count = segment.share.delivered(step + 1) - at
            batch = self._source.take(segment, step, count)
            waited = time.perf_counter() - began
            self._ledger.delivered(segment.number, count, waited, step == segment.first)
            at += count
            if step + 1 == segment.stop:
                self._end(segment)
            yield segment, step, batch
            del batch
        if segment.first == segment.stop:
            self._end(segment)

    def _end(self, segment: EpochSegment) -> None:
        self.segment = next(self._coming, None)
        self._source.end(segment, self.segment is None)


class Pipeline:
    """Batches of some epochs, which may be endless, read ahead by threads; a `BatchSource`.

    No other pipeline may use the `pools` meanwhile.
    """

    def __init__(
        self,
        planner: UnitPlanner,
        segments: Segments,
        settings: PipelineSettings,
        pools: Pools,
        ledger: Ledger,
    ) -> None:
        self._planner, self._segments = planner, segments
        self._settings, self._ledger = settings, ledger
        self._pools, self._blocks, self._values = pools, pools.blocks, pools.values
        for pool in pools.each:
            pool.start()
        self._requests: SimpleQueue[bool] = SimpleQueue()  # units that the consumer waits for
        self._fills: SimpleQueue[Fill | None] = SimpleQueue()
        self._jobs: SimpleQueue[tuple[int, Fill, ReadPart] | None] = SimpleQueue()
        self._lock, self._ending = threading.Lock(), threading.RLock()
        self._planned = self._taken = 0  # fills
        self._consumer_waits = False
        self._reading: Reading | None = None
        self._ready: deque[Slice] = deque()
        self.closed = False
        self._threads: list[threading.Thread] = []
        self._pid = os.getpid()
        works = [(f"dsprep-read-{i}", self._read) for i in range(settings.threads)]
        try:
            for name, work in (*works, ("dsprep-plan", self._plan)):
                thread = threading.Thread(target=work, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError as error:
            self.close()
            raise UsageError(
                f"{settings.threads} io_threads cannot be started: {error}", fix="take fewer"
            ) from error

    # --- the planner -------------------------------------------------------------------------

    def _plan(self) -> None:
        try:
            cache = self._settings.cache
            for segment in self._segments():
                self._reading = None if cache is None else cache.begin(segment)
                self._plan_segment(segment)
        except Stopped:
            return
        except BaseException as error:
            self._put(_failed_fill(error))

    def _plan_segment(self, segment: EpochSegment) -> None:
        share, sequence = segment.share, segment.epoch.sequence
        step, delivery = segment.first, self._planner.delivery
        start = at = end = share.delivered(step)  # positions: of the block, of what comes next
        stop = share.delivered(segment.stop)
        block: tuple[Block, Bytes] | None = None
        for unit in segment.epoch.units(share, at):
            if at == stop:
                return
            if len(unit) > stop - at:
                unit = unit.part(0, stop - at)
            samples, slots = sequence.slots(unit)
            ragged: dict[str, Ragged] = {}
            slices = []
            low, count = 0, len(samples)
            while low < count:
                if block is None:
                    units = -(-(count - low) // delivery.capacity)
                    block = self._blocks.take(0, self._starved, units)
                    step = min(step + delivery.batches, segment.stop)
                    start, end = at, share.delivered(step)
                high = min(count, low + end - at)
                slices.append(Slice(*block, at - start, low, high, ragged))
                at += high - low
                low = high
                if at == end:
                    block = None
            copy = self._find_copy(segment, samples)
            fill = Fill(samples, slots, tuple(slices), copy, ragged=ragged)
            self._hand_out(segment.number, self._planned_fill(fill))
            del fill, slices  # they hold blocks that the next unit may wait for

    def _find_copy(self, segment: EpochSegment, samples: Ints) -> Staged | None:
        """Return the copy from which samples are read; None: from the dataset itself."""
        if self._reading is None:
            return None
        staged, waited = self._reading.find(samples, lambda: self.closed)
        if waited:
            self._ledger.add(segment.number, stall_seconds=waited)
        return staged

    def _planned_fill(self, fill: Fill) -> Fill:
        """Plan what is to be read of a unit; from the dataset itself if its copy is gone."""
        settings = self._settings
        parts = settings.parts if self._planned else max(settings.parts, settings.first)
        try:
            self._planner.plan(fill, parts, settings.align, self._memory)
        except (OSError, DsprepError) as error:
            if fill.cached_copy is not None:
                fill.cached_copy.fail(error)
                again = Fill(fill.samples, fill.slots, fill.slices, ragged=fill.ragged)
                again.ragged.clear()
                return self._planned_fill(again)
            if isinstance(error, OSError):
                raise self._failure(error, fill, None) from error
            raise
        return fill

    def _hand_out(self, epoch: int, fill: Fill) -> None:
        if not self._settings.ahead and not self._requests.get():
            raise Stopped
        jobs = [(epoch, fill, part) for part in fill.parts]
        for job in jobs:  # before the consumer wakes up
            self._jobs.put(job)
        self._put(fill)
        if not jobs:
            self._finish(fill)

    def _memory(self, name: str, nbytes: int) -> Bytes:
        """Return memory for values of a field that do not go to a block at once."""
        return self._values[name].take(nbytes, self._starved)[1]

    def _starved(self) -> bool:
        """Return whether the consumer waits, and nothing is under way to it."""
        return self._consumer_waits and self._planned == self._taken

    def _put(self, fill: Fill) -> None:
        self._planned += 1
        self._fills.put(fill)

    # --- the readers -------------------------------------------------------------------------

    def _read(self) -> None:
        """Read the parts that are handed out, until the end."""
        arena = Arena()
        while (job := self._jobs.get()) is not None:
            epoch, fill, part = job
            if self.closed:
                fill.fail(closed_error())
            elif fill.error is None:
                self._run_job(epoch, fill, part, arena)
            del job, fill, part  # they hold blocks

    def _run_job(self, epoch: int, fill: Fill, part: ReadPart, arena: Arena) -> None:
        reads = nbytes = copied = 0
        try:
            with self._settings.token(lambda: self.closed):
                began = time.perf_counter()
                try:
                    reads, nbytes = self._get(fill, part, arena)
                    copied = nbytes if fill.cached_copy is not None else 0
                except (OSError, DsprepError) as error:
                    if fill.cached_copy is None:
                        raise
                    fill.cached_copy.fail(error)
                    fill.spoiled = True
                with self._lock:
                    fill.missing -= 1
                    last = fill.missing == 0
                if last and fill.spoiled:  # no other thread reads any of it now
                    copied = 0
                    fill.decoded.clear()
                    for each in list(fill.parts):
                        part = self._from_dataset(fill, each)
                        more = self._get(fill, part, arena, itself=True)
                        reads, nbytes = reads + more[0], nbytes + more[1]
        except Stopped:
            fill.fail(closed_error())
            return
        except BaseException as error:
            fill.fail(self._failure(error, fill, part))
            return
        if last:
            self._finish(fill)
        self._ledger.add(
            epoch,
            reads=reads,
            nbytes=nbytes,
            cache_nbytes=copied,
            units=int(last),
            cache_units=int(last and fill.cached_copy is not None and not fill.spoiled),
            io_seconds=time.perf_counter() - began,
        )

    def _get(
        self, fill: Fill, part: ReadPart, arena: Arena, *, itself: bool = False
    ) -> tuple[int, int]:
        """Read a part, or that of the dataset `itself`; return calls made, and bytes asked for."""
        if part.decode is not None:
            opened = self._planner.sidecar if itself else self._planner.opened(fill)
            return 1, part.decode(arena, opened)
        if part.file is not None and part.runs is not None:
            return self._read_part(part.file, part.runs)
        return 0, 0

    def _from_dataset(self, fill: Fill, part: ReadPart) -> ReadPart:
        """Return the part of the dataset itself in place of that of a copy, at the same offsets."""
        if part.file is None or part.file.original is None:
            return part
        file = self._planner.sidecar.open_file(*part.file.original)
        fill.files[file] = _offset(part)
        return replace(part, file=file)

    def _read_part(self, file: Handle, runs: Runs) -> tuple[int, int]:
        """Read ranges; return the calls made, and the bytes that they asked for."""
        engine, transfer = self._settings.engine, self._settings.transfer
        if transfer is None or int(runs.sizes.max(initial=0)) <= transfer:
            return engine.read_runs(file, runs)
        pieces = [piece for run in runs for piece in stepped(*run, transfer)]
        done = [engine.read_runs(file, one_range(*piece)) for piece in pieces]
        return sum(reads for reads, _ in done), sum(nbytes for _, nbytes in done)

    def _failure(self, error: BaseException, fill: Fill, part: ReadPart | None) -> BaseException:
        """Return the error for the consumer, with the sample that could not be read."""
        if not isinstance(error, (OSError, DsprepError)) or not len(fill.samples):
            return error
        sample = int(fill.samples[0])
        if part is not None:
            with suppress(OSError, DsprepError):  # this file, or another one, may be gone, too
                sample = self._planner.sample_at(fill, part, error)
        failure = ReadError(f"sample {sample} cannot be read: {error}", sample)
        failure.__cause__ = error
        return failure

    def _finish(self, fill: Fill) -> None:
        try:
            self._planner.delivery.finish(fill)
        except BaseException as error:
            fill.error = error
        fill.files |= {part.file: _offset(part) for part in fill.parts if part.file is not None}
        fill.parts.clear()
        fill.done.put(None)
        self._nudge()

    # --- the consumer ------------------------------------------------------------------------

    def take(self, segment: EpochSegment, step: int, count: int) -> Batch:
        """Return the batch of the next step; see `BatchSource`."""
        self._nudge()
        pieces: list[Slice] = []
        while count:
            if not self._ready:
                self._ready.extend(self._next().take())
            taken = self._ready.popleft()
            have = taken.high - taken.low
            if have > count:
                have = count
                taken, rest = taken.cut(count)
                self._ready.appendleft(rest)
                del rest
            count -= have
            pieces.append(taken)
            del taken
        return self._planner.delivery.batch(pieces)

    def _nudge(self) -> None:
        for pool in self._pools.each:
            pool.nudge()

    def end(self, segment: EpochSegment, last: bool) -> None:
        """Do nothing; see `BatchSource`."""

    def _next(self) -> Fill:
        """Return the next unit, once it is in memory."""
        if self._pid != os.getpid():
            raise forked_error()
        if self.closed:
            raise closed_error()
        if self._planned == self._taken:
            self._consumer_waits = True
            for pool in self._pools.each:
                pool.wake()
        if not self._settings.ahead:
            self._requests.put(True)
        fill = self._fills.get()
        self._consumer_waits = False
        self._taken += 1
        assert fill is not None
        self._nudge()
        fill.done.get()
        if fill.error is not None:
            try:
                raise fill.error
            finally:
                fill.error = None  # its traceback refers to this
        try:
            for file, offset in fill.files.items():
                file.check_same(offset)
        except FormatError as error:
            raise ReadError(str(error), int(fill.samples[0])) from error
        except OSError as error:  # the server is gone that it was read from
            sample = int(fill.samples[0]) if len(fill.samples) else -1
            reason = f"whether {file.path} changed is unknown: {error}"
            raise ReadError(f"sample {sample} is not given out: {reason}", sample) from error
        return fill

    # --- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Stop and join all threads; batches that were handed out stay valid."""
        if self._pid != os.getpid():  # a forked child has none of the threads
            return
        with self._ending:  # who comes second begins to read again once this is over
            if not self.closed:
                self.closed = True
                self._end_threads()

    def _end_threads(self) -> None:
        self._requests.put(False)
        for pool in self._pools.each:
            pool.stop()
        threads, self._threads = self._threads, []
        readers, planning = threads[: self._settings.threads], threads[self._settings.threads :]
        end = time.monotonic() + JOIN_SECONDS
        _join(planning, end)
        # Nothing of what is left is read any more; a consumer in another thread may wait for it.
        with suppress(Empty):
            while (job := self._jobs.get_nowait()) is not None:
                job[1].fail(closed_error())
        for _ in readers:
            self._jobs.put(None)
        _join(readers, end)
        while not self._fills.empty():
            self._fills.get()
        self._fills.put(_failed_fill(closed_error()))


def _join(threads: list[threading.Thread], end: float) -> None:
    """Wait for all of them but this one, until that `time.monotonic`."""
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, end - time.monotonic()))


def _offset(part: ReadPart) -> int:
    """Return the first offset of a part."""
    return 0 if part.runs is None or not len(part.runs.starts) else int(part.runs.starts[0])


def _failed_fill(error: BaseException) -> Fill:
    none = np.zeros(0, np.int64)
    fill = Fill(none, none, ())
    fill.fail(error)
    return fill


def forked_error() -> UsageError:
    """Return the error of a loop that is the parent's."""
    return UsageError(
        "this loop is of the process that was forked", fix="begin a loop of the Reader again"
    )


def closed_error() -> UsageError:
    """Return the error of a loop that was closed while it ran."""
    return UsageError("the reader was closed within the loop", fix="end the loop first")
