"""The making of an LMDB file, recovered from the offsets of its values.

A database whose keys rose as it was written is laid out as a few numbers say: page size, key size,
value size, records per transaction, ``MDB_APPEND`` or not, main or named database, copied
compactly or not. `recover` tries what can be, and believes only what gives the offset of every
single value.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from dsprep.core.schema import Ints
from dsprep.errors import FormatError
from dsprep.layout.laws import Affine, Explicit, Law, is_exact
from dsprep.layout.laws.lmdb import MOST_SIZES, Shape, overflow
from dsprep.layout.laws.replay import Replay, feasible, regular
from dsprep.layout.laws.tree import Tree

_STEP = 1 << 20
_JUDGED = 64
"""Transactions that are replayed before all are."""
_TRIED = 48
"""Commit intervals that are tried where the file leaves several open."""
_WIDEST = 1 << 12


def recover(
    psize: int,
    offsets: Ints,
    sizes: Ints,
    key_sizes: tuple[int, int],
    transaction: int,
    named: bool,
) -> tuple[tuple[Law, ...], dict[str, Any]]:
    """Return ``(laws, facts)``: how a database was made whose values are there, if that shows.

    `offsets` and `sizes` are in key order; `key_sizes` those of the shortest and the longest key,
    `transaction` the number of the newest meta. The laws give exactly the offsets, the smallest
    first; most often there is one or none. A
    `Replay` comes after every `Tree`.

    The facts are for a person and for JSON; empty if there is no law. ``commit interval`` (a number
    of records or ``"one transaction"``), ``append`` and ``copied compactly`` are there only if the
    file states them: a compact copy does not state the first, nor do values inside leaves.
    """
    n = len(offsets)
    if not n or key_sizes[0] != key_sizes[1]:
        return (), {}
    low, high = int(sizes.min()), int(sizes.max())
    shapes = [Shape(psize, key_sizes[0], low, append, named) for append in (True, False)]
    if not shapes[0].possible or (low != high and (not shapes[0].big or n > MOST_SIZES)):
        return (), {}
    lengths: Law = Affine(n, low) if low == high else Explicit(sizes)
    before = overflow(shapes[0], lengths)
    trees = [
        Tree(kind, shape, lengths, before=before) for kind in ("one", "compact") for shape in shapes
    ]
    exact: list[Law] = [tree for tree in trees if is_exact(tree, offsets)]
    if not exact and transaction > 1:
        exact = [*_replays(offsets, transaction, lengths, trees)]
    return tuple(exact), _facts(exact, low, high) if exact else {}


def _replays(offsets: Ints, transaction: int, lengths: Law, trees: list[Tree]) -> Iterator[Law]:
    """Yield the replays that are exact, for each shape at most one."""
    # One record more may have been put after them all.
    n, shapes = len(offsets), [tree.shape for tree in trees[:2]]
    for tree, shape in zip(trees, shapes, strict=False):
        parted = _parts(tree, offsets)
        tried = (
            Replay(shape, lengths, plan, together)
            for together in ((False, True) if shape.named else (False,))
            for each in _intervals(tree, parted, transaction - (shape.named and not together))
            for plan in (regular(n, each), (*regular(n - 1, each), (1, 1)))
            if feasible(shape, lengths, plan)
        )
        yield from islice((law for law in tried if _is_exact(law, offsets)), 1)


def _is_exact(law: Replay, offsets: Ints) -> bool:
    """Return whether a replay gives these offsets; its first transactions are judged before all."""
    each, lengths = law.plan[0][1], law.lengths
    head = each * max(_JUDGED, -(-4 * law.shape.leaf // each))
    try:
        if len(offsets) > head:
            some = lengths.span(0, head)
            known = Affine(head, int(some[0])) if isinstance(lengths, Affine) else Explicit(some)
            begin = Replay(law.shape, known, regular(head, each), law.together)
            fixed = head - law.shape.leaf  # the open leaf moves
            if not np.array_equal(begin.span(0, fixed), offsets[:fixed]):
                return False
        return is_exact(law, offsets)
    except FormatError:  # it leads where replays do not hold
        return False


def _parts(tree: Tree, offsets: Ints) -> int:
    """Return the first record that is not stored where one transaction would have put it."""
    step = 256
    start = 0
    while start < len(offsets):
        stop = min(len(offsets), start + step)
        wrong = tree.span(start, stop) != offsets[start:stop]
        if wrong.any():
            return start + int(wrong.argmax())
        start, step = stop, min(2 * step, _STEP)
    return start


def _intervals(tree: Tree, parted: int, times: int) -> list[int]:
    """Return the records per transaction that the file leaves open, the likeliest first."""
    # The first transaction is laid out as one transaction is. The second begins with copies of the
    # pages at the right edge of the tree. They push the next value on overflow pages away from its
    # place, so that the first such value gives it. Values in leaves are pushed away with the leaf
    # that was open, so any of its records may have been the last one; or one before, as a leaf can
    # come back to its place later; how many `times` records were put gives the rest.
    n, shape = tree.count, tree.shape
    if shape.big:
        return [parted] if 0 < parted < n else []
    if times < 2:
        return []
    near = range(parted + 1, min(parted + shape.leaf, n - 1) + 1)
    like = range(-(-n // times), min(n - 1, (n - 1) // (times - 1)) + 1)
    made = [c for c in near if abs(-(-n // c) - times) <= 1]  # one may have put other records
    some = {*made, *(c for c in like[:_WIDEST] if c <= parted + shape.leaf)}

    def order(c: int) -> tuple[bool, bool, int, int]:
        """Round numbers come first: the zeros at their end, decimal or binary, are counted."""
        zeros = 4 * (len(str(c)) - len(str(c).rstrip("0")))
        return c not in near, c not in like, -max(zeros, (c & -c).bit_length() - 1), c

    return sorted(some, key=order)[:_TRIED]


def _facts(exact: list[Law], low: int, high: int) -> dict[str, Any]:
    """Return what the laws agree on."""
    law = exact[0]
    assert isinstance(law, Tree | Replay)
    shape = law.shape
    facts: dict[str, Any] = {
        "order": "ascending keys",
        "record size": low if low == high else f"{low} to {high}",
        "key size": shape.key,
        "values": "on overflow pages" if shape.big else "in leaves",
        "leaf capacity": shape.leaf,
        "branch capacity": shape.branch,
        "page size": shape.psize,
        "meta pages": 2,
        "database": "named" if shape.named else "main",
    }
    known = [each for each in exact if isinstance(each, Tree | Replay)]
    if len({each.shape.append for each in known}) == 1:
        facts["append"] = shape.append
    kinds = {each.kind if isinstance(each, Tree) else each.name for each in known}
    if len(kinds) == 1:
        facts["copied compactly"] = kinds == {"compact"}
    if isinstance(law, Replay):
        if shape.big:  # else the next intervals may give the same offsets
            facts["commit interval"] = law.plan[0][1]
    elif kinds == {"one"}:
        facts["commit interval"] = "one transaction"
    return facts
