"""Compressed chunks read and decoded without the HDF5 library, on as many threads as call.

The library decodes under one lock for the whole process, and takes as much memory as a stream
inflates to. Here chunks with filters of `dsprep.core.filters` are found once and then read with
``pread`` and decoded by codecs that release the GIL and stop at the size of a chunk. The chunks
of the same rows are a block. A block that several threads want is decoded once, and the decoded
blocks that exist at a time are few: see `Encoded.resident`.
"""

from __future__ import annotations

import itertools
import math
import threading
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsprep.core.filters import decode
from dsprep.core.schema import Array
from dsprep.core.storage import pread_exact
from dsprep.errors import FormatError
from dsprep.formats.hdf5.codecs import Filters, filters_of
from dsprep.formats.hdf5.index import chunk_table, edges_unfiltered, in_file

_AT_ONCE = 32 << 20
"""Decoded bytes in the making: threads beyond wait, unless none is at work."""


_LARGEST_BLOCK = 256 << 20
"""Decoded bytes of chunks side by side beyond which the library reads them one by one."""


class Encoded:
    """The chunks of one dataset.

    Parameters
    ----------
    table
        The chunks, as from `dsprep.formats.hdf5.index.chunk_table`.
    chunk, shape
        Of a chunk, and of the dataset, in elements.
    itemsize
        Bytes of an element.
    filters
        In the order in which they were applied, see `dsprep.core.filters`.
    """

    def __init__(
        self,
        table: NDArray[Any],
        chunk: tuple[int, ...],
        shape: tuple[int, ...],
        itemsize: int,
        filters: Filters,
    ) -> None:
        self._table, self._chunk_shape, self._shape = table, chunk, shape
        self._itemsize, self._filters = itemsize, filters
        self._block, self._row_nbytes = chunk[0], math.prod(shape[1:]) * itemsize
        self._nbytes = self._block * self._row_nbytes
        self._chunk_nbytes = math.prod(chunk) * itemsize
        self._along = tuple(-(-n // c) for n, c in zip(shape[1:], chunk[1:], strict=True))
        self._last: tuple[int, Array | None] = (-1, None)
        self._underway: dict[int, Future[Array]] = {}
        self._lock = threading.Lock()
        self._decoders = threading.BoundedSemaphore(max(1, _AT_ONCE // self._nbytes))

    @property
    def resident(self) -> int:
        """Bytes that reading holds beside its result: a block, and what it is made from."""
        return self._nbytes + self._chunk_nbytes

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
        """Return the rows of a block, side by side from the chunks that have some of them."""
        tiles = math.prod(self._along)
        if tiles == 1 and self._chunk_nbytes == self._nbytes:
            return self._decode_chunk(fd, b, where).reshape(self._block, self._row_nbytes)
        out = np.empty((self._block, *self._shape[1:], self._itemsize), np.uint8)
        for k, place in enumerate(np.ndindex(*self._along)):
            tile = self._decode_chunk(fd, b * tiles + k, where)
            tile = tile.reshape(*self._chunk_shape, self._itemsize)
            sizes = zip(place, self._chunk_shape[1:], self._shape[1:], strict=True)
            box = [slice(p * c, min(p * c + c, n)) for p, c, n in sizes]
            inner = tuple(slice(0, s.stop - s.start) for s in box)
            out[:, *box] = tile[:, *inner]
        return out.reshape(self._block, self._row_nbytes)

    def _decode_chunk(self, fd: int, number: int, where: object) -> Array:
        entry = self._table[number]
        address = int(entry["address"])
        here = f"{where}, offset {address}"
        data = pread_exact(fd, int(entry["nbytes"]), address, here)
        return decode(data, self._filters, int(entry["mask"]), self._chunk_nbytes, here)


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
    if not filters or isinstance(filters, str):
        return None
    shape, chunk = tuple(map(int, dataset.shape)), tuple(map(int, dataset.chunks))
    itemsize = row_nbytes // math.prod(shape[1:])
    if chunk[1:] != shape[1:] and chunk[0] * row_nbytes > _LARGEST_BLOCK:
        return None
    table = chunk_table(dataset, file_nbytes)
    if table is None or not in_file(table, file_nbytes):
        return None
    if edges_unfiltered(dataset, table, math.prod(chunk) * itemsize):
        return None
    return Encoded(table, chunk, shape, itemsize, filters)


def check_chunks(dataset: Any, start: int, stop: int, where: object) -> None:
    """Decode chunks that the library is to read, and keep nothing of them.

    The library takes memory for whatever a stream inflates to, and any bytes for a whole chunk.

    Parameters
    ----------
    start, stop
        The rows that are to be read.

    Raises
    ------
    FormatError
        If a chunk is damaged, or holds more than a chunk may.
    """
    from h5py import h5d

    plist = dataset.id.get_create_plist()
    if plist.get_layout() != h5d.CHUNKED or not hasattr(dataset.id, "get_chunk_info_by_coord"):
        return
    filters = filters_of(plist)
    if isinstance(filters, str) or not dataset.size:
        return
    shape, chunk = tuple(map(int, dataset.shape)), tuple(map(int, dataset.chunks))
    nbytes = math.prod(chunk) * int(dataset.id.get_type().get_size())
    first = start // chunk[0] * chunk[0]
    others = (range(0, n, c) for n, c in zip(shape[1:], chunk[1:], strict=True))
    for corner in itertools.product(range(first, stop, chunk[0]), *others):
        found = dataset.id.get_chunk_info_by_coord(corner)
        if found.byte_offset is None or not found.size:
            continue
        if not filters:
            if found.size != nbytes:  # the library leaves the rest of its memory as it was
                raise FormatError(
                    "a chunk without filters is not of a chunk's size",
                    where=f"{where}, chunk at {corner}, offset {found.byte_offset}",
                    expected=f"{nbytes} bytes",
                    found=f"{found.size}",
                    fix="the file was changed or is damaged",
                )
            continue
        mask, data = dataset.id.read_direct_chunk(corner)
        over = any(a + c > n for a, c, n in zip(corner, chunk, shape, strict=True))
        if not (over and len(data) == nbytes):  # those may be stored without filters
            decode(data, filters, mask, nbytes, f"{where}, chunk at {corner}")
