"""What the loaders of other projects here share: the form in which a project stores the samples.

Only fields of a fixed shape are stored, called ``f0``, ``f1``, ...; elements of dtypes that torch
lacks are stored as their bytes, with one axis more: as many bytes to read. A form is written once,
into ``dsprep-peers`` in the folder for temporary files: remove it when you have measured.
"""

import hashlib
import shutil
import tempfile
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import dsprep

BLOCK, FILE = 8 << 20, 64 << 20
PLAIN = {np.dtype(c) for c in ("i1", "u1", "i2", "i4", "i8", "f2", "f4", "f8")}


def columns_of(schema):
    """Return name, dtype and shape of every field as it is stored."""
    columns = []
    for i, f in enumerate(schema):
        if f.ragged:
            raise SystemExit(f"field {f.name} is ragged: leave it out with --field")
        plain = f.dtype in PLAIN
        shape = f.inner or (1,) if plain else (*f.inner, f.dtype.itemsize)
        columns.append((f"f{i}", f.dtype if plain else np.dtype("u1"), shape))
    return columns


def chunk(schema):
    """Return the samples of a chunk of 1 MiB or less: a power of two."""
    return 1 << max(0, ((1 << 20) // max(1, schema.fixed_nbytes)).bit_length() - 1)


def blocks(source):
    """Yield whole chunks of samples as they are stored, with the number of the first."""
    each = chunk(source.schema)
    step = max(1, BLOCK // max(1, each * source.schema.fixed_nbytes)) * each
    for start in range(0, len(source), step):
        batch = source.read(start, min(len(source), start + step))
        yield (
            start,
            {
                name: np.ascontiguousarray(batch[f.name])
                .reshape(-1)
                .view(dtype)
                .reshape(-1, *shape)
                for f, (name, dtype, shape) in zip(
                    source.schema, columns_of(source.schema), strict=True
                )
            },
        )


def samples(source):
    """Yield each sample as it is stored."""
    for _, columns in blocks(source):
        for i in range(len(columns["f0"])):
            yield {name: column[i] for name, column in columns.items()}


def stored(data, project, write):
    """Return the path of a project's form of a dataset, its schema and number of samples.

    ``write(source, path)`` writes it, unless it is there.
    """
    with dsprep.open(data) as source:
        seen = [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in map(Path, data)]
        key = hashlib.sha256(repr((seen, str(source.schema))).encode()).hexdigest()[:16]
        path = Path(tempfile.gettempdir(), "dsprep-peers", f"{project}-{key}")
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            partial = Path(tempfile.mkdtemp(dir=path.parent), "form")
            write(source, partial)
            try:
                partial.rename(path)  # another rank may have been first
            except OSError:
                shutil.rmtree(partial)
            partial.parent.rmdir()
        return path, source.schema, len(source)


class Ranges:
    """A project that is fastest at ranges: a step's samples are consecutive, shuffled within.

    Threads read, as many steps ahead. ``read(start, stop)`` gives an array for each field.
    """

    def __init__(self, read, count, batch_size, rank, world_size, seed, threads):
        self.read, self.count, self.batch_size = read, count, batch_size
        self.rank, self.world_size, self.seed, self.threads = rank, world_size, seed, threads
        self.epoch, self.pool = 0, ThreadPoolExecutor(threads)

    def set_epoch(self, number):
        self.epoch = number

    def __iter__(self):
        waiting, rng = deque(), np.random.default_rng([self.seed, self.epoch])
        starts = rng.permutation(np.arange(0, self.count, self.batch_size))
        for start in starts[self.rank :: self.world_size].tolist():
            order = rng.permutation(min(self.count, start + self.batch_size) - start)
            waiting.append(self.pool.submit(self._step, start, order))
            if len(waiting) > self.threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _step(self, start, order):
        return [np.take(column, order, axis=0) for column in self.read(start, start + len(order))]

    def close(self):
        self.pool.shutdown(cancel_futures=True)


def alone(project, world_size):
    """Stop where a project cannot share samples between ranks without torch.distributed."""
    if world_size > 1:
        raise SystemExit(f"{project} is measured with --ranks 1")
