"""Reads by a few processes at a time: a Reader's threads share a token while they read.

Who has the tokens is a matter of `dsprep.reader.node.tokens` (one node) or `tokens_mpi` (all ranks
of a communicator).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from dsprep.reader.memory import Stopped
from dsprep.reader.node import job_key
from dsprep.reader.node.tokens import POLL_SECONDS, Local
from dsprep.reader.ranks import RankInfo


class Tokens(Protocol):
    """Where a process gets one token at a time."""

    def acquire(self, ended: Callable[[], bool]) -> Any:
        """Wait for a token, and return it; raise `Stopped` if it `ended` before."""

    def release(self, token: Any) -> None:
        """Hand a token on."""


class Stagger:
    """The tokens of a Reader, for all its threads; see `dsprep.reader.pipeline.Settings.token`.

    Threads that read at the same time share a token; at most `threads` parts are read with it
    before it is handed on.
    """

    def __init__(self, tokens: Tokens, threads: int) -> None:
        self._tokens, self._threads = tokens, threads
        self._changed = threading.Condition()
        self._token: Any = None
        self._asking = False
        self._inside = self._parts = 0

    @contextmanager
    def __call__(self, ended: Callable[[], bool]) -> Iterator[None]:
        """Hold a token; raise `Stopped` if it `ended` before there was one."""
        self._enter(ended)
        try:
            yield
        finally:
            self._leave()

    def _enter(self, ended: Callable[[], bool]) -> None:
        with self._changed:
            while self._asking or (self._token is not None and self._parts >= self._threads):
                if ended():
                    raise Stopped
                self._changed.wait(POLL_SECONDS)
            if self._token is not None:
                self._inside += 1
                self._parts += 1
                return
            self._asking = True
        token = None
        try:
            token = self._tokens.acquire(ended)
        finally:
            with self._changed:
                self._asking = False
                self._token = token
                if token is not None:
                    self._inside = self._parts = 1
                self._changed.notify_all()

    def _leave(self) -> None:
        with self._changed:
            self._inside -= 1
            if self._inside:
                return
            token, self._token = self._token, None
            self._asking = True  # nobody asks before this one is handed on
        try:
            self._tokens.release(token)
        finally:
            with self._changed:
                self._asking = False
                self._changed.notify_all()


def staggering(
    rank_info: RankInfo, count: int, threads: int, node_key: str | None, comm: Any
) -> Stagger:
    """Return the `count` tokens of a process in which so many threads read.

    They belong to all processes of an mpi4py communicator, or to those of the node.
    """
    if comm is not None:
        from dsprep.reader.node.tokens_mpi import Mpi

        return Stagger(Mpi(comm, count), threads)
    rank = rank_info.rank if rank_info.local_rank is None else rank_info.local_rank
    return Stagger(Local(job_key(node_key), count, rank), threads)
