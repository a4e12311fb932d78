"""The layout of groups of records, which begin at multiples of the stripe size.

Records follow one another without gaps, so a group is a run of bytes by itself. To align groups,
padding goes into records (`example.padding_head`: a field that every parser of Examples skips):

- the same amount into every record, so that a group takes a whole number of stripes and all
  records keep one size, if that adds at most `MOST_PADDING` to them;
- otherwise into the last record of each group but the last, as much as is missing to a stripe.

Records that are no Examples take no padding: their groups begin anywhere.

A padded record is whole only with its padding, which its length and CRC include; so it counts as
part of the group.
"""

from __future__ import annotations

import numpy as np

from dsprep.core.groups import Grouping, round_up
from dsprep.core.schema import Ints, Schema
from dsprep.formats.tfrecord import features
from dsprep.formats.tfrecord.build import LEAST_PADDING, MOST_OVERHEAD, Builder
from dsprep.formats.tfrecord.example import LARGEST
from dsprep.formats.tfrecord.framing import FRAME

MOST_PADDING = 0.02
"""Padding per byte of a record up to which every record gets the same."""


def arrange(schema: Schema, types: dict[str, int], grouping: Grouping) -> Builder:
    """Return the plan of records whose fields are lists of these `types`."""
    # The first group begins at 0.
    align = grouping.align if grouping.count > 1 else 1
    builder = Builder(schema, types)
    if align > 1 and (builder.opaque or builder.nbytes + align > LARGEST):
        builder.aligned = False
        return builder
    if align > 1 and builder.nbytes and grouping.even:
        step = align // int(np.gcd(grouping.samples, align))
        every = -builder.nbytes % step  # with it the samples of a group fill whole stripes
        if 0 < every < LEAST_PADDING:
            every += round_up(LEAST_PADDING, step)
        if every <= MOST_PADDING * builder.nbytes:
            return Builder(schema, types, every)
    builder.align = align
    return builder


def group_sizes(
    schema: Schema, types: dict[str, int], builder: Builder, grouping: Grouping, payload: int
) -> Ints:
    """Return the bytes of each group: exact for records of one size, else at most."""
    if builder.nbytes:
        return np.diff(builder.group_offsets(grouping.edges))
    each = FRAME + MOST_OVERHEAD + sum(len(n.encode()) + MOST_OVERHEAD for n in schema.names)
    rows = {f.name: features.row_nbytes(f, types[f.name]) for f in schema}
    each += sum(rows[f.name] for f in schema if not f.ragged)
    sizes: Ints = np.diff(grouping.edges) * each
    ragged = [f for f in schema if f.ragged]
    if all(f.name in grouping.rows for f in ragged):
        sizes = sizes + sum(grouping.rows[f.name] * rows[f.name] for f in ragged)
    else:
        sizes = sizes + int(payload * max(rows[f.name] / f.row_nbytes for f in ragged))
    return -(-sizes // builder.align) * builder.align
