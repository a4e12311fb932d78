"""``dsprep convert``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dsprep.cli import options as opt
from dsprep.cli.report import (
    fail,
    note,
    print_done,
    print_json,
    print_rows,
    progress_bar,
    report_rows,
    say,
    scratch_rows,
)
from dsprep.cli.usage import HDF5_ZARR, LMDB, TFRECORD
from dsprep.storage.paths import as_path

if TYPE_CHECKING:
    from dsprep.formats.base import Source
    from dsprep.formats.options import OpenOptions
    from dsprep.writing.job import Job, RunOptions

EPILOG = """
dsprep convert train.h5 train.tfrecord

dsprep convert 'day*.h5' days.zarr --compress zstd:5 --cast x=float16

dsprep convert cifar_lmdb cifar.h5 --values datum

dsprep convert cosmo/train train.h5 --field x:int16[128,128,128,4] --field y

dsprep convert train.h5 shards --to tfrecord --shard-size 1GiB --dry-run
"""


@opt.command(EPILOG)
def convert(
    paths: opt.SourcesAndTarget,
    writing: opt.Writing,
    reading: OpenOptions,
    run: RunOptions,
    samples: str | None = opt.value("START:STOP", "Only these samples.", panel=opt.WRITING),
    cast: list[str] = opt.value(
        "NAME=DTYPE",
        "Change a field's dtype; values that do not fit are refused.",
        default=[],
        panel=opt.WRITING,
    ),
    chunk: int | None = opt.value("N", "Target: samples per chunk.", panel=HDF5_ZARR, min=1),
    key_format: str | None = opt.value(
        "FORMAT", "Target: keys, as in {index:08d} (the default), or u64be.", panel=LMDB
    ),
    feature: list[str] = opt.value(
        "NAME=TYPE",
        "Target: the feature list that holds a field: bytes, float or int64.",
        default=[],
        panel=TFRECORD,
    ),
    zarr_format: int = opt.value("2|3", "Target: the version of Zarr.", default=3, panel=HDF5_ZARR),
    zarr_shard: int | None = opt.value(
        "N", "Target: samples per shard file; 0: one file per chunk.", panel=HDF5_ZARR, min=0
    ),
    dry_run: opt.DryRun = False,
    json: opt.Json = False,
) -> None:
    """Convert a dataset between HDF5, LMDB, TFRecord and Zarr.

    Values stay the same bit for bit. The output appears when it is complete; run an interrupted
    command again to continue it.
    """
    from dsprep.core.schema import parse_dtype
    from dsprep.verbs.convert import ConvertOptions, plan_job
    from dsprep.writing.job import admit
    from dsprep.writing.plan import stop_of
    from dsprep.writing.run import check_targets, run_job

    sources, target = opt.sources_and_target("convert", paths, run.overwrite)
    options = ConvertOptions(
        casts={n: parse_dtype(d) for n, d in _pairs("--cast", cast).items()},
        samples=samples,
        **writing.options(
            chunk=chunk,
            zarr_format=zarr_format,
            zarr_shard=zarr_shard,
            features=_features(feature),
            **({} if key_format is None else {"key_format": key_format}),
        ),
    )
    reading = replace(reading, stop=stop_of(samples))
    with opt.opened(sources, reading, not json, marked=True) as source:
        job = plan_job(source, as_path(target), options)
        if dry_run:
            admit(job, run.workers, run.memory)
            check_targets([job.target], run, dry=True)
            _print_plan(job, source, json)
            return
        announced = (*source.notes, *job.losses)
        if not json:
            for line in announced:
                note(line)
        with progress_bar("convert", job.samples, job.payload, not json) as update:
            report = run_job(job, run, update)
        if json:
            print_json({**vars(report), "rate": report.copied / max(report.seconds, 1e-9)})
            return
        for line in report.notes[len(announced) :]:
            note(line)
        print_done(report_rows(report))


def _pairs(option: str, texts: list[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, equals, value = text.rpartition("=")
        if not equals or not name or not value:
            fail(f"{option} {text!r} is not understood (expected NAME=VALUE)", 2)
        pairs[name] = value
    return pairs


def _features(texts: list[str]) -> dict[str, str]:
    from dsprep.errors import UsageError

    features = _pairs("--feature", texts)
    for name, kind in features.items():
        if kind not in ("bytes", "float", "int64"):
            raise UsageError(f"--feature {name}={kind}", expected="bytes, float or int64")
    return features


def _print_plan(job: Job, source: Source, json: bool) -> None:
    from dsprep.core.units import show_nbytes
    from dsprep.storage.atomic import scratch

    if json:
        print_json(
            {
                "target": job.target,
                "format": job.format.name,
                "samples": job.samples,
                "files": [{"name": s.name, "start": s.start, "stop": s.stop} for s in job.shards],
                "fields": dict(job.plans[0].stored),
                "payload_nbytes": job.payload,
                "estimated_nbytes": job.estimate,
                "scratch_nbytes": job.scratch,
                "scratch_directory": scratch(job.target),
                "notes": [*source.notes, *job.losses],
            }
        )
        return
    print_rows(
        [
            ("source", f"{source.version}, {len(source):,} samples in {source.path}"),
            ("target", f"{job.format.name} {job.target}"),
            ("samples", f"{job.samples:,}"),
            ("files", _files(job)),
            ("values", show_nbytes(job.payload)),
            ("on disk", _space(job)),
            *scratch_rows([job]),
            *((f"  {job.schema[n]}", how) for n, how in job.plans[0].stored.items()),
        ]
    )
    for line in (*source.notes, *job.losses):
        note(line)
    say("Nothing was written (--dry-run).")


def _space(job: Job) -> str:
    from dsprep.core.units import show_nbytes

    text = f"{'at most' if job.options.compress else 'about'} {show_nbytes(job.estimate)}"
    if job.scratch:
        text += f", and {show_nbytes(job.scratch)} for working files meanwhile"
    return text


def _files(job: Job) -> str:
    first, last = job.shards[0], job.shards[-1]
    if not job.sharded:
        return first.name
    return (
        f"{len(job.shards)}: {first.name} ({len(first):,} samples) ... {last.name} ({len(last):,})"
    )
