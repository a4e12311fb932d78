"""Units, the ranges read at a time: the meaning of ``buffer_size`` for a dataset."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from dsprep.core.schema import Ints, Schema
from dsprep.core.spans import offsets_of
from dsprep.errors import UsageError
from dsprep.layout.locate import locate
from dsprep.reader.order import Shuffle
from dsprep.sidecar.sidecar import Sidecar
from dsprep.storage.base import Handle
from dsprep.storage.paths import StorePath
from dsprep.writing.buffers import parse_buffer

BUFFER_NBYTES = 64 << 20
"""Bytes that are read at a time of datasets without groups, unless a size is given."""

ENOUGH = 1024
"""Samples of a subset that are read and shuffled together, unless a size is given: as many as a
group has, and no more than these, since each may take a read."""

BUFFER_SAMPLES = 1 << 18
"""Samples of such a range at most: what is computed for each takes some tens of bytes."""

BUFFER_FILES = 512
"""Files of such a range at most: its first sample waits until all of them were opened."""


def sample_nbytes(sidecar: Sidecar, schema: Schema) -> float:
    """Return the bytes of a sample; of ragged samples about how many, by the sizes of files."""
    if not schema.ragged:
        return float(schema.fixed_nbytes)
    total = sidecar.content.nbytes
    return total / max(1, len(sidecar))


def cut_units(
    sidecar: Sidecar,
    schema: Schema,
    shuffle: Shuffle,
    buffer_size: int | str | None,
    mixed: int | None,
    kept: Ints | None = None,
) -> tuple[Ints, Ints, int]:
    """Return the ranges that are assigned, and how many of them are read and shuffled together.

    Parameters
    ----------
    schema
        The fields that are read.
    buffer_size
        Samples or bytes; rounded down to whole groups, at least one, where there are groups.
        None or ``"auto"``: one group, or `BUFFER_NBYTES`, and at most `BUFFER_SAMPLES` in
        `BUFFER_FILES`.
    mixed
        Ranges to shuffle together; None: as many as `buffer_size` holds.
    kept
        The samples of a subset, rising; None: all.

    Returns
    -------
    ``(stored, edges, mixed)``: where the ranges begin among the samples of the dataset, int64 of
    shape ``(ranges + 1,)``, rising strictly from 0; the same among those that are kept; a number.
    """
    samples, limit = parse_buffer("auto" if buffer_size is None else str(buffer_size))
    nbytes = max(1.0, sample_nbytes(sidecar, schema))
    if limit is not None:
        samples = max(1, int(limit / nbytes))
    stored = group_edges(sidecar)
    if stored is None or shuffle == "global":
        total = len(sidecar)
        few = BUFFER_FILES / files_per_sample(sidecar, schema)
        default = max(1, int(min(BUFFER_SAMPLES, BUFFER_NBYTES / nbytes, few)))
        files = BUFFER_FILES if samples is None else total
        samples = min(samples or default, max(1, total))
        stored = even_edges(sidecar, samples, files)
        if shuffle == "global":
            stored = np.append(np.arange(0, total, samples, dtype=np.int64), total)
        samples = None
    edges = stored if kept is None else np.searchsorted(kept, stored)
    if mixed is None:
        largest, chosen = (int(np.diff(e).max(initial=1)) for e in (stored, edges))
        mixed = max(1, (samples or (largest if kept is None else min(largest, ENOUGH))) // chosen)
    return stored, edges, mixed


def files_per_sample(sidecar: Sidecar, schema: Schema) -> float:
    """Return the files that hold a sample, on average; within a directory as in the first one."""
    counts = sidecar.content.counts
    numbers = np.flatnonzero(counts)
    if not len(numbers):
        return 1.0
    layout, count = sidecar.layout(int(numbers[0])), int(counts[numbers[0]])
    inside = sum(count for f in schema if f.name in layout.files)
    for grid in (c.grid for name, c in layout.columns.items() if name in schema.names):
        if grid is not None and grid.several:
            inside += grid.block_count // math.prod(grid.files or ())
    return len(numbers) / len(sidecar) + inside / count


def is_decoded(sidecar: Sidecar, names: Sequence[str]) -> bool:
    """Return whether values of some fields are decoded (filters, tiles), as the first file says."""
    if not len(sidecar):
        return False
    columns = sidecar.layout(0).columns
    grids = [columns[n].grid for n in names if n in columns]
    return any(grid is not None and not grid.plain for grid in grids)


def epoch_requests(dataset: Path, units: int, unit_nbytes: float) -> int | None:
    """Return about how many requests reading so many units takes; None of local files."""
    if not isinstance(dataset, StorePath):
        return None
    return units * max(1, -int(-unit_nbytes // dataset.store.part_nbytes))


def first_file(sidecar: Sidecar, names: Sequence[str]) -> Handle:
    """Return the file of the first sample's first field that has a location.

    Raises
    ------
    UsageError
        If no field has one.
    """
    number, local = sidecar.file_of(0)
    layout = sidecar.layout(number)
    for name in names:
        if name in layout.unlocated or name in layout.given:
            continue
        extents = locate(layout, name, np.array([local], np.int64))
        path = extents.template
        if extents.file_index is not None and extents.file_index.shape[1]:
            path = extents.path(extents.file_index[:, 0].tolist())
        return sidecar.open_file(number, path)
    raise UsageError("no field has a location", where=sidecar.dataset)


def group_edges(sidecar: Sidecar) -> Ints | None:
    """Return the first sample of each group of a repacked dataset, and its number of samples.

    That is int64 of shape ``(groups + 1,)``, rising strictly from 0; None if a file has no groups.
    """
    edges = [np.zeros(1, np.int64)]
    start = 0
    for number, count in enumerate(sidecar.content.counts.tolist()):
        if not count:
            continue
        groups = sidecar.layout(number).groups
        if groups is None:
            return None
        if groups.first is None:
            first = np.arange(0, count, groups.samples, dtype=np.int64)
        else:
            first = groups.first.span(0, groups.first.count)
        start += count
        edges += [start - count + first[1:], np.array([start], np.int64)]
    joined = np.maximum.accumulate(np.concatenate(edges))
    distinct: Ints = joined[np.append(True, joined[1:] > joined[:-1])]
    return distinct


def even_edges(sidecar: Sidecar, samples: int, files: int = BUFFER_FILES) -> Ints:
    """Return ranges of `samples` consecutive samples, of a dataset without groups.

    Where files hold more than that, a range does not go beyond its file; where they hold less,
    such as one sample each, it takes several, at most `files`. Like `group_edges`.
    """
    counts = sidecar.content.counts
    counts = counts[counts > 0]
    starts = offsets_of(counts).tolist()
    total, edges = starts[-1], [0]
    if len(counts) < 2:
        return np.append(np.arange(0, total, samples, dtype=np.int64), total)
    if total // len(counts) < samples:
        while (at := edges[-1]) < total:
            last = bisect_right(starts, at) - 1 + files
            edges.append(min(at + samples, starts[min(last, len(counts))]))
        return np.array(edges, np.int64)
    parts = [np.arange(a, b, samples, dtype=np.int64) for a, b in pairwise(starts)]
    return np.append(np.concatenate(parts), total)
