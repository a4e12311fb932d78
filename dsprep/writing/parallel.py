"""Writing whole shards by the workers of an executor.

A task makes a directory with one shard, written from its beginning; this process moves the shard
to its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from typing_extensions import override

from dsprep.formats.base import Opening
from dsprep.writing.job import Job
from dsprep.writing.shards import RECORD, made_name, put_shard, shard_path, write_shard
from dsprep.writing.staging import Staging
from dsprep.writing.tasks import Task, begin_attempts, run_tasks
from dsprep.writing.transfer import Done

THREADS_PER_TASK = 2
"""One reads while another one writes."""


@dataclass(frozen=True, kw_only=True)
class ShardTask(Task[int]):
    """A shard that is to be written; returns its payload bytes.

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
    def make(self, directory: Path) -> int:
        durable, path = self.durable, directory / self.job.shards[0].name
        save = (lambda *_: None) if durable else None  # incomplete, it is written again
        with self.source() as source:
            job = replace(self.job, source=source)
            record = directory / RECORD
            done = write_shard(job, 0, path, record, durable, THREADS_PER_TASK, save)
            return sum(nbytes or 0 for _, nbytes in done)


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
                name=made_name(index),
                job=one,
                source=needed,
                number=index,
                samples=(shard.start, shard.stop),
            )

    with closing(run_tasks(executor, tasks())) as results:  # what ends this is known to them
        for task, nbytes in results:
            put_shard(job, staging, task.number)
            staging.complete(task.number, shard_path(job, staging.data, task.number))
            yield len(job.shards[task.number]), nbytes
