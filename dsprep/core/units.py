"""Sizes, rates and times: from the words of users, and for people to read."""

from __future__ import annotations

import re

from dsprep.errors import UsageError

_UNITS = {"k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY_UNITS = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


def parse_nbytes(text: str) -> int:
    """Return the bytes that a size such as ``256MiB``, ``4GB`` or ``4096B`` means.

    >>> parse_nbytes("1.5KiB")
    1536

    Raises
    ------
    UsageError
        If it is something else, such as a number without a unit: 4 could be bytes as well as GiB.
    """
    cleaned = text.strip().lower()
    word = cleaned.removesuffix("b")
    number = word.rstrip("kmgti")
    unit = word[len(number) :]
    factor = 1 if unit == "" else {**_UNITS, **_BINARY_UNITS}.get(unit)
    try:
        value = float(number) * (factor or 0)
    except ValueError:
        factor = None
        value = 0
    if word == cleaned and not unit and value > 0:
        raise UsageError(
            f"the size {text} has no unit", expected=f"such as {text.strip()}MiB or {text.strip()}B"
        )
    if factor is None or not 0 < value < 1 << 62:
        raise UsageError(f"{text!r} is not a size", expected="a size such as 256MiB or 4GB")
    return int(value)


_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_seconds(text: str) -> float:
    """Return the seconds that a time such as ``12ms``, ``90s`` or ``7d`` means.

    >>> parse_seconds("12ms")
    0.012

    Raises
    ------
    UsageError
        If it is something else, or none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(us|ms|s|min|h|d)", text, re.ASCII)
    if match is None or not float(match[1]):
        raise UsageError(f"{text!r} is not a time", expected="a time such as 12ms, 90s or 7d")
    return float(match[1]) * _SECONDS[match[2]]


def parse_rate(text: str) -> float:
    """Return bytes per second of a rate such as ``400GB/s``; raise `UsageError` if it is none."""
    size, slash, second = text.strip().partition("/")
    if slash and second.strip().lower() not in ("s", "sec"):
        raise UsageError(f"{text!r} is not a rate", expected="such as 400GB/s")
    return float(parse_nbytes(size))


def as_nbytes(size: int | str) -> int:
    """Return the bytes of a size in words, or of a number, which counts bytes in Python."""
    return parse_nbytes(f"{size}B" if isinstance(size, int) else size)


def show_nbytes(nbytes: float, binary: bool = False) -> str:
    """Return a size for a person to read: ``19.2 kB``, ``50.3 MB``, or in binary units.

    >>> show_nbytes(19200), show_nbytes(7 << 19, binary=True)
    ('19.2 kB', '3.5 MiB')
    """
    step, i = (1024, "i") if binary else (1000, "")
    for unit in ("B", f"{'K' if i else 'k'}{i}B", f"M{i}B", f"G{i}B", f"T{i}B"):
        if abs(nbytes) < step:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= step
    return f"{nbytes:.1f} P{i}B"


def show_binary_nbytes(nbytes: float) -> str:
    """Return a size in binary units where it is a whole number of them, as sizes are chosen.

    >>> show_binary_nbytes(64 << 20), show_binary_nbytes(1536 << 20), show_binary_nbytes(64_000_000)
    ('64 MiB', '1536 MiB', '64.0 MB')
    """
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size and nbytes % size == 0 and nbytes % 1000:
            return f"{nbytes // size:.0f} {unit}"
    return show_nbytes(nbytes)


def show_time(seconds: float) -> str:
    """Return a time to wait: ``210 ms``, ``40 s``, ``12 min``, ``3 h 05 min``."""
    if 0 < seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"
