"""What the writers of groups share: the files, metadata, shard indexes and the ZIP directory.

In a directory the root's metadata document is written last, when all else is durable; in a ZIP
file the central directory is. Without it, neither is a store: an interrupted output never looks
complete.
"""

from __future__ import annotations

import itertools
import os
import zlib
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.core.checksums import CRC32, crc32c
from dsprep.core.groups import Grouping
from dsprep.core.schema import Array, Ints, Schema
from dsprep.core.storage import (
    as_bytes,
    pread_exact,
    pread_into,
    pwrite_all,
    remove,
    sync_directory,
)
from dsprep.formats.base import GroupWriter, State, WriteOptions
from dsprep.formats.zarr import group_zip
from dsprep.formats.zarr.attributes import CAPACITY, COPY, ROWS
from dsprep.formats.zarr.documents import documents, root_key
from dsprep.formats.zarr.files import Files
from dsprep.formats.zarr.group_plan import GroupGrid, Track, key, plan_grid
from dsprep.formats.zarr.pack import is_zip
from dsprep.formats.zarr.shards import placed_index
from dsprep.layout.laws import Explicit, Law, affine
from dsprep.layout.model import Blocks, Groups

BLOCK = 8 << 20


@dataclass(frozen=True, eq=False)
class Chunks:
    """The chunks of an array, by number.

    Attributes
    ----------
    offsets, nbytes
        Where each is in its file, and its bytes: int64.
    crc32
        ZIP's checksum of each, where it is a member.
    """

    offsets: Ints
    nbytes: Ints
    crc32: Ints


def planned(
    path: Path, schema: Schema, grouping: Grouping, options: WriteOptions
) -> tuple[GroupGrid, dict[str, bytes]]:
    """Return where everything goes, and the metadata documents by key."""
    zipped = is_zip(path)
    grid = plan_grid(schema, options, grouping, zipped)
    made = _documents(schema, grid, options)
    if zipped:
        front = metadata_nbytes(made) + sum(
            len(places) * step for _, places, step in beside(grid, 0, options.zarr_format)
        )
        grid = plan_grid(schema, options, grouping, zipped, front)
    return grid, made


def metadata_nbytes(made: dict[str, bytes]) -> int:
    """Return the bytes of the documents as members of a ZIP file."""
    return sum(group_zip.header_nbytes(name) + len(data) for name, data in made.items())


def beside(grid: GroupGrid, at: int, zarr_format: int) -> Iterator[tuple[int, Ints, int]]:
    """Yield the ordinary arrays of a ZIP file: number, place of each chunk, bytes of a member.

    Parameters
    ----------
    at
        Where the first header may begin: behind the metadata.
    """
    for number in grid.ordinary:
        plan = grid.arrays[number]
        count = plan.chunks(grid.rows[number]) if plan.row_nbytes else 0
        head = group_zip.header_nbytes(key(plan, max(0, count - 1), zarr_format))
        step = head + plan.chunk * plan.row_nbytes
        yield number, at + head + step * np.arange(count), step
        at += step * count


def _documents(schema: Schema, grid: GroupGrid, options: WriteOptions) -> dict[str, bytes]:
    own: dict[str, dict[str, Any]] = {}
    for plan in grid.arrays:
        if plan.role == "values":
            rows = int(np.sum(grid.grouping.rows[plan.field.name]))
            own[plan.field.name] = {CAPACITY: plan.chunk, ROWS: rows}
    for place in grid.copied:
        first = grid.tracks[0].places[0]
        main = grid.arrays[first.number]
        at = place.at - first.at - main.chunk * main.row_nbytes
        own[grid.arrays[place.number].path] = {COPY: {"array": main.path, "at": at}}
    raw = frozenset(grid.arrays[n].path for n in grid.ordinary)
    return documents(schema, list(zip(grid.arrays, grid.rows, strict=True)), options, own, raw)


