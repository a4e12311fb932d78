"""Doing what a job says: copy shard by shard, publish, and write the sidecar.

A job is made by ``conversion`` or ``repack``; nothing is decided here but how many threads fit.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import dsprep
from dsprep import executors
from dsprep.core.atomic import partial_path
from dsprep.core.groups import Grouping
from dsprep.core.marks import Mark, sample, unchanged
from dsprep.core.schema import Schema
from dsprep.core.storage import (
    data_files,
    free_memory,
    free_nbytes,
    node,
    remove,
    sync_directory,
    tree_nbytes,
    wait_for,
)
from dsprep.errors import DsprepError, ExecutorError, TargetError, UsageError
from dsprep.formats.base import Format, Source, State, WriteOptions, Writer
from dsprep.layout.laws import Explicit, Law
from dsprep.layout.model import Blocks, Groups
from dsprep.sidecar import spec
from dsprep.sidecar.spec import write_json
from dsprep.source.dataset import MultiSource, check_replaceable, marks_of
from dsprep.source.from_sidecar import SidecarSource
from dsprep.write.plan import (
    PIECE_NBYTES,
    Cast,
    Shard,
    group_pieces,
    pieces,
    show_asked,
    show_nbytes,
)
from dsprep.write.remote import Part, deal, opened, part
from dsprep.write.shuffle import ShuffledSource
from dsprep.write.sidecars import Made, describe, made_by
from dsprep.write.split import DerivedSource
from dsprep.write.staging import STATUS, Staging, check_target, discard, published
from dsprep.write.transfer import CHECKPOINT_NBYTES, Done, ShardCopy

COPIES_PER_WORKER = 4
"""A worker holds a piece as read, as encoded, and what compression needs besides."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a conversion will do; deciding is over, nothing has been written.

    Attributes
    ----------
    target
        The file or directory that will appear.
    format
        The target's format.
    schema
        The fields written, after casts.
    casts
        Changes of dtype by field name.
    options
        How to write.
    shards
        The output files; one named as `target` itself when the output is not sharded.
    sharded
        Whether `target` is a directory of shards.
    stored
        How each field will be stored, by name.
    losses
        What the target cannot keep, one clause each.
    payload
        Bytes of all values, estimated where they cannot be told without reading all.
    estimate
        Bytes on disk that the output will take.
    scratch
        Bytes that working files take besides while it is made.
    largest
        Bytes of the largest sample, as far as known; when whole groups are written, of a group.
    unit
        Samples that stay together, when no groups are written.
    files
        Files and directories that one shard consists of.
    groupings
        The groups of each shard, when the output is written in groups; else empty.
    recipe
        What was done to the order and choice of samples, for the lineage.
    """

    target: Path
    format: Format
    schema: Schema
    casts: Mapping[str, Cast]
    options: WriteOptions
    shards: tuple[Shard, ...]
    sharded: bool
    stored: Mapping[str, str]
    losses: tuple[str, ...]
    payload: int
    estimate: int
    scratch: int
    largest: int
    unit: int = 1
    files: int = 1
    groupings: tuple[Grouping, ...] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Samples that will be written."""
        return self.shards[-1].stop - self.shards[0].start


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a conversion did.

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
        What was assumed when reading, and what the target could not keep.
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


_START: Mapping[str, Any] = {"shard": 0, "samples": 0, "writer": None}

Progress = Callable[[int, int], None]
"""Called with (samples, payload bytes) done so far."""


def run_job(job: Job, source: Source, **options: Any) -> Report:
    """Do what `job` says; see `making` for the parameters."""
    with making(job, source, **options) as output:
        report = output.publish()
        return replace(report, notes=(*report.notes, *output.discard()))


