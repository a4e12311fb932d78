"""``plan --tier``: what mini-epoch training takes of two tiers of storage, by the paper's model.

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
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from dsprep.core.schema import Ints
from dsprep.core.units import show_binary_nbytes, show_nbytes, show_time
from dsprep.errors import UsageError, require
from dsprep.planning.waiting import Job
from dsprep.reader.mini_epochs import MiniEpochs
from dsprep.writing.buffers import slow_convergence

SHARE = 0.5
"""Of the fast tier: what the largest mini-epoch has to be smaller than. Section III."""

MANY = 64
"""Mini-epochs or repeats beyond which the paper's models lost accuracy. Figs. 7 to 10."""

MUCH = 1.1
"""Times the bytes of a mini-epoch that all nodes copy of it, beyond which smaller groups pay."""

ROUNDING = 2 * 4096
"""Bytes that a group takes of a tier beyond its own, at most: whole pages are kept of it."""


@dataclass(frozen=True)
class Point:
    """The effect of one repeating factor.

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
    """A training on a dataset with a fast tier.

    Attributes
    ----------
    job
        What trains.
    capacity
        Bytes that the job may use of the fast tier of each node.
    epochs
        Of training: how often the network sees as many samples as the dataset has. S.
    pfs
        Bytes per second that the capacity tier gives to all nodes together: B2.
    fast
        Bytes per second that the fast tiers of all nodes give together: B1; None: enough.
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

    job: Job
    capacity: int
    epochs: int
    pfs: float
    fast: float | None = None
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

    @cached_property
    def consumed(self) -> float:
        """Bytes per second that training consumes when it never waits: EB1."""
        return self.job.ranks * self.job.batch_size * self.sample_nbytes / self.job.compute

    @cached_property
    def served(self) -> float:
        """Bytes per second that training gets where only the fast tier may be too slow."""
        return min(self.consumed, self.fast or math.inf)

    @property
    def copied(self) -> float:
        """The copies of a mini-epoch, in its bytes: of a group in two pools, both copy all."""
        return 1 + (self.job.nodes - 1) * self.mini_epochs / self.groups

    @property
    def knee(self) -> float:
        """EB1 / B2: training that repeats more than that never waits for the capacity tier.

        EB1 as far as it is copied: times `copied`.
        """
        return self.served * self.copied / self.pfs

    @property
    def repeats(self) -> int:
        """The smallest repeating factor beyond the knee: rf; 1 where the whole dataset fits."""
        return 1 if self.fits else math.floor(self.knee) + 1

    def at(self, repeats: float) -> Point:
        """Return what another repeating factor gives."""
        pfs = self.pfs
        given = self.served if self.fits else min(self.served, repeats * pfs / self.copied)
        taken = 0.0 if self.fits else drawn(self.served * self.copied, pfs, [repeats])
        return Point(repeats, given, taken, 1 - given / self.consumed)

    @property
    def before(self) -> Point:
        """The effect of the capacity tier alone."""
        given = min(self.consumed, self.pfs)
        return Point(1, given, given, 1 - given / self.consumed)

    @property
    def after(self) -> Point:
        """The effect of this plan, once the first mini-epoch is copied."""
        return self.at(self.repeats)

    @property
    def copy_seconds(self) -> float:
        """Seconds in which a mini-epoch is copied: the first pass takes at least as long."""
        return self.nbytes * self.copied / self.mini_epochs / self.pfs

    @property
    def steps(self) -> float:
        """Steps of one pass of a mini-epoch."""
        return self.samples / self.mini_epochs / self.job.ranks / self.job.batch_size

    @property
    def passes(self) -> int:
        """Passes of mini-epochs in the training: S times nm."""
        return self.epochs * self.mini_epochs

    @property
    def outer_epochs(self) -> float:
        """The epochs of mini-epochs that the training has: S / rf."""
        return self.epochs / self.repeats

    @property
    def passes_per_sample(self) -> tuple[int, int]:
        """The passes of a sample: at least, and at most."""
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
        """Arguments of the Reader, besides those of the dataset and the cache."""
        common = {"epochs": math.ceil(self.outer_epochs)}
        pools, cut = self.job.nodes, MiniEpochs(self.mini_epochs)
        if self.fits and pools == 1:
            return common
        if pools > 1:  # where all fits, samples stay on their node for good
            cut = replace(cut, recompose=not self.fits, pools=pools)
        parts = cut.parts if pools == 1 else cut
        return {"mini_epochs": parts, "repeats": self.repeats, **common}

    @property
    def warnings(self) -> tuple[str, ...]:
        """Risks, one sentence each."""
        lines = [*self._of_order(), *slow_convergence(self.samples, self.groups, self.epochs)]
        many = [f"{self.mini_epochs:,} mini-epochs"] if self.mini_epochs > MANY else []
        many += [f"{self.repeats:,} repeats"] if self.repeats > MANY else []
        if many:
            lines.append(
                f"{' and '.join(many)}: beyond {MANY}, models lost 1 to 10 % of their accuracy "
                "(Xu et al., PDSW 2021, Figs. 7 to 10); repeats that adapt won back some of it"
            )
        fast, moved = self.fast, self.consumed + self.after.drawn
        if fast is not None and fast < moved:
            lines.append(
                f"the fast tiers give {show_nbytes(fast)}/s, less than the {show_nbytes(moved)}/s "
                "that training reads and copying writes: training waits for them"
            )
        return tuple(lines)

    def rows(self) -> dict[str, str]:
        """Return the plan for a person: headings and what they say."""
        before, after, nodes = self.before, self.after, self.job.nodes
        if self.fits:
            parts, reason = "it is copied once, and stays", "nothing is drawn after that"
        else:
            parts = f"up to {show_nbytes(self.largest)} a node, two at a time"
            twice = f" * {self.copied:.4g} (copied)" if self.copied >= 1.0005 else ""
            reason = f"more than EB1/B2 = {_rate(self.served)}{twice} / {_rate(self.pfs)}"
            reason += f" = {self.knee:.4g}"
        fewest, largest = self.passes_per_sample
        times = f"{fewest:,}" if fewest == largest else f"{fewest:,} to {largest:,}"
        room = show_binary_nbytes(self.capacity) + f" on each of {nodes:,} nodes" * (nodes > 1)
        copied = f"{show_time(self.copy_seconds)} for {'all' if self.fits else 'a mini-epoch'}"
        return {
            "fast tier": f"{room}: the dataset {'fits' if self.fits else 'does not fit'}",
            "consumed": f"{_rate(self.consumed)} where training never waits (EB1)",
            "mini-epochs": f"{self.mini_epochs:,} (nm): {parts}",
            "repeats": f"{self.repeats:,} (rf): {reason}",
            "passes": f"{self.passes:,} (S nm) of {self.steps:,.3g} steps; each sample comes "
            f"{times} times in {self.epochs:,} epochs (S)",
            "drawn": f"{_rate(before.drawn)} -> {_rate(after.drawn)} from the capacity tier (EB2)",
            "throughput": f"{_rate(before.throughput)} -> {_rate(after.throughput)} of training",
            "stalled": f"{before.stalled:.0%} -> {after.stalled:.0%} of the time",
            "copying": f"{copied}; the first pass takes at least as long",
            "Reader": ", ".join(f"{name}={value!r}" for name, value in self.reader.items()),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON."""
        derived = (
            *("consumed", "copied", "knee", "repeats", "outer_epochs", "passes", "steps"),
            *("passes_per_sample", "never_seen", "copy_seconds", "warnings"),
        )
        reader = {n: vars(v) if isinstance(v, MiniEpochs) else v for n, v in self.reader.items()}
        points = {"reader": reader, "before": asdict(self.before), "after": asdict(self.after)}
        return {**asdict(self), **{name: getattr(self, name) for name in derived}, **points}

    def _of_order(self) -> list[str]:
        """Return what may go wrong with the samples that come."""
        lines, repeats, epochs = [], self.repeats, self.epochs
        if self.never_seen:
            lines.append(
                f"{repeats:,} repeats are more than the {epochs:,} epochs (S/rf = "
                f"{self.outer_epochs:.3g}): {self.never_seen:.0%} of the samples are never seen"
            )
        elif self.passes_per_sample[0] < self.passes_per_sample[1]:
            lines.append(
                f"{epochs:,} epochs are not a multiple of {repeats:,} repeats: some samples come "
                f"{self.passes_per_sample[1]:,} times, others {self.passes_per_sample[0]:,} times"
            )
        part = self.groups // self.mini_epochs
        if self.copied > MUCH and not self.fits:
            lines.append(
                f"{part:,} groups of a mini-epoch for {self.job.nodes:,} nodes: several nodes "
                f"copy the same groups, {self.copied - 1:.0%} more in all; repack with a smaller "
                "--buffer-size"
            )
        if self.steps < 1:
            lines.append(
                f"a pass of a mini-epoch has {self.steps * self.job.batch_size:.3g} samples for "
                f"each rank, fewer than a batch of {self.job.batch_size:,}"
            )
        return lines


def _rate(value: float) -> str:
    return f"{show_nbytes(value)}/s"


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


def fitted(edges: Ints, sample_nbytes: float, job: Job, **tiers: Any) -> TierPlan:
    """Return the plan for groups that begin at `edges`.

    Parameters
    ----------
    sample_nbytes
        Bytes of a sample, as stored.
    job, tiers
        What trains; and the attributes of `TierPlan` on the storage: `capacity`, `epochs`, `pfs`
        and perhaps `fast`.

    Raises
    ------
    UsageError
        If no number of mini-epochs is small enough.
    """
    capacity: int = tiers["capacity"]
    samples, groups = int(edges[-1]), len(edges) - 1
    require(
        samples and sample_nbytes,
        UsageError,
        "the dataset has no bytes that could be kept on another tier",
    )
    group = math.ceil(int(np.diff(edges).max()) * sample_nbytes) + ROUNDING
    total = math.ceil(samples * sample_nbytes) + groups * ROUNDING
    uneven = 2 * group if job.nodes > 1 else 0  # what nodes have that begins or ends with others
    fits, parts = math.ceil(total / job.nodes) + uneven <= capacity, 1
    if not fits:
        uneven += group  # parts end with groups
        room = SHARE * capacity - uneven - 1
        parts = math.floor(total / job.nodes / room) + 1 if room > 0 else groups + 1
        require(
            parts <= groups,
            UsageError,
            f"half of the fast tier ({show_nbytes(SHARE * capacity)}) is too small for "
            f"the groups, of up to {show_nbytes(group)} each",
            fix="repack with a smaller --buffer-size, or give more capacity",
        )
    return TierPlan(
        job=job,
        **tiers,
        samples=samples,
        sample_nbytes=sample_nbytes,
        groups=groups,
        mini_epochs=parts,
        largest=math.ceil(total / parts / job.nodes) + uneven,
        fits=fits,
    )
