"""What the ranks of a job deliver: the same settings on all of them, a rank and where it begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dsprep.packing import digest
from dsprep.reader.order import Epoch, Remainder, Sequence, Shuffle, Stage
from dsprep.reader.pipeline import Leg
from dsprep.schema import Ints


@dataclass(frozen=True)
class Start:
    """Where a loop begins, and how far it goes.

    Attributes
    ----------
    epoch
        The first epoch.
    stages
        What was done of it with other numbers of ranks or other batches.
    steps
        Steps that were done since.
    epochs
        How many; None: without end.
    """

    epoch: int
    stages: tuple[Stage, ...]
    steps: int
    epochs: int | None


@dataclass(frozen=True)
class Dealing:
    """How samples are ordered and dealt.

    Attributes
    ----------
    edges, shuffle, seed, mixed
        As in `dsprep.reader.order.Sequence`.
    remainder
        What happens where samples cannot be dealt evenly.
    world_size, batch_size
        Ranks, and samples per step of each.
    """

    edges: Ints
    shuffle: Shuffle
    seed: int
    mixed: int
    remainder: Remainder
    world_size: int
    batch_size: int

    def leg(self, rank: int, epoch: int, stages: tuple[Stage, ...] = (), first: int = 0) -> Leg:
        """Return what a rank delivers of an epoch, from step `first` on."""
        order = Sequence(self.edges, self.shuffle, self.seed, epoch, self.mixed)
        dealt = Epoch(order, stages, self.remainder)
        return Leg(epoch, dealt, dealt.share(self.world_size, rank, self.batch_size), first)

    def legs(self, rank: int, start: Start) -> Callable[[], Iterator[Leg]]:
        """Return what a loop of a rank runs through."""

        def legs() -> Iterator[Leg]:
            yield self.leg(rank, start.epoch, start.stages, start.steps)
            number = 1
            while self.edges[-1] and (start.epochs is None or number < start.epochs):
                yield self.leg(rank, start.epoch + number)
                number += 1

        return legs

    def order(self) -> dict[str, object]:
        """Return what decides the order, besides ranks and batches, as JSON."""
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "remainder": self.remainder,
            "mixed": self.mixed,
            "samples": int(self.edges[-1]),
            "units": digest(self.edges.tobytes())[:16],
        }
