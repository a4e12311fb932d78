"""Details of a benchmark as ``NAME=VALUE`` or, of one that is swept, ``NAME=VALUE,VALUE,...``.

A buffer size without a unit counts samples, as it does elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dsprep.bench.report.comparing import apart
from dsprep.bench.report.model import BenchReport, Row
from dsprep.bench.report.tables import digits, tables
from dsprep.bench.strategies import DUMMY, LIMIT
from dsprep.bench.task import Settings
from dsprep.cache.folder import parse_size
from dsprep.core.units import parse_nbytes
from dsprep.errors import UsageError, require
from dsprep.reader import engines

RATE = "samples_per_second"
MOST = 64
"""Values of a sweep."""
GAIN = 0.05
"""A value that is better by no more than this share is not worth a larger setting."""


def parse_count(text: str) -> int:
    """Return a count from 1 on."""
    is_count = text.isascii() and text.isdigit() and len(text) <= 9 and int(text) > 0
    require(is_count, UsageError, f"{text[:40]!r} is not a count", expected="a count from 1 on")
    return int(text)


PARAMETERS: dict[str, Callable[[str], Any]] = {
    # whether it is in bytes, and how many bytes or samples
    "buffer-size": lambda text: (
        not text.isdigit(),
        (parse_count if text.isdigit() else parse_nbytes)(text),
    ),
    "transfer-size": parse_nbytes,
    "tier-size": lambda text: str(parse_size(text)),
    "engine": lambda text: engines.make(text).name,
    **dict.fromkeys(
        ("threads", "ranks", "batch-size", "buffers", "repeats", "mini-epochs"), parse_count
    ),
    **dict.fromkeys(("stagger", "readers-per-node", "epochs"), parse_count),
}
"""The details, and what gives the amount that a value means."""

AS_WRITTEN = ("buffer-size", "tier-size", "engine")
"""Settings whose values stay text."""


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name of a detail, and its settings by the values as written, rising.

    >>> parse("threads=4,1,2")
    ('threads', {'1': 1, '2': 2, '4': 4})
    """
    name, _, listed = text.strip().removeprefix("--").partition("=")
    values = [value.strip() for value in listed.split(",")]
    if name not in PARAMETERS or not listed or len(values) > MOST:
        expected = "NAME=VALUE or NAME=VALUE,VALUE,..., of " + ", ".join(PARAMETERS)
        raise UsageError(f"{text[:200]!r} is not a detail of --sweep", expected=expected)
    amounts = {value: PARAMETERS[name](value) for value in values}
    is_once = len(set(amounts.values())) == len(values)
    require(is_once, UsageError, "--sweep has a value twice", found=listed)
    is_mixed = name == "buffer-size" and len({is_bytes for is_bytes, _ in amounts.values()}) > 1
    words = "a buffer size is in samples or in bytes, not both"
    require(not is_mixed, UsageError, words, found=listed)
    rising = sorted(values, key=amounts.__getitem__)
    return name, {v: v if name in AS_WRITTEN else amounts[v] for v in rising}


def points(settings: Settings, texts: Sequence[str]) -> tuple[str, list[tuple[str, Settings]]]:
    """Return what is swept, empty if nothing is, and each of its values with all settings."""
    swept, values = "", dict[str, Any]()
    for text in texts:
        name, known = parse(text)
        if len(known) > 1:
            fix = "run the command for each"
            require(not swept, UsageError, f"--sweep varies {swept} and {name}", fix=fix)
            swept, values = name, known
        else:
            settings = replace(settings, **{name.replace("-", "_"): next(iter(known.values()))})
    if not swept:
        return "", [("", settings)]
    key = swept.replace("-", "_")
    return swept, [(value, replace(settings, **{key: known})) for value, known in values.items()]


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
    lines = []
    for name, rows in sorted(tables(report).items(), key=lambda item: item[0] != "dsprep"):
        rates = {row.value: row.median(RATE) or 0.0 for row in rows if not row.failure}
        if name in (LIMIT, DUMMY) or len(rates) < 2:
            continue
        value = report.knees.get(name)
        if value not in rates:
            lines.append(f"{name}: no knee was reached; sweep further, or raise --repeat.")
            continue
        lines.append(
            f"{name}: use {report.swept}={value}: {digits(rates[value])} samples/s; no later value "
            f"gains more than {GAIN:.0%} or the spread."
        )
    return " ".join(lines)
