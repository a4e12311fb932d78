"""Writes groups to LMDB: their values one behind another, or each as one value.

LMDB decides where values lie, so groups begin at pages, not at stripes. Where every sample is a
value of its own, a group is all from the header of its first value's pages (or from its first leaf)
to the end of its last value: the tree's pages lie between the values. (Where some values are small
enough for leaves and others are not, a leaf lies behind all large values of its samples, also those
of other groups, so ranges overlap; one value per group avoids that.) Its places and its sum are
found in the finished file, which is read once more for that. Where a group is one value, its sum
is taken while it is in memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from dsprep.digests import crc32c, read_crc32c
from dsprep.formats.base import GroupWriter, State
from dsprep.formats.lmdb.extents import Found, find
from dsprep.formats.lmdb.group_values import Packing, capacities
from dsprep.formats.lmdb.index import build
from dsprep.formats.lmdb.keys import Keys
from dsprep.formats.lmdb.pages import HEADER, Pages
from dsprep.formats.lmdb.tree import PSIZE
from dsprep.formats.lmdb.values import MAX_VALUE, total_lengths
from dsprep.formats.lmdb.writer import LmdbWriter, Piece
from dsprep.grouping import Grouping
from dsprep.laws import Explicit, affine
from dsprep.layout.model import Blocks, Groups
from dsprep.schema import Arena, Batch, Field, Ints, Schema

READ = 1 << 20
"""Bytes that are read back at a time."""
THREADS = 2
"""Threads that read back; more wait for each other's turn at Python."""


class LmdbGroupWriter(LmdbWriter, GroupWriter):
    """An LMDB file of one value per sample, in groups.

    Parameters
    ----------
    path
        The file itself.
    inside
        The file below the path of the dataset: empty if that is the file.
    schema, grouping, keys
        What is written: groups of samples of `schema` under these keys, one for each sample.
    state
        From `checkpoint`, to continue.
    """

    def __init__(
        self,
        path: Path,
        inside: str,
        schema: Schema,
        grouping: Grouping,
        keys: Keys,
        state: State | None,
    ) -> None:
        super().__init__(path, schema, int(grouping.edges[-1]), keys, state)
        self._grouping, self._inside = grouping, inside

    def groups(self) -> Groups:
        """Return where the groups lie; see `GroupWriter.groups`."""
        with _places(self._path) as found:
            begins, ends = ranges_of(found, self._grouping.edges)
            sums = read_crcs(found.pages.fd, begins, ends, self._path)
        return describe(self._grouping, begins, ends, sums, self._inside)


class LmdbGroupValuesWriter(LmdbWriter, GroupWriter):
    """An LMDB file of one value per group; see `group_values`.

    Parameters
    ----------
    path, inside, schema, grouping, state
        As for `LmdbGroupWriter`.
    keys
        One for each group.
    """

    whole = True

    def __init__(
        self,
        path: Path,
        inside: str,
        schema: Schema,
        grouping: Grouping,
        keys: Keys,
        state: State | None,
    ) -> None:
        self._packing = Packing(schema)
        sizes = self._packing.sizes(grouping)
        super().__init__(path, value_schema(self._packing, sizes), grouping.count, keys, state)
        self._grouping, self._inside = grouping, inside
        self._capacities = capacities(grouping)
        self._sums = np.full(grouping.count, -1, np.int64)

    def encode(self, batch: Batch, start: int, arena: Arena) -> Piece:
        """Return the value of the group that begins at sample `start`."""
        if not len(next(iter(batch.values()), ())):
            return self._piece([], 0, arena)
        g = self._grouping.of(start)
        parts = self._packing.parts(batch, start, int(self._capacities[g]), arena)
        nbytes = int(total_lengths(parts)[0])
        if nbytes > MAX_VALUE:
            self._packing.refuse(g, nbytes)
        crc = 0
        for part in parts:
            crc = crc32c(part.data, crc)
        self._sums[g] = crc
        return self._piece(parts, g, arena)

    def groups(self) -> Groups:
        """Return where the groups lie; see `GroupWriter.groups`."""
        with _places(self._path) as found:
            begins, ends = found.offsets, found.offsets + found.lengths
            old = np.flatnonzero(self._sums < 0)
            self._sums[old] = read_crcs(found.pages.fd, begins[old], ends[old], self._path)
        return describe(self._grouping, begins, ends, self._sums, self._inside)


def value_schema(packing: Packing, sizes: Ints) -> Schema:
    """Return the schema of values of these sizes, as the writer of single values takes it."""
    if packing.ragged or not len(sizes) or bool((sizes != sizes[0]).any()):
        return Schema((Field.opaque("value"),))
    return Schema((Field("value", np.dtype(np.uint8), (int(sizes[0]),)),))


@contextmanager
def _places(path: Path) -> Iterator[Found]:
    """Find all values of a finished file, and keep it open."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pages = Pages(fd, path)
        index = build(pages, pages.meta.main, "key", ())
        yield find(pages, index, None)
    finally:
        os.close(fd)


def ranges_of(found: Found, edges: Ints) -> tuple[Ints, Ints]:
    """Return where groups of values begin and end: int64, shape ``(groups,)`` each."""
    inside = found.offsets % PSIZE
    # A value right behind a page's header is on overflow pages of its own; leaves have pointers.
    begins = found.offsets - np.where(inside == HEADER, HEADER, inside)
    ends = found.offsets + found.lengths
    if len(edges) == 1:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    starts = edges[:-1]
    return np.minimum.reduceat(begins, starts), np.maximum.reduceat(ends, starts)


def read_crcs(fd: int, begins: Ints, ends: Ints, where: object) -> Ints:
    """Return the CRC-32Cs of the bytes ``begins[g] .. ends[g]`` of a file."""

    def one(place: tuple[int, int]) -> int:
        return read_crc32c(fd, *place, where)

    with ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(one, zip(begins.tolist(), ends.tolist(), strict=True))
        return np.fromiter(found, np.int64, len(begins))


def describe(grouping: Grouping, begins: Ints, ends: Ints, sums: Ints, path: str) -> Groups:
    """Return the groups as they are described in a sidecar."""
    lengths = ends - begins
    return Groups(
        max(1, grouping.samples),
        Blocks(
            affine.fit(begins) or Explicit(begins),
            affine.fit(lengths) or Explicit(lengths),
            path,
        ),
        Explicit(sums),
        None if grouping.even else Explicit(grouping.edges[:-1].copy()),
    )
