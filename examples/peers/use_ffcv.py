"""FFCV: one ``.beton`` file, mapped, random order, samples copied out by compiled threads.

    dsprep bench read DATA --warm -s dsprep -s examples/peers/use_ffcv.py:make

``os_cache=True`` is what its guide advises where the dataset fits into memory. Its code is compiled
in the epoch that warms up (pip install ffcv, which takes OpenCV and a compiler).
"""

import numpy as np
from common import columns_of, samples, stored


class Rows:
    def __init__(self, source):
        self.samples, self.count = samples(source), len(source)

    def __len__(self):
        return self.count

    def __getitem__(self, i):  # one worker asks in order
        return tuple(next(self.samples).values())


def write(source, path):
    """Write the ``.beton`` file."""
    from ffcv.fields import NDArrayField
    from ffcv.writer import DatasetWriter

    fields = {name: NDArrayField(*rest) for name, *rest in columns_of(source.schema)}
    writer = DatasetWriter(str(path), fields, num_workers=1)
    writer.from_indexed_dataset(Rows(source))


def make(data, batch_size, rank, world_size, seed, threads):
    from ffcv.fields.decoders import NDArrayDecoder
    from ffcv.loader import Loader, OrderOption

    path, schema, count = stored(data, "ffcv", write)
    return Loader(
        str(path),
        batch_size=batch_size,
        num_workers=threads,
        os_cache=True,
        order=OrderOption.RANDOM,
        seed=seed,
        indices=np.arange(rank, count, world_size, dtype=np.uint64),
        pipelines={name: [NDArrayDecoder()] for name, *_ in columns_of(schema)},
        drop_last=False,
    )
