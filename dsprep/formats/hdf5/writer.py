"""An HDF5 file whose every byte has its place before the first sample comes.

The library makes the file with all metadata and allocates the data; then it is closed, and the
samples are written with ``pwrite`` at the addresses that it chose. So pieces may come in any
order and from any thread, an interrupted file continues where it was, and a killed run never
leaves the library's metadata half-written.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dsprep.core.checksums import CRC32C, pwrite_crc32c, read_crc32c
from dsprep.core.schema import Arena, Array, Batch, DType, Ints, Ragged, has_padding, new_array
from dsprep.core.storage import close, pwrite_all, sync
from dsprep.errors import FormatError
from dsprep.formats.base import State, Writer
from dsprep.formats.hdf5.create import addresses, allocate, find, regular
from dsprep.formats.hdf5.plan import FilePlan, Part
from dsprep.layout.laws import Explicit
from dsprep.layout.model import Blocks, Groups

_INT = np.dtype("<i8")
_MISSING = -1


@dataclass(frozen=True, eq=False)
class _Piece:
    """Samples from `start` on: one C-contiguous array per part."""

    start: int
    samples: int
    rows: Sequence[Array]


class PlacedWriter(Writer):
    """Writes fields without filters: fixed ones, and in groups ragged ones too."""

    def __init__(self, path: Path, file: FilePlan, state: State | None) -> None:
        self._path, self._file, self._fd = path, file, -1
        self.whole = file.grouped and file.schema.ragged
        if state is None:
            allocate(path, file)
        self._places = [found for found, _ in find(path, file)]
        self._sums: Sums | None = None
        if file.grouped:
            found, _ = addresses(path, file)
            self._offsets, self._lengths = _ranges(file, found)
            # In a file whose groups are not as planned, other things may be between the chunks.
            self._regular = regular(found, file)
            self._sums = Sums(self._offsets, self._lengths, np.diff(file.grouping.edges))
        self._fd = os.open(path, os.O_RDWR)

    def encode(self, batch: Batch, start: int, arena: Arena) -> _Piece:
        """Return the samples as contiguous arrays: mostly the columns themselves."""
        samples = len(next(iter(batch.values())))
        return _Piece(start, samples, rows_of(self._file, batch, start, arena))

    def write(self, piece: _Piece) -> None:
        """Write the piece at its place."""
        group = self._file.grouping.of(piece.start)
        segments = []
        for part, places, rows in zip(self._file.parts, self._places, piece.rows, strict=True):
            first = group * part.chunk if part.role == "values" else piece.start
            for offset, low, high in _runs(part, places, first, first + len(rows)):
                data = rows[low - first : high - first]
                if self._sums is None:
                    pwrite_all(self._fd, [data], offset)
                else:
                    crc = pwrite_crc32c(self._fd, [data], offset)
                    segments.append(Segment(offset, data.nbytes, crc))
        if self._sums is not None and self._regular:
            self._sums.add(group, piece.samples, segments)

    def sync(self) -> None:
        """Make what has been written durable."""
        sync(self._fd, data=True)

    def finish(self) -> None:
        """See `Writer.finish`; the file has been complete since the last piece."""
        if self.durable:
            sync(self._fd)
        if self._sums is not None:
            self._sums.complete(self._path)
        self.close()

    def groups(self) -> Groups | None:
        """Return where the groups are."""
        if self._sums is None:
            return None
        return groups_of(self._file, self._offsets, self._lengths, self._sums.crcs)

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close(fd)


def _runs(part: Part, places: Ints, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield ``(offset, first, last)``: rows ``first <= i < last`` are from ``offset`` on.

    Together they are ``start <= i < stop``, in order; chunks that follow each other in the file
    are joined. `places` has the offset of each chunk.
    """
    at, per = start, part.chunk or stop
    while at < stop:
        b = at // per
        offset = int(places[b]) + (at - b * per) * part.row_nbytes
        end = min((b + 1) * per, stop)
        while end < stop:
            b += 1
            if int(places[b]) != offset + (end - at) * part.row_nbytes:
                break
            end = min((b + 1) * per, stop)
        yield offset, at, end
        at = end


