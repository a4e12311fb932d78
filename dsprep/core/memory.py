"""The memory of this machine: how much there is, and how much may be taken."""

from __future__ import annotations

import os
from pathlib import Path


def total_memory() -> int:
    """Return the bytes of memory of this machine, which stay the same between runs."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


LEAST_MEMORY = 256 << 20
"""Bytes that may be taken where nothing is said, however little is free."""


def allowed_memory(memory: int | None) -> int:
    """Return the bytes that may be taken: those that somebody chose, else a quarter of the free."""
    return max(LEAST_MEMORY, free_memory() // 4) if memory is None else memory


def free_memory() -> int:
    """Return the bytes of memory that can be taken without swapping, within the cgroup's limit."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except OSError:
        return free
    return free if limit == "max" else max(0, min(free, int(limit) - used))
