"""Writing by the workers of an executor: whole shards, or one file in parts.

Each shard is written from its beginning in a directory of its own; ``shard-N.json`` says that it is
complete.

A large output of one file is written in parts, if the offset of every sample is known beforehand.
It lies in a directory ``apart-...`` of this run. There ``parts.json`` has what decides where parts
begin, and ``part-N.json`` says of one that it is complete, with the checksums of its groups. A run
that finds such a directory renames it to a new name, so that what workers of an earlier run still
do finds no file, and continues with the parts that are missing, by whatever executor, or by
threads.
"""

from __future__ import annotations

import errno
import itertools
import tempfile
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from dsprep import executors
from dsprep.errors import DsprepError, ExecutorError, FormatError, UsageError
from dsprep.formats.base import Opening, Source, State, Writer
from dsprep.sidecar.spec import read_record, write_record
from dsprep.storage.durable import sync_directory
from dsprep.storage.identity import sole_writer
from dsprep.storage.nodes import node, wait_for
from dsprep.storage.trees import remove, tree_nbytes
from dsprep.writing.job import Job
from dsprep.writing.shards import (
    START,
    complete,
    copying,
    create_writer,
    is_kept,
    need,
    ranges_of,
    record_shard,
    remove_leftovers,
    shard_path,
    while_written,
)
from dsprep.writing.staging import Staging, published
from dsprep.writing.transfer import Done


@dataclass(frozen=True)
class _Task:
    """A shard, or a part of an output of one file, as it travels. It may be written twice.

    Attributes
    ----------
    job
        Of this file alone, whose samples are numbered as in `source`.
    source
        The samples.
    number
        Of the shard or part among all.
    start, stop, position
        The samples of the file, and where its writer is at the first one. None: all, in a file
        that has to be made.
    path, root
        The file to write, and the working directory of the job.
    attempts
        A directory of this run. When another run begins it goes, and with it whatever workers
        still do of this one.
    threads, durable
        As in `run_job`.
    samples
        The samples as the user counts them, for messages.
    node
        Where the directories were made; see `storage.node`.
    """

    job: Job
    source: Opening
    number: int
    start: int
    stop: int
    position: State | None
    path: Path
    root: Path
    attempts: Path
    threads: int
    durable: bool
    samples: tuple[int, int]
    node: str


class _Written(NamedTuple):
    """What was done of a task.

    Payload bytes copied; the samples of the file, half-open; of a shard its bytes; what the writer
    of a part reported; and the node that wrote it.
    """

    copied: int
    start: int
    stop: int
    nbytes: int
    report: State
    node: str

    @property
    def done(self) -> Done:
        """What was copied."""
        return Done(self.stop - self.start, self.copied)


THREADS_PER_TASK = 2
"""One reads while another one writes."""


def write_apart(
    job: Job,
    source: Source,
    staging: Staging,
    todo: tuple[int, Sequence[int]],
    executor: Executor,
) -> Generator[Done, None, None]:
    """Write shards on the workers of an executor; yields what `_write_here` does."""
    before, missing = todo
    yield Done(before, 0)
    attempts = _attempts(staging)

    def task(index: int) -> _Task:
        path = shard_path(job, staging.data, index).absolute()
        return replace(_task(job, source, staging, attempts, index), number=index, path=path)

    for done, written in executors.run(executor, _do, map(task, missing), count=len(missing)):
        wait_for(done.path, written.node, written.nbytes)
        if job.groupings:
            wait_for(staging.root / f"groups-{done.number}.json", written.node)
        staging.completed(job, done.number)
        yield written.done


def _task(
    job: Job,
    source: Source,
    staging: Staging,
    attempts: Path,
    index: int,
    part: tuple[int, int, State] | None = None,
) -> _Task:
    """Return the task to write a shard, or a part of it."""
    shard = job.shards[index]
    start, stop, position = part or (0, len(shard), None)
    first, last = shard.start + start, shard.start + stop
    need(source, first)  # tasks are made in order
    needed, offset = source.part(first, last)
    one = replace(
        job,
        shards=(replace(shard, start=shard.start - offset, stop=shard.stop - offset),),
        groupings=job.groupings[index : index + 1],
        payload=round(job.payload * len(shard) / max(1, job.samples)),
    )
    return _Task(
        job=one,
        source=needed,
        number=0,
        start=start,
        stop=stop,
        position=position,
        path=attempts / shard.name,
        root=staging.root.absolute(),
        attempts=attempts,
        threads=THREADS_PER_TASK,
        durable=staging.durable,
        samples=(first, last),
        node=node(),
    )


