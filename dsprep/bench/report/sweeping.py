"""Sweeps: which values a setting takes, where more of it stops to gain, and the words for that.

``--sweep`` takes ``PARAMETER=VALUE,VALUE,...``, such as ``buffer-size=1MiB,4MiB,16MiB``. A buffer
size without a unit counts samples, as it does elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsprep.bench.report.comparing import apart
from dsprep.bench.report.model import BenchReport, Row
from dsprep.bench.report.tables import digits, tables
from dsprep.bench.strategies import DUMMY, LIMIT, THROTTLED
from dsprep.core.units import parse_nbytes
from dsprep.errors import UsageError
from dsprep.reader import engines

RATE = "samples_per_second"
PARAMETERS = {
    "buffer-size": "",
    "transfer-size": "transfer_size",
    "threads": "io_threads",
    "ranks": "",
    "stagger": "",
    "batch-size": "",
    "buffers": "buffers",
    "repeats": "repeats",
    "mini-epochs": "mini_epochs",
    "engine": "engine",
}
"""What may be swept, and what the Reader calls it; empty: it has no such argument."""
MOST = 64
"""Values of a sweep."""
GAIN = 0.05
"""A value that is better by no more than this share is not worth a larger setting."""


def parse(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the parameter and its values as the user would write them, rising.

    >>> parse("threads=4,1,2")
    ('threads', ('1', '2', '4'))
    """
    parameter, _, listed = text.strip().removeprefix("--").partition("=")
    values = [value.strip() for value in listed.split(",")]
    if parameter not in PARAMETERS or not listed or len(values) > MOST:
        expected = "PARAMETER=VALUE,VALUE,..., of " + ", ".join(PARAMETERS)
        raise UsageError(f"{text[:200]!r} is not a sweep", expected=expected)
    amounts = {value: amount(parameter, value) for value in values}
    if len(set(amounts.values())) < len(values):
        raise UsageError("--sweep has a value twice", found=listed)
    if parameter == "buffer-size" and len({_is_count(v) for v in values}) > 1:
        raise UsageError("a buffer size is in samples or in bytes, not both", found=listed)
    return parameter, tuple(sorted(values, key=amounts.__getitem__))


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9


def amount(parameter: str, value: str) -> int:
    """Return the bytes or the count that a value means; of engines, which one it is."""
    expected = "a count from 1 on"
    if parameter == "engine":
        if value in engines.NAMES:
            return engines.NAMES.index(value)
        expected = f"some of {','.join(engines.NAMES)}"
    elif parameter == "transfer-size" or (parameter == "buffer-size" and not _is_count(value)):
        return parse_nbytes(value)
    elif _is_count(value) and int(value) > 0:
        return int(value)
    raise UsageError(f"{value!r} is not a value of --{parameter}", expected=expected)


def knee(rows: Sequence[Row]) -> str | None:
    """Return the smallest value from which on no larger one gains more than `GAIN`.

    Of the rows of one strategy, by rising values. A value whose spread overlaps is not better. None
    if there are no figures, or the largest value still gains: there may be a knee beyond it.
    """
    known = [(row.value, row.measures[RATE]) for row in rows if not row.failure]
    for i, (value, measure) in enumerate(known[:-1]):
        if not any(apart(measure, later, GAIN) > 0 for _, later in known[i + 1 :]):
            return value
    return None


def words(report: BenchReport) -> str:
    """Return which setting to use, strategy by strategy, dsprep's first."""
    parameter, lines = report.swept, []
    for name, rows in sorted(tables(report).items(), key=lambda item: item[0] != "dsprep"):
        rates = {row.value: row.median(RATE) or 0.0 for row in rows if not row.failure}
        if name in (LIMIT, DUMMY) or len(rates) < 2:
            continue
        value = report.knees.get(name)
        if value not in rates:
            lines.append(f"{name}: no knee was reached; sweep further, or raise --repeat.")
            continue
        called = PARAMETERS.get(parameter) if name in THROTTLED else ""
        shown = f'"{value}"' if parameter == "engine" else amount(parameter, value)
        reader = f" (Reader: {called}={shown})" if called else ""
        lines.append(
            f"{name}: use --{parameter} {value}{reader}: {digits(rates[value])} samples/s; no "
            f"later value gains more than {GAIN:.0%} or the spread."
        )
    return " ".join(lines)
