"""The layout of a report: rows, columns, and the form of numbers.

The terminal and the page print the same cells.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from dsprep.bench.report.model import MEASURES, BenchReport, Measure, Row
from dsprep.core.units import show_nbytes

NOTHING = "-"
"""The cell of a measure that a row lacks."""


def columns(report: BenchReport) -> tuple[str, ...]:
    """Return the measures that a table of this report has: those that some row has a value for.

    Utilisation is one only where steps compute something, skew only where there are several ranks.
    """
    taken = report.taken
    if not any(row.median("compute_seconds") for row in report.rows):
        taken.discard("utilisation_percent")
    if report.settings.get("ranks", 1) <= 1 and report.swept != "ranks":
        taken.discard("skew_seconds")
    return tuple(name for name, kind in MEASURES.items() if kind.heading and name in taken)


def tables(report: BenchReport) -> dict[str, list[Row]]:
    """Return the rows of each table: all without a heading, or of a sweep those of a strategy."""
    tables: dict[str, list[Row]] = {}
    for row in report.rows:
        tables.setdefault(row.name if report.swept else "", []).append(row)
    return tables


def label(report: BenchReport, row: Row) -> str:
    """Return what the first column says: the strategy, or the value of what is swept."""
    if not report.swept:
        return row.name
    return row.value + ("  <- knee" if report.knees.get(row.name) == row.value else "")


def footnotes(rows: Iterable[Row]) -> list[str]:
    """Return the evidence and notes of rows, each once, with the strategies that it is about."""
    about: dict[str, dict[str, None]] = {}
    for row in rows:
        for text in (*([f"cold: {row.evidence}"] if row.evidence else []), *row.notes):
            about.setdefault(text, {})[row.name] = None
    return [f"{', '.join(names)}: {text}" for text, names in about.items()]


def digits(value: float) -> str:
    """Return a number with three significant digits, thousands marked.

    >>> digits(0.01234), digits(12.34), digits(12345.6)
    ('0.0123', '12.3', '12,346')
    """
    if not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0"
    if abs(value) < 1000:
        value = float(f"{value:.3g}")
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) < 1e-4:
        return f"{value:.1e}"
    return f"{value:.{2 - math.floor(math.log10(abs(value)))}f}"


def show_seconds(seconds: float) -> str:
    """Return a time in the unit that fits.

    >>> show_seconds(0.0123), show_seconds(4.2e-5)
    ('12.3 ms', '42.0 µs')
    """
    if not math.isfinite(seconds):
        return NOTHING
    if seconds == 0:
        return "0 s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= 0.9995 * size:
            return f"{digits(seconds / size)} {unit}"
    return f"{digits(seconds / 1e-9)} ns"


def show_percent(share: float) -> str:
    """Return percent without the sign, one more digit for small ones."""
    return f"{share:.0f}" if share >= 9.95 else f"{share:.1f}"


def show_value(name: str, value: float) -> str:
    """Return a value of the measure `name` for a person to read."""
    if not math.isfinite(value):
        return NOTHING
    unit = MEASURES[name].unit
    if unit == "1":
        return f"{value:,.0f}" if abs(value) < 1e7 else f"{value / 1e6:,.1f} M"
    if unit == "B":
        return show_nbytes(value)
    return {"s": show_seconds, "%": show_percent}.get(unit, digits)(value)


def show_spread(measure: Measure) -> str:
    """Return half the range over repeats as a share, ``±3%``; empty below 0.5 %."""
    if not all(map(math.isfinite, (measure.value, measure.least, measure.most))):
        return ""
    half = (measure.most - measure.least) / 2
    if not measure.value or half < 0.005 * abs(measure.value):
        return ""
    return f"±{100 * half / abs(measure.value):.0f}%"


def show(name: str, measure: Measure | None, *, spread: bool = True) -> str:
    """Return a measure with its spread, or without."""
    if measure is None:
        return NOTHING
    text = show_value(name, measure.value)
    return f"{text} {show_spread(measure)}".rstrip() if spread else text
