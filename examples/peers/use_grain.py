"""Grain over ArrayRecord: a record per sample, shuffled, batched before they are read.

    dsprep bench read DATA --warm -s dsprep -s examples/peers/use_grain.py:make

Uncompressed and ``group_size:1``, as https://github.com/google/array_record advises for random
access; threads by ``ReadOptions`` (pip install grain array-record).
"""

import numpy as np
from common import columns_of, samples, stored


def write(source, path):
    """Write the ArrayRecord file."""
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    for sample in samples(source):
        writer.write(b"".join(array.tobytes() for array in sample.values()))
    writer.close()


class Loader:
    def __init__(self, path, schema, batch_size, rank, world_size, seed, threads):
        from grain.sources import ArrayRecordDataSource

        self.source, self.columns = ArrayRecordDataSource([str(path)]), columns_of(schema)
        self.batch_size, self.seed, self.threads = batch_size, seed, threads
        self.ranks, self.epoch = slice(rank, None, world_size), 0

    def set_epoch(self, number):
        self.epoch = number

    def __iter__(self):
        import grain

        shuffled = grain.MapDataset.source(self.source).shuffle(seed=self.seed + self.epoch)
        batches = shuffled[self.ranks].batch(self.batch_size, batch_fn=self._decoded)
        options = grain.ReadOptions(num_threads=self.threads, prefetch_buffer_size=2 * self.threads)
        return iter(batches.to_iter_dataset(options))

    def _decoded(self, records):
        rows, at, values = np.frombuffer(b"".join(records), "u1"), 0, {}
        rows = rows.reshape(len(records), -1)
        for name, dtype, shape in self.columns:
            stop = at + dtype.itemsize * int(np.prod(shape))
            values[name] = np.ascontiguousarray(rows[:, at:stop]).view(dtype)
            values[name] = values[name].reshape(len(records), *shape)
            at = stop
        return values

    def close(self):
        self.source.__exit__(None, None, None)


def make(data, batch_size, rank, world_size, seed, threads):
    path, schema, _ = stored(data, "grain", write)
    return Loader(path, schema, batch_size, rank, world_size, seed, threads)
