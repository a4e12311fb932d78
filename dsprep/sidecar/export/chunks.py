"""One field of a whole dataset as a grid of chunks, and where each of them lies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from dsprep.core.schema import Array, Field, Ints
from dsprep.errors import FormatError, UsageError
from dsprep.layout.as_json import file_path
from dsprep.layout.locate import locate
from dsprep.layout.model import FileLayout, Grid
from dsprep.sidecar.export.files import SLICE, check_inside


@dataclass(frozen=True)
class Chunk:
    """Chunks of one file.

    Attributes
    ----------
    place
        In the grid: int64, shape ``(axes, m)``.
    offset, length
        int64, shape ``(m,)``: the stored bytes.
    """

    place: Ints
    offset: Ints
    length: Ints


Tail: TypeAlias = tuple[str, Path, int, int, int]


@dataclass(frozen=True)
class Part:
    """The samples of one file.

    Attributes
    ----------
    path
        The dataset's file, or directory.
    layout
        Of the file.
    first
        Its first sample, in the dataset.
    grid
        The array; None: records.
    lines
        Rows of the array per sample.
    """

    path: Path
    layout: FileLayout
    first: int
    grid: Grid | None
    lines: int = 1

    @property
    def count(self) -> int:
        """Samples in the file."""
        return self.layout.count

    @property
    def free(self) -> bool:
        """Whether rows follow one another from the first to the last."""
        grid = self.grid
        if grid is None or not grid.plain or grid.files is not None:
            return False
        return grid.chunk == grid.shape and int(grid.blocks.offsets.at(_ONE)[0]) >= 0

    @property
    def unit(self) -> int:
        """Samples that lie behind each other wherever one begins with a multiple of it."""
        if self.grid is None:
            return 1
        return self.grid.chunk[0] // self.lines


_ONE = np.zeros(1, np.int64)


@dataclass(frozen=True)
class Plan:
    """A field as an array of Zarr.

    Attributes
    ----------
    field
        The field.
    chunks
        Shape of a chunk, samples first.
    parts
        The files that hold samples.
    filters
        Of every chunk.
    fill
        Its fill value in JSON; None without.
    whole
        Whether chunks are those of the dataset, with filters or cut along inner axes.
    unfillable
        Why there is no fill value, though chunks may want one.
    """

    field: Field
    chunks: tuple[int, ...]
    parts: tuple[Part, ...] = ()
    filters: tuple[Mapping[str, Any], ...] = ()
    fill: Any = None
    whole: bool = False
    unfillable: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of a chunk, decoded."""
        return math.prod(self.chunks) * self.field.dtype.itemsize

    @property
    def count(self) -> int:
        """How many chunks there are."""
        inner = zip(self.field.inner, self.chunks[1:], strict=True)
        side = math.prod(-(-n // c) for n, c in inner)
        return sum(-(-p.count // self.chunks[0]) for p in self.parts) * side

    def chunk_references(self) -> Iterator[tuple[Path, Chunk]]:
        """Yield the stored chunks, some at a time, with the file that holds them.

        Raises
        ------
        FormatError
            If a place is not in its file.
        UsageError
            If chunks are not stored, and what they hold cannot be told.
        """
        for part in self.parts:
            if part.grid is None:
                yield from self._records(part)
            elif part.free:
                yield from self._rows(part)
            else:
                yield from self._grid(part, part.grid)

    def _records(self, part: Part) -> Iterator[tuple[Path, Chunk]]:
        for start in range(0, part.count, SLICE):
            indices = np.arange(start, min(start + SLICE, part.count), dtype=np.int64)
            found = locate(part.layout, self.field.name, indices)
            if (found.length != self.nbytes).any():
                raise FormatError(
                    "a record has another length than its field",
                    where=f"{part.path}, field {self.field.name}",
                    expected=self.nbytes,
                )
            yield self._checked(part, found.template, indices, found.offset, found.length)

    def _rows(self, part: Part) -> Iterator[tuple[Path, Chunk]]:
        assert part.grid is not None
        base = int(part.grid.blocks.offsets.at(_ONE)[0])
        path = part.path / part.grid.blocks.path
        kept = self._referable(part, base, path)
        for start in range(0, kept, SLICE):
            numbers = np.arange(start, min(start + SLICE, kept), dtype=np.int64)
            length = np.full(len(numbers), self.nbytes, np.int64)
            offset = base + numbers * self.nbytes
            yield self._checked(part, part.grid.blocks.path, numbers, offset, length)

    def _referable(self, part: Part, base: int, path: Path) -> int:
        """Return how many chunks of contiguous rows the file has in full."""
        n = -(-part.count // self.chunks[0])
        if part.count % self.chunks[0] and base + n * self.nbytes > path.stat().st_size:
            return n - 1
        return n

    def tails(self) -> Iterator[Tail]:
        """Yield ``(key, path, offset, nbytes, size)`` of a last chunk that the file ends in.

        `nbytes` of it are there, of `size`.
        """
        for part in self.parts[-1:]:
            grid = part.grid
            if grid is None or not part.free:
                continue
            base, path = int(grid.blocks.offsets.at(_ONE)[0]), part.path / grid.blocks.path
            kept = self._referable(part, base, path)
            per = self.chunks[0]
            if kept * per < part.count:
                nbytes = (part.count - kept * per) * self.field.row_nbytes
                key = f"{part.first // per + kept}" + ".0" * len(self.field.inner)
                yield key, path, base + kept * self.nbytes, nbytes, self.nbytes

    def _grid(self, part: Part, grid: Grid) -> Iterator[tuple[Path, Chunk]]:
        step = grid.chunk[0] if self.whole else self.chunks[0] * part.lines
        counts = (-(-grid.shape[0] // step), *grid.chunks[1:])
        total = math.prod(counts)
        for start in range(0, total, SLICE):
            numbers = np.arange(start, min(start + SLICE, total), dtype=np.int64)
            place = np.array(np.unravel_index(numbers, counts), np.int64)
            row = place[0] * step
            at = np.concatenate([row[None] // grid.chunk[0], place[1:]])
            block, files = grid.numbers(at)
            offset, length = grid.blocks.offsets.at(block), grid.blocks.lengths.at(block)
            stored = (offset >= 0) & (length > 0)
            if not self.whole:
                offset = offset + row % grid.chunk[0] * grid.row_nbytes
                length = np.where(stored, self.nbytes, 0)
            if not stored.all():
                self._need_fill(part, grid)
                place, offset, length = place[:, stored], offset[stored], length[stored]
                files = files[:, stored] if files is not None else None
            template = grid.blocks.path
            if files is None:
                yield self._checked(part, template, place, offset, length)
                continue
            # Neighbours in one file together.
            edges = np.flatnonzero((np.diff(files) != 0).any(axis=0)) + 1
            for some in np.split(np.arange(len(offset)), edges):
                if len(some):
                    name = file_path(template, files[:, some[0]].tolist())
                    yield self._checked(part, name, place[:, some], offset[some], length[some])

    def _need_fill(self, part: Part, grid: Grid) -> None:
        where = f"{part.path}, field {self.field.name}"
        if grid.fill is None:
            raise FormatError("a chunk is missing, and there is no fill value", where=where)
        if self.unfillable:
            raise UsageError(
                f"field {self.field.name} has chunks that are not stored: {self.unfillable}",
                where=part.path,
                fix="convert the dataset",
            )

    def _checked(
        self, part: Part, name: str, place: Array, offset: Ints, length: Ints
    ) -> tuple[Path, Chunk]:
        path = part.path / name
        check_inside(offset, length, path, f"field {self.field.name}")
        if place.ndim == 1 or len(place) != len(self.chunks):
            axis = place if place.ndim == 1 else place[0]
            place = np.zeros((len(self.chunks), len(axis)), np.int64)
            place[0] = axis
        else:
            place = place.copy()
        place[0] += part.first // self.chunks[0]
        return path, Chunk(place, offset, length)
