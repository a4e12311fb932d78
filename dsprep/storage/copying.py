"""From memory to many places, by one call of the kernel: the GIL is taken once, not per sample.

``process_vm_readv(2)``, applied to the own process, takes the same list of places as ``preadv``.
Where it meets a page that cannot be read, such as one of a mapping past the end of its file, it
stops, while a copy by the processor would end the process by SIGBUS.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np

from dsprep.core.schema import Ints
from dsprep.storage.ranges import IOV_MAX

MOST = 1 << 30
"""Bytes that the kernel surely copies by one call (it stops short of 2 GiB)."""

_DENIED = frozenset({1, 38})  # EPERM, ENOSYS: by a filter of system calls, or a kernel without


def _process_vm_readv() -> Any:
    """Return the function of the C library; None where it has none."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if function is not None:
        size, pointer = ctypes.c_ulong, ctypes.c_void_p
        function.restype = ctypes.c_ssize_t
        function.argtypes = [ctypes.c_int, pointer, size, pointer, size, size]
    return function


_call = _process_vm_readv()


def scatter(address: int, iovecs: Ints) -> int | None:
    """Copy memory from `address` on to places as in `Handle.read_range`, as far as it can be read.

    Any `IOV_MAX` of the places have at most `MOST` bytes. Returns the bytes copied, all unless a
    page could not be read; None if the system denies the call.
    """
    done = 0
    source = np.empty(2, np.int64)
    for low in range(0, len(iovecs), IOV_MAX):
        part = iovecs[low : low + IOV_MAX]
        size = int(part[:, 1].sum())
        source[:] = address + done, size
        if _call is None:
            return None
        got = _call(os.getpid(), part.ctypes.data, len(part), source.ctypes.data, 1, 0)
        if got < 0 and ctypes.get_errno() in _DENIED:
            return None
        done += max(0, got)
        if got < size:
            break
    return done


def copy(address: int, iovecs: Ints) -> None:
    """Copy memory from `address` on to places, by the quickest way that the system has."""
    if scatter(address, iovecs) is None:
        move(address, iovecs)


def move(address: int, iovecs: Ints) -> None:
    """Copy memory from `address` on to places one by one: slower, and possible everywhere."""
    for to, size in iovecs.tolist():
        ctypes.memmove(to, address, size)
        address += size
