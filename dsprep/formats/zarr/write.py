"""Writing a Zarr store: dsprep writes the bytes of chunks, zarr-python the metadata.

Uncompressed, the offset of every row is known as soon as its number is (see `grid`): pieces are cut
anywhere, written in any order by any number of threads, and the output does not depend on the cut.
`finish` gives the files their length and index. In groups the sums of what is written are kept;
what an earlier run has written is read back for them.

Compressed, a piece of the large fixed fields, or of a group, consists of whole files and is encoded
when it comes. All else (small fields, ragged values, whose rows do not end with pieces) is
collected as it is in the folder ``PATH.spool`` and encoded by `finish`.

A ZIP file is packed from a directory beside it. In groups it is written as such: a piece is a whole
group, whose members have their local headers, with their sums, before them.

The metadata documents, or the central directory of a ZIP file, are written last: an interrupted
output is not a Zarr store.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from dsprep.core.schema import Arena, Array, Batch, Ints, Ragged
from dsprep.errors import TargetError
from dsprep.formats.base import State, Writer
from dsprep.formats.record_writer import stored_groups
from dsprep.formats.stored_rows import contiguous, spans
from dsprep.formats.zarr.chunks import build_index
from dsprep.formats.zarr.documents import encode_file, encoder
from dsprep.formats.zarr.grid import Grid
from dsprep.formats.zarr.locate import blocks_of
from dsprep.formats.zarr.plan import ArrayPlan, header_nbytes
from dsprep.formats.zarr.zip_file import (
    CRC32_END,
    Member,
    directory,
    is_zip,
    local_header,
    pack,
)
from dsprep.layout.model import Column, FileLayout, Groups
from dsprep.layout.model import Grid as LocatedGrid
from dsprep.storage.base import Handle
from dsprep.storage.checksums import CRC32, CRC32C, Sums, crc32c, pwrite_crc32c, read_crc32
from dsprep.storage.durable import close, preallocate, start_sync, sync, sync_directory
from dsprep.storage.paths import open_file
from dsprep.storage.ranges import (
    CALL_NBYTES,
    Buffer,
    as_bytes,
    close_quietly,
    fstat,
    pread_into,
    pwrite_all,
    truncate,
)
from dsprep.storage.trees import remove


@dataclass
class Piece:
    """Consecutive samples on their way to their files.

    Attributes
    ----------
    start, count
        The first sample, and how many.
    rows
        By number of the array: uint8, shape ``(n, row_nbytes)``; or encoded files, as chunks.
    counts, first_row
        By name of ragged field: rows of each sample, int64; and the row of the values where the
        piece begins, set by `reserve`.
    """

    start: int
    count: int
    rows: dict[int, Any] = field(default_factory=dict)
    counts: dict[str, Ints] = field(default_factory=dict)
    first_row: dict[str, int] = field(default_factory=dict)

    def column(self, number: int, plan: ArrayPlan) -> tuple[int, Any]:
        """Return the first row of an array, and its rows; those of an index from the counts."""
        name = plan.field.name
        if plan.role == "samples":
            return self.start, self.rows[number]
        if plan.role == "values":
            return self.first_row[name], self.rows[number]
        column = counts = self.counts[name]
        if plan.role == "first":
            column = np.cumsum(counts) - counts + self.first_row[name]
        return self.start, np.ascontiguousarray(column, "<i8").view(np.uint8).reshape(-1, 8)


class ZarrWriter(Writer):
    """A Zarr store being written; see `base.Writer`.

    Attributes
    ----------
    arrays
        Those of the grid; when it is complete, settled for the rows that there are.
    """

    def __init__(self, grid: Grid, path: Path, state: State | None) -> None:
        self._path, self.root, self._grid = path, path, grid
        if is_zip(path) and not grid.zipped:
            self.root = path.with_name(path.name + ".parts")
        self.arrays, self.unit, self.whole_groups = list(grid.arrays), grid.unit, grid.whole
        self._spool = Path(f"{path}.spool")
        self._encode = [encoder(plan) for plan in grid.arrays]
        self._rows = {f.name: 0 for f in grid.schema if f.ragged}
        self._most = {n: int(rows.max(initial=0)) for n, rows in grid.grouping.rows.items()}
        self._sums = Sums()
        self._dirty: set[Path] = set()
        self._written: set[Path] = set()  # since the last `start_sync`
        self._lock = threading.Lock()
        if state is None:
            remove(path)
            self.clean()
        else:
            self._rows = {name: int(state["rows"][name]) for name in self._rows}
        static = (s.field.name for s in grid.schema.static)
        folders = [self.root / n for n in (*(plan.path for plan in grid.arrays), *static)]
        for folder in () if grid.zipped else (self._spool, *folders):
            folder.mkdir(parents=True, exist_ok=True)

    # --- files ---------------------------------------------------------------------------------

    @contextmanager
    def _opened(self, path: Path, nbytes: int = 0) -> Iterator[int]:
        """Open a file for writing, for the next `sync`; an empty one gets space for `nbytes`."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if nbytes > CALL_NBYTES and not fstat(fd).st_size:
                preallocate(fd, 0, nbytes)
            yield fd
        finally:
            close(fd)
            with self._lock:
                self._dirty.add(path)
                self._written.add(path)

    def _replace(self, path: Path, parts: Sequence[Buffer]) -> None:
        """Write a whole file."""
        with self._opened(path) as fd:
            nbytes = pwrite_all(fd, parts, 0)
            if fstat(fd).st_size > nbytes:
                truncate(fd, nbytes)

    @override
    def start_sync(self) -> None:
        with self._lock:
            written, self._written = self._written, set()
        for path in written:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            start_sync(fd)
            close_quietly(fd)

    @override
    def sync(self) -> None:
        with self._lock:
            dirty, self._dirty = self._dirty, set()
        for path in sorted(dirty):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                sync(fd, data=True)
            finally:
                os.close(fd)
        for folder in sorted({p.parent for p in dirty}):
            sync_directory(folder)

    def _key(self, number: int, file: int) -> str:
        """Return the key of a file of an array; of a ZIP file in groups, of a chunk."""
        return self.arrays[number].key(file, self._grid.options.zarr_format)

    def _file(self, number: int, file: int) -> Path:
        return self.root if self._grid.zipped else self.root / self._key(number, file)

    # --- pieces --------------------------------------------------------------------------------

    @override
    def encode(self, batch: Batch, start: int, arena: Arena) -> Piece:
        piece = Piece(start, len(next(iter(batch.values()))))
        for number, plan in enumerate(self.arrays):
            column = batch[plan.field.name]
            if plan.role in ("first", "count"):
                continue
            if isinstance(column, Ragged):
                piece.counts[plan.field.name] = column.lengths
                column = column.values
            rows = np.empty((len(column), 0), np.uint8)
            if plan.row_nbytes:
                column = contiguous(column, arena, f"write.{plan.path}")
                rows = column.reshape(-1).view(np.uint8).reshape(len(column), plan.row_nbytes)
            piece.rows[number] = rows
            if plan.whole_files:
                cuts = (rows[at : at + plan.file] for at in range(0, len(rows), plan.file))
                piece.rows[number] = [encode_file(c, plan, self._encode[number]) for c in cuts]
        return piece

    @override
    def reserve(self, piece: Piece) -> None:
        # The values of a piece begin where the previous one's end, or with their group.
        grouping, grouped = self._grid.grouping, self._grid.grouped
        group = grouping.of(piece.start) if grouped else 0
        for name, counts in piece.counts.items():
            begin = group * self._most[name] if grouped else 0
            if piece.start == grouping.edges[group]:
                self._rows[name] = begin
            piece.first_row[name] = self._rows[name]
            self._rows[name] += int(counts.sum())
            rows = self._rows[name] - begin
            if grouped and rows > int(grouping.rows[name][group]):
                raise TargetError(
                    f"field {name} has more rows than were counted",
                    where=f"{self.root}, group {group}",
                    expected=int(grouping.rows[name][group]),
                    found=rows,
                    fix="the source has changed: begin again",
                )

    @override
    def write(self, piece: Piece) -> None:
        if not piece.count:
            return
        group, grid = self._grid.grouping.of(piece.start), self._grid
        for number, plan in enumerate(self.arrays):
            first, rows = piece.column(number, plan)
            if plan.whole_files:
                for i, chunks in enumerate(rows, first // plan.file):
                    self._write_file(number, i, chunks)
                    if number == grid.summed:
                        nbytes = sum(map(len, chunks))
                        self._sums.add(group, 0, nbytes, crc32c(b"".join(chunks)))
            elif plan.codec is not None and rows.size:
                with self._opened(self._spool / str(number)) as fd:
                    pwrite_all(fd, [rows], first * plan.row_nbytes)
            elif not grid.zipped or number in grid.ordinary:
                self._write_rows(number, first, rows, group)
        if grid.zipped and grid.tracks:
            self._write_members(piece, group)

    def _write_rows(self, number: int, first: int, rows: Array, group: int) -> None:
        """Write the rows ``first ..`` of an array."""
        plan, offsets = self.arrays[number], self._grid.offsets.get(number)
        last = first + len(rows)
        for file in range(first // plan.file, -(-last // plan.file) if rows.size else 0):
            begin = file * plan.file
            a, b = max(first, begin), min(last, begin + plan.file)
            runs = [((a - begin) * plan.row_nbytes, a, b)]
            if offsets is not None:
                runs = list(spans(offsets, plan.chunk, plan.row_nbytes, a, b))
            nbytes = plan.file_rows(self._grid.rows[number], file) * plan.row_nbytes
            with self._opened(self._file(number, file), 0 if self._grid.zipped else nbytes) as fd:
                for offset, low, high in runs:
                    part = rows[low - first : high - first]
                    if number == self._grid.summed:
                        crc = pwrite_crc32c(fd, [part], offset)
                        self._sums.add(group, offset, part.nbytes, crc)
                    else:
                        pwrite_all(fd, [part], offset)

    def _write_members(self, piece: Piece, group: int) -> None:
        """Write a group of a ZIP file, each chunk behind its local header."""
        track, grid = self._grid.tracks[0], self._grid
        begin, end = int(track.starts[group]), int(track.used[group])
        parts: list[tuple[int, int, int]] = []
        with self._opened(self.root, int(track.ends[-1])) as fd:
            for n in track.numbers:
                plan = self.arrays[n]
                at, crc, crc32 = int(grid.offsets[n][group]), 0, 0
                data = as_bytes(piece.column(n, plan)[1])
                for i in range(0, len(data), CALL_NBYTES):  # in the cache
                    part = data[i : i + CALL_NBYTES]
                    crc32 = zlib.crc32(part, crc32)
                    crc = pwrite_crc32c(fd, [part], at + i, crc)
                crc32 = CRC32.joined([(0, len(data), crc32)], plan.chunk_nbytes)
                header = self._write_header(fd, n, group, crc32)
                parts.append((at - len(header) - begin, len(header), CRC32C.of(header)))
                parts.append((at - begin, len(data), crc))
        parts = sorted(p for p in parts if 0 <= p[0] < end - begin)
        self._sums.add(group, begin, end - begin, CRC32C.joined(parts, end - begin))

    def _write_header(self, fd: int, number: int, chunk: int, crc32: int) -> bytes:
        """Write and return the local header of a member of a ZIP file."""
        header = local_header(self._key(number, chunk), self.arrays[number].chunk_nbytes, crc32)
        pwrite_all(fd, [header], int(self._grid.offsets[number][chunk]) - len(header))
        return header

    def _write_file(self, number: int, i: int, chunks: Sequence[Any]) -> None:
        """Write file `i` of an array, made of encoded chunks."""
        plan, parts = self.arrays[number], list(chunks)
        if plan.sharded:
            sizes = np.array([len(c) for c in chunks], np.int64)
            parts.append(build_index(sizes, plan.file // plan.chunk))
        self._replace(self._file(number, i), parts)

    @override
    def checkpoint(self) -> State:
        return {"rows": dict(self._rows)}

    # --- the end -------------------------------------------------------------------------------

    @override
    def finish(self) -> None:
        if self._grid.zipped:
            self._finish_zip()
            return
        rows = list(self._grid.rows)
        for number, plan in enumerate(self.arrays):
            if plan.role == "values" and not self._grid.grouped:
                rows[number] = self._rows[plan.field.name]
            plan = self.arrays[number] = plan.settled(rows[number])
            if plan.codec is None:
                self._finish_rows(number, rows[number])
            elif not plan.whole_files and rows[number] and plan.row_nbytes:
                self._encode_spool(number, rows[number])
        for name, data in self._grid.describe(rows).items():
            self._replace(self.root / name, [data])
        if self.durable:
            self.sync()
        if self.root != self._path:
            pack(self.root, self._path, self.durable)

    def _finish_rows(self, number: int, rows: int) -> None:
        """Fill the last chunk of each file of an array with zeros, and add the index."""
        plan, placed = self.arrays[number], self._grid.offsets.get(number)
        for i in range(plan.files(rows)):
            rows_in_file = plan.file_rows(rows, i)
            chunks, per = plan.chunks(rows_in_file), plan.file // plan.chunk
            offsets = np.arange(chunks) * plan.chunk_nbytes
            if placed is not None:
                offsets = placed[i * per :][:chunks]
            last = int(offsets[-1])
            with self._opened(self._file(number, i)) as fd:
                if placed is None:
                    truncate(fd, rows_in_file * plan.row_nbytes)
                truncate(fd, last + plan.chunk_nbytes)
                if plan.sharded:
                    sizes = np.full(chunks, plan.chunk_nbytes, np.int64)
                    pwrite_all(fd, [build_index(sizes, per, offsets)], last + plan.chunk_nbytes)

    def _encode_spool(self, number: int, rows: int) -> None:
        """Encode what was collected of an array, one file at a time, its chunks side by side."""
        plan, path, encode = self.arrays[number], self._spool / str(number), self._encode[number]
        if not path.exists() or path.stat().st_size < rows * plan.row_nbytes:
            raise TargetError("the collected samples are gone", where=path)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool, path.open("rb") as spool:
            for i in range(plan.files(rows)):
                values = np.empty((plan.file_rows(rows, i), plan.row_nbytes), np.uint8)
                pread_into(spool.fileno(), values, i * plan.file * plan.row_nbytes, path)
                cuts = (values[at : at + plan.chunk] for at in range(0, len(values), plan.chunk))
                parts = pool.map(lambda rows: encode_file(rows, plan, encode), cuts)
                self._write_file(number, i, [chunk for part in parts for chunk in part])

    def _finish_zip(self) -> None:
        grid, members, at = self._grid, list[Member](), 0
        end = int(grid.tracks[0].ends[-1]) if grid.tracks else grid.front
        with self._opened(self.root) as fd, closing(open_file(self.root)) as file:
            truncate(fd, end)
            for name, data in grid.documents.items():
                header = local_header(name, len(data), crc := CRC32.of(data))
                pwrite_all(fd, [header, data], at)
                members.append((name, len(data), crc, at + len(header)))
                at += len(header) + len(data)
            chunks = [(n, k) for n, offsets in grid.offsets.items() for k in range(len(offsets))]
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                members += pool.map(partial(self._member, fd, file), chunks)
            if self.durable:
                sync(fd, data=True)
            truncate(fd, end + pwrite_all(fd, [directory(members, end)], end))
        if self.durable:
            self.sync()

    def _member(self, fd: int, file: Handle, chunk: tuple[int, int]) -> Member:
        """Return a chunk as a member, with the CRC-32 in its header."""
        number, k = chunk
        name, nbytes = self._key(number, k), self.arrays[number].chunk_nbytes
        at = int(self._grid.offsets[number][k])
        if number in self._grid.ordinary:
            header = self._write_header(fd, number, k, read_crc32(file, at, at + nbytes))
        else:
            header = file.pread(CRC32_END, at - header_nbytes(name))
        return name, nbytes, int.from_bytes(header[CRC32_END - 4 : CRC32_END], "little"), at

    @override
    def clean(self) -> None:
        remove(self._spool)
        if self.root != self._path:
            remove(self.root)

    @override
    def layout(self) -> FileLayout | None:
        # Where it follows from the plan: of fixed fields, as they are.
        plain = all(p.role == "samples" and p.codec is None for p in self.arrays)
        if not plain or self.root != self._path or any("{" in p.path for p in self.arrays):
            return None
        columns = {p.field.name: Column(self._located(n)) for n, p in enumerate(self.arrays)}
        return FileLayout(self._grid.grouping.total, columns=columns)

    def _located(self, number: int) -> LocatedGrid | None:
        """Return the grid of the chunks of an array; None if it has no bytes."""
        plan, rows = self.arrays[number], self._grid.rows[number]
        if not rows * plan.row_nbytes:
            return None
        files, per, placed = plan.files(rows), plan.file // plan.chunk, self._grid.offsets
        alone = files == 1 or self._grid.zipped
        count = plan.chunks(rows) if alone else files * per
        offsets = np.resize(placed.get(number, np.arange(per) * plan.chunk_nbytes), count)
        path = plan.key(0 if alone else None, self._grid.options.zarr_format)
        return LocatedGrid(
            blocks_of(
                offsets, np.full(count, plan.chunk_nbytes), "" if self._grid.zipped else path
            ),
            (rows, *plan.inner),
            plan.stored.itemsize,
            (plan.chunk, *plan.inner),
            None if alone else (per, *(1 for _ in plan.inner)),
        )

    @override
    def groups(self) -> Groups | None:
        # The first track.
        grid, path, files, number, per = self._grid, "", None, 0, 1
        if not grid.grouped:
            return None
        begins = ends = np.zeros(grid.grouping.count, np.int64)
        if grid.tracks:
            number, per = grid.tracks[0].numbers[0], grid.per
            begins, ends = grid.tracks[0].starts, grid.tracks[0].used
            path = "" if grid.zipped else self._key(number, 0)
            if path and per < grid.grouping.count:
                head, _, name = path.rpartition("/")
                path, files = f"{head}/{name.replace('0', '{0}', 1)}", per
            if self.arrays[number].codec is not None:
                sizes = [self._file(number, g).stat().st_size for g in range(grid.grouping.count)]
                ends = begins + sizes
        return stored_groups(
            lambda group: self._file(number, group // per),
            grid.grouping,
            begins,
            ends,
            self._sums.of,
            path,
            files,
        )
