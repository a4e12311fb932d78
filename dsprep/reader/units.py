"""How much is read at a time: what ``buffer_size`` means for a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dsprep.buffers import InBytes, InSamples, parse_buffer
from dsprep.errors import DsprepError
from dsprep.layout.codec import file_path
from dsprep.layout.extents import locate
from dsprep.located import Sidecar
from dsprep.reader.order import Shuffle
from dsprep.reader.ranges import even_edges, group_edges
from dsprep.schema import Ints, Schema

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
    """Return the ranges that are dealt, and how many of them are read and shuffled together.

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
    asked = None if buffer_size is None else parse_buffer(str(buffer_size))
    nbytes = max(1.0, sample_nbytes(sidecar, schema))
    samples = None
    if isinstance(asked, InBytes):
        samples = max(1, int(asked.nbytes / nbytes))
    elif isinstance(asked, InSamples):
        samples = asked.count
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


def some_ranges(
    sidecar: Sidecar, edges: Ints, names: Sequence[str], most: int = 256
) -> tuple[list[tuple[Path, int, int]], bool]:
    """Return where some units lie, evenly chosen, and whether fields have to be decoded.

    Returns
    -------
    ranges
        File, offset and bytes of the longest field of each of at most `most` units; fewer where
        places are not told, such as of chunks in files of their own.
    decoded
        Whether there are filters.
    """
    schema = sidecar.schema
    if not len(sidecar):
        return [], False
    columns = sidecar.layout(0).columns
    grids = [columns[n].grid for n in names if n in columns]
    decoded = any(grid is not None and not grid.plain for grid in grids)
    if not names:
        return [], decoded
    name = max(names, key=lambda n: schema[n].row_nbytes)
    count = len(edges) - 1
    out: list[tuple[Path, int, int]] = []
    for unit in np.unique(np.linspace(0, count - 1, most).astype(int)).tolist():
        first, last = int(edges[unit]), int(edges[unit + 1]) - 1
        number, low = sidecar.file_of(first)
        high = min(last - first + low, sidecar.content.files[number].samples - 1)
        try:
            found = locate(sidecar.layout(number), name, np.array([low, high], np.int64))
        except DsprepError:
            continue
        if not len(found.offset) or int(found.offset.min()) < 0:
            continue
        below, kept = found.template, slice(None)
        if found.place is not None:  # chunks in files of their own: the first of them
            below, kept = file_path(below, found.place[:, 0].tolist()), slice(1)
        start = int(found.offset[kept].min())
        stop = int((found.offset + found.length)[kept].max())
        root = sidecar.dataset / sidecar.content.files[number].path
        out.append((root / below if below else root, start, stop - start))
    return out, decoded
