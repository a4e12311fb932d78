"""One array of a store: rows through its own layout, or by zarr-python where it has none.

An array is located when it is first read: opening a store stays cheap. zarr-python reads what
`dsprep.core.filters` does not decode, and says what chunks hold that are not there.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from dsprep.core.schema import Array, Field, Ints
from dsprep.errors import FormatError, MissingExtra
from dsprep.formats.index_tables import LocatedRows
from dsprep.formats.located import Unlocated
from dsprep.formats.zarr.attributes import FIELDS
from dsprep.formats.zarr.chunks import library_errors, read_chunks
from dsprep.formats.zarr.locate import check_names, locate, stored_files
from dsprep.formats.zarr.metadata import ArrayMeta
from dsprep.formats.zarr.store import Store, join
from dsprep.layout.model import Column, Grid
from dsprep.reading.chunks import KEPT


class StoredArray:
    """One array of a store, opened for reading; safe to use from several threads.

    `complete`: dsprep wrote it, so a missing file is damage and does not stand for the fill value.
    `dtype` is that of an element as stored, `count` the number of rows, `nbytes` that of values.
    """

    def __init__(self, meta: ArrayMeta, store: Store) -> None:
        self.meta, self.store = meta, store
        self.dtype, self.shape, self.vlen = meta.dtype, meta.shape, meta.vlen
        self.count = (meta.shape or (0,))[0]
        self.nbytes = 0 if meta.vlen else math.prod(meta.shape) * meta.dtype.itemsize
        self.where = f"{store.path}, array {meta.path or '/'}"
        self.complete = False
        self._decoding = threading.Lock()
        self._block: tuple[int, Array] = (-1, np.empty(0))

    @cached_property
    def files(self) -> Ints:
        """The files that are there, as `stored_files` gives them."""
        return stored_files(self.store, self.meta)

    @cached_property
    def grid(self) -> Grid | None:
        """The places of rows; raise as `locate` does."""
        return None if 0 in self.meta.shape else locate(self)

    @cached_property
    def _rows(self) -> LocatedRows | None:
        """The rows at their places; None if only zarr reads them."""
        field = Field(self.meta.path or "/", self.meta.dtype, self.meta.shape[1:])
        try:
            column = Column(self.grid)
        except Unlocated:
            return None
        return LocatedRows(field, self.count, column, self.store.open, self.where)

    def read(self, start: int, stop: int) -> Array:
        """Return rows ``start <= i < stop``, as stored: of an index table."""
        if self._rows is None:
            return self.by_library([(start, stop)])
        self.store.verify_crc(self.meta.file_keys(start, stop))
        return self._rows.read(start, stop)

    # --- zarr-python ---------------------------------------------------------------------------

    @property
    def _block_rows(self) -> int:
        """Rows that zarr decodes together: those of a file, or what may be kept."""
        return min(self.meta.grid[0], max(1, KEPT // max(1, self.meta.row_nbytes)))

    def resident_nbytes(self) -> int:
        """Return the bytes that `by_library` holds: rows that are kept, and those of a chunk."""
        return 2 * self._block_rows * self.meta.row_nbytes if self.meta.shape else 0

    def by_library(self, ranges: list[tuple[int, int]]) -> Array:
        """Return ranges of rows; reads are smaller than many a chunk, so the last ones are kept."""
        if not self.meta.shape:
            return self._decode(0, 1)
        rows, parts = self._block_rows, []
        for start, stop in ranges:
            for i in range(start // rows, -(-stop // rows) if stop > start else 0):
                low, high = i * rows, min((i + 1) * rows, self.count)
                with self._decoding:
                    if self._block[0] != i:
                        self._block = i, self._decode(low, high)
                    block = self._block[1]
                parts.append(block[max(start, low) - low : min(stop, high) - low])
        return np.concatenate(parts or [np.empty((0, *self.meta.shape[1:]), self.meta.dtype)])

    def _decode(self, start: int, stop: int) -> Array:
        """Return rows ``start <= i < stop``: C-contiguous, as stored; objects if they vary."""
        shape, varies = self.meta.shape, self.meta.vlen
        with library_errors(f"{self.where}, rows {start} to {stop}"):
            keys = self.meta.file_keys(start, stop) if shape else [self.meta.key()]
            files = read_chunks(self, keys)
            if not files:
                check_names(self)
            library = self._library(files)
            values = np.asarray(library[start:stop] if shape else library[()])
            if values.shape != ((stop - start, *shape[1:]) if shape else ()):
                raise FormatError("the data have the wrong shape", where=self.where)
            return np.ascontiguousarray(values, None if varies else self.meta.dtype)

    def missing(self, key: str, detail: str | None = None) -> FormatError:
        """Return the error for a file that dsprep wrote and that is gone."""
        return FormatError(
            "a chunk file is missing",
            where=f"{self.store.path}, {key}",
            found=detail,
            fix="restore it; if zarr-python removed it because it held zeros only, "
            f"remove the attribute {FIELDS} of the store",
        )

    def fill_value(self) -> bytes:
        """Return an element of chunks that are not there."""
        with library_errors(self.where):
            value = self._library({}).fill_value
            filled = np.zeros((), self.dtype) if value is None else np.asarray(value, self.dtype)
            return filled.tobytes()

    def _library(self, files: Mapping[str, bytes]) -> Any:
        """Return zarr-python's array, of files in memory: they have been looked at."""
        import zarr
        from zarr.core.buffer import default_buffer_prototype

        path, version = self.meta.path, self.meta.version
        names = ("zarr.json",) if version == 3 else (".zarray", ".zattrs")
        read = {join(path, name): self.store.document(join(path, name)) for name in names}
        make = default_buffer_prototype().buffer.from_bytes
        buffers = {key: make(data) for key, data in {**read, **files}.items() if data is not None}
        store = zarr.storage.MemoryStore(buffers, read_only=True)
        try:
            return zarr.open_array(store, path=path, mode="r", zarr_format=version)
        except (KeyError, ValueError) as error:
            lacking = [name for name in self.meta.codecs if name in str(error)]
            if not lacking:
                raise
            raise MissingExtra(
                f"codec {lacking[0]} is not installed",
                where=self.where,
                fix="install the package that provides it, such as imagecodecs or pcodec",
            ) from error
