"""Parts of a dataset as they travel to other processes, which open them anew.

What travels is small: paths and options, and the numbers of the samples where they were selected
or shuffled. Samples that were dealt into buckets are read from those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from dsprep.dataset import MultiSource, Opening
from dsprep.errors import UsageError
from dsprep.formats.base import Source
from dsprep.schema import Ints
from dsprep.shuffling import ShuffledSource
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
