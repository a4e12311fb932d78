"""Parts of a dataset as they travel to other processes, which open them anew.

What travels is small: paths and options, and the numbers of the samples where they were selected
or shuffled. Samples that were dealt into buckets are read from those.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from dsprep import executors
from dsprep.core.marks import Mark, unchanged
from dsprep.core.schema import Ints
from dsprep.errors import UsageError
from dsprep.formats.base import Source
from dsprep.source.from_sidecar import SidecarSource
from dsprep.source.many import MultiSource, Opening, marks_of
from dsprep.write.shuffle import FirstPass, ShuffledSource
from dsprep.write.split import DerivedSource, DuplicatedSource, SelectedSource


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

    @property
    def marks(self) -> tuple[Mark, ...]:
        """What the files were."""
        return self.base.marks


@dataclass(frozen=True)
class Buckets:
    """Samples in the order of a shuffle whose first pass is done."""

    source: ShuffledSource

    def open(self) -> Source:
        """Open the buckets."""
        return self.source

    @property
    def marks(self) -> tuple[Mark, ...]:
        """Nothing: the files are not read any more."""
        return ()


Part: TypeAlias = Opening | Selection | Buckets


@contextmanager
def opened(part: Part) -> Iterator[Source]:
    """Open a part, and close it.

    Raises
    ------
    ChangedError
        If the files that it is read from are not those that were opened first, before or after.
    """
    with unchanged(part.marks), part.open() as source:
        yield source


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
    marks_of(source)
    if isinstance(source, MultiSource):
        return source.part(start, stop)
    if not isinstance(source.opening, Opening):
        raise UsageError("other processes cannot open this dataset", where=source.path)
    return _with_marks(source, source.opening, start, stop), 0


def _with_marks(source: Source, opening: Opening, start: int, stop: int) -> Opening:
    """Return how to open a source, with the marks of no other files than samples are read from."""
    if not isinstance(source, SidecarSource):
        return opening
    files = len(opening.paths)
    first, last = (source.sidecar.file_of(i)[0] for i in (start, max(start, stop - 1)))
    some = slice(min(first, files), min(last + 1, files))
    return replace(opening, marks=(*opening.marks[some], *opening.marks[files:]))


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
    with opened(task.part) as base:
        task.first_pass.deal(task.number, base, task.offset)
