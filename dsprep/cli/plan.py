"""``dsprep plan``: what training needs from storage, computed and not measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dsprep.cli.command import command
from dsprep.cli.report import fail, note, print_json, print_rows, print_table, say

if TYPE_CHECKING:
    from dsprep.verbs.plan_read import ReadPlan

NOTHING = 1e-7
"""Seconds below which a wait counts as none."""


@command
def plan(
    data: tuple[str, ...],
    /,
    batch_size: int,
    compute: str,
    storage: str,
    nodes: int = 1,
    ranks_per_node: int = 1,
    threads: int = 4,
    buffer_size: str | None = None,
    tier: str | None = None,
    epochs: int = 1,
    tier_rate: str | None = None,
    sidecar: Path | None = None,
    json: bool = False,
) -> None:
    """Predict what a job needs from storage, and what it waits for.

    Nothing but the sidecar is read: a closed form on dsprep's own order of groups. A fast tier is
    planned by the model of Xu et al. (PDSW 2021), Eq. 1 with MIN in place of the MAX that is
    printed there, which contradicts the results of the paper.

    Parameters
    ----------
    data : DATA...
        The dataset, or its sidecar.
    batch_size
        Samples per step and rank.
    compute : TIME
        The time of a step without I/O, such as 12ms.
    storage : FILE|NAME|FIGURES
        The output of bench storage; cori, summit, cori-lustre or lmdbio; or
        latency=1ms,stream=500MB/s, and total=20GB/s, opens=, p50=, p99=, read=8MB.
    nodes
        Nodes of the job.
    ranks_per_node
        Processes that read, on each of them.
    threads
        Threads that read for a rank.
    buffer_size : SIZE
        Samples or bytes that are read at a time.
    tier : SIZE
        Bytes of a fast tier that the job may use on each node: plans mini-epochs.
    epochs
        Epochs of the training, with a fast tier: S.
    tier_rate : RATE
        The rate of the tiers of all nodes together.
    sidecar
        The sidecar, if not beside the data.
    json
        Print the result as JSON.

    Examples
    --------
    dsprep plan x.h5 --nodes 64 -M 64 --compute 12ms --storage storage.json
    dsprep plan x.h5 -M 32 --compute 50ms --storage cori --tier 1.6TB --epochs 90
    dsprep plan x.h5 -M 2 --compute 129ms --storage latency=1ms,stream=500MB/s

    Notes
    -----
    Exit status: 0 done, 1 bad data, 2 wrong usage.
    """
    from dsprep.core.units import parse_nbytes, parse_rate, parse_seconds
    from dsprep.planning.published import parse_storage
    from dsprep.planning.waiting import Job
    from dsprep.verbs.plan_read import plan_read

    if tier is None and (epochs != 1 or tier_rate is not None):
        fail("--epochs and --tier-rate are those of --tier", 2)
    job = Job(nodes, ranks_per_node, batch_size, parse_seconds(compute), threads)
    tiers = None
    if tier is not None:
        rate = None if tier_rate is None else parse_rate(tier_rate)
        tiers = {"capacity": parse_nbytes(tier), "epochs": epochs, "fast": rate}
    made = plan_read(data, job, parse_storage(storage), buffer_size, tiers, sidecar)
    if json:
        print_json(made.to_json())
        return
    print_rows([*_rows(made).items()])
    say("")
    print_table(_table(made))
    for line in made.notes:
        note(line)


def _table(plan: ReadPlan) -> list[Sequence[str]]:
    """Return the ways in words, a heading first."""
    from dsprep.bench.report.tables import show_seconds

    rows: list[Sequence[str]] = [
        ("way", "exposed I/O", "later epochs", "skew", "slowest", "AU %", "limit")
    ]
    for way in plan.ways.values():
        waits = way.exposed_seconds, way.later_seconds, way.skew_seconds, way.slowest_seconds
        seconds = (show_seconds(s if s > NOTHING else 0.0) for s in waits)
        rows.append((way.name, *seconds, f"{100 * way.utilisation:.3g}", way.limit))
    return rows


def _rows(plan: ReadPlan) -> dict[str, str]:
    """Return the needs of the job and what is advised, by heading."""
    from dsprep.bench.report.tables import digits, show_seconds
    from dsprep.core.units import show_nbytes

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
    rows["stripes"] = plan.layout
    pays = "never pays" if epochs is None else f"pays after {digits(epochs)} epochs"
    if not plan.grouped:
        rows["repack"] = f"{show_seconds(repack.rewrite_seconds)} by all ranks; {pays}"
    rows["staging"] = f"{show_seconds(facts['staging_seconds'])} to all nodes"
    return {**rows, **(plan.tier.rows() if plan.tier else {}), "predicted": plan.predicted}
