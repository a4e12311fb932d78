"""Where the samples of an HDF5 file lie, for readers that do without the library.

A dataset is told as a `Grid` if its bytes are exactly those of the field's dtype and every chunk
can be decoded by `dsprep.core.filters`. Whatever else the library may do to the bytes (convert
types, look into heaps, other files or the object header) makes a field *unlocated*, with the
reason.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsprep.core.schema import Field, Ints
from dsprep.core.storage import pread_most
from dsprep.errors import FormatError
from dsprep.formats.hdf5.codecs import filters_of
from dsprep.formats.hdf5.columns import ColumnReader, Fixed, Indexed, PerGroup, Sequences
from dsprep.formats.hdf5.guard import library
from dsprep.formats.hdf5.index import chunk_table, edges_unfiltered, grid_of
from dsprep.formats.hdf5.tables import locate
from dsprep.layout.laws import Affine, Explicit
from dsprep.layout.model import Blocks, Column, FileLayout, Grid

_STEP = 1 << 20


@dataclass(frozen=True, eq=False)
class _File:
    """The file, opened for plain reads."""

    path: Path
    fd: int
    nbytes: int
    userblock: int


class _Unlocated(Exception):
    """Only the library can find a field; the argument is the reason, a clause."""


class _Steps:
    """Progress over all columns: chunks and samples alike."""

    def __init__(self, progress: Callable[[int, int], None] | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def __call__(self, steps: int) -> None:
        if self._progress is not None:
            self._done = min(self._total, self._done + steps)
            self._progress(self._done, self._total)

    def finish(self) -> None:
        """Report the end: chunks that are not stored, or known already, were not stepped over."""
        if self._done < self._total:
            self(self._total - self._done)


def find(
    path: Path,
    fd: int,
    file: Any,
    columns: Mapping[str, tuple[ColumnReader, Field]],
    count: int,
    progress: Callable[[int, int], None] | None,
) -> FileLayout:
    """Return where every sample lies; see `Source.extents`.

    Parameters
    ----------
    path, fd, file
        The file, opened for plain reads and as an `h5py.File`.
    columns
        By field name, with the fields as the user asked for them.
    count
        The number of samples.

    Raises
    ------
    FormatError
        If an index tells places that the file does not have, or tables contradict their values.
    """
    with library(path, "the file cannot be read"):
        userblock = int(file.id.get_create_plist().get_userblock())
        here = _File(path, fd, os.fstat(fd).st_size, userblock)
        steps = _Steps(progress, sum(_steps(c, count) for c, _ in columns.values()))
    grids: dict[str, Grid | str | None] = {}
    found: dict[str, Column] = {}
    unlocated: dict[str, str] = {}
    for name, (column, field) in columns.items():
        where = f"{path}, field {name}"
        try:
            with library(where, "the field cannot be located"):
                found[name] = _column(column, field, here, grids, steps, where)
        except _Unlocated as reason:
            unlocated[name] = str(reason)
    steps.finish()
    return FileLayout(count, columns=found, unlocated=unlocated)


def _steps(column: ColumnReader, count: int) -> int:
    if isinstance(column, Sequences):
        return 0
    if isinstance(column, PerGroup):
        return count
    dataset = column.rows.dataset
    chunks = math.prod(grid_of(dataset)) if dataset.chunks and dataset.size else 0
    return chunks + (count if isinstance(column, Indexed) else 0)


# --- columns ---------------------------------------------------------------------------------


def _column(
    column: ColumnReader,
    field: Field,
    file: _File,
    grids: dict[str, Grid | str | None],
    steps: _Steps,
    where: str,
) -> Column:
    if isinstance(column, Sequences):
        raise _Unlocated(
            "its values lie in the global heap, each found through a descriptor; "
            "dsprep convert makes them addressable"
        )
    if isinstance(column, PerGroup):
        return _per_group(column, field, file, steps, where)
    if isinstance(column, Indexed) and column.route.rebase is not None:
        raise _Unlocated(
            "it counts rows of another dataset, and is made to begin at 0 in each sample"
        )
    rows = column.rows
    key = str(rows.dataset.name)
    if key not in grids:
        try:
            grids[key] = _grid(rows.dataset, file, steps, where)
        except _Unlocated as reason:
            grids[key] = str(reason)
    grid = grids[key]
    if isinstance(grid, str):
        raise _Unlocated(grid)
    if isinstance(column, Fixed):
        if grid is None or not field.row_nbytes:
            return Column(None)
        found = Column(grid, grid.shape[0] if rows.whole else 1)
        return _fitting(found, column.count, field)
    first, number = _rows_of_samples(column, steps)
    return _ragged(column, field, grid, first, number, where)


def _per_group(column: PerGroup, field: Field, file: _File, steps: _Steps, where: str) -> Column:
    """Return the column of a field whose samples are datasets of one block each, all alike."""
    if column.ragged or column.held.vlen:
        raise _Unlocated(
            "its samples differ in length, and each lies in a dataset of its own; dsprep convert "
            "makes them addressable"
        )
    if not field.row_nbytes:
        return Column(None)
    first: Grid | None = None
    begins, sizes = np.empty(column.count, np.int64), np.empty(column.count, np.int64)
    for i in range(column.count):
        part = column.open(i)
        grid = (
            _grid(part.rows.dataset, file, _Steps(None, 0), where)
            if isinstance(part, Fixed)
            else None
        )
        if (
            grid is None
            or grid.blocks.count != 1
            or grid.masks is not None
            or grid.fill is not None
        ):
            raise _Unlocated("each of its samples lies in a dataset of several chunks")
        first = first or grid
        if (grid.filters, math.prod(grid.chunk)) != (first.filters, math.prod(first.chunk)):
            raise _Unlocated("its samples lie in datasets that are not stored alike")
        begins[i], sizes[i] = (
            grid.blocks.offsets.at(np.zeros(1, np.int64))[0],
            grid.blocks.lengths.at(np.zeros(1, np.int64))[0],
        )
        steps(1)
    if first is None or math.prod(first.chunk) * first.itemsize != field.row_nbytes:
        raise _Unlocated("its rows are stored with another size than its samples have")
    inner = column.held.shape
    blocks = Blocks(Explicit(begins), _constant(sizes))
    return Column(
        replace(
            first,
            blocks=blocks,
            shape=(column.count, *inner),
            chunk=(1, *inner),
            itemsize=field.dtype.itemsize,
        )
    )


def _fitting(column: Column, count: int, field: Field) -> Column:
    """Return the column if its rows are samples of the field."""
    grid = column.grid
    if grid is not None:
        per = grid.row_nbytes * (1 if field.ragged else column.lines)
        fixed = column.first is None
        if per != field.row_nbytes or (fixed and grid.shape[0] != count * column.lines):
            raise _Unlocated("its rows are stored with another size than its samples have")
    return column


def _rows_of_samples(column: Indexed, steps: _Steps) -> tuple[Ints, Ints]:
    """Return the first row of every sample, and how many it has."""
    count, end = column.count, 0
    first, number = np.empty(count, np.int64), np.empty(count, np.int64)
    for start in range(0, count, _STEP):
        stop = min(start + _STEP, count)
        found = locate(column.route.tables, column.rows.count, start, stop)
        number[start:stop] = np.diff(found.offsets)
        if found.offsets[-1]:
            first[start:stop] = found.first
            end = int(found.highs[-1])
        else:
            first[start:stop] = end  # samples without rows lie anywhere: where those before end
        steps(stop - start)
    return first, number


def _ragged(
    column: Indexed, field: Field, grid: Grid | None, first: Ints, number: Ints, where: str
) -> Column:
    """Return the column of a field by its rows, which the user may have given another type."""
    unit = field.row_nbytes
    if column.route.kind != "bytes" or field.kind != "array":
        if not unit or grid is None:
            return Column(None, 1, Explicit(first), _constant(number))
        found = Column(grid, 1, Explicit(first), _constant(number))
        return _fitting(found, column.count, field)
    if not unit:
        if not field.ragged:
            return Column(None)
        return Column(None, 1, Explicit(first), _constant(number))
    bad = number % unit != 0 if field.ragged else number != unit
    if bool(bad.any()):
        i = int(bad.argmax())
        raise FormatError(
            f"the bytes do not fit {field}",
            where=f"{where}, sample {i}",
            expected=f"a multiple of {unit} bytes" if field.ragged else f"{unit} bytes",
            found=f"{int(number[i])} bytes",
        )
    if not field.ragged:
        if grid is None:
            return Column(None)
        if not np.array_equal(first, np.arange(len(first), dtype=np.int64) * unit):
            raise _Unlocated("its bytes are no array of the type that it was given")
        return _fitting(Column(grid, unit), column.count, field)
    if grid is not None:
        cut = grid.chunk[0] % unit and grid.chunk != grid.shape
        if cut or grid.shape[0] % unit or bool((first % unit).any()):
            raise _Unlocated("its bytes are cut inside elements of the type that it was given")
        grid = _in_units(grid, unit)
    return Column(grid, 1, Explicit(first // unit), _constant(number // unit))


def _in_units(grid: Grid, unit: int) -> Grid:
    """Return an array of bytes as one of larger elements."""
    fill = None if grid.fill is None else grid.fill * unit
    shape, chunk = (grid.shape[0] // unit,), (grid.chunk[0] // unit,)
    return replace(grid, shape=shape, chunk=chunk, itemsize=unit, fill=fill)


def _constant(values: Ints) -> Affine | Explicit:
    if len(values) and bool((values == values[0]).all()):
        return Affine(len(values), int(values[0]))
    return Explicit(values)


# --- datasets --------------------------------------------------------------------------------


def _grid(dataset: Any, file: _File, steps: _Steps, where: str) -> Grid | None:
    """Return where the rows of an `h5py.Dataset` lie; None if it has no bytes."""
    from h5py import h5d, h5t

    element = dataset.id.get_type()
    if h5t.py_create(dataset.dtype, logical=True) != element:
        raise _Unlocated("the HDF5 library converts its type when it reads")
    shape = tuple(map(int, dataset.shape))
    if not math.prod(shape):
        return None
    plist = dataset.id.get_create_plist()
    found = plist.get_layout()
    if found == h5d.COMPACT:
        raise _Unlocated("it is compact: it lies inside the file's metadata")
    if found == h5d.VIRTUAL:
        raise _Unlocated("it is virtual: it is made of parts of other datasets")
    if plist.get_external_count():
        raise _Unlocated("it lies in external files")
    itemsize = int(element.get_size())
    if found == h5d.CONTIGUOUS:
        return _contiguous(dataset, shape, itemsize, file, where)
    if found == h5d.CHUNKED:
        return _chunked(dataset, shape, itemsize, file, steps, where)
    raise _Unlocated("its layout is unknown")


def _contiguous(
    dataset: Any, shape: tuple[int, ...], itemsize: int, file: _File, where: str
) -> Grid:
    nbytes = math.prod(shape) * itemsize
    # Before the first write there is no address, or, with a user block, a false one.
    if dataset.id.get_storage_size() != nbytes or (offset := dataset.id.get_offset()) is None:
        raise _Unlocated("nothing was ever written to it")
    if not 0 < offset <= file.nbytes - nbytes:
        raise FormatError(
            "the data lie outside the file",
            where=where,
            expected=f"{nbytes} bytes from {offset} on",
            found=f"a file of {file.nbytes} bytes",
        )
    if not shape:  # one element, perhaps of an array type
        shape = (dataset.dtype.subdtype or (None, (1,)))[1]
        itemsize = nbytes // math.prod(shape)
    return Grid(Blocks(Affine(1, int(offset)), Affine(1, nbytes)), shape, itemsize, shape)


def _chunked(
    dataset: Any, shape: tuple[int, ...], itemsize: int, file: _File, steps: _Steps, where: str
) -> Grid:
    plist = dataset.id.get_create_plist()
    filters = filters_of(plist)
    if isinstance(filters, str):
        raise _Unlocated(f"its chunks are encoded by {filters}, which only HDF5 libraries decode")
    chunk = tuple(map(int, dataset.chunks))
    nbytes = math.prod(chunk) * itemsize
    table = chunk_table(dataset, file.nbytes, steps)
    if table is None:
        raise _Unlocated("the HDF5 library cannot list its chunks")
    _check(table, nbytes if not filters else None, file, where)
    if filters and edges_unfiltered(dataset, table, nbytes):
        raise _Unlocated("chunks at its edges may be stored without its filters")
    stored = table["address"] >= 0
    if file.userblock and not _believed(dataset, table, file):
        raise _Unlocated("the HDF5 library tells wrong addresses behind a user block")
    blocks = Blocks(
        Explicit(np.ascontiguousarray(table["address"])),
        Explicit(table["nbytes"].astype(np.int64)),
    )
    mask = table["mask"] & np.uint32((1 << len(filters)) - 1)
    masks = Explicit(mask.astype(np.int64)) if bool(mask.any()) else None
    fill = None if bool(stored.all()) else _fill(dataset, int(stored.argmin()))
    return Grid(blocks, shape, itemsize, chunk, None, filters, masks, fill)


def _check(table: NDArray[Any], nbytes: int | None, file: _File, where: str) -> None:
    """Raise `FormatError` unless every stored chunk is in the file, of `nbytes` if given."""
    address, sizes = table["address"], table["nbytes"].astype(np.int64)
    wrong = (address == 0) | (address > file.nbytes - sizes)
    if nbytes is not None:
        wrong |= (address > 0) & (sizes != nbytes)
    if bool(wrong.any()):
        i = int(wrong.argmax())
        raise FormatError(
            "a chunk lies outside the file, or has a wrong size",
            where=f"{where}, offset {int(address[i])}",
            expected=None if nbytes is None else f"{nbytes} bytes",
            found=f"{int(sizes[i])} bytes in a file of {file.nbytes} bytes",
        )


def _believed(dataset: Any, table: NDArray[Any], file: _File) -> bool:
    """Whether a chunk lies where the library says: some releases forget the user block."""
    stored = np.flatnonzero(table["address"] >= 0)
    if not len(stored):
        return True
    number = int(stored[int(table["nbytes"][stored].argmin())])
    place = np.unravel_index(number, grid_of(dataset))
    corner = tuple(int(p) * int(c) for p, c in zip(place, dataset.chunks, strict=True))
    _, data = dataset.id.read_direct_chunk(corner)
    entry = table[number]
    return pread_most(file.fd, int(entry["nbytes"]), int(entry["address"])) == bytes(data)


def _fill(dataset: Any, missing: int) -> bytes:
    """Return the element that the library gives for a chunk that is not stored, asking for one.

    It leaves memory as it is where fill values are undefined or never written: then zeros.
    """
    from h5py import h5s, h5t

    place = np.unravel_index(missing, grid_of(dataset))
    corner = tuple(int(p) * int(c) for p, c in zip(place, dataset.chunks, strict=True))
    one = tuple(1 for _ in corner)
    space = dataset.id.get_space()
    space.select_hyperslab(corner, one)
    value = np.zeros(one, dataset.dtype)
    element = h5t.py_create(dataset.dtype, logical=True)
    dataset.id.read(h5s.create_simple(one), space, value, element)
    return value.tobytes()
