"""Lance: its own torch dataset, whose sampler shuffles the order of batches of consecutive samples.

    dsprep bench read DATA --warm -s dsprep -s examples/peers/use_lance.py:make

``ShardedBatchSampler(randomize=True)`` and the threads are those of
https://lancedb.github.io/lance/performance.html (pip install pylance torch).
"""

import itertools
import os

from common import stored
from use_datasets import record_batches


def write(source, path):
    """Write the directory."""
    import lance
    from pyarrow import RecordBatchReader

    batches = record_batches(source)
    first = next(batches)
    reader = RecordBatchReader.from_batches(first.schema, itertools.chain([first], batches))
    lance.write_dataset(reader, str(path), data_storage_version="2.2")


class Loader:
    def __init__(self, path, batch_size, rank, world_size, seed):
        from lance.sampler import ShardedBatchSampler
        from lance.torch.data import LanceDataset

        self.sampler, self.at, self.seed = ShardedBatchSampler, (rank, world_size), seed
        self.dataset = LanceDataset(
            str(path), batch_size, sampler=self._sampler(0), auto_detect_rank=False
        )

    def _sampler(self, epoch):
        return self.sampler(*self.at, randomize=True, seed=self.seed + epoch)

    def set_epoch(self, number):
        self.dataset.sampler = self._sampler(number)

    def __iter__(self):
        return iter(self.dataset)


def make(data, batch_size, rank, world_size, seed, threads):
    for name in ("LANCE_IO_THREADS", "LANCE_CPU_THREADS"):
        os.environ.setdefault(name, str(threads))
    return Loader(stored(data, "lance", write)[0], batch_size, rank, world_size, seed)
