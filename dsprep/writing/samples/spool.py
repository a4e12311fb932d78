"""Samples that are kept until all are known: in memory, and what is more in a file without a name.

Where groups begin depends on how many samples there are and, if they are ragged, on their sizes.
The file has what came at a time, field by field, as raw bytes. It is never waited for: it is of use
to this process only, and goes with it.
"""

from __future__ import annotations

import itertools
import mmap
import tempfile
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from typing_extensions import override

from dsprep.core.schema import Arena, Batch, Bytes, Field, Ints, Ragged, Schema, new_array
from dsprep.formats.base import Source
from dsprep.layout.describe import FieldStorage
from dsprep.storage.atomic import make_scratch
from dsprep.storage.durable import punch, write_error
from dsprep.storage.ranges import as_bytes, pread_into, pwrite_all
from dsprep.writing.samples.feed import GIVEN

WAITING = 2
"""Batches that are in memory until they are written, at most."""

_BYTE = np.dtype(np.uint8)


class Spool(Source):
    """Samples kept in memory and in a temporary file, and then read from there, in any order.

    Parameters
    ----------
    path
        What they are for: the file is in the same directory.
    schema
        The fields.
    memory
        Bytes from which on the samples that come go to the file.
    """

    repeatable = False
    random_access = True

    def __init__(self, path: Path, schema: Schema, memory: int = 0) -> None:
        self.path, self.schema, self.version = path, schema, GIVEN
        self._file = tempfile.TemporaryFile(dir=make_scratch(path), buffering=0)  # noqa: SIM115 (`close`)
        self._fd, self._end, self._released = self._file.fileno(), 0, 0
        self._memory = memory
        self._ready: Future[Arena] | None = None
        self._kept: dict[int, dict[str, memoryview]] = {}  # batches in memory, by number
        self._pool = ThreadPoolExecutor(1, "dsprep-spool")
        self._writing: deque[Future[int]] = deque()
        self._arenas = itertools.cycle([Arena() for _ in range(WAITING + 1)])
        self._firsts = [0]  # the first sample of each batch, and the number of all
        self._offsets: list[dict[str, int]] = []  # by field, where a batch begins
        self._parts: dict[str, list[Ints]] = {f.name: [] for f in schema if f.ragged}
        self._edges: dict[str, Ints] = {}

    def memory(self) -> Arena | None:
        """Return memory for the batch after the next one; None: fresh memory, as it may be kept.

        It is free when `put` has returned.
        """
        if self._end >= self._memory:
            return next(self._arenas)
        ready, self._ready = self._ready, None
        return None if ready is None else ready.result()

    def put(self, batch: Batch) -> None:
        """Add samples; the batch is not changed until it is written: see `memory`."""
        at, buffers, offsets = self._end, dict[str, memoryview](), dict[str, int]()
        for f in self.schema:
            column = batch[f.name]
            if isinstance(column, Ragged):
                self._parts[f.name].append(column.lengths)
            values = column.values if isinstance(column, Ragged) else column
            buffers[f.name], offsets[f.name] = as_bytes(np.ascontiguousarray(values)), self._end
            self._end += values.nbytes
        if at < self._memory:
            self._kept[len(self._offsets)] = buffers
            sizes = {f.name: len(buffers[f.name]) for f in self.schema if not f.ragged}
            self._ready = self._pool.submit(_touched, sizes)
        else:
            while len(self._writing) >= WAITING:
                self._writing.popleft().result()
            self._writing.append(self._pool.submit(self._write, buffers, at))
        self._firsts.append(self._firsts[-1] + len(column))
        self._offsets.append(offsets)

    def _write(self, buffers: dict[str, memoryview], at: int) -> int:
        return pwrite_all(self._fd, list(buffers.values()), at)

    def spill(self) -> None:
        """Have all that is in memory in the file."""
        for number in list(self._kept):
            self._write(self._kept[number], min(self._offsets[number].values()))
            del self._kept[number]

    def finish(self) -> None:
        """Have all samples in memory or in the file; from then on they are read.

        Raises
        ------
        OSError
            If the file system has no space for them.
        """
        while self._writing:
            self._writing.popleft().result()
        self._pool.shutdown()
        self._arenas = itertools.cycle([])
        for name, parts in self._parts.items():
            lengths = np.concatenate([np.zeros(1, np.int64), *parts])
            parts.clear()
            self._edges[name] = np.cumsum(lengths, out=lengths)

    def __len__(self) -> int:
        return self._firsts[-1]

    @override
    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        columns: Batch = {}
        for f in self.schema:
            edges = self._edges.get(f.name)
            low, high = (start, stop) if edges is None else (int(edges[start]), int(edges[stop]))
            out = new_array(arena, f"given.{f.name}", (high - low, *f.inner), f.dtype)
            if out.nbytes:
                self._read_rows(f, edges, (start, stop), out.reshape(-1).view(np.uint8))
            columns[f.name] = out
            if edges is not None:
                columns[f.name] = Ragged(out, edges[start : stop + 1] - low, f.kind)
        write_error(self._fd)  # the system may drop what it failed to bring to the disk
        return columns

    def _read_rows(
        self, field: Field, edges: Ints | None, samples: tuple[int, int], out: Bytes
    ) -> None:
        """Fill `out` with the bytes of a field of some samples, batch by batch."""
        start, stop = samples
        part = int(np.searchsorted(self._firsts, start, "right")) - 1
        done = 0
        while start < stop:
            first, end = self._firsts[part], min(stop, self._firsts[part + 1])
            low, at, high = (first, start, end) if edges is None else edges[[first, start, end]]
            nbytes, before = int(high - at) * field.row_nbytes, int(at - low) * field.row_nbytes
            rows = out[done : done + nbytes]
            if part in self._kept:
                rows[:] = self._kept[part][field.name][before : before + nbytes]
            else:
                offset = self._offsets[part][field.name] + before
                pread_into(self._fd, rows, offset, f"{self.path}, temporary file")
            done, start, part = done + nbytes, end, part + 1

    @override
    def rows(self, name: str, start: int, stop: int) -> Ints | None:
        return np.diff(self._edges[name][start : stop + 1])

    def release(self, first: int) -> None:
        """Give back the space of the samples before this one; see `Source.release`."""
        part = int(np.searchsorted(self._firsts, first, "right")) - 1
        for number in [n for n in self._kept if n < part]:
            del self._kept[number]
        end = self._end if part == len(self._offsets) else min(self._offsets[part].values())
        if end > self._released:
            punch(self._fd, self._released, end - self._released)
            self._released = end

    @override
    def resident_nbytes(self) -> int:
        return sum(b.nbytes for buffers in self._kept.values() for b in buffers.values())

    def files(self) -> list[Path]:
        """Return nothing: the file has no name."""
        return []

    def storage(self) -> dict[str, FieldStorage]:
        """Return nothing, as `files` does."""
        return {}

    def close(self) -> None:
        """Close the file, with which it goes."""
        self._pool.shutdown(cancel_futures=True)
        self._file.close()


def _touched(sizes: dict[str, int]) -> Arena:
    """Return memory for columns of so many bytes, whose pages are there when it is written to."""
    arena = Arena()
    for name, nbytes in sizes.items():
        arena.empty(f"given.{name}", (nbytes,), _BYTE)[:: mmap.PAGESIZE] = 0
    return arena
