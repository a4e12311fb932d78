"""The words on tiers of storage: what a cache gained, and how far mini-epochs are from the model.

See `dsprep.verbs.tiers`.
"""

from __future__ import annotations

from dsprep.bench.report.model import BenchReport, Row
from dsprep.bench.report.tables import digits, number, show_percent, show_seconds
from dsprep.bench.strategies import MET
from dsprep.bench.tiering import label

RATE = "samples_per_second"

PAIRS = (
    ("gb_per_second", "model_gb_per_second"),
    ("drawn_gb_per_second", "model_drawn_gb_per_second"),
)
"""Measures, and what the model expects of them."""


def words(report: BenchReport) -> str:
    """Return what was found about tiers; empty if nothing was."""
    rate = report.settings.get("tier_bandwidth")
    lines = []
    if rate:
        words = label(str(rate))
        lines.append(
            f"{words[0].upper()}{words[1:]}: the figures show how the tiers work together, not "
            "what a storage gives."
        )
    return " ".join(filter(None, [*lines, _cache(report), _model(report), _exposed(report)]))


def _cache(report: BenchReport) -> str:
    """Return what a cache gained."""
    rows = {r.name: r for r in report.rows if not r.failure}
    plain = rows["dsprep"].value(RATE) if "dsprep" in rows else None
    lines = []
    for name, epoch_name in (("cache-first", "the first epoch"), ("cache-next", "further epochs")):
        value = rows[name].value(RATE) if name in rows else None
        if value and plain:
            hits = rows[name].value("hit_percent") or 0.0
            lines.append(
                f"{epoch_name} {digits(value / plain)} times (hits {show_percent(hits)} %)"
            )
    return f"Of the rate of dsprep without a cache: {', '.join(lines)}." if lines else ""


def _met(report: BenchReport) -> dict[str, Row]:
    """Return the rows of mini-epochs, by the value that is swept."""
    single = [("", row) for row in report.rows if row.name == MET]
    rows = dict(single) if report.sweep is None else report.sweep.rows_of(MET)
    return {value: row for value, row in rows.items() if not row.failure}


def _model(report: BenchReport) -> str:
    """Return how far what was measured is from the model."""
    off = []
    for name, model in PAIRS:
        pairs = [(r.value(name), r.value(model)) for r in _met(report).values()]
        known = [abs(got / expected - 1) for got, expected in pairs if got and expected]
        if not known:
            return ""
        off.append(f"{100 * max(known):.1f} %")
    prefix = "at most " if report.sweep is not None else ""
    return (
        f"{MET} is {prefix}{off[0]} off the throughput of the model, min(r, rf*B2), and {prefix}"
        f"{off[1]} off the bandwidth that it draws, min(r/rf, B2); r is what the steps consume."
    )


def _exposed(report: BenchReport) -> str:
    """Return how long a pass waited."""
    sweep, lines = report.sweep, []
    for value, row in _met(report).items():
        passes = 1.0
        for parameter in ("repeats", "mini-epochs"):
            swept = sweep is not None and sweep.parameter == parameter
            each = number(report.settings, parameter.replace("-", "_"), 1)
            passes *= float(value) if swept else each
        exposed = show_seconds((row.value("exposed_seconds") or 0.0) / passes)
        lines.append(f"{exposed} at {value}" if value else exposed)
    return f"Exposed I/O of a pass: {', '.join(lines)}." if lines else ""
