"""One process reads for its neighbours: memory that they share, and who may look at it when.

The root gives the others a file in memory (memfd) through a socket with an abstract name, so that
nothing of it is anywhere in the file system, and all is gone with the processes. When a process
dies its socket is closed, and its neighbours fail at their next step.
"""

from __future__ import annotations

import errno
import mmap
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from dsprep.core.schema import Bytes
from dsprep.errors import DsprepError
from dsprep.reader.memory import anonymous
from dsprep.reader.node import wire

OPEN_SECONDS = 60.0
"""How long the processes of a run wait for each other at the beginning."""

STEP_SECONDS = 300.0
"""How long they wait for each other in a step."""

_RETRY_SECONDS = 0.01


def _lost(problem: str) -> DsprepError:
    return DsprepError(problem, fix="see what the other processes of the run say")


def _receive(sock: socket.socket, seconds: float) -> tuple[dict[str, Any], list[int]] | None:
    """Wait for a message, and the files that come with it; None: there is none."""
    deadline = time.monotonic() + seconds
    return wire.receive(sock, lambda: time.monotonic() > deadline)


class Root:
    """The process that reads.

    Parameters
    ----------
    name
        Of the socket that the others connect to; see `dsprep.reader.node.wire.address`.
    others
        The ranks that it reads for besides itself.
    """

    def __init__(self, name: str, others: Sequence[int]) -> None:
        self._memory: mmap.mmap | None = None
        self._fd: int | None = None  # of memory that the others do not have yet
        self._looking = False
        self._socks: list[socket.socket] = []
        if others:
            self._accept(name, set(others))

    def _accept(self, name: str, missing: set[int]) -> None:
        deadline = time.monotonic() + OPEN_SECONDS
        with wire.new_socket() as listening:
            try:
                listening.bind(name)
                listening.listen(len(missing))
                while missing:
                    left = max(0.001, deadline - time.monotonic())
                    listening.settimeout(left)
                    sock, _ = listening.accept()
                    self._socks.append(sock)
                    received = _receive(sock, left) if wire.same_user(sock) else None
                    if received is None or received[0].get("rank") not in missing:
                        self._socks.pop().close()
                    else:
                        missing.remove(received[0]["rank"])
            except BaseException as error:
                self.close()
                if isinstance(error, TimeoutError):
                    ranks = ", ".join(map(str, sorted(missing)))
                    raise _lost(f"rank {ranks} did not come in {OPEN_SECONDS:.0f} s") from error
                raise

    def memory(self, nbytes: int) -> Bytes:
        """Return memory of at least that many bytes, once nobody looks at it any more."""
        if self._looking and None in [_receive(s, STEP_SECONDS) for s in self._socks]:
            raise _lost("a process that this one reads for is gone, or hangs")
        self._looking = False
        if self._memory is None or len(self._memory) < nbytes:
            self._memory = None
            self._drop_fd()
            size = max(nbytes + nbytes // 8, mmap.PAGESIZE)
            if self._socks:
                self._fd, self._memory = wire.new_memory(size)
            else:
                self._memory = anonymous(size)
        return np.frombuffer(self._memory, np.uint8)

    def look(self) -> Bytes:
        """Return what was read last, which the others may look at from now on."""
        assert self._memory is not None, "nothing was read yet"
        fds = [] if self._fd is None else [self._fd]
        for sock in self._socks:
            try:
                sock.settimeout(STEP_SECONDS)
                wire.send(sock, {"look": True}, fds)
                sock.settimeout(None)
            except OSError as error:
                how = "hangs" if isinstance(error, TimeoutError) else "is gone"
                raise _lost(f"a process that this one reads for {how}") from error
        self._looking = bool(self._socks)
        self._drop_fd()
        return np.frombuffer(self._memory, np.uint8)

    def looked(self) -> None:
        """Do nothing: the others report that they are done, and `memory` waits for that."""

    def _drop_fd(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None

    def close(self) -> None:
        """Close everything; the others fail if they still wait."""
        for sock in self._socks:
            sock.close()
        self._drop_fd()
        self._socks, self._memory = [], None


class Member:
    """A process that another one reads for; `name` and `rank` are as for `Root`."""

    def __init__(self, name: str, rank: int) -> None:
        self._memory: mmap.mmap | None = None
        deadline = time.monotonic() + OPEN_SECONDS
        while (sock := _connected(name, rank)) is None:
            if time.monotonic() > deadline:
                raise _lost(f"the process that reads did not come in {OPEN_SECONDS:.0f} s")
            time.sleep(_RETRY_SECONDS)
        self._sock = sock

    def look(self) -> Bytes:
        """Return what the root read next."""
        received = _receive(self._sock, STEP_SECONDS)
        if received is None:
            raise _lost("the process that reads for this one is gone, or hangs")
        for fd in received[1]:
            try:
                self._memory = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
            finally:
                os.close(fd)
        assert self._memory is not None
        return np.frombuffer(self._memory, np.uint8)

    def looked(self) -> None:
        """Report that the memory may be used again."""
        try:
            wire.send(self._sock, {"looked": True})
        except OSError as error:
            raise _lost("the process that reads for this one is gone") from error

    def close(self) -> None:
        """Close everything; the root fails if it still waits."""
        self._sock.close()
        self._memory = None


def _connected(name: str, rank: int) -> socket.socket | None:
    """Return a connection to the root; None: it is not there yet."""
    sock = wire.new_socket()
    try:
        sock.connect(name)
        if wire.same_user(sock):
            wire.send(sock, {"rank": rank})
            return sock
        sock.close()
    except OSError as error:
        sock.close()
        if error.errno in (errno.EMFILE, errno.EPERM, errno.EACCES):
            raise
    return None
