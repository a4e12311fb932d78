"""Converting a dataset: open, plan, copy, publish, and write the sidecar."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from dsprep import formats
from dsprep.core.arguments import ConvertArguments
from dsprep.core.groups import plain
from dsprep.core.schema import DType, FieldSpec, parse_dtype
from dsprep.errors import FormatError, UsageError
from dsprep.formats.base import Source
from dsprep.formats.options import Compression, OpenOptions, WriteOptions, check_options
from dsprep.reader.options import check_names
from dsprep.source.dataset import open_dataset
from dsprep.source.static import with_static
from dsprep.storage.paths import StorePath, as_path
from dsprep.writing.buffers import parse_shard_size
from dsprep.writing.job import Job, Progress, Report, RunOptions, make_job
from dsprep.writing.plan import (
    cast_schema,
    count_rows,
    make_casts,
    parse_range,
    parse_stop,
    payload_nbytes,
    shards_by_bytes,
    shards_by_samples,
)
from dsprep.writing.run import run_job


def parse_arguments(given: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Return what `plan_job` and `RepackOptions` take alike.

    Raises
    ------
    UsageError
        If an argument is not known, or not possible.
    """
    check_names(given, known)
    more: dict[str, Any] = {} if given.get("chunk") is None else {"chunk": given["chunk"]}
    if given.get("compress") is not None:
        more["compress"] = Compression.parse(given["compress"])
    parse_shard_size(given.get("shard_size"))
    write = replace(given.get("write_options") or WriteOptions(), **more)
    return {"to": given.get("to"), "write": write, "shard_size": given.get("shard_size")}


def parse_options(given: ConvertArguments) -> tuple[dict[str, Any], RunOptions]:
    """Return the options of `plan_job` and of the run, from the arguments of `convert`."""
    common = parse_arguments(given, ConvertArguments.__annotations__)
    casts = {name: parse_dtype(dtype) for name, dtype in (given.get("cast") or {}).items()}
    options = {**common, "casts": casts, "samples": given.get("samples")}
    return options, RunOptions.among(given)


def plan_job(
    source: Source,
    target: Path,
    *,
    to: str | None = None,
    write: WriteOptions | None = None,
    casts: Mapping[str, DType] | None = None,
    samples: str | None = None,
    shard_size: str | int | None = None,
) -> Job:
    """Decide everything about a conversion; nothing is written.

    Parameters
    ----------
    source
        The dataset, opened.
    target
        The file or directory to make.
    to
        The format; None: by the suffix of `target`.
    write
        How the format writes.
    casts
        Other dtypes by field name.
    samples
        A range of samples, ``START:STOP``; None: all.
    shard_size
        The samples, or the bytes of values, of a file, if there are several.

    Returns
    -------
    Job
        For `run_job`.

    Raises
    ------
    DsprepError
        If the target's format is unknown or cannot hold the data, or options contradict each other.
    """
    target, write = resolve_target(target), write or WriteOptions()
    format = formats.of_target(target, to)
    if format is None:
        raise formats.unnamed(target)
    check_options(write, format.write_options, format.name)
    changes = make_casts(source.schema, casts or {})
    schema, lost = with_static(cast_schema(source.schema, changes), source, format)
    if not schema.fields:
        raise FormatError("the dataset has no fields", where=source.path)
    start, stop = 0, len(source)
    if samples:
        start, stop = parse_range(samples, len(source))
    notes = format.check(schema, write)  # before sizes are computed: it may take reading
    per_file, nbytes = parse_shard_size(shard_size)
    ranges = [(start, stop)]
    if per_file is not None:
        ranges = shards_by_samples(start, stop, per_file)
    elif nbytes is not None:
        ranges = shards_by_bytes(source, start, stop, nbytes)
    payload, largest = payload_nbytes(source, start, stop)
    if not schema.ragged:
        payload = schema.fixed_nbytes * (stop - start)  # after casts
    rows = count_rows(source, schema, ranges)
    return make_job(
        target,
        format,
        schema,
        write,
        [plain(b - a, r) for (a, b), r in zip(ranges, rows, strict=True)],
        start,
        payload=payload,
        sharded=shard_size is not None,
        source=source,
        casts=changes,
        losses=(*notes, *lost),
        largest=largest,
    )


def resolve_target(target: Path) -> Path:
    """Return the path of an output, made absolute if it has no name of its own.

    Raises
    ------
    UsageError
        If it is not a path, or has no name.
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
    fields: Sequence[str] = (),
    progress: Progress | None = None,
    **options: Unpack[ConvertArguments],
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
        `shard_size` a directory.
    fields
        The fields wanted, as ``NAME[=PATH][@INDEX][:DTYPE[SHAPE]]``; all when empty.
    progress
        Called with (samples, payload bytes) done so far.
    **options
        Options of the output, `dsprep.core.arguments.ConvertArguments`; of the run, `workers`,
        `memory`, `overwrite`, `restart`, `durable`, `executor`, `dsprep.writing.job.RunOptions`.
        Sizes may be text. `open_options` and `write_options` are everything else about reading and
        writing; `fields`, `compress` and `chunk` take precedence.

    Returns
    -------
    Report
        The output: `target`, `sidecar`, `samples`, `files`, bytes in and out, `seconds`, and
        `notes` on what the target cannot keep.

    Raises
    ------
    DsprepError, OSError
        If anything is wrong; nothing half-written is left under the name `target`.
    """
    output, run = parse_options(options)
    stop = parse_stop(output["samples"])
    reading = merge_open_options(options.get("open_options"), fields, run.memory, stop)
    with open_dataset(source, reading, marked=True) as opened:
        return run_job(plan_job(opened, as_path(target), **output), run, progress)


def merge_open_options(
    options: OpenOptions | None,
    fields: Sequence[str],
    memory: int | None = None,
    stop: int | None = None,
) -> OpenOptions:
    """Return options of reading; the other arguments take precedence over `options`."""
    more: dict[str, Any] = {} if memory is None else {"memory": memory}
    more |= {} if stop is None else {"stop": stop}
    if fields:
        more["fields"] = tuple(map(FieldSpec.parse, fields))
    return replace(options or OpenOptions(), **more)
