"""TensorStore over Zarr, as zarr-python wrote it: an array per field, chunks of 1 MiB or less.

Uncompressed, no cache of chunks, the metadata are read once, ``threads`` threads that read and
copy: the resources of https://google.github.io/tensorstore/context.html and "recheck_cached_data"
of https://google.github.io/tensorstore/driver/zarr3/. A step reads a range, all fields at once
(``read`` returns a future).
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

from dsprep.bench.strategies.peers import Ranges, names
from dsprep.bench.strategies.peers.zarrs import Zarrs
from dsprep.core.schema import Array
from dsprep.formats.base import Source


class Tensorstore(Ranges):
    """Ranges of TensorStores."""

    project: ClassVar[str] = "TensorStore"

    @classmethod
    def save(cls, source: Source, target: Path) -> None:
        """Write a store with an array for each field."""
        Zarrs.save(source, target)

    def made(self, resources: ExitStack) -> Any:
        """Open the arrays."""
        import tensorstore

        threads = {"limit": max(1, self.task.threads)}
        context = tensorstore.Context(
            {
                "cache_pool": {"total_bytes_limit": 0},
                "data_copy_concurrency": threads,
                "file_io_concurrency": threads,
            }
        )
        spec = {"driver": "zarr3", "recheck_cached_metadata": "open", "recheck_cached_data": "open"}
        opened = [
            tensorstore.open(
                {**spec, "kvstore": {"driver": "file", "path": f"{self.task.path / name}/"}},
                context=context,
                read=True,
            )
            for name in names(self.task.schema)
        ]
        return [store.result() for store in opened]

    def rows(self, start: int, stop: int) -> list[Array]:
        """Return a range of each array."""
        reading = [store[start:stop].read(order="C") for store in self.loader]
        return [future.result() for future in reading]
