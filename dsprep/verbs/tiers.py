"""``plan tiers``: what mini-epoch training takes of two tiers of storage, by the paper's model.

The capacity tier holds the whole dataset and gives B2 bytes per second to all nodes together; each
node has room for EC1 bytes on a fast tier. An epoch is cut into nm mini-epochs, each of which is
passed rf times while the next one is copied; so two have to fit at a time, and of what training
consumes (EB1) only one part in rf is drawn from the capacity tier. Source: Xu et al., "Data-Aware
Storage Tiering for Deep Learning" (PDSW 2021), sections III and IV. Its Eq. 1 is printed with MAX,
by which (nm, rf) = (128, 128) would leave 400 GB/s to be drawn; the paper's own result, 30.4 GB/s,
takes MIN, which stands here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.core.schema import Ints
from dsprep.core.units import show_nbytes
from dsprep.errors import UsageError
from dsprep.reader.data import Paths, open_data
from dsprep.reader.options import subset_samples
from dsprep.reader.units import cut_units, sample_nbytes
from dsprep.writing.buffers import slow_convergence

SHARE = 0.5
"""Of the fast tier: what the largest mini-epoch has to be smaller than. Section III."""

MANY = 64
"""Mini-epochs or repeats beyond which the paper's models lost accuracy. Figs. 7 to 10."""

MUCH = 1.1
"""Times the bytes of a mini-epoch that all nodes copy of it, beyond which smaller groups pay."""

ROUNDING = 2 * 4096
"""Bytes that a group takes of a tier beyond its own, at most: whole pages are kept of it."""

SHOWN = 1 << 40
"""Repeats beyond which curves are not computed."""


@dataclass(frozen=True, kw_only=True)
class Tiers:
    """The storage of a job, and what its training consumes.

    Attributes
    ----------
    capacity
        Bytes that this job may use of the fast tier of each node.
    nodes, ranks_per_node
        How many there are.
    batch_size
        Samples per step and rank.
    compute
        Seconds that a step takes without I/O.
    pfs
        Bytes per second that the capacity tier gives to all nodes together: B2.
    fast
        Bytes per second that the fast tiers of all nodes give together: B1; None: enough.
    epochs
        Of training: how often the network sees as many samples as the dataset has. S.
    """

    capacity: int
    nodes: int
    ranks_per_node: int
    batch_size: int
    compute: float
    pfs: float
    fast: float | None = None
    epochs: int


@dataclass(frozen=True)
class Point:
    """What one repeating factor gives.

    Attributes
    ----------
    repeats
        The factor: rf.
    throughput
        Bytes per second that training gets.
    drawn
        Bytes per second drawn from the capacity tier: EB2.
    stalled
        Share of the time in which training waits.
    """

    repeats: float
    throughput: float
    drawn: float
    stalled: float


