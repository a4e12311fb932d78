"""Whether every sample comes as often as promised, by computing what every rank delivers.

Nothing is read but the sidecar. What is counted comes from the functions from which `Reader`
takes its order, unit by unit: which samples a unit delivers, and that each of its slots in the
order is taken once. Of mini-epochs that is done for each pass, and these are compared: every
sample is in one part of each epoch, in all passes of it, and in the same pool. Memory is a byte
per sample and a few per group.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dsprep.errors import UsageError
from dsprep.reader.data import Paths, open_data
from dsprep.reader.mini_epochs import MiniEpochs
from dsprep.reader.options import OrderOptions, Repeats, assign, at_least, chosen_fields
from dsprep.reader.order import Assignment, Remainder, Shuffle
from dsprep.reader.units import epoch_requests, group_edges, sample_nbytes
from dsprep.verbs.counting import Counter, EpochAudit, Parts


@dataclass(frozen=True)
class AuditReport:
    """What every rank delivers.

    Attributes
    ----------
    path
        The dataset.
    samples, groups
        That it has; of a dataset without groups the ranges that are read at a time.
    grouped
        Whether it has groups.
    mixed
        Groups that are read and shuffled together.
    sample_nbytes
        Bytes of a sample; of ragged samples about how many.
    shuffle, remainder, seed, batch_size
        As asked.
    resume
        ``(step, ranks)``: after how many steps the epoch continues on how many ranks; or None.
    mini_epochs
        Parts of an epoch, which are passed several times each; None: epochs are not cut.
    repeats
        Passes of each part, of one epoch after another.
    recompose
        Whether every epoch draws new parts.
    pools
        Caches among which a part is divided.
    epochs
        One after another; with mini-epochs their passes.
    """

    path: Path
    samples: int
    groups: int
    grouped: bool
    mixed: int
    sample_nbytes: float
    shuffle: Shuffle
    remainder: Remainder
    seed: int
    batch_size: int
    resume: tuple[int, int] | None
    mini_epochs: int | None
    repeats: tuple[int, ...]
    recompose: bool
    pools: int
    epochs: tuple[EpochAudit, ...]

    @property
    def kept(self) -> bool:
        """Whether the promise of the remainder policy was kept in every epoch, or pass."""
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


def audit(
    path: Paths,
    ranks: int,
    batch_size: int,
    *,
    epochs: int = 1,
    buffer_size: int | str | None = None,
    shuffle: Shuffle = "group",
    remainder: Remainder = "ragged",
    seed: int = 0,
    buffers_mixed: int | None = None,
    mini_epochs: int | None = None,
    repeats: Repeats = 1,
    recompose: bool = True,
    pools: int = 1,
    subset: Any = None,
    weights: Any = None,
    fields: tuple[str, ...] = (),
    resume_at: int | None = None,
    resume_ranks: int | None = None,
    sidecar: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> AuditReport:
    """Compute what every rank delivers in each epoch, and compare it with the promise.

    Parameters
    ----------
    path
        The dataset, or its sidecar; as for `Reader`.
    ranks
        Processes that read.
    batch_size, epochs, buffer_size, shuffle, seed, buffers_mixed, fields
        As for `Reader`.
    subset, weights
        As for `Reader`.
    mini_epochs, repeats, recompose, pools
        As for `Reader`; of repeats that adapt those that were decided, see `dsprep.repeats.Replay`.
    remainder
        ``"drop"``, ``"pad"`` or ``"ragged"``: ``drop_last=True``, ``pad=True`` and neither.
    resume_at, resume_ranks
        Each epoch, or each pass, is interrupted after so many steps, and continues on so many
        ranks.
    sidecar
        Its sidecar, if that is not beside the dataset.
    progress
        Called with samples counted so far, and in all.

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
    options = OrderOptions.of(
        path,
        batch_size,
        remainder=remainder,
        sidecar=sidecar,
        buffer_size=buffer_size,
        seed=seed,
        shuffle=shuffle,
        fields=fields,
        buffers_mixed=buffers_mixed,
        mini_epochs=mini_epochs,
        repeats=_known(repeats),
        recompose=recompose,
        pools=pools,
        subset=subset,
        weights=weights,
    )
    with open_data(options.path, options.data) as opened:
        order = assign(options, opened, ranks)
        grouped = shuffle != "global" and group_edges(opened) is not None
        nbytes, dataset = sample_nbytes(opened, chosen_fields(options, opened)), opened.dataset
    edges, mini = order.edges, order.mini
    _check_drop(order)
    return AuditReport(
        dataset,
        int(edges[-1]),
        order.groups,
        grouped,
        order.mixed,
        nbytes,
        shuffle,
        remainder,
        seed,
        batch_size,
        None if resume_at is None or resume_ranks is None else (resume_at, resume_ranks),
        mini_epochs,
        () if mini is None else _repeats(mini, epochs),
        recompose,
        pools,
        tuple(_counted(order, epochs, resume_at, resume_ranks, progress)),
    )


def _counted(
    order: Assignment,
    epochs: int,
    resume_at: int | None,
    resume_ranks: int | None,
    progress: Callable[[int, int], None] | None,
) -> Iterator[EpochAudit]:
    """Yield what comes in each epoch, or in each pass of its mini-epochs."""
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


def _known(repeats: Repeats) -> Repeats:
    if hasattr(repeats, "enough"):
        raise UsageError(
            "repeats that adapt are decided by training",
            fix="give those that were: repeats=dsprep.repeats.Replay(FILE)",
        )
    return repeats


def _check_drop(order: Assignment) -> None:
    n, parts = int(order.edges[-1]), 1 if order.mini is None else order.mini.parts
    if order.remainder == "drop" and n and n // parts // order.world_size < order.batch_size:
        cut = f" in {parts} mini-epochs" if parts > 1 else ""
        raise UsageError(
            f"drop leaves nothing: {n} samples{cut} are fewer than a batch of {order.batch_size} "
            f"for each of {order.world_size} ranks",
            fix="take smaller batches or fewer ranks, or pad",
        )


def _check_resume(resume_at: int | None, resume_ranks: int | None) -> None:
    """Raise `UsageError` unless both or neither are given, and possible."""
    if (resume_at is None) != (resume_ranks is None):
        raise UsageError(
            "resuming takes both the step and the number of ranks",
            fix="give resume_at and resume_ranks, or neither",
        )
    if resume_at is not None:
        at_least("resume_at", resume_at, 0)
        at_least("resume_ranks", resume_ranks, 1)


def _report(progress: Callable[[int, int], None], before: int, total: int, done: int) -> None:
    progress(min(total, before + done), total)
