"""Figures as inline SVG.

Bars are placed in percent of the width and have no ``viewBox``, so that a narrow window makes them
shorter but leaves their text as large as it was.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

from dsprep.bench.report.model import MEASURES, Measure, Report, Row, Sweep
from dsprep.bench.report.sweeping import standing
from dsprep.bench.report.tables import show_seconds, show_spread, show_value
from dsprep.bench.strategies import DUMMY, LIMIT
from dsprep.core.escaping import printable

LONGEST = 2000
"""Characters of a fact or remark."""

ROW = 46
"""Pixels of a bar with its label."""
PARTS = (("compute", "compute"), ("exposed", "exposed I/O"), ("skew", "waiting for ranks"))

HEIGHT, ABOVE, BELOW = 250, 26, 34
"""Pixels of a plot of curves, and of its margins."""
LEFT, RIGHT = 15.0, 94.0
"""Where the first and the last point stand, in percent of the width."""

_CAPTIONS = {
    "samples_per_second": "Samples per second, of all ranks",
    "gb_per_second": "GB of values per second (1e9 bytes)",
}

Points: TypeAlias = Sequence[Measure | None]


def text(value: object) -> str:
    """Return foreign text for the page: escaped, cut if very long, nothing that steers."""
    told = str(value)
    told = told if len(told) <= LONGEST else told[: LONGEST - 1] + "..."
    return html.escape(printable(told))


def drawn(report: Report) -> str:
    """Return the measure that is drawn."""
    order = ("samples_per_second", "gb_per_second", "epoch_seconds")
    taken = {name for row in report.all_rows for name in row.measures}
    return next((m for m in order if m in taken), order[0])


def _finite(value: float) -> float:
    return value if math.isfinite(value) and value > 0 else 0.0


def _percent(value: float, top: float) -> str:
    return f"{100 * min(1.0, _finite(value) / top):.2f}%"


def _svg(key: str, title: str, describes: str, height: int, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="100%" height="{height}" role="img" '
        f'aria-labelledby="{key}-t {key}-d"><title id="{key}-t">{title}</title>'
        f'<desc id="{key}-d">{describes}</desc>\n{body}\n</svg>'
    )


# --- bars ------------------------------------------------------------------------------------


def bars(report: Report) -> str:
    """Return a bar for each row; the limit's end goes through all of them as the line of 100 %."""
    name = drawn(report)
    unit = MEASURES[name]
    first = LIMIT if unit.better > 0 else ""
    rows = [r for r in report.rows if name in r.measures and not r.problems]
    rows.sort(key=lambda r: (r.name != first, -unit.better * r.measures[name].value))
    if not rows:
        return ""
    better = "more" if unit.better > 0 else "less"
    words = _CAPTIONS.get(name) or f"{unit.unit} {unit.words}"
    caption = text(f"{words}; {better} is better")
    scale = [r for r in rows if r.name != DUMMY or r.name == first] or rows  # it reads nothing
    top = max(_finite(r.measures[name].most) for r in scale) or 1.0
    limit = rows[0] if rows[0].name == first else None
    parts = [_bar(row, name, ROW * i, top, limit) for i, row in enumerate(rows)]
    if limit is not None:
        x = _percent(limit.measures[name].value, top)
        parts += [
            f'<line class="mark" x1="{x}" x2="{x}" y1="{y}" y2="{y + 18}"/>'
            for y in range(ROW + 20, ROW * len(rows), ROW)
        ]
    says = "; ".join(f"{text(r.name)} {_detail(name, r.measures[name])}" for r in rows)
    line = "" if limit is None else f" The dashed line is {text(limit.name)}, 100 %."
    figure = _svg("bars", caption, says, ROW * len(rows), parts)
    return f"<figure>{figure}<figcaption>{caption}.{line}</figcaption></figure>"


def _detail(name: str, m: Measure) -> str:
    return text(" ".join(filter(None, [show_value(name, m.value), show_spread(m)])))


