"""Where the ranges of samples begin that are read at a time: at groups, or every B samples."""

from __future__ import annotations

import numpy as np

from dsprep.core.schema import Ints
from dsprep.sidecar.sidecar import Sidecar


def group_edges(sidecar: Sidecar) -> Ints | None:
    """Return where the groups of a repacked dataset begin, and its number of samples.

    Returns
    -------
    int64, shape ``(groups + 1,)``, rising strictly from 0; None if a file has no groups.
    """
    edges = [np.zeros(1, np.int64)]
    start = 0
    for number, entry in enumerate(sidecar.content.files):
        if not entry.samples:
            continue
        groups = sidecar.layout(number).groups
        if groups is None:
            return None
        if groups.first is None:
            first = np.arange(0, entry.samples, groups.samples, dtype=np.int64)
        else:
            first = groups.first.span(0, groups.first.count)
        start += entry.samples
        edges += [start - entry.samples + first[1:], np.array([start], np.int64)]
    return np.unique(np.concatenate(edges))


def even_edges(sidecar: Sidecar, samples: int) -> Ints:
    """Return ranges of `samples` consecutive samples, of a dataset without groups.

    Where files hold more than that, a range does not go beyond its file; where they hold less,
    such as one sample each, it takes several.

    Returns
    -------
    int64, shape ``(ranges + 1,)``, rising strictly from 0.
    """
    counts = np.array([f.samples for f in sidecar.content.files if f.samples], np.int64)
    total = int(counts.sum())
    if len(counts) < 2 or total // len(counts) < samples:
        return np.append(np.arange(0, total, samples, dtype=np.int64), total)
    starts = np.cumsum(counts) - counts
    parts = [
        np.arange(a, a + n, samples, dtype=np.int64)
        for a, n in zip(starts.tolist(), counts.tolist(), strict=True)
    ]
    return np.append(np.concatenate(parts), total)
