"""Writing groups without compression: the offset of every row is known before the first.

Pieces are parts of groups, of any size, and written in any order. The sums of a group are joined
from those of its pieces when the last one has come; then the local headers of a ZIP file's
members, which hold sums, are written. Groups of which an earlier run wrote a part are read back.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from dsprep.core.groups import Grouping, seam
from dsprep.core.schema import Array, Schema
from dsprep.errors import TargetError
from dsprep.formats.base import State
from dsprep.formats.options import WriteOptions
from dsprep.formats.zarr.group_plan import GroupChunks, Track
from dsprep.formats.zarr.groups import GroupStore, erase, local_header
from dsprep.formats.zarr.writer import Piece
from dsprep.storage.checksums import CRC32, CRC32C, pwrite_crc32c, read_crc32, read_crc32c
from dsprep.storage.ranges import CALL_NBYTES, as_bytes, fstat, pwrite_all, truncate


class Sum(NamedTuple):
    """The sums of a range of a group: `at` counts from the group's beginning."""

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
        for track, slot in ((t, p) for t in tracks for p in t.slots if not p.copy):
            plan = self.arrays[slot.number]
            offsets = self.grid.chunk_offsets(track, slot)
            nbytes = np.full(len(offsets), plan.chunk * plan.row_nbytes)
            self.chunks[slot.number] = np.stack([offsets, nbytes, np.zeros_like(offsets)])
        if self.grid.zipped and tracks:
            with self.files.opened(path, int(self.ends[0][-1])):
                pass
        if state is not None:
            self._rows = {name: int(state["rows"][name]) for name in self._rows}
            for track in tracks if not self.shared else ():
                self._erase_after_checkpoint(track)

    def _erase_after_checkpoint(self, track: Track) -> None:
        """Cut off all behind the last value of the checkpoint, and write zeros between its values.

        A killed run may have written anything there.
        """
        group = self.grouping.of(self.samples)
        done = self.samples - int(self.grouping.edges[group])
        at = group if done else max(0, group - 1)
        begin = int(track.starts[at])
        cells = self.grid.cells(track, group, done, self._rows) if done else []
        known = [(begin + c.at, begin + c.at + c.used) for c in cells if c.used]
        before = slice(at - at % track.groups, group)  # in the same file
        stops = track.used[before][track.used[before] > track.starts[before]]
        end = max([int(stops.max(initial=self.grid.front)), *(stop for _, stop in known)])
        self.cut(track, at, end)
        if known:
            with self.files.opened(self.track_file(track, at)) as fd:
                erase(fd, known, begin, end)

    # --- pieces --------------------------------------------------------------------------------

    @override
    def reserve(self, piece: Piece) -> None:
        # Values follow those of the same group.
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

    def _capacity(self, name: str) -> int:
        return int(np.max(self.grouping.rows[name]))

    @override
    def skip(self, stop: int) -> int:
        # All offsets are known.
        self.samples, self.shared = seam(stop, self.grouping, []), True
        return self.samples

    @override
    def report(self) -> State:
        # The sums of groups, and of members of a ZIP file.
        groups = np.flatnonzero(self._summed)
        members = [
            (cell.array, cell.chunk, int(self.chunks[cell.array][2, cell.chunk]))
            for group in (groups.tolist() if self.grid.zipped else ())
            for cell in self.grid.cells(self.grid.tracks[0], group)
        ]
        return {"sums": [groups.tolist(), self.crcs[groups].tolist()], "members": members}

    @override
    def adopt(self, report: State) -> None:
        groups, crcs = np.array(report["sums"], np.int64)
        self.crcs[groups], self._summed[groups] = crcs, True
        for number, chunk, crc32 in report["members"]:
            self.chunks[number][2, chunk] = crc32

    @override
    def checkpoint(self) -> State:
        return {**super().checkpoint(), "rows": dict(self._rows)}

    @override
    def write(self, piece: Piece) -> None:
        if not piece.count:
            return
        group = self.grouping.of(piece.start)
        for number in self.grid.ordinary:
            self.write_rows(number, piece.start, piece.column(number, self.arrays[number]))
        for i, track in enumerate(self.grid.tracks):
            sums: list[Sum] = []
            begin = int(track.starts[group])
            last = min(group - group % track.groups + track.groups, len(track.ends)) - 1
            with self.files.opened(self.track_file(track, group), int(track.ends[last])) as fd:
                for at, rows in (
                    part for p in track.slots for part in self._parts(piece, group, p)
                ):
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

    def _parts(self, piece: Piece, group: int, slot: GroupChunks) -> Iterator[tuple[int, Array]]:
        """Yield the rows of a piece in each chunk, and their offset in the group."""
        plan, rows = self.arrays[slot.number], piece.rows[slot.number]
        chunk, first = self.grid.chunk, piece.start - int(self.grouping.edges[group])
        if plan.role == "values":
            name, chunk = plan.field.name, plan.chunk
            first = piece.first_row[name] - group * self._capacity(name)
        last = first + len(rows)
        for j in range(first // chunk, -(-last // chunk)):
            a, b = max(first, j * chunk), min(last, (j + 1) * chunk)
            if a < b and plan.row_nbytes:
                at = slot.at + j * slot.step + (a - j * chunk) * plan.row_nbytes
                yield at, rows[a - first : b - first]

    # --- sums ----------------------------------------------------------------------------------

    def _add(self, fd: int, group: int, samples: int, sums: list[Sum]) -> None:
        """Note the sums of a piece, and complete its group if it was the last one."""
        with self._lock:
            pending = self._sums.setdefault(group, [])
            pending += sums
            self._came[group] = self._came.get(group, 0) + samples
            edges = self.grouping.edges
            if self._came[group] < int(edges[group + 1] - edges[group]):
                return
            del self._sums[group], self._came[group]
        self._complete(fd, group, pending)

    def _complete(self, fd: int, group: int, sums: list[Sum]) -> None:
        """Join the sums of a group; write its local headers."""
        track = self.grid.tracks[0]
        sums.sort()
        parts = [(s.at, s.nbytes, s.crc32c) for s in sums]
        if self.grid.zipped:
            begin, i = int(track.starts[group]), 0
            for cell in self.grid.cells(track, group):
                inside = []
                while i < len(sums) and sums[i].at < cell.at + cell.nbytes:
                    inside.append((sums[i].at - cell.at, sums[i].nbytes, sums[i].crc32))
                    i += 1
                crc = CRC32.joined(inside, cell.nbytes)
                self.chunks[cell.array][2, cell.chunk] = crc
                header = local_header(self.key(cell.array, cell.chunk), cell.nbytes, crc)
                pwrite_all(fd, [header], begin + cell.at - len(header))
                if cell.at:
                    parts.append((cell.at - len(header), len(header), CRC32C.of(header)))
            parts.sort()
        used = int(track.used[group] - track.starts[group])
        self.crcs[group] = CRC32C.joined([p for p in parts if p[0] < used], used)
        self._summed[group] = True

    def complete_groups(self) -> None:
        """Read back what an earlier run wrote."""
        if self.grid.tracks:
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                list(pool.map(self._read_back, np.flatnonzero(~self._summed).tolist()))

    def _read_back(self, group: int) -> None:
        track = self.grid.tracks[0]
        path, begin, end = self.track_file(track, group), track.starts[group], track.ends[group]
        with self.files.opened(path, access=os.O_RDWR) as fd:
            if fstat(fd).st_size < end:
                truncate(fd, int(end))
            sums = []
            for cell in self.grid.cells(track, group):
                a, b = int(begin) + cell.at, int(begin) + cell.at + cell.used
                crc32 = read_crc32(fd, a, b, path) if self.grid.zipped else 0
                sums.append(Sum(cell.at, cell.used, read_crc32c(fd, a, b, path), crc32))
            self._complete(fd, group, sums)
