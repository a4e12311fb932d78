"""Rows of an array whose chunks are encoded, or cut along inner axes.

The chunks of the same rows are a *line*. A line of which only some rows are wanted is kept, since
the next read often begins inside it; threads that want it while another one decodes it wait.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from dsprep.core import filters
from dsprep.core.schema import Array, Bytes
from dsprep.errors import FormatError, layout_mismatch
from dsprep.layout.as_json import file_path
from dsprep.layout.model import Grid
from dsprep.storage.base import Handle

DECODED = 64 << 20
"""Decoded bytes in the making at once: threads beyond wait, unless none is at work."""

KEPT = 256 << 20
"""Decoded bytes of a line up to which it is kept."""


class Chunks:
    """Decodes the chunks of one field; safe to use from several threads.

    Attributes
    ----------
    side
        Chunks in a line.
    nbytes
        Bytes that reading holds besides its result: a line, and a chunk that it is made from.
    """

    def __init__(self, grid: Grid, name: str, open_file: Callable[[str], Handle]) -> None:
        self.grid, self._name, self._open = grid, name, open_file
        self.side = math.prod(grid.chunks[1:])
        # What one chunk holds of a whole row, and nothing else, is a line already.
        self._alone = grid.chunk[1:] == grid.shape[1:]
        line_nbytes = grid.chunk[0] * grid.row_nbytes
        self._keeps = line_nbytes <= KEPT or self._alone
        self.nbytes = (line_nbytes if self._keeps else grid.chunk_nbytes) + grid.chunk_nbytes
        self._tiles = list(np.ndindex(*grid.chunks[1:]))
        self._last: tuple[int, Array | None] = (-1, None)
        self._underway: dict[int, Future[Array]] = {}
        self._lock = threading.Lock()
        self._decoders = _at_once(grid.chunk_nbytes)
        self._makers = _at_once(line_nbytes)

    def copy(
        self, line: int, rows: list[tuple[int, int, int]], out: Array, stored: Bytes | None
    ) -> None:
        """Copy rows of one line; raises `FormatError` if a chunk is damaged.

        Parameters
        ----------
        line
            The number of its chunks along the first axis.
        rows
            Ranges of rows, each as ``(to, begin, count)``: where they go in `out`, the first one
            within the line, and how many.
        out
            uint8, shape ``(rows, *inner, itemsize)``.
        stored
            The bytes of the only chunk, if they have been read.
        """
        per = self.grid.chunk[0]
        used = min(per, self.grid.shape[0] - line * per)
        if not self._keeps or (len(rows) == 1 and rows[0][2] == used and not self.has(line)):
            self._scatter(line, rows, out, stored)
            return
        block = self._line(line, stored)
        for to, begin, count in rows:
            out[to : to + count] = block[begin : begin + count]

    def has(self, line: int) -> bool:
        """Return whether a line is in memory, or being decoded by a thread."""
        with self._lock:
            return self._last[0] == line or line in self._underway

    def where(self, line: int, tile: int = 0) -> tuple[str, int, int, int]:
        """Return a chunk's file, offset and length, and its mask; length 0: it is not stored."""
        grid = self.grid
        number, path = line * self.side + tile, grid.blocks.path
        if grid.several:
            position = np.array([[line], *([k] for k in self._tiles[tile])], np.int64)
            numbers, files = grid.numbers(position)
            number = int(numbers[0])
            path = path if files is None else file_path(path, files[:, 0].tolist())
        offset, length = grid.blocks.offsets.one(number), grid.blocks.lengths.one(number)
        if offset < 0 or length <= 0:
            return path, -1, 0, 0
        return path, offset, length, 0 if grid.masks is None else grid.masks.one(number)

    def _line(self, line: int, stored: Bytes | None) -> Array:
        """Return a line, shape ``(chunk[0], *inner, itemsize)``, and keep it."""
        with self._lock:
            number, block = self._last
            if number == line and block is not None:
                return block
            future = self._underway.get(line)
            mine = future is None
            if future is None:
                future = self._underway[line] = Future()
        if mine:
            try:
                with self._makers:
                    with self._lock:
                        self._last = (-1, None)  # so that the old one makes room for the new
                    block = self._make(line, stored)
            except BaseException as error:
                with self._lock:
                    del self._underway[line]
                future.set_exception(error)
            else:
                with self._lock:
                    self._last = (line, block)
                    del self._underway[line]
                future.set_result(block)
        return future.result()

    def _make(self, line: int, stored: Bytes | None) -> Array:
        grid = self.grid
        if self._alone:
            path, offset, length, mask = self.where(line)
            if length:
                with self._decoders:
                    return self._decode(self._open(path), (offset, length), mask, stored)
        block = np.empty((grid.chunk[0], *grid.shape[1:], grid.itemsize), np.uint8)
        self._scatter(line, [(0, 0, grid.chunk[0])], block, stored)
        return block

    def _scatter(
        self, line: int, rows: list[tuple[int, int, int]], out: Array, stored: Bytes | None
    ) -> None:
        """Copy rows of a line chunk by chunk."""
        grid = self.grid
        opened: tuple[str | None, Handle | None] = (None, None)
        for number, tile in enumerate(self._tiles):
            sizes = zip(tile, grid.chunk[1:], grid.shape[1:], strict=True)
            box = [slice(p * c, min(p * c + c, n)) for p, c, n in sizes]
            inner = tuple(slice(0, s.stop - s.start) for s in box)
            path, offset, length, mask = self.where(line, number)
            if not length:
                for to, _, count in rows:
                    out[to : to + count, *box] = fill_value(grid, self._name)
                continue
            if path != opened[0]:
                opened = path, self._open(path)
            file = opened[1]
            assert file is not None  # opened with its path
            with self._decoders:
                chunk = self._decode(file, (offset, length), mask, stored)
            for to, begin, count in rows:
                out[to : to + count, *box] = chunk[begin : begin + count, *inner]

    def _decode(
        self, file: Handle, extent: tuple[int, int], mask: int, data: Bytes | None
    ) -> Array:
        """Return a chunk as uint8 of shape ``(*chunk, itemsize)``."""
        grid = self.grid
        offset, nbytes = extent
        here = f"{file.path}, field {self._name}, offset {offset}"
        if data is None and not 0 <= offset <= file.nbytes - nbytes:
            file.check_extents(np.array([offset]), np.array([nbytes]), f"field {self._name}")
        if not grid.filters and nbytes != grid.chunk_nbytes:
            raise FormatError(
                "a chunk has the wrong size", where=here, expected=grid.chunk_nbytes, found=nbytes
            )
        stored: Bytes | bytes = file.pread_exact(nbytes, offset) if data is None else data
        file.check_same(offset)
        flat = filters.decode(stored, grid.filters, mask, grid.chunk_nbytes, here)
        if data is not None and np.may_share_memory(flat, data):
            flat = flat.copy()  # it may be kept longer than the caller's memory
        return flat.reshape(*grid.chunk, grid.itemsize)


def fill_value(grid: Grid, name: str) -> Bytes:
    """Return the element that chunks hold which are not stored; `FormatError` if none may be."""
    if grid.fill is None:
        raise layout_mismatch("lacks a chunk, and gives no fill value", f"field {name}")
    return np.frombuffer(grid.fill, np.uint8)


def _at_once(nbytes: int) -> threading.BoundedSemaphore:
    """Return what lets as many threads in as make blocks of `nbytes` in the memory allowed."""
    return threading.BoundedSemaphore(max(1, min(64, DECODED // max(1, nbytes))))
