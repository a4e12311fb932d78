"""TensorStore over Zarr: no cache of chunks, metadata read once (pip install tensorstore).

    dsprep bench read DATA --warm -s dsprep -s examples/peers/use_tensorstore.py:make

The options are those of https://google.github.io/tensorstore/context.html.
"""

from common import Ranges, columns_of, stored
from use_zarrs import write


def make(data, batch_size, rank, world_size, seed, threads):
    import tensorstore

    path, schema, count = stored(data, "zarr", write)
    limit = {"limit": threads}
    context = tensorstore.Context(
        {
            "cache_pool": {"total_bytes_limit": 0},
            "data_copy_concurrency": limit,
            "file_io_concurrency": limit,
        }
    )
    spec = {"driver": "zarr3", "recheck_cached_metadata": "open", "recheck_cached_data": "open"}
    opening = [
        tensorstore.open(
            {**spec, "kvstore": {"driver": "file", "path": f"{path / name}/"}},
            context=context,
            read=True,
        )
        for name, *_ in columns_of(schema)
    ]
    arrays = [one.result() for one in opening]

    def read(start, stop):
        reading = [array[start:stop].read(order="C") for array in arrays]
        return [one.result() for one in reading]

    return Ranges(read, count, batch_size, rank, world_size, seed, threads)
