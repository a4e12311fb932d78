"""Doing what a job says: copy shard by shard, publish, and write the sidecar.

Shards are written one after another by threads of this process, or by the workers of an executor,
each from its beginning in a directory of its own. ``state.json`` has the number of the shards that
are complete from the first one on, and the position in the next; ``shard-N.json`` says of one more
that it is complete.

A large output of one file is written in parts by the workers of an executor, if the offset of every
sample is known beforehand. It lies in a directory ``apart-...`` of this run. There ``parts.json``
has what decides where parts begin, and ``part-N.json`` says of one that it is complete, with the
checksums of its groups. A run that finds such a directory renames it to a new name, so that what
workers of an earlier run still do finds no file, and continues with the parts that are missing, by
whatever executor, or by threads.
"""

from __future__ import annotations

import errno
import itertools
import json
import re
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dsprep import executors
from dsprep.core.atomic import partial_path
from dsprep.core.groups import Grouping
from dsprep.core.marks import Mark, unchanged
from dsprep.core.storage import node, remove, sync_directory, tree_nbytes, wait_for
from dsprep.errors import DsprepError, ExecutorError, UsageError
from dsprep.formats.base import Opening, Source, State, Writer
from dsprep.layout.laws import Explicit, Law
from dsprep.layout.model import Blocks, Groups
from dsprep.sidecar import spec
from dsprep.sidecar.spec import write_json
from dsprep.source.files import check_replaceable
from dsprep.write.create_sidecar import Made, describe
from dsprep.write.job import (
    Job,
    Progress,
    Report,
    RunOptions,
    admit,
    check_space,
    fingerprint,
    lineage,
)
from dsprep.write.plan import Shard, group_pieces, pieces
from dsprep.write.shuffle import ShuffledSource
from dsprep.write.staging import Staging, check_target, discard, published
from dsprep.write.transfer import CHECKPOINT_NBYTES, Done, ShardCopy

_START: Mapping[str, Any] = {"shard": 0, "samples": 0, "writer": None}


def run_job(
    job: Job, source: Source, options: RunOptions | None = None, progress: Progress | None = None
) -> Report:
    """Do what `job` says; see `making`."""
    with making(job, source, options, progress) as output:
        report = output.publish()
        return replace(report, notes=(*report.notes, *output.discard()))


@contextmanager
def making(
    job: Job, source: Source, options: RunOptions | None = None, progress: Progress | None = None
) -> Iterator[Output]:
    """Make the whole output, not yet under its name, and lock it.

    The first pass of a shuffled source begins when the target is locked and there is enough space;
    its temporary files are removed when the output is complete.

    Parameters
    ----------
    job, source
        What is made of which samples.
    options
        How.
    progress
        Called with (samples, payload bytes) done so far.

    Raises
    ------
    DsprepError, OSError
        If the target exists or is busy, space or memory do not suffice, or data are damaged.
    """
    options = options or RunOptions()
    began = time.monotonic()
    threads = admit(job, source, options.workers, options.memory)
    before = source.marks() or tuple(Mark.of(p.absolute()) for p in source.files())
    if options.overwrite:
        check_replaceable(job.target)
    with Staging(
        job.target,
        fingerprint(job, source, before),
        overwrite=options.overwrite,
        restart=options.restart,
        durable=options.durable,
    ) as staging:
        check_space([job])
        shuffled = source if isinstance(source, ShuffledSource) else None
        with unchanged(before):
            if shuffled is not None and not (staging.state or {}).get("complete"):
                _shuffle(shuffled, staging, options.executor)
            pieces = _write(job, source, staging, options.executor, threads)
            resumed, copied = _count(job, staging, pieces, progress)
        made = None
        if not published(job.target):
            made = _described(job, source, staging, options.executor)
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
        yield Output(staging, made, report)


