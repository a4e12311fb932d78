"""One process reads for its neighbours: memory that they share, and who may look at it when.

The root shares a file in memory (memfd), which the others open through ``/proc``, and says through
a socket with an abstract name when they may look at it: nothing of it is anywhere in the file
system, and all is gone with the processes. When one dies its socket is closed, and its neighbours
fail at their next step; who waits for one that never comes is ended with the run.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.errors import DsprepError
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
    nbytes
        Of the memory; none is taken before it is filled.
    """

    def __init__(self, name: str, ranks: Sequence[int], rank: int, nbytes: int) -> None:
        self._lines: list[Connection[Any, Any]] = []
        self._is_root = rank == ranks[0]
        address, key = f"\0dsprep-{name}", name.encode()
        if self._is_root:
            fd = os.memfd_create("dsprep-bench")
            truncate(fd, nbytes)
            with Listener(address, "AF_UNIX", len(ranks), authkey=key) as listener:
                while len(self._lines) < len(ranks) - 1:
                    with suppress(AuthenticationError, EOFError):
                        self._lines.append(listener.accept())
            memory = mmap.mmap(fd, nbytes)
            for line in self._lines:
                line.send((os.getpid(), fd))
                line.recv()
            os.close(fd)
        else:
            self._lines.append(_connected(address, key))
            with Path("/proc/{}/fd/{}".format(*self._lines[0].recv())).open("rb") as file:
                memory = mmap.mmap(file.fileno(), nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
            self._lines[0].send(None)
        self.memory = np.frombuffer(memory, np.uint8)

    def begin(self) -> None:
        """Let the neighbours look at the memory; or wait until the root does."""
        self._meet(self._is_root)

    def end(self) -> None:
        """Wait until no neighbour looks at the memory any more; or tell the root."""
        self._meet(not self._is_root)

    def _meet(self, tells: bool) -> None:
        try:
            for line in self._lines:
                line.send(None) if tells else line.recv()
        except (EOFError, OSError) as error:
            fix = "see what the other processes of the run say"
            words = "a process that this one shares memory with is gone"
            raise DsprepError(words, fix=fix) from error

    def close(self) -> None:
        """Close everything; the others fail if they still wait."""
        for line in self._lines:
            line.close()
        self._lines, self.memory = [], np.empty(0, np.uint8)


def _connected(address: str, key: bytes) -> Connection[Any, Any]:
    """Return a connection to the root, once it is there."""
    while True:
        with suppress(FileNotFoundError, ConnectionError):
            return Client(address, "AF_UNIX", authkey=key)
        time.sleep(_RETRY_SECONDS)
