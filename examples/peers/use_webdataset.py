"""webdataset: tar shards read from end to end by worker processes, shuffled in a buffer of 1,000.

    dsprep bench read DATA --warm -s dsprep -s examples/peers/use_webdataset.py:make

Each field of a sample is a ``.npy`` member. Workers make the batches, as its documentation advises.
Ranks get whole shards, so one process is measured (pip install webdataset torch).
"""

from common import FILE, alone, columns_of, samples, stored


def write(source, path):
    """Write the directory of tar files: about 16 at least, so that every worker gets some."""
    from webdataset import ShardWriter

    path.mkdir()
    limits = {"maxcount": max(1, len(source) // 16), "maxsize": FILE}
    with ShardWriter(str(path / "%06d.tar"), verbose=0, **limits) as writer:
        for i, sample in enumerate(samples(source)):
            files = {f"{name}.npy": array for name, array in sample.items()}
            writer.write({"__key__": f"{i:012d}", **files})


def make(data, batch_size, world_size, threads):
    from torch.utils.data import default_collate
    from webdataset import WebDataset, WebLoader

    alone("webdataset", world_size)
    path, schema, _ = stored(data, "webdataset", write)
    shards = sorted(map(str, path.glob("*.tar")))
    dataset = (
        WebDataset(shards, shardshuffle=len(shards), detshuffle=True, empty_check=False)
        .shuffle(1000)
        .decode()
        .to_tuple(*(f"{name}.npy" for name, *_ in columns_of(schema)))
        .batched(batch_size, collation_fn=default_collate)
    )
    return WebLoader(dataset, batch_size=None, num_workers=threads, persistent_workers=True)
