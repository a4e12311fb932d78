"""How much space an output takes, and how its groups are laid out, without I/O."""

from __future__ import annotations

import numpy as np

from dsprep.core.groups import Grouping, GroupPlan
from dsprep.core.schema import Ints, Schema
from dsprep.formats.base import WriteOptions
from dsprep.formats.lmdb.keys import plan_keys
from dsprep.formats.lmdb.pages import HEADER, NODE
from dsprep.formats.lmdb.tree import NODE_MAX, PSIZE, ROOM, Tree, node_sizes
from dsprep.formats.lmdb.values import Packing, Values


def stored(schema: Schema, options: WriteOptions) -> dict[str, str]:
    """Return where each field lies in a sample's value."""
    values = Values(schema)
    plan_keys(options.key_format, 1)
    if options.group_values:
        return {f.name: "a part of its group's value" for f in schema}
    if len(schema) == 1:
        return {f.name: "the value" for f in schema}
    at, plan = values.table, {}
    for f in values.fixed:
        plan[f.name] = f"bytes {at} to {at + f.row_nbytes} of the value"
        at += f.row_nbytes
    for k, f in enumerate(values.ragged):
        length = f", its length in bytes {8 * k} to {8 * k + 8}" if values.table else ""
        place = f"from byte {at}" if k == 0 else f"behind {values.ragged[k - 1].name}"
        plan[f.name] = f"{place} in the value{length}"
    return {f.name: plan[f.name] for f in schema}


def estimate(schema: Schema, count: int, payload: int, options: WriteOptions) -> int:
    """Return the bytes of the file: exact for fixed fields, an upper bound otherwise."""
    key = plan_keys(options.key_format, count).nbytes
    values = Values(schema)
    if not count:
        return 2 * PSIZE
    if schema.ragged:
        # A value inside leaves costs at most twice its bytes, as a leaf may stay half empty;
        # one on overflow pages wastes less than a page and a header, and is not small.
        total = payload + values.table * count
        large = min(count, total // (NODE_MAX - NODE - key + 1) + 1)
        leaves = 2 * count * (NODE + key + 12) // ROOM + 2
        tree = 2 * leaves // Tree(key).fanout + 2
        slack = max(total if large < count else 0, large * (PSIZE + HEADER))
        return (2 + leaves + tree) * PSIZE + total + slack
    nodes, runs = node_sizes(key, np.array([values.head]))
    level = leaves = -(-count // (ROOM // (int(nodes[0]) + 2)))
    branches, each = 0, Tree(key).fanout - 1
    while level > 1:
        level = (level - 2) // each + 1
        branches += level
    return (2 + leaves + branches + int(runs[0]) * count) * PSIZE


def groups(schema: Schema, options: WriteOptions, grouping: Grouping) -> GroupPlan:
    """Return how groups will be laid out: contiguous, and where LMDB puts them.

    Raises
    ------
    UnsupportedError
        If LMDB cannot hold the value of the largest group.
    """
    if options.group_values:
        packing = Packing(schema)
        sizes = packing.sizes(grouping)
        values = packing.value_schema(sizes)
        nbytes = estimate(values, grouping.count, int(sizes.sum()), options)
        padding = int((-(HEADER + sizes) % PSIZE).sum())
        how = "a group is one value, field by field; LMDB decides where, so groups are not aligned"
        return _plan(nbytes, padding, sizes, grouping, how)
    count = int(grouping.edges[-1])
    payloads: Ints = np.diff(grouping.edges) * schema.fixed_nbytes
    for f in schema:
        if f.ragged and f.name in grouping.rows:
            payloads = payloads + grouping.rows[f.name] * f.row_nbytes
    nbytes = estimate(schema, count, int(payloads.sum()), options)
    key = plan_keys(options.key_format, count).nbytes
    return _of_samples(nbytes, payloads, schema, grouping, key)


def _of_samples(
    nbytes: int, payloads: Ints, schema: Schema, grouping: Grouping, key: int
) -> GroupPlan:
    """Return the plan for one value per sample under keys of `key` bytes, in a file of `nbytes`.

    Groups can be longer where values inside leaves and on overflow pages are mixed.
    """
    values, counts = Values(schema), np.diff(grouping.edges)
    sizes = payloads + values.table * counts
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


def _plan(nbytes: int, padding: int, sizes: Ints, grouping: Grouping, how: str) -> GroupPlan:
    return GroupPlan(
        nbytes=nbytes,
        padding=padding,
        group_nbytes=int(sizes.max(initial=0)),
        aligned=grouping.align == 1,
        reads=1,
        how=how,
    )
