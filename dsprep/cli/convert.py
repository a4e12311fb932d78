"""``dsprep convert``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dsprep.cli.command import command, open_source, sources_and_target
from dsprep.cli.report import (
    note,
    print_done,
    print_json,
    print_rows,
    progress_bar,
    report_rows,
    say,
    scratch_rows,
)
from dsprep.core.arguments import ConvertArguments, RunArguments
from dsprep.formats.options import OpenOptions

if TYPE_CHECKING:
    from dsprep.formats.base import Source
    from dsprep.writing.job import Job


@command
def convert(
    paths: tuple[str, ...],
    /,
    options: ConvertArguments,
    run: RunArguments,
    reading: OpenOptions,
    dry_run: bool = False,
    json: bool = False,
) -> None:
    """Convert a dataset between HDF5, LMDB, TFRecord and Zarr.

    Values stay the same bit for bit. The output appears when it is complete; run an interrupted
    command again to continue it.

    Parameters
    ----------
    paths : SRC... DST
        Files, directories, quoted globs or @list.txt, read as one dataset; then the output.
    dry_run
        Show what would be done, and stop.
    json
        Print the result as JSON.

    Examples
    --------
    dsprep convert train.h5 train.tfrecord
    dsprep convert 'day*.h5' days.zarr --compress zstd:5 --cast x=float16
    dsprep convert cifar_lmdb cifar.h5 --values datum
    dsprep convert cosmo/train train.h5 --field x:int16[128,128,128,4] --field y
    dsprep convert train.h5 shards --to tfrecord --shard-size 1GiB --dry-run
    """
    from dsprep.storage.paths import as_path
    from dsprep.verbs.convert import parse_options, plan_job
    from dsprep.writing.job import count_workers
    from dsprep.writing.plan import parse_stop
    from dsprep.writing.run import check_targets, run_job

    output, run_options = parse_options(options)
    sources, target = sources_and_target("convert", paths, run_options.overwrite)
    reading = replace(reading, stop=parse_stop(output["samples"]))
    with open_source(sources, reading, not json, marked=True) as source:
        job = plan_job(source, as_path(target), **output)
        if dry_run:
            count_workers(job, run_options.workers, run_options.memory)
            check_targets([job.target], run_options, dry=True)
            _print_plan(job, source, json)
            return
        announced = (*source.notes, *job.losses)
        if not json:
            for line in announced:
                note(line)
        with progress_bar("convert", job.samples, job.payload, not json) as update:
            report = run_job(job, run_options, update)
        if json:
            print_json({**vars(report), "rate": report.copied / max(report.seconds, 1e-9)})
            return
        for line in report.notes[len(announced) :]:
            note(line)
        print_done(report_rows(report))


def _print_plan(job: Job, source: Source, json: bool) -> None:
    from dsprep.core.units import show_nbytes
    from dsprep.storage.atomic import scratch_directory

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
                "scratch_nbytes": job.scratch_nbytes,
                "scratch_directory": scratch_directory(job.target),
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
    if job.scratch_nbytes:
        text += f", and {show_nbytes(job.scratch_nbytes)} for working files meanwhile"
    return text


def _files(job: Job) -> str:
    first, last = job.shards[0], job.shards[-1]
    if not job.sharded:
        return first.name
    return (
        f"{len(job.shards)}: {first.name} ({len(first):,} samples) ... {last.name} ({len(last):,})"
    )
