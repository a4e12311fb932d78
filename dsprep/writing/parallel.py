"""Writing whole shards by the workers of an executor.

A task makes a shard from its beginning, and puts it in its place, with its record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from typing_extensions import override

from dsprep.formats.base import Opening
from dsprep.storage.nodes import wait_for
from dsprep.writing.job import Job
from dsprep.writing.shards import shard_path, write_shard
from dsprep.writing.staging import Staging
from dsprep.writing.tasks import Task, begin_attempts, run_tasks
from dsprep.writing.transfer import Done

THREADS_PER_TASK = 2
"""One reads while another one writes."""


@dataclass(frozen=True, kw_only=True)
class ShardTask(Task[int]):
    """A shard that is to be written, and then recorded; returns its payload bytes.

    Attributes
    ----------
    job
        Of this file alone, whose samples are numbered as in `source`.
    source
        The samples.
    number
        Of the shard among all.
    path
        Final path of the shard.
    samples
        The samples as the user counts them, for messages.
    """

    job: Job
    source: Opening
    number: int
    path: Path
    samples: tuple[int, int]

    @property
    @override
    def subject(self) -> str:
        (start, stop), (shard,) = self.samples, self.job.shards
        return f"samples {start:,} to {stop:,} of {shard.name}"

    @override
    def make(self, directory: Path) -> int:
        durable, path, record = self.durable, directory / self.path.name, directory / self.name
        save = (lambda *_: None) if durable else None  # incomplete, it is written again
        with self.source() as source:
            job = replace(self.job, source=source)
            done = write_shard(job, 0, path, record, durable, THREADS_PER_TASK, save)
            return sum(nbytes or 0 for _, nbytes in done)

    @override
    def put(self, directory: Path) -> None:
        if not self.made.exists():
            (directory / self.path.name).replace(self.path)
            (directory / self.name).replace(self.made)


def write_apart(
    job: Job, staging: Staging, missing: Sequence[int], executor: Executor
) -> Iterator[Done]:
    """Write shards on the workers of an executor; yield each."""
    attempts = begin_attempts(staging.root)

    def tasks() -> Iterator[ShardTask]:
        for index in missing:
            shard = job.shards[index]
            needed, offset = job.source.part(shard.start, shard.stop)
            one = replace(
                job,
                shards=(replace(shard, start=shard.start - offset),),
                payload=round(job.payload * len(shard) / max(1, job.samples)),
            )
            yield ShardTask(
                attempts=attempts,
                durable=staging.durable,
                name=staging.record_path(index).name,
                job=one,
                source=needed,
                number=index,
                path=shard_path(job, staging.data.absolute(), index),
                samples=(shard.start, shard.stop),
            )

    with closing(run_tasks(executor, tasks())) as results:  # what ends this is known to them
        for task, nbytes in results:
            wait_for(task.path)
            staging.complete(task.number, shard_path(job, staging.data, task.number))
            yield len(job.shards[task.number]), nbytes
