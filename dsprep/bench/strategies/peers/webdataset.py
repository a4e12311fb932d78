"""webdataset: tar shards, read from end to end by worker processes, shuffled in a buffer.

Each field of a sample is a ``.npy`` file in the tar, decoded by webdataset. Shards have 64 MiB or
less, and there are about 16 at least, so that every worker gets some. The order of the shards is
shuffled, then samples in a buffer of 1000 (fewer where these took more than 256 MiB). Batches are
made by the workers, as its documentation advises. Every worker ends with a batch of fewer samples:
these are joined, and cut again; to unbatch and batch all of them again, which is the advice for
better shuffling, would cost more. Without ``resampled``, which repeats and leaves out samples,
each comes exactly once. Ranks get whole shards, and so not the same number of samples: one process
is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

from dsprep.bench.strategies.peers import CHUNK, Peer, names, samples
from dsprep.formats.base import Source

SHARDS = 16
"""Shards that there are to be at least."""

BUFFER, ROOM = 1000, 256 << 20
"""Samples, and bytes, of the shuffle buffer at most."""


class Webdataset(Peer):
    """A WebLoader with ``threads`` workers."""

    project: ClassVar[str] = "webdataset"
    alone: ClassVar[str] = "its ranks get whole shards"

    @classmethod
    def save(cls, source: Source, target: Path) -> None:
        """Write the directory of tar files."""
        from webdataset import ShardWriter

        target.mkdir()
        limits = {"maxcount": max(1, len(source) // SHARDS), "maxsize": CHUNK}
        with ShardWriter(str(target / "%06d.tar"), verbose=0, **limits) as writer:
            for i, sample in enumerate(samples(source)):
                files = {f"{name}.npy": array for name, array in sample.items()}
                writer.write({"__key__": f"{i:012d}", **files})

    def made(self, resources: ExitStack) -> Any:
        """Find the shards."""
        from torch.utils.data import default_collate
        from webdataset import WebDataset, WebLoader

        task = self.task
        shards = sorted(map(str, task.path.glob("*.tar")))
        dataset = (
            WebDataset(shards, shardshuffle=len(shards), detshuffle=True, empty_check=False)
            .shuffle(max(1, min(BUFFER, ROOM // max(1, task.schema.fixed_nbytes))))
            .decode()
            .to_tuple(*(f"{name}.npy" for name in names(task.schema)))
            .batched(task.batch_size, collation_fn=default_collate)
        )
        return WebLoader(dataset, batch_size=None, **self.workers)

    def epoch(self, number: int) -> Iterator[Any]:
        """Yield the workers' batches; at last, what is left of them."""
        size, last = self.task.batch_size, []
        for item in super().epoch(number):
            if self.size(item) == size:
                yield item
            else:
                last.append(item)
        if last:
            import torch

            joined = [torch.cat(columns) for columns in zip(*last, strict=True)]
            for at in range(0, len(joined[0]), size):
                yield [column[at : at + size] for column in joined]
