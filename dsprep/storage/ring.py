"""Many reads of a file in flight at once, through one ``io_uring(7)`` of the calling thread.

Scattered reads from storage wait for each other if a thread makes them one by one. A ring takes
hundreds by one call of the kernel: the entries are written by numpy, without an object per read.

Memory that the kernel may still write to must not be given back: whatever interrupts a read, its
requests in flight are awaited before the exception leaves.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import numpy as np

from dsprep.core.schema import Ints
from dsprep.storage.libc import c_function

ENTRIES = 256
"""Requests in flight at most: more gained nothing on the drives that were measured."""

READ, READV = 22, 1
"""Operations of the kernel: bytes to an address, or to a list of them."""

_SETUP, _ENTER = 425, 426  # the same numbers on every architecture
_GETEVENTS = 1
_ONE_MAPPING, _PLAIN_READS = 1, 8  # features, of Linux 5.4 and 5.6
_SINGLE_ISSUER, _DEFER_TASKRUN = 1 << 12, 1 << 13  # completions are posted within our own calls

# What other processors post may be seen in another order elsewhere, without instructions of its
# own that numpy does not have: there, completions have to be posted within our own calls.
_ORDERED = platform.machine() == "x86_64"


_call = c_function("syscall", ctypes.c_long)


class Ring:
    """Requests to the kernel and their results, of one thread.

    Parameters
    ----------
    entries
        Requests in flight at most, a power of two.

    Attributes
    ----------
    process
        The process that made it; one that was forked from it must not use it.
    busy
        Whether it is reading. What interrupts that, such as the handler of a signal, must not
        read by it.

    Raises
    ------
    OSError
        If the kernel refuses it, or has no descriptor or memory for it.

    Notes
    -----
    ``io_uring_setup(2)`` states the layout of ``struct io_uring_params`` and of the mapped rings.
    """

    def __init__(self, entries: int = ENTRIES) -> None:
        self.fd, self.process, self.busy = -1, os.getpid(), False
        if sys.platform != "linux" or sys.byteorder != "little":
            raise OSError(errno.ENOSYS, "io_uring is used on little-endian Linux only")
        for flags in (_SINGLE_ISSUER | _DEFER_TASKRUN, 0)[: 1 + _ORDERED]:
            parameters = np.zeros(30, np.uint32)
            parameters[2] = flags
            self.fd = _call(_SETUP, entries, ctypes.c_void_p(parameters.ctypes.data))
            if self.fd >= 0 or ctypes.get_errno() != errno.EINVAL:
                break
        if self.fd < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"io_uring is refused: {os.strerror(number)}")
        if ~int(parameters[5]) & (_ONE_MAPPING | _PLAIN_READS):
            raise OSError(errno.ENOSYS, "io_uring of this kernel is too old")
        self.entries, completions = int(parameters[0]), int(parameters[1])
        requests, results = parameters[10:20], parameters[20:30]
        nbytes = max(int(requests[6]) + 4 * self.entries, int(results[5]) + 16 * completions)
        rings, table = self._map(nbytes, 0), self._map(64 * self.entries, 0x1000_0000)
        words = np.frombuffer(rings, np.uint32, nbytes // 4)
        self._head, self._tail, mask = (int(requests[i]) // 4 for i in range(3))
        self._taken, self._posted, results_mask = (int(results[i]) // 4 for i in range(3))
        self._mask, self._results_mask = int(words[mask]), int(words[results_mask])
        first = int(requests[6]) // 4
        words[first : first + self.entries] = np.arange(self.entries)
        self._words = words
        # ``struct io_uring_sqe``: operation and file, offset, address, length, the request's number
        self._requests = np.frombuffer(table, np.int64, 8 * self.entries).reshape(-1, 8)
        # ``struct io_uring_cqe``: the request's number (two words), result, flags
        descriptors = np.frombuffer(rings, np.int32, 4 * completions, int(results[5]))
        self._results = descriptors.reshape(-1, 4)

    def _map(self, nbytes: int, offset: int) -> mmap.mmap:
        shared = mmap.MAP_SHARED | mmap.MAP_POPULATE
        return mmap.mmap(self.fd, nbytes, shared, mmap.PROT_READ | mmap.PROT_WRITE, offset=offset)

    def __del__(self) -> None:
        if self.fd >= 0:  # in a forked process, too: it has a copy of the descriptor
            os.close(self.fd)

    def read(self, heads: Ints, starts: Ints, addresses: Ints, lengths: Ints) -> tuple[int, Ints]:
        """Read ranges of files.

        Parameters
        ----------
        heads
            int64, shape ``(n,)``: `READ` or `READV`, and the file ``<< 32``.
        starts
            int64, shape ``(n,)``: the first byte of each range in its file.
        addresses, lengths
            int64, shape ``(n,)``: where its bytes go, and how many they are, less than 2 GiB; of
            `READV` the address of its first ``struct iovec``, and how many of them it has.

        Returns
        -------
        calls
            System calls made.
        got
            int64, shape ``(n,)``: the bytes of each that were read, which may be fewer than asked
            for, even none; or the negative number of the error.
        """
        got = np.zeros(len(starts), np.int64)
        calls = sent = done = 0
        with self._used():
            while done < len(got):
                room = min(self.entries - (sent - done), len(got) - sent)
                if room:
                    self._put((heads, starts, addresses, lengths), sent, sent + room)
                    sent += room
                left = sent - done
                calls += 1
                if not self._enter(left if sent == len(got) else left // 2):
                    self._settle()
                    self._take(got)
                    break
                done += len(self._take(got))
        return calls, got

    def each(
        self, head: int, starts: Ints, lengths: Ints, slots: Ints
    ) -> Generator[tuple[int, int, int], None, None]:
        """Read ranges of a file through some memory, each as soon as there is room for it.

        Parameters
        ----------
        head, starts, lengths
            As in `read`, for a file.
        slots
            int64, shape ``(k,)``: addresses of memory that any of the ranges fits in. So many
            requests are in flight.

        Yields
        ------
        number, address, result
            Of a range that is there, in any order: which one, the slot that it is in, and what
            `read` calls `got`. The slot is used again when the next one is asked for.
        """
        n, sent = len(starts), 0
        got, addresses = np.zeros(n, np.int64), np.zeros(n, np.int64)
        columns = np.full(n, head), starts, addresses, lengths
        free, ready, pending = slots[: self.entries].tolist(), deque[int](), set[int]()
        with self._used():
            for _ in range(n):
                new = range(sent, sent + min(len(free), n - sent))
                if new:
                    addresses[new.start : new.stop] = [free.pop() for _ in new]
                    self._put(columns, new.start, new.stop)
                    pending.update(new)
                    sent = new.stop
                while new or not ready:
                    taken = self._enter(0 if ready else 1)
                    if not taken:
                        self._settle()
                    came = self._take(got).tolist()
                    pending.difference_update(came)
                    ready.extend(came)
                    if not taken:  # nothing of these has come
                        ready.extend(pending)
                        pending.clear()
                    new = range(0)
                number = ready.popleft()
                yield number, int(addresses[number]), int(got[number])
                free.append(int(addresses[number]))

    @contextmanager
    def _used(self) -> Iterator[None]:
        """Leave nothing in flight, however the ``with`` block ends."""
        self.busy = True
        try:
            if self._words[self._head] != self._words[self._taken]:
                self._drain()  # an interrupt struck while it was drained
            yield
        except BaseException:
            self._drain()
            raise
        finally:
            self.busy = False

    def _put(self, columns: tuple[Ints, ...], begin: int, end: int) -> None:
        """Write some requests, for which there is room, to the ring."""
        entries = np.zeros((end - begin, 8), np.int64)
        for k, column in enumerate(columns):
            entries[:, k] = column[begin:end]
        entries[:, 4] = numbers = np.arange(begin, end)
        tail = int(self._words[self._tail])
        self._requests[(numbers + (tail - begin)) & self._mask] = entries
        self._words[self._tail] = (tail + end - begin) & 0xFFFF_FFFF

    def _enter(self, minimum: int) -> bool:
        """Submit requests and wait until `minimum` are done; False if the kernel takes no more."""
        waiting = (int(self._words[self._tail]) - int(self._words[self._head])) & 0xFFFF_FFFF
        result = _call(_ENTER, self.fd, waiting, minimum, _GETEVENTS, None, 0)
        return bool(result >= 0) or ctypes.get_errno() == errno.EINTR

    def _take(self, got: Ints) -> Ints:
        """Note the results that are there, and make room for others; return whose they are."""
        first, posted = int(self._words[self._taken]), int(self._words[self._posted])
        count = (posted - first) & 0xFFFF_FFFF
        results = self._results[np.arange(first, first + count) & self._results_mask]
        numbers: Ints = results[:, 0]
        got[numbers] = results[:, 2]
        self._words[self._taken] = posted
        return numbers

    def _settle(self) -> None:
        """Take back requests that the kernel has not taken, and wait for those that it has."""
        self._words[self._tail] = self._words[self._head]
        while self._words[self._head] != self._words[self._posted]:
            _call(_ENTER, self.fd, 0, 1, _GETEVENTS, None, 0)

    def _drain(self) -> None:
        """Leave nothing in flight, and forget all results."""
        while True:
            try:
                self._settle()
                self._words[self._taken] = self._words[self._posted]
            except BaseException:  # another one is on its way already
                continue
            else:
                return


_own = threading.local()
_refused = threading.Event()


def way() -> str:
    """Return what reads ranges apart from each other here: ``"io_uring"`` or ``"preadv"``."""
    return "preadv" if ring() is None else "io_uring"


def ring() -> Ring | None:
    """Return the ring of this thread; None where it is in use, or the kernel refuses rings."""
    own_ring: Ring | None = getattr(_own, "ring", None)
    if own_ring is not None and own_ring.process == os.getpid():
        return None if own_ring.busy else own_ring
    if not _refused.is_set():
        try:
            own_ring = _own.ring = Ring()
        except OSError:
            _refused.set()
        else:
            return own_ring
    return None
