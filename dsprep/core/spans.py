"""Spans of memory, ``(offset, length)``: packed back to back, and moved by few copies."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from dsprep.core.schema import Array, Bytes, Ints

LONG = 1024
"""Mean bytes from which on one copy per span is faster than few for all of about one length."""

_AT_ONCE = 1 << 20  # bytes of such spans that are in memory twice


def move_spans(source: Bytes, starts: Ints, lengths: Ints, out: Bytes, targets: Ints) -> None:
    """Copy ``source[starts[i]:][:lengths[i]]`` to ``out[places[i]:]``, for all i.

    Parameters
    ----------
    source, out
        uint8, 1-D and contiguous.
    starts, lengths, targets
        int64, shape ``(n,)``, in bytes, within `source` and `out`; the targets do not overlap.
    """
    n = len(starts)
    total = int(lengths.sum())
    if not total:
        return
    width = int(lengths[0])
    if (lengths == width).all():
        step, pace = _common_step(starts), _common_step(targets)
        new = np.flatnonzero((np.diff(starts) != step) | (np.diff(targets) != pace)) + 1
        if len(new) * 8 < n:  # a few runs of even steps, such as the nodes of full pages
            for a, b in pairwise([0, *new.tolist(), n]):
                at, to = int(starts[a]), int(targets[a])
                rows = np.ndarray((b - a, width), np.uint8, source, at, (step, 1))
                np.ndarray((b - a, width), np.uint8, out, to, (pace, 1))[:] = rows
            return
        if width < LONG:
            _copy_equal(source, starts, width, out, targets)
            return
    if total >= n * LONG:
        get, put = source.data, out.data  # slices of these cost half of what those of arrays do
        columns = (starts, starts + lengths, targets, targets + lengths)
        for a, b, c, d in zip(*(column.tolist() for column in columns), strict=True):
            put[c:d] = get[a:b]
        return
    # Of 2 ** k to 2 ** (k + 1) bytes, the first 2 ** k and the last 2 ** k are all.
    logarithms = np.frexp(lengths)[1] - 1  # of 0 bytes: -1
    for k in range(int(logarithms.max()) + 1):
        some = np.flatnonzero(logarithms == k)
        first, begins, over = starts[some], targets[some], lengths[some] - (1 << k)
        _copy_equal(source, first, 1 << k, out, begins)
        _copy_equal(source, first + over, 1 << k, out, begins + over)


def _copy_equal(source: Bytes, starts: Ints, width: int, out: Bytes, targets: Ints) -> None:
    """Copy spans of one length, as elements of that many bytes that begin at any byte."""
    element, step = np.dtype((np.void, width)), max(1, _AT_ONCE // width)
    get = np.ndarray((len(source) - width + 1,), element, source, 0, (1,))
    put = np.ndarray((len(out) - width + 1,), element, out, 0, (1,))
    for i in range(0, len(starts), step):
        put[targets[i : i + step]] = get[starts[i : i + step]]


def _common_step(starts: Ints) -> int:
    """Return the distance between neighbours that is most common, judged by some of them."""
    if len(starts) < 2:
        return 0
    some = np.linspace(0, len(starts) - 2, 33).astype(np.int64)
    return int(np.sort(starts[some + 1] - starts[some])[16])


def offsets_of(lengths: Ints) -> Ints:
    """Return the offsets of contiguous spans: int64, shape ``(n + 1,)``."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def ranges(starts: Array, counts: Array) -> Ints:
    """Return ``starts[i], starts[i] + 1, ...``, ``counts[i]`` of them, for all i as one array."""
    ends = np.cumsum(counts, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    out: Ints = np.repeat(np.asarray(starts, np.int64) - (ends - counts), counts)
    out += np.arange(total)
    return out
