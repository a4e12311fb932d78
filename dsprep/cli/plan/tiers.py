"""``dsprep plan tiers``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsprep.cli import options as opt
from dsprep.cli.bench.output import check_page, write
from dsprep.cli.report import note, print_json, print_rows, show_time

if TYPE_CHECKING:
    from dsprep.verbs.tiers import TierPlan

EPILOG = """
dsprep plan tiers x.h5 --capacity 64GB -M 32 --compute 50ms --pfs 1GB/s -E 9

dsprep plan tiers x.h5 --capacity 1.6TB --nodes 64 --ranks-per-node 8 -M 2 \\
    --compute 12ms --pfs 400GB/s --epochs 90 --html plan.html

Exit status: 0 done, 1 bad data, 2 wrong usage.
"""


@opt.command(EPILOG)
def tiers(
    data: Annotated[list[str], opt.argument("DATA...", "The dataset, or its sidecar.")],
    capacity: Annotated[
        str, typer.Option(metavar="SIZE", help="Of a node's fast tier that the job may use.")
    ],
    batch_size: Annotated[
        int,
        typer.Option("--batch-size", "-M", metavar="N", min=1, help="Samples per step and rank."),
    ],
    compute: Annotated[
        str, typer.Option(metavar="TIME", help="What a step takes without I/O, such as 12ms.")
    ],
    pfs: Annotated[
        str,
        typer.Option(
            metavar="RATE",
            help="Bandwidth of the capacity tier: 400GB/s, or what --storage of plan read takes.",
        ),
    ],
    epochs: Annotated[
        int,
        typer.Option("--epochs", "-E", metavar="N", min=1, help="Of the training: S."),
    ],
    nodes: int = opt.value("N", "How many there are.", default=1, min=1),
    ranks_per_node: int = opt.value("N", "Processes that read.", default=1, min=1),
    fast: str | None = opt.value("RATE", "Bandwidth of the fast tiers of all nodes together."),
    subset: opt.Subset = None,
    sidecar: opt.At = None,
    json: opt.Json = False,
    html: Path | None = opt.value("FILE", "Write a page for a browser, with a plot."),
    overwrite: bool = opt.switch("Replace FILE.", "--overwrite"),
) -> None:
    """Plan mini-epoch training: parts that fit the fast tier, repeats that hide the slow one.

    Nothing but the sidecar is read. The model is that of Xu et al. (PDSW 2021), Eq. 1 with MIN in
    place of the MAX that is printed there, which contradicts the results of the paper.
    """
    from dsprep.core.units import parse_nbytes, parse_rate, parse_seconds
    from dsprep.planning.published import parse_storage
    from dsprep.verbs import tiers as verb

    settings = verb.Tiers(
        capacity=parse_nbytes(capacity),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        batch_size=batch_size,
        compute=parse_seconds(compute),
        pfs=parse_rate(pfs) if pfs[:1].isdigit() else parse_storage(pfs).copy_rate(nodes),
        fast=None if fast is None else parse_rate(fast),
        epochs=epochs,
    )
    check_page(html, overwrite)
    plan = verb.plan_tiers(data, settings, sidecar=sidecar, subset=subset)
    if json:
        print_json(plan_json(plan))
    else:
        print_rows(rows(plan))
        for warning in plan.warnings:
            note(warning)
    if html is not None:
        from dsprep.bench.report.tier_plan import html as page

        write(html, page(plan, Path(data[0]).name, dict(rows(plan))))


def rows(plan: TierPlan) -> list[tuple[str, str]]:
    """Return a plan for a person: headings and what they say."""
    from dsprep.bench.report.tables import show_seconds
    from dsprep.core.units import show_binary_nbytes, show_nbytes

    def rate(value: float) -> str:
        return f"{show_nbytes(value)}/s"

    job, before, after = plan.tiers, plan.before, plan.after
    nodes = f" on each of {job.nodes:,} nodes, {plan.ranks:,} ranks" if job.nodes > 1 else ""
    if plan.fits:
        parts, reason = "it is copied once, and stays", "nothing is drawn after that"
    else:
        parts = f"up to {show_nbytes(plan.largest)} a node, two at a time"
        twice = f" * {plan.copied:.4g} (copied)" if plan.copied >= 1.0005 else ""
        reason = (
            f"more than EB1/B2 = {rate(plan.served)}{twice} / {rate(job.pfs)} = {plan.knee:.4g}"
        )
    steps = f"{plan.steps:,.0f}" if plan.steps >= 10 else f"{plan.steps:.3g}"
    fewest, largest = plan.passes_per_sample
    times = f"{fewest:,}" if fewest == largest else f"{fewest:,} to {largest:,}"
    seconds, copies = plan.copy_seconds, "all" if plan.fits else "a mini-epoch"
    copied = show_time(seconds) if seconds >= 100 else show_seconds(seconds)
    total = f"{plan.samples:,} samples in {plan.groups:,} groups, {show_nbytes(plan.nbytes)}"
    room = f"{show_binary_nbytes(job.capacity)}{nodes}"
    return [
        ("verdict", plan.verdict),
        ("dataset", total),
        ("fast tier", f"{room}: the dataset {'fits' if plan.fits else 'does not fit'}"),
        ("consumed", f"{rate(plan.consumed)} where training never waits (EB1)"),
        ("mini-epochs", f"{plan.mini_epochs:,} (nm): {parts}"),
        ("repeats", f"{plan.repeats:,} (rf): {reason}"),
        ("passes", f"{plan.passes:,} (S nm) of {steps} steps; S/rf = {plan.outer_epochs:.3g}"),
        ("each sample", f"comes {times} times in {job.epochs:,} epochs (S)"),
        ("drawn", f"{rate(before.drawn)} -> {rate(after.drawn)} from the capacity tier (EB2)"),
        ("throughput", f"{rate(before.throughput)} -> {rate(after.throughput)} of training"),
        ("stalled", f"{before.stalled:.0%} -> {after.stalled:.0%} of the time"),
        ("copying", f"{copied} for {copies}; the first pass takes at least as long"),
        ("Reader", ", ".join(f"{name}={value!r}" for name, value in plan.reader.items())),
    ]


def plan_json(plan: TierPlan) -> dict[str, Any]:
    """Return a plan as JSON."""
    from dataclasses import asdict

    names = ("samples", "sample_nbytes", "groups", "ranks", "fits", "mini_epochs", "largest")
    more = ("consumed", "copied", "knee", "repeats", "outer_epochs", "passes", "steps")
    return {
        "asked": asdict(plan.tiers),
        **{name: getattr(plan, name) for name in (*names, *more, "copy_seconds")},
        "seen": {
            "least": plan.passes_per_sample[0],
            "most": plan.passes_per_sample[1],
            "never": plan.never_seen,
        },
        **{name: asdict(getattr(plan, name)) for name in ("before", "after")},
        "verdict": plan.verdict,
        "curve": [asdict(point) for point in plan.curve],
        "reader": plan.reader,
        "warnings": list(plan.warnings),
    }
