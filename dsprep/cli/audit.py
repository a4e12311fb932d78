"""``dsprep audit``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from dsprep.cli.command import command
from dsprep.cli.report import count_bar, fail, print_json, print_rows, say
from dsprep.core.arguments import OrderArguments

if TYPE_CHECKING:
    from dsprep.verbs.audit import AuditReport
    from dsprep.verbs.counting import EpochAudit


@command
def audit(
    data: tuple[str, ...],
    /,
    ranks: int,
    batch_size: int,
    order: OrderArguments,
    epochs: int = 1,
    repeats: str = "1",
    resume_at: int | None = None,
    resume_ranks: int | None = None,
    json: bool = False,
) -> None:
    """Prove that every sample comes once: compute what each rank delivers in each epoch.

    Nothing but the sidecar is read.

    Parameters
    ----------
    data : DATA...
        The dataset, or its sidecar.
    ranks
        Processes that read.
    batch_size
        Samples per step and rank.
    epochs
        Epochs to compute.
    repeats : RF
        Passes of each mini-epoch: a number, or those of each in turn (2,4,6), of which the last one
        holds for all further ones.
    resume_at : STEP
        Interrupt each epoch, or pass, after so many steps.
    resume_ranks
        Continue it with so many ranks.
    json
        Print the result as JSON.

    Examples
    --------
    dsprep audit train.h5 --ranks 64 --batch-size 32
    dsprep audit train.h5 --ranks 9216 --batch-size 4 --epochs 3 --remainder drop
    dsprep audit train.lmdb --ranks 8 --batch-size 64 -b 64MiB --buffers-mixed 4
    dsprep audit train.h5 -P 64 -M 32 --resume-at 100 --resume-ranks 48
    dsprep audit train.h5 -P 64 -M 32 --mini-epochs 8 --repeats 4
    dsprep audit x.h5 -P 4 -M 32 --mini-epochs 3 --repeats 2,4,6 --no-recompose
    dsprep audit train.h5 -P 64 -M 32 --subset 'label in (3, 5)' --weights w

    Notes
    -----
    Exit status: 0 the promise is kept, 1 it is broken, or bad data, 2 wrong usage.
    """
    from dsprep.verbs.audit import audit as compute

    order["repeats"] = _numbers(repeats)
    resuming = {"resume_at": resume_at, "resume_ranks": resume_ranks}
    with count_bar("audit", not json) as update:
        report = compute(
            data, ranks, batch_size, epochs=epochs, progress=update, **resuming, **order
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
