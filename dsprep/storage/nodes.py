"""What several nodes see of one file system: which node this is, and when another's work shows."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from dsprep.errors import TargetError
from dsprep.storage.trees import tree_nbytes

PATIENCE = 65.0
"""Seconds for which another node's work may be unseen here: clients of network file systems keep
attributes and missing names for up to a minute."""


def pauses() -> Iterator[float]:
    """Yield the seconds before each further look at what another node has written."""
    left, pause = PATIENCE, 0.02
    while left > 0:
        yield min(pause, left)
        left, pause = left - pause, min(2 * pause, 5.0)


@lru_cache
def boot() -> str:
    """Return a word for this start of this kernel; empty if it is not told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@lru_cache
def node() -> str:
    """Return a word for this node since its start."""
    return f"{os.uname().nodename} {boot()}"


def file_system(device: int) -> str:
    """Return the type of the file system of a device number; empty if it is not told."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    words = [line.split() for line in lines]
    return next((w[w.index("-") + 1] for w in words if w[2:3] == [number] and "-" in w), "")


def wait_for(path: Path, by: str, nbytes: int | None = None) -> None:
    """Wait until a file or directory that another process has completed is seen here.

    Parameters
    ----------
    by
        The `node` of that process; nothing is looked at if it is this one.
    nbytes
        Its bytes; of a directory those of its data files.

    Raises
    ------
    TargetError
        If it is not seen after `PATIENCE`.
    """
    if by == node():
        return
    visible_nbytes: int | None = None
    for pause in (0.0, *pauses()):
        time.sleep(pause)
        revalidate(path)
        visible_nbytes = None
        with suppress(FileNotFoundError):
            visible_nbytes = path.stat().st_size if nbytes is None else tree_nbytes(path)
        if visible_nbytes is not None and nbytes in (None, visible_nbytes):
            return
    raise TargetError(
        f"another node has completed it, and it is not seen from here after {PATIENCE:.0f} s",
        where=path,
        expected=None if nbytes is None else f"{nbytes:,} bytes",
        found="nothing there" if visible_nbytes is None else f"{visible_nbytes:,} bytes",
        fix="take a file system that all nodes share; if this is one, have its client keep "
        "attributes for a shorter time: actimeo=1 or noac for NFS, attr_timeout=1 for FUSE",
    )


def revalidate(path: Path) -> None:
    """Have the client of a network file system ask its server for a file or directory.

    Opening does that, and for names that it takes for missing, opening the directory.
    """
    for each in (path.parent, path):
        with suppress(OSError):
            fd = os.open(each, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                os.fstat(fd)
            finally:
                os.close(fd)
