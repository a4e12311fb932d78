"""A plan of reading, as rows of words and as a page. Everything in it is predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dsprep import __version__
from dsprep.bench.report.model import BenchReport, Measure, Point, Row, Sweep
from dsprep.bench.report.page import document, section
from dsprep.bench.report.plots import curves, epochs, text
from dsprep.bench.report.tables import digits, show_seconds
from dsprep.core.units import show_nbytes
from dsprep.planning.queues import Simulated, Stripes
from dsprep.planning.waiting import ERROR
from dsprep.verbs.plan_read import ReadPlan

CURVES = ("sample", "group", "group-db", "dsprep")
"""Ways that are drawn over the number of nodes."""

DOUBLINGS = range(-4, 2)
"""Numbers of nodes that are drawn: as many times two of those asked for."""


def table(plan: ReadPlan) -> list[Sequence[str]]:
    """Return the ways in words, a heading first."""
    head = ("way", "exposed I/O", "later epochs", "skew", "slowest", "AU %", "limit")
    rows = [
        (
            way.name,
            *map(show_seconds, (way.exposed_seconds, way.later_seconds, way.skew_seconds)),
            show_seconds(way.slowest_seconds),
            f"{100 * way.utilisation:.3g}",
            way.limit,
        )
        for way in plan.ways.values()
    ]
    return [head, *rows]


def rows(plan: ReadPlan) -> list[tuple[str, str]]:
    """Return what the job needs and what is advised, by heading."""
    job, load, facts, repack = plan.job, plan.load, plan.facts, plan.repack
    figures, best = plan.figures, plan.ways["group-db"]

    def rate(value: float) -> str:
        return f"{show_nbytes(value)}/s"

    needed, given = facts["needed_bytes_per_second"], facts["given_bytes_per_second"]
    enough, turns = facts["enough_samples"], facts["stagger"]
    group = f"{facts['group_samples']:,} samples, "
    group += f"{show_nbytes(facts['group_samples'] * plan.sample_nbytes)} (B)"
    small = (
        "none is read as fast as its steps compute"
        if enough is None
        else (f"from {enough:,.0f} samples on a read is hidden by its steps")
    )
    one_each = f"each rank {show_nbytes(facts['buffers_nbytes'] / job.ranks_per_node)}"
    pays = "never pays" if repack.epochs is None else f"pays after {digits(repack.epochs)} epochs"
    mean = best.io_seconds / max(1, load.units)
    return [
        ("dataset", f"{len(plan.sequence):,} samples of {show_nbytes(plan.sample_nbytes)}, "
         f"{show_nbytes(load.nbytes)} in {plan.files:,} file{'s' * (plan.files > 1)}"),
        ("job", f"{job.nodes:,} nodes, {job.ranks:,} ranks; {load.steps:,} steps of "
         f"{show_seconds(job.compute)} on {job.batch_size:,} samples a rank"),
        ("storage", f"{figures.name or 'unnamed'}: {figures.words}"),
        ("needed", f"{rate(needed)} (b*S/t), {rate(needed / job.nodes)} a node; "
         f"{digits(facts['samples_per_second'])} samples/s or {digits(facts['groups_per_second'])} "
         f"groups/s, {facts['opens']:,} files opened in a first epoch"),
        ("given", f"{rate(given)} to all ranks, {digits(given / needed)} times that"),
        ("limit", f"{best.limit} where groups are double buffered, {plan.ways['sample'].limit} "
         "sample by sample"),
        ("straggler", f"a group takes {show_seconds(mean)} to read, the slowest of "
         f"{job.ranks:,} at a barrier {show_seconds(best.slowest_seconds)}"),
        ("group", f"{group} last {digits(facts['group_steps'])} steps (B/M); two of {one_each}, "
         f"{show_nbytes(facts['buffers_nbytes'])} a node; {small}"),
        ("readers", f"{facts['readers_per_node']:,} of {job.ranks_per_node:,} ranks of a node are "
         f"enough; {'all' if turns is None else f'{turns:,} of all ranks'} at a time (stagger)"),
        ("stripes", f"{plan.layout.command}: {plan.layout.why}"),
        ("repack", f"{show_seconds(repack.rewrite_seconds)} on all ranks; {pays}"),
        ("staging", f"{show_seconds(facts['staging_seconds'])} to the nodes"),
        ("predicted", ERROR),
    ]  # fmt: skip


def simulated_rows(
    queues: Mapping[str, Simulated], plan: ReadPlan, stripes: Stripes
) -> list[tuple[str, str]]:
    """Return what a simulation gave, beside the closed form."""
    lines = []
    for name, queue in queues.items():
        way = plan.ways[name]
        closed = show_seconds(way.later_seconds + way.skew_seconds)
        words = (
            f"waits {show_seconds(queue.waited_seconds)} an epoch (closed form {closed}); "
            f"{queue.seeks:,} of {queue.requests:,} requests to {stripes.targets:,} targets seek, "
            f"the busiest works {queue.busiest:.3g} times the mean"
        )
        if queue.simulated_rounds < queue.rounds:
            words += f"; {queue.simulated_rounds:,} of {queue.rounds:,} groups simulated"
        lines.append((f"{name}, queues", words))
    return lines


def html(plan: ReadPlan, name: str, facts: Mapping[str, str]) -> str:
    """Return the page of a plan: `facts` are `rows` and what a simulation gave."""
    title = f"Reading {name} on {plan.job.nodes:,} nodes"
    head = f'<header>\n<p class="eyebrow">dsprep plan read</p>\n<h1>{text(title)}</h1>\n</header>'
    notes = "".join(f"<li>{text(words)}</li>" for words in plan.notes)
    items = "".join(
        f'<div class="whole"><dt>{text(k)}</dt><dd>{text(v)}</dd></div>' for k, v in facts.items()
    )
    report = _report(plan)
    parts = [
        head,
        section("Plan, predicted", f'<dl class="grid">{items}</dl>'),
        section("What the prediction lacks", notes and f'<ul class="notes">{notes}</ul>'),
        section("A later epoch, by what it is spent on", epochs(_rows(plan))),
        section("Samples per second, by nodes", curves(report)),
        section("Ways of reading", _table(table(plan))),
    ]
    return document(f"{title} - dsprep plan", parts, f"dsprep {__version__}")


def _table(lines: Sequence[Sequence[str]]) -> str:
    """Return rows as a table; the first one is its heading."""
    head = "".join(f'<th scope="col">{text(word)}</th>' for word in lines[0])
    body = "".join(
        f'<tr><th scope="row">{text(first)}</th>'
        f"{''.join(f'<td>{text(word)}</td>' for word in others)}</tr>\n"
        for first, *others in lines[1:]
    )
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Figures"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>"
    )


def _rows(plan: ReadPlan) -> list[Row]:
    """Return the ways as rows of a report, of a later epoch."""
    compute, rows = plan.facts["epoch_seconds"], []
    for way in plan.ways.values():
        total = compute + way.later_seconds + way.skew_seconds
        values = {
            "epoch_seconds": total,
            "exposed_seconds": way.later_seconds,
            "compute_seconds": compute,
            "skew_seconds": way.skew_seconds,
            "samples_per_second": len(plan.sequence) / total,
        }
        rows.append(Row(way.name, way.words, {k: Measure(v, v, v) for k, v in values.items()}))
    return rows


def _report(plan: ReadPlan) -> BenchReport:
    """Return the samples per second over the number of nodes, as a sweep."""
    nodes = sorted({max(1, round(plan.job.nodes * 2.0**i)) for i in DOUBLINGS})
    points = tuple(
        Point(str(n), tuple(row for row in _rows(plan.on(n)) if row.name in CURVES)) for n in nodes
    )
    return BenchReport("", "", {}, {}, {}, (), Sweep("nodes", points))
