"""The process that measures: ``python -m dsprep.bench.child FD``.

It runs one rank of one run of one strategy. Through the socket FD it receives a `Task`, says None
when it is at the gate where ranks meet, which is answered when all are there, and sends back a
`Result`, or words for why there is none.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from dsprep.bench import caches, counters, sums
from dsprep.bench.strategies import find
from dsprep.bench.strategies.base import Strategy
from dsprep.bench.task import Epoch, Result, Task, make_compute
from dsprep.errors import DsprepError

PR_SET_PDEATHSIG = 1

now = time.perf_counter


def run(task: Task, strategy: Strategy, wait: Callable[[], None]) -> Result:
    """Run the epochs of a task.

    Parameters
    ----------
    task, strategy
        What to do; the strategy is not open yet, and closed in the end.
    wait
        Returns when all ranks have called it.
    """
    try:
        compute = make_compute(task.compute)
        compute()  # libraries start their threads
        task.share(0)
        if not task.cold:
            strategy.open()
        epochs = []
        for number in range(task.warmup + task.epochs):
            if not task.cold and number and strategy.anew:
                _close(strategy, wait)
                strategy.open()
            held = _made_cold(task, strategy, wait) if task.cold else None
            epoch = replace(_epoch(task, strategy, number, wait, compute), held=held)
            if number >= task.warmup:
                epochs.append(epoch)
        peak = counters.peak_rss()
        total, checked = None, 0
        if task.check and strategy.delivers:
            total, checked = _checked(task, strategy, task.warmup + task.epochs)
        wait()
        return Result(epochs=tuple(epochs), peak_rss=peak, full=total, checked=checked)
    finally:
        strategy.close()


def _close(strategy: Strategy, wait: Callable[[], None]) -> None:
    """Close a strategy on all ranks, and then remove what it kept for the last epoch."""
    strategy.close()
    wait()
    if strategy.anew and strategy.opened:
        strategy.clear()
        wait()


def _made_cold(task: Task, strategy: Strategy, wait: Callable[[], None]) -> float | None:
    """Close, drop the files from the page cache, open again; return the share that had stayed.

    What opening read, such as the first pages of many small files, is dropped as well: a loop does
    not find it in memory when it comes to those files.
    """
    _close(strategy, wait)  # nobody has anything mapped
    drops = task.rank == 0 or task.everywhere
    if drops:
        caches.drop(task.drop)
        if task.tier_folder is not None:
            caches.drop(p for p in task.tier_folder.rglob("*") if p.is_file())
    wait()
    held = caches.held(task.drop)
    wait()
    strategy.open()
    wait()
    if drops:
        caches.drop(task.drop)
    wait()
    return held


def _epoch(
    task: Task,
    strategy: Strategy,
    number: int,
    wait: Callable[[], None],
    compute: Callable[[], object],
) -> Epoch:
    """Run one epoch, with the clock on."""
    light = sums.lightly(task.schema) if strategy.delivers else None
    waits, samples, summed = [], 0, 0
    checking = computed = skew = 0.0
    steps = range(strategy.steps(number))
    wait()
    before = counters.count()
    began = clock = now()
    items: Iterator[Any] = iter(strategy.epoch(number))
    for _ in steps:
        item = next(items, None)
        got = now()
        waits.append(got - clock)
        if item is not None:
            samples += strategy.size(item)
            if light is not None:
                summed += light(strategy.batch(item))
            checked = now()
            checking += checked - got
            compute()
            del item
        else:
            checked = now()
        clock = now()
        computed += clock - checked
        if task.world_size > 1:
            wait()
            met = now()
            skew += met - clock
            clock = met
    excess = next(items, None) is not None
    ended = now()
    waits.append(ended - clock)
    after = counters.count()
    drawn = strategy.drawn(number)
    if drawn is not None and task.compute != "none":  # what is copied went on while it was checked
        computed, checking = computed + checking, 0.0
    return Epoch(
        samples=samples,
        seconds=ended - began - checking,
        waits=tuple(round(w, 7) for w in waits),
        computing=computed,
        skew=skew,
        counters=after - before,
        light=None if light is None else summed % 2**64,
        excess=excess,
        drawn=drawn,
    )


def _checked(task: Task, strategy: Strategy, number: int) -> tuple[int, int]:
    """Return the full sum of one more epoch, and its samples."""
    total = samples = 0
    for item in strategy.epoch(number):
        total += sums.full(strategy.batch(item), task.schema)
        samples += strategy.size(item)
        del item
    return total % 2**64, samples


class BrokenOff(Exception):
    """The benchmark has ended while this process waited at the gate."""


def main() -> None:
    """Run the task that comes through the socket."""
    line: Connection[Any, Any] = Connection(int(sys.argv[1]))

    def wait() -> None:
        if task.world_size > 1:
            line.send(None)
            try:
                line.recv()
            except EOFError as error:
                raise BrokenOff from error

    message: Result | str
    try:
        task: Task = line.recv()
        message = run(task, find(task.strategy).load()(task), wait)
    except DsprepError as error:
        message = str(error)
    except (BrokenOff, BrokenPipeError, ConnectionResetError):
        os._exit(1)
    except Exception as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    line.send(message)
    line.close()
    os._exit(0)  # at once: some libraries take long to end, or hang


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends; see ``prctl(2)``.

    Where the C library has no such call, it lives on until its work is done.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


if __name__ == "__main__":
    end_with_parent()
    main()
