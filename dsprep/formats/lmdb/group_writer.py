"""Writes groups to LMDB: their values one behind another, or each as one value.

LMDB decides where values lie, so groups begin at pages, not at stripes. Where every sample is a
value of its own, a group is all from the header of its first value's pages (or from its first leaf)
to the end of its last value: the tree's pages lie between the values. (Where some values are small
enough for leaves and others are not, a leaf lies behind all large values of its samples, also those
of other groups, so ranges overlap; one value per group avoids that.) Its places are found in the
finished file. Its sum is taken while large values are written; where values are small, or an
earlier run wrote them, the group is read once more for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np

from dsprep.core.checksums import Sums, pwrite_crc32c, read_crc32c
from dsprep.core.groups import Grouping, even
from dsprep.core.schema import Arena, Batch, Field, Ints, Schema
from dsprep.core.storage import Buffer, as_bytes
from dsprep.formats.base import GroupWriter, OpenOptions, State
from dsprep.formats.lmdb.group_values import Packing, capacities
from dsprep.formats.lmdb.keys import Keys
from dsprep.formats.lmdb.pages import HEADER
from dsprep.formats.lmdb.records import Records
from dsprep.formats.lmdb.recover import Found
from dsprep.formats.lmdb.tree import PSIZE
from dsprep.formats.lmdb.values import MAX_VALUE, total_lengths
from dsprep.formats.lmdb.writer import LmdbWriter, Piece
from dsprep.layout.laws import Explicit, affine
from dsprep.layout.model import Blocks, Groups

READ = 1 << 20
"""Bytes that are read back at a time."""
THREADS = 2
"""Threads that read back; more wait for each other's turn at Python."""


class _SummingWriter(LmdbWriter):
    """An LMDB file whose writer keeps the sums of what it writes, if all values are large.

    Parameters
    ----------
    path, schema, count, keys, state
        As for `LmdbWriter`.
    grouping
        The groups of values.
    lead
        Where in the first page of its first value a group begins.
    """

    def __init__(
        self,
        path: Path,
        schema: Schema,
        grouping: Grouping,
        keys: Keys,
        state: State | None,
        lead: int,
    ) -> None:
        super().__init__(path, schema, int(grouping.edges[-1]), keys, state)
        self._values_in, self._lead, self._sums = grouping, lead, Sums()

    def _put(self, piece: Piece, buffers: Sequence[Buffer], offset: int) -> None:
        """Write some of a piece's bytes, and keep their sums: apart what no group has."""
        if not piece.runs.all():
            super()._put(piece, buffers, offset)
            return
        group = self._values_in.of(piece.start)
        begin = int(piece.value_pages[0]) * PSIZE + self._lead
        end = int(piece.value_pages[-1]) * PSIZE + HEADER + int(piece.sizes[-1])
        for at, part in _cut(buffers, offset, (begin, end)):
            crc = pwrite_crc32c(self._fd, part, at)
            self._sums.add(group, at, sum(map(len, part)), crc)

    def _sums_of(self, fd: int, begins: Ints, ends: Ints) -> Ints:
        """Return the sum of each group; those not known are read."""
        places = zip(begins.tolist(), ends.tolist(), strict=True)
        known = [self._sums.of(g, *place) for g, place in enumerate(places)]
        sums = np.array([-1 if crc is None else crc for crc in known], np.int64)
        rest = np.flatnonzero(sums < 0)
        sums[rest] = read_crcs(fd, begins[rest], ends[rest], self._path)
        return sums


def _cut(
    buffers: Sequence[Buffer], offset: int, edges: tuple[int, int]
) -> Iterator[tuple[int, list[memoryview]]]:
    """Yield the buffers and where they go, cut where `edges` of the file are."""
    at, part, nbytes = offset, list[memoryview](), 0
    for buffer in buffers:
        view = as_bytes(buffer) if isinstance(buffer, np.ndarray) else memoryview(buffer)
        for edge in edges:
            here = edge - at - nbytes
            if 0 <= here < len(view):
                if nbytes + here:
                    yield at, [*part, view[:here]]
                at, part, nbytes, view = edge, [], 0, view[here:]
        part.append(view)
        nbytes += len(view)
    if nbytes:
        yield at, part


class LmdbGroupWriter(_SummingWriter, GroupWriter):
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
        super().__init__(path, schema, grouping, keys, state, lead=0)
        self._grouping, self._inside = grouping, inside

    def groups(self) -> Groups:
        """Return where the groups lie; see `GroupWriter.groups`."""
        with _opened(self._path) as records:
            begins, ends = ranges_of(records.found(), self._grouping.edges)
            sums = self._sums_of(records.file.fd, begins, ends)
        return describe(self._grouping, begins, ends, sums, self._inside)


class LmdbGroupValuesWriter(_SummingWriter, GroupWriter):
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
        schema, values = value_schema(self._packing, sizes), even(grouping.count, 1)
        super().__init__(path, schema, values, keys, state, lead=HEADER)
        self._grouping, self._inside = grouping, inside
        self._capacities = capacities(grouping)

    def encode(self, batch: Batch, start: int, arena: Arena) -> Piece:
        """Return the value of the group that begins at sample `start`."""
        if not len(next(iter(batch.values()), ())):
            return self._piece([], 0, arena)
        g = self._grouping.of(start)
        parts = self._packing.parts(batch, start, int(self._capacities[g]), arena)
        nbytes = int(total_lengths(parts)[0])
        if nbytes > MAX_VALUE:
            self._packing.refuse(g, nbytes)
        return self._piece(parts, g, arena)

    def groups(self) -> Groups:
        """Return where the groups lie; see `GroupWriter.groups`."""
        with _opened(self._path) as records:
            found = records.found()
            begins, ends = found.offsets, found.offsets + found.sizes
            sums = self._sums_of(records.file.fd, begins, ends)
        return describe(self._grouping, begins, ends, sums, self._inside)


def value_schema(packing: Packing, sizes: Ints) -> Schema:
    """Return the schema of values of these sizes, as the writer of single values takes it."""
    if packing.ragged or not len(sizes) or bool((sizes != sizes[0]).any()):
        return Schema((Field.opaque("value"),))
    return Schema((Field("value", np.dtype(np.uint8), (int(sizes[0]),)),))


def _opened(path: Path) -> closing[Records]:
    """Open a finished file and find all its values."""
    return closing(Records(path, path, OpenOptions(), survey=True))


def ranges_of(found: Found, edges: Ints) -> tuple[Ints, Ints]:
    """Return where groups of values begin and end: int64, shape ``(groups,)`` each."""
    inside = found.offsets % PSIZE
    # A value right behind a page's header is on overflow pages of its own; leaves have pointers.
    begins = found.offsets - np.where(inside == HEADER, HEADER, inside)
    ends = found.offsets + found.sizes
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
