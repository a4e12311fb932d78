"""One file system on several nodes: the work of another one shows late."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from dsprep.errors import TargetError

PATIENCE = 65.0
"""Seconds for which another node's work may be unseen here: clients of network file systems keep
missing names for up to a minute."""


@lru_cache
def boot() -> str:
    """Return a word for this start of this kernel; empty if it is not told."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def wait_for(path: Path) -> None:
    """Wait until what another process has made is seen here; `TargetError` after `PATIENCE`."""
    end, pause = time.monotonic() + PATIENCE, 0.02
    while not path.exists():
        if time.monotonic() > end:
            raise TargetError(
                f"another process has completed it, and it is not seen here after {PATIENCE:.0f} s",
                where=path,
                fix="take a file system that all nodes share; if this is one, have its client keep "
                "attributes for a shorter time: actimeo=1 or noac for NFS, attr_timeout=1 for FUSE",
            )
        time.sleep(pause)
        pause = min(2 * pause, 5.0)
        revalidate(path)


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
