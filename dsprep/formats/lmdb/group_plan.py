"""How groups will lie in LMDB, for a person and for the space check."""

from __future__ import annotations

import numpy as np

from dsprep.core.groups import Grouping, GroupPlan
from dsprep.core.schema import Ints, Schema
from dsprep.formats.lmdb.group_values import Packing
from dsprep.formats.lmdb.group_writer import value_schema
from dsprep.formats.lmdb.pages import HEADER, NODE
from dsprep.formats.lmdb.tree import NODE_MAX, PSIZE, ROOM, Tree, node_sizes
from dsprep.formats.lmdb.values import Values


def payloads(schema: Schema, grouping: Grouping) -> Ints:
    """Return the bytes of all fields in each group."""
    sizes: Ints = np.diff(grouping.edges) * schema.fixed_nbytes
    for f in schema:
        if f.ragged and f.name in grouping.rows:
            sizes = sizes + grouping.rows[f.name] * f.row_nbytes
    return sizes


def of_samples(nbytes: int, schema: Schema, grouping: Grouping, key: int) -> GroupPlan:
    """Return the plan for one value per sample under keys of `key` bytes, in a file of `nbytes`.

    Groups can be longer where values inside leaves and on overflow pages are mixed.
    """
    values, counts = Values(schema), np.diff(grouping.edges)
    sizes = payloads(schema, grouping) + values.table * counts
    padding = 0
    if schema.ragged:
        most = sizes + counts * (HEADER + PSIZE + NODE + key + 11)  # a page of its own, and a node
        most += most // ROOM * (PSIZE - ROOM) + 2 * PSIZE  # and leaves shared with neighbours
        if int(sizes.sum()) > NODE_MAX * int(counts.sum()):
            padding = int(counts.sum()) * (PSIZE // 2)
    else:
        nodes, runs = node_sizes(key, np.array([values.head]))
        pages = int(runs[0])
        leaves = counts // (ROOM // (int(nodes[0]) + 2)) + (1 if pages else 2)
        branches = leaves // (Tree(key).fanout - 1) + 1
        most = (counts * pages + leaves + branches) * PSIZE
        if pages:
            padding = int(counts.sum()) * (-(HEADER + values.head) % PSIZE)
    return _plan(
        nbytes,
        padding,
        most,
        grouping,
        "the values of a group follow each other, with pages of the tree between them; LMDB "
        "decides where, so groups are not aligned",
    )


def group_values(schema: Schema, grouping: Grouping) -> tuple[Schema, Ints]:
    """Return the schema and the sizes of values that hold a group each.

    Raises
    ------
    UnsupportedError
        If LMDB cannot hold the largest.
    """
    packing = Packing(schema)
    sizes = packing.sizes(grouping)
    return value_schema(packing, sizes), sizes


def of_values(nbytes: int, sizes: Ints, grouping: Grouping) -> GroupPlan:
    """Return the plan for values of these sizes, a group each, in a file of `nbytes`."""
    padding = int((-(HEADER + sizes) % PSIZE).sum())
    how = "a group is one value, field by field; LMDB decides where, so groups are not aligned"
    return _plan(nbytes, padding, sizes, grouping, how)


def _plan(nbytes: int, padding: int, sizes: Ints, grouping: Grouping, how: str) -> GroupPlan:
    return GroupPlan(
        nbytes=nbytes,
        padding=padding,
        group_nbytes=int(sizes.max(initial=0)),
        aligned=grouping.align == 1,
        reads=1,
        how=how,
    )
