"""Figures as inline SVG, from text that is escaped already.

Bars are placed in percent of the width and have no ``viewBox``, so that a narrow window makes them
shorter but leaves their text as large as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsprep.bench.report.model import Measure
from dsprep.bench.report.sweeping import standing

ROW = 46
"""Pixels of a bar with its label."""
PARTS = (("compute", "compute"), ("exposed", "exposed I/O"), ("skew", "waiting for ranks"))


@dataclass(frozen=True)
class Bar:
    """One bar.

    Attributes
    ----------
    label, detail
        Text left and right above it.
    measure
        Its length, and its whisker.
    kind
        ``limit``, ``own``, ``other`` or ``idle`` (reads nothing, and sets no scale): its colour.
    share
        Percent of the limit, if known.
    """

    label: str
    measure: Measure
    detail: str
    kind: str
    share: float | None = None


@dataclass(frozen=True)
class Stack:
    """An epoch: seconds of compute, exposed I/O and skew, and of all."""

    label: str
    parts: tuple[float, ...]
    total: float
    detail: str


@dataclass(frozen=True)
class Curve:
    """What a strategy gave at each value of a sweep, at `places` along the axis."""

    label: str
    ticks: tuple[str, ...]
    places: tuple[float, ...]
    values: tuple[Measure | None, ...]
    limit: tuple[Measure | None, ...]
    knee: str


def _finite(value: float) -> float:
    return value if math.isfinite(value) and value > 0 else 0.0


def _percent(value: float, top: float) -> str:
    return f"{100 * min(1.0, _finite(value) / top):.2f}%"


def _svg(key: str, title: str, describes: str, height: int, body: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="100%" height="{height}" role="img" '
        f'aria-labelledby="{key}-t {key}-d"><title id="{key}-t">{title}</title>'
        f'<desc id="{key}-d">{describes}</desc>\n{body}\n</svg>'
    )


def bars(rows: Sequence[Bar], caption: str) -> str:
    """Return horizontal bars; the limit's end goes through all of them as the line of 100 %."""
    if not rows:
        return ""
    scale = [b for b in rows if b.kind != "idle"] or rows
    top = max(_finite(b.measure.most) for b in scale) or 1.0
    limit = next((b for b in rows if b.kind == "limit"), None)
    height = ROW * len(rows)
    of = "" if limit is None else f'<tspan class="more"> of {limit.label}</tspan>'
    parts = []
    for i, bar in enumerate(rows):
        y = ROW * i
        share = ""
        if bar.share is not None and limit is not None and bar.kind != "limit":
            share = f'<tspan class="dim" dx="8">{_share(bar.share)} %{of}</tspan>'
        if bar.kind == "limit":
            share = '<tspan class="dim" dx="8">100 %</tspan>'
        least, most = (_percent(v, top) for v in (bar.measure.least, bar.measure.most))
        parts.append(
            f'<g class="{bar.kind}"><text x="0" y="{y + 16}" class="name">{bar.label}</text>'
            f'<text x="100%" y="{y + 16}" text-anchor="end">{bar.detail}{share}</text>'
            f'<rect class="track" x="0" y="{y + 23}" width="100%" height="12" rx="3"/>'
            f'<rect class="bar" x="0" y="{y + 23}" width="{_percent(bar.measure.value, top)}" '
            f'height="12" rx="3"/>{_whisker(least, most, y + 29)}</g>'
        )
    if limit is not None:
        x = _percent(limit.measure.value, top)
        for i in range(len(rows)):
            y = ROW * i + 20
            if rows[i].kind != "limit":
                parts.append(f'<line class="mark" x1="{x}" x2="{x}" y1="{y}" y2="{y + 18}"/>')
    says = "; ".join(f"{b.label} {b.detail}" for b in rows)
    line = f" The dashed line is {limit.label}, 100 %." if limit is not None else ""
    figure = _svg("bars", caption, says, height, "\n".join(parts))
    return f"<figure>{figure}<figcaption>{caption}.{line}</figcaption></figure>"


def _share(share: float) -> str:
    return f"{share:.0f}" if share >= 9.95 else f"{share:.1f}"


def _whisker(least: str, most: str, y: int) -> str:
    if least == most:
        return ""
    return "".join(
        f'<line class="whisker" x1="{a}" x2="{b}" y1="{y + up}" y2="{y + down}"/>'
        for a, b, up, down in (
            (least, most, 0, 0),
            (least, least, -4, 4),
            (most, most, -4, 4),
        )
    )


def stacks(rows: Sequence[Stack]) -> str:
    """Return stacked bars of epochs."""
    top = max((max(_finite(s.total), sum(map(_finite, s.parts))) for s in rows), default=0) or 1.0
    parts = []
    for i, stack in enumerate(rows):
        y, at = ROW * i, 0.0
        drawn = [f'<rect class="track" x="0" y="{y + 23}" width="100%" height="12" rx="3"/>']
        for (kind, _), value in zip(PARTS, stack.parts, strict=True):
            if _finite(value):
                drawn.append(
                    f'<rect class="{kind}" x="{_percent(at, top)}" y="{y + 23}" '
                    f'width="{_percent(value, top)}" height="12"/>'
                )
                at += value
        parts.append(
            f'<g><text x="0" y="{y + 16}" class="name">{stack.label}</text>'
            f'<text x="100%" y="{y + 16}" text-anchor="end" class="wide">{stack.detail}</text>'
            f'<text x="100%" y="{y + 16}" text-anchor="end" class="narrow">'
            f"{stack.detail.partition(':')[0]}</text>{''.join(drawn)}</g>"
        )
    present = [any(_finite(s.parts[k]) for s in rows) for k in range(len(PARTS))]
    legend = "".join(
        f'<li class="{kind}">{words}</li>'
        for (kind, words), there in zip(PARTS, present, strict=True)
        if there
    )
    says = "; ".join(f"{s.label} {s.detail}" for s in rows)
    figure = _svg("epochs", "Where an epoch goes", says, ROW * len(rows), "\n".join(parts))
    return f'<figure><ul class="legend">{legend}</ul>{figure}</figure>'


