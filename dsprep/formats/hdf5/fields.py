"""The fields of an HDF5 file, each with the datasets that hold it.

`DatasetField`
    One dataset; its first axis counts samples, or it is the only sample.
`SequenceField`
    One dataset of HDF5's own variable-length types. It holds one descriptor per element: the number
    of items as a little-endian 32-bit integer, the address of a heap, and the number of an object
    in it (the global heap ID of the HDF5 File Format Specification, after the length). The
    descriptors are read like the rows of any dataset, and the values from the heaps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from typing_extensions import override

from dsprep.core.schema import Array, Field, Ints, Ragged
from dsprep.core.schema import Column as Values
from dsprep.errors import FormatError
from dsprep.formats.hdf5.datasets import Contents, check_sources, sources
from dsprep.formats.hdf5.guard import hdf5_errors, need_filters
from dsprep.formats.hdf5.locate import check_chunks, chunking, locate_grid
from dsprep.formats.index_tables import LocatedRows
from dsprep.formats.located import RowsField, Unlocated
from dsprep.layout.describe import FieldStorage, of_array
from dsprep.layout.model import Column


class DatasetField(RowsField):
    """A dataset whose rows are samples, or that is the only sample if it is the `whole_file`.

    Attributes
    ----------
    field
        What the samples are.
    count
        The number of samples.
    where
        The file and the field, for messages.
    """

    def __init__(
        self, contents: Contents, path: str, field: Field | None = None, whole_file: bool = False
    ) -> None:
        shape = contents.datasets[path].shape
        self.contents, self._path, self._whole_file = contents, path, whole_file or not shape
        self.where = f"{contents.where}, field {path}"
        self.count = 1 if self._whole_file else shape[0]
        inner = shape if self._whole_file else shape[1:]
        self.field = field or Field(path, contents.datasets[path].dtype, inner)
        self._kept: Any = None

    @property
    def dtype(self) -> Any:
        """The dtype of the elements."""
        return self.field.dtype

    def dataset(self) -> Any:
        """Return the `h5py.Dataset`; it stays open unless there may be millions.

        Raises `MissingExtra` or `FormatError` if a filter or a file of its values is not there.
        """
        if self._kept is not None:
            return self._kept
        dataset = self.contents.open(self._path)
        with hdf5_errors(self.where, "the dataset cannot be read"):
            need_filters(dataset, self.where)
            self._sources = sources(dataset, self.where)
        check_sources(self._sources, self.where)
        self._kept = None if self._whole_file else dataset
        return dataset

    @override
    def locate(self) -> Column:
        with hdf5_errors(self.where, "the dataset cannot be located"):
            grid = locate_grid(self.dataset(), self.contents.disk, self.where)
        if grid is None or not self.field.row_nbytes:
            return Column(None)
        return Column(grid, grid.shape[0] if self._whole_file else 1)

    @override
    def rows(self, ranges: Iterable[tuple[int, int]]) -> Array:
        ranges = [*ranges]
        count, at = sum(high - low for low, high in ranges), 0
        # The library writes neither padding nor chunks that are not there and have no fill value.
        out = np.zeros((count, *self.field.inner), self.dtype)
        for low, high in ranges if out.nbytes else ():
            if low < high:
                self._read_into(out[at : at + high - low], low, high)
            at += high - low
        self.contents.disk.check_same()
        return out

    def _read_into(self, out: Array, start: int, stop: int) -> None:
        from h5py import h5s, h5t

        with hdf5_errors(f"{self.where}, samples {start} to {stop - 1}", "the data cannot be read"):
            dataset = self.dataset()
            shape = dataset.shape
            file_space, memory = dataset.id.get_space(), h5s.create(h5s.SCALAR)
            if shape:
                start, stop = (0, shape[0]) if self._whole_file else (start, stop)
                check_chunks(dataset, start, stop, self.where)
                shape = (stop - start, *shape[1:])
                file_space.select_hyperslab((start, *(0 for _ in shape[1:])), shape)
                memory = h5s.create_simple(shape)
            element = h5t.py_create(dataset.dtype, logical=True)
            dataset.id.read(memory, file_space, out, element)
        check_sources(self._sources, self.where)

    @override
    def resident_nbytes(self) -> int:
        dataset = self.dataset()
        return 2 * math.prod(map(int, dataset.chunks or (0,))) * int(dataset.dtype.itemsize)

    @override
    def storage_of(self, count: int, nbytes: float, tables: Sequence[str] = ()) -> FieldStorage:
        with hdf5_errors(self.where, "the layout cannot be read"):
            dataset = self.dataset()
            form = chunking(dataset)
            rows = nbytes / form.row_nbytes if form.row_nbytes else 1
            size = int(dataset.id.get_storage_size())
        return of_array(form, rows, count, ragged=bool(tables), stored_nbytes=size, tables=tables)


class SequenceField(DatasetField):
    """A ragged field of one of HDF5's variable-length types: along one axis, or one value."""

    @override
    def locate(self) -> Column:
        raise Unlocated(
            "its values are in the global heap, each found through a descriptor; dsprep convert "
            "makes it addressable"
        )

    @cached_property
    def _descriptors(self) -> LocatedRows:
        """Reads descriptors as they are stored: bytes."""
        disk, width = self.contents.disk, self.contents.heaps.width
        try:
            with hdf5_errors(self.where, "the dataset cannot be located"):
                grid = locate_grid(self.dataset(), disk, self.where, raw=width)
        except Unlocated as reason:
            raise FormatError(
                f"values of variable length cannot be found without the HDF5 library, which "
                f"follows damaged ones without end: {reason}",
                where=self.where,
                expected="plain or chunked storage without a fill value of its own",
                fix="write the dataset again: h5repack -f GZIP=1 IN OUT",
            ) from reason
        field = Field(self.field.name, np.dtype(np.uint8), (width,))
        return LocatedRows(field, self.count, Column(grid), disk.opened, self.where)

    def _rows(self, start: int, stop: int) -> Array:
        width = self.contents.heaps.width
        return self._descriptors.read(start, stop).reshape(-1, width)

    @override
    def read(self, start: int, stop: int) -> Values:
        from h5py import h5t

        dtype, kind = self.field.dtype, self.field.kind
        with hdf5_errors(f"{self.where}, samples {start} to {stop - 1}", "it cannot be read"):
            element = self.dataset().id.get_type()
            size = element.get_super().get_size() if isinstance(element, h5t.TypeVlenID) else 1
            rows = self._rows(start, stop)
            values, nbytes = self.contents.heaps.read(rows, size, self.where)
        if kind == "str":
            values, nbytes = _to_zeros(values, nbytes)
        self.contents.disk.check_same()
        return Ragged.from_lengths(values.view(dtype), nbytes // dtype.itemsize, kind)

    @override
    def sizes(self, start: int, stop: int) -> Ints | None:
        if self._whole_file:
            return None
        rows = self._rows(start, stop)
        items = np.ascontiguousarray(rows[:, :4]).view("<u4")[:, 0].astype(np.int64)
        # Where nothing was written, the address of the heap is 0, whatever the length says.
        items[~rows[:, 4:-4].any(axis=1)] = 0
        return items * self.field.row_nbytes

    @override
    def resident_nbytes(self) -> int:
        return self._descriptors.resident_nbytes()

    @override
    def storage(self) -> FieldStorage:
        with hdf5_errors(self.where, "the layout cannot be read"):
            form = chunking(self.dataset())
        access = "each sample is in a heap, found through a descriptor of its own: slow at random"
        return FieldStorage(storage=form.words("rows"), codecs=form.codecs, access=access)


def _to_zeros(values: Array, nbytes: Ints) -> tuple[Array, Ints]:
    """Return texts up to their first zero byte, as the library gives them, and their bytes."""
    zeros = np.flatnonzero(values == 0)
    if not len(zeros):
        return values, nbytes
    ends = np.cumsum(nbytes)
    begins = ends - nbytes
    first = np.append(zeros, len(values))[np.searchsorted(zeros, begins)]
    kept = np.minimum(first, ends) - begins
    inside = np.arange(len(values)) < np.repeat(begins + kept, nbytes)
    return values[inside], kept
