"""The block of rows that was decoded last, kept for the reads that follow it.

Pieces are smaller than the chunks of many a store; without this, a chunk of 64 MB would be
decoded once for every 8 MB that are read of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class LastBlock(Generic[T]):
    """Holds one block; safe to use from several threads.

    Threads that want the block that is being decoded wait for it; a thread that wants another
    one decodes that, and it takes the place of the first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: tuple[int, Future[T]] | None = None

    def get(self, number: int, decode: Callable[[], T]) -> T:
        """Return block `number`, which `decode` makes if it is not the one that is held.

        What `decode` raises is raised in every thread that waits for it, and nothing is held.
        """
        with self._lock:
            if self._held is not None and self._held[0] == number:
                future, mine = self._held[1], False
            else:
                future, mine = Future(), True
                self._held = (number, future)
        if mine:
            try:
                future.set_result(decode())
            except BaseException as error:
                with self._lock:
                    if self._held == (number, future):
                        self._held = None
                future.set_exception(error)
        return future.result()
