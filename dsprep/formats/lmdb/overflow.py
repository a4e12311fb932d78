"""Values on overflow pages: a header, the value, and zeros to the end of the page.

A value is on whole pages that follow one another; only the first has a header. It has the page's
own number, a flag, and how many pages the value takes (see `pages`), so it proves where a value
begins, and that one of its length fits (`Frame`); it has no checksum.

To be written, `Runs` leaves the values where they are, for the kernel to gather; `EvenRuns` copies
equal values into whole pages, as many at a time as stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from dsprep.core.pread import packed
from dsprep.core.schema import Arena, Bytes, Ints
from dsprep.core.storage import as_bytes
from dsprep.errors import FormatError
from dsprep.formats.lmdb.pages import HEADER, P_OVERFLOW, is_page_size
from dsprep.formats.lmdb.tree import PSIZE
from dsprep.formats.lmdb.values import ValuePart

BLOCK_NBYTES = 512 << 10
"""Pages filled at a time by `EvenRuns`; a second-level cache holds them."""

_U16 = np.dtype("<u2")


def headers(pages: Ints, runs: Ints) -> Bytes:
    """Return the headers of overflow pages: uint8, shape ``(n, HEADER)``."""
    out = np.zeros((len(pages), HEADER), np.uint8)
    out[:, :8] = pages.astype("<u8").view(np.uint8).reshape(-1, 8)
    out.view(_U16)[:, 5] = P_OVERFLOW
    out[:, 12:] = runs.astype("<u4").view(np.uint8).reshape(-1, 4)
    return out


# --- reading ---


def describe_frame(psize: int) -> dict[str, Any]:
    """Return what a sidecar says of the frame: its name, and the bytes per page."""
    return {"name": "lmdb", "psize": psize}


class Frame:
    """The header before a value; see ``dsprep.reading.records``. `params`: see `describe_frame`."""

    before = HEADER
    after = 0

    def __init__(self, params: Mapping[str, Any]) -> None:
        psize = params.get("psize")
        if not isinstance(psize, int) or isinstance(psize, bool) or not is_page_size(psize):
            raise FormatError(
                "the page size in a sidecar is wrong",
                expected="a power of two from 256 to 32768",
                found=psize,
            )
        self._psize = psize

    def wrong(self, before: Bytes, offsets: Ints, lengths: Ints) -> NDArray[np.bool_]:
        """Return which values at these offsets are not on overflow pages that are theirs.

        A value that does not begin right behind a page's header is inside a leaf page, where
        nothing of the kind is before it; it is never wrong.
        """
        number = before[:, :8].copy().view("<u8")[:, 0]
        flags = before[:, 10:12].copy().view("<u2")[:, 0]
        count = before[:, 12:].copy().view("<u4")[:, 0]
        page = (offsets - HEADER) // self._psize
        bad = (number != page.astype(np.uint64)) | ((flags & P_OVERFLOW) == 0)
        # LMDB leaves a value that shrinks on the pages that it has.
        bad |= count < (HEADER - 1 + lengths) // self._psize + 1
        return np.asarray(bad & (offsets % self._psize == HEADER))

    def payload_wrong(self, buffer: Bytes, starts: Ints, lengths: Ints, after: Bytes) -> None:
        """Return None: LMDB keeps no checksums."""
        return


# --- writing ---


@dataclass(frozen=True, eq=False)
class EvenRuns:
    """Values of one size, on `run` overflow pages each, of parts that are evenly spaced in memory.

    Each part is a view: uint8, shape ``(n, width)``.
    """

    parts: tuple[Bytes, ...]
    run: int

    @classmethod
    def of(cls, parts: list[ValuePart], sizes: Ints, runs: Ints) -> Self | None:
        """Return the values if they are equal in size and small enough, else None."""
        run = int(runs[0]) if len(runs) > 1 else 0
        if not 0 < run * PSIZE <= BLOCK_NBYTES // 2 or not (sizes == sizes[0]).all():
            return None
        rows = []
        for part in parts:
            steps, width = np.diff(part.starts), int(part.lengths[0])
            if not ((part.lengths == width).all() and (steps == steps[0]).all()):
                return None
            if width:
                view = part.data[int(part.starts[0]) :]
                shape, strides = (len(runs), width), (int(steps[0]), 1)
                rows.append(as_strided(view, shape, strides, writeable=False))
        return cls(tuple(rows), run)

    def blocks(self, pages: Ints, arena: Arena) -> Iterator[tuple[int, Bytes]]:
        """Yield ``(first page, bytes)`` for values whose overflow pages begin at `pages`.

        The bytes are valid until the next block is asked for.
        """
        most = BLOCK_NBYTES // (self.run * PSIZE)
        held = arena.empty("write.pages", (most, self.run * PSIZE), np.dtype(np.uint8))
        held[:] = 0
        heads = headers(pages, np.full(len(pages), self.run, np.int64))
        # Where a leaf or branch is between two values, a new range of the file begins.
        gaps = np.flatnonzero(np.diff(pages) != self.run) + 1
        for begin, end in zip([0, *gaps.tolist()], [*gaps.tolist(), len(pages)], strict=True):
            for start in range(begin, end, most):
                stop = min(start + most, end)
                block = held[: stop - start]
                block[:, :HEADER] = heads[start:stop]
                at = HEADER
                for rows in self.parts:
                    block[:, at : at + rows.shape[1]] = rows[start:stop]
                    at += rows.shape[1]
                yield int(pages[start]), block


class Runs:
    """The overflow pages of a piece's values, as buffers to write one after another.

    What follows a value in its last page and the header of the next one are one buffer.
    """

    def __init__(
        self, parts: list[ValuePart], sizes: Ints, runs: Ints, pages: Ints, arena: Arena
    ) -> None:
        self._big = np.flatnonzero(runs)
        starts = packed(runs[self._big] * PSIZE - sizes[self._big])
        between = arena.empty("write.between", (int(starts[-1]),), np.dtype(np.uint8))
        between[:] = 0
        between[starts[:-1, None] + np.arange(HEADER)] = headers(pages[self._big], runs[self._big])
        self._between, self._starts = as_bytes(between), starts.tolist()
        behind = (starts[1:-1] + HEADER).tolist()  # a rest, and the header of the next value
        self._rests = _views(between, (starts[:-1] + HEADER).tolist(), [*behind, int(starts[-1])])
        self._parts = [
            _views(
                part.data,
                part.starts[self._big].tolist(),
                (part.starts + part.lengths)[self._big].tolist(),
            )
            for part in parts
        ]

    def add(self, buffers: list[memoryview], start: int, stop: int) -> None:
        """Append the overflow pages of samples ``start <= i < stop`` of the piece."""
        first, last = np.searchsorted(self._big, [start, stop]).tolist()
        if first == last:
            return
        begin, end = self._starts[first], self._starts[last]
        buffers.append(self._between[begin : begin + HEADER])
        columns = [*self._parts, self._rests]
        block = [self._between] * (len(columns) * (last - first))
        for k, column in enumerate(columns):
            block[k :: len(columns)] = column[first:last]
        block[-1] = self._between[self._starts[last - 1] + HEADER : end]
        buffers += block


def _views(data: Bytes, starts: list[int], stops: list[int]) -> list[memoryview]:
    """Return ``data[starts[i]:stops[i]]`` for all i."""
    whole = data.data
    return [whole[a:b] for a, b in zip(starts, stops, strict=True)]
