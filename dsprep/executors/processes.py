"""Processes on this machine."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager


@contextmanager
def opened(workers: int | None, scheduler: str | None) -> Iterator[Executor]:
    """Give a pool of new processes; they end with it."""
    count = workers or len(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=context, initializer=end_with_parent) as pool:
        yield pool


def end_with_parent() -> None:
    """Let this process end when the one that started the pool has been killed.

    It would wait for tasks for ever, or write on while the command is already repeated.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="dsprep-parent", daemon=True).start()
