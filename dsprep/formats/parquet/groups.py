"""Row groups, decoded by pyarrow: small ones as a whole, large ones forward, in steps."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from dsprep.errors import FormatError
from dsprep.formats.parquet.costs import KEPT, Costs, RowGroup
from dsprep.formats.parquet.guard import arrow, library
from dsprep.storage.base import Handle, for_library

BUFFER = 256 << 10
"""Bytes of a large row group that are read at once."""


class _Stream:
    """A large row group being read forward; `at` is the row that `table` begins with."""

    def __init__(self, group: RowGroup, tables: Iterator[Any], where: str) -> None:
        self.group, self._tables, self._where = group, tables, where
        self.at, self.table = 0, self._next(0)

    def _next(self, at: int) -> Any:
        table = next(self._tables, None)
        if table is None:
            raise _other_rows(self._where, self.group.rows, at)
        return table

    def rows(self, start: int, stop: int) -> Any:
        """Return rows of the group as a table; none of those before `at` are there any more."""
        parts = []
        while start < stop:
            end = self.at + len(self.table)
            if start >= end:
                self.at, self.table = end, self._next(end)
                continue
            part = self.table.slice(start - self.at, stop - start)
            parts.append(part)
            start += len(part)
        return arrow().concat_tables(parts)


def _other_rows(where: str, expected: int, rows: int) -> FormatError:
    return FormatError(
        "the row group has another number of rows than the footer gives",
        where=where,
        expected=expected,
        found=rows,
    )


class RowGroups:
    """Rows of a file; safe to use from several threads.

    Parameters
    ----------
    file
        The file, which pyarrow opens once more by its descriptor: it stays the same one even if
        another takes its name.
    metadata
        Its footer.
    columns
        Names of the columns wanted.
    costs
        How each row group is decoded.
    """

    def __init__(self, file: Handle, metadata: Any, columns: list[str], costs: Costs) -> None:
        self._file, self._metadata = file, metadata
        self._columns, self._costs = columns, costs
        self._dictionaries = costs.dictionaries()
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._busy = 0  # large row groups of which a step is being decoded
        self._decoded: OrderedDict[int, Future[Any]] = OrderedDict()
        self._streams: list[_Stream] = []

    def read(self, group: RowGroup, start: int, stop: int) -> Any:
        """Return rows ``start <= i < stop`` of a row group as a table.

        Raises
        ------
        FormatError
            If it is damaged.
        """
        where = f"{self._file.path}, row group {group.number}"
        with library(where, "the row group cannot be decoded"):
            if group.whole:
                return self._read_whole(group, where).slice(start, stop - start)
            return self._forward(group, start, stop, where)

    def _read_whole(self, group: RowGroup, where: str) -> Any:
        with self._lock:
            future = self._decoded.get(group.number)
            mine = future is None
            if future is None:
                future = self._decoded[group.number] = Future()
                while len(self._decoded) > KEPT:
                    self._decoded.popitem(last=False)
            self._decoded.move_to_end(group.number)
        if not mine:
            return future.result()
        try:
            with self._opened(0) as opened:
                table = opened.read_row_group(group.number, self._columns, use_threads=False)
            if len(table) != group.rows:
                raise _other_rows(where, group.rows, len(table))
        except BaseException as error:
            with self._lock:
                self._decoded.pop(group.number, None)
            future.set_exception(error)
            raise
        future.set_result(table)
        return table

    def _forward(self, group: RowGroup, start: int, stop: int, where: str) -> Any:
        limit, stream = self._costs.streams(group), None
        with self._room:
            self._room.wait_for(lambda: self._busy < limit)
            self._busy += 1
            known = [s for s in self._streams if s.group == group and s.at <= start]
            if known:
                stream = max(known, key=lambda s: s.at)
                self._streams.remove(stream)
            del self._streams[max(0, limit - self._busy) :]
        try:
            if stream is None:
                stream = _Stream(group, self._tables(group), where)
            rows = stream.rows(start, stop)
        except BaseException:
            stream = None
            raise
        finally:
            with self._room:
                self._busy -= 1
                self._streams[:0] = [] if stream is None else [stream]
                self._room.notify()
        return rows

    def _tables(self, group: RowGroup) -> Iterator[Any]:
        with self._opened(BUFFER) as opened:
            for batch in opened.iter_batches(
                group.step, [group.number], self._columns, use_threads=False
            ):
                yield arrow().Table.from_batches([batch])

    def _opened(self, buffer: int) -> Any:
        parquet = arrow().parquet
        return parquet.ParquetFile(
            for_library(self._file),
            metadata=self._metadata,
            read_dictionary=self._dictionaries,
            buffer_size=buffer,
            pre_buffer=False,
            page_checksum_verification=True,
        )

    def close(self) -> None:
        """Release what is decoded."""
        with self._lock:
            self._decoded.clear()
            self._streams.clear()
