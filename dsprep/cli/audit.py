"""``dsprep audit``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dsprep.cli import options as opt
from dsprep.cli.report import count_bar, fail, print_json, print_rows, say

if TYPE_CHECKING:
    from dsprep.verbs.audit import AuditReport
    from dsprep.verbs.counting import EpochAudit

RESUMING = "An epoch that is interrupted"
PARTS = "Mini-epochs"

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
    mini_epochs: int | None = opt.value(
        "NM", "Parts of each epoch; each pass of them is computed.", panel=PARTS, min=1
    ),
    repeats: str = opt.value(
        "RF",
        "Passes of each part: a number, or those of each in turn (2,4,6), of which the last one "
        "holds for all further parts.",
        panel=PARTS,
        default="1",
    ),
    fixed_parts: bool = opt.switch(
        "The same parts in every epoch: the Reader's recompose=False.", "--fixed-parts", panel=PARTS
    ),
    pools: int = opt.value(
        "N", "Caches among which a part is divided, as the Reader's.", panel=PARTS, default=1, min=1
    ),
    resume_at: int | None = opt.value(
        "STEP", "Interrupt each epoch, or pass, after so many steps.", panel=RESUMING, min=0
    ),
    resume_ranks: int | None = opt.value(
        "N", "Continue it with so many ranks.", panel=RESUMING, min=1
    ),
    subset: opt.Subset = None,
    weights: opt.Weights = None,
    sidecar: opt.At = None,
    json: opt.Json = False,
) -> None:
    """Prove that every sample comes once: compute what each rank delivers in each epoch.

    Nothing but the sidecar is read.
    """
    from dsprep.verbs.audit import audit as compute

    if (resume_at is None) != (resume_ranks is None):
        fail("--resume-at and --resume-ranks go together", 2)
    if mini_epochs is None and (repeats != "1" or fixed_parts or pools > 1):
        fail("--repeats, --fixed-parts and --pools are those of --mini-epochs", 2)
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
            mini_epochs=mini_epochs,
            repeats=_numbers(repeats),
            recompose=not fixed_parts,
            pools=pools,
            subset=subset,
            weights=weights,
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


def _numbers(text: str) -> int | tuple[int, ...]:
    words = text.split(",")
    if not all(word.strip().isdecimal() and len(word) < 10 for word in words):
        fail(f"--repeats is {text!r}; expected numbers such as 4, or 2,4,6", 2)
    numbers = tuple(map(int, words))
    return numbers if len(numbers) > 1 else numbers[0]


def print_report(report: AuditReport) -> None:
    """Print what was found for a person."""
    from dsprep.core.units import show_nbytes

    word = "group" if report.grouped else "range"
    ranges = f"{report.groups:,} {word}{'s' * (report.groups != 1)}"
    order = f"shuffle {report.shuffle}, seed {report.seed}, remainder {report.remainder}"
    if report.mixed > 1:
        order += f", {report.mixed} {word}s mixed"
    if report.mini_epochs is not None and not report.recompose:
        order += ", the same mini-epochs in every epoch"
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
            *_requests(report),
        ]
    )
    for number, passes in _by_epoch(report).items():
        say(f"epoch {number}")
        print_rows(_rows(report, number, passes, word))
    broken = [e for e in report.epochs if e.problems]
    for epoch in broken:
        for problem in epoch.problems:
            say(f"broken: {_name(epoch)}: {problem}")
    say(_verdict(report) if not broken else "The promise is broken.")


def _requests(report: AuditReport) -> list[tuple[str, str]]:
    """Return what all epochs together ask of an object store, if the data are in one."""
    from dsprep.core.units import show_nbytes

    if report.requests is None:
        return []
    text = f"about {report.requests:,} GET requests, {show_nbytes(report.read_nbytes)}"
    passes = len(report.epochs)
    return [("asks", f"{text} in {passes:,} passes" if passes > 1 else text)]


def _by_epoch(report: AuditReport) -> dict[int, list[EpochAudit]]:
    """Return the passes of each epoch; without mini-epochs that is one."""
    epochs: dict[int, list[EpochAudit]] = {}
    for each in report.epochs:
        number = each.epoch if each.mini_epoch is None else each.mini_epoch.epoch
        epochs.setdefault(number, []).append(each)
    return epochs


def _name(epoch: EpochAudit) -> str:
    mini_epoch = epoch.mini_epoch
    if mini_epoch is None:
        return f"epoch {epoch.epoch}"
    return f"epoch {mini_epoch.epoch}, mini-epoch {mini_epoch.part}, pass {mini_epoch.turn}"


def _rows(
    report: AuditReport, number: int, passes: list[EpochAudit], word: str
) -> list[tuple[str, str]]:
    rows = []
    nm = report.mini_epochs
    if nm is not None:
        sizes = _range([e.never + e.once + e.more for e in passes])
        repeats = _range(report.repeats[number * nm : (number + 1) * nm])
        pools = f" in {report.pools:,} pools" * (report.pools > 1)
        text = (
            f"{nm:,} of {sizes} samples{pools}, each passed {repeats} time{'s' * (repeats != '1')}"
        )
        rows.append(("  mini-epochs", f"{text}: {len(passes):,} in all"))
    names = (("once", "once"), ("never", "never"), ("more often", "more"))
    times = ", ".join(f"{text} {_range([getattr(e, n) for e in passes])}" for text, n in names)
    rows.append(("  delivered", f"{'in each pass ' * (nm is not None)}{times}"))
    for distinct, often in (e.drawn for e in passes if e.drawn is not None):
        text = f"{distinct:,} of {report.samples:,} samples, one of them {often:,} times"
        rows.append(("  by weights", text))
    for runs in zip(*(e.runs for e in passes), strict=True):
        full = _range([r.full for r in runs])
        batches = f"{full} full batch{'es' * (full != '1')} of {report.batch_size}"
        if any(r.short or r.empty for r in runs):
            short, empty = (_range([getattr(r, n) for r in runs]) for n in ("short", "empty"))
            batches += f", {short} shorter, {empty} empty"
        samples = _range([n for r in runs for n in (r.least, r.most)])
        steps = _range([r.steps for r in runs])
        each = f"{steps} step{'s' * (steps != '1')} and {samples} samples each; {batches}"
        ranks = runs[0].ranks
        rows.append((f"  {ranks:,} rank{'s' * (ranks != 1)}", each))
    units = f"{_range([e.units for e in passes])}, the largest of "
    units += f"{max(e.largest_unit for e in passes):,} samples"
    shared = [e.shared_groups for e in passes if e.shared_groups is not None]
    if shared:
        units += f"; {_range(shared)} {word}s shared by several ranks, each of which reads its part"
    return [*rows, ("  units", units)]


def _range(numbers: Sequence[int]) -> str:
    """Return numbers by the least and the largest of them."""
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _verdict(report: AuditReport) -> str:
    epochs = len(_by_epoch(report))
    every = f"in {'each of ' * (epochs > 1)}{epochs} epoch{'s' * (epochs > 1)}"
    never = _range([e.never for e in report.epochs])
    repeats = _range([e.repeats for e in report.epochs])
    if report.mini_epochs is not None:
        text = (
            f"Every sample is in one mini-epoch {every}, and comes exactly once in each pass of it"
        )
        if report.remainder == "drop" and never != "0":
            text += f", but for {never} that a pass leaves out"
    elif report.remainder == "drop" and never != "0":
        left = report.samples - report.epochs[0].never
        text = f"{left:,} samples come exactly once {every}, {never} not at all"
    else:
        drawn = any(e.drawn for e in report.epochs)
        text = f"Every {'draw' if drawn else 'sample'} comes exactly once {every}"
    if report.remainder == "pad" and repeats != "0":
        text += f", and {repeats} repeats fill up the last batches"
    return f"{text}; all ranks take the same number of steps."


def report_json(report: AuditReport) -> dict[str, Any]:
    """Return what was found for other programs."""
    from dataclasses import asdict

    content = {**vars(report), "kept": report.kept}
    content["largest_unit_nbytes"] = report.largest_unit_nbytes
    if report.requests is not None:
        content["requests"], content["read_nbytes"] = report.requests, report.read_nbytes
    content["epochs"] = [asdict(e) for e in report.epochs]
    if report.resume:
        content["resume"] = {"step": report.resume[0], "ranks": report.resume[1]}
    return content
