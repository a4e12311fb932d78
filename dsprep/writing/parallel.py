"""Writing whole shards by the workers of an executor.

A task makes a directory with one shard, written from its beginning; this process moves the shard
to its place.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from typing_extensions import override

from dsprep.formats.base import Opening, State
from dsprep.storage.trees import remove
from dsprep.writing.job import Job
from dsprep.writing.shards import (
    complete,
    copying,
    is_kept,
    need,
    shard_path,
    while_written,
)
from dsprep.writing.staging import Staging
from dsprep.writing.tasks import Task, Workplace, run_tasks
from dsprep.writing.transfer import Done

RECORD = "made.json"
"""The record of a shard, in the directory in which it is made."""

THREADS_PER_TASK = 2
"""One reads while another one writes."""


@dataclass(frozen=True, kw_only=True)
class ShardTask(Task[Done]):
    """A shard that is to be written.

    Attributes
    ----------
    job
        Of this file alone, whose samples are numbered as in `source`.
    source
        The samples.
    number
        Of the shard among all.
    samples
        The samples as the user counts them, for messages.
    """

    job: Job
    source: Opening
    number: int
    samples: tuple[int, int]

    @property
    @override
    def subject(self) -> str:
        (start, stop), (shard,) = self.samples, self.job.shards
        return f"samples {start:,} to {stop:,} of {shard.name}"

    @override
    def make(self, directory: Path) -> Done:
        job, durable, name = self.job, self.workplace.durable, self.job.shards[0].name
        path = directory / name
        with while_written(name), self.source() as source:
            job = replace(job, source=source)
            with closing(job.plans[0].create(path, None)) as writer:
                save = _save_nothing if durable else None
                record = directory / RECORD
                finish = partial(complete, job, 0, writer, path, record, durable)
                copy = copying(job, writer, 0, 0, THREADS_PER_TASK, save, finish)
                nbytes = sum(piece.nbytes for piece in copy)
            writer.clean()
        return Done(job.samples, nbytes)


def _save_nothing(samples: int, position: State) -> None:
    """Record no position: an incomplete shard is written again from its beginning."""


def write_apart(
    job: Job, staging: Staging, before: int, missing: Sequence[int], executor: Executor
) -> Generator[Done, None, None]:
    """Write shards on the workers of an executor; yields what `_write_here` does."""
    source = job.source
    yield Done(before, 0)
    place = Workplace.begin(staging.root, durable=staging.durable)

    def tasks() -> Iterator[ShardTask]:
        for index in missing:
            shard = job.shards[index]
            need(source, shard.start)  # tasks are made in order
            needed, offset = source.part(shard.start, shard.stop)
            one = replace(
                job,
                shards=(replace(shard, start=shard.start - offset),),
                payload=round(job.payload * len(shard) / max(1, job.samples)),
            )
            yield ShardTask(
                workplace=place,
                name=_made(index),
                job=one,
                source=needed,
                number=index,
                samples=(shard.start, shard.stop),
            )

    with closing(run_tasks(executor, tasks())) as results:  # what ends this is known to them
        for task, done in results:
            _put(job, staging, task.number)
            staging.complete(task.number, shard_path(job, staging.data, task.number))
            yield done


def _made(index: int) -> str:
    """Return the name of the directory in which a worker has made a shard."""
    return f"made-{index}"


def _put(job: Job, staging: Staging, index: int) -> None:
    """Put a shard that a worker has made in its place."""
    made, path = staging.root / _made(index), shard_path(job, staging.data, index)
    with suppress(FileNotFoundError):  # killed while it did this
        if (made / path.name).exists():
            remove(path)
        (made / path.name).replace(path)
    with suppress(FileNotFoundError):
        (made / RECORD).replace(staging.record_path(index))
    remove(made)


def complete_shards(job: Job, staging: Staging, begun: int | None) -> set[int]:
    """Return the shards that are complete; remove what is part of none.

    `begun`: a shard that is not complete, whose files stay because it is continued.
    """
    if staging.is_published:
        return set(range(len(job.shards)))
    there, numbers = {path.name for path in staging.root.iterdir()}, range(len(job.shards))
    for i in numbers:
        if _made(i) in there:
            _put(job, staging, i)
            there.add(staging.record_path(i).name)
    recorded = [i for i in numbers if staging.record_path(i).name in there]
    complete = {i for i in recorded if is_kept(job, staging, i)}
    stays = {job.shards[i].name for i in (*complete, *(() if begun is None else (begun,)))}
    own = "/" if begun is None else f"{job.shards[begun].name}."
    directory = staging.data / job.target.name if job.sharded else staging.data
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.name not in stays and not path.name.startswith(own):
            remove(path)
    return complete
