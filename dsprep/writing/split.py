"""The choice of samples for training, validation and test.

A split is exact and repeatable: it depends on the seed and the samples alone. By default samples
are dealt at random. With a field to group by, all samples with the same value of it (a patient, a
simulation, a recording) land in one split, so that nothing leaks from training into test.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dsprep.core.permutation import Permutation
from dsprep.core.schema import Arena, Array, Bytes, Field, Ints, Ragged, has_padding
from dsprep.errors import SchemaError, UsageError
from dsprep.formats.base import Source
from dsprep.writing.plan import pieces

_STEP = 1 << 20  # samples that are dealt at a time
MAX_KEY_NBYTES = 4096
"""Bytes of one value of a fixed field by which samples are grouped."""


def parse_split(text: str) -> list[tuple[str, float]]:
    """Return the splits and shares that ``--split`` asks for.

    >>> parse_split("train=0.8,val=0.1,test=0.1")
    [('train', 0.8), ('val', 0.1), ('test', 0.1)]

    Raises
    ------
    UsageError
        If names repeat or are not file names, or shares are not above 0 with the sum 1.
    """
    parts: list[tuple[str, float]] = []
    for word in text.split(","):
        name, equals, number = (w.strip() for w in word.partition("="))
        try:
            share = float(number)
        except ValueError:
            share = -1.0
        if not equals or not name or "/" in name or name.startswith(".") or not 0 < share <= 1:
            raise UsageError(
                f"--split {text!r} is not understood",
                expected="names and shares such as train=0.8,val=0.1,test=0.1",
            )
        parts.append((name, share))
    names = [n for n, _ in parts]
    if len(set(names)) < len(names):
        raise UsageError(f"--split {text!r} names a split twice")
    check_shares(parts, f"--split {text!r}")
    return parts


def check_shares(parts: Sequence[tuple[str, float]], given: str) -> None:
    """Raise `UsageError` unless all shares are above 0 and their sum is 1."""
    total = sum(s for _, s in parts)
    if abs(total - 1) > 1e-6 or not all(s > 0 for _, s in parts):
        raise UsageError(
            f"{given}: the shares must be above 0 and add up to 1",
            expected=1,
            found=f"{total:.6g}",
        )


def assign(
    count: int,
    parts: Sequence[tuple[str, float]],
    seed: int,
    labels: Ints | None = None,
    only: str | None = None,
) -> dict[str, Ints]:
    """Return the samples of each split.

    Parameters
    ----------
    count
        Samples in all.
    parts
        Names and shares, the shares with the sum 1.
    seed
        Of the random choice.
    labels
        int64, shape ``(count,)``, as of `group_labels`: samples with the same one stay together.
        Then the sizes are as near to the shares as dealing whole groups, largest first, brings
        them.
    only
        The split that is wanted; None: all.

    Returns
    -------
    Name to int64 sample numbers, rising; together every sample exactly once.

    Raises
    ------
    UsageError
        If there are fewer samples, or values of the field, than splits.
    """
    if labels is None:
        if count < len(parts):
            raise UsageError(f"{count} samples cannot be cut into {len(parts)} splits")
        sizes = _shares(count, [s for _, s in parts])
        edges = [0, *itertools.accumulate(sizes)]
        order = Permutation(seed, count)
        chosen = {}
        for i, (name, _) in enumerate(parts):
            if only in (None, name):
                mask = np.zeros(count, bool)
                for start in range(edges[i], edges[i + 1], _STEP):
                    stop = min(start + _STEP, edges[i + 1])
                    mask[order.forward(np.arange(start, stop, dtype=np.int64))] = True
                chosen[name] = np.flatnonzero(mask)
        return chosen
    members = np.bincount(labels)
    if len(members) < len(parts):
        raise UsageError(
            f"the field to group by is not different enough for {len(parts)} splits",
            expected=f"at least {len(parts)} different values",
            found=len(members),
            fix="group by another field, or ask for fewer splits",
        )
    split = _deal(members, [s for _, s in parts], seed)[labels]
    numbered = [(i, name) for i, (name, _) in enumerate(parts) if only in (None, name)]
    return {name: np.flatnonzero(split == i) for i, name in numbered}


def _shares(count: int, shares: Sequence[float]) -> list[int]:
    """Return whole numbers near ``share * count``, at least 1, by largest remainders."""
    exact = [s * count for s in shares]
    sizes = [int(x) for x in exact]
    by_rest = sorted(range(len(sizes)), key=lambda i: (sizes[i] - exact[i], i))
    for k in range(count - sum(sizes)):
        sizes[by_rest[k % len(sizes)]] += 1
    while 0 in sizes:
        sizes[int(np.argmax(sizes))] -= 1
        sizes[sizes.index(0)] += 1
    return sizes


def _deal(members: Ints, shares: Sequence[float], seed: int) -> Ints:
    """Return the split of each group: largest first, to the split that lacks most."""
    order = Permutation(seed, len(members)).forward(np.arange(len(members), dtype=np.int64))
    order = order[np.argsort(-members[order], kind="stable")]
    lacking = [s * int(members.sum()) for s in shares]
    empty = set(range(len(shares)))
    split = np.empty(len(members), np.int64)
    sizes = members[order].tolist()
    for left, group, size in zip(range(len(order), 0, -1), order.tolist(), sizes, strict=True):
        among = empty if left <= len(empty) else range(len(shares))
        best = max(among, key=lambda i: (lacking[i], -i))
        split[group] = best
        lacking[best] -= size
        empty.discard(best)
    return split


def group_labels(source: Source, field: Field) -> Ints:
    """Return a number for each sample, equal where the values of `field` have the same bits.

    The numbers count the values in an order that does not depend on where samples lie. Reads the
    dataset in slices; takes up to 48 bytes per sample.

    Raises
    ------
    SchemaError
        If a value of a fixed field has more than `MAX_KEY_NBYTES`.
    """
    if not field.ragged and field.row_nbytes > MAX_KEY_NBYTES:
        raise SchemaError(
            f"{field} is too large to group by", expected=f"at most {MAX_KEY_NBYTES} bytes"
        )
    keys = np.empty((len(source), 2), np.uint64)
    arena = Arena()
    for start, stop in pieces(source):
        keys[start:stop] = _keys(source.read(start, stop, arena)[field.name])
    order = np.lexsort(keys.T)
    changes = (keys[order[1:]] != keys[order[:-1]]).any(axis=1)
    labels = np.zeros(len(keys), np.int64)
    labels[order[1:]] = np.cumsum(changes)
    return labels


def _keys(column: Array | Ragged) -> NDArray[np.uint64]:
    """Return two words per sample: the value itself where it fits in one, else 128 bits of hash."""
    out = np.zeros((len(column), 2), np.uint64)
    if isinstance(column, Ragged):
        flat = _packed(column.values)
        edges = (column.offsets * flat.shape[1]).tolist()
        data = flat.reshape(-1).data
        values = [data[i:j] for i, j in itertools.pairwise(edges)]
    else:
        flat = _packed(column)
        if flat.shape[1] <= 8:
            out.view(np.uint8)[:, : flat.shape[1]] = flat
            return out
        values = [memoryview(row) for row in flat]
    digests = b"".join(hashlib.blake2b(v, digest_size=16).digest() for v in values)
    out[:] = np.frombuffer(digests, np.uint64).reshape(-1, 2)
    return out


def _packed(values: Array) -> Bytes:
    """Return the bytes of each row, shape ``(n, bytes)``, without padding inside elements."""
    if has_padding(values.dtype):
        from numpy.lib.recfunctions import repack_fields

        values = repack_fields(values, align=False, recurse=True)
    nbytes = math.prod(values.shape[1:]) * values.dtype.itemsize
    rows: Bytes = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return rows.reshape(len(values), nbytes)
