"""Lance: its own torch dataset, whose sampler shuffles the order of the batches.

A batch has consecutive samples, in their order: ``ShardedBatchSampler`` with ``randomize=True``
(https://lancedb.github.io/lance/integrations/pytorch), several times faster here than to take
random samples. ``threads`` threads read and as many decode (``LANCE_IO_THREADS`` and
``LANCE_CPU_THREADS``: https://lancedb.github.io/lance/performance.html). Storage version 2.2.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from dsprep.bench.strategies.peers import Peer
from dsprep.bench.strategies.peers.arrow import batches
from dsprep.formats.base import Source


class Lance(Peer):
    """Lance's LanceDataset."""

    project: ClassVar[str] = "Lance"

    @classmethod
    def save(cls, source: Source, target: Path) -> None:
        """Write the directory."""
        import lance
        from pyarrow import RecordBatchReader

        data = batches(source)
        first = next(data)

        def every() -> Iterator[Any]:
            yield first
            yield from data

        reader = RecordBatchReader.from_batches(first.schema, every())
        lance.write_dataset(reader, str(target), data_storage_version="2.2")

    def made(self, resources: ExitStack) -> Any:
        """Open the dataset."""
        task = self.task
        for name in ("LANCE_IO_THREADS", "LANCE_CPU_THREADS"):
            os.environ.setdefault(name, str(max(1, task.threads)))
        from lance.sampler import ShardedBatchSampler
        from lance.torch.data import LanceDataset

        self._sampler = partial(ShardedBatchSampler, task.rank, task.world_size, randomize=True)
        return LanceDataset(
            str(task.path), task.batch_size, sampler=self._sampler(), auto_detect_rank=False
        )

    def epoch(self, number: int) -> Iterator[Any]:
        """Yield the dataset's own batches in this epoch's order; of one field it is a tensor."""
        seed = int(np.random.default_rng([self.task.seed, number]).integers(1 << 31))
        self.loader.sampler = self._sampler(seed=seed)
        for item in super().epoch(number):
            yield item if isinstance(item, dict) else {"f0": item}
