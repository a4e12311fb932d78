"""An HDF5 file whose every byte has its offset before the first sample comes.

The library makes the file with all metadata and allocates the data; then it is closed, and the
samples are written with ``pwrite`` at the addresses that it chose. So pieces may come in any
order and from any thread, an interrupted file continues where it was, and a killed run never
leaves the library's metadata half-written.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from dsprep.core.checksums import CRC32C, pwrite_crc32c, read_crc32c
from dsprep.core.schema import (
    Arena,
    Array,
    Batch,
    DType,
    Ints,
    Ragged,
    copy_members,
    has_padding,
    new_array,
)
from dsprep.core.storage import close, pwrite_all, sync
from dsprep.errors import FormatError
from dsprep.formats.base import State, Writer
from dsprep.formats.hdf5.create import allocate, by_group, find, regular
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
    rows: list[Array]


class PlacedWriter(Writer):
    """Writes fields without filters: fixed ones, and in groups ragged ones too."""

    def __init__(self, path: Path, file: FilePlan, state: State | None) -> None:
        self._path, self._file, self._fd = path, file, -1
        self.whole = file.grouped and file.schema.ragged
        if state is None:
            allocate(path, file)
        places = find(path, file)
        self._places = [found for found, _ in places]
        self._sums: Sums | None = None
        if file.grouped:
            found, _ = by_group(places, file)
            used = np.array([p.used * p.row_nbytes for p in file.parts], np.int64)
            self._sums = Sums(file, found, np.where(used > 0, found + used, 0))
            # In a file whose groups are not as planned, other things may be between the chunks.
            self._regular = regular(found, file)
        self._fd = os.open(path, os.O_RDWR)

    def encode(self, batch: Batch, start: int, arena: Arena) -> _Piece:
        """Return the samples as contiguous arrays: mostly the columns themselves."""
        samples = len(next(iter(batch.values())))
        return _Piece(start, samples, rows_of(self._file, batch, start, arena))

    def write(self, piece: _Piece) -> None:
        """Write the piece at its offsets."""
        group = self._file.grouping.of(piece.start)
        segments: list[Segment] = []
        for part, places, rows in zip(self._file.parts, self._places, piece.rows, strict=True):
            first = group * part.chunk if part.role == "values" else piece.start
            for offset, low, high in _runs(part, places, first, first + len(rows)):
                data = rows[low - first : high - first]
                if self._sums is None:
                    pwrite_all(self._fd, [data], offset)
                else:
                    crc = pwrite_crc32c(self._fd, [data], offset)
                    segments.append((offset, data.nbytes, crc))
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
        return None if self._sums is None else self._sums.groups()

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            close(fd)


def _runs(part: Part, places: Ints, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Yield ``(offset, first, last)``: rows ``first <= i < last`` are from `offset` on.

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
    padded = has_padding(dtype)
    if column.flags.c_contiguous and not padded:
        return column
    out = new_array(arena, key, column.shape, dtype)
    if padded:
        out.reshape(-1).view(np.uint8)[...] = 0
    copy_members(column, out)
    return out


# --- checksums --------------------------------------------------------------------------------

Segment: TypeAlias = tuple[int, int, int]
"""Bytes that were written: their offset in the file, their number and their CRC."""


class Sums:
    """CRCs of the groups of a file, all of whose other bytes are zero.

    Parameters
    ----------
    begins, ends
        int64, shape ``(parts, groups)``: where the bytes in use of each chunk begin and end; an end
        of 0: none are.
    crcs
        int64, shape ``(groups,)``: those that are known already.
    """

    def __init__(self, file: FilePlan, begins: Ints, ends: Ints, crcs: Ints | None = None) -> None:
        self._samples = np.diff(file.grouping.edges)
        self._offsets = np.zeros(len(self._samples), np.int64)
        self._lengths, self._most = self._offsets, file.grouping.samples
        if len(begins):
            self._offsets = begins.min(axis=0)
            self._lengths = np.maximum(ends.max(axis=0) - self._offsets, 0)
        self._crcs = np.full(len(self._samples), _MISSING, np.int64) if crcs is None else crcs
        self._begun: dict[int, tuple[int, list[Segment]]] = {}
        self._lock = threading.Lock()

    def add(self, group: int, samples: int, segments: list[Segment]) -> None:
        """Note that so many samples of a group have been written. Thread-safe."""
        with self._lock:
            before, others = self._begun.pop(group, (0, []))
            samples, segments = before + samples, others + segments
            if samples < self._samples[group]:
                self._begun[group] = samples, segments
                return
        at = int(self._offsets[group])
        parts = [(o - at, n, crc) for o, n, crc in sorted(segments) if n]
        self._crcs[group] = CRC32C.joined(parts, int(self._lengths[group]))

    def complete(self, path: Path) -> None:
        """Read the groups back that an earlier run wrote in whole or in part."""
        missing = np.flatnonzero(self._crcs == _MISSING)
        if not len(missing):
            return
        fd = os.open(path, os.O_RDONLY)
        try:
            for g in missing.tolist():
                begin = int(self._offsets[g])
                self._crcs[g] = read_crc32c(fd, begin, begin + int(self._lengths[g]), path)
        finally:
            os.close(fd)

    def groups(self) -> Groups:
        """Return the groups of a layout."""
        blocks = Blocks(Explicit(self._offsets), Explicit(self._lengths))
        return Groups(self._most, blocks, Explicit(self._crcs))
