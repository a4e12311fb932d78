"""How groups of records are laid out, and how they come to begin at multiples of the stripe size.

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

from dataclasses import replace

import numpy as np

from dsprep.core.groups import Grouping, round_up
from dsprep.core.schema import Ints, Schema
from dsprep.formats.base import FilePlan
from dsprep.formats.tfrecord import features
from dsprep.formats.tfrecord.build import LEAST_PADDING, MOST_OVERHEAD, Builder
from dsprep.formats.tfrecord.example import LARGEST
from dsprep.formats.tfrecord.framing import FRAME

MOST_PADDING = 0.02
"""Padding per byte of a record up to which every record gets the same."""


def arrange(schema: Schema, types: dict[str, int], grouping: Grouping) -> Builder:
    """Return how records are laid out whose fields are carried by lists of these `types`."""
    # the first group begins at 0
    align = grouping.align if grouping.count > 1 else 1
    builder = Builder(schema, types)
    if align > 1 and (builder.opaque or builder.nbytes + align > LARGEST):
        builder.aligned = False
        return builder
    if align > 1 and builder.nbytes and grouping.even:
        every = _in_every(builder.nbytes, grouping.samples, align)
        if every <= MOST_PADDING * builder.nbytes:
            return Builder(schema, types, every)
    builder.align = align
    return builder


def _in_every(nbytes: int, samples: int, align: int) -> int:
    """Return the least padding of records with which `samples` of them fill whole stripes."""
    step = align // int(np.gcd(samples, align))
    padding = -nbytes % step
    return padding if not padding or padding >= LEAST_PADDING else padding + round_up(2, step)


# --- the plan --------------------------------------------------------------------------------


def with_groups(
    plan: FilePlan,
    schema: Schema,
    types: dict[str, int],
    builder: Builder,
    grouping: Grouping,
) -> FilePlan:
    """Return the plan with groups: exact for records of one size, else with upper bounds."""
    counts = np.diff(grouping.edges)
    align = builder.align
    if builder.nbytes:
        offsets = builder.group_offsets(grouping.edges)
        sizes, nbytes = np.diff(offsets), int(offsets[-1])
        padding = nbytes - grouping.total * (builder.nbytes - builder.padding)
    else:
        sizes = _largest_records(schema, types, grouping)
        sizes = -(-sizes // align) * align
        nbytes = int(sizes.sum())
        padding = len(counts) * (align // 2)
    return replace(
        plan,
        nbytes=nbytes,
        padding=padding,
        group_nbytes=int(sizes.max(initial=0)),
        aligned=builder.aligned,
    )


def _largest_records(schema: Schema, types: dict[str, int], grouping: Grouping) -> Ints:
    """Return the most bytes that the records of each group can take."""
    names = sum(len(n.encode()) + MOST_OVERHEAD for n in schema.names)
    each = FRAME + MOST_OVERHEAD + names
    each += sum(features.row_nbytes(f, types[f.name]) for f in schema if not f.ragged)
    sizes: Ints = np.diff(grouping.edges) * each
    for f in schema:
        if f.ragged and f.name in grouping.rows:
            sizes = sizes + grouping.rows[f.name] * features.row_nbytes(f, types[f.name])
    return sizes
