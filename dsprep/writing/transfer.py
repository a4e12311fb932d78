"""The only copy loop: pieces from a source to a writer, on threads, in bounded memory.

Each worker reads a piece, encodes it, waits for its turn to get a place, and writes it. Reading,
compressing, checksumming and writing release the GIL; only giving places is serial. Every so many
bytes the data are made durable and the position is recorded, from which a later run continues.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeAlias

from dsprep.core.schema import Arena, Batch, batch_nbytes
from dsprep.formats.base import Source, State, Writer
from dsprep.writing.plan import Cast, apply_casts

CHECKPOINT_NBYTES = 256 << 20
"""Payload between two records of the position."""


Done: TypeAlias = tuple[int, int | None]
"""Samples that have been written, and their payload bytes; None: an earlier run had written them.
"""


class ShardCopy:
    """Copies one shard's samples from `source` to `writer`.

    Parameters
    ----------
    samples
        Those of the source that are the output, half-open.
    ranges
        The pieces still to be copied, in order, as ranges of source samples.
    casts
        Changes of dtype on the way.
    workers
        Threads.
    save
        Called with (samples done, writer state) when a position is durable; None: no position is
        recorded, and nothing waits for the disk.
    checkpoint_nbytes
        Payload between two calls of `save`.

    Attributes
    ----------
    last
        The last sample, when it has been copied.
    """

    def __init__(
        self,
        source: Source,
        writer: Writer,
        samples: tuple[int, int],
        ranges: Iterator[tuple[int, int]],
        casts: Mapping[str, Cast],
        workers: int,
        save: Callable[[int, State], None] | None = None,
        checkpoint_nbytes: int = CHECKPOINT_NBYTES,
    ) -> None:
        self._source, self._writer, self._casts = source, writer, casts
        self._start, self._end = samples
        self.last: Batch | None = None
        self._workers, self._save, self._checkpoint_nbytes = workers, save, checkpoint_nbytes
        self._pieces = enumerate(ranges)
        self._take = threading.Lock()
        self._turn = threading.Condition()
        self._next_turn = self._reserved = self._saved = 0
        self._stopped = self._failed = False
        self._reports: SimpleQueue[tuple[int, int, int] | BaseException | None] = SimpleQueue()
        # Positions from which a run could continue: (pieces before it, samples, writer state).
        self._positions: deque[tuple[int, int, State]] = deque()
        self._since_position = 0

    def run(self) -> Iterator[Done]:
        """Copy, yielding each piece when it has been written.

        Raises whatever a worker raised first, after all workers have ended. If it is broken off
        otherwise, the position is recorded up to which all has been written.
        """
        threads = [
            threading.Thread(target=self._work, name=f"dsprep-copy-{i}", daemon=True)
            for i in range(self._workers)
        ]
        for thread in threads:
            thread.start()
        running, written, prefix = len(threads), set[int](), 0  # pieces ``0 <= i < prefix`` are
        try:
            while running:
                report = self._reports.get()
                if report is None:
                    running -= 1
                    continue
                if isinstance(report, BaseException):
                    raise report
                index, *done = report
                written.add(index)
                while prefix in written:
                    written.remove(prefix)
                    prefix += 1
                self._save_position(prefix)
                yield done[0], done[1]
        finally:
            with self._turn:
                self._stopped = True
                self._turn.notify_all()
            for thread in threads:
                thread.join()
            if running and not self._failed and self._reserved > self._saved:
                with suppress(OSError, ValueError):  # the writer has been closed
                    self._positions = deque([(0, self._reserved, self._writer.checkpoint())])
                    self._save_position(0)

    def _save_position(self, prefix: int) -> None:
        """Make the last position that lies within the written prefix durable, and save it."""
        last = None
        with self._turn:
            while self._positions and self._positions[0][0] <= prefix:
                last = self._positions.popleft()
        if last is not None and self._save is not None:
            self._writer.sync()
            self._save(last[1], last[2])
            self._saved = last[1]

    def _work(self) -> None:
        arena = Arena()
        try:
            while not self._stopped:
                with self._take:
                    index, (start, stop) = next(self._pieces, (-1, (0, 0)))
                if index < 0:
                    break
                self._copy(index, start, stop, arena)
        except BaseException as error:
            with self._turn:
                self._failed = self._stopped = True
                self._turn.notify_all()
            self._reports.put(error)
        self._reports.put(None)

    def _copy(self, index: int, start: int, stop: int, arena: Arena) -> None:
        batch = apply_casts(self._source.read(start, stop, arena), self._casts, start)
        nbytes = batch_nbytes(batch)
        if stop == self._end:
            # No other piece of this thread takes its memory.
            self.last = {name: column[-1:] for name, column in batch.items()}
        piece: Any = self._writer.encode(batch, start - self._start, arena)
        with self._turn:
            self._turn.wait_for(lambda: self._stopped or self._next_turn == index)
            if self._stopped:  # another worker has failed
                return
            self._writer.reserve(piece)
            self._reserved = stop - self._start
            self._since_position += nbytes
            if self._save is not None and self._since_position >= self._checkpoint_nbytes:
                self._since_position = 0
                self._positions.append((index + 1, self._reserved, self._writer.checkpoint()))
            self._next_turn += 1
            self._turn.notify_all()
        self._writer.write(piece)
        if self._save is not None:
            self._writer.start_sync()
        self._reports.put((index, stop - start, nbytes))
