"""``dsprep repack``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dsprep.cli.command import command, open_source, sources_and_target
from dsprep.cli.report import (
    Verbosity,
    current_verbosity,
    note,
    print_done,
    print_json,
    print_rows,
    progress_bar,
    report_rows,
    say,
    scratch_rows,
)
from dsprep.core.arguments import RepackArguments, RunArguments
from dsprep.formats.options import OpenOptions

if TYPE_CHECKING:
    from dsprep.verbs.repack import RepackOptions, RepackPlan, RepackReport
    from dsprep.writing.job import Job
    from dsprep.writing.stripes import Stripe


@command
def repack(
    paths: tuple[str, ...],
    /,
    options: RepackArguments,
    run: RunArguments,
    reading: OpenOptions,
    dry_run: bool = False,
    json: bool = False,
) -> None:
    """Rewrite a dataset so that one read fetches a whole group of samples.

    The samples of a group are one contiguous range of bytes, all fields together, which begins at
    a multiple of the stripe size where the format allows. The result is an ordinary file of its
    format. Unless --quiet is given, two seconds are taken to measure when the rewrite pays off.

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
    dsprep repack train.h5 grouped.h5 --buffer-size 256MiB
    dsprep repack 'cosmo/*.h5' cosmo.tfrecord --buffer-size 128 --shuffle 7
    dsprep repack train.lmdb grouped.zarr.zip --stripe-size 1MiB --dry-run
    dsprep repack all.h5 set.h5 --split train=0.8,test=0.2 --group-by run

    Notes
    -----
    Exit status: 0 done, 1 bad data or target, 2 wrong usage, 130 interrupted.
    """
    from dsprep.storage.paths import as_path
    from dsprep.verbs.repack import order_warnings, parse_options, plan_repack, run_repack
    from dsprep.writing.run import check_targets

    output, run_options = parse_options(options)
    sources, target = sources_and_target("repack", paths, run_options.overwrite)
    with open_source(sources, reading, not json, marked=True) as source:
        plan = plan_repack(source, as_path(target), output, run_options)
        plan = replace(plan, warnings=(*plan.warnings, *order_warnings(plan)))
        if dry_run:
            check_targets([part.target for part in plan.parts], run_options, dry=True)
        if not json:
            _say_plan(plan, output, dry_run)
        elif dry_run:
            print_json(_plan_json(plan))
        if dry_run:
            return
        measure = current_verbosity() > Verbosity.quiet
        with _progress_of_all(plan, not json) as progress:
            report = run_repack(plan, run_options, measure=measure, progress=progress)
    if json:
        print_json(
            {
                **_plan_json(plan),
                "reports": [vars(r) for _, r in report.parts],
                "break_even": report.break_even and vars(report.break_even),
                "unmeasured": report.unmeasured or None,
            }
        )
    else:
        for line in dict.fromkeys(line for _, done in report.parts for line in done.notes):
            note(line)
        if report.unmeasured:
            note(f"when the rewrite pays off was not measured: {report.unmeasured}")
        _print_report(report)


@contextmanager
def _progress_of_all(plan: RepackPlan, show: bool) -> Iterator[Callable[[Job, int, int], None]]:
    """Show the progress of all outputs together."""
    payload, samples = (sum(getattr(p, n) for p in plan.parts) for n in ("payload", "samples"))
    done = {id(part): (0, 0) for part in plan.parts}
    with progress_bar("repack", samples, payload, show) as update:

        def progress(part: Job, samples: int, nbytes: int) -> None:
            done[id(part)] = samples, nbytes
            update(sum(s for s, _ in done.values()), sum(b for _, b in done.values()))

        yield progress


def _say_plan(plan: RepackPlan, options: RepackOptions, dry_run: bool) -> None:
    """Print the plan unless ``--quiet`` is given, and the warnings."""
    if dry_run or current_verbosity() > Verbosity.quiet:
        _print_plan(plan, options.ranks)
    more = (*_space_notes(plan), *_notes(plan)) if dry_run else ()
    for line in (*plan.warnings, *_idle_option_notes(plan, options), *more):
        note(line)
    if dry_run:
        say("Nothing was written (--dry-run).")


def _notes(plan: RepackPlan) -> list[str]:
    """Return notes on samples left out and facts not kept."""
    return [*dict.fromkeys(s for p in plan.parts for s in (*p.source.notes, *p.losses))]


def _idle_option_notes(plan: RepackPlan, options: RepackOptions) -> list[str]:
    """Return notes on options without effect."""
    given = ["--shuffle"] * (options.shuffle is not None)
    given += ["--duplicate"] * (options.duplicate > 1)
    if options.split is None or not given or "train" in [p.split for p in plan.parts]:
        return []
    return [f"no split is named train: without effect: {', '.join(given)}"]


def _space_notes(plan: RepackPlan) -> list[str]:
    """Return the note that there is too little space for all outputs, if so."""
    from dsprep.errors import TargetError
    from dsprep.writing.job import check_space

    try:
        check_space(plan.parts)
    except TargetError as error:
        return [str(error)]
    return []


def _print_plan(plan: RepackPlan, ranks: int | None) -> None:
    from dsprep.core.units import show_nbytes
    from dsprep.verbs.repack import inodes
    from dsprep.writing.stripes import suggest_stripes

    stripe, rows = plan.stripe, []
    for part in plan.parts:
        job, size, first = part, part.group_size, part.plans[0]
        share = part.padding / max(1, job.estimate)
        name = f" {part.split}" if part.split else ""
        files = f"{len(job.shards):,} file{'s' * (len(job.shards) != 1)}"
        about = "about " * (size.limit_nbytes is not None)
        aligned = all(p.aligned for p in part.plans)
        binary = "iB as asked" in size.reason
        mean_nbytes = round(job.payload / max(1, job.samples) * size.samples)
        nbytes, read = (show_nbytes(n, binary) for n in (mean_nbytes, first.group_nbytes))
        each = f"{about}{_samples(size.samples)}, {nbytes}"
        disk = f"about {show_nbytes(job.estimate)} in {files}, {share:.1%} of it padding"
        rows += [
            (f"target{name}", f"{job.format.name} {job.target}, {_samples(job.samples)}"),
            ("groups", f"{part.groups:,} of {each}: {size.reason}"),
            ("reads", f"{first.reads} per group, of at most {read}"),
            ("aligned", _alignment(stripe if aligned else None, job)),
            ("on disk", f"{disk}, {inodes(job):,} inodes"),
        ]
        if job.scratch_nbytes:
            rows.append(("working", f"{show_nbytes(job.scratch_nbytes)} of files meanwhile"))
    rows += scratch_rows(plan.parts)
    if stripe.file_system.startswith("lustre"):
        advice = suggest_stripes(
            stripe,
            [[p.nbytes for p in part.plans] for part in plan.parts],
            str(plan.parts[0].target.parent),
            group_nbytes=max(p.group_nbytes for part in plan.parts for p in part.plans),
            ranks=ranks,
        )
        rows.append(("stripes", advice))
    print_rows(rows)


def _samples(count: int) -> str:
    return f"{count:,} sample{'s' * (count != 1)}"


def _alignment(stripe: Stripe | None, job: Job) -> str:
    """Return the alignment of groups, or the reason why there is none."""
    from dsprep.core.units import show_binary_nbytes

    if stripe is None and job.options.compress is not None:
        return "not all: compressed groups differ in size, and padding them would cost too much"
    if stripe is None:
        return "no: the format does not allow it"
    where = "as asked" if stripe.source == "as asked" else f"of {stripe.file_system}"
    return f"to {show_binary_nbytes(stripe.nbytes)} {where}"


def _plan_json(plan: RepackPlan) -> dict[str, Any]:
    from dsprep.verbs.repack import inodes

    return {
        "format": plan.parts[0].format.name,
        "stripe": vars(plan.stripe),
        "warnings": list(plan.warnings),
        "notes": _notes(plan),
        "parts": [
            {
                "name": part.split,
                "target": part.target,
                "format": part.format.name,
                "samples": part.samples,
                "groups": part.groups,
                "samples_per_group": part.group_size.samples,
                "group_nbytes": max(p.group_nbytes for p in part.plans),
                "reads_per_group": part.plans[0].reads,
                "aligned": all(p.aligned for p in part.plans),
                "reason": part.group_size.reason,
                "padding_nbytes": part.padding,
                "estimated_nbytes": part.estimate,
                "scratch_nbytes": part.scratch_nbytes,
                "files": len(part.shards),
                "inodes": inodes(part),
            }
            for part in plan.parts
        ],
    }


def _print_report(report: RepackReport) -> None:
    from dsprep.bench.report.tables import show_seconds

    rows = []
    for part, done in report.parts:
        rows += report_rows(done, part.split)
    break_even = report.break_even
    if break_even is not None:
        each, together = map(show_seconds, (break_even.sample_seconds, break_even.group_seconds))
        text = f"{each} a sample before, read one by one cold; {together} in groups: "
        if break_even.epochs is None:
            text += "reading is not faster here"
        else:
            text += f"the rewrite pays off after {max(break_even.epochs, 0.1):.1f} epochs"
        rows.append(("pays off", text))
    print_done(rows)
