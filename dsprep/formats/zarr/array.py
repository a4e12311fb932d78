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
from typing import Any, Generic, TypeVar

import numpy as np

from dsprep.core.schema import Arena, Array, Bytes, DType, Field, Ints, Schema
from dsprep.errors import FormatError, MissingExtra
from dsprep.formats.zarr.attributes import FIELDS
from dsprep.formats.zarr.chunks import MAX_CHUNK, check_chunks, library_errors
from dsprep.formats.zarr.locate import Located, Step, Unlocated, locate
from dsprep.formats.zarr.metadata import NUMCODECS, ArrayMeta
from dsprep.formats.zarr.store import Store, join
from dsprep.layout.model import Column, FileLayout
from dsprep.reading.chunks import KEPT
from dsprep.reading.columns import PendingRead, fetch
from dsprep.reading.layout_reader import LayoutReader

EDGES = 8
"""Reads of more chunks than this decode those at their two ends for themselves."""

LARGE = 256 << 20
"""Bytes of rows above which a read first looks whether the files can hold so much."""

T = TypeVar("T")


class LastBlock(Generic[T]):
    """The block that was decoded last, kept for the reads that follow it.

    Reads are smaller than the chunks of many a store; without this, a chunk of 64 MB would be
    decoded once for every 8 MB that are read of it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest: tuple[int, T] | None = None

    def get(self, number: int, decode: Callable[[], T]) -> T:
        """Return block `number`, which `decode` makes if it is not the one that is held."""
        with self._lock:
            if self._latest is None or self._latest[0] != number:
                self._latest = number, decode()
            return self._latest[1]


class StoredArray:
    """One array of a store, opened for reading; safe to use from several threads.

    `complete`: dsprep wrote it, so a missing file is damage and does not stand for the fill value.
    """

    def __init__(self, meta: ArrayMeta, store: Store) -> None:
        self.meta = meta
        self.store = store
        self.where = f"{store.path}, array {meta.path or '/'}"
        self.complete = False
        self._array: Any = None
        self._opening, self._lock = threading.Lock(), threading.Lock()
        self._located: Located | None = None
        self._rows: LayoutReader | None = None
        self._unlocated = False
        self._block: LastBlock[Array] = LastBlock()

    def __len__(self) -> int:
        return self.meta.shape[0]

    @property
    def dtype(self) -> DType:
        """Of an element, as stored."""
        return self.meta.dtype

    @property
    def count(self) -> int:
        """How many rows it has."""
        return len(self)

    # --- rows ----------------------------------------------------------------------------------

    def column(self, step: Step, lines: int = 1) -> Column:
        """Return where the rows are stored, `lines` of them a sample; raise as `locate` does."""
        if 0 in self.meta.shape:
            return Column(None, lines)
        return Column(locate(self, step), lines)

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
        self._check_stored(low, high)
        reader = self._reader(low, high)
        if reader is None:
            ranges = list(zip(first.tolist(), count.tolist(), strict=True))
            return PendingRead(0, [], lambda _: self._by_library(ranges))
        if self.meta.shape:
            self.store.verify_crc(self.meta.file_keys(low, high))
        (column,) = reader.columns.values()
        return column.begin_rows(first, count, arena, key)

    def _reader(self, low: int, high: int) -> LayoutReader | None:
        """Return the reader of rows ``low <= i < high``; None if only zarr reads them."""
        meta, files = self.meta, (self.meta.grid or (1,))[0]
        with self._lock:
            if self._unlocated:
                return None
            try:
                self._located = self._located or Located(self)
                known = self._located.grid
                self._located.find(low // files, -(-high // files))
            except Unlocated:
                self._unlocated = True
                return None
            grid = self._located.grid
            if self._rows is None or known is not grid:
                field = Field(meta.path or "/", meta.dtype, meta.shape[1:])
                layout = FileLayout(grid.shape[0], columns={field.name: Column(grid)})
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

    def invalidate(self) -> None:
        """Look for the chunks again before the next read: they were not as expected."""
        with self._lock:
            self._located = self._rows = None

    def resident_nbytes(self) -> int:
        """Return the bytes of decoded chunks that reading holds: those of a row, and one more."""
        meta = self.meta
        if meta.raw or meta.vlen or not meta.shape:
            return 0
        chunk = min(math.prod(meta.chunk) * meta.dtype.itemsize, MAX_CHUNK)
        across = math.prod(-(-n // c) for n, c in zip(meta.shape[1:], meta.chunk[1:], strict=True))
        return (1 + (across if across * chunk <= KEPT else 1)) * chunk

    def _check_stored(self, start: int, stop: int) -> None:
        """Before much memory is taken for rows, see that the files hold about as much."""
        meta = self.meta
        nbytes = (stop - start) * meta.row_nbytes
        if nbytes <= LARGE or meta.outer not in ("", "bytes") or meta.vlen or not meta.shape:
            return
        stored_nbytes, file_nbytes = 0, math.prod(meta.grid) * meta.dtype.itemsize
        for key in meta.file_keys(start, stop):
            with self.store.chunk(key) as chunk:
                stored_nbytes += chunk.nbytes if chunk else min(LARGE, file_nbytes)
            if stored_nbytes >= nbytes:
                return
        raise FormatError(
            "the chunks are too short",
            where=f"{self.where}, rows {start} to {stop}",
            expected=f"{nbytes} bytes",
            found=f"{stored_nbytes}",
            fix="the array is damaged, or far larger than what was written of it",
        )

    # --- zarr-python ---------------------------------------------------------------------------

    def _by_library(self, ranges: list[tuple[int, int]]) -> Bytes:
        """Return the bytes of ranges of rows.

        Where one begins or ends inside a chunk, the next one needs that chunk too: its rows are
        decoded once and kept.
        """
        if not self.meta.shape:
            return self.element(()).reshape(1).view(np.uint8)
        parts, rows = [], self.meta.chunk[0]
        for start, count in ranges:
            stop = start + count
            inside = start % rows or (stop % rows and stop < len(self))
            if not inside or rows * self.meta.row_nbytes > KEPT or count > EDGES * rows:
                parts.append(self._decode(start, stop))
                continue
            for i in range(start // rows, -(-stop // rows)):
                low, high = i * rows, min((i + 1) * rows, len(self))
                a, b = max(start, low), min(stop, high)
                if (a, b) == (low, high):
                    parts.append(self._decode(low, high))
                else:
                    block = self._block.get(i, partial(self._decode, low, high))
                    parts.append(block[a - low : b - low].copy())  # the block is kept
        values = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return values.reshape(-1).view(np.uint8)

    def _decode(self, start: int, stop: int) -> Array:
        """Return rows ``start <= i < stop``: C-contiguous, as stored."""
        with self._reading(start, stop):
            for key in self.meta.file_keys(start, stop) if self.complete else ():
                if not self.store.has(key):
                    raise self.missing(key)
            check_chunks(self.store, self.meta, start, stop)
            values = np.asarray(self.library()[start:stop])
            if values.shape != (stop - start, *self.meta.shape[1:]):
                raise FormatError("the data have the wrong shape", where=self.where)
            return np.ascontiguousarray(values).astype(self.meta.dtype, copy=False)

    @contextmanager
    def _reading(self, start: int, stop: int) -> Iterator[None]:
        """Turn what zarr-python says of rows into `FormatError`; see that their files are the same.

        It opens files by their names: these are looked at before and afterwards.
        """
        with library_errors(f"{self.where}, rows {start} to {stop}"):
            self.store.recognise(self.meta.file_keys(start, stop))
            yield
            self.store.recognise(self.meta.file_keys(start, stop))

    def missing(self, key: str, detail: str | None = None) -> FormatError:
        """Return the error for a file that dsprep wrote and that is gone."""
        return FormatError(
            "a chunk file is missing",
            where=f"{self.store.path}, {key}",
            found=detail,
            fix="restore it; if zarr-python removed it because it held zeros only, "
            f"remove the attribute {FIELDS} of the store",
        )

    def objects(self, start: int, stop: int) -> list[Any]:
        """Return elements ``start <= i < stop`` of an array whose elements vary in length."""
        with self._reading(start, stop):
            check_chunks(self.store, self.meta, start, stop)
            elements: list[Any] = np.asarray(self.library()[start:stop]).tolist()
            return elements

    def element(self, at: tuple[int, ...]) -> Array:
        """Return an element, as shape ``()``; of an array without axes, its value."""
        with library_errors(self.where):
            value = np.asarray(self.library()[at if self.meta.shape else ()])
            return value.astype(self.meta.dtype, copy=False).reshape(())

    def library(self) -> Any:
        """Return zarr-python's array, opened once."""
        with self._opening:
            if self._array is None:
                self.check_codecs()
                import zarr

                with library_errors(self.where):
                    store, prefix = self.store.library()
                    path = join(prefix, self.meta.path)
                    self._array = zarr.open_array(
                        store=store, path=path, mode="r", zarr_format=self.meta.version
                    )
            return self._array

    def check_codecs(self) -> None:
        """Raise `MissingExtra` if a codec is not installed."""
        from numcodecs.registry import codec_registry, entries
        from zarr.registry import get_codec_class

        for name in self.meta.codecs:
            # Of these zarr has the names, and numcodecs the codecs.
            bare = name.removeprefix(NUMCODECS)
            known = bare in codec_registry or bare in entries
            if self.meta.version == 3 and (known or bare == name):
                try:
                    known = get_codec_class(name) is not None
                except (KeyError, ValueError):  # of zarr before 3.2, and its UnknownCodecError
                    known = False
            if not known:
                raise MissingExtra(
                    f"codec {name} is not installed",
                    where=self.where,
                    fix=_package(name),
                )


_PACKAGES = {"pcodec": "pcodec", "zfpy": "zfpy", "msgpack2": "msgpack", "crc32c": "crc32c"}
"""Codecs that numcodecs has only where another package is installed."""


def _package(codec: str) -> str:
    """Return how to install a codec."""
    name = codec.removeprefix(NUMCODECS)
    if name.startswith("imagecodecs_"):
        return "pip install imagecodecs, and register its codecs: imagecodecs.numcodecs"
    if name in _PACKAGES:
        return f"pip install {_PACKAGES[name]}"
    return "install the package that provides it to zarr"
