"""Where every record lies, and which fields have one place in all of them.

The headers were read when the file was opened. A field of a ``tf.train.Example`` has a constant
place if all records have one length and agree in every byte that is not part of a value: tags,
lengths and names. That is proven for every record. Of records from `WHOLE` bytes on only these
bytes are read; shorter ones are read as they lie, which is faster.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from dsprep.errors import FormatError, UnsupportedError
from dsprep.formats.tfrecord import columns, example, frame, recipe
from dsprep.formats.tfrecord.example import BYTES, INT64, Value, WireError
from dsprep.formats.tfrecord.features import Feature
from dsprep.formats.tfrecord.framing import FOOTER, FRAME, HEADER, TRUNCATED, Index
from dsprep.formats.tfrecord.stream import WINDOW, PackedFile, PlainFile
from dsprep.laws import Affine, Explicit
from dsprep.layout.model import Blocks, FileLayout, Part, Records
from dsprep.schema import Bytes, Ints

WHOLE = 4096
"""Bytes of a record below which it is read whole."""
NEAR = 128
"""Bytes of values between two ranges that are read along rather than skipped."""
_AT_ONCE = 4096

Progress: TypeAlias = Callable[[int, int], None] | None
Ranges: TypeAlias = list[tuple[int, int]]


def file_layout(
    file: PlainFile | PackedFile,
    index: Index,
    features: Sequence[Feature],
    opaque: bool,
    known: frozenset[str] | None,
    progress: Progress,
) -> FileLayout:
    """Return the layout of the records.

    Parameters
    ----------
    file, index
        The file, and its records.
    features
        What is wanted of each record.
    opaque
        Whether that is the record itself.
    known
        The features that a record may have; None: any.

    Raises
    ------
    UnsupportedError
        If the file is compressed.
    FormatError
        If the file has changed.
    Misfit
        If a record has a length that does not fit.
    """
    if isinstance(file, PackedFile):
        raise UnsupportedError(
            f"samples have no offsets inside a {file.codec} stream",
            where=file.path,
            fix=f"dsprep convert {file.path} DST writes it without compression",
        )
    if opaque:
        parts = {f.field.name: _opaque_part(f, index) for f in features}
    else:
        parts = _parts(file, index, features, known, progress)
    hidden = any(part.at is None for part in parts.values())
    records = Records(
        _blocks(index),
        parts,
        recipe=recipe.describe(features, known is None) if hidden else None,
        frame={"name": frame.NAME},
    )
    return FileLayout(index.count, records)


def _blocks(index: Index) -> Blocks:
    """Return where the payloads lie."""
    n = index.count
    if not isinstance(index.lengths, np.ndarray):
        stride = index.lengths + FRAME
        return Blocks(Affine(n, HEADER, stride), Affine(n, index.lengths))
    lengths = index.lengths_of(0, n)
    offsets: Ints = lengths + FRAME
    np.cumsum(offsets, out=offsets)
    offsets -= lengths
    offsets -= FOOTER
    return Blocks(Explicit(offsets), Explicit(lengths))


def _opaque_part(feature: Feature, index: Index) -> Part:
    """Return the part that is the whole record, given that every length fits."""
    field = feature.field
    columns.check_sizes(
        index.lengths_of(0, index.count), field.row_nbytes, feature, field.dtype.itemsize
    )
    return Part(0, None if field.ragged else field.row_nbytes)


def _parts(
    file: PlainFile,
    index: Index,
    features: Sequence[Feature],
    known: frozenset[str] | None,
    progress: Progress,
) -> dict[str, Part]:
    """Return the place of each field, where it has one in all records."""
    parts = {f.field.name: Part() for f in features}
    if not index.count or not features or isinstance(index.lengths, np.ndarray):
        return parts
    first = np.empty(index.lengths, np.uint8)
    file.read_into(first, HEADER)
    try:
        found = example.parse(example.view(first), 0, len(first))
    except WireError:  # reading says so, with the record
        return parts
    ranges = example.glue(found, 0, len(first))
    placed = {f.field.name: _place(found.get(f.name), f) for f in features}
    fits = known is None or found.keys() <= known
    if ranges is None or not fits or not any(placed.values()):
        return parts
    if not _all_agree(file, index.count, first, ranges, progress):
        return parts
    return {name: part or Part() for name, part in placed.items()}


def _place(value: Value | None, feature: Feature) -> Part | None:
    """Return where a feature lies in a record, if its bits there are those of the field."""
    if value is None or value.type != feature.type or feature.type == INT64:
        return None
    if value.type == BYTES and len(value.ranges) != 1:
        return None
    start, stop = value.ranges[0] if value.ranges else (0, 0)
    field = feature.field
    size = np.array([stop - start], np.int64)
    columns.check_sizes(size, field.row_nbytes, feature, field.dtype.itemsize)
    return Part(start, stop - start)


# --- every record ----------------------------------------------------------------------------


def _all_agree(
    file: PlainFile, count: int, first: Bytes, ranges: Ranges, progress: Progress
) -> bool:
    """Whether all payloads equal `first` in the given ranges."""
    spans = [(0, len(first))] if len(first) + FRAME < WHOLE else _joined(ranges)
    begins = np.cumsum([0, *(b - a for a, b in spans)])
    compared = []  # where each range lies in a row, and what has to be there
    for a, b in ranges:
        k = max(i for i, span in enumerate(spans) if span[0] <= a)
        at = int(begins[k]) + a - spans[k][0]
        compared.append((at, at + b - a, first[a:b]))
    read = _whole(file, count, len(first)) if spans[0][1] == len(first) else None
    done = 0
    for rows in read or _apart(file, count, len(first), spans):
        if any((rows[:, a:b] != expected).any() for a, b, expected in compared):
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


def _whole(file: PlainFile, count: int, length: int) -> Iterator[Bytes]:
    """Yield the payloads as rows, a window of the file at a time."""
    stride = length + FRAME
    step = max(1, WINDOW // stride)
    window = np.empty((min(step, count), stride), np.uint8)
    for start in range(0, count, step):
        rows = window[: min(step, count - start)]
        file.read_into(rows, start * stride)
        yield rows[:, HEADER : HEADER + length]


def _apart(file: PlainFile, count: int, length: int, spans: Ranges) -> Iterator[Bytes]:
    """Yield the bytes of all payloads in `spans` as rows, each span by its own read."""
    stride, width = length + FRAME, sum(b - a for a, b in spans)
    step = max(1, min(_AT_ONCE, WINDOW // max(1, width)))
    sizes = [(HEADER + a, b - a) for a, b in spans]
    for start in range(0, count, step):
        stop = min(start + step, count)
        data = b"".join(
            os.pread(file.fd, size, at + offset)
            for at in range(start * stride, stop * stride, stride)
            for offset, size in sizes
        )
        if len(data) != (stop - start) * width:
            raise FormatError("the file has become shorter", where=file.path, fix=TRUNCATED)
        yield np.frombuffer(data, np.uint8).reshape(stop - start, width)
