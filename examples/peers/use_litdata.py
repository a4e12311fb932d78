"""litdata: chunks of 64 MB, shuffled, read in place by worker processes that stay.

    dsprep bench read DATA --warm -s dsprep -s examples/peers/use_litdata.py:make

It takes ranks from torch.distributed alone, so one process is measured (pip install litdata torch).
"""

import os

from common import alone, samples, stored

os.environ.setdefault("LITDATA_DISABLE_VERSION_CHECK", "1")


def write(source, path):
    """Write the directory of chunks."""
    from litdata.streaming.writer import BinaryWriter

    path.mkdir()
    writer = BinaryWriter(str(path), chunk_bytes="64MB")
    for i, sample in enumerate(samples(source)):
        writer.add_item(i, sample)
    writer.done()
    writer.merge(1)


def make(data, batch_size, world_size, seed, threads):
    from litdata import StreamingDataLoader, StreamingDataset

    alone("litdata", world_size)
    path, *_ = stored(data, "litdata", write)
    dataset = StreamingDataset(str(path), shuffle=True, drop_last=False, seed=seed)
    return StreamingDataLoader(
        dataset, batch_size=batch_size, num_workers=threads, persistent_workers=True
    )
