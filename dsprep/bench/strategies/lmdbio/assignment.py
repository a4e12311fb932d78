"""Who gets which records, as LMDBIO assigns them: in order, a contiguous block per step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """What is read at a time, and the steps that it lasts for."""

    # start, stop: the records
    start: int
    stop: int
    steps: int  # one, or as many as are read by one large read


@dataclass(frozen=True)
class Assignment:
    """How records are assigned to ranks, and ranks to those that read for them."""

    samples: int  # records, numbered in the order of their keys
    # ranks, batch_size: of the run: a step takes `ranks * batch_size` records
    ranks: int
    batch_size: int
    roots: int  # ranks that read: each for itself and its neighbours
    steps: int = 1  # steps of a window

    def root_of(self, rank: int) -> int:
        """Return which of the roots reads for a rank."""
        return next(j for j in range(self.roots) if rank in self.members(j))

    def members(self, root: int) -> range:
        """Return the ranks that a root reads for; it is the first of them."""
        return range(root * self.ranks // self.roots, (root + 1) * self.ranks // self.roots)

    def windows(self) -> Iterator[Window]:
        """Yield what all roots together read at a time; only the last one has fewer records."""
        block = self.ranks * self.batch_size
        full = self.samples // block
        for step in range(0, full, self.steps):
            until = min(step + self.steps, full)
            yield Window(step * block, until * block, until - step)
        if full * block < self.samples:
            yield Window(full * block, self.samples, 1)

    def span(self, window: Window, root: int) -> tuple[int, int]:
        """Return the records that a root reads: first, and after the last."""
        ranks = self.members(root)
        low, high = (self._edge(window, rank) for rank in (ranks.start, ranks.stop))
        return low, high

    def part(self, window: Window, rank: int, step: int) -> tuple[int, int]:
        """Return the records that a rank gets in a step of a window."""
        if window.steps == 1:
            return self._edge(window, rank), self._edge(window, rank + 1)
        ranks = self.members(self.root_of(rank))
        first = self._edge(window, ranks.start)
        first += (step * len(ranks) + rank - ranks.start) * self.batch_size
        return first, first + self.batch_size

    def _edge(self, window: Window, rank: int) -> int:
        return window.start + (window.stop - window.start) * rank // self.ranks
