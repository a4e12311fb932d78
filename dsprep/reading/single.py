"""One sample, or consecutive ones of arrays, at little more than what the system calls cost.

What does not depend on the sample is worked out once for a file and some of its fields: a function
for each range of bytes that is read, and one for each field that is made of it. A sample that
takes more than that, such as one in an encoded chunk, and one that is not as its layout says are
left to `LayoutReader.read`, which also has the words for what is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from dsprep.core.schema import Arena, Batch, Bytes, Field, Ragged, new_array
from dsprep.core.schema import Column as Values
from dsprep.layout.locate import rows_at
from dsprep.layout.model import Column, FileLayout, OwnFiles, Part, Records
from dsprep.layout.plain import plain
from dsprep.reading.records import Recipe
from dsprep.storage.base import Handle
from dsprep.storage.scatter import NEAR

Range: TypeAlias = tuple[str, int, int]
"""The path of a file, an offset in it, and a number of bytes."""

Where: TypeAlias = Callable[[int], Range | None]
"""Returns the range of a sample, or None."""

Make: TypeAlias = Callable[[Bytes], Values | None]
"""Returns a field of a sample, made of its range, or None."""

Contiguous: TypeAlias = tuple[str, int, int, tuple[int, ...], np.dtype[Any]]
"""An array: its field, the offset of its first sample, and bytes, shape and dtype of a sample."""


class Single:
    """Reads some fields of any one sample of a file, or of consecutive ones.

    Parameters
    ----------
    layout
        Of the file.
    fields
        The fields.
    open_file
        Opens a file by its path in the layout.
    recipe
        Takes records apart whose fields have no constant place.

    Raises
    ------
    LookupError
        If the fields take more than this, whatever the sample.
    """

    def __init__(
        self,
        layout: FileLayout,
        fields: Sequence[Field],
        open_file: Callable[[str], Handle],
        recipe: Recipe | None,
    ) -> None:
        self._open, self._recipe = open_file, recipe
        self._where: list[Where] = []
        self._own: set[int] = set()  # those of `_where` that have to end where their file ends
        self._fields: list[tuple[str, int, Make | None]] = []  # None: made by the recipe
        known = {} if layout.records is None else layout.records.parts
        parts = {f.name: known[f.name] for f in fields if f.name in known}
        low = 0
        self._names = [f.name for f in fields]
        self._arrays = _arrays(layout, fields)
        self._given = [(f, layout.given[f.name]) for f in fields if f.name in layout.given]
        if layout.records is not None and parts:
            low, where = _of_record(layout.records, parts)
            self._where.append(where)
        elif len(self._given) == len(fields):
            raise LookupError
        for field in fields:
            if field.name in layout.given:
                continue
            if part := parts.get(field.name):
                at = part.at
                make = None if at is None else _maker(field, at - low, part.nbytes)
                self._fields.append((field.name, 0, make))
            else:
                own = layout.files.get(field.name)
                self._fields.append((field.name, len(self._where), _maker(field, 0, None)))
                if own is None:
                    self._where.append(_of_rows(layout.columns[field.name]))
                else:
                    self._own.add(len(self._where))
                    self._where.append(_of_file(own))

    def read(self, sample: int, count: int = 1, arena: Arena | None = None) -> Batch | None:
        """Return the fields of `count` samples from `sample` on, at least one, or None.

        Raises as `LayoutReader.read` does.
        """
        out: Batch = {}
        if self._arrays is not None:  # straight into what is returned
            path, arrays = self._arrays
            file, offset = self._open(path), 0
            if file.fd < 0 and (count > 1 or len(arrays) > 1):
                return None  # a plan asks a store for all of them at once
            for name, first, size, inner, dtype in arrays:
                offset = first + sample * size
                if offset + count * size > file.nbytes:
                    return None
                key = f"sidecar.field.{name}"
                out[name] = values = new_array(arena, key, (count, *inner), dtype)
                file.pread_into(values, offset)
            file.check_same(offset)
            return out
        if count > 1:
            return None
        ranges = []
        for where in self._where:
            extent = where(sample)
            if extent is None:
                return None
            ranges.append(extent)
        data = self._read(ranges)
        if data is None:
            return None
        decoded: Batch | None = None
        for name, k, make in self._fields:
            if make is not None:
                made = make(data[k])
            else:
                if decoded is None and self._recipe is not None:
                    decoded = self._recipe.one(data[k])
                made = None if decoded is None else decoded.get(name)
            if made is None:
                return None
            out[name] = made
        if self._given:
            out |= {field.name: given.one(sample, field) for field, given in self._given}
            return {name: out[name] for name in self._names}
        return out

    def _read(self, ranges: Sequence[Range]) -> list[Bytes] | None:
        """Return the bytes of ranges; None as `read` does."""
        if len(ranges) > 1 and self._open(ranges[0][0]).fd < 0:
            return None  # a plan asks a store for all of them at once
        out = []
        files: dict[str, Handle] = {}
        first: list[tuple[Handle, int]] = []  # where each is read
        for k, (path, offset, nbytes) in enumerate(ranges):
            file = files.get(path)
            if file is None:
                file = files[path] = self._open(path)
                first.append((file, offset))
            if k in self._own:
                file.check_end(offset + nbytes)
            if not 0 <= offset <= file.nbytes - nbytes:
                file.check_extents(np.array([offset]), np.array([nbytes]), "a sample")
            data = np.empty(nbytes, np.uint8)
            if nbytes:
                file.pread_into(data, offset)
            out.append(data)
        for file, offset in first:
            file.check_same(offset)
        return out


def _arrays(layout: FileLayout, fields: Sequence[Field]) -> tuple[str, list[Contiguous]] | None:
    """Return the file of fields that are contiguous arrays of one, and these; None otherwise."""
    arrays = plain(layout, fields) if all(f.row_nbytes for f in fields) else None
    if not arrays or any(a.base is None or a.path != arrays[0].path for a in arrays):
        return None
    each = [(f, a.base) for a in arrays for f, _ in a.fields if a.base is not None]
    contiguous = [(f.name, base, f.row_nbytes, f.inner, f.dtype) for f, base in each]
    return arrays[0].path, contiguous


def _of_rows(column: Column) -> Where:
    """Return what gives the rows of a sample."""
    grid, lines, first, count = column.grid, column.lines, column.first, column.count
    if grid is None or not grid.plain:
        raise LookupError
    nbytes = grid.row_nbytes

    def where(sample: int) -> Range | None:
        if first is None or count is None:
            begin, rows = sample * lines, lines
        else:
            begin, rows = first.one(sample), count.one(sample)
        extent = rows_at(grid, begin, rows)
        return None if extent is None else (*extent, rows * nbytes)

    return where


def _of_file(own: OwnFiles) -> Where:
    """Return what gives the whole file of a sample."""
    names, lengths = own.names, own.lengths

    def where(sample: int) -> Range | None:
        nbytes = lengths.one(sample)
        return (os.fsdecode(names[sample]), 0, nbytes) if nbytes >= 0 else None

    return where


def _of_record(records: Records, parts: Mapping[str, Part]) -> tuple[int, Where]:
    """Return where in a record the bytes of parts begin, and what gives all up to their end."""
    placed = [(p.at, p.nbytes) for p in parts.values() if p.at is not None]
    low, high = 0, None
    if len(placed) == len(parts):
        low = min(at for at, _ in placed)
        reach = max(at + (nbytes or 0) for at, nbytes in placed)
        if reach - low > sum(nbytes or 0 for _, nbytes in placed) + NEAR:
            raise LookupError
        high = reach if all(nbytes is not None for _, nbytes in placed) else None
    path, offsets, lengths = records.blocks.path, records.blocks.offsets, records.blocks.lengths
    order, blocks = records.order, records.blocks.count

    def where(sample: int) -> Range | None:
        number = sample if order is None else order.one(sample)
        if not 0 <= number < blocks:
            return None
        length = lengths.one(number)
        end = length if high is None else high
        return (path, offsets.one(number) + low, end - low) if low <= end <= length else None

    return low, where


def _maker(field: Field, at: int, nbytes: int | None) -> Make:
    """Return what makes a field of the bytes from `at` on, so many or (None) all."""
    dtype, row, shape = field.dtype, field.row_nbytes, (1, *field.inner)
    if not row:
        raise LookupError

    def fixed(data: Bytes) -> Values | None:
        end = len(data) if nbytes is None else at + nbytes
        if end - at != row or end > len(data):
            return None
        return np.ndarray(shape, dtype, data, at)

    def ragged(data: Bytes) -> Values | None:
        values = data[at:] if nbytes is None else data[at : at + nbytes]
        if len(values) % row or len(values) != (nbytes or len(values)):
            return None
        edges = np.array([0, len(values) // row])
        return Ragged(values.view(dtype).reshape(-1, *field.inner), edges, field.kind)

    return ragged if field.ragged else fixed
