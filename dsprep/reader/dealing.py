"""What the ranks of a job deliver: the same settings on all of them, a rank and where it begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dsprep.core.packing import digest
from dsprep.core.schema import Ints
from dsprep.reader.order import Epoch, Remainder, Sequence, Shuffle, Stage
from dsprep.reader.pipeline import Leg


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
    part
        Which of how many parts of the steps of this rank, in which order they were dealt.
    done
        Steps of this part that were done.
    """

    epoch: int
    stages: tuple[Stage, ...]
    steps: int
    epochs: int | None
    part: tuple[int, int] = (0, 1)
    done: int = 0


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

    def leg(self, rank: int, start: Start) -> Leg:
        """Return what a rank delivers of the epoch in which a loop begins."""
        order = Sequence(self.edges, self.shuffle, self.seed, start.epoch, self.mixed)
        dealt = Epoch(order, start.stages, self.remainder)
        share = dealt.share(self.world_size, rank, self.batch_size)
        left, (i, parts) = share.steps - start.steps, start.part
        first, stop = (start.steps + k * left // parts for k in (i, i + 1))
        return Leg(start.epoch, dealt, share, first + start.done, stop)

    def legs(self, rank: int, start: Start) -> Callable[[], Iterator[Leg]]:
        """Return what a loop of a rank runs through."""

        def legs() -> Iterator[Leg]:
            yield self.leg(rank, start)
            number = 1
            while self.edges[-1] and (start.epochs is None or number < start.epochs):
                yield self.leg(rank, Start(start.epoch + number, (), 0, 1, start.part))
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
