"""The places of records, and the fields that have the same offset in all of them.

The headers were read when the file was opened. A field of a ``tf.train.Example`` has a constant
place if the values of all features have, which is seen while every record is looked into. Records
may still differ in length: by padding behind the features (`plan`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dsprep.core.groups import Grouping
from dsprep.core.schema import Ints
from dsprep.formats.tfrecord import framing
from dsprep.formats.tfrecord.build import Builder
from dsprep.formats.tfrecord.example import BYTES, INT64
from dsprep.formats.tfrecord.features import Feature, FeatureStats
from dsprep.formats.tfrecord.fields import check_sizes
from dsprep.formats.tfrecord.fields import describe as describe_recipe
from dsprep.layout.laws import Affine, Law
from dsprep.layout.model import Blocks, FileLayout, Part, Records
from dsprep.reading.records import Label


def records_of(
    blocks: Blocks,
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
        blocks,
        parts,
        recipe=describe_recipe(features, known is None) if hidden else None,
        frame={"name": framing.NAME},
    )


def parts_of(
    constant: Mapping[str, FeatureStats], features: Sequence[Feature], label: Label
) -> dict[str, Part]:
    """Return the part of each field whose bits are at its place; `FormatError` if it is too short.

    `constant` are features that have the same ranges in all records.
    """
    parts = {}
    for f in features:
        stats = constant.get(f.name)
        if stats is None or stats.types != {f.type} or f.type == INT64 or f.form == "lengths":
            continue
        ranges = stats.ranges or []
        if f.type == BYTES and len(ranges) != 1:
            continue
        start, stop = ranges[0] if ranges else (0, 0)
        check_sizes(np.array([stop - start]), f, label)
        parts[f.field.name] = Part(start, stop - start)
    return parts


def opaque_parts(blocks: Blocks, features: Sequence[Feature], label: Label) -> dict[str, Part]:
    """Return the parts of records that are fields themselves; `FormatError` if one does not fit."""
    lengths = blocks.lengths
    some = lengths.span(0, min(1, lengths.count) if isinstance(lengths, Affine) else lengths.count)
    for f in features:
        check_sizes(some, f, label)
    return {f.field.name: Part(0, None if f.field.ragged else f.field.row_nbytes) for f in features}


# --- files that were written -----------------------------------------------------------------


def layout_of(builder: Builder, samples: Grouping, lengths: Ints | None) -> FileLayout | None:
    """Return the layout of a file that was made by `builder`.

    `lengths` are those of payloads that vary. None if only looking through the file gives it: if
    they are not known, or may be of one length by chance, or if values have no bytes.
    """
    chosen = builder.features
    if builder.nbytes:
        law = _lengths(builder, samples)
        placed = zip(chosen, builder.positions, strict=True)
        parts = {f.name: Part(at, f.field.row_nbytes) for f, at in placed if f.type != INT64}
        if not all(f.field.row_nbytes for f in chosen):
            return None
    elif lengths is None:
        return None
    else:
        law = framing.lengths_of(lengths)
        parts = {f.name: Part(0) for f in chosen} if builder.opaque else {}
        if isinstance(law, Affine) and not builder.opaque:
            return None
    blocks = framing.blocks_of(law)
    known = frozenset(f.name for f in chosen)
    return FileLayout(blocks.count, records_of(blocks, chosen, known, parts))


def _lengths(builder: Builder, samples: Grouping) -> Law:
    """Return the lengths of payloads of records of one size."""
    each = builder.nbytes
    if samples.plain:
        return Affine(samples.total, each - framing.FRAME)
    edges, begins = samples.edges, builder.group_offsets(samples.edges)
    lengths = np.full(int(edges[-1]), each - framing.FRAME, np.int64)
    lengths[edges[1:] - 1] += np.diff(begins) - np.diff(edges) * each
    return framing.lengths_of(lengths)
