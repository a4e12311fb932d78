"""Where every record is stored, and which fields have the same offset in all of them.

The headers were read when the file was opened. A field of a ``tf.train.Example`` has a constant
place if all records have one length and agree in every byte that is not part of a value: tags,
lengths and names, which is seen while the records are looked into. Where they differ in length,
they have to agree up to the end of the features, and behind it there has to be nothing, or padding
up to the end of the record (`plan`). That is proven for every record: of large ones (`sparse`) only
these bytes are read; shorter ones are read with all that is between them, which is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TypeAlias

import numpy as np

from dsprep.core.groups import Grouping
from dsprep.core.schema import Bytes, Ints
from dsprep.core.spans import offsets_of, ranges
from dsprep.errors import FormatError
from dsprep.formats.protobuf import WireError
from dsprep.formats.tfrecord import example, framing
from dsprep.formats.tfrecord.batch_parser import TAIL, is_padding
from dsprep.formats.tfrecord.build import Template
from dsprep.formats.tfrecord.example import BYTES, INT64, Value
from dsprep.formats.tfrecord.features import Feature
from dsprep.formats.tfrecord.fields import check_sizes
from dsprep.formats.tfrecord.fields import describe as describe_recipe
from dsprep.formats.tfrecord.framing import HEADER, Index
from dsprep.formats.tfrecord.plan import Arrangement
from dsprep.formats.tfrecord.stream import WINDOW, sparse
from dsprep.layout.laws import Affine, Law, Table
from dsprep.layout.model import Blocks, FileLayout, Part, Records
from dsprep.storage.base import Handle
from dsprep.storage.paths import open_file

NEAR = 128
"""Bytes of values between two ranges that are read along rather than skipped."""
_AT_ONCE = 4096
PROBED, PROBED_NBYTES = 16, 16 << 20
"""Records that are compared with what was written, and their bytes: at least two records."""

Progress: TypeAlias = Callable[[int, int], None] | None
Ranges: TypeAlias = list[tuple[int, int]]


def file_layout(
    file: Handle,
    index: Index,
    features: Sequence[Feature],
    known: frozenset[str] | None,
    alike: bool | None,
    progress: Progress,
) -> FileLayout:
    """Return the layout of records of Examples, with the place of each field that has one in all.

    `known` are the features that a record may have; None: any. `alike`: whether they differ in
    values and padding alone; None: not known. Raises `FormatError` if the file has changed, and
    `RecordMismatch` if a record has a length that does not fit.
    """
    parts = _parts(file, index, features, known, alike, progress)
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
        recipe=describe_recipe(features, known is None) if hidden else None,
        frame={"name": framing.NAME},
    )


def layout_of(
    arranged: Arrangement, samples: int | Grouping
) -> Callable[[Path, Ints | None], FileLayout | None] | None:
    """Return what gives the layout of a file that was written as `arranged`; see `WritePlan`.

    None unless records have one size, and all values have bytes.
    """
    builder = arranged.builder
    if not arranged.fixed or not isinstance(builder, Template):
        return None
    by_name = builder.features
    if not all(f.field.row_nbytes for f, _ in by_name):
        return None

    def layout(path: Path, lengths: Ints | None = None) -> FileLayout:
        index, chosen = Index(*_lengths(arranged, builder.nbytes, samples)), [f for f, _ in by_name]
        parts = {
            f.field.name: Part() if f.type == INT64 else Part(at, f.field.row_nbytes)
            for f, at in by_name
        }
        with closing(open_file(path)) as file:
            probe(file, index, chosen, parts)
        known = frozenset(f.name for f in chosen)
        return FileLayout(index.count, records_of(index, chosen, known, parts))

    return layout


def _lengths(arranged: Arrangement, each: int, samples: int | Grouping) -> tuple[Law, int]:
    """Return the lengths of payloads of records of `each` bytes, and the bytes of the file."""
    if not isinstance(samples, Grouping):
        return Affine(samples, each - framing.FRAME), samples * each
    edges, begins = samples.edges, arranged.group_offsets(samples.edges)
    lengths = np.full(int(edges[-1]), each - framing.FRAME, np.int64)
    more = np.diff(begins) - np.diff(edges) * each
    if not more.any():
        return Affine(len(lengths), each - framing.FRAME), int(begins[-1])
    lengths[edges[1:] - 1] += more
    return Table(lengths), int(begins[-1])


def probe(
    file: Handle, index: Index, features: Sequence[Feature], parts: Mapping[str, Part]
) -> None:
    """Raise `FormatError` unless some records are where the index has them, and have the parts.

    These are not looked at if there are no `features`.
    """
    bad = file.nbytes != index.nbytes
    limit = max(2, min(PROBED, PROBED_NBYTES * index.count // max(1, index.nbytes)))
    for i in framing.spread(index.count, limit) if not bad else ():
        start, length = index.offsets.one(i), index.lengths.one(i)
        record = np.empty(length + framing.FRAME, np.uint8)
        file.read_into(record, start - HEADER)
        head = framing.headers(np.array([length]))[0]
        sound = bool((record[:HEADER] == head).all())
        sound = sound and framing.payload_right(record, HEADER, length)
        payload = example.view(record[HEADER : HEADER + length])
        values = example.parse(payload, 0, length) if sound and features else {}
        placed = {f.field.name: _constant_part(values.get(f.name), f) or Part() for f in features}
        bad = not sound or placed != parts
        if bad:
            break
    if bad:
        raise FormatError(
            "the file is not what was written to it",
            where=file.path,
            fix="something else writes to it, or the disk is damaged",
        )


def opaque_layout(index: Index, features: Sequence[Feature]) -> FileLayout:
    """Return the layout of records that are fields themselves.

    Raises `RecordMismatch` if one does not fit.
    """
    parts = {}
    for f in features:
        unit = f.field.dtype.itemsize
        check_sizes(index.lengths.span(0, index.count), f.field.row_nbytes, f, unit)
        parts[f.field.name] = Part(0, None if f.field.ragged else f.field.row_nbytes)
    return FileLayout(index.count, records_of(index, features, None, parts))


def _parts(
    file: Handle,
    index: Index,
    features: Sequence[Feature],
    known: frozenset[str] | None,
    alike: bool | None,
    progress: Progress,
) -> dict[str, Part]:
    """Return the place of each field, where it has one in all records."""
    parts = {f.field.name: Part() for f in features}
    nbytes = _common(file, index) if index.count and features and alike is not False else 0
    if not nbytes:
        return parts
    first = np.empty(nbytes, np.uint8)
    file.read_into(first, HEADER)
    try:
        parsed = example.parse(example.view(first), 0, nbytes)
    except WireError:  # reading says so, with the record
        return parts
    ranges = example.glue(parsed, 0, nbytes)
    placed = {f.field.name: _constant_part(parsed.get(f.name), f) for f in features}
    fits = known is None or parsed.keys() <= known
    if ranges is None or not fits or not any(placed.values()):
        return parts
    if not (alike or _all_agree(file, index, first, ranges, progress)):
        return parts
    return {name: part or Part() for name, part in placed.items()}


def _common(file: Handle, index: Index) -> int:
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


def _constant_part(value: Value | None, feature: Feature) -> Part | None:
    """Return where a feature is in a record, if its bits there are those of the field."""
    if value is None or value.type != feature.type or feature.type == INT64:
        return None
    if feature.form == "lengths" or (value.type == BYTES and len(value.ranges) != 1):
        return None
    start, stop = value.ranges[0] if value.ranges else (0, 0)
    field = feature.field
    size = np.array([stop - start], np.int64)
    check_sizes(size, field.row_nbytes, feature, field.dtype.itemsize)
    return Part(start, stop - start)


# --- every record ----------------------------------------------------------------------------


def _all_agree(
    file: Handle, index: Index, first: Bytes, shared: Ranges, progress: Progress
) -> bool:
    """Whether all payloads equal `first` in the shared ranges, and end or are padded behind it."""
    count, nbytes = index.count, len(first)
    tail = [] if index.constant else [(nbytes, nbytes + TAIL)]
    spans = _joined(shared + tail)
    begins = np.cumsum([0, *(b - a for a, b in spans)])
    compared = []  # where each range is in a row, and what has to be there
    for a, b in shared:
        k = max(i for i, span in enumerate(spans) if span[0] <= a)
        at = int(begins[k]) + a - spans[k][0]
        compared.append((at, at + b - a, first[a:b]))
    done = 0
    for rows in _rows(file, index, spans):
        if any((rows[:, a:b] != expected).any() for a, b, expected in compared):
            return False
        start, done = done, done + len(rows)
        if tail:
            rest = index.lengths.span(start, done) - nbytes
            if rest.any() and not is_padding(rows[rest > 0, -TAIL:], rest[rest > 0]):
                return False
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


def _rows(file: Handle, index: Index, spans: Ranges) -> Iterator[Bytes]:
    """Yield the bytes of all payloads in `spans` as rows, some payloads at a time.

    Small records are read with all that is between the spans. What a span has behind the end of
    the file is 0.
    """
    table = np.array(spans, np.int64)
    begins, widths = table[:, 0], table[:, 1] - table[:, 0]
    columns, reach = ranges(begins, widths), int(table[-1, 1])
    apart = index.nbytes >= sparse(file) * index.count
    each = len(columns) if apart else index.nbytes // index.count
    step = max(1, min(_AT_ONCE, WINDOW // max(1, each)))
    for start in range(0, index.count, step):
        starts = index.offsets.span(start, min(start + step, index.count))
        first, stop = int(starts[0]), min(int(starts[-1]) + reach, index.nbytes)
        if stop - first <= 4 * WINDOW and not apart:
            window = np.zeros(stop - first + TAIL, np.uint8)
            file.read_into(window[: stop - first], first)
            yield window[(starts - first)[:, None] + columns]
            continue
        offsets = (starts[:, None] + begins).reshape(-1)
        edges = offsets_of(np.tile(widths, len(starts)))
        lengths = np.minimum(np.diff(edges), index.nbytes - offsets)
        rows = np.zeros(int(edges[-1]), np.uint8)
        file.read_spans(offsets, lengths, rows, edges[:-1], NEAR)
        yield rows.reshape(len(starts), -1)
