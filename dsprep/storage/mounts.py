"""Mounted file systems, as ``/proc`` tells them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mount:
    """A mounted file system, as a line of ``/proc/self/mountinfo`` (proc_pid_mountinfo(5)) has it.

    `device` is ``major:minor``.
    """

    device: str
    point: str
    kind: str
    options: tuple[str, ...]


def existing(path: Path) -> Path:
    """Return the absolute path, or its nearest parent that exists."""
    at = path.absolute()
    while not at.exists() and at != at.parent:
        at = at.parent
    return at


def mount_of(at: Path, lines: str | None = None) -> Mount | None:
    """Return the mount that holds the absolute path `at`; None if that is unknown."""
    if lines is None:
        try:
            lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        except OSError:
            return None
    best: Mount | None = None
    for line in lines.splitlines():
        left, _, right = line.partition(" - ")
        words, more = left.split(" "), right.split(" ")
        if len(words) < 6 or len(more) < 3:
            continue
        # Blanks in it are written as octal numbers.
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), words[4])
        inside = point == "/" or at == Path(point) or Path(point) in at.parents
        if inside and (best is None or len(point) >= len(best.point)):
            options = tuple(dict.fromkeys(words[5].split(",") + more[2].split(",")))
            best = Mount(words[2], point, more[0], options)
    return best