@dataclass(frozen=True, kw_only=True)
class TierPlan:
    """How a dataset is trained on with a fast tier.

    Attributes
    ----------
    tiers
        What was asked.
    samples, sample_nbytes, groups
        Of the dataset, as stored.
    mini_epochs
        nm: the smallest number whose largest mini-epoch is less than half of the fast tier; 1 where
        the whole dataset fits, which is then copied once.
    largest
        Bytes of a node's share of the largest mini-epoch, at most.
    fits
        Whether the whole dataset fits into the fast tiers.
    """

    tiers: Tiers
    samples: int
    sample_nbytes: float
    groups: int
    mini_epochs: int
    largest: int
    fits: bool

    @property
    def nbytes(self) -> float:
        """Bytes of the dataset."""
        return self.samples * self.sample_nbytes

    @property
    def ranks(self) -> int:
        """Processes that train."""
        return self.tiers.nodes * self.tiers.ranks_per_node

    @cached_property
    def consumed(self) -> float:
        """Bytes per second that training consumes when it never waits: EB1."""
        return self.ranks * self.tiers.batch_size * self.sample_nbytes / self.tiers.compute

    @cached_property
    def served(self) -> float:
        """Bytes per second that training gets where only the fast tier may be too slow."""
        return min(self.consumed, self.tiers.fast or math.inf)

    @property
    def copied(self) -> float:
        """What nodes copy of a mini-epoch, in its bytes: of a group in two pools, both copy all."""
        return 1 + (self.tiers.nodes - 1) * self.mini_epochs / self.groups

    @property
    def knee(self) -> float:
        """EB1 / B2: training that repeats more than that never waits for the capacity tier.

        EB1 as far as it is copied: times `copied`.
        """
        return self.served * self.copied / self.tiers.pfs

    @property
    def repeats(self) -> int:
        """The smallest repeating factor beyond the knee: rf; 1 where the whole dataset fits."""
        return 1 if self.fits else math.floor(self.knee) + 1

    def at(self, repeats: float) -> Point:
        """Return what another repeating factor gives."""
        pfs = self.tiers.pfs
        given = self.served if self.fits else min(self.served, repeats * pfs / self.copied)
        taken = 0.0 if self.fits else drawn(self.served * self.copied, pfs, [repeats])
        return Point(repeats, given, taken, 1 - given / self.consumed)

    @property
    def before(self) -> Point:
        """What training gets from the capacity tier alone."""
        given = min(self.consumed, self.tiers.pfs)
        return Point(1, given, given, 1 - given / self.consumed)

    @property
    def after(self) -> Point:
        """What it gets by this plan, once the first mini-epoch is copied."""
        return self.at(self.repeats)

    @property
    def verdict(self) -> str:
        """Whether training waits without the fast tier, and with it."""
        before, after, times = (
            self.before.stalled,
            self.after.stalled,
            self.tiers.pfs / self.consumed,
        )
        if not before:
            words = f"the capacity tier alone keeps up ({times:.3g} times what training takes)"
            return f"{words}: no mini-epochs, no cache needed"
        return f"training waits {before:.0%} of the time without the fast tier, {after:.0%} with it"

    @property
    def curve(self) -> list[Point]:
        """What powers of two give as repeating factors, and this plan's own, up to `top`."""
        factors = {1 << i for i in range(self.top.bit_length())} | {self.repeats}
        return [self.at(factor) for factor in sorted(factors) if factor <= SHOWN]

    @property
    def top(self) -> int:
        """The largest repeating factor of `curve`, a power of two."""
        return min(SHOWN, max(2 * MANY, 1 << (2 * self.repeats - 1).bit_length()))

    @property
    def copy_seconds(self) -> float:
        """Seconds in which a mini-epoch is copied: the first pass takes at least as long."""
        return self.nbytes * self.copied / self.mini_epochs / self.tiers.pfs

    @property
    def steps(self) -> float:
        """Steps of one pass of a mini-epoch."""
        return self.samples / self.mini_epochs / self.ranks / self.tiers.batch_size

    @property
    def passes(self) -> int:
        """Passes of mini-epochs in the training: S times nm."""
        return self.tiers.epochs * self.mini_epochs

    @property
    def outer_epochs(self) -> float:
        """How often all mini-epochs come in the training: S / rf."""
        return self.tiers.epochs / self.repeats

    @property
    def passes_per_sample(self) -> tuple[int, int]:
        """How often the training passes each sample: at least, and at most."""
        parts, repeats = self.mini_epochs, self.repeats
        cycles, rest = divmod(self.passes, parts * repeats)
        fewest = max(0, rest - (parts - 1) * repeats)
        return cycles * repeats + fewest, cycles * repeats + min(rest, repeats)

    @property
    def never_seen(self) -> float:
        """Share of the samples that never come."""
        begun = -(-self.passes // self.repeats)
        return max(0.0, 1 - begun / self.mini_epochs)

    @property
    def reader(self) -> dict[str, Any]:
        """Arguments of the Reader, besides those of the dataset and the directory of the cache."""
        common = {"epochs": math.ceil(self.outer_epochs), "cache_size": self.tiers.capacity}
        pools = {"pools": self.tiers.nodes} if self.tiers.nodes > 1 else {}
        if self.fits and not pools:
            return common
        kept = {"recompose": False} if self.fits else {}  # samples stay on their node for good
        cut = {"mini_epochs": self.mini_epochs, "repeats": self.repeats}
        return {**cut, **pools, **kept, **common}

    @property
    def warnings(self) -> tuple[str, ...]:
        """What may go wrong, one sentence each."""
        lines = [*self._of_order(), *slow_convergence(self.samples, self.groups, self.tiers.epochs)]
        many = [f"{self.mini_epochs:,} mini-epochs"] if self.mini_epochs > MANY else []
        many += [f"{self.repeats:,} repeats"] if self.repeats > MANY else []
        if many:
            lines.append(
                f"{' and '.join(many)}: beyond {MANY}, models lost 1 to 10 % of their accuracy "
                "(Xu et al., PDSW 2021, Figs. 7 to 10); repeats that adapt won back some of it"
            )
        fast, moved = self.tiers.fast, self.consumed + self.after.drawn
        if fast is not None and fast < moved:
            lines.append(
                f"the fast tiers give {show_nbytes(fast)}/s, less than the {show_nbytes(moved)}/s "
                "that training reads and copying writes: training waits for them"
            )
        return tuple(lines)

    def _of_order(self) -> list[str]:
        """Return what may go wrong with the samples that come."""
        lines, repeats, epochs = [], self.repeats, self.tiers.epochs
        if self.never_seen:
            lines.append(
                f"{repeats:,} repeats are more than the {epochs:,} epochs (S/rf = "
                f"{self.outer_epochs:.3g}): {self.never_seen:.0%} of the samples are never seen"
            )
        elif self.passes_per_sample[0] < self.passes_per_sample[1]:
            lines.append(
                f"{epochs:,} epochs are no multiple of {repeats:,} repeats: some samples are seen "
                f"{self.passes_per_sample[1]:,} times, others {self.passes_per_sample[0]:,} times"
            )
        part = self.groups // self.mini_epochs
        if self.copied > MUCH and not self.fits:
            lines.append(
                f"{part:,} groups of a mini-epoch for {self.tiers.nodes:,} nodes: several nodes "
                f"copy the same groups, {self.copied - 1:.0%} more in all; repack with a smaller "
                "--buffer-size"
            )
        if self.steps < 1:
            lines.append(
                f"a pass of a mini-epoch has {self.steps * self.tiers.batch_size:.3g} samples for "
                f"each rank, fewer than a batch of {self.tiers.batch_size:,}"
            )
        return lines


def drawn(consumed: float, pfs: float, repeats: Sequence[float]) -> float:
    """Return the bytes per second drawn from the capacity tier: Eq. 1 of the paper, with MIN.

    Parameters
    ----------
    consumed
        EB1, bytes per second.
    pfs
        B2, bytes per second.
    repeats
        Of each mini-epoch, which all take the same time.
    """
    rates = [min(consumed / rf, pfs) for rf in repeats]
    return math.fsum(rates) / len(rates)


def plan_tiers(
    path: Paths, tiers: Tiers, *, sidecar: str | Path | None = None, subset: Any = None
) -> TierPlan:
    """Return how a dataset is trained on with a fast tier that is too small for it.

    Nothing but the sidecar is read.

    Parameters
    ----------
    path
        The dataset, or its sidecar; as for `Reader`.
    tiers
        The storage of the job, and what its training consumes.
    sidecar
        The sidecar, where it is not beside the dataset.
    subset
        Which samples are used, as for `Reader`. Groups are copied whole.

    Raises
    ------
    UsageError
        If numbers are not possible, or no number of mini-epochs is small enough.
    """
    _check(tiers)
    with open_data(*((path,) if sidecar is None else (sidecar, path))) as opened:
        kept = subset_samples(subset, opened)
        edges, inside, _ = cut_units(opened, opened.schema, "group", None, None, kept)
        stored = sum(f.identity.nbytes for f in opened.content.files) / max(1, len(opened))
        nbytes = min(sample_nbytes(opened, opened.schema), stored)  # less where compressed
    if kept is None:
        return fitted(edges, nbytes, tiers)
    sizes = np.diff(edges)[np.diff(inside) > 0]  # of groups with any sample
    plan = fitted(np.append(0, np.cumsum(sizes)), nbytes, tiers)
    return replace(plan, samples=len(kept), sample_nbytes=plan.nbytes / len(kept))


def fitted(edges: Ints, sample_nbytes: float, tiers: Tiers) -> TierPlan:
    """Return the plan for groups that begin at `edges`; see `plan_tiers`."""
    samples, groups = int(edges[-1]), len(edges) - 1
    if not samples or not sample_nbytes:
        raise UsageError("the dataset has no bytes that could be kept on another tier")
    group = math.ceil(int(np.diff(edges).max()) * sample_nbytes) + ROUNDING
    total = math.ceil(samples * sample_nbytes) + groups * ROUNDING
    uneven = 2 * group if tiers.nodes > 1 else 0  # what nodes have that begins or ends with others
    fits, parts = math.ceil(total / tiers.nodes) + uneven <= tiers.capacity, 1
    if not fits:
        uneven += group  # parts end with groups
        room = SHARE * tiers.capacity - uneven - 1
        parts = math.floor(total / tiers.nodes / room) + 1 if room > 0 else groups + 1
        if parts > groups:
            raise UsageError(
                f"half of the fast tier ({show_nbytes(SHARE * tiers.capacity)}) is too small for "
                f"the groups, of up to {show_nbytes(group)} each",
                fix="repack with a smaller --buffer-size, or give more capacity",
            )
    return TierPlan(
        tiers=tiers,
        samples=samples,
        sample_nbytes=sample_nbytes,
        groups=groups,
        mini_epochs=parts,
        largest=math.ceil(total / parts / tiers.nodes) + uneven,
        fits=fits,
    )


def _check(tiers: Tiers) -> None:
    for name in ("capacity", "nodes", "ranks_per_node", "batch_size", "epochs"):
        if getattr(tiers, name) < 1:
            raise UsageError(f"{name} is {getattr(tiers, name)}", expected="at least 1")
    rates = {"compute": tiers.compute, "pfs": tiers.pfs, "fast": tiers.fast}
    for name, value in rates.items():
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{name} is {value}", expected="more than 0")
