"""How much is read at a time: what ``buffer_size`` means for a dataset."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsprep.core.schema import Ints, Schema
from dsprep.errors import UsageError
from dsprep.layout.locate import locate
from dsprep.reader.order import Shuffle
from dsprep.sidecar.sidecar import Sidecar
from dsprep.storage.base import Handle
from dsprep.writing.buffers import InBytes, InSamples, parse_buffer

BUFFER_NBYTES = 64 << 20
"""Bytes that are read at a time of datasets without groups, unless a size is given."""

BUFFER_SAMPLES = 1 << 18
"""Samples of such a range at most: what is computed for each takes some tens of bytes."""


def sample_nbytes(sidecar: Sidecar, schema: Schema) -> float:
    """Return the bytes of a sample; of ragged samples about how many, by the sizes of files."""
    if not schema.ragged:
        return float(schema.fixed_nbytes)
    total = sum(f.identity.nbytes for f in sidecar.content.files)
    return total / max(1, len(sidecar))


def cut_units(
    sidecar: Sidecar,
    schema: Schema,
    shuffle: Shuffle,
    buffer_size: int | str | None,
    mixed: int | None,
) -> tuple[Ints, int]:
    """Return the ranges that are assigned, and how many of them are read and shuffled together.

    Parameters
    ----------
    schema
        The fields that are read.
    buffer_size
        Samples or bytes; rounded down to whole groups, at least one, where there are groups.
        None or ``"auto"``: one group, or `BUFFER_NBYTES` and at most `BUFFER_SAMPLES`.
    mixed
        Ranges to shuffle together; None: as many as `buffer_size` holds.

    Returns
    -------
    ``(edges, mixed)``: int64, shape ``(ranges + 1,)``, rising strictly from 0; and a number.
    """
    requested = None if buffer_size is None else parse_buffer(str(buffer_size))
    nbytes = max(1.0, sample_nbytes(sidecar, schema))
    samples = None
    if isinstance(requested, InBytes):
        samples = max(1, int(requested.nbytes / nbytes))
    elif isinstance(requested, InSamples):
        samples = requested.count
    edges = group_edges(sidecar)
    if edges is not None and shuffle != "global":
        if mixed is None:
            largest = int(np.diff(edges).max(initial=1))
            mixed = 1 if samples is None else max(1, samples // largest)
        return edges, mixed
    total = len(sidecar)
    default = min(BUFFER_SAMPLES, max(1, int(BUFFER_NBYTES / nbytes)))
    samples = min(samples or default, max(1, total))
    if shuffle == "global":
        return np.append(np.arange(0, total, samples, dtype=np.int64), total), mixed or 1
    return even_edges(sidecar, samples), mixed or 1


def is_decoded(sidecar: Sidecar, names: Sequence[str]) -> bool:
    """Return whether values of some fields are decoded (filters, tiles), as the first file says."""
    if not len(sidecar):
        return False
    columns = sidecar.layout(0).columns
    grids = [columns[n].grid for n in names if n in columns]
    return any(grid is not None and not grid.plain for grid in grids)


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
    """Return where the groups of a repacked dataset begin, and its number of samples.

    That is int64 of shape ``(groups + 1,)``, rising strictly from 0; None if a file has no groups.
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
    joined = np.maximum.accumulate(np.concatenate(edges))
    distinct: Ints = joined[np.append(True, joined[1:] > joined[:-1])]
    return distinct


def even_edges(sidecar: Sidecar, samples: int) -> Ints:
    """Return ranges of `samples` consecutive samples, of a dataset without groups.

    Where files hold more than that, a range does not go beyond its file; where they hold less,
    such as one sample each, it takes several. Like `group_edges`.
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