def _ranges(file: FilePlan, found: Ints) -> tuple[Ints, Ints]:
    """Return the first byte of each group, and how many there are to the last one in use."""
    if not len(file.parts):
        empty = np.zeros(file.grouping.count, np.int64)
        return empty, empty
    used = np.array([p.used * p.row_nbytes for p in file.parts], np.int64)
    offsets: Ints = found.min(axis=0)
    ends = np.where(used > 0, found + used, offsets)
    lengths: Ints = ends.max(axis=0) - offsets
    return offsets, lengths


def groups_of(file: FilePlan, offsets: Ints, lengths: Ints, crcs: Ints) -> Groups:
    """Return the groups of a layout."""
    blocks = Blocks(Explicit(offsets), Explicit(lengths))
    return Groups(file.grouping.samples, blocks, Explicit(crcs))


# --- rows -------------------------------------------------------------------------------------


def rows_of(file: FilePlan, batch: Batch, start: int, arena: Arena) -> list[Array]:
    """Return what samples from `start` on put into each part: C-contiguous arrays.

    Raises
    ------
    FormatError
        If a ragged field has not the rows that the groups were planned with.
    """
    group = file.grouping.of(start)
    return [_rows(part, batch, group, arena) for part in file.parts]


def _rows(part: Part, batch: Batch, group: int, arena: Arena) -> Array:
    field = part.plan.field
    column = batch[field.name]
    if not isinstance(column, Ragged):
        return contiguous(column, field.dtype, arena, f"write.{field.name}")
    if part.role == "count":
        return column.lengths.astype(_INT)
    if part.role == "first":
        return (column.offsets[:-1] + group * part.plan.chunk).astype(_INT)
    if len(column.values) != part.used[group]:
        raise FormatError(
            f"field {field.name} has changed since the groups were planned",
            where=f"group {group}",
            expected=f"{part.used[group]} rows",
            found=len(column.values),
            fix="start again with --restart",
        )
    return contiguous(column.values, field.dtype, arena, f"write.{field.name}")


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


# --- checksums --------------------------------------------------------------------------------


class Segment(NamedTuple):
    """Bytes that were written: their place in the file, their number and their CRC."""

    offset: int
    nbytes: int
    crc: int


@dataclass
class _Open:
    """A group of which some samples are there."""

    samples: int = 0
    segments: list[Segment] = field(default_factory=list)


class Sums:
    """CRCs of ranges in one file, all of whose other bytes are zero.

    Parameters
    ----------
    offsets, lengths
        int64, shape ``(groups,)``: the ranges.
    samples
        int64, shape ``(groups,)``: the samples of each.
    """

    def __init__(self, offsets: Ints, lengths: Ints, samples: Ints) -> None:
        self._offsets, self._lengths, self._samples = offsets, lengths, samples
        self.crcs = np.full(len(offsets), _MISSING, np.int64)
        self._open: dict[int, _Open] = {}
        self._lock = threading.Lock()

    def add(self, group: int, samples: int, segments: list[Segment]) -> None:
        """Note that so many samples of a group have been written. Thread-safe."""
        with self._lock:
            found = self._open.setdefault(group, _Open())
            found.samples += samples
            found.segments += segments
            if found.samples < self._samples[group]:
                return
            del self._open[group]
        self.crcs[group] = self._joined(group, found.segments)

    def _joined(self, group: int, segments: list[Segment]) -> int:
        at = int(self._offsets[group])
        parts = [(o - at, n, crc) for o, n, crc in sorted(segments) if n]
        return CRC32C.joined(parts, int(self._lengths[group]))

    def complete(self, path: Path) -> None:
        """Read the groups back that an earlier run wrote in whole or in part."""
        missing = np.flatnonzero(self.crcs == _MISSING)
        if not len(missing):
            return
        fd = os.open(path, os.O_RDONLY)
        try:
            for g in missing.tolist():
                begin = int(self._offsets[g])
                self.crcs[g] = read_crc32c(fd, begin, begin + int(self._lengths[g]), path)
        finally:
            os.close(fd)
