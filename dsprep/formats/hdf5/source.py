"""HDF5 files as samples.

Fields that can be located are read at their offsets, as a sidecar's readers read them; everything
else goes through the library, whose lock then serialises the threads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from dsprep.core.schema import Arena, Batch, Ints, Schema
from dsprep.formats.base import OpenOptions, Source, retype
from dsprep.formats.hdf5 import describe
from dsprep.formats.hdf5.fields import Fields
from dsprep.formats.hdf5.grids import Unlocated
from dsprep.formats.hdf5.guard import library, open_file
from dsprep.layout.describe import FieldStorage
from dsprep.layout.model import Column, FileLayout
from dsprep.reading.columns import fetch
from dsprep.reading.files import File


class Hdf5Source(Source):
    """One HDF5 file opened for reading."""

    def __init__(self, path: Path, options: OpenOptions) -> None:
        self.path = path
        self._disk = File(path)
        self._file: Any = None
        try:
            with library(path, "the HDF5 file cannot be opened"):
                self._file = open_file(path)
                superblock = self._file.id.get_create_plist().get_version()[0]
            self.version = f"HDF5, superblock {superblock}"
            found = Fields(self._file, self._disk, options)
        except BaseException:
            self.close()
            raise
        self._columns, self._count, self.notes = found.columns, found.count, tuple(found.notes)
        self.schema = Schema(tuple(field for _, field in found.columns.values()), found.attrs)

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int, arena: Arena | None = None) -> Batch:
        """Return samples ``start <= i < stop``; see `Source.read`."""
        columns = {
            name: column.begin(start, stop, arena, f"read.{name}")
            for name, (column, _) in self._columns.items()
        }
        # Without an arena each field has memory of its own, which lives as long as that field.
        alone = ({name: wanted} for name, wanted in columns.items())
        parts = alone if arena is None else [columns]
        found = {name: c for part in parts for name, c in fetch(part, arena).items()}
        return {
            name: retype(found[name], field, self.path, start)
            for name, (_, field) in self._columns.items()
        }

    def sizes(self, start: int, stop: int) -> Ints | None:
        """Return the payload bytes of each sample; None where that takes reading them."""
        total = np.zeros(stop - start, np.int64)
        for column, _ in self._columns.values():
            sizes = column.sizes(start, stop)
            if sizes is None:
                return None
            total += sizes
        return total

    def resident_nbytes(self) -> int:
        """Return the bytes that reading holds besides the samples asked for: decoded chunks."""
        used = {dataset for column, _ in self._columns.values() for dataset in column.datasets()}
        return sum(dataset.resident for dataset in used)

    def storage(self) -> dict[str, FieldStorage]:
        """Return how each field is stored."""
        with library(self.path, "the layout cannot be read"):
            return {
                name: describe.storage(column, self._count)
                for name, (column, _) in self._columns.items()
            }

    def extents(self, progress: Callable[[int, int], None] | None = None) -> FileLayout:
        """Return where every sample is; see `Source.extents`."""
        total, done = sum(column.steps for column, _ in self._columns.values()), 0

        def step(steps: int) -> None:
            nonlocal done
            if progress is not None and steps:
                done = min(total, done + steps)
                progress(done, total)

        found: dict[str, Column] = {}
        unlocated: dict[str, str] = {}
        for name, (column, field) in self._columns.items():
            where = f"{self.path}, field {name}"
            try:
                with library(where, "the field cannot be located"):
                    found[name] = column.locate(field, where, step)
            except Unlocated as reason:
                unlocated[name] = str(reason)
        step(total - done)  # chunks that are not stored, or known already, were not stepped over
        return FileLayout(self._count, columns=found, unlocated=unlocated)

    def loading_code(self) -> str:
        """Return a program that loads sample 0 with h5py."""
        with library(self.path, "the layout cannot be read"):
            return describe.program(self.path, self._columns)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with suppress(OSError, RuntimeError):  # as `let_go`
                self._file.close()
            self._file = None
        self._disk.close()
