"""``dsprep audit``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsprep.cli import options as opt
from dsprep.cli.report import count_bar, fail, print_json, print_rows, say

if TYPE_CHECKING:
    from dsprep.verbs.audit import AuditReport
    from dsprep.verbs.counting import EpochAudit

RESUMING = "An epoch that is interrupted"

EPILOG = """
dsprep audit train.h5 --ranks 64 --batch-size 32

dsprep audit train.h5 --ranks 9216 --batch-size 4 --epochs 3 --remainder drop

dsprep audit train.lmdb --ranks 8 --batch-size 64 -b 64MiB --buffers-mixed 4

dsprep audit train.h5 -P 64 -M 32 --resume-at 100 --resume-ranks 48

dsprep audit train.h5 -P 64 -M 32 --mini-epochs 8 --repeats 4

dsprep audit train.h5 -P 4 -M 32 --mini-epochs 3 --repeats 2,4,6 --fixed-parts

dsprep audit train.h5 -P 64 -M 32 --subset 'label in (3, 5)' --weights w

Exit status: 0 the promise is kept, 1 it is broken, or bad data, 2 wrong usage.
"""


@opt.command(EPILOG)
def audit(
    data: Annotated[list[str], opt.argument("DATA...", "The dataset, or its sidecar.")],
    ranks: Annotated[
        int, typer.Option("--ranks", "-P", metavar="N", min=1, help="Processes that read.")
    ],
    batch_size: Annotated[
        int,
        typer.Option("--batch-size", "-M", metavar="N", min=1, help="Samples per step and rank."),
    ],
    ordering: dict[str, Any],
    epochs: int = opt.value("N", "Epochs to compute.", "--epochs", "-E", default=1, min=1),
    repeats: str = opt.value(
        "RF",
        "Passes of each part: a number, or those of each in turn (2,4,6), of which the last one "
        "holds for all further parts.",
        panel=opt.PARTS,
        default="1",
    ),
    resume_at: int | None = opt.value(
        "STEP", "Interrupt each epoch, or pass, after so many steps.", panel=RESUMING, min=0
    ),
    resume_ranks: int | None = opt.value(
        "N", "Continue it with so many ranks.", panel=RESUMING, min=1
    ),
    json: opt.Json = False,
) -> None:
    """Prove that every sample comes once: compute what each rank delivers in each epoch.

    Nothing but the sidecar is read.
    """
    from dsprep.verbs.audit import audit as compute

    if ordering["mini_epochs"] is None and repeats != "1":
        fail("--repeats are those of --mini-epochs", 2)
    with count_bar("audit", not json) as update:
        report = compute(
            data,
            ranks,
            batch_size,
            epochs=epochs,
            repeats=_numbers(repeats),
            resume_at=resume_at,
            resume_ranks=resume_ranks,
            progress=update,
            **ordering,
        )
    if json:
        print_json(report.to_json())
    else:
        print_report(report)
    if not report.kept:
        raise typer.Exit(1)


def _numbers(text: str) -> int | tuple[int, ...]:
    words = text.split(",")
    if not all(word.strip().isdecimal() and len(word) < 10 for word in words):
        fail(f"--repeats is {text!r}; expected numbers such as 4, or 2,4,6", 2)
    numbers = tuple(map(int, words))
    return numbers if len(numbers) > 1 else numbers[0]


def print_report(report: AuditReport) -> None:
    """Print what was found for a person."""
    from dsprep.core.units import show_nbytes

    options, word = report.options, "group" if report.grouped else "range"
    order = f"shuffle {options.shuffle}, seed {options.seed}, remainder {options.remainder}"
    order += f", {report.mixed} {word}s mixed" * (report.mixed > 1)
    order += ", the same mini-epochs in every epoch" * (
        options.mini is not None and not options.mini.recompose
    )
    if report.resume:
        order += f", continued on {report.resume[1]} ranks after step {report.resume[0]}"
    largest = max(e.largest_unit for e in report.epochs)
    rows = [
        ("dataset", str(report.path)),
        ("samples", f"{report.samples:,} in {report.groups:,} {word}{'s' * (report.groups != 1)}"),
        ("order", order),
        ("largest unit", f"{largest:,} samples, {show_nbytes(report.largest_unit_nbytes)}"),
    ]
    if report.requests is not None:
        text = f"about {report.requests:,} GET requests, {show_nbytes(report.read_nbytes)}"
        rows.append(("asks", text))
    print_rows(rows)
    by_epoch: dict[int, list[EpochAudit]] = {}
    for each in report.epochs:
        number = each.epoch if each.mini_epoch is None else each.mini_epoch.epoch
        by_epoch.setdefault(number, []).append(each)
    for number, passes in by_epoch.items():
        say(f"epoch {number}")
        print_rows(_rows(report, number, passes, word))
    broken = [e for e in report.epochs if e.problems]
    for epoch in broken:
        part = epoch.mini_epoch
        where = f"epoch {epoch.epoch}"
        if part is not None:
            where = f"epoch {part.epoch}, mini-epoch {part.part}, pass {part.turn}"
        for problem in epoch.problems:
            say(f"broken: {where}: {problem}")
    say(_verdict(report) if not broken else "The promise is broken.")


def _rows(
    report: AuditReport, number: int, passes: list[EpochAudit], word: str
) -> list[tuple[str, str]]:
    rows, mini = [], report.options.mini
    nm = None if mini is None else mini.parts
    if nm is not None:
        sizes = _range([e.never + e.once + e.more for e in passes])
        repeats = _range(report.repeats[number * nm : (number + 1) * nm])
        text = f"{nm:,} of {sizes} samples, each passed {repeats} time{'s' * (repeats != '1')}"
        rows.append(("  mini-epochs", f"{text}: {len(passes):,} in all"))
    names = (("once", "once"), ("never", "never"), ("more often", "more"))
    times = ", ".join(f"{text} {_range([getattr(e, n) for e in passes])}" for text, n in names)
    rows.append(("  delivered", f"{'in each pass ' * (nm is not None)}{times}"))
    for distinct, often in (e.drawn for e in passes if e.drawn is not None):
        text = f"{distinct:,} of {report.samples:,} samples, one of them {often:,} times"
        rows.append(("  by weights", text))
    for runs in zip(*(e.runs for e in passes), strict=True):
        full, short, empty, steps = (
            _range([getattr(r, n) for r in runs]) for n in ("full", "short", "empty", "steps")
        )
        samples = _range([n for r in runs for n in (r.least, r.most)])
        batches = f"{full} full batches of {report.options.batch_size}"
        batches += f", {short} shorter, {empty} empty" * ((short, empty) != ("0", "0"))
        each = f"{steps} steps and {samples} samples each; {batches}"
        rows.append((f"  {runs[0].ranks:,} ranks", each))
    units = f"{_range([e.units for e in passes])}, the largest of "
    units += f"{max(e.largest_unit for e in passes):,} samples"
    shared = [e.shared_groups for e in passes if e.shared_groups is not None]
    if shared:
        groups = f"{_range(shared)} {word}" + "s" * (_range(shared) != "1")
        units += f"; {groups} shared by several ranks, each of which reads its part"
    return [*rows, ("  units", units)]


def _range(numbers: Sequence[int]) -> str:
    """Return numbers by the least and the largest of them."""
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _verdict(report: AuditReport) -> str:
    each = "draw" if any(e.drawn for e in report.epochs) else "sample"
    text = f"Every {each} comes exactly once in each epoch"
    if report.options.mini_epochs is not None:
        text = "Every sample is in one mini-epoch of each epoch, and comes exactly once in each "
        text += "pass of it"
    if (never := _range([e.never for e in report.epochs])) != "0":
        text += f", but for {never} that are left out"
    if (repeats := _range([e.repeats for e in report.epochs])) != "0":
        text += f", and {repeats} repeats fill up the last batches"
    return f"{text}; all ranks take the same number of steps."
