"""Writing a Zarr store: dsprep writes the bytes of chunks, zarr-python the metadata.

Uncompressed rows are contiguous in their file, so the offset of every row is known as soon as its
number is: pieces are cut anywhere, written in any order by any number of threads, and the output
does not depend on the cut. `finish` gives the files their length and index.

Compressed, a piece of the large fixed fields consists of whole files and is encoded when it
comes. All else (small fields, ragged values, whose rows do not end with pieces) is collected as
it is in the directory `SPOOL` and encoded by `ZarrWriter.finish`.

The root's metadata document is written last, when all else is durable: an output that has it is
complete, and an interrupted one is not a Zarr store.
"""

from __future__ import annotations

import os
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from dsprep.core.groups import seam
from dsprep.core.schema import Arena, Array, Batch, Ints, Ragged, Schema, without_padding
from dsprep.errors import TargetError
from dsprep.formats.base import State, Writer
from dsprep.formats.options import WriteOptions
from dsprep.formats.zarr.chunks import build_index
from dsprep.formats.zarr.documents import documents, encode_file, encoder, root_key
from dsprep.formats.zarr.plan import ArrayPlan, plan_arrays
from dsprep.formats.zarr.store import Directory
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

BLOCK = 4 << 20


class OutputFiles:
    """The files of an output; safe to use from several threads."""

    def __init__(self) -> None:
        self._dirty: set[Path] = set()
        self._written: set[Path] = set()  # since the last `start_sync`
        self._lock = threading.Lock()

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

    def start_sync(self) -> None:
        """See `base.Writer.start_sync`."""
        with self._lock:
            written, self._written = self._written, set()
        for path in written:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            start_sync(fd)
            close_quietly(fd)

    def sync(self) -> None:
        """Make all that has been written durable."""
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
        By number of the array: uint8 of shape ``(n, row_nbytes)``.
    counts
        By name of ragged field: rows of each sample, int64.
    files
        Encoded files: the array's number, the file's number, and its chunks.
    first_row
        By name of ragged field: the row of the values where the piece begins; set by `reserve`.
    """

    start: int
    count: int
    rows: dict[int, Array] = field(default_factory=dict)
    counts: dict[str, Ints] = field(default_factory=dict)
    files: list[tuple[int, int, list[Any]]] = field(default_factory=list)
    first_row: dict[str, int] = field(default_factory=dict)

    def column(self, number: int, plan: ArrayPlan) -> Array:
        """Return the rows of an array: of the index of ragged fields, made from the counts."""
        if plan.role not in ("first", "count"):
            return self.rows[number]
        column = counts = self.counts[plan.field.name]
        if plan.role == "first":
            column = np.cumsum(counts) - counts + self.first_row[plan.field.name]
        return np.ascontiguousarray(column, "<i8").view(np.uint8).reshape(-1, 8)


class StoreWriter(Writer):
    """What writers of stores share: files of contiguous rows, and the metadata at the end."""

    def __init__(
        self, root: Path, schema: Schema, options: WriteOptions, arrays: Sequence[ArrayPlan]
    ) -> None:
        self.root, self.schema, self.options = root, schema, options
        self.arrays, self.files = list(arrays), OutputFiles()

    def make_folders(self, *more: str) -> None:
        """Make the directories of the arrays, and others."""
        for name in ("", *more, *(p.path for p in self.arrays)):
            (self.root / name).mkdir(parents=True, exist_ok=True)

    def key(self, number: int, file: int) -> str:
        """Return the key of a file of an array."""
        return self.arrays[number].key(file, self.options.zarr_format)

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

    def slot(self, number: int, file: int) -> tuple[Path, int]:
        """Return where the rows of a file of an array begin."""
        return self.root / self.key(number, file), 0

    def write_rows(self, number: int, first: int, rows: Array, count: int = 0) -> None:
        """Write the rows ``first ..`` of an array whose rows are contiguous in each file.

        `count`: the rows of the array, for which space is reserved, if they are known.
        """
        plan = self.arrays[number]
        if not rows.size:
            return
        last = first + len(rows)
        for i in range(first // plan.file, -(-last // plan.file)):
            a, b = max(first, i * plan.file), min(last, (i + 1) * plan.file)
            path, offset = self.slot(number, i)
            nbytes = plan.file_rows(count, i) * plan.row_nbytes if count else 0
            with self.files.opened(path, nbytes) as fd:
                at = offset + (a - i * plan.file) * plan.row_nbytes
                pwrite_all(fd, [rows[a - first : b - first]], at)

    def finish_rows(self, number: int, rows: int) -> None:
        """Fill the last chunk of each file of contiguous rows with zeros, and add the index."""
        plan = self.arrays[number]
        chunk_nbytes = plan.chunk * plan.row_nbytes
        for i in range(plan.files(rows)):
            rows_in_file = plan.file_rows(rows, i)
            chunks = plan.chunks(rows_in_file)
            with self.files.opened(self.root / self.key(number, i)) as fd:
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
                self.files.replace(self.root / name, [data])
        temporary = self.root / f"{last}.part"
        self.files.replace(temporary, [made[last]])
        if self.durable:
            self.sync()
            for folder in {self.root / p.path for p in self.arrays}:
                while folder != self.root:
                    sync_directory(folder)
                    folder = folder.parent
        temporary.replace(self.root / last)
        if self.durable:
            sync_directory(self.root)

    @override
    def start_sync(self) -> None:
        self.files.start_sync()

    @override
    def sync(self) -> None:
        self.files.sync()

    @override
    def close(self) -> None:
        return


class ZarrWriter(StoreWriter):
    """A Zarr store without groups being written; see `base.Writer`."""

    def __init__(
        self, path: Path, schema: Schema, count: int, options: WriteOptions, state: State | None
    ) -> None:
        plans, self.unit = plan_arrays(schema, options)
        plans = [p if p.role == "values" else p.settled(count) for p in plans]
        super().__init__(folder(path) if is_zip(path) else path, schema, options, plans)
        self._path, self._count = path, count
        self._encode = [encoder(options.compress, p) for p in plans]
        self._rows = {f.name: 0 for f in schema if f.ragged}
        self._shared = False
        if state is None:
            remove(path)
            remove(self.root)
        else:
            self._rows = {name: int(state["rows"][name]) for name in self._rows}
            self._shared = bool(state["shared"])
        marker = self.root / root_key(options.zarr_format)
        self._complete = state is not None and marker.exists()
        if not self._shared:
            self.make_folders(SPOOL)

    # --- pieces --------------------------------------------------------------------------------

    @override
    def encode(self, batch: Batch, start: int, arena: Arena) -> Piece:
        piece = super().encode(batch, start, arena)
        for number, plan in enumerate(self.arrays):
            if plan.whole_files:
                rows = piece.rows.pop(number)
                for at in range(0, len(rows) if plan.row_nbytes else 0, plan.file):
                    chunks = encode_file(rows[at : at + plan.file], plan, self._encode[number])
                    piece.files.append((number, (start + at) // plan.file, chunks))
        return piece

    @override
    def reserve(self, piece: Piece) -> None:
        # A piece's values begin where the previous piece's end.
        for name, counts in piece.counts.items():
            piece.first_row[name] = self._rows[name]
            self._rows[name] += int(counts.sum())

    @override
    def write(self, piece: Piece) -> None:
        if self._complete:
            return
        for number, i, chunks in piece.files:
            self._write_file(number, i, chunks)
        for number, plan in enumerate(self.arrays):
            if not plan.whole_files:
                first = piece.first_row[plan.field.name] if plan.role == "values" else piece.start
                count = 0 if plan.role == "values" else self._count
                self.write_rows(number, first, piece.column(number, plan), count)

    def write_rows(self, number: int, first: int, rows: Array, count: int = 0) -> None:
        """Write rows, or collect them to be compressed."""
        if self.options.compress is None:
            super().write_rows(number, first, rows, count)
        elif rows.size:
            with self.files.opened(self.root / SPOOL / str(number)) as fd:
                pwrite_all(fd, [rows], first * self.arrays[number].row_nbytes)

    def _write_file(self, number: int, i: int, chunks: list[Any]) -> None:
        """Write file `i` of an array, made of encoded chunks."""
        plan = self.arrays[number]
        parts = list(chunks)
        if plan.sharded:
            sizes = np.array([len(c) for c in chunks], np.int64)
            parts.append(build_index(sizes, plan.file // plan.chunk))
        self.files.replace(self.root / self.key(number, i), parts)

    # --- the end -------------------------------------------------------------------------------

    @override
    def checkpoint(self) -> State:
        return {"rows": dict(self._rows), "shared": self._shared}

    @override
    def skip(self, stop: int) -> int | None:
        # Rows of a ragged field are counted as they come.
        self._shared = True
        rows = [plan.row_nbytes for plan in self.arrays]
        return None if self._rows else seam(stop, self._count, rows, self.unit)

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
        remove(self.root / SPOOL)
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
        plan = self.arrays[number]
        spool = self.root / SPOOL / str(number)
        encode = self._encode[number]
        with (
            ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
            Directory(self.root).chunk(f"{SPOOL}/{number}") as collected,
        ):
            if collected is None or collected.nbytes < rows * plan.row_nbytes:
                raise TargetError("the collected samples are gone", where=spool)
            for i in range(plan.files(rows)):
                count = plan.file_rows(rows, i)
                values = np.empty((count, plan.row_nbytes), np.uint8)
                pread_into(collected.fd, values, i * plan.file * plan.row_nbytes, spool)
                self._write_file(number, i, _encode_parallel(values, plan, encode, pool))


def _encode_parallel(
    rows: Array, plan: ArrayPlan, encode: Callable[[Array], Any], pool: ThreadPoolExecutor
) -> list[Any]:
    """Return the encoded chunks of one file, encoded by a pool of threads."""
    starts = range(0, len(rows), plan.chunk)
    parts = pool.map(lambda at: encode_file(rows[at : at + plan.chunk], plan, encode), starts)
    return [chunk for part in parts for chunk in part]


# --- a finished store in one ZIP file ------------------------------------------------------------


def folder(path: Path) -> Path:
    """Return the directory, beside the ZIP file `path`, in which its store is built."""
    return path.with_name(path.name + ".parts")


def is_zip(path: Path) -> bool:
    """Whether an output of this name is a ZIP file; ``out.zarr.zip.part`` is one in the making."""
    return ".zip" in path.suffixes


def pack(root: Path, path: Path, durable: bool) -> None:
    """Make the directory `root` the ZIP file `path`. Can be repeated if interrupted."""
    with path.open("wb") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as target:
            for member in members(root):
                add(target, root, member)
        if durable:
            file.flush()
            sync(file.fileno())
    if durable:
        sync_directory(path.parent)


def members(root: Path) -> list[str]:
    """Return the names of all files under `root`, sorted, but for directories of dsprep's own."""
    names = []
    for where, folders, files in os.walk(root):
        folders[:] = [f for f in folders if not f.startswith(".dsprep")]
        inside = os.path.relpath(where, root)
        names += [f if inside == "." else f"{inside}/{f}" for f in files]
    return sorted(names)


def add(target: zipfile.ZipFile, root: Path, member: str) -> None:
    """Add one file."""
    info = zipfile.ZipInfo(member, (1980, 1, 1, 0, 0, 0))
    info.external_attr = 0o100644 << 16
    source = root / member
    info.file_size = source.stat().st_size
    with source.open("rb") as file, target.open(info, "w") as out:
        shutil.copyfileobj(file, out, BLOCK)
