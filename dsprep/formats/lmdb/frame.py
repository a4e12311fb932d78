"""What lies before a value on overflow pages, and proves it: the header of the first page.

It has the page's own number, a flag, and how many pages the value takes (see `pages`). So it
proves where a value begins, and that one of its length fits; it has no checksum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import Bytes, Ints
from dsprep.errors import FormatError
from dsprep.formats.lmdb.meta import is_page_size
from dsprep.formats.lmdb.pages import HEADER, P_OVERFLOW


def describe(psize: int) -> dict[str, Any]:
    """Return what a sidecar says of the frame: its name, and the bytes per page."""
    return {"name": "lmdb", "psize": psize}


class Frame:
    """The header before a value; see ``dsprep.records``.

    Parameters
    ----------
    params
        What `describe` returned.

    Raises
    ------
    FormatError
        If the page size is none that LMDB can have.
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

        A value that does not begin right behind a page's header lies inside a leaf page, where
        nothing of the kind is before it; it is never wrong.
        """
        alone = offsets % self._psize == HEADER
        bad = wrong_headers(before, offsets - HEADER, lengths, self._psize)
        return np.asarray(alone & bad)

    def payload_wrong(self, buffer: Bytes, starts: Ints, lengths: Ints, after: Bytes) -> None:
        """Return None: LMDB keeps no checksums."""
        return


def wrong_headers(headers: Bytes, offsets: Ints, lengths: Ints, psize: int) -> NDArray[np.bool_]:
    """Return which headers are not those of overflow pages for values of these lengths.

    Parameters
    ----------
    headers
        uint8, shape ``(n, HEADER)``.
    offsets
        int64, shape ``(n,)``: where each of them lies in the file.
    lengths
        int64, shape ``(n,)``: bytes of the values.
    psize
        Bytes per page.
    """
    number = headers[:, :8].copy().view("<u8")[:, 0]
    flags = headers[:, 10:12].copy().view("<u2")[:, 0]
    count = headers[:, 12:].copy().view("<u4")[:, 0]
    bad = (number != (offsets // psize).astype(np.uint64)) | ((flags & P_OVERFLOW) == 0)
    # LMDB leaves a value that shrinks on the pages that it has.
    bad |= count < (HEADER - 1 + lengths) // psize + 1
    return np.asarray(bad)
