"""Writing groups with compression: the size of a group is known when it has been encoded.

A piece is a whole group. Groups are stored back to back in the order of their samples. One begins
at a multiple of the stripe size where all that is skipped for it stays below 1/50 of the file.

The offsets, sizes and checksums of the groups are kept in a working file beside the output:
a checkpoint then has only how far it reaches, however many groups there are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from typing_extensions import override

from dsprep.core.groups import Grouping, round_up
from dsprep.core.schema import Arena, Batch, Ints, Schema
from dsprep.core.spans import offsets_of
from dsprep.errors import FormatError, UnsupportedError
from dsprep.formats.base import State
from dsprep.formats.options import WriteOptions
from dsprep.formats.zarr.documents import encode_file, encoder
from dsprep.formats.zarr.group_plan import PADDING
from dsprep.formats.zarr.groups import GroupStore, local_header
from dsprep.formats.zarr.plan import LARGEST
from dsprep.formats.zarr.writer import Piece
from dsprep.storage.checksums import CRC32, CRC32C
from dsprep.storage.ranges import pread_into, pwrite_all
from dsprep.storage.trees import remove


@dataclass
class PackedPiece(Piece):
    """The samples of one group, encoded.

    `parts` are, by track, what is stored in the group's range, back to back; `heads` right before.
    """

    group: int = 0
    parts: list[list[bytes]] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)


class PackedGroups(GroupStore):
    """See the module."""

    whole = True

    def __init__(
        self,
        path: Path,
        schema: Schema,
        grouping: Grouping,
        options: WriteOptions,
        state: State | None,
    ) -> None:
        super().__init__(path, schema, grouping, options, state)
        self._index = path.with_name(path.name + ".chunks")
        tracks = self.grid.tracks
        self._encode = [encoder(options.compress, plan) for plan in self.arrays]
        self._first: dict[int, Ints] = {}
        for number in (p.number for t in tracks for p in t.slots):
            self._first[number] = offsets_of(self.grid.chunks(number))
            self.chunks[number] = np.zeros((3, int(self._first[number][-1])), np.int64)
        self.starts = [np.zeros(grouping.count, np.int64) for _ in tracks]
        self.used = self.ends = [np.zeros(grouping.count, np.int64) for _ in tracks]
        self._ending = [[self.grid.front, 0] for _ in tracks]
        if state is None:
            remove(self._index)
        else:
            self._ending = [list(map(int, pair)) for pair in state["ending"]]
            self._continue()

    # --- pieces --------------------------------------------------------------------------------

    @override
    def encode(self, batch: Batch, start: int, arena: Arena) -> PackedPiece:
        plain = super().encode(batch, start, arena)
        piece = PackedPiece(start, plain.count, group=self.grouping.of(start))
        if not piece.count:
            return piece
        piece.rows = {n: plain.rows[n] for n in self.grid.ordinary}
        for i, track in enumerate(self.grid.tracks):
            parts: list[bytes] = []
            for n in (slot.number for slot in track.slots):
                table, first = self.chunks[n], int(self._first[n][piece.group])
                encoded = encode_file(plain.rows[n], self.arrays[n], self._encode[n])
                for number, chunk in enumerate(map(bytes, encoded), first):
                    table[1, number] = len(chunk)
                    if self.grid.zipped:
                        parts.append(self._header(n, number, chunk))
                    parts.append(chunk)
            piece.heads.append(parts.pop(0) if self.grid.zipped else b"")
            piece.parts.append(parts)
            if i == 0:
                crc = 0
                for part in parts:
                    crc = CRC32C.combine(crc, CRC32C.of(part), len(part))
                self.crcs[piece.group] = crc
        return piece

    def _header(self, number: int, chunk: int, data: bytes) -> bytes:
        """Return the local header of a chunk, whose sum is noted."""
        if len(data) > LARGEST:
            raise UnsupportedError(
                "zarr: 4 GiB are the most that a member of a ZIP file holds here",
                where=f"field {self.arrays[number].field.name}",
                found=f"{len(data)} bytes in a group",
                fix="choose smaller groups, or a directory store",
            )
        crc = CRC32.of(data)
        self.chunks[number][2, chunk] = crc
        return local_header(self.key(number, chunk), len(data), crc)

    @override
    def reserve(self, piece: PackedPiece) -> None:
        # Behind the group before.
        for i, (parts, head) in enumerate(zip(piece.parts, piece.heads, strict=True)):
            track = self.grid.tracks[i]
            if not self.grid.zipped and piece.group % track.groups == 0:
                self._ending[i] = [0, 0]
            stop, padding = self._ending[i]
            at = stop + len(head)
            begin = round_up(at, self.grouping.align)
            if (padding + begin - at) * PADDING > begin:
                begin = at
            self._ending[i] = [begin + sum(map(len, parts)), padding + begin - at]
            self.starts[i][piece.group], self.ends[i][piece.group] = begin, self._ending[i][0]
            chunks = iter(begin + offsets_of(np.array([len(p) for p in parts], np.int64)))
            for n in (slot.number for slot in track.slots):
                for number in range(*self._first[n][piece.group : piece.group + 2]):
                    self.chunks[n][0, number] = next(chunks)
                    if self.grid.zipped:
                        next(chunks)  # the header of the next one, or the end
        self.samples = piece.start + piece.count

    @override
    def write(self, piece: PackedPiece) -> None:
        if not piece.count:
            return
        for number, rows in piece.rows.items():
            self.write_rows(number, piece.start, rows)
        for i, track in enumerate(self.grid.tracks):
            with self.files.opened(self.track_file(track, piece.group)) as fd:
                head = piece.heads[i]
                begin = int(self.starts[i][piece.group])
                pwrite_all(fd, [head, *piece.parts[i]], begin - len(head))
        for known, at in self._known(piece.group):
            with self.files.opened(self._index) as fd:
                pwrite_all(fd, [np.ascontiguousarray(known)], at)

    # --- what is known of groups ---------------------------------------------------------------

    def _known(self, group: int, last: int = -1) -> Iterator[tuple[Ints, int]]:
        """Yield what is known of groups ``group .. last``, and its offset in the working file."""
        last = group + 1 if last < 0 else last
        at = 0
        for column in (self.crcs, *self.starts, *self.ends):
            yield column[group:last], at + 8 * group
            at += column.nbytes
        for n, first in self._first.items():
            some = slice(int(first[group]), int(first[last]))
            for column in self.chunks[n]:
                yield column[some], at + 8 * some.start
                at += column.nbytes

    def _continue(self) -> None:
        """Recall what is known of the groups before the checkpoint; cut off what is behind."""
        done = int(np.searchsorted(self.grouping.edges, self.samples))
        if done and not self._index.exists():
            raise FormatError(
                "the unfinished output lacks its working file",
                where=self._index,
                fix="start again with --restart",
            )
        with self.files.opened(self._index, access=os.O_RDWR) as fd:
            for column, at in self._known(0, done):
                if column.size:
                    pread_into(fd, column.view(np.uint8), at, self._index)
        for i, track in enumerate(self.grid.tracks):
            end = int(self.ends[i][done - 1]) if done else self.grid.front
            self.cut(track, max(0, done - 1), end)

    def complete_groups(self) -> None:
        """Nothing is left to do: every piece was a whole group."""

    # --- durability ----------------------------------------------------------------------------

    @override
    def checkpoint(self) -> State:
        return {**super().checkpoint(), "ending": [list(pair) for pair in self._ending]}

    @override
    def clean(self) -> None:
        remove(self._index)
