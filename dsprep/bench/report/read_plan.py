"""A plan of reading, as rows of words. Everything in it is predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dsprep.bench.report.tables import digits, show_seconds
from dsprep.core.units import show_nbytes
from dsprep.planning.queues import Simulated
from dsprep.verbs.plan_read import ReadPlan

NOTHING = 1e-7
"""Seconds below which a wait counts as none."""


def table(plan: ReadPlan) -> list[Sequence[str]]:
    """Return the ways in words, a heading first."""
    rows: list[Sequence[str]] = [
        ("way", "exposed I/O", "later epochs", "skew", "slowest", "AU %", "limit")
    ]
    for way in plan.ways.values():
        waits = way.exposed_seconds, way.later_seconds, way.skew_seconds, way.slowest_seconds
        seconds = (show_seconds(s if s > NOTHING else 0.0) for s in waits)
        rows.append((way.name, *seconds, f"{100 * way.utilisation:.3g}", way.limit))
    return rows


def rows(plan: ReadPlan, queues: Mapping[str, Simulated]) -> dict[str, str]:
    """Return what the job needs and what is advised, by heading, and what a simulation gave."""
    job, load, facts, repack, figures = plan.job, plan.load, plan.facts, plan.repack, plan.figures
    needed, given = (facts[f"{word}_bytes_per_second"] for word in ("needed", "given"))
    best, group, both = plan.ways["group-db"], facts["group_samples"], facts["buffers_nbytes"]
    enough, turns, epochs = facts["enough_samples"], facts["stagger"], repack.epochs
    mean = best.io_seconds / max(1, load.units)
    rows = {"verdict": plan.verdict}
    rows["dataset"] = f"{len(plan.sequence):,} samples of {show_nbytes(plan.sample_nbytes)}"
    rows["dataset"] += f", {show_nbytes(load.nbytes)}; files: {load.files:,}"
    rows["job"] = f"ranks: {job.ranks:,}, nodes: {job.nodes:,}; steps of an epoch: {load.steps:,},"
    rows["job"] += f" each of {job.batch_size:,} samples a rank and {show_seconds(job.compute)}"
    rows["storage"] = f"{figures.name or 'unnamed'}: {figures.words}"
    rows["needed"] = f"{show_nbytes(needed)}/s (b*S/t), {show_nbytes(needed / job.nodes)}/s a node;"
    rows["needed"] += f" {digits(facts['samples_per_second'])} samples/s or"
    rows["needed"] += f" {digits(facts['groups_per_second'])} groups/s; opens: {facts['opens']:,}"
    rows["given"] = f"{show_nbytes(given)}/s to all ranks, {digits(given / needed)} times that"
    rows["limit"] = f"{best.limit} where groups are double buffered"
    rows["limit"] += f", {plan.ways['sample'].limit} sample by sample"
    rows["straggler"] = f"a group takes {show_seconds(mean)} to read, the slowest of {job.ranks:,}"
    rows["straggler"] += f" at a barrier {show_seconds(best.slowest_seconds)}"
    rows["group"] = f"{group:,} samples (B), {show_nbytes(group * plan.sample_nbytes)}, last"
    rows["group"] += f" {digits(facts['group_steps'])} steps (B/M); buffers: {show_nbytes(both)} "
    rows["group"] += "a node (2B a rank); " + (
        "none is read as fast as its steps compute"
        if enough is None
        else f"from B = {enough:,.0f} on its steps hide its read"
    )
    rows["readers"] = f"per node: {facts['readers_per_node']:,} of {job.ranks_per_node:,}"
    rows["readers"] += ", which is enough" if given >= needed else ", which get less than is needed"
    rows["readers"] += "; at a time (stagger): " + ("all" if turns is None else f"{turns:,}")
    rows["stripes"] = f"{plan.layout.command}: {plan.layout.why}"
    pays = "never pays" if epochs is None else f"pays after {digits(epochs)} epochs"
    if not plan.grouped:
        rows["repack"] = f"{show_seconds(repack.rewrite_seconds)} by all ranks; {pays}"
    rows["staging"] = f"{show_seconds(facts['staging_seconds'])} to all nodes"
    for name, queue in queues.items():
        closed = plan.ways[name].exposed_seconds + plan.ways[name].skew_seconds
        words = f"waits {show_seconds(queue.waited_seconds)} in queues ({show_seconds(closed)} in "
        words += f"closed form); {queue.seeks:,} of {queue.requests:,} requests seek, the busiest "
        words += f"target works {queue.busiest:.3g} times the mean"
        rows[f"{name}, simulated"] = (
            words + f"; {queue.simulated_rounds:,} of {queue.rounds:,} groups a rank"
        )
    return {**rows, **(plan.tier.rows() if plan.tier else {}), "predicted": plan.predicted}
