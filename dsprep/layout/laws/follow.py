"""Blocks that follow one another: each begins where the one before ends, plus what is between.

The offset of block i is ``rest(i)`` plus the sizes of all blocks before it, where a block of
length n has the size ``n + frame``, rounded up to a multiple of ``align``. So the offsets of
records of any lengths cost nothing beyond the lengths; ``rest`` is a law of its own, a constant
where nothing else is between the blocks, and steps where pages or padding do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from typing_extensions import override

from dsprep.core.packing import Tables
from dsprep.core.schema import Array, Ints
from dsprep.layout import laws
from dsprep.layout.laws.base import LARGEST, Law, damaged, integer

STEP = 256
"""Blocks between two sums that are kept in full."""


class Follow(Law):
    """Offsets from lengths.

    Parameters
    ----------
    lengths
        The law of the lengths.
    rest
        Of the same count.
    frame
        Bytes that each block has besides its length.
    align
        What block sizes are rounded up to.
    """

    name = "follow"

    def __init__(self, lengths: Law, rest: Law, frame: int = 0, align: int = 1) -> None:
        self.count = lengths.count
        self.lengths, self.rest, self.frame, self.align = lengths, rest, frame, align
        self._sums: tuple[Ints, Array] | None = None

    @override
    def at(self, indices: Ints) -> Ints:
        coarse, fine = self._sums or self._add_up()
        out: Ints = coarse[indices // STEP]
        out += fine[indices]
        out += self.rest.at(indices)
        return out

    @override
    def one(self, index: int) -> int:
        coarse, fine = self._sums or self._add_up()
        return int(coarse[index // STEP]) + int(fine[index]) + self.rest.one(index)

    def _add_up(self) -> tuple[Ints, Array]:
        """Return the sizes before every `STEP`-th block, and those before each one since."""
        n = self.count
        fine = np.empty(n, np.int64)
        coarse = np.zeros(n // STEP + 1, np.int64)
        total = 0
        for start in range(0, n, STEP << 10):
            stop = min(start + (STEP << 10), n)
            ends = np.cumsum(sizes(self.lengths.span(start, stop), self.frame, self.align))
            before = np.concatenate([np.zeros(1, np.int64), ends])[:-1] + total
            marks = np.arange(0, stop - start, STEP)
            coarse[start // STEP : start // STEP + len(marks)] = before[marks]
            fine[start:stop] = before - np.repeat(before[marks], STEP)[: stop - start]
            total += int(ends[-1])
        narrow: Array = fine
        if n and int(fine.max()) < 1 << 32:
            narrow = fine.astype(np.uint32)
        self._sums = coarse, narrow  # threads that come at once make the same
        return self._sums

    def to_json(self, tables: Tables) -> Any:
        """``{"law": "follow", "rest": law}``, and ``frame`` and ``align`` where they matter."""
        json: dict[str, Any] = {"law": self.name, "rest": self.rest.to_json(tables)}
        if self.frame:
            json["frame"] = self.frame
        if self.align > 1:
            json["align"] = self.align
        return json

    @classmethod
    @override
    def from_json(
        cls, json: Mapping[str, Any], count: int, tables: Tables, lengths: Law | None
    ) -> Follow:
        if lengths is None or lengths.count != count:
            raise damaged("a law needs the lengths of blocks, of which there are none", tables)
        given = {"frame": 0, "align": 1, **json}
        frame = integer(given, "frame", tables, 0, 1 << 40)
        align = integer(given, "align", tables, 1, 1 << 40)
        if isinstance(lengths, laws.Affine):
            top = abs(lengths.base) + abs(lengths.stride) * count + frame + align
            if top * count > LARGEST:
                raise damaged("a law leaves all files", tables, found=json)
        elif float(np.abs(lengths.span(0, count)).astype(float).sum()) + float(count) * (
            frame + align
        ) > float(LARGEST):
            raise damaged("a law leaves all files", tables)
        return cls(lengths, laws.parse(json.get("rest"), count, tables), frame, align)

    @override
    def words(self) -> str:
        between = f" with {self.frame:,} bytes between" if self.frame else ""
        rounded = f" rounded up to {self.align:,}" if self.align > 1 else ""
        return f"one after another{between}{rounded}, from {self.rest.words()} on"


def sizes(lengths: Ints, frame: int, align: int) -> Ints:
    """Return what blocks of these lengths take."""
    out: Ints = lengths + frame
    if align > 1:
        out += -out % align
    return out


def fit(values: Ints, lengths: Law, frame: int, align: int) -> Follow:
    """Return the law of offsets `values` with the smallest rest that there is."""
    plain = Follow(lengths, laws.Affine(len(values), 0), frame, align)
    rest = values - plain.span(0, len(values))
    return Follow(lengths, laws.fit(rest), frame, align)
