"""One process reads for its neighbours: memory that they share, and who may look at it when.

The root shares a file in memory (memfd), which the others open through ``/proc``, and says through
a socket with an abstract name when they may look at it: nothing of it is anywhere in the file
system, and all is gone with the processes. When one dies its socket is closed, and its neighbours
fail at their next step; who waits for one that never comes is ended with the run.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.core.schema import Bytes
from dsprep.errors import DsprepError
from dsprep.reader.memory import anonymous
from dsprep.storage.ranges import truncate

_RETRY_SECONDS = 0.01


class Neighbours:
    """The processes of a node that share what the first of them, the root, reads.

    Parameters
    ----------
    name
        Of the socket, which no other run has; who knows it may connect.
    ranks
        Theirs.
    rank
        Of this one.
    """

    def __init__(self, name: str, ranks: Sequence[int], rank: int) -> None:
        self._memory: mmap.mmap | None = None
        self._fd = -1  # of the memory, where others share it
        self._looking = False
        self._lines: list[Connection[Any, Any]] = []
        self.is_root = rank == ranks[0]
        address, key = f"\0dsprep-{name}", name.encode()
        if not self.is_root:
            self._lines.append(_connected(address, key))
        elif len(ranks) > 1:
            with Listener(address, "AF_UNIX", len(ranks), authkey=key) as listener:
                while len(self._lines) < len(ranks) - 1:
                    with suppress(AuthenticationError, EOFError):
                        self._lines.append(listener.accept())

    def memory(self, nbytes: int) -> Bytes:
        """Return the root's memory, at least that many bytes, once nobody looks at it any more."""
        with _heard():
            for line in self._lines if self._looking else ():
                line.recv_bytes(1)
        self._looking = False
        if self._memory is None or len(self._memory) < nbytes:
            size = max(nbytes + nbytes // 8, mmap.PAGESIZE)
            self._drop()
            if self._lines:
                self._fd = os.memfd_create("dsprep-bench")
                truncate(self._fd, size)
            self._memory = anonymous(size) if self._fd < 0 else mmap.mmap(self._fd, size)
        return np.frombuffer(self._memory, np.uint8)

    def look(self) -> Bytes:
        """Return what was read last, which the others may look at from now on."""
        with _heard():
            for line in self._lines if self.is_root else ():
                line.send_bytes(struct.pack("<2q", os.getpid(), self._fd))
            if not self.is_root:
                self._map(*struct.unpack("<2q", self._lines[0].recv_bytes(16)))
        self._looking = bool(self._lines)
        assert self._memory is not None, "nothing was read yet"
        return np.frombuffer(self._memory, np.uint8)

    def _map(self, pid: int, fd: int) -> None:
        """Map the memory of the root, unless that is done."""
        with Path(f"/proc/{pid}/fd/{fd}").open("rb") as file:
            if self._memory is None or len(self._memory) != os.fstat(file.fileno()).st_size:
                self._memory = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)

    def looked(self) -> None:
        """Report to the root that the memory may be used again."""
        with _heard():
            for line in () if self.is_root else self._lines:
                line.send_bytes(b".")

    def _drop(self) -> None:
        self._memory = None
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def close(self) -> None:
        """Close everything; the others fail if they still wait."""
        for line in self._lines:
            line.close()
        self._lines = []
        self._drop()


@contextmanager
def _heard() -> Iterator[None]:
    """Say in one line that a neighbour is gone."""
    try:
        yield
    except (EOFError, OSError) as error:
        fix = "see what the other processes of the run say"
        raise DsprepError("a process that this one shares memory with is gone", fix=fix) from error


def _connected(address: str, key: bytes) -> Connection[Any, Any]:
    """Return a connection to the root, once it is there."""
    while True:
        with suppress(FileNotFoundError, ConnectionError):
            return Client(address, "AF_UNIX", authkey=key)
        time.sleep(_RETRY_SECONDS)
