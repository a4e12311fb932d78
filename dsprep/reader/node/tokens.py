"""At most n readers at a time: a token is held while reading, and any reader takes a free one.

Who waits takes its turn first: one reader at a time looks for a free token, so that a reader which
has just read does not take its token again before those that waited. Nothing depends on how many
readers there are, or whether they come late, end early or are killed. Source: Pumma et al.,
"Scalable Deep Learning via I/O Analysis and Optimization" (LMDBIO, staggering).

On one node, turn and tokens are sockets with abstract names (unix(7)). The kernel lets one process
at a time have a name, and takes it back from one that is killed.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from dsprep.reader.memory import Stopped
from dsprep.reader.node import job_key, wire
from dsprep.reader.ranks import RankInfo

POLL_SECONDS = 0.001
"""Seconds between two looks of a reader that waits."""


class Tokens(Protocol):
    """Numbers that a process takes, each while no other one has it: 0, the turn; 1 to `count`."""

    count: int

    def take(self, number: int) -> Any:
        """Return the token of a number; None if another process holds it."""

    def release(self, token: Any) -> None:
        """Give a number back."""


class Local:
    """The tokens of a node, which readers with the same `key` share."""

    def __init__(self, key: str, count: int) -> None:
        self.count = count
        self._names = [wire.address("token", key, i) for i in range(count + 1)]

    def take(self, number: int) -> socket.socket | None:
        """Return a socket of this name; see `Tokens`."""
        sock = wire.new_socket()
        try:
            sock.bind(self._names[number])
        except OSError as error:
            sock.close()
            if error.errno != errno.EADDRINUSE:
                raise
            return None
        return sock

    def release(self, token: socket.socket) -> None:
        """Close a socket; see `Tokens`."""
        token.close()


class Stagger:
    """The tokens of a Reader, for all its threads: `PipelineSettings.token`.

    Threads that read at the same time share a token; at most `threads` parts are read with it
    before it is handed on.
    """

    def __init__(self, tokens: Tokens, threads: int) -> None:
        self._tokens, self._threads = tokens, threads
        self._asking, self._changed = threading.Lock(), threading.Condition()
        self._token: Any = None
        self._inside = self._parts = 0

    @contextmanager
    def __call__(self, ended: Callable[[], bool]) -> Iterator[None]:
        """Hold a token; raise `Stopped` if it `ended` before there was one."""
        with self._asking:
            self._enter(ended)
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                if not self._inside:
                    token, self._token = self._token, None
                    self._changed.notify()
                    self._tokens.release(token)

    def _enter(self, ended: Callable[[], bool]) -> None:
        with self._changed:
            while self._token is not None:
                if self._parts < self._threads:
                    self._inside += 1
                    self._parts += 1
                    return
                self._changed.wait()
        turn = self._first([0], ended)
        try:
            self._token = self._first(range(1, self._tokens.count + 1), ended)
        finally:
            self._tokens.release(turn)
        self._inside = self._parts = 1

    def _first(self, numbers: Sequence[int], ended: Callable[[], bool]) -> Any:
        """Return the first of some tokens that is free, once there is one."""
        while True:
            for number in numbers:
                if (token := self._tokens.take(number)) is not None:
                    return token
            if ended():
                raise Stopped
            time.sleep(POLL_SECONDS)


def staggering(rank_info: RankInfo, count: int, threads: int, comm: Any) -> Stagger:
    """Return the `count` tokens of a process in which so many threads read.

    They belong to all processes of an mpi4py communicator, or to those of the node.
    """
    if comm is not None:
        from dsprep.reader.node.tokens_mpi import board

        return Stagger(board(comm, count), threads)
    return Stagger(Local(job_key(), count), threads)
