"""Sources of some samples of another source, in an order of their own."""

from __future__ import annotations

import itertools
import math
import threading
from functools import partial
from pathlib import Path

import numpy as np
from typing_extensions import override

from dsprep.core.gather import Assembly
from dsprep.core.schema import Arena, Batch, Ints, empty_batch
from dsprep.errors import UsageError
from dsprep.formats.base import Opening, Source
from dsprep.layout.describe import FieldStorage
from dsprep.storage.identity import Identities

PROBE = 64
"""Samples that are read to estimate the size of ragged ones that only reading gives."""

JOIN_NBYTES = 128 << 10
"""Bytes between two requested samples up to which reading them costs less than another call."""

SPAN_NBYTES = 8 << 20
"""Bytes that are read together, requested or not."""


def probe_nbytes(source: Source, start: int, stop: int) -> int:
    """Return the mean payload bytes of up to `PROBE` samples spread over ``start .. stop``."""
    count = min(PROBE, stop - start)
    if count == 0:
        return 1
    total = 0
    for i in range(count):
        at = start + (stop - start) * i // count
        total += sum(int(c.nbytes) for c in source.read(at, at + 1).values())
    return max(1, math.ceil(total / count))


def open_some(opening: Opening, indices: Ints | tuple[int, int]) -> Source:
    """Open a source, and return the samples of these numbers, or of a half-open range."""
    numbers = np.arange(*indices) if isinstance(indices, tuple) else indices
    return DerivedSource(opening(), numbers)


class DerivedSource(Source):
    """Samples of another source by number: sample i is sample ``indices[i]``.

    Where numbers rise, neighbours are read together. What is not about single samples is passed
    through; closing it closes `base`.

    Parameters
    ----------
    base
        The source.
    indices
        int64, shape ``(n,)``, in any order; None: all.
    times
        Repeats of each: the order of all, again and again.

    Raises
    ------
    UsageError
        If a number is not one of a sample, or there would be too many samples.
    """

    def __init__(self, base: Source, indices: Ints | None = None, times: int = 1) -> None:
        self.base, self.path, self.schema = base, base.path, base.schema
        self._indices, self._times = indices, times
        self._count = len(base) if indices is None else len(indices)
        if (
            indices is not None
            and len(indices)
            and not 0 <= indices.min() <= indices.max() < len(base)
        ):
            problem = "a sample is selected that does not exist"
            raise UsageError(problem, expected=f"0 to {len(base) - 1}")
        if times < 1:
            raise UsageError(f"--duplicate {times} is not possible", expected="at least 1")
        if times * max(1, len(base)) * max(1, base.schema.fixed_nbytes) >= 1 << 62:
            raise UsageError(f"--duplicate {times} is not possible: no storage is so large")
        self.version, self.notes, self.named = base.version, base.notes, base.named
        self.repeatable = base.repeatable
        self._local = threading.local()
        self._sample_nbytes: int | None = None

    def __len__(self) -> int:
        return self._count * self._times

    def numbers(self, indices: Ints) -> Ints:
        """Return the numbers in `base` of some samples: int64."""
        if self._times > 1:
            indices = indices % self._count
        return indices if self._indices is None else self._indices[indices]

    def origin(self, indices: Ints) -> tuple[Source, Ints]:
        """Return the source that is derived from nothing, and which samples of it they are."""
        source: Source = self
        while isinstance(source, DerivedSource):
            indices = source.numbers(indices)
            source = source.base
        return source, indices

    @override
    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        numbers = self.numbers(np.arange(start, stop, dtype=np.int64))
        if not len(numbers):
            return empty_batch(self.schema)
        bounds = self._spans(numbers).tolist()
        if len(bounds) == 2 and numbers[-1] - numbers[0] + 1 == len(numbers):
            return self.base.read(int(numbers[0]), int(numbers[-1]) + 1, arena)
        assembly = Assembly(self.schema, len(numbers), arena, "selected")
        for i, j in itertools.pairwise(bounds):
            first, last = int(numbers[i]), int(numbers[j - 1])
            batch = self.base.read(first, last + 1, self.own_arena())
            assembly.put(i, batch, numbers[i:j] - first)
        return assembly.batch()

    def own_arena(self) -> Arena:
        """Return this thread's memory for what is read from `base`."""
        arena: Arena | None = getattr(self._local, "arena", None)
        if arena is None:
            arena = self._local.arena = Arena()
        return arena

    def _spans(self, numbers: Ints) -> Ints:
        """Return where in `numbers` each read begins, and its length."""
        steps = np.diff(numbers)
        apart = steps <= 0
        if (steps > 1).any():
            each = self._sample_nbytes
            if each is None:
                each = self.schema.fixed_nbytes
                if self.schema.ragged:
                    each = probe_nbytes(self.base, 0, len(self.base))
                each = self._sample_nbytes = max(1, each)
            apart |= (steps - 1) * each > JOIN_NBYTES
            # A read ends before it grows long where samples are left out; whole runs stay whole.
            block = (numbers - numbers[0]) // max(1, SPAN_NBYTES // each)
            apart |= (np.diff(block) != 0) & (steps != 1)
        return np.concatenate([[0], np.flatnonzero(apart) + 1, [len(numbers)]])

    @override
    def sizes(self, start: int, stop: int) -> Ints | None:
        if not self.schema.ragged:
            return super().sizes(start, stop)
        numbers = self.numbers(np.arange(start, stop, dtype=np.int64))
        out = np.empty(len(numbers), np.int64)
        for i, j in itertools.pairwise(self._spans(numbers).tolist() if len(numbers) else ()):
            first, last = int(numbers[i]), int(numbers[j - 1])
            sizes = self.base.sizes(first, last + 1)
            if sizes is None:
                return None
            out[i:j] = sizes[numbers[i:j] - first]
        return out

    def files(self) -> list[Path]:
        """Return the files of `base`."""
        return self.base.files()

    @override
    def locate(self, sample: int) -> tuple[Path, int]:
        return self.base.locate(int(self.numbers(np.array([sample]))[0]))

    def identities(self) -> Identities:
        """Return the identities of the files of `base`."""
        return self.base.identities()

    @override
    def part(self, start: int, stop: int) -> tuple[Opening, int]:
        # Only the numbers of the samples travel.
        base, indices = self.origin(np.arange(start, stop, dtype=np.int64))
        first = int(indices.min(initial=len(base)))
        opening, offset = base.part(first, int(indices.max(initial=first - 1)) + 1)
        return partial(open_some, opening, indices - offset), start

    def resident_nbytes(self) -> int:
        """Return the resident bytes of `base`."""
        return self.base.resident_nbytes()

    def storage(self) -> dict[str, FieldStorage]:
        """Return the storage of the fields of `base`."""
        return self.base.storage()

    def close(self) -> None:
        """Close `base`."""
        self.base.close()
