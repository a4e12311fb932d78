"""``dsprep audit``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dsprep.cli import options as opt
from dsprep.cli.report import count_bar, fail, print_json, print_rows, say

if TYPE_CHECKING:
    from dsprep.verbs.audit import AuditReport, EpochAudit

RESUMING = "An epoch that is interrupted"

EPILOG = """
dsprep audit train.h5 --ranks 64 --batch-size 32

dsprep audit train.h5 --ranks 9216 --batch-size 4 --epochs 3 --remainder drop

dsprep audit train.lmdb --ranks 8 --batch-size 64 -b 64MiB --buffers-mixed 4

dsprep audit train.h5 -P 64 -M 32 --resume-at 100 --resume-ranks 48

Exit status: 0 the promise is kept, 1 it is broken, or bad data, 2 wrong usage.
"""


def audit(
    data: Annotated[str, opt.argument("DATA", "A dataset with a sidecar, or the sidecar.")],
    ranks: Annotated[
        int, typer.Option("--ranks", "-P", metavar="N", min=1, help="Processes that read.")
    ],
    batch_size: Annotated[
        int,
        typer.Option("--batch-size", "-M", metavar="N", min=1, help="Samples per step and rank."),
    ],
    epochs: int = opt.value("N", "Epochs to compute.", "--epochs", "-E", default=1, min=1),
    buffer_size: str | None = opt.value(
        "SIZE",
        "What is read at a time: samples (4096) or bytes (64MiB); by default one group, or 64MiB "
        "where there are none.",
        "--buffer-size",
        "-b",
    ),
    shuffle: Literal["group", "global", "none"] = opt.value(
        "group|global|none", "As the Reader's.", default="group"
    ),
    remainder: Literal["drop", "pad", "ragged"] = opt.value(
        "drop|pad|ragged",
        "What happens to samples that do not fill a batch on every rank: left out (drop), filled "
        "up by repeats (pad), or delivered in shorter batches (ragged).",
        default="ragged",
    ),
    seed: int = opt.value("N", "As the Reader's.", default=0),
    buffers_mixed: int | None = opt.value(
        "K", "Groups that are shuffled together; by default those of --buffer-size.", min=1
    ),
    resume_at: int | None = opt.value(
        "STEP", "Interrupt each epoch after so many steps.", panel=RESUMING, min=0
    ),
    resume_ranks: int | None = opt.value(
        "N", "Continue it with so many ranks.", panel=RESUMING, min=1
    ),
    sidecar: opt.At = None,
    json: opt.Json = False,
) -> None:
    """Prove that every sample comes once: compute what each rank delivers in each epoch.

    Nothing but the sidecar is read.
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
            shuffle=shuffle,
            remainder=remainder,
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
    from dsprep.writing.plan import show_nbytes

    word = "group" if report.grouped else "range"
    ranges = f"{report.groups:,} {word}{'s' * (report.groups != 1)}"
    order = f"shuffle {report.shuffle}, seed {report.seed}, remainder {report.remainder}"
    if report.mixed > 1:
        order += f", {report.mixed} {word}s mixed"
    if report.resume:
        order += f", continued on {report.resume[1]} ranks after step {report.resume[0]}"
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
        batches = f"{run.full:,} full batch{'es' * (run.full != 1)} of {batch_size}"
        if run.short or run.empty:
            batches += f", {run.short:,} shorter, {run.empty:,} empty"
        samples = f"{run.least:,}" if run.least == run.most else f"{run.least:,} to {run.most:,}"
        steps = f"{run.steps:,} step{'s' * (run.steps != 1)}"
        each = f"{steps} and {samples} samples each; {batches}"
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
        text = f"{report.samples - never:,} samples come exactly once {every}, {never:,} not at all"
    if report.remainder == "pad" and repeats:
        text += f", and {repeats:,} repeats fill up the last batches"
    return f"{text}; all ranks take the same number of steps."


def report_json(report: AuditReport) -> dict[str, Any]:
    """Return what was found for other programs."""
    found = {**vars(report), "kept": report.kept}
    found["largest_unit_nbytes"] = report.largest_unit_nbytes
    found["epochs"] = [{**vars(e), "runs": [vars(r) for r in e.runs]} for e in report.epochs]
    if report.resume:
        found["resume"] = {"step": report.resume[0], "ranks": report.resume[1]}
    return found
