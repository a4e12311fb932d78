"""The threads that read: of one pipeline, or of several that take turns, as those of a `Mix`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

from dsprep.core.schema import Arena

Work: TypeAlias = "Callable[[Arena], None]"
"""Reads one part, with memory of the thread; it raises nothing and waits for no consumer."""


class IoThreads:
    """`count` threads, which are there as long as anybody uses them. Works begin in order."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._lock, self._users = threading.RLock(), 0  # a garbage collector may end one within
        self._works: SimpleQueue[Work | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def begin(self) -> None:
        """Add a user, who calls `end` once, also after a `RuntimeError`: no thread can start."""
        with self._lock:
            self._users += 1
            if self._threads:
                return
            self._works = SimpleQueue()  # threads that did not end in time have theirs
            for i in range(self.count):
                name = f"dsprep-read-{i}"
                args = (self._works,)
                thread = threading.Thread(target=_serve, args=args, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)

    def put(self, work: Work) -> None:
        """Have a thread do something."""
        self._works.put(work)

    def end(self, deadline: float) -> None:
        """Remove a user; after the last one wait for the threads, until that `time.monotonic`."""
        with self._lock:
            self._users -= 1
            threads: list[threading.Thread] = []
            if not self._users:
                threads, self._threads = self._threads, threads
            for _ in threads:
                self._works.put(None)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))


def _serve(works: SimpleQueue[Work | None]) -> None:
    arena = Arena()
    while (work := works.get()) is not None:
        work(arena)
        del work  # it holds its pipeline
