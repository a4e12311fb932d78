"""What the page cache holds of a file, as far as the kernel tells."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import numpy as np

from dsprep.reading.files import File


def resident(file: File, offset: int, nbytes: int) -> float | None:
    """Return the share of a range that is in the page cache; None where the kernel keeps it secret.

    Notes
    -----
    ``mincore(2)`` says of a file that one may neither write nor owns that all of it is there.
    """
    found = os.fstat(file.fd)
    if os.geteuid() not in (0, found.st_uid) and not os.access(file.path, os.W_OK):
        return None
    low = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    try:
        memory = mmap.mmap(file.fd, offset + nbytes - low, prot=mmap.PROT_READ, offset=low)
    except (OSError, ValueError):  # a file system that maps nothing; a range behind the end
        return None
    data = np.frombuffer(memory, np.uint8)
    pages = np.zeros(-(-len(data) // mmap.PAGESIZE), np.uint8)
    mincore: Any = ctypes.CDLL(None).mincore
    pointer = ctypes.c_void_p
    if mincore(pointer(data.ctypes.data), ctypes.c_size_t(len(data)), pointer(pages.ctypes.data)):
        return None
    return float((pages & 1).mean())
