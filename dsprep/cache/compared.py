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

from dsprep.cache.copies import COMPARED, Copy
from dsprep.storage.identity import is_coarse
from dsprep.storage.marks import Mark
from dsprep.storage.nodes import file_system

SETTLED = 10.0
"""Seconds after which a change time of whole seconds is surely another one, whatever the clock."""


def keep(copy: Copy, marks: Mapping[int, Mark]) -> None:
    """Keep marks, by the number of the file, in the directory of a copy; not those that say little.

    None are kept either of files that were written to since they were taken.
    """
    untouched = {n: m.to_json() for n, m in marks.items() if _is_telling(m) and m.is_untouched()}
    copy.open_path(COMPARED).write_text(json.dumps(untouched))


def kept(copy: Path, path: Callable[[int], Path]) -> dict[int, Mark]:
    """Return what `keep` was given for the copy at a path, nothing if there is nothing.

    `path` gives that of a file of the dataset.
    """
    try:
        records = json.loads((copy / COMPARED).read_bytes())
        return {int(i): Mark.from_json(mark, path(int(i))) for i, mark in records.items()}
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
    settled = time.time() - mark.status.ctime_ns / 1e9 > SETTLED
    return settled and bool(kind) and not kind.startswith("fuse")
