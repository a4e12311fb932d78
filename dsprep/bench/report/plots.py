"""Figures as inline SVG.

Bars are placed in percent of the width and have no ``viewBox``, so that a narrow window makes them
shorter but leaves their text as large as it was.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import TypeAlias

from dsprep.bench.report.model import MEASURES, BenchReport, Measure, Row, Sweep
from dsprep.bench.report.sweeping import standing
from dsprep.bench.report.tables import show, show_percent, show_seconds, show_value
from dsprep.bench.report.tiering import PAIRS
from dsprep.bench.strategies import DUMMY, LIMIT
from dsprep.core.escaping import printable

LONGEST = 2000
"""Characters of a fact or remark."""

ROW = 46
"""Pixels of a bar with its label."""
PARTS = {"compute": "compute", "exposed": "exposed I/O", "skew": "waiting for ranks"}

HEIGHT, ABOVE, BELOW = 250, 26, 34
"""Pixels of a plot of curves, and of its margins."""
LEFT, RIGHT = 15.0, 94.0
"""Where the first and the last point stand, in percent of the width."""

APART = 8.0
"""Percent of the width that labels of an axis are apart at least, on a narrow page too."""

_CAPTIONS = {
    "samples_per_second": "Samples per second, of all ranks",
    "gb_per_second": "GB of values per second (1e9 bytes)",
    "drawn_gb_per_second": "GB per second drawn from the capacity tier (1e9 bytes)",
}

Points: TypeAlias = Sequence[Measure | None]


def text(value: object) -> str:
    """Return foreign text for the page: escaped, cut if very long, nothing that steers."""
    words = str(value)
    words = words if len(words) <= LONGEST else words[: LONGEST - 1] + "..."
    return html.escape(printable(words))


def drawn(report: BenchReport) -> str:
    """Return the measure that is drawn."""
    order = ("samples_per_second", "gb_per_second", "epoch_seconds")
    return next((m for m in order if m in report.taken), order[0])


def _finite(value: float) -> float:
    return value if math.isfinite(value) and value > 0 else 0.0


def _percent(value: float, top: float) -> str:
    return f"{100 * min(1.0, _finite(value) / top):.2f}%"


def svg(key: str, title: str, describes: str, height: int, parts: Sequence[str]) -> str:
    """Return a figure that is as wide as there is room; `key` is that of no other one."""
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="100%" height="{height}" role="img" '
        f'aria-labelledby="{key}-t {key}-d"><title id="{key}-t">{title}</title>'
        f'<desc id="{key}-d">{describes}</desc>\n{body}\n</svg>'
    )


def stroke(kind: str, x1: str, x2: str, y1: float, y2: float) -> str:
    """Return a line of a class of the style sheet."""
    return f'<line class="{kind}" x1="{x1}" x2="{x2}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


# --- bars ------------------------------------------------------------------------------------


def _labelled(name: str, y: int, detail: str, rects: Sequence[tuple[str, float, float]]) -> str:
    """Return the label of a bar, what stands at its right end, and its track and rectangles.

    `rects` are classes, starts and widths, as shares of the width.
    """
    shapes = ""
    for kind, at, width in (("track", 0.0, 1.0), *rects):
        corners = "" if kind in PARTS else ' rx="3"'
        extent = f'x="{100 * at:.2f}%" y="{y + 23}" width="{100 * width:.2f}%" height="12"'
        shapes += f'<rect class="{kind}" {extent}{corners}/>'
    return f'<text x="0" y="{y + 16}" class="name">{text(name)}</text>{detail}{shapes}'


def _at_right(y: int, words: str, kind: str = "") -> str:
    shown = f' class="{kind}"' if kind else ""
    return f'<text x="100%" y="{y + 16}" text-anchor="end"{shown}>{words}</text>'


def bars(report: BenchReport) -> str:
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
    line = ""
    if limit is not None:
        line = f" The dashed line is {text(limit.name)}, 100 %."
        x = _percent(limit.measures[name].value, top)
        parts += [stroke("mark", x, x, y, y + 18) for y in range(ROW + 20, ROW * len(rows), ROW)]
    says = "; ".join(f"{text(r.name)} {text(show(name, r.measures[name]))}" for r in rows)
    figure = svg("bars", caption, says, ROW * len(rows), parts)
    return f"<figure>{figure}<figcaption>{caption}.{line}</figcaption></figure>"


def _bar(row: Row, name: str, y: int, top: float, limit: Row | None) -> str:
    m, share = row.measures[name], ""
    percent = row.value("limit_percent")
    kind = {DUMMY: "idle", "dsprep": "own"}.get(row.name, "other")
    if row is limit:
        kind, share = "limit", "100 %"
    elif percent is not None and limit is not None:
        of = f'<tspan class="more"> of {text(limit.name)}</tspan>'
        share = f"{show_percent(percent)} %{of}"
    share = share and f'<tspan class="dim" dx="8">{share}</tspan>'
    low, high = (_percent(v, top) for v in (m.least, m.most))
    whisker = [] if low == high else [(low, high, 0), (low, low, 4), (high, high, 4)]
    detail = _at_right(y, text(show(name, m)) + share)
    bar = _labelled(row.name, y, detail, [("bar", 0.0, min(1.0, _finite(m.value) / top))])
    lines = "".join(stroke("whisker", a, b, y + 29 - h, y + 29 + h) for a, b, h in whisker)
    return f'<g class="{kind}">{bar}{lines}</g>'


def epochs(rows: Sequence[Row]) -> str:
    """Return stacked bars of epochs, if steps do more than wait for data."""
    known = [r for r in rows if r.value("epoch_seconds") is not None and not r.problems]
    times = [{p: r.value(f"{p}_seconds") or 0.0 for p in PARTS} for r in known]
    if not any(t["compute"] or t["skew"] for t in times):
        return ""
    totals = [r.value("epoch_seconds") or 0.0 for r in known]
    sums = [sum(map(_finite, t.values())) for t in times]
    top = max(map(_finite, (*totals, *sums))) or 1.0
    parts, says = [], []
    for i, (row, seconds, total) in enumerate(zip(known, times, totals, strict=True)):
        at, rects = 0.0, []
        for kind, value in seconds.items():
            if _finite(value):
                rects.append((kind, at / top, min(1.0, value / top)))
                at += value
        words = {**PARTS, "skew": "skew"}
        each = ", ".join(f"{words[p]} {show_seconds(v)}" for p, v in seconds.items() if v)
        detail = text(f"{show_seconds(total)}: {each}")
        says.append(f"{text(row.name)} {detail}")
        right = _at_right(ROW * i, detail, "wide")
        right += _at_right(ROW * i, detail.partition(":")[0], "narrow")
        parts.append(f"<g>{_labelled(row.name, ROW * i, right, rects)}</g>")
    legend = "".join(
        f'<li class="{part}">{words}</li>'
        for part, words in PARTS.items()
        if any(_finite(t[part]) for t in times)
    )
    figure = svg("epochs", "Where an epoch goes", "; ".join(says), ROW * len(known), parts)
    return f'<figure><ul class="legend">{legend}</ul>{figure}</figure>'


# --- curves ----------------------------------------------------------------------------------


def curves(report: BenchReport) -> str:
    """Return a plot for each strategy of a sweep, all on the same scale; empty without one.

    Where a model expects something, it is plots of that, with the model as a dashed line.
    """
    sweep = report.sweep
    if sweep is None:
        return ""
    if PAIRS[0][1] in report.taken:
        return _beside_model(sweep)
    name = drawn(report)
    limit = _points(sweep, LIMIT, name, problems=True)
    lines = {
        strategy: _points(sweep, strategy, name)
        for strategy in sweep.strategies
        if strategy != LIMIT or sweep.strategies == (LIMIT,)
    }
    known = [m for values in (*lines.values(), limit) for m in values if m is not None and lines]
    top = round_up(max((_finite(m.most) for m in known), default=0.0) or 1.0)
    figures = [
        _Plot(sweep, name, f"curve{i}", top).draw(strategy, values, limit)
        for i, (strategy, values) in enumerate(lines.items())
        if any(v is not None for v in values)
    ]
    return f'<div class="plots">{"".join(figures)}</div>' if figures else ""


def _beside_model(sweep: Sweep) -> str:
    """Return a plot for each strategy and measure of which a model expects something."""
    figures = list[str]()
    for name, model in PAIRS:
        for strategy in sweep.strategies:
            values, expected = (_points(sweep, strategy, n) for n in (name, model))
            known = [m for m in (*values, *expected) if m is not None]
            if any(expected):
                top = round_up(max(_finite(m.most) for m in known) or 1.0)
                words = text(f"{_CAPTIONS[name]} over {sweep.parameter}. Dashed: the model.")
                plot = _Plot(sweep, name, f"{name}{len(figures)}", top)
                figures.append(plot.draw(strategy, values, expected, words))
    return f'<div class="plots">{"".join(figures)}</div>'


def _points(sweep: Sweep, strategy: str, name: str, problems: bool = False) -> Points:
    """Return a measure of a strategy at each value; None where it has no figure."""
    rows = sweep.rows_of(strategy)
    good = {v: r.measures.get(name) for v, r in rows.items() if problems or not r.problems}
    return [good.get(p.value) for p in sweep.points]


def round_up(value: float) -> float:
    """Return a round number that is not smaller."""
    unit = 10.0 ** math.floor(math.log10(value))
    return next(f * unit for f in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if f * unit >= value)


class _Plot:
    """A plot of values over the binary logarithm of what is swept."""

    def __init__(self, sweep: Sweep, name: str, key: str, top: float) -> None:
        self.sweep, self.name, self.key, self.top = sweep, name, key, top
        stand = [standing(p.value) for p in sweep.points]
        self.at = [math.log2(s) if s else i for i, s in enumerate(stand)]
        self.order = sorted(range(len(stand)), key=lambda i: self.at[i])
        self.base = HEIGHT - BELOW

    def x(self, i: int) -> float:
        """Return where a point stands, in percent of the width."""
        first, last = min(self.at), max(self.at)
        return LEFT + ((self.at[i] - first) / (last - first) if last > first else 0.5) * (
            RIGHT - LEFT
        )

    def y(self, value: float) -> float:
        """Return where a value stands, in pixels."""
        return self.base - (self.base - ABOVE) * min(1.0, _finite(value) / self.top)

    def draw(self, strategy: str, values: Points, limit: Points, words: str = "") -> str:
        """Return the plot of a strategy, and a dashed line, the limit unless `words` say other."""
        unit = text(MEASURES[self.name].unit)
        ticks = [text(p.value) for p in self.sweep.points]
        knee = text(self.sweep.knees.get(strategy, ""))
        parts = self._grid(unit)
        every = -(-len(ticks) // 6)
        at_knee = [self.x(i) for i in self.order if ticks[i] == knee]
        parts += [
            f'<text class="tick" x="{self.x(i):.2f}%" y="{self.base + 18}" '
            f'text-anchor="middle">{ticks[i]}</text>'
            for n, i in enumerate(self.order)
            if ticks[i] == knee
            or (n % every == 0 and not any(abs(self.x(i) - x) < APART for x in at_knee))
        ]
        paths = "".join(self._path(k, line) for k, line in (("limit", limit), ("line", values)))
        parts.append(
            f'<svg x="0" y="0" width="100%" height="{HEIGHT}" viewBox="0 0 100 {HEIGHT}" '
            f'preserveAspectRatio="none">{paths}</svg>'
        )
        shown = []
        for i in self.order:
            if (m := values[i]) is not None:
                parts.append(self._point(i, m, bool(knee) and ticks[i] == knee))
                shown.append(f"{ticks[i]}: {show_value(self.name, m.value)}")
        dashed = " Dashed: the limit." if any(limit) else ""
        label, parameter = text(strategy), text(self.sweep.parameter)
        title = f"{label} over {parameter}, {unit}"
        figure = svg(self.key, title, ", ".join(shown), HEIGHT, parts)
        caption = words or f"{unit} over {parameter}.{dashed}"
        return f"<figure><h3>{label}</h3>{figure}<figcaption>{caption}</figcaption></figure>"

    def _grid(self, unit: str) -> list[str]:
        """Return three lines with what they stand for."""
        parts = []
        for share in (0, 0.5, 1):
            high = self.y(share * self.top)
            with_unit = f" {unit}" if share == 1 and unit != "s" else ""
            words = f"{show_value(self.name, share * self.top)}{with_unit}" if share else "0"
            parts.append(stroke("grid", "0", "100%", high, high))
            parts.append(f'<text class="tick" x="0" y="{high - 5:.1f}">{words}</text>')
        return parts

    def _path(self, kind: str, line: Points) -> str:
        points = [f"{self.x(i):.2f},{self.y(m.value):.1f}" for i in self.order if (m := line[i])]
        if len(points) < 2:
            return ""
        every = " ".join(points)
        return f'<polyline class="{kind}" points="{every}" vector-effect="non-scaling-stroke"/>'

    def _point(self, i: int, m: Measure, knee: bool) -> str:
        at, y = f"{self.x(i):.2f}%", self.y(m.value)
        mark = ""
        if knee:
            mark = (
                f'{stroke("knee", at, at, y, self.base)}<text class="kneename" x="{at}" '
                f'y="{y - 14:.1f}" text-anchor="middle">knee</text>'
            )
        return (
            f"{mark}{stroke('whisker', at, at, self.y(m.least), self.y(m.most))}"
            f'<circle class="{"knee" if knee else "dot"}" cx="{at}" cy="{y:.1f}" '
            f'r="{6 if knee else 3.5}"/>'
        )
