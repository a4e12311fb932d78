"""One field of a whole dataset as an array of Zarr version 2: its chunks, and where each is.

Zarr counts its chunks through from the first sample to the last, though the dataset may be in
several files. So the samples of a chunk divide those of every file but the last, and those of every
chunk that the dataset has itself. What cannot be brought into such a grid, or what the words of
Zarr version 2 (zarr-specs.readthedocs.io, and the codec configurations of numcodecs) cannot state
exactly, is `Inexpressible`.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from dsprep.core import filters as known
from dsprep.core.schema import Array, DType, Field, Ints, is_extension, show_dtype
from dsprep.errors import FormatError, UsageError
from dsprep.layout.as_json import file_path
from dsprep.layout.locate import locate
from dsprep.layout.model import Column, FileLayout, Given, Grid, OwnFiles, Records
from dsprep.sidecar.export import SLICE, check_inside
from dsprep.sidecar.sidecar import Sidecar


@dataclass(frozen=True)
class FileChunks:
    """Chunks of one file, int64: where in the grid, shape ``(axes, m)``, and their stored bytes."""

    position: Ints
    offset: Ints
    length: Ints


Tail: TypeAlias = tuple[str, Path, int, int, int]


@dataclass(frozen=True)
class FileArray:
    """The samples of one file, from `first` of the dataset on; `grid` is None for records."""

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
        """Whether rows are contiguous from the first to the last."""
        grid = self.grid
        if grid is None or not grid.plain or grid.several:
            return False
        return grid.chunk == grid.shape and int(grid.blocks.offsets.at(_ONE)[0]) >= 0

    @property
    def unit(self) -> int:
        """Samples that are contiguous wherever one begins with a multiple of it."""
        if self.grid is None:
            return 1
        return self.grid.chunk[0] // self.lines


_ONE = np.zeros(1, np.int64)


@dataclass(frozen=True)
class ArrayPlan:
    """A field as an array of Zarr.

    Attributes
    ----------
    chunks
        Shape of a chunk, samples first.
    parts
        The files that hold samples.
    filters
        Of every chunk.
    fill
        Its fill value in JSON; None without, and `unfillable` says why, though chunks may want one.
    as_stored
        Whether chunks are those of the dataset, with filters or cut along inner axes.
    """

    field: Field
    chunks: tuple[int, ...]
    parts: tuple[FileArray, ...] = ()
    filters: tuple[Mapping[str, Any], ...] = ()
    fill: Any = None
    as_stored: bool = False
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

    def chunk_references(self) -> Iterator[tuple[Path, FileChunks]]:
        """Yield the stored chunks, some at a time, with the file that holds them.

        Raises
        ------
        FormatError
            If an extent is not in its file.
        UsageError
            If chunks are not stored, and there is no fill value for them.
        """
        for part in self.parts:
            if part.grid is None:
                yield from self._records(part)
            elif part.free:
                yield from self._rows(part)
            else:
                yield from self._grid(part, part.grid)

    def _records(self, part: FileArray) -> Iterator[tuple[Path, FileChunks]]:
        for start in range(0, part.count, SLICE):
            indices = np.arange(start, min(start + SLICE, part.count), dtype=np.int64)
            extents = locate(part.layout, self.field.name, indices)
            if (extents.length != self.nbytes).any():
                raise FormatError(
                    "a record has another length than its field",
                    where=f"{part.path}, field {self.field.name}",
                    expected=self.nbytes,
                )
            yield self._checked(part, extents.template, indices, extents.offset, extents.length)

    def _rows(self, part: FileArray) -> Iterator[tuple[Path, FileChunks]]:
        assert part.grid is not None
        base = int(part.grid.blocks.offsets.at(_ONE)[0])
        path = part.path / part.grid.blocks.path
        kept = self._referable(part, base, path)
        for start in range(0, kept, SLICE):
            numbers = np.arange(start, min(start + SLICE, kept), dtype=np.int64)
            length = np.full(len(numbers), self.nbytes, np.int64)
            offset = base + numbers * self.nbytes
            yield self._checked(part, part.grid.blocks.path, numbers, offset, length)

    def _referable(self, part: FileArray, base: int, path: Path) -> int:
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

    def _grid(self, part: FileArray, grid: Grid) -> Iterator[tuple[Path, FileChunks]]:
        step = grid.chunk[0] if self.as_stored else self.chunks[0] * part.lines
        counts = (-(-grid.shape[0] // step), *grid.chunks[1:])
        total = math.prod(counts)
        for start in range(0, total, SLICE):
            numbers = np.arange(start, min(start + SLICE, total), dtype=np.int64)
            position = np.array(np.unravel_index(numbers, counts), np.int64)
            row = position[0] * step
            at = np.concatenate([row[None] // grid.chunk[0], position[1:]])
            block, files = grid.numbers(at)
            offset, length = grid.blocks.offsets.at(block), grid.blocks.lengths.at(block)
            stored = (offset >= 0) & (length > 0)
            if not self.as_stored:
                offset = offset + row % grid.chunk[0] * grid.row_nbytes
                length = np.where(stored, self.nbytes, 0)
            if not stored.all():
                self._need_fill(part, grid)
                position, offset, length = position[:, stored], offset[stored], length[stored]
                files = files[:, stored] if files is not None else None
            template = grid.blocks.path
            if files is None:
                yield self._checked(part, template, position, offset, length)
                continue
            # Neighbours in one file together.
            edges = np.flatnonzero((np.diff(files) != 0).any(axis=0)) + 1
            for some in np.split(np.arange(len(offset)), edges):
                if len(some):
                    name = file_path(template, files[:, some[0]].tolist())
                    yield self._checked(part, name, position[:, some], offset[some], length[some])

    def _need_fill(self, part: FileArray, grid: Grid) -> None:
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
        self, part: FileArray, name: str, position: Array, offset: Ints, length: Ints
    ) -> tuple[Path, FileChunks]:
        path = part.path / name
        check_inside(offset, length, path, f"field {self.field.name}")
        if position.ndim == 1 or len(position) != len(self.chunks):
            axis = position if position.ndim == 1 else position[0]
            position = np.zeros((len(self.chunks), len(axis)), np.int64)
            position[0] = axis
        else:
            position = position.copy()
        position[0] += part.first // self.chunks[0]
        return path, FileChunks(position, offset, length)


# --- chunks of one shape -----------------------------------------------------------------------


SMALL, USUAL, LARGE = 1 << 20, 4 << 20, 16 << 20
"""Bytes of a chunk of contiguous rows: at least, if possible; without need for another; at most,
unless a sample is larger."""


def plan(sidecar: Sidecar, field: Field) -> ArrayPlan:
    """Return `field` as an array of Zarr; `Inexpressible` if it is not one.

    Raises `UsageError` if filters were left out for some of its chunks.
    """
    zarr_dtype(field.dtype)
    if field.ragged:
        raise Inexpressible("its size varies from sample to sample")
    if not field.row_nbytes or not len(sidecar):
        return ArrayPlan(field, (1, *(max(1, n) for n in field.inner)))
    parts, first = [], 0
    for number, file in enumerate(sidecar.content.files):
        if file.samples:
            parts.append(_part(sidecar, number, field, first))
        first += file.samples
    if any(p.grid is not None and not p.grid.plain for p in parts):
        return _as_stored(field, tuple(parts))
    return _as_rows(field, tuple(parts))


def _part(sidecar: Sidecar, number: int, field: Field, first: int) -> FileArray:
    layout, path = sidecar.layout(number), sidecar.dataset / sidecar.content.files[number].path
    match layout.find_field(field.name):
        case Records() as records:
            if records.parts[field.name].at is None:
                raise Inexpressible("its values have no constant offset in a record")
            return FileArray(path, layout, first, None)
        case OwnFiles():
            raise Inexpressible("each sample is in a file of its own")
        case Given():
            raise Inexpressible("its values are in the sidecar, and in no file")
        case Column(grid=Grid() as grid, first=None) as column:
            pass
        case Column():
            raise Inexpressible("the sidecar does not locate it")
        case reason:
            raise Inexpressible(reason)
    if grid.shape[0] != layout.count * column.lines:
        raise Inexpressible("its rows are not those of the samples")
    known.check(grid.filters, f"{path}, field {field.name}")
    if grid.chunk != grid.shape and grid.chunk[0] % column.lines:
        raise Inexpressible("its chunks end within samples")
    return FileArray(path, layout, first, grid, column.lines)


def _as_rows(field: Field, parts: tuple[FileArray, ...]) -> ArrayPlan:
    """Return a plan in which a chunk is as many samples as are contiguous."""
    last, common_count = parts[-1], math.gcd(*(p.count for p in parts[:-1]))
    bound = math.gcd(common_count, *(p.unit for p in parts if not p.free))
    per = _samples(bound, last.count if last.free else bound, field.row_nbytes)
    fill, unfillable = _fill(field, parts)
    return ArrayPlan(field, (per, *field.inner), parts, (), fill, unfillable=unfillable)


def _samples(bound: int, last: int, nbytes: int) -> int:
    """Return the samples of a chunk: a divisor of `bound` (0: any number).

    It should be a divisor of `last` too, so that the last chunk is full.
    """
    max_samples = max(1, LARGE // nbytes)
    full = _divisor(math.gcd(bound, last), max_samples)
    if full * nbytes >= SMALL or full in (bound, last):
        return full
    return _divisor(bound, max_samples) if bound else max(1, min(last, USUAL // nbytes))


def _divisor(n: int, largest: int) -> int:
    """Return the largest divisor of `n` up to `largest`, of those tried in reasonable time."""
    low = np.arange(1, min(math.isqrt(n), 1 << 20) + 1, dtype=np.int64)
    low = low[n % low == 0]
    both = np.concatenate([low, n // low])
    return int(both[both <= largest].max())


def _as_stored(field: Field, parts: tuple[FileArray, ...]) -> ArrayPlan:
    """Return a plan in which chunks are those of the dataset."""
    shapes, filters = set(), set()
    for part in parts:
        grid = part.grid
        if grid is None:
            raise Inexpressible("its files are not chunked alike")
        if part.lines == 1 and grid.shape[1:] == field.inner:
            shapes.add(grid.chunk)
        elif grid.chunk[1:] == grid.shape[1:] and grid.chunk[0] % part.lines == 0:
            shapes.add((grid.chunk[0] // part.lines, *field.inner))
        else:
            raise Inexpressible("its chunks cut samples in another shape than theirs")
        kept = _applied(field, part, grid)
        if any(f["id"] == "deflate" for f in kept):
            raise Inexpressible("Zarr has no codec for deflated members of ZIP files")
        filters.add(tuple(tuple(sorted(f.items(), key=str)) for f in kept))
    if len(shapes) > 1 or len(filters) > 1:
        raise Inexpressible("its files are not chunked alike")
    chunk = shapes.pop()
    if any(p.count % chunk[0] for p in parts[:-1]):
        raise Inexpressible("a file ends within a chunk, and others follow")
    fill, unfillable = _fill(field, parts)
    applied = tuple(dict(f) for f in filters.pop())
    return ArrayPlan(field, chunk, parts, applied, fill, as_stored=True, unfillable=unfillable)


def _applied(field: Field, part: FileArray, grid: Grid) -> list[Mapping[str, Any]]:
    """Return the filters of all chunks; `UsageError` if they are not the same."""
    if grid.masks is None:
        return list(grid.filters)
    mask: int | None = None
    for start in range(0, grid.block_count, SLICE):
        stop = min(start + SLICE, grid.block_count)
        masks = grid.masks.span(start, stop)
        stored = (grid.blocks.offsets.span(start, stop) >= 0) & (
            grid.blocks.lengths.span(start, stop) > 0
        )
        distinct_masks = set(np.unique(masks[stored]).tolist())
        distinct_masks |= {mask} if mask is not None else set()
        if len(distinct_masks) > 1:
            raise UsageError(
                f"field {field.name} cannot be expressed in Zarr: filters were left out for some "
                "of its chunks only",
                where=part.path,
                fix="convert the dataset",
            )
        mask = distinct_masks.pop() if distinct_masks else mask
    return [f for i, f in enumerate(grid.filters) if not (mask or 0) >> i & 1]


def _fill(field: Field, parts: tuple[FileArray, ...]) -> tuple[Any, str]:
    """Return the fill value, and why there is none, should chunks need one."""
    fills = {p.grid.fill for p in parts if p.grid is not None and p.grid.fill is not None}
    if len(fills) != 1:
        return None, "its files have different fill values" if fills else ""
    try:
        return fill_value(fills.pop(), field.dtype), ""
    except Inexpressible as reason:
        return None, str(reason)


# --- Zarr version 2 ----------------------------------------------------------------------------


COMPRESSORS = frozenset({"zlib", "gzip", "zstd", "blosc", "lz4", "bz2"})
_DROPPED = {"blosc": {"typesize"}}  # older releases of numcodecs do not know it


class Inexpressible(Exception):
    """Zarr cannot express it; the argument is the reason, a clause."""


def zarr_dtype(of: DType) -> Any:
    """Return a dtype as in ``.zarray``, byte order included."""
    if of.names is not None and of.fields is not None:
        members = [(n, of.fields[n][0]) for n in of.names]
        if any(d.names or d.subdtype or is_extension(d) for _, d in members):
            raise Inexpressible(f"Zarr version 2 has no dtype {show_dtype(of)}")
        if np.dtype(members) != of:
            raise Inexpressible("Zarr version 2 has no dtype with gaps between its members")
        return [[n, zarr_dtype(d)] for n, d in members]
    exact = of.kind in "biuSUV" or (of.kind in "fc" and of.itemsize in _SIZES[of.kind])
    exact = exact or (of.kind in "Mm" and "[" in of.str)  # with a unit
    if not exact or is_extension(of) or of.subdtype is not None:
        raise Inexpressible(f"Zarr version 2 has no dtype {show_dtype(of)}")
    return of.str


_SIZES = {"f": (2, 4, 8), "c": (8, 16)}


def codecs(filters: Sequence[Mapping[str, Any]]) -> tuple[Any, Any]:
    """Return ``filters`` and ``compressor`` as in ``.zarray``, for filters as in `Grid`."""
    configs: list[dict[str, Any]] = []
    for f in filters:
        name = f["id"]
        dropped = _DROPPED.get(name, set())
        kept = {k: v for k, v in f.items() if v is not None and k not in dropped}
        if name == "crc32c":
            kept["location"] = "end"  # by default numcodecs puts it in front
        configs.append(kept)
    last = configs.pop() if configs and configs[-1]["id"] in COMPRESSORS else None
    return configs or None, last


def fill_value(fill: bytes, of: DType) -> Any:
    """Return an element as the ``fill_value`` in ``.zarray``."""
    element = np.frombuffer(fill, of)[0]
    if of.names is not None or of.kind in "SV":
        return base64.b64encode(fill).decode()
    if of.kind == "U":
        return str(element)
    if of.kind in "Mm":
        return int(element.astype(np.int64))
    if of.kind in "fc":
        parts = [element.real, element.imag] if of.kind == "c" else [element]
        words = [_real(float(p)) for p in parts]
        back = [float(w) for w in words]
        same = np.array([complex(*back) if of.kind == "c" else back[0]], of).tobytes() == fill
        if not same:
            raise Inexpressible("its fill value has bits that JSON does not keep")
        return words if of.kind == "c" else words[0]
    return element.item()


def _real(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def attribute(value: Any) -> Any:
    """Return an attribute as JSON: numpy values and arrays become numbers and lists."""
    if isinstance(value, np.generic | np.ndarray):
        kind = value.dtype.kind
        words = kind == "O" and all(isinstance(v, str) for v in np.asarray(value).reshape(-1))
        if not (words or kind in "biuU" or (kind == "f" and value.dtype.itemsize in _SIZES["f"])):
            raise Inexpressible(f"JSON has no {show_dtype(value.dtype)}")
        return value.tolist()
    if isinstance(value, str | bool | int | float):
        return value
    raise Inexpressible(f"JSON has no {type(value).__name__}")
