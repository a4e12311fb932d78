"""Affine runs: the general law, small wherever numbers rise evenly for a while.

A run is ``count`` numbers from ``start`` on in steps of ``stride``. Packed, each is three varints:
its count, its stride, and the jump from where the run before it ended (both zigzagged). What
repeats in them, as it does in databases that were built regularly, costs next to nothing behind
LZMA.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from typing_extensions import override

from dsprep.core.packing import Tables, from_varints, to_varints, unzigzag, zigzag
from dsprep.core.schema import Ints
from dsprep.layout.laws.base import LARGEST, Law, damaged, integer


class Runs(Law):
    """Affine runs, found by binary search.

    Attributes
    ----------
    first
        int64, shape ``(runs,)``: the index with which each run begins; ``first[0] == 0``.
    start, stride
        int64, shape ``(runs,)``: its first number, and its step.
    """

    name = "runs"

    def __init__(self, count: int, first: Ints, start: Ints, stride: Ints) -> None:
        self.count = count
        self.first, self.start, self.stride = first, start, stride
        self._base = start - first * stride

    @override
    def at(self, indices: Ints) -> Ints:
        run = np.searchsorted(self.first, indices, "right") - 1
        out: Ints = indices * self.stride[run]
        out += self._base[run]
        return out

    @override
    def one(self, index: int) -> int:
        run = int(self.first.searchsorted(index, "right")) - 1
        return int(self._base[run]) + index * int(self.stride[run])

    @override
    def span(self, start: int, stop: int) -> Ints:
        if start >= stop:
            return np.empty(0, np.int64)
        low, high = np.searchsorted(self.first, [start, stop - 1], "right") - 1
        runs = np.arange(low, high + 1)
        edges = np.append(np.maximum(self.first[runs], start), stop)
        counts = np.diff(edges)
        out: Ints = np.arange(start, stop, dtype=np.int64)
        out *= np.repeat(self.stride[runs], counts)
        out += np.repeat(self._base[runs], counts)
        return out

    def to_json(self, tables: Tables) -> Any:
        """``{"law": "runs", "runs": how many, "data": packed}``."""
        return {"law": self.name, "runs": len(self.first), "data": tables.put(self.pack())}

    def pack(self) -> bytes:
        """Return the varints of all runs."""
        counts = np.diff(np.append(self.first, self.count))
        ends = self.start + (counts - 1) * self.stride
        jumps = self.start - np.concatenate([np.zeros(1, np.int64), ends[:-1]])
        rows = np.stack([counts.view(np.uint64), zigzag(self.stride), zigzag(jumps)], axis=1)
        return to_varints(rows.reshape(-1))

    @classmethod
    @override
    def from_json(
        cls, json: Mapping[str, Any], count: int, tables: Tables, lengths: Law | None
    ) -> Runs:
        try:
            numbers = from_varints(tables.get(json.get("data")))
        except ValueError as error:
            raise damaged("the runs of a law are damaged", tables, found=error) from error
        if len(numbers) != 3 * integer(json, "runs", tables, 0):
            raise damaged("a law has another number of runs", tables, json["runs"])
        rows = numbers.reshape(-1, 3)
        counts = rows[:, 0].astype(np.int64)
        if bool((counts < 1).any()) or sum_of(counts) != count:
            raise damaged("the runs of a law do not add up", tables, count)
        stride, jump = unzigzag(rows[:, 1].copy()), unzigzag(rows[:, 2].copy())
        steps = np.concatenate([np.zeros(1, np.int64), (stride * (counts - 1))[:-1]])[: len(counts)]
        # Bounded by floats first: these sums may be far beyond int64.
        reach = np.abs(stride).astype(float) * counts
        total = np.abs(jump).astype(float) + np.concatenate([[0.0], reach[:-1]])[: len(counts)]
        if float(total.sum()) + float(reach.max(initial=0)) > LARGEST * 64:
            raise damaged("the runs of a law leave all files", tables)
        start = np.cumsum(jump + steps)
        end = start + stride * (counts - 1)
        if len(start) and max(int(np.abs(start).max()), int(np.abs(end).max())) > LARGEST:
            raise damaged("the runs of a law leave all files", tables)
        return cls(count, np.cumsum(counts) - counts, start, stride)

    @override
    def words(self) -> str:
        return f"{len(self.first):,} affine runs"


def fit(values: Ints) -> Runs:
    """Return the runs of `values`, found greedily from the front."""
    n = len(values)
    if not n:
        return Runs(0, *(np.zeros(0, np.int64) for _ in range(3)))
    first = _starts(values)
    counts = np.diff(np.append(first, n))
    step = np.zeros(len(first), np.int64)
    long = counts > 1
    step[long] = values[first[long] + 1] - values[first[long]]
    return Runs(n, first, values[first], step)


def _starts(values: Ints) -> Ints:
    """Return where runs begin: a run takes all that goes on with its first step."""
    # The number behind a run begins the next one, whose step is that to the number after it. So a
    # stretch of equal steps follows a run either at once or one number later.
    n = len(values)
    steps = np.diff(values)
    # Ends of stretches of equal steps: the index of the last number that each reaches.
    ends = np.flatnonzero(steps[1:] != steps[:-1]) + 1
    ends = np.append(ends, n - 1) if n > 1 else np.zeros(1, np.int64)
    # A run that ends at e is followed by one that begins at e + 1, whose steps are those of the
    # stretch that holds e + 1 -> e + 2; the stretches that end at or before e + 1 are passed over.
    following = np.searchsorted(ends, ends + 1, "right")
    jump = np.append(following, len(ends))
    reached = np.zeros(1, np.int64)
    while reached[-1] < len(ends):  # each time twice as far
        reached = np.concatenate([reached, jump[reached]])
        jump = jump[jump]
    starts = np.append(0, ends[reached[reached < len(ends)]] + 1)
    return starts[starts < n]


def sum_of(counts: Ints) -> int:
    """Return the sum, exactly however large the numbers are."""
    if not len(counts) or float(counts.astype(float).sum()) < LARGEST:
        return int(counts.sum())
    return sum(counts.tolist())
