"""Code shared by the adapters for frameworks: loops, states, conversion of values.

Nothing is imported here but numpy; `dsprep.torch`, `dsprep.tf` and `dsprep.jax` import theirs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, TypeVar

from dsprep.core.schema import Array, DType, Schema
from dsprep.errors import UnsupportedError, UsageError
from dsprep.reader.ledger import EpochStats
from dsprep.reader.loader import Reader

if TYPE_CHECKING:
    import typing_extensions

    B = typing_extensions.TypeVar("B", default=dict[str, Any])
else:
    B = TypeVar("B")
"""A batch."""


class Values(NamedTuple):
    """A ragged field as two arrays or tensors of a framework.

    Attributes
    ----------
    values
        Shape ``(total, *inner)``: the rows of all samples, one after another; of `bytes` and
        `str` (UTF-8) uint8.
    offsets
        Shape ``(n + 1,)``: sample i has the rows ``offsets[i]:offsets[i + 1]``.
    """

    values: Any
    offsets: Any

    def __repr__(self) -> str:
        values, offsets = (getattr(part, "shape", part) for part in self)
        return f"Values(values={values}, offsets={offsets})"


def native(values: Array) -> Array:
    """Return values in the byte order of the machine: the same array, or swapped bytes."""
    if values.dtype.isnative:
        return values
    return values.byteswap().view(values.dtype.newbyteorder("="))


def mapped(leaf: Callable[[Any], Any], value: Any, leaves: tuple[type, ...] = ()) -> Any:
    """Return a structure of dicts, lists and tuples with ``leaf(x)`` for everything else in it.

    `leaves` are kinds of tuples, or dicts, that are not looked into.
    """
    if isinstance(value, leaves):
        return leaf(value)
    if isinstance(value, Mapping):
        return {name: mapped(leaf, inside, leaves) for name, inside in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(leaf, inside, leaves) for inside in value))
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(leaf, inside, leaves) for inside in value)
    return leaf(value)


def check_fields(schema: Schema, takes: Callable[[DType], bool], framework: str) -> None:
    """Raise `UnsupportedError` for the first field whose dtype the framework lacks."""
    for f in schema:
        if not takes(f.dtype):
            raise UnsupportedError(
                f"{framework} has no dtype for field {f}",
                fix="name other fields with fields=, or give a transform= that turns it into "
                "something else",
            )


class Ahead(Iterator[Any]):
    """The batches of a `Reader`, the next one begun while this one is used.

    `begin` is applied to a batch one step before it is delivered: its copy to a device is started.
    When the loop ends early, the reader goes back to the batch after the last one delivered.
    """

    def __init__(self, reader: Reader, begin: Callable[[Any], Any]) -> None:
        self._reader, self._begin = reader, begin
        self._batches = iter(reader)
        self._begun: list[Any] = []
        self._taken = self._given = 0
        self._end: Exception | None = None

    def _take(self) -> None:
        if self._end is not None:
            return
        try:
            batch = next(self._batches)
            self._taken += 1
            self._begun.append(self._begin(batch))
        except Exception as error:  # the batch before comes first
            self._end = error

    def __next__(self) -> Any:
        if not self._begun:
            self._take()
        if not self._begun:
            assert self._end is not None
            raise self._end
        self._take()
        self._given += 1
        return self._begun.pop(0)

    @property
    def pending(self) -> int:
        """Batches that were taken from the reader and are not delivered yet."""
        return self._taken - self._given

    def state(self) -> dict[str, Any]:
        """Return the state of the reader, without the batches that were not delivered."""
        state = self._reader.state_dict()
        last = state["stages"][-1]
        last[2] = max(0, last[2] - self.pending)
        return state

    def close(self) -> None:
        """End the loop; the reader continues after the last batch that was delivered."""
        state = self.state()
        self._batches.close()
        self._begun.clear()
        if self.pending and self._reader.on_break == "continue":
            self._reader.load_state_dict(state)
            self._taken = self._given


class ReaderLoops(Generic[B]):
    """Loops of a framework through a `Reader`: their epochs, states and statistics.

    Attributes
    ----------
    reader
        The `Reader`.
    """

    reader: Reader
    _ahead: Ahead | None = None  # of the loop that is under way, if it is one batch ahead
    _last_loop: Callable[[], Generator[Any, None, None] | None] = staticmethod(lambda: None)

    def _noted(self, loop: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """Return a loop, after noting it as the one that `set_epoch` ends."""
        self._last_loop = weakref.ref(loop)
        return loop

    def __getstate__(self) -> dict[str, Any]:
        loops = ("_ahead", "_last_loop")  # those of the original
        return {name: value for name, value in vars(self).items() if name not in loops}

    def __getitem__(self, index: Any) -> NoReturn:
        """Raise `UsageError`: batches are iterated over."""
        raise UsageError(
            "batches have no numbers: they are iterated over",
            fix="take dsprep.torch.Samples(path)[i], or dsprep.Sidecar.open(path).read([i])",
        )

    def __len__(self) -> int:
        """Return the steps of a whole epoch, also of one that is resumed.

        Those that were done count, on however many ranks: trainers that continue, such as that of
        Lightning, compare the steps of the epoch with it, not those of the loop.
        """
        return self.reader.steps_done + self.reader.remaining

    @property
    def remaining(self) -> int:
        """Steps left in the epoch: those that the next loop would deliver."""
        ahead = 0 if self._ahead is None else self._ahead.pending
        return self.reader.remaining + ahead

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a whole epoch of as many ranks and samples a step as now."""
        return self.reader.steps_of(self.epoch)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self.reader.epoch if self._ahead is None else int(self._ahead.state()["epoch"])

    def set_epoch(self, epoch: int) -> None:
        """Start the next loop at the beginning of an epoch; one that is under way ends.

        A trainer that takes a number of batches may leave its loop without ending it.
        """
        if (loop := self._last_loop()) is not None:
            with suppress(ValueError):  # called within a batch: the reader reports it
                loop.close()
        self.reader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch that was delivered, as JSON."""
        return self.reader.state_dict() if self._ahead is None else self._ahead.state()

    def load_state_dict(self, state: Mapping[str, Any], *, other_data: bool = False) -> None:
        """Continue where `state_dict` was called; before the loop; see `Reader`."""
        self.reader.load_state_dict(state, other_data=other_data)

    @property
    def stats(self) -> list[EpochStats]:
        """Statistics of the reader, epoch by epoch."""
        return self.reader.stats

    def close(self) -> None:
        """Stop reading and close all files; what was delivered stays valid."""
        self.reader.close()
