"""The shards of a job: their writers, the pieces that are copied to them, and their groups.

A shard is a file of the output; an output of one file is one shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dsprep.core.schema import Batch
from dsprep.errors import DsprepError
from dsprep.formats.base import Source, State, Writer
from dsprep.sidecar import spec
from dsprep.sidecar.spec import write_record
from dsprep.storage.trees import remove
from dsprep.writing.create_sidecar import describe
from dsprep.writing.job import Job
from dsprep.writing.plan import Shard, group_pieces, pieces
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
    writer: Writer,
    index: int,
    done: int,
    threads: int,
    save: Callable[[int, State], None] | None,
    finish: Callable[[Batch | None], None] = lambda last: None,
) -> Iterator[Done]:
    """Copy all but the first samples of a shard; yield each piece when it has been written.

    `save` is called with (samples, state of the writer) when a position is durable; None: nothing
    waits for the disk. `finish` is called in the end: see `ShardCopy.run`.
    """
    shard = job.shards[index]
    if job.grouped:
        nbytes = job.payload // max(1, job.samples)
        ranges = group_pieces(shard, nbytes, is_whole=writer.whole, after=done)
    else:
        ranges = pieces(job.source, shard.start, shard.stop, writer.unit, after=done)
    copy = ShardCopy(
        job.source,
        writer,
        (shard.start, shard.stop),
        ranges,
        casts=job.casts,
        workers=threads,
        save=save,
        checkpoint_nbytes=CHECKPOINT_NBYTES,
    )
    return copy.run(finish)


def complete(
    job: Job,
    index: int,
    writer: Writer,
    path: Path,
    record: Path,
    durable: bool,
    last: Batch | None = None,
) -> None:
    """Complete a shard, and record its sidecar: as long as that fits it, it is complete.

    `last` is its last sample, which is read back by the sidecar; None: it is not at hand.
    """
    writer.durable = durable
    writer.finish()
    made = describe(job.format, job.schema, path, len(job.shards[index]), writer, last)
    write_record(spec.to_record(made.content, made.companion), record, durable=durable)


def shard_path(job: Job, data: Path, index: int) -> Path:
    """Return the path of a shard whose dataset is made in the directory `data`."""
    path = data / job.target.name
    return path / job.shards[index].name if job.sharded else path


def continue_writer(shard: Shard, path: Path, state: Mapping[str, Any]) -> tuple[Writer, int]:
    """Return a writer at its recorded position, or at the start if that cannot be restored."""
    if state["writer"] is not None:
        try:
            return shard.plan.create(path, state["writer"]), int(state["samples"])
        except (DsprepError, FileNotFoundError):
            pass  # killed while completing the shard, when its working files were gone
    remove_leftovers(path)
    return shard.plan.create(path, None), 0


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
