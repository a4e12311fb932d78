"""Writing groups without compression: the place of every row is known before the first.

Pieces are parts of groups, of any size, and written in any order. The sums of a group are joined
from those of its pieces when the last one has come; then the local headers of a ZIP file's
members, which hold sums, are written. Groups of which an earlier run wrote a part are read back.
"""

from __future__ import annotations

import itertools
import os
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dsprep.core.checksums import CRC32, CRC32C, pwrite_crc32c
from dsprep.core.groups import Grouping
from dsprep.core.schema import Arena, Array, Batch, Ints, Ragged, Schema
from dsprep.core.storage import CALL_NBYTES, as_bytes, pwrite_all
from dsprep.errors import TargetError
from dsprep.formats.base import State, WriteOptions
from dsprep.formats.zarr import group_zip
from dsprep.formats.zarr.files import stored_rows
from dsprep.formats.zarr.group_plan import Place, Track
from dsprep.formats.zarr.group_store import Chunks, GroupStore, checksums, erase


class Sum(NamedTuple):
    """The sums of a range of a group: its place counts from the group's beginning."""

    at: int
    nbytes: int
    crc32c: int
    crc32: int


@dataclass
class Piece:
    """Consecutive samples of one group.

    Attributes
    ----------
    start, count
        The first sample, and how many.
    rows
        By number of the array: uint8 of shape ``(n, row_nbytes)``.
    counts
        By name of ragged field: rows of each sample, int64.
    first_row
        By name of ragged field: the row within the group where the piece begins.
    """

    start: int
    count: int
    rows: dict[int, Array]
    counts: dict[str, Array]
    first_row: dict[str, int] = field(default_factory=dict)


