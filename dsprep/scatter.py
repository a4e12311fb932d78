"""Byte ranges of a file, each read to an address of its own, with as few ``preadv`` as possible.

The kernel puts each range where it belongs while it copies, so a shuffle costs no copy of its
own. The list of places is made by numpy, not of one Python object per range: ``preadv`` of the C
library is called with it. (`os.preadv` takes one object per place, which costs about a third of
the time that the kernel needs for 3 kB.)
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from itertools import pairwise
from typing import Any

import numpy as np

from dsprep.errors import FormatError
from dsprep.schema import Ints
from dsprep.storage import IOV_MAX, PAUSES

NEAR = 16 << 10
"""Bytes between two ranges that are read and dropped rather than skipped by a second call."""

GROUP_NEAR = 4 << 20
"""The same within a group, whose padding is read along for the sake of one request."""

_dropped = np.empty(NEAR, np.uint8)

DROPPED = int(_dropped.ctypes.data)
"""The address that bytes go to which nobody reads: `NEAR` bytes."""


def _preadv() -> Any:
    """Return ``preadv`` of the C library, with 64-bit offsets."""
    libc = ctypes.CDLL(None, use_errno=True)
    function = getattr(libc, "preadv64", None) or libc.preadv
    function.restype = ctypes.c_ssize_t
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
    return function


_call = _preadv()


def scatter(
    fd: int, offsets: Ints, lengths: Ints, addresses: Ints, where: object, near: int = NEAR
) -> tuple[int, int]:
    """Read the bytes ``offsets[i] .. offsets[i] + lengths[i]`` to ``addresses[i]``.

    Parameters
    ----------
    fd
        The file.
    offsets, lengths, addresses
        As in `runs`.
    where
        The file, for messages.
    near
        As in `runs`.

    Returns
    -------
    calls, nbytes
        System calls made, and bytes that they asked for.

    Raises
    ------
    FormatError, OSError
        As in `fill`.
    """
    calls = nbytes = 0
    for start, places in runs(offsets, lengths, addresses, near):
        done = fill(fd, start, places, where)
        calls, nbytes = calls + done[0], nbytes + done[1]
    return calls, nbytes


def runs(offsets: Ints, lengths: Ints, addresses: Ints, near: int = NEAR) -> list[tuple[int, Ints]]:
    """Return ranges of a file as few longer ones, each with the places where its bytes go.

    Parameters
    ----------
    offsets, lengths
        int64, shape ``(n,)``, in bytes; offsets rise.
    addresses
        int64, shape ``(n,)``, of memory that the caller owns and that takes that many bytes.
    near
        Bytes between two ranges that are read along. More than `NEAR` of them are only as long as
        they are in all not more than the bytes that are wanted.

    Returns
    -------
    Each ``(start, places)``: places is int64, shape ``(m, 2)``, C-contiguous, an address and a
    number of bytes one after another (``struct iovec``) for the file from byte `start` on.
    Bytes between two ranges go to a place that nobody reads.
    """
    if not len(offsets):
        return []
    # Ranges that go on where the one before ends, here and there, are one.
    new = np.ones(len(offsets), bool)
    new[1:] = offsets[1:] != offsets[:-1] + lengths[:-1]
    new[1:] |= addresses[1:] != addresses[:-1] + lengths[:-1]
    starts = np.flatnonzero(new)
    if len(starts) < len(offsets):
        lengths = np.add.reduceat(lengths, starts)
        offsets, addresses = offsets[starts], addresses[starts]
    gaps = offsets[1:] - (offsets[:-1] + lengths[:-1])
    dropped = (gaps > 0) & (gaps <= near)
    if near > NEAR and int(gaps[dropped].sum()) > int(lengths.sum()):
        dropped &= gaps <= NEAR
    # Where each range goes in the list of places: behind those of the gaps before it.
    extra = np.where(dropped, -(-gaps // NEAR), 0)
    at = np.arange(len(offsets))
    at[1:] += np.cumsum(extra)
    places = np.empty((int(at[-1]) + 1, 2), np.int64)
    if dropped.any():
        places[:] = DROPPED, NEAR
        last = at[1:][dropped] - 1
        places[last, 1] = gaps[dropped] - (extra[dropped] - 1) * NEAR
    places[at, 0], places[at, 1] = addresses, lengths
    far = np.flatnonzero((gaps != 0) & ~dropped) + 1
    return [
        (int(offsets[a]), places[at[a] : at[b - 1] + 1])
        for a, b in pairwise([0, *far.tolist(), len(offsets)])
    ]


def fill(fd: int, start: int, places: Ints, where: object) -> tuple[int, int]:
    """Read the file from ``start`` on into places, which that fills.

    Parameters
    ----------
    fd
        The file.
    start, places
        As `runs` returns them.
    where
        The file, for messages.

    Returns
    -------
    calls, nbytes
        System calls made, and bytes that they asked for.

    Raises
    ------
    FormatError
        If the file ends before the last place is full.
    OSError
        If it cannot be read.
    """
    calls, at, pauses = 0, start, iter(PAUSES)
    while len(places):
        part = places[:IOV_MAX]
        size = int(part[:, 1].sum())
        got = _call(fd, part.ctypes.data, len(part), at)
        calls += 1
        if got < 0:
            number = ctypes.get_errno()
            if number == errno.EINTR:
                continue
            if number == errno.EAGAIN and (pause := next(pauses, None)) is not None:
                time.sleep(pause)
                continue
            raise OSError(number, f"{os.strerror(number)} at offset {at}", str(where))
        if got == 0 and size:
            raise FormatError(
                "the file ends too early",
                where=f"{where}, offset {start}",
                expected=f"{int(places[:, 1].sum())} bytes more",
                found="none",
                fix="the file is truncated or still being written",
            )
        at, pauses = at + got, iter(PAUSES)
        if got == size:
            places = places[len(part) :]
            continue
        ends = np.cumsum(part[:, 1])
        full = int(np.searchsorted(ends, got, "right"))
        rest = int(ends[full]) - got
        places = places[full:].copy()
        places[0, 0] += places[0, 1] - rest
        places[0, 1] = rest
    return calls, at - start
