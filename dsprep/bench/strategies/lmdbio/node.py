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


def _lost(what: str) -> DsprepError:
    return DsprepError(what, fix="see what the other processes of the run say")


def _received(sock: socket.socket, deadline: float) -> tuple[dict[str, Any], list[int]] | None:
    """Wait for a message, and the files that come with it; None: there is none."""
    return wire.receive(sock, lambda: time.monotonic() > deadline)


class Root:
    """The process that reads.

    Parameters
    ----------
    name
        Where the others find it; see `dsprep.reader.node.wire.address`.
    others
        The ranks that it reads for besides itself.
    """

    def __init__(self, name: str, others: Sequence[int]) -> None:
        self._memory: mmap.mmap | None = None
        self._fd: int | None = None  # of memory that the others do not have yet
        self._looking = False
        self._socks: list[socket.socket] = []
        self._shared = bool(others)
        if others:
            self._accept(name, set(others))

    def _accept(self, name: str, missing: set[int]) -> None:
        deadline = time.monotonic() + OPEN_SECONDS
        with wire.new_socket() as listening:
            try:
                listening.bind(name)
                listening.listen(len(missing))
                while missing:
                    listening.settimeout(max(0.001, deadline - time.monotonic()))
                    sock, _ = listening.accept()
                    self._socks.append(sock)
                    if not self._greet(sock, missing, deadline):
                        self._socks.pop().close()
            except BaseException as error:
                self.close()
                if isinstance(error, TimeoutError):
                    ranks = ", ".join(map(str, sorted(missing)))
                    raise _lost(f"rank {ranks} did not come in {OPEN_SECONDS:.0f} s") from error
                raise

    def _greet(self, sock: socket.socket, missing: set[int], deadline: float) -> bool:
        """Find out who connected, and answer; False: it is gone, or nobody that is expected."""
        found = _received(sock, deadline)
        if found is None or not wire.same_user(sock):
            return False
        rank = found[0].get("rank")
        if rank not in missing:
            return False
        try:
            wire.send(sock, {"welcome": rank})
        except OSError:  # it gave up
            return False
        missing.discard(rank)
        return True

    def memory(self, nbytes: int) -> Bytes:
        """Return memory of at least that many bytes, once nobody looks at it any more."""
        deadline = time.monotonic() + STEP_SECONDS
        if self._looking and None in [_received(s, deadline) for s in self._socks]:
            raise _lost("a process that this one reads for is gone, or hangs")
        self._looking = False
        if self._memory is None or len(self._memory) < nbytes:
            self._memory = None
            self._memory = self._made(max(nbytes + nbytes // 8, mmap.PAGESIZE))
        return np.frombuffer(self._memory, np.uint8)

    def _made(self, nbytes: int) -> mmap.mmap:
        if not self._shared:
            return anonymous(nbytes)
        self._drop_fd()
        self._fd, memory = wire.new_memory(nbytes)
        return memory

    def look(self) -> Bytes:
        """Return what was read last, which the others may look at from now on."""
        assert self._memory is not None, "nothing was read yet"
        fds = [] if self._fd is None else [self._fd]
        for sock in self._socks:
            try:
                sock.settimeout(STEP_SECONDS)
                wire.send(sock, {"look": True}, fds)
                sock.settimeout(None)
            except TimeoutError as error:
                raise _lost("a process that this one reads for hangs") from error
            except OSError as error:
                raise _lost("a process that this one reads for is gone") from error
        self._looking = bool(self._socks)
        self._drop_fd()
        return np.frombuffer(self._memory, np.uint8)

    def looked(self) -> None:
        """Nothing: the others say that they have looked, and `memory` waits for that."""

    def _drop_fd(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None

    def close(self) -> None:
        """Let all go; the others fail if they still wait."""
        for sock in self._socks:
            sock.close()
        self._drop_fd()
        self._socks, self._memory = [], None


class Member:
    """A process that another one reads for.

    Parameters
    ----------
    name
        Where that one is found.
    rank
        Of this process.
    """

    def __init__(self, name: str, rank: int) -> None:
        self._memory: mmap.mmap | None = None
        deadline = time.monotonic() + OPEN_SECONDS
        while (sock := _welcomed(name, rank, deadline)) is None:
            if time.monotonic() > deadline:
                raise _lost(f"the process that reads did not come in {OPEN_SECONDS:.0f} s")
            time.sleep(_RETRY_SECONDS)
        self._sock = sock

    def look(self) -> Bytes:
        """Return what the root read next."""
        found = _received(self._sock, time.monotonic() + STEP_SECONDS)
        if found is None:
            raise _lost("the process that reads for this one is gone, or hangs")
        for fd in found[1]:
            try:
                self._memory = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
            finally:
                os.close(fd)
        assert self._memory is not None
        return np.frombuffer(self._memory, np.uint8)

    def looked(self) -> None:
        """Say that the memory may be used again."""
        try:
            wire.send(self._sock, {"looked": True})
        except OSError as error:
            raise _lost("the process that reads for this one is gone") from error

    def close(self) -> None:
        """Let all go; the root fails if it still waits."""
        self._sock.close()
        self._memory = None


def _welcomed(name: str, rank: int, deadline: float) -> socket.socket | None:
    """Return a connection to the root; None: it is not there, or ends just now."""
    sock = wire.new_socket()
    try:
        sock.connect(name)
        wire.send(sock, {"rank": rank})
        found = _received(sock, deadline)
    except OSError as error:
        sock.close()
        if error.errno in (errno.EMFILE, errno.EPERM, errno.EACCES):
            raise
        return None
    if found is None or not wire.same_user(sock):
        sock.close()
        return None
    return sock
