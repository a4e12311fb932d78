"""One array of a store: rows through its own layout, or by zarr-python where it has none.

An array is located when it is first read: opening a store stays cheap. zarr-python reads what
`dsprep.core.filters` does not decode, and the fill value of chunks that are not there.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from dsprep.core.memory import free_memory
from dsprep.core.schema import Arena, Array, Bytes, Field, Ints, Schema
from dsprep.errors import FormatError, MissingExtra
from dsprep.formats.located import Unlocated
from dsprep.formats.zarr.attributes import FIELDS
from dsprep.formats.zarr.chunks import MAX_CHUNK, check_chunks, library_errors
from dsprep.formats.zarr.locate import locate
from dsprep.formats.zarr.metadata import ArrayMeta
from dsprep.formats.zarr.store import Store, join
from dsprep.layout.model import Column, FileLayout
from dsprep.reading.chunks import KEPT
from dsprep.reading.columns import PendingRead, fetch
from dsprep.reading.layout_reader import LayoutReader

LARGE = 256 << 20
"""Bytes of rows above which a read first looks whether they fit into memory."""


class StoredArray:
    """One array of a store, opened for reading; safe to use from several threads.

    `complete`: dsprep wrote it, so a missing file is damage and does not stand for the fill value.
    `dtype` is that of an element as stored, `count` the number of rows.
    """

    def __init__(self, meta: ArrayMeta, store: Store) -> None:
        self.meta, self.store = meta, store
        self.dtype, self.count = meta.dtype, (meta.shape or (0,))[0]
        self.where = f"{store.path}, array {meta.path or '/'}"
        self.complete = False
        self._array: Any = None
        self._opening, self._lock, self._decoding = (threading.Lock() for _ in range(3))
        self._located: Column | None = None
        self._rows: LayoutReader | None = None
        self._unlocated = False
        self._block: tuple[int, Any] = (-1, None)

    # --- rows ----------------------------------------------------------------------------------

    def column(self, lines: int = 1) -> Column:
        """Return where the rows are stored, `lines` of them a sample; raise as `locate` does."""
        if 0 in self.meta.shape:
            return Column(None, lines)
        return Column(locate(self), lines)

    def begin(self, first: Ints, count: Ints, arena: Arena | None, key: str) -> PendingRead:
        """Return what reading ranges of rows needs; see `ColumnReader.begin_rows`.

        Parameters
        ----------
        first, count
            int64, shape ``(n,)``: rising ranges. Of an array without axes, row 0 is its value.

        Raises
        ------
        FormatError
            If a file of these rows is damaged.
        """
        if not count.any() or 0 in self.meta.shape:
            return PendingRead(0, [], lambda _: np.empty(0, np.uint8))
        low, high = int(first[0]), int((first + count).max())
        nbytes = int(count.sum()) * self.meta.row_nbytes
        if nbytes > LARGE and nbytes > free_memory():
            raise FormatError(
                "the rows are too large for the memory",
                where=f"{self.where}, rows {low} to {high}",
                found=f"{nbytes} bytes",
                fix="the metadata are damaged, or read fewer samples at a time",
            )
        reader = self._reader()
        if reader is None:
            ranges = list(zip(first.tolist(), count.tolist(), strict=True))
            return PendingRead(0, [], lambda _: self._by_library(ranges))
        if self.meta.shape:
            self.store.verify_crc(self.meta.file_keys(low, high))
        (column,) = reader.columns.values()
        return column.begin_rows(first, count, arena, key)

    def _reader(self) -> LayoutReader | None:
        """Return the reader of all rows; None if only zarr reads them."""
        with self._lock:
            if self._rows is None and not self._unlocated:
                try:
                    located = self._located = self._located or self.column()
                except Unlocated:
                    self._unlocated = True
                    return None
                assert located.grid is not None
                field = Field(self.meta.path or "/", self.meta.dtype, self.meta.shape[1:])
                layout = FileLayout(located.grid.shape[0], columns={field.name: located})
                self._rows = LayoutReader(layout, Schema((field,)), self.store.open, self.where)
            return self._rows

    def read(self, start: int, stop: int) -> Array:
        """Return rows ``start <= i < stop``, as stored."""
        first, count = np.array([start], np.int64), np.array([stop - start], np.int64)
        pending = self.begin(first, count, None, "")
        rows: Bytes = fetch({self.meta.path: pending}, None)[self.meta.path]  # type: ignore[assignment]
        return rows.view(self.meta.dtype).reshape(stop - start, *self.meta.shape[1:])

    def release(self) -> None:
        """Free the chunks that are kept decoded."""
        with self._lock:
            self._rows = None

    def resident_nbytes(self) -> int:
        """Return the bytes of decoded chunks that reading holds: those of a row, and one more."""
        meta = self.meta
        if meta.raw or meta.vlen or not meta.shape:
            return 0
        chunk = min(math.prod(meta.chunk) * meta.dtype.itemsize, MAX_CHUNK)
        across = math.prod(-(-n // c) for n, c in zip(meta.shape[1:], meta.chunk[1:], strict=True))
        return (1 + (across if across * chunk <= KEPT else 1)) * chunk

    # --- zarr-python ---------------------------------------------------------------------------

    def _by_library(self, ranges: list[tuple[int, int]]) -> Bytes:
        """Return the bytes of ranges of rows; the rows of the chunks decoded last are kept."""
        if not self.meta.shape:
            return self.element(()).reshape(1).view(np.uint8)
        rows = min(self.meta.chunk[0], max(1, KEPT // max(1, self.meta.row_nbytes)))
        parts = []
        for start, count in ranges:
            for i in range(start // rows, -(-(start + count) // rows)):
                low, high = i * rows, min((i + 1) * rows, self.count)
                block = self.kept(i, partial(self._decode, low, high))
                parts.append(block[max(start, low) - low : min(start + count, high) - low])
        return np.concatenate(parts).reshape(-1).view(np.uint8)

    def kept(self, number: int, decode: Callable[[], Any]) -> Any:
        """Return block `number`, which `decode` makes if it is not the one that was decoded last.

        Reads are smaller than the chunks of many a store.
        """
        with self._decoding:
            if self._block[0] != number:
                self._block = number, decode()
            return self._block[1]

    def _decode(self, start: int, stop: int) -> Array:
        """Return rows ``start <= i < stop``: C-contiguous, as stored."""
        with self.reading(start, stop):
            values = np.asarray(self._library()[start:stop])
            if values.shape != (stop - start, *self.meta.shape[1:]):
                raise FormatError("the data have the wrong shape", where=self.where)
            return np.ascontiguousarray(values).astype(self.meta.dtype, copy=False)

    @contextmanager
    def reading(self, start: int, stop: int) -> Iterator[None]:
        """Turn what libraries say of rows into `FormatError`."""
        with library_errors(f"{self.where}, rows {start} to {stop}"):
            keys = list(self.meta.file_keys(start, stop))
            for key in keys if self.complete else ():
                if not self.store.has(key):
                    raise self.missing(key)
            check_chunks(self.store, self.meta, keys)
            yield

    def missing(self, key: str, detail: str | None = None) -> FormatError:
        """Return the error for a file that dsprep wrote and that is gone."""
        return FormatError(
            "a chunk file is missing",
            where=f"{self.store.path}, {key}",
            found=detail,
            fix="restore it; if zarr-python removed it because it held zeros only, "
            f"remove the attribute {FIELDS} of the store",
        )

    def element(self, at: tuple[int, ...]) -> Array:
        """Return an element, as shape ``()``; of an array without axes, its value."""
        with library_errors(self.where):
            value = np.asarray(self._library()[at if self.meta.shape else ()])
            return value if self.meta.vlen else value.astype(self.meta.dtype).reshape(())

    def _library(self) -> Any:
        """Return zarr-python's array, opened once."""
        with self._opening, library_errors(self.where):
            if self._array is None:
                import zarr

                store, prefix = self.store.library()
                path, version = join(prefix, self.meta.path), self.meta.version
                try:
                    self._array = zarr.open_array(store, path=path, mode="r", zarr_format=version)
                except (KeyError, ValueError) as error:
                    lacking = [name for name in self.meta.codecs if name in str(error)]
                    if not lacking:
                        raise
                    raise MissingExtra(
                        f"codec {lacking[0]} is not installed",
                        where=self.where,
                        fix="install the package that provides it, such as imagecodecs or pcodec",
                    ) from error
            return self._array
