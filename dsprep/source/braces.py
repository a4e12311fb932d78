"""Brace patterns, as shells and webdataset expand them: ``train-{000000..000127}.tar``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dsprep.errors import UsageError

MAX_PATHS = 1 << 20
"""Paths that a pattern may stand for."""

_RANGE = re.compile(r"(-?\d{1,18})\.\.(-?\d{1,18})(?:\.\.-?(\d{1,18}))?", re.ASCII)


def expand(text: str) -> list[str]:
    """Return what a pattern stands for, in its order; of a text without one, the text.

    As in bash: ``{a,b}``, ``{1..9}``, ``{01..10}`` (numbers of one width) and ``{1..9..2}``, also
    several in a row, but not within each other; other braces stand for themselves.

    Raises
    ------
    UsageError
        If it stands for more than `MAX_PATHS` paths.

    Examples
    --------
    >>> expand("x-{08..10}.{tar,json}")[:3]
    ['x-08.tar', 'x-08.json', 'x-09.tar']
    """
    paths, end = [""], 0
    for braces in re.finditer(r"\{([^{}]*)\}", text):
        members, width = _members(braces[1])
        if not members:
            continue
        if len(paths) * len(members) > MAX_PATHS:
            problem = f"{text!r} stands for too many paths"
            raise UsageError(problem, expected=f"<= {MAX_PATHS:,}")
        before = text[end : braces.start()]
        paths = [f"{path}{before}{each:{width}}" for path in paths for each in members]
        end = braces.end()
    return [path + text[end:] for path in paths]


def _members(inside: str) -> tuple[Sequence[str | int], str]:
    """Return what braces stand for, and how it is formatted; none if it is only itself."""
    if "," in inside:
        return inside.split(","), ""
    match = _RANGE.fullmatch(inside)
    if match is None:
        return [], ""
    low, high, step = int(match[1]), int(match[2]), int(match[3] or 1) or 1
    padded = any(re.match(r"-?0\d", end) for end in (match[1], match[2]))
    width = f"0{max(len(match[1]), len(match[2]))}" if padded else ""
    return range(low, high + 1, step) if low <= high else range(low, high - 1, -step), width
