"""Where the rows of a dataset lie in the file, for datasets whose bytes are plain rows.

A contiguous dataset is one block of rows. A chunked dataset without filters whose chunks split
only the first axis is several; the last is stored in full, so the rows of each lie together. In
both cases a range of rows is a few ranges of bytes, which threads can read and write side by
side without the HDF5 library and its lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsprep.formats.hdf5.index import chunk_table, in_file


@dataclass(frozen=True, eq=False)
class Placement:
    """Blocks of rows.

    Attributes
    ----------
    addresses
        int64, shape ``(blocks,)``: the file offset of each block.
    block
        Rows per block; the last may be partly unused.
    row_nbytes
        Bytes of one row.
    """

    addresses: NDArray[np.int64]
    block: int
    row_nbytes: int

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield ``(offset, first, last)``: rows ``first <= i < last`` lie from ``offset`` on.

        Together they are ``start <= i < stop``, in order; blocks that follow each other in the
        file are joined.
        """
        at = start
        while at < stop:
            b = at // self.block
            offset = int(self.addresses[b]) + (at - b * self.block) * self.row_nbytes
            end = min((b + 1) * self.block, stop)
            while end < stop:
                b += 1
                if int(self.addresses[b]) != offset + (end - at) * self.row_nbytes:
                    break
                end = min((b + 1) * self.block, stop)
            yield offset, at, end
            at = end


def placement_of(dataset: Any, row_nbytes: int, file_nbytes: int) -> Placement | None:
    """Return where the rows of an `h5py.Dataset` lie, or None if only the library can tell.

    Parameters
    ----------
    row_nbytes
        Bytes of one row on disk; not 0.
    file_nbytes
        Size of the file: blocks that would end behind it are not placed.
    """
    from h5py import h5t

    if h5t.py_create(dataset.dtype, logical=True) != dataset.id.get_type():
        return None
    return blocks_of(dataset, row_nbytes, file_nbytes)


def blocks_of(dataset: Any, row_nbytes: int, file_nbytes: int) -> Placement | None:
    """Do what `placement_of` does for rows that are wanted as they lie, whatever their type."""
    from h5py import h5d

    plist = dataset.id.get_create_plist()
    layout = plist.get_layout()
    if not dataset.shape or not dataset.size or plist.get_nfilters():
        return None
    count = dataset.shape[0]
    if layout == h5d.CONTIGUOUS and plist.get_external_count() == 0:
        # A dataset that was never written has no address, or, with a user block, a false one.
        if dataset.id.get_storage_size() != count * row_nbytes:
            return None
        offset = dataset.id.get_offset()
        if offset is None or offset + count * row_nbytes > file_nbytes:
            return None
        return Placement(np.array([offset], np.int64), count, row_nbytes)
    if layout == h5d.CHUNKED and dataset.chunks[1:] == dataset.shape[1:]:
        return _chunks(dataset, row_nbytes, file_nbytes)
    return None


def _chunks(dataset: Any, row_nbytes: int, file_nbytes: int) -> Placement | None:
    block = int(dataset.chunks[0])
    table = chunk_table(dataset, file_nbytes)
    if table is None or not in_file(table, file_nbytes):
        return None
    if bool((table["nbytes"] != block * row_nbytes).any()):
        return None
    return Placement(table["address"].copy(), block, row_nbytes)
