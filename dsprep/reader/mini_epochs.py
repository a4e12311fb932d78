"""Mini-epochs: parts of an epoch that are passed several times before the next one begins.

A fast tier of storage holds two parts at a time: one is read again and again while the next one is
copied, so that the tier with the whole dataset has to give each sample once in so many passes.
Source: Xu et al., "Data-Aware Storage Tiering for Deep Learning" (PDSW 2021), sections III and V.

The groups of an epoch are cut into parts of about as many samples each. A part is divided among
**pools**, one for each cache that holds a share of it: equal runs of samples in the order of the
part, the shares of the ranks of a node. Every pass draws the order within each pool anew, but for
groups that lie in two pools. These stay at the border, and both caches have them: so every sample
is read from the same cache in every pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dsprep.core.permutation import Permutation
from dsprep.core.schema import Ints
from dsprep.core.spans import offsets_of


def derive(*words: object) -> int:
    """Return a number below 2**63 that depends on all words; the same everywhere."""
    text = " ".join(map(str, words)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class Pass:
    """One pass through one part.

    Attributes
    ----------
    number
        Of all passes of the training, from 0.
    epoch, part, turn
        Which pass of which part of which epoch, each from 0.
    """

    number: int
    epoch: int
    part: int
    turn: int


class Policy(Protocol):
    """Decides how often a part is passed; see `dsprep.repeats`."""

    def enough(self, reports: Sequence[Mapping[str, float]]) -> bool:
        """Return whether the passes of a part that gave these metrics are enough."""


@dataclass(frozen=True)
class MiniEpochs:
    """The division of epochs into parts, and the passes of each.

    Parameters
    ----------
    parts
        Of an epoch: nm in the paper.
    repeats
        Passes of each part, the parts counted over all epochs: rf in the paper. Of numbers, the
        last one holds for all further parts. Empty: decided as training goes on, see `Policy`. A
        `Reader` takes those of its own `repeats`.
    recompose
        Whether every epoch draws its parts anew; if not, only in which order they come.
    pools
        Caches among which a part is divided: the number of nodes, where each has one of its own and
        as many ranks. Every pass then draws the order within each, so that samples stay on their
        node; of a group in which one ends and the next one begins, both have a copy.
    """

    parts: int
    repeats: tuple[int, ...] = (1,)
    recompose: bool = True
    pools: int = 1

    @property
    def facts(self) -> list[object]:
        """The inputs that determine the passes, as JSON."""
        return [self.parts, list(self.repeats), self.recompose, self.pools]

    def first(self, epoch: int) -> int:
        """Return the number of the first pass of an epoch, where repeats are known beforehand."""
        parts, repeats = epoch * self.parts, self.repeats
        return sum(repeats[:parts]) + max(0, parts - len(repeats)) * repeats[-1]

    def at(self, number: int, decided: tuple[int, ...] = ()) -> Pass:
        """Return the pass that has this number.

        `decided` are the repeats of the parts that are over, where they are not known beforehand;
        all further passes are of the next part.
        """
        known = self.repeats or decided
        ends = offsets_of(np.array(known, np.int64))
        rest = number - int(ends[-1])
        if rest < 0:
            part = int(np.searchsorted(ends, number, "right")) - 1
            turn = number - int(ends[part])
        else:
            more, turn = divmod(rest, known[-1]) if self.repeats else (0, rest)
            part = len(known) + more
        return Pass(number, *divmod(part, self.parts), turn)

    def groups(self, edges: Ints, seed: int, mini_pass: Pass, *, shuffled: bool) -> Ints:
        """Return the groups of a pass, in their order.

        Parameters
        ----------
        edges
            int64, shape ``(groups + 1,)``: where groups begin, and the number of samples. There
            are at least as many groups with samples as parts.
        seed
            Seed of the order.
        mini_pass
            The pass.
        shuffled
            Whether groups come in random order.

        Returns
        -------
        array
            int64, shape ``(n,)``.
        """
        members = self._members(edges, seed, mini_pass, shuffled=shuffled)
        if not shuffled:
            return members
        ends = offsets_of(np.diff(edges)[members])
        borders = borders_of(int(ends[-1]), self.pools)
        starts = np.searchsorted(ends, borders[:-1], "left").tolist()
        stops = (np.searchsorted(ends, borders[1:], "right") - 1).tolist()
        drawn = members.copy()
        for pool, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            if stop - start > 1:  # groups that lie in this pool alone
                words = (seed, mini_pass.epoch, mini_pass.part, mini_pass.turn, pool)
                order = Permutation(derive(*words), stop - start).all()
                drawn[start:stop] = members[start:stop][order]
        return drawn

    def pool(self, edges: Ints, seed: int, mini_pass: Pass, number: int, *, shuffled: bool) -> Ints:
        """Return the groups of which a pool has samples, in every pass, rising; see `groups`."""
        members = self._members(edges, seed, mini_pass, shuffled=shuffled)
        ends = offsets_of(np.diff(edges)[members])
        low, high = borders_of(int(ends[-1]), self.pools)[number : number + 2].tolist()
        if low == high:
            return members[:0]
        start = int(np.searchsorted(ends, low, "right")) - 1
        return np.sort(members[start : int(np.searchsorted(ends, high, "left"))])

    def _members(self, edges: Ints, seed: int, mini_pass: Pass, *, shuffled: bool) -> Ints:
        """Return the groups of a part, in an order that is the same in all passes."""
        part, order = mini_pass.part, np.flatnonzero(np.diff(edges))
        if shuffled:
            drawn = mini_pass.epoch if self.recompose else "always"
            order = order[Permutation(derive(seed, drawn, "parts"), len(order)).all()]
            if not self.recompose:
                turns = Permutation(derive(seed, mini_pass.epoch, "order of parts"), self.parts)
                part = int(turns.all()[part])
        start, stop = _cuts(edges, order, self.parts)[part : part + 2].tolist()
        return order[start:stop]


def borders_of(n: int, pools: int) -> Ints:
    """Return the positions among n samples at which pools begin, and n: int64.

    They are where the shares of the first ranks of nodes begin, see `dsprep.reader.order.share`.
    """
    return np.arange(pools + 1, dtype=np.int64) * n // pools


def _cuts(edges: Ints, groups: Ints, parts: int) -> Ints:
    """Return the first group of each of `parts` nearly equal parts, and the end of the last one."""
    ends, count = offsets_of(np.diff(edges)[groups]), len(groups)
    targets = np.arange(parts + 1, dtype=np.int64) * int(ends[-1]) // parts
    smallest = np.arange(parts + 1, dtype=np.int64)
    near = np.searchsorted(ends, targets, "left") - smallest
    rising = (
        np.maximum.accumulate(near) + smallest
    )  # a large group may be where two parts would end
    cuts = np.minimum(rising, np.maximum(count - parts + smallest, 0))
    cuts[-1] = count
    return cuts
