"""zarr-python, sample by sample: ``array[i]``, copied into the batch; nothing overlaps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dsprep.bench.strategies.base import Strategy
from dsprep.bench.strategies.stored import Stored, stack


class ZarrSamples(Strategy):
    """As in a training script without a loader: the arrays are opened once."""

    _store: Any = None
    _fields: tuple[Stored, ...] = ()

    def open(self) -> None:
        """Open the store, a directory or a ZIP file, and its arrays."""
        import zarr

        path = self.task.path
        kind = zarr.storage.ZipStore if path.is_file() else zarr.storage.LocalStore
        self._store = kind(path, read_only=True)
        root = zarr.open_group(self._store, mode="r")
        self._fields = tuple(Stored(root, f, self.task) for f in self.task.schema)

    def epoch(self, number: int) -> Iterator[Any]:
        """Yield each step's samples, shuffled."""
        for indices in self.task.batches(number):
            yield stack(self._fields, indices)

    def size(self, item: Any) -> int:
        """Return the samples of a step."""
        return len(next(iter(item.values())))

    def close(self) -> None:
        """Close the store."""
        self._fields = ()
        if self._store is not None:
            self._store.close()
        self._store = None
