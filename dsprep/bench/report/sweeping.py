"""Sweeps: which values a setting takes, where more of it stops to gain, and the words for that.

``--sweep`` takes ``PARAMETER=VALUES``. Values are a list, ``buffer-size=1MiB,4MiB,16MiB``, or a
range, ``threads=1..16``: every value is twice the one before (four times for sizes), up to the last
one, which is always taken. ``buffer-size=1MiB..1GiB*8`` sets another factor. A buffer size without
a unit counts samples, as it does elsewhere. ``engine=buffered,direct`` takes a list alone.
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
SIZES = ("buffer-size", "transfer-size")
COUNTS = (*("threads", "ranks", "stagger", "batch-size", "buffers", "repeats", "mini-epochs"),)
WORDS = {"engine": engines.NAMES}
"""Parameters whose values are words, from the default on: a later one has to gain."""
READER = {
    "threads": "io_threads",
    "engine": "engine",
    "transfer-size": "transfer_size",
    "buffers": "buffers",
    "repeats": "repeats",
    "mini-epochs": "mini_epochs",
}
"""What the Reader calls them."""
MOST = 64
"""Values of a sweep."""
GAIN = 0.05
"""A value that is better by no more than this share is not worth a larger setting."""
EXPECTED = "PARAMETER=V,V,... or PARAMETER=FIRST..LAST, such as buffer-size=1MiB..256MiB"


def parse(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the parameter and its values as the user would write them.

    >>> parse("threads=1..6")
    ('threads', ('1', '2', '4', '6'))
    >>> parse("buffer-size=1MiB..16MiB")
    ('buffer-size', ('1MiB', '4MiB', '16MiB'))
    """
    parameter, equals, text_of_values = text.partition("=")
    parameter, text_of_values = parameter.strip().removeprefix("--"), text_of_values.strip()
    known = (*SIZES, *COUNTS, *WORDS)
    if parameter not in known:
        expected = f"{EXPECTED}; PARAMETER is one of {', '.join(known)}"
        raise UsageError(f"{text!r} is not a sweep", expected=expected)
    if not equals or not text_of_values:
        raise UsageError(f"{text!r} is not a sweep", expected=EXPECTED)
    listed = tuple(v.strip() for v in text_of_values.split(","))
    values = (
        _range(parameter, text_of_values)
        if ".." in text_of_values and parameter not in WORDS
        else listed
    )
    if len(values) > MOST:
        raise UsageError(
            f"a sweep of {len(values)} values is too long",
            expected=f"{MOST} at most",
            found=text_of_values,
        )
    amounts = [amount(parameter, v) for v in values]
    if parameter == "buffer-size" and len({_is_count(v) for v in values}) > 1:
        raise UsageError("a buffer size is in samples or in bytes, not both", found=text_of_values)
    for value, size in zip(values, amounts, strict=True):
        if amounts.count(size) > 1:
            raise UsageError(f"--sweep has the value {value} twice", found=text_of_values)
    return parameter, tuple(v for v in WORDS.get(parameter, values) if v in values)


def _range(parameter: str, text: str) -> tuple[str, ...]:
    """Return the values of ``FIRST..LAST`` or ``FIRST..LAST*FACTOR``."""
    ends, star, by = text.partition("*")
    first, _, last = ends.partition("..")
    at, stop = amount(parameter, first), amount(parameter, last)
    plain = _is_count(first.strip())
    factor = 4 if parameter in SIZES else 2
    if star:
        factor = int(by) if _is_count(by.strip()) else 0
    if factor < 2 or at > stop:
        raise UsageError(f"{text!r} is not a range", expected="FIRST..LAST or FIRST..LAST*FACTOR")
    values = []
    while at < stop:
        values.append(str(at) if plain else _word(at))
        at *= factor
    return (*values, last.strip())


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9


def _word(nbytes: int) -> str:
    """Return a size as a user would write it, with a unit in any case."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes % size == 0:
            return f"{nbytes // size}{unit}"
    return f"{nbytes}B"


def amount(parameter: str, value: str) -> int:
    """Return the bytes or the count that a value means; of words, which one it is."""
    text = value.strip()
    if parameter in WORDS:
        if text in WORDS[parameter]:
            return WORDS[parameter].index(text)
        expected = f"some of {','.join(WORDS[parameter])}"
    elif parameter in SIZES and not (parameter == "buffer-size" and _is_count(text)):
        return parse_nbytes(text)
    elif _is_count(text) and int(text) > 0:
        return int(text)
    else:
        expected = "a count from 1 on"
    raise UsageError(f"{value!r} is not a value of --{parameter}", expected=expected)


def standing(value: str) -> int:
    """Return where a value stands among others, count or size; foreign ones come first."""
    try:
        return int(value) if _is_count(value) else parse_nbytes(value)
    except UsageError:
        return 0


def knee(rows: Sequence[Row]) -> str | None:
    """Return the smallest value from which on no larger one gains more than `GAIN`.

    Of the rows of one strategy. A value whose spread overlaps is not better. None if there are no
    figures, or the largest value still gains: then there may be a knee beyond it.
    """
    known = {row.value: row.measures[RATE] for row in rows if not row.failure}
    order = sorted(known, key=standing)
    for i, value in enumerate(order[:-1]):
        if not any(apart(known[value], known[v], GAIN) > 0 for v in order[i + 1 :]):
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
        called = READER.get(parameter) if name in THROTTLED else None
        shown = f'"{value}"' if parameter in WORDS else amount(parameter, value)
        reader = f" (Reader: {called}={shown})" if called is not None else ""
        lines.append(
            f"{name}: use --{parameter} {value}{reader}: {digits(rates[value])} samples/s; no "
            f"later value gains more than {GAIN:.0%} or the spread."
        )
    return " ".join(lines)