def _bar(row: Row, name: str, y: int, top: float, limit: Row | None) -> str:
    m, share = row.measures[name], ""
    percent = row.value("limit_percent")
    kind = {DUMMY: "idle", "dsprep": "own"}.get(row.name, "other")
    if row is limit:
        kind, share = "limit", '<tspan class="dim" dx="8">100 %</tspan>'
    elif percent is not None and limit is not None:
        of = f'<tspan class="more"> of {text(limit.name)}</tspan>'
        share = f'<tspan class="dim" dx="8">{show_value("limit_percent", percent)} %{of}</tspan>'
    least, most = (_percent(v, top) for v in (m.least, m.most))
    whisker = [] if least == most else [(least, most, 0), (least, least, 4), (most, most, 4)]
    return (
        f'<g class="{kind}"><text x="0" y="{y + 16}" class="name">{text(row.name)}</text>'
        f'<text x="100%" y="{y + 16}" text-anchor="end">{_detail(name, m)}{share}</text>'
        f'<rect class="track" x="0" y="{y + 23}" width="100%" height="12" rx="3"/>'
        f'<rect class="bar" x="0" y="{y + 23}" width="{_percent(m.value, top)}" '
        'height="12" rx="3"/>'
        + "".join(
            f'<line class="whisker" x1="{a}" x2="{b}" y1="{y + 29 - h}" y2="{y + 29 + h}"/>'
            for a, b, h in whisker
        )
        + "</g>"
    )


def epochs(rows: Sequence[Row]) -> str:
    """Return stacked bars of epochs, if there is more than waiting for data to tell apart."""
    known = [r for r in rows if r.value("epoch_seconds") is not None and not r.problems]
    times = [[r.value(f"{part}_seconds") or 0.0 for part, _ in PARTS] for r in known]
    if not any(compute or skew for compute, _, skew in times):
        return ""
    totals = [r.value("epoch_seconds") or 0.0 for r in known]
    longest = (max(_finite(e), sum(map(_finite, t))) for e, t in zip(totals, times, strict=True))
    top = max(longest, default=0) or 1.0
    parts, says = [], []
    for i, (row, seconds, total) in enumerate(zip(known, times, totals, strict=True)):
        y, at = ROW * i, 0.0
        pieces = [f'<rect class="track" x="0" y="{y + 23}" width="100%" height="12" rx="3"/>']
        for (kind, _), value in zip(PARTS, seconds, strict=True):
            if _finite(value):
                pieces.append(
                    f'<rect class="{kind}" x="{_percent(at, top)}" y="{y + 23}" '
                    f'width="{_percent(value, top)}" height="12"/>'
                )
                at += value
        words = zip(("compute", "exposed I/O", "skew"), seconds, strict=True)
        each = ", ".join(f"{word} {show_seconds(v)}" for word, v in words if v)
        detail = text(f"{show_seconds(total)}: {each}")
        says.append(f"{text(row.name)} {detail}")
        parts.append(
            f'<g><text x="0" y="{y + 16}" class="name">{text(row.name)}</text>'
            f'<text x="100%" y="{y + 16}" text-anchor="end" class="wide">{detail}</text>'
            f'<text x="100%" y="{y + 16}" text-anchor="end" class="narrow">'
            f"{detail.partition(':')[0]}</text>{''.join(pieces)}</g>"
        )
    legend = "".join(
        f'<li class="{kind}">{words}</li>'
        for k, (kind, words) in enumerate(PARTS)
        if any(_finite(t[k]) for t in times)
    )
    figure = _svg("epochs", "Where an epoch goes", "; ".join(says), ROW * len(known), parts)
    return f'<figure><ul class="legend">{legend}</ul>{figure}</figure>'


# --- curves ----------------------------------------------------------------------------------


def curves(report: Report) -> str:
    """Return a plot for each strategy of a sweep, all on the same scale; empty without one."""
    sweep = report.sweep
    if sweep is None:
        return ""
    name = drawn(report)
    limit = [_found(p.rows, LIMIT, name, problems=True) for p in sweep.points]
    names = list(dict.fromkeys(row.name for p in sweep.points for row in p.rows))
    lines = {
        strategy: [_found(p.rows, strategy, name) for p in sweep.points]
        for strategy in names
        if strategy != LIMIT or names == [LIMIT]
    }
    known = [m for values in (*lines.values(), limit) for m in values if m is not None and lines]
    top = _round_up(max((_finite(m.most) for m in known), default=0.0) or 1.0)
    figures = [
        _curve(sweep, strategy, values, limit, name, f"curve{i}", top)
        for i, (strategy, values) in enumerate(lines.items())
        if any(v is not None for v in values)
    ]
    return f'<div class="plots">{"".join(figures)}</div>' if figures else ""


