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
        if (rows, nbytes) != (task.samples, field.row_nbytes):
            raise FormatError(
                f"the array does not hold {field}",
                where=where,
                expected=f"{task.samples} samples, {field.row_nbytes} bytes a row",
                found=f"{rows} samples, {nbytes} bytes a row",
            )

    def sample(self, index: int) -> Array:
        """Return a sample's value, as the schema says; 1-D uint8 for `bytes` and `str`."""
        selection: int | slice = index
        shape: tuple[int, ...] = self.field.inner
        if self.field.ragged:
            first, count = int(self._first[index]), int(self._count[index])
            selection, shape = slice(first, first + count), (count, *shape)
        rows = np.asarray(self.values[selection], self.values.dtype)  # a lone string loses its NULs
        self._delay(rows.nbytes, 1)
        return as_field(rows, self.field, shape)

    def column(self, indices: Ints) -> Column:
        """Return several samples, read one by one."""
        samples = [self.sample(i) for i in indices.tolist()]
        if not self.field.ragged:
            return np.stack(samples, dtype=self.field.dtype)
        none = np.empty((0, *self.field.inner), self.field.dtype)
        rows = np.concatenate([none, *samples], dtype=self.field.dtype)
        return Ragged.from_lengths(rows, self._count[indices], self.field.kind)


def _sample_by_sample(task: Task, fields: Sequence[Stored]) -> Way:
    """Return the way of a training script without a loader, with all fields of each sample."""

    def epoch(number: int) -> Iterator[Any]:
        for indices in task.batches(number):
            yield {stored.field.name: stored.column(indices) for stored in fields}

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
