"""``O_DIRECT``: from the storage past the page cache, for data that is read once or never fits.

Such reads begin and end at multiples of a block, in the file and in memory. Each thread reads
windows of whole blocks into memory of its own, many at a time, and the samples are copied from
there to their places while others arrive.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from typing_extensions import override

from dsprep.core.schema import Bytes, Ints
from dsprep.reader.engines import Engine, Unavailable
from dsprep.reader.memory import HUGE, PAGE, anonymous
from dsprep.storage import copying
from dsprep.storage.base import Handle
from dsprep.storage.ranges import (
    as_bytes,
    close_quietly,
    ends_early,
    fstat,
    preadv_once,
)
from dsprep.storage.ring import READ, Ring, ring
from dsprep.storage.scatter import Runs, stepped

WINDOW = 4 << 20
"""Bytes read at a time, where the kernel refuses io_uring, and of memory of each thread."""

PART, DEPTH = 1 << 20, 32
"""Bytes of a read otherwise, and how many of them are in flight: one at a time leaves arrays of
drives idle. A thread has memory for as many."""

_FIX = 'give engine="buffered", which works on every file system'

_REFUSALS = frozenset(
    {
        errno.EINVAL,  # what open(2) says of file systems without O_DIRECT
        errno.EOPNOTSUPP,
        errno.ENOSYS,
        errno.ENOENT,  # no /proc, or a server that reopens no file without a name
        errno.EACCES,
        errno.EPERM,
    }
)
"""By which opening an open file once more, for direct reads, is refused for good."""


class Direct(Engine):
    """Reads past the page cache; see `Engine`."""

    name = "direct"

    def __init__(self) -> None:
        self._open: WeakKeyDictionary[Handle, Opened] = WeakKeyDictionary()
        self._own = threading.local()

    @override
    def read_runs(self, file: Handle, runs: Runs) -> tuple[int, int]:
        _check_size(file, runs)
        if not int(runs.sizes.sum()):
            return 0, 0
        opened = self._opened(file)
        own_ring, block = ring(), opened.block
        step = WINDOW if own_ring is None else max(PART, block)
        parts = [part for run in runs if run[1][:, 1].any() for part in stepped(*run, step)]
        starts = np.array([at for at, _ in parts])
        needed = starts + [int(iovecs[:, 1].sum()) for _, iovecs in parts]
        low = starts // block * block
        windows = low, -(-needed // block) * block - low, needed - low
        calls = len(parts)
        with closing(self._arrived(file, opened, windows, own_ring, step)) as arrived:
            for i, address, more in arrived:
                at, iovecs = parts[i]
                copying.copy(address + at - int(low[i]), iovecs)
                calls += more
        return calls, int(windows[1].sum())

    def _arrived(
        self,
        file: Handle,
        opened: Opened,
        windows: tuple[Ints, Ints, Ints],
        own_ring: Ring | None,
        step: int,
    ) -> Generator[tuple[int, int, int], None, None]:
        """Yield the number of each window that was read, its address, and further calls made."""
        # Windows are whole blocks: offsets, bytes, and how many of these must come.
        low, sizes, needed = (each.tolist() for each in windows)
        if own_ring is None or len(low) < 2:
            memory = self._memory(max(sizes))
            for i, size in enumerate(sizes):
                calls = opened.read(file, memory[:size], low[i], needed[i])
                yield i, int(memory.ctypes.data), calls - 1
            return
        depth = min(DEPTH, len(low))
        memory = self._memory(depth * step)
        base = int(memory.ctypes.data)
        slots = base + np.arange(depth) * step
        head = READ | opened.fd << 32
        with closing(own_ring.each(head, windows[0], windows[1], slots)) as arrived:
            for i, slot, got in arrived:
                more = 0
                if got < needed[i]:  # an error, or cut short
                    window = memory[slot - base :][: sizes[i]]
                    more = opened.read(file, window, low[i], needed[i])
                yield i, slot, more

    @override
    def prepare(self, file: Handle) -> None:
        self._opened(file)

    def _opened(self, file: Handle) -> Opened:
        opened = self._open.get(file)
        if opened is None:
            # Another thread may have opened it meanwhile: then that one is taken.
            opened = self._open.setdefault(file, Opened(file))
        return opened

    def _memory(self, nbytes: int) -> Bytes:
        """Return memory of this thread, at a multiple of any block."""
        own: Bytes | None = getattr(self._own, "memory", None)
        if own is None or len(own) < nbytes:
            align = max(HUGE, WINDOW)
            mapped = np.frombuffer(anonymous(nbytes + align), np.uint8)
            own = self._own.memory = mapped[-mapped.ctypes.data % align :]
        return own


def _check_size(file: Handle, runs: Runs) -> None:
    """Raise `FormatError` if a file ends before one of the ranges does."""
    size = file.look()[0]
    for i in np.flatnonzero(runs.starts + runs.sizes > size).tolist():
        start, nbytes = int(runs.starts[i]), int(runs.sizes[i])
        if nbytes:
            raise ends_early(file.path, start, nbytes, max(0, size - start))


class Opened:
    """A descriptor for direct reads of a file, closed when nothing refers to it any more.

    Reads begin and end at multiples of `block` bytes, in the file and in memory.
    """

    def __init__(self, file: Handle) -> None:
        self.fd = -1
        if file.fd < 0:
            raise Unavailable("it is not a file of a file system", where=file.path, fix=_FIX)
        if not hasattr(os, "O_DIRECT"):
            raise Unavailable("O_DIRECT is only on Linux", where=file.path, fix=_FIX)
        try:
            # Through the descriptor: the path may lead to another file by now.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT
            self.fd = os.open(f"/proc/self/fd/{file.fd}", flags)
        except OSError as error:
            if error.errno in _REFUSALS:
                raise _refused(file.path, f"to open it: {error.strerror}") from error
            raise OSError(error.errno, error.strerror, str(file.path)) from error
        self.block = block_nbytes(self.fd)
        if not self.block:
            raise _refused(file.path, "statx gives no alignment for it")

    def __del__(self) -> None:
        if self.fd >= 0:
            close_quietly(self.fd)

    def read(self, file: Handle, memory: Bytes, offset: int, needed: int) -> int:
        """Read whole blocks from `offset` on, of which the first `needed` bytes must come.

        Returns the read calls made.
        """
        calls = have = 0
        while True:
            try:
                got = preadv_once(self.fd, as_bytes(memory)[have:], offset + have)
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise _refused(
                        file.path, f"to read it: {os.strerror(error.errno or 0)}"
                    ) from error
                raise
            calls += 1
            if have + got >= needed:
                return calls
            blocks = got // self.block * self.block
            have += blocks
            if not blocks:  # less than a block came, as before the end of some files
                file.pread_into(memory[have:needed], offset + have)
                return calls + 1


def _refused(path: Path, reason: str) -> Unavailable:
    return Unavailable(f"O_DIRECT is refused here ({reason})", where=path, fix=_FIX)


def block_nbytes(fd: int) -> int:
    """Return the bytes at whose multiples direct reads of a file begin and end.

    They are at least a page, a power of two; 0 if the kernel says that the file cannot be read so.
    ``statx(2)`` states them since Linux 6.1 (``STATX_DIOALIGN``); before, a file system's block
    is enough where that is small, and a page where `st_blksize` is the size of a good transfer.
    """
    stated = _dio_align(fd)
    if stated is not None:
        block = max(4096, PAGE, *stated)
        return block if min(stated) > 0 and block <= WINDOW and block & (block - 1) == 0 else 0
    size = fstat(fd).st_blksize
    return max(4096, PAGE, size if size <= 65536 and size & (size - 1) == 0 else 0)


def _dio_align(fd: int) -> tuple[int, int] | None:
    """Return what ``statx`` says: alignment of memory and of offsets, 0 where impossible."""
    statx: Any = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    answer = np.zeros(64, np.uint32)  # struct statx: 256 bytes
    empty_path, dioalign = 0x1000, 0x2000
    if statx is None or statx(fd, b"", empty_path, dioalign, ctypes.c_void_p(answer.ctypes.data)):
        return None
    if not answer[0] & dioalign:
        return None
    return int(answer[38]), int(answer[39])
