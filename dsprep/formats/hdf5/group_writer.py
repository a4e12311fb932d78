"""Groups without compression: every byte has its place before the first sample comes.

As in `dsprep.formats.hdf5.writer`, the library is closed while samples are written.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dsprep.core.checksums import pwrite_crc32c
from dsprep.core.schema import Arena, Array, Batch, Ints
from dsprep.core.storage import close, sync
from dsprep.formats.base import GroupWriter, State
from dsprep.formats.hdf5.allocate import allocate, find, regular
from dsprep.formats.hdf5.group_plan import GroupedFile
from dsprep.formats.hdf5.group_rows import rows_of
from dsprep.formats.hdf5.group_sums import Segment, Sums
from dsprep.layout.laws import Explicit
from dsprep.layout.model import Blocks, Groups


@dataclass(frozen=True, eq=False)
class _Piece:
    """Samples of one group, from its sample `at` on: one array per part."""

    group: int
    at: int
    samples: int
    rows: Sequence[Array]


class PlacedGroups(GroupWriter):
    """Writes groups of fixed and ragged fields without filters."""

    def __init__(self, path: Path, file: GroupedFile, state: State | None) -> None:
        self._path, self._file, self._fd = path, file, -1
        self.whole = file.schema.ragged
        if state is None:
            allocate(path, file)
        self._addresses, _ = find(path, file)
        self._offsets, self._lengths = ranges(file, self._addresses)
        # In a file whose groups do not lie as planned, other things may lie between the chunks.
        self._regular = regular(self._addresses, file)
        self._sums = Sums(self._offsets, self._lengths, np.diff(file.grouping.edges))
        self._fd = os.open(path, os.O_RDWR)

    def encode(self, batch: Batch, start: int, arena: Arena) -> _Piece:
        """Return the samples as contiguous arrays: mostly the columns themselves."""
        group = self._file.grouping.of(start)
        at = start - int(self._file.grouping.edges[group])
        samples = len(next(iter(batch.values())))
        return _Piece(group, at, samples, rows_of(self._file, batch, group, arena))

    def write(self, piece: _Piece) -> None:
        """Write the piece at its place."""
        segments = []
        for part, address, rows in zip(
            self._file.parts, self._addresses[:, piece.group].tolist(), piece.rows, strict=True
        ):
            offset = address + piece.at * part.row_nbytes
            segments.append(Segment(offset, rows.nbytes, pwrite_crc32c(self._fd, [rows], offset)))
        if self._regular:
            self._sums.add(piece.group, piece.samples, segments)

    def sync(self) -> None:
        """Make what has been written durable."""
        sync(self._fd, data=True)

    def finish(self) -> None:
        """See `Writer.finish`; the file has been complete since the last piece."""
        if self.durable:
            sync(self._fd)
        self._sums.complete(self._path)
        self.close()

    def groups(self) -> Groups:
        """Return where the groups lie."""
        return told(self._file, self._offsets, self._lengths, self._sums.crcs)

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close(fd)


def ranges(file: GroupedFile, addresses: Ints) -> tuple[Ints, Ints]:
    """Return the first byte of each group, and how many there are to the last one in use."""
    if not len(file.parts):
        empty = np.zeros(file.grouping.count, np.int64)
        return empty, empty
    used = np.array([p.used * p.row_nbytes for p in file.parts], np.int64)
    offsets: Ints = addresses.min(axis=0)
    ends = np.where(used > 0, addresses + used, offsets)
    lengths: Ints = ends.max(axis=0) - offsets
    return offsets, lengths


def told(file: GroupedFile, offsets: Ints, lengths: Ints, crcs: Ints) -> Groups:
    """Return the groups as a layout tells them."""
    blocks = Blocks(Explicit(offsets), Explicit(lengths))
    return Groups(file.grouping.samples, blocks, Explicit(crcs))
