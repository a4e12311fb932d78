"""Writing a dataset of what a function makes of items: by any workers, continued when interrupted.

The samples are written to parts beside the target first, by the processes that call the function
(`dsprep.writing.items`); when all are there, a job writes the output from these as from any
dataset.
Both happen in the target's working directory, locked throughout: ``items/`` has the parts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import dsprep
from dsprep import executors
from dsprep.errors import TargetError, UsageError
from dsprep.formats.base import Source
from dsprep.source.files import check_replaceable
from dsprep.storage.atomic import partial_path
from dsprep.storage.paths import as_path
from dsprep.verbs.convert import resolve_target
from dsprep.verbs.repack import RepackOptions, plan_repack
from dsprep.writing.items.calls import CONTINUED, Calls
from dsprep.writing.items.parts import Failed, PartsSource, part_paths
from dsprep.writing.job import Job, Progress, Report, RunOptions, count_workers
from dsprep.writing.run import make_output, open_staging, publish
from dsprep.writing.staging import START, Staging, published
from dsprep.writing.tasks import begin_attempts


@dataclass(frozen=True, kw_only=True)
class ItemsReport(Report):
    """The result of writing what a function makes of items.

    Attributes
    ----------
    items
        How many there are.
    left_out
        Of how many the function gave no sample.
    failures
        How many failed, and were left out.
    failed
        The first 1000 of these: number, item and error of each.
    """

    items: int
    left_out: int
    failures: int
    failed: tuple[Failed, ...]


def write_items(
    target: str | Path,
    calls: Calls,
    repack: RepackOptions,
    run: RunOptions,
    *,
    executor: str | Executor = executors.THREADS,
    progress: Progress | None = None,
    resume: bool = False,
) -> ItemsReport:
    """Call a function for all items, and write the samples that it gives; see `dsprep.write`.

    Parameters
    ----------
    target
        The file or directory to make.
    calls
        What is called for which items.
    repack, run
        What is made of the samples, and how; the `workers` also call the function.
    executor, progress, resume
        As of `dsprep.write`.

    Notes
    -----
    The samples come in the order of the items, and the bytes do not depend on who calls the
    function. An interrupted, killed or failed run is continued by the call with `resume`: of a
    function of the same name, as many items, the same fields and options. That function and items
    are otherwise the same is for the caller to know. A note says how much is taken over. Parts
    beside the target have the samples that were made; a worker loses about two seconds of work, or
    the item that it is at.

    A worker holds 2 MiB of samples besides what the function itself holds, with ``"skip"`` all
    those of an item; this process holds the items, 500 bytes for each of about 4096 parts and 100
    for each MiB of samples. On the disk the samples are twice until the output is complete.
    """
    target = resolve_target(as_path(target))
    if resume and run.restart:
        raise UsageError("resume=True continues what restart=True discards", fix="give one of them")
    began = time.monotonic()
    options = {k: str(v) for k, v in asdict(repack).items()}
    identity = {"version": dsprep.__version__, **calls.job(), "options": options}
    if run.overwrite:
        check_replaceable(target)
    with (
        _opened(executor, run.workers) as workers,
        open_staging(
            target,
            identity,
            overwrite=run.overwrite,
            restart=run.restart,
            durable=run.durable,
            refuse=lambda job: None if resume else _refuse(target, job),
        ) as staging,
    ):
        staging.resume_hint = "call again with resume=True to continue"
        if published(target):
            staging.discard()
            raise TargetError(
                "an interrupted run had completed it", where=target, fix="nothing is left to do"
            )

        def plan(samples: Source) -> Job:
            return plan_repack(samples, target, repack, run).parts[0]

        samples = _called(staging, calls, workers, progress, plan)
        job = plan(samples)
        job = replace(job, recipe={**job.recipe, **calls.lineage()})
        staging.reset("items")  # what was written of these, perhaps with other groups
        tell = None if progress is None else lambda done, _: progress(done, job.samples)
        with job.source:
            threads = count_workers(job, run.workers, run.memory)
            others = None if type(workers) is ThreadPoolExecutor else workers
            output = make_output(staging, job, threads, others, progress=tell)
        report, counts = publish([output])[0], calls.counts()
        told = CONTINUED.format(f"{calls.resumed:,}", f"{counts['items']:,}")
        notes = (*[told][: calls.resumed], *report.notes)
        done = {**vars(report), **counts, "notes": notes, "seconds": time.monotonic() - began}
        return ItemsReport(**done)


def _called(
    staging: Staging,
    calls: Calls,
    workers: Executor,
    progress: Progress | None,
    plan: Callable[[Source], object],
) -> PartsSource:
    """Call the function for all items for which that was not done; return their samples."""
    if staging.state is None:
        staging.save(START)  # a rerun continues
        staging.state = dict(START)
    directory = staging.root / "items"
    directory.mkdir(exist_ok=True)
    calls.find(directory)
    attempts = begin_attempts(directory)
    # What the target cannot hold is refused before all items are done.
    durable = staging.durable
    calls.run(workers, attempts, durable, progress, lambda f: plan(PartsSource(directory, f, ())))
    if not calls.samples:
        staging.discard()  # a rerun calls the function again
        raise calls.no_samples()
    return calls.source(directory)


def _refuse(target: Path, job: Mapping[str, Any]) -> None:
    """Raise `TargetError` if an interrupted run of a function is there."""
    if isinstance(total := job.get("items"), int):
        done = sum(b - a for a, b, _ in part_paths(partial_path(target) / "items"))
        raise TargetError(
            f"an interrupted run left {done:,} of {total:,} items",
            where=target,
            fix="resume=True continues it, restart=True discards what it left",
        )


def _opened(executor: str | Executor, workers: int | None) -> AbstractContextManager[Any]:
    """Return the executor that calls the function."""
    if isinstance(executor, Executor):
        return nullcontext(executor)
    if executor == executors.THREADS:
        return ThreadPoolExecutor(workers or len(os.sched_getaffinity(0)), "dsprep-item")
    return executors.opened(executor, workers=workers)
