"""Converting a dataset: open, plan, copy, publish, and write the sidecar."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import dsprep
from dsprep import formats, sidecar
from dsprep.dataset import MultiSource, check_replaceable, open_dataset
from dsprep.errors import DsprepError, FormatError, TargetError, UsageError
from dsprep.formats.base import (
    Compression,
    Format,
    OpenOptions,
    Source,
    State,
    WriteOptions,
    Writer,
    check_options,
)
from dsprep.plan import (
    PIECE_NBYTES,
    Cast,
    Shard,
    cast_schema,
    make_casts,
    parse_nbytes,
    parse_range,
    probe_nbytes,
    shard_names,
    shards_by_bytes,
    shards_by_samples,
    show_nbytes,
)
from dsprep.provenance import describe, made_by
from dsprep.schema import DType, FieldSpec, Schema, parse_dtype
from dsprep.staging import Staging
from dsprep.storage import data_files, free_memory, free_nbytes, remove, tree_nbytes
from dsprep.through import SidecarSource
from dsprep.transfer import CHECKPOINT_NBYTES, ShardCopy

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
        Bytes of the largest sample, as far as known.
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


Progress = Callable[[int, int], None]
"""Called with (samples, payload bytes) done so far."""


def plan_job(
    source: Source,
    target: Path,
    *,
    to: str | None = None,
    options: WriteOptions | None = None,
    casts: Mapping[str, DType] | None = None,
    samples: str | None = None,
    samples_per_file: int | None = None,
    shard_nbytes: int | None = None,
) -> Job:
    """Decide everything about a conversion; see `convert` for the parameters.

    Raises
    ------
    DsprepError
        If the target's format is unknown or cannot hold the data, or options contradict.
    """
    options = options or WriteOptions()
    if "\0" in str(target) or not str(target):
        raise UsageError(f"{str(target)!r} is not a path")
    if target.name in ("", ".."):
        target = target.resolve()
        if not target.name:
            raise UsageError("the target has no name", where=target)
    format = formats.load(to) if to else formats.by_suffix(target)
    if format is None:
        raise UsageError(
            f"the name {target.name} does not tell the format",
            expected="a suffix such as "
            + ", ".join(formats.load(n).suffixes[0] for n in formats.FORMATS),
            fix="or name it with --to",
        )
    check_options(options, format.write_options, format.name)
    if samples_per_file is not None and shard_nbytes is not None:
        raise UsageError("give either --samples-per-file or --shard-size")
    made_casts = make_casts(source.schema, casts or {})
    schema = cast_schema(source.schema, made_casts)
    if not schema.fields:
        raise FormatError("the dataset has no fields", where=source.path)
    stored = format.plan_fields(schema, options)
    start, stop = parse_range(samples, len(source)) if samples else (0, len(source))
    suffix = next((s for s in format.suffixes if target.name.endswith(s)), "")
    sharded = samples_per_file is not None or shard_nbytes is not None
    if samples_per_file is not None:
        ranges = shards_by_samples(start, stop, samples_per_file)
    elif shard_nbytes is not None:
        ranges = shards_by_bytes(source, start, stop, shard_nbytes)
    else:
        ranges = [(start, stop)]
    stem = target.name.removesuffix(suffix)
    names = (
        shard_names(stem, suffix or format.suffixes[0], len(ranges)) if sharded else [target.name]
    )
    shards = tuple(Shard(n, a, b) for n, (a, b) in zip(names, ranges, strict=True))
    payload, largest = _measure(source, schema, start, stop)
    return Job(
        target=target,
        format=format,
        schema=schema,
        casts=made_casts,
        options=options,
        shards=shards,
        sharded=sharded,
        stored=stored,
        losses=tuple(format.losses(schema, options)),
        payload=payload,
        estimate=format.estimate(schema, stop - start, payload, options),
        scratch=format.scratch(schema, stop - start, payload, options),
        largest=largest,
    )


def _measure(source: Source, schema: Schema, start: int, stop: int) -> tuple[int, int]:
    """Return the payload bytes after casts, and those of the largest sample."""
    if not schema.ragged:
        return schema.fixed_nbytes * (stop - start), source.schema.fixed_nbytes
    payload = largest = 0
    for at in range(start, stop, 1 << 18):
        sizes = source.sizes(at, min(stop, at + (1 << 18)))
        if sizes is None:
            mean = probe_nbytes(source, start, stop)
            return mean * (stop - start), mean
        payload += int(sizes.sum())
        largest = max(largest, int(sizes.max()))
    return payload, largest


def run_job(
    job: Job,
    source: Source,
    *,
    workers: int | None = None,
    memory: int | None = None,
    overwrite: bool = False,
    restart: bool = False,
    durable: bool = True,
    progress: Progress | None = None,
) -> Report:
    """Do what `job` says; see `convert` for the parameters.

    Raises
    ------
    DsprepError, OSError
        If the target exists or is busy, space or memory do not suffice, or data are damaged.
    """
    began = time.monotonic()
    _check_not_source(job.target, source)
    if overwrite:
        check_replaceable(job.target)
    threads = count_workers(job, workers, memory, source.resident_nbytes())
    with Staging(
        job.target, _fingerprint(job, source), overwrite=overwrite, restart=restart, durable=durable
    ) as staging:
        _check_space(job, staging)
        resumed, copied = _copy_shards(job, source, staging, threads, progress)
        staging.publish()
        written = [(_final_path(job, shard), len(shard)) for shard in job.shards]
        made = describe(job.format, job.schema, written, job.target.absolute(), _lineage(source))
        made.write(durable=durable)
        staging.discard()
    return Report(
        target=job.target,
        sidecar=sidecar.sidecar_path(job.target),
        samples=job.samples,
        files=len(job.shards),
        bytes_in=sum(tree_nbytes(p) for p in source_paths(source)),
        payload=copied + round(job.payload * resumed / max(1, job.samples)),
        copied=copied,
        bytes_out=sum(f.identity.nbytes for f in made.content.files),
        seconds=time.monotonic() - began,
        resumed=resumed,
        notes=(*source.notes, *job.losses),
    )


def _copy_shards(
    job: Job, source: Source, staging: Staging, threads: int, progress: Progress | None
) -> tuple[int, int]:
    """Copy all shards that are not done yet; return (samples found done, payload bytes copied)."""
    state = staging.state or {"shard": 0, "samples": 0, "writer": None}
    first = int(state["shard"])
    resumed = sum(len(s) for s in job.shards[:first]) + int(state["samples"])
    per_sample = job.payload / max(1, job.samples)
    samples, copied = resumed, 0
    before = round(resumed * per_sample)
    if progress is not None:
        progress(samples, before)
    if job.sharded and first < len(job.shards):
        (staging.data / job.target.name).mkdir(exist_ok=True)
    for index in range(first, len(job.shards)):
        shard = job.shards[index]
        path = staging.data / job.target.name
        path = path / shard.name if job.sharded else path
        done, position = (int(state["samples"]), state["writer"]) if index == first else (0, None)
        if index == first and position is None:
            _remove_leftovers(path)
        writer, found = _open_writer(job, path, len(shard), done, position)
        resumed, samples, done = resumed - (done - found), samples - (done - found), found
        writer.durable = staging.durable

        def save(samples: int, position: State, index: int = index) -> None:
            staging.save({"shard": index, "samples": samples, "writer": position})

        try:
            copy = ShardCopy(
                source,
                writer,
                shard,
                done,
                job.casts,
                threads,
                save,
                CHECKPOINT_NBYTES if staging.durable else None,
            )
            for piece in copy.run():
                samples, copied = samples + piece.samples, copied + piece.nbytes
                if progress is not None:
                    progress(samples, before + copied)
            writer.finish()
        finally:
            writer.close()
        if staging.durable:
            staging.save({"shard": index + 1, "samples": 0, "writer": None})
        writer.clean()
    staging.save({"shard": len(job.shards), "samples": 0, "writer": None, "complete": True})
    return resumed, copied


def _open_writer(
    job: Job, path: Path, count: int, done: int, position: State | None
) -> tuple[Writer, int]:
    """Return a writer at its recorded position, or at the start if that cannot be restored."""
    if position is not None:
        try:
            return job.format.create(path, job.schema, count, job.options, position), done
        except (DsprepError, FileNotFoundError):
            # Killed while completing the shard, when its working files were gone: made again.
            _remove_leftovers(path)
    return job.format.create(path, job.schema, count, job.options, None), 0


def _remove_leftovers(path: Path) -> None:
    """Remove an unfinished shard and its working files, which are named as it is and a suffix."""
    for leftover in path.parent.iterdir():
        if leftover.name == path.name or leftover.name.startswith(f"{path.name}."):
            remove(leftover)


def _final_path(job: Job, shard: Shard) -> Path:
    return job.target.absolute() / shard.name if job.sharded else job.target.absolute()


def count_workers(job: Job, workers: int | None, memory: int | None, resident: int = 0) -> int:
    """Return how many workers may run at once within `memory` bytes, `resident` of them taken.

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
    unit = job.format.unit(job.schema, job.options) * job.payload // max(1, job.samples)
    each = COPIES_PER_WORKER * max(PIECE_NBYTES, unit, job.largest)
    if each + resident > memory:
        raise UsageError(
            "one worker does not fit in the memory allowed",
            expected=f"--memory of at least {show_nbytes(each + resident)}",
            found=show_nbytes(memory),
            fix="raise --memory, or make chunks smaller with --chunk",
        )
    return min(workers, (memory - resident) // each)


def _check_space(job: Job, staging: Staging) -> None:
    """Raise `TargetError` if the rest of the output surely does not fit."""
    if job.options.compress is not None or (staging.state or {}).get("complete"):
        return  # the estimate is an upper bound, or all has been written
    needed = job.estimate + job.scratch - tree_nbytes(staging.root)
    free = free_nbytes(job.target.parent)
    if needed > free:
        raise TargetError(
            "there is not enough space",
            where=job.target.parent,
            expected=f"about {show_nbytes(needed)}",
            found=f"{show_nbytes(free)} free",
        )


def source_paths(source: Source) -> list[Path]:
    """Return the files and stores that `source` reads."""
    return source.paths if isinstance(source, MultiSource | SidecarSource) else [source.path]


def _check_not_source(target: Path, source: Source) -> None:
    final = Path(os.path.realpath(target))  # allows links that lead in circles
    for path in source_paths(source):
        used = path.resolve()
        if used == final or final in used.parents or used in final.parents:
            raise UsageError(
                "the target is or holds the source", where=target, fix="choose another place"
            )


def _fingerprint(job: Job, source: Source) -> dict[str, Any]:
    """Return what decides every byte of the output, as JSON."""
    digest = hashlib.sha256()
    nbytes = 0
    for dataset in source_paths(source):
        for path in sorted(data_files(dataset.absolute())):
            stat = path.stat()
            line = f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n"
            digest.update(line.encode("utf-8", "surrogateescape"))
            nbytes += stat.st_size
    shards = hashlib.sha256(repr(job.shards).encode()).hexdigest()
    return {
        "version": dsprep.__version__,
        "format": job.format.name,
        "source": f"{source_paths(source)[0]}, {nbytes} bytes in all",
        "source as it was": digest.hexdigest(),
        "read as": [f"{f}" for f in source.schema],
        "fields": job.schema.to_json(),
        "options": {k: str(v) for k, v in asdict(job.options).items()},
        "samples": [job.shards[0].start, job.shards[-1].stop],
        "files": [len(job.shards), shards],
    }


def _lineage(source: Source) -> dict[str, Any]:
    paths = source_paths(source)
    return {
        "source": [str(p.absolute()) for p in paths[:8]],
        "source_files": len(paths),
        **made_by("dsprep.convert"),
    }


def convert(
    source: str | Path | Sequence[str | Path],
    target: str | Path,
    *,
    to: str | None = None,
    fields: Sequence[str] = (),
    compress: str | None = None,
    chunk: int | None = None,
    cast: Mapping[str, str] | None = None,
    samples: str | None = None,
    samples_per_file: int | None = None,
    shard_size: str | int | None = None,
    open_options: OpenOptions | None = None,
    write_options: WriteOptions | None = None,
    workers: int | None = None,
    memory: str | int | None = None,
    overwrite: bool = False,
    restart: bool = False,
    durable: bool = True,
    progress: Progress | None = None,
) -> Report:
    """Convert a dataset to another format, or to another layout of the same format.

    The output appears under its name when it is complete, its sidecar last. An interrupted
    conversion is continued by the same call, and ends in the same bytes.

    Parameters
    ----------
    source
        A file, a directory, a glob, ``@list.txt``, or a sequence of these.
    target
        The file or directory to make. With `samples_per_file` or `shard_size` a directory.
    to
        ``"hdf5"``, ``"lmdb"``, ``"tfrecord"`` or ``"zarr"``; by the suffix of `target` if None.
    fields
        The fields wanted, as ``NAME[=PATH][@INDEX][:DTYPE[SHAPE]]``; all when empty.
    compress
        ``"none"``, or a codec and perhaps a level: ``"zstd:5"``.
    chunk
        Samples per chunk, for hdf5 and zarr.
    cast
        Field name to new dtype; values that do not fit are refused.
    samples
        ``"START:STOP"`` as in Python, half-open.
    samples_per_file, shard_size
        Cut the output into files of so many samples, or of at most so many bytes of values
        (an int, or text such as ``"4GiB"``).
    open_options, write_options
        Everything else about reading and writing; `fields`, `compress` and `chunk` take
        precedence.
    workers
        Threads; by default one per core, at most 8.
    memory
        Bytes (or text) that buffers may take; by default a quarter of what is free.
    overwrite
        Replace an existing target once the new one is complete.
    restart
        Discard what an interrupted run left, instead of continuing it.
    durable
        Wait for the disk before names appear and positions are recorded. Without, a crash of
        the machine (not of the process) can lose data, and interrupted runs begin anew.
    progress
        Called with (samples, payload bytes) done so far.

    Raises
    ------
    DsprepError, OSError
        If anything is wrong; nothing half-written is left under the name `target`.
    """
    reading = open_options or OpenOptions()
    if fields:
        reading = replace(reading, fields=tuple(map(FieldSpec.parse, fields)))
    writing = write_options or WriteOptions()
    if compress is not None:
        writing = replace(writing, compress=Compression.parse(compress))
    if chunk is not None:
        writing = replace(writing, chunk=chunk)
    with open_dataset(source, reading) as opened:
        job = plan_job(
            opened,
            Path(target),
            to=to,
            options=writing,
            casts={name: parse_dtype(dtype) for name, dtype in (cast or {}).items()},
            samples=samples,
            samples_per_file=samples_per_file,
            shard_nbytes=parse_nbytes(str(shard_size)) if shard_size is not None else None,
        )
        return run_job(
            job,
            opened,
            workers=workers,
            memory=parse_nbytes(str(memory)) if memory is not None else None,
            overwrite=overwrite,
            restart=restart,
            durable=durable,
            progress=progress,
        )
