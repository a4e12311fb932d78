"""Stores in groups: what their writers share, in a directory or in one ZIP file.

In a directory the root's metadata document is written last, when all else is durable; in a ZIP
file the central directory is. Without it, neither is a store: an interrupted output never looks
complete.

A member of a ZIP file is a local header and, directly behind it, its bytes. What lies between
members belongs to none. The central directory at the end names every member and where its header
is. Members are smaller than 4 GiB; the file is not limited (ZIP64).

Source: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

from __future__ import annotations

import itertools
import os
import struct
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from typing_extensions import override

from dsprep.core.groups import Grouping
from dsprep.core.schema import Ints, Schema
from dsprep.formats.base import State
from dsprep.formats.options import WriteOptions
from dsprep.formats.zarr.chunks import build_index
from dsprep.formats.zarr.documents import root_key
from dsprep.formats.zarr.group_plan import Track, plan_grid
from dsprep.formats.zarr.plan import LARGEST, header_nbytes
from dsprep.formats.zarr.writer import StoreWriter, is_zip
from dsprep.layout.laws import Explicit
from dsprep.layout.model import Blocks, Groups
from dsprep.storage.checksums import CRC32
from dsprep.storage.durable import sync
from dsprep.storage.ranges import fstat, pread_exact, pwrite_all, truncate
from dsprep.storage.trees import remove

BLOCK = 8 << 20

DATE = 1 << 5 | 1
"""1980-01-01: the same samples give the same bytes."""
UTF8 = 0x800
"""Flag: the name is UTF-8."""
UNIX = 3 << 8
"""The system whose file modes `MODE` has."""
MODE = 0o100644 << 16

Member = tuple[str, int, int, int]
"""Name, bytes, CRC-32, and the offset of the local header."""


class GroupStore(StoreWriter):
    """A store in groups being written.

    Attributes
    ----------
    starts, used, ends
        By track: where each group begins in its file, where its last value ends, and where its
        last chunk ends, filled up; int64, shape ``(groups,)``.
    chunks
        By number of an array in a track, of each of its chunks: offset in the file, bytes, and
        ZIP's checksum if it is a member; int64, shape ``(3, chunks)``.
    crcs
        CRC-32C of each group.
    samples, shared
        Samples that have been reserved; whether others write some of them, so that what is there
        stays.
    """

    def __init__(
        self,
        path: Path,
        schema: Schema,
        grouping: Grouping,
        options: WriteOptions,
        state: State | None,
    ) -> None:
        self.grid = plan_grid(schema, options, grouping, is_zip(path))
        super().__init__(path, schema, options, self.grid.arrays)
        self.grouping = grouping
        self.starts: list[Ints] = []
        self.used: list[Ints] = []
        self.ends: list[Ints] = []
        self.chunks: dict[int, Ints] = {}
        self.crcs = np.zeros(grouping.count, np.int64)
        self.samples, self.shared = 0, False
        if state is None:
            remove(path)
        else:
            self.samples, self.shared = int(state["samples"]), bool(state["shared"])
        if self.shared:
            return
        if path.is_dir():
            (path / root_key(options.zarr_format)).unlink(missing_ok=True)
        if self.grid.zipped:
            with self.files.opened(path) as fd:
                self._erase_beside(fd)
        else:
            self.make_folders()

    # --- files ---------------------------------------------------------------------------------

    @override
    def slot(self, number: int, file: int) -> tuple[Path, int]:
        if self.grid.zipped:
            return self.root, int(self.grid.beside[number][file])
        return super().slot(number, file)

    def track_file(self, track: Track, group: int) -> Path:
        """Return the file of a group of a track."""
        if self.grid.zipped:
            return self.root
        return self.root / self.key(track.slots[0].number, group // track.groups)

    def cut(self, track: Track, group: int, end: int) -> None:
        """Let the file of a group end at `end`, and remove the files of later ones."""
        with self.files.opened(self.track_file(track, group)) as fd:
            truncate(fd, end)
        for later in itertools.count(group // track.groups + 1):
            path = self.root / self.key(track.slots[0].number, later)
            if self.grid.zipped or not path.exists():
                break
            path.unlink()

    def _erase_beside(self, fd: int) -> None:
        """Write zeros to all of the ordinary arrays but what is known to be written."""
        keep = []
        for number, offsets in self.grid.beside.items():
            plan = self.arrays[number]
            rows = np.clip(self.samples - plan.chunk * np.arange(len(offsets)), 0, plan.chunk)
            stops = offsets + rows * plan.row_nbytes
            keep += list(zip(offsets.tolist(), stops.tolist(), strict=True))
        erase(fd, keep, 0, min(self.grid.front, fstat(fd).st_size))

    @abstractmethod
    def complete_groups(self) -> None:
        """See that all groups are in their files, with their sums, after the last piece."""

    # --- durability ----------------------------------------------------------------------------

    @override
    def checkpoint(self) -> State:
        return {"samples": self.samples, "shared": self.shared}

    @override
    def finish(self) -> None:
        self.complete_groups()
        if self.grid.zipped:
            self._finish_zip()
            return
        for track, ends in zip(self.grid.tracks, self.ends, strict=True):
            self._finish_track(track, ends)
        for number in self.grid.ordinary:
            self.finish_rows(number, self.grid.rows[number])
        self.finish_documents(self.grid.documents)

    def _finish_track(self, track: Track, ends: Ints) -> None:
        """Give each file of a track its length, and its index if it is a shard."""
        number = track.slots[0].number
        plan = self.arrays[number]
        counts = np.concatenate([[0], np.cumsum(self.grid.chunks(number))])
        for i, first in enumerate(range(0, len(ends), track.groups)):
            last = min(first + track.groups, len(ends))
            end = int(ends[last - 1])
            with self.files.opened(self.root / self.key(number, i)) as fd:
                truncate(fd, end)
                if plan.sharded:
                    offsets, sizes, _ = self.chunks[number][:, counts[first] : counts[last]]
                    pwrite_all(fd, [build_index(sizes, plan.file // plan.chunk, offsets)], end)

    # --- a ZIP file ----------------------------------------------------------------------------

    def _finish_zip(self) -> None:
        with self.files.opened(self.root, access=os.O_RDWR) as fd:
            end = int(self.ends[0][-1]) if self.grid.tracks else self.grid.front
            truncate(fd, end)
            members = [*self._write_front(fd), *self._group_members()]
            members.sort(key=lambda member: member[3])
            if self.durable:
                sync(fd, data=True)
            truncate(fd, end + pwrite_all(fd, [directory(members, end)], end))
        if self.durable:
            self.sync()

    def _write_front(self, fd: int) -> Iterator[Member]:
        """Write the metadata; give the chunks of ordinary arrays headers, with sums of the file."""
        at = 0
        for name, data in self.grid.documents.items():
            crc = CRC32.of(data)
            header = local_header(name, len(data), crc)
            pwrite_all(fd, [header, data], at)
            yield name, len(data), crc, at
            at += len(header) + len(data)
        for number, offsets in self.grid.beside.items():
            nbytes = self.arrays[number].chunk * self.arrays[number].row_nbytes
            for i, at in enumerate(offsets.tolist()):
                name, crc = self.key(number, i), CRC32.of(pread_exact(fd, nbytes, at, self.root))
                header = local_header(name, nbytes, crc)
                pwrite_all(fd, [header], at - len(header))
                yield name, nbytes, crc, at - len(header)

    def _group_members(self) -> Iterator[Member]:
        for number in (p.number for track in self.grid.tracks for p in track.slots):
            for i, (offset, nbytes, crc) in enumerate(self.chunks[number].T.tolist()):
                name = self.key(number, i)
                yield name, nbytes, crc, offset - header_nbytes(name)

    # --- groups --------------------------------------------------------------------------------

    @override
    def groups(self) -> Groups:
        # Track 0.
        path, files = "", None
        starts = lengths = np.zeros(self.grouping.count, np.int64)
        if self.grid.tracks:
            starts, lengths = self.starts[0], self.used[0] - self.starts[0]
        if self.grid.tracks and not self.grid.zipped:
            track = self.grid.tracks[0]
            path = self.key(track.slots[0].number, 0)
            if track.groups < self.grouping.count:
                files = track.groups
                head, _, name = path.rpartition("/")
                path = f"{head}/{name.replace('0', '{0}', 1)}"
        first = None if self.grouping.even else Explicit(self.grouping.edges[:-1])
        blocks = Blocks(Explicit(starts), Explicit(lengths), path)
        samples = max(1, self.grouping.samples)
        return Groups(samples, blocks, Explicit(self.crcs), first, files)


def erase(fd: int, keep: list[tuple[int, int]], start: int, stop: int) -> None:
    """Write zeros to all bytes ``start <= i < stop`` of a file that do not lie in `keep`."""
    edges = [(start, start), *sorted(k for k in keep if k[1] > k[0]), (stop, stop)]
    zeros = np.zeros(min(BLOCK, max(1, stop - start)), np.uint8)
    for (_, a), (b, _) in itertools.pairwise(edges):
        for at in range(a, b, BLOCK):
            pwrite_all(fd, [zeros[: min(BLOCK, b - at)]], at)


# --- the parts of a ZIP file -----------------------------------------------------------------


def local_header(name: str, nbytes: int, crc32: int) -> bytes:
    """Return what is right before the bytes of a member."""
    text = name.encode()
    fields = (20, _flags(text), 0, 0, DATE, crc32, nbytes, nbytes, len(text), 0)
    return struct.pack("<4sHHHHHIIIHH", b"PK\3\4", *fields) + text


def _flags(name: bytes) -> int:
    return 0 if name.isascii() else UTF8


def directory(members: Iterable[Member], at: int) -> bytes:
    """Return the central directory and the records that end the file, to be written at `at`."""
    entries, count = [], 0
    for name, nbytes, crc32, offset in members:
        text, extra, version = name.encode(), b"", 20
        if offset > LARGEST:
            extra, offset, version = struct.pack("<HHQ", 1, 8, offset), LARGEST + 1, 45
        head = (UNIX | 45, version, _flags(text), 0, 0, DATE, crc32, nbytes, nbytes)
        tail = (len(text), len(extra), 0, 0, 0, MODE, offset)
        entries.append(struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\1\2", *head, *tail) + text + extra)
        count += 1
    body = b"".join(entries)
    end = b""
    if count > 0xFFFE or at > LARGEST or len(body) > LARGEST:
        numbers = (44, 45, 45, 0, 0, count, count, len(body), at)
        end = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", *numbers)
        end += struct.pack("<4sIQI", b"PK\6\7", 0, at + len(body), 1)
    short, long = min(count, 0xFFFF), 0xFFFFFFFF
    if end:
        at, nbytes = long, long
    else:
        nbytes = len(body)
    return body + end + struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, short, short, nbytes, at, 0)