@contextmanager
def making(
    job: Job,
    source: Source,
    *,
    workers: int | None = None,
    memory: int | None = None,
    overwrite: bool = False,
    restart: bool = False,
    durable: bool = True,
    progress: Progress | None = None,
    shuffled: ShuffledSource | None = None,
    executor: Executor | None = None,
) -> Iterator[Output]:
    """Make the whole output, not yet under its name, and lock it; see `convert` for the parameters.

    Parameters
    ----------
    shuffled
        `source`, if it is shuffled: its first pass begins when the target is locked and there is
        enough space, and its temporary files go when the output is complete.
    executor
        Who writes the shards, if there are several; None: this process, one after another.

    Raises
    ------
    DsprepError, OSError
        If the target exists or is busy, space or memory do not suffice, or data are damaged.
    """
    began = time.monotonic()
    threads = admit(job, source, workers, memory)
    marks = _marks(source)
    if overwrite:
        check_replaceable(job.target)
    with Staging(
        job.target,
        _fingerprint(job, source, marks),
        overwrite=overwrite,
        restart=restart,
        durable=durable,
    ) as staging:
        check_space([job])
        with unchanged(marks):
            if shuffled is not None and not (staging.state or {}).get("complete"):
                _shuffle(shuffled, staging, executor)
            if executor is None or len(job.shards) == 1:
                resumed, copied = _copy_shards(job, source, staging, threads, progress)
            else:
                resumed, copied = _hand_out(job, source, staging, executor, progress)
        made = None if published(job.target) else _described(job, source, staging, executor)
        if shuffled is not None:
            shuffled.clean()
        report = Report(
            target=job.target,
            sidecar=spec.sidecar_path(job.target),
            samples=job.samples,
            files=len(job.shards),
            bytes_in=sum(tree_nbytes(p) for p in source_paths(source)),
            payload=copied + round(job.payload * resumed / max(1, job.samples)),
            copied=copied,
            bytes_out=0,
            seconds=time.monotonic() - began,
            resumed=resumed,
            notes=(*source.notes, *job.losses, *staging.notes),
        )
        yield Output(staging, made, report)


def _described(job: Job, source: Source, staging: Staging, executor: Executor | None) -> Made:
    """Write the sidecar of a complete output that has not got its name, and return it."""
    made = describe(
        job.format,
        job.schema,
        [(_shard_path(job, staging.data, i), len(shard)) for i, shard in enumerate(job.shards)],
        staging.made,
        {**_lineage(job, source), **job.recipe},
        [_saved_groups(staging, i) for i in range(len(job.groupings))],
        executor,
    )
    spec.write(made.content, staging.sidecar, made.companion, durable=staging.durable)
    return made


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
        self.staging.publish()
        if self.made is not None:
            self.staging.write_sidecar(self.made.content, self.made.companion)
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
        staging.save(_START)  # a rerun goes on with the first pass
    if executor is not None and shuffled.how == "buckets":
        deal(shuffled, executor)
    shuffled.prepare()


def check_targets(targets: Sequence[Path], *, overwrite: bool, restart: bool) -> None:
    """Raise `TargetError` if one of several outputs may not be made, before any of them is."""
    done = [published(t) for t in targets]
    if done[-1] and not all(done):
        # Outputs are made, and in the end their records removed, in this order: all are complete,
        # and a run was killed while it removed the records.
        _discard_kept([t for t, p in zip(targets, done, strict=True) if p])
        done = [False for _ in targets]
    for target, made in zip(targets, done, strict=True):
        if restart or not made:
            check_target(target, overwrite)


def _discard_kept(targets: Sequence[Path]) -> None:
    """Remove the records that these outputs are complete."""
    for target in targets:
        discard(partial_path(target))