def _do(task: _Task) -> _Written:
    """Write a shard or a part."""
    try:
        for directory in (task.attempts, task.path.parent):
            wait_for(directory, task.node)
        with sole_writer(task.root):
            return _do_shard(task) if task.position is None else _do_part(task)
    except DsprepError as error:
        raise _task_error(task, error.args[0]) from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise _task_error(task, f"{where}{error.strerror or error}") from error


def _task_error(task: _Task, error: str) -> ExecutorError:
    start, stop = task.samples
    return ExecutorError(
        f"{error} (while samples {start:,} to {stop:,} were written to {task.path.name})"
    )


def _do_shard(task: _Task) -> _Written:
    # In a directory of this attempt: another one may be under way if a worker seemed lost.
    own = Path(tempfile.mkdtemp(prefix=f"{task.number}-", dir=task.attempts))
    made = own / task.path.name
    with task.source.opened() as source:
        with closing(create_writer(task.job, made, 0, None)) as writer:
            nbytes = _copied(task, source, writer)
            complete(writer, own / "groups.json", task.durable)
        writer.clean()
    if task.job.groupings:
        (own / "groups.json").replace(task.root / f"groups-{task.number}.json")
    stored = tree_nbytes(made)  # before another attempt can take its place
    _put(made, task.path, own)
    if task.durable:
        sync_directory(task.path.parent)
        with suppress(FileNotFoundError):  # another attempt is replacing it, which records it
            record_shard(task.path, own / "shard.json", durable=True)
            (own / "shard.json").replace(task.root / f"shard-{task.number}.json")
        sync_directory(task.root)
    remove(own)
    return _Written(nbytes, task.start, task.stop, stored, {}, node())


def _do_part(task: _Task) -> _Written:
    """Write a part; another attempt at it writes the same bytes to the same offsets."""
    wait_for(task.attempts / _CUT, task.node)
    with (
        task.source.opened() as source,
        closing(create_writer(task.job, task.path, 0, task.position)) as writer,
    ):
        nbytes = _copied(task, source, writer)
        if task.durable:
            writer.sync()
        report = writer.report()
    written = _Written(nbytes, task.start, task.stop, 0, report, node())
    record = task.attempts / f"part-{task.number}.json"
    write_record(written._asdict(), record, durable=task.durable)
    return written


def _copied(task: _Task, source: Source, writer: Writer) -> int:
    """Copy the samples of a task; return their bytes."""
    ranges = ranges_of(task.job, source, writer, 0, task.start, task.stop)
    save = _save_nothing if task.durable else None
    copy = copying(task.job, source, writer, 0, ranges, task.threads, save)
    return sum(piece.nbytes for piece in copy)


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
    """Record no position: an incomplete shard or part is written again from its beginning."""


_APART = "apart-"


def complete_shards(job: Job, staging: Staging, begun: int | None) -> set[int]:
    """Return the shards that are complete; remove what is part of none.

    `begun`: a shard that is not complete, whose files stay because it is continued.
    """
    if published(job.target):
        return set(range(len(job.shards)))
    there = {path.name for path in staging.root.iterdir()}
    numbers = range(len(job.shards))
    complete = {i for i in numbers if f"shard-{i}.json" in there and is_kept(job, staging, i)}
    stays = [job.shards[i].name for i in (*complete, *(() if begun is None else (begun,)))]
    directory = staging.data / job.target.name if job.sharded else staging.data
    apart = staging.root.glob(f"{_APART}*") if job.sharded else ()
    for path in (*apart, *(directory.iterdir() if directory.is_dir() else ())):
        if path.name not in stays and (begun is None or not path.name.startswith(f"{stays[-1]}.")):
            remove(path)
    return complete


# --- one file in parts -------------------------------------------------------------------------

PART_NBYTES = 64 << 20
"""Payload of a part, at least: a worker opens the source for each. A file is written in parts from
four on."""

MANY_PARTS, MOST_PARTS = 64, 4096
"""Parts of a file, about, from which on they become larger, up to four times as large; and from
which on they become larger only."""

_CUT = "parts.json"

ALONE = (
    "the one file was written by this process alone: the offsets of its samples are not known "
    "beforehand (they are ragged or compressed), or it has few pages at which samples begin; "
    "--shard-size cuts the output into files for the other processes"
)


@dataclass(frozen=True)
class _Parts:
    """An output of one file that is written in parts, side by side.

    Attributes
    ----------
    made
        The file, in the directory of this run's attempts: workers of earlier runs do not find it
        there.
    writer
        Its writer, which skips all samples and completes it.
    position
        That of the writer at the beginning.
    cut
        The parts: the first sample, the last + 1, and the position of the writer at the first.
    """

    made: Path
    writer: Writer
    position: State
    cut: Iterator[tuple[int, int, State]]


