"""The steps by which LMDBIO made reading from LMDB faster, one class each.

The pattern is the paper's: nothing is shuffled; in a step all ranks together take a contiguous
block of ``world_size * batch_size`` records, and rank r the r-th part of it. Every record comes
once in an epoch; of the records left for a last, smaller block every rank gets an equal share.
Reading is not overlapped with computing. Each class adds one thing to the one before it:

============ ======== ======== ======== ========= ======== =========
step         one      jumps    explicit offsets   many     readers
             reads    to its   reads    computed  steps by take
             for all  records                     one read turns
============ ======== ======== ======== ========= ======== =========
`Lmm`        x
`Dm`         x        x
`Dio`        x        x        x
`Prov`       x        x        x        x
`Coal`       x        x        x        x         x
`Stag`       x        x        x        x         x        x
============ ======== ======== ======== ========= ======== =========

Source: Pumma et al., "Scalable Deep Learning via I/O Analysis and Optimization".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any, ClassVar

from dsprep.bench.strategies.base import Strategy
from dsprep.bench.strategies.lmdbio.node import STEP_SECONDS, Member, Root
from dsprep.bench.strategies.lmdbio.records import ComputedReads, Cursor, ExplicitReads, table
from dsprep.core.schema import Batch, Bytes, Ints
from dsprep.core.spans import move_spans, offsets_of
from dsprep.errors import DsprepError
from dsprep.formats.lmdb import data_file
from dsprep.formats.lmdb.values import Values
from dsprep.reader.memory import PAGE, Pool, Stopped
from dsprep.reader.node import wire
from dsprep.reader.node.tokens import Local
from dsprep.reader.units import BUFFER_NBYTES, sample_nbytes
from dsprep.sidecar.sidecar import Sidecar


@dataclass(frozen=True)
class Window:
    """What is read at a time: records ``start <= i < stop``, which last for some steps."""

    start: int
    stop: int
    steps: int  # one, or as many as are read by one large read


@dataclass(frozen=True)
class Assignment:
    """How records are assigned to ranks, and ranks to those that read for them."""

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
            yield Window(step * block, until * block, until - step)
        if full * block < self.samples:
            yield Window(full * block, self.samples, 1)

    def span(self, window: Window, root: int) -> tuple[int, int]:
        """Return the records that a root reads: first, and after the last."""
        ranks = self.members(root)
        return self._edge(window, ranks.start), self._edge(window, ranks.stop)

    def part(self, window: Window, rank: int, step: int) -> tuple[int, int]:
        """Return the records that a rank gets in a step of a window."""
        if window.steps == 1:
            return self._edge(window, rank), self._edge(window, rank + 1)
        ranks = self.members(self.root_of(rank))
        first = self._edge(window, ranks.start)
        first += (step * len(ranks) + rank - ranks.start) * self.batch_size
        return first, first + self.batch_size

    def _edge(self, window: Window, rank: int) -> int:
        return window.start + (window.stop - window.start) * rank // self.ranks


class Lmm(Strategy):
    """LMM: of the ranks of a node, `Task.readers_per_node` read for all, into shared memory.

    A root goes through the records by a cursor of LMDB, which maps the file, from the first one
    on: to its own part of the first step (the sequential seek), and over the parts of the other
    roots from step to step. So with one root on one node there is nothing to seek, and with one
    rank this is plain reading by a cursor.
    """

    jumps: ClassVar[bool] = False  # the columns of the table above
    explicit: ClassVar[bool] = False
    computed: ClassVar[bool] = False
    coalesced: ClassVar[bool] = False
    staggered: ClassVar[bool] = False

    _node: Root | Member
    _records: Cursor | ExplicitReads

    def prepare(self, resources: ExitStack) -> None:
        """Find each other; a root opens the database."""
        task = self.task
        self._values = Values(task.schema)
        self._pool = Pool(1, 2)
        roots = min(task.readers_per_node, task.world_size)
        steps = self._steps(roots) if self.coalesced else 1
        self._assigned = Assignment(task.samples, task.world_size, task.batch_size, roots, steps)
        self._root = self._assigned.root_of(task.rank)
        members = self._assigned.members(self._root)
        name = wire.address("bench", task.strategy, task.key, self._root)
        if task.rank == members[0]:
            self._records = self._opened()
            resources.callback(self._records.close)
            self._node = root = Root(name, members[1:])
            resources.callback(root.close)
            root.memory(self._largest())[::PAGE] = 0  # its pages are there in time
        else:
            self._node = Member(name, task.rank)
            resources.callback(self._node.close)
        self._tokens = Local(f"bench {task.strategy} {task.key}", task.stagger, self._root)

    def _steps(self, roots: int) -> int:
        """Return how many steps a buffer holds."""
        with Sidecar.open(self.task.path) as sidecar:
            each = sample_nbytes(sidecar, sidecar.schema)
        limit = -(-self.task.world_size // roots) * self.task.batch_size
        return max(1, int((self.task.buffer_nbytes or BUFFER_NBYTES) / max(1.0, each * limit)))

    def _largest(self) -> int:
        """Return about how many bytes this root reads at a time."""
        assigned = self._assigned
        window = next(assigned.windows(), None)
        if window is None:
            return 0
        low, high = assigned.span(window, self._root)
        each = data_file(self.task.path).stat().st_size / assigned.samples
        return int((high - low) * (16 + each))

    def _opened(self) -> Cursor | ExplicitReads:
        task = self.task
        if self.computed:
            return ExplicitReads(task.path, ComputedReads(task.path), task.transfer_size)
        cursor = Cursor(task.path, task.samples, self.jumps)
        return ExplicitReads(task.path, cursor, task.transfer_size) if self.explicit else cursor

    def epoch(self, number: int) -> Iterator[Any]:
        """Yield the batches of this rank, in order."""
        done = False
        try:
            for window in self._assigned.windows():
                yield from self._window(window)
            if isinstance(self._node, Root):
                self._node.memory(0)  # nobody looks at it any more
            done = True
        finally:
            if not done:  # the others are not to wait for what does not come
                self.close()

    def _window(self, window: Window) -> Iterator[Batch]:
        """Yield the batches of what is read at a time."""
        low, high = self._assigned.span(window, self._root)
        node = self._node
        if isinstance(node, Root) and high > low:
            self._records.read(low, high, node.memory, self._turn)
        shared = node.look()
        starts, lengths = table(shared, high - low)
        for step in range(window.steps):
            first, stop = self._assigned.part(window, self.task.rank, step)
            mine = slice(first - low, stop - low)
            batch = self._batch(shared, starts[mine], lengths[mine], first)
            if step == window.steps - 1:
                del shared, starts, lengths
                node.looked()
            if stop > first:
                yield batch
            del batch

    def _batch(self, shared: Bytes, starts: Ints, lengths: Ints, first: int) -> Batch:
        """Copy records out of the shared memory, and take them apart."""
        offsets = offsets_of(lengths)
        total = int(offsets[-1])
        _, out = self._pool.take(total, lambda: True)
        move_spans(shared, starts, lengths, out, offsets[:-1])
        path = self.task.path
        return self._values.decode(out[:total], lengths, lambda i: f"{path}, record {first + i}")

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold one of the tokens of the node, if readers take turns."""
        if not self.staggered:
            yield
            return
        deadline = monotonic() + STEP_SECONDS
        try:
            token = self._tokens.acquire(lambda: monotonic() > deadline)
        except Stopped as error:
            raise DsprepError("another process does not end its turn to read") from error
        try:
            yield
        finally:
            self._tokens.release(token)