def _described(job: Job, source: Source, staging: Staging, executor: Executor | None) -> Made:
    """Write the sidecar of a complete output that has not got its name, and return it."""
    made = describe(
        job.format,
        job.schema,
        job.options,
        [(_shard_path(job, staging.data, i), _samples(job, i)) for i in range(len(job.shards))],
        staging.made,
        {**lineage(job, source), **job.recipe},
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
    shuffled.prepare(executor)


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


def _write(
    job: Job, source: Source, staging: Staging, executor: Executor | None, threads: int
) -> Generator[Done, None, None]:
    """Write what is not there yet: by so many threads here, or by the workers of an executor.

    Yields what earlier runs have written, then every piece or part.
    """
    if len(job.shards) == 1:
        parts = _parts_of(job, source, staging, executor)
        if parts is not None:
            return _write_parts(job, source, staging, parts, (executor, threads))
        executor = None
    state = staging.state or _START
    first, begun = int(state["shard"]), state["writer"] is not None
    if executor is not None and (begun or (staging.durable and not state.get("complete"))):
        # A rerun continues with other shards, and in none of which the files are removed now.
        staging.save({**_START, "shard": first})
    continued = first if executor is None and begun else None
    done = set(range(first))
    if job.sharded:
        done |= _clean_apart(job, staging, continued)
    missing = [i for i in range(len(job.shards)) if i not in done]
    if job.sharded and missing:
        (staging.data / job.target.name).mkdir(exist_ok=True)
    before = sum(len(job.shards[i]) for i in done)
    if executor is not None:
        return _write_apart(job, source, staging, (before, missing), executor)
    begin = (0, None)
    if missing[:1] == [continued]:
        begin = int(state["samples"]), state["writer"]
    return _write_here(job, source, staging, (before, missing), threads, begin)


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
        for piece in pieces:
            samples, copied = samples + piece.samples, copied + piece.nbytes
            if progress is not None:
                progress(samples, before + copied)
    staging.save({"shard": len(job.shards), "samples": 0, "writer": None, "complete": True})
    return resumed, copied


def _write_here(
    job: Job,
    source: Source,
    staging: Staging,
    todo: tuple[int, Sequence[int]],
    threads: int,
    begin: tuple[int, State | None],
) -> Generator[Done, None, None]:
    """Write shards one after another; yield what is there already, then every piece.

    `todo`: the samples of shards that are there, and the shards that are missing. `begin`: the
    samples that the first of these has, and the position of its writer, None at its start.
    """
    done, writer = 0, None
    before, missing = todo
    try:
        for index in missing:
            path = _shard_path(job, staging.data, index)
            if index == missing[0]:
                writer, done = _continued(job, path, index, *begin)
                _need(source, job.shards[index].start + done)
                yield Done(before + done, 0)
            else:
                writer, done = _created(job, path, index, None), 0

            def save(samples: int, position: State, index: int = index) -> None:
                staging.save({"shard": index, "samples": samples, "writer": position})
                _release(source, job.shards[index].start + samples)

            ranges = _ranges(job, source, writer, index, done)
            saved = save if staging.durable else None
            with _while_written(path.name):
                yield from _copy(job, source, writer, index, ranges, threads, saved)
                _complete(writer, staging.root / f"groups-{index}.json", staging.durable)
                if staging.durable:
                    staging.save({"shard": index + 1, "samples": 0, "writer": None})
                    _release(source, job.shards[index].stop)
                writer.clean()
        if not missing:
            yield Done(before, 0)
    finally:
        if writer is not None:
            writer.close()


def _need(source: Source, first: int) -> None:
    """Have the samples from this one on at hand, whatever an earlier run has released."""
    if isinstance(source, ShuffledSource):
        source.need(first)


def _release(source: Source, first: int) -> None:
    """Give back the space of temporary files with samples before this one: they are written."""
    if isinstance(source, ShuffledSource):
        source.release(first)


@contextmanager
def _while_written(name: str) -> Iterator[None]:
    """Say what was being written in an error of the system that names no file."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, f"{error.strerror} (while {name} was written)") from error


def _copy(
    job: Job,
    source: Source,
    writer: Writer,
    index: int,
    ranges: Iterator[tuple[int, int]],
    threads: int,
    save: Callable[[int, State], None] | None,
) -> Iterator[Done]:
    """Copy some of the samples of a shard; yield each piece when it has been written.

    `save` is called with (samples, state of the writer) when a position is durable; None: nothing
    waits for the disk.
    """
    copy = ShardCopy(
        source,
        writer,
        job.shards[index],
        ranges,
        casts=job.casts,
        workers=threads,
        save=save,
        checkpoint_nbytes=CHECKPOINT_NBYTES,
    )
    return copy.run()


def _complete(writer: Writer, path: Path, durable: bool) -> None:
    """Complete a shard, and keep in a file where its groups are."""
    writer.durable = durable
    writer.finish()
    groups = writer.groups()
    if groups is not None:
        _save_groups(path, groups, durable)


def _shard_path(job: Job, data: Path, index: int) -> Path:
    path = data / job.target.name
    return path / job.shards[index].name if job.sharded else path


# --- by other processes ------------------------------------------------------------------------


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


def _write_apart(
    job: Job,
    source: Source,
    staging: Staging,
    todo: tuple[int, Sequence[int]],
    executor: Executor,
) -> Generator[Done, None, None]:
    """Have shards written by the workers of an executor; as `_write_here`."""
    before, missing = todo
    yield Done(before, 0)
    attempts = _attempts(staging)

    def task(index: int) -> _Task:
        path = _shard_path(job, staging.data, index).absolute()
        return replace(_task(job, source, staging, attempts, index), number=index, path=path)

    for done, written in executors.run(executor, _do, map(task, missing), count=len(missing)):
        wait_for(done.path, written.node, written.nbytes)
        if job.groupings:
            wait_for(staging.root / f"groups-{done.number}.json", written.node)
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
    _need(source, first)  # tasks are made in order
    needed, offset = source.part(first, last)
    one = replace(
        job,
        shards=(Shard(shard.name, shard.start - offset, shard.stop - offset),),
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
        return _do_shard(task) if task.position is None else _do_part(task)
    except DsprepError as error:
        raise _told_of(task, str(error)) from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise _told_of(task, f"{where}{error.strerror or error}") from error


def _told_of(task: _Task, error: str) -> ExecutorError:
    start, stop = task.samples
    return ExecutorError(
        f"{error} (while samples {start:,} to {stop:,} were written to {task.path.name})"
    )


def _do_shard(task: _Task) -> _Written:
    # In a directory of this attempt: another one may be under way if a worker seemed lost.
    own = Path(tempfile.mkdtemp(prefix=f"{task.number}-", dir=task.attempts))
    made = own / task.path.name
    with task.source.opened() as source:
        with closing(_created(task.job, made, 0, None)) as writer:
            nbytes = _copied(task, source, writer)
            _complete(writer, own / "groups.json", task.durable)
        writer.clean()
    if task.job.groupings:
        (own / "groups.json").replace(task.root / f"groups-{task.number}.json")
    if task.durable:
        write_json({"nbytes": nbytes}, own / "shard.json")
    stored = tree_nbytes(made)  # before another attempt can take its place
    _put(made, task.path, own)
    if task.durable:
        sync_directory(task.path.parent)
        (own / "shard.json").replace(task.root / f"shard-{task.number}.json")
        sync_directory(task.root)
    remove(own)
    return _Written(nbytes, task.start, task.stop, stored, {}, node())


def _do_part(task: _Task) -> _Written:
    """Write a part; another attempt at it writes the same bytes to the same offsets."""
    wait_for(task.attempts / _CUT, task.node)
    with (
        task.source.opened() as source,
        closing(_created(task.job, task.path, 0, task.position)) as writer,
    ):
        nbytes = _copied(task, source, writer)
        if task.durable:
            writer.sync()
        report = writer.report()
    written = _Written(nbytes, task.start, task.stop, 0, report, node())
    record = task.attempts / f"part-{task.number}.json"
    write_json(written._asdict(), record, durable=task.durable)
    return written


def _copied(task: _Task, source: Source, writer: Writer) -> int:
    """Copy the samples of a task; return their bytes."""
    ranges = _ranges(task.job, source, writer, 0, task.start, task.stop)
    save = _save_nothing if task.durable else None
    copy = _copy(task.job, source, writer, 0, ranges, task.threads, save)
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
    """Record no position: a shard or part that is not complete is written anew."""


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


def _parts_of(
    job: Job, source: Source, staging: Staging, executor: Executor | None
) -> _Parts | None:
    """Return the parts of an output of one file: those of an interrupted run, or new ones.

    None if the file is written by this process alone.
    """
    state = staging.state or _START
    if job.sharded or state.get("complete"):
        return None
    left = list(staging.root.absolute().glob(f"{_APART}*"))
    found = next((path for path in left if (path / _CUT).exists()), None)
    for path in left:
        if path != found:
            remove(path)
    if found is not None:
        return _begun_parts(job, staging, found)
    if executor is None or state["writer"] is not None or job.payload <= 4 * PART_NBYTES:
        return None
    first = job.shards[0].start
    try:
        source.part(first, first + 1)
    except UsageError:  # other processes cannot open it
        return None
    _remove_leftovers(staging.made)
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
        staging.save(_START)  # a rerun continues with other parts
    record = {"samples": samples, "position": parts.position}
    write_json(record, attempts / _CUT, durable=staging.durable)
    return parts


def _begun_parts(job: Job, staging: Staging, found: Path) -> _Parts | None:
    """Return the parts of a run that was interrupted; None if some of its files are gone."""
    attempts = _attempts(staging)
    attempts.rmdir()
    found.rename(attempts)  # what its workers still do finds no file
    made = attempts / job.target.name
    if staging.made.exists() and not made.exists():
        staging.made.rename(made)  # killed before it was recorded that all is complete
    record = json.loads((attempts / _CUT).read_bytes())
    with suppress(DsprepError, FileNotFoundError):
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
    writer = _created(job, made, 0, position)
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


def _write_parts(
    job: Job, source: Source, staging: Staging, parts: _Parts, by: tuple[Executor | None, int]
) -> Generator[Done, None, None]:
    """Have parts written by the workers of an executor, or by so many threads; as `_write_here`."""
    attempts, writer, (executor, threads) = parts.made.parent, parts.writer, by
    found = [_Written(**json.loads(p.read_bytes())) for p in attempts.glob("part-*.json")]
    known = {(written.start, written.stop): written for written in found}

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
        yield Done(sum(written.stop - written.start for written in found), 0)
        with ThreadPoolExecutor(1) as alone:
            for task, written in executors.run(executor or alone, _do, tasks()):
                wait_for(attempts / f"part-{task.number}.json", written.node)
                writer.adopt(written.report)
                yield written.done
        with _while_written(job.target.name):
            _complete(writer, staging.root / "groups-0.json", staging.durable)
    finally:
        writer.close()
    parts.made.rename(staging.made)
    if staging.durable:
        sync_directory(staging.data)


# --- pieces, writers, groups -------------------------------------------------------------------


def _ranges(
    job: Job, source: Source, writer: Writer, index: int, done: int, until: int | None = None
) -> Iterator[tuple[int, int]]:
    """Return the pieces of a shard that are to be copied: all after the first ones, or a part."""
    shard = job.shards[index]
    if job.groupings:
        nbytes = job.payload // max(1, job.samples)
        grouping, whole = job.groupings[index], writer.whole
        return group_pieces(grouping, shard, nbytes, whole=whole, after=done, until=until)
    if until is not None:
        shard = replace(shard, stop=shard.start + until)
    return pieces(source, shard, writer.unit, after=done)


def _created(job: Job, path: Path, index: int, position: State | None) -> Writer:
    """Return the writer of a shard, at its start or at a recorded position."""
    return job.format.create(path, job.schema, _samples(job, index), job.options, position)


def _samples(job: Job, index: int) -> int | Grouping:
    """Return the groups of a shard, or else its number of samples."""
    return job.groupings[index] if job.groupings else len(job.shards[index])


def _continued(
    job: Job, path: Path, index: int, done: int, position: State | None
) -> tuple[Writer, int]:
    """Return a writer at its recorded position, or at the start if that cannot be restored."""
    if position is not None:
        try:
            return _created(job, path, index, position), done
        except (DsprepError, FileNotFoundError):
            pass  # killed while completing the shard, when its working files were gone
    _remove_leftovers(path)
    return _created(job, path, index, None), 0


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
