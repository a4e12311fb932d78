"""``plan tiers``: what mini-epoch training takes of two tiers of storage, by the paper's model.

The capacity tier holds the whole dataset and gives B2 bytes per second to all nodes together; each
node has room for EC1 bytes on a fast tier. An epoch is cut into nm mini-epochs, each of which is
passed rf times while the next one is copied; so two have to fit at a time, and of what training
consumes (EB1) only one part in rf is drawn from the capacity tier. Source: S002, sections III and
IV. Its Eq. 1 is printed with MAX, by which (nm, rf) = (128, 128) would leave 400 GB/s to be drawn;
the paper's own result, 30.4 GB/s, takes MIN, which stands here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from dsprep.core.schema import Ints
from dsprep.errors import UsageError
from dsprep.layout.describe import show_nbytes
from dsprep.reader.units import cut_units, sample_nbytes
from dsprep.sidecar.sidecar import Sidecar

SHARE = 0.5
"""Of the fast tier: what the largest mini-epoch has to be smaller than. S002, section III."""

MANY = 64
"""Mini-epochs or repeats beyond which the paper's models lost accuracy. S002, Figs. 7 to 10."""


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
    passes
        Epochs of training: how often the network sees as many samples as the dataset has. S.
    """

    capacity: int
    nodes: int
    ranks_per_node: int
    batch_size: int
    compute: float
    pfs: float
    fast: float | None = None
    passes: int


@dataclass(frozen=True, kw_only=True)
class TierPlan:
    """What comes of it.

    Attributes
    ----------
    tiers
        What was asked.
    samples, sample_nbytes, groups
        Of the dataset.
    mini_epochs
        The smallest number whose largest mini-epoch is less than half of the fast tier; 1 where
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

    @cached_property
    def consumed(self) -> float:
        """Bytes per second that training consumes when it never waits: EB1."""
        t = self.tiers
        return t.nodes * t.ranks_per_node * t.batch_size * self.sample_nbytes / t.compute

    @cached_property
    def repeats(self) -> int:
        """The smallest repeating factor without stalls: rf > EB1 / B2; 1 where all of it fits."""
        return 1 if self.fits else math.floor(self.consumed / self.tiers.pfs) + 1

    @property
    def throughput(self) -> tuple[float, float]:
        """Bytes per second that training gets: from the capacity tier alone, and by this plan."""
        return min(self.consumed, self.tiers.pfs), self.rate(self.repeats)

    def rate(self, repeats: int) -> float:
        """Return the bytes per second that training gets with another repeating factor."""
        drawn = math.inf if self.fits else repeats * self.tiers.pfs
        return min(self.consumed, drawn, self.tiers.fast or math.inf)

    @property
    def drawn(self) -> tuple[float, float]:
        """Bytes per second drawn from the capacity tier: before, and by this plan: EB2."""
        after = 0.0 if self.fits else drawn(self.consumed, self.tiers.pfs, [self.repeats])
        return min(self.consumed, self.tiers.pfs), after

    @property
    def stalled(self) -> tuple[float, float]:
        """Share of the time in which training waits: from the capacity tier, and by this plan."""
        before, after = self.throughput
        return 1 - before / self.consumed, 1 - after / self.consumed

    @property
    def epochs(self) -> float:
        """How often all mini-epochs come in the training: S / rf."""
        return self.tiers.passes / self.repeats

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is to be feared, a sentence each."""
        found = []
        if self.epochs < 1:
            found.append(
                f"{self.repeats} passes of each mini-epoch are more than the {self.tiers.passes} "
                f"epochs of training: {1 - self.epochs:.0%} of the samples are never seen"
            )
        elif self.epochs != int(self.epochs):
            found.append(
                f"{self.tiers.passes} epochs of training are {self.epochs:.1f} times all "
                f"mini-epochs: some samples are seen {self.repeats} times more than others"
            )
        many = [f"{self.mini_epochs} mini-epochs"] if self.mini_epochs > MANY else []
        many += [f"{self.repeats} repeats"] if self.repeats > MANY else []
        if many:
            found.append(
                f"{' and '.join(many)}: with more than {MANY} the models of S002 (Figs. 7 to 10) "
                "lost 1 to 10 % of their accuracy; repeats that adapt won some of it back"
            )
        if self.tiers.fast is not None and self.tiers.fast < self.consumed:
            found.append(
                f"the fast tier gives {show_nbytes(self.tiers.fast)}/s and training consumes "
                f"{show_nbytes(self.consumed)}/s: it waits for the fast tier"
            )
        return tuple(found)


def drawn(consumed: float, pfs: float, repeats: Sequence[int]) -> float:
    """Return the bytes per second drawn from the capacity tier: Eq. 1 of S002, with MIN.

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


def plan_tiers(path: str | Path, tiers: Tiers, *, sidecar: str | Path | None = None) -> TierPlan:
    """Return how a dataset is trained on with a fast tier that is too small for it.

    Nothing but the sidecar is read.

    Parameters
    ----------
    path
        A dataset with a sidecar, or the sidecar.
    tiers
        The storage of the job, and what its training consumes.
    sidecar
        The sidecar, where it is not beside the dataset.

    Raises
    ------
    UsageError
        If numbers are not possible, or no number of mini-epochs is small enough.
    """
    _check(tiers)
    with Sidecar.open(path) if sidecar is None else Sidecar.open(sidecar, path) as opened:
        edges, _ = cut_units(opened, opened.schema, "group", None, None)
        nbytes = sample_nbytes(opened, opened.schema)
    return fitted(edges, nbytes, tiers)


def fitted(edges: Ints, sample_nbytes: float, tiers: Tiers) -> TierPlan:
    """Return the plan for groups that begin at `edges`; see `plan_tiers`."""
    samples, groups = int(edges[-1]), len(edges) - 1
    if not samples or not sample_nbytes:
        raise UsageError("the dataset has no bytes that could be kept on another tier")
    group = math.ceil(int(np.diff(edges).max()) * sample_nbytes)
    total = math.ceil(samples * sample_nbytes)
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
    for name in ("capacity", "nodes", "ranks_per_node", "batch_size", "passes"):
        if getattr(tiers, name) < 1:
            raise UsageError(f"{name} is {getattr(tiers, name)}", expected="at least 1")
    rates = {"compute": tiers.compute, "pfs": tiers.pfs, "fast": tiers.fast}
    for name, value in rates.items():
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{name} is {value}", expected="more than 0")
