"""At most n readers of an MPI job at a time; see `dsprep.reader.node.tokens`.

Which tokens are taken is written on a board in the memory of rank 0, which all others read and
change by themselves (one-sided communication: MPI-4, chapter 12). So it does not matter what rank 0
does meanwhile; a thread there sees to it that MPI makes progress.
"""

from __future__ import annotations

import threading
from multiprocessing.util import Finalize
from typing import Any

import numpy as np

from dsprep.errors import MissingExtra, UsageError

PROGRESS_SECONDS = 0.001

_keyval: int | None = None


class Board:
    """The `count` tokens of a job, and the turn: numbers in the memory of rank 0, 1 while taken."""

    def __init__(self, mpi: Any, comm: Any, count: int) -> None:
        self.count, self._mpi, self._comm = count, mpi, comm.Dup()
        numbers = 0 if comm.Get_rank() else count + 1
        self._window = mpi.Win.Allocate(8 * numbers, 8, comm=self._comm)
        if numbers:
            self._window.Lock(0)
            np.frombuffer(self._window.tomemory(), np.int64)[:] = 0
            self._window.Unlock(0)
        self._comm.Barrier()
        self._window.Lock_all()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._progress, name="dsprep-tokens", daemon=True)
        if numbers and comm.Get_size() > 1:
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
        if self._thread.ident is not None:
            self._thread.join()
        self._window.Free()
        self._comm.Free()

    def take(self, number: int) -> int | None:
        """Return a number that was free; see `dsprep.reader.node.tokens.Tokens`."""
        new, free, before = (np.array([n], np.int64) for n in (1, 0, 0))
        self._window.Compare_and_swap(new, free, before, 0, number)
        self._window.Flush(0)
        return None if before[0] else number

    def release(self, token: int) -> None:
        """Make a number free again."""
        free, before = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self._window.Fetch_and_op(free, before, 0, token, self._mpi.REPLACE)
        self._window.Flush(0)


def board(comm: Any, count: int) -> Board:
    """Return the board for so many tokens of an mpi4py communicator, the same each time.

    All ranks call it, in the same order as other collective calls; what follows is up to each.
    """
    global _keyval
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
    if _keyval is None:
        _keyval = MPI.Comm.Create_keyval()
    boards: dict[int, Board] | None = comm.Get_attr(_keyval)
    if boards is None:
        boards = {}
        comm.Set_attr(_keyval, boards)
    if count not in boards:
        boards[count] = Board(MPI, comm, count)
    return boards[count]
