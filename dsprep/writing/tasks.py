"""Tasks of a run that any workers do: each makes something that gets its name when complete.

A task may be done twice, by two workers at the same time if one of them is taken for dead: each
attempt has a directory of its own, and the first one that is complete gets the name. Attempts are
in a directory of this run; it goes when the next run begins, so that what workers of an earlier
run still do finds no directory.
"""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from dsprep import executors
from dsprep.storage.durable import sync_directory
from dsprep.storage.nodes import wait_for
from dsprep.storage.trees import remove

R = TypeVar("R")

_ATTEMPTS = "attempts-"


def begin_attempts(directory: Path) -> Path:
    """Return a directory in another one for the attempts of a new run; those of others go."""
    directory = directory.absolute()
    for path in directory.glob(f"{_ATTEMPTS}*"):
        remove(path)
    return Path(tempfile.mkdtemp(prefix=_ATTEMPTS, dir=directory))


@dataclass(frozen=True, kw_only=True)
class Task(Generic[R]):
    """A task that is sent to a worker.

    Attributes
    ----------
    attempts
        Directory of attempts, inside the directory of the results.
    name
        Name of the result in that directory.
    subject
        Its subject, for a person.
    durable
        Whether to wait for the disk.
    make
        Does the work in an empty directory, durably if it is to be.
    put
        Gives files that were made in a directory their names, the last one as `made`; None: the
        directory gets it, unless another attempt was faster.
    """

    attempts: Path
    name: str
    subject: str
    durable: bool
    make: Callable[[Path], R]
    put: Callable[[Path], None] | None = None

    @property
    def made(self) -> Path:
        """The path that is there when it is complete."""
        return self.attempts.parent / self.name


def do(task: Task[R]) -> R:
    """Do a task."""
    own = Path(tempfile.mkdtemp(prefix=f"{task.name}-", dir=task.attempts))
    result = task.make(own)
    try:
        own.rename(task.made) if task.put is None else task.put(own)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    remove(own)
    if task.durable:
        sync_directory(task.made.parent)
    return result


def run_tasks(
    executor: Executor,
    tasks: Iterable[Task[R]],
    ahead: Callable[[], int] | None = None,
) -> Generator[tuple[Task[R], R], None, None]:
    """Yield each task and its result, once its directory is visible here.

    Parameters
    ----------
    executor
        The workers.
    tasks
        Tasks with one directory of attempts.
    ahead
        Returns the number of tasks to hand out ahead, as for `executors.run`.
    """
    with closing(executors.run(executor, do, tasks, ahead)) as results:
        for task, result in results:
            wait_for(task.made)
            yield task, result
