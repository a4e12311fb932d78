"""From memory to many places, by one call of the kernel: the GIL is taken once, not per sample.

``process_vm_readv(2)``, applied to the own process, takes the same list of places as ``preadv``.
"""

from __future__ import annotations

import ctypes
import os

import numpy as np

from dsprep.core.schema import Ints
from dsprep.storage.libc import c_function
from dsprep.storage.ranges import IOV_MAX

MOST = 1 << 30
"""Bytes that the kernel surely copies by one call (it stops short of 2 GiB)."""


_SIZE, _POINTER = ctypes.c_ulong, ctypes.c_void_p
_call = c_function(
    "process_vm_readv", ctypes.c_ssize_t, ctypes.c_int, _POINTER, _SIZE, _POINTER, _SIZE, _SIZE
)


def copy(address: int, iovecs: Ints) -> None:
    """Copy memory from `address` on to places as in `Handle.read_range`.

    Any `IOV_MAX` of the places have at most `MOST` bytes.
    """
    source = np.empty(2, np.int64)
    for low in range(0, len(iovecs), IOV_MAX):
        part = iovecs[low : low + IOV_MAX]
        size = int(part[:, 1].sum())
        source[:] = address, size
        got = -1
        if _call is not None:
            got = _call(os.getpid(), part.ctypes.data, len(part), source.ctypes.data, 1, 0)
        if got < size:  # it is denied by a filter of system calls, or the kernel lacks it
            move(address, part)
        address += size


def move(address: int, iovecs: Ints) -> None:
    """Copy memory to places one by one: slower, and possible everywhere."""
    for to, size in iovecs.tolist():
        ctypes.memmove(to, address, size)
        address += size
