"""litdata: its own chunks, read in place by worker processes.

Chunks of 64 MB, ``shuffle=True`` (chunks, and samples within them), workers that stay from epoch
to epoch; the rest is as by default. On a local path litdata maps the chunks in place and
copies none to a cache. It can repeat no sample and drops none, since ``drop_last`` is False for
one process. It shares out samples only inside ``torch.distributed``: one process is measured.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

from dsprep.bench.strategies.peers import Peer, samples
from dsprep.formats.base import Source


class Litdata(Peer):
    """A StreamingDataLoader with ``threads`` workers over a StreamingDataset."""

    project: ClassVar[str] = "litdata"
    alone: ClassVar[str] = "it takes ranks from torch.distributed"

    @classmethod
    def save(cls, source: Source, target: Path) -> None:
        """Write the directory of chunks."""
        _quiet()
        from litdata.streaming.writer import BinaryWriter

        target.mkdir()
        writer = BinaryWriter(str(target), chunk_bytes="64MB")
        for i, sample in enumerate(samples(source)):
            writer.add_item(i, sample)
        writer.done()
        writer.merge(1)

    def made(self, resources: ExitStack) -> Any:
        """Read the index."""
        _quiet()
        from litdata import StreamingDataLoader, StreamingDataset

        task = self.task
        dataset = StreamingDataset(str(task.path), shuffle=True, drop_last=False, seed=task.seed)
        return StreamingDataLoader(dataset, batch_size=task.batch_size, **self.workers)

    def close(self) -> None:
        """End the workers.

        They have to be ended here: litdata's loader and its iterator refer to each other, and when
        both are collected the queues are closed before the iterator can end them; it waits in vain.
        """
        iterator = getattr(self.loader, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()
        super().close()


def _quiet() -> None:
    """Keep litdata from asking the network for a newer version of itself."""
    os.environ.setdefault("LITDATA_DISABLE_VERSION_CHECK", "1")
