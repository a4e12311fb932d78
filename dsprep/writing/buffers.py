"""How many samples a group has: what one I/O buffer holds. Decisions only, nothing is read.

``--buffer-size`` is a number of samples (``128``), of bytes (``256MiB``) or ``auto``. Larger groups
mean fewer and longer reads, but more memory, fewer groups to deal to ranks, and less randomness
where samples are shuffled inside their groups only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from dsprep.core.schema import Ints, Schema
from dsprep.core.units import parse_nbytes, show_binary_nbytes, show_nbytes
from dsprep.errors import UsageError
from dsprep.writing.plan import ends_by_bytes
from dsprep.writing.stripes import Stripe

AIM = 256 << 20
"""Bytes of a group that ``auto`` aims at: far beyond what one request costs on any storage."""

STRIPES = 64
"""Stripes of a group from which on padding to whole stripes is below 2 %."""

MEMORY_SHARE = 16
"""A group is at most one part in so many of the memory: a node holds two per process."""

GROUPS_PER_RANK = 4
"""Groups per rank that ``auto`` leaves, so that ranks get nearly equal shares in random order."""

LEAST_SHARE = 4
"""`within` makes groups at most so many times smaller."""

INDEX_NBYTES = 16
"""Bytes that tell where the rows of a sample begin, and how many they are."""


@dataclass(frozen=True)
class InSamples:
    """Groups of so many samples."""

    count: int


@dataclass(frozen=True)
class InBytes:
    """Groups of at most so many bytes."""

    nbytes: int


@dataclass(frozen=True)
class Auto:
    """Groups as large as is good."""


BufferSize: TypeAlias = InSamples | InBytes | Auto


@dataclass(frozen=True)
class BufferChoice:
    """The size of groups.

    Attributes
    ----------
    samples
        Samples per group; of ragged samples the mean.
    group_nbytes
        Payload bytes of such a group; of ragged samples the mean.
    limit_nbytes
        Bytes that no group passes that has more than one sample; for `edges_by_bytes`. None: the
        groups have `samples` samples each, whatever their bytes.
    reasoning
        Why, one sentence each.
    reason
        What decided, in a few words.
    """

    samples: int
    group_nbytes: int
    limit_nbytes: int | None
    reasoning: tuple[str, ...]
    reason: str


def parse_buffer(text: str) -> BufferSize:
    """Return what ``--buffer-size`` asks for.

    >>> parse_buffer("128"), parse_buffer("1KiB"), parse_buffer("auto")
    (InSamples(count=128), InBytes(nbytes=1024), Auto())

    Raises
    ------
    UsageError
        If it is none of a number of samples, a size and ``auto``.
    """
    word = text.strip().lower()
    if word == "auto":
        return Auto()
    if word.isdecimal() and word.isascii():
        if int(word) < 1 or int(word) >= 1 << 62:
            raise UsageError(f"groups of {text} samples are not possible", expected="at least 1")
        return InSamples(int(word))
    try:
        if word[-1:].isalpha():
            return InBytes(parse_nbytes(word))
        raise UsageError("a number of samples is whole")
    except UsageError as error:
        raise UsageError(
            f"--buffer-size {text!r} is not understood",
            expected="samples such as 128, bytes such as 256MiB, or auto",
        ) from error


def decide(
    samples: int,
    sample_nbytes: int | Ints,
    requested: BufferSize,
    stripe: Stripe,
    memory: int,
    ranks: int = 1,
) -> BufferChoice:
    """Return how large groups are to be.

    Asked for in bytes or automatic, they are as nearly equal as may be: as few as the bytes allow,
    and then no larger than so many need to be. A number of samples is taken as it is.

    Parameters
    ----------
    samples
        In the dataset.
    sample_nbytes
        Payload bytes of every sample; or, where they differ, int64, shape ``(n,)``, of some or all
        of them.
    requested
        What the user wants.
    stripe
        Of the storage.
    memory
        Bytes of memory of a node.
    ranks
        Processes that will read.
    """
    ragged = isinstance(sample_nbytes, np.ndarray)
    mean = _mean(sample_nbytes)
    if isinstance(requested, InSamples):
        count = max(1, min(requested.count, samples))
        nbytes = round(mean * count)
        size = f"{_count(count, 'sample')} as asked"
        if count < requested.count:
            size = f"{_count(requested.count, 'sample')} asked, the dataset has {count:,}"
        first_reason = (f"{size}: {show_nbytes(nbytes)}" + " on average" * ragged,)
        return BufferChoice(count, nbytes, None, first_reason, "as asked")
    if isinstance(requested, InBytes):
        limit = requested.nbytes
        reasons = [f"at most {show_binary_nbytes(limit)} as asked"]
        reason = reasons[0]
    else:
        limit, reasons, reason = _automatic(samples, mean, stripe, memory, ranks)
    count = max(1, min(samples, int(limit // max(mean, 1))))
    groups = max(1, -(-samples // count))
    count = max(1, -(-samples // groups))  # a short last group would be padded like a whole one
    if mean > limit:
        reasons.append(f"one sample has {show_nbytes(mean)}, more than that")
        reason = "a sample is larger than a group was to be"
    nbytes = round(mean * count)
    reasons.append(
        f"{'about ' * ragged}{_count(count, 'sample')}: "
        f"{show_nbytes(nbytes)}, {nbytes / stripe.nbytes:.1f} stripes of "
        f"{show_binary_nbytes(stripe.nbytes)}"
    )
    return BufferChoice(count, nbytes, int(limit) if ragged else None, tuple(reasons), reason)


def within(
    choice: BufferChoice, limit: int, schema: Schema, rows: Mapping[str, Ints]
) -> BufferChoice:
    """Return groups of equally many samples of which the largest keeps within a limit.

    For formats that have room in every group for as many rows as the largest needs. Groups are
    made smaller down to `LEAST_SHARE`: very different samples would make most of the room padding.

    Parameters
    ----------
    choice
        How large groups of ragged samples are to be on average.
    limit
        Bytes.
    schema
        The fields.
    rows
        By ragged field: int64, shape ``(samples,)``, the rows of each sample.
    """
    each = schema.fixed_nbytes + INDEX_NBYTES * len(rows)
    smallest = max(1, -(-choice.samples // LEAST_SHARE))
    samples, count = choice.samples, max(map(len, rows.values()))
    while True:
        nbytes = samples * each
        for name, numbers in rows.items():
            starts = np.arange(0, len(numbers), samples)
            largest = np.add.reduceat(numbers, starts).max() if len(numbers) else 0
            nbytes += int(largest) * schema[name].row_nbytes
        if nbytes <= limit or samples <= smallest:
            break
        groups = -(-count // max(smallest, min(samples - 1, samples * limit // nbytes)))
        samples = -(-count // groups)  # a short last group would be padded like a whole one
    subject = f"{_count(samples, 'sample')} each, so that the largest group fits"
    reason = choice.reason if samples == choice.samples else f"{choice.reason} for the largest"
    if nbytes > limit:
        samples, subject = choice.samples, "some groups are larger: samples are too different"
        reason = choice.reason
    mean = choice.group_nbytes / max(1, choice.samples)
    more = (subject,) if nbytes > limit or samples < choice.samples else ()
    return replace(
        choice,
        samples=samples,
        group_nbytes=round(mean * samples),
        reasoning=(*choice.reasoning, *more),
        reason=reason,
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _mean(sample_nbytes: int | Ints) -> float:
    if isinstance(sample_nbytes, np.ndarray):
        return float(sample_nbytes.mean()) if len(sample_nbytes) else 0.0
    return float(sample_nbytes)


def _automatic(
    samples: int, mean: float, stripe: Stripe, memory: int, ranks: int
) -> tuple[int, list[str], str]:
    """Return the bytes of a group, why, and the one reason that decided."""
    enough = STRIPES * stripe.nbytes
    limit = max(AIM, enough)
    if limit > AIM:
        reasons = [f"{STRIPES} stripes are {show_binary_nbytes(limit)}: padding stays below 2 %"]
        reason = f"{STRIPES} stripes keep padding below 2 %"
    else:
        reasons = [f"{show_binary_nbytes(AIM)} is far more than one request costs"]
        reason = reasons[0]
    largest = max(1, memory // MEMORY_SHARE)
    if limit > largest:
        limit = largest
        reasons.append(f"1/{MEMORY_SHARE} of the memory is {show_nbytes(limit)}")
        reason = f"1/{MEMORY_SHARE} of the memory"
    target = GROUPS_PER_RANK * ranks
    share = int(mean * (samples // target))
    if samples >= target and 0 < share < limit:
        limit = share
        reasons.append(
            f"{_count(target, 'group')}, {GROUPS_PER_RANK} per rank, have {show_nbytes(share)}"
        )
        reason = f"{GROUPS_PER_RANK} groups per rank"
    elif samples < target and mean:
        limit = max(1, int(mean))
        reasons.append(f"there are fewer samples than {GROUPS_PER_RANK} per rank")
        reason = reasons[-1]
    if limit < enough and stripe.matters:
        reasons.append(f"that is less than {STRIPES} stripes: padding may exceed 2 %")
    return limit, reasons, reason


def edges_by_bytes(sizes: Iterable[Ints], limit: int) -> Ints:
    """Return where groups of at most `limit` bytes begin, and the number of samples.

    A group is as many consecutive samples as fit; a sample larger than the limit is a group of
    its own.

    Parameters
    ----------
    sizes
        Payload bytes of all samples: slices of int64, one after another.
    limit
        Bytes.

    Returns
    -------
    int64, shape ``(groups + 1,)``, rising strictly from 0; ``[0]`` if there are no samples.
    """
    if limit < 1:
        raise UsageError(f"groups of {limit} bytes are not possible", expected="at least 1")
    return np.fromiter(itertools.chain([0], ends_by_bytes(sizes, limit)), np.int64)


def warnings(
    samples: int,
    groups: int,
    group_nbytes: int,
    *,
    memory: int,
    ranks: int | None = None,
    ranks_per_node: int | None = None,
    epochs: int | None = None,
) -> list[str]:
    """Return what may go wrong with these groups, one sentence each.

    Parameters
    ----------
    samples, groups
        In the dataset: N and G.
    group_nbytes
        Of the largest group.
    memory
        Bytes of memory of a node.
    ranks, ranks_per_node
        Processes that will read, in all and on one node, if known.
    epochs
        Passes over the data, S; see `slow_convergence`.
    """
    lines = []
    if ranks is not None and groups < ranks:
        lines.append(
            f"{_count(groups, 'group')} for {_count(ranks, 'rank')}: fewer groups than ranks, "
            "some would have no data"
        )
    if epochs is not None:
        lines += slow_convergence(samples, groups, epochs)
    processes = ranks_per_node or 1
    needed = 2 * group_nbytes * processes
    if needed > memory:
        lines.append(
            f"two buffers for each of {processes} processes take {show_nbytes(needed)}, "
            f"more than the {show_nbytes(memory)} of memory"
        )
    return lines


def slow_convergence(samples: int, groups: int, epochs: int) -> list[str]:
    """Return the warning that shuffling inside groups may not be enough, if it may not.

    Shuffling inside G disjoint groups is known to converge as shuffling everything does where
    ``S < N / G``: the warning is given unless ``S * G < N``, or groups have one sample each, whose
    order is that of a global shuffle.
    """
    if not samples > groups > 0 or epochs * groups < samples:
        return []
    words = (
        f"{_count(epochs, 'epoch')}, not fewer than the {samples / groups:,.4g} samples of a "
        "group (S >= N/G): shuffling inside groups may converge worse than a global shuffle"
    )
    return [words]
