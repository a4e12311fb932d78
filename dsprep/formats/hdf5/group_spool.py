"""Compressed groups: their sizes are known only when they are there.

Until then the groups are appended to two files in the folder ``PATH.spool``:

``data``
    Group after group; within a group one encoded chunk for each part.
``groups``
    For each group the bytes of each of its chunks, and their CRC-32C together, as int64.

`PackedGroups.finish` makes the HDF5 file from this folder only, so it can be killed and repeated.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dsprep.core.checksums import combine, crc32c
from dsprep.core.schema import Arena, Array, Batch, Ints
from dsprep.core.storage import Buffer, close, pread_into, pwrite_all, remove, sync
from dsprep.errors import TargetError
from dsprep.formats.base import GroupWriter, State
from dsprep.formats.hdf5.allocate import find, place, together
from dsprep.formats.hdf5.chunks import encode_chunk
from dsprep.formats.hdf5.group_plan import GroupedFile, Part
from dsprep.formats.hdf5.group_rows import rows_of
from dsprep.formats.hdf5.group_sums import Sums
from dsprep.formats.hdf5.group_writer import told
from dsprep.layout.model import Groups

_INT = np.dtype("<i8")


@dataclass(eq=False)
class _Piece:
    """A group, ready to be appended; `PackedGroups.reserve` gives it its place."""

    group: int
    chunks: Sequence[Buffer]
    row: Array
    offset: int = -1


class PackedGroups(GroupWriter):
    """Writes groups of any fields, compressed one by one."""

    whole = True

    def __init__(self, path: Path, file: GroupedFile, state: State | None) -> None:
        self._path, self._file = path, file
        self._folder = Path(f"{path}.spool")
        self._done, self._nbytes = 0, 0
        self._data, self._index = -1, -1
        self._found: Groups | None = None
        if state is None:
            remove(self._folder)
            self._folder.mkdir(parents=True)
        else:
            self._done, self._nbytes = int(state["groups"]), int(state["bytes"])
        self._open()

    def _open(self) -> None:
        """Open the spool, and cut off what an interrupted run wrote after its checkpoint."""
        flags = os.O_RDWR | os.O_CREAT
        wanted = self._nbytes, self._done * (len(self._file.parts) + 1) * _INT.itemsize
        try:
            self._data = os.open(self._folder / "data", flags, 0o666)
            self._index = os.open(self._folder / "groups", flags, 0o666)
            sizes = os.fstat(self._data).st_size, os.fstat(self._index).st_size
        except FileNotFoundError:
            sizes = (-1, -1)
        if sizes[0] < wanted[0] or sizes[1] < wanted[1]:
            self.close()
            raise TargetError(
                "the samples written so far are gone",
                where=self._folder,
                fix="start again with --restart",
            )
        for fd, size, want in zip((self._data, self._index), sizes, wanted, strict=True):
            if size > want:
                os.ftruncate(fd, want)

    # --- while the samples come ---

    def encode(self, batch: Batch, start: int, arena: Arena) -> _Piece:
        """Return a group as encoded chunks."""
        group = self._file.grouping.of(start)
        rows = rows_of(self._file, batch, group, arena)
        chunks = [_encoded(p, r) for p, r in zip(self._file.parts, rows, strict=True)]
        row, crc = np.zeros(len(chunks) + 1, _INT), 0
        for k, chunk in enumerate(chunks):
            row[k] = len(chunk)
            crc = combine(crc, crc32c(chunk), len(chunk))
        row[-1] = crc
        return _Piece(group, chunks, row)

    def reserve(self, piece: _Piece) -> None:
        """Append the group to the spool."""
        piece.offset = self._nbytes
        self._done += 1
        self._nbytes += int(piece.row[:-1].sum())

    def write(self, piece: _Piece) -> None:
        """Write the group at its place in the spool."""
        pwrite_all(self._data, piece.chunks, piece.offset)
        pwrite_all(self._index, [piece.row], piece.group * piece.row.nbytes)

    def checkpoint(self) -> State:
        """Return the length of the spool."""
        return {"groups": self._done, "bytes": self._nbytes}

    def sync(self) -> None:
        """Make the spool durable."""
        sync(self._data, data=True)
        sync(self._index, data=True)

    def close(self) -> None:
        """Close the spool."""
        both, self._data, self._index = (self._data, self._index), -1, -1
        close(*(fd for fd in both if fd >= 0))

    # --- when all are there ---

    def finish(self) -> None:
        """Make the HDF5 file from the spool."""
        table = np.zeros((self._file.grouping.count, len(self._file.parts) + 1), _INT)
        pread_into(self._index, table, 0, self._folder / "groups")
        place(self._path, self._file, lambda: self._groups(table[:, :-1]))
        if self.durable:
            fd = os.open(self._path, os.O_RDWR)
            try:
                sync(fd)
            finally:
                close(fd)
        self._found = self._told(table[:, -1])
        self.close()

    def _groups(self, sizes: Ints) -> Iterator[list[memoryview]]:
        """Yield the groups in order, in memory that the next one uses again."""
        block = np.empty(int(sizes.sum(axis=1).max(initial=0)), np.uint8)
        at = 0
        for row in sizes:
            ends = np.cumsum(row)
            nbytes = int(ends[-1]) if len(ends) else 0
            pread_into(self._data, block[:nbytes], at, self._folder / "data")
            cuts = [0, *ends.tolist()]
            view = block.data
            yield [view[a:b] for a, b in itertools.pairwise(cuts)]
            at += nbytes

    def _told(self, crcs: Ints) -> Groups:
        addresses, sizes = find(self._path, self._file)
        offsets = addresses.min(axis=0, initial=1 << 62)
        lengths = (addresses + sizes).max(axis=0, initial=0) - offsets
        if not len(addresses):
            offsets, lengths = np.zeros_like(crcs), np.zeros_like(crcs)
        if not together(addresses, sizes):  # what lies between the chunks is not in the sums
            sums = Sums(offsets, lengths, np.diff(self._file.grouping.edges))
            sums.complete(self._path)
            crcs = sums.crcs
        return told(self._file, offsets, lengths, np.ascontiguousarray(crcs))

    def groups(self) -> Groups:
        """Return where the groups lie."""
        if self._found is None:
            raise RuntimeError("groups are asked for before finish")
        return self._found

    def clean(self) -> None:
        """Remove the spool."""
        remove(self._folder)


def _encoded(part: Part, rows: Array) -> bytes:
    """Return the chunk of a group; the tables of ragged fields are not compressed."""
    flat = rows.reshape(-1).view(np.uint8)
    if part.role in ("rows", "values"):
        return bytes(encode_chunk(flat, part.plan, part.chunk))
    return flat.tobytes() + bytes(part.nbytes - len(flat))
