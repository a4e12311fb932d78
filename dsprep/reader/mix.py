"""`Mix`: several datasets in given shares, step by step, with an exact state."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np

from dsprep.core.schema import Ints, concatenate, differences
from dsprep.errors import SchemaError, UsageError
from dsprep.reader.loader import Reader
from dsprep.reader.mini_epochs import derive
from dsprep.reader.options import at_least, check_word

Stop: TypeAlias = Literal["first", "all", "never"]

STOPS = ("first", "all", "never")
STATE_VERSION = 1

_GOLDEN = 0x9E3779B97F4A7C15  # of 2**64: multiples of it fall evenly among all fractions
_STEPS = 1 << 12  # whose sources are computed at a time


class Mix:
    """Batches of several readers, each of them as often as its share says.

    Which reader gives a step depends on the seed and the number of the step alone, and is the same
    on every rank. After n steps each has given its share of n to within a few (the steps are taken
    by multiples of the golden ratio). ``for batch in mix`` is one epoch, ``next`` the next one, or
    the rest of one that was left early, as with a `Reader`; a reader that ended goes on with its
    next epoch, and one that did not with the rest of its own. It reads ahead of that between two
    loops, until `close`, or until a loop is left early.

    The readers divide the threads and the buffers of one reader with default arguments by the
    shares: each has one thread and two buffers at least. A reader that was given `io_threads` or
    `buffers` has that many.

    Parameters
    ----------
    shares
        Reader to share; they are divided by their sum. Readers, or `dsprep.torch.Batches` and its
        like, of any batch sizes. They read ahead side by side.
    seed
        Which of them begins.
    stop
        When an epoch ends: ``"first"``: at the step that a reader cannot give since its epoch is
        over; ``"all"``: once every reader has come to that, those that did so before start again;
        ``"never"``.
    within
        Whether a batch has samples of all readers, in place of one. Their batch sizes are the
        shares then, and must fit them; fields, which they must have in common, are concatenated,
        which copies every batch.

    Attributes
    ----------
    epoch
        The epoch that is under way or comes next.
    steps
        Steps that were done in all.
    counts
        Steps that each reader gave, in the order of `shares`.

    Raises
    ------
    UsageError
        If shares are not above 0, or readers do not fit each other.
    """

    def __init__(
        self,
        shares: Mapping[Any, float],
        *,
        seed: int = 0,
        stop: Stop = "first",
        within: bool = False,
    ) -> None:
        check_word("stop", stop, STOPS)
        try:
            self.readers: tuple[Any, ...] = tuple(shares)
            weights = np.array([*shares.values()], np.float64)
        except (AttributeError, TypeError, ValueError) as error:
            expected = "a dict of Reader to share, such as {a: 0.7, b: 0.3}"
            raise UsageError(f"shares are {shares!r}", expected=expected) from error
        for reader in self.readers:
            if not hasattr(type(reader), "steps_per_epoch"):
                raise UsageError(
                    f"a Mix has no batches of {reader!r}",
                    expected="dsprep.Reader, or Batches of dsprep.torch and its like",
                )
        with np.errstate(all="ignore"):  # a sum that is too large leaves none of them a share
            parts = weights / weights.sum()
        if not len(parts) or not ((weights > 0) & (parts > 2.0**-53)).all():
            expected = "numbers above 0, none of which vanishes beside the others"
            raise UsageError(f"shares are {[*shares.values()]}", expected=expected)
        self.shares: tuple[float, ...] = tuple(parts.tolist())
        self.seed = at_least("seed", seed, 0, 1 << 128)
        self.stop, self.within = stop, bool(within)
        ends = np.cumsum(self.shares[:-1])  # the last one has the rest
        self._ends = np.array([int(end * 2.0**64) for end in ends], np.uint64)
        self._shift = derive(self.seed, "mix")
        if self.within:
            self._check_within()
        self.epoch = self.steps = 0
        self.counts = [0] * len(self.readers)
        self._ended = [False] * len(self.readers)  # in this epoch: a step of it was not there
        self._through = list(self._ended)  # all steps of it were delivered
        self._loop: Generator[Any, None, None] | None = None
        self._begin_process()

    def _begin_process(self) -> None:
        """Reset what is under way, at first and in a forked child."""
        self._pid = os.getpid()
        self._loops: dict[int, Iterator[Any]] = {}  # of readers that are within an epoch

    def _check_within(self) -> None:
        """Raise `UsageError` unless readers give the parts of batches that can be joined."""
        readers = [reader for reader in self.readers if isinstance(reader, Reader)]
        if len(readers) < len(self.readers) or any(r.transforms for r in readers):
            raise UsageError("within=True joins batches of dsprep.Reader without a transform")
        sizes = [reader.batch_size for reader in readers]
        exact = [share * sum(sizes) for share in self.shares]
        if any(abs(size - each) >= 1 for size, each in zip(sizes, exact, strict=True)):
            raise UsageError(
                f"batches of {sizes} samples are not in shares of {self.shares}",
                fix="give the readers batch_size=" + ", ".join(str(round(x)) for x in exact),
            )
        for reader in readers[1:]:
            lines = list(differences(readers[0].schema, reader.schema))
            if lines:
                raise SchemaError(f"batches cannot be joined: {lines[0]}", fix="name fields=")

    def sources(self, start: int, stop: int) -> Ints:
        """Return the index of the reader of each step: int64, shape ``(stop - start,)``.

        Parameters
        ----------
        start, stop
            Half-open range of steps, counted from the first one of all.
        """
        steps = np.arange(start, stop, dtype=np.uint64)
        at = steps * np.uint64(_GOLDEN) + np.uint64(self._shift)  # of 2**64, around it
        return np.searchsorted(self._ends, at, "right").astype(np.int64)

    def __len__(self) -> int:
        """Return the steps that are left of the epoch: those of the next loop.

        Raises
        ------
        TypeError
            If it has no end.
        """
        if self.stop == "never":
            raise TypeError('a Mix with stop="never" has no length')
        left, ended = self._left(), list(self._ended)
        if self.within:
            if self.stop == "first":
                return min(left)
            return max(n for n, over in zip(left, ended, strict=True) if not over)
        again, at = [reader.steps_per_epoch for reader in self.readers], self.steps
        while True:
            for source in self.sources(at, at + _STEPS).tolist():
                if not left[source]:
                    ended[source] = True
                    if self._is_over(ended) or not again[source]:
                        return at - self.steps
                    left[source] = again[source]
                left[source] -= 1
                at += 1

    def _left(self) -> list[int]:
        """Return the steps that readers have left of their epochs."""
        each = zip(self.readers, self._through, strict=True)
        return [0 if through else reader.remaining for reader, through in each]

    def __iter__(self) -> Iterator[Any]:
        """Return the batches of the next epoch, or of what is left of it."""
        self._end_loop()
        self._loop = self._batches()
        return self._loop

    def _batches(self) -> Generator[Any, None, None]:
        if self._pid != os.getpid():
            self._begin_process()
        left, everybody, loops = self._left(), [*range(len(self.readers))], self._loops
        for i in everybody:
            if left[i] and i not in loops:
                loops[i] = self._begin(i)
        is_over = False
        coming: list[int] = []  # which readers give the next steps, backwards
        try:
            while True:
                chosen = everybody
                if not self.within:
                    if not coming:
                        coming = self.sources(self.steps, self.steps + _STEPS).tolist()[::-1]
                    chosen = [coming.pop()]
                for i in chosen:
                    self._ended[i] |= not left[i]
                if self._is_over(self._ended):
                    break
                parts = []
                for i in chosen:
                    if not left[i]:
                        loops[i] = self._begin(i)
                        left[i] = self.readers[i].remaining
                    parts.append(self._take(i, left))
                self.steps += 1
                yield self._joined(parts) if self.within else parts[0]
                del parts
            self.epoch += 1
            self._ended = [False] * len(self.readers)
            self._through = list(self._ended)
            is_over = True
        finally:
            if not is_over:
                self._end_loops()

    def _begin(self, i: int) -> Iterator[Any]:
        """Begin a loop of a reader, with its share of threads and memory."""
        reader = getattr(self.readers[i], "reader", self.readers[i])
        if isinstance(reader, Reader):
            reader.take_share(self.shares[i])
        loop: Iterator[Any] = iter(self.readers[i])
        return loop

    def _take(self, i: int, left: list[int]) -> Any:
        """Return the next batch of a reader; after its last one the reader ends its epoch."""
        batch = next(self._loops[i], None)
        if batch is None:
            raise UsageError(f"a reader of the mix has no samples: {self.readers[i]!r}")
        left[i] -= 1
        self._through[i] = not left[i]
        if self._through[i]:
            next(self._loops.pop(i), None)
        self.counts[i] += 1
        return batch

    def _is_over(self, ended: list[bool]) -> bool:
        return (self.stop == "first" and any(ended)) or (self.stop == "all" and all(ended))

    def _joined(self, parts: list[Any]) -> Any:
        reader = self.readers[0]
        assert isinstance(reader, Reader), "it was checked"
        return concatenate(reader.schema, parts)

    def _end_loop(self) -> None:
        if self._loop is not None:
            self._loop.close()
        self._loop = None

    def _end_loops(self) -> None:
        """End the loops of all readers, and drop what they have read ahead."""
        while self._loops:
            self._loops.popitem()[1].close()  # type: ignore[attr-defined]

    # --- resuming ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all readers, exact to the batch, as JSON: the same on every rank."""
        return {
            "version": STATE_VERSION,
            "mix": [self.seed, self.stop, self.within, list(self.shares)],
            "epoch": self.epoch,
            "steps": self.steps,
            "counts": list(self.counts),
            "ended": list(self._ended),
            "through": list(self._through),
            "readers": [reader.state_dict() for reader in self.readers],
        }

    def load_state_dict(self, state: Mapping[str, Any], *, other_data: bool = False) -> None:
        """Continue where `state_dict` was called, also with another number of ranks.

        Parameters
        ----------
        state
            The result of `state_dict`, also as read from JSON.
        other_data
            As for `Reader.load_state_dict`.

        Raises
        ------
        UsageError
            If it is not a state of such a mix.
        """
        self._end_loop()
        self._end_loops()
        mine = [self.seed, self.stop, self.within, list(self.shares)]
        try:
            made_by, readers = list(state["mix"]), state["readers"]
            numbers = [at_least(name, state[name], 0) for name in ("version", "epoch", "steps")]
            counts = [at_least("counts", n, 0) for n in state["counts"]]
            flags = [[bool(b) for b in state[name]] for name in ("ended", "through")]
            if numbers[0] != STATE_VERSION:
                raise ValueError(f"version {numbers[0]}")
            if {len(readers), len(counts), *map(len, flags)} != {len(self.readers)}:
                raise ValueError(f"it has {len(readers)} readers, not {len(self.readers)}")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"this is not a state of such a Mix: {error!r}") from error
        if made_by != mine:
            raise UsageError(
                "the state was saved by a mix of another seed, stop, within, or other shares",
                expected=mine,
                found=made_by,
            )
        for reader, each in zip(self.readers, readers, strict=True):
            reader.load_state_dict(each, other_data=other_data)
        _, self.epoch, self.steps = numbers
        self.counts, (self._ended, self._through) = counts, flags

    def close(self) -> None:
        """End the loop and close all readers; batches that were delivered stay valid."""
        self._end_loop()
        self._end_loops()
        for reader in self.readers:
            reader.close()

    def __enter__(self) -> Mix:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        shares = ", ".join(
            f"{s:.3g} of {r!r}" for s, r in zip(self.shares, self.readers, strict=True)
        )
        return f"<Mix: {shares}>"
