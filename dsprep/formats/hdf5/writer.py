"""An HDF5 file whose every byte has its place before the first sample comes.

The library makes the file with all metadata and allocates the data; then it is closed, and the
samples are written with ``pwrite`` at the addresses that it chose. So pieces may come in any
order and from any thread, an interrupted file continues where it was, and a killed run never
leaves the library's metadata half-written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dsprep.core.schema import Arena, Array, Batch, DType, Ints, Schema, has_padding, new_array
from dsprep.core.storage import close, pwrite_all, sync
from dsprep.errors import FormatError
from dsprep.formats.base import State, Writer
from dsprep.formats.hdf5 import grids
from dsprep.formats.hdf5.create import build
from dsprep.formats.hdf5.guard import library
from dsprep.formats.hdf5.plan import FieldPlan
from dsprep.reading.files import File


@dataclass(frozen=True, eq=False)
class _Piece:
    """Samples from `start` on: one C-contiguous array per field."""

    start: int
    columns: Sequence[Array]


class PlacedWriter(Writer):
    """Writes fixed fields without filters."""

    def __init__(
        self,
        path: Path,
        schema: Schema,
        plans: Sequence[FieldPlan],
        count: int,
        state: State | None,
    ) -> None:
        self._path, self._plans, self._fd = path, plans, -1
        if state is None:
            _check_size(path, schema.fixed_nbytes * count)
            with library(path, "the file cannot be made"):
                build(path, schema, plans, count, {}).close()
        self._places = places(path, plans, count)
        self._fd = os.open(path, os.O_RDWR)

    def encode(self, batch: Batch, start: int, arena: Arena) -> _Piece:
        """Return the samples as contiguous arrays: mostly the columns themselves."""
        columns = [
            contiguous(batch[p.field.name], p.field.dtype, arena, f"write.{p.field.name}")  # type: ignore[arg-type]
            for p in self._plans
        ]
        return _Piece(start, columns)

    def write(self, piece: _Piece) -> None:
        """Write the piece at its place."""
        for place, column in zip(self._places, piece.columns, strict=True):
            if place is not None:
                start = piece.start
                for offset, first, last in place.runs(start, start + len(column)):
                    pwrite_all(self._fd, [column[first - start : last - start]], offset)

    def sync(self) -> None:
        """Make what has been written durable."""
        sync(self._fd, data=True)

    def finish(self) -> None:
        """See `Writer.finish`; the file has been complete since the last piece."""
        if self.durable:
            sync(self._fd)
        self.close()

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close(fd)


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

    addresses: Ints
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


def places(path: Path, plans: Sequence[FieldPlan], count: int) -> list[Placement | None]:
    """Return where the rows of each unfiltered fixed field lie; None for fields without bytes.

    Raises
    ------
    FormatError
        If the file is not the one that `build` made.
    """
    import h5py

    found: list[Placement | None] = []
    disk = File(path)
    with (
        library(path, "the unfinished file cannot be continued"),
        h5py.File(path, "r", locking=False) as file,
    ):
        for p in plans:
            place = None
            if p.field.row_nbytes and count:
                try:
                    grid = grids.locate(file[p.field.name], disk, str(path))
                except (grids.Unlocated, grids.Outside):
                    grid = None
                if grid is None or not grid.plain or grid.fill or grid.shape != p.shape(count):
                    raise FormatError(
                        f"the unfinished file has no place for field {p.field.name}",
                        where=path,
                        fix="start again with --restart",
                    )
                blocks = np.arange(grid.blocks.count, dtype=np.int64)
                place = Placement(grid.blocks.offsets.at(blocks), grid.chunk[0], grid.row_nbytes)
            found.append(place)
    return found


def contiguous(column: Array, dtype: DType, arena: Arena, key: str) -> Array:
    """Return `column` as a C-contiguous array whose padding bytes are zero.

    Padding holds whatever memory held before: it must neither leak nor make two outputs differ.
    """
    if has_padding(dtype):
        out = new_array(arena, key, column.shape, dtype)
        out.reshape(-1).view(np.uint8)[...] = 0
        _copy_members(out, column)
        return out
    if column.flags.c_contiguous:
        return column
    out = new_array(arena, key, column.shape, dtype)
    np.copyto(out, column)
    return out


def _copy_members(out: Array, column: Array) -> None:
    """Copy structs member by member; numpy copies the padding along with whole ones."""
    if out.dtype.names is None:
        out[...] = column
        return
    for name in out.dtype.names:
        _copy_members(out[name], column[name])


def _check_size(path: Path, nbytes: int) -> None:
    """Raise `OSError` if the file system cannot hold a file of that size.

    The HDF5 library crashes when it finds out by itself.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        os.ftruncate(fd, nbytes)
    finally:
        os.close(fd)
