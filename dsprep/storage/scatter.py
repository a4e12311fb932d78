"""Byte ranges of a file, each read to an address of its own, with as few ``preadv`` as possible.

`drain` is the opposite: bytes at many addresses are written to one range of a file.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dsprep.core.schema import Ints
from dsprep.core.spans import offsets_of
from dsprep.storage.libc import c_function
from dsprep.storage.ranges import CALL_NBYTES, IOV_MAX, PAUSES, ends_early
from dsprep.storage.ring import READ, READV, ring

NEAR = 16 << 10
"""Bytes between two ranges that are read and dropped rather than skipped by a second call."""

GROUP_NEAR = 4 << 20
"""The same within a group, whose padding is read along for the sake of one request."""

APART_NEAR = 4 << 10
"""The same among ranges that are apart, in no order: a request of many in flight costs less than
what it takes to copy more than that."""

_dropped = np.empty(NEAR, np.uint8)

SEVERAL = 8
"""Ranges from which on they are handed to the kernel together."""

_AGAIN = frozenset({errno.EINTR, errno.EAGAIN, errno.ECANCELED, errno.ENOMEM})
"""Results of a ring that say nothing of the file: it is read by `fill`."""

LONGEST = 1 << 30
"""Bytes of a request: the kernel reads less than 2 GiB by one."""

DROPPED = int(_dropped.ctypes.data)
"""The address that bytes go to which nobody reads: `NEAR` bytes."""


_PARAMETERS = ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_call, _write = c_function("preadv", *_PARAMETERS), c_function("pwritev", *_PARAMETERS)


@dataclass(frozen=True)
class Runs:
    """Contiguous ranges of a file, each with the addresses that its bytes go to.

    Attributes
    ----------
    starts
        int64, shape ``(n,)``: the first byte of each in the file.
    edges
        int64, shape ``(n + 1,)``: range i goes to ``places[edges[i]:edges[i + 1]]``.
    places
        int64, shape ``(m, 2)``, C-contiguous: addresses, each with a number of bytes (``struct
        iovec``). Bytes between what is wanted go to an address that nobody reads.
    single
        Whether each range goes to one address.
    """

    starts: Ints
    edges: Ints
    places: Ints
    single: bool = False

    @property
    def sizes(self) -> Ints:
        """Bytes of each: int64, shape ``(n,)``."""
        lengths = self.places[:, 1]
        return lengths if self.single else np.diff(offsets_of(lengths)[self.edges])

    @property
    def vectors(self) -> tuple[Ints, Ints]:
        """The address of the first ``struct iovec`` of each, and how many one call may take."""
        first = self.edges[:-1]
        counts = np.minimum(self.edges[1:] - first, IOV_MAX)
        return self.places.ctypes.data + first * self.places.itemsize * 2, counts

    def requests(self, fd: int) -> tuple[Ints, Ints, Ints, Ints]:
        """Return what `dsprep.storage.ring.Ring.read` takes for a file."""
        if self.single:
            operation, addresses = READ, self.places[:, 0]
            lengths = np.minimum(self.places[:, 1], LONGEST)
        else:
            operation, (addresses, lengths) = READV, self.vectors
        heads = np.full(len(self.starts), operation | fd << 32)
        return heads, self.starts, addresses, lengths

    def part(self, begin: int, end: int) -> Runs:
        """Return some of the ranges."""
        first = int(self.edges[begin])
        edges = self.edges[begin : end + 1] - first
        iovecs = self.places[first : first + int(edges[-1])]
        return Runs(self.starts[begin:end], edges, iovecs, self.single)

    def divided(self, count: int) -> Iterator[Runs]:
        """Yield the ranges in at most `count` parts, of about as many bytes each."""
        ends = np.cumsum(self.sizes)
        at = np.searchsorted(ends, np.arange(1, count) * int(ends[-1]) // count, "right")
        for begin, end in pairwise(sorted({0, *at.tolist(), len(ends)})):
            yield self.part(begin, end)

    def __iter__(self) -> Iterator[tuple[int, Ints]]:
        """Yield the first byte and the places of each."""
        for start, (a, b) in zip(self.starts.tolist(), pairwise(self.edges.tolist()), strict=True):
            yield start, self.places[a:b]


class RangeError(OSError):
    """One of many ranges of a file cannot be read; `offset` is its first byte in the file."""

    offset = 0

    def at(self, offset: int) -> RangeError:
        """Return itself with the offset."""
        self.offset = offset
        return self


_NO_RUNS = Runs(np.zeros(0, np.int64), np.zeros(1, np.int64), np.zeros((0, 2), np.int64))


def runs(offsets: Ints, lengths: Ints, addresses: Ints, near: int = NEAR) -> Runs:
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
    """
    if not len(offsets):
        return _NO_RUNS
    gaps = offsets[1:] - offsets[:-1] - lengths[:-1]
    if 8 * int(np.count_nonzero(gaps <= near)) < len(offsets):
        return together(
            offsets, [(addresses, lengths)]
        )  # joining so few takes longer than it saves
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
    iovecs = np.empty((int(at[-1]) + 1, 2), np.int64)
    if dropped.any():
        iovecs[:] = DROPPED, NEAR
        last = at[1:][dropped] - 1
        iovecs[last, 1] = gaps[dropped] - (extra[dropped] - 1) * NEAR
    iovecs[at, 0], iovecs[at, 1] = addresses, lengths
    first = np.concatenate(([0], np.flatnonzero((gaps != 0) & ~dropped) + 1))
    return Runs(offsets[first], np.append(at[first], len(iovecs)), iovecs)


