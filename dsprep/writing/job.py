"""A job: what will be made, whether it can be done here, and what determines its bytes.

A job is made by `dsprep.verbs.convert` or `dsprep.verbs.repack` and done by `dsprep.writing.run`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias, Unpack

import dsprep
from dsprep.core.arguments import RunArguments
from dsprep.core.groups import Grouping
from dsprep.core.memory import allowed_memory
from dsprep.core.schema import Schema
from dsprep.core.units import as_nbytes, show_nbytes
from dsprep.errors import TargetError, UsageError
from dsprep.formats.base import FilePlan, Source, WritableFormat
from dsprep.formats.options import WriteOptions, memory_error
from dsprep.storage.atomic import partial_path, scratch_directory
from dsprep.storage.identity import Identities
from dsprep.storage.paths import StorePath, as_path
from dsprep.storage.trees import free_nbytes, tree_nbytes
from dsprep.writing.buffers import NO_GROUPS, GroupSize
from dsprep.writing.create_sidecar import made_by
from dsprep.writing.plan import PIECE_NBYTES, Cast, Shard, shard_names, split_suffix
from dsprep.writing.shuffle import ShuffledSource
from dsprep.writing.staging import STATUS, published

COPIES_PER_WORKER = 4
"""A worker holds a piece as read, as encoded, and what compression needs besides."""

PARALLEL_UPLOADS = 2
"""Shards that are uploaded to a store at a time, while the next one is written."""

Progress: TypeAlias = Callable[[int, int], None]
"""Called with (samples, payload bytes) done so far."""


MAX_WORKERS = 8
"""Threads that work on an output at most, unless more are asked for."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The complete plan of an output; nothing has been written.

    Attributes
    ----------
    target
        The file or directory that will appear.
    format
        The target's format.
    source
        The samples, in the order in which they are written. It does not travel with the job.
    schema
        The fields written, after casts.
    casts
        Changes of dtype by field name.
    options
        Options of the format.
    shards
        The output files; one named as `target` itself when the output is not sharded.
    losses
        Losses: facts that the target cannot keep, one clause each.
    payload
        Bytes of all values, estimated if exact sizes would require a full read.
    largest
        Bytes of the largest sample, as far as known; when whole groups are written, of a group.
    recipe
        Order and choice of the samples, for the lineage.
    group_size
        Size of the groups, and the reason.
    """

    target: Path
    format: WritableFormat
    source: Source
    schema: Schema
    casts: Mapping[str, Cast]
    options: WriteOptions
    shards: tuple[Shard, ...]
    losses: tuple[str, ...]
    payload: int
    largest: int
    recipe: Mapping[str, Any] = field(default_factory=dict)
    group_size: GroupSize = NO_GROUPS

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "source": None}

    @property
    def sharded(self) -> bool:
        """True if `target` is a directory of shards."""
        return self.shards[0].name != self.target.name

    @property
    def split(self) -> str:
        """The split of what is written; empty: all."""
        name: str = self.recipe.get("part", "")
        return name

    @property
    def samples(self) -> int:
        """Samples that will be written."""
        return self.shards[-1].stop - self.shards[0].start

    @property
    def grouped(self) -> bool:
        """True if it is written in groups."""
        return not self.shards[0].grouping.plain

    @property
    def plans(self) -> list[FilePlan]:
        """Plans of the files."""
        return [shard.plan for shard in self.shards]

    @property
    def estimate(self) -> int:
        """Bytes on disk, about."""
        return sum(plan.nbytes for plan in self.plans)

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of working files while it is written."""
        unshuffled = self.source.scratch_nbytes if isinstance(self.source, ShuffledSource) else 0
        return unshuffled + sum(plan.scratch_nbytes for plan in self.plans)

    @property
    def groups(self) -> int:
        """The number of groups."""
        return sum(shard.grouping.count for shard in self.shards)

    @property
    def padding(self) -> int:
        """Padding bytes."""
        return sum(plan.padding for plan in self.plans)