class PlacedGroups(GroupStore):
    """See the module."""

    def __init__(
        self,
        path: Path,
        schema: Schema,
        grouping: Grouping,
        options: WriteOptions,
        state: State | None,
    ) -> None:
        super().__init__(path, schema, grouping, options, state)
        self._rows = {f.name: 0 for f in schema if f.ragged}
        self._lock = threading.Lock()
        self._sums: dict[int, list[Sum]] = {}
        self._came: dict[int, int] = {}
        self._summed = np.zeros(grouping.count, bool)
        self._members = {
            n: np.zeros(int(self._grid.chunks(n).sum()), np.int64)
            for n in range(len(self._grid.arrays))
            if self._grid.zipped and n not in self._grid.ordinary
        }
        if state is not None:
            self._rows = {name: int(state["rows"][name]) for name in self._rows}
            for track in self._grid.tracks:
                self._forget(track)

    # --- pieces --------------------------------------------------------------------------------

    def encode(self, batch: Batch, start: int, arena: Arena) -> Piece:
        """See `base.Writer.encode`."""
        piece = Piece(start, len(next(iter(batch.values()))), {}, {})
        for number, plan in enumerate(self._grid.arrays):
            column = batch[plan.field.name]
            if plan.role in ("first", "count"):
                continue
            if isinstance(column, Ragged):
                piece.counts[plan.field.name] = column.lengths
                column = column.values
            piece.rows[number] = stored_rows(column, plan, arena)
        return piece

    def reserve(self, piece: Piece) -> None:
        """See `base.Writer.reserve`: values follow those of the same group."""
        group = self._grouping.of(piece.start)
        begins = piece.start == int(self._grouping.edges[group])
        for name, counts in piece.counts.items():
            piece.first_row[name] = 0 if begins else self._rows[name]
            self._rows[name] = piece.first_row[name] + int(counts.sum())
            if self._rows[name] > int(self._grouping.rows[name][group]):
                raise TargetError(
                    f"field {name} has more rows than were counted",
                    where=f"{self._path}, group {group}",
                    expected=int(self._grouping.rows[name][group]),
                    found=self._rows[name],
                    fix="the source has changed: begin again",
                )
        self._samples = piece.start + piece.count

    def checkpoint(self) -> State:
        """See `base.Writer.checkpoint`."""
        return {**super().checkpoint(), "rows": dict(self._rows)}

    def write(self, piece: Piece) -> None:
        """See `base.Writer.write`."""
        if not piece.count:
            return
        group = self._grouping.of(piece.start)
        for number in self._grid.ordinary:
            self._place_ordinary(number, piece.start, self._ordinary_rows(piece, group, number))
        for i, track in enumerate(self._grid.tracks):
            sums: list[Sum] = []
            begin = int(track.starts[group])
            with self._files.opened(self._track_file(track, group)) as fd:
                for place in track.places:
                    for at, rows in self._parts(piece, group, place):
                        if i == 0:
                            crcs = self._write_summed(fd, rows, begin + at)
                            sums.append(Sum(at, rows.nbytes, *crcs))
                        else:
                            pwrite_all(fd, [rows], begin + at)
                if i == 0:
                    self._add(fd, group, piece.count, sums)

    def _write_summed(self, fd: int, rows: Array, offset: int) -> tuple[int, int]:
        """Write rows; return their CRC-32C, and their CRC-32 for a ZIP file, taken on the way."""
        if not self._grid.zipped:
            return pwrite_crc32c(fd, [rows], offset), 0
        data, crc, crc32 = as_bytes(rows), 0, 0
        for at in range(0, len(data), CALL_NBYTES):
            part = data[at : at + CALL_NBYTES]
            crc32 = zlib.crc32(part, crc32)
            crc = pwrite_crc32c(fd, [part], offset + at, crc)
        return crc, crc32

    def _ordinary_rows(self, piece: Piece, group: int, number: int) -> Array:
        plan = self._grid.arrays[number]
        if plan.role not in ("first", "count"):
            return piece.rows[number]
        counts = piece.counts[plan.field.name]
        column = counts
        if plan.role == "first":
            column = np.cumsum(counts) - counts + piece.first_row[plan.field.name]
            column += group * self._capacity(plan.field.name)
        return np.ascontiguousarray(column, "<i8").view(np.uint8).reshape(-1, 8)

    def _capacity(self, name: str) -> int:
        return int(np.max(self._grouping.rows[name]))

    def _parts(self, piece: Piece, group: int, place: Place) -> Iterator[tuple[int, Array]]:
        """Yield the rows of a piece in each chunk, and their place in the group."""
        plan, rows = self._grid.arrays[place.number], piece.rows[place.number]
        chunk = plan.chunk if plan.role == "values" else self._grid.chunk
        first = piece.start - int(self._grouping.edges[group])
        if plan.role == "values":
            first = piece.first_row[plan.field.name]
        last = first + len(rows)
        for j in range(first // chunk, -(-last // chunk)):
            a, b = max(first, j * chunk), min(last, (j + 1) * chunk)
            if a < b and plan.row_nbytes:
                at = place.at + j * place.step + (a - j * chunk) * plan.row_nbytes
                yield at, rows[a - first : b - first]

    # --- sums ----------------------------------------------------------------------------------

    def _add(self, fd: int, group: int, samples: int, sums: list[Sum]) -> None:
        """Note the sums of a piece, and complete its group if it was the last one."""
        with self._lock:
            held = self._sums.setdefault(group, [])
            held += sums
            self._came[group] = self._came.get(group, 0) + samples
            edges = self._grouping.edges
            if self._came[group] < int(edges[group + 1] - edges[group]):
                return
            del self._sums[group], self._came[group]
        self._complete(fd, group, held)

    def _cells(self, group: int) -> list[tuple[int, int, int, int, int]]:
        """Return of each chunk, by place: that, array, number, bytes, and those of samples."""
        edges, found = self._grouping.edges, []
        for place in self._grid.tracks[0].places:
            plan = self._grid.arrays[place.number]
            held, chunk = int(edges[group + 1] - edges[group]), self._grid.chunk
            if plan.role == "values":
                held, chunk = int(self._grouping.rows[plan.field.name][group]), plan.chunk
            first = self._grid.first_chunk(place.number, group)
            for j in range(1 if plan.role == "values" else -(-held // chunk)):
                real = min(chunk, held - j * chunk) * plan.row_nbytes
                at = place.at + j * place.step
                found.append((at, place.number, first + j, chunk * plan.row_nbytes, real))
        return sorted(found)

    def _complete(self, fd: int, group: int, sums: list[Sum]) -> None:
        """Join the sums of a group; write its local headers."""
        track = self._grid.tracks[0]
        sums.sort()
        parts = [(s.at, s.nbytes, s.crc32c) for s in sums]
        if self._grid.zipped:
            begin, i = int(track.starts[group]), 0
            for at, number, chunk, nbytes, _ in self._cells(group):
                inside = []
                while i < len(sums) and sums[i].at < at + nbytes:
                    inside.append((sums[i].at - at, sums[i].nbytes, sums[i].crc32))
                    i += 1
                crc = CRC32.joined(inside, nbytes)
                self._members[number][chunk] = crc
                header = group_zip.local_header(self._key(number, chunk), nbytes, crc)
                pwrite_all(fd, [header], begin + at - len(header))
                if at:
                    parts.append((at - len(header), len(header), CRC32C.of(header)))
            parts.sort()
        used = int(track.used[group] - track.starts[group])
        self._crcs[group] = CRC32C.joined([p for p in parts if p[0] < used], used)
        self._summed[group] = True

    def _complete_groups(self) -> None:
        """Read back what an earlier run wrote."""
        if not self._grid.tracks:
            return
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(self._read_back, np.flatnonzero(~self._summed).tolist()))

    def _read_back(self, group: int) -> None:
        track = self._grid.tracks[0]
        path, begin = self._track_file(track, group), int(track.starts[group])
        with self._files.opened(path) as fd:
            end = int(track.ends[group])
            if os.fstat(fd).st_size < end:
                os.ftruncate(fd, end)
            sums = [
                Sum(at, real, *checksums(fd, begin + at, real, path, self._grid.zipped))
                for at, _, _, _, real in self._cells(group)
            ]
            self._complete(fd, group, sums)

    # --- the rest ------------------------------------------------------------------------------

    def _forget(self, track: Track) -> None:
        """Write zeros where a killed run may have written what the checkpoint does not know.

        That is in the group of the checkpoint, and behind the samples of the one before.
        """
        group = self._grouping.of(self._samples) if self._grouping.count else 0
        near = range(max(0, group - 1), min(group + 1, self._grouping.count))
        known = {g: self._known(track, g) for g in near}
        for g in near:
            with_next = g + 1 in near and (g + 1) % track.groups and known[g + 1]
            begin, end = int(track.starts[g]), int(track.ends[g])
            with self._files.opened(self._track_file(track, g)) as fd:
                if with_next:
                    end = int(track.starts[g + 1])
                elif known[g]:
                    os.ftruncate(fd, end)
                elif g % track.groups == 0:
                    os.ftruncate(fd, end := begin)
                else:
                    continue  # the group before has cut the file
                erase(fd, known[g], begin, end)
        for later in itertools.count(group // track.groups + 1):
            behind = self._path / self._key(track.places[0].number, later)
            if self._grid.zipped or not behind.exists():
                break
            behind.unlink()

    def _known(self, track: Track, group: int) -> list[tuple[int, int]]:
        """Return the ranges of a group that were written before the checkpoint."""
        first, last = self._grouping.edges[group : group + 2].tolist()
        done = min(last, self._samples) - first
        keep = []
        for place in track.places:
            plan = self._grid.arrays[place.number]
            held, chunk = done, self._grid.chunk
            if plan.role == "values":
                name, chunk = plan.field.name, plan.chunk
                held = int(self._grouping.rows[name][group])
                if first + done < last:
                    held = self._rows[name] if done else 0
            for j in range(-(-held // chunk)):
                at = int(track.starts[group]) + place.at + j * place.step
                keep.append((at, at + min(chunk, held - j * chunk) * plan.row_nbytes))
        return keep

    def _ends(self, track: Track) -> Ints:
        return track.ends

    def _chunks(self, track: Track, number: int) -> Chunks:
        place = next(p for p in track.places if p.number == number)
        plan = self._grid.arrays[number]
        offsets = self._grid.chunk_places(track, place)
        crcs = self._members.get(number, offsets)
        return Chunks(offsets, np.full(len(offsets), plan.chunk * plan.row_nbytes), crcs)

    def _spans(self) -> tuple[Ints, Ints]:
        if not self._grid.tracks:
            nothing = np.zeros(self._grouping.count, np.int64)
            return nothing, nothing
        track = self._grid.tracks[0]
        return track.starts, track.used - track.starts