def together(starts: Ints, columns: Sequence[tuple[Ints | int, Ints | int]]) -> Runs:
    """Return ranges of a file, in any order, each of as many parts, back to back.

    `columns` are, part by part, the addresses that these go to, and their bytes.
    """
    n, k = len(starts), len(columns)
    iovecs = np.empty((n, k, 2), np.int64)
    for i, (addresses, lengths) in enumerate(columns):
        iovecs[:, i, 0], iovecs[:, i, 1] = addresses, lengths
    edges = np.arange(0, n * k + 1, k)
    return Runs(starts, edges, iovecs.reshape(-1, 2), single=k == 1)


def one_range(start: int, iovecs: Ints) -> Runs:
    """Return one range of a file that goes to `iovecs`."""
    return Runs(np.array([start]), np.array([0, len(iovecs)]), iovecs)


def cut(start: int, iovecs: Ints, at: Sequence[int]) -> list[tuple[int, Ints]]:
    """Cut a range of a file, and its places, at some rising offsets within it."""
    ends = np.cumsum(iovecs[:, 1])
    edges = [start, *at, start + int(ends[-1])]
    if edges[0] == edges[-1]:
        return [(start, iovecs)]
    out = []
    for begin, end in pairwise(edges):
        low = int(np.searchsorted(ends, begin - start, "right"))
        high = int(np.searchsorted(ends, end - start, "left"))
        part = iovecs[low : high + 1].copy()
        part[-1, 1] -= int(ends[high]) - (end - start)
        before = begin - start - int(ends[low] - iovecs[low, 1])
        part[0] += before, -before
        out.append((begin, part))
    return out


