"""Compressed chunks read and decoded without the HDF5 library, on as many threads as call.

The library decodes under one lock for the whole process. Here the chunks of the common case,
which split only the first axis and are deflated or zstd, shuffled or not, are found once and
then read with ``pread`` and decoded by codecs that release the GIL. A chunk that several threads
want is decoded once, and the decoded chunks that exist at a time are few: see `Encoded.resident`.
"""

from __future__ import annotations

import threading
import zlib
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsprep.errors import FormatError
from dsprep.formats.hdf5.placement import chunk_table
from dsprep.schema import Array
from dsprep.storage import pread_exact

_DEFLATE, _SHUFFLE, _ZSTD = 1, 2, 32015
_BEST_RATIO = {_DEFLATE: 1100, _ZSTD: 1 << 17}
"""How much smaller than its content a chunk can be; what claims more is not allocated."""

_AT_ONCE = 32 << 20
"""Decoded bytes in the making: threads beyond wait, unless none is at work."""

_SMALL, _STEP = 4 << 20, 256 << 10


class Encoded:
    """The chunks of one dataset.

    Parameters
    ----------
    table
        The chunks, as from `dsprep.formats.hdf5.placement.chunk_table`.
    block, row_nbytes
        Rows per chunk, and bytes of one row when decoded.
    filters
        Filter numbers in the order in which they were applied.
    itemsize
        Bytes of an element, for the shuffle.
    """

    def __init__(
        self,
        table: NDArray[Any],
        block: int,
        row_nbytes: int,
        filters: tuple[int, ...],
        itemsize: int,
    ) -> None:
        self._table, self._block, self._row_nbytes = table, block, row_nbytes
        self._filters, self._itemsize = filters, itemsize
        self._nbytes = block * row_nbytes
        self._last: tuple[int, Array | None] = (-1, None)
        self._underway: dict[int, Future[Array]] = {}
        self._lock = threading.Lock()
        self._decoders = threading.BoundedSemaphore(max(1, _AT_ONCE // self._nbytes))

    @property
    def resident(self) -> int:
        """Bytes that reading holds beside its result: a chunk, and what it is made from."""
        return 2 * self._nbytes

    def read(self, fd: int, out: Array, start: int, where: object) -> None:
        """Fill `out`, uint8 of shape ``(n, row_nbytes)``, with the rows from `start` on.

        Raises
        ------
        FormatError
            If a chunk is damaged.
        """
        at, stop = start, start + len(out)
        while at < stop:
            b = at // self._block
            first = b * self._block
            end = min(first + self._block, stop)
            rows = self._chunk(fd, b, where, keep=end - at < self._block)
            out[at - start : end - start] = rows[at - first : end - first]
            at = end

    def _chunk(self, fd: int, b: int, where: object, *, keep: bool) -> Array:
        """Return chunk `b` as uint8 of shape ``(block, row_nbytes)``.

        With `keep` it is remembered, since the next range of rows probably begins inside it, and
        threads that want it meanwhile wait for it.
        """
        if not keep:
            with self._decoders:
                return self._decode(fd, b, where)
        with self._lock:
            number, rows = self._last
            if number == b and rows is not None:
                return rows
            future = self._underway.get(b)
            mine = future is None
            if future is None:
                future = self._underway[b] = Future()
        if mine:
            self._make(fd, b, where, future)
        return future.result()

    def _make(self, fd: int, b: int, where: object, future: Future[Array]) -> None:
        """Decode chunk `b` for all who hold `future`."""
        try:
            with self._decoders:
                with self._lock:
                    self._last = (-1, None)  # so that the old one makes room for the new
                rows = self._decode(fd, b, where)
        except BaseException as error:
            with self._lock:
                del self._underway[b]
            future.set_exception(error)
        else:
            with self._lock:
                self._last = (b, rows)
                del self._underway[b]
            future.set_result(rows)

    def _decode(self, fd: int, b: int, where: object) -> Array:
        entry = self._table[b]
        address = int(entry["address"])
        here = f"{where}, offset {address}"
        data: Any = pread_exact(fd, int(entry["nbytes"]), address, here)
        for i in reversed(range(len(self._filters))):
            if not int(entry["mask"]) >> i & 1:
                data = self._undo(self._filters[i], data, here)
        flat = np.frombuffer(data, np.uint8)
        if len(flat) != self._nbytes:
            raise FormatError(
                "a chunk has the wrong size",
                where=here,
                expected=f"{self._nbytes} bytes",
                found=len(flat),
            )
        return flat.reshape(self._block, self._row_nbytes)

    def _undo(self, code: int, data: Any, here: str) -> Any:
        if code == _SHUFFLE:
            flat = np.frombuffer(data, np.uint8)
            if len(flat) != self._nbytes:
                return data  # the caller reports the size
            return np.ascontiguousarray(flat.reshape(self._itemsize, -1).T).reshape(-1)
        if self._nbytes > _BEST_RATIO[code] * len(data) + 1024:
            raise FormatError(
                "a chunk is too small for what it should hold",
                where=here,
                expected=f"{self._nbytes} bytes",
                found=f"{len(data)} bytes, compressed",
            )
        try:
            if code == _DEFLATE:
                return _inflate(data, self._nbytes)
            from numcodecs.zstd import Zstd

            return Zstd().decode(data, out=np.empty(self._nbytes, np.uint8))
        except (zlib.error, RuntimeError, ValueError) as error:
            raise FormatError(f"a chunk cannot be decompressed: {error}", where=here) from error


def _inflate(data: Any, nbytes: int) -> Array:
    """Return what `data` holds, at most one byte more than `nbytes`.

    If large, step by step into its place: in one call zlib's module needs the memory twice.
    """
    if nbytes <= _SMALL:
        return np.frombuffer(zlib.decompressobj().decompress(data, nbytes + 1), np.uint8)
    out = np.empty(nbytes + 1, np.uint8)
    stream, filled = zlib.decompressobj(), 0
    view, at = memoryview(data), 0
    rest: Any = b""
    while filled <= nbytes and not stream.eof:
        if not rest:
            rest, at = view[at : at + _STEP], at + _STEP
        part = stream.decompress(rest, min(4 * _STEP, nbytes + 1 - filled))
        out[filled : filled + len(part)] = np.frombuffer(part, np.uint8)
        filled += len(part)
        rest = stream.unconsumed_tail
        if not part and not rest and at >= len(view):
            break
    return out[:filled]


def encoded_of(dataset: Any, row_nbytes: int, file_nbytes: int) -> Encoded | None:
    """Return the chunks of an `h5py.Dataset`, or None if they are left to the library.

    The parameters are those of `dsprep.formats.hdf5.placement.placement_of`.
    """
    from h5py import h5t

    element = dataset.id.get_type()
    if h5t.py_create(dataset.dtype, logical=True) != element:
        return None
    return chunks_of(dataset, row_nbytes, file_nbytes, element.get_size())


def chunks_of(dataset: Any, row_nbytes: int, file_nbytes: int, itemsize: int) -> Encoded | None:
    """Do what `encoded_of` does for rows that are wanted as they lie, whatever their type."""
    from h5py import h5d

    plist = dataset.id.get_create_plist()
    if plist.get_layout() != h5d.CHUNKED or not dataset.size:
        return None
    filters = tuple(plist.get_filter(i)[0] for i in range(plist.get_nfilters()))
    if (
        not filters
        or not set(filters) <= {_DEFLATE, _SHUFFLE, _ZSTD}
        or dataset.chunks[1:] != dataset.shape[1:]
    ):
        return None
    table = chunk_table(dataset, file_nbytes)
    if table is None:
        return None
    return Encoded(table, int(dataset.chunks[0]), row_nbytes, filters, itemsize)
