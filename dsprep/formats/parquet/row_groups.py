"""Row groups, decoded by pyarrow: small ones as a whole, large ones a step of rows at a time.

What the footer states of them is taken from pyarrow. Of a large row group the rows are decoded
forward, and the last steps are kept: a step before them begins the row group again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dsprep.errors import FormatError, UnsupportedError
from dsprep.formats.options import not_enough
from dsprep.formats.parquet.guard import arrow, library
from dsprep.storage.base import Handle, for_library

MAGIC, ENCRYPTED = b"PAR1", b"PARE"
KEPT = 4
"""Small row groups, or steps of each large one, that stay decoded."""
SMALL, STEP_NBYTES = 64 << 20, 8 << 20
"""Bytes of a row group that is decoded as a whole, and of a step of a larger one."""


@dataclass(frozen=True)
class Chunk:
    """A column of a row group: its path, codec, bytes encoded and stored, and nulls if known."""

    name: str
    codec: str
    encoded: int
    stored: int
    nulls: int | None


def chunks_of(metadata: Any, number: int) -> list[Chunk]:
    """Return the columns of a row group, as the footer states them."""
    group, chunks = metadata.row_group(number), []
    for i in range(group.num_columns):
        c = group.column(i)
        if c.file_path:
            raise UnsupportedError("the values are in other files", fix="name these")
        known = c.is_stats_set and c.statistics.has_null_count
        nulls = int(c.statistics.null_count) if known else None
        codec = str(c.compression).lower().replace("uncompressed", "none")
        sizes = int(c.total_uncompressed_size), int(c.total_compressed_size)
        if min(*sizes, nulls or 0) < 0:
            raise FormatError("the footer states sizes below zero")
        chunks.append(Chunk(c.path_in_schema, codec, *sizes, nulls))
    return chunks


class RowGroups:
    """The row groups of a file, of the columns that are read; threads may read side by side."""

    def __init__(
        self, file: Handle, metadata: Any, columns: list[str], row_nbytes: int, limit: int
    ) -> None:
        self._file, self._metadata, self._columns = file, metadata, columns
        self.rows = [int(metadata.row_group(i).num_rows) for i in range(metadata.num_row_groups)]
        self.chunks = [chunks_of(metadata, i) for i in range(len(self.rows))]
        encoded = [sum(c.encoded for c in part if is_of(c.name, columns)) for part in self.chunks]
        self.nbytes = [max(n, row_nbytes * k) for n, k in zip(encoded, self.rows, strict=True)]
        self._small, self._step = min(SMALL, limit // 64), min(STEP_NBYTES, limit // 128)
        for number, nbytes in enumerate(encoded):
            if 2 * nbytes > limit:  # of a page nothing says that it is smaller
                largest = max(self.chunks[number], key=lambda c: c.encoded * is_of(c.name, columns))
                raise not_enough(
                    "a row group cannot be decoded in the memory allowed",
                    2 * nbytes,
                    limit,
                    where=f"{file.path}, row group {number}, column {largest.name}",
                    fix="raise --memory, or leave columns out by naming others with --field",
                )
        self._locks = [threading.Lock() for _ in self.rows]
        self._whole = lru_cache(KEPT)(self._read_whole)
        self._streams: dict[int, tuple[Iterator[Any], deque[tuple[int, Any]]]] = {}

    def step(self, number: int) -> int:
        """Return the rows that are decoded together."""
        rows, nbytes = self.rows[number], self.nbytes[number]
        return max(1, rows if nbytes <= self._small else int(self._step * rows // nbytes))

    def read(self, number: int, start: int, stop: int) -> Any:
        """Return rows ``start <= i < stop`` of a row group as a table."""
        where = f"{self._file.path}, row group {number}"
        with library(where, "the row group cannot be decoded"), self._locks[number]:
            if self.nbytes[number] <= self._small:
                return self._whole(number).slice(start, stop - start)
            return self._forward(number, start, stop)

    def _read_whole(self, number: int) -> Any:
        with self._opened(0) as opened:
            table = opened.read_row_group(number, self._columns, use_threads=False)
        if len(table) != self.rows[number]:
            raise self._wrong(number, len(table))
        return table

    def _forward(self, number: int, start: int, stop: int) -> Any:
        tables, kept = self._streams.get(number, (iter(()), deque()))
        if not kept or start < kept[0][0]:
            tables, kept = self._tables(number), deque(maxlen=KEPT)
            self._streams[number] = tables, kept
        parts, at = [], start
        for first, table in kept:
            if first <= at < first + len(table):
                parts.append(table.slice(at - first, stop - at))
                at += len(parts[-1])
        while at < stop:
            first = kept[-1][0] + len(kept[-1][1]) if kept else 0
            table = next(tables, None)
            if table is None:
                raise self._wrong(number, first)
            kept.append((first, table))
            if at < first + len(table):
                parts.append(table.slice(at - first, stop - at))
                at += len(parts[-1])
        return arrow().concat_tables(parts)

    def _tables(self, number: int) -> Iterator[Any]:
        with self._opened(256 << 10) as opened:
            batches = opened.iter_batches(
                self.step(number), [number], self._columns, use_threads=False
            )
            yield from (arrow().Table.from_batches([batch]) for batch in batches)

    def _wrong(self, number: int, rows: int) -> FormatError:
        return FormatError(
            "the row group has another number of rows than the footer gives",
            where=f"{self._file.path}, row group {number}",
            expected=self.rows[number],
            found=rows,
        )

    def _opened(self, buffer: int) -> Any:
        return arrow().parquet.ParquetFile(
            for_library(self._file),
            metadata=self._metadata,
            buffer_size=buffer,
            pre_buffer=False,
            page_checksum_verification=True,
        )

    def resident_nbytes(self) -> int:
        """Return the bytes of what is kept decoded."""
        return KEPT * min(max(self.nbytes, default=0), self._small + self._step)

    def close(self) -> None:
        """Release what is decoded."""
        self._whole.cache_clear()
        self._streams.clear()


def is_of(path: str, names: list[str]) -> bool:
    """Whether a leaf is one of these columns, or of a struct or list that is."""
    return path in names or any(path.startswith(f"{name}.") for name in names)
