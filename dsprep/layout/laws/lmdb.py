"""The shape of an LMDB tree that was built from rising keys: what a page holds, what a value takes.

Of LMDB 0.9 (``mdb.c``), with pages of ``psize`` bytes, a key of ``key`` bytes and ``even`` for
rounding up to an even number:

- a page has 16 bytes of header and 2 bytes for each node;
- a node of a leaf takes ``even(8 + key + value)`` bytes. If ``8 + key + value`` is more than
  ``((psize - 16) / 2 & ~1) - 2``, the value goes to overflow pages of its own, behind 16 bytes,
  and the node keeps 8 bytes for their number;
- a node of a branch takes ``even(8 + key)`` bytes, the first ``8``;
- the leaf at the right edge that is full is split when the next record comes. With ``MDB_APPEND``
  the new leaf begins with that record; without, the last record of the full leaf moves to it. A
  branch that is full is always split as without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dsprep.core.packing import Tables
from dsprep.layout.laws.affine import Affine
from dsprep.layout.laws.base import LARGEST, Law, damaged
from dsprep.layout.laws.base import integer as bounded
from dsprep.layout.laws.follow import Follow

HEADER, NODE = 16, 8
MAX_KEY = 511
MAX_VALUE = (1 << 32) - 1
MOST_SIZES = 1 << 27
"""Values of different sizes that a law is for: their pages are added up in memory."""
_SLICE = 1 << 20


@dataclass(frozen=True)
class Shape:
    """Parameters that determine the offsets of sorted records.

    `psize` are the bytes per page, `key` and `value` those of every key and value (of the smallest
    value where they differ); `append` is whether the records were put with ``MDB_APPEND``, `named`
    whether they are in a named database.
    """

    psize: int
    key: int
    value: int
    append: bool
    named: bool

    @cached_property
    def node_max(self) -> int:
        """Bytes of a node above which its value goes to overflow pages."""
        return ((self.psize - HEADER) // 2 & ~1) - 2

    @cached_property
    def possible(self) -> bool:
        """True if LMDB could have written this."""
        return NODE + self.key + 8 <= self.node_max

    @cached_property
    def big(self) -> bool:
        """True if values are on overflow pages."""
        return NODE + self.key + self.value > self.node_max

    @cached_property
    def node(self) -> int:
        """Bytes of a leaf's node, without its pointer."""
        return (NODE + self.key + (8 if self.big else self.value)) + 1 & ~1

    @cached_property
    def leaf(self) -> int:
        """Records that fill a leaf; at least 2."""
        return (self.psize - HEADER) // (self.node + 2)

    @cached_property
    def branch(self) -> int:
        """Children that fill a branch; at least 3."""
        return 1 + (self.psize - HEADER - NODE - 2) // ((NODE + self.key + 1 & ~1) + 2)

    @cached_property
    def step(self) -> int:
        """Records that a leaf keeps once the next one has begun."""
        return self.leaf if self.append else self.leaf - 1

    @cached_property
    def inside(self) -> int:
        """Offset of the first node's value in a leaf page, if values are there."""
        return self.psize - self.node + NODE + self.key

    def to_json(self) -> dict[str, Any]:
        """Return the parameters of a law, without the value's bytes, which its lengths state."""
        return {"psize": self.psize, "key": self.key, "append": self.append, "named": self.named}

    def words(self) -> str:
        """Return the shape for a person."""
        where = "on overflow pages" if self.big else "in the leaves"
        return (
            f"pages of {self.psize:,} bytes, keys of {self.key}, values {where}, "
            f"{self.leaf:,} records a leaf, {self.branch:,} pages a branch, "
            f"{'with' if self.append else 'without'} MDB_APPEND"
        )


def overflow(shape: Shape, lengths: Law) -> Law:
    """Return the law of the bytes of all overflow pages of the records before each one."""
    if isinstance(lengths, Affine) and not lengths.stride:
        pages = (HEADER - 1 + shape.value) // shape.psize + 1 if shape.big else 0
        return Affine(lengths.count, 0, pages * shape.psize)
    return Follow(lengths, Affine(lengths.count, 0), HEADER, shape.psize)


def parse(json: Mapping[str, Any], count: int, tables: Tables, lengths: Law | None) -> Shape:
    """Return the shape in a sidecar, for values of these lengths.

    Raises `FormatError` if there is no such tree, or its offsets would not fit into int64.
    """
    psize = bounded(json, "psize", tables, 256, 1 << 15)
    key = bounded(json, "key", tables, 1, MAX_KEY)
    if psize & (psize - 1):
        raise damaged("psize of a law is wrong", tables, "a power of two", psize)
    flags = [json.get(name, False) for name in ("append", "named")]
    if not all(isinstance(flag, bool) for flag in flags):
        raise damaged("append and named of a law are true or false", tables, found=flags)
    if lengths is None or lengths.count != count:
        raise damaged("a law needs the lengths of values, of which there are none", tables)
    even = isinstance(lengths, Affine) and not lengths.stride
    if not even and count > MOST_SIZES:
        raise damaged("a law is for fewer values of different sizes", tables, MOST_SIZES, count)
    low, high, total = extent(lengths)
    if count and not 0 <= low <= high <= MAX_VALUE:
        raise damaged("values of such lengths are in no LMDB", tables, f"0 to {MAX_VALUE}", low)
    shape = Shape(psize, key, low, *flags)
    if not shape.possible:
        raise damaged("keys of a law are too long for its pages", tables, found=key)
    if low != high and not shape.big:
        raise damaged("a law needs equal values, or all on overflow pages", tables)
    if total + float(count + 64) * 4 * psize > float(LARGEST):
        raise damaged("a law leaves all files", tables, found=json)
    return shape


def extent(lengths: Law) -> tuple[int, int, float]:
    """Return the smallest and the largest length, and about their sum."""
    n = lengths.count
    if not n:
        return 0, 0, 0.0
    if isinstance(lengths, Affine):
        ends = lengths.base, lengths.base + lengths.stride * (n - 1)
        return min(ends), max(ends), float(n) * max(map(abs, ends))
    low, high, total = LARGEST, -LARGEST, 0.0
    for start in range(0, n, _SLICE):
        some = lengths.span(start, min(n, start + _SLICE))
        low, high = min(low, int(some.min())), max(high, int(some.max()))
        total += float(np.abs(some).astype(float).sum())
    return low, high, total
