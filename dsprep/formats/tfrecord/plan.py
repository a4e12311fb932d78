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

from dataclasses import dataclass, replace

import numpy as np

from dsprep.core.groups import Grouping, round_up
from dsprep.core.schema import Ints, Schema
from dsprep.core.spans import offsets_of
from dsprep.formats.base import FilePlan
from dsprep.formats.tfrecord import features
from dsprep.formats.tfrecord.build import MOST_OVERHEAD, Builder
from dsprep.formats.tfrecord.example import LARGEST
from dsprep.formats.tfrecord.framing import FRAME

MOST_PADDING = 0.02
"""Padding per byte of a record up to which every record gets the same."""
LEAST_PADDING = 2
"""Bytes that a field takes; a group that lacks 1 byte to a stripe takes a stripe more."""


@dataclass(frozen=True)
class Arrangement:
    """How the groups of one file are laid out.

    `builder` makes the records, of which each has `every` bytes of padding. Groups begin at
    multiples of `align` because what is before them is filled up: 1 if not; `aligned` is whether
    they do at multiples of the stripe size.
    """

    builder: Builder
    every: int = 0
    align: int = 1
    aligned: bool = True

    def missing(self, end: int) -> int:
        """Return the padding of the last record of a group that would end at `end`."""
        short = -end % self.align
        return short + self.align if 0 < short < LEAST_PADDING else short

    def group_offsets(self, edges: Ints) -> Ints:
        """Return where groups of records of one size begin, and where the last one ends."""
        sizes = np.diff(edges) * self.builder.nbytes
        if self.align > 1:
            different, owner = np.unique(sizes[:-1], return_inverse=True)
            filled = [size + self.missing(size) for size in different.tolist()]
            sizes[:-1] = np.array(filled, np.int64)[owner]
        return offsets_of(sizes)


def arrange(schema: Schema, types: dict[str, int], grouping: Grouping) -> Arrangement:
    """Return how records are laid out whose fields are carried by lists of these `types`."""
    # the first group begins at 0
    align = grouping.align if grouping.count > 1 else 1
    builder = Builder(schema, types)
    if align > 1 and (builder.opaque or builder.nbytes + align > LARGEST):
        return Arrangement(builder, aligned=False)
    if align > 1 and builder.nbytes and grouping.even:
        every = _in_every(builder.nbytes, grouping.samples, align)
        if every <= MOST_PADDING * builder.nbytes:
            return Arrangement(Builder(schema, types, every), every)
    return Arrangement(builder, align=align)


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
    arrangement: Arrangement,
    grouping: Grouping,
) -> FilePlan:
    """Return the plan with groups: exact for records of one size, else with upper bounds."""
    counts = np.diff(grouping.edges)
    builder, align = arrangement.builder, arrangement.align
    if builder.nbytes:
        offsets = arrangement.group_offsets(grouping.edges)
        sizes, nbytes = np.diff(offsets), int(offsets[-1])
        padding = nbytes - grouping.total * (builder.nbytes - arrangement.every)
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
        aligned=arrangement.aligned,
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
