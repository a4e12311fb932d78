"""``dsprep plan tiers``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsprep.cli import options as opt
from dsprep.cli.report import note, print_json, print_rows

if TYPE_CHECKING:
    from dsprep.verbs.tiers import TierPlan

EPILOG = """
dsprep plan tiers x.h5 --capacity 64GB -M 32 --compute 50ms --pfs 1GB/s -E 9

dsprep plan tiers x.h5 --capacity 1TB -M 2 --compute 9ms --pfs 9GB/s -E 9

Exit status: 0 done, 1 bad data, 2 wrong usage.
"""


def tiers(
    data: Annotated[str, opt.argument("DATA", "A dataset with a sidecar, or the sidecar.")],
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
        typer.Option(metavar="RATE", help="Bandwidth of the capacity tier, such as 400GB/s."),
    ],
    epochs: Annotated[
        int,
        typer.Option("--epochs", "-E", metavar="N", min=1, help="Of the training: S."),
    ],
    nodes: int = opt.value("N", "How many there are.", default=1, min=1),
    ranks_per_node: int = opt.value("N", "Processes that read.", default=1, min=1),
    fast: str | None = opt.value("RATE", "Bandwidth of the fast tiers of all nodes together."),
    sidecar: opt.At = None,
    json: opt.Json = False,
) -> None:
    """Plan mini-epoch training: parts that fit the fast tier, repeats that hide the slow one.

    Nothing but the sidecar is read.
    """
    from dsprep.verbs import tiers as verb
    from dsprep.writing.plan import parse_nbytes, parse_rate, parse_seconds

    asked = verb.Tiers(
        capacity=parse_nbytes(capacity),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        batch_size=batch_size,
        compute=parse_seconds(compute),
        pfs=parse_rate(pfs),
        fast=None if fast is None else parse_rate(fast),
        passes=epochs,
    )
    plan = verb.plan_tiers(data, asked, sidecar=sidecar)
    if json:
        print_json(plan_json(plan))
        return
    print_plan(plan)
    for warning in plan.warnings:
        note(warning)


def print_plan(plan: TierPlan) -> None:
    """Print a plan for a person."""
    from dsprep.layout.describe import show_nbytes

    def change(before: float, after: float) -> str:
        return f"{show_nbytes(before)}/s -> {show_nbytes(after)}/s"

    total = show_nbytes(plan.samples * plan.sample_nbytes)
    if plan.fits:
        parts = "1: the whole dataset fits, and is copied once"
    else:
        parts = f"{plan.mini_epochs:,}: two of up to {show_nbytes(plan.largest)} a node fit"
    before, after = plan.stalled
    seen = f"{plan.repeats:,} in turn, {plan.epochs:,.3g} times"
    print_rows(
        [
            ("dataset", f"{plan.samples:,} samples in {plan.groups:,} groups, {total}"),
            ("consumed", f"{show_nbytes(plan.consumed)}/s, where training never waits"),
            ("mini-epochs", parts),
            ("repeats", f"{plan.repeats:,}"),
            ("passes", seen),
            ("drawn", f"{change(*plan.drawn)} from the capacity tier"),
            ("training gets", change(*plan.throughput)),
            ("waiting", f"{before:.0%} -> {after:.0%} of the time"),
            ("Reader", f"mini_epochs={plan.mini_epochs}, repeats={plan.repeats}"),
        ]
    )


def plan_json(plan: TierPlan) -> dict[str, Any]:
    """Return a plan as JSON."""
    from dataclasses import asdict

    names = ("samples", "sample_nbytes", "groups", "fits", "mini_epochs", "largest", "repeats")
    pairs = ("drawn", "throughput", "stalled")
    return {
        "asked": asdict(plan.tiers),
        **{name: getattr(plan, name) for name in names},
        "consumed": plan.consumed,
        "epochs": plan.epochs,
        **{n: dict(zip(("before", "after"), getattr(plan, n), strict=True)) for n in pairs},
        "warnings": list(plan.warnings),
    }
