"""Writing a Zarr store: dsprep writes the bytes of chunks, zarr-python the metadata.

Uncompressed, the offset of every row is known as soon as its number is: pieces are cut anywhere,
written in any order by any number of threads, and the output does not depend on the cut. `finish`
gives the files their length and index.

Compressed, a piece of the large fixed fields consists of whole files and is encoded when it
comes. All else (small fields, ragged values, whose rows do not end with pieces) is collected as
it is in the directory `SPOOL` and encoded by `ZarrWriter.finish`.

The root's metadata document is written last, when all else is durable: an output that has it is
complete, and an interrupted one is not a Zarr store.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from dsprep.core.schema import Arena, Array, Batch, Ints, Ragged, Schema, without_padding
from dsprep.errors import TargetError
from dsprep.formats.base import State, Writer
from dsprep.formats.options import WriteOptions
from dsprep.formats.zarr.chunks import build_index
from dsprep.formats.zarr.documents import documents, encode_file, encoder, root_key
from dsprep.formats.zarr.plan import ArrayPlan, plan_arrays
from dsprep.formats.zarr.zip_file import is_zip, pack
from dsprep.storage.durable import close, preallocate, start_sync, sync, sync_directory
from dsprep.storage.ranges import (
    CALL_NBYTES,
    Buffer,
    close_quietly,
    fstat,
    pread_into,
    pwrite_all,
    truncate,
)
from dsprep.storage.trees import remove

SPOOL = ".dsprep-spool"
"""The directory, inside the output, of what `ZarrWriter.finish` is going to encode."""


def stored_rows(values: Array, plan: ArrayPlan, arena: Arena) -> Array:
    """Return the rows of `values` as uint8, shape ``(n, row_nbytes)``, C-contiguous."""
    if not plan.row_nbytes:
        return np.empty((len(values), 0), np.uint8)
    values = without_padding(values)
    if not values.flags.c_contiguous:
        rows = arena.empty(f"write.{plan.path}", values.shape, values.dtype)
        rows[...] = values
        values = rows
    return values.reshape(-1).view(np.uint8).reshape(len(values), plan.row_nbytes)


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


class StoreWriter(Writer):
    """What writers of stores share: rows at their places in files, and the metadata at the end.

    Attributes
    ----------
    offsets
        By number of an array: where each of its chunks begins in its file. The chunks of other
        arrays are back to back.
    """

    offsets: Mapping[int, Ints] = {}

    def __init__(
        self, root: Path, schema: Schema, options: WriteOptions, arrays: Sequence[ArrayPlan]
    ) -> None:
        self.root, self.schema, self.options = root, schema, options
        self.arrays = list(arrays)
        self._dirty: set[Path] = set()
        self._written: set[Path] = set()  # since the last `start_sync`
        self._lock = threading.Lock()

    # --- files ---------------------------------------------------------------------------------

    @contextmanager
    def opened(self, path: Path, nbytes: int = 0, access: int = os.O_WRONLY) -> Iterator[int]:
        """Open a file for writing, to be made durable by the next `sync`.

        If it is empty, space is reserved for `nbytes`; the caller truncates it in the end.
        """
        fd = os.open(path, access | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if nbytes > CALL_NBYTES and not fstat(fd).st_size:
                preallocate(fd, 0, nbytes)
            yield fd
        finally:
            close(fd)
            with self._lock:
                self._dirty.add(path)
                self._written.add(path)

    def replace(self, path: Path, parts: Sequence[Buffer]) -> None:
        """Write a whole file."""
        with self.opened(path) as fd:
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

    def make_folders(self, *more: str) -> None:
        """Make the directories of the arrays, and others."""
        for name in ("", *more, *self.names):
            (self.root / name).mkdir(parents=True, exist_ok=True)

    @property
    def names(self) -> list[str]:
        """The paths of all arrays."""
        return [*(p.path for p in self.arrays), *(s.field.name for s in self.schema.static)]

    def path(self, number: int, file: int) -> Path:
        """Return the path of a file of an array."""
        return self.root / self.arrays[number].key(file, self.options.zarr_format)

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
            piece.rows[number] = stored_rows(column, plan, arena)
        return piece

    def spans(self, number: int, first: int, rows: Array) -> Iterator[tuple[int, int, Array]]:
        """Yield the number of a file, an offset in it, and which of the rows ``first ..`` go there.

        Chunks that are back to back are one span.
        """
        plan, last = self.arrays[number], first + len(rows) if rows.size else first
        offsets = self.offsets.get(number)
        unit = plan.file if offsets is None else plan.chunk
        at = first
        while at < last:
            begin, offset = at, -1
            while at < last and begin // plan.file == at // plan.file:
                position = 0 if offsets is None else int(offsets[at // unit])
                position += at % unit * plan.row_nbytes
                if offset >= 0 and position != offset + (at - begin) * plan.row_nbytes:
                    break
                offset = position if offset < 0 else offset
                at = min(last, at - at % unit + unit)
            yield begin // plan.file, offset, rows[begin - first : at - first]

    def write_rows(self, number: int, first: int, rows: Array, count: int = 0) -> None:
        """Write the rows ``first ..`` of an array; space is reserved for `count` rows if given."""
        plan = self.arrays[number]
        for file, offset, part in self.spans(number, first, rows):
            nbytes = plan.file_rows(count, file) * plan.row_nbytes if count else 0
            with self.opened(self.path(number, file), nbytes) as fd:
                pwrite_all(fd, [part], offset)

    def finish_rows(self, number: int, rows: int) -> None:
        """Fill the last chunk of each file of contiguous rows with zeros, and add the index."""
        plan = self.arrays[number]
        chunk_nbytes = plan.chunk * plan.row_nbytes
        for i in range(plan.files(rows)):
            rows_in_file = plan.file_rows(rows, i)
            chunks = plan.chunks(rows_in_file)
            with self.opened(self.path(number, i)) as fd:
                truncate(fd, rows_in_file * plan.row_nbytes)
                truncate(fd, chunks * chunk_nbytes)
                if plan.sharded:
                    sizes = np.full(chunks, chunk_nbytes, np.int64)
                    index = build_index(sizes, plan.file // plan.chunk)
                    pwrite_all(fd, [index], chunks * chunk_nbytes)

    def finish_documents(self, made: Mapping[str, bytes]) -> None:
        """Write the documents, the root's last, each durable before the next matters."""
        last = root_key(self.options.zarr_format)
        for name, data in made.items():
            if name != last:
                self.replace(self.root / name, [data])
        temporary = self.root / f"{last}.part"
        self.replace(temporary, [made[last]])
        if self.durable:
            self.sync()
            for folder in {self.root / name for name in self.names}:
                while folder != self.root:
                    sync_directory(folder)
                    folder = folder.parent
        temporary.replace(self.root / last)
        if self.durable:
            sync_directory(self.root)

    @override
    def close(self) -> None:
        return


