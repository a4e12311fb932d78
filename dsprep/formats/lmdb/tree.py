"""The place of every page of a new LMDB file, decided while the samples arrive: no I/O here.

The tree is the one that LMDB itself builds from sorted keys with ``MDB_APPEND``: a leaf takes
nodes until the next one does not fit, and a branch that would get child B + 1 keeps B - 1 and
leaves 2 to its new neighbour, where B children fill a page. The pages are in the order of
``mdb_copy -c``: the overflow pages of a leaf's values in key order, the leaf, and after the last
child of a branch the branch.

A branch with B - 1 children is therefore written at once only if at least two more children are to
come. That is known from the number of samples when all values have one size, and from the rest of
the piece otherwise. Where it cannot be known (values of many sizes, the last leaves of the output,
and a piece that ends among them) the branch is written when its child B + 1 is: the tree is the
same, this one page is later than in a copy by LMDB.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

import numpy as np

from dsprep.core.schema import Ints
from dsprep.core.spans import offsets_of
from dsprep.formats.lmdb.pages import EMPTY, HEADER, NODE, Database

PSIZE = 4096
"""Bytes per page: that of nearly all machines, and readable on every one."""
ROOM = PSIZE - HEADER
NODE_MAX = ((ROOM // 2) & ~1) - 2
"""Bytes of a node above which its value goes to overflow pages."""

Child = tuple[int, int]
"""A page, and the number of the first sample below it."""

Branch = tuple[int, list[Child]]
"""A branch page to write, and its children."""


def node_sizes(key: int, sizes: Ints) -> tuple[Ints, Ints]:
    """Return ``(node sizes, overflow pages)`` for values of these sizes."""
    nbytes = NODE + key + sizes
    big = nbytes > NODE_MAX
    nodes = (np.where(big, NODE + key + 8, nbytes) + 1) & ~1
    return nodes, np.where(big, (HEADER - 1 + sizes) // PSIZE + 1, 0)


def cut(sizes: Ints, used: int) -> Ints:
    """Return at which nodes a new leaf begins: int64, shape ``(k,)``.

    `sizes` are the bytes of the nodes to come, `used` those that the open leaf has used, pointers
    included. Leaf j ends before node ``ends[j]``; the last nodes stay open.
    """
    n = len(sizes)
    if not n:
        return np.zeros(0, np.int64)
    if (sizes == sizes[0]).all():
        each = int(sizes[0]) + 2
        return np.arange((ROOM - used) // each, n, ROOM // each)
    filled = offsets_of(sizes + 2)
    end = int(np.searchsorted(filled, ROOM - used, "right")) - 1
    full = (np.searchsorted(filled, filled + ROOM, "right") - 1).tolist()  # if a leaf begins there
    ends: list[int] = []
    while end < n:
        ends.append(end)
        end = full[end]
    return np.array(ends, np.int64)


@dataclass
class Tree:
    """The right edge of a tree that grows, with keys of `key` bytes.

    `levels` are the pages that have no parent yet: leaves, their parents, and so on. `next_page`
    and all pages above it are not given away yet.
    """

    key: int
    next_page: int = 2
    levels: list[list[Child]] = field(default_factory=lambda: [[]])
    leaf_pages: int = 0
    branch_pages: int = 0
    overflow_pages: int = 0

    @property
    def fanout(self) -> int:
        """The children that fill a branch page: B."""
        return 1 + (ROOM - NODE - 2) // ((NODE + self.key + 1 & ~1) + 2)

    def assign_pages(
        self, runs: Ints, ends: Ints, firsts: Ints, to_come: int, last: bool
    ) -> tuple[Ints, Ints, list[Branch]]:
        """Give pages to the next samples and to the leaves and branches that they complete.

        `runs` are the overflow pages of each value; leaf j ends before sample ``ends[j]`` of these,
        and its first sample is number ``firsts[j]``. At least `to_come` leaves follow, none if the
        output ends here (`last`).

        Returns the first overflow page of each value, the page of each leaf, and the branches.
        """
        base, k = self.next_page, len(ends)
        before = offsets_of(runs)
        extra = np.zeros(k + 1, np.int64)  # branches before leaf j
        leaves = base + before[ends] + np.arange(k)
        branches: list[Branch] = []
        j = 0
        while j < k:
            open_ = self.levels[0]
            full = self.fanout - 1 if len(open_) < self.fanout - 1 else self.fanout + 1
            stop = min(k, j + full - len(open_))
            extra[j:stop] = len(branches)
            leaves[j:stop] += len(branches)
            open_ += zip(leaves[j:stop].tolist(), firsts[j:stop].tolist(), strict=True)
            j = stop
            self.next_page = int(leaves[j - 1]) + 1
            self._settle(0, k - j + to_come, branches)
        if last and k:
            self._settle_last(branches)
        extra[k] = len(branches)
        self.next_page = base + int(before[-1]) + k + len(branches)
        self.leaf_pages += k
        self.branch_pages += len(branches)
        self.overflow_pages += int(before[-1])
        leaf_of = np.searchsorted(ends, np.arange(len(runs)), "right")
        return base + before[:-1] + leaf_of + extra[leaf_of], leaves, branches

    def _settle(self, level: int, to_come: int, branches: list[Branch]) -> None:
        """Close the branches that are complete, from those above `level` upwards."""
        for at in count(level):
            if at == len(self.levels):
                return
            size, full = len(self.levels[at]), self.fanout - 1
            leaves = 2  # at least so many are below the last two pages
            for _ in range(at):
                leaves = (leaves - 1) * full + 2
            sure = to_come >= leaves
            if not (size == full and sure) and size != self.fanout + 1:
                return
            self._close(at, full, branches)

    def _settle_last(self, branches: list[Branch]) -> None:
        """Close all branches, up to the root."""
        for at in count():
            if at == len(self.levels) - 1 and len(self.levels[at]) == 1:
                return
            self._close(at, len(self.levels[at]), branches)
            self._settle(at + 1, 0, branches)

    def _close(self, level: int, size: int, branches: list[Branch]) -> None:
        """Put a branch above the first `size` pages of `level`."""
        children = self.levels[level][:size]
        self.levels[level] = self.levels[level][size:]
        if level + 1 == len(self.levels):
            self.levels.append([])
        self.levels[level + 1].append((self.next_page, children[0][1]))
        branches.append((self.next_page, children))
        self.next_page += 1

    def database(self, entries: int) -> Database:
        """Return the record of the finished tree."""
        if not entries:
            return EMPTY
        return Database(
            pad=0,
            flags=0,
            depth=len(self.levels),
            branch_pages=self.branch_pages,
            leaf_pages=self.leaf_pages,
            overflow_pages=self.overflow_pages,
            entries=entries,
            root=self.levels[-1][0][0],
        )

    def to_json(self) -> dict[str, Any]:
        """Return the tree as it is now, as JSON; `from_json` is the inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, json: dict[str, Any]) -> Tree:
        """Return the tree that `to_json` wrote."""
        levels = [[(int(page), int(first)) for page, first in level] for level in json["levels"]]
        return cls(**{**json, "levels": levels})
