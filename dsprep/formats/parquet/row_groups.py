"""Row groups, decoded by pyarrow, a step of rows at a time: all of a small one, a part of others.

What the footer states of them is taken from pyarrow. The rows of a row group are decoded forward,
and its last steps are kept: a step before them begins the row group again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any, TypeAlias

from dsprep.errors import FormatError, UnsupportedError
from dsprep.formats.library import library_errors
from dsprep.formats.options import memory_error
from dsprep.formats.parquet.guard import arrow
from dsprep.storage.base import Handle, for_library

MAGIC, ENCRYPTED = b"PAR1", b"PARE"
KEPT = 4
"""Row groups of which steps stay decoded, and how many of each."""
SMALL, STEP_NBYTES = 64 << 20, 8 << 20
"""Bytes of a row group that is decoded as a whole, and of a step of a larger one."""

Steps: TypeAlias = tuple[Iterator[Any], deque[tuple[int, Any]]]
"""Tables that are still to be decoded, and the first rows of the last ones with these."""


def chunks(metadata: Any, number: int, names: list[str]) -> list[Any]:
    """Return the columns of a row group that are, or are parts of, these: as pyarrow has them."""
    group = metadata.row_group(number)
    paths = (metadata.schema.column(i).path for i in range(group.num_columns))
    columns = [group.column(i) for i, path in enumerate(paths) if is_of(path, names)]
    for chunk in columns:
        if chunk.file_path:
            raise UnsupportedError("the values are in other files", fix="name these")
        if min(chunk.total_uncompressed_size, chunk.total_compressed_size) < 0:
            raise FormatError("the footer states sizes below zero")
    return columns


class RowGroups:
    """The row groups of a file, of the columns that are read; threads may read side by side."""

    def __init__(
        self, file: Handle, metadata: Any, columns: list[str], row_nbytes: int, limit: int
    ) -> None:
        self._file, self._metadata, self._columns = file, metadata, columns
        self.rows = [int(metadata.row_group(i).num_rows) for i in range(metadata.num_row_groups)]
        self.nbytes = []
        self._small, self._step = min(SMALL, limit // 64), min(STEP_NBYTES, limit // 128)
        for number, rows in enumerate(self.rows):
            sizes = {c.path_in_schema: c.total_uncompressed_size for c in self._chunks(number)}
            encoded = sum(sizes.values())
            self.nbytes.append(max(encoded, row_nbytes * rows))
            if 2 * encoded > limit:  # of a page nothing says that it is smaller
                largest = max(sizes, key=lambda path: sizes[path])
                raise memory_error(
                    "a row group cannot be decoded in the memory allowed",
                    2 * encoded,
                    limit,
                    where=f"{file.path}, row group {number}, column {largest}",
                    fix="raise --memory, or leave columns out by naming others with --field",
                )
        self._locks = [threading.Lock() for _ in self.rows]
        self._steps: OrderedDict[int, Steps] = OrderedDict()

    def _chunks(self, number: int) -> list[Any]:
        return chunks(self._metadata, number, self._columns)

    def step(self, number: int) -> int:
        """Return the rows that are decoded together."""
        rows, nbytes = self.rows[number], self.nbytes[number]
        return max(1, rows if nbytes <= self._small else int(self._step * rows // nbytes))

    def read(self, number: int, start: int, stop: int) -> Any:
        """Return rows ``start <= i < stop`` of a row group as a table."""
        where = f"{self._file.path}, row group {number}"
        with library_errors(where, "the row group cannot be decoded"), self._locks[number]:
            tables, kept = self._steps.get(number, (iter(()), deque()))
            if not kept or start < kept[0][0]:
                tables, kept = self._steps[number] = self._tables(number), deque(maxlen=KEPT)
                if len(self._steps) > KEPT:
                    self._steps.popitem(last=False)
            parts, at = [], start
            for first, table in kept:
                if first <= at < first + len(table):
                    parts.append(table.slice(at - first, stop - at))
                    at += len(parts[-1])
            while at < stop:
                first = kept[-1][0] + len(kept[-1][1]) if kept else 0
                table = next(tables, None)
                if table is None:
                    raise FormatError(
                        "the row group has fewer rows than the footer gives",
                        where=where,
                        expected=self.rows[number],
                        found=first,
                    )
                kept.append((first, table))
                if at < first + len(table):
                    parts.append(table.slice(at - first, stop - at))
                    at += len(parts[-1])
            return arrow().concat_tables(parts)

    def _tables(self, number: int) -> Iterator[Any]:
        with arrow().parquet.ParquetFile(
            for_library(self._file),
            metadata=self._metadata,
            buffer_size=0 if self.nbytes[number] <= self._small else 256 << 10,
            pre_buffer=False,
            page_checksum_verification=True,
        ) as opened:
            batches = opened.iter_batches(
                self.step(number), [number], self._columns, use_threads=False
            )
            yield from (arrow().Table.from_batches([batch]) for batch in batches)

    def resident_nbytes(self) -> int:
        """Return the bytes of what is kept decoded."""
        return KEPT * min(max(self.nbytes, default=0), self._small + self._step)

    def close(self) -> None:
        """Release what is decoded."""
        self._steps.clear()


def is_of(path: str, names: list[str]) -> bool:
    """Return whether a leaf is one of these columns, or of a struct or list that is."""
    return path in names or any(path.startswith(f"{name}.") for name in names)
