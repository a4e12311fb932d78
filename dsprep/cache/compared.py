"""What the files of a dataset were when they were compared with the sidecar, kept with a copy.

A process that finds them untouched need not open them to know that the sidecar is theirs. What
tells is the change time, which nobody can set: whoever writes to a file after this gives it another
one. Where it is of whole seconds (Lustre), that is certain only once some have passed, and through
FUSE (sshfs) it may be the time stamp, which can be set.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from dsprep.core.marks import Mark, is_coarse
from dsprep.core.storage import file_system

NAME = "compared"

SETTLED = 10.0
"""Seconds after which a change time of whole seconds is surely another one, whatever the clock."""


def keep(copy: Path, marks: Mapping[int, Mark]) -> None:
    """Keep marks, by the number of the file, in the directory of a copy; not those that say little.

    None are kept either of files that were written to since they were taken.
    """
    found = {n: m.to_json() for n, m in marks.items() if _is_telling(m) and m.is_untouched()}
    (copy / NAME).write_text(json.dumps(found))


def kept(copy: Path, root: Callable[[int], Path]) -> dict[int, Mark]:
    """Return what `keep` was given, nothing if there is nothing; `root` gives a file's path."""
    try:
        found = json.loads((copy / NAME).read_bytes())
        return {int(i): Mark.from_json(mark, root(int(i))) for i, mark in found.items()}
    except (
        OSError,
        ArithmeticError,
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
        RecursionError,
    ):
        return {}


def _is_telling(mark: Mark) -> bool:
    """Whether a file that is written to from now on has another change time."""
    if not is_coarse(mark.status):
        return True
    kind = file_system(mark.path.stat().st_dev)
    settled = time.time() - mark.status[3] / 1e9 > SETTLED
    return settled and bool(kind) and not kind.startswith("fuse")
