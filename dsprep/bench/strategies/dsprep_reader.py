"""`dsprep.Reader`, as a training script would use it: repacked data, data as stored, and tiers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from dsprep.bench.delays import DelayedEngine
from dsprep.bench.strategies.base import Way
from dsprep.bench.task import Drawn, Task
from dsprep.planning.published import parse_storage
from dsprep.reader.cached import Cache
from dsprep.reader.loader import Reader
from dsprep.reader.pipeline import PipelineSettings

BLOCK = 4 << 20
"""Bytes that are copied to a cache at a time."""


def buffer_size(task: Task) -> str | None:
    """Return what a Reader gets as the bytes to read at a time."""
    return None if task.buffer_nbytes is None else f"{task.buffer_nbytes}B"


class DelayedReader(Reader):
    """A Reader of an imitated storage."""

    def __init__(self, *arguments: Any, task: Task, **more: Any) -> None:
        self._task = task
        super().__init__(*arguments, **more)

    def _set_up(self, comm: Any) -> PipelineSettings:
        settings = super()._set_up(comm)
        return replace(settings, engine=DelayedEngine(settings.engine, self._task))


def open_reader(task: Task, resources: ExitStack, *, passes: int = 1, **more: Any) -> Way:
    """Open a Reader over a repacked dataset: groups and samples shuffled, read ahead by threads.

    `more` are other arguments of it; an epoch is so many passes.
    """
    arguments: dict[str, Any] = {
        "buffer_size": buffer_size(task),
        "seed": task.seed,
        "rank": task.rank,
        "world_size": task.world_size,
        "epochs": 1,
        "shuffle": "group",
        "buffers": None if task.buffers == Task.buffers else task.buffers,
        "io_threads": task.threads,
        "transfer_size": task.transfer_size,
        "engine": task.engine,
        **more,
    }
    reader = (
        Reader(task.path, task.batch_size, **arguments)
        if task.storage is None
        else DelayedReader(task.path, task.batch_size, task=task, **arguments)
    )
    resources.callback(reader.close)

    def turns(number: int) -> range:
        return range(number * passes, (number + 1) * passes)

    def epoch(number: int) -> Iterator[Any]:
        for turn in turns(number):
            reader.set_epoch(turn)
            yield from reader

    def steps(number: int) -> int:
        return sum(reader.steps_of(turn) for turn in turns(number))

    def drawn(number: int) -> Drawn:
        stats = [s for s in reader.stats if s.epoch in turns(number)]
        return Drawn(
            read=sum(s.nbytes for s in stats),
            cached=sum(s.cache_nbytes for s in stats),
            copied=sum(s.copied_nbytes for s in stats),
            stalled=sum(s.stall_seconds for s in stats),
        )

    has_tier = task.tier is not None
    return Way(epoch, steps=steps if passes > 1 else None, drawn=drawn if has_tier else None)


def open_provenance(task: Task, resources: ExitStack) -> Way:
    """Open a Reader over a dataset that was not repacked, at the extents that its sidecar gives.

    All samples are shuffled. What is read at a time, `Task.buffer_nbytes`, are samples from all
    over the dataset, in the order in which they are stored.
    """
    return open_reader(task, resources, shuffle="global", data=task.data, subset=task.numbers)


def open_cache(task: Task, resources: ExitStack, *, apart: bool = False, **more: Any) -> Way:
    """Open a Reader with a cache on the fast tier, or with one of this opening alone."""
    folder = task.own_folder if apart else task.tier_folder
    assert folder is not None  # a strategy with a tier has one
    bandwidth = None
    if task.storage is not None:  # as much as its threads would copy
        figures = parse_storage(task.storage)
        rate, total = task.threads * BLOCK / figures.alone(BLOCK), figures.total_bytes_per_second
        bandwidth = int(rate if total is None else min(rate, total / task.world_size))
    tier = Cache(folder, task.tier_size, bandwidth=bandwidth)
    return open_reader(task, resources, cache=tier, **more)


def open_met(task: Task, resources: ExitStack) -> Way:
    """Open a Reader for mini-epochs: an epoch is cut into parts, each passed several times.

    It knows of all epochs, one more of which is checked, and copies ahead across them. Source: Xu
    et al., PDSW 2021, section III.
    """
    epochs, passes = task.warmup + task.epochs + 1, task.mini_epochs * task.repeats
    parts: dict[str, Any] = {
        "mini_epochs": task.mini_epochs,
        "repeats": task.repeats,
        "passes": passes,
    }
    return open_cache(task, resources, epochs=epochs, **parts)
