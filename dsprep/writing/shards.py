"""The shards of a job, files of the output: written, recorded, and found when a run continues."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from dsprep.errors import DsprepError
from dsprep.formats.base import Writer
from dsprep.sidecar import spec
from dsprep.sidecar.spec import write_record
from dsprep.storage.trees import remove
from dsprep.writing.create_sidecar import NewSidecar, describe_output
from dsprep.writing.job import Job
from dsprep.writing.plan import Shard, group_pieces, pieces
from dsprep.writing.staging import START, Staging
from dsprep.writing.transfer import CHECKPOINT_NBYTES, Done, ShardCopy


def write_shard(
    job: Job,
    index: int,
    path: Path,
    record: Path,
    durable: bool,
    threads: int,
    save: Callable[[Mapping[str, Any]], None] | None,
    state: Mapping[str, Any] = START,
) -> Generator[Done, None, NewSidecar]:
    """Write a shard, and record its sidecar: a shard that fits its record is complete.

    Yields samples of an earlier run, then each piece that was written; returns the sidecar.

    Parameters
    ----------
    path, record
        Paths of the shard, and of its record.
    save
        Called with each durable position; None: nothing waits for the disk.
    state
        The position of an earlier run, or `START`.
    """
    shard = job.shards[index]
    try:
        writer, done = _continue_writer(shard, path, state)
        with closing(writer):
            yield done, None
            if job.grouped:
                nbytes = job.payload // max(1, job.samples)
                ranges = group_pieces(shard, nbytes, is_whole=writer.whole_groups, after=done)
            else:
                ranges = pieces(job.source, shard.start, shard.stop, writer.unit, after=done)
            copy = ShardCopy(
                job.source,
                writer,
                (shard.start, shard.stop),
                ranges,
                job.casts,
                threads,
                None
                if save is None
                else lambda n, at: save({"shard": index, "samples": n, "writer": at}),
                CHECKPOINT_NBYTES,
            )
            yield from copy.run()
            writer.durable = durable
            writer.finish()
            made = describe_output(job.format, job.schema, path, len(shard), writer, copy.last)
            write_record(spec.to_record(made.content, made.companion), record, durable=durable)
            if save is not None:
                save({**START, "shard": index + 1})
            writer.clean()
            return made
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, f"{error.strerror} (while {path.name} was written)") from error


def _continue_writer(shard: Shard, path: Path, state: Mapping[str, Any]) -> tuple[Writer, int]:
    """Return a writer at its recorded position, or at the start if that cannot be restored."""
    if state["writer"] is not None:
        try:
            return shard.plan.create(path, state["writer"]), int(state["samples"])
        except (DsprepError, FileNotFoundError):
            pass  # killed while completing the shard, when its working files were gone
        for leftover in path.parent.iterdir():
            if leftover.name == path.name or leftover.name.startswith(f"{path.name}."):
                remove(leftover)
    return shard.plan.create(path, None), 0


def shard_path(job: Job, data: Path, index: int) -> Path:
    """Return the path of a shard whose dataset is made in the directory `data`."""
    path = data / job.target.name
    return path / job.shards[index].name if job.sharded else path


def complete_shards(job: Job, staging: Staging, begun: int | None) -> set[int]:
    """Return the shards that are complete; remove files of others.

    `begun` is an incomplete shard that will be continued: its files stay.
    """
    numbers = range(len(job.shards))
    if staging.is_published:
        return set(numbers)
    there = {path.name for path in staging.root.iterdir()}
    complete = set[int]()
    for i in numbers:
        if staging.record_path(i).name in there:
            with suppress(OSError, DsprepError, ValueError, TypeError, LookupError):
                path, known = shard_path(job, staging.data, i), staging.record(i)[0].files[0]
                if known.identity.changed(path, job.format.facts) is None:
                    complete.add(i)
            if i not in complete:
                staging.record_path(i).unlink()
    stays = {job.shards[i].name for i in (*complete, *(() if begun is None else (begun,)))}
    own = "/" if begun is None else f"{job.shards[begun].name}."
    directory = staging.data / job.target.name if job.sharded else staging.data
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.name not in stays and not path.name.startswith(own):
            remove(path)
    return complete
