"""Processes on this machine.

Each is served by a thread of its own through a pipe. Nothing else is shared, no semaphores above
all: those of `multiprocessing` have names, which stay in ``/dev/shm`` when all is killed at once.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from dsprep.errors import DsprepError, describe
from dsprep.storage.libc import c_function

PR_SET_PDEATHSIG = 1

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals of a terminal or a batch system to all processes; the first one sees to the others."""


@contextmanager
def opened(workers: int | None, scheduler: str | None) -> Iterator[Executor]:
    """Give a pool of new processes; they end with it."""
    pool = Processes(workers or len(os.sched_getaffinity(0)))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


class Processes(ThreadPoolExecutor):
    """A pool of processes, which are started when they are needed."""

    by_reference = True
    """Functions travel as module and name."""

    def __init__(self, count: int) -> None:
        super().__init__(count, "dsprep-process")
        self._context = multiprocessing.get_context("spawn")
        self._own = threading.local()
        self._children: list[tuple[BaseProcess, Connection]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Have a process call `fn`."""
        return super().submit(self._ask, (fn, args, kwargs))

    def stop(self) -> None:
        """Kill all processes; what they were doing raises `BrokenProcessPool`."""
        for process, _ in list(self._children):
            process.kill()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End all processes when they have done what they are doing."""
        super().shutdown(wait=wait, cancel_futures=cancel_futures)
        if wait:
            for process, pipe in self._children:
                pipe.close()
                process.join()

    def _ask(self, task: tuple[Any, ...]) -> Any:
        """Return what a task returns, or raise what it raises, in this thread's process."""
        child: tuple[BaseProcess, Connection] | None = getattr(self._own, "child", None)
        if child is None or not child[0].is_alive():
            child = self._own.child = self._start()
        process, pipe = child
        try:
            pipe.send(task)
            good, result = pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            process.join()
            code = process.exitcode
            ending = f"ended with status {code}"
            if code is not None and code < 0:
                ending = f"was ended by signal {-code} ({signal.strsignal(-code)})"
            raise BrokenProcessPool(f"the process {ending}") from error
        if good:
            return result
        raise result

    def _start(self) -> tuple[BaseProcess, Connection]:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # of this thread, and of the new process
        pipe, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._children.append((process, pipe))
        return process, pipe


def _serve(pipe: Connection) -> None:
    """Run the tasks that come through `pipe` until it is closed."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    end_with_parent()
    while True:
        try:
            function, args, kwargs = pipe.recv()
            reply = True, function(*args, **kwargs)
        except EOFError:
            return
        except Exception as error:
            if not isinstance(error, DsprepError | OSError):
                error.add_note(f"In another process:\n{traceback.format_exc()}")
            reply = False, error
        try:
            pipe.send(reply)
        except Exception as error:  # what cannot be pickled raises anything
            pipe.send((False, RuntimeError(f"the result cannot be sent: {describe(error)}")))


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends; see ``prctl(2)``.

    It would write on while the command is already repeated. Where the C library has no such call,
    it lives on until its work is done.
    """
    prctl = c_function("prctl", ctypes.c_int)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
