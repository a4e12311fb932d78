"""Running jobs: copy shard by shard, publish, and write the sidecar.

Shards are written one after another by threads of this process, or by the workers of an executor
(`dsprep.writing.parallel`). ``state.json`` has the number of the shards that are complete from the
first one on, and the position in the next.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from dsprep.sidecar import spec
from dsprep.source.files import check_replaceable
from dsprep.storage.atomic import is_own, partial_path
from dsprep.storage.identity import Identities, identities_of, unchanged
from dsprep.storage.paths import StorePath
from dsprep.storage.trees import tree_nbytes
from dsprep.writing.create_sidecar import NewSidecar, join_sidecars
from dsprep.writing.job import (
    Job,
    Progress,
    Report,
    RunOptions,
    check_space,
    count_workers,
    fingerprint,
    lineage,
)
from dsprep.writing.shards import complete_shards, shard_path, write_shard
from dsprep.writing.shuffle import ShuffledSource
from dsprep.writing.staging import (
    COMMAND,
    START,
    Staging,
    check_target,
    discard,
    published,
)
from dsprep.writing.transfer import Done

ALONE_NOTE = (
    "the one file was written by this process alone; --shard-size cuts the output into files for "
    "the other processes"
)


def run_job(
    job: Job, options: RunOptions | None = None, progress: Progress | None = None
) -> Report:
    """Make the output of a job; `progress` is called with (samples, payload bytes) done so far."""
    report = None if progress is None else lambda _, *done: progress(*done)
    return run_jobs([job], options or RunOptions(), report)[0]


def run_jobs(
    jobs: Sequence[Job],
    run: RunOptions,
    progress: Callable[[Job, int, int], None] | None = None,
    allow: Callable[[], None] = lambda: None,
) -> list[Report]:
    """Make outputs; all are complete before the first is published.

    The first pass of a shuffled source begins when the target is locked and there is enough space;
    its temporary files are removed when the output is complete.

    Parameters
    ----------
    jobs
        The outputs.
    run
        Options of the run.
    progress
        Called with (job, samples, payload bytes) done so far.
    allow
        Called before they are published; if it raises, none is.

    Raises
    ------
    DsprepError, OSError
        If a target exists or is busy, space or memory do not suffice, or data are damaged.
    """
    if len(jobs) > 1:
        check_targets([job.target for job in jobs], run)
        check_space(jobs, run.restart)
    with ExitStack() as stack:
        outputs = []
        for job in jobs:
            threads = count_workers(job, run.workers, run.memory)
            before = job.source.identities() or identities_of(job.source.files())
            if run.overwrite:
                check_replaceable(job.target)
            staging = open_staging(
                job.target,
                {**fingerprint(job, before), COMMAND: lineage(job)["command"]},
                overwrite=run.overwrite,
                restart=run.restart,
                durable=run.durable,
                resumable=job.source.repeatable,
            )
            stack.enter_context(staging)
            report = None if progress is None else partial(progress, job)
            outputs.append(make_output(staging, job, threads, run.executor, before, report))
        allow()
        return publish(outputs)


Output: TypeAlias = tuple[Staging, NewSidecar | None, Callable[[], Report]]
"""The working directory of a complete output, locked; its sidecar, None if an earlier run has
published it; and a function that gives the report once it is published."""


def open_staging(target: Path, job: Mapping[str, Any], **options: Any) -> Staging:
    """Return the directory in which `target` is made, locked; see `Staging`."""
    if isinstance(target, StorePath):
        from dsprep.writing.upload import UploadStaging

        return UploadStaging(target, job, **options)
    return Staging(target, job, **options)


def make_output(
    staging: Staging,
    job: Job,
    threads: int,
    executor: Executor | None,
    identities: Identities = (),
    progress: Progress | None = None,
) -> Output:
    """Make an output in its locked working directory, continuing an earlier run.

    Parameters
    ----------
    staging
        The working directory.
    job
        The output.
    threads, executor
        Threads of this process, and the executor that replaces them, if any.
    identities
        Identities of the files of the source before the run.
    progress
        Called with (samples, payload bytes) done so far.

    Raises
    ------
    DsprepError, OSError
        If there is not enough space, or data are damaged or have changed.
    """
    began, source = time.monotonic(), job.source
    check_space([job])
    resumed = samples = copied = 0
    with unchanged(identities), closing(_write(job, staging, executor, threads)) as pieces:
        try:
            for count, nbytes in pieces:
                samples, copied = samples + count, copied + (nbytes or 0)
                resumed += count if nbytes is None else 0
                if progress is not None:
                    progress(samples, copied + round(resumed * job.payload / max(1, job.samples)))
        except KeyboardInterrupt as error:
            error.args = (f"after {samples:,} samples",)
            raise
        staging.save({**START, "shard": len(job.shards), "complete": True})
    made = None
    if not staging.is_published:
        made = join_sidecars(
            job.format,
            job.schema,
            staging.made,
            [shard_path(job, staging.data, i) for i in range(len(job.shards))],
            [staging.record(i) for i in range(len(job.shards))],
            {**lineage(job), **job.recipe},
        )
    if isinstance(source, ShuffledSource):
        source.clean()
    bytes_in = sum(known.nbytes for _, known in identities[: len(source.files())])

    def report() -> Report:
        return Report(
            target=job.target,
            sidecar=spec.sidecar_path(job.target),
            samples=job.samples,
            files=len(job.shards),
            bytes_in=bytes_in,
            payload=copied + round(job.payload * resumed / max(1, job.samples)),
            copied=copied,
            bytes_out=tree_nbytes(job.target),
            seconds=time.monotonic() - began,
            resumed=resumed,
            notes=(*source.notes, *job.losses, *staging.notes),
        )

    return staging, made, report


def publish(outputs: Sequence[Output]) -> list[Report]:
    """Publish outputs with their sidecars; then remove working directories and replaced outputs."""
    for staging, made, _ in outputs:
        if made is not None:
            staging.publish(made.content, made.companion)
    for staging, _, _ in outputs:
        staging.discard()
    return [report() for _, _, report in outputs]


def check_targets(targets: Sequence[Path], run: RunOptions, *, dry: bool = False) -> None:
    """Raise `TargetError` if an output may not be made; with `dry`, nothing is removed."""
    for target in targets:
        is_own(partial_path(target))
    done = [published(t) for t in targets]
    if done[-1] and not all(done):
        # Outputs are made, and in the end their records removed, in this order: all are complete,
        # and a run was killed while it removed the records.
        for target in [] if dry else itertools.compress(targets, done):
            discard(target)
        done = [False for _ in targets]
    for target, made in zip(targets, done, strict=True):
        if run.overwrite:
            check_replaceable(target)
        if run.restart or not made:
            check_target(target, run.overwrite)


def _write(
    job: Job, staging: Staging, executor: Executor | None, threads: int
) -> Generator[Done, None, None]:
    """Write missing shards; yield samples of earlier runs, then each piece or shard."""
    source, state, shuffle_executor = job.source, staging.state or START, executor
    if executor is not None and len(job.shards) == 1:
        executor = None
        staging.notes += (ALONE_NOTE,)
    first, begun = int(state["shard"]), state["writer"] is not None
    if executor is not None and (begun or (staging.durable and not state.get("complete"))):
        # A rerun must not continue inside a shard whose files are removed now.
        staging.save({**START, "shard": first})
    continued = first if executor is None and begun else None
    done = complete_shards(job, staging, continued)
    for i in sorted(done) if not staging.is_published else ():
        staging.complete(i, shard_path(job, staging.data, i))
    done |= staging.uploaded.keys()
    yield sum(len(job.shards[i]) for i in done), None
    missing = [i for i in range(len(job.shards)) if i not in done]
    if missing and isinstance(source, ShuffledSource):
        source.durable = staging.durable
        if staging.durable and source.how == "buckets" and staging.state is None:
            staging.save(START)  # a rerun continues the first pass
        source.prepare(shuffle_executor)
    if missing:
        shard_path(job, staging.data, 0).parent.mkdir(parents=True, exist_ok=True)
    if executor is not None:
        from dsprep.writing.parallel import write_apart

        yield from write_apart(job, staging, missing, executor)
        return
    save = staging.save if staging.durable else None
    for i in missing:
        path, begins = shard_path(job, staging.data, i), state if i == continued else START
        record, durable = staging.record_path(i), staging.durable
        made = yield from write_shard(job, i, path, record, durable, threads, save, begins)
        staging.complete(i, path, made)
