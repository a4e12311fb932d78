"""Files being written: opened when needed, and remembered until they are durable."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from dsprep.core.schema import Arena, Array
from dsprep.core.storage import Buffer, close, pwrite_all, sync, sync_directory
from dsprep.formats.zarr.carriers import without_padding
from dsprep.formats.zarr.grid import ArrayPlan


class Files:
    """The files of an output; safe to use from several threads."""

    def __init__(self) -> None:
        self._dirty: set[Path] = set()
        self._lock = threading.Lock()

    @contextmanager
    def opened(self, path: Path) -> Iterator[int]:
        """Open a file for writing, to be made durable by the next `sync`."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            yield fd
        finally:
            close(fd)
            with self._lock:
                self._dirty.add(path)

    def replace(self, path: Path, parts: Sequence[Buffer]) -> None:
        """Write a whole file."""
        with self.opened(path) as fd:
            nbytes = pwrite_all(fd, parts, 0)
            if os.fstat(fd).st_size > nbytes:
                os.ftruncate(fd, nbytes)

    def sync(self) -> None:
        """Make all that has been written durable."""
        with self._lock:
            dirty, self._dirty = self._dirty, set()
        for path in sorted(dirty):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                sync(fd, data=True)
            finally:
                os.close(fd)
        for folder in sorted({p.parent for p in dirty}):
            sync_directory(folder)


def stored_rows(values: Array, plan: ArrayPlan, arena: Arena) -> Array:
    """Return the rows of `values` as uint8, shape ``(n, row_nbytes)``, C-contiguous."""
    if not plan.row_nbytes:
        return np.empty((len(values), 0), np.uint8)
    values = without_padding(values)
    if not values.flags.c_contiguous:
        held = arena.empty(f"write.{plan.path}", values.shape, values.dtype)
        held[...] = values
        values = held
    return values.reshape(-1).view(np.uint8).reshape(len(values), plan.row_nbytes)
