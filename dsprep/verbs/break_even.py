"""After how many epochs a rewrite has paid for itself, from short cold reads on this storage."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dsprep.core.permutation import Permutation
from dsprep.core.schema import Arena
from dsprep.formats.base import Source
from dsprep.reader.units import group_edges
from dsprep.sidecar.sidecar import Sidecar
from dsprep.storage.trees import drop_cached

SECONDS = 1.0
"""Seconds of each of the two measurements, about, at most."""

MOST = 1000
"""Reads of each."""


@dataclass(frozen=True)
class BreakEven:
    """The cost of a rewrite, and its savings in each epoch.

    Attributes
    ----------
    rewrite_seconds
        What the rewrite took.
    sample_seconds, group_seconds
        Seconds per sample: the source read one random sample at a time, the output read one
        random group at a time, both with a cold page cache.
    epochs
        After how many epochs the time is won back; None if reading is not faster.
    """

    rewrite_seconds: float
    sample_seconds: float
    group_seconds: float
    epochs: float | None

    @classmethod
    def of(cls, rewrite: float, sample: float, group: float, count: int) -> BreakEven:
        """Return it for `count` samples of an epoch."""
        saved = (sample - group) * count
        return cls(rewrite, sample, group, rewrite / saved if saved > 0 else None)


def measure(
    source: Source, paths: Sequence[Path], target: Sidecar, rewrite_seconds: float, seed: int = 0
) -> BreakEven | None:
    """Return when the rewrite pays, or None if there is nothing to read.

    Parameters
    ----------
    source, paths
        The dataset that was rewritten, and its files.
    target
        The output, whose sidecar has groups.
    """
    count = len(target)
    edges = group_edges(target)
    if not count or not len(source) or edges is None or len(edges) < 2:
        return None
    arena = Arena()

    def sample(i: int) -> int:
        source.read(i, i + 1, arena)
        return 1

    def group(g: int) -> int:
        target.read(slice(int(edges[g]), int(edges[g + 1])), arena=arena)
        return int(edges[g + 1] - edges[g])

    sample(0)  # what is opened and imported once does not count
    group(0)
    drop_cached(paths)
    each = _seconds_per_sample(sample, len(source), seed)
    drop_cached([target.dataset / f.path for f in target.content.files])
    together = _seconds_per_sample(group, len(edges) - 1, seed)
    return BreakEven.of(rewrite_seconds, each, together, count)


def _seconds_per_sample(read: Callable[[int], int], count: int, seed: int) -> float:
    """Read some of `count` things in random order, none twice: then it would be in the cache."""
    chosen = Permutation(seed, count).forward(np.arange(min(count, MOST), dtype=np.int64))
    began, samples = time.perf_counter(), 0
    for i in chosen.tolist():
        samples += read(i)
        if time.perf_counter() > began + SECONDS:
            break
    return (time.perf_counter() - began) / samples
