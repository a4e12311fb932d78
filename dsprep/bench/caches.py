"""Looking at what the page cache holds."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.storage.base import Handle
from dsprep.storage.paths import StorePath, open_file
from dsprep.storage.trees import data_files

WINDOW = 4 << 30
"""Bytes that are looked at in one go, which takes a byte of memory per page."""


def files_of(path: Path) -> list[Path]:
    """Return the files with the data of a dataset, in order; none of a store: no page has them."""
    if isinstance(path, StorePath):
        return []
    return sorted(p for p in data_files(path) if p.is_file())


def resident(files: Iterable[Path]) -> float | None:
    """Return the share of the bytes of files that the page cache has; None if it cannot be seen."""
    cached = total = 0.0
    for file in map(open_file, files):
        for at in range(0, file.nbytes, WINDOW):
            nbytes = min(WINDOW, file.nbytes - at)
            share = _share(file, at, nbytes)
            if share is None:
                return None
            cached, total = cached + share * nbytes, total + nbytes
    return cached / total if total else 0.0


def _share(file: Handle, offset: int, nbytes: int) -> float | None:
    """Return the share of a range that is in the page cache; None where the kernel hides it."""
    owner = os.fstat(file.fd).st_uid
    if os.geteuid() not in (0, owner) and not os.access(file.path, os.W_OK):
        return None
    low = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    try:
        memory = mmap.mmap(file.fd, offset + nbytes - low, prot=mmap.PROT_READ, offset=low)
    except (OSError, ValueError):  # a file system that maps nothing; a range beyond the end
        return None
    data = np.frombuffer(memory, np.uint8)
    pages = np.zeros(-(-len(data) // mmap.PAGESIZE), np.uint8)
    mincore: Any = ctypes.CDLL(None).mincore
    pointer = ctypes.c_void_p
    if mincore(pointer(data.ctypes.data), ctypes.c_size_t(len(data)), pointer(pages.ctypes.data)):
        return None
    return float((pages & 1).mean())
