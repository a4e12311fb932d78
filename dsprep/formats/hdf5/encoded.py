"""Compressed chunks read and decoded without the HDF5 library, on as many threads as call.

The library decodes under one lock for the whole process. Here the chunks of the common case,
which split only the first axis and have filters of `dsprep.filters`, are found once and then
read with ``pread`` and decoded by codecs that release the GIL. A chunk that several threads
want is decoded once, and the decoded chunks that exist at a time are few: see `Encoded.resident`.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from numpy.typing import NDArray

from dsprep.filters import decode
from dsprep.formats.hdf5.codecs import Filters, filters_of
from dsprep.formats.hdf5.index import chunk_table, edges_unfiltered, in_file
from dsprep.schema import Array
from dsprep.storage import pread_exact

_AT_ONCE = 32 << 20
"""Decoded bytes in the making: threads beyond wait, unless none is at work."""


class Encoded:
    """The chunks of one dataset.

    Parameters
    ----------
    table
        The chunks, as from `dsprep.formats.hdf5.index.chunk_table`.
    block, row_nbytes
        Rows per chunk, and bytes of one row when decoded.
    filters
        In the order in which they were applied, see `dsprep.filters`.
    """

    def __init__(
        self,
        table: NDArray[Any],
        block: int,
        row_nbytes: int,
        filters: Filters,
    ) -> None:
        self._table, self._block, self._row_nbytes = table, block, row_nbytes
        self._filters = filters
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
        data = pread_exact(fd, int(entry["nbytes"]), address, here)
        flat = decode(data, self._filters, int(entry["mask"]), self._nbytes, here)
        return flat.reshape(self._block, self._row_nbytes)


def encoded_of(dataset: Any, row_nbytes: int, file_nbytes: int) -> Encoded | None:
    """Return the chunks of an `h5py.Dataset`, or None if they are left to the library.

    The parameters are those of `dsprep.formats.hdf5.placement.placement_of`.
    """
    from h5py import h5t

    if h5t.py_create(dataset.dtype, logical=True) != dataset.id.get_type():
        return None
    return chunks_of(dataset, row_nbytes, file_nbytes)


def chunks_of(dataset: Any, row_nbytes: int, file_nbytes: int) -> Encoded | None:
    """Do what `encoded_of` does for rows that are wanted as they lie, whatever their type."""
    from h5py import h5d

    plist = dataset.id.get_create_plist()
    if plist.get_layout() != h5d.CHUNKED or not dataset.size:
        return None
    filters = filters_of(plist)
    if not filters or isinstance(filters, str) or dataset.chunks[1:] != dataset.shape[1:]:
        return None
    table = chunk_table(dataset, file_nbytes)
    block = int(dataset.chunks[0])
    if table is None or not in_file(table, file_nbytes):
        return None
    if edges_unfiltered(dataset, table, block * row_nbytes):
        return None
    return Encoded(table, block, row_nbytes, filters)
