"""Strategies that deliver nothing: plain ``preadv`` (the 100 % line), steps without reading."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import ClassVar, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from dsprep.bench.strategies.base import Strategy
from dsprep.core.schema import Bytes, Ints
from dsprep.errors import UsageError
from dsprep.layout.as_json import file_path
from dsprep.reader.engines.direct import Opened
from dsprep.reader.memory import Pool
from dsprep.reader.order import share
from dsprep.reader.units import group_edges
from dsprep.reading.read_plan import shared
from dsprep.sidecar.sidecar import Sidecar
from dsprep.storage.base import Handle

_ALIGN = 64 << 10
"""Bytes at whose multiples buffers begin: whole blocks of direct reads."""

Job: TypeAlias = tuple[int, Handle, int, int]
"""Samples, and the extent of their bytes: a file, an offset, a number of bytes."""


@dataclass(frozen=True)
class GroupTable:
    """Where the groups of a dataset are stored."""

    edges: Ints  # int64, shape `(groups + 1,)`: the first sample of each, and the number of samples
    file: Ints  # int64, shape `(groups,)`: the file that it is in, one of `files`
    files: list[tuple[int, str]]  # number of the file entry, and the path below it
    offsets: Ints  # int64, shape `(groups,)`, as the lengths in bytes
    lengths: Ints

    @classmethod
    def of(cls, sidecar: Sidecar) -> GroupTable:
        """Return the groups of a dataset."""
        edges = group_edges(sidecar)
        if edges is None:
            raise UsageError(
                "the dataset has no groups", where=sidecar.dataset, fix="write it by dsprep repack"
            )
        files: list[tuple[int, str]] = []
        columns: list[list[Ints]] = [[np.zeros(0, np.int64)] for _ in range(3)]
        for number, entry in enumerate(sidecar.content.files):
            groups = sidecar.layout(number).groups if entry.samples else None
            if groups is None:
                continue
            n, path = groups.blocks.count, groups.blocks.path
            each = groups.files or n
            columns[0].append(len(files) + np.arange(n, dtype=np.int64) // each)
            columns[1].append(groups.blocks.offsets.span(0, n))
            columns[2].append(groups.blocks.lengths.span(0, n))
            files += [
                (number, file_path(path, [k]) if groups.files else path)
                for k in range(-(-n // each))
            ]
        file, offsets, lengths = (np.concatenate(c) for c in columns)
        return cls(edges, file, files, offsets, lengths)

    def shared(self, order: Ints, start: int, stop: int) -> tuple[Ints, Ints, Ints, Ints]:
        """Return the groups that hold some positions of a sequence of groups.

        Parameters
        ----------
        order
            int64, shape ``(groups,)``: the groups in sequence.
        start, stop
            Which of the samples, in sequence.

        Returns
        -------
        Samples, file, offset and number of bytes of each group, int64; of a group that is only
        partly among them, its samples' share of the bytes.
        """
        sizes = np.diff(self.edges)[order]
        ends = np.cumsum(sizes)
        some = np.flatnonzero((ends > start) & (ends - sizes < stop))
        order, sizes, ends = order[some], sizes[some], ends[some]
        low = np.maximum(0, start - (ends - sizes))
        high = sizes - np.maximum(0, ends - stop)
        begin = self.lengths[order] * low // sizes
        end = self.lengths[order] * high // sizes
        return high - low, self.file[order], self.offsets[order] + begin, end - begin


@dataclass(eq=False)
class Group:
    """A group under way."""

    samples: int
    buffer: Bytes  # where its bytes go
    left: int = 0  # parts that are not in memory yet
    end: int = 0  # samples that are in memory when it is


Work: TypeAlias = tuple[Group, Callable[[], None]]
"""A part of a group, and what reads it."""


class Counting(Strategy):
    """A strategy that delivers nothing: its items are numbers of samples."""

    delivers: ClassVar[bool] = False

    def size(self, item: int) -> int:
        """Return the samples of a step."""
        return int(item)


class Dummy(Counting):
    """Nothing is read, as with the dummy data of SC18's CosmoFlow: what is left is not I/O."""

    def prepare(self, resources: ExitStack) -> None:
        """Open nothing."""

    def epoch(self, number: int) -> Iterator[int]:
        """Yield the number of samples of each step."""
        return map(len, self.task.batches(number))


