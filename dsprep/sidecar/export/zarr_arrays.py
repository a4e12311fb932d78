"""One field of a whole dataset as an array of Zarr version 2: its chunks, and where each is.

Zarr counts its chunks through from the first sample to the last, though the dataset may be in
several files. So the samples of a chunk divide those of every file but the last, and those of every
chunk that the dataset has itself. What cannot be brought into such a grid is `Inexpressible`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from dsprep.core import filters as known
from dsprep.core.schema import Field, Ints
from dsprep.errors import FormatError, UsageError
from dsprep.layout.as_json import file_path
from dsprep.layout.locate import locate
from dsprep.layout.model import Column, FileLayout, Given, Grid, OwnFiles, Records
from dsprep.sidecar.export import SLICE, check_inside
from dsprep.sidecar.sidecar import Sidecar

Part: TypeAlias = tuple[Path, FileLayout, int]
"""A file with samples, its layout, and its first sample in the dataset."""

Chunks: TypeAlias = tuple[Path, Ints, Ints, Ints]
"""A file, and chunks in it, int64: where in the grid, ``(axes, m)``, offsets, and lengths."""

LARGE = 16 << 20
"""Bytes of a chunk of contiguous samples at most, unless one is larger."""


@dataclass(frozen=True)
class ArrayPlan:
    """A field as an array of Zarr.

    Attributes
    ----------
    chunks
        Shape of a chunk, samples first.
    filters
        Of every chunk; None: a chunk is contiguous samples, which need none.
    fill
        The fill value; None without.
    """

    field: Field
    chunks: tuple[int, ...]
    parts: tuple[Part, ...] = ()
    filters: tuple[Mapping[str, Any], ...] | None = None
    fill: Any = None

    @property
    def count(self) -> int:
        """The number of chunks."""
        inner = zip(self.field.inner, self.chunks[1:], strict=True)
        side = math.prod(-(-n // c) for n, c in inner)
        return sum(-(-layout.count // self.chunks[0]) for _, layout, _ in self.parts) * side

    def references(self) -> Iterator[Chunks]:
        """Yield the stored chunks, some at a time.

        Raises
        ------
        FormatError
            If an extent is not in its file.
        UsageError
            If chunks are not stored, and there is no fill value for them.
        """
        for root, layout, first in self.parts:
            chunks = self._contiguous(layout) if self.filters is None else self._encoded(layout)
            for name, position, offset, length in chunks:
                stored = (offset >= 0) & (length > 0)
                if not stored.all() and self.fill is None:
                    raise UsageError(
                        f"field {self.field.name} has chunks that are not stored, and no fill "
                        "value that JSON keeps",
                        where=root,
                        fix="convert the dataset",
                    )
                position, offset, length = position[:, stored], offset[stored], length[stored]
                path = root / name
                check_inside(offset, length, path, f"field {self.field.name}")
                position[0] += first // self.chunks[0]
                yield path, position, offset, length

    def _contiguous(self, layout: FileLayout) -> Iterator[tuple[str, Ints, Ints, Ints]]:
        """Yield chunks of plain samples: each begins with that of its first one."""
        step, nbytes = self.chunks[0], self.field.row_nbytes
        for start in range(0, layout.count, step * SLICE):
            samples = np.arange(
                start, min(start + step * SLICE, layout.count), step, dtype=np.int64
            )
            extents = locate(layout, self.field.name, samples)
            if (extents.length != nbytes).any() or len(extents.length) != len(samples):
                raise FormatError(
                    "a sample has another length than its field",
                    where=f"field {self.field.name}",
                    expected=nbytes,
                )
            for name, some in extents.by_path():
                offset = extents.offset[some]
                position = np.zeros((len(self.chunks), len(offset)), np.int64)
                position[0] = samples[some] // step
                yield name, position, offset, np.full(len(offset), step * nbytes, np.int64)

    def _encoded(self, layout: FileLayout) -> Iterator[tuple[str, Ints, Ints, Ints]]:
        """Yield chunks as they are stored."""
        grid = layout.columns[self.field.name].grid
        assert grid is not None  # or it is not planned so
        for start in range(0, math.prod(grid.chunks), SLICE):
            numbers = np.arange(start, min(start + SLICE, math.prod(grid.chunks)), dtype=np.int64)
            position = np.array(np.unravel_index(numbers, grid.chunks), np.int64)
            block, files = grid.numbers(position)
            offset, length = grid.blocks.offsets.at(block), grid.blocks.lengths.at(block)
            if files is None:
                yield grid.blocks.path, position, offset, length
                continue
            edges = np.flatnonzero((np.diff(files) != 0).any(axis=0)) + 1
            for some in np.split(np.arange(len(offset)), edges):
                name = file_path(grid.blocks.path, files[:, some[0]].tolist())
                yield name, position[:, some], offset[some], length[some]


# --- chunks of one shape -----------------------------------------------------------------------


def plan(sidecar: Sidecar, field: Field) -> ArrayPlan:
    """Return `field` as an array of Zarr; `Inexpressible` if it is not one."""
    if field.ragged:
        raise Inexpressible("its size varies from sample to sample")
    if not field.row_nbytes or not len(sidecar):
        return ArrayPlan(field, (1, *(max(1, n) for n in field.inner)))
    parts, columns = list[Part](), list[Column | None]()
    for number, file in enumerate(sidecar.content.files):
        if file.samples:
            root, layout = sidecar.root(number), sidecar.layout(number)
            parts.append((root, layout, sidecar.first(number)))
            columns.append(_column(layout, field, root))
    grids = [c.grid for c in columns if c is not None and c.grid is not None]
    fills = {grid.fill for grid in grids if grid.fill is not None}
    fill = np.frombuffer(fills.pop(), field.dtype)[0] if len(fills) == 1 else None
    if not all(grid.plain for grid in grids):
        chunk, filters = _stored_alike(field, parts, columns)
        return ArrayPlan(field, chunk, tuple(parts), filters, fill)
    bound = math.gcd(*(layout.count for _, layout, _ in parts[:-1]))
    for (_, layout, _), column in zip(parts, columns, strict=True):
        grid = None if column is None else column.grid
        if column is None or grid is None:
            bound = 1  # records are apart
        elif grid.chunk != grid.shape or grid.several:
            bound = math.gcd(bound, grid.chunk[0] // column.lines)
        else:
            bound = math.gcd(bound, layout.count)
    per = _divisor(bound, max(1, LARGE // field.row_nbytes))
    return ArrayPlan(field, (per, *field.inner), tuple(parts), None, fill)


def _column(layout: FileLayout, field: Field, root: Path) -> Column | None:
    """Return how a field is stored as an array in a file; None: in records."""
    match layout.find_field(field.name):
        case Records() as records:
            if records.parts[field.name].at is None:
                raise Inexpressible("its values have no constant offset in a record")
            return None
        case OwnFiles():
            raise Inexpressible("each sample is in a file of its own")
        case Given():
            raise Inexpressible("its values are in the sidecar, and in no file")
        case Column(grid=Grid() as grid, first=None) as column:
            known.check(grid.filters, f"{root}, field {field.name}")
        case Column():
            raise Inexpressible("the sidecar does not locate it")
        case reason:
            raise Inexpressible(reason)
    if grid.shape[0] != layout.count * column.lines:
        raise Inexpressible("its rows are not those of the samples")
    if grid.chunk != grid.shape and grid.chunk[0] % column.lines:
        raise Inexpressible("its chunks end within samples")
    return column


def _stored_alike(
    field: Field, parts: Sequence[Part], columns: Sequence[Column | None]
) -> tuple[tuple[int, ...], tuple[Mapping[str, Any], ...]]:
    """Return the shape and the filters that the stored chunks of all files have."""
    kinds = []
    for column in columns:
        grid = None if column is None else column.grid
        if column is None or grid is None:
            raise Inexpressible("its files are not chunked alike")
        if grid.masks is not None:
            raise Inexpressible("filters were left out of some of its chunks")
        if any(f["id"] == "deflate" for f in grid.filters):
            raise Inexpressible("Zarr has no codec for deflated members of ZIP files")
        if column.lines == 1 and grid.shape[1:] == field.inner:
            shape = grid.chunk
        elif grid.chunk[1:] == grid.shape[1:]:
            shape = (grid.chunk[0] // column.lines, *field.inner)
        else:
            raise Inexpressible("its chunks cut samples in another shape than theirs")
        kinds.append((shape, grid.filters))
    if any(kind != kinds[0] for kind in kinds):
        raise Inexpressible("its files are not chunked alike")
    (chunk, filters) = kinds[0]
    if any(layout.count % chunk[0] for _, layout, _ in parts[:-1]):
        raise Inexpressible("a file ends within a chunk, and others follow")
    return chunk, tuple(filters)


def _divisor(n: int, largest: int) -> int:
    """Return the largest divisor of `n` up to `largest`, of those tried in reasonable time."""
    low = np.arange(1, min(math.isqrt(n), 1 << 20) + 1, dtype=np.int64)
    low = low[n % low == 0]
    both = np.concatenate([low, n // low])
    return int(both[both <= largest].max())


class Inexpressible(Exception):
    """Zarr cannot express it; the argument is the reason, a clause."""
