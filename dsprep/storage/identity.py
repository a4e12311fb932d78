"""Whether a file is still the same, by what the file system states about it.

What decides is size, time stamp and change time; see `dsprep.storage.marks`, of whole datasets.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from dsprep.errors import FormatError


class Status(NamedTuple):
    """What of a file's status changes when it is written to or replaced; times are in ns."""

    inode: int
    nbytes: int
    mtime_ns: int
    ctime_ns: int


SECOND = 10**9

UNITS = (100, 10**6, 10**7, SECOND, 2 * SECOND)
"""To which file systems, archives and protocols cut times, in ns: SMB and NTFS, UDF, exFAT, many,
and FAT."""


class ChangedError(FormatError):
    """Data changed while they were read."""


def status(facts: os.stat_result) -> Status:
    """Return what of a file's status changes when it is written to or replaced."""
    return Status(facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)


def same_time(a: int, b: int) -> bool:
    """Whether two times are equal, perhaps since one was cut to coarser units."""
    return a == b or any(a // u == b // u and (a % u == 0 or b % u == 0) for u in UNITS)


_sole: Counter[str] = Counter()
"""Absolute paths at and below which nobody but the job of this process writes, and how often."""
_sole_lock = threading.Lock()


@contextmanager
def sole_writer(*paths: Path) -> Iterator[None]:
    """Compare what lies at and below these paths by size alone: nobody else can write there."""
    own = [os.path.abspath(path) for path in paths]  # noqa: PTH100 (links stay as they are)
    with _sole_lock:
        _sole.update(own)
    try:
        yield
    finally:
        with _sole_lock:
            _sole.subtract(own)
            for path in own:
                if not _sole[path]:
                    del _sole[path]


def _is_sole(path: str | Path) -> bool:
    """Whether only this job writes to a file."""
    if not _sole:
        return False
    name = os.path.abspath(path)  # noqa: PTH100
    with _sole_lock:
        return any(name == own or name.startswith(f"{own}/") for own in _sole)


def same_file(path: str | Path, before: Status, now: Status) -> bool:
    """Whether a file on the same mount is the same, as far as its status says that."""
    if before.nbytes != now.nbytes:
        return False
    same = same_time(before.mtime_ns, now.mtime_ns) and same_time(before.ctime_ns, now.ctime_ns)
    return same or _is_sole(path)


def is_coarse(status: Status) -> bool:
    """Whether a change time says too little, being of whole seconds; it may be the time stamp."""
    return status.ctime_ns % SECOND == 0


def changed(path: Path, before: Status, now: Status | None) -> ChangedError:
    """Return the error for a file that was replaced, written to, or (None) removed."""
    return ChangedError(
        "the file changed while it was read",
        where=path,
        expected=_differences(before, now),
        found="nothing there" if now is None else _differences(now, before),
        fix="start again once nobody writes to it",
    )


def _differences(one: Status, other: Status | None) -> str:
    """Return what of a status differs from the other one, all of it if there is none."""
    inode, nbytes, mtime, ctime = one
    words = f"inode {inode}", f"{nbytes:,} bytes", f"time stamp {mtime}", f"change time {ctime}"
    return ", ".join(w for k, w in enumerate(words) if other is None or one[k] != other[k])
