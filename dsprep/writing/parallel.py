"""Writing whole shards by the workers of an executor.

A task makes a shard from its beginning, and puts it in its place, with its record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from dsprep.formats.base import Opening
from dsprep.storage.nodes import wait_for
from dsprep.writing.job import Job
from dsprep.writing.shards import shard_path, write_shard
from dsprep.writing.staging import Staging
from dsprep.writing.tasks import Task, begin_attempts, run_tasks
from dsprep.writing.transfer import Done

THREADS_PER_TASK = 2
"""One reads while another one writes."""


def make_shard(
    job: Job, source: Opening, number: int, path: Path, record: str, durable: bool, directory: Path
) -> tuple[int, int]:
    """Write the one shard of a job, and its record; return its number among all, and its bytes."""
    save = (lambda *_: None) if durable else None  # incomplete, it is written again
    parts = directory / path.name, directory / record
    with source() as samples:
        job = replace(job, source=samples)
        done = write_shard(job, 0, *parts, durable, THREADS_PER_TASK, save)
        return number, sum(nbytes or 0 for _, nbytes in done)


def put_shard(path: Path, record: Path, directory: Path) -> None:
    """Give a shard and its record their places."""
    if not record.exists():
        (directory / path.name).replace(path)
        (directory / record.name).replace(record)


def write_apart(
    job: Job, staging: Staging, missing: Sequence[int], executor: Executor
) -> Iterator[Done]:
    """Write shards on the workers of an executor; yield each."""
    attempts = begin_attempts(staging.root)

    def tasks() -> Iterator[Task[tuple[int, int]]]:
        for index in missing:
            shard = job.shards[index]
            needed, offset = job.source.part(shard.start, shard.stop)
            one = replace(
                job,
                shards=(replace(shard, start=shard.start - offset),),
                payload=round(job.payload * len(shard) / max(1, job.samples)),
            )
            name = staging.record_path(index).name
            path, durable = shard_path(job, staging.data.absolute(), index), staging.durable
            yield Task(
                attempts=attempts,
                name=name,
                subject=f"samples {shard.start:,} to {shard.stop:,} of {shard.name}",
                durable=durable,
                make=partial(make_shard, one, needed, index, path, name, durable),
                put=partial(put_shard, path, attempts.parent / name),
            )

    with closing(run_tasks(executor, tasks())) as results:  # what ends this is known to them
        for _, (number, nbytes) in results:
            path = shard_path(job, staging.data, number)
            wait_for(path)
            staging.complete(number, path)
            yield len(job.shards[number]), nbytes
