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
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dsprep.core.checksums import CRC32, CRC32C, pwrite_crc32c
from dsprep.core.groups import Grouping
from dsprep.core.schema import Array, Schema
from dsprep.core.storage import CALL_NBYTES, as_bytes, pwrite_all
from dsprep.errors import TargetError
from dsprep.formats.base import State, WriteOptions
from dsprep.formats.zarr.group_plan import Place, Track
from dsprep.formats.zarr.groups import Chunks, GroupStore, checksums, erase, local_header
from dsprep.formats.zarr.writer import Piece


class Sum(NamedTuple):
    """The sums of a range of a group: its place counts from the group's beginning."""

    at: int
    nbytes: int
    crc32c: int
    crc32: int


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
        tracks = self.grid.tracks
        self.starts = [t.starts for t in tracks]
        self.used, self.ends = [t.used for t in tracks], [t.ends for t in tracks]
        for track, place in ((t, p) for t in tracks for p in t.places if not p.copy):
            plan = self.arrays[place.number]
            offsets = self.grid.chunk_places(track, place)
            nbytes = np.full(len(offsets), plan.chunk * plan.row_nbytes)
            self.chunks[place.number] = Chunks(offsets, nbytes, np.zeros_like(offsets))
        if state is not None:
            self._rows = {name: int(state["rows"][name]) for name in self._rows}
            for track in self.grid.tracks:
                self._forget(track)

    # --- pieces --------------------------------------------------------------------------------

    def reserve(self, piece: Piece) -> None:
        """See `base.Writer.reserve`: values follow those of the same group."""
        group = self.grouping.of(piece.start)
        begins = piece.start == int(self.grouping.edges[group])
        for name, counts in piece.counts.items():
            first = 0 if begins else self._rows[name]
            piece.first_row[name] = group * self._capacity(name) + first
            self._rows[name] = first + int(counts.sum())
            if self._rows[name] > int(self.grouping.rows[name][group]):
                raise TargetError(
                    f"field {name} has more rows than were counted",
                    where=f"{self.root}, group {group}",
                    expected=int(self.grouping.rows[name][group]),
                    found=self._rows[name],
                    fix="the source has changed: begin again",
                )
        self.samples = piece.start + piece.count

    def checkpoint(self) -> State:
        """See `base.Writer.checkpoint`."""
        return {**super().checkpoint(), "rows": dict(self._rows)}

    def write(self, piece: Piece) -> None:
        """See `base.Writer.write`."""
        if not piece.count:
            return
        group = self.grouping.of(piece.start)
        for number in self.grid.ordinary:
            self.place(number, piece.start, piece.column(number, self.arrays[number]))
        for i, track in enumerate(self.grid.tracks):
            sums: list[Sum] = []
            begin = int(track.starts[group])
            with self.files.opened(self.track_file(track, group)) as fd:
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
        if not self.grid.zipped:
            return pwrite_crc32c(fd, [rows], offset), 0
        data, crc, crc32 = as_bytes(rows), 0, 0
        for at in range(0, len(data), CALL_NBYTES):
            part = data[at : at + CALL_NBYTES]
            crc32 = zlib.crc32(part, crc32)
            crc = pwrite_crc32c(fd, [part], offset + at, crc)
        return crc, crc32

    def _capacity(self, name: str) -> int:
        return int(np.max(self.grouping.rows[name]))

    def _parts(self, piece: Piece, group: int, place: Place) -> Iterator[tuple[int, Array]]:
        """Yield the rows of a piece in each chunk, and their place in the group."""
        plan, rows = self.arrays[place.number], piece.rows[place.number]
        chunk = plan.chunk if plan.role == "values" else self.grid.chunk
        first = piece.start - int(self.grouping.edges[group])
        if plan.role == "values":
            name = plan.field.name
            first = piece.first_row[name] - self.grouping.of(piece.start) * self._capacity(name)
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
            edges = self.grouping.edges
            if self._came[group] < int(edges[group + 1] - edges[group]):
                return
            del self._sums[group], self._came[group]
        self._complete(fd, group, held)

    def _cells(self, group: int) -> list[tuple[int, int, int, int, int]]:
        """Return of each chunk, by place: that, array, number, bytes, and those of samples."""
        edges, found = self.grouping.edges, []
        for place in self.grid.tracks[0].places:
            plan = self.arrays[place.number]
            held, chunk = int(edges[group + 1] - edges[group]), self.grid.chunk
            if plan.role == "values":
                held, chunk = int(self.grouping.rows[plan.field.name][group]), plan.chunk
            first = self.grid.first_chunk(place.number, group)
            for j in range(1 if plan.role == "values" else -(-held // chunk)):
                real = min(chunk, held - j * chunk) * plan.row_nbytes
                at = place.at + j * place.step
                found.append((at, place.number, first + j, chunk * plan.row_nbytes, real))
        return sorted(found)

    def _complete(self, fd: int, group: int, sums: list[Sum]) -> None:
        """Join the sums of a group; write its local headers."""
        track = self.grid.tracks[0]
        sums.sort()
        parts = [(s.at, s.nbytes, s.crc32c) for s in sums]
        if self.grid.zipped:
            begin, i = int(track.starts[group]), 0
            for at, number, chunk, nbytes, _ in self._cells(group):
                inside = []
                while i < len(sums) and sums[i].at < at + nbytes:
                    inside.append((sums[i].at - at, sums[i].nbytes, sums[i].crc32))
                    i += 1
                crc = CRC32.joined(inside, nbytes)
                self.chunks[number].crc32[chunk] = crc
                header = local_header(self.key(number, chunk), nbytes, crc)
                pwrite_all(fd, [header], begin + at - len(header))
                if at:
                    parts.append((at - len(header), len(header), CRC32C.of(header)))
            parts.sort()
        used = int(track.used[group] - track.starts[group])
        self.crcs[group] = CRC32C.joined([p for p in parts if p[0] < used], used)
        self._summed[group] = True

    def complete_groups(self) -> None:
        """Read back what an earlier run wrote."""
        if not self.grid.tracks:
            return
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(self._read_back, np.flatnonzero(~self._summed).tolist()))

    def _read_back(self, group: int) -> None:
        track = self.grid.tracks[0]
        path, begin = self.track_file(track, group), int(track.starts[group])
        with self.files.opened(path) as fd:
            end = int(track.ends[group])
            if os.fstat(fd).st_size < end:
                os.ftruncate(fd, end)
            sums = [
                Sum(at, real, *checksums(fd, begin + at, real, path, self.grid.zipped))
                for at, _, _, _, real in self._cells(group)
            ]
            self._complete(fd, group, sums)

    # --- the rest ------------------------------------------------------------------------------

    def _forget(self, track: Track) -> None:
        """Write zeros where a killed run may have written what the checkpoint does not know.

        That is in the group of the checkpoint, and behind the samples of the one before.
        """
        group = self.grouping.of(self.samples) if self.grouping.count else 0
        near = range(max(0, group - 1), min(group + 1, self.grouping.count))
        known = {g: self._known(track, g) for g in near}
        for g in near:
            with_next = g + 1 in near and (g + 1) % track.groups and known[g + 1]
            begin, end = int(track.starts[g]), int(track.ends[g])
            with self.files.opened(self.track_file(track, g)) as fd:
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
            behind = self.root / self.key(track.places[0].number, later)
            if self.grid.zipped or not behind.exists():
                break
            behind.unlink()

    def _known(self, track: Track, group: int) -> list[tuple[int, int]]:
        """Return the ranges of a group that were written before the checkpoint."""
        first, last = self.grouping.edges[group : group + 2].tolist()
        done = min(last, self.samples) - first
        keep = []
        for place in track.places:
            plan = self.arrays[place.number]
            held, chunk = done, self.grid.chunk
            if plan.role == "values":
                name, chunk = plan.field.name, plan.chunk
                held = int(self.grouping.rows[name][group])
                if first + done < last:
                    held = self._rows[name] if done else 0
            for j in range(-(-held // chunk)):
                at = int(track.starts[group]) + place.at + j * place.step
                keep.append((at, at + min(chunk, held - j * chunk) * plan.row_nbytes))
        return keep