class Limit(Counting):
    """As many bytes as the groups have, the groups shuffled, read into buffers used in turn.

    A rank reads as much as a Reader's rank: n / P of the n samples in shuffled groups, and of a
    group that two ranks share, each its part of the bytes; all ranks together read all bytes
    once. A step is done as soon as as many samples as it needs are in memory. As in a Reader, the
    threads share a group, each a part of it, and are no more groups ahead of the consumer than
    there are buffers. The engine ``mapped`` has no such line of its own: there it is
    ``buffered``.
    """

    def prepare(self, resources: ExitStack) -> None:
        """Find the groups, and touch the memory that they are read into."""
        task = self.task
        self._sidecar = sidecar = resources.enter_context(Sidecar.open(task.path))
        self._table = GroupTable.of(sidecar)
        largest = int(self._table.lengths.max(initial=1))
        count = max(task.buffers, task.threads)
        pool = Pool(-(-(largest + 2 * _ALIGN) // _ALIGN) * _ALIGN, count)
        self._buffers = [pool.take(0, lambda: False)[1] for _ in range(count)]
        for buffer in self._buffers:
            buffer[::4096] = 0
        self._direct: WeakKeyDictionary[Handle, Opened] = WeakKeyDictionary()

    def epoch(self, number: int) -> Iterator[int]:
        """Yield the number of samples of each step, once that many are in memory."""
        task = self.task
        mine = share(task.samples, task.world_size, task.rank, task.batch_size, "ragged")
        groups = self._groups(number, mine.start, mine.start + mine.own)
        work: SimpleQueue[Work | None] = SimpleQueue()
        done: SimpleQueue[Group | BaseException] = SimpleQueue()

        def start(buffer: Bytes) -> None:
            job = next(groups, None)
            if job is not None:
                samples, file, offset, nbytes = job
                group = Group(samples, buffer)
                parts = self._parts(file, offset, nbytes, buffer)
                group.left = len(parts)
                for part in parts:
                    work.put((group, part))

        threads = [
            threading.Thread(target=_work, args=(work, done), daemon=True)
            for _ in range(task.threads)
        ]
        try:
            for thread in threads:
                thread.start()
            for buffer in self._buffers:
                start(buffer)
            loaded: deque[Group] = deque()  # in memory
            have = requested = 0
            for count in mine.sizes(0, mine.steps).tolist():
                requested += count
                while True:
                    while loaded and loaded[0].end <= requested:
                        start(loaded.popleft().buffer)
                    if have >= requested:
                        break
                    read = done.get()
                    if isinstance(read, BaseException):
                        raise read
                    read.left -= 1
                    if not read.left:
                        have = read.end = have + read.samples
                        loaded.append(read)
                yield count
        finally:
            while not work.empty():
                work.get()
            for _ in threads:
                work.put(None)
            for thread in threads:
                if thread.ident is not None:
                    thread.join()

    def _groups(self, epoch: int, start: int, stop: int) -> Iterator[Job]:
        """Yield what is to be read, group by group."""
        table = self._table
        order = np.random.default_rng([self.task.seed, epoch]).permutation(len(table.file))
        columns = table.shared(order, start, stop)
        for samples, file, offset, nbytes in zip(*(c.tolist() for c in columns), strict=True):
            yield samples, self._sidecar.open_file(*table.files[file]), offset, nbytes

    def _parts(
        self, file: Handle, offset: int, nbytes: int, buffer: Bytes
    ) -> list[Callable[[], None]]:
        """Cut a group into as many parts as there are threads, unless they get too small."""
        iovecs = np.array([[0, nbytes]], np.int64)
        low = offset // _ALIGN * _ALIGN
        calls: list[Callable[[], None]] = []
        for at, part in shared(offset, iovecs, self.task.threads, _ALIGN):
            begin = at // _ALIGN * _ALIGN if self.task.engine == "direct" else at
            size, into = int(part[:, 1].sum()), buffer[begin - low :]
            calls.append(partial(self._read, file, at, size, into))
        return calls

    def _read(self, file: Handle, start: int, nbytes: int, buffer: Bytes) -> None:
        if self.task.engine == "direct":
            self._read_direct(file, start, nbytes, buffer)
            return
        step = self.task.transfer_size or max(1, nbytes)
        for at in range(0, nbytes, step):
            file.pread_into(buffer[at : min(nbytes, at + step)], start + at)

    def _read_direct(self, file: Handle, start: int, nbytes: int, buffer: Bytes) -> None:
        opened = self._direct.get(file)
        if opened is None:
            opened = self._direct.setdefault(file, Opened(file))
        block = opened.block
        low, stop = start // block * block, -(-(start + nbytes) // block) * block
        step = max(1, (self.task.transfer_size or stop - low) // block) * block
        for at in range(low, stop, step):
            size = min(step, stop - at)
            minimum = min(size, start + nbytes - at)
            opened.read(file, buffer[at - low : at - low + size], at, minimum)


def _work(work: SimpleQueue[Work | None], done: SimpleQueue[Group | BaseException]) -> None:
    """Read parts until there is None."""
    while (part := work.get()) is not None:
        group, read = part
        try:
            read()
        except BaseException as error:
            done.put(error)
            return
        done.put(group)