class ZarrWriter(StoreWriter):
    """A Zarr store without groups being written; see `base.Writer`.

    A ZIP file is built as a directory beside it, which `finish` packs.
    """

    def __init__(
        self, path: Path, schema: Schema, count: int, options: WriteOptions, state: State | None
    ) -> None:
        plans, self.unit = plan_arrays(schema, options)
        plans = [p if p.role == "values" else p.settled(count) for p in plans]
        root = path.with_name(path.name + ".parts") if is_zip(path) else path
        super().__init__(root, schema, options, plans)
        self._path, self._count, self._spool = path, count, root / SPOOL
        self._encode = [encoder(options.compress, p) for p in plans]
        self._rows = {f.name: 0 for f in schema if f.ragged}
        if state is None:
            remove(path)
            remove(self.root)
        else:
            self._rows = {name: int(state["rows"][name]) for name in self._rows}
        marker = self.root / root_key(options.zarr_format)
        self._complete = state is not None and marker.exists()
        self.make_folders(SPOOL)

    @override
    def reserve(self, piece: Piece) -> None:
        # A piece's values begin where the previous piece's end.
        for name, counts in piece.counts.items():
            piece.first_row[name] = self._rows[name]
            self._rows[name] += int(counts.sum())

    @override
    def encode(self, batch: Batch, start: int, arena: Arena) -> Piece:
        # Of compressed large fields the rows are encoded files.
        piece = super().encode(batch, start, arena)
        for number, plan in enumerate(self.arrays):
            if plan.whole_files and plan.row_nbytes:
                rows = piece.rows[number]
                cuts = (rows[at : at + plan.file] for at in range(0, len(rows), plan.file))
                piece.rows[number] = [encode_file(c, plan, self._encode[number]) for c in cuts]
        return piece

    @override
    def write(self, piece: Piece) -> None:
        for number, plan in enumerate(self.arrays if not self._complete else ()):
            first, rows = piece.column(number, plan)
            if plan.whole_files and plan.row_nbytes:
                for i, chunks in enumerate(rows, first // plan.file):
                    self._write_file(number, i, chunks)
            elif self.options.compress is None:
                self.write_rows(number, first, rows, 0 if plan.role == "values" else self._count)
            elif rows.size:
                with self.opened(self._spool / str(number)) as fd:
                    pwrite_all(fd, [rows], first * plan.row_nbytes)

    def _write_file(self, number: int, i: int, chunks: Sequence[Any]) -> None:
        """Write file `i` of an array, made of encoded chunks."""
        plan, parts = self.arrays[number], list(chunks)
        if plan.sharded:
            sizes = np.array([len(c) for c in chunks], np.int64)
            parts.append(build_index(sizes, plan.file // plan.chunk))
        self.replace(self.path(number, i), parts)

    @override
    def checkpoint(self) -> State:
        return {"rows": dict(self._rows)}

    @override
    def finish(self) -> None:
        if not self._complete:
            rows = [
                self._rows[p.field.name] if p.role == "values" else self._count for p in self.arrays
            ]
            self.arrays = [p.settled(n) for p, n in zip(self.arrays, rows, strict=True)]
            for number, (plan, count) in enumerate(zip(self.arrays, rows, strict=True)):
                if self.options.compress is None:
                    self.finish_rows(number, count)
                elif not plan.whole_files and count and plan.row_nbytes:
                    self._encode_spool(number, count)
            arrays = list(zip(self.arrays, rows, strict=True))
            self.finish_documents(documents(self.schema, arrays, self.options))
        remove(self._spool)
        if self.durable:
            sync_directory(self.root)
        if self.root != self._path:
            pack(self.root, self._path, self.durable)

    @override
    def clean(self) -> None:
        # What was packed into a ZIP file is not needed any more.
        if self.root != self._path:
            remove(self.root)

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
