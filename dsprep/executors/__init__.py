"""Workers for the tasks of a plan: this process, others on this machine, MPI ranks, or Dask.

Work that is cut into independent tasks goes to a `concurrent.futures.Executor`; nobody but this
package knows which. A task is a function of a module and one argument, both of which can be
pickled; it may be run twice, and by two workers at the same time if one of them is taken for dead.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import CancelledError, Executor, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from itertools import islice
from queue import SimpleQueue
from typing import TypeVar

from dsprep.errors import ExecutorError, UsageError

T = TypeVar("T")
R = TypeVar("R")

EXECUTORS = {
    "processes": "dsprep.executors.processes",
    "mpi": "dsprep.executors.mpi",
    "dask": "dsprep.executors.dask",
}
"""Each module has ``opened(workers, scheduler)``."""

THREADS = "threads"
"""No executor: the threads of this process."""

NAMES = (THREADS, *EXECUTORS)

AHEAD = 2
"""Tasks per worker that are handed over before the first is done."""

LEAST_AHEAD = 64
"""Tasks that are handed over at least: an executor may not know how many workers it has."""


def opened(
    name: str | None = None, *, workers: int | None = None
) -> AbstractContextManager[Executor | None]:
    """Return a context that gives the executor called `name`; None for threads.

    Parameters
    ----------
    name
        One of `NAMES`. None: ``"mpi"`` where this is one of several processes that mpiexec or srun
        started, else ``"threads"``. ``"dask:tcp://host:8786"`` is Dask with the scheduler at that
        address, ``"dask:FILE"`` the one of that file; else it starts workers on this machine.
    workers
        Processes, where the executor starts them itself; one per core if None.

    Notes
    -----
    In MPI processes other than the first, entering the context does the tasks of the first one,
    and ends the program when there are no more.

    Raises
    ------
    UsageError
        If there is no such executor.
    MissingExtra
        If its package is not installed.
    """
    if name is None:
        from dsprep.executors.mpi import launched

        name = "mpi" if launched() else THREADS
    kind, _, scheduler = name.partition(":")
    if scheduler and kind != "dask":
        raise UsageError(f"{scheduler} is a scheduler of Dask, not of {kind}", fix="name dask")
    if kind == THREADS:
        return nullcontext(None)
    if kind not in EXECUTORS:
        raise UsageError(f"{name!r} is not an executor", expected="one of " + ", ".join(NAMES))
    executor: AbstractContextManager[Executor | None] = import_module(EXECUTORS[kind]).opened(
        workers, scheduler or None
    )
    return executor


def run(
    executor: Executor,
    function: Callable[[T], R],
    tasks: Iterable[T],
    ahead: Callable[[], int] | None = None,
) -> Generator[tuple[T, R], None, None]:
    """Yield each task with its result, as they are done.

    Parameters
    ----------
    executor, function, tasks
        Who calls what on which arguments; a lost worker is told with ``task.subject``, if any.
    ahead
        Gives how many tasks are handed over before they are done, at most; enough to keep all
        workers busy if None.

    Raises
    ------
    ExecutorError
        If a worker was lost.
    Exception
        What a task raised first; those under way are waited for, others not begun.
    """
    if ahead is None:
        ahead = partial(max, LEAST_AHEAD, AHEAD * workers_of(executor))
    lost = (BrokenProcessPool, CancelledError, *getattr(executor, "lost", ()))
    todo = iter(tasks)
    running: dict[Future[R], T] = {}
    done = SimpleQueue[Future[R]]()  # to wait for all of thousands each time takes long
    try:
        while True:
            for task in islice(todo, max(0, ahead() - len(running))):
                future = executor.submit(function, task)
                running[future] = task
                future.add_done_callback(done.put)
            if not running:
                return
            future = done.get()
            task = running.pop(future)
            try:
                result = future.result()
            except lost as error:
                raise ExecutorError(
                    "a worker was lost",
                    where=getattr(task, "subject", None),
                    found=str(error)[:200] or None,
                    fix="look into its log (is the memory enough?), and repeat the command: it "
                    "continues with what is missing",
                ) from error
            yield task, result
    except (KeyboardInterrupt, GeneratorExit) as error:
        # Nobody waits for what is under way; where that can be stopped, it is: it leaves nothing
        # that a later run takes for complete.
        getattr(executor, "stop", lambda: None)()
        if _is_interrupted(error) and not getattr(executor, "waited_for", True):
            running.clear()
        raise
    finally:
        for future in running:
            future.cancel()
        if running:
            wait([f for f in running if not f.cancelled()])


def _is_interrupted(error: BaseException) -> bool:
    """Return whether an interrupt ends this, perhaps one of who takes the results."""
    now: BaseException | None = error
    while now is not None and not isinstance(now, KeyboardInterrupt):
        now = now.__context__
    return now is not None


def workers_of(executor: Executor) -> int:
    """Return the number of workers that an executor states; 0 if it states none."""
    for name in ("num_workers", "_max_workers"):  # of MPI and of Dask here; of processes
        count = getattr(executor, name, None)
        if isinstance(count, int):
            return count
    return 0
