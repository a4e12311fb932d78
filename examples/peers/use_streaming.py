"""MosaicML streaming: MDS shards of 64 MiB, uncompressed, read by the workers of a DataLoader.

    dsprep bench read DATA --warm -s dsprep -s examples/peers/use_streaming.py:make

It takes ranks from torch.distributed alone, so one process is measured
(pip install mosaicml-streaming torch).
"""

from common import FILE, alone, columns_of, samples, stored


def write(source, path):
    """Write the directory of shards."""
    from streaming import MDSWriter

    columns = {
        name: f"ndarray:{dtype.name}:{','.join(map(str, shape))}"
        for name, dtype, shape in columns_of(source.schema)
    }
    with MDSWriter(columns=columns, out=str(path), size_limit=FILE) as writer:
        for sample in samples(source):
            writer.write(sample)


def make(data, batch_size, world_size, seed, threads):
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    alone("streaming", world_size)
    path, *_ = stored(data, "streaming", write)
    clean_stale_shared_memory()
    dataset = StreamingDataset(
        local=str(path),
        shuffle=True,
        shuffle_seed=seed,
        batch_size=batch_size,
        num_canonical_nodes=1,
    )
    return DataLoader(dataset, batch_size, num_workers=threads, persistent_workers=True)
