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

from dsprep.bench.report.model import MEASURES, Measure, Report, Row
from dsprep.write.plan import show_nbytes

NOTHING = "-"
"""Where a row has no such measure."""

HEADER = ("strategy", "parameter", "value", "runs", "problems", "notes")
"""The columns that every CSV file begins with."""


@dataclass(frozen=True)
class Column:
    """A measure as a column."""

    measure: str  # its name in `MEASURES`
    heading: str  # above the numbers, with the unit where all numbers have the same
    rank: int  # how soon it goes if there is no room: the largest first
    spread: bool = False  # whether the spread is told even where there is little room


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
    columns: tuple[Column, ...]  # of numbers
    lines: tuple[Line, ...]  # in order


_READ = (
    Column("exposed_seconds", "exposed I/O", 2),
    Column("exposed_after_first_seconds", "after first", 12),
    Column("first_batch_seconds", "first batch", 7),
    Column("wait_p50_seconds", "wait p50", 8),
    Column("wait_p99_seconds", "wait p99", 5),
    Column("samples_per_second", "samples/s", 0, spread=True),
    Column("gb_per_second", "GB/s", 4),
    Column("limit_percent", "% limit", 1),
    Column("utilisation_percent", "AU %", 3),
    Column("skew_seconds", "skew", 6),
    Column("read_calls", "reads", 11),
    Column("asked_bytes", "asked", 15),
    Column("device_bytes", "device", 9),
    Column("network_bytes", "network", 9),
    Column("major_faults", "faults", 16),
    Column("context_switches", "switches", 17),
    Column("peak_rss_bytes", "RSS", 10),
    Column("cpu_seconds", "CPU", 13),
    Column("epoch_seconds", "epoch", 14),
)


def number(facts: Mapping[str, Any], key: str, default: float) -> float:
    """Return a fact that is a finite number, or `default`."""
    value = facts.get(key)
    told = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if told and value is not None else default


def columns(report: Report) -> list[Column]:
    """Return the columns that a table of this report has: those that some row has a value for.

    Utilisation is one only where steps compute something, skew only where there are several ranks.
    """
    rows = report.all_rows
    taken = {name for row in rows for name in row.measures}
    if not any(row.value("compute_seconds") for row in rows):
        taken.discard("utilisation_percent")
    if number(report.settings, "ranks", 1) <= 1 and not _sweeps(report, "ranks"):
        taken.discard("skew_seconds")
    return [c for c in _READ if c.measure in taken]


def _sweeps(report: Report, parameter: str) -> bool:
    return report.sweep is not None and report.sweep.parameter == parameter


def tables(report: Report) -> list[Table]:
    """Return the tables of a report: one of all strategies, or one for each that was swept."""
    shown = tuple(columns(report))
    found = []
    if report.rows:
        lines = tuple(Line(row.name, row) for row in report.rows)
        found.append(Table("", "strategy", shown, lines))
    if report.sweep is not None:
        sweep = report.sweep
        for name in dict.fromkeys(row.name for p in sweep.points for row in p.rows):
            lines = tuple(
                Line(p.value, row, sweep.knees.get(name) == p.value)
                for p in sweep.points
                for row in p.rows
                if row.name == name
            )
            found.append(Table(name, sweep.parameter, shown, lines))
    return found


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
    """Return a number with three digits that count, thousands marked.

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


def show_value(name: str, value: float) -> str:
    """Return a value of the measure `name` for a person to read."""
    if not math.isfinite(value):
        return NOTHING
    unit = MEASURES[name].unit
    if unit == "s":
        return show_seconds(value)
    if unit == "B":
        return show_nbytes(value)
    if unit == "%":
        return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}"
    if unit == "1":
        return f"{value:,.0f}" if abs(value) < 1e7 else f"{value / 1e6:,.1f} M"
    return digits(value)


def show_spread(measure: Measure) -> str:
    """Return half the range over repeats as a share, ``±3%``; empty below 0.5 %."""
    if not all(map(math.isfinite, (measure.value, measure.least, measure.most))):
        return ""
    half = (measure.most - measure.least) / 2
    if not measure.value or half < 0.005 * abs(measure.value):
        return ""
    return f"±{100 * half / abs(measure.value):.0f}%"


def show(row: Row, column: Column, *, spread: bool | None = None) -> str:
    """Return what a cell says.

    Parameters
    ----------
    spread
        Whether the spread is told too; None: as the column says.
    """
    measure = row.measures.get(column.measure)
    if measure is None:
        return NOTHING
    text = show_value(column.measure, measure.value)
    wide = column.spread if spread is None else spread
    return f"{text} {show_spread(measure)}".rstrip() if wide else text


# --- for programs ----------------------------------------------------------------------------


def csv_text(report: Report) -> str:
    """Return the rows as CSV: a line for each strategy, or each strategy and point of the sweep.

    The columns of `HEADER` come first, then the evidence of cold runs, then every measure that some
    row has, in full precision, headed by name and unit, with its least and most after it.
    """
    taken = {name for row in report.all_rows for name in row.measures}
    names = [name for name in MEASURES if name in taken]
    out = io.StringIO()
    write = csv.writer(out, lineterminator="\n").writerow
    ends = ("", " least", " most")
    write([*HEADER, "evidence", *(f"{n}{end} [{MEASURES[n].unit}]" for n in names for end in ends)])

    def add(row: Row, parameter: str, value: str) -> None:
        cells: list[object] = [row.name, parameter, value, row.runs]
        cells += ["; ".join(row.problems), "; ".join(row.notes), row.evidence]
        for name in names:
            m = row.measures.get(name)
            cells += ["", "", ""] if m is None else [repr(m.value), repr(m.least), repr(m.most)]
        write(cells)

    for row in report.rows:
        add(row, "", "")
    if report.sweep is not None:
        for point in report.sweep.points:
            for row in point.rows:
                add(row, report.sweep.parameter, point.value)
    return out.getvalue()
