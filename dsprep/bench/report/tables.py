"""What a report looks like as tables: which columns, how a number is written, and CSV.

Tables are pure values: the terminal and the HTML page draw the same `Table`.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dsprep.bench.report.model import COLUMNS, MEASURES, BenchReport, Measure, Row
from dsprep.core.units import show_nbytes

NOTHING = "-"
"""Where a row has no such measure."""

HEADER = ("strategy", "parameter", "value", "runs", "problems", "notes")
"""The columns that every CSV file begins with."""


@dataclass(frozen=True)
class Line:
    """A row of a table."""

    label: str  # what the first column says: the strategy, or the value of what is swept
    row: Row  # the measures
    knee: bool = False  # whether more of what is swept gains next to nothing from here on


@dataclass(frozen=True)
class Table:
    """Lines under one heading."""

    title: str  # above the table; empty if it is the only one
    first: str  # heading of the column of labels
    columns: tuple[str, ...]  # names of measures
    lines: tuple[Line, ...]


def number(facts: Mapping[str, Any], key: str, default: float) -> float:
    """Return a fact that is a finite number, or `default`."""
    value = facts.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return default


def columns(report: BenchReport) -> tuple[str, ...]:
    """Return the measures that a table of this report has: those that some row has a value for.

    Utilisation is one only where steps compute something, skew only where there are several ranks.
    """
    taken = report.taken
    if not any(row.value("compute_seconds") for row in report.all_rows):
        taken.discard("utilisation_percent")
    swept = "" if report.sweep is None else report.sweep.parameter
    if number(report.settings, "ranks", 1) <= 1 and swept != "ranks":
        taken.discard("skew_seconds")
    return tuple(name for name in COLUMNS if name in taken)


def tables(report: BenchReport) -> list[Table]:
    """Return the tables of a report: one of all strategies, or one for each that was swept."""
    shown, made = columns(report), []
    if report.rows:
        lines = tuple(Line(row.name, row) for row in report.rows)
        made.append(Table("", "strategy", shown, lines))
    if (sweep := report.sweep) is not None:
        for name in sweep.strategies:
            knee = sweep.knees.get(name)
            lines = tuple(Line(v, row, knee == v) for v, row in sweep.rows_of(name).items())
            made.append(Table(name, sweep.parameter, shown, lines))
    return made


def footnotes(rows: Iterable[Row]) -> list[str]:
    """Return the evidence and notes of rows, each once, with the strategies that it is about."""
    about: dict[str, list[str]] = {}
    for row in rows:
        for text in (*([f"cold: {row.evidence}"] if row.evidence else []), *row.notes):
            names = about.setdefault(text, [])
            if row.name not in names:
                names.append(row.name)
    return [f"{', '.join(names)}: {text}" for text, names in about.items()]


# --- numbers for people ----------------------------------------------------------------------


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


# --- for programs ----------------------------------------------------------------------------


def csv_text(report: BenchReport) -> str:
    """Return the rows as CSV: a line for each strategy, or each strategy and point of the sweep.

    The columns of `HEADER` come first, then the evidence of cold runs, then every measure that some
    row has, in full precision, headed by name and unit, with its least and most after it.
    """
    names = [name for name in MEASURES if name in report.taken]
    out = io.StringIO()
    write = csv.writer(out, lineterminator="\n").writerow
    ends = ("", " least", " most")
    write([*HEADER, "evidence", *(f"{n}{end} [{MEASURES[n].unit}]" for n in names for end in ends)])
    lines = [(row, "", "") for row in report.rows]
    if (sweep := report.sweep) is not None:
        lines += [(row, sweep.parameter, p.value) for p in sweep.points for row in p.rows]
    for row, parameter, value in lines:
        cells: list[object] = [row.name, parameter, value, row.runs]
        cells += ["; ".join(row.problems), "; ".join(row.notes), row.evidence]
        for name in names:
            m = row.measures.get(name)
            cells += ["", "", ""] if m is None else [repr(m.value), repr(m.least), repr(m.most)]
        write(cells)
    return out.getvalue()
