"""zarr-python with the codec pipeline of zarrs, in Rust.

An uncompressed array per field, chunks of 1 MiB or less, and no shards. ``threads`` workers on the
Rust side, no checksums. Its pipeline serves slices; an array of indices makes zarr fall back to
its own pipeline (``strict`` makes that an error), so a step reads a slice:
https://pypi.org/project/zarrs/ ("Configuration", "Supported Indexing Methods").
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

from dsprep.bench.strategies.peers import Ranges, blocks, chunk, names, stored
from dsprep.core.schema import Array
from dsprep.formats.base import Source


class Zarrs(Ranges):
    """Slices of zarr arrays, whose chunks are read by ``threads`` threads in Rust."""

    project: ClassVar[str] = "zarrs"

    @classmethod
    def save(cls, source: Source, target: Path) -> None:
        """Write a store with an array for each field."""
        import zarr

        each, arrays = chunk(source.schema), {}
        root = zarr.create_group(store=str(target))
        for name, f in zip(names(source.schema), source.schema, strict=True):
            dtype, shape = stored(f)
            arrays[name] = root.create_array(
                name,
                shape=(len(source), *shape),
                dtype=dtype,
                chunks=(each, *shape),
                compressors=None,
            )
        for start, columns in blocks(source):
            for name, column in columns.items():
                arrays[name][start : start + len(column)] = column

    def made(self, resources: ExitStack) -> Any:
        """Open the arrays, which keep the pipeline with which they were opened."""
        import zarr
        import zarrs  # noqa: F401  # registers the pipeline

        settings = {
            "threading.max_workers": max(1, self.task.threads),
            "codec_pipeline.path": "zarrs.ZarrsCodecPipeline",
            "codec_pipeline.validate_checksums": False,
            "codec_pipeline.strict": True,
        }
        with zarr.config.set(settings):
            root = zarr.open_group(str(self.task.path), mode="r")
            return [root[name] for name in names(self.task.schema)]

    def rows(self, start: int, stop: int) -> list[Array]:
        """Return a slice of each array."""
        return [array[start:stop] for array in self.loader]