class GroupStore(GroupWriter):
    """A store in groups being written; see `base.GroupWriter`."""

    def __init__(
        self,
        path: Path,
        schema: Schema,
        grouping: Grouping,
        options: WriteOptions,
        state: State | None,
    ) -> None:
        self._path, self._schema, self._options, self._grouping = path, schema, options, grouping
        self._grid, self._made = planned(path, schema, grouping, options)
        self._files = Files()
        self._beside: dict[int, Ints] = {}
        if self._grid.zipped:
            found = beside(self._grid, metadata_nbytes(self._made), options.zarr_format)
            self._beside = {number: places for number, places, _ in found}
        self._crcs = np.zeros(grouping.count, np.int64)
        self._samples = 0
        if state is None:
            remove(path)
        else:
            self._samples = int(state["samples"])
            if path.is_dir():
                (path / root_key(options.zarr_format)).unlink(missing_ok=True)
        if self._grid.zipped:
            with self._files.opened(path) as fd:
                self._erase_beside(fd)
        else:
            for name in ("", *(p.path for p in self._grid.arrays)):
                (path / name).mkdir(parents=True, exist_ok=True)

    # --- files ---------------------------------------------------------------------------------

    def _key(self, number: int, file: int) -> str:
        return key(self._grid.arrays[number], file, self._options.zarr_format)

    def _track_file(self, track: Track, group: int) -> Path:
        """Return the file of a group of a track."""
        if self._grid.zipped:
            return self._path
        return self._path / self._key(track.places[0].number, group // track.groups)

    def _place_ordinary(self, number: int, first: int, rows: Array) -> None:
        """Write the rows ``first ..`` of an ordinary array."""
        plan = self._grid.arrays[number]
        if not rows.size:
            return
        step = plan.chunk if self._grid.zipped else plan.file
        places = self._beside.get(number)
        last = first + len(rows)
        for i in range(first // step, -(-last // step)):
            a, b = max(first, i * step), min(last, (i + 1) * step)
            at = (a - i * step) * plan.row_nbytes
            path = self._path if self._grid.zipped else self._path / self._key(number, i)
            with self._files.opened(path) as fd:
                at += 0 if places is None else int(places[i])
                pwrite_all(fd, [rows[a - first : b - first]], at)

    def _erase_beside(self, fd: int) -> None:
        """Write zeros to all of the ordinary arrays but what is known to be written."""
        keep = []
        for number, places in self._beside.items():
            plan = self._grid.arrays[number]
            held = np.clip(self._samples - plan.chunk * np.arange(len(places)), 0, plan.chunk)
            stops = places + held * plan.row_nbytes
            keep += list(zip(places.tolist(), stops.tolist(), strict=True))
        erase(fd, keep, 0, min(self._grid.front, os.fstat(fd).st_size))

    @abstractmethod
    def _ends(self, track: Track) -> Ints:
        """Return where each group of a track ends, chunks filled up."""

    @abstractmethod
    def _chunks(self, track: Track, number: int) -> Chunks:
        """Return the chunks of an array of a track."""

    @abstractmethod
    def _complete_groups(self) -> None:
        """See that all groups are in their files, with their sums, after the last piece."""

    # --- durability ----------------------------------------------------------------------------

    def checkpoint(self) -> State:
        """See `base.Writer.checkpoint`."""
        return {"samples": self._samples}

    def sync(self) -> None:
        """See `base.Writer.sync`."""
        self._files.sync()

    def close(self) -> None:
        """See `base.Writer.close`."""
        return

    def finish(self) -> None:
        """See `base.Writer.finish`."""
        self._complete_groups()
        if self._grid.zipped:
            self._finish_zip()
        else:
            self._finish_directory()

    # --- a directory ---------------------------------------------------------------------------

    def _finish_directory(self) -> None:
        for track in self._grid.tracks:
            self._finish_track(track)
        for number in self._grid.ordinary:
            self._finish_ordinary(number)
        last = root_key(self._options.zarr_format)
        for name, data in self._made.items():
            if name != last:
                self._files.replace(self._path / name, [data])
        if self.durable:
            self.sync()
            for folder in {self._path / p.path for p in self._grid.arrays}:
                while folder != self._path:
                    sync_directory(folder)
                    folder = folder.parent
        self._files.replace(self._path / last, [self._made[last]])
        if self.durable:
            self.sync()
            sync_directory(self._path)

    def _finish_track(self, track: Track) -> None:
        """Give each file of a track its length, and its index if it is a shard."""
        number = track.places[0].number
        plan, ends = self._grid.arrays[number], self._ends(track)
        found = self._chunks(track, number)
        counts = np.concatenate([[0], np.cumsum(self._grid.chunks(number))])
        for i, first in enumerate(range(0, len(ends), track.groups)):
            last = min(first + track.groups, len(ends))
            end = int(ends[last - 1])
            with self._files.opened(self._path / self._key(number, i)) as fd:
                os.ftruncate(fd, end)
                if plan.sharded:
                    some = slice(counts[first], counts[last])
                    offsets, sizes = found.offsets[some], found.nbytes[some]
                    pwrite_all(fd, [placed_index(offsets, sizes, plan.file // plan.chunk)], end)

    def _finish_ordinary(self, number: int) -> None:
        plan, rows = self._grid.arrays[number], self._grid.rows[number]
        chunk_nbytes = plan.chunk * plan.row_nbytes
        for i in range(plan.files(rows)):
            held = plan.file_rows(rows, i)
            chunks = plan.chunks(held)
            with self._files.opened(self._path / self._key(number, i)) as fd:
                os.ftruncate(fd, held * plan.row_nbytes)
                os.ftruncate(fd, chunks * chunk_nbytes)
                if plan.sharded:
                    offsets = np.arange(chunks) * chunk_nbytes
                    sizes = np.full(chunks, chunk_nbytes)
                    index = placed_index(offsets, sizes, plan.file // plan.chunk)
                    pwrite_all(fd, [index], chunks * chunk_nbytes)

    # --- a ZIP file ----------------------------------------------------------------------------

    def _finish_zip(self) -> None:
        with self._files.opened(self._path) as fd:
            ends = self._ends(self._grid.tracks[0]) if self._grid.tracks else [self._grid.front]
            end = int(ends[-1])
            os.ftruncate(fd, end)
            members = [*self._write_front(fd), *self._group_members()]
            members += self._ordinary_members(fd)
            members.sort(key=lambda member: member[3])
            if self.durable:
                os.fdatasync(fd)
            os.ftruncate(fd, end + pwrite_all(fd, [group_zip.directory(members, end)], end))
        if self.durable:
            self.sync()

    def _write_front(self, fd: int) -> Iterator[group_zip.Member]:
        at = 0
        for name, data in self._made.items():
            crc = CRC32.of(data)
            header = group_zip.local_header(name, len(data), crc)
            pwrite_all(fd, [header, data], at)
            yield name, len(data), crc, at
            at += len(header) + len(data)

    def _group_members(self) -> Iterator[group_zip.Member]:
        for track in self._grid.tracks:
            for place in track.places:
                found = self._chunks(track, place.number)
                columns = (found.offsets, found.nbytes, found.crc32)
                every = zip(*(c.tolist() for c in columns), strict=True)
                for i, (offset, nbytes, crc) in enumerate(every):
                    name = self._key(place.number, i)
                    yield name, nbytes, crc, offset - group_zip.header_nbytes(name)

    def _ordinary_members(self, fd: int) -> Iterator[group_zip.Member]:
        """Yield the chunks of ordinary arrays, whose sums are taken from the file."""
        for number, places in self._beside.items():
            plan = self._grid.arrays[number]
            nbytes = plan.chunk * plan.row_nbytes
            for i, at in enumerate(places.tolist()):
                name = self._key(number, i)
                crc = CRC32.of(pread_exact(fd, nbytes, at, self._path))
                header = group_zip.local_header(name, nbytes, crc)
                pwrite_all(fd, [header], at - len(header))
                yield name, nbytes, crc, at - len(header)

    # --- groups --------------------------------------------------------------------------------

    @abstractmethod
    def _spans(self) -> tuple[Ints, Ints]:
        """Return where each group begins in its file, and the bytes that one read fetches."""

    def groups(self) -> Groups:
        """See `base.GroupWriter.groups`: track 0."""
        path, files = "", None
        starts, lengths = self._spans()
        if self._grid.tracks and not self._grid.zipped:
            track = self._grid.tracks[0]
            path = self._key(track.places[0].number, 0)
            if track.groups < self._grouping.count:
                files = track.groups
                head, _, name = path.rpartition("/")
                path = f"{head}/{name.replace('0', '{0}', 1)}"
        first = None if self._grouping.even else law(self._grouping.edges[:-1])
        samples = max(1, self._grouping.samples)
        blocks = Blocks(law(starts), law(lengths), path)
        return Groups(samples, blocks, law(self._crcs), first, files)


def law(values: Ints) -> Law:
    """Return the simplest law of `values`."""
    return affine.fit(values) or Explicit(values)


def erase(fd: int, keep: list[tuple[int, int]], start: int, stop: int) -> None:
    """Write zeros to all bytes ``start <= i < stop`` of a file that do not lie in `keep`."""
    edges = [(start, start), *sorted(k for k in keep if k[1] > k[0]), (stop, stop)]
    zeros = np.zeros(min(BLOCK, max(1, stop - start)), np.uint8)
    for (_, a), (b, _) in itertools.pairwise(edges):
        for at in range(a, b, BLOCK):
            pwrite_all(fd, [zeros[: min(BLOCK, b - at)]], at)


def checksums(fd: int, at: int, nbytes: int, where: object, zipped: bool) -> tuple[int, int]:
    """Return CRC-32C, and ZIP's CRC-32, of a range of a file."""
    buffer = np.empty(min(BLOCK, nbytes), np.uint8)
    one = two = 0
    for done in range(0, nbytes, BLOCK):
        part = buffer[: min(BLOCK, nbytes - done)]
        pread_into(fd, part, at + done, where)
        one = crc32c(part, one)
        two = zlib.crc32(as_bytes(part), two) if zipped else 0
    return one, two
