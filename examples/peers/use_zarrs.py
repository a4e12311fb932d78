"""zarr-python with the codec pipeline of zarrs, in Rust: uncompressed, chunks of 1 MiB, slices.

    dsprep bench read DATA --warm -s dsprep -s examples/peers/use_zarrs.py:make

Its pipeline serves slices alone, so a step reads one (pip install zarrs).
"""

from common import Ranges, blocks, chunk, columns_of, stored


def write(source, path):
    """Write a store with an array for each field."""
    import zarr

    root, each = zarr.create_group(store=str(path)), chunk(source.schema)
    for name, dtype, shape in columns_of(source.schema):
        root.create_array(
            name,
            shape=(len(source), *shape),
            dtype=dtype,
            chunks=(each, *shape),
            compressors=None,
        )
    for start, columns in blocks(source):
        for name, column in columns.items():
            root[name][start : start + len(column)] = column


def make(data, batch_size, rank, world_size, seed, threads):
    import zarr
    import zarrs  # noqa: F401  # registers the pipeline

    path, schema, count = stored(data, "zarr", write)
    settings = {
        "threading.max_workers": threads,
        "codec_pipeline.path": "zarrs.ZarrsCodecPipeline",
        "codec_pipeline.validate_checksums": False,
        "codec_pipeline.strict": True,
    }
    with zarr.config.set(settings):
        root = zarr.open_group(str(path), mode="r")
        arrays = [root[name] for name, *_ in columns_of(schema)]

    def read(start, stop):
        return [array[start:stop] for array in arrays]

    return Ranges(read, count, batch_size, rank, world_size, seed, threads)
