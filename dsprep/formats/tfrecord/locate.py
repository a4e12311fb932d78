"""Where every record is stored, and which fields have the same offset in all of them.

The headers were read when the file was opened. A field of a ``tf.train.Example`` has a constant
place if the values of all features have, which is seen while every record is looked into. Records
may still differ in length: by padding behind the features (`plan`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from dsprep.core.groups import Grouping
from dsprep.errors import FormatError
from dsprep.formats.tfrecord import framing
from dsprep.formats.tfrecord.build import Assembly, Template
from dsprep.formats.tfrecord.example import BYTES, INT64, Value
from dsprep.formats.tfrecord.features import Feature
from dsprep.formats.tfrecord.fields import check_sizes
from dsprep.formats.tfrecord.fields import describe as describe_recipe
from dsprep.formats.tfrecord.framing import Index
from dsprep.formats.tfrecord.plan import Arrangement
from dsprep.layout.laws import Affine, Law, Table
from dsprep.layout.model import Blocks, FileLayout, Part, Records
from dsprep.reading.records import Label


def records_of(
    index: Index,
    features: Sequence[Feature],
    known: frozenset[str] | None,
    parts: Mapping[str, Part],
) -> Records:
    """Return records of Examples that may have other features if they are `known`; None: any.

    `parts` are those of the fields that have a place.
    """
    parts = {f.field.name: parts.get(f.field.name, Part()) for f in features}
    hidden = any(part.at is None for part in parts.values())
    return Records(
        Blocks(index.offsets, index.lengths),
        parts,
        recipe=describe_recipe(features, known is None) if hidden else None,
        frame={"name": framing.NAME},
    )


def parts_of(
    places: Mapping[str, Value], features: Sequence[Feature], label: Label
) -> dict[str, Part]:
    """Return the part of each field whose bits are at its place; `FormatError` if it is too short.

    `places` are those of the features in every record.
    """
    parts = {}
    for f in features:
        value = places.get(f.name)
        if value is None or value.type != f.type or f.type == INT64 or f.form == "lengths":
            continue
        if value.type == BYTES and len(value.ranges) != 1:
            continue
        start, stop = value.ranges[0] if value.ranges else (0, 0)
        check_sizes(np.array([stop - start]), f, label)
        parts[f.field.name] = Part(start, stop - start)
    return parts


def opaque_parts(index: Index, features: Sequence[Feature], label: Label) -> dict[str, Part]:
    """Return the parts of records that are fields themselves; `FormatError` if one does not fit."""
    for f in features:
        check_sizes(index.lengths.span(0, index.count), f, label)
    return {f.field.name: Part(0, None if f.field.ragged else f.field.row_nbytes) for f in features}


# --- files that were written -----------------------------------------------------------------


def layout_of(arranged: Arrangement, samples: int | Grouping, path: Path) -> FileLayout | None:
    """Return the layout of a file that was written as `arranged`.

    None unless records have one size, and all values have bytes.
    """
    builder = arranged.builder
    if isinstance(builder, Assembly) or not all(f.field.row_nbytes for f, _ in builder.features):
        return None
    by_name = builder.features
    index, chosen = Index(*_lengths(arranged, builder, samples)), [f for f, _ in by_name]
    parts = {f.field.name: Part(at, f.field.row_nbytes) for f, at in by_name if f.type != INT64}
    check_written(path, index)
    known = frozenset(f.name for f in chosen)
    return FileLayout(index.count, records_of(index, chosen, known, parts))


def _lengths(arranged: Arrangement, builder: Template, samples: int | Grouping) -> tuple[Law, int]:
    """Return the lengths of payloads of records of one size, and the bytes of the file."""
    each = builder.nbytes
    if not isinstance(samples, Grouping):
        return Affine(samples, each - framing.FRAME), samples * each
    edges, begins = samples.edges, arranged.group_offsets(samples.edges)
    lengths = np.full(int(edges[-1]), each - framing.FRAME, np.int64)
    more = np.diff(begins) - np.diff(edges) * each
    if not more.any():
        return Affine(len(lengths), each - framing.FRAME), int(begins[-1])
    lengths[edges[1:] - 1] += more
    return Table(lengths), int(begins[-1])


def check_written(path: Path, index: Index) -> None:
    """Raise `FormatError` unless a file that was just written has the bytes that were written."""
    nbytes = path.stat().st_size
    if nbytes != index.nbytes:
        raise FormatError(
            "the file is not what was written to it",
            where=path,
            expected=f"{index.nbytes} bytes",
            found=nbytes,
            fix="something else writes to it, or the disk is damaged",
        )