class Dm(Lmm):
    """DM: a root jumps to its records instead of going through all before them.

    In the paper a cursor is handed on from rank to rank, between nodes whose mappings are at the
    same address. Here the root asks for the key of its first record, which it computes from the
    record's number: a descent of the tree, which reaches the same without any neighbour.
    """

    jumps: ClassVar[bool] = True


class Dio(Dm):
    """DIO: values are not copied out of the mapping but read by ``pread``.

    Where they are stored is seen in the mapping: a cursor goes over the records of a step, and the
    addresses of their values, less that of the file, are offsets. In the paper one process does
    that and hands the offsets out to all roots; here every root does it for its own records.
    """

    explicit: ClassVar[bool] = True


class Prov(Dio):
    """PROV: the offsets of values are computed, from the sidecar; the file is not mapped."""

    computed: ClassVar[bool] = True


class Coal(Prov):
    """COAL: a root reads the records of many steps at a time, contiguously.

    As many as `Task.buffer_nbytes` hold; 64 MiB by default. Each root reads one block of the
    records of these steps, for its own ranks: they get other records than in one step at a time.
    """

    coalesced: ClassVar[bool] = True


class Stag(Coal):
    """STAG: `Task.stagger` roots read at a time, in turns; with a single root nothing changes.

    A root that has read hands its token on to the next one; see `dsprep.reader.node.tokens`.
    """

    staggered: ClassVar[bool] = True
