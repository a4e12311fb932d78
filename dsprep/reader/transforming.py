"""Transforms of batches at work: in threads, in order, a few batches ahead."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from dsprep.core.schema import Array, Batch, Ints
from dsprep.errors import ItemError, describe
from dsprep.reader.defaults import threads_by_rule
from dsprep.reader.each import Each, generator, takes_rng
from dsprep.reader.memory import Allocate, Pool
from dsprep.reader.mini_epochs import derive
from dsprep.reader.order import EpochSegment

_ALIGN = 64  # bytes, for vector instructions
_RUNS = 2  # of samples for each thread: who is done with one takes the next

Work: TypeAlias = tuple[list[Future[Any]], Batch | None]
"""Tasks of threads for a batch, and the batch that they fill; None: the only one returns it."""

Batches: TypeAlias = Iterator[tuple[EpochSegment, int, Any]]


class Transforming:
    """Applies the transforms of one Reader.

    Parameters
    ----------
    transforms
        Functions that are applied, in order.
    seed, rank
        What random numbers are drawn from, with the epoch and the number of the step or sample.
    dataset
        For errors.
    allocate
        Gives memory for batches.
    """

    def __init__(
        self,
        transforms: Sequence[Any],
        seed: int,
        rank: int,
        dataset: Path,
        allocate: Allocate,
    ) -> None:
        self._transforms, self._seed, self._rank = transforms, seed, rank
        how, last = (dataset, allocate), len(transforms) - 1
        self._each = {
            number: EachRun(each, self._key("each", number), number < last, *how)
            for number, each in enumerate(transforms)
            if isinstance(each, Each)
        }

    def apply(self, batches: Batches, cores: int, threads: int | None) -> Batches:
        """Return batches, transformed by so many threads for a function of a batch, or by rule."""
        for number, transform in enumerate(self._transforms):
            if isinstance(transform, Each):
                count, ahead_count = transform.threads or threads_by_rule(cores, decoded=True), 1
                begin = partial(self._each[number].begin, threads=count)
            else:
                count = ahead_count = threads or threads_by_rule(cores)
                begin = partial(self._begin, number)
            batches = _ahead(batches, begin, count, ahead_count)
        return batches

    def _key(self, *words: str | int) -> int:
        """Return what random numbers are drawn from; the last word is a transform's number."""
        return derive(self._seed, *(words if words[-1] else words[:-1]))

    def _begin(
        self, number: int, pool: ThreadPoolExecutor, batch: Any, segment: EpochSegment, step: int
    ) -> Work:
        """Begin to transform a batch by a function of it."""
        function, more = self._transforms[number], {}
        if takes_rng(function):
            key = self._key("batch", self._rank, number)
            more = {"rng": generator(key, segment.number, step)}
        return [pool.submit(function, batch, **more)], None


def _ahead(batches: Batches, begin: Any, threads: int, ahead_count: int) -> Batches:
    """Yield what becomes of batches, of which at most so many are begun besides."""
    ahead: deque[tuple[EpochSegment, int, Work]] = deque()
    with ThreadPoolExecutor(threads, "dsprep-transform") as pool:
        try:
            for segment, step, batch in batches:
                ahead.append((segment, step, begin(pool, batch, segment, step)))
                del batch
                if len(ahead) > ahead_count:
                    yield _done(*ahead.popleft())
            while ahead:
                yield _done(*ahead.popleft())
        finally:
            for _, _, (futures, _) in ahead:
                for future in futures:
                    future.cancel()


def _done(segment: EpochSegment, step: int, work: Work) -> tuple[EpochSegment, int, Any]:
    results = [future.result() for future in work[0]]
    return segment, step, results[0] if work[1] is None else work[1]


class EachRun:
    """Applies an `Each` to the batches of one Reader, perhaps for a further transform.

    `key` is what `rng` is drawn from, with the epoch and the number of the sample.
    """

    def __init__(
        self, each: Each, key: int, further: bool, dataset: Path, allocate: Allocate
    ) -> None:
        self._each, self._key, self._dataset = each, key, dataset
        # Batches in memory: one used, one ready, one on its way; and on the way through others.
        self._pool = Pool(1, 3 + 5 * further, allocate)
        self._numbers: Iterator[Ints] = iter(())

    def begin(
        self, pool: ThreadPoolExecutor, batch: Batch, segment: EpochSegment, step: int, threads: int
    ) -> Work:
        """Begin to work on the batch of a step: one after another from the first one on."""
        if step == segment.first:
            self._numbers = segment.numbers()
        numbers = next(self._numbers)
        count, epoch = len(numbers), segment.number
        out = self._arrays(count)
        each = max(1, -(-count // (threads * _RUNS)))
        runs = [
            pool.submit(self._fill, batch, out, numbers, epoch, range(at, min(at + each, count)))
            for at in range(0, count, each)
        ]
        return runs, {**self._each.kept(batch), **out}

    def _arrays(self, count: int) -> dict[str, Array]:
        """Return memory for the results of `count` samples."""
        begins, end = {}, 0
        for name, (dtype, shape) in self._each.out.items():
            begins[name] = end
            end += -(-count * math.prod(shape) * dtype.itemsize // _ALIGN) * _ALIGN
        _, memory = self._pool.take(end, lambda: True)
        return {
            name: np.ndarray((count, *shape), dtype, memory, begins[name])
            for name, (dtype, shape) in self._each.out.items()
        }

    def _fill(
        self, batch: Batch, out: dict[str, Array], numbers: Ints, epoch: int, run: range
    ) -> None:
        rng = generator(self._key, epoch, 0)
        state = rng.bit_generator.state  # to set it takes a twentieth of a new generator's time
        counter: Array = state["state"]["counter"]
        for i in run:
            counter[1] = number = int(numbers[i])
            rng.bit_generator.state = state
            sample = {name: column[i] for name, column in batch.items()}
            try:
                self._each.function(sample, {n: a[i, ...] for n, a in out.items()}, rng)
            except Exception as error:
                raise ItemError(
                    f"sample {number} cannot be transformed: {describe(error)}",
                    where=self._dataset,
                ) from error
