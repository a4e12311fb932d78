"""Parts of a dataset as they travel to other processes, which open them anew.

What travels is small: paths and options, and the numbers of the samples where they were selected
or shuffled. Samples that were dealt into buckets are read from those.
"""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from dsprep import executors
from dsprep.dataset import MultiSource, Opening
from dsprep.errors import UsageError
from dsprep.formats.base import Source
from dsprep.schema import Ints
from dsprep.shuffling import FirstPass, ShuffledSource
from dsprep.splitting import DerivedSource, DuplicatedSource, SelectedSource


@dataclass(frozen=True)
class Selection:
    """Samples of a source by number.

    Attributes
    ----------
    base
        The source.
    indices
        int64, shape ``(n,)``.
    """

    base: Opening
    indices: Ints

    def open(self) -> Source:
        """Open the source."""
        return SelectedSource(self.base.open(), self.indices)


@dataclass(frozen=True)
class Buckets:
    """Samples in the order of a shuffle whose first pass is done."""

    source: ShuffledSource

    def open(self) -> Source:
        """Open the buckets."""
        return self.source


Part: TypeAlias = Opening | Selection | Buckets


def part(source: Source, start: int, stop: int) -> tuple[Part, int]:
    """Return how another process opens what samples ``start <= i < stop`` need.

    Returns
    -------
    The part, and the number that its first sample has in `source`.

    Raises
    ------
    UsageError
        If the source was made in this process and cannot be opened in another one.
    """
    if isinstance(source, ShuffledSource) and source.how == "buckets":
        return Buckets(source), 0
    if isinstance(source, DerivedSource):
        base, indices = _numbers(source, np.arange(start, stop, dtype=np.int64))
        first = int(indices.min(initial=len(base)))
        opening, offset = part(base, first, int(indices.max(initial=first - 1)) + 1)
        assert isinstance(opening, Opening)  # the base is derived from nothing
        return Selection(opening, indices - offset), start
    if isinstance(source, MultiSource):
        return source.part(start, stop)
    if not isinstance(source.opening, Opening):
        raise UsageError("other processes cannot open this dataset", where=source.path)
    return source.opening, 0


def _numbers(source: Source, indices: Ints) -> tuple[Source, Ints]:
    """Return the source at the bottom, and the numbers that samples have there."""
    while isinstance(source, DerivedSource):
        if isinstance(source, SelectedSource):
            indices = source.indices[indices]
        elif isinstance(source, DuplicatedSource):
            indices = indices % len(source.base)
        elif isinstance(source, ShuffledSource):
            indices = source.order(indices)
        source = source.base
    return source, indices


@dataclass(frozen=True)
class _DealTask:
    """A part of a first pass, and the samples that it needs."""

    first_pass: FirstPass
    number: int
    part: Part
    offset: int


PART_NBYTES = 1 << 30
"""Payload of a part of a first pass, about."""

MOST_PARTS = 512
"""Parts of a first pass at most: the second pass has a file of each open, of 1024 by default."""


def deal(source: ShuffledSource, executor: Executor) -> None:
    """Have the first pass of a shuffle done, or what earlier runs left of it.

    Raises
    ------
    DsprepError, OSError
        If the data are damaged or a worker was lost; a rerun goes on with the parts missing.
    """
    first_pass = source.first_pass(min(MOST_PARTS, -(-source.scratch_nbytes // PART_NBYTES)))
    if not first_pass.parts:  # one process has begun it, and goes on
        return
    tasks = (
        _DealTask(first_pass, i, *part(source.base, *first_pass.range(i)))
        for i in range(first_pass.parts)
        if not first_pass.place(i).is_dir()
    )
    for _ in executors.run(executor, _deal_part, tasks):
        pass
    source.dealt(first_pass)


def _deal_part(task: _DealTask) -> None:
    with task.part.open() as base:
        task.first_pass.deal(task.number, base, task.offset)