def stepped(start: int, iovecs: Ints, nbytes: int | None) -> list[tuple[int, Ints]]:
    """Cut a range of a file at all multiples of `nbytes`; None: not at all."""
    if nbytes is None:
        return [(start, iovecs)]
    end = start + int(iovecs[:, 1].sum())
    return cut(start, iovecs, range((start // nbytes + 1) * nbytes, end, nbytes))


def read_files(parts: Sequence[tuple[int, Runs, object]]) -> tuple[int, int]:
    """Read ranges of files to their places: many together, where the kernel has ``io_uring``.

    `parts` are a file, what to read of it, and the file for messages. Returns the system calls
    made, and the bytes that they asked for; raises as `fill`.
    """
    calls = nbytes = 0
    own_ring = ring() if sum(len(runs.starts) for _, runs, _ in parts) >= SEVERAL else None
    if own_ring is None:
        results = [*map(_one_by_one, parts)]
    else:
        requests = [runs.requests(fd) for fd, runs, _ in parts]
        if len(requests) == 1:
            calls, got = own_ring.read(*requests[0])
            results = [got]
        else:
            calls, got = own_ring.read(*map(np.concatenate, zip(*requests, strict=True)))
            results = np.split(got, np.cumsum([len(r[0]) for r in requests])[:-1])
    for (fd, runs, where), got in zip(parts, results, strict=True):
        sizes = runs.sizes
        nbytes += int(sizes.sum())
        if own_ring is None:
            calls += len(got)
        for i in np.flatnonzero(got != sizes).tolist():
            start, done = int(runs.starts[i]), int(got[i])
            if done < 0 and -done not in _AGAIN:
                text = f"{os.strerror(-done)} at offset {start}"
                raise RangeError(-done, text, str(where)).at(start)
            done = max(0, done)
            rest = _rest(runs.places[runs.edges[i] : runs.edges[i + 1]], done)
            calls += fill(fd, start + done, rest, where)[0]
    return calls, nbytes


def _one_by_one(part: tuple[int, Runs, object]) -> Ints:
    """Read each range by a call; return what these return, or the negative number of an error."""
    (fd, runs, _), got = part, list[int]()
    lists = (runs.starts, *runs.vectors)
    for start, vector, count in zip(*(column.tolist() for column in lists), strict=True):
        done = _call(fd, vector, count, start)
        got.append(done if done >= 0 else -ctypes.get_errno())
        if done < 0 and -got[-1] not in _AGAIN:
            break  # nothing of the others then
    return np.array(got + [0] * (len(runs.starts) - len(got)), np.int64)


def fill(fd: int, start: int, iovecs: Ints, where: object) -> tuple[int, int]:
    """Read the file from ``start`` on into places, as `runs` returns them, which that fills.

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
    while len(iovecs):
        part = iovecs[:IOV_MAX]
        size = int(part[:, 1].sum())
        got = _call(fd, part.ctypes.data, len(part), at)
        calls += 1
        if got < 0:
            _again(pauses, at, where)
            continue
        if got == 0 and size:
            rest = int(iovecs[:, 1].sum())
            raise ends_early(where, start, at - start + rest, at - start)
        at, pauses = at + got, iter(PAUSES)
        if got == size:
            iovecs = iovecs[len(part) :]
            continue
        iovecs = _rest(iovecs, got)
    return calls, at - start


def drain(fd: int, start: int, iovecs: Ints, where: object) -> None:
    """Write the bytes at places, as `fill` takes them, to a file from ``start`` on.

    Raises
    ------
    OSError
        If they cannot be written.
    """
    at, pauses = start, iter(PAUSES)
    while len(iovecs):
        part = iovecs[:IOV_MAX]
        ends = np.cumsum(part[:, 1])
        count = int(np.searchsorted(ends, CALL_NBYTES, "right"))
        part = part[:count] if count else np.array([[part[0, 0], CALL_NBYTES]])
        size = int(part[:, 1].sum())
        got = _write(fd, part.ctypes.data, len(part), at)
        if got < 0 or (got == 0 and size):
            _again(pauses, at, where, errno.EIO if got == 0 else 0)
            continue
        at, pauses = at + got, iter(PAUSES)
        iovecs = iovecs[count:] if count and got == size else _rest(iovecs, got)


def _again(pauses: Iterator[float], at: int, where: object, number: int = 0) -> None:
    """Wait before a call that failed is made again, or raise what went wrong."""
    number = number or ctypes.get_errno()
    if number == errno.EINTR:
        return
    pause = next(pauses, None) if number == errno.EAGAIN else None
    if pause is None:
        raise OSError(number, f"{os.strerror(number)} at offset {at}", str(where))
    time.sleep(pause)


def _rest(iovecs: Ints, got: int) -> Ints:
    """Return what is left to fill of places after `got` bytes."""
    ends = np.cumsum(iovecs[:, 1])
    full = int(np.searchsorted(ends, got, "right"))
    rest = iovecs[full:].copy()
    if len(rest):
        left = int(ends[full]) - got
        rest[0] = rest[0, 0] + rest[0, 1] - left, left
    return rest
