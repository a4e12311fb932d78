"""Writing a store in groups, in a directory or in one ZIP file; see `grid` for the offsets.

Without compression pieces are parts of groups, of any size, written in any order. The sums of a
group are joined from those of its pieces when it is complete; then the local headers of a ZIP
file's members, which hold sums, are written. Groups of which an earlier run wrote a part are read
back. With compression a piece is a whole group, and a chunk of it a file.

The root's metadata document, or the central directory of a ZIP file, is written last: without it,
neither is a store.
"""

from __future__ import annotations

import os
import zlib
from bisect import bisect_left
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
from typing_extensions import override

from dsprep.core.groups import Grouping
from dsprep.core.schema import Arena, Array, Batch, Schema
from dsprep.errors import TargetError
from dsprep.formats.base import State
from dsprep.formats.options import WriteOptions
from dsprep.formats.zarr.chunks import build_index
from dsprep.formats.zarr.documents import encode_file, encoder, root_key
from dsprep.formats.zarr.grid import GroupGrid, Track
from dsprep.formats.zarr.write import Piece, StoreWriter
from dsprep.formats.zarr.zip_file import Member, directory, is_zip, local_header
from dsprep.layout.laws import Explicit
from dsprep.layout.model import Blocks, Groups
from dsprep.storage.checksums import CRC32, CRC32C, pwrite_crc32c, read_crc32, read_crc32c
from dsprep.storage.durable import sync
from dsprep.storage.paths import open_file
from dsprep.storage.ranges import (
    CALL_NBYTES,
    as_bytes,
    fstat,
    pread_exact,
    pwrite_all,
    truncate,
)
from dsprep.storage.trees import remove

UNKNOWN = -1

Sum = tuple[int, int, int, int]
"""Of a range that was written: offset in the file, bytes, CRC-32C, and CRC-32 in a ZIP file."""


