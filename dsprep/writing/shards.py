"""The shards of a job: their writers, the pieces that are copied to them, and their groups.

A shard is a file of the output; an output of one file is one shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dsprep.core.groups import Grouping
from dsprep.errors import DsprepError
from dsprep.formats.base import Source, State, Writer
from dsprep.sidecar import spec
from dsprep.sidecar.spec import write_record
from dsprep.storage.trees import remove
from dsprep.writing.create_sidecar import describe
from dsprep.writing.job import Job
from dsprep.writing.plan import group_pieces, pieces
from dsprep.writing.shuffle import ShuffledSource
from dsprep.writing.staging import Staging
from dsprep.writing.transfer import CHECKPOINT_NBYTES, Done, ShardCopy


def need(source: Source, first: int) -> None:
    """Make the samples from this one on available, even if an earlier run released them."""
    if isinstance(source, ShuffledSource):
        source.need(first)


@contextmanager
def while_written(name: str) -> Iterator[None]:
    """Name what was being written in a system error that names no file."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, f"{error.strerror} (while {name} was written)") from error


def copying(
    job: Job,
    source: Source,
    writer: Writer,
    index: int,
    ranges: Iterator[tuple[int, int]],
    threads: int,
    save: Callable[[int, State], None] | None,
    finish: Callable[[], None] = lambda: None,
) -> Iterator[Done]:
    """Copy some of the samples of a shard; yield each piece when it has been written.

    `save` is called with (samples, state of the writer) when a position is durable; None: nothing
    waits for the disk. `finish` is called in the end.
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
    return copy.run(finish)


def complete(job: Job, index: int, writer: Writer, path: Path, record: Path, durable: bool) -> None:
    """Complete a shard, and record its sidecar: as long as that fits it, it is complete."""
    writer.durable = durable
    writer.finish()
    made = describe(job.format, job.schema, path, len(job.shards[index]), writer)
    write_record(spec.to_record(made.content, made.companion), record, durable=durable)


def shard_path(job: Job, data: Path, index: int) -> Path:
    """Return the path of a shard whose dataset is made in the directory `data`."""
    path = data / job.target.name
    return path / job.shards[index].name if job.sharded else path


def ranges_of(
    job: Job, source: Source, writer: Writer, index: int, done: int
) -> Iterator[tuple[int, int]]:
    """Return the pieces of a shard that are to be copied: all after the first ones."""
    shard = job.shards[index]
    if job.groupings:
        nbytes = job.payload // max(1, job.samples)
        grouping, is_whole = job.groupings[index], writer.whole
        return group_pieces(grouping, shard, nbytes, is_whole=is_whole, after=done)
    return pieces(source, shard, writer.unit, after=done)


def create_writer(job: Job, path: Path, index: int, position: State | None) -> Writer:
    """Return the writer of a shard, at its start or at a recorded position."""
    return job.format.create(path, job.schema, samples_of(job, index), job.options, position)


def samples_of(job: Job, index: int) -> int | Grouping:
    """Return the groups of a shard, or else its number of samples."""
    return job.groupings[index] if job.groupings else job.shards[index].samples


def continue_writer(
    job: Job, path: Path, index: int, done: int, position: State | None
) -> tuple[Writer, int]:
    """Return a writer at its recorded position, or at the start if that cannot be restored."""
    if position is not None:
        try:
            return create_writer(job, path, index, position), done
        except (DsprepError, FileNotFoundError):
            pass  # killed while completing the shard, when its working files were gone
    remove_leftovers(path)
    return create_writer(job, path, index, None), 0


def is_kept(job: Job, staging: Staging, index: int) -> bool:
    """Whether a shard is what an earlier run recorded when it was complete."""
    path = shard_path(job, staging.data, index)
    try:
        content, _ = staging.record(index)
        return content.files[0].identity.changed(path, job.format.facts) is None
    except (OSError, DsprepError, ValueError, TypeError, LookupError):
        return False


def remove_leftovers(path: Path) -> None:
    """Remove an unfinished shard and its working files: its name and a suffix."""
    for leftover in path.parent.iterdir():
        if leftover.name == path.name or leftover.name.startswith(f"{path.name}."):
            remove(leftover)
