"""A plan of two tiers as a page: what training gets and draws, over the repeating factor."""

from __future__ import annotations

from collections.abc import Mapping

from dsprep.bench.report.model import BenchReport, Measure, Point, Row, Sweep
from dsprep.bench.report.page import planned, section, words_table
from dsprep.bench.report.plots import curves
from dsprep.bench.strategies import LIMIT
from dsprep.core.units import show_nbytes
from dsprep.verbs.tiers import TierPlan

GOT, DRAWN = "training gets", "drawn from the capacity tier"
RULE = "Model, not a measurement: Xu et al., PDSW 2021, Eq. 1 with MIN in place of the printed MAX."


def html(plan: TierPlan, name: str, facts: Mapping[str, str]) -> str:
    """Return the page of a plan.

    Parameters
    ----------
    name
        Of the dataset.
    facts
        What the command prints, by heading.
    """
    after = plan.after
    rule = (
        f"Stall-free beyond rf = {plan.knee:.4g}; rf = {plan.repeats:,} is planned: {GOT} "
        f"{_rate(after.throughput)}, of which {_rate(after.drawn)} are drawn. The dashed line is "
        f"the bandwidth of the capacity tier. {RULE}"
    )
    lines: list[tuple[str, ...]] = [("rf", "training gets", "drawn", "stalled", "S/rf")]
    lines += [
        (
            f"{p.repeats:,}{' (plan)' * (p.repeats == plan.repeats)}",
            *map(_rate, (p.throughput, p.drawn)),
            f"{p.stalled:.0%}",
            f"{plan.tiers.epochs / p.repeats:.3g}",
        )
        for p in plan.curve
    ]
    parts = [
        section("Bytes per second of all nodes, by repeating factor rf", _curves(plan)),
        section("Figures", words_table(lines)),
    ]
    notes = (rule, *plan.warnings)
    return planned("dsprep plan tiers", f"Two tiers for {name}", facts, notes, parts)


def _rate(value: float) -> str:
    return f"{show_nbytes(value)}/s"


def _curves(plan: TierPlan) -> str:
    """Return a plot of what training gets, and one of what is drawn."""
    points = []
    for p in plan.curve:
        values = {GOT: p.throughput, DRAWN: p.drawn, LIMIT: plan.tiers.pfs}
        rates = {name: value / 1e9 for name, value in values.items()}
        measures = {n: {"gb_per_second": Measure(v, v, v)} for n, v in rates.items()}
        points.append(Point(f"{p.repeats:g}", tuple(Row(n, "", m) for n, m in measures.items())))
    sweep = Sweep("repeats", tuple(points), {GOT: str(plan.repeats), DRAWN: str(plan.repeats)})
    return curves(BenchReport("", "", {}, {}, {}, (), sweep))
