"""`each`: a function of one sample, such as decoding an image, in threads and into one batch.

A batch is divided among the threads, so that the first one waits for its share of the samples, not
for all of them; meanwhile the next batch is worked on. What the function fills is memory that the
Reader uses again once nobody refers to it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dsprep.core.schema import Array, Batch, DType, Ints, Ragged, column_of
from dsprep.errors import ItemError, UsageError, describe
from dsprep.reader.memory import Allocate, Pool
from dsprep.reader.order import EpochSegment

_ALIGN = 64  # bytes, for vector instructions
_RUNS = 2  # of samples for each thread: who is done with one takes the next


@dataclass(frozen=True, eq=False)
class Each:
    """A `transform` of a Reader that is made of a function of one sample; see `each`."""

    function: Callable[[dict[str, Any], dict[str, Array], np.random.Generator], None]
    out: Mapping[str, tuple[DType, tuple[int, ...]]]
    keep: tuple[str, ...] | None
    threads: int | None

    def kept(self, batch: Batch) -> Batch:
        """Return the fields that go through; raise `SchemaError` for one that there is not."""
        fixed = [n for n, c in batch.items() if not isinstance(c, Ragged) and n not in self.out]
        return {n: column_of(batch, n) for n in (fixed if self.keep is None else self.keep)}

    def empty(self, batch: Batch) -> Batch:
        """Return what becomes of no samples."""
        return {**self.kept(batch), **{n: np.empty((0, *s), d) for n, (d, s) in self.out.items()}}


def each(
    function: Callable[[dict[str, Any], dict[str, Array], np.random.Generator], None],
    out: Mapping[str, tuple[Any, Sequence[int]]] | None = None,
    *,
    keep: Sequence[str] | None = None,
    threads: int | None = None,
) -> Each:
    """Return a ``transform`` for a `Reader` that applies a function to every sample.

    Parameters
    ----------
    function
        ``function(sample, out, rng)``: `sample` is a dict of field to the value of this sample (an
        array, a number, `bytes` or `str`); it fills the arrays of the dict `out`; `rng` is a
        `numpy.random.Generator` that depends on the Reader's seed, the epoch and the number of the
        sample alone: so what is drawn is the same on any number of threads and ranks, in batches
        of any size, and after a resume; use it within the call. It runs in several threads at a
        time, which is of use
        where it releases the GIL, as decoders do.
    out
        Name to dtype and shape of what it fills: ``{"image": ("uint8", (3, 224, 224))}``. None:
        its attribute ``out``, as of `dsprep.decode.image`.
    keep
        Fields that go through as they are; None: all fixed ones that `out` does not name.
    threads
        How many; None: the cores of this process, divided among the ranks that share them.

    Returns
    -------
    Each
        Batches then have the fields of `out`, of shape ``(n, *shape)``, and those that are kept.

    Raises
    ------
    UsageError
        If `out` is missing or impossible.

    Examples
    --------
    >>> def scaled(sample, out, rng):
    ...     out["x"][:] = sample["x"] * rng.uniform(0.8, 1.2)
    >>> Reader("train.h5", 64, transform=each(scaled, {"x": ("float32", (32,))}))  # doctest: +SKIP
    """
    check_call("each", function, "sample", "out", "rng")
    given: Any = getattr(function, "out", None) if out is None else out
    try:
        known = {
            str(name): (np.dtype(dtype), tuple(int(n) for n in shape))
            for name, (dtype, shape) in dict(given).items()
        }
        if not known or any(d.hasobject or min(s, default=0) < 0 for d, s in known.values()):
            raise ValueError("no arrays of numbers")
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"out is {given!r}: {error}", expected="{'image': ('uint8', (3, 224, 224))}"
        ) from error
    if threads is not None and threads < 1:
        raise UsageError(f"threads is {threads!r}", expected="a number, at least 1")
    return Each(function, known, None if keep is None else tuple(keep), threads)


@dataclass(frozen=True, eq=False)
class Collate:
    """A `transform` that gives a function the samples of a batch: a list of dicts.

    `apart` makes a sequence of the values of the samples of a column.
    """

    __wrapped__: Callable[..., Any]  # whose signature says whether it takes `rng`
    apart: Callable[[Any], Sequence[Any]] = list

    def __call__(self, batch: Batch, **more: Any) -> Any:
        """Return what the function returns."""
        rows = zip(*map(self.apart, batch.values()), strict=True)
        return self.__wrapped__([dict(zip(batch, row, strict=True)) for row in rows], **more)


class Begun(Protocol):
    """A batch on which threads work, as a `Future` is one."""

    def result(self) -> Any:
        """Wait for it, and return it; or raise what went wrong."""

    def cancel(self) -> Any:
        """Leave it, if it has not begun."""


@dataclass(frozen=True)
class EachBegun:
    """A batch of which threads fill some samples each."""

    runs: list[Future[None]]
    batch: Batch

    def result(self) -> Batch:
        """See `Begun`."""
        for run in self.runs:
            run.result()
        return self.batch

    def cancel(self) -> None:
        """See `Begun`."""
        for run in self.runs:
            run.cancel()


class EachRun:
    """Applies an `Each` to the batches of one Reader.

    Parameters
    ----------
    each
        What is applied.
    key
        What `rng` is drawn from, with the epoch and the number of the sample.
    dataset
        For errors.
    blocks, allocate
        How many batches are in memory, and what gives it.
    """

    def __init__(
        self, each: Each, key: int, dataset: Path, blocks: int, allocate: Allocate
    ) -> None:
        self._each, self._key, self._dataset = each, key, dataset
        self._pool = Pool(1, blocks, allocate)
        self._numbers: Iterator[Ints] = iter(())

    def begin(
        self, pool: ThreadPoolExecutor, batch: Batch, leg: EpochSegment, step: int, threads: int
    ) -> Begun:
        """Begin to work on the batch of a step: one after another from the first one on."""
        if step == leg.first:
            self._numbers = leg.numbers()
        numbers = next(self._numbers)
        count, epoch = len(numbers), leg.number
        out = self._arrays(count)
        each = max(1, -(-count // (threads * _RUNS)))
        runs = [
            pool.submit(self._fill, batch, out, numbers, epoch, range(at, min(at + each, count)))
            for at in range(0, count, each)
        ]
        return EachBegun(runs, {**self._each.kept(batch), **out})

    def _arrays(self, count: int) -> dict[str, Array]:
        """Return memory for the results of `count` samples."""
        places, end = {}, 0
        for name, (dtype, shape) in self._each.out.items():
            places[name] = end
            end += -(-count * math.prod(shape) * dtype.itemsize // _ALIGN) * _ALIGN
        _, memory = self._pool.take(end, lambda: True)
        return {
            name: np.ndarray((count, *shape), dtype, memory, places[name])
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


def generator(key: int, epoch: int, number: int) -> np.random.Generator:
    """Return random numbers that depend on these alone: Philox, as numpy defines it."""
    bits = np.random.Philox(key=np.array([key, epoch], np.uint64), counter=[0, number, 0, 0])
    return np.random.Generator(bits)


def check_call(what: str, function: Any, *arguments: str) -> None:
    """Raise `UsageError` unless a function that is an option takes such arguments."""
    expected = f"a function of ({', '.join(arguments)})"
    if not callable(function):
        raise UsageError(f"{what} is {function!r}", expected=expected)
    try:
        signature = inspect.signature(function)
    except ValueError:  # of C
        return
    more = {"rng": None} if takes_rng(function) and "rng" not in arguments else {}
    try:
        signature.bind(*arguments, **more)
    except TypeError as error:
        fix = "transform=dsprep.each(...) takes a function of (sample, out, rng)"
        raise UsageError(
            f"{what} {function!r} cannot be called: {error}",
            expected=expected,
            fix=fix if arguments == ("batch",) else None,
        ) from error


def takes_rng(transform: Callable[..., Any]) -> bool:
    """Whether a transform of batches wants random numbers, too: a second parameter ``rng``."""
    try:
        parameters = inspect.signature(transform).parameters
    except (TypeError, ValueError):  # of C
        return False
    return "rng" in parameters
