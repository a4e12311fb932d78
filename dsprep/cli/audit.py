"""``dsprep audit``."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsprep.cli import options as opt
from dsprep.cli.report import count_bar, fail, guarded, print_json, print_rows, say
from dsprep.cli.usage import Command

if TYPE_CHECKING:
    from dsprep.verbs.audit import AuditReport, EpochAudit

RESUMING = "An epoch that is broken off"

EPILOG = """
dsprep audit train.h5 --ranks 64 --batch-size 32

dsprep audit train.h5 --ranks 9216 --batch-size 4 --epochs 3 --remainder drop

dsprep audit train.lmdb --ranks 8 --batch-size 64 -b 64MiB --buffers-mixed 4

dsprep audit train.h5 -P 64 -M 32 --resume-at 100 --resume-ranks 48

Exit status: 0 the promise is kept, 1 it is broken, or bad data, 2 wrong usage.
"""


class Shuffles(StrEnum):
    """Choices of ``--shuffle``."""

    group = "group"
    everything = "global"
    none = "none"


class Remainders(StrEnum):
    """Choices of ``--remainder``."""

    drop = "drop"
    pad = "pad"
    ragged = "ragged"


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("audit", epilog=EPILOG, cls=Command)(guarded(audit))


def audit(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA", help="A dataset with a sidecar, or the sidecar.", show_default=False
        ),
    ],
    ranks: Annotated[
        int,
        opt.value("N", "Processes that read.", "--ranks", "-P", min=1, show_default=False),
    ],
    batch_size: Annotated[
        int,
        opt.value(
            "N", "Samples per step and rank.", "--batch-size", "-M", min=1, show_default=False
        ),
    ],
    epochs: Annotated[int, opt.value("N", "Epochs to compute.", "--epochs", "-E", min=1)] = 1,
    buffer_size: Annotated[
        str | None,
        opt.value(
            "SIZE",
            "What is read at a time: samples (4096) or bytes (64MiB). One group, or 64MiB "
            "where there are none, if not given.",
            "--buffer-size",
            "-b",
        ),
    ] = None,
    shuffle: Annotated[
        Shuffles, opt.value("group|global|none", "As the Reader's.")
    ] = Shuffles.group,
    remainder: Annotated[
        Remainders,
        opt.value(
            "drop|pad|ragged",
            "Samples that do not fill a batch on every rank: left out (drop), batches filled "
            "up by repeats (pad), or shorter batches (ragged).",
        ),
    ] = Remainders.ragged,
    seed: Annotated[int, opt.value("N", "As the Reader's.")] = 0,
    buffers_mixed: Annotated[
        int | None,
        opt.value(
            "K", "Groups that are shuffled together; those of --buffer-size if not given.", min=1
        ),
    ] = None,
    resume_at: Annotated[
        int | None,
        opt.value("STEP", "Break off after so many steps.", panel=RESUMING, min=0),
    ] = None,
    resume_ranks: Annotated[
        int | None,
        opt.value("P2", "Go on with so many ranks.", panel=RESUMING, min=1),
    ] = None,
    sidecar: opt.At = None,
    json: opt.Json = False,
) -> None:
    """Prove that every sample comes once: compute what each rank delivers in each epoch.

    Nothing is read but the sidecar.
    """
    from dsprep.verbs.audit import audit as compute

    if (resume_at is None) != (resume_ranks is None):
        fail("--resume-at and --resume-ranks go together", 2)
    with count_bar("audit", not json) as update:
        report = compute(
            data,
            ranks,
            batch_size,
            epochs=epochs,
            buffer_size=buffer_size,
            shuffle=shuffle.value,
            remainder=remainder.value,
            seed=seed,
            buffers_mixed=buffers_mixed,
            resume_at=resume_at,
            resume_ranks=resume_ranks,
            sidecar=sidecar,
            progress=update,
        )
    if json:
        print_json(report_json(report))
    else:
        print_report(report)
    if not report.kept:
        raise typer.Exit(1)


def print_report(report: AuditReport) -> None:
    """Print what was found for a person."""
    from dsprep.write.plan import show_nbytes

    word = "group" if report.grouped else "range"
    ranges = f"{report.groups:,} {word}{'s' * (report.groups != 1)}"
    order = f"shuffle {report.shuffle}, seed {report.seed}, remainder {report.remainder}"
    if report.mixed > 1:
        order += f", {report.mixed} {word}s mixed"
    if report.resume:
        order += f", {report.resume[1]} ranks from step {report.resume[0]} on"
    largest = max(e.largest_unit for e in report.epochs)
    print_rows(
        [
            ("dataset", str(report.path)),
            ("samples", f"{report.samples:,} in {ranges}"),
            ("order", order),
            (
                "largest unit",
                f"{largest:,} samples, {show_nbytes(report.largest_unit_nbytes)}",
            ),
        ]
    )
    for epoch in report.epochs:
        say(f"epoch {epoch.epoch}")
        print_rows(_rows(epoch, word, report.batch_size))
    broken = [e for e in report.epochs if e.problems]
    for epoch in broken:
        for problem in epoch.problems:
            say(f"broken: epoch {epoch.epoch}: {problem}")
    say(_verdict(report) if not broken else "The promise is broken.")


def _rows(epoch: EpochAudit, word: str, batch_size: int) -> list[tuple[str, str]]:
    rows = [
        ("  delivered", f"once {epoch.once:,}, never {epoch.never:,}, more often {epoch.more:,}")
    ]
    for run in epoch.runs:
        batches = f"{run.full:,} full batches of {batch_size}"
        if run.short or run.empty:
            batches += f", {run.short:,} shorter, {run.empty:,} empty"
        samples = f"{run.least:,}" if run.least == run.most else f"{run.least:,} to {run.most:,}"
        each = f"{run.steps:,} steps and {samples} samples each; {batches}"
        rows.append((f"  {run.ranks:,} rank{'s' * (run.ranks != 1)}", each))
    units = f"{epoch.units:,}, the largest of {epoch.largest_unit:,} samples"
    if epoch.shared_groups is not None:
        units += f"; {epoch.shared_groups:,} {word}s read by more than one rank, each its part"
    return [*rows, ("  units", units)]


def _verdict(report: AuditReport) -> str:
    every = f"in {'each of ' * (len(report.epochs) > 1)}{len(report.epochs)} epoch"
    every += "s" * (len(report.epochs) > 1)
    never = report.epochs[0].never
    repeats = report.epochs[0].repeats
    text = f"Every sample comes exactly once {every}"
    if report.remainder == "drop" and never:
        text = (
            f"{report.samples - never:,} samples come exactly once {every}, {never:,} are left out"
        )
    if report.remainder == "pad" and repeats:
        text += f", and {repeats:,} repeats fill up the last batches"
    return f"{text}; all ranks do equally many steps."


def report_json(report: AuditReport) -> dict[str, Any]:
    """Return what was found for other programs."""
    told = {**vars(report), "kept": report.kept}
    told["largest_unit_nbytes"] = report.largest_unit_nbytes
    told["epochs"] = [{**vars(e), "runs": [vars(r) for r in e.runs]} for e in report.epochs]
    if report.resume:
        told["resume"] = {"step": report.resume[0], "ranks": report.resume[1]}
    return told
