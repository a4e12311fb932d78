"""Writing groups with compression: the size of a group is known when it has been encoded.

A piece is a whole group. Groups lie one behind another in the order of their samples. One begins
at a multiple of the stripe size where all that is skipped for it stays below 1/50 of the file.

What is known of each group, places, sizes and sums, is kept in a working file beside the output:
a checkpoint then has only how far it reaches, however many groups there are.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dsprep.core.checksums import CRC32, CRC32C
from dsprep.core.groups import Grouping, round_up
from dsprep.core.schema import Arena, Array, Batch, Ints, Schema
from dsprep.core.storage import pread_into, pwrite_all, remove
from dsprep.errors import FormatError, UnsupportedError
from dsprep.formats.base import State, WriteOptions
from dsprep.formats.zarr import group_zip
from dsprep.formats.zarr.codecs import encode_file, encoder
from dsprep.formats.zarr.files import stored_rows
from dsprep.formats.zarr.group_plan import PADDING, Track
from dsprep.formats.zarr.group_store import Chunks, GroupStore


@dataclass
class Piece:
    """The samples of one group.

    Attributes
    ----------
    start, count
        The first sample, and how many.
    group
        Theirs.
    rows
        By number of an ordinary array: uint8 of shape ``(n, row_nbytes)``.
    parts
        By track: what lies in the group's range, one behind another.
    heads
        By track: bytes right before it.
    """

    start: int
    count: int
    group: int
    rows: dict[int, Array]
    parts: list[list[bytes]]
    heads: list[bytes]


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
        self._index = path.with_name(path.name + ".sizes")
        tracks, arrays = self._grid.tracks, self._grid.arrays
        self._encode = [encoder(options.compress, plan) for plan in arrays]
        numbers = [p.number for t in tracks for p in t.places]
        self._first = {
            n: np.concatenate([[0], np.cumsum(self._grid.chunks(n))]).astype(np.int64)
            for n in numbers
        }
        self._sizes = {n: np.zeros(int(f[-1]), np.int64) for n, f in self._first.items()}
        self._members = {n: np.zeros(int(f[-1]), np.int64) for n, f in self._first.items()}
        self._starts = np.zeros((len(tracks), grouping.count), np.int64)
        self._stops = np.zeros((len(tracks), grouping.count), np.int64)
        self._ending = [[self._grid.front, 0] for _ in tracks]
        if state is None:
            remove(self._index)
        else:
            self._ending = [list(map(int, pair)) for pair in state["ending"]]
            self._continue()

    # --- pieces --------------------------------------------------------------------------------

    def encode(self, batch: Batch, start: int, arena: Arena) -> Piece:
        """See `base.Writer.encode`."""
        count = len(next(iter(batch.values())))
        piece = Piece(start, count, self._grouping.of(start), {}, [], [])
        if not count:
            return piece
        rows = {}
        for number, plan in enumerate(self._grid.arrays):
            column = batch[plan.field.name]
            assert isinstance(column, np.ndarray)  # the plan refuses ragged fields
            rows[number] = stored_rows(column, plan, arena)
        piece.rows = {n: rows[n] for n in self._grid.ordinary}
        for i, track in enumerate(self._grid.tracks):
            parts: list[bytes] = []
            for place in track.places:
                n = place.number
                first = int(self._first[n][piece.group])
                encoded = encode_file(rows[n], self._grid.arrays[n], self._encode[n])
                chunks = map(bytes, encoded)
                for number, chunk in enumerate(chunks, first):
                    self._sizes[n][number] = len(chunk)
                    if self._grid.zipped:
                        parts.append(self._header(n, number, chunk))
                    parts.append(chunk)
            piece.heads.append(parts.pop(0) if self._grid.zipped else b"")
            piece.parts.append(parts)
            if i == 0:
                crc = 0
                for part in parts:
                    crc = CRC32C.combine(crc, CRC32C.of(part), len(part))
                self._crcs[piece.group] = crc
        return piece

    def _header(self, number: int, chunk: int, data: bytes) -> bytes:
        """Return the local header of a chunk, whose sum is noted."""
        if len(data) > group_zip.LARGEST:
            raise UnsupportedError(
                "zarr: 4 GiB are the most that a member of a ZIP file holds here",
                where=f"field {self._grid.arrays[number].field.name}",
                found=f"{len(data)} bytes in a group",
                fix="choose smaller groups, or a directory store",
            )
        crc = CRC32.of(data)
        self._members[number][chunk] = crc
        return group_zip.local_header(self._key(number, chunk), len(data), crc)

    def reserve(self, piece: Piece) -> None:
        """See `base.Writer.reserve`: behind the group before."""
        for i, (parts, head) in enumerate(zip(piece.parts, piece.heads, strict=True)):
            if not self._grid.zipped and piece.group % self._grid.tracks[i].groups == 0:
                self._ending[i] = [0, 0]
            stop, padding = self._ending[i]
            at = stop + len(head)
            begin = round_up(at, self._grouping.align)
            if (padding + begin - at) * PADDING > begin:
                begin = at
            end = begin + sum(map(len, parts))
            self._ending[i] = [end, padding + begin - at]
            self._starts[i, piece.group], self._stops[i, piece.group] = begin, end
        self._samples = piece.start + piece.count

    def write(self, piece: Piece) -> None:
        """See `base.Writer.write`."""
        if not piece.count:
            return
        for number, rows in piece.rows.items():
            self._place_ordinary(number, piece.start, rows)
        for i, track in enumerate(self._grid.tracks):
            with self._files.opened(self._track_file(track, piece.group)) as fd:
                head = piece.heads[i]
                begin = int(self._starts[i, piece.group])
                pwrite_all(fd, [head, *piece.parts[i]], begin - len(head))
        for known, at in self._known(piece.group):
            with self._files.opened(self._index) as fd:
                pwrite_all(fd, [np.ascontiguousarray(known)], at)

    # --- what is known of groups ---------------------------------------------------------------

    def _known(self, group: int, last: int = -1) -> Iterator[tuple[Ints, int]]:
        """Yield what is known of groups ``group .. last``, and its place in the working file."""
        last = group + 1 if last < 0 else last
        at = 0
        for column in (self._crcs, *self._starts, *self._stops):
            yield column[group:last], at + 8 * group
            at += column.nbytes
        for n, first in self._first.items():
            some = slice(int(first[group]), int(first[last]))
            for column in (self._sizes[n], self._members[n]):
                yield column[some], at + 8 * some.start
                at += column.nbytes

    def _continue(self) -> None:
        """Recall what is known of the groups before the checkpoint; cut off what is behind."""
        done = int(np.searchsorted(self._grouping.edges, self._samples))
        if done and not self._index.exists():
            raise FormatError(
                "the unfinished output lacks its working file",
                where=self._index,
                fix="start again with --restart",
            )
        with self._files.opened(self._index) as fd:
            for column, at in self._known(0, done):
                if column.size:
                    pread_into(fd, column.view(np.uint8), at, self._index)
        for i, track in enumerate(self._grid.tracks):
            file, inside = divmod(done, track.groups)
            end = self._ending[i][0] if inside or self._grid.zipped else 0
            for later in itertools.count(file):
                path = self._path
                if not self._grid.zipped:
                    path = path / self._key(track.places[0].number, later)
                if not path.exists():
                    break
                os.truncate(path, end)
                if self._grid.zipped:
                    break
                end = 0

    def _complete_groups(self) -> None:
        """Nothing is left to do: every piece was a whole group."""

    def _at(self, track: Track) -> int:
        return self._grid.tracks.index(track)

    def _ends(self, track: Track) -> Ints:
        ends: Ints = self._stops[self._at(track)]
        return ends

    def _chunks(self, track: Track, number: int) -> Chunks:
        """Return the chunks; those of a group follow one another, headers between."""
        groups = np.repeat(np.arange(self._grouping.count), self._grid.chunks(number))
        before = np.zeros(self._grouping.count, np.int64)
        for place in track.places:
            n, sizes = place.number, self._sizes[place.number]
            taken = sizes + self._header_sizes(n)
            ahead = np.concatenate([[0], np.cumsum(taken)])
            if n == number:
                break
            before += ahead[self._first[n][1:]] - ahead[self._first[n][:-1]]
        heads = self._header_sizes(number)
        lead = self._header_sizes(track.places[0].number)[self._first[track.places[0].number][:-1]]
        begin = self._starts[self._at(track)] - lead + before
        within = ahead[:-1] - ahead[self._first[number][:-1]][groups]
        return Chunks(begin[groups] + within + heads, sizes, self._members[number])

    def _header_sizes(self, number: int) -> Ints:
        """Return the bytes of the local header of each chunk."""
        count = len(self._sizes[number])
        if not self._grid.zipped:
            return np.zeros(count, np.int64)
        digits = np.char.str_len(np.arange(count).astype(str)) if count else np.zeros(0)
        one = group_zip.header_nbytes(self._key(number, 0)) - 1
        return np.asarray(one + digits, np.int64)

    def _spans(self) -> tuple[Ints, Ints]:
        if not self._grid.tracks:
            nothing = np.zeros(self._grouping.count, np.int64)
            return nothing, nothing
        return self._starts[0], self._stops[0] - self._starts[0]

    # --- durability ----------------------------------------------------------------------------

    def checkpoint(self) -> State:
        """See `base.Writer.checkpoint`."""
        return {**super().checkpoint(), "ending": [list(pair) for pair in self._ending]}

    def clean(self) -> None:
        """See `base.Writer.clean`."""
        remove(self._index)
