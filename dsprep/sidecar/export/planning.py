"""Chunks of one shape for one field of a whole dataset.

Zarr counts its chunks through from the first sample to the last, though the dataset may be in
several files. So the samples of a chunk divide those of every file but the last, and those of every
chunk that the dataset has itself. What cannot be brought into such a grid is `Inexpressible`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dsprep.core import filters as known
from dsprep.core.schema import Field
from dsprep.errors import UsageError
from dsprep.layout.model import Grid
from dsprep.sidecar.export import zarr2
from dsprep.sidecar.export.chunks import Part, Plan
from dsprep.sidecar.export.files import SLICE
from dsprep.sidecar.export.zarr2 import Inexpressible
from dsprep.sidecar.sidecar import Sidecar

SMALL, USUAL, LARGE = 1 << 20, 4 << 20, 16 << 20
"""Bytes of a chunk of contiguous rows: at least, if possible; without need for another; at most,
unless a sample is larger."""


def plan(sidecar: Sidecar, field: Field) -> Plan:
    """Return `field` as an array of Zarr.

    Raises
    ------
    Inexpressible
        If it is not one.
    UsageError
        If filters were left out for some of its chunks.
    """
    zarr2.dtype(field.dtype)
    if field.ragged:
        raise Inexpressible("its size varies from sample to sample")
    if not field.row_nbytes or not len(sidecar):
        return Plan(field, (1, *(max(1, n) for n in field.inner)))
    parts, first = [], 0
    for number, file in enumerate(sidecar.content.files):
        if file.samples:
            parts.append(_part(sidecar, number, field, first))
        first += file.samples
    if any(p.grid is not None and not p.grid.plain for p in parts):
        return _as_stored(field, tuple(parts))
    return _as_rows(field, tuple(parts))


def _part(sidecar: Sidecar, number: int, field: Field, first: int) -> Part:
    layout, path = sidecar.layout(number), sidecar.dataset / sidecar.content.files[number].path
    if field.name in layout.unlocated:
        raise Inexpressible(layout.unlocated[field.name])
    records, column = layout.records, layout.columns.get(field.name)
    if records is not None and field.name in records.parts:
        if records.parts[field.name].at is None:
            raise Inexpressible("its values have no constant place in a record")
        return Part(path, layout, first, None)
    if column is None or column.grid is None or column.first is not None:
        raise Inexpressible("the sidecar does not tell where it lies")
    grid = column.grid
    if grid.shape[0] != layout.count * column.lines:
        raise Inexpressible("its rows are not those of the samples")
    known.check(grid.filters, f"{path}, field {field.name}")
    if grid.chunk != grid.shape and grid.chunk[0] % column.lines:
        raise Inexpressible("its chunks end within samples")
    return Part(path, layout, first, grid, column.lines)


def _as_rows(field: Field, parts: tuple[Part, ...]) -> Plan:
    """Return a plan in which a chunk is as many samples as lie behind one another."""
    last, whole = parts[-1], math.gcd(*(p.count for p in parts[:-1]))
    bound = math.gcd(whole, *(p.unit for p in parts if not p.free))
    per = _samples(bound, last.count if last.free else bound, field.row_nbytes)
    fill, unfillable = _fill(field, parts)
    return Plan(field, (per, *field.inner), parts, (), fill, unfillable=unfillable)


def _samples(bound: int, last: int, nbytes: int) -> int:
    """Return the samples of a chunk.

    Parameters
    ----------
    bound
        It has to be a divisor of this; 0: it may be any.
    last
        Of this it should be one, so that the last chunk is full.
    nbytes
        Of a sample.
    """
    most = max(1, LARGE // nbytes)
    full = _divisor(math.gcd(bound, last), most)
    if full * nbytes >= SMALL or full in (bound, last):
        return full
    return _divisor(bound, most) if bound else max(1, min(last, USUAL // nbytes))


def _divisor(n: int, most: int) -> int:
    """Return the largest divisor of `n` up to `most`, of those found in reasonable time."""
    low = np.arange(1, min(math.isqrt(n), 1 << 20) + 1, dtype=np.int64)
    low = low[n % low == 0]
    both = np.concatenate([low, n // low])
    return int(both[both <= most].max())


def _as_stored(field: Field, parts: tuple[Part, ...]) -> Plan:
    """Return a plan in which chunks are those of the dataset."""
    shapes, filters = set(), set()
    for part in parts:
        grid = part.grid
        if grid is None:
            raise Inexpressible("its files are not chunked alike")
        if part.lines == 1 and grid.shape[1:] == field.inner:
            shapes.add(grid.chunk)
        elif grid.chunk[1:] == grid.shape[1:] and grid.chunk[0] % part.lines == 0:
            shapes.add((grid.chunk[0] // part.lines, *field.inner))
        else:
            raise Inexpressible("its chunks cut samples in another shape than theirs")
        kept = _applied(field, part, grid)
        filters.add(tuple(tuple(sorted(f.items(), key=str)) for f in kept))
    if len(shapes) > 1 or len(filters) > 1:
        raise Inexpressible("its files are not chunked alike")
    chunk = shapes.pop()
    if any(p.count % chunk[0] for p in parts[:-1]):
        raise Inexpressible("a file ends within a chunk, and others follow")
    fill, unfillable = _fill(field, parts)
    applied = tuple(dict(f) for f in filters.pop())
    return Plan(field, chunk, parts, applied, fill, whole=True, unfillable=unfillable)


def _applied(field: Field, part: Part, grid: Grid) -> list[Mapping[str, Any]]:
    """Return the filters of all chunks; `UsageError` if they are not the same."""
    if grid.masks is None:
        return list(grid.filters)
    mask: int | None = None
    for start in range(0, grid.block_count, SLICE):
        stop = min(start + SLICE, grid.block_count)
        masks = grid.masks.span(start, stop)
        stored = (grid.blocks.offsets.span(start, stop) >= 0) & (
            grid.blocks.lengths.span(start, stop) > 0
        )
        found = set(np.unique(masks[stored]).tolist()) | ({mask} if mask is not None else set())
        if len(found) > 1:
            raise UsageError(
                f"field {field.name} cannot be told in Zarr: filters were left out for some of its "
                "chunks only",
                where=part.path,
                fix="convert the dataset",
            )
        mask = found.pop() if found else mask
    return [f for i, f in enumerate(grid.filters) if not (mask or 0) >> i & 1]


def _fill(field: Field, parts: tuple[Part, ...]) -> tuple[Any, str]:
    """Return the fill value, and why there is none, should chunks need one."""
    fills = {p.grid.fill for p in parts if p.grid is not None and p.grid.fill is not None}
    if len(fills) != 1:
        return None, "its files have different fill values" if fills else ""
    try:
        return zarr2.fill_value(fills.pop(), field.dtype), ""
    except Inexpressible as reason:
        return None, str(reason)
