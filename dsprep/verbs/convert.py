"""Converting a dataset: open, plan, copy, publish, and write the sidecar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path

from dsprep import formats
from dsprep.core.schema import DType, FieldSpec, Schema, parse_dtype
from dsprep.errors import FormatError, UsageError
from dsprep.formats.base import (
    Compression,
    OpenOptions,
    Source,
    WriteOptions,
    check_options,
)
from dsprep.source.dataset import open_dataset
from dsprep.write.jobs import Job, Progress, Report, run_job
from dsprep.write.plan import (
    Shard,
    as_nbytes,
    cast_schema,
    make_casts,
    one_each,
    parse_range,
    probe_nbytes,
    shard_names,
    shards_by_bytes,
    shards_by_samples,
)


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
    format = formats.of_target(target, to)
    if format is None:
        raise UsageError(
            f"the name {target.name} does not tell the format",
            expected="a suffix such as "
            + ", ".join(formats.load(n).suffixes[0] for n in formats.FORMATS),
            fix="or name it with --to",
        )
    check_options(options, format.write_options - {"group_values"}, format.name)
    if samples_per_file is not None and shard_nbytes is not None:
        raise UsageError("give either --samples-per-file or --shard-size")
    made_casts = make_casts(source.schema, casts or {})
    schema = cast_schema(source.schema, made_casts)
    if not schema.fields:
        raise FormatError("the dataset has no fields", where=source.path)
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
    plan = format.plan(schema, options, stop - start, payload, names[0])
    return Job(
        target=target,
        format=format,
        schema=schema,
        casts=made_casts,
        options=options,
        shards=shards,
        sharded=sharded,
        stored=plan.stored,
        losses=(*plan.notes, *one_each(shards)),
        payload=payload,
        estimate=plan.nbytes,
        scratch=plan.scratch,
        unit=plan.unit,
        files=plan.files,
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
    executor: Executor | None = None,
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
    executor
        Who writes the files, if there are several (see `dsprep.executors`); None: threads here.

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
    with open_dataset(source, reading, marked=True) as opened:
        job = plan_job(
            opened,
            Path(target),
            to=to,
            options=writing,
            casts={name: parse_dtype(dtype) for name, dtype in (cast or {}).items()},
            samples=samples,
            samples_per_file=samples_per_file,
            shard_nbytes=as_nbytes(shard_size) if shard_size is not None else None,
        )
        return run_job(
            job,
            opened,
            workers=workers,
            memory=as_nbytes(memory) if memory is not None else None,
            overwrite=overwrite,
            restart=restart,
            durable=durable,
            progress=progress,
            executor=executor,
        )
