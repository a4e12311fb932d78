"""At most n readers at a time: a token is held while reading, and handed on to the next reader.

There are n tokens, numbered from 0, and readers are numbered by their rank. A reader waits for the
token ``rank % n``, and gives it to the next one that waits for the same token, in the order of
ranks, around their end. So if all want to read, n consecutive ranks do, whose samples are next to
each other in the sequence of the epoch, then the n after these. A token that nobody asks for may be
taken by anyone. Nothing depends on how many readers there are, whether that is a multiple of n, or
whether they come late, end early or are killed. Source: Pumma et al., "Scalable Deep Learning via
I/O Analysis and Optimization" (LMDBIO, staggering).

On one node, a token is a socket with an abstract name (unix(7)). The kernel lets one process at a
time have the name, and takes it back from one that is killed. Who wants the token connects to it.
Who has read hands the socket itself over (``SCM_RIGHTS``), with the connections of those that wait.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import time
from collections.abc import Callable, Sequence

from dsprep.reader.memory import Stopped
from dsprep.reader.node import wire

POLL_SECONDS = 0.05
"""How often one that waits looks for a token that nobody has, and whether it is to stop."""
_MOST = wire.MOST_FDS - 1


def successor(waiting: Sequence[int], rank: int) -> int:
    """Return which of some ranks is the next one after `rank`, around the end: its index.

    >>> successor([6, 2, 4], 4), successor([2, 1], 4), successor([4], 4)
    (0, 1, 0)
    """
    return min(range(len(waiting)), key=lambda i: (waiting[i] <= rank, waiting[i]))


class _Token:
    """A token that this process has, and those that wait for it: rank (-1: not known), socket."""

    def __init__(self, sock: socket.socket, waiting: list[tuple[int, socket.socket]]) -> None:
        self.sock, self.waiting = sock, waiting
        for each in (sock, *(w for _, w in waiting)):
            wire.own(each)

    def close(self) -> None:
        """Release it; readers that wait for it notice."""
        for each in (*(w for _, w in self.waiting), self.sock):
            each.close()


class Local:
    """The tokens of a node, of which the reader number `rank` takes one at a time.

    Readers with the same `key` share them.
    """

    def __init__(self, key: str, count: int, rank: int) -> None:
        self._names = [wire.address("token", key, i) for i in range(count)]
        self._own, self._rank = rank % count, rank

    def acquire(self, ended: Callable[[], bool]) -> _Token:
        """Wait for a token; see `Tokens`."""
        count = len(self._names)
        while True:
            for i in range(count):
                token = self._take(self._names[(self._own + i) % count])
                if token is not None:
                    return token
            token = self._wait(ended)
            if token is not None:
                return token
            if ended():
                raise Stopped

    def _take(self, name: str) -> _Token | None:
        """Return the token if it is free; None if somebody has it."""
        sock = wire.new_socket()
        try:
            sock.bind(name)
            sock.listen(socket.SOMAXCONN)
        except OSError as error:
            sock.close()
            if error.errno != errno.EADDRINUSE:
                raise
            return None
        return _Token(sock, [])

    def _wait(self, ended: Callable[[], bool]) -> _Token | None:
        """Wait for this reader's token to be handed over; None: have a look at the others."""
        with contextlib.closing(wire.new_socket()) as sock:
            try:
                sock.settimeout(POLL_SECONDS)
                sock.connect(self._names[self._own])
                if not wire.same_user(sock):
                    raise PermissionError(errno.EPERM, "another user has the token of this reader")
                wire.send(sock, {"rank": self._rank})
            except PermissionError:
                raise
            except OSError:  # nobody has it any more, or not yet
                time.sleep(0.001)
                return None
            poll = select.poll()
            poll.register(sock, select.POLLIN)
            while not poll.poll(POLL_SECONDS * 1000):
                if ended():
                    return None
                for name in self._names:
                    token = self._take(name)
                    if token is not None:
                        return token
            return self._received(sock)

    def _received(self, sock: socket.socket) -> _Token | None:
        sock.settimeout(None)
        received = wire.receive(sock)
        if received is None:
            return None
        sockets, ranks = [socket.socket(fileno=fd) for fd in received[1]], received[0]["waiting"]
        if not sockets or len(sockets) != len(ranks) + 1:  # too many open files: let them go
            for each in sockets:
                each.close()
            time.sleep(0.01)
            return None
        return _Token(sockets[0], list(zip(ranks, sockets[1:], strict=True)))

    def release(self, token: _Token) -> None:
        """Hand a token on to the next reader that waits for it, or let it go."""
        try:
            self._accept(token)
            while token.waiting:
                i = successor([rank for rank, _ in token.waiting], self._rank)
                _, sock = token.waiting.pop(i)
                rest = token.waiting[:_MOST]
                message = {"waiting": [rank for rank, _ in rest]}
                fds = [token.sock.fileno(), *(w.fileno() for _, w in rest)]
                try:
                    with contextlib.closing(sock):
                        wire.send(sock, message, fds, socket.MSG_DONTWAIT)
                except OSError:  # it is gone
                    continue
                return
        finally:
            token.close()

    def _accept(self, token: _Token) -> None:
        """Find out who waits."""
        token.sock.setblocking(False)
        while True:
            try:
                sock, _ = token.sock.accept()
            except OSError:  # nobody any more
                break
            token.waiting.append((-1, sock))
        known = []
        for rank, sock in token.waiting:
            rank_number = rank if rank >= 0 else self._rank_of(sock)
            if rank_number is None:
                sock.close()
            else:
                known.append((rank_number, sock))
        token.waiting = known

    def _rank_of(self, sock: socket.socket) -> int | None:
        """Return the rank of one that waits; None: it is gone."""
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        try:
            if not wire.same_user(sock) or not poll.poll(100):  # it connected, and says it now
                return None
            received = wire.receive(sock)
            return None if received is None else int(received[0]["rank"])
        except (OSError, ValueError, TypeError, KeyError):
            return None
