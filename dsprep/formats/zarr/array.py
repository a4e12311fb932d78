"""One array of a store: rows through its own layout, or by zarr-python where it has none.

An array is located when it is first read: opening a store stays cheap. zarr-python reads what
`dsprep.core.filters` does not decode, and the fill value of chunks that are not there.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import numpy as np

from dsprep.core.schema import Array, Bytes, Field, Schema
from dsprep.errors import FormatError, MissingExtra
from dsprep.formats.located import Unlocated
from dsprep.formats.zarr.attributes import FIELDS
from dsprep.formats.zarr.chunks import MAX_CHUNK, check_chunks, library_errors
from dsprep.formats.zarr.locate import locate
from dsprep.formats.zarr.metadata import ArrayMeta
from dsprep.formats.zarr.store import Store, join
from dsprep.layout.model import Column, FileLayout, Grid
from dsprep.reading.chunks import KEPT
from dsprep.reading.layout_reader import LayoutReader


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
        self._opening, self._decoding = threading.Lock(), threading.Lock()
        self._block: tuple[int, Any] = (-1, None)

    @cached_property
    def grid(self) -> Grid | None:
        """Where the rows are stored; raise as `locate` does."""
        return None if 0 in self.meta.shape else locate(self)

    @cached_property
    def _reader(self) -> LayoutReader | None:
        """What reads rows; None if only zarr does."""
        field = Field(self.meta.path or "/", self.meta.dtype, self.meta.shape[1:])
        try:
            layout = FileLayout(self.count, columns={field.name: Column(self.grid)})
        except Unlocated:
            return None
        return LayoutReader(layout, Schema((field,)), self.store.open, self.where)

    def read(self, start: int, stop: int) -> Array:
        """Return rows ``start <= i < stop``, as stored: of an index table."""
        if self._reader is None:
            rows = self.by_library([(start, stop)])
            return rows.view(self.meta.dtype).reshape(stop - start, *self.meta.shape[1:])
        self.store.verify_crc(self.meta.file_keys(start, stop))
        name = self.meta.path or "/"
        indices = np.arange(start, stop, dtype=np.int64)
        return self._reader.read(indices, (name,))[name]  # type: ignore[return-value]

    def resident_nbytes(self) -> int:
        """Return the bytes of decoded chunks that reading holds: those of a row, and one more."""
        meta = self.meta
        if meta.raw or meta.vlen or not meta.shape:
            return 0
        chunk = min(math.prod(meta.chunk) * meta.dtype.itemsize, MAX_CHUNK)
        across = math.prod(-(-n // c) for n, c in zip(meta.shape[1:], meta.chunk[1:], strict=True))
        return (1 + (across if across * chunk <= KEPT else 1)) * chunk

    # --- zarr-python ---------------------------------------------------------------------------

    def by_library(self, ranges: list[tuple[int, int]]) -> Bytes:
        """Return the bytes of ranges of rows; the rows of the chunks decoded last are kept."""
        if not self.meta.shape:
            return self.element(()).reshape(1).view(np.uint8)
        rows = min(self.meta.chunk[0], max(1, KEPT // max(1, self.meta.row_nbytes)))
        parts = [np.empty((0, *self.meta.shape[1:]), self.meta.dtype)]
        for start, stop in ranges:
            for i in range(start // rows, -(-stop // rows) if stop > start else 0):
                low, high = i * rows, min((i + 1) * rows, self.count)
                block = self.kept(i, partial(self._decode, low, high))
                parts.append(block[max(start, low) - low : min(stop, high) - low])
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
