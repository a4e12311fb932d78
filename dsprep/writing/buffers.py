"""The number of samples in a group, which one I/O buffer holds. Decisions only, nothing is read.

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
from dsprep.errors import UsageError, require
from dsprep.writing.plan import ends_by_bytes
from dsprep.writing.stripes import Stripe

AIM_NBYTES = 256 << 20
"""Bytes of a group that ``auto`` aims at: far beyond what one request costs on any storage."""

STRIPES = 64
"""Stripes of a group from which on padding to whole stripes is below 2 %."""

MEMORY_SHARE = 16
"""The memory of a node in groups, at least: a node holds two per process."""

GROUPS_PER_RANK = 4
"""Groups per rank that ``auto`` leaves, so that ranks get nearly equal shares in random order."""

MAX_SHRINK = 4
"""The largest factor by which `shrink_groups` makes groups smaller."""

INDEX_NBYTES = 16
"""Bytes of the index of a sample: its first row, and the number of its rows."""


BufferSize: TypeAlias = tuple[int | None, int | None]
"""Samples per group, or bytes per group at most; neither: automatic."""


@dataclass(frozen=True)
class GroupSize:
    """The size of groups.

    Attributes
    ----------
    samples
        Samples per group; of ragged samples the mean.
    limit_nbytes
        Bytes that no group passes that has more than one sample; for `edges_by_bytes`. None: the
        groups have `samples` samples each, whatever their bytes.
    reason
        The reason for the size, in a few words.
    """

    samples: int
    limit_nbytes: int | None
    reason: str


NO_GROUPS = GroupSize(1, None, "")


def parse_shard_size(size: str | int | None) -> BufferSize:
    """Return the samples, or the bytes of values, of each file; neither: the output is one file.

    Raises
    ------
    UsageError
        If it is neither a number of samples nor a size.
    """
    if size is None:
        return None, None
    require(size != "auto", UsageError, "--shard-size auto is not possible", fix="name a size")
    return parse_buffer(str(size), "--shard-size")


def parse_buffer(text: str, option: str = "--buffer-size") -> BufferSize:
    """Return the samples, or the bytes, that an option gives; neither: automatic.

    >>> parse_buffer("1KiB")
    (None, 1024)

    Raises
    ------
    UsageError
        If it is none of a number of samples, a size and ``auto``.
    """
    word = text.strip().lower()
    if word == "auto":
        return None, None
    if word.isdecimal() and word.isascii():
        if int(word) < 1 or int(word) >= 1 << 62:
            raise UsageError(f"{option} {text} is not possible", expected="at least 1 sample")
        return int(word), None
    try:
        if word[-1:].isalpha():
            return None, parse_nbytes(word)
        raise UsageError("a number of samples is whole")
    except UsageError as error:
        raise UsageError(
            f"{option} {text!r} is not understood",
            expected="samples such as 128, or bytes such as 256MiB",
        ) from error


def choose_groups(
    samples: int,
    sample_nbytes: int | Ints,
    requested: BufferSize,
    stripe: Stripe,
    memory: int,
    ranks: int = 1,
) -> GroupSize:
    """Return the size of groups.

    A size in bytes, or ``auto``, gives as few groups as the bytes allow, as equal as possible. A
    number of samples is taken as it is.

    Parameters
    ----------
    samples
        Samples of the dataset.
    sample_nbytes
        Payload bytes of every sample; or, where they differ, int64, shape ``(n,)``, of some or all
        of them.
    requested
        Samples or bytes per group, as requested; neither: automatic.
    stripe
        The unit of storage to which groups are aligned.
    memory
        Bytes of memory of a node.
    ranks
        Processes that will read.
    """
    ragged = isinstance(sample_nbytes, np.ndarray)
    mean = _mean(sample_nbytes)
    requested_samples, requested_nbytes = requested
    if requested_samples is not None:
        count = max(1, min(requested_samples, samples))
        return GroupSize(count, None, "as asked")
    if requested_nbytes is not None:
        limit, reason = requested_nbytes, f"at most {show_binary_nbytes(requested_nbytes)} as asked"
    else:
        limit, reason = _automatic(samples, mean, stripe, memory, ranks)
    count = max(1, min(samples, int(limit // max(mean, 1))))
    groups = max(1, -(-samples // count))
    count = max(1, -(-samples // groups))  # a short last group would be padded like a whole one
    if mean > limit:
        reason = "a sample is larger than a group was to be"
    return GroupSize(count, int(limit) if ragged else None, reason)


def shrink_groups(
    choice: GroupSize, limit: int, schema: Schema, rows: Mapping[str, Ints]
) -> GroupSize:
    """Return the size of equal groups whose largest one keeps within a limit.

    For formats that have room in every group for as many rows as the largest needs. Groups are
    made smaller down to `MAX_SHRINK`: very different samples would make most of the room padding.

    Parameters
    ----------
    choice
        The average size of groups of ragged samples.
    limit
        Bytes of a group at most.
    schema
        The fields.
    rows
        By ragged field: int64, shape ``(samples,)``, the rows of each sample.
    """
    each = schema.fixed_nbytes + INDEX_NBYTES * len(rows)
    smallest = max(1, -(-choice.samples // MAX_SHRINK))
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
    if nbytes > limit or samples == choice.samples:
        return choice
    return replace(choice, samples=samples, reason=f"{choice.reason} for the largest")


def _mean(sample_nbytes: int | Ints) -> float:
    if isinstance(sample_nbytes, np.ndarray):
        return float(sample_nbytes.mean()) if len(sample_nbytes) else 0.0
    return float(sample_nbytes)


def _automatic(
    samples: int, mean: float, stripe: Stripe, memory: int, ranks: int
) -> tuple[int, str]:
    """Return the bytes of a group, and the reason that decided."""
    limit, reason = AIM_NBYTES, f"{show_binary_nbytes(AIM_NBYTES)} is far more than a request costs"
    if STRIPES * stripe.nbytes > AIM_NBYTES:
        limit, reason = STRIPES * stripe.nbytes, f"{STRIPES} stripes keep padding below 2 %"
    largest = max(1, memory // MEMORY_SHARE)
    if limit > largest:
        limit, reason = largest, f"1/{MEMORY_SHARE} of the memory"
    target = GROUPS_PER_RANK * ranks
    share = int(mean * (samples // target))
    if samples >= target and 0 < share < limit:
        limit, reason = share, f"{GROUPS_PER_RANK} groups per rank"
    elif samples < target and mean:
        limit = max(1, int(mean))
        reason = f"there are fewer samples than {GROUPS_PER_RANK} per rank"
    return limit, reason


def edges_by_bytes(sizes: Iterable[Ints], limit: int) -> Ints:
    """Return the first samples of groups of at most `limit` bytes, and the number of samples.

    A group is as many consecutive samples as fit; a sample larger than the limit is a group of
    its own.

    Parameters
    ----------
    sizes
        Payload bytes of all samples: slices of int64, one after another.
    limit
        Bytes of a group at most.

    Returns
    -------
    int64, shape ``(groups + 1,)``, rising strictly from 0; ``[0]`` if there are no samples.
    """
    if limit < 1:
        raise UsageError(f"groups of {limit} bytes are not possible", expected="at least 1")
    return np.fromiter(itertools.chain([0], ends_by_bytes(sizes, limit)), np.int64)


def group_warnings(
    samples: int,
    groups: int,
    group_nbytes: int,
    *,
    memory: int,
    ranks: int | None = None,
    epochs: int | None = None,
) -> list[str]:
    """Return warnings about these groups, one sentence each.

    Parameters
    ----------
    samples, groups
        Samples and groups of the dataset: N and G.
    group_nbytes
        Bytes of the largest group.
    memory
        Bytes of memory of a node.
    ranks
        Processes that will read, if known.
    epochs
        Passes over the data, S; see `slow_convergence`.
    """
    lines = []
    if ranks is not None and groups < ranks:
        lines.append(f"fewer groups ({groups:,}) than ranks ({ranks:,}): some would have no data")
    if epochs is not None:
        lines += slow_convergence(samples, groups, epochs)
    needed = 2 * group_nbytes
    if needed > memory:
        lines.append(
            f"two buffers take {show_nbytes(needed)}, more than the {show_nbytes(memory)} of memory"
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
        f"epochs: {epochs:,}, not fewer than the {samples / groups:,.4g} samples of a "
        "group (S >= N/G): shuffling inside groups may converge worse than a global shuffle"
    )
    return [words]
