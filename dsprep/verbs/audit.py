"""Proof that every sample comes as often as promised: computes what every rank delivers.

Nothing is read but the sidecar. What is counted comes from the functions from which `Reader`
takes its order, unit by unit: which samples a unit delivers, and that each of its slots in the
order is taken once. Of mini-epochs that is done for each pass, and these are compared: every
sample is in one part of each epoch, in all passes of it. Memory is a byte per sample and a few per
group.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from dsprep.core.arguments import OrderArguments
from dsprep.errors import UsageError, require
from dsprep.reader.checks import check_steps
from dsprep.reader.data import Paths, open_data
from dsprep.reader.mini_epochs import MiniEpochs
from dsprep.reader.options import OrderOptions, assign, at_least, chosen_fields
from dsprep.reader.order import Assignment
from dsprep.reader.units import epoch_requests, group_edges, sample_nbytes
from dsprep.verbs.counting import Counter, EpochAudit, Parts


@dataclass(frozen=True)
class AuditReport:
    """The samples that every rank delivers.

    Attributes
    ----------
    path
        The dataset.
    options
        As asked.
    samples, groups
        That it has; of a dataset without groups the ranges that are read at a time.
    grouped
        Whether it has groups.
    mixed
        Groups that are read and shuffled together.
    sample_nbytes
        Bytes of a sample; of ragged samples about how many.
    resume
        ``(step, ranks)``: after how many steps the epoch continues on how many ranks; or None.
    repeats
        Passes of each part, of one epoch after another; empty where epochs are not cut.
    epochs
        One after another; with mini-epochs their passes.
    """

    path: Path
    options: OrderOptions
    samples: int
    groups: int
    grouped: bool
    mixed: int
    sample_nbytes: float
    resume: tuple[int, int] | None
    repeats: tuple[int, ...]
    epochs: tuple[EpochAudit, ...]

    @property
    def kept(self) -> bool:
        """True if the promise of the remainder policy was kept in every epoch, or pass."""
        return not any(e.problems for e in self.epochs)

    @property
    def largest_unit_nbytes(self) -> int:
        """Bytes of the largest unit; of ragged samples about how many."""
        return round(max((e.largest_unit for e in self.epochs), default=0) * self.sample_nbytes)

    @property
    def requests(self) -> int | None:
        """Requests to an object store that all epochs take, about; None of local files."""
        units = sum(e.units for e in self.epochs)
        return epoch_requests(self.path, units, self.read_nbytes / max(1, units))

    @property
    def read_nbytes(self) -> int:
        """Bytes that all ranks read in all epochs, about."""
        return round(sum(e.once + e.more for e in self.epochs) * self.sample_nbytes)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        asked, mini = ("batch_size", "shuffle", "remainder", "seed"), self.options.mini
        derived = ("kept", "largest_unit_nbytes", "requests", "read_nbytes")
        content = {**vars(self), "epochs": [asdict(e) for e in self.epochs]}
        content |= {name: getattr(self.options, name) for name in asked}
        content["mini_epochs"] = None if mini is None else mini.parts
        content |= {n: getattr(mini or MiniEpochs(1), n) for n in ("recompose", "pools")}
        if self.resume:
            content["resume"] = {"step": self.resume[0], "ranks": self.resume[1]}
        content |= {name: getattr(self, name) for name in derived}
        del content["options"]
        return content


def audit(
    path: Paths,
    ranks: int,
    batch_size: int,
    *,
    epochs: int = 1,
    resume_at: int | None = None,
    resume_ranks: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    **order: Unpack[OrderArguments],
) -> AuditReport:
    """Compute what every rank delivers in each epoch, and compare it with the promise.

    Parameters
    ----------
    path
        The dataset, or its sidecar; as for `Reader`.
    ranks
        Processes that read.
    batch_size, epochs
        As for `Reader`.
    resume_at, resume_ranks
        Each epoch, or each pass, is interrupted after so many steps, and continues on so many
        ranks.
    progress
        Called with samples counted so far, and in all.
    **order
        What decides which samples come, and in which order: see
        `dsprep.core.arguments.OrderArguments`. Of repeats that adapt those that were decided, see
        `dsprep.repeats.Replay`.

    Returns
    -------
    AuditReport
        ``report.kept`` is True if the promise of `remainder` was kept in every epoch.

    Raises
    ------
    UsageError
        If arguments are not possible.
    MissingError, StaleError, FormatError
        If the dataset has no sidecar, or not its own, or a damaged one.
    """
    at_least("ranks", ranks, 1)
    at_least("epochs", epochs, 1)
    _check_resume(resume_at, resume_ranks)
    if hasattr(order.get("repeats"), "enough"):
        raise UsageError(
            "repeats that adapt are decided by training",
            fix="give those that were: repeats=dsprep.repeats.Replay(FILE)",
        )
    options = OrderOptions.of(path, batch_size, order)
    with open_data(options.path, options.data) as opened:
        assigned = assign(options, opened, ranks)
        grouped = options.shuffle != "global" and group_edges(opened) is not None
        nbytes, dataset = sample_nbytes(opened, chosen_fields(options, opened)), opened.dataset
    check_steps(assigned)
    return AuditReport(
        dataset,
        options,
        int(assigned.edges[-1]),
        assigned.groups,
        grouped,
        assigned.mixed,
        nbytes,
        None if resume_at is None or resume_ranks is None else (resume_at, resume_ranks),
        () if assigned.mini is None else _repeats(assigned.mini, epochs),
        tuple(_counted(assigned, epochs, resume_at, resume_ranks, progress)),
    )


def _counted(
    order: Assignment,
    epochs: int,
    resume_at: int | None,
    resume_ranks: int | None,
    progress: Callable[[int, int], None] | None,
) -> Iterator[EpochAudit]:
    """Yield the counts of each epoch, or of each pass of its mini-epochs."""
    mini, n, done = order.mini, int(order.edges[-1]), 0
    count = epochs if mini is None else mini.first(epochs)
    total = n * count // (1 if mini is None else mini.parts)
    parts = None if mini is None else Parts(order, mini)
    for number in range(count):
        sequence, mini_pass, problems = order.sequence(number), None, list[str]()
        if mini is not None and parts is not None and sequence.groups is not None:
            mini_pass, after = mini.at(number), mini.at(number + 1)
            problems = parts.problems(mini_pass, sequence.groups, after.turn == 0)
        counter = Counter(sequence, order.remainder, order.batch_size, mini_pass, problems)
        if progress is not None:
            counter.report = partial(_report, progress, done, total)
        counted = counter.run(order.world_size, resume_at, resume_ranks)
        done += len(sequence)
        if progress is not None and done:
            _report(progress, 0, total, done)
        del counter, sequence  # before the next ones are made
        yield counted


def _repeats(mini: MiniEpochs, epochs: int) -> tuple[int, ...]:
    """Return the passes of each part of some epochs."""
    turns = [mini.at(number).turn for number in range(mini.first(epochs) + 1)]
    return tuple(a + 1 for a, b in itertools.pairwise(turns) if b == 0)


def _check_resume(resume_at: int | None, resume_ranks: int | None) -> None:
    """Raise `UsageError` unless both or neither are given, and possible."""
    require(
        (resume_at is None) == (resume_ranks is None),
        UsageError,
        "resuming takes both the step and the number of ranks",
        fix="give resume_at (--resume-at) and resume_ranks (--resume-ranks), or neither",
    )
    if resume_at is not None:
        at_least("resume_at", resume_at, 0)
        at_least("resume_ranks", resume_ranks, 1)


def _report(progress: Callable[[int, int], None], before: int, total: int, done: int) -> None:
    progress(min(total, before + done), total)
