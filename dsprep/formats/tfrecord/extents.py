"""Where every record lies, and which fields have one place in all of them.

The headers were read when the file was opened. A field of a ``tf.train.Example`` has a constant
place if all records have one length and agree in every byte that is not part of a value: tags,
lengths and names. Where they differ in length, they have to agree up to the end of the features,
and behind it there has to be nothing, or padding up to the end of the record (`group`). That is
proven for every record. Of records from `SPARSE` bytes on only these bytes are read; shorter ones
are read as they lie, which is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from dsprep.core.schema import Bytes
from dsprep.core.storage import pread_most
from dsprep.errors import FormatError
from dsprep.formats.tfrecord import example, framing, recipe
from dsprep.formats.tfrecord.batch_parser import is_padding
from dsprep.formats.tfrecord.example import BYTES, INT64, Value, WireError
from dsprep.formats.tfrecord.features import Feature
from dsprep.formats.tfrecord.framing import FRAME, HEADER, TRUNCATED, Index
from dsprep.formats.tfrecord.stream import SPARSE, WINDOW, windows
from dsprep.layout.model import Blocks, FileLayout, Part, Records
from dsprep.reading.files import File

NEAR = 128
"""Bytes of values between two ranges that are read along rather than skipped."""
_AT_ONCE = 4096
TAIL = 6
"""Bytes behind the features that are looked at: the tag and the length of padding."""

Progress: TypeAlias = Callable[[int, int], None] | None
Ranges: TypeAlias = list[tuple[int, int]]


def file_layout(
    file: File,
    index: Index,
    features: Sequence[Feature],
    known: frozenset[str] | None,
    progress: Progress,
) -> FileLayout:
    """Return the layout of records of Examples, with the place of each field that has one in all.

    Parameters
    ----------
    file, index
        The file, and its records.
    features
        What is wanted of each record.
    known
        The features that a record may have; None: any.

    Raises
    ------
    FormatError
        If the file has changed.
    Misfit
        If a record has a length that does not fit.
    """
    parts = _parts(file, index, features, known, progress)
    return FileLayout(index.count, records_of(index, features, known, parts))


def records_of(
    index: Index,
    features: Sequence[Feature],
    known: frozenset[str] | None,
    parts: Mapping[str, Part] | None = None,
) -> Records:
    """Return records of Examples; `parts`: where fields are in all of them, None: not looked at."""
    parts = {f.field.name: Part() for f in features} if parts is None else parts
    hidden = any(part.at is None for part in parts.values())
    return Records(
        Blocks(index.offsets, index.lengths),
        parts,
        recipe=recipe.describe(features, known is None) if hidden else None,
        frame={"name": framing.NAME},
    )


def opaque_layout(index: Index, features: Sequence[Feature]) -> FileLayout:
    """Return the layout of records that are fields themselves.

    Raises
    ------
    Misfit
        If a record has a length that does not fit.
    """
    parts = {}
    for f in features:
        unit = f.field.dtype.itemsize
        recipe.check_sizes(index.lengths.span(0, index.count), f.field.row_nbytes, f, unit)
        parts[f.field.name] = Part(0, None if f.field.ragged else f.field.row_nbytes)
    return FileLayout(index.count, records_of(index, features, None, parts))


def _parts(
    file: File,
    index: Index,
    features: Sequence[Feature],
    known: frozenset[str] | None,
    progress: Progress,
) -> dict[str, Part]:
    """Return the place of each field, where it has one in all records."""
    parts = {f.field.name: Part() for f in features}
    nbytes = _common(file, index) if index.count and features else 0
    if not nbytes:
        return parts
    first = np.empty(nbytes, np.uint8)
    file.read_into(first, HEADER)
    try:
        found = example.parse(example.view(first), 0, nbytes)
    except WireError:  # reading says so, with the record
        return parts
    ranges = example.glue(found, 0, nbytes)
    placed = {f.field.name: _place(found.get(f.name), f) for f in features}
    fits = known is None or found.keys() <= known
    if ranges is None or not fits or not any(placed.values()):
        return parts
    if not _all_agree(file, index, first, ranges, progress):
        return parts
    return {name: part or Part() for name, part in placed.items()}


def _common(file: File, index: Index) -> int:
    """Return how many bytes of every record may be alike but for values, 0 if none are.

    Of records that differ in length these are the features, given that padding follows them.
    """
    if index.constant:
        return index.lengths.one(0)
    shortest = int(index.lengths.span(0, index.count).min())
    head = np.empty(min(TAIL, shortest), np.uint8)
    file.read_into(head, HEADER)
    try:
        end = example.features_end(example.view(head))
    except WireError:
        return 0
    return end if end <= shortest else 0


def _place(value: Value | None, feature: Feature) -> Part | None:
    """Return where a feature lies in a record, if its bits there are those of the field."""
    if value is None or value.type != feature.type or feature.type == INT64:
        return None
    if value.type == BYTES and len(value.ranges) != 1:
        return None
    start, stop = value.ranges[0] if value.ranges else (0, 0)
    field = feature.field
    size = np.array([stop - start], np.int64)
    recipe.check_sizes(size, field.row_nbytes, feature, field.dtype.itemsize)
    return Part(start, stop - start)


# --- every record ----------------------------------------------------------------------------


def _all_agree(
    file: File,
    index: Index,
    first: Bytes,
    ranges: Ranges,
    progress: Progress,
) -> bool:
    """Whether all payloads equal `first` in the given ranges, and end or are padded behind it."""
    count, nbytes = index.count, len(first)
    tail = [] if index.constant else [(nbytes, nbytes + TAIL)]
    spans = _joined(ranges + tail)
    if index.nbytes >= SPARSE * count:
        read = _apart(file, index, spans)
    elif index.constant:
        spans = [(0, nbytes)]
        read = _whole(file, count, nbytes)
    else:
        read = _gathered(file, index, spans)
    begins = np.cumsum([0, *(b - a for a, b in spans)])
    compared = []  # where each range lies in a row, and what has to be there
    for a, b in ranges:
        k = max(i for i, span in enumerate(spans) if span[0] <= a)
        at = int(begins[k]) + a - spans[k][0]
        compared.append((at, at + b - a, first[a:b]))
    done = 0
    for rows in read:
        if any((rows[:, a:b] != expected).any() for a, b, expected in compared):
            return False
        rest = (
            index.lengths.span(done, done + len(rows)) - nbytes if tail else np.zeros(1, np.int64)
        )
        if rest.any() and not is_padding(rows[rest > 0, -TAIL:], rest[rest > 0]):
            return False
        done += len(rows)
        if progress is not None:
            progress(done, count)
    return True


def _joined(ranges: Ranges) -> Ranges:
    """Return the ranges, those near each other as one."""
    out: Ranges = []
    for a, b in ranges:
        if out and a - out[-1][1] <= NEAR:
            out[-1] = out[-1][0], b
        else:
            out.append((a, b))
    return out


def _whole(file: File, count: int, length: int) -> Iterator[Bytes]:
    """Yield payloads of one length as rows, a window of the file at a time."""
    stride = length + FRAME
    step = max(1, WINDOW // stride) * stride
    for _, window in windows(file, range(0, count * stride, step), step):
        yield window.reshape(-1, stride)[:, HEADER : HEADER + length]


def _gathered(file: File, index: Index, spans: Ranges) -> Iterator[Bytes]:
    """Yield the bytes of all payloads in `spans` as rows, out of windows of the file.

    What a span has behind the end of the file is anything.
    """
    columns = np.concatenate([np.arange(a, b) for a, b in spans])
    reach, end = spans[-1][1], index.nbytes
    window = np.zeros(max(WINDOW, reach), np.uint8)
    step = max(1, min(_AT_ONCE, WINDOW // len(columns)))
    start = 0
    while start < index.count:
        starts = index.offsets.span(start, min(start + step, index.count))
        begin = int(starts[0])
        near = max(1, int(np.searchsorted(starts, begin + WINDOW - reach, "right")))
        stop = min(int(starts[near - 1]) + reach, end)
        file.read_into(window[: stop - begin], begin)
        yield window[(starts[:near] - begin)[:, None] + columns]
        start += near


def _apart(file: File, index: Index, spans: Ranges) -> Iterator[Bytes]:
    """Yield the bytes of all payloads in `spans` as rows, each span by its own read.

    What a span has behind the end of the file is 0.
    """
    width, end = sum(b - a for a, b in spans), index.nbytes
    step = max(1, min(_AT_ONCE, WINDOW // max(1, width)))
    sizes = [(a, b - a) for a, b in spans]
    for start in range(0, index.count, step):
        starts = index.offsets.span(start, min(start + step, index.count))
        data = b"".join(
            pread_most(file.fd, size, at + offset)
            for at in starts.tolist()
            for offset, size in sizes
        )
        behind = max(0, int(starts[-1]) + spans[-1][1] - end)
        if len(data) != len(starts) * width - behind:
            raise FormatError("the file has become shorter", where=file.path, fix=TRUNCATED)
        yield np.frombuffer(data + bytes(behind), np.uint8).reshape(len(starts), width)