class GroupWriter(StoreWriter):
    """A store in groups being written.

    Attributes
    ----------
    crc32
        By number of an array in a track: ZIP's checksum of each of its chunks, int64.
    crcs, nbytes
        CRC-32C of each group, or `UNKNOWN`; and its bytes in the first track.
    """

    def __init__(
        self,
        path: Path,
        schema: Schema,
        grouping: Grouping,
        options: WriteOptions,
        state: State | None,
    ) -> None:
        grid = self.grid = GroupGrid(schema, options, grouping, is_zip(path))
        super().__init__(path, schema, options, grid.arrays)
        self.grouping, self.offsets = grouping, grid.offsets
        tracked = [n for t in grid.tracks for n in t.numbers]
        self.crc32 = {n: np.zeros(len(grid.offsets[n]), np.int64) for n in tracked}
        self.nbytes = np.zeros(grouping.count, np.int64)
        for track in grid.tracks[:1]:
            self.nbytes[:] = track.used - track.starts
        self.crcs = np.full(grouping.count, UNKNOWN, np.int64)
        self.whole = options.compress is not None
        self._encode = [encoder(options.compress, plan) for plan in self.arrays]
        self._rows = {f.name: 0 for f in schema if f.ragged}
        self._sums = dict[int, list[Sum]]()
        if state is None:
            remove(path)
        else:
            self._rows = {name: int(state["rows"][name]) for name in self._rows}
        if not grid.zipped:
            (path / root_key(options.zarr_format)).unlink(missing_ok=True)
            self.make_folders()

    # --- files ---------------------------------------------------------------------------------

    @override
    def path(self, number: int, file: int) -> Path:
        return self.root if self.grid.zipped else super().path(number, file)

    # --- pieces --------------------------------------------------------------------------------

    @override
    def encode(self, batch: Batch, start: int, arena: Arena) -> Piece:
        # Of compressed arrays the rows are the chunk.
        piece = super().encode(batch, start, arena)
        for n in self.crc32 if self.whole and piece.count else ():
            (chunk,) = encode_file(piece.rows[n], self.arrays[n], self._encode[n])
            piece.rows[n] = bytes(chunk)
        return piece

    @override
    def reserve(self, piece: Piece) -> None:
        # Values follow those of the same group.
        group = self.grouping.of(piece.start)
        begins = piece.start == int(self.grouping.edges[group])
        for name, counts in piece.counts.items():
            rows = self.grouping.rows[name]
            first = 0 if begins else self._rows[name]
            piece.first_row[name] = group * int(np.max(rows)) + first
            self._rows[name] = first + int(counts.sum())
            if self._rows[name] > int(rows[group]):
                raise TargetError(
                    f"field {name} has more rows than were counted",
                    where=f"{self.root}, group {group}",
                    expected=int(rows[group]),
                    found=self._rows[name],
                    fix="the source has changed: begin again",
                )

    @override
    def write(self, piece: Piece) -> None:
        if not piece.count:
            return
        group = self.grouping.of(piece.start)
        for number in self.grid.ordinary:
            self.write_rows(number, *piece.column(number, self.arrays[number]))
        for n in self.crc32 if self.whole else ():
            self.replace(self.path(n, group), [piece.rows[n]])
            if n in self.grid.tracks[0].numbers:
                self._note(group, piece.rows[n])
        for track in self.grid.tracks if not self.whole else ():
            file = group // track.groups
            end = int(track.ends[min((file + 1) * track.groups, len(track.ends)) - 1])
            sums: list[Sum] = []
            with self.opened(self.path(track.numbers[0], file), end) as fd:
                for n in track.numbers:
                    first, rows = piece.column(n, self.arrays[n])
                    for _, offset, part in self.spans(n, first, rows):
                        if track is self.grid.tracks[0]:
                            sums.append(self._write_summed(fd, part, offset))
                        else:
                            pwrite_all(fd, [part], offset)
                if track is self.grid.tracks[0]:
                    self._add(fd, group, sums)

    def _write_summed(self, fd: int, rows: Array, offset: int) -> Sum:
        """Write rows, and take their sums on the way."""
        if not self.grid.zipped:
            return offset, rows.nbytes, pwrite_crc32c(fd, [rows], offset), 0
        data, crc, crc32 = as_bytes(rows), 0, 0
        for at in range(0, len(data), CALL_NBYTES):
            part = data[at : at + CALL_NBYTES]
            crc32 = zlib.crc32(part, crc32)
            crc = pwrite_crc32c(fd, [part], offset + at, crc)
        return offset, rows.nbytes, crc, crc32

    # --- sums ----------------------------------------------------------------------------------

    def _used(self, group: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield array, chunk, offset and bytes of samples of each chunk of a group in track 0."""
        for n in self.grid.tracks[0].numbers:
            chunk_rows, row_nbytes = self.grid.rows_in_chunks(n), self.arrays[n].row_nbytes
            for k in range(*self.grid.first_chunks(n)[group : group + 2].tolist()):
                yield n, k, int(self.offsets[n][k]), int(chunk_rows[k]) * row_nbytes

    def _add(self, fd: int, group: int, sums: list[Sum]) -> None:
        """Note the sums of a piece, and complete its group if it was the last one."""
        with self._lock:
            pending = self._sums.setdefault(group, [])
            pending += sums
            if sum(s[1] for s in pending) < sum(used for *_, used in self._used(group)):
                return
            del self._sums[group]
        self._complete(fd, group, pending)

    def _complete(self, fd: int, group: int, sums: list[Sum]) -> None:
        """Join the sums of a group; write its local headers."""
        track = self.grid.tracks[0]
        begin, nbytes = int(track.starts[group]), int(track.used[group] - track.starts[group])
        sums.sort()
        parts = [(at - begin, size, crc) for at, size, crc, _ in sums]
        for n, k, at, _ in self._used(group) if self.grid.zipped else ():
            size = self.grid.chunk_nbytes(n)
            inside = sums[bisect_left(sums, (at,)) : bisect_left(sums, (at + size,))]
            crc32 = CRC32.joined([(s[0] - at, s[1], s[3]) for s in inside], size)
            self.crc32[n][k] = crc32
            header = local_header(self._key(n, k), size, crc32)
            pwrite_all(fd, [header], at - len(header))
            parts.append((at - begin - len(header), len(header), CRC32C.of(header)))
        parts = sorted(p for p in parts if 0 <= p[0] < nbytes)
        self.crcs[group] = CRC32C.joined(parts, nbytes)

    def _note(self, group: int, data: bytes) -> None:
        """Note the size and the sum of a compressed group."""
        self.nbytes[group], self.crcs[group] = len(data), CRC32C.of(data)

    def _read_back(self, group: int) -> None:
        """Take the sums of a group from its file, and complete it."""
        track = self.grid.tracks[0]
        path = self.path(track.numbers[0], group // track.groups)
        if self.whole:
            self._note(group, path.read_bytes())
            return
        with self.opened(path, access=os.O_RDWR) as fd:
            truncate(fd, max(fstat(fd).st_size, int(track.ends[group])))
            sums = []
            with closing(open_file(path)) as file:
                for _, _, at, used in self._used(group):
                    crc32 = read_crc32(file, at, at + used) if self.grid.zipped else 0
                    sums.append((at, used, read_crc32c(file, at, at + used), crc32))
            self._complete(fd, group, sums)

    # --- the end -------------------------------------------------------------------------------

    @override
    def checkpoint(self) -> State:
        return {"rows": dict(self._rows)}

    @override
    def finish(self) -> None:
        unknown = np.flatnonzero(self.crcs == UNKNOWN).tolist() if self.grid.tracks else []
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(self._read_back, unknown))
        if self.grid.zipped:
            self._finish_zip()
            return
        for track in self.grid.tracks if not self.whole else ():
            self._finish_track(track)
        for number in self.grid.ordinary:
            self.finish_rows(number, self.grid.rows[number])
        self.finish_documents(self.grid.documents)

    def _finish_track(self, track: Track) -> None:
        """Give each file of a track its length, and its index if it is a shard."""
        (number,) = track.numbers
        plan, edges = self.arrays[number], self.grid.first_chunks(number)
        for i, first in enumerate(range(0, len(track.ends), track.groups)):
            last = min(first + track.groups, len(track.ends))
            with self.opened(self.path(number, i)) as fd:
                end = int(track.ends[last - 1])
                truncate(fd, end)
                if plan.sharded:
                    offsets = self.offsets[number][edges[first] : edges[last]]
                    sizes = np.full(len(offsets), self.grid.chunk_nbytes(number))
                    pwrite_all(fd, [build_index(sizes, plan.file // plan.chunk, offsets)], end)

    def _finish_zip(self) -> None:
        with self.opened(self.root, access=os.O_RDWR) as fd:
            end = int(self.grid.tracks[0].ends[-1]) if self.grid.tracks else self.grid.front
            truncate(fd, end)
            members = [*self._write_front(fd)]
            for n, crcs in self.crc32.items():
                chunks = enumerate(zip(crcs.tolist(), self.offsets[n].tolist(), strict=True))
                size = self.grid.chunk_nbytes(n)
                members += [(self._key(n, k), size, crc, at) for k, (crc, at) in chunks]
            if self.durable:
                sync(fd, data=True)
            truncate(fd, end + pwrite_all(fd, [directory(members, end)], end))
        if self.durable:
            self.sync()

    def _write_front(self, fd: int) -> Iterator[Member]:
        """Write the metadata; give the chunks of ordinary arrays headers, with sums of the file."""
        at = 0
        for name, data in self.grid.documents.items():
            header = local_header(name, len(data), crc := CRC32.of(data))
            pwrite_all(fd, [header, data], at)
            yield name, len(data), crc, at + len(header)
            at += len(header) + len(data)
        for n in self.grid.ordinary:
            size = self.grid.chunk_nbytes(n)
            for k, at in enumerate(self.offsets[n].tolist()):
                name, crc = self._key(n, k), CRC32.of(pread_exact(fd, size, at, self.root))
                header = local_header(name, size, crc)
                pwrite_all(fd, [header], at - len(header))
                yield name, size, crc, at

    def _key(self, number: int, chunk: int) -> str:
        """Return the name of a member of a ZIP file, which is a chunk."""
        return self.arrays[number].key(chunk, self.options.zarr_format)

    @override
    def groups(self) -> Groups:
        # Track 0.
        path, files, starts = "", None, np.zeros(self.grouping.count, np.int64)
        for track in self.grid.tracks[:1]:
            starts, key = track.starts, self._key(track.numbers[0], 0)
            path = "" if self.grid.zipped else key
            if path and track.groups < self.grouping.count:
                head, _, name = key.rpartition("/")
                path, files = f"{head}/{name.replace('0', '{0}', 1)}", track.groups
        first = None if self.grouping.even else Explicit(self.grouping.edges[:-1])
        blocks = Blocks(Explicit(starts), Explicit(self.nbytes), path)
        return Groups(max(1, self.grouping.samples), blocks, Explicit(self.crcs), first, files)
