"""`each`: a function of one sample, such as decoding an image, in threads and into one batch.

A batch is divided among the threads, so that the first one waits for its share of the samples, not
for all of them; meanwhile the next batch is worked on. What the function fills is memory that the
Reader uses again once nobody refers to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsprep.core.schema import Array, Batch, DType, Ragged, column_of
from dsprep.errors import UsageError


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
        """Return the result for an empty batch."""
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
        """Call the function, and return its result."""
        rows = zip(*map(self.apart, batch.values()), strict=True)
        return self.__wrapped__([dict(zip(batch, row, strict=True)) for row in rows], **more)


def generator(key: int, epoch: int, number: int) -> np.random.Generator:
    """Return random numbers that depend on these alone: Philox, as numpy defines it."""
    bits = np.random.Philox(key=np.array([key, epoch], np.uint64), counter=[0, number, 0, 0])
    return np.random.Generator(bits)


def check_call(option: str, function: Any, *arguments: str) -> None:
    """Raise `UsageError` unless a function that is an option takes such arguments."""
    expected = f"a function of ({', '.join(arguments)})"
    if not callable(function):
        raise UsageError(f"{option} is {function!r}", expected=expected)
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
            f"{option} {function!r} cannot be called: {error}",
            expected=expected,
            fix=fix if arguments == ("batch",) else None,
        ) from error


def takes_rng(transform: Callable[..., Any]) -> bool:
    """Return whether a transform of batches takes random numbers: a parameter ``rng``."""
    try:
        parameters = inspect.signature(transform).parameters
    except (TypeError, ValueError):  # of C
        return False
    return "rng" in parameters
