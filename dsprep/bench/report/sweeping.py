"""Sweeps: which values a setting takes, where more of it stops to gain, and the words for that.

``--sweep`` takes ``PARAMETER=VALUES``. Values are a list, ``buffer-size=1MiB,4MiB,16MiB``, or a
range, ``threads=1..16``: every value is twice the one before (four times for sizes), up to the last
one, which is always taken. ``buffer-size=1MiB..1GiB*8`` sets another factor. A buffer size without
a unit counts samples, as it does elsewhere. ``engine=buffered,direct`` takes a list alone.
"""

from __future__ import annotations

from dsprep.bench.report.comparing import apart
from dsprep.bench.report.model import MEASURES, Measure, Sweep
from dsprep.bench.report.tables import show_value
from dsprep.bench.strategies import LIMIT, THROTTLED
from dsprep.core.units import parse_nbytes
from dsprep.errors import UsageError
from dsprep.reader import engines

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


def knee(sweep: Sweep, strategy: str, measure: str = "samples_per_second") -> str | None:
    """Return the smallest value from which on no larger one is better by more than `GAIN`.

    A value whose spread overlaps is not better. None if the strategy has no figures, or gains up
    to the largest value: then there may be a knee beyond it.
    """
    known = _known(sweep, strategy, measure)
    order, better = sorted(known, key=standing), MEASURES[measure].better
    for i, value in enumerate(order[:-1]):
        if not any(apart(known[value], known[v], GAIN) == better for v in order[i + 1 :]):
            return value
    return None


def _known(sweep: Sweep, strategy: str, measure: str) -> dict[str, Measure]:
    """Return a measure of a strategy by value, where it has figures."""
    rows = sweep.rows_of(strategy)
    return {
        v: r.measures[measure] for v, r in rows.items() if measure in r.measures and not r.problems
    }


def words(sweep: Sweep, measure: str = "samples_per_second") -> list[str]:
    """Return a sentence for each strategy with figures: which setting to use, and why."""
    names = sorted(sweep.strategies, key=lambda n: (n != "dsprep", n))
    return [s for n in names if n != LIMIT and (s := _sentence(sweep, n, measure))]


def _sentence(sweep: Sweep, name: str, measure: str) -> str:
    rates = {v: m.value for v, m in _known(sweep, name, measure).items()}
    if not rates:
        return ""
    order = sorted(rates, key=standing)
    value = sweep.knees.get(name) or order[-1]
    use = f"{name}: use {_argument(sweep.parameter, value, name)}"
    if value not in rates:
        return f"{use}."
    unit, better = MEASURES[measure].unit, MEASURES[measure].better
    if len(rates) == 1:
        return f"{name}: --{sweep.parameter} {value} was the only value with figures."
    best = (max if better > 0 else min)(rates, key=lambda v: rates[v])
    here = f"{show_value(measure, rates[value])} {unit}".removesuffix(" s")
    if sweep.parameter in WORDS and best == value:
        return f"{use}: {here}, and no other value gains more."
    if value == order[-1]:
        return f"{use} or more: {here} there, and no knee was reached; sweep further."
    if value == order[0] and best == value:
        return f"{use}: {here}, and no larger value gains more."
    if better * (rates[best] - rates[value]) > GAIN * rates[value]:
        return (
            f"{name}: the spread is too wide to say which --{sweep.parameter} to use: {here} at "
            f"{value}, {show_value(measure, rates[best])} at {best}; raise --repeat."
        )
    top = "" if best == value else f"; the most, {show_value(measure, rates[best])}, at {best}"
    beyond = "no other value" if sweep.parameter in WORDS else "beyond it no value"
    return f"{use}: {here}, and {beyond} gains more than {GAIN:.0%} or the spread{top}."


def _argument(parameter: str, value: str, strategy: str) -> str:
    """Return what to pass, also to the Reader where the strategy is one."""
    option, called = f"--{parameter} {value}", READER.get(parameter)
    if called is None or strategy not in THROTTLED:
        return option
    shown = f'"{value}"' if parameter in WORDS else amount(parameter, value)
    return f"{option} (Reader: {called}={shown})"
