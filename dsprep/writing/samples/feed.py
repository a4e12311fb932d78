"""Samples that are written while a program makes them: what asks for them is given its memory.

A job asks for pieces, on several threads; the program fills them, in order, on its own thread. No
sample is kept, and none is copied more than once on its way to the writer.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from typing_extensions import override

from dsprep.core.schema import Arena, Array, Batch, Schema, empty_batch, new_array
from dsprep.errors import DsprepError, UsageError
from dsprep.writing.job import Job, Progress, Report, RunOptions
from dsprep.writing.run import run_jobs
from dsprep.writing.samples.assemble import Assembler
from dsprep.writing.samples.spool import GivenSource


class FedSource(GivenSource):
    """A known number of samples of fixed shape, each of which is read once and in order.

    Parameters
    ----------
    path
        What they are written to, for messages.
    schema, count
        The fields, none of them ragged, and the number of samples.
    """

    def __init__(self, path: Path, schema: Schema, count: int) -> None:
        self.path, self.schema = path, schema
        self._count = count
        self._requests: dict[int, tuple[dict[str, Array], threading.Event]] = {}
        self._at = self._end = 0  # the samples that are being filled in, half-open
        self._changed, self._allowed = threading.Condition(), threading.Event()
        self._is_abandoned = False
        self._pool = ThreadPoolExecutor(1, "dsprep-write")
        self._reports = Future[list[Report]]()

    def __len__(self) -> int:
        return self._count

    def begin(self, job: Job, run: RunOptions, progress: Progress | None) -> None:
        """Make the output of these samples on another thread; `finish` lets it be published."""
        report = None if progress is None else lambda _, *done: progress(*done)
        self._reports = self._pool.submit(run_jobs, [job], run, report, self._wait)

        def notify(_: object) -> None:
            with self._changed:
                self._changed.notify_all()

        self._reports.add_done_callback(notify)

    def _wait(self) -> None:
        self._allowed.wait()
        self._check()

    def _check(self) -> None:
        if self._is_abandoned:
            raise DsprepError("the program that gives the samples has stopped")

    @override
    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        if start == stop:
            return empty_batch(self.schema)
        arrays = {
            f.name: new_array(arena, f"given.{f.name}", (stop - start, *f.inner), f.dtype)
            for f in self.schema
        }
        filled = threading.Event()
        with self._changed:
            self._check()
            self._requests[start] = arrays, filled
            self._changed.notify_all()
        filled.wait()
        self._check()
        return dict(arrays)

    def _give(self) -> None:
        """Give what has been filled in to the thread that asked for it."""
        if self._end > self._at:
            _, filled = self._requests.pop(self._at)
            filled.set()
        self._at = self._end

    def next(self, packed: Assembler) -> int:
        """Give away what is filled in, and have the next samples put where they are wanted.

        Returns
        -------
        How many there is room for.
        """
        with self._changed:
            self._give()
            self._changed.wait_for(lambda: self._at in self._requests or self._reports.done())
            if self._at not in self._requests:
                self._reports.result()
                raise UsageError("more samples came than are written", where=self.path)
            packed.use(self._requests[self._at][0])
            self._end = self._at + packed.room
        return packed.room

    def finish(self) -> Report:
        """Publish the output, when it has been made."""
        with self._changed:
            self._give()
        self._allowed.set()
        return self._reports.result()[0]

    def abandon(self) -> None:
        """End the job; nothing is left of what has not been published."""
        with self._changed:
            self._is_abandoned = True
            for _, filled in self._requests.values():
                filled.set()
        self._allowed.set()
        self._pool.shutdown()
