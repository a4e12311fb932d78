"""zarr-python, sample by sample: ``array[i]``, copied into the batch; nothing overlaps."""

from __future__ import annotations

from dsprep.bench.strategies.stored import SampleBySample, Stored


class ZarrSamples(SampleBySample):
    """The arrays are opened once."""

    def open(self) -> None:
        """Open the store, a directory or a ZIP file, and its arrays."""
        import zarr

        path = self.task.path
        kind = zarr.storage.ZipStore if path.is_file() else zarr.storage.LocalStore
        self.holder = kind(path, read_only=True)
        root = zarr.open_group(self.holder, mode="r")
        self.stored = tuple(Stored(root, f, self.task) for f in self.task.schema)
