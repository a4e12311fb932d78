"""Storage of fields and the cost of reading one sample: in words, from the layout.

Formats pass what they know before all chunks or records have been located, so that inspecting a
large file stays cheap; a sidecar's layout has everything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from dsprep.core.schema import Schema
from dsprep.core.units import show_nbytes
from dsprep.layout.laws import LARGEST, Affine, Law
from dsprep.layout.model import Column, FileLayout, Given, Grid, OwnFiles, Records

SUMMED = 1 << 20
"""Blocks whose bytes are added up together, or at most."""

_LOOKED_AT = 1024  # samples whose rows are counted for a mean, and records whose order is seen
_NEAR = 64 << 10  # bytes between records that are neighbours


@dataclass(frozen=True, kw_only=True)
class FieldStorage:
    """The storage of one field, for a person to read.

    Attributes
    ----------
    storage
        ``contiguous``, ``chunks of 64 samples``, ``values of 9,000 bytes in overflow pages``, ...
    codecs
        Filters in the order in which they were applied when writing.
    stored_nbytes
        Bytes on disk, or None where those of several fields cannot be separated.
    access
        The cost of reading one random sample, and the reason: one sentence.
    reads, read_nbytes
        Ranges that a read of one random sample takes, and their bytes once decoded; a mean. None
        where that is not known.
    """

    storage: str
    codecs: tuple[str, ...] = ()
    stored_nbytes: int | None = None
    access: str = ""
    reads: float | None = None
    read_nbytes: float | None = None


@dataclass(frozen=True, kw_only=True)
class Chunking:
    """An array as its metadata describe it.

    Attributes
    ----------
    shape, itemsize
        Of the array, and bytes of an element.
    chunk
        Shape of a chunk; None: the array is one range.
    file
        Shape of what one file holds; None: all of it.
    codecs
        Filters of the chunks, in the order of writing.
    plain
        Whether the rows of a sample can be read at their offsets, without the rest of a chunk.
    library
        What reads the array, where it is not located; else empty.
    stored
        What the format calls the storage, where that is not clear from the shapes.
    """

    shape: tuple[int, ...]
    itemsize: int
    chunk: tuple[int, ...] | None = None
    file: tuple[int, ...] | None = None
    codecs: tuple[str, ...] = ()
    plain: bool = False
    library: str = ""
    stored: str = ""

    @classmethod
    def of(cls, grid: Grid) -> Chunking:
        """Return the shapes of an array of a layout."""
        file = None
        if grid.files is not None:
            file = tuple(c * n for c, n in zip(grid.chunk, grid.files, strict=True))
        return cls(
            shape=grid.shape,
            itemsize=grid.itemsize,
            chunk=None if grid.plain and grid.block_count == 1 else grid.chunk,
            file=file,
            codecs=tuple(str(f["id"]) for f in grid.filters),
            plain=grid.plain,
        )

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row, decoded."""
        return math.prod(self.shape[1:]) * self.itemsize

    def words(self, unit: str) -> str:
        """Return the storage of the array in words, in rows of `unit`."""
        if self.stored or self.chunk is None:
            return self.stored or "contiguous"
        if not self.shape:
            return "one value"
        text = f"chunks of {self._extent(self.chunk, unit)}"
        if self.file is not None and self.file != self.chunk:
            text += f" in shards of {self._extent(self.file, unit)}"
        return text

    def _extent(self, part: tuple[int, ...], unit: str) -> str:
        if any(p < n for p, n in zip(part[1:], self.shape[1:], strict=True)):
            return " x ".join(f"{p:,}" for p in part)
        return f"{part[0]:,} {unit if part[0] != 1 else unit.removesuffix('s')}"

    def parts(self, part: tuple[int, ...], rows: float) -> float:
        """Return how many parts of this shape so many rows back to back are in, on average."""
        across = math.prod(-(-n // p) for n, p in zip(self.shape[1:], part[1:], strict=True))
        if not part:
            return 1
        along = (rows - 1) / part[0] + 1 if rows > 1 else 1
        return across * min(-(-self.shape[0] // part[0]), along)


def of_array(
    array: Chunking,
    rows: float,
    samples: int,
    *,
    ragged: bool = False,
    stored_nbytes: int | None = None,
    tables: Sequence[str] = (),
) -> FieldStorage:
    """Return the storage of a field that is an array.

    Parameters
    ----------
    rows
        Of one of the `samples`, back to back: a mean.
    ragged
        Whether samples differ in their number of rows.
    tables
        What is read to find the rows of a sample.
    """
    unit = "rows" if ragged or rows != 1 else "samples"
    storage, (access, reads, nbytes) = array.words(unit), _access(array, rows, samples, unit)
    if tables:
        storage += f", rows by {' and '.join(tables)}"
        after = f"reads of {len(tables)} index tables"
        access += f", after {'a read of its index table' if len(tables) == 1 else after}"
    return FieldStorage(
        storage=storage,
        codecs=array.codecs,
        stored_nbytes=stored_nbytes,
        access=access,
        reads=reads,
        read_nbytes=nbytes,
    )


def _access(array: Chunking, rows: float, samples: int, unit: str) -> tuple[str, float, float]:
    """Return the cost of reading one sample: words, ranges, and decoded bytes."""
    sample_nbytes, by = rows * array.row_nbytes, f" by {array.library}" if array.library else ""
    if array.chunk is None:
        return f"one read of {show_nbytes(sample_nbytes)}{by and ','}{by}", 1, sample_nbytes
    nbytes = math.prod(array.chunk) * array.itemsize
    parts = array.parts(array.chunk, rows)
    factor = parts * nbytes / max(1, sample_nbytes)
    times = f"{_times(factor)} the bytes that are wanted" if sample_nbytes and factor > 1.05 else ""
    if array.plain:
        more = f"; a library that reads whole chunks takes {times}" if times else ""
        return f"one read of {show_nbytes(sample_nbytes)}{more}", 1, sample_nbytes
    work = f"is read{' and decoded' if array.codecs else ''}{by}"
    if all(n <= c for n, c in zip(array.shape, array.chunk, strict=True)):
        only = f"the only chunk ({show_nbytes(nbytes)}) {work}"
        return only + (" for one sample" if samples > 1 else ""), 1, nbytes
    times = times and f": {times}"
    size = show_nbytes(nbytes)
    if parts < 1.05:
        contents = f"{array.chunk[0]:,} {unit if array.chunk[0] != 1 else unit.removesuffix('s')}"
        return f"a chunk of {contents} ({size}) {work} for one sample{times}", parts, nbytes
    files = 1.0 if array.file is None else array.parts(array.file, rows)
    where = f" in {_about(files)} files" if files > 1.05 else ""
    text = f"a sample is in {_about(parts)} chunks of {size}{where}, each {work}{times}"
    return text, parts, parts * nbytes


class Sizes(NamedTuple):
    """Bytes of the smallest and the largest of records, and of all; and how many there are."""

    smallest: int
    largest: int
    total: int
    records: int


def of_record(
    sizes: Sizes,
    *,
    kind: str = "records",
    alone: bool = True,
    backward: float | None = None,
) -> FieldStorage:
    """Return the storage of a field in records.

    Parameters
    ----------
    kind
        The format's word for the records.
    alone
        Whether the records hold no other field.
    backward
        Share of the records that are stored before the record before; None: it is not known.
    """
    low, high = sizes.smallest, sizes.largest
    size = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    access = "one read at a computed offset"
    if backward is not None and backward < 0.01:
        access += "; neighbours are neighbours in the file"
    elif backward is not None:
        access += f"; {backward:.0%} of them are stored before the one before: ranges are scattered"
    shared = "" if alone else ", all fields of a sample in one"
    return FieldStorage(
        storage=f"{kind} of {size} bytes{shared}",
        stored_nbytes=sizes.total if alone else None,
        access=access,
        reads=1,
        read_nbytes=sizes.total / max(1, sizes.records),
    )


def of_layout(layout: FileLayout, schema: Schema) -> dict[str, FieldStorage]:
    """Return the storage of the fields of a layout; its laws have to be in memory."""
    return {f.name: _of_field(layout, f.name) for f in schema}


def _of_field(layout: FileLayout, name: str) -> FieldStorage:
    match layout.find_field(name):
        case Column() as column:
            return _of_column(column, layout.count)
        case Records() as records:
            return _of_records(records)
        case OwnFiles() as own:
            access = "one file is opened, read and closed"
            return replace(of_record(_sizes(own.lengths), kind="files"), access=access)
        case Given():
            text = "in no file: by names, folders or a table"
            return FieldStorage(
                storage=text, stored_nbytes=0, access="no read", reads=0, read_nbytes=0
            )
        case reason:
            return FieldStorage(storage="for the format's own library", access=reason)


def _of_records(records: Records) -> FieldStorage:
    """Return the storage of fields in records, judged by the first ones if there are very many."""
    blocks, sizes = records.blocks, _sizes(records.blocks.lengths)
    looked_at, alone = min(blocks.count, SUMMED), len(records.parts) == 1
    constant = isinstance(blocks.lengths, Affine) and not blocks.lengths.stride
    if constant and isinstance(blocks.offsets, Affine) and records.order is None:
        storage = of_record(sizes, alone=alone)
        return replace(storage, storage=f"{storage.storage}, constant stride")
    offsets = blocks.offsets.span(0, min(looked_at, _LOOKED_AT))
    backward = float((np.diff(offsets) < -_NEAR).mean()) if len(offsets) > 1 else 0.0
    return of_record(sizes, alone=alone, backward=backward)


def _sizes(lengths: Law) -> Sizes:
    """Return the sizes of blocks, judged by the first ones if there are very many."""
    constant = isinstance(lengths, Affine) and not lengths.stride
    some = lengths.span(0, min(lengths.count, 1 if constant else SUMMED))
    low, high = int(some.min(initial=LARGEST)), int(some.max(initial=0))
    total = round(float(some.mean()) * lengths.count) if len(some) else 0
    return Sizes(min(low, high), high, total, lengths.count)


def _of_column(column: Column, samples: int) -> FieldStorage:
    if column.grid is None:
        return FieldStorage(storage="nothing: it has no bytes", reads=0, read_nbytes=0)
    rows: float = column.lines
    if column.count is not None:
        counts = column.count.span(0, min(column.count.count, _LOOKED_AT))
        rows = float(counts.mean()) if len(counts) else 0.0
    stored, ragged = _stored_nbytes(column.grid), column.first is not None
    if stored is not None and column.count is not None and column.grid.plain:
        stored = min(stored, sum_of(column.count)[0] * column.grid.row_nbytes)
    form = Chunking.of(column.grid)
    return of_array(form, rows, samples, ragged=ragged, stored_nbytes=stored)


def sum_of(law: Law) -> tuple[int, bool]:
    """Return the sum of the numbers above 0, and whether it is exact, not estimated."""
    n = law.count
    if isinstance(law, Affine) and not law.stride:
        return max(0, law.base) * n, True
    if isinstance(law, Affine) and law.stride > 0 and law.base >= 0:
        return n * law.base + law.stride * (n * (n - 1) // 2), True
    if n <= 4 * SUMMED:
        parts = (law.span(a, min(a + SUMMED, n)) for a in range(0, n, SUMMED))
        return sum(int(np.maximum(p, 0).sum()) for p in parts), True
    spread = np.linspace(0, n - 1, SUMMED >> 2).astype(np.int64)
    return int(float(np.maximum(law.at(spread), 0).mean()) * n), False


def _stored_nbytes(grid: Grid) -> int | None:
    """Return the bytes of all chunks; None where there are very many, or numbers without one."""
    blocks = grid.blocks
    if blocks.count > SUMMED or grid.block_count != math.prod(grid.chunks):
        return None
    lengths = blocks.lengths.span(0, blocks.count)
    return int(lengths[blocks.offsets.span(0, blocks.count) >= 0].sum())


# --- numbers in words --------------------------------------------------------------------------


def _times(factor: float) -> str:
    return f"{factor:,.0f}x" if factor >= 10 or factor == int(factor) else f"{factor:.1f}x"


def _about(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"about {value:.1f}"
