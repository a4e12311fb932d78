"""The groups that each rank reads: of many ranks at once, as the Reader gives them one by one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsprep.core.schema import Ints
from dsprep.reader.order import Sequence


@dataclass(frozen=True)
class Shares:
    """The groups of a sequence that each of some ranks reads, as `Epoch.units` gives them.

    Attributes
    ----------
    bounds
        int64, shape ``(ranks + 1,)``: rank r has the positions ``bounds[r] .. bounds[r + 1]``.
    first, stop
        int64, shape ``(ranks,)``: it reads the groups ``first .. stop`` of the sequence.
    """

    bounds: Ints
    first: Ints
    stop: Ints

    @classmethod
    def of(cls, sequence: Sequence, ranks: int) -> Shares:
        """Return the shares of an epoch that is assigned as a whole."""
        bounds = np.arange(ranks + 1, dtype=np.int64) * len(sequence) // ranks
        first = np.searchsorted(sequence.ends, bounds[:-1], "right") - 1
        stop = np.searchsorted(sequence.ends, bounds[1:] - 1, "right")
        return cls(bounds, first, np.where(bounds[1:] > bounds[:-1], stop, first))

    @property
    def samples(self) -> Ints:
        """Samples of each rank: int64, ``(ranks,)``."""
        return np.diff(self.bounds)
