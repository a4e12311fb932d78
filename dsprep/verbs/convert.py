"""Converting a dataset: open, plan, copy, publish, and write the sidecar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

from dsprep import formats
from dsprep.core.groups import plain
from dsprep.core.schema import DType, FieldSpec, parse_dtype
from dsprep.core.units import as_nbytes
from dsprep.errors import FormatError, UsageError
from dsprep.formats.base import Source
from dsprep.formats.options import Compression, OpenOptions, WriteOptions, check_options
from dsprep.reader.options import at_least
from dsprep.source.dataset import open_dataset
from dsprep.source.static import with_static
from dsprep.storage.paths import StorePath, as_path
from dsprep.writing.job import Job, Progress, Report, RunArguments, RunOptions, job_of
from dsprep.writing.plan import (
    cast_schema,
    count_rows,
    is_cut,
    make_casts,
    parse_range,
    payload_nbytes,
    shards_by_bytes,
    shards_by_samples,
    stop_of,
)
from dsprep.writing.run import run_job


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """The output of a conversion.

    Attributes
    ----------
    to
        The format; None: by the suffix of the target.
    write
        How the format writes.
    casts
        Field name to new dtype.
    samples
        ``"START:STOP"``; all if None.
    samples_per_file, shard_nbytes
        Into which files: of so many samples, or of at most so many bytes of values.
    """

    to: str | None = None
    write: WriteOptions = field(default_factory=WriteOptions)
    casts: Mapping[str, DType] = field(default_factory=dict)
    samples: str | None = None
    samples_per_file: int | None = None
    shard_nbytes: int | None = None


def plan_job(source: Source, target: Path, options: ConvertOptions | None = None) -> Job:
    """Decide everything about a conversion; nothing is written.

    Parameters
    ----------
    source
        The dataset, opened.
    target
        The file or directory to make.
    options
        What to make; by default what the suffix of `target` says.

    Returns
    -------
    Job
        For `run_job`.

    Raises
    ------
    DsprepError
        If the target's format is unknown or cannot hold the data, or options contradict each other.
    """
    options = options or ConvertOptions()
    target = named_target(target)
    format = formats.of_target(target, options.to)
    if format is None:
        raise formats.unnamed(target)
    check_options(options.write, format.write_options, format.name)
    casts = make_casts(source.schema, options.casts)
    schema, lost = with_static(cast_schema(source.schema, casts), source, format)
    if not schema.fields:
        raise FormatError("the dataset has no fields", where=source.path)
    start, stop = 0, len(source)
    if options.samples:
        start, stop = parse_range(options.samples, len(source))
    notes = format.check(schema, options.write)  # before sizes are computed: it may take reading
    sharded = is_cut(options.samples_per_file, options.shard_nbytes)
    ranges = [(start, stop)]
    if options.samples_per_file is not None:
        ranges = shards_by_samples(start, stop, options.samples_per_file)
    elif options.shard_nbytes is not None:
        ranges = shards_by_bytes(source, start, stop, options.shard_nbytes)
    payload, largest = payload_nbytes(source, start, stop)
    if not schema.ragged:
        payload = schema.fixed_nbytes * (stop - start)  # after casts
    rows = count_rows(source, schema, ranges)
    return job_of(
        target,
        format,
        schema,
        options.write,
        [plain(b - a, r) for (a, b), r in zip(ranges, rows, strict=True)],
        start,
        payload=payload,
        sharded=sharded,
        source=source,
        casts=casts,
        losses=(*notes, *lost),
        largest=largest,
    )


def named_target(target: Path) -> Path:
    """Return the path of an output, which has a name.

    Raises
    ------
    UsageError
        If it has none.
    """
    if isinstance(target, StorePath):
        target.store.check_writable(target.key)
        return target
    if "\0" in str(target) or not str(target):
        raise UsageError(f"{str(target)!r} is not a path")
    if target.name in ("", ".."):
        target = target.resolve()
        if not target.name:
            raise UsageError("the target has no name", where=target)
    return target


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
    progress: Progress | None = None,
    **how: Unpack[RunArguments],
) -> Report:
    """Convert a dataset to another format, or to another layout of the same format.

    The output appears under its name when it is complete, its sidecar last. An interrupted
    conversion is continued by the same call, and produces the same bytes.

    Parameters
    ----------
    source
        A file, a directory, a glob, ``@list.txt``, or a sequence of these.
    target
        The file or directory to make, also a URL (``s3://``, ``gs://``, ``az://``). With
        `samples_per_file` or `shard_size` a directory.
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
    progress
        Called with (samples, payload bytes) done so far.
    workers, memory, overwrite, restart, durable, executor
        How the output is made: see `dsprep.writing.job.RunOptions`. `memory` may be text.

    Returns
    -------
    Report
        What was written: `target`, `sidecar`, `samples`, `files`, bytes in and out, `seconds`, and
        `notes` on what the target cannot keep.

    Raises
    ------
    DsprepError, OSError
        If anything is wrong; nothing half-written is left under the name `target`.
    """
    options = ConvertOptions(
        to=to,
        write=writing(write_options, compress=compress, chunk=chunk),
        casts={name: parse_dtype(dtype) for name, dtype in (cast or {}).items()},
        samples=samples,
        samples_per_file=samples_per_file and at_least("samples_per_file", samples_per_file, 1),
        shard_nbytes=None if shard_size is None else as_nbytes(shard_size),
    )
    run = RunOptions.of(**how)
    options_to_read = replace(reading(open_options, fields, run.memory), stop=stop_of(samples))
    with open_dataset(source, options_to_read, marked=True) as opened:
        return run_job(plan_job(opened, as_path(target), options), run, progress)


def reading(
    options: OpenOptions | None, fields: Sequence[str], memory: int | None = None
) -> OpenOptions:
    """Return how to read; `fields` and `memory` take precedence over those of `options`."""
    more: dict[str, Any] = {} if memory is None else {"memory": memory}
    if fields:
        more["fields"] = tuple(map(FieldSpec.parse, fields))
    return replace(options or OpenOptions(), **more)


def writing(
    options: WriteOptions | None, *, compress: str | None = None, chunk: int | None = None
) -> WriteOptions:
    """Return how to write; `compress` and `chunk` take precedence over those of `options`."""
    more: dict[str, Any] = {} if chunk is None else {"chunk": chunk}
    if compress is not None:
        more["compress"] = Compression.parse(compress)
    return replace(options or WriteOptions(), **more)