def _found(rows: Sequence[Row], strategy: str, name: str, problems: bool = False) -> Measure | None:
    good = (r for r in rows if r.name == strategy and (problems or not r.problems))
    return next((r.measures.get(name) for r in good), None)


def _round_up(value: float) -> float:
    """Return a round number that is not smaller."""
    unit = 10.0 ** math.floor(math.log10(value))
    return next(f * unit for f in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if f * unit >= value)


def _curve(
    sweep: Sweep, strategy: str, values: Points, limit: Points, name: str, key: str, top: float
) -> str:
    """Return the plot of a strategy: values over the binary logarithm of what is swept."""
    at = [math.log2(s) if (s := standing(p.value)) else i for i, p in enumerate(sweep.points)]
    ticks, knee = [text(p.value) for p in sweep.points], text(sweep.knees.get(strategy, ""))
    order = sorted(range(len(at)), key=lambda i: at[i])
    first, last, base = min(at), max(at), HEIGHT - BELOW

    def x(i: int) -> float:
        return LEFT + ((at[i] - first) / (last - first) if last > first else 0.5) * (RIGHT - LEFT)

    def y(value: float) -> float:
        return base - (base - ABOVE) * min(1.0, _finite(value) / top)

    unit = text(MEASURES[name].unit)
    parts = _grid(name, unit, top, y)
    every = -(-len(ticks) // 6)
    parts += [
        f'<text class="tick" x="{x(i):.2f}%" y="{base + 18}" text-anchor="middle">{ticks[i]}</text>'
        for n, i in enumerate(order)
        if n % every == 0 or ticks[i] == knee
    ]
    paths = ""
    for kind, line in (("limit", limit), ("line", values)):
        points = [f"{x(i):.2f},{y(m.value):.1f}" for i in order if (m := line[i])]
        if len(points) > 1:
            paths += (
                f'<polyline class="{kind}" points="{" ".join(points)}" '
                'vector-effect="non-scaling-stroke"/>'
            )
    parts.append(
        f'<svg x="0" y="0" width="100%" height="{HEIGHT}" viewBox="0 0 100 {HEIGHT}" '
        f'preserveAspectRatio="none">{paths}</svg>'
    )
    for i in order:
        if (m := values[i]) is not None:
            parts.append(_point(f"{x(i):.2f}%", m, y, bool(knee) and ticks[i] == knee))
    shown = (f"{ticks[i]}: {show_value(name, m.value)}" for i in order if (m := values[i]))
    dashed = " Dashed: the limit." if any(limit) else ""
    label, parameter = text(strategy), text(sweep.parameter)
    figure = _svg(key, f"{label} over {parameter}, {unit}", ", ".join(shown), HEIGHT, parts)
    return (
        f"<figure><h3>{label}</h3>{figure}"
        f"<figcaption>{unit} over {parameter}.{dashed}</figcaption></figure>"
    )


def _grid(name: str, unit: str, top: float, y: Callable[[float], float]) -> list[str]:
    """Return three lines with what they stand for."""
    parts = []
    for share in (0, 0.5, 1):
        high = y(share * top)
        with_unit = f" {unit}" if share == 1 and unit != "s" else ""
        words = f"{show_value(name, share * top)}{with_unit}" if share else "0"
        parts.append(f'<line class="grid" x1="0" x2="100%" y1="{high:.1f}" y2="{high:.1f}"/>')
        parts.append(f'<text class="tick" x="0" y="{high - 5:.1f}">{words}</text>')
    return parts


def _point(at: str, m: Measure, y: Callable[[float], float], knee: bool) -> str:
    drawn = ""
    if knee:
        drawn = (
            f'<line class="knee" x1="{at}" x2="{at}" y1="{y(m.value):.1f}" y2="{HEIGHT - BELOW}"/>'
            f'<text class="kneename" x="{at}" y="{y(m.value) - 14:.1f}" '
            'text-anchor="middle">knee</text>'
        )
    return (
        f'{drawn}<line class="whisker" x1="{at}" x2="{at}" y1="{y(m.least):.1f}" '
        f'y2="{y(m.most):.1f}"/><circle class="{"knee" if knee else "dot"}" cx="{at}" '
        f'cy="{y(m.value):.1f}" r="{6 if knee else 3.5}"/>'
    )
