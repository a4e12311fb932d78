"""Writing a Zarr store: dsprep writes the bytes of chunks, zarr-python the metadata.

Uncompressed rows lie one after another in their file, so the place of every row is known as soon
as its number is: pieces are cut anywhere, written in any order by any number of threads, and the
output does not depend on the cut. `ZarrWriter.finish` gives the files their length and index.

Compressed, a piece of the large fixed fields consists of whole files and is encoded when it
comes. All else (small fields, ragged values, whose rows do not end with pieces) is collected as
it is in the directory `SPOOL` and encoded by `ZarrWriter.finish`.

The root's metadata document is written last, when all else is durable: an output that has it is
complete, and an interrupted one is not a Zarr store.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.core.schema import Arena, Array, Batch, Ragged, Schema
from dsprep.core.storage import pread_into, pwrite_all, remove, sync_directory
from dsprep.errors import TargetError
from dsprep.formats.base import State, WriteOptions, Writer
from dsprep.formats.zarr import pack
from dsprep.formats.zarr.codecs import encode_file, encoder
from dsprep.formats.zarr.documents import documents, root_key
from dsprep.formats.zarr.files import Files, stored_rows
from dsprep.formats.zarr.grid import ArrayPlan, plan_arrays
from dsprep.formats.zarr.shards import build_index
from dsprep.formats.zarr.store import Directory

SPOOL = ".dsprep-spool"
"""The directory, inside the output, of what `ZarrWriter.finish` is going to encode."""


@dataclass
class Piece:
    """Consecutive samples on their way to their files.

    Attributes
    ----------
    start
        The first sample.
    rows
        By number of the array: uint8 of shape ``(n, row_nbytes)``, still to be placed.
    counts
        By name of ragged field: rows of each sample, int64.
    files
        Encoded files: the array's number, the file's number, and its chunks.
    first_row
        By name of ragged field: the row of the values where the piece begins; set by `reserve`.
    """

    start: int
    rows: dict[int, Array]
    counts: dict[str, Array]
    files: list[tuple[int, int, list[Any]]]
    first_row: dict[str, int] = field(default_factory=dict)


class ZarrWriter(Writer):
    """A Zarr store being written; see `base.Writer`."""

    def __init__(
        self, path: Path, schema: Schema, count: int, options: WriteOptions, state: State | None
    ) -> None:
        self._path, self._schema, self._count, self._options = path, schema, count, options
        plans, self.unit = plan_arrays(schema, options)
        self._plans = [p if p.role == "values" else p.settled(count) for p in plans]
        self._encode = [encoder(options.compress, p) for p in self._plans]
        self._rows = {f.name: 0 for f in schema if f.ragged}
        self._files = Files()
        self._root = pack.folder(path) if pack.is_zip(path) else path
        marker = self._root / root_key(options.zarr_format)
        if state is None:
            remove(path)
            remove(self._root)
        else:
            self._rows = {name: int(state["rows"][name]) for name in self._rows}
        self._complete = state is not None and marker.exists()
        for name in ("", SPOOL, *(p.path for p in self._plans)):
            (self._root / name).mkdir(parents=True, exist_ok=True)

    def _spooled(self, plan: ArrayPlan) -> bool:
        return self._options.compress is not None and not plan.whole

    def _file(self, number: int, i: int) -> Path:
        """Return where file `i` of an array is."""
        plan = self._plans[number]
        start = "c." if self._options.zarr_format == 3 else ""
        return self._root / plan.path / (start + ".".join(map(str, (i, *(0 for _ in plan.inner)))))

    # --- pieces --------------------------------------------------------------------------------

    def encode(self, batch: Batch, start: int, arena: Arena) -> Piece:
        """See `base.Writer.encode`."""
        piece = Piece(start, {}, {}, [])
        for number, plan in enumerate(self._plans):
            column = batch[plan.field.name]
            if plan.role in ("first", "count"):
                continue
            if isinstance(column, Ragged):
                piece.counts[plan.field.name] = column.lengths
                column = column.values
            rows = stored_rows(column, plan, arena)
            if plan.whole:
                piece.files += self._encoded(number, rows, start)
            else:
                piece.rows[number] = rows
        return piece

    def _encoded(
        self, number: int, rows: Array, start: int
    ) -> Iterator[tuple[int, int, list[Any]]]:
        plan = self._plans[number]
        if plan.row_nbytes:
            for at in range(0, len(rows), plan.file):
                part = rows[at : at + plan.file]
                yield (
                    number,
                    (start + at) // plan.file,
                    encode_file(part, plan, self._encode[number]),
                )

    def reserve(self, piece: Piece) -> None:
        """See `base.Writer.reserve`: a piece's values begin where the previous piece's end."""
        for name, counts in piece.counts.items():
            piece.first_row[name] = self._rows[name]
            self._rows[name] += int(counts.sum())

    def write(self, piece: Piece) -> None:
        """See `base.Writer.write`."""
        if self._complete:
            return
        for number, i, chunks in piece.files:
            self._write_file(number, i, chunks)
        for number, plan in enumerate(self._plans):
            name = plan.field.name
            if plan.role in ("first", "count"):
                counts = piece.counts[name]
                column = counts
                if plan.role == "first":
                    column = np.cumsum(counts) - counts + piece.first_row[name]
                rows = np.ascontiguousarray(column, "<i8").view(np.uint8).reshape(-1, 8)
                self._place(number, piece.start, rows)
            elif number in piece.rows:
                first = piece.first_row[name] if plan.role == "values" else piece.start
                self._place(number, first, piece.rows[number])

    def _place(self, number: int, first: int, rows: Array) -> None:
        """Write the rows ``first ..`` of an array where they belong."""
        plan = self._plans[number]
        if not rows.size:
            return
        if self._spooled(plan):
            with self._files.opened(self._root / SPOOL / str(number)) as fd:
                pwrite_all(fd, [rows], first * plan.row_nbytes)
            return
        last = first + len(rows)
        for i in range(first // plan.file, -(-last // plan.file)):
            a, b = max(first, i * plan.file), min(last, (i + 1) * plan.file)
            with self._files.opened(self._file(number, i)) as fd:
                pwrite_all(fd, [rows[a - first : b - first]], (a - i * plan.file) * plan.row_nbytes)

    def _write_file(self, number: int, i: int, chunks: list[Any]) -> None:
        """Write file `i` of an array, made of encoded chunks."""
        plan = self._plans[number]
        parts = list(chunks)
        if plan.sharded:
            sizes = np.array([len(c) for c in chunks], np.int64)
            parts.append(build_index(sizes, plan.file // plan.chunk))
        self._files.replace(self._file(number, i), parts)

    # --- durability ----------------------------------------------------------------------------

    def checkpoint(self) -> State:
        """See `base.Writer.checkpoint`."""
        return {"rows": dict(self._rows)}

    def sync(self) -> None:
        """See `base.Writer.sync`."""
        self._files.sync()

    def finish(self) -> None:
        """See `base.Writer.finish`."""
        if not self._complete:
            self._finish_arrays()
            self._finish_metadata()
        remove(self._root / SPOOL)
        if self.durable:
            sync_directory(self._root)
        if self._root != self._path:
            pack.pack(self._root, self._path, self.durable)

    def clean(self) -> None:
        """See `base.Writer.clean`: what was packed into a ZIP file is not needed any more."""
        if self._root != self._path:
            remove(self._root)

    def _array_rows(self, plan: ArrayPlan) -> int:
        return self._rows[plan.field.name] if plan.role == "values" else self._count

    def _finish_arrays(self) -> None:
        for number, plan in enumerate(self._plans):
            rows = self._array_rows(plan)
            self._plans[number] = plan = plan.settled(rows)
            if self._spooled(plan) and rows and plan.row_nbytes:
                self._encode_spool(number, rows)
            elif not plan.whole:
                for i in range(plan.files(rows)):
                    self._complete_file(number, i, plan.file_rows(rows, i))

    def _complete_file(self, number: int, i: int, rows: int) -> None:
        """Fill the last chunk of an uncompressed file with zeros, and add the index."""
        plan = self._plans[number]
        chunk_nbytes = plan.chunk * plan.row_nbytes
        chunks = plan.chunks(rows)
        with self._files.opened(self._file(number, i)) as fd:
            os.ftruncate(fd, rows * plan.row_nbytes)
            os.ftruncate(fd, chunks * chunk_nbytes)
            if plan.sharded:
                sizes = np.full(chunks, chunk_nbytes, np.int64)
                index = build_index(sizes, plan.file // plan.chunk)
                pwrite_all(fd, [index], chunks * chunk_nbytes)

    def _encode_spool(self, number: int, rows: int) -> None:
        """Encode what was collected of an array, one file at a time, its chunks side by side."""
        plan = self._plans[number]
        spool = self._root / SPOOL / str(number)
        encode = self._encode[number]
        with (
            ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
            Directory(self._root).chunk(f"{SPOOL}/{number}") as found,
        ):
            if found is None or found.nbytes < rows * plan.row_nbytes:
                raise TargetError("the collected samples are gone", where=spool)
            for i in range(plan.files(rows)):
                count = plan.file_rows(rows, i)
                held = np.empty((count, plan.row_nbytes), np.uint8)
                pread_into(found.fd, held, i * plan.file * plan.row_nbytes, spool)
                self._write_file(number, i, _encode_parallel(held, plan, encode, pool))

    def _finish_metadata(self) -> None:
        """Write the documents, the root's last, each durable before the next matters."""
        arrays = [(p, self._array_rows(p)) for p in self._plans]
        made = documents(self._schema, arrays, self._options)
        last = root_key(self._options.zarr_format)
        root = made.pop(last)
        for key, data in made.items():
            self._files.replace(self._root / key, [data])
        temporary = self._root / SPOOL / "root"
        self._files.replace(temporary, [root])
        if self.durable:
            self.sync()
        temporary.replace(self._root / last)
        if not self.durable:
            return
        for folder in {self._root / p.path for p in self._plans}:
            while folder != self._root:
                sync_directory(folder)
                folder = folder.parent

    def close(self) -> None:
        """See `base.Writer.close`."""
        return


def _encode_parallel(
    rows: Array, plan: ArrayPlan, encode: Callable[[Array], Any], pool: ThreadPoolExecutor
) -> list[Any]:
    """Return the encoded chunks of one file, encoded by a pool of threads."""
    starts = range(0, len(rows), plan.chunk)
    parts = pool.map(lambda at: encode_file(rows[at : at + plan.chunk], plan, encode), starts)
    return [chunk for part in parts for chunk in part]
