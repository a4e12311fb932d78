"""Writing a dataset of what a function makes of items: by any workers, continued when interrupted.

The samples are written to parts beside the target first, by the processes that call the function
(`dsprep.writing.items`); when all are there, a job writes the output from these as from any
dataset.
Both happen in the target's working directory, locked throughout: ``items/`` has the parts, and
``plan.json`` what was planned for them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import dsprep
from dsprep import executors
from dsprep.core.schema import Schema
from dsprep.errors import TargetError, UsageError
from dsprep.formats.base import Source
from dsprep.sidecar import spec
from dsprep.sidecar.spec import write_json
from dsprep.source.files import check_replaceable
from dsprep.storage.atomic import KEPT, partial_path
from dsprep.storage.paths import as_path
from dsprep.storage.trees import HIDDEN, remove, tree_nbytes
from dsprep.verbs.convert import named_target
from dsprep.verbs.repack import RepackOptions, plan_repack
from dsprep.writing.items.calls import (
    CONTINUED,
    Call,
    Calls,
    NoSampleError,
    ProgressCallback,
    ProgressReporter,
    Summary,
)
from dsprep.writing.items.parts import LostError, PartsSource, count_items
from dsprep.writing.items.tasks import Function, check_main, show_function
from dsprep.writing.job import Job, Report, RunOptions, admit, fingerprint
from dsprep.writing.run import Output, make_in
from dsprep.writing.shards import START
from dsprep.writing.staging import Staging, published
from dsprep.writing.upload import open_staging


@dataclass(frozen=True, kw_only=True)
class ItemsReport(Report, Summary):
    """What was written of items: a `Report` that also says what became of these."""


@dataclass(frozen=True, kw_only=True)
class ItemsOptions:
    """How items are written.

    Attributes
    ----------
    repack
        What is made of their samples.
    run
        How; its `workers` also call the function.
    schema
        Fields that are declared.
    executor
        Who calls the function: ``"threads"`` of this process, ``"processes"`` of this machine,
        ``"mpi"``, ``"dask"``, or an executor that is open.
    errors
        ``"raise"``, or ``"skip"``: items that fail are left out, and listed in the report.
    progress
        Called with a `Progress`, which as text is a line for a person: ``progress=print``.
    resume
        Continue an interrupted run, if there is one.
    """

    repack: RepackOptions
    run: RunOptions
    schema: Schema | None = None
    errors: str = "raise"
    executor: str | Executor = executors.THREADS
    progress: ProgressCallback | None = None
    resume: bool = False


def write_items(
    target: str | Path, items: Sequence[Any], function: Function, how: ItemsOptions
) -> ItemsReport:
    """Call a function for all items, and write the samples that it gives.

    Parameters
    ----------
    target
        The file or directory to make.
    items
        A sequence in an order that another run finds again: paths, numbers, tuples.
    function
        Of an item: gives a sample (a dict), several (an iterable of dicts), or None, which leaves
        the item out. For processes and MPI it is defined at the top level of a module.
    how
        How that is done.

    Returns
    -------
    ItemsReport
        As of `dsprep.convert`, with `items`, `left_out`, `failures` and `failed`.

    Raises
    ------
    ItemError
        If the function fails, from what it raised; the message names the item.
    SchemaError
        If a sample does not fit those before; the message names item and field.
    DsprepError, OSError
        If the target exists or is busy, space or memory do not suffice, or a worker was lost.

    Notes
    -----
    The samples come in the order of the items, and the bytes do not depend on who calls the
    function. An interrupted, killed or failed run is continued by the call with `resume`: of a
    function of the same name, as many items, the same fields and options. That function and items
    are otherwise the same is for the caller to know. A note says how much is taken over. Parts
    beside the target have the samples that were made; a worker loses about two seconds of work, or
    the item that it is at.

    A worker holds 2 MiB of samples, and the sample that it packs, besides what the function itself
    holds; this process holds the items and 500 bytes for each of about 4096 parts. On the disk the
    samples are twice, less what is removed when the output has it.
    """
    target = named_target(as_path(target))
    if how.errors not in ("raise", "skip"):
        raise UsageError(f"errors={how.errors!r} is not possible", expected="'raise' or 'skip'")
    call = Call(function=function, items=items, declared=how.schema, skip=how.errors == "skip")
    if how.resume and how.run.restart:
        raise UsageError("resume=True continues what restart=True discards", fix="give one of them")
    check_main()
    began, run = time.monotonic(), how.run
    options = {k: str(v) for k, v in asdict(how.repack).items()}
    identity = {"version": dsprep.__version__, **call.job(), "options": options}
    if run.overwrite:
        check_replaceable(target)
    with (
        _opened(how.executor, run.workers) as executor,
        open_staging(
            target,
            identity,
            overwrite=run.overwrite,
            restart=run.restart,
            durable=run.durable,
            refuse=lambda job: None if how.resume else _refuse(target, job),
        ) as staging,
    ):
        staging.again = "call again with resume=True to continue"
        if published(target):
            earlier = _published(target, staging)
            staging.discard()
            return earlier
        try:
            calls, output = _made(target, call, how, staging, executor)
        except LostError:  # the output was lost, or a part: what is missing is made again
            _reset(staging)
            calls, output = _made(target, call, how, staging, executor)
        except NoSampleError:
            staging.discard()  # a rerun calls the function again
            raise
        report, summary = output.publish(), calls.summary()
        notes = (*calls.notes, *report.notes, *output.discard(), *_notes(summary))
        changed = {
            "notes": notes,
            "seconds": time.monotonic() - began,
            "resumed": max(report.resumed, calls.samples),
        }
        return ItemsReport(**{**vars(report), **vars(summary), **changed})


def _refuse(target: Path, job: Mapping[str, Any]) -> None:
    """Raise `TargetError` if an interrupted run of a function is there."""
    if isinstance(total := job.get("items"), int):
        done = count_items(partial_path(target) / "items")
        raise TargetError(
            f"an interrupted run left {done:,} of {total:,} items",
            where=target,
            fix="resume=True continues it, restart=True discards what it left",
        )


def _made(
    target: Path, call: Call, how: ItemsOptions, staging: Staging, executor: Executor
) -> tuple[Calls, Output]:
    """Have all samples made, and the output of them."""
    while True:
        calls = _called(call, how, staging, executor)
        part = plan_repack(calls.source(), target, how.repack, how.run).parts[0]
        recipe = {**part.job.recipe, **_lineage(call, calls.summary())}
        job = replace(part.job, recipe=recipe)
        if _bind(staging, job, part.source):
            break
    with part.source as source:
        threads = admit(job, source, how.run.workers, how.run.memory)
        reporter = ProgressReporter(how.progress, "samples", job.samples)
        by = threads, None if type(executor) is ThreadPoolExecutor else executor
        return calls, make_in(staging, job, source, by, progress=reporter)


@contextmanager
def _opened(executor: str | Executor, workers: int | None) -> Iterator[Executor]:
    """Give who calls the function."""
    if isinstance(executor, Executor):
        yield executor
    elif executor == executors.THREADS:
        with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0)), "dsprep-item") as threads:
            yield threads
    else:
        with executors.opened(executor, workers=workers) as opened:
            assert opened is not None  # or it is threads
            yield opened


def _called(call: Call, how: ItemsOptions, staging: Staging, executor: Executor) -> Calls:
    """Call the function for all items for which that was not done."""
    state = staging.state or START
    begun = state["writer"] is not None or bool(state["shard"] or state.get("complete"))
    if staging.state is None:
        staging.save(START)  # a rerun continues
        staging.state = dict(START)
    target = staging.target
    calls = Calls(call, staging.root / "items", durable=staging.durable, released=begun)

    def check(schema: Schema) -> None:
        """Have what the target cannot hold refused before all items are done."""
        plan_repack(PartsSource(staging.root / "items", schema, ()), target, how.repack, how.run)

    calls.run(executor, how.progress, check)
    return calls


_KEPT = ("items", "job.json", "state.json", "plan.json", "data", *KEPT)


def _bind(staging: Staging, job: Job, source: Source) -> bool:
    """Return whether the output is to be made, or has been begun, as it is planned now.

    If another one was begun, such as with the stripes of another disk, that is removed: parts whose
    data are in it have to be made again.
    """
    path = staging.root / "plan.json"
    plan = json.loads(json.dumps(fingerprint(job, source, ())))
    before = None
    with suppress(FileNotFoundError, ValueError):
        before = json.loads(path.read_bytes())
    if before == plan:
        return True
    _reset(staging)
    write_json(plan, path, durable=staging.durable)
    return before is None


def _reset(staging: Staging) -> None:
    """Start the output over, from the parts."""
    for left in (*staging.root.iterdir(), *staging.data.iterdir()):
        if left.name not in _KEPT and not left.name.startswith(HIDDEN):
            remove(left)
    staging.reset()
    staging.save(START)
    staging.state = dict(START)


def _lineage(call: Call, summary: Summary) -> dict[str, Any]:
    """Return what the sidecar says of the origin of the samples."""
    return {
        "command": "dsprep.write",
        "function": show_function(call.function),
        "items": summary.items,
        "left_out": summary.left_out,
        "failures": summary.failures,
    }


def _notes(summary: Summary) -> tuple[str, ...]:
    lines = []
    if summary.left_out:
        lines.append(f"{summary.left_out:,} of {summary.items:,} items gave no sample")
    if summary.failures:
        first = summary.failed[0]
        lines.append(
            f"{summary.failures:,} of {summary.items:,} items failed and were left out, first item "
            f"{first.number} ({first.item}): {first.error}"
        )
    return tuple(lines)


def _published(target: Path, staging: Staging) -> ItemsReport:
    """Return what an earlier run did that was killed when all had been done."""
    content = spec.read(spec.sidecar_path(target))
    known, nbytes = content.lineage, tree_nbytes(target)
    items = int(known["items"])
    return ItemsReport(
        target=target,
        sidecar=spec.sidecar_path(target),
        samples=content.samples,
        files=len(content.files),
        bytes_in=0,
        payload=nbytes,
        copied=0,
        bytes_out=nbytes,
        seconds=0.0,
        resumed=content.samples,
        notes=(*staging.notes, CONTINUED.format(f"{items:,}", f"{items:,}")),
        items=items,
        left_out=int(known["left_out"]),
        failures=int(known["failures"]),
        failed=(),
    )
