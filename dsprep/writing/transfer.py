"""The only copy loop: pieces from a source to a writer, on threads, in bounded memory.

Each worker reads a piece, encodes it, waits for its turn to get a place, and writes it. Reading,
compressing, checksumming and writing release the GIL; only giving places is serial. Every so many
bytes the data are made durable and the position is recorded, from which a later run continues.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from queue import SimpleQueue
from typing import Any, TypeAlias

from dsprep.core.schema import Arena, Batch, batch_nbytes
from dsprep.formats.base import Source, State, Writer
from dsprep.writing.plan import Cast, apply_casts

CHECKPOINT_NBYTES = 256 << 20
"""Payload bytes between two records of the position."""


Done: TypeAlias = tuple[int, int | None]
"""Samples that have been written, and their payload bytes; None: an earlier run had written them.
"""


_Piece: TypeAlias = tuple[int, int, tuple[int, State] | None]
"""Samples, payload bytes, and perhaps a position behind them: samples before, and the writer's."""


class ShardCopy:
    """Copies one shard's samples from `source` to `writer`.

    Parameters
    ----------
    samples
        Half-open range of the samples of the source that are copied.
    ranges
        The pieces still to be copied, in order, as ranges of source samples.
    casts
        Changes of dtype by field name.
    workers
        Number of threads.
    save
        Called with (samples done, writer state) when a position is durable; None: no position is
        recorded, and nothing waits for the disk.
    checkpoint_nbytes
        Payload bytes between two calls of `save`.

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
        self._ranges, self._workers = ranges, workers
        self._save, self._checkpoint_nbytes = save, checkpoint_nbytes
        self._turn = threading.Condition()
        self._next_turn = self._reserved = self._saved = self._since_position = 0
        self._stopped = False
        self._arenas = SimpleQueue[Arena]()

    def run(self) -> Iterator[Done]:
        """Copy, yielding each piece when it and all before have been written.

        Raises whatever a worker raised first, after all workers have ended. If it is broken off
        otherwise, the position is recorded up to which all has been written.
        """
        for _ in range(self._workers):
            self._arenas.put(Arena())
        pool = ThreadPoolExecutor(self._workers, "dsprep-copy")
        running, ranges = deque[Future[_Piece]](), enumerate(self._ranges)
        try:
            while True:
                for index, (start, stop) in islice(ranges, 2 * self._workers - len(running)):
                    running.append(pool.submit(self._copy, index, start, stop))
                if not running:
                    return
                with suppress(CancelledError):  # another one has failed
                    samples, nbytes, position = running[0].result()
                    if position is not None:
                        self._save_position(*position)
                    yield samples, nbytes
                running.popleft()
        except (GeneratorExit, KeyboardInterrupt):
            self._stop()
            pool.shutdown(cancel_futures=True)
            errors = [future.exception() for future in running if not future.cancelled()]
            if all(error is None or isinstance(error, CancelledError) for error in errors):
                with suppress(OSError, ValueError):  # the writer has been closed
                    self._save_position(self._reserved, self._writer.checkpoint())
            raise
        finally:
            self._stop()
            pool.shutdown(cancel_futures=True)

    def _stop(self) -> None:
        with self._turn:
            self._stopped = True
            self._turn.notify_all()

    def _save_position(self, samples: int, state: State) -> None:
        """Make a position durable, and save it."""
        if self._save is not None and samples > self._saved:
            self._writer.sync()
            self._save(samples, state)
            self._saved = samples

    def _copy(self, index: int, start: int, stop: int) -> _Piece:
        arena, position = self._arenas.get(), None
        try:
            if self._stopped:
                raise CancelledError
            batch = apply_casts(self._source.read(start, stop, arena), self._casts, start)
            nbytes = batch_nbytes(batch)
            piece: Any = self._writer.encode(batch, start - self._start, arena)
            with self._turn:
                self._turn.wait_for(lambda: self._stopped or self._next_turn == index)
                if self._stopped:
                    raise CancelledError
                self._writer.reserve(piece)
                self._reserved = stop - self._start
                self._since_position += nbytes
                if self._save is not None and self._since_position >= self._checkpoint_nbytes:
                    self._since_position = 0
                    position = self._reserved, self._writer.checkpoint()
                self._next_turn += 1
                self._turn.notify_all()
            self._writer.write(piece)
            if self._save is not None:
                self._writer.start_sync()
        except BaseException:
            self._stop()
            raise
        finally:
            if stop != self._end:
                self._arenas.put(arena)
        if stop == self._end:
            self.last = {name: column[-1:] for name, column in batch.items()}
        return stop - start, nbytes, position
