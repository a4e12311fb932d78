"""The steps by which LMDBIO made reading from LMDB faster, a level each.

The pattern is the paper's: nothing is shuffled; in a step all ranks together take a contiguous
block of ``world_size * batch_size`` records, and rank r the r-th part of it. Every record comes
once in an epoch; of the records left for a last, smaller block every rank gets an equal share.
Reading is not overlapped with computing. Each level adds one thing to the one before it:

============ ======== ======== ======== ========= ======== =========
level        one      jumps    explicit offsets   many     readers
             reads    to its   reads    computed  steps by take
             for all  records                     one read turns
============ ======== ======== ======== ========= ======== =========
LMM          x
DM           x        x
DIO          x        x        x
PROV         x        x        x        x
COAL         x        x        x        x         x
STAG         x        x        x        x         x        x
============ ======== ======== ======== ========= ======== =========

Source: Pumma et al., "Scalable Deep Learning via I/O Analysis and Optimization".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from dsprep.bench.strategies.base import Way
from dsprep.bench.strategies.lmdbio.node import Neighbours
from dsprep.bench.strategies.lmdbio.records import Cursor, Records, computed, explicit, table
from dsprep.bench.task import Task
from dsprep.core.schema import Batch
from dsprep.formats.lmdb import data_file
from dsprep.formats.lmdb.values import Values
from dsprep.reader.memory import PAGE
from dsprep.reader.node.tokens import Local, Stagger
from dsprep.reader.units import BUFFER_NBYTES, sample_nbytes
from dsprep.sidecar.sidecar import Sidecar

LMM, DM, DIO, PROV, COAL, STAG = range(6)
"""The levels."""

Window: TypeAlias = tuple[int, int, int]
"""Records read at a time, ``start <= i < stop``, and the steps for which they last: one, or
as many as are read by one large read."""


@dataclass(frozen=True)
class Assignment:
    """The assignment of records to ranks, and of ranks to those that read for them."""

    samples: int  # records, numbered in the order of their keys
    ranks: int  # of the run
    batch_size: int  # a step takes `ranks * batch_size` records
    roots: int  # ranks that read: each for itself and its neighbours
    steps: int = 1  # of a window

    def root_of(self, rank: int) -> int:
        """Return which of the roots reads for a rank."""
        return next(j for j in range(self.roots) if rank in self.members(j))

    def members(self, root: int) -> range:
        """Return the ranks that a root reads for; it is the first of them."""
        return range(root * self.ranks // self.roots, (root + 1) * self.ranks // self.roots)

    def windows(self) -> Iterator[Window]:
        """Yield what all roots together read at a time; only the last one has fewer records."""
        block = self.ranks * self.batch_size
        full = self.samples // block
        for step in range(0, full, self.steps):
            until = min(step + self.steps, full)
            yield step * block, until * block, until - step
        if full * block < self.samples:
            yield full * block, self.samples, 1

    def span(self, window: Window, root: int) -> tuple[int, int]:
        """Return the records that a root reads: first, and after the last."""
        ranks = self.members(root)
        return self._edge(window, ranks.start), self._edge(window, ranks.stop)

    def part(self, window: Window, rank: int, step: int) -> tuple[int, int]:
        """Return the records that a rank gets in a step of a window."""
        if window[2] == 1:
            return self._edge(window, rank), self._edge(window, rank + 1)
        ranks = self.members(self.root_of(rank))
        first = self._edge(window, ranks.start)
        first += (step * len(ranks) + rank - ranks.start) * self.batch_size
        return first, first + self.batch_size

    def _edge(self, window: Window, rank: int) -> int:
        start, stop, _ = window
        return start + (stop - start) * rank // self.ranks


def open_steps(task: Task, resources: ExitStack, *, level: int) -> Way:
    """Open a root, which reads for its neighbours into shared memory, or a neighbour.

    The ranks find each other; `Task.readers_per_node` of them are roots. LMM: a root goes through
    the records by a cursor of LMDB, which maps the file, from the first one on: to its own part of
    the first step (the sequential seek), and over the parts of the other roots from step to step.
    So with one root on one node there is nothing to seek, and with one rank this is plain reading
    by a cursor. What further levels add is in the table above. In the paper, DM hands a cursor on
    from rank to rank, between nodes whose mappings are at the same address; here a root asks for
    the key of its first record. There one process finds the offsets of DIO and hands them out to
    all roots; here every root does it for its own records. COAL reads as many steps as
    `Task.buffer_nbytes` hold, 64 MiB by default: ranks get other records than in one step at a
    time. STAG lets `Task.stagger` roots read at a time; see `dsprep.reader.node.tokens`.
    """
    roots = min(task.readers_per_node, task.world_size)
    steps = _steps_of(task, roots) if level >= COAL else 1
    assigned = Assignment(task.samples, task.world_size, task.batch_size, roots, steps)
    root = assigned.root_of(task.rank)
    name = f"{task.strategy}-{task.key}-{root}-{task.opening}"
    is_root = task.rank == assigned.members(root)[0]
    records = _records_of(task, resources, level) if is_root else None
    nbytes = 16 * task.samples + data_file(task.path).stat().st_size + PAGE
    node = Neighbours(name, assigned.members(root), task.rank, nbytes)
    resources.callback(node.close)
    turn: Callable[[], AbstractContextManager[None]] = nullcontext
    if level >= STAG:
        tokens = Local(f"bench {task.strategy} {task.key}", task.stagger)
        turn = partial(Stagger(tokens, 1), lambda: False)
    values = Values(task.schema)

    def read(window: Window) -> Iterator[Batch]:
        """Yield the batches of what is read at a time."""
        low, high = assigned.span(window, root)
        if records is not None and high > low:
            with turn():
                records(low, high, node.memory)
        node.begin()
        starts, lengths = table(node.memory, high - low)
        for step in range(window[2]):
            first, stop = assigned.part(window, task.rank, step)
            own, label = slice(first - low, stop - low), partial(_label, task.path, first)
            batch = values.decode(node.memory, starts[own], lengths[own], label)
            if step == window[2] - 1:
                node.end()
            if stop > first:
                yield batch
            del batch

    def epoch(number: int) -> Iterator[Any]:
        done = False
        try:
            for window in assigned.windows():
                yield from read(window)
            done = True
        finally:
            if not done:  # the others are not to wait for what does not come
                node.close()

    return Way(epoch)


def _label(path: Path, first: int, i: int) -> str:
    return f"{path}, record {first + i}"


def _steps_of(task: Task, roots: int) -> int:
    """Return how many steps a buffer holds."""
    with Sidecar.open(task.path) as sidecar:
        each = sample_nbytes(sidecar, sidecar.schema)
    limit = -(-task.world_size // roots) * task.batch_size
    return max(1, int((task.buffer_nbytes or BUFFER_NBYTES) / max(1.0, each * limit)))


def _records_of(task: Task, resources: ExitStack, level: int) -> Records:
    """Return what reads records, as a level does it."""
    if level >= PROV:
        return explicit(task, computed(task.path, resources), resources)
    cursor = Cursor(task, level >= DM)
    resources.callback(cursor.close)
    if level >= DIO:
        return explicit(task, cursor.offsets, resources)
    return cursor.read
