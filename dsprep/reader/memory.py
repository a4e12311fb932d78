"""Memory that samples are read into: page-aligned, taken once, used again when nobody looks.

A batch is a view of a `Block`. The block comes back to its `Pool` when the last array that
refers to it is gone, however long the consumer holds it, so a batch never changes under anyone.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeAlias

import numpy as np

from dsprep.core.schema import Bytes
from dsprep.errors import UsageError

PAGE = mmap.PAGESIZE
HUGE = 2 << 20
"""Bytes of a huge page (x86-64 and most ARM kernels); larger memory asks for such pages."""

PAUSE = 0.02
"""Seconds after which a thread that waits for blocks looks for some that nobody told it of, as
those of batches that are let go between two loops."""

Allocate: TypeAlias = Callable[[int], mmap.mmap]
"""Gives memory of at least that many bytes: anonymous, shared with other processes, pinned."""


Returned: TypeAlias = "deque[weakref.ref[Bytes]]"
"""Leases that have ended."""


class Stopped(Exception):
    """The reader is being closed."""


def in_huge_pages(memory: mmap.mmap) -> None:
    """Ask for huge pages, where the kernel has some."""
    if len(memory) >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)


def anonymous(nbytes: int) -> mmap.mmap:
    """Return private memory, in huge pages where the kernel has some."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    in_huge_pages(memory)
    return memory


class Block:
    """Memory of a batch, or of ragged values of a unit: `nbytes` of `memory` from byte `at` on.

    `lent` is its lease, while it has one that comes back.
    """

    def __init__(self, memory: mmap.mmap, at: int, nbytes: int) -> None:
        self.memory, self.at, self.nbytes = memory, at, nbytes
        self.address = int(np.frombuffer(memory, np.uint8, 1, at).ctypes.data)
        self.lent: weakref.ref[Bytes] | None = None

    def lease(self, back: Returned | None) -> Bytes:
        """Return all of it as uint8; once nothing refers to that any more, `lent` goes `back`.

        Every array made from it by slicing, `view` or `reshape` refers to it. The callback is the
        list's own: in one written in Python an interrupt of the program could arrive, which would
        be lost, and the block with it.
        """
        root = np.frombuffer(self.memory, np.uint8, self.nbytes, self.at)
        if back is not None:
            self.lent = weakref.ref(root, back.append)
        return root


class Pool:
    """`count` blocks of at least `nbytes` bytes each.

    One thread takes; any thread, also a garbage collector's, gives back, which wakes nobody: a
    thread that goes to and fro for each block takes more time than the blocks. Whoever gives some
    back calls `nudge` now and then.
    """

    def __init__(self, nbytes: int, count: int, allocate: Allocate = anonymous) -> None:
        self.nbytes, self.count = _pages(nbytes), count
        self._allocate = allocate
        self._back: Returned = deque()
        self._calls: SimpleQueue[None] = SimpleQueue()  # to the thread that waits
        self._short = 0  # blocks that it waits for
        self._free: list[Block] = []
        self._lent: dict[int, Block] = {}  # by the id of its lease
        self._made = 0
        self._stopped = False

    def take(
        self, nbytes: int, starved: Callable[[], bool], coming: int = 1
    ) -> tuple[Block, Bytes]:
        """Return a block of so many bytes and its lease, waiting until one is free.

        If none is, it waits until `coming` are, which will be taken one after another. `starved`
        returns whether waiting would last for ever: the consumer waits too, and holds all
        blocks. Then one more is made, for once. It is asked again after each `wake`. Raises
        `Stopped` after `stop`.
        """
        nbytes = max(nbytes, self.nbytes)
        while True:
            self._collect()
            if self._stopped:
                raise Stopped
            if self._free:
                block = self._free.pop()  # the one used last: it may still be in the cache
                if block.nbytes < nbytes:
                    del block
                    block = self._make(nbytes + nbytes // 4)
                lease = block.lease(self._back)
                self._lent[id(block.lent)] = block
                return block, lease
            if self._made < self.count:
                self._fill(nbytes)
                continue
            if starved():
                block = self._make(nbytes)
                return block, block.lease(None)
            self._short = min(coming, self.count)
            if len(self._back) < self._short:
                with suppress(Empty):
                    self._calls.get(timeout=PAUSE)
            self._short = 0

    def _collect(self) -> None:
        while self._back:  # nobody else takes from it
            self._free.append(self._lent.pop(id(self._back.popleft())))

    def _fill(self, nbytes: int) -> None:
        """Make all blocks that are still missing, in one piece of memory."""
        each, missing = _pages(nbytes), self.count - self._made
        memory = self._memory(each * missing + HUGE)
        at = -int(np.frombuffer(memory, np.uint8, 1).ctypes.data) % HUGE
        self._free += [Block(memory, at + i * each, each) for i in reversed(range(missing))]
        self._made = self.count

    def _make(self, nbytes: int) -> Block:
        nbytes = _pages(nbytes)
        return Block(self._memory(nbytes), 0, nbytes)

    def _memory(self, nbytes: int) -> mmap.mmap:
        try:
            return self._allocate(nbytes)
        except (OSError, OverflowError, MemoryError) as error:
            raise UsageError(
                f"there is not enough memory for batches: {nbytes} bytes",
                fix="take a smaller batch_size, buffer_size or number of buffers",
            ) from error

    def nudge(self) -> None:
        """Wake a waiting thread if there is what it waits for."""
        if 0 < self._short <= len(self._back):
            self.wake()

    def wake(self) -> None:
        """Have a waiting thread ask again whether it is starved."""
        self._calls.put(None)

    def start(self) -> None:
        """Let threads take again, after `stop`."""
        self._stopped = False

    def stop(self) -> None:
        """Let a waiting thread, and every later one until `start`, raise `Stopped`."""
        self._stopped = True
        self.wake()


def _pages(nbytes: int) -> int:
    return -(-max(1, nbytes) // PAGE) * PAGE
