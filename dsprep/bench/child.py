"""The process that measures: ``python -m dsprep.bench.child FD``.

It runs one rank of one run of one strategy. Through the socket FD it receives a `Task`, says None
when it is at the gate where ranks meet, which is answered when all are there, and sends back a
`Result`, or words for why there is none.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from dsprep.bench import caches, counters, sums
from dsprep.bench.strategies import find
from dsprep.bench.strategies.base import Strategy
from dsprep.bench.task import Epoch, Result, Task
from dsprep.errors import DsprepError
from dsprep.executors.processes import end_with_parent
from dsprep.storage.trees import drop_cached

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
    entry = find(task.strategy)
    try:
        seconds = task.step_seconds
        task.share(0)
        if not task.cold:
            strategy.open()
        epochs = []
        for number in range(task.warmup + task.epochs):
            if not task.cold and number and entry.reopens:
                _close(strategy, wait)
                strategy.open()
            resident = _made_cold(task, strategy, wait) if task.cold else None
            epoch = replace(_epoch(task, strategy, number, wait, seconds), resident=resident)
            if number >= task.warmup:
                epochs.append(epoch)
        peak = counters.peak_rss()
        total, checked = None, 0
        if entry.delivers:
            if task.storage is not None:  # what is compared need not be late
                _close(strategy, wait)
                strategy.task = replace(strategy.task, storage=None)
                strategy.open()
            total, checked = _checked(task, strategy, task.warmup + task.epochs)
        wait()
        return Result(epochs=tuple(epochs), peak_rss=peak, full=total, checked=checked)
    finally:
        strategy.close()


def _close(strategy: Strategy, wait: Callable[[], None]) -> None:
    """Close a strategy on all ranks."""
    strategy.close()
    wait()


def _made_cold(task: Task, strategy: Strategy, wait: Callable[[], None]) -> float | None:
    """Close, drop the files from the page cache, open again; return the share that had stayed."""
    # What opening read, such as the first pages of many small files, is dropped as well: a loop
    # does not find it in memory when it comes to those files.
    _close(strategy, wait)  # nobody has anything mapped
    drops = task.rank == 0 or task.everywhere
    if drops:
        drop_cached(task.drop)
        if task.tier_folder is not None:
            drop_cached(p for p in task.tier_folder.rglob("*") if p.is_file())
    wait()
    resident = caches.resident(task.drop)
    wait()
    strategy.open()
    wait()
    if drops:
        drop_cached(task.drop)
    wait()
    return resident


def _epoch(
    task: Task,
    strategy: Strategy,
    number: int,
    wait: Callable[[], None],
    seconds: float,
) -> Epoch:
    """Run one epoch of steps that take so many seconds beside reading, with the clock on."""
    way = strategy.way
    steps = range(task.steps if way.steps is None else way.steps(number))
    waits, samples = [], 0
    computed = skew = 0.0
    wait()
    before = counters.count()
    began = clock = now()
    items = strategy.epoch(number)
    for _ in steps:
        item = next(items, None)
        got = now()
        waits.append(got - clock)
        clock = got
        if item is not None:
            samples += way.size(item)
            if seconds:
                time.sleep(seconds)
            del item
            clock = now()
            computed += clock - got
        if task.world_size > 1:
            wait()
            met = now()
            skew += met - clock
            clock = met
    excess = next(items, None) is not None
    ended = now()
    waits.append(ended - clock)
    return Epoch(
        samples=samples,
        seconds=ended - began,
        waits=tuple(round(w, 7) for w in waits),
        computing=computed,
        skew=skew,
        counters=counters.count() - before,
        excess=excess,
        drawn=None if way.drawn is None else way.drawn(number),
    )


def _checked(task: Task, strategy: Strategy, number: int) -> tuple[int, int]:
    """Return the sum of one more epoch, and its samples."""
    way, total, samples = strategy.way, 0, 0
    for item in strategy.epoch(number):
        total += sums.full(way.batch(item), task.schema)
        samples += way.size(item)
        del item
    return total % 2**64, samples


def main() -> None:
    """Run the task that comes through the socket."""
    line: Connection[Any, Any] = Connection(int(sys.argv[1]))

    def wait() -> None:
        if task.world_size > 1:
            line.send(None)
            try:
                line.recv()
            except EOFError:  # the benchmark has ended
                os._exit(1)

    message: Result | str
    try:
        task: Task = line.recv()
        message = run(task, Strategy(task, find(task.strategy).load()), wait)
    except DsprepError as error:
        message = str(error)
    except (BrokenPipeError, ConnectionResetError):
        os._exit(1)
    except Exception as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    line.send(message)
    line.close()
    os._exit(0)  # at once: some libraries take long to end, or hang


if __name__ == "__main__":
    end_with_parent()
    main()
