"""At most n readers of an MPI job at a time; see `dsprep.reader.node.tokens`.

Who has which token, and who waits, is written on a board in the memory of rank 0, which all others
read and change by themselves (one-sided communication: MPI-4, chapter 12). So it does not matter
what rank 0 does meanwhile; a thread there sees to it that MPI makes progress.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any

import numpy as np

from dsprep.core.schema import Ints
from dsprep.errors import MissingExtra, UsageError
from dsprep.reader.memory import Stopped
from dsprep.reader.node.tokens import successor

POLL_SECONDS = (0.0002, 0.005)
"""How often one that waits looks at the board: at first, and at last."""
PROGRESS_SECONDS = 0.001

WAITS, CHOSEN = 1, 2
"""On the board, of each rank: it wants a token; it will be given one. Else 0."""


class Mpi:
    """The `count` tokens of a job.

    All ranks of the mpi4py communicator make it, in the same order as other collective calls; what
    follows is up to each of them.
    """

    def __init__(self, comm: Any, count: int) -> None:
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise MissingExtra("comm= needs mpi4py", fix="pip install mpi4py") from error
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise UsageError(
                "MPI was not initialised for calls from several threads",
                expected="MPI_THREAD_MULTIPLE, the default of mpi4py",
                fix="do not lower mpi4py.rc.thread_level, or stagger on each node, without comm=",
            )
        self._board = _board(MPI, comm, count)

    def acquire(self, ended: Callable[[], bool]) -> int:
        """Wait for a token; see `dsprep.reader.node.tokens.Tokens`."""
        board = self._board
        pause, longest = POLL_SECONDS
        while not board.mine.acquire(timeout=longest):  # of another Reader of this process
            if ended():
                raise Stopped
        try:
            token = board.take_free(board.read_tokens())
            if token is not None:
                return token
            board.say(WAITS)
            while True:
                holders = board.read_tokens()
                if board.me in holders:  # handed over
                    board.say(0)
                    return holders.index(board.me)
                if ended() and board.withdraw():
                    raise Stopped
                if 0 in holders and board.withdraw():
                    token = board.take_free(holders)
                    if token is not None:
                        return token
                    board.say(WAITS)
                time.sleep(pause)
                pause = min(2 * pause, longest)
        except BaseException:
            board.mine.release()
            raise

    def release(self, token: int) -> None:
        """Hand a token on to the next reader that waits for it, or let it go."""
        try:
            self._board.hand_on(token)
        finally:
            self._board.mine.release()


class _Board:
    """Numbers in the memory of rank 0: per token the rank that has it, plus 1; per rank, its wish.

    `me` is this rank, plus 1; `mine` is held by the Reader of this process that has a token, or
    waits for one.
    """

    def __init__(self, mpi: Any, comm: Any, count: int) -> None:
        self._mpi, self._comm, self._count = mpi, comm.Dup(), count
        self._rank, self._size = int(comm.Get_rank()), int(comm.Get_size())
        self.mine, self.me = threading.Lock(), self._rank + 1
        numbers = count + self._size if self._rank == 0 else 0
        self._window = mpi.Win.Allocate(8 * numbers, 8, comm=self._comm)
        if numbers:
            self._window.Lock(0)
            np.frombuffer(self._window.tomemory(), np.int64)[:] = 0
            self._window.Unlock(0)
        self._comm.Barrier()
        self._window.Lock_all()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        if numbers and self._size > 1:
            self._thread = threading.Thread(
                target=self._progress, name="dsprep-tokens", daemon=True
            )
            self._thread.start()
        Finalize(None, self._stop, exitpriority=50)  # MPI is finalised after that

    def _progress(self) -> None:
        """Have MPI serve the others, where nothing else does that."""
        while not self._done.wait(PROGRESS_SECONDS):
            self._comm.Iprobe()

    def _stop(self) -> None:
        """End, on all ranks, as MPI does."""
        if self._mpi.Is_finalized():
            return
        self._window.Unlock_all()
        self._comm.Barrier()
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        self._window.Free()
        self._comm.Free()

    def _read(self, at: int, count: int) -> Ints:
        values, none = np.zeros(count, np.int64), np.zeros(count, np.int64)
        target = (at, count, self._mpi.INT64_T)
        self._window.Get_accumulate(none, values, 0, target, self._mpi.NO_OP)
        self._window.Flush(0)
        return values

    def _write(self, at: int, value: int) -> None:
        new, old = np.array([value], np.int64), np.zeros(1, np.int64)
        self._window.Fetch_and_op(new, old, 0, at, self._mpi.REPLACE)
        self._window.Flush(0)

    def _change(self, at: int, before: int, after: int) -> bool:
        """Change a number if it is `before`; return whether it was."""
        old, new, result = (np.array([n], np.int64) for n in (before, after, 0))
        self._window.Compare_and_swap(new, old, result, 0, at)
        self._window.Flush(0)
        return int(result[0]) == before

    def read_tokens(self) -> list[int]:
        """Return who has each token: rank plus 1, or 0."""
        tokens: list[int] = self._read(0, self._count).tolist()
        return tokens

    def take_free(self, holders: list[int]) -> int | None:
        """Take a token that nobody has, if there is one: this rank's own before others."""
        for i in range(self._count):
            token: int = (self._rank + i) % self._count
            if not holders[token] and self._change(token, 0, self.me):
                return token
        return None

    def say(self, wish: int) -> None:
        """Write what this rank wants."""
        self._write(self._count + self._rank, wish)

    def withdraw(self) -> bool:
        """Want nothing any more; return False if a token is being handed over already."""
        return self._change(self._count + self._rank, WAITS, 0)

    def hand_on(self, token: int) -> None:
        """Give a token to the next rank that waits for it, to another one, or to nobody."""
        waiting = np.flatnonzero(self._read(self._count, self._size) == WAITS).tolist()
        own = [rank for rank in waiting if rank % self._count == token]
        others = [rank for rank in waiting if rank % self._count != token]
        for ranks in (own, others):
            while ranks:
                rank = ranks.pop(successor(ranks, self._rank))
                if self._change(self._count + rank, WAITS, CHOSEN):
                    self._write(token, rank + 1)
                    return
        self._write(token, 0)


_keyval: int | None = None


def _board(mpi: Any, comm: Any, count: int) -> _Board:
    """Return the board for so many tokens of a communicator, the same each time."""
    global _keyval
    if _keyval is None:
        _keyval = mpi.Comm.Create_keyval()
    boards: dict[int, _Board] | None = comm.Get_attr(_keyval)
    if boards is None:
        boards = {}
        comm.Set_attr(_keyval, boards)
    if count not in boards:
        boards[count] = _Board(mpi, comm, count)
    return boards[count]
