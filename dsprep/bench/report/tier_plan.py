"""A plan of two tiers as a page: what training gets and draws, over the repeating factor."""

from __future__ import annotations

import math
from collections.abc import Mapping

from dsprep import __version__
from dsprep.bench.report.page import document, section
from dsprep.bench.report.plots import ABOVE, BELOW, LEFT, RIGHT, round_up, stroke, svg, text
from dsprep.core.units import show_nbytes
from dsprep.verbs.tiers import Point, TierPlan

HEIGHT = 360
"""Pixels of the plot."""

BASE = HEIGHT - BELOW - 18
"""Where its axis is, in pixels from above."""

TICKS = 12
"""Labels below the axis, at most about."""

STEPS = 160
"""Points of a curve."""

CURVES = {"got": "training gets", "drawn": "drawn from the capacity tier"}
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
    title = f"Two tiers for {name}"
    head = f'<header>\n<p class="eyebrow">dsprep plan tiers</p>\n<h1>{text(title)}</h1>\n</header>'
    warnings = "".join(f"<li>{text(words)}</li>" for words in plan.warnings)
    rows = "".join(
        f'<div class="whole"><dt>{text(k)}</dt><dd>{text(v)}</dd></div>' for k, v in facts.items()
    )
    parts = [
        head,
        section("Plan", f'<dl class="grid">{rows}</dl>'),
        section("Warnings", warnings and f'<ul class="notes">{warnings}</ul>'),
        section("Bytes per second of all nodes, by repeating factor", _figure(plan)),
        section("Figures", _table(plan)),
    ]
    return document(f"{title} - dsprep plan", parts, f"dsprep {__version__}")


def _rate(value: float) -> str:
    return f"{show_nbytes(value)}/s"


def _figure(plan: TierPlan) -> str:
    """Return the plot: both curves, the knee, and the repeating factor of the plan."""
    top = round_up(max(plan.at(plan.top).throughput, plan.before.throughput))
    factors = [plan.top ** (i / STEPS) for i in range(STEPS + 1)]
    lines: dict[str, list[str]] = {"got": [], "drawn": []}
    for point in map(plan.at, sorted({*factors, max(1.0, plan.knee), plan.repeats})):
        at = f"{_x(plan, point.repeats):.3f}"
        lines["got"].append(f"{at},{_y(point.throughput, top):.1f}")
        lines["drawn"].append(f"{at},{_y(point.drawn, top):.1f}")
    drawn = "".join(
        f'<polyline class="{kind}" points="{" ".join(points)}" vector-effect="non-scaling-stroke"/>'
        for kind, points in lines.items()
    )
    plot = (
        f'<svg x="0" y="0" width="100%" height="{HEIGHT}" viewBox="0 0 100 {HEIGHT}" '
        f'preserveAspectRatio="none">{drawn}</svg>'
    )
    parts = [*_axes(plan, top), plot, *_marks(plan, top)]
    says = (
        f"stall-free beyond rf = {plan.knee:.4g}; rf = {plan.repeats:,} is planned: training gets "
        f"{_rate(plan.after.throughput)}, of which {_rate(plan.after.drawn)} are drawn"
    )
    title = "Bytes per second over the repeating factor"
    legend = "".join(f'<li class="{kind}">{words}</li>' for kind, words in CURVES.items())
    figure = svg("tiers", title, text(says), HEIGHT, parts)
    return (
        f'<figure><ul class="legend">{legend}</ul>{figure}'
        f"<figcaption>{text(says[0].upper() + says[1:])}. {RULE}</figcaption></figure>"
    )


def _x(plan: TierPlan, repeats: float) -> float:
    """Return where a repeating factor is, in percent of the width."""
    share = math.log2(min(max(1.0, repeats), plan.top)) / math.log2(plan.top)
    return LEFT + (RIGHT - LEFT) * share


def _y(value: float, top: float) -> float:
    """Return where a rate is, in pixels."""
    return BASE - (BASE - ABOVE) * min(1.0, value / top)


def _axes(plan: TierPlan, top: float) -> list[str]:
    """Return lines of rates, labels of both axes, and their titles."""
    parts = []
    for share in (0, 0.5, 1):
        high = _y(share * top, top)
        words = _rate(share * top) if share else "0"
        parts.append(stroke("grid", f"{LEFT}%", f"{RIGHT}%", high, high))
        parts.append(_tick(f"{LEFT - 1}%", high + 4, words, "end"))
    powers = plan.top.bit_length() - 1
    for power in range(0, powers + 1, -(-powers // TICKS)):
        at = f"{_x(plan, 1 << power):.2f}%"
        parts.append(stroke("grid", at, at, BASE, BASE + 5))
        parts.append(_tick(at, BASE + 20, f"{1 << power:,}"))
    title = "repeating factor rf: passes of each mini-epoch in turn"
    return [*parts, _tick(f"{(LEFT + RIGHT) / 2}%", HEIGHT - 6, title)]


def _tick(x: str, y: float, words: str, anchor: str = "middle") -> str:
    return f'<text class="tick" x="{x}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'


def _marks(plan: TierPlan, top: float) -> list[str]:
    """Return the knee as a dashed line, and what the plan takes as points on both curves."""
    after, at = plan.after, f"{_x(plan, plan.repeats):.2f}%"
    side, shift = ("end", -10) if plan.repeats > plan.top / 8 else ("start", 10)
    parts, words = [], f"rf = {plan.repeats:,}"
    if plan.knee > 1 and not plan.fits:
        knee = f"{_x(plan, plan.knee):.2f}%"
        parts, words = [stroke("knee", knee, knee, ABOVE, BASE)], f"knee {plan.knee:.4g}, {words}"
    for kind, value in (("got", after.throughput), ("drawn", after.drawn)):
        y = _y(value, top)
        parts.append(f'<circle class="mark {kind}" cx="{at}" cy="{y:.1f}" r="5"/>')
        parts.append(
            f'<text class="kneename {kind}" x="{at}" dx="{shift}" y="{y - 9:.1f}" '
            f'text-anchor="{side}">{_rate(value)}</text>'
        )
    title = f'<text class="kneename" x="{at}" y="{ABOVE - 12}" text-anchor="middle">{words}</text>'
    return [*parts, title]


def _table(plan: TierPlan) -> str:
    """Return the points of the curves in numbers."""
    names = ("rf", "training gets", "drawn", "stalled", "S/rf")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    rows = "\n".join(_row(plan, point) for point in plan.curve)
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Figures"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>"
    )


def _row(plan: TierPlan, point: Point) -> str:
    own = point.repeats == plan.repeats
    mark = ' <span class="tag">plan</span>' if own else ""
    cells = (
        _rate(point.throughput),
        _rate(point.drawn),
        f"{point.stalled:.0%}",
        f"{plan.tiers.epochs / point.repeats:.3g}",
    )
    kind = ' class="own"' if own else ""
    words = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr{kind}><th scope="row">{point.repeats:,}{mark}</th>{words}</tr>'
