"""h5py, sample by sample: ``dataset[i]``, copied into the batch; nothing overlaps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dsprep.bench.strategies.base import Strategy
from dsprep.bench.strategies.stored import Stored, stack
from dsprep.schema import Array

DIRECT_NBYTES = 512 << 10
"""Samples from this size on are read by ``read_direct`` right into the batch. It saves a copy and
fresh memory, and costs some 30 us a call more than indexing, for which h5py has a short cut."""


class Dataset(Stored):
    """A field of an HDF5 file, by the faster of h5py's two ways."""

    def put(self, room: Any, place: int, index: int) -> None:
        """Read a sample into its place of a batch."""
        if self.field.ragged or self.field.row_nbytes < DIRECT_NBYTES:
            super().put(room, place, index)
        else:
            into: Array = room[place : place + 1]
            self.values.read_direct(into, slice(index, index + 1))


class H5pySamples(Strategy):
    """As in a training script without a loader: the file and its datasets stay open."""

    _file: Any = None
    _fields: tuple[Stored, ...] = ()

    def open(self) -> None:
        """Open the file and its datasets."""
        import h5py

        self._file = h5py.File(self.task.path, "r")
        self._fields = tuple(Dataset(self._file, f, self.task) for f in self.task.schema)

    def epoch(self, number: int) -> Iterator[Any]:
        """Yield each step's samples, shuffled."""
        for indices in self.task.batches(number):
            yield stack(self._fields, indices)

    def size(self, item: Any) -> int:
        """Return the samples of a step."""
        return len(next(iter(item.values())))

    def close(self) -> None:
        """Close the file."""
        self._fields = ()
        if self._file is not None:
            self._file.close()
        self._file = None
