"""From extents to reads: which ranges of which files go to which addresses. Nothing is read here.

Samples anywhere in a dataset are collected in a `ReadPlan`, from what `dsprep.layout.locate` gives.
Consecutive samples at a constant distance, such as the rows of a chunk or records of one size, are
a few numbers (`strided`); planning them so (`woven`) takes a tenth of the time and gives the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dsprep.core.schema import Field, Ints
from dsprep.layout.laws import Affine
from dsprep.layout.locate import Extents, Stored, rows_at
from dsprep.layout.model import Column, FileLayout, Records
from dsprep.storage.base import Handle, read_all
from dsprep.storage.scatter import APART_NEAR, DROPPED, NEAR, Runs, cut, runs, together

LEAST = 2 << 20
"""Bytes of a part below which another thread would not pay."""

MERGED = 512
"""Samples from which on values that are near each other are looked for, and read together."""


class ReadPlan:
    """Ranges of files, collected field by field, and the address that each is read to."""

    def __init__(self) -> None:
        self._files: dict[int, tuple[Handle, list[tuple[Ints, Ints, Ints]]]] = {}
        self._apart: list[tuple[Handle, Runs]] = []

    def add(
        self, open_file: Callable[[str], Handle], extents: Extents, to: Ints, subject: str
    ) -> None:
        """Add the extents of a field that are stored, and stored as they are wanted.

        Parameters
        ----------
        open_file
            Returns a file by its path in `extents`.
        to
            int64, shape ``(n,)``: the address of the first byte of each request.
        subject
            What lies there, for messages.

        Raises
        ------
        FormatError
            If an extent is not within its file.
        """
        addresses = extents.addresses(to)
        for path, chosen in extents.by_path():
            file = open_file(path)
            self.put(
                file, extents.offset[chosen], extents.length[chosen], addresses[chosen], subject
            )

    def put(
        self, file: Handle, offsets: Ints, lengths: Ints, addresses: Ints, subject: str
    ) -> None:
        """Add ranges of a file, each with its address; see `add`."""
        file.check_extents(offsets, lengths, subject)
        if len(offsets):
            columns = self._files.setdefault(id(file), (file, []))[1]
            columns.append((offsets, lengths, addresses))

    def put_stored(self, file: Handle, stored: Stored, to: Sequence[Ints]) -> None:
        """Add fields of samples in any order, each value with its address; see `add`.

        `to` has int64, shape ``(n,)``, for each of the fields of `stored`.
        """
        starts, n = stored.starts, len(stored.starts)
        low, high = int(starts.min()), int(starts.max())
        ends = [at + f.row_nbytes for f, at in stored.fields]
        if low < 0 or high + max(ends) > file.nbytes:
            for f, at in stored.fields:
                file.check_extents(starts + at, np.full(n, f.row_nbytes), f"field {f.name}")
        if n >= MERGED and high - low < n * 2 * APART_NEAR:
            for (f, at), addresses in zip(stored.fields, to, strict=True):
                self.put(file, starts + at, np.full(n, f.row_nbytes), addresses, f"field {f.name}")
            return
        self._apart += [(file, runs) for runs in _side_by_side(stored, to)]

    def read(self, near: int) -> None:
        """Read all of it; see `dsprep.storage.base.read_all`."""
        parts = [*self._apart, *self.runs(near)]
        read_all(parts)
        first = {file: int(r.starts[0]) for file, r in reversed(parts) if len(r.starts)}
        for file, offset in first.items():
            file.check_same(offset)

    @property
    def nbytes(self) -> int:
        """Bytes of the files that have been added."""
        return sum(file.nbytes for file, _ in self._files.values())

    def runs(self, near: int) -> Iterator[tuple[Handle, Runs]]:
        """Yield what to read of each file, by rising offsets; see `dsprep.storage.scatter.runs`."""
        for file, columns in self._files.values():
            offsets, lengths, addresses = (
                columns[0] if len(columns) == 1 else map(np.concatenate, zip(*columns, strict=True))
            )
            if (offsets[1:] < offsets[:-1]).any():
                order = np.argsort(offsets, kind="stable")
                offsets, lengths, addresses = offsets[order], lengths[order], addresses[order]
            yield file, runs(offsets, lengths, addresses, near)


def _side_by_side(stored: Stored, to: Sequence[Ints]) -> Iterator[Runs]:
    """Yield one range per sample of fields that are near each other in it."""
    order = sorted(range(len(to)), key=lambda k: stored.fields[k][1])
    begin, columns, end = 0, list[tuple[Ints | int, int]](), 0
    for k in order:
        (f, at), addresses = stored.fields[k], to[k]
        gap = at - end
        if columns and not 0 <= gap <= NEAR:
            yield together(stored.starts + begin, columns)
            columns = []
        if not columns:
            begin = at
        elif gap:
            columns.append((DROPPED, gap))
        columns.append((addresses, f.row_nbytes))
        end = at + f.row_nbytes
    yield together(stored.starts + begin, columns)


# --- consecutive samples at a constant distance ------------------------------------------------


@dataclass(frozen=True)
class Strided:
    """A field of consecutive samples: sample i is stored at ``offset + i * stride``.

    Attributes
    ----------
    path
        The file, below the dataset's file entry.
    offset, stride
        Bytes.
    nbytes
        Bytes of a sample.
    """

    path: str
    offset: int
    stride: int
    nbytes: int

    def stop(self, count: int) -> int:
        """Return the offset behind the last of `count` samples."""
        return self.offset + (count - 1) * self.stride + self.nbytes


def strided(
    layout: FileLayout, fields: Sequence[Field], first: int, count: int
) -> list[Strided] | None:
    """Return the locations of fields of consecutive samples, None if they are not so simple.

    Parameters
    ----------
    layout
        Of the file.
    fields
        Of at least one byte, and not ragged.
    first, count
        Samples of the file; at least one.
    """
    out: list[Strided] = []
    records: tuple[int, int, int, bool] | None = None
    for field in fields:
        column = layout.columns.get(field.name)
        planned = None
        if column is not None:
            planned = _of_column(column, field, first, count)
        elif layout.records is not None:
            records = records or _of_records(layout.records, first, count)
            if records is not None:
                planned = _of_part(layout.records, field, count, *records)
        if planned is None:
            return None
        out.append(planned)
    return out


def _of_column(column: Column, field: Field, first: int, count: int) -> Strided | None:
    grid, nbytes = column.grid, field.row_nbytes
    if grid is None or not grid.plain or column.first is not None or field.ragged:
        return None
    rows = rows_at(grid, first * column.lines, count * column.lines)
    if rows is None or column.lines * grid.row_nbytes != nbytes:
        return None
    return Strided(*rows, nbytes, nbytes)


def _of_records(records: Records, first: int, count: int) -> tuple[int, int, int, bool] | None:
    """Return offset and stride of records, the bytes of the shortest, and whether all have them."""
    offsets, lengths = records.blocks.offsets, records.blocks.lengths
    if records.order is not None:
        return None
    if count == 1:
        base, stride = offsets.one(first), 0
    elif isinstance(offsets, Affine):
        base, stride = offsets.one(first), offsets.stride
    else:
        begins = offsets.span(first, first + count)
        steps = np.diff(begins)
        base, stride = int(begins[0]), int(steps[0])
        if (steps != stride).any():
            return None
    fixed = isinstance(lengths, Affine) and not lengths.stride
    smallest = lengths.one(first) if fixed else int(lengths.span(first, first + count).min())
    return base, stride, smallest, fixed


def _of_part(
    records: Records, field: Field, count: int, base: int, stride: int, smallest: int, fixed: bool
) -> Strided | None:
    part, nbytes = records.parts.get(field.name), field.row_nbytes
    if part is None or part.at is None:
        return None
    if part.nbytes is None:
        if not fixed or smallest - part.at != nbytes:
            return None
    elif part.nbytes != nbytes:
        return None
    stride = nbytes if count == 1 else stride
    if part.at + nbytes > smallest or stride < nbytes:
        return None
    return Strided(records.blocks.path, base + part.at, stride, nbytes)


def woven(
    fields: Sequence[Strided], addresses: Sequence[Ints | int], count: int
) -> list[tuple[int, Ints]] | None:
    """Return what has to be read of one file, as `dsprep.storage.scatter.runs` does.

    Parameters
    ----------
    fields
        Different fields of the same samples.
    addresses
        For each, where the values go: int64, shape ``(count,)``; or where all of them go together,
        as they are stored.
    count
        Samples.

    Returns
    -------
    None where fields overlap or differ too much to be woven together.
    """
    bands: list[list[int]] = []  # fields of one band follow each other in every sample
    for k in sorted(range(len(fields)), key=lambda k: fields[k].offset):
        first = fields[bands[-1][0]] if bands else None
        same = first is not None and fields[k].stride == first.stride
        if first is not None and same and fields[k].offset < first.offset + first.stride:
            bands[-1].append(k)
        else:
            bands.append([k])
    out: list[tuple[int, list[Ints]]] = []
    end = -1
    for band in bands:
        start = fields[band[0]].offset
        iovecs = _band([fields[k] for k in band], [addresses[k] for k in band], count)
        gap = start - end
        if iovecs is None or (out and gap < 0):
            return None
        if out and gap <= NEAR:
            out[-1][1].extend([np.array([[DROPPED, gap]], np.int64), iovecs] if gap else [iovecs])
        else:
            out.append((start, [iovecs]))
        end = fields[band[-1]].stop(count)
    return [(start, each[0] if len(each) == 1 else np.concatenate(each)) for start, each in out]


def _band(fields: Sequence[Strided], addresses: Sequence[Ints | int], count: int) -> Ints | None:
    """Return the places of fields that follow each other in every sample, and of their gaps."""
    stride, at = fields[0].stride, fields[0].offset
    only = addresses[0]
    if len(fields) == 1 and stride == fields[0].nbytes and isinstance(only, int):
        return np.array([[only, count * stride]], np.int64)
    columns: list[tuple[Ints | int, int]] = []
    for field, address in zip(fields, addresses, strict=True):
        gap = field.offset - at
        if not 0 <= gap <= NEAR:
            return None
        if gap:
            columns.append((DROPPED, gap))
        if isinstance(address, int):
            address = address + np.arange(count, dtype=np.int64) * field.nbytes
        columns.append((address, field.nbytes))
        at = field.offset + field.nbytes
    gap = fields[0].offset + stride - at
    if not 0 <= gap <= NEAR:
        return None
    if gap:
        columns.append((DROPPED, gap))
    iovecs = np.empty((count, len(columns), 2), np.int64)
    for k, (address, nbytes) in enumerate(columns):
        iovecs[:, k, 0], iovecs[:, k, 1] = address, nbytes
    flat = iovecs.reshape(-1, 2)
    return flat[:-1] if gap else flat


# --- ranges cut for threads and calls ----------------------------------------------------------


def shared(start: int, iovecs: Ints, limit: int, align: int) -> list[tuple[int, Ints]]:
    """Cut a range of a file into at most `limit` parts of like size, at multiples of `align`."""
    total = int(iovecs[:, 1].sum())
    count = min(limit, total // max(align, LEAST))
    if count < 2:
        return [(start, iovecs)]
    at = {(start + total * k // count) // align * align for k in range(1, count)}
    return cut(start, iovecs, sorted(a for a in at if start < a < start + total))