# --- curves ----------------------------------------------------------------------------------

HEIGHT, ABOVE, BELOW = 250, 26, 34
"""Pixels of a plot of curves, and of its margins."""
LEFT, RIGHT = 15.0, 94.0
"""Where the first and the last point stand, in percent of the width."""


def place(value: str, i: int) -> float:
    """Return where a value stands: its binary logarithm, or its number if it is none."""
    at = standing(value)
    return math.log2(at) if at else float(i)


def curves(rows: Sequence[Curve], parameter: str, unit: str, show: Callable[[float], str]) -> str:
    """Return a plot for each strategy, all on the same scale, side by side where there is room."""
    known = [m for c in rows for m in (*c.values, *c.limit) if m is not None]
    top = _round_up(max((_finite(m.most) for m in known), default=0.0) or 1.0)
    figures = [
        _curve(c, f"curve{i}", top, parameter, unit, show)
        for i, c in enumerate(rows)
        if any(v is not None for v in c.values)
    ]
    return f'<div class="plots">{"".join(figures)}</div>' if figures else ""


def _round_up(value: float) -> float:
    """Return a round number that is not smaller."""
    unit = 10.0 ** math.floor(math.log10(value))
    return next(f * unit for f in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if f * unit >= value)


def _curve(
    curve: Curve, key: str, top: float, parameter: str, unit: str, show: Callable[[float], str]
) -> str:
    first, last = min(curve.places), max(curve.places)

    def x(i: int) -> float:
        share = (curve.places[i] - first) / (last - first) if last > first else 0.5
        return LEFT + share * (RIGHT - LEFT)

    def y(value: float) -> float:
        return HEIGHT - BELOW - (HEIGHT - BELOW - ABOVE) * min(1.0, _finite(value) / top)

    base = HEIGHT - BELOW
    parts = []
    for share in (0, 0.5, 1):
        high = y(share * top)
        words = f"{show(share * top)}{f' {unit}' if share == 1 and unit != 's' else ''}"
        parts.append(f'<line class="grid" x1="0" x2="100%" y1="{high:.1f}" y2="{high:.1f}"/>')
        parts.append(
            f'<text class="tick" x="0" y="{high - 5:.1f}">{words if share else "0"}</text>'
        )
    every = -(-len(curve.ticks) // 6)
    order = sorted(range(len(curve.ticks)), key=lambda i: curve.places[i])
    for n, i in enumerate(order):
        if n % every == 0 or curve.ticks[i] == curve.knee:
            parts.append(
                f'<text class="tick" x="{x(i):.2f}%" y="{base + 18}" text-anchor="middle">'
                f"{curve.ticks[i]}</text>"
            )
    lines = [("limit", curve.limit), ("line", curve.values)]
    paths = "".join(_path(kind, [(x(i), v) for i in order if (v := values[i])], y)
                    for kind, values in lines)  # fmt: skip
    parts.append(
        f'<svg x="0" y="0" width="100%" height="{HEIGHT}" viewBox="0 0 100 {HEIGHT}" '
        f'preserveAspectRatio="none">{paths}</svg>'
    )
    for i in order:
        m = curve.values[i]
        if m is None:
            continue
        at, is_knee = f"{x(i):.2f}%", bool(curve.knee) and curve.ticks[i] == curve.knee
        if is_knee:
            parts.append(
                f'<line class="knee" x1="{at}" x2="{at}" y1="{y(m.value):.1f}" y2="{base}"/>'
                f'<text class="kneename" x="{at}" y="{y(m.value) - 14:.1f}" '
                'text-anchor="middle">knee</text>'
            )
        parts.append(
            f'<line class="whisker" x1="{at}" x2="{at}" y1="{y(m.least):.1f}" '
            f'y2="{y(m.most):.1f}"/><circle class="{"knee" if is_knee else "dot"}" cx="{at}" '
            f'cy="{y(m.value):.1f}" r="{6 if is_knee else 3.5}"/>'
        )
    says = ", ".join(
        f"{curve.ticks[i]}: {show(m.value)}" for i in order if (m := curve.values[i]) is not None
    )
    limit = " Dashed: the limit." if any(curve.limit) else ""
    figure = _svg(key, f"{curve.label} over {parameter}, {unit}", says, HEIGHT, "\n".join(parts))
    return (
        f"<figure><h3>{curve.label}</h3>{figure}"
        f"<figcaption>{unit} over {parameter}.{limit}</figcaption></figure>"
    )


def _path(kind: str, points: Sequence[tuple[float, Measure]], y: Callable[[float], float]) -> str:
    if len(points) < 2:
        return ""
    line = " ".join(f"{x:.2f},{y(m.value):.1f}" for x, m in points)
    return f'<polyline class="{kind}" points="{line}" vector-effect="non-scaling-stroke"/>'
