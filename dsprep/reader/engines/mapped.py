"""``mmap``, to compare with: the page cache seen as memory.

The kernel copies from the mapping, not the processor, so that a file that is truncated meanwhile
gives an error and no SIGBUS. Pages of the mapping count as memory of the process (RSS) though the
kernel may take them back. It is never chosen automatically: `buffered` copies the same bytes from
the same cache without a page table in between.
"""

from __future__ import annotations

import errno
import mmap
import os
from weakref import WeakKeyDictionary

import numpy as np

from dsprep.core.schema import Bytes, Ints
from dsprep.reader.engines import Unavailable
from dsprep.storage import copying
from dsprep.storage.base import Handle
from dsprep.storage.ranges import ends_early
from dsprep.storage.scatter import Runs, stepped

STEP = 8 << 20
"""Bytes that the kernel is asked to read ahead, and then copied."""

_FIX = 'give engine="buffered"'

_REFUSALS = frozenset(
    {
        errno.ENODEV,  # what mmap(2) says of file systems that map nothing
        errno.EINVAL,
        errno.EOPNOTSUPP,
        errno.ENOSYS,
        errno.EACCES,
        errno.EPERM,
        errno.ENOMEM,  # a limit of address space
    }
)
"""By which a mapping of a file is refused."""


class Mapped:
    """Reads from a mapping; see `Engine`."""

    name = "mapped"

    def __init__(self) -> None:
        self._maps: WeakKeyDictionary[Handle, Bytes] = WeakKeyDictionary()

    def read(self, file: Handle, start: int, iovecs: Ints) -> tuple[int, int]:
        """Read a range to places; see `Engine.read`. A call is a step of the copy."""
        nbytes = int(iovecs[:, 1].sum())
        if not nbytes:
            return 0, 0
        mapped = self._map(file, start + nbytes)
        calls = 0
        for at, part in stepped(start, iovecs, STEP):
            size = int(part[:, 1].sum())
            os.posix_fadvise(file.fd, at, size, os.POSIX_FADV_WILLNEED)
            got = copying.scatter(mapped.ctypes.data + at, part)
            calls += 1
            if got is None:
                raise Unavailable("process_vm_readv is denied here", where=file.path, fix=_FIX)
            if got < size:
                _check_size(file, at + size)
                text = f"{os.strerror(errno.EIO)} at offset {at + got}"
                raise OSError(errno.EIO, text, str(file.path))
        _check_size(file, start + nbytes)  # a page that the file ends in was filled with zeros
        return calls, nbytes

    @property
    def scattered(self) -> str:
        """As everything: from the mapping; see `Engine.scattered`."""
        return self.name

    def read_runs(self, file: Handle, runs: Runs) -> tuple[int, int]:
        """Read ranges to their places, one by one; see `Engine.read_runs`."""
        done = [self.read(file, start, iovecs) for start, iovecs in runs]
        return sum(calls for calls, _ in done), sum(nbytes for _, nbytes in done)

    def prepare(self, file: Handle) -> None:
        """Map a file; see `Engine.prepare`."""
        if file.nbytes:
            self._map(file, 1)

    def _map(self, file: Handle, stop: int) -> Bytes:
        """Return all of a file, as it was when it was opened, as memory."""
        _check_size(file, stop)
        mapped = self._maps.get(file)
        if mapped is None or len(mapped) < stop:
            if file.fd < 0:
                raise Unavailable("it is no file of a file system", where=file.path, fix=_FIX)
            try:
                memory = mmap.mmap(file.fd, 0, prot=mmap.PROT_READ)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise OSError(error.errno, error.strerror, str(file.path)) from error
                raise Unavailable(
                    f"mmap is refused here ({error.strerror})", where=file.path, fix=_FIX
                ) from error
            mapped = self._maps[file] = np.frombuffer(memory, np.uint8)
        return mapped


def _check_size(file: Handle, stop: int) -> None:
    """Raise `FormatError` if a file has less than `stop` bytes by now."""
    size = file.look()[0]
    if size < stop:
        raise ends_early(file.path, 0, stop, size)
