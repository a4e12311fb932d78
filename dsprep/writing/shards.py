"""The shards of a job: their writers, the pieces that are copied to them, and their groups.

A shard is a file of the output; an output of one file is one shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.core.groups import Grouping
from dsprep.errors import DsprepError
from dsprep.formats.base import Source, State, Writer
from dsprep.layout.laws import Explicit, Law
from dsprep.layout.model import Blocks, Groups
from dsprep.sidecar.spec import read_record, write_record
from dsprep.storage.marks import Mark
from dsprep.storage.trees import remove
from dsprep.writing.job import Job
from dsprep.writing.plan import group_pieces, pieces
from dsprep.writing.shuffle import ShuffledSource
from dsprep.writing.staging import Staging
from dsprep.writing.transfer import CHECKPOINT_NBYTES, Done, ShardCopy

START: Mapping[str, Any] = {"shard": 0, "samples": 0, "writer": None}
"""What ``state.json`` has before the first sample."""


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


def complete(writer: Writer, path: Path, durable: bool) -> None:
    """Complete a shard, and keep in a file where its groups are."""
    writer.durable = durable
    writer.finish()
    groups = writer.groups()
    if groups is not None:
        _save_groups(path, groups, durable)


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


def record_shard(path: Path, record: Path, *, durable: bool = False) -> None:
    """Record what a complete shard is; if the record is lost, the shard is made again."""
    write_record(Mark.of(path, sampled=True).to_json(), record, durable=durable)


def is_kept(job: Job, staging: Staging, index: int) -> bool:
    """Whether a shard is what an earlier run recorded when it was complete."""
    path = shard_path(job, staging.data, index)
    try:
        mark = Mark.from_json(read_record(staging.root / f"shard-{index}.json"), path)
        if job.groupings:
            saved_groups(staging, index)
        return mark.is_same(Mark.with_files(path, refresh=True)[0])
    except (OSError, ValueError, TypeError, LookupError):
        return False


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
    write_record(content, path, durable=durable)


def saved_groups(staging: Staging, index: int) -> Groups:
    """Return what `_save_groups` kept."""
    content = read_record(staging.root / f"groups-{index}.json")
    law = {
        name: None if content[name] is None else Explicit(np.array(content[name], np.int64))
        for name in ("offsets", "lengths", "crc32c", "first")
    }
    assert law["offsets"] is not None
    assert law["lengths"] is not None
    blocks = Blocks(law["offsets"], law["lengths"], content["path"])
    return Groups(content["samples"], blocks, law["crc32c"], law["first"], content["files"])


def remove_leftovers(path: Path) -> None:
    """Remove an unfinished shard and its working files: its name and a suffix."""
    for leftover in path.parent.iterdir():
        if leftover.name == path.name or leftover.name.startswith(f"{path.name}."):
            remove(leftover)
