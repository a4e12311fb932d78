"""What was measured before: in the process, and for a week in a small file of the user.

A file that is damaged, or cannot be read or written, is as good as none.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dsprep.reader import engines

KEPT = 200
"""Results that the file of the user holds."""

KEPT_SECONDS = 7 * 86400
"""How long one is believed."""

VERSION = 1


@dataclass(frozen=True)
class Choice:
    """How to read.

    Attributes
    ----------
    engine
        What `dsprep.reader.engines.make` takes, and not ``"auto"``.
    threads
        How many read at a time.
    why
        The reason, for a person.
    """

    engine: str
    threads: int
    why: str


_known: dict[str, Choice] = {}


def _file() -> Path:
    """Return where choices are kept for the next process."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if base.startswith("/") else Path.home() / ".cache"
    return root / "dsprep" / "engines.json"


def recall(key: str) -> Choice | None:
    """Return what was found for a key within the last week."""
    if key not in _known:
        with suppress(Exception):
            for name, choice, _ in _read():
                if name == key:
                    _known[key] = Choice(choice.engine, choice.threads, f"remembered: {choice.why}")
    return _known.get(key)


def remember(key: str, choice: Choice) -> None:
    """Keep what was found, in a file if that is possible."""
    _known[key] = choice
    rows = []
    with suppress(Exception):
        rows = [row for row in _read() if row[0] != key]
    with suppress(Exception):
        _write([*rows[1 - KEPT :], (key, choice, time.time())])


def _read() -> Iterator[tuple[str, Choice, float]]:
    """Yield what the file holds that is sound and not too old."""
    path = _file()
    if path.stat().st_size > 1 << 20:
        raise ValueError("too large")
    content = json.loads(path.read_bytes())
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise ValueError("of another version")
    now = time.time()
    for row in content.get("choices", []):
        match row:
            case [str(key), str(engine), int(threads), str(why), float(when)] if (
                engine in engines.NAMES[1:]
                and 1 <= threads <= 4096
                and now - KEPT_SECONDS < when < now + 60
            ):
                yield key, Choice(engine, threads, why[:1000]), when


def _write(rows: Sequence[tuple[str, Choice, float]]) -> None:
    """Replace the file at once by another one, so that nobody reads half of it."""
    path = _file()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    choices = [[key, c.engine, c.threads, c.why, when] for key, c, when in rows]
    text = json.dumps({"version": VERSION, "choices": choices})
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as out:
        made = Path(out.name)
        try:
            out.write(text)
            out.close()
            made.replace(path)
        except BaseException:
            made.unlink()
            raise
