"""Brace patterns, as shells and webdataset expand them: ``train-{000000..000127}.tar``."""

from __future__ import annotations

import re

from dsprep.errors import UsageError

MAX_PATHS = 1 << 20
"""Paths that a pattern may stand for."""

MAX_LENGTH = 8 << 10
"""Characters of a pattern: longer ones are not taken apart, and no file is called so."""

MAX_DEPTH = 16
"""Braces within braces, at most."""

_NUMBERS = re.compile(r"(-?\d{1,18})\.\.(-?\d{1,18})(?:\.\.(-?\d{1,18}))?", re.ASCII)
_LETTERS = re.compile(r"([a-zA-Z])\.\.([a-zA-Z])(?:\.\.(-?\d{1,18}))?", re.ASCII)


def expand(text: str, depth: int = 0) -> list[str]:
    """Return what a pattern stands for, in its order; of a text without one, the text.

    As in bash: ``{a,b}``, ``{1..9}``, ``{01..10}`` (numbers of one width), ``{1..9..2}`` and
    ``{a..e}``, also within each other and several in a row; other braces stand for themselves.

    Raises
    ------
    UsageError
        If it stands for more than `MAX_PATHS` paths.

    Examples
    --------
    >>> expand("x-{08..10}.{tar,json}")[:3]
    ['x-08.tar', 'x-08.json', 'x-09.tar']
    """
    braces = _first(text) if len(text) <= MAX_LENGTH else None
    if braces is None:
        return [text]
    begin, end, items = braces
    if depth >= MAX_DEPTH:
        raise UsageError(f"{text!r} has braces within braces", expected=f"at most {MAX_DEPTH} deep")
    out: list[str] = []
    for item in items:
        out += expand(item, depth + 1)
        _check(len(out), text)
    # What follows the braces is another pattern, and not one within them.
    rests = expand(text[end:], depth) if len(text) > end else [""]
    _check(len(out) * len(rests), text)
    return [text[:begin] + item + rest for item in out for rest in rests]


def _check(count: int, text: str) -> None:
    if count > MAX_PATHS:
        raise UsageError(f"{text!r} stands for too many paths", expected=f"<= {MAX_PATHS:,}")


def _first(text: str) -> tuple[int, int, list[str]] | None:
    """Return the first braces that stand for several texts: where they are, and the texts."""
    for opening in re.finditer(r"\{", text):
        begin, depth, edges = opening.start(), 0, list[int]()
        for mark in re.finditer(r"[{},]", text[begin:]):
            depth += {"{": 1, "}": -1, ",": 0}[mark[0]]
            if depth <= 1 and mark[0] != "{" and (depth == 0 or mark[0] == ","):
                edges.append(begin + mark.start())
            if depth == 0:
                break
        if depth or not edges:
            continue
        starts = [begin, *edges[:-1]]
        items = [text[a + 1 : b] for a, b in zip(starts, edges, strict=True)]
        if len(items) == 1:
            items = _range(items[0])
        if items:
            return begin, edges[-1] + 1, items
    return None


def _range(text: str) -> list[str]:
    """Return the members of ``A..B`` or ``A..B..STEP``; none if it is something else."""
    match = _NUMBERS.fullmatch(text) or _LETTERS.fullmatch(text)
    if match is None:
        return []
    low, high = match[1], match[2]
    numbers = not low.isalpha()
    a, b = (int(low), int(high)) if numbers else (ord(low), ord(high))
    step = abs(int(match[3] or 1)) or 1
    _check(abs(b - a) // step + 1, "{" + text + "}")
    every = range(a, b + 1, step) if a <= b else range(a, b - 1, -step)
    if not numbers:
        return list(map(chr, every))
    padded = any(re.match(r"-?0\d", end) for end in (low, high))
    width = max(len(low), len(high)) if padded else 0
    return [f"{n:0{width}d}" for n in every]
