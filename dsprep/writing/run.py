"""Running a job: copy shard by shard, publish, and write the sidecar.

Shards are written one after another by threads of this process, or by the workers of an executor
(`dsprep.writing.parallel`). ``state.json`` has the number of the shards that are complete from the
first one on, and the position in the next.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dsprep.formats.base import State
from dsprep.sidecar import spec
from dsprep.source.files import check_replaceable
from dsprep.storage.atomic import is_own, partial_path
from dsprep.storage.identity import Identities, identities_of, unchanged
from dsprep.storage.trees import tree_nbytes
from dsprep.writing.create_sidecar import Made, joined
from dsprep.writing.job import (
    Job,
    Progress,
    Report,
    RunOptions,
    admit,
    check_space,
    fingerprint,
    lineage,
)
from dsprep.writing.parallel import complete_shards, write_apart
from dsprep.writing.shards import (
    complete,
    continue_writer,
    copying,
    need,
    remove_leftovers,
    shard_path,
    while_written,
)
from dsprep.writing.shuffle import ShuffledSource
from dsprep.writing.staging import COMMAND, START, Staging, check_target, discard, published
from dsprep.writing.transfer import Done
from dsprep.writing.upload import open_staging

ALONE = (
    "the one file was written by this process alone; --shard-size cuts the output into files for "
    "the other processes"
)


def run_job(
    job: Job, options: RunOptions | None = None, progress: Progress | None = None
) -> Report:
    """Run `job` and publish its output; see `making`."""
    with making(job, options, progress) as output:
        report = output.publish()
        return replace(report, notes=(*report.notes, *output.discard()))


@contextmanager
def making(
    job: Job, options: RunOptions | None = None, progress: Progress | None = None
) -> Iterator[Output]:
    """Make the whole output, not yet under its name, and lock it.

    The first pass of a shuffled source begins when the target is locked and there is enough space;
    its temporary files are removed when the output is complete.

    Parameters
    ----------
    job
        What is made.
    options
        How.
    progress
        Called with (samples, payload bytes) done so far.

    Raises
    ------
    DsprepError, OSError
        If the target exists or is busy, space or memory do not suffice, or data are damaged.
    """
    options, source = options or RunOptions(), job.source
    threads = admit(job, options.workers, options.memory)
    before = source.identities() or identities_of(source.files())
    if options.overwrite:
        check_replaceable(job.target)
    with open_staging(
        job.target,
        {**fingerprint(job, before), COMMAND: lineage(job)["command"]},
        overwrite=options.overwrite,
        restart=options.restart,
        durable=options.durable,
        lasting=source.repeatable,
    ) as staging:
        yield make_in(staging, job, threads, options.executor, before, progress)


def make_in(
    staging: Staging,
    job: Job,
    threads: int,
    executor: Executor | None,
    identities: Identities = (),
    progress: Progress | None = None,
) -> Output:
    """Make the whole output in a directory that is locked, or what an earlier run left of it.

    Parameters
    ----------
    staging
        Where.
    job, progress
        As of `making`.
    threads, executor
        Who works: so many threads, or the workers of an executor if there is one.
    identities
        What the files of the source were.

    Raises
    ------
    DsprepError, OSError
        If there is not enough space, or data are damaged or have changed.
    """
    began, source = time.monotonic(), job.source
    check_space([job])
    shuffled = source if isinstance(source, ShuffledSource) else None
    with unchanged(identities):
        if shuffled is not None and not (staging.state or {}).get("complete"):
            _shuffle(shuffled, staging, executor)
        pieces = _write(job, staging, executor, threads)
        resumed, copied = _count(job, staging, pieces, progress)
    made = None if staging.is_published else _described(job, staging)
    if shuffled is not None:
        shuffled.clean()
    report = Report(
        target=job.target,
        sidecar=spec.sidecar_path(job.target),
        samples=job.samples,
        files=len(job.shards),
        bytes_in=sum(tree_nbytes(p) for p in source.files()),
        payload=copied + round(job.payload * resumed / max(1, job.samples)),
        copied=copied,
        bytes_out=0,
        seconds=time.monotonic() - began,
        resumed=resumed,
        notes=(*source.notes, *job.losses, *staging.notes),
    )
    return Output(staging, made, report)


def _described(job: Job, staging: Staging) -> Made:
    """Return the sidecar of a complete output that has not got its name."""
    shards = range(len(job.shards))
    return joined(
        job.format,
        job.schema,
        staging.made,
        [shard_path(job, staging.data, i) for i in shards],
        [staging.record(i) for i in shards],
        {**lineage(job), **job.recipe},
    )


@dataclass(frozen=True)
class Output:
    """An output that is complete; under its name when it has been published.

    Attributes
    ----------
    staging
        Where it was made; locked.
    made
        Its sidecar; None if an earlier run has published the output.
    report
        What was done.
    """

    staging: Staging
    made: Made | None
    report: Report

    def publish(self) -> Report:
        """Put the output in place, then its sidecar; return what was done in all."""
        began, before = time.monotonic(), len(self.staging.notes)
        if self.made is not None:
            self.staging.publish(self.made.content, self.made.companion)
        return replace(
            self.report,
            notes=(*self.report.notes, *self.staging.notes[before:]),
            bytes_out=tree_nbytes(self.report.target),
            seconds=self.report.seconds + time.monotonic() - began,
        )

    def discard(self) -> tuple[str, ...]:
        """Remove what the output replaced, and the record that it is complete; return notes."""
        before = len(self.staging.notes)
        self.staging.discard()
        return self.staging.notes[before:]


def _shuffle(shuffled: ShuffledSource, staging: Staging, executor: Executor | None) -> None:
    """Do the first pass of a shuffle, or what earlier runs left of it."""
    shuffled.durable = staging.durable
    if staging.durable and shuffled.how == "buckets" and staging.state is None:
        staging.save(START)  # a rerun continues the first pass
    shuffled.prepare(executor)


def check_targets(targets: Sequence[Path], run: RunOptions, *, dry: bool = False) -> None:
    """Raise `TargetError` if one of some outputs may not be made; `dry`: nothing is removed."""
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
    """Write what is not there yet: by so many threads here, or by the workers of an executor.

    Yields what earlier runs have written, then every piece or shard.
    """
    if executor is not None and len(job.shards) == 1:
        executor = None
        staging.notes += (ALONE,)
    state = staging.state or START
    first, begun = int(state["shard"]), state["writer"] is not None
    if executor is not None and (begun or (staging.durable and not state.get("complete"))):
        # A rerun must not continue inside a shard whose files are removed now.
        staging.save({**START, "shard": first})
    continued = first if executor is None and begun else None
    done = complete_shards(job, staging, continued)
    for i in sorted(done) if not staging.is_published else ():
        staging.complete(i, shard_path(job, staging.data, i))
    done |= staging.uploaded.keys()
    missing = [i for i in range(len(job.shards)) if i not in done]
    if missing:
        shard_path(job, staging.data, 0).parent.mkdir(parents=True, exist_ok=True)
    before = sum(len(job.shards[i]) for i in done)
    if executor is not None:
        return write_apart(job, staging, before, missing, executor)
    if missing[:1] != [continued]:
        state = START
        if continued in missing:
            remove_leftovers(shard_path(job, staging.data, continued))
    return _write_here(job, staging, before, missing, threads, state)


def _count(
    job: Job, staging: Staging, pieces: Generator[Done, None, None], progress: Progress | None
) -> tuple[int, int]:
    """Count what `_write` yields, and record that the output is complete.

    Returns
    -------
    Samples that an earlier run had written, and payload bytes that this one copied.
    """
    with closing(pieces):
        resumed = samples = next(pieces).samples
        copied, before = 0, round(resumed * job.payload / max(1, job.samples))
        if progress is not None:
            progress(samples, before)
        try:
            for piece in pieces:
                samples, copied = samples + piece.samples, copied + piece.nbytes
                if progress is not None:
                    progress(samples, before + copied)
        except KeyboardInterrupt as error:
            error.args = (f"after {samples:,} samples",)
            raise
    staging.save({**START, "shard": len(job.shards), "complete": True})
    return resumed, copied


def _write_here(
    job: Job,
    staging: Staging,
    before: int,
    missing: Sequence[int],
    threads: int,
    state: Mapping[str, Any],
) -> Generator[Done, None, None]:
    """Write shards one after another; yield what is there already, then every piece.

    `before`: the samples of shards that are there. `state`: how far the first missing one is.
    """
    done, writer, source = 0, None, job.source
    try:
        for index in missing:
            path = shard_path(job, staging.data, index)
            if index == missing[0]:
                writer, done = continue_writer(job.shards[index], path, state)
                need(source, job.shards[index].start + done)
                yield Done(before + done, 0)
            else:
                writer, done = job.shards[index].plan.create(path, None), 0

            def save(samples: int, position: State, index: int = index) -> None:
                staging.save({"shard": index, "samples": samples, "writer": position})
                source.release(job.shards[index].start + samples)

            saved = save if staging.durable else None
            with while_written(path.name):
                record = staging.record_path(index)
                finish = partial(complete, job, index, writer, path, record, staging.durable)
                yield from copying(job, writer, index, done, threads, saved, finish)
                if staging.durable:
                    staging.save({**START, "shard": index + 1})
                    source.release(job.shards[index].stop)
                writer.clean()
            staging.complete(index, path)
        if not missing:
            yield Done(before, 0)
    finally:
        if writer is not None:
            writer.close()