def make_job(
    target: Path,
    format: WritableFormat,
    schema: Schema,
    options: WriteOptions,
    groupings: Sequence[Grouping],
    start: int = 0,
    *,
    payload: int,
    sharded: bool,
    **facts: Any,
) -> Job:
    """Return the job of an output; nothing is written.

    Parameters
    ----------
    groupings
        The groups of each file.
    start
        The first sample of the source.
    **facts
        Other attributes of the job.
    """
    shards, samples = list[Shard](), max(1, sum(grouping.total for grouping in groupings))
    names = shard_names(*split_suffix(target, format), len(groupings)) if sharded else [target.name]
    for name, grouping in zip(names, groupings, strict=True):
        plan = format.plan(schema, options, grouping, payload * grouping.total // samples, name)
        shards.append(Shard(name, start, grouping, plan))
        start += grouping.total
    return Job(
        target=target,
        format=format,
        schema=schema,
        options=options,
        shards=tuple(shards),
        payload=payload,
        **facts,
    )


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a conversion.

    Attributes
    ----------
    target
        The output.
    sidecar
        Its sidecar.
    samples, files
        Samples and files written.
    bytes_in
        Bytes of the source's files.
    payload
        Bytes of all values.
    copied
        Bytes of the values that this run copied.
    bytes_out
        Bytes of the output's files.
    seconds
        Wall time of this run.
    resumed
        Samples that an earlier, interrupted run had written.
    notes
        Assumptions when reading, and facts that the target could not keep.
    """

    target: Path
    sidecar: Path
    samples: int
    files: int
    bytes_in: int
    payload: int
    copied: int
    bytes_out: int
    seconds: float
    resumed: int
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a run. The bytes of the output do not depend on them.

    Attributes
    ----------
    workers
        Threads; None: one per core, at most 8, and 8 where they wait for an object store.
    memory
        Bytes that buffers may take; None: a quarter of what is free.
    overwrite
        Replace an existing target once the new one is complete.
    restart
        Discard what an interrupted run left, instead of continuing it.
    durable
        Wait for the disk before names appear and positions are recorded. Without, a crash of the
        machine (not of the process) can lose data, and interrupted runs start over.
    executor
        Who writes the files (see `dsprep.executors`); None: threads here.
    """

    workers: int | None = None
    memory: int | None = None
    overwrite: bool = False
    restart: bool = False
    durable: bool = True
    executor: Executor | None = None

    @classmethod
    def of(cls, **options: Unpack[RunArguments]) -> RunOptions:
        """Return parsed options; `memory` is bytes, or text such as ``"4GiB"``."""
        given: dict[str, Any] = {**options}
        if given.get("memory") is not None:
            given["memory"] = as_nbytes(given["memory"])
        return cls(**given)

    @classmethod
    def among(cls, given: Mapping[str, Any]) -> RunOptions:
        """Return the options that are among the arguments of a function."""
        return cls.of(**{n: v for n, v in given.items() if n in RunArguments.__annotations__})


def count_workers(job: Job, workers: int | None, memory: int | None) -> int:
    """Return the number of workers of a job: as requested, limited by memory.

    Raises
    ------
    UsageError
        If the target is or holds the source, or the job does not fit in the memory.
    """
    source = job.source
    _check_not_source(job.target, source)
    resident = source.resident_nbytes()
    extra = job.payload + job.samples if isinstance(source, ShuffledSource) else 0
    if workers is None and isinstance(source.path, StorePath):
        workers = MAX_WORKERS
    given: Any = workers
    if given is not None and not (hasattr(given, "__index__") and given >= 1):
        raise UsageError(
            f"{workers!r} workers are not possible", expected="a whole number, at least 1"
        )
    if workers is None:
        workers = min(MAX_WORKERS, len(os.sched_getaffinity(0)))
    memory = allowed_memory(memory)
    unit = min(job.plans[0].unit, max(map(len, job.shards)))
    unit = unit * job.payload // max(1, job.samples)
    each = COPIES_PER_WORKER * max(PIECE_NBYTES, unit, job.largest)
    if each + resident > memory:
        needed = each + max(resident, min(each, extra))
        raise memory_error(
            "one worker does not fit in the memory allowed",
            needed,
            memory,
            fix="raise --memory, or make chunks smaller with --chunk"
            if not job.grouped
            else "raise --memory, or lower --buffer-size",
        )
    return min(int(workers), (memory - resident) // each)


def check_space(jobs: Sequence[Job], restart: bool = False) -> None:
    """Raise `TargetError` if there is not enough space for outputs written in turn.

    With `restart`, partial output of earlier runs does not count as written.
    """
    needed = largest = 0
    for job in jobs:
        root = partial_path(job.target)
        if job.options.compress is not None or (not restart and published(job.target)):
            continue  # the estimate is an upper bound, or all has been written
        needed += staged_nbytes(job)
        needed -= tree_nbytes(root) if root.is_dir() else 0
        largest = max(largest, needed + job.scratch_nbytes)
    at = scratch_directory(jobs[0].target)
    free = free_nbytes(at)
    if largest > free:
        raise TargetError(
            "there is not enough space",
            where=at,
            expected=f"about {show_nbytes(largest)}",
            found=f"{show_nbytes(free)} free",
            fix=None
            if at == jobs[0].target.parent
            else "set TMPDIR to a directory with more, or cut the output with --shard-size",
        )


def staged_nbytes(job: Job) -> int:
    """Return the bytes of an output that are on this machine at a time, about."""
    if not isinstance(job.target, StorePath):
        return job.estimate
    largest = max(map(len, job.shards)) / max(1, job.samples)
    return min(job.estimate, round((2 * PARALLEL_UPLOADS + 1) * largest * job.estimate))


def _check_not_source(target: Path, source: Source) -> None:
    final = target
    if not isinstance(target, StorePath):
        final = Path(os.path.realpath(target))  # allows links that lead in circles
    resolved = lru_cache(maxsize=1024)(lambda path: path.resolve())  # of many files in a folder
    for path in source.files():
        is_plain = path.name not in ("", "..") and not path.is_symlink()
        used = f"{resolved(path.parent)}/{path.name}" if is_plain else str(path.resolve())
        if f"{used}/".startswith(f"{final}/") or f"{final}/".startswith(f"{used}/"):
            raise UsageError(
                "the target is or holds the source", where=target, fix="choose another path"
            )
    for name in source.named:
        if (named := as_path(name)).is_dir() and named.resolve() in final.parents:
            raise UsageError(
                f"the target is in {name}, and would be part of the source next time",
                where=target,
                fix="choose a path outside",
            )


def fingerprint(job: Job, known: Identities) -> dict[str, Any]:
    """Return the inputs that determine the output bytes, as JSON.

    Other time stamps of the data change the `STATUS` alone.

    Parameters
    ----------
    known
        Identities of the files of the source.
    """
    data, times, cut, edges = (hashlib.sha256() for _ in range(4))
    source = job.source
    paths = source.files()
    identities = known[: len(paths)]
    for path, each in identities:
        line = f"{path}\0{each.files} {each.nbytes} {each.sampled} {each.etag}\n"
        data.update(line.encode("utf-8", "surrogateescape"))
        times.update(f"{each.mtime_ns}\n".encode())
    for shard in job.shards:
        line = f"{shard.name}\0{shard.start}\0{shard.stop}\n"
        cut.update(line.encode("utf-8", "surrogateescape"))
        if job.grouped:
            edges.update(f"{shard.grouping.align}\0".encode() + shard.grouping.edges.tobytes())
    nbytes = sum(each.nbytes for _, each in identities)
    return {
        "version": dsprep.__version__,
        "format": job.format.name,
        "source": f"{paths[0]}, {nbytes} bytes in all" if paths else source.version,
        "source as it was": data.hexdigest(),
        STATUS: times.hexdigest(),
        "read as": source.schema.to_json(),
        "fields": job.schema.to_json(),
        "options": {k: str(v) for k, v in asdict(job.options).items()},
        "samples": [job.shards[0].start, job.shards[-1].stop],
        "files": [len(job.shards), cut.hexdigest()],
        "groups": [job.groups, edges.hexdigest()],
        "recipe": dict(job.recipe),
    }


def lineage(job: Job) -> dict[str, Any]:
    """Return the source files of the output, and the command."""
    source = job.source
    paths = source.files()
    function = "repack" if job.grouped else "convert"
    return {
        "source": [str(p.absolute()) for p in paths[:8]],
        "source_files": len(paths),
        **made_by(f"dsprep.{function if source.repeatable else 'write'}"),
    }
