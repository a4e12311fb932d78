"""Values on overflow pages: a header, the value, and zeros to the end of the page.

A value is on whole pages that follow one another; only the first has a header. It has the page's
own number, a flag, and how many pages the value takes (see `pages`), so it proves where a value
begins, and that one of its length fits (`Frame`); it has no checksum.

To be written, the values stay where they are in memory, for the kernel to gather.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import Bytes, Ints
from dsprep.errors import FormatError
from dsprep.formats.lmdb.pages import HEADER, P_OVERFLOW, is_page_size
from dsprep.formats.lmdb.tree import PSIZE
from dsprep.formats.stored_rows import RowSpans

_zeros = np.zeros(PSIZE, np.uint8)
_U16 = np.dtype("<u2")


def headers(pages: Ints, runs: Ints) -> Bytes:
    """Return the headers of overflow pages: uint8, shape ``(n, HEADER)``."""
    out = np.zeros((len(pages), HEADER), np.uint8)
    out[:, :8] = pages.astype("<u8").view(np.uint8).reshape(-1, 8)
    out.view(_U16)[:, 5] = P_OVERFLOW
    out[:, 12:] = runs.astype("<u4").view(np.uint8).reshape(-1, 4)
    return out


# --- reading ---


class Frame:
    """The header before a value; see ``dsprep.reading.records``.

    In a sidecar it is ``{"name": "lmdb", "psize": 4096}``: its name, and the bytes per page.
    """

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


def overflow_spans(
    parts: Sequence[RowSpans], sizes: Ints, runs: Ints, pages: Ints
) -> tuple[Bytes, list[tuple[Ints, Ints, Ints]]]:
    """Return what is on the overflow pages of values, and where it is in memory.

    Parameters
    ----------
    parts, sizes
        What the values are made of, and their bytes.
    runs, pages
        int64, shape ``(n,)``: how many pages each takes, 0 if it is inside a leaf; the first one.

    Returns
    -------
    The headers, to be kept while they are written; and, header by header, part by part and rest by
    rest, the offsets in the file, the addresses and the lengths: int64 each, some of them 0.
    """
    big = np.flatnonzero(runs)
    at, pages, runs = pages[big] * PSIZE, pages[big], runs[big]
    heads = headers(pages, runs)
    own = heads.ctypes.data + np.arange(len(big), dtype=np.int64) * HEADER
    spans = [(at, own, np.full(len(big), HEADER))]
    at = at + HEADER
    for part in parts:
        lengths = part.lengths[big]
        spans.append((at, part.data.ctypes.data + part.starts[big], lengths))
        at = at + lengths
    rest = (pages + runs) * PSIZE - at
    return heads, [*spans, (at, np.full(len(big), _zeros.ctypes.data), rest)]
