"""Writing whole shards by the workers of an executor.

Each shard is written from its beginning in a directory of its own, in one of this run, so that
what workers of an earlier run still do finds no directory; ``shard-N.json`` says that it is
complete.
"""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Generator, Sequence
from concurrent.futures import Executor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from dsprep import executors
from dsprep.errors import DsprepError, ExecutorError
from dsprep.formats.base import Opening, Source, State
from dsprep.storage.durable import sync_directory
from dsprep.storage.identity import sole_writer
from dsprep.storage.nodes import node, wait_for
from dsprep.storage.trees import remove, tree_nbytes
from dsprep.writing.job import Job
from dsprep.writing.shards import (
    complete,
    copying,
    create_writer,
    is_kept,
    need,
    ranges_of,
    record_shard,
    shard_path,
)
from dsprep.writing.staging import Staging, published
from dsprep.writing.transfer import Done


@dataclass(frozen=True)
class _Task:
    """A shard as it travels. It may be written twice.

    Attributes
    ----------
    job
        Of this file alone, whose samples are numbered as in `source`.
    source
        The samples.
    number
        Of the shard among all.
    path, root
        The file to write, and the working directory of the job.
    attempts
        A directory of this run. When another run begins it goes, and with it whatever workers
        still do of this one.
    durable
        As in `run_job`.
    samples
        The samples as the user counts them, for messages.
    node
        Where the directories were made; see `storage.node`.
    """

    job: Job
    source: Opening
    number: int
    path: Path
    root: Path
    attempts: Path
    durable: bool
    samples: tuple[int, int]
    node: str


class _Written(NamedTuple):
    """What was done of a task: samples and payload; bytes of the shard; the node that wrote it."""

    done: Done
    nbytes: int
    node: str


THREADS_PER_TASK = 2
"""One reads while another one writes."""


def write_apart(
    job: Job,
    source: Source,
    staging: Staging,
    todo: tuple[int, Sequence[int]],
    executor: Executor,
) -> Generator[Done, None, None]:
    """Write shards on the workers of an executor; yields what `_write_here` does."""
    before, missing = todo
    yield Done(before, 0)
    attempts = Path(tempfile.mkdtemp(prefix=_APART, dir=staging.root.absolute()))

    def task(index: int) -> _Task:
        return _task(job, source, staging, attempts, index)

    for done, written in executors.run(executor, _do, map(task, missing), count=len(missing)):
        wait_for(done.path, written.node, written.nbytes)
        if job.groupings:
            wait_for(staging.root / f"groups-{done.number}.json", written.node)
        staging.completed(job, done.number)
        yield written.done


def _task(job: Job, source: Source, staging: Staging, attempts: Path, index: int) -> _Task:
    """Return the task to write a shard."""
    shard = job.shards[index]
    need(source, shard.start)  # tasks are made in order
    needed, offset = source.part(shard.start, shard.stop)
    one = replace(
        job,
        shards=(replace(shard, start=shard.start - offset, stop=shard.stop - offset),),
        groupings=job.groupings[index : index + 1],
        payload=round(job.payload * len(shard) / max(1, job.samples)),
    )
    return _Task(
        job=one,
        source=needed,
        number=index,
        path=shard_path(job, staging.data, index).absolute(),
        root=staging.root.absolute(),
        attempts=attempts,
        durable=staging.durable,
        samples=(shard.start, shard.stop),
        node=node(),
    )


def _do(task: _Task) -> _Written:
    """Write a shard."""
    try:
        for directory in (task.attempts, task.path.parent):
            wait_for(directory, task.node)
        with sole_writer(task.root):
            return _do_shard(task)
    except DsprepError as error:
        raise _task_error(task, error.args[0]) from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise _task_error(task, f"{where}{error.strerror or error}") from error


def _task_error(task: _Task, error: str) -> ExecutorError:
    start, stop = task.samples
    return ExecutorError(
        f"{error} (while samples {start:,} to {stop:,} were written to {task.path.name})"
    )


def _do_shard(task: _Task) -> _Written:
    # In a directory of this attempt: another one may be under way if a worker seemed lost.
    own, job = Path(tempfile.mkdtemp(prefix=f"{task.number}-", dir=task.attempts)), task.job
    made = own / task.path.name
    save = _save_nothing if task.durable else None
    with task.source.opened() as source:
        with closing(create_writer(job, made, 0, None)) as writer:
            ranges = ranges_of(job, source, writer, 0, 0)
            copy = copying(job, source, writer, 0, ranges, THREADS_PER_TASK, save)
            nbytes = sum(piece.nbytes for piece in copy)
            complete(writer, own / "groups.json", task.durable)
        writer.clean()
    if job.groupings:
        (own / "groups.json").replace(task.root / f"groups-{task.number}.json")
    stored = tree_nbytes(made)  # before another attempt can take its place
    _put(made, task.path, own)
    if task.durable:
        sync_directory(task.path.parent)
        with suppress(FileNotFoundError):  # another attempt is replacing it, which records it
            record_shard(task.path, own / "shard.json", durable=True)
            (own / "shard.json").replace(task.root / f"shard-{task.number}.json")
        sync_directory(task.root)
    remove(own)
    return _Written(Done(job.samples, nbytes), stored, node())


def _put(made: Path, path: Path, own: Path) -> None:
    """Rename a shard to its place; of another attempt's, which has the same bytes, one stays."""
    while True:
        try:
            made.replace(path)
        except OSError as error:  # a directory replaces none that holds files
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return
        with suppress(FileNotFoundError):  # the other attempt does the same
            path.rename(own / "old")
            remove(own / "old")


def _save_nothing(samples: int, position: State) -> None:
    """Record no position: an incomplete shard is written again from its beginning."""


_APART = "apart-"


def complete_shards(job: Job, staging: Staging, begun: int | None) -> set[int]:
    """Return the shards that are complete; remove what is part of none.

    `begun`: a shard that is not complete, whose files stay because it is continued.
    """
    if published(job.target):
        return set(range(len(job.shards)))
    there = {path.name for path in staging.root.iterdir()}
    numbers = range(len(job.shards))
    complete = {i for i in numbers if f"shard-{i}.json" in there and is_kept(job, staging, i)}
    stays = [job.shards[i].name for i in (*complete, *(() if begun is None else (begun,)))]
    directory = staging.data / job.target.name if job.sharded else staging.data
    apart = staging.root.glob(f"{_APART}*")
    for path in (*apart, *(directory.iterdir() if directory.is_dir() else ())):
        if path.name not in stays and (begun is None or not path.name.startswith(f"{stays[-1]}.")):
            remove(path)
    return complete
