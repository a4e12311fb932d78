"""Figures of a dataset by its sidecar: the share of its files that is payload, reads in a row.

Places are computed, no sample is read. Of large datasets samples spread evenly are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dsprep.core.schema import Ints
from dsprep.layout.laws import Affine, Law
from dsprep.layout.locate import locate, rows_of
from dsprep.layout.model import FileLayout
from dsprep.sidecar.sidecar import Sidecar

NEAR = 64 << 10
"""Bytes between two reads that do not make them two: skipping them takes no longer."""
IN_A_ROW = 1000
"""Consecutive samples whose reads are counted together."""

_WINDOWS = 64
_SUMMED = 1 << 22  # numbers of a law that are added up one by one
_SLICE = 1 << 20
_APART = 1 << 41  # between ranges of different files


def total(law: Law) -> tuple[int, bool]:
    """Return the sum of the numbers above 0, and whether it is exact, not estimated."""
    n = law.count
    if isinstance(law, Affine) and (not law.stride or law.base >= 0):
        if not law.stride:
            return max(0, law.base) * n, True
        if law.stride > 0:
            return n * law.base + law.stride * (n * (n - 1) // 2), True
    if n <= _SUMMED:
        parts = (law.span(a, min(a + _SLICE, n)) for a in range(0, n, _SLICE))
        return sum(int(np.maximum(p, 0).sum()) for p in parts), True
    some = np.linspace(0, n - 1, _SUMMED >> 4).astype(np.int64)
    return int(float(np.maximum(law.at(some), 0).mean()) * n), False


def payload(opened: Sidecar) -> tuple[int | None, bool]:
    """Return the bytes in the files that hold samples, and whether that is exact."""
    known: dict[tuple[int, int], tuple[int | None, bool]] = {}
    found: int | None = None
    exact = True
    for i, entry in enumerate(opened.content.files):
        key = entry.layout, entry.samples
        if key not in known:
            known[key] = _payload_of(opened.layout(i))
        nbytes, sure = known[key]
        if nbytes is not None:
            found = (found or 0) + nbytes
        exact &= sure
    return found, exact


def _payload_of(layout: FileLayout) -> tuple[int | None, bool]:
    sums: list[tuple[int, bool]] = []
    records = layout.records
    if records is not None:
        sizes = [p.nbytes for p in records.parts.values() if p.at is not None]
        if len(sizes) == len(records.parts) and None not in sizes:
            sums.append((layout.count * sum(n or 0 for n in sizes), True))
        else:
            sums.append(total(records.blocks.lengths))
    for column in layout.columns.values():
        grid = column.grid
        if grid is None:
            sums.append((0, True))
        elif not grid.plain:
            sums.append(total(grid.blocks.lengths))
        elif column.count is not None:
            rows, sure = total(column.count)
            sums.append((rows * grid.row_nbytes, sure))
        else:
            sums.append((layout.count * column.lines * grid.row_nbytes, True))
    if not sums:
        return None, True
    return sum(n for n, _ in sums), all(sure for _, sure in sums)


def runs(opened: Sidecar) -> float | None:
    """Return the mean number of ranges that consecutive samples take."""
    n = len(opened)
    step = min(IN_A_ROW, n)
    if not n:
        return None
    most = n // step
    begins = np.unique(np.linspace(0, most - 1, min(most, _WINDOWS)).astype(np.int64)) * step
    counted = [_ranges(opened, int(a), int(a) + step) for a in begins]
    told = [k for k in counted if k is not None]
    return float(np.mean(told)) if told else None


def _ranges(opened: Sidecar, start: int, stop: int) -> int | None:
    """Return how many ranges a read of some samples takes, one field after another."""
    count, any_field = 0, False
    for layout, _, local in opened.files_of(start, stop):
        for name in _streams(layout):
            any_field = True
            found = _stored(layout, name, local)
            if found is None:
                continue
            offset, length = found
            if len(offset):
                once = np.sort(np.unique(offset, return_index=True)[1])  # a chunk is read once
                offset, length = offset[once], length[once]
                ends = offset + length
                far = (offset[1:] - ends[:-1] > NEAR) | (offset[:-1] - ends[1:] > NEAR)
                count += 1 + int(far.sum())
    return count if any_field else None


def _streams(layout: FileLayout) -> Iterator[str]:
    """Yield the fields that are read one by one: those of records come together."""
    if layout.records is not None and layout.records.parts:
        yield next(iter(layout.records.parts))
    yield from (n for n, c in layout.columns.items() if c.grid is not None)


def _stored(layout: FileLayout, name: str, local: Ints) -> tuple[Ints, Ints] | None:
    """Return the stored ranges of some samples, in order; files of one field count as one."""
    column = layout.columns.get(name)
    if column is not None and column.grid is not None:
        _, rows = rows_of(column, local)
        if len(rows) and int(np.abs(rows).max()) > _SLICE * max(1, column.grid.chunk[0]):
            return None  # a sample of that size takes as many reads as it has chunks
    if layout.records is not None and name in layout.records.parts:
        records = layout.records
        numbers = local if records.order is None else records.order.at(local)
        return records.blocks.offsets.at(numbers), records.blocks.lengths.at(numbers)
    found = locate(layout, name, local)
    offset, length = found.offset, found.length
    if found.place is not None and len(offset):
        new = np.zeros(len(offset), np.int64)
        new[1:] = (np.diff(found.place, axis=1) != 0).any(axis=0)
        offset = offset + np.cumsum(new) * _APART
    kept = found.offset >= 0
    return offset[kept], length[kept]
