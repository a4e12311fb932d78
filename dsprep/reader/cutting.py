"""Ranges of files: gathered field by field, and cut for several threads or calls."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsprep.core.pread import runs
from dsprep.core.schema import Ints
from dsprep.reading.files import File

LEAST = 2 << 20
"""Bytes of a part below which another thread would not pay."""


class Reads:
    """The ranges of one file, gathered field by field."""

    def __init__(self, file: File) -> None:
        self.file = file
        self._columns: list[tuple[Ints, Ints, Ints]] = []

    def add(self, offsets: Ints, lengths: Ints, addresses: Ints) -> None:
        """Add ranges."""
        if len(offsets):
            self._columns.append((offsets, lengths, addresses))

    def runs(self, near: int) -> list[tuple[int, Ints]]:
        """Return the ranges in order; see `dsprep.core.pread.runs`."""
        if not self._columns:
            return []
        columns = self._columns[0]
        if len(self._columns) > 1:
            a, b, c = (np.concatenate([each[k] for each in self._columns]) for k in range(3))
            columns = a, b, c
        offsets = columns[0]
        if (offsets[1:] < offsets[:-1]).any():
            order = np.argsort(offsets, kind="stable")
            a, b, c = (each[order] for each in columns)
            columns = a, b, c
        return runs(*columns, near)


def cut(start: int, places: Ints, at: Sequence[int]) -> list[tuple[int, Ints]]:
    """Cut a range of a file, and its places, at some rising offsets within it."""
    ends = np.cumsum(places[:, 1])
    out = []
    low = begin = 0  # place, and bytes of it that are in the part before
    for offset in (*at, start + int(ends[-1])):
        high = int(np.searchsorted(ends, offset - start, "left"))
        part = places[low : high + 1].copy()
        end = offset - start - int(ends[high] - places[high, 1])
        part[-1, 1] = end
        part[0, 0] += begin
        part[0, 1] -= begin
        first = start + int(ends[low] - places[low, 1]) + begin
        out.append((first, part))
        low, begin = (high + 1, 0) if end == places[high, 1] else (high, end)
    return out


def shared(start: int, places: Ints, most: int, align: int) -> list[tuple[int, Ints]]:
    """Cut a range of a file into at most `most` parts of like size, at multiples of `align`."""
    total = int(places[:, 1].sum())
    count = min(most, total // max(align, LEAST))
    if count < 2:
        return [(start, places)]
    at = {(start + total * k // count) // align * align for k in range(1, count)}
    return cut(start, places, sorted(a for a in at if start < a < start + total))


def stepped(start: int, places: Ints, nbytes: int | None) -> list[tuple[int, Ints]]:
    """Cut a range of a file at all multiples of `nbytes`; None: not at all."""
    if nbytes is None:
        return [(start, places)]
    end = start + int(places[:, 1].sum())
    return cut(start, places, range((start // nbytes + 1) * nbytes, end, nbytes))
