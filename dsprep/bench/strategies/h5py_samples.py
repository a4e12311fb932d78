"""h5py, sample by sample: ``dataset[i]``, copied into the batch; nothing overlaps."""

from __future__ import annotations

from typing import Any

from dsprep.bench.strategies.stored import SampleBySample, Stored
from dsprep.core.schema import Array

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


class H5pySamples(SampleBySample):
    """The file and its datasets stay open."""

    def open(self) -> None:
        """Open the file and its datasets."""
        import h5py

        self.holder = h5py.File(self.task.path, "r")
        self.stored = tuple(Dataset(self.holder, f, self.task) for f in self.task.schema)