def _state(root: Path) -> dict[str, Any]:
    """Return how far a run came that worked in `root`; empty if it left no word."""
    try:
        state = json.loads((root / "state.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def _copy_shards(
    job: Job, source: Source, staging: Staging, threads: int, progress: Progress | None
) -> tuple[int, int]:
    """Copy all shards that are not done yet; return (samples found done, payload bytes copied)."""
    state = staging.state or _START
    first = int(state["shard"])
    begun = None if state["writer"] is None else first
    apart = _clean_apart(job, staging, begun) - set(range(first)) if job.sharded else set[int]()
    resumed = sum(len(s) for s in job.shards[:first]) + int(state["samples"])
    resumed += sum(len(job.shards[i]) for i in apart)
    per_sample = job.payload / max(1, job.samples)
    samples, copied = resumed, 0
    before = round(resumed * per_sample)
    if progress is not None:
        progress(samples, before)
    _make_directory(job, staging, first)
    for index in range(first, len(job.shards)):
        if index in apart:
            continue
        path = _shard_path(job, staging.data, index)
        done, position = (int(state["samples"]), state["writer"]) if index == first else (0, None)
        if index == first and position is None:
            _remove_leftovers(path)
        writer, found = _open_writer(job, path, index, done, position)
        resumed, samples, done = resumed - (done - found), samples - (done - found), found

        def save(samples: int, position: State, index: int = index) -> None:
            staging.save({"shard": index, "samples": samples, "writer": position})

        with _while_written(job.shards[index].name):
            for piece in _write_shard(
                job, source, writer, index, done, threads, staging.root, staging.durable, save
            ):
                samples, copied = samples + piece.samples, copied + piece.nbytes
                if progress is not None:
                    progress(samples, before + copied)
            if staging.durable:
                staging.save({"shard": index + 1, "samples": 0, "writer": None})
            writer.clean()
    staging.save({"shard": len(job.shards), "samples": 0, "writer": None, "complete": True})
    return resumed, copied


@contextmanager
def _while_written(name: str) -> Iterator[None]:
    """Say what was being written in an error of the system that names no file."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, f"{error.strerror} (while {name} was written)") from error


def _write_shard(
    job: Job,
    source: Source,
    writer: Writer,
    index: int,
    done: int,
    threads: int,
    root: Path,
    durable: bool,
    save: Callable[[int, State], None],
) -> Iterator[Done]:
    """Copy the samples of a shard from `done` on; yield each piece when it has been written."""
    writer.durable = durable
    try:
        copy = ShardCopy(
            source,
            writer,
            job.shards[index],
            _ranges(job, source, writer, index, done),
            job.casts,
            threads,
            save,
            CHECKPOINT_NBYTES if durable else None,
        )
        yield from copy.run()
        writer.finish()
        groups = writer.groups()
        if groups is not None:
            _save_groups(root / f"groups-{index}.json", groups, durable)
    finally:
        writer.close()


def _make_directory(job: Job, staging: Staging, first: int) -> None:
    if job.sharded and first < len(job.shards):
        (staging.data / job.target.name).mkdir(exist_ok=True)


def _shard_path(job: Job, data: Path, index: int) -> Path:
    path = data / job.target.name
    return path / job.shards[index].name if job.sharded else path


# --- shards by other processes -----------------------------------------------------------------


@dataclass(frozen=True)
class _ShardTask:
    """One shard as it travels: written from its beginning, so that it may be written twice.

    Attributes
    ----------
    job
        Of this shard alone, whose samples are numbered as in `part`.
    part
        The samples.
    number
        Of the shard among all.
    path, root
        The file to write, and the working directory of the job.
    attempts
        A directory of this run. When another run begins it goes, and with it whatever workers
        still do of this one.
    threads, durable
        As in `run_job`.
    samples
        The shard's samples as the user counts them, for messages.
    node
        Where the directories were made; see `storage.node`.
    """

    job: Job
    part: Part
    number: int
    path: Path
    root: Path
    attempts: Path
    threads: int
    durable: bool
    samples: tuple[int, int]
    node: str


class _Written(NamedTuple):
    """A shard that is complete: payload bytes copied, its bytes, and the node that wrote it."""

    copied: int
    nbytes: int
    node: str


THREADS_PER_TASK = 2
"""One reads while another one writes."""


def _hand_out(
    job: Job,
    source: Source,
    staging: Staging,
    executor: Executor,
    progress: Progress | None,
) -> tuple[int, int]:
    """Have the shards that are not done yet written; return as `_copy_shards`."""
    state = staging.state or _START
    if state["writer"] is not None or (staging.durable and not state.get("complete")):
        # A rerun goes on with other shards, and in none of which the files are removed now.
        staging.save({**_START, "shard": state["shard"]})
    done = _clean_apart(job, staging, None) | set(range(int(state["shard"])))
    resumed = samples = sum(len(job.shards[i]) for i in done)
    copied, before = 0, round(resumed * job.payload / max(1, job.samples))
    _make_directory(job, staging, len(done))
    if progress is not None:
        progress(samples, before)
    attempts = Path(tempfile.mkdtemp(prefix=_APART, dir=staging.root.absolute()))
    tasks = (
        _shard_task(job, source, staging, attempts, i)
        for i in range(len(job.shards))
        if i not in done
    )
    missing = len(job.shards) - len(done)
    for task, written in executors.run(executor, _do_shard, tasks, count=missing):
        wait_for(task.path, written.node, written.nbytes)
        if task.job.groupings:
            wait_for(staging.root / f"groups-{task.number}.json", written.node)
        samples, copied = samples + len(job.shards[task.number]), copied + written.copied
        if progress is not None:
            progress(samples, before + copied)
    staging.save({"shard": len(job.shards), "samples": 0, "writer": None, "complete": True})
    return resumed, copied


def _shard_task(
    job: Job, source: Source, staging: Staging, attempts: Path, index: int
) -> _ShardTask:
    shard = job.shards[index]
    needed, offset = part(source, shard.start, shard.stop)
    one = replace(
        job,
        shards=(Shard(shard.name, shard.start - offset, shard.stop - offset),),
        groupings=job.groupings[index : index + 1],
        payload=round(job.payload * len(shard) / max(1, job.samples)),
    )
    path = _shard_path(job, staging.data, index).absolute()
    return _ShardTask(
        one,
        needed,
        index,
        path,
        staging.root.absolute(),
        attempts,
        THREADS_PER_TASK,
        staging.durable,
        (shard.start, shard.stop),
        node(),
    )


def _do_shard(task: _ShardTask) -> _Written:
    """Write a shard."""
    try:
        return _copied(task)
    except DsprepError as error:
        raise _told_of(task, str(error)) from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise _told_of(task, f"{where}{error.strerror or error}") from error


def _told_of(task: _ShardTask, error: str) -> ExecutorError:
    start, stop = task.samples
    return ExecutorError(
        f"{error} (while samples {start:,} to {stop:,} were written to {task.path.name})"
    )


def _copied(task: _ShardTask) -> _Written:
    for directory in (task.attempts, task.path.parent):
        wait_for(directory, task.node)
    # In a directory of this attempt: another one may be under way if a worker seemed lost.
    own = Path(tempfile.mkdtemp(prefix=f"{task.number}-", dir=task.attempts))
    made = own / task.path.name
    with opened(task.part) as source:
        writer, _ = _open_writer(task.job, made, 0, 0, None)
        pieces = _write_shard(
            task.job, source, writer, 0, 0, task.threads, own, task.durable, _save_nothing
        )
        nbytes = sum(piece.nbytes for piece in pieces)
        writer.clean()
    if task.job.groupings:
        (own / "groups-0.json").replace(task.root / f"groups-{task.number}.json")
    if task.durable:
        write_json({"nbytes": nbytes}, own / "shard.json")
    stored = tree_nbytes(made)  # before another attempt can take its place
    _put(made, task.path, own)
    if task.durable:
        sync_directory(task.path.parent)
        (own / "shard.json").replace(task.root / f"shard-{task.number}.json")
        sync_directory(task.root)
    remove(own)
    return _Written(nbytes, stored, node())


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
    """Record no position: a shard that is not complete is written anew."""


_APART = "apart-"


def _clean_apart(job: Job, staging: Staging, begun: int | None) -> set[int]:
    """Return the shards that other processes have completed; remove what is part of none.

    `begun`: a shard that is not complete, whose files stay because it is gone on with.
    """
    found = set[int]()
    for path in list(staging.root.iterdir()):
        match = re.fullmatch(r"shard-(\d+)\.json", path.name)
        if match:
            found.add(int(match[1]))
        elif path.name.startswith(_APART):
            remove(path)
    state = staging.state or _START
    directory = staging.data / job.target.name
    if state.get("complete") or not directory.is_dir():
        return found
    there = {path.name: path for path in directory.iterdir()}
    found = {i for i in found if job.shards[i].name in there}
    kept = {job.shards[i].name for i in found | set(range(int(state["shard"])))}
    stays = None if begun is None else job.shards[begun].name
    for name, path in there.items():
        if name not in kept and name != stays and not name.startswith(f"{stays}."):
            remove(path)
    return found


# --- pieces, writers, groups -------------------------------------------------------------------


def _ranges(
    job: Job, source: Source, writer: Writer, index: int, done: int
) -> Iterator[tuple[int, int]]:
    """Return the pieces of a shard that are still to be copied."""
    shard = job.shards[index]
    if job.groupings:
        nbytes = job.payload // max(1, job.samples)
        grouping = job.groupings[index]
        return group_pieces(grouping, shard, nbytes, whole=writer.whole, after=done)
    return pieces(source, shard, writer.unit, after=done)


def _open_writer(
    job: Job, path: Path, index: int, done: int, position: State | None
) -> tuple[Writer, int]:
    """Return a writer at its recorded position, or at the start if that cannot be restored."""

    def create(state: State | None) -> Writer:
        samples = job.groupings[index] if job.groupings else len(job.shards[index])
        return job.format.create(path, job.schema, samples, job.options, state)

    if position is not None:
        try:
            return create(position), done
        except (DsprepError, FileNotFoundError):
            # Killed while completing the shard, when its working files were gone: made again.
            _remove_leftovers(path)
    return create(None), 0


def _save_groups(path: Path, groups: Groups, durable: bool) -> None:
    """Keep where the groups of a complete shard lie until the sidecar is written."""
    blocks = groups.blocks
    laws: dict[str, Law | None] = {
        "offsets": blocks.offsets,
        "lengths": blocks.lengths,
        "crc32c": groups.crc32c,
        "first": groups.first,
    }
    content: dict[str, Any] = {
        "samples": groups.samples,
        "path": blocks.path,
        "files": groups.files,
    }
    for name, law in laws.items():
        content[name] = None if law is None else law.span(0, law.count).tolist()
    write_json(content, path, durable=durable)


def _saved_groups(staging: Staging, index: int) -> Groups:
    """Return what `_save_groups` kept."""
    content = json.loads((staging.root / f"groups-{index}.json").read_bytes())
    law = {
        name: None if content[name] is None else Explicit(np.array(content[name], np.int64))
        for name in ("offsets", "lengths", "crc32c", "first")
    }
    assert law["offsets"] is not None
    assert law["lengths"] is not None
    blocks = Blocks(law["offsets"], law["lengths"], content["path"])
    return Groups(content["samples"], blocks, law["crc32c"], law["first"], content["files"])


def _remove_leftovers(path: Path) -> None:
    """Remove an unfinished shard and its working files, which are named as it is and a suffix."""
    for leftover in path.parent.iterdir():
        if leftover.name == path.name or leftover.name.startswith(f"{path.name}."):
            remove(leftover)


def admit(job: Job, source: Source, workers: int | None, memory: int | None) -> int:
    """Return how many workers a job may have; nothing is written.

    Raises
    ------
    UsageError
        If the target is a place of the source, or the job does not fit in the memory.
    """
    _check_not_source(job.target, source)
    taken = source.resident_nbytes()
    most = job.payload + job.samples if isinstance(source, ShuffledSource) else 0
    return count_workers(job, workers, memory, taken, most)


def count_workers(
    job: Job, workers: int | None, memory: int | None, resident: int = 0, most: int = 0
) -> int:
    """Return how many workers may run at once within `memory` bytes, `resident` of them taken.

    `most`: what would be taken of any memory, though never more than half of it.

    Raises
    ------
    UsageError
        If not even one fits.
    """
    if workers is not None and workers < 1:
        raise UsageError(f"{workers} workers are not possible", expected="at least 1")
    if workers is None:
        workers = min(8, len(os.sched_getaffinity(0)))
    if memory is None:
        memory = max(256 << 20, free_memory() // 4)
    unit = 0
    if not job.groupings:
        unit = min(job.unit, max(map(len, job.shards)))
        unit = unit * job.payload // max(1, job.samples)
    each = COPIES_PER_WORKER * max(PIECE_NBYTES, unit, job.largest)
    if each + resident > memory:
        least = each + max(resident, min(each, most))
        step = 10 ** max(0, (len(str(least)) - 1) // 3 * 3 - 1)  # as many digits as are shown
        raise UsageError(
            "one worker does not fit in the memory allowed",
            expected=f"--memory of at least {show_nbytes(-(-least // step) * step)}",
            found=show_asked(memory),
            fix="raise --memory, or make chunks smaller with --chunk"
            if not job.groupings
            else "raise --memory, or lower --buffer-size",
        )
    return min(workers, (memory - resident) // each)


def check_space(jobs: Sequence[Job], restart: bool = False) -> None:
    """Raise `TargetError` if what is missing of some outputs, made in turn, surely does not fit.

    `restart`: what earlier runs left is discarded.
    """
    needed = most = 0
    for job in jobs:
        root = partial_path(job.target)
        if job.options.compress is not None or (_state(root).get("complete") and not restart):
            continue  # the estimate is an upper bound, or all has been written
        needed += job.estimate - (tree_nbytes(root) if root.is_dir() else 0)
        most = max(most, needed + job.scratch)
    at = jobs[0].target.parent
    free = free_nbytes(at)
    if most > free:
        raise TargetError(
            "there is not enough space",
            where=at,
            expected=f"about {show_nbytes(most)}",
            found=f"{show_nbytes(free)} free",
        )


def source_paths(source: Source) -> list[Path]:
    """Return the files and stores that `source` reads."""
    source = _bottom(source)
    return source.paths if isinstance(source, MultiSource | SidecarSource) else [source.path]


def _bottom(source: Source) -> Source:
    while isinstance(source, DerivedSource):
        source = source.base
    return source


def _marks(source: Source) -> tuple[Mark, ...]:
    """Return what the files of `source` were when it was opened; those of its data come first."""
    return marks_of(_bottom(source)) or tuple(Mark.of(p.absolute()) for p in source_paths(source))


def _check_not_source(target: Path, source: Source) -> None:
    final = Path(os.path.realpath(target))  # allows links that lead in circles
    for path in source_paths(source):
        used = path.resolve()
        if used == final or final in used.parents or used in final.parents:
            raise UsageError(
                "the target is or holds the source", where=target, fix="choose another place"
            )
    for name in _bottom(source).named:
        if _would_name(name, final):
            raise UsageError(
                f"the target lies in {name}, and would be part of the source the next time",
                where=target,
                fix="choose a place outside",
            )


def _would_name(name: str, path: Path) -> bool:
    """Whether a directory or pattern would mean `path`, too, if that existed."""
    if Path(name).is_dir():
        return Path(name).resolve() in path.parents
    parts, pattern = path.parts, (Path(name).parent.resolve() / Path(name).name).parts
    recursive = "**" in pattern
    if not glob.has_magic(name) or (len(parts) != len(pattern) and not recursive):
        return False
    if recursive:
        return fnmatch(str(path), str(Path(*pattern)).replace("**/", "*"))
    return all(map(fnmatch, parts, pattern))


def _fingerprint(job: Job, source: Source, marks: Sequence[Mark]) -> dict[str, Any]:
    """Return what decides every byte of the output, as JSON.

    Data that look as they did, but were replaced or written to, have another `STATUS`; on another
    node or mount that says nothing.
    """
    data, exact = hashlib.sha256(), hashlib.sha256()
    files: list[tuple[Path, int]] = []
    places = set[str]()
    for mark in marks[: len(source_paths(source))]:
        files += [(p, p.stat().st_size) for p in data_files(mark.path)]
        line = f"{mark.path}\0{mark.lasting}\n"
        data.update(line.encode("utf-8", "surrogateescape"))
        exact.update(f"{mark.exact}\0{mark.sampled}\n".encode())
        places.add(mark.at)
    data.update(sample(files).encode())
    nbytes = sum(size for _, size in files)
    shards = hashlib.sha256(repr(job.shards).encode()).hexdigest()
    return {
        "version": dsprep.__version__,
        "format": job.format.name,
        "source": f"{source_paths(source)[0]}, {nbytes} bytes in all",
        "source as it was": data.hexdigest(),
        STATUS: [*sorted(places), exact.hexdigest()],
        "read as": [f"{f}" for f in source.schema],
        "fields": job.schema.to_json(),
        "options": {k: str(v) for k, v in asdict(job.options).items()},
        "samples": [job.shards[0].start, job.shards[-1].stop],
        "files": [len(job.shards), shards],
        **({"groups": _told(job.groupings), "recipe": dict(job.recipe)} if job.groupings else {}),
    }


def _told(groupings: Sequence[Grouping]) -> dict[str, Any]:
    """Return groups as a person would tell them, with what tells all their edges."""
    digest = hashlib.sha256()
    for grouping in groupings:
        digest.update(f"{grouping.align}\0".encode() + grouping.edges.tobytes())
    return {
        "number": sum(g.count for g in groupings),
        "samples": max(g.samples for g in groupings),
        "stripe": groupings[0].align,
        "edges": digest.hexdigest(),
    }


def _lineage(job: Job, source: Source) -> dict[str, Any]:
    paths = source_paths(source)
    return {
        "source": [str(p.absolute()) for p in paths[:8]],
        "source_files": len(paths),
        **made_by("dsprep.repack" if job.groupings else "dsprep.convert"),
    }
