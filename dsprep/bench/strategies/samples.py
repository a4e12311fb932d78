"""h5py and zarr-python, sample by sample: ``array[i]``, copied into the batch; nothing overlaps.

A fixed field is an array of that name, a row per sample; a ragged one a group with ``values``,
``first`` and ``count``. Where an array stands in for a dtype that its library lacks, the bits are
those of the field. The arrays are the library's own: each sample is read by indexing them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from dsprep.bench.delays import delay_of
from dsprep.bench.strategies.base import Way
from dsprep.bench.task import Task
from dsprep.core.schema import Array, Column, Field, Ints, Ragged
from dsprep.errors import FormatError

DIRECT_NBYTES = 512 << 10
"""Samples from this size on are read by h5py's ``read_direct`` right into the batch. It saves a
copy and fresh memory, and costs some 30 us a call more than indexing, for which h5py has a short
cut."""


class Stored:
    """A field in an open `h5py.File` or `zarr.Group`; `values` is the library's array of it."""

    def __init__(self, root: Any, field: Field, task: Task) -> None:
        self.field, self._delay = field, delay_of(task)
        where = f"{task.path}, {field.name}"
        try:
            node = root[field.name]
            if field.ragged:
                # The tables are small, and who reads often keeps them in memory.
                self._first, self._count = (node[name][...] for name in ("first", "count"))
                node = node["values"]
            self.values = node
            rows = len(self._count) if field.ragged else int(node.shape[0])
            nbytes = math.prod(node.shape[1:]) * node.dtype.itemsize
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise FormatError(
                f"there is no {'group' if field.ragged else 'array'} of {field}", where=where
            ) from error
        self._is_direct = nbytes >= DIRECT_NBYTES and hasattr(node, "read_direct")
        if (rows, nbytes) != (task.samples, field.row_nbytes):
            raise FormatError(
                f"the array does not hold {field}",
                where=where,
                expected=f"{task.samples} samples, {field.row_nbytes} bytes a row",
                found=f"{rows} samples, {nbytes} bytes a row",
            )

    def read(self, index: int) -> Array:
        """Return the stored rows of a sample, or its row of a fixed field."""
        place: int | slice = index
        if self.field.ragged:
            first = int(self._first[index])
            place = slice(first, first + int(self._count[index]))
        rows: Array = self.values[place]
        self._delay(rows.nbytes, 1)
        return rows

    def sample(self, index: int) -> Array:
        """Return a sample's value, as the schema says; 1-D uint8 for `bytes` and `str`."""
        rows = np.asarray(self.read(index), self.values.dtype)  # a lone string loses its NULs
        shape = (int(self._count[index]),) if self.field.ragged else ()
        return as_field(rows, self.field, (*shape, *self.field.inner))

    def room(self, count: int) -> Any:
        """Return where `put` leaves `count` samples."""
        if self.field.ragged:
            return []
        return np.empty((count, *self.values.shape[1:]), self.values.dtype)

    def put(self, room: Any, at: int, index: int) -> None:
        """Read a sample into row `at` of a batch, by the faster of h5py's two ways."""
        if self.field.ragged:
            room.append(self.read(index))
        elif self._is_direct:
            self.values.read_direct(room[at : at + 1], slice(index, index + 1))
            self._delay(room[at].nbytes, 1)
        else:
            room[at] = self.read(index)

    def column(self, room: Any, indices: Ints) -> Column:
        """Return the samples that `put` left."""
        if not self.field.ragged:
            return as_field(room, self.field, (len(indices), *self.field.inner))
        lengths = self._count[indices]
        dtype = self.values.dtype
        rows = np.concatenate([np.empty((0, *self.values.shape[1:]), dtype), *room], dtype=dtype)
        shape = (int(lengths.sum()), *self.field.inner)
        return Ragged.from_lengths(as_field(rows, self.field, shape), lengths, self.field.kind)


def _sample_by_sample(task: Task, fields: Sequence[Stored]) -> Way:
    """Return the way of a training script without a loader, with all fields of each sample."""

    def epoch(number: int) -> Iterator[Any]:
        for indices in task.batches(number):
            both = [(s, s.room(len(indices))) for s in fields]
            for at, index in enumerate(indices.tolist()):
                for stored, room in both:
                    stored.put(room, at, index)
            yield {s.field.name: s.column(room, indices) for s, room in both}

    return Way(epoch)


def open_h5py(task: Task, resources: ExitStack) -> Way:
    """Open an HDF5 file, whose datasets stay open."""
    import h5py

    file = resources.enter_context(h5py.File(task.path, "r"))
    return _sample_by_sample(task, [Stored(file, f, task) for f in task.schema])


def open_zarr(task: Task, resources: ExitStack) -> Way:
    """Open a Zarr store, a directory or a ZIP file, whose arrays are opened once."""
    import zarr

    kind = zarr.storage.ZipStore if task.path.is_file() else zarr.storage.LocalStore
    store = kind(task.path, read_only=True)
    resources.callback(store.close)
    root = zarr.open_group(store, mode="r")
    return _sample_by_sample(task, [Stored(root, f, task) for f in task.schema])


def as_field(array: Array, field: Field, shape: tuple[int, ...]) -> Array:
    """Return stored elements as those of the field that they stand for."""
    dtype = field.dtype
    if array.dtype == dtype:
        return array.reshape(shape)
    if not array.size:
        return np.empty(shape, dtype)
    if array.dtype.newbyteorder("=") == dtype.newbyteorder("="):
        return array.astype(dtype).reshape(shape)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).view(dtype).reshape(shape)
