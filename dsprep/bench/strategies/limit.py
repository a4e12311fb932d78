"""Ways that deliver nothing: plain ``preadv`` (the 100 % line), steps without reading.

Their items are numbers of samples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import TypeAlias

import numpy as np

from dsprep.bench.delays import delay_of
from dsprep.bench.strategies.base import Way
from dsprep.bench.task import Task
from dsprep.core.schema import Bytes, Ints
from dsprep.errors import UsageError
from dsprep.layout.as_json import file_path
from dsprep.reader.engines import make
from dsprep.reader.memory import Pool
from dsprep.reader.order import share
from dsprep.reader.units import group_edges
from dsprep.reading.read_plan import shared
from dsprep.sidecar.sidecar import Sidecar
from dsprep.storage.base import Handle
from dsprep.storage.scatter import one_range

_ALIGN = 64 << 10
"""Bytes at whose multiples buffers begin: whole blocks of direct reads."""

Extents: TypeAlias = list[tuple[int, tuple[int, str], int, int]]
"""Of groups: samples, the number of the file entry and the path below it, offset and bytes."""


def groups_of(sidecar: Sidecar) -> Extents:
    """Return where the groups of a dataset are stored, in the order of their samples."""
    edges = group_edges(sidecar)
    if edges is None:
        raise UsageError(
            "the dataset has no groups", where=sidecar.dataset, fix="write it by dsprep repack"
        )
    stored: list[tuple[tuple[int, str], int, int]] = []
    for number, entry in enumerate(sidecar.content.files):
        groups = sidecar.layout(number).groups if entry.samples else None
        if groups is None:
            continue
        blocks, count = groups.blocks, groups.blocks.count
        paths = [
            file_path(blocks.path, [k // groups.files]) if groups.files else blocks.path
            for k in range(count)
        ]
        extents = (blocks.offsets.span(0, count).tolist(), blocks.lengths.span(0, count).tolist())
        stored += [((number, p), at, n) for p, at, n in zip(paths, *extents, strict=True)]
    sizes = np.diff(edges).tolist()
    return [(size, *where) for size, where in zip(sizes, stored, strict=True)]


def _between(
    groups: Extents, order: Ints, start: int, stop: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield number, samples, offset and bytes of the groups that hold some positions."""
    # Of a group that is only partly among them, its samples' share of the bytes.
    end = 0
    for i in order.tolist():
        size, _, offset, nbytes = groups[i]
        begin, end = end, end + size
        low, high = max(0, start - begin), size - max(0, end - stop)
        if end > start and begin < stop:
            first, last = nbytes * low // size, nbytes * high // size
            yield i, high - low, offset + first, last - first


def open_dummy(task: Task, resources: ExitStack) -> Way:
    """Open nothing, as with the dummy data of SC18's CosmoFlow: what is left is not I/O."""
    return Way(lambda number: map(len, task.batches(number)), int)


def open_limit(task: Task, resources: ExitStack) -> Way:
    """Open the groups, as many bytes as they have, shuffled, read into buffers used in turn.

    A rank reads as much as a Reader's rank: n / P of the n samples in shuffled groups, and of a
    group that two ranks share, each its part of the bytes; all ranks together read all bytes
    once. A step is done as soon as as many samples as it needs are in memory. As in a Reader, the
    threads share a group, each a part of it, and are no more groups ahead of the consumer than
    there are buffers.
    """
    sidecar = resources.enter_context(Sidecar.open(task.path))
    extents, engine, delay = groups_of(sidecar), make(task.engine), delay_of(task)
    largest, count = max((n for *_, n in extents), default=1), max(task.buffers, task.threads)
    pool = Pool(-(-(largest + 2 * _ALIGN) // _ALIGN) * _ALIGN, count)
    buffers = [pool.take(0, lambda: False)[1] for _ in range(count)]
    for buffer in buffers:
        buffer[::4096] = 0
    threads = resources.enter_context(ThreadPoolExecutor(task.threads))

    def read(file: Handle, start: int, into: Bytes) -> None:
        """Read a part of a group, by calls of so many bytes at most."""
        step = task.transfer_size or max(1, len(into))
        for at in range(0, len(into), step):
            part = into[at : at + step]
            if engine.name == "direct":
                iovecs = np.array([[part.ctypes.data, len(part)]], np.int64)
                engine.read_runs(file, one_range(start + at, iovecs))
            else:
                file.pread_into(part, start + at)
            delay(len(part), 1)

    def begin(i: int, offset: int, nbytes: int, buffer: Bytes) -> list[Future[None]]:
        """Begin to read a group, in as many parts as there are threads, unless they are small."""
        file, low = sidecar.open_file(*extents[i][1]), offset // _ALIGN * _ALIGN
        reads = []
        for at, part in shared(offset, np.array([[0, nbytes]], np.int64), task.threads, _ALIGN):
            end = at + int(part[:, 1].sum())
            if engine.name == "direct":  # whole blocks, which the device writes to their place
                at, end = at // _ALIGN * _ALIGN, min(file.nbytes, -(-end // _ALIGN) * _ALIGN)
            reads.append(threads.submit(read, file, at, buffer[at - low : end - low]))
        return reads

    def epoch(number: int) -> Iterator[int]:
        mine = share(task.samples, task.world_size, task.rank, task.batch_size, "ragged")
        order = np.random.default_rng([task.seed, number]).permutation(len(extents))
        groups = _between(extents, order, mine.start, mine.start + mine.own)
        return _steps(groups, begin, buffers, mine.sizes(0, mine.steps).tolist())

    return Way(epoch, int)


def _steps(
    groups: Iterator[tuple[int, int, int, int]],
    begin: Callable[[int, int, int, Bytes], list[Future[None]]],
    buffers: list[Bytes],
    sizes: list[int],
) -> Iterator[int]:
    """Yield the number of samples of each step, once that many are in memory."""
    coming = deque[tuple[int, list[Future[None]], Bytes]]()
    loaded = deque[tuple[int, Bytes]]()  # the last position of groups in memory
    free, have, requested = deque(buffers), 0, 0
    try:
        for size in sizes:
            requested += size
            while have < requested or (loaded and loaded[0][0] <= requested):
                while loaded and loaded[0][0] <= requested:
                    free.append(loaded.popleft()[1])
                while free and (group := next(groups, None)) is not None:
                    i, samples, at, nbytes = group
                    buffer = free.popleft()
                    coming.append((samples, begin(i, at, nbytes, buffer), buffer))
                if have < requested:
                    samples, reads, buffer = coming.popleft()
                    for each in reads:
                        each.result()
                    have += samples
                    loaded.append((have, buffer))
            yield size
    finally:
        wait([each for _, reads, _ in coming for each in reads if not each.cancel()])
