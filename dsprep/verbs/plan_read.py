"""``plan``: what a job needs from storage, and what it will wait for. Predicted.

Nothing but the sidecar is read; how groups are assigned to ranks is dsprep's own order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.errors import UsageError, require
from dsprep.planning import waiting
from dsprep.planning.shares import Shares
from dsprep.planning.storage_figures import StorageFigures
from dsprep.planning.waiting import Job, Load, Way
from dsprep.reader.data import Paths, open_data
from dsprep.reader.options import at_least
from dsprep.reader.order import Assignment, Sequence
from dsprep.reader.units import cut_units, group_edges, sample_nbytes
from dsprep.verbs.break_even import BreakEven
from dsprep.verbs.tiers import TierPlan, fitted
from dsprep.writing.stripes import Stripe, detect_stripe, suggest_stripes

MOST_RANKS = 1 << 24
"""Ranks of a job at most: what each of them reads is computed."""


@dataclass(frozen=True)
class ReadPlan:
    """The needs of a job, and its waits for storage.

    Attributes
    ----------
    job, figures
        What was asked.
    tier
        The plan of a fast tier; None without one.
    sequence, mixed
        The order of an epoch, and how many of its groups are read together.
    sample_nbytes, files
        Of the dataset, as stored.
    grouped
        Whether the dataset has groups; if not, they are those after a `repack`.
    stripe, layout
        Of the storage of the dataset, and the command that gives new files stripes that fit.
    """

    job: Job
    figures: StorageFigures
    tier: TierPlan | None
    sequence: Sequence
    mixed: int
    sample_nbytes: float
    files: int
    grouped: bool
    stripe: Stripe
    layout: str

    @cached_property
    def load(self) -> Load:
        """The reads of an epoch."""
        shares = Shares.of(self.sequence, self.job.ranks)
        samples = int(shares.samples.max())
        units = int((-(-(shares.stop - shares.first) // self.mixed)).max())
        nbytes = self.sample_nbytes * len(self.sequence)
        steps = -(-samples // self.job.batch_size)
        return Load(samples, units, steps, self.sample_nbytes, nbytes, self.files)

    @cached_property
    def ways(self) -> dict[str, Way]:
        """Every way of reading, by name."""
        plain = waiting.ways(self.job, self.load, self.figures)
        return plain | ({w.name: w for w in self._tiers(self.tier)} if self.tier else {})

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The needs of the job, and advice.

        ``needed_bytes_per_second`` of all nodes together is BW_min, b*S/t, of Mathuriya et al.
        (SC18); ``given_bytes_per_second`` the storage gives to all ranks. ``opens`` are those of
        all ranks in a first epoch, ``epoch_seconds`` those of one that never waits. A group of
        ``group_samples`` (B) lasts ``group_steps`` (B / M, with M per rank), two of each rank take
        ``buffers_nbytes`` of a node, and ``enough_samples`` are those of the smallest group whose
        read its steps hide (None: there is none). ``readers_per_node`` are enough to read for all
        ranks of a node, and no more than ``stagger`` ranks should read at a time (None: all may).
        """
        job, figures = self.job, self.figures
        samples_per_second = job.ranks * job.batch_size / job.compute
        needed = samples_per_second * self.sample_nbytes
        group = int(np.diff(self.sequence.edges).max()) * self.mixed
        return {
            "samples_per_second": samples_per_second,
            "groups_per_second": samples_per_second / group,
            "needed_bytes_per_second": needed,
            "given_bytes_per_second": job.ranks * figures.bytes_per_second(job.ranks),
            "opens": job.ranks * min(self.files, self.load.units),
            "epoch_seconds": self.load.steps * job.compute,
            "group_samples": group,
            "group_steps": group / job.batch_size,
            "buffers_nbytes": 2 * group * self.sample_nbytes * job.ranks_per_node,
            "enough_samples": waiting.enough(job, self.load, figures),
            "readers_per_node": waiting.readers_per_node(job, needed, figures),
            "stagger": waiting.turns(job, figures),
            "staging_seconds": self.load.nbytes / figures.copy_rate(job.nodes),
        }

    @property
    def repack(self) -> BreakEven:
        """The cost of a rewrite by all ranks, and the savings of reading its groups."""
        seconds = 2 * self.load.nbytes / self.facts["given_bytes_per_second"]  # and written
        each, together = (self.ways[name].later_seconds for name in ("sample", "group-db"))
        count = self.load.samples
        return BreakEven.of(seconds, each / count, together / count, count)

    @property
    def verdict(self) -> str:
        """A sentence on whether training waits for this storage, and what is enough."""
        shares = {name: way.utilisation for name, way in self.ways.items()}
        each, ours = shares["sample-prefetch"], shares["dsprep"]
        if each >= waiting.BUSY:
            ahead = f"sample by sample with {self.job.threads} threads that read ahead"
            return f"the storage keeps up, even {ahead}: no repack, no cache needed"
        words = f"training computes {each:.0%} of the time sample by sample, {ours:.0%} by groups"
        if ours >= waiting.BUSY:
            return f"the storage keeps up with reads of groups: {words}; no cache needed"
        uses = {"cache-next": "a cache on the fast tier", "met": "mini-epochs on it"}
        tiers = "".join(f", {shares[n]:.0%} with {use}" for n, use in uses.items() if n in shares)
        slow = "too slow"
        if self.facts["given_bytes_per_second"] >= self.facts["needed_bytes_per_second"]:
            slow = f"fast enough but for its {self.ways['dsprep'].limit}"
        return f"the storage is {slow}: {words}{tiers or '; --tier SIZE adds a fast tier'}"

    @property
    def predicted(self) -> str:
        """A sentence on how far the storage may be from its figures."""
        if (ratio := self.figures.rounds_ratio) is None:
            return "by a closed form; how much the storage varies was not measured"
        return f"by a closed form; rounds of bench storage differed by up to {ratio:.3g} times"

    @property
    def notes(self) -> list[str]:
        """Gaps of the prediction, one sentence each."""
        figures, nodes = self.figures, self.job.nodes
        total, few = figures.total_bytes_per_second, 0 < figures.nodes < self.job.nodes
        lines = {
            "what all ranks get together was not measured, or did not saturate: each gets what one "
            "has alone": total is None,
            f"the storage was measured from {figures.nodes:,} of {nodes:,} nodes, whose network may"
            " be what limits it: more nodes may get more": few and total is not None,
            "how read times spread was not measured: no rank is slow": not figures.sigma,
            "opening files was not measured, and takes no time": figures.opens_per_second is None,
            "the dataset has no groups: those of a repack are predicted": not self.grouped,
        }
        tier = () if self.tier is None else self.tier.warnings
        return [*(words for words, holds in lines.items() if holds), *tier]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "verdict": self.verdict,
            "predicted": self.predicted,
            "job": {**asdict(self.job), "ranks": self.job.ranks},
            "storage": self.figures.to_json(),
            "load": asdict(self.load),
            "ways": {name: asdict(way) for name, way in self.ways.items()},
            **self.facts,
            "stripes": self.layout,
            "repack": asdict(self.repack),
            "tier": None if self.tier is None else self.tier.to_json(),
            "notes": self.notes,
        }

    def _tiers(self, plan: TierPlan) -> Iterator[Way]:
        """Yield a cache, and mini-epochs where not all fits into it."""
        staging, epoch = self.facts["staging_seconds"], self.facts["epoch_seconds"]
        left = max(0.0, 1 - plan.capacity * self.job.nodes / plan.nbytes)
        stalled = 1 - min(1.0, plan.pfs / left / plan.consumed) if left else 0.0
        rows = [("cache-next", stalled, 1)]
        if not plan.fits:
            rows.append(("met", plan.after.stalled, plan.mini_epochs))
        for name, stalled, parts in rows:
            waited = epoch * stalled / (1 - stalled)
            first = max(waited, (staging - epoch) / parts)
            limit = "compute" if 1 - stalled >= waiting.BUSY else "aggregate"
            yield Way(name, staging, first, waited, 0.0, 0.0, 1 - stalled, limit)