def parts_of(
    job: Job, source: Source, staging: Staging, executor: Executor | None
) -> _Parts | None:
    """Return the parts of an output of one file: those of an interrupted run, or new ones.

    None if the file is written by this process alone.
    """
    state = staging.state or START
    if job.sharded or state.get("complete"):
        return None
    left = list(staging.root.absolute().glob(f"{_APART}*"))
    earlier = next((path for path in left if (path / _CUT).exists()), None)
    for path in left:
        if path != earlier:
            remove(path)
    if earlier is not None:
        return _begun_parts(job, staging, earlier)
    if executor is None or state["writer"] is not None or job.payload <= 4 * PART_NBYTES:
        return None
    first = job.shards[0].start
    try:
        source.part(first, first + 1)
    except UsageError:  # other processes cannot open it
        return None
    remove_leftovers(staging.made)
    attempts = _attempts(staging)
    more = min(job.payload // MANY_PARTS, 4 * PART_NBYTES)
    nbytes = max(PART_NBYTES, more, job.payload // MOST_PARTS)
    samples = max(1, nbytes * job.samples // job.payload)
    parts = _cut_up(job, attempts / job.target.name, samples, None)
    if parts is None:
        remove(attempts)
        staging.notes += (ALONE,)
        return None
    if staging.durable:
        parts.writer.sync()
        staging.save(START)  # a rerun continues with other parts
    record = {"samples": samples, "position": parts.position}
    write_record(record, attempts / _CUT, durable=staging.durable)
    return parts


def _begun_parts(job: Job, staging: Staging, earlier: Path) -> _Parts | None:
    """Return the parts of a run that was interrupted; None if some of its files are gone."""
    attempts = _attempts(staging)
    attempts.rmdir()
    earlier.rename(attempts)  # what its workers still do finds no file
    made = attempts / job.target.name
    if staging.made.exists() and not made.exists():
        staging.made.rename(made)  # killed before it was recorded that all is complete
    with suppress(DsprepError, FileNotFoundError):
        record = read_record(attempts / _CUT)
        return _cut_up(job, made, record["samples"], record["position"])
    remove(attempts)
    return None


def _attempts(staging: Staging) -> Path:
    """Make the directory of this run's attempts, or of one that is renamed to it."""
    return Path(tempfile.mkdtemp(prefix=_APART, dir=staging.root.absolute()))


def _cut_up(job: Job, made: Path, samples: int, position: State | None) -> _Parts | None:
    """Return the parts of a file, of about so many samples each; None if there are not several.

    `position`: that of the writer at the beginning, if the file is there.
    """
    writer = create_writer(job, made, 0, position)
    cut = _cuts(writer, job.samples, samples)
    first = next(cut, None)
    if first is None or first[1] == job.samples:
        writer.close()
        return None
    return _Parts(made, writer, first[2], itertools.chain([first], cut))


def _cuts(writer: Writer, count: int, samples: int) -> Iterator[tuple[int, int, State]]:
    """Yield the parts of a file of `count` samples; none if its writer cannot skip them."""
    stop = writer.skip(0)
    while stop is not None and stop < count:
        start, position = stop, writer.checkpoint()
        stop = writer.skip(min(count, start + samples))
        if stop is not None:
            yield start, stop, position


def write_parts(
    job: Job, source: Source, staging: Staging, parts: _Parts, by: tuple[Executor | None, int]
) -> Generator[Done, None, None]:
    """Write parts on the workers of an executor or on threads; yields what `_write_here` does."""
    attempts, writer, (executor, threads) = parts.made.parent, parts.writer, by
    records = list[_Written]()
    for path in attempts.glob("part-*.json"):
        with suppress(FormatError):  # or the part is written again
            records.append(_Written(**read_record(path)))
    known = {(written.start, written.stop): written for written in records}

    def tasks() -> Iterator[_Task]:
        each = threads if executor is None else THREADS_PER_TASK
        for number, part in enumerate(parts.cut):
            written = known.get(part[:2])
            if written is not None:
                writer.adopt(written.report)
            else:
                task = _task(job, source, staging, attempts, 0, part)
                yield replace(task, number=number, threads=each)

    try:
        yield Done(sum(written.stop - written.start for written in records), 0)
        with ThreadPoolExecutor(1) as alone:
            for task, written in executors.run(executor or alone, _do, tasks()):
                wait_for(attempts / f"part-{task.number}.json", written.node)
                writer.adopt(written.report)
                yield written.done
        with while_written(job.target.name):
            complete(writer, staging.root / "groups-0.json", staging.durable)
    finally:
        writer.close()
    parts.made.rename(staging.made)
    if staging.durable:
        sync_directory(staging.data)
    record_shard(staging.made, staging.root / "shard-0.json")
    staging.completed(job, 0)
