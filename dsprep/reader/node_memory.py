"""Memory that two processes share, without a name: it is gone with the last of them.

The reading process makes it (``memfd_create``), the other one maps it.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from dsprep.core.schema import Array
from dsprep.reader.memory import HUGE


@dataclass(frozen=True)
class _Piece:
    address: int
    nbytes: int
    memory: weakref.ref[mmap.mmap]


class Shared:
    """Makes memory, and tells by an address which piece of it that is.

    Any thread may use it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pieces: dict[int, _Piece] = {}
        self._new: dict[int, int] = {}  # files of pieces that were not handed over yet
        self._gone: list[int] = []  # appended to by whatever thread frees a piece
        self._untold: list[int] = []  # gone, which the other process does not know
        self._made = 0
        self._closed = False

    def allocate(self, nbytes: int) -> mmap.mmap:
        """Return memory of `nbytes` bytes; see `dsprep.reader.memory.Allocate`."""
        fd = os.memfd_create("dsprep", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            memory = mmap.mmap(fd, nbytes, mmap.MAP_SHARED)
        except BaseException:
            os.close(fd)
            raise
        in_huge_pages(memory, nbytes)
        start = int(np.frombuffer(memory, np.uint8, 1).ctypes.data)
        gone = self._gone
        with self._lock:
            index, self._made = self._made, self._made + 1
            known = weakref.ref(memory, lambda _: gone.append(index))
            self._pieces[index] = _Piece(start, nbytes, known)
            self._new[index] = fd
            if self._closed:
                self._forget_new()
        return memory

    def changes(self) -> tuple[list[tuple[int, int, int]], list[int]]:
        """Return what the other process does not know yet.

        Returns
        -------
        new, gone
            The number, bytes and file of each new piece, which `handed_over` is to be called with;
            the numbers of those that are no more.
        """
        with self._lock:
            self._purge()
            gone, self._untold = self._untold, []
            return [(i, self._pieces[i].nbytes, fd) for i, fd in self._new.items()], gone

    def _purge(self) -> None:
        while self._gone:
            index = self._gone.pop()
            del self._pieces[index]
            fd = self._new.pop(index, None)
            if fd is None:  # handed over
                self._untold.append(index)
            else:
                os.close(fd)

    def handed_over(self, index: int) -> None:
        """Note that the other process has a piece."""
        with self._lock:
            os.close(self._new.pop(index))

    def not_told(self, gone: list[int]) -> None:
        """Have `changes` return again which pieces are no more."""
        with self._lock:
            self._untold += gone

    def find(self, arrays: list[Array]) -> list[tuple[int, int] | None]:
        """Return the piece that each array lies in and from which byte on, or None."""
        with self._lock:
            self._purge()
            alive = sorted((piece.address, i) for i, piece in self._pieces.items())
            sizes = [self._pieces[i].nbytes for _, i in alive]
        starts = [start for start, _ in alive]
        found: list[tuple[int, int] | None] = []
        for array in arrays:
            at = int(array.ctypes.data)
            i = bisect_right(starts, at) - 1
            inside = i >= 0 and at + array.nbytes <= starts[i] + sizes[i]
            found.append((alive[i][1], at - starts[i]) if inside else None)
        return found

    def close(self) -> None:
        """Close the files of what was not handed over."""
        with self._lock:
            self._closed = True
            self._forget_new()

    def _forget_new(self) -> None:
        for fd in self._new.values():
            os.close(fd)
        self._new.clear()


def in_huge_pages(memory: mmap.mmap, nbytes: int) -> None:
    """Ask for huge pages, where the kernel has some for shared memory."""
    if nbytes >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return