def plan_read(
    path: Paths,
    job: Job,
    figures: StorageFigures,
    buffer_size: int | str | None = None,
    tier: Mapping[str, Any] | None = None,
    sidecar: str | Path | None = None,
) -> ReadPlan:
    """Return the storage rates that a job needs, and its waiting times.

    Parameters
    ----------
    path
        The dataset, or its sidecar; as for `Reader`.
    job, figures
        What trains, and what the storage gives.
    buffer_size
        What is read at a time, as for `Reader`.
    tier
        A fast tier: its `capacity`, the `epochs` of training, and perhaps the rate that it gives,
        `fast`, as of `TierPlan`. How a cache and mini-epochs do is predicted, too.
    sidecar
        The sidecar, where it is not beside the dataset.

    Raises
    ------
    UsageError
        If numbers are not possible.
    """
    for name in ("nodes", "ranks_per_node", "batch_size", "threads"):
        at_least(name, getattr(job, name), 1)
    at_least("nodes times ranks_per_node", job.ranks, 1, MOST_RANKS)
    seconds = job.compute
    require(0 < seconds < math.inf, UsageError, f"compute is {seconds}", expected="more than 0")
    with open_data(*((path,) if sidecar is None else (sidecar, path))) as opened:
        _, edges, mixed = cut_units(opened, opened.schema, "group", buffer_size, None)
        sizes = [f.identity.nbytes for f in opened.content.files]
        each = min(sample_nbytes(opened, opened.schema), sum(sizes) / max(1, len(opened)))
        stripe = detect_stripe(opened.dataset, max(sizes, default=0))
        grouped = group_edges(opened) is not None
    if len(edges) < 2 or not each:
        raise UsageError("the dataset has no bytes that could be read")
    order = Assignment(edges, "group", 0, mixed, "ragged", job.ranks, job.batch_size)
    unit_nbytes = int(np.diff(edges).max() * mixed * each)
    stripes = suggest_stripes(stripe, [sizes], group_nbytes=unit_nbytes, ranks=job.ranks)
    tiers = None
    if tier is not None:
        tiers = fitted(edges, each, job, pfs=figures.copy_rate(job.nodes), **tier)
    facts = mixed, each, len(sizes), grouped, stripe, stripes
    return ReadPlan(job, figures, tiers, order.sequence(0), *facts)
