"""Hugging Face datasets: slices of a mapped Arrow file, not decoded (pip install datasets).

    dsprep bench read DATA --warm -s dsprep -s examples/peers/use_datasets.py:make

Slices are the fast way: a shuffled dataset is an order of magnitude slower
(https://huggingface.co/docs/datasets/about_mapstyle_vs_iterable).
"""

import math
import os

from common import Ranges, blocks, columns_of, stored

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def record_batches(source):
    """Yield record batches of all samples, 8 MiB each."""
    import pyarrow

    for _, columns in blocks(source):
        lists = [
            pyarrow.FixedSizeListArray.from_arrays(column.reshape(-1), column[0].size)
            for column in columns.values()
        ]
        yield pyarrow.RecordBatch.from_arrays(lists, list(columns))


def write(source, path):
    """Write the Arrow file."""
    import datasets
    import pyarrow
    from datasets.arrow_writer import ArrowWriter

    features = datasets.Features(
        {
            name: datasets.List(datasets.Value(dtype.name), length=math.prod(shape))
            for name, dtype, shape in columns_of(source.schema)
        }
    )
    with ArrowWriter(path=str(path), features=features) as writer:
        for batch in record_batches(source):
            writer.write_table(pyarrow.Table.from_batches([batch]))
        writer.finalize()


def make(data, batch_size, rank, world_size, seed, threads):
    import datasets

    path, schema, count = stored(data, "arrow", write)
    names = [name for name, *_ in columns_of(schema)]
    dataset = datasets.Dataset.from_file(str(path)).with_format("arrow")

    def read(start, stop):
        table = dataset[start:stop]
        flat = (table[name].combine_chunks().flatten() for name in names)
        return [column.to_numpy().reshape(stop - start, -1) for column in flat]

    return Ranges(read, count, batch_size, rank, world_size, seed, threads)
